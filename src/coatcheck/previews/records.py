"""JSON and JSON lines: their shape, where they parse; head and tail where they do not."""

from __future__ import annotations

from typing import Final

from .parts import CutDict, CutList, TooDeep, parse, parse_cut, parse_many
from .sample import Preview, Text
from .shape import Place, describe
from .text import ends, some

_MOST: Final = 2_000


def json_document(text: Text, limit: int) -> Preview:
    try:
        document = parse(text.head) if text.is_whole else parse_cut(text.head)
    except (TooDeep, RecursionError):
        return ends(text, limit, ", JSON nested too deep to outline")
    except ValueError:
        return _one_behind_another(text, limit)
    if isinstance(document, str):
        inner = Text(document, "", text.is_whole, text.size, text.seen, None, True, text.encoding)
        return ends(inner, limit, " of a JSON string") if text.is_whole else ends(text, limit)
    shape, root = describe([document], limit)
    return Preview(shape, _shown(document, root) + text.scope) if len(shape) <= limit else ends(text, limit)


def json_lines(text: Text, limit: int) -> Preview:
    lines = text.head.split("\n")
    partial = "" if text.is_whole else lines.pop()
    lines = [line for line in lines if line and not line.isspace()]
    records, broken = _parse_lines(lines[:_MOST])
    if not records:
        try:
            records = [parse_cut(partial)] if not broken else []
        except (ValueError, RecursionError):
            records = []
    if not records:
        return ends(text, limit, ", not JSON lines")
    if text.is_whole:
        total = str(len(lines) - broken)
    else:
        total = str(text.lines) if text.lines is not None else f"at least {len(lines) - broken}"
    lead = f"{total} records × " if total != "1" else ""
    shape, root = describe(records, limit - len(lead))
    if len(lead + shape) > limit:
        return ends(text, limit)
    of = f"all {total}" if str(len(records)) == total else f"the first {len(records)} of {total}"
    note = f"; {some(broken, 'line')} not JSON" if broken else ""
    return Preview(
        lead + shape, f"shape of {'the only record' if total == '1' else of + ' records'}{_keys(root)}{note}"
    )


def _parse_lines(lines: list[str]) -> tuple[list[object], int]:
    records: list[object] = []
    broken = 0
    for line in lines:
        try:
            records.append(parse(line))
        except (ValueError, RecursionError):
            broken += 1
    return records, broken


def _one_behind_another(text: Text, limit: int) -> Preview:
    """Several JSON texts in one, as programs print them."""
    try:
        found = parse_many(text.head, _MOST) if text.is_whole else []
    except (ValueError, RecursionError):
        found = []
    if len(found) > 1:
        total = f"at least {_MOST}" if len(found) == _MOST else str(len(found))
        lead = f"{total} JSON values × "
        shape, root = describe(found, limit - len(lead))
        if len(lead + shape) <= limit:
            of = "the first" if len(found) == _MOST else "all"
            return Preview(lead + shape, f"shape of {of} {len(found)} values{_keys(root)}")
    return ends(text, limit, ", not valid JSON" if text.is_whole else "")


def _shown(document: object, root: Place) -> str:
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


def _keys(root: Place) -> str:
    """How many of the keys of a row are listed, where that is not all of them."""
    place = root
    while place.children and not place.children[0][0]:
        place = place.children[0][1]
    missing = place.total - len(place.children)
    return f", {len(place.children)} of {place.total} keys" if missing > 0 else ""
