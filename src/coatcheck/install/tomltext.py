"""TOML edited as text. `tomllib` says what a document means; this finds where in the text it stands."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.errors import InvalidArgument
from coatcheck.install import jsonc
from coatcheck.install.jsonc import Splice, spliced

_TRIVIA: Final = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_REST_OF_LINE: Final = re.compile(r"[ \t]*(?:#[^\r\n]*)?(?:\r\n|\n|\Z)")
STRING: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*+"'
    r"|'[^'\n]*+'",
    re.DOTALL,
)
_KEY: Final = re.compile(r'[ \t]*(?P<part>[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\')[ \t]*(?P<dot>\.?)')
_BARE: Final = re.compile(r"[^\s,\[\]{}#\"']+(?: [0-9:.+Zz-]+)?")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A table's header (`value` is None), or an assignment: what it is about, and where it and its value stand."""

    path: Path
    start: int
    end: int
    value: tuple[int, int] | None = None


def parse(text: str) -> dict[str, Any]:
    """Raises `InvalidArgument`."""
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"it is no TOML: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("it is no TOML: it is too deep") from error


def appending(text: str, path: Path, table: dict[str, Any]) -> str:
    """The text with one more table at its end."""
    eol = "\r\n" if "\r\n" in text else "\n"
    gap = "" if not text else eol if text.endswith("\n") else eol * 2
    lines = [f"[{'.'.join(map(_key, path))}]", *(f"{_key(key)} = {_dumps(value)}" for key, value in table.items())]
    return text + gap + eol.join(lines) + eol


def line(name: str, value: Any) -> str:
    """A key and its value."""
    return f"{_key(name)} = {_dumps(value)}"


def removing(text: str, path: Path) -> str:
    """The text without a table and those below it, each with the blank line before it."""
    splices: list[Splice] = []
    spans: list[list[int]] = []
    inside = False
    for one in statements(text):
        if one.value is None:
            inside = one.path[: len(path)] == path
            if inside:
                spans.append([one.start, one.end])
        elif inside:
            spans[-1][1] = one.end
        elif one.path[: len(path)] == path:  # dotted keys in a table above
            spans.append([one.start, one.end])
    for start, end in spans:
        blank = re.search(r"(?:(?<=\n)|\A)\r?\n\Z", text[:start])
        splices.append((blank.start() if blank else start, end, ""))
    return spliced(text, splices)


def setting(text: str, path: Path, value: Any, *, after: Path | None = None) -> str:
    """The text with another value at a path; where it has none, on a line of its own behind the path `after`."""
    found = _assignment(text, path)
    if found is not None and found.value is not None:
        return spliced(text, [(*found.value, _like(text, found.value, value))])
    near = _assignment(text, after) if after else None
    if near is None:
        raise InvalidArgument(f"{'.'.join(path)} is not on a line of its own")
    eol = "\r\n" if "\r\n" in text else "\n"
    line = text.rfind("\n", 0, near.start) + 1
    key = text[near.start : near.value[0] if near.value else near.end].rpartition("=")[0].rstrip()
    prefix = key[: len(key) - len(key.rpartition(".")[2])]
    gap = "" if text[line : near.end].endswith("\n") else eol
    new = f"{gap}{text[line : near.start]}{prefix}{_key(path[-1])} = {_dumps(value)}{eol}"
    return spliced(text, [(near.end, near.end, new)])


def prepending(text: str, path: Path, items: list[str], *, is_empty: bool) -> str:
    """The text with more items at the beginning of an array."""
    found = _assignment(text, path)
    if found is None or found.value is None:
        raise InvalidArgument(f"{'.'.join(path)} is not on a line of its own")
    return jsonc.prepending(text, found.value[0], [_dumps(item) for item in items], is_empty=is_empty)


def unsetting(text: str, path: Path) -> str:
    """The text without the line of an assignment."""
    found = _assignment(text, path)
    if found is None:
        return text
    return spliced(text, [(text.rfind("\n", 0, found.start) + 1, found.end, "")])


def statements(text: str) -> Iterator[Statement]:
    """The headers and assignments of a document that `parse` has taken. Arrays of tables have a path of their own."""
    table: Path = ()
    at = _skip(text, 0)
    while at < len(text):
        if text[at] == "[":
            several = text.startswith("[[", at)
            path, end = _path(text, at + 1 + several)
            table = ("[[", *path) if several else path
            end = _line_end(text, end + 1 + several)
            yield Statement(table, at, end)
        else:
            path, equals = _path(text, at)
            start = re.compile(r"=[ \t]*").match(text, equals)
            if start is None:
                raise InvalidArgument("it is no TOML that can be edited")
            stop = _value_end(text, start.end())
            end = _line_end(text, stop)
            yield Statement((*table, *path), at, end, (start.end(), stop))
        at = _skip(text, end)


def strings(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the strings of a value stand; the keys of inline tables left out."""
    for match in STRING.finditer(text, start, end):
        if not re.compile(r"[ \t]*[=.]").match(text, match.end(), end):
            yield match.span()


def _assignment(text: str, path: Path) -> Statement | None:
    return next((one for one in statements(text) if one.path == path and one.value is not None), None)


def _path(text: str, at: int) -> tuple[Path, int]:
    parts: list[str] = []
    while (match := _KEY.match(text, at)) is not None:
        part = match["part"]
        parts.append(part if _BARE_KEY.fullmatch(part) else str(tomllib.loads(f"x = {part}")["x"]))
        at = match.end()
        if not match["dot"]:
            return tuple(parts), at
    raise InvalidArgument("it is no TOML that can be edited")


def _value_end(text: str, at: int) -> int:
    """The end of a value. Brackets are counted, not nested: `tomllib` has seen to that they fit."""
    depth = 0
    while True:
        if depth:
            at = _skip(text, at)
        if (match := STRING.match(text, at)) is not None:
            at = match.end()
        elif text[at : at + 1] in tuple("[{"):
            depth, at = depth + 1, at + 1
        elif text[at : at + 1] in tuple("]}"):
            depth, at = depth - 1, at + 1
        elif depth and text[at : at + 1] in tuple(",=."):
            at += 1
        elif (match := _BARE.match(text, at)) is not None:
            at = match.end()
        else:
            raise InvalidArgument("it is no TOML that can be edited")
        if not depth:
            return at


def _line_end(text: str, at: int) -> int:
    match = _REST_OF_LINE.match(text, at)
    if match is None:
        raise InvalidArgument("it is no TOML that can be edited")
    return match.end()


def _skip(text: str, at: int) -> int:
    match = _TRIVIA.match(text, at)
    assert match is not None
    return match.end()


def _like(text: str, span: tuple[int, int], value: Any) -> str:
    """A value as TOML; an array over several lines where the one before was."""
    old = text[span[0] : span[1]]
    if not isinstance(value, list) or not old.startswith("[") or "\n" not in old:
        return _dumps(value)
    eol = "\r\n" if "\r\n" in old else "\n"
    indent = re.search(r"\n([ \t]+)\S", old)
    inner = indent[1] if indent else "    "
    last = old[old.rfind("\n") + 1 : -1]
    outer = last if not last.strip() else ""
    return "[" + "".join(f"{eol}{inner}{_dumps(item)}," for item in value) + f"{eol}{outer}]"


def _key(part: str) -> str:
    return part if _BARE_KEY.fullmatch(part) else _dumps(part)


def _dumps(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_dumps, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # of strings, the same in both
