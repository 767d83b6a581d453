"""Where the rows of a JSON document are: its arrays of objects, and its objects of alike objects.

Values at equal paths are one place, so the `labels` of a thousand issues are described together.
All values of a document are looked at, level by level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from coatcheck.deferred import lazy_pattern

from .json_parts import CutDict, CutList
from .shape import keys_of

PLAIN: Final = lazy_pattern(r"[A-Za-z_$@][\w$@-]{0,60}")
_MOST: Final = 600  # places that are looked at
_DEEPEST: Final = 8
_MAP: Final = 4  # objects of at least as many alike objects are tables
_WIDE: Final = 200  # keys at one place beyond which it is a map, not a record
_PATTERN_KEYS: Final = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Rows at one path of a document.

    `path` names it for people, `pointer` is the JSON pointer to it if it is a single value, else
    None. `keys` are the keys of the rows, if they are the values of one object. `arrays` is the
    number of arrays that the rows are from."""

    path: str
    pointer: str | None
    rows: Sequence[dict[str, object]]
    keys: tuple[str, ...] = ()
    arrays: int = 1
    is_cut: bool = False
    depth: int = 0

    @property
    def weight(self) -> int:
        """How much of the document the rows are, in values."""
        return sum(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class _At:
    path: str
    pointer: str | None
    values: Sequence[object]
    depth: int

    def has(self, wanted: type) -> bool:
        """Whether a value is of a type."""
        return any(issubclass(kind, wanted) for kind in set(map(type, self.values)))


def places(document: object) -> list[Place]:
    """The places of a document that have rows, those with the most first, outer ones before inner
    ones of the same size."""
    found: list[Place] = []
    queue = deque([_At("", "", [document], 0)])
    seen = 0
    while queue and seen < _MOST:
        at = queue.popleft()
        seen += 1
        arrays = [value for value in at.values if isinstance(value, list)] if at.has(list) else []
        objects = [value for value in at.values if isinstance(value, dict)] if at.has(dict) else []
        if arrays:
            found += _in_arrays(at, arrays, queue)
        if objects:
            found += _in_objects(at, objects, queue)
    return sorted(found, key=lambda place: (-place.weight, place.depth))


def _in_arrays(at: _At, arrays: list[list[object]], queue: deque[_At]) -> list[Place]:
    """The rows in arrays, and their inner values for later."""
    items = list(chain.from_iterable(arrays))
    rows = [item for item in items if isinstance(item, dict)]
    inner = [item for item in items if isinstance(item, (dict, list))]
    if inner and at.depth < _DEEPEST:
        is_one = len(inner) == 1 and len(arrays) == 1 and at.pointer is not None
        pointer = f"{at.pointer}/0" if is_one else None
        queue.append(_At(f"{at.path}[*]", pointer, inner, at.depth + 1))
    if not rows or len(rows) * 2 < len(items):
        return []
    is_cut = any(isinstance(one, CutList) for one in arrays)
    if is_cut and len(rows) > 1 and isinstance(rows[-1], CutDict):
        rows.pop()
    pointer = at.pointer if len(arrays) == 1 else None
    return [Place(at.path, pointer, rows, (), len(arrays), is_cut, at.depth)]


def _in_objects(at: _At, objects: list[dict[str, object]], queue: deque[_At]) -> list[Place]:
    """The rows of an object of alike objects; else its inner values for later."""
    only = objects[0] if len(objects) == 1 else None
    if only is not None and is_table(only):
        rows = [value for value in only.values() if isinstance(value, dict)]
        if at.depth < _DEEPEST:
            inner = _containers(list(only.values()))
            queue.append(_At(f"{at.path}.*", None, inner, at.depth + 1))
        keys = tuple(map(str, only))
        return [Place(at.path, at.pointer, rows, keys, 1, isinstance(only, CutDict), at.depth)]
    if at.depth >= _DEEPEST:
        return []
    by_key = keys_of(objects)
    if len(by_key) > _WIDE:  # a map with many different keys
        by_key = {"*": list(chain.from_iterable(by_key.values()))}
    for key, values in by_key.items():
        inner = _containers(values)
        if inner:
            is_one = only is not None and key in only and len(inner) == 1
            queue.append(_below(at, key, inner, is_one=is_one))
    return []


def _containers(values: list[object]) -> list[object]:
    """The objects and arrays among some values."""
    if not any(issubclass(kind, (dict, list)) for kind in set(map(type, values))):
        return []
    return [value for value in values if isinstance(value, (dict, list))]


def _below(at: _At, key: str, inner: list[object], *, is_one: bool) -> _At:
    """The values under a key. If they are one value, it has a pointer."""
    name = key if key == "*" or PLAIN.fullmatch(key) else "…"
    pointer = None
    if is_one and at.pointer is not None:
        pointer = f"{at.pointer}/{key.replace('~', '~0').replace('/', '~1')}"
    return _At(f"{at.path}.{name}" if at.path else name, pointer, inner, at.depth + 1)


def is_table(one: dict[str, object]) -> bool:
    """Whether an object is a table by key: many values, nearly all objects with keys in common."""
    if len(one) < _MAP:
        return False
    rows = [value for value in one.values() if isinstance(value, dict)]
    if len(rows) * 10 < len(one) * 9:
        return False
    first = rows[:_PATTERN_KEYS]
    times: dict[str, int] = {}
    for row in first:
        for key in row:
            times[key] = times.get(key, 0) + 1
    common = sum(count for count in times.values() if count * 2 >= len(first))
    return common * 2 >= sum(times.values()) > 0
