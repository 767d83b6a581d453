"""The shape of JSON values: keys, types and sizes, as one line for a preview or as an outline for a page.

`[30 × {id: int, state: "open"|"closed", user: {18 keys}, body?: str|null}]` reads: thirty objects, not all of them
with a body. Values at equal paths are merged, so a thousand rows take no more room than one. Room is given to upper
levels first, in a preview to the largest part of each level.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from operator import itemgetter
from typing import ClassVar, Final, cast

from .excerpts import count, fit, visible

SAMPLED: Final = 1_000
"""Values at one path that an outline merges."""

_PLAIN_KEY: Final = re.compile(r"[A-Za-z_$@][\w$.\-/]{0,60}", re.ASCII)
_DULL_KEY: Final = re.compile(r"(?:.{0,60}_)?(?:url|href|node_id|etag)\Z")
_TELLING: Final = frozenset({"type", "kind", "role", "level", "status", "state", "event", "error"})
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


_SCALARS: Final = frozenset({str, int, float, bool, type(None), CutText})
_CUT: Final = frozenset({CutDict, CutList})
_TYPES: Final[Mapping[type, str]] = {
    str: "str", CutText: "str", bool: "bool", int: "int", float: "number", dict: "object", CutDict: "object",
    list: "array", CutList: "array",
}  # fmt: skip


class _Values:
    """All values at one path of a document: the `user` of every row, for example."""

    __slots__ = ("_by_type", "depth", "values")
    type_names: ClassVar[Mapping[type, str]] = _TYPES

    def __init__(self, values: Sequence[object], depth: int) -> None:
        self.values = values
        self.depth = depth
        self._by_type: dict[str, Sequence[object]] | None = None

    @property
    def by_type(self) -> dict[str, Sequence[object]]:
        """The values grouped by the names of their types, in the order of first appearance."""
        if self._by_type is None:
            name_of = self.type_names.get
            names = {name_of(kind, "null") for kind in set(map(type, self.values))}
            if len(names) == 1:
                self._by_type = {names.pop(): self.values}
                return self._by_type
            found: dict[str, list[object]] = {}
            for value in self.values:
                found.setdefault(name_of(type(value), "null"), []).append(value)
            self._by_type = dict(found)
        return self._by_type


class ShapeNode(_Values):
    """One path in the line of a preview. `hidden` nodes show their key alone unless they have a `detail`."""

    __slots__ = ("_extents", "children", "detail", "hidden", "is_telling", "total")

    def __init__(self, values: Sequence[object], depth: int = 0, *, is_telling: bool = False) -> None:
        super().__init__(values, depth)
        self.children: list[tuple[str, ShapeNode]] = []
        self.total = 0
        self.hidden = False
        self.is_telling = is_telling
        self.detail = ""
        self._extents: dict[str, str] = {}

    def extent(self, name: str, values: Sequence[object]) -> str:
        """Number of members of the objects or arrays at this path."""
        known = self._extents.get(name)
        if known is None:
            known = self._extents[name] = extent(values)
        return known

    def text(self) -> str:
        if self.detail:
            return self.detail
        return "|".join(self._of_type(name, values) for name, values in self.by_type.items()) or "nothing"

    def _of_type(self, name: str, values: Sequence[object]) -> str:
        if name == "object":
            return self._object(values)
        if name == "array":
            return self._array(values)
        if name == "str" and len(values) == 1 and isinstance(value := values[0], str) and len(value) > _SHORT:
            return f"str({'≥' if isinstance(value, CutText) else ''}{len(value)} chars)"
        return name

    def _object(self, values: Sequence[object]) -> str:
        size = self.extent("object", values)
        if not self.children:
            return "{}" if size == "0" else "{1 key}" if size == "1" else f"{{{size} keys}}"
        parts = [key if child.hidden and not child.detail else f"{key}: {child.text()}" for key, child in self.children]
        cut = size.startswith("≥")
        if self.total > len(parts):
            parts.append(f"+{self.total - len(parts)} {'or more' if cut else 'more'}")
        elif cut and len(values) == 1:
            parts.append("…")
        return "{" + ", ".join(parts) + "}"

    def _array(self, values: Sequence[object]) -> str:
        size = self.extent("array", values)
        if size == "0":
            return "[]"
        if not self.children or self.children[0][0]:  # none listed, or those of objects at the same path
            return f"[{size}]"
        return f"[{size} × {self.children[0][1].text()}]"

    @property
    def is_scalar(self) -> bool:
        return not any(name in ("object", "array") for name in self.by_type)

    @property
    def is_list(self) -> bool:
        """Whether the only value is a list of scalars."""
        return len(self.values) == 1 and isinstance(self.values[0], list) and self.children[0][1].is_scalar


def extent(containers: Sequence[object], digits: str = "") -> str:
    """Number of members of containers: `3`, `0-12`, or `≥31` if one of them is cut. `digits` formats the numbers."""
    sizes = set(map(len, cast("Sequence[Sized]", containers)))
    cut = not _CUT.isdisjoint(map(type, containers))
    low, high = min(sizes), max(sizes)
    return f"{'≥' if cut else ''}{high:{digits}}" if low == high or cut else f"{low:{digits}}-{high:{digits}}"


def keys_of(objects: Iterable[object]) -> dict[str, list[object]]:
    """Every key in order of appearance, with its values: those of objects with equal keys together."""
    alike: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for each in objects:
        if isinstance(each, dict):
            alike.setdefault(tuple(each), []).append(each)
    found: dict[str, list[object]] = {}
    for keys, rows in alike.items():
        if len(keys) < 2 or len(rows) < 2:
            for row in rows:
                for key, value in row.items():
                    found.setdefault(key, []).append(value)
            continue
        for key, values in zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True):
            found.setdefault(key, []).extend(values)
    return found


def elements_of(arrays: Sequence[object]) -> list[object]:
    """The members of arrays, without a member that is cut unless it is the only one."""
    if set(map(type, arrays)) == {list}:
        return list(chain.from_iterable(cast("Iterable[list[object]]", arrays)))
    found: list[object] = []
    for each in arrays:
        if isinstance(each, list):
            found += each[:-1] if len(each) > 1 and isinstance(each[-1], (CutDict, CutList, CutText)) else each
    return found


def describe(values: Sequence[object], room: int) -> tuple[str, ShapeNode]:
    """The shape of values at one path on one line, in at most `room` characters if at all possible."""
    root = ShapeNode(values)
    spare = room - len(root.text())
    nodes = [root]
    queue: list[tuple[int, int, int, ShapeNode]] = [(0, 0, 0, root)]
    while queue and spare > 0:
        node = heapq.heappop(queue)[3]
        closed = len(node.text())
        made = _open(node, spare + closed)
        spare -= len(node.text()) - closed
        for child in made:
            nodes.append(child)
            if not child.is_scalar and child.depth < _DEEPEST:
                heapq.heappush(queue, (child.depth, -_weight(child.values), len(nodes), child))
    _fill(nodes, spare)
    return root.text(), root


def _open(node: ShapeNode, room: int) -> list[ShapeNode]:
    """List as many members of a node as fit, and return the new nodes."""
    kinds = node.by_type
    if "object" in kinds:
        return _open_object(node, kinds["object"], room)
    if "array" in kinds and (elements := elements_of(kinds["array"])):
        node.children = [("", ShapeNode(elements, node.depth))]
        if len(node.text()) <= room:
            return [node.children[0][1]]
        node.children = []
    return []


def _open_object(node: ShapeNode, objects: Sequence[object], room: int) -> list[ShapeNode]:
    found = keys_of(objects)
    complete = len(objects) - list(map(type, objects)).count(CutDict) or len(objects)
    node.total = len(found)
    if len(found) * 3 <= room:
        node.children = [_member(node, key, found[key], complete) for key in found]
        if len(node.text()) <= room:
            return [child for _, child in node.children]
    weights = {key: _weight(values) for key, values in found.items()}
    heaviest = max(weights, key=lambda key: weights[key])
    ranked = sorted(found, key=lambda key: _rank(key, is_heavy=key == heaviest and weights[key] > 0))
    members = [_member(node, key, found[key], complete) for key in ranked[: room // 3 + 1]]
    for _, child in members:
        child.hidden = child.is_scalar
        child.detail = _few(child) if child.is_scalar and child.is_telling else ""
    low, high = 0, len(members)
    while low < high:
        middle = (low + high + 1) // 2
        node.children = members[:middle]
        low, high = (middle, high) if len(node.text()) <= room else (low, middle - 1)
    node.children = members[: low if low > 1 or not node.depth else 0]
    return [child for _, child in node.children]


def _rank(key: str, *, is_heavy: bool) -> int:
    return 0 if key in _TELLING else 1 if is_heavy else 3 if _DULL_KEY.match(key) else 2


def _member(node: ShapeNode, key: str, values: Sequence[object], complete: int) -> tuple[str, ShapeNode]:
    return _key(key) + ("?" if len(values) < complete else ""), ShapeNode(
        values, node.depth + 1, is_telling=key in _TELLING
    )


def _weight(values: Sequence[object]) -> int:
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return 0
    containers = values if kinds.isdisjoint(_SCALARS) else [each for each in values if isinstance(each, (dict, list))]
    return sum(map(len, cast("Iterable[Sized]", containers)))


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else _quoted(key, 60)


def _quoted(text: str, room: int) -> str:
    """A string in quotes, with an ellipsis at its end if it is cut."""
    used = fit(text, room)
    plain = visible(text[:used].replace("\n", "⏎").replace("\t", " ").replace("\r", "")).replace('"', "'")
    return f'"{plain}"' if used == len(text) else f'"{plain}…"'


def _fill(nodes: Sequence[ShapeNode], spare: int) -> None:
    """Use the remaining room for values: where there are few distinct ones, then the beginnings of long strings."""
    for node in sorted(nodes, key=lambda node: not node.is_telling):
        if (not node.children or node.is_list) and not node.detail and (detail := _few(node)):
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
            size, more = node.extent("array", node.values), ", …" if len(elements) > 3 else ""
            return f"[{size} × {types}: {', '.join(first)}{more}]"
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
    return "|".join(distinct) if node.is_telling or len(node.values) == 1 or len(distinct) < len(node.values) else ""


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value, _SHORT)
    return (str(value) if type(value) is int else json.dumps(value))[:_SHORT]


def outline(values: Sequence[object], max_chars: int, lead: str = "") -> tuple[str, int]:
    """An indented outline of values at one path, `lead` first, and the number of paths that did not fit.

    Room is given out breadth first, and every node states how much is left out below it."""
    top = _OutlineNode(values, 0, "", lead)
    left = 0
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
    return "\n".join(_rendered(top))[:max_chars], left


class _OutlineNode(_Values):
    """One path in an outline. `hidden` counts the nodes below it that did not fit."""

    __slots__ = ("children", "hidden", "label", "lead", "sampled")
    type_names = {  # noqa: RUF012 - declared by the class above
        bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"
    }  # fmt: skip

    def __init__(self, values: Sequence[object], depth: int, label: str, lead: str = "", sampled: str = "") -> None:
        super().__init__(values, depth)
        self.label, self.lead, self.sampled = label, lead, sampled
        self.children: list[_OutlineNode] = []
        self.hidden = 0

    def line(self) -> str:
        types = " | ".join(filter(None, [self.lead, *self._types()]))
        more = f", {count(self.hidden, 'more place')} below" if self.hidden and not self.children else ""
        return f"{'  ' * self.depth}{self.label}{': ' if self.label else ''}{types}{self.sampled}{more}"

    def tail(self) -> str:
        return f"{'  ' * (self.depth + 1)}… {count(self.hidden, 'more key')}"

    def below(self) -> list[_OutlineNode]:
        """The nodes one level down, keys in order of appearance."""
        nodes = []
        objects = self.by_type.get("object", ())
        for key, values in keys_of(objects).items():
            often = "" if len(values) == len(objects) else f" ({len(values):,} of {len(objects):,})"
            nodes.append(_OutlineNode(values, self.depth + 1, _outline_key(key) + often))
        arrays = cast("Sequence[list[object]]", self.by_type.get("array", ()))
        items = _first_items(arrays)
        if any(isinstance(item, (dict, list)) for item in items):
            total = sum(map(len, arrays))
            sampled = f" (the first {len(items):,} of {total:,})" if total > len(items) else ""
            nodes.append(_OutlineNode(items, self.depth + 1, "[]", "", sampled))
        return nodes

    def _types(self) -> Iterator[str]:
        """The types of the values: `string "a", "b"`, `object of 3 keys`, `array of 0-12 strings`."""
        kinds = self.by_type
        if "object" in kinds:
            size = extent(kinds["object"], ",")
            yield f"object of {size} key{'' if size in ('1', '0-1') else 's'}"
        if "array" in kinds:
            size = extent(kinds["array"], ",")
            items = _first_items(cast("Sequence[list[object]]", kinds["array"]))
            names = sorted({self.type_names.get(type(item), "null") for item in items})
            samples = f" {_samples(items)}" if names and not {"object", "array"}.intersection(names) else ""
            yield f"array of {size} {'/'.join(names) or 'item'}{'' if size in ('1', '0-1') else 's'}{samples}"
        for name, values in kinds.items():
            if name not in ("object", "array"):
                yield name if name == "null" else f"{name} {_samples(values)}"


def _rendered(top: _OutlineNode) -> Iterator[str]:
    stack: list[_OutlineNode | str] = [top]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
            continue
        yield node.line()
        if node.hidden and node.children:
            stack.append(node.tail())
        stack.extend(reversed(node.children))


def _samples(values: Sequence[object]) -> str:
    """Up to three different values."""
    samples: dict[str, None] = {}
    for value in values:
        if len(samples) == 3:
            return ", ".join(samples) + ", …"
        if isinstance(value, str) and len(value) > _SHORT:
            samples[f'{json.dumps(value[:_SHORT], ensure_ascii=False)[:-1]}…" ({len(value):,} characters)'] = None
        else:
            samples[json.dumps(value, ensure_ascii=False)[: 2 * _SHORT]] = None
    return ", ".join(samples)


def _first_items(arrays: Sequence[list[object]]) -> list[object]:
    """The first items of all arrays, as many as are merged."""
    items: list[object] = []
    for each in arrays:
        items.extend(each[: SAMPLED - len(items)])
    return items


def _outline_key(key: str) -> str:
    if key.isidentifier() and len(key) <= _OUTLINE_KEY:
        return key
    return json.dumps(key if len(key) <= _OUTLINE_KEY else key[:_OUTLINE_KEY] + "…", ensure_ascii=False)
