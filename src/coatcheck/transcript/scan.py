"""Where in a JSON text the values stand: exact spans by path, at the speed of the decoder in C.

Texts come here only after they were parsed, so they are known to be JSON. Where a key stands twice in an object the
last one counts, as it does for the parser.
"""

from __future__ import annotations

import json
import json.decoder
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from coatcheck.transcript.formats.values import Path

Span = tuple[int, int]
_C: Final[Any] = json.decoder  # its two functions in C are not in everybody's stubs
_SCAN: Final = _C.JSONDecoder().scan_once
_STRING: Final = _C.scanstring
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_LEAD: Final = re.compile(r"\ufeff?[ \t\n\r]*")
_CONTAINERS: Final = (dict, list)


def parse(text: str) -> tuple[Any, int, int] | None:
    """The value of a text, and where it begins and ends; None where it is no JSON that we can hold. A byte-order mark
    and blanks may stand around it."""
    start = 0 if text.startswith("{") else _end(_LEAD, text, 0)
    try:
        value, end = _SCAN(text, start)
    except (ValueError, StopIteration, RecursionError):
        return None
    return (value, start, end) if _end(_BLANK, text, end) == len(text) else None


class Opened(NamedTuple):
    """A text that is an object or a list: its characters, its value, and where that begins and ends in them.
    `elements` are the spans of what a list holds, where that is objects alone."""

    text: bytes
    source: str
    value: dict[str, Any] | list[Any]
    start: int
    end: int
    elements: list[Span] | None = None

    @classmethod
    def of(cls, text: bytes) -> Opened | None:
        """The text opened; None where it is no JSON that we can hold, or neither an object nor a list."""
        try:
            source = text.decode()
        except UnicodeDecodeError:
            return None
        if not source.startswith("{"):
            start = _end(_LEAD, source, 0)
            listed = _objects(source, start) if source.startswith("[", start) else None
            if listed is not None:
                return cls(text, source, *listed)
        found = parse(source)
        return cls(text, source, *found) if found is not None and isinstance(found[0], _CONTAINERS) else None


def _objects(text: str, start: int) -> tuple[list[Any], int, int, list[Span]] | None:
    """A list of objects, parsed one by one: that takes no longer, and shows where each of them stands. None where it
    holds anything else."""
    values: list[Any] = []
    elements: list[Span] = []
    at = _end(_BLANK, text, start + 1)
    try:
        while text.startswith("{", at):
            value, end = _SCAN(text, at)
            values.append(value)
            elements.append((at, end))
            behind = _end(_BLANK, text, end)
            at = _end(_BLANK, text, behind + 1)
            if not text.startswith(",", behind):
                is_all = text.startswith("]", behind) and at == len(text)
                return (values, start, behind + 1, elements) if is_all else None
    except (ValueError, StopIteration, RecursionError):
        pass
    return None


def spans(text: str, start: int, paths: Iterable[Path]) -> dict[Path, Span]:
    """Where the values at these paths stand in the value that begins at `start`. Paths that lead nowhere are left
    out."""
    tree: dict[str | int, Any] = {}
    found: dict[Path, Span] = {}
    for path in paths:
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[_HERE] = path
    _walk(text, start, tree, found)
    return found


def last_value(text: str, start: int, key: str) -> tuple[Any, Span] | None:
    """The last value that the object at `start` has under a key, and the span to take away so that the object is as if
    it never had that member: from the end of the member before, or to the beginning of the one after."""
    found: tuple[Any, Span] | None = None
    begin = before = _end(_BLANK, text, start + 1)
    is_first = True
    while text[begin] != "}":
        name, at = _STRING(text, begin + 1, True)
        at = _end(_BLANK, text, _end(_BLANK, text, at) + 1)
        value, end = _SCAN(text, at)
        after = _after(text, end)
        if name == key:
            found = value, (begin, after) if is_first else (before, end)
        before, begin, is_first = end, after, False
    return found


def last_member(text: str, end: int) -> int:
    """Where the last member of an object ends, from where the object ends: behind it stand only blanks and a brace."""
    at = end - 1
    while text[at - 1] in " \t\n\r":
        at -= 1
    return at


_HERE: Final = -1  # no path of ours has a negative index


def _walk(text: str, at: int, tree: dict[str | int, Any], found: dict[Path, Span]) -> int:
    """Note the spans of what the tree names in the value at a place; where that value ends."""
    start, kind = at, text[at]
    if kind in "{[" and any(step != _HERE for step in tree):
        at = _end(_BLANK, text, at + 1)
        index = 0
        while text[at] not in "}]":
            step: str | int = index
            if kind == "{":
                step, at = _STRING(text, at + 1, True)
                at = _end(_BLANK, text, _end(_BLANK, text, at) + 1)
            branch = tree.get(step)
            if branch is None or (kind == "{") != isinstance(step, str):
                at = _SCAN(text, at)[1]
            else:
                _drop(branch, found)
                at = _walk(text, at, branch, found)
            index += 1
            at = _after(text, at)
        at += 1
    else:
        at = _SCAN(text, at)[1]
    if _HERE in tree:
        found[tree[_HERE]] = (start, at)
    return at


def _drop(tree: dict[str | int, Any], found: dict[Path, Span]) -> None:
    """What was found below a key that stands once more does not count."""
    for step, one in tree.items():
        if step == _HERE:
            found.pop(one, None)
        elif found:
            _drop(one, found)


def _after(text: str, at: int) -> int:
    """Past the comma behind a value, if there is one, to what comes next."""
    at = _end(_BLANK, text, at)
    return _end(_BLANK, text, at + 1) if text[at] == "," else at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
