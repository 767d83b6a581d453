"""JSON and JSON lines: the shape of what parses, head and tail of what does not.

JSON that was cut is parsed as far as it goes. The containers and the string around the cut become `Cut…` types.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Final

from .excerpts import Excerpt, Preview, ends, some
from .shape import CutDict, CutList, CutText, ShapeNode, describe

DEEPEST: Final = 200
"""Deeper nesting is not parsed, so that a preview never depends on how deep the caller's stack is."""

_MOST: Final = 2_000
_ESCAPES: Final = 13  # one more than the length of two escapes
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING: Final = str.maketrans("[{", "]}")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits))


class TooDeep(ValueError):
    """Nested deeper than `DEEPEST`."""


def json_document(text: Excerpt, limit: int) -> Preview:
    try:
        document = parse(text.head) if text.is_whole else parse_cut(text.head)
    except (TooDeep, RecursionError):
        return ends(text, limit, ", JSON nested too deep to outline")
    except ValueError:
        return _several_values(text, limit)
    if isinstance(document, str):
        inner = replace(text, head=document, lines=None, is_exact=True)
        return ends(inner, limit, " of a JSON string") if text.is_whole else ends(text, limit)
    shape, root = describe([document], limit)
    return Preview(shape, _shown(document, root) + text.scope)


def json_lines(text: Excerpt, limit: int) -> Preview:
    lines = text.head.split("\n")
    partial = "" if text.is_whole else lines.pop()
    lines = [line for line in lines if line and not line.isspace()]
    records: list[object] = []
    broken = 0
    for line in lines[:_MOST]:
        try:
            records.append(parse(line))
        except (ValueError, RecursionError):
            broken += 1
    if not records:
        try:
            records = [parse_cut(partial)] if not broken else []
        except (ValueError, RecursionError):
            pass
    if not records:
        return ends(text, limit, ", not JSON lines")
    total = str(len(lines) - broken)
    if not text.is_whole:
        total = f"at least {total}" if text.lines is None else str(text.lines)
    lead = f"{total} records × " if total != "1" else ""
    shape, root = describe(records, limit - len(lead))
    of = f"all {total}" if str(len(records)) == total else f"the first {len(records)} of {total}"
    shown = "the only record" if total == "1" else f"{of} records"
    note = f"; {some(broken, 'line')} not JSON" if broken else ""
    return Preview(lead + shape, f"shape of {shown}{_keys(root)}{note}")


def _several_values(text: Excerpt, limit: int) -> Preview:
    """Preview of several JSON values one after another, as programs print them. `parse` has checked their depth."""
    found: list[object] = []
    at = _SPACE.match(text.head).end()  # type: ignore[union-attr]
    try:
        while text.is_whole and at < len(text.head) and len(found) < _MOST:
            value, at = _DECODER.raw_decode(text.head, at)
            found.append(value)
            at = _SPACE.match(text.head, at).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        found = []
    if len(found) > 1:
        is_all = len(found) < _MOST
        lead = f"{'' if is_all else 'at least '}{len(found)} JSON values × "
        shape, root = describe(found, limit - len(lead))
        if len(lead + shape) <= limit:
            return Preview(
                lead + shape, f"shape of {'all' if is_all else 'the first'} {len(found)} values{_keys(root)}"
            )
    return ends(text, limit, ", not valid JSON" if text.is_whole else "")


def _shown(document: object, root: ShapeNode) -> str:
    if isinstance(document, dict) and root.children:
        least = "at least " if isinstance(document, CutDict) else ""
        count = len(root.children)
        if count == len(document):
            return f"shape: {'the first' if least else 'all'} {some(count, 'key')}"
        return f"shape: {count} of {least}{len(document)} keys"
    if isinstance(document, list) and document:
        least = "the first " if isinstance(document, CutList) else "all "
        return f"shape of {least}{some(len(document), 'item')}{_keys(root)}"
    return "its type"


def _keys(root: ShapeNode) -> str:
    """Number of keys of a row that are listed, if some are missing."""
    node = root
    while node.children and not node.children[0].label:
        node = node.children[0]
    return f", {len(node.children)} of {node.total} keys" if node.total > len(node.children) else ""


def parse(text: str) -> object:
    """Parse a JSON text. Raises ValueError if it is invalid."""
    from pydantic_core import from_json  # twice as fast as `json`, and bounded in depth; imported on demand

    try:
        value: object = from_json(text)
    except ValueError:  # invalid, or a number of thousands of digits, or half a surrogate pair
        _unclosed("".join(_outside(text)[::2]))
        value = _DECODER.decode(text)
    return value


def _outside(text: str) -> list[str]:
    """Split a JSON text into what is outside and inside its strings, in turns. An even number of parts means that the
    last string is cut. The parts keep their lengths."""
    if "\\" in text:
        text = text.replace("\\\\", "__").replace('\\"', "__")
    return text.split('"')


def _unclosed(outside: str) -> str:
    """The brackets still open at the end. Raises ValueError for one closed but not open, or for too many."""
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
    """Parse the beginning of a JSON text: its complete values, and the containers around the cut as `Cut…` types."""
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
