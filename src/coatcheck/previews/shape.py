"""The shape of JSON values: keys, types and sizes, as one line for a preview or as an outline for a
page.

`[30 × {id: int, state: "open"|"closed", user: {18 keys}, body?: str|null}]` reads: thirty objects,
not all of them with a body. Values at equal paths are merged, so a thousand rows take no more room
than one. Room is given to upper levels first, in a preview to the largest part of each level. Of an
array that was not seen to its end, types and values are only those of the members that were seen:
`[≥30, those seen: {id: int}]`.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import chain, islice, starmap
from typing import ClassVar, Final, Self, cast

from coatcheck.deferred import lazy_pattern

from .excerpts import count, fit, visible

SAMPLED: Final = 1_000
"""Values at one path that an outline merges."""

SEEN: Final = "those seen:"
"""What precedes the types and values of an array that was not seen to its end."""

_PLAIN_KEY: Final = lazy_pattern(r"[A-Za-z_$@][\w$.\-/]{0,60}", re.ASCII)
_DULL_KEY: Final = lazy_pattern(r"(?:.{0,60}_)?(?:url|href|node_id|etag)\Z")
TELLING: Final = frozenset({"type", "kind", "role", "level", "status", "state", "event", "error"})
_FEW: Final = 4
_MANY: Final = 16
_SHORT: Final = 40
_DEEPEST: Final = 6
_OUTLINE_DEEPEST: Final = 30
_WIDE: Final = 25  # keys of one object in an outline before the rest is summed up
_OUTLINE_KEY: Final = 60


class CutDict(dict[str, object]):
    """An object with more keys than we saw, or whose last value is cut."""


class CutList(list[object]):
    """An array with more members than we saw."""


class CutText(str):
    """A string that continues."""

    __slots__ = ()


_CUT: Final = frozenset({CutDict, CutList})
_CONTAINERS: Final = _CUT | {dict, list}
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


class ShapeNode(_Node):
    """One path in the line of a preview, with the number of its keys. `hidden` nodes show their key
    alone unless they have a `detail`."""

    total: int = 0
    hidden: bool = False
    is_telling: bool = False
    detail: str = ""

    def __init__(self, values: Sequence[object], depth: int = 0, label: str = "") -> None:
        super().__init__(values, depth, label)
        # Number of members of the objects and of the arrays at this path.
        self.sizes = {
            name: extent(self.by_type[name]) for name in ("object", "array") if name in self.by_type
        }
        self.is_scalar = not self.sizes

    def text(self) -> str:
        return self.detail or "|".join(starmap(self._text_of, self.by_type.items())) or "nothing"

    def _text_of(self, name: str, values: Sequence[object]) -> str:
        size = self.sizes.get(name, "")
        if name == "array":
            # Children with keys are those of objects at the same path.
            inner = self.children[0].text() if self.children and not self.children[0].label else ""
            if size == "0":
                return "[]"
            return f"[{_members(size, inner)}]" if inner else f"[{size}]"
        if (
            name == "str"
            and len(values) == 1
            and isinstance(value := values[0], str)
            and len(value) > _SHORT
        ):
            return f"str({'≥' if isinstance(value, CutText) else ''}{len(value)} chars)"
        if name != "object":
            return name
        if not self.children:
            return "{}" if size == "0" else "{1 key}" if size == "1" else f"{{{size} keys}}"
        parts = [
            one.label if one.hidden and not one.detail else f"{one.label}: {one.text()}"
            for one in self.children
        ]
        cut = size.startswith("≥")
        if self.total > len(parts):
            parts.append(f"+{self.total - len(parts)} {'or more' if cut else 'more'}")
        elif cut and len(values) == 1:
            parts.append("…")
        return "{" + ", ".join(parts) + "}"


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


def _members(size: str, inner: str) -> str:
    """The number of members of arrays and what they are, as far as they were seen."""
    return f"{size}, {SEEN} {inner}" if size.startswith("≥") else f"{size} × {inner}"


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
        for key, values in zip(keys, zip(*map(dict.values, rows), strict=True), strict=True):
            found.setdefault(key, []).extend(values)
    return found


def elements_of(arrays: Sequence[object]) -> list[object]:
    """The members of arrays, without a member that is cut unless it is the only one. Only a
    `CutList` has one."""
    found: list[object] = []
    for each in cast("Sequence[list[object]]", arrays):
        is_cut = (
            type(each) is CutList
            and len(each) > 1
            and isinstance(each[-1], (CutDict, CutList, CutText))
        )
        found += each[:-1] if is_cut else each
    return found


def describe(values: Sequence[object], room: int) -> tuple[str, ShapeNode]:
    """The shape of values at one path on one line, in at most `room` characters if at all
    possible."""
    root = ShapeNode(values)
    spare = room - len(root.text())
    nodes = [root]
    queue: list[tuple[int, int, int, ShapeNode]] = [(0, 0, 0, root)]
    while queue and spare > 0:
        node = heapq.heappop(queue)[3]
        closed = len(node.text())
        length = _open(node, spare + closed)
        spare -= length - closed
        for child in node.children:
            nodes.append(child)
            if not child.is_scalar and child.depth < _DEEPEST:
                heapq.heappush(queue, (child.depth, -_weight(child.values), len(nodes), child))
    _fill(nodes, spare)
    return root.text(), root


def _open(node: ShapeNode, room: int) -> int:
    """List as many members of a node as fit, and return the length of its text."""
    objects = node.by_type.get("object", ())
    if not objects:
        elements = elements_of(node.by_type.get("array", ()))
        node.children = [ShapeNode(elements, node.depth)] if elements else []
        if elements and (length := len(node.text())) <= room:
            return length
        node.children = []
        return len(node.text())
    found = keys_of(objects)
    complete = len(objects) - list(map(type, objects)).count(CutDict) or len(objects)
    node.total = len(found)
    if len(found) * 3 <= room:
        node.children = [_member(node, key, found[key], complete) for key in found]
        if (length := len(node.text())) <= room:
            return length
    weights = {key: _weight(values) for key, values in found.items()}
    heaviest = max(weights, key=lambda key: weights[key])
    ranks = {key: 3 if _DULL_KEY.match(key) else 2 for key in found}
    ranks |= {heaviest: 1} if weights[heaviest] else {}
    ranks |= {key: 0 for key in found if key in TELLING}
    ranked = sorted(found, key=lambda key: ranks[key])
    members = [_member(node, key, found[key], complete) for key in ranked[: room // 3 + 1]]
    for child in members:
        child.hidden = child.is_scalar
        child.detail = _few(child) if child.is_scalar and child.is_telling else ""
    low, high = 0, len(members)
    while low < high:
        middle = (low + high + 1) // 2
        node.children = members[:middle]
        low, high = (middle, high) if len(node.text()) <= room else (low, middle - 1)
    node.children = members[: low if low > 1 or not node.depth else 0]
    return len(node.text())


def _member(node: ShapeNode, key: str, values: Sequence[object], complete: int) -> ShapeNode:
    label = key if _PLAIN_KEY.fullmatch(key) else _quoted(key, 60)
    child = ShapeNode(values, node.depth + 1, label + ("?" if len(values) < complete else ""))
    child.is_telling = key in TELLING
    return child


def _weight(values: Sequence[object]) -> int:
    kinds = set(map(type, values))
    if not kinds <= _CONTAINERS:
        values = (
            [each for each in values if type(each) in _CONTAINERS] if kinds & _CONTAINERS else ()
        )
    return sum(map(len, cast("Sequence[Sized]", values)))


def _quoted(text: str, room: int) -> str:
    """A string in quotes, with an ellipsis at its end if it is cut."""
    used = fit(text, room)
    plain = visible(text[:used].replace("\n", "⏎").replace("\t", " ").replace("\r", "")).replace(
        '"', "'"
    )
    return f'"{plain}"' if used == len(text) else f'"{plain}…"'


def _fill(nodes: Sequence[ShapeNode], spare: int) -> None:
    """Use the remaining room for values: where there are few distinct ones, then the beginnings of
    long strings."""
    for node in sorted(nodes, key=lambda node: not node.is_telling):
        is_list = len(node.values) == 1 and isinstance(node.values[0], list)
        is_open = bool(node.children) and not (is_list and node.children[0].is_scalar)
        if not is_open and not node.detail and (detail := _few(node)):
            cost = len(detail) - _room_taken(node)
            if cost <= spare:
                node.detail = detail
                spare -= cost
    for node in nodes:
        if spare < _SHORT // 2:
            return
        if not node.detail and len(node.values) == 1 and isinstance(value := node.values[0], str):
            size = node.text().removeprefix("str")
            detail = _quoted(value, spare - len(size) - 5) + size
            spare -= len(detail) - _room_taken(node)
            node.detail = detail


def _room_taken(node: ShapeNode) -> int:
    """Room that a node takes now; negative if showing it needs a colon first."""
    return -2 if node.hidden else len(node.text())


def _few(node: ShapeNode) -> str:
    """The values themselves if they are few and short, or the first ones of a list."""
    kinds = node.by_type
    if set(kinds) == {"array"} and len(node.values) == 1:
        elements = elements_of(node.values)
        first = [_scalar(each) for each in elements[:3] if not isinstance(each, (dict, list))]
        if first and len(first) == len(elements[:3]):
            types = "|".join(dict.fromkeys(_TYPES.get(type(each), "null") for each in elements))
            inner = f"{types}: {', '.join(first)}{', …' if len(elements) > 3 else ''}"
            return f"[{_members(node.sizes['array'], inner)}]"
        return ""
    if not node.is_scalar:
        return ""
    distinct: dict[str, None] = {}
    values: Iterable[object] = node.values
    if len(set(map(type, node.values))) == 1:  # else 1, 1.0 and true would count as equal
        values = known = dict.fromkeys(node.values)
        if len(known) > _MANY and not node.is_telling:  # even if some of them look the same
            return ""
    for value in values:
        if isinstance(value, str) and len(value) > _SHORT:
            return ""
        distinct[_scalar(value)] = None
        if len(distinct) > _FEW:
            return "|".join([*list(distinct)[: _FEW - 1], "…"]) if node.is_telling else ""
    return (
        "|".join(distinct)
        if node.is_telling or len(node.values) == 1 or len(distinct) < len(node.values)
        else ""
    )


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value, _SHORT)
    return (str(value) if type(value) is int else json.dumps(value))[:_SHORT]


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
