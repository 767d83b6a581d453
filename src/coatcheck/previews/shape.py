"""The shape of JSON values as an outline for a page: keys, types, sizes and sample values.

Values at equal paths are merged, so a thousand rows take no more room than one. Room is given to
upper levels first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from typing import ClassVar, Final, Self, cast

from .excerpts import count
from .json_parts import CutDict, CutList, CutText

SAMPLED: Final = 1_000
"""Values at one path that an outline merges."""

_SHORT: Final = 40
_OUTLINE_DEEPEST: Final = 30
_WIDE: Final = 25  # keys of one object in an outline before the rest is summed up
_OUTLINE_KEY: Final = 60
_CUT: Final = frozenset({CutDict, CutList})
_TYPES: Final[Mapping[type, str]] = {
    str: "str", CutText: "str", bool: "bool", int: "int", float: "number", dict: "object",
    CutDict: "object", list: "array", CutList: "array",
}  # fmt: skip


class _Node:
    """All values at one path of a document: the `user` of every row, for example."""

    type_names: ClassVar[Mapping[type, str]] = _TYPES

    def __init__(self, values: Sequence[object], depth: int = 0, label: str = "") -> None:
        self.values, self.depth, self.label = values, depth, label
        self.children: list[Self] = []
        self.by_type = self._by_type()

    def _by_type(self) -> Mapping[str, Sequence[object]]:
        """The values grouped by the names of their types, in the order of first appearance."""
        name_of = self.type_names.get
        names = {name_of(kind, "null") for kind in set(map(type, self.values))}
        if len(names) == 1:
            return {names.pop(): self.values}
        found: dict[str, list[object]] = {}
        for value in self.values:
            found.setdefault(name_of(type(value), "null"), []).append(value)
        return found


def extent(containers: Sequence[object], digits: str = "") -> str:
    """Number of members of containers: `3`, `0-12`, or `≥31` if one of them is cut. `digits`
    formats the numbers."""
    sizes = set(map(len, cast("Sequence[Sized]", containers)))
    cut = not _CUT.isdisjoint(map(type, containers))
    low, high = min(sizes), max(sizes)
    return (
        f"{'≥' if cut else ''}{high:{digits}}"
        if low == high or cut
        else f"{low:{digits}}-{high:{digits}}"
    )


def keys_of(objects: Iterable[object]) -> dict[str, list[object]]:
    """Every key in order of appearance, with its values: those of objects with equal keys
    together."""
    alike: dict[tuple[str, ...], list[dict[str, object]]] = {}
    last: tuple[str, ...] | None = None
    same: list[dict[str, object]] = []
    for each in objects:
        if isinstance(each, dict):
            keys = tuple(each)
            if keys != last:  # rows with equal keys mostly follow one another
                last, same = keys, alike.setdefault(keys, [])
            same.append(each)
    found: dict[str, list[object]] = {}
    for keys, rows in alike.items():
        for key in keys:
            found.setdefault(key, []).extend(map(itemgetter(key), rows))
    return found


def outline(values: Sequence[object], max_chars: int, lead: str = "") -> tuple[str, int]:
    """An indented outline of values at one path, `lead` first, and the number of paths that did not
    fit.

    Room is given out breadth first, and every node states how much is left out below it."""
    top = _OutlineNode(values)
    top.lead, left = lead, 0
    room = max_chars - len(top.line()) - 60
    queue = deque([top])
    while queue:
        node = queue.popleft()
        below = node.below()
        reserve = len(node.tail()) + 12
        for index, child in enumerate(below):
            cost = len(child.line()) + 30
            wide = index >= _WIDE and len(below) > _WIDE + 3
            if wide or child.depth > _OUTLINE_DEEPEST or cost + reserve > room:
                node.hidden = len(below) - index
                left += node.hidden
                room -= reserve
                break
            node.children.append(child)
            queue.append(child)
            room -= cost
    return "\n".join(top.lines())[:max_chars], left


class _OutlineNode(_Node):
    """One path in an outline. `hidden` counts the nodes below it that did not fit."""

    hidden: int = 0
    lead: str = ""
    sampled: str = ""
    type_names = {  # noqa: RUF012 - declared by the class above
        bool: "boolean", int: "number", float: "number", str: "string", dict: "object",
        list: "array"
    }  # fmt: skip

    @cached_property
    def items(self) -> list[object]:
        """The first items of the arrays at this path, as many as are merged."""
        arrays = cast("Iterable[list[object]]", self.by_type.get("array", ()))
        return list(islice(chain.from_iterable(arrays), SAMPLED))

    def line(self) -> str:
        types = " | ".join(filter(None, [self.lead, *self._types()]))
        more = (
            f", {count(self.hidden, 'more place')} below"
            if self.hidden and not self.children
            else ""
        )
        return (
            f"{'  ' * self.depth}{self.label}{': ' if self.label else ''}{types}"
            f"{self.sampled}{more}"
        )

    def tail(self) -> str:
        return f"{'  ' * (self.depth + 1)}… {count(self.hidden, 'more key')}"

    def lines(self) -> Iterator[str]:
        yield self.line()
        for child in self.children:
            yield from child.lines()
        if self.hidden and self.children:
            yield self.tail()

    def below(self) -> list[_OutlineNode]:
        """The nodes one level down, keys in order of appearance."""
        nodes = []
        objects = self.by_type.get("object", ())
        for key, values in keys_of(objects).items():
            often = "" if len(values) == len(objects) else f" ({len(values):,} of {len(objects):,})"
            nodes.append(_OutlineNode(values, self.depth + 1, _outline_key(key) + often))
        if any(isinstance(item, (dict, list)) for item in self.items):
            nodes.append(_OutlineNode(self.items, self.depth + 1, "[]"))
            total = sum(map(len, cast("Iterable[Sized]", self.by_type["array"])))
            if total > len(self.items):
                nodes[-1].sampled = f" (the first {len(self.items):,} of {total:,})"
        return nodes

    def _types(self) -> Iterator[str]:
        """The types of the values: `string "a", "b"`, `object of 3 keys`, `array of 0-12
        strings`."""
        kinds = dict(self.by_type)
        if "object" in kinds:
            size = extent(kinds.pop("object"), ",")
            yield f"object of {size} key{'' if size in ('1', '0-1') else 's'}"
        if "array" in kinds:
            arrays = kinds.pop("array")
            size = extent(arrays, ",")
            items = chain.from_iterable(cast("Iterable[list[object]]", arrays))
            names = sorted({self.type_names.get(kind, "null") for kind in set(map(type, items))})
            samples = (
                f" {_samples(self.items)}"
                if names and not {"object", "array"}.intersection(names)
                else ""
            )
            yield (
                f"array of {size} "
                f"{'/'.join(names) or 'item'}{'' if size in ('1', '0-1') else 's'}{samples}"
            )
        yield from (
            name if name == "null" else f"{name} {_samples(values)}"
            for name, values in kinds.items()
        )


def _samples(values: Sequence[object]) -> str:
    """Up to three different values."""
    samples: dict[str, None] = {}
    for value in values:
        if len(samples) == 3:
            return ", ".join(samples) + ", …"
        if isinstance(value, str) and len(value) > _SHORT:
            samples[
                f'{json.dumps(value[:_SHORT], ensure_ascii=False)[:-1]}…" ({len(value):,} '
                "characters)"
            ] = None
        else:
            samples[json.dumps(value, ensure_ascii=False)[: 2 * _SHORT]] = None
    return ", ".join(samples)


def _outline_key(key: str) -> str:
    is_short = len(key) <= _OUTLINE_KEY
    if key.isidentifier() and is_short:
        return key
    return json.dumps(key if is_short else key[:_OUTLINE_KEY] + "…", ensure_ascii=False)
