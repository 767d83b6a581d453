"""What the columns of a table have in them: types as DuckDB reads them, values with their counts,
ranges, nulls.

Everything is computed from all rows that are passed in. A value is shown only if the text around it
does not make it a secret: `safe` masks it in the context of its name and of its row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, cast

from coatcheck.redaction import MARK, is_suspect, mask
from coatcheck.sql_types import type_of_integers, type_of_strings, type_of_texts

from .excerpts import line, masked_line, some

SHOWN: Final = 24
"""Characters of a value in a list of values."""

_BRIEF: Final = 3  # values shown of many
FEW: Final = 8
"""Values that are all listed."""

_GROUPS: Final = 200  # different values of a column whose most frequent ones are worth a list
_CONTEXT: Final = 2_000
_TELLING: Final = 12  # different values of a column that are worth counting

Row = Callable[[object], str]
"""The text of the first row with a value, in which the value may be a secret; empty if nothing but
the name of the column can make it one."""


def no_row(_: object) -> str:
    """No text around a value."""
    return ""


_NUMERIC: Final = frozenset({"BIGINT", "HUGEINT", "DOUBLE"})
_RANGED: Final = _NUMERIC | {"DATE", "TIMESTAMP", "TIMESTAMPTZ", "TIME"}
_NAMES: Final = {str: "text", int: "number", float: "number", bool: "boolean", list: "array"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `detail` has its values or its range and the number of nulls; `brief` is the same
    with fewer values."""

    name: str
    type: str
    detail: str
    distinct: int
    nulls: int
    counts: tuple[tuple[str, int], ...] = ()
    brief: str = ""
    """The values with their numbers, the most frequent first, if they are few, short and repeat:
    then a count of them says something."""

    @property
    def is_telling(self) -> bool:
        return len(self.counts) > 1

    @property
    def variants(self) -> tuple[str, ...]:
        """The column in ever more words: its name, with the type, with the number of values or
        their range, with the values."""
        name = masked_line(self.name, 40) or '""'
        typed = f"{name} {self.type}"
        number = f"{self.distinct} distinct{_nulls(self.nulls)}"
        details = [one for one in (self.brief, self.detail) if one]
        has_range = ".." in self.detail
        if self.distinct > 1 and not has_range and len(number) < len(details[0]):
            details.insert(0, number)
        return (name, typed, *(f"{typed} {one}" for one in details))


def safe(value: str, room: int, name: str = "", row: str = "") -> str:
    """A value on one line of at most `room` characters, masked if it is a secret by itself, beside
    its name, or in its row."""
    shown = line(value, room)
    start = value[:_CONTEXT]
    for context in (f'"{name}": "{start}"', row):
        if not context or not is_suspect(context):
            continue
        masked = mask(context)
        if masked != context and start[: max(room, 8)] not in masked:
            return MARK + " value]"
    return shown


def of_cells(name: str, cells: Sequence[str], row: Row) -> Column:
    """The column of a table of text. An empty cell is a null."""
    values = set(cells)
    nulls = cells.count("") if "" in values else 0
    values.discard("")
    return _described(name, type_of_texts(values), cells, values, nulls, row)


def of_values(name: str, values: Sequence[object], rows: int, row: Row) -> Column:
    """The column of rows of JSON. `rows` is the number of all rows: some may lack the value."""
    kinds = set(map(type, values))
    nulls = rows - len(values)
    if type(None) in kinds:
        kinds.discard(type(None))
        nulls += values.count(None)
        values = [value for value in values if value is not None]
    if not values:
        return Column(name, "VARCHAR", "always null", 0, nulls)
    if all(issubclass(kind, dict) for kind in kinds):
        keys = _keys_inside(cast("Sequence[dict[str, object]]", values))
        return Column(name, "STRUCT", keys + _nulls(nulls), 0, nulls)
    if all(issubclass(kind, list) for kind in kinds):
        return _of_arrays(name, cast("Sequence[list[object]]", values), nulls)
    if any(issubclass(kind, (dict, list)) for kind in kinds):
        names = sorted({_NAMES.get(kind, "object") for kind in kinds})
        return Column(name, "JSON", "|".join(names) + _nulls(nulls), 0, nulls)
    if kinds == {bool}:
        return _described(name, "BOOLEAN", values, set(values), nulls, row)
    if kinds <= {int, float}:
        integers = cast("Sequence[int]", values)
        found = type_of_integers(integers) if kinds == {int} else "DOUBLE"
        return _described(name, found, values, set(values), nulls, row)
    texts = [value if isinstance(value, str) else _written(value) for value in values]
    distinct = set(texts)
    found = type_of_strings(distinct) if len(kinds) == 1 else "VARCHAR"
    return _described(name, found, texts, distinct, nulls, row)


def _written(value: object) -> str:
    """A plain value as SQL shows it: JSON, or a date of Python's."""
    is_plain = value is None or isinstance(value, (bool, int, float))
    return json.dumps(value) if is_plain else str(value)


def _keys_inside(objects: Sequence[dict[str, object]]) -> str:
    """The keys of objects, if not all of them the first."""
    keys = dict.fromkeys(chain.from_iterable(objects))
    listed = ", ".join(masked_line(str(key), 24) for key in islice(keys, 4))
    more = f", +{len(keys) - 4}" if len(keys) > 4 else ""
    return f"{{{listed}{more}}}"


def _of_arrays(name: str, arrays: Sequence[list[object]], nulls: int) -> Column:
    """The column of arrays: the type of their items, and how many they have."""
    sizes = set(map(len, arrays))
    low, high = min(sizes), max(sizes)
    many = f"{low}-{high} items" if low < high else f"{low} items"
    inner = set(map(type, chain.from_iterable(arrays)))
    return Column(name, f"{_inner(inner)}[]", many + _nulls(nulls), 0, nulls)


def _inner(kinds: set[type]) -> str:
    """The type of the items of arrays."""
    kinds.discard(type(None))
    if len(kinds) != 1:
        return "JSON"
    kind = next(iter(kinds))
    if issubclass(kind, dict):
        return "STRUCT"
    if issubclass(kind, list):
        return "JSON[]"
    return {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}.get(kind, "VARCHAR")


def _described(
    name: str,
    type_: str,
    values: Sequence[object],
    distinct: set[object] | set[str],
    nulls: int,
    row: Row,
) -> Column:
    """A column of plain values. `values` may contain the empty text for a null."""
    count, rows = len(distinct), len(values)
    span = _range(type_, distinct) if type_ in _RANGED and count > FEW else ""
    is_group = 0 < count <= min(_GROUPS, max(rows // 3, 1)) and rows - nulls > count
    short = [value for value in distinct if len(str(value)) <= 3 * SHOWN] if is_group else []
    counted = _counted(values) if short else []
    detail = brief = ""
    if span:
        detail = f"{span}, {count} distinct" if count < rows // 2 else span
    elif count == 1:
        detail = _only(name, next(iter(distinct)), rows, row)
    elif len(short) * 2 > count:
        detail = _frequent(name, counted, FEW, row) + _nulls(nulls)
        if count > _BRIEF + 1:
            brief = _frequent(name, counted, _BRIEF, row) + _nulls(nulls)
        return Column(name, type_, detail, count, nulls, _counts(type_, counted, short), brief)
    elif count:
        detail = f"{some(count, 'value')}, e.g. {_value(name, _first(values), row)}"
    return Column(name, type_, detail + _nulls(nulls), count, nulls, _counts(type_, counted, short))


def _only(name: str, value: object, rows: int, row: Row) -> str:
    """The one value of a column."""
    if value == "":
        return "always empty"
    shown = _value(name, value, row)
    return shown if rows == 1 else f"always {shown}"


def _counts(
    type_: str, counted: list[tuple[object, int]], short: list[object] | list[str]
) -> tuple[tuple[str, int], ...]:
    """The values with their numbers, if a count of them says something."""
    if type_ not in ("VARCHAR", "BOOLEAN") or len(counted) > _TELLING or len(short) < len(counted):
        return ()
    return tuple((str(value), times) for value, times in counted)


def _counted(values: Sequence[object]) -> list[tuple[object, int]]:
    """The values with their numbers, the most frequent first."""
    counts = Counter(values)
    counts.pop("", None)
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))


def _frequent(name: str, counted: list[tuple[object, int]], few: int, row: Row) -> str:
    """All values with their numbers if they are few, else the most frequent ones."""
    most = few if len(counted) <= few else _BRIEF
    listed = "|".join(f"{_value(name, value, row)} {times}" for value, times in counted[:most])
    return listed if len(counted) <= most else f"{listed}|… {len(counted)} distinct"


def _value(name: str, value: object, row: Row) -> str:
    if not isinstance(value, str):
        return _written(value)[:SHOWN]
    return safe(value, SHOWN, name, row(value))


def _first(values: Sequence[object]) -> object:
    return next((value for value in values if value != ""), "")


def _range(type_: str, distinct: Collection[object]) -> str:
    """The least and the largest value; empty if texts of different forms cannot be compared."""
    if type_ not in _NUMERIC:
        return _range_of_times(type_, cast("Collection[str]", distinct))
    if isinstance(next(iter(distinct)), str):
        kind = float if type_ == "DOUBLE" else int
        read = list(map(kind, cast("Collection[str]", distinct)))
        return f"{_number(min(read))}..{_number(max(read))}"
    numbers = cast("Collection[float]", distinct)
    return f"{_number(min(numbers))}..{_number(max(numbers))}"


def _range_of_times(type_: str, texts: Collection[str]) -> str:
    """The first and the last of dates or times, if their texts sort like them: all in one form,
    with the year first, and in one zone."""
    low, high = min(texts), max(texts)
    if len(set(map(len, texts))) > 1:
        return ""
    begins_with_year = low[:4].isdigit() and high[:4].isdigit() and low[4] == high[4]
    if type_ != "TIME" and not begins_with_year:
        return ""
    if type_ == "TIMESTAMPTZ" and len({one[-6:].lstrip("0123456789.:") for one in texts}) > 1:
        return ""
    return f"{low}..{high}"


def _number(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:SHOWN]


def _nulls(nulls: int) -> str:
    return f", {nulls} null" if nulls else ""
