"""The shape of a JSON document on one page: keys, types, lengths of arrays and sample values, `query="shape"`.

Values that stand at the same place (the items of an array, the records of JSONL) are merged, and a key tells how many
of them have it. Room is given out breadth first, so that the top is whole before anything deeper is shown, and each
place says what was left out below it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.media import TEXT
from coatcheck.reading.answer import Answer, count
from coatcheck.reading.documents import is_jsonl, lines, load, parse
from coatcheck.streams import Content

PAGE: Final = 8_000
SAMPLED: Final = 1_000  # values that are merged at one place
_RECORD_BYTES: Final = 16 << 20
_WIDE: Final = 25  # keys of one object before the rest is summed up
_SAMPLE: Final = 40
_KEY: Final = 60
_DEEPEST: Final = 30
_NAMES: Final = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


def shape(content: Content, *, max_chars: int = PAGE) -> Answer:
    """An outline of a JSON or JSONL content in at most `max_chars` characters."""
    if is_jsonl(content.ref.media_type):
        records, total, skipped = _records(content)
        if total and not records:
            raise InvalidArgument("no line of the artifact is readable as JSON", hint="read it by lines")
        merged = "" if len(records) + skipped >= total else f", shape of the first {len(records):,}"
        place = _Place("", f"{count(total, 'record')}, one JSON value per line{merged}", records)
        note = f"{count(skipped, 'line')} skipped as no readable JSON" if skipped else ""
    else:
        place = _Place("", "", [load(content)])
        note = ""
    told, left = _outline(place, max_chars)
    if left:
        note = "; ".join(filter(None, [f"{count(left, 'place')} left out; a JSONPath like $.key[0] goes deeper", note]))
    return Answer(told, TEXT, "outline, whole" if not left else "outline, the top levels", complete=not left, note=note)


@dataclass(slots=True)
class _Place:
    """Where values stand in the document, with the values that were found there."""

    label: str
    lead: str
    values: list[Any]
    depth: int = 0
    sampled: str = ""  # set where more values stand here than were merged
    children: list[_Place] = field(default_factory=list)
    hidden: int = 0

    def line(self) -> str:
        said = " | ".join(filter(None, [self.lead, *_types(self.values)]))
        more = f", {count(self.hidden, 'more place')} below" if self.hidden and not self.children else ""
        return f"{'  ' * self.depth}{self.label}{': ' if self.label else ''}{said}{self.sampled}{more}"

    def tail(self) -> str:
        return f"{'  ' * (self.depth + 1)}… {count(self.hidden, 'more key')}"

    def below(self) -> list[_Place]:
        """The places one level down, keys in the order in which they first appear."""
        groups: dict[str, list[Any]] = {}
        objects = [value for value in self.values if isinstance(value, dict)]
        for value in objects:
            for key, item in value.items():
                groups.setdefault(key, []).append(item)
        places = []
        for key, group in groups.items():
            often = "" if len(objects) == 1 or len(group) == len(objects) else f" ({len(group):,} of {len(objects):,})"
            places.append(_Place(_key(key) + often, "", group, self.depth + 1))
        items, total = _items(self.values)
        if items and any(isinstance(item, dict | list) for item in items):
            sampled = f" (the first {len(items):,} of {total:,})" if total > len(items) else ""
            places.append(_Place("[]", "", items, self.depth + 1, sampled))
        return places


def _outline(top: _Place, max_chars: int) -> tuple[str, int]:
    """The lines of the places for which there is room, and the number of places that were seen but not shown."""
    left = 0
    room = max_chars - len(top.line()) - 60
    queue = deque([top])
    while queue:
        place = queue.popleft()
        below = place.below()
        reserve = len(place.tail()) + 12
        for index, child in enumerate(below):
            cost = len(child.line()) + 30
            wide = index >= _WIDE and len(below) > _WIDE + 3
            if wide or child.depth > _DEEPEST or cost + reserve > room:
                place.hidden = len(below) - index
                left += place.hidden
                room -= reserve
                break
            place.children.append(child)
            queue.append(child)
            room -= cost
    text = "\n".join(_rendered(top))
    return text[:max_chars], left


def _rendered(top: _Place) -> Iterator[str]:
    stack: list[_Place | str] = [top]
    while stack:
        at = stack.pop()
        if isinstance(at, str):
            yield at
            continue
        yield at.line()
        if at.hidden and at.children:
            stack.append(at.tail())
        stack.extend(reversed(at.children))


def _types(values: list[Any]) -> Iterator[str]:
    """What kinds of value stand at one place: `string "a", "b"`, `object of 3 keys`, `array of 0-12 strings`."""
    scalars: dict[str, list[Any]] = {}
    objects: list[int] = []
    arrays: list[list[Any]] = []
    for value in values:
        if isinstance(value, dict):
            objects.append(len(value))
        elif isinstance(value, list):
            arrays.append(value)
        else:
            scalars.setdefault(_NAMES[type(value)], []).append(value)
    if objects:
        yield f"object of {_span(objects)} key{'' if max(objects) == 1 else 's'}"
    if arrays:
        items, _ = _items(arrays)
        kinds = sorted({_kind(item) for item in items})
        samples = f" {_sample(items)}" if kinds and "object" not in kinds and "array" not in kinds else ""
        lengths = [len(array) for array in arrays]
        yield f"array of {_span(lengths)} {'/'.join(kinds) or 'item'}{'' if max(lengths) == 1 else 's'}{samples}"
    for name, group in scalars.items():
        yield name if name == "null" else f"{name} {_sample(group)}"


def _sample(values: list[Any]) -> str:
    """Up to three different values, in the order in which they come."""
    told: dict[str, None] = {}
    for value in values:
        if len(told) == 3:
            return ", ".join(told) + ", …"
        text = value if isinstance(value, str) else None
        if text is not None and len(text) > _SAMPLE:
            told[f'{json.dumps(text[:_SAMPLE], ensure_ascii=False)[:-1]}…" ({len(text):,} characters)'] = None
        else:
            told[json.dumps(value, ensure_ascii=False)[: 2 * _SAMPLE]] = None
    return ", ".join(told)


def _kind(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else _NAMES[type(value)]


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _key(key: str) -> str:
    plain = key.isidentifier() and len(key) <= _KEY
    short = key if len(key) <= _KEY else key[:_KEY] + "…"
    return key if plain else json.dumps(short, ensure_ascii=False)


def _items(values: list[Any]) -> tuple[list[Any], int]:
    """The first items of all arrays among the values, and how many there are in all."""
    items: list[Any] = []
    total = 0
    for value in values:
        if isinstance(value, list):
            total += len(value)
            items.extend(value[: SAMPLED - len(items)])
    return items, total


def _records(content: Content) -> tuple[list[Any], int, int]:
    """The first records, as many as are merged; the number of all lines, and of those that are no JSON."""
    records: list[Any] = []
    total = skipped = size = 0
    for number, line in lines(content):
        total += 1
        if len(records) >= SAMPLED or size > _RECORD_BYTES:
            continue
        try:
            if line is None:
                raise LimitExceeded("too long")
            size += len(line)
            records.append(parse(line, f"line {number}"))
        except (InvalidArgument, LimitExceeded):
            skipped += 1
    return records, total, skipped
