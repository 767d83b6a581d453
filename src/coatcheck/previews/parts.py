"""JSON that may go on beyond what we hold: parsed as far as it goes, with the unfinished parts marked as such."""

from __future__ import annotations

import json
import re
from typing import Final

DEEPEST: Final = 200
"""Nesting beyond this is not parsed: what a preview says must not depend on how deep the caller's stack is."""

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{},]', re.DOTALL)
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKET: Final = re.compile(r"[^\[\]{}]+")


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
    _check_depth(text)
    value: object = _DECODER.decode(text)
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


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for bracket in _NO_BRACKET.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise TooDeep(f"nested deeper than {DEEPEST}")


def parse_cut(text: str) -> object:
    """The beginning of a JSON text: what stands complete in it, and the containers around the cut as `Cut…` types."""
    stack: list[str] = []
    safe, depth = 0, 0
    last = None
    for match in _TOKEN.finditer(text):
        token = text[match.start()]
        if token == '"':
            last = match
        elif token in "[{":
            stack.append(token)
            if len(stack) > DEEPEST:
                raise TooDeep(f"nested deeper than {DEEPEST}")
        elif token == ",":
            safe, depth = match.start(), len(stack)
        elif not stack:
            raise ValueError("closes what was not open")
        else:
            stack.pop()
            safe, depth = match.end(), len(stack)
    if last is not None and last.end() == len(text) and not last.group().endswith('"') and _is_value(text, last):
        return _close(text[: last.start()] + _finish(text[last.start() :]), stack, cut_text=True)
    if not safe:
        raise ValueError("nothing in it is complete")
    return _close(text[:safe], stack[:depth], cut_text=False)


def _is_value(text: str, string: re.Match[str]) -> bool:
    before = text[: string.start()].rstrip()[-1:]
    return before == ":" or before in "[,"


def _finish(string: str) -> str:
    """A string that was cut, closed. The cut may have split an escape: those are at most six characters."""
    for drop in range(7):
        candidate = string[: len(string) - drop] + '"'
        try:
            json.loads(candidate)
        except ValueError:
            continue
        return candidate
    raise ValueError("no string")


def _close(text: str, stack: list[str], *, cut_text: bool) -> object:
    closers = "".join("]" if bracket == "[" else "}" for bracket in reversed(stack))
    document: object = _DECODER.decode(text + closers)
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


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 400 else float(digits)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


_DECODER: Final = json.JSONDecoder(parse_int=_number)
