"""Parse JSON texts, whole or cut.

JSON that was cut is parsed as far as it goes. The containers and the string around the cut become
`Cut…` types.
"""

from __future__ import annotations

import json
from typing import Final

from coatcheck.deferred import lazy_pattern

DEEPEST: Final = 200
"""Deeper nesting is not parsed, so that a preview never depends on how deep the caller's stack
is."""

_ESCAPES: Final = 13  # one more than the length of two escapes
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING: Final = str.maketrans("[{", "]}")
_SPACE: Final = lazy_pattern(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder(
    parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits)
)


class TooDeep(ValueError):
    """Nested deeper than `DEEPEST`."""


class CutDict(dict[str, object]):
    """An object with more keys than we saw, or whose last value is cut."""


class CutList(list[object]):
    """An array with more members than we saw."""


class CutText(str):
    """A string that continues."""

    __slots__ = ()


def parse(text: str) -> object:
    """Parse a JSON text. Raises ValueError if it is invalid."""
    from pydantic_core import (
        from_json,
    )  # twice as fast as `json`, and bounded in depth; imported on demand

    try:
        value: object = from_json(text)
    except ValueError:  # invalid, or a number of thousands of digits, or half a surrogate pair
        _unclosed("".join(_outside(text)[::2]))
        value = _DECODER.decode(text)
    return value


def _outside(text: str) -> list[str]:
    """Split a JSON text into the parts outside and inside its strings, in turn. An even number of
    parts means that the last string is cut. The parts keep their lengths."""
    if "\\" in text:
        text = text.replace("\\\\", "__").replace('\\"', "__")
    return text.split('"')


def _unclosed(outside: str) -> str:
    """The brackets still open at the end. Raises ValueError if one is closed that was not open, or
    for too many."""
    left = outside.encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    for _ in range(DEEPEST + 1):
        inner = left.replace(b"[]", b"").replace(b"{}", b"")  # the innermost pairs, all at once
        if len(inner) == len(left):
            break
        left = inner
    else:
        raise TooDeep(f"nested deeper than {DEEPEST}")
    if b"]" in left or b"}" in left:
        raise ValueError("a bracket is closed that was not open")
    if len(left) > DEEPEST:
        raise TooDeep(f"nested deeper than {DEEPEST}")
    return left.decode()


def parse_cut(text: str) -> object:
    """Parse the beginning of a JSON text: its complete values, and the containers around the cut as
    `Cut…` types."""
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
    _unclosed("".join(parts[::2]))
    raise ValueError("nothing in it is complete")


def _finish(string: str) -> str:
    """Close a string that was cut, perhaps inside an escape or a surrogate pair."""
    for drop in range(_ESCAPES):
        candidate = string[: len(string) - drop] + '"'
        try:
            if not "\ud800" <= json.loads(candidate)[-1:] <= "\udbff":
                return candidate
        except ValueError:
            continue
    raise ValueError("no string")


def _close(text: str, stack: str, *, cut_text: bool) -> object:
    """Parse a text with its open containers closed, and mark them as cut."""
    chain = [parse(text + stack[::-1].translate(_CLOSING))]
    for _ in stack:
        inner = chain[-1]
        if isinstance(inner, (list, dict)) and inner:
            chain.append(inner[-1] if isinstance(inner, list) else inner[next(reversed(inner))])
    last = chain.pop()
    marked: object = CutText(last) if cut_text and isinstance(last, str) else last
    for container in reversed(chain):
        if isinstance(container, list):
            marked = CutList([*container[:-1], marked])
        elif isinstance(container, dict):
            marked = CutDict({**container, next(reversed(container)): marked})
    return marked


def parse_several(text: str, most: int) -> list[object]:
    """Parse JSON values that follow one another, at most `most`. `parse` must have checked the
    depth of the text. Raises ValueError if what follows a value is not JSON."""
    found: list[object] = []
    at = _skip(text, 0)
    while at < len(text) and len(found) < most:
        value, at = _DECODER.raw_decode(text, at)
        found.append(value)
        at = _skip(text, at)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
