"""JSON that may go on beyond what we hold: parsed as far as it goes, with the unfinished parts marked as such."""

from __future__ import annotations

import json
from typing import Final

DEEPEST: Final = 200
"""Nesting beyond this is not parsed: what a preview says must not depend on how deep the caller's stack is."""

_ESCAPES: Final = 13  # characters that two escapes may take, and one
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


class CutDict(dict[str, object]):
    """An object that has more keys than we saw, or whose last value is cut."""


class CutList(list[object]):
    """An array that has more members than we saw."""


class CutText(str):
    """A string that goes on."""

    __slots__ = ()


class TooDeep(ValueError):
    """Nested deeper than we look."""


def parse(text: str) -> object:
    """A JSON text. Raises ValueError where it is none."""
    from pydantic_core import from_json  # twice as fast as `json`, and bounded in depth; here, as few need it

    try:
        value: object = from_json(text)
    except ValueError:  # or a number of thousands of digits, half a surrogate pair
        _check_depth(text)
        value = _DECODER.decode(text)
    return value


def parse_many(text: str, most: int) -> list[object]:
    """JSON values one behind another, no more than `most`, of a text whose depth `parse` has checked.

    Raises ValueError where there is anything else.
    """
    found: list[object] = []
    at = _skip_space(text, 0)
    while at < len(text) and len(found) < most:
        value, at = _DECODER.raw_decode(text, at)
        found.append(value)
        at = _skip_space(text, at)
    return found


def _outside(text: str) -> list[str]:
    """What stands around the strings of a JSON text and inside them, in turns. An odd one out is a string that goes on.

    Every part has the length that it has in the text."""
    if "\\" in text:
        text = text.replace("\\\\", "__").replace('\\"', "__")
    return text.split('"')


def _unclosed(outside: str) -> str:
    """The brackets that are open at the end. Raises where one is closed that was not open, or too many are."""
    brackets = outside.encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    for _ in range(DEEPEST + 1):
        left = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(left) == len(brackets):
            break
        brackets = left
    if len(brackets) > DEEPEST:
        raise TooDeep(f"nested deeper than {DEEPEST}")
    if b"]" in brackets or b"}" in brackets:
        raise ValueError("closes what was not open")
    return brackets.decode()


def _check_depth(text: str) -> None:
    brackets = "".join(_outside(text)[::2]).encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    depth = 0
    for bracket in brackets if len(brackets) > DEEPEST else b"":
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise TooDeep(f"nested deeper than {DEEPEST}")


def parse_cut(text: str) -> object:
    """The beginning of a JSON text: what stands complete in it, and the containers around the cut as `Cut…` types."""
    parts = _outside(text)
    if len(parts) % 2 == 0:
        start = len(text) - len(parts[-1]) - 1
        stack = _unclosed("".join(parts[:-1:2]))
        before = text[:start].rstrip()[-1:]
        if before == ":" or (before in ("[", ",") and stack[-1:] == "["):
            return _close(text[:start] + _finish(text[start:]), stack, cut_text=True)
    end = len(text)
    for at in range(len(parts) - 1, -1, -1):
        start = end - len(parts[at])
        if at % 2 == 0 and (found := max(map(parts[at].rfind, ",]}"))) >= 0:
            safe = start + found + (parts[at][found] != ",")
            stack = _unclosed("".join(parts[:at:2]) + parts[at][: found + 1])
            return _close(text[:safe], stack, cut_text=False)
        end = start - 1
    _check_depth(text)
    raise ValueError("nothing in it is complete")


def _finish(string: str) -> str:
    """A string that was cut, closed. The cut may have split an escape, or two that make one character."""
    for drop in range(_ESCAPES):
        candidate = string[: len(string) - drop] + '"'
        try:
            if not "\ud800" <= json.loads(candidate)[-1:] <= "\udbff":
                return candidate
        except ValueError:
            continue
    raise ValueError("no string")


def _close(text: str, stack: str, *, cut_text: bool) -> object:
    document = parse(text + stack[::-1].translate(_CLOSING))
    chain = [document]
    for _ in stack:
        inner = chain[-1]
        if isinstance(inner, list) and inner:
            chain.append(inner[-1])
        elif isinstance(inner, dict) and inner:
            chain.append(inner[next(reversed(inner))])
    innermost = chain[-1]
    marked: object = CutText(innermost) if cut_text and isinstance(innermost, str) else innermost
    for container in reversed(chain[:-1]):
        marked = _mark(container, marked)
    return marked


def _mark(container: object, last: object) -> object:
    if isinstance(container, list):
        return CutList([*container[:-1], last] if container else [])
    if isinstance(container, dict):
        return CutDict({**container, next(reversed(container)): last} if container else {})
    return container


_CLOSING: Final = str.maketrans("[{", "]}")


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 400 else float(digits)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


_DECODER: Final = json.JSONDecoder(parse_int=_number)
