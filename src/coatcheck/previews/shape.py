"""The shape of JSON: which keys, which types, how many. Wide before deep, the heaviest part first, no more than fits.

`[30 × {id: int, state: "open"|"closed", user: {18 keys}, body?: str|null}]` reads: thirty objects, not all of them
with a body. Equal places are merged, so a thousand rows cost no more room than one.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from operator import itemgetter
from typing import Final, cast

from .parts import CutDict, CutList, CutText
from .text import fit, visible

_PLAIN_KEY: Final = re.compile(r"[A-Za-z_$@][\w$.\-/]{0,60}", re.ASCII)
_DULL_KEY: Final = re.compile(r"(?:.{0,60}_)?(?:url|href|node_id|etag)\Z")
_TELLING: Final = frozenset({"type", "kind", "role", "level", "status", "state", "event", "error"})
_SCALARS: Final = frozenset({str, int, float, bool, type(None), CutText})
_CUT: Final = frozenset({CutDict, CutList})
_FEW: Final = 4
_MANY: Final = 16
_SHORT: Final = 40
_DEEPEST: Final = 6


class Place:
    """One place in the document, with every value that stands there: each row's `user`, say."""

    __slots__ = ("_by_type", "_extents", "children", "depth", "detail", "hidden", "is_telling", "total", "values")

    def __init__(self, values: Sequence[object], depth: int = 0, *, is_telling: bool = False) -> None:
        self.values = values
        self.depth = depth
        self.children: list[tuple[str, Place]] = []
        self.total = 0
        self.hidden = False
        self.is_telling = is_telling
        self.detail = ""
        self._by_type: dict[str, Sequence[object]] | None = None
        self._extents: dict[str, str] = {}

    @property
    def by_type(self) -> dict[str, Sequence[object]]:
        if self._by_type is None:
            names = {type_of(kind) for kind in set(map(type, self.values))}
            if len(names) == 1:
                self._by_type = {names.pop(): self.values}
                return self._by_type
            found: dict[str, list[object]] = {}
            for value in self.values:
                found.setdefault(type_of(type(value)), []).append(value)
            self._by_type = dict(found)
        return self._by_type

    def extent(self, name: str, values: Sequence[object]) -> str:
        """How many members the objects or arrays here have."""
        known = self._extents.get(name)
        if known is None:
            known = self._extents[name] = extent(values)
        return known

    @property
    def weight(self) -> int:
        return _weight(self.values)

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
        if not self.children or self.children[0][0]:  # none listed, or those of the objects in the same place
            return f"[{size}]"
        return f"[{size} × {self.children[0][1].text()}]"

    @property
    def is_scalar(self) -> bool:
        return not any(name in ("object", "array") for name in self.by_type)

    @property
    def is_list(self) -> bool:
        """Whether it is one list of scalars."""
        return len(self.values) == 1 and isinstance(self.values[0], list) and self.children[0][1].is_scalar


_TYPES: Final[dict[type, str]] = {
    str: "str", CutText: "str", bool: "bool", int: "int", float: "number", dict: "object", CutDict: "object",
    list: "array", CutList: "array",
}  # fmt: skip


def type_of(kind: type) -> str:
    """What JSON calls the values of a type."""
    return _TYPES.get(kind, "null")


def extent(containers: Sequence[object]) -> str:
    """How many members containers have: `3`, `0-12`, `≥31` where one of them goes on beyond what was seen."""
    sizes = set(map(len, cast("Sequence[Sized]", containers)))
    cut = not _CUT.isdisjoint(map(type, containers))
    low, high = min(sizes), max(sizes)
    return f"{'≥' if cut else ''}{high}" if low == high or cut else f"{low}-{high}"


def keys_of(objects: Iterable[object]) -> dict[str, list[object]]:
    """Every key, in the order met, with its values: those of objects with equal keys together."""
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
    """The members of arrays, without the one that was cut off in the middle where there are others."""
    if set(map(type, arrays)) == {list}:
        return list(chain.from_iterable(cast("Iterable[list[object]]", arrays)))
    found: list[object] = []
    for each in arrays:
        if isinstance(each, list):
            found += each[:-1] if len(each) > 1 and isinstance(each[-1], (CutDict, CutList, CutText)) else each
    return found


def describe(values: Sequence[object], room: int) -> tuple[str, Place]:
    """The shape of values that stand in one place, in at most `room` characters where at all possible."""
    root = Place(values)
    spare = room - len(root.text())
    places = [root]
    queue: list[tuple[int, int, int, Place]] = [(0, 0, 0, root)]
    while queue and spare > 0:
        place = heapq.heappop(queue)[3]
        closed = len(place.text())
        made = _open(place, spare + closed)
        spare -= len(place.text()) - closed
        for child in made:
            places.append(child)
            if not child.is_scalar and child.depth < _DEEPEST:
                heapq.heappush(queue, (child.depth, -child.weight, len(places), child))
    _fill(places, spare)
    return root.text(), root


def _open(place: Place, room: int) -> list[Place]:
    """List the members of a place, as many as fit; the places that this made."""
    kinds = place.by_type
    if "object" in kinds:
        return _open_object(place, kinds["object"], room)
    if "array" in kinds and (elements := elements_of(kinds["array"])):
        place.children = [("", Place(elements, place.depth))]
        if len(place.text()) <= room:
            return [place.children[0][1]]
        place.children = []
    return []


def _open_object(place: Place, objects: Sequence[object], room: int) -> list[Place]:
    found = keys_of(objects)
    complete = len(objects) - list(map(type, objects)).count(CutDict) or len(objects)
    place.total = len(found)
    if len(found) * 3 <= room:
        place.children = [_member(place, key, found[key], complete) for key in found]
        if len(place.text()) <= room:
            return [child for _, child in place.children]
    weights = {key: _weight(values) for key, values in found.items()}
    heaviest = max(weights, key=lambda key: weights[key])
    ranked = sorted(found, key=lambda key: _rank(key, is_heavy=key == heaviest and weights[key] > 0))
    members = [_member(place, key, found[key], complete) for key in ranked[: room // 3 + 1]]
    for _, child in members:
        child.hidden = child.is_scalar
        child.detail = _few(child) if child.is_scalar and child.is_telling else ""
    low, high = 0, len(members)
    while low < high:
        middle = (low + high + 1) // 2
        place.children = members[:middle]
        low, high = (middle, high) if len(place.text()) <= room else (low, middle - 1)
    place.children = members[: low if low > 1 or not place.depth else 0]
    return [child for _, child in place.children]


def _rank(key: str, *, is_heavy: bool) -> int:
    return 0 if key in _TELLING else 1 if is_heavy else 3 if _DULL_KEY.match(key) else 2


def _member(place: Place, key: str, values: Sequence[object], complete: int) -> tuple[str, Place]:
    return _key(key) + ("?" if len(values) < complete else ""), Place(
        values, place.depth + 1, is_telling=key in _TELLING
    )


def _weight(values: Sequence[object]) -> int:
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return 0
    held = values if kinds.isdisjoint(_SCALARS) else [each for each in values if isinstance(each, (dict, list))]
    return sum(map(len, cast("Iterable[Sized]", held)))


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else _quoted(key, 60)


def _quoted(text: str, room: int) -> str:
    """A string as JSON writes it, an ellipsis behind its closing quote where it goes on."""
    used = fit(text, room)
    plain = visible(text[:used].replace("\n", "⏎").replace("\t", " ").replace("\r", "")).replace('"', "'")
    return f'"{plain}"' if used == len(text) else f'"{plain}…"'


def _fill(places: Sequence[Place], spare: int) -> None:
    """Use what room is left for values: the few that a place takes, then the beginnings of long strings."""
    for place in sorted(places, key=lambda place: not place.is_telling):
        if (not place.children or place.is_list) and not place.detail and (detail := _few(place)):
            cost = len(detail) - _room_of(place)
            if cost <= spare:
                place.detail = detail
                spare -= cost
    for place in places:
        if spare < _SHORT // 2:
            return
        if not place.detail and len(place.values) == 1 and isinstance(value := place.values[0], str):
            size = place.text().removeprefix("str")
            detail = _quoted(value, spare - len(size) - 5) + size
            spare -= len(detail) - _room_of(place)
            place.detail = detail


def _room_of(place: Place) -> int:
    """What a place takes now; less than nothing where showing it needs a colon first."""
    return -2 if place.hidden else len(place.text())


def _few(place: Place) -> str:
    """The values themselves, where they are few and short, or the first of a list of such."""
    kinds = place.by_type
    if set(kinds) == {"array"} and len(place.values) == 1:
        elements = elements_of(place.values)
        first = [_scalar(each) for each in elements[:3] if not isinstance(each, (dict, list))]
        if first and len(first) == len(elements[:3]):
            types = "|".join(dict.fromkeys(type_of(type(each)) for each in elements))
            size, more = place.extent("array", place.values), ", …" if len(elements) > 3 else ""
            return f"[{size} × {types}: {', '.join(first)}{more}]"
        return ""
    if not place.is_scalar:
        return ""
    distinct: dict[str, None] = {}
    values: Iterable[object] = place.values
    if len(set(map(type, place.values))) == 1:  # else 1, 1.0 and true would be one
        values = known = dict.fromkeys(place.values)
        if len(known) > _MANY and not place.is_telling:  # even where some of them look the same
            return ""
    for value in values:
        if isinstance(value, str) and len(value) > _SHORT:
            return ""
        distinct[_scalar(value)] = None
        if len(distinct) > _FEW:
            return "|".join([*list(distinct)[: _FEW - 1], "…"]) if place.is_telling else ""
    return "|".join(distinct) if place.is_telling or len(place.values) == 1 or len(distinct) < len(place.values) else ""


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value, _SHORT)
    return (str(value) if type(value) is int else json.dumps(value))[:_SHORT]
