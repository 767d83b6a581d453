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
    note = _nulls(nulls)
    if not values:
        return Column(name, "NULL", "", 0, nulls)
    if all(issubclass(kind, dict) for kind in kinds):
        objects = cast("Sequence[dict[str, object]]", values)
        keys = dict.fromkeys(chain.from_iterable(objects))
        listed = ", ".join(masked_line(str(key), 24) for key in islice(keys, 4))
        more = f", +{len(keys) - 4}" if len(keys) > 4 else ""
        return Column(name, "STRUCT", f"{{{listed}{more}}}{note}", 0, nulls)
    if all(issubclass(kind, list) for kind in kinds):
        arrays = cast("Sequence[list[object]]", values)
        sizes = set(map(len, arrays))
        low, high = min(sizes), max(sizes)
        many = f"{low}-{high} items" if low < high else f"{low} items"
        inner = set(map(type, chain.from_iterable(arrays)))
        return Column(name, f"{_inner(inner)}[]", many + note, 0, nulls)
    if not kinds <= {str, int, float, bool}:
        if len(kinds) == 1 and issubclass(next(iter(kinds)), str):
            return Column(name, "VARCHAR", note.strip(), 0, nulls)
        names = sorted({_NAMES.get(kind, "object") for kind in kinds})
        return Column(name, "JSON", f"{'|'.join(names)}{note}", 0, nulls)
    if kinds == {bool}:
        return _described(name, "BOOLEAN", values, set(values), nulls, row)
    if kinds <= {int, float}:
        integers = cast("Sequence[int]", values)
        found = type_of_integers(integers) if kinds == {int} else "DOUBLE"
        return _described(name, found, values, set(values), nulls, row)
    if kinds == {str}:
        distinct = set(values)
        return _described(name, type_of_strings(distinct), values, distinct, nulls, row)
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return _described(name, "VARCHAR", texts, set(texts), nulls, row)


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
    count = len(distinct)
    rows = len(values)
    is_group = 0 < count <= min(_GROUPS, max(rows // 3, 1)) and max(rows - nulls, 0) > count
    short = [value for value in distinct if len(str(value)) <= 3 * SHOWN] if is_group else []
    counted = _counted(values) if is_group else []
    is_plain = type_ in ("VARCHAR", "BOOLEAN") and len(short) == count <= _TELLING
    counts = tuple((str(value), times) for value, times in counted) if is_plain else ()
    brief = ""
    span = _range(type_, distinct) if type_ in _RANGED and count > FEW else ""
    if span:
        detail = f"{span}, {count} distinct" if count < rows // 2 else span
    elif count == 1:
        value = next(iter(distinct))
        often = "" if rows == 1 else "always "
        detail = f"{often}{_value(name, value, row)}"
    elif is_group and len(short) * 2 > count:
        detail = _frequent(name, counted, FEW, row)
        brief = _frequent(name, counted, _BRIEF, row) if count > _BRIEF + 1 else ""
    elif count == 0:
        detail = ""
    else:
        sample = _value(name, _first(values), row)
        detail = f"{some(count, 'value')}, e.g. {sample}"
    brief = brief and brief + _nulls(nulls)
    return Column(name, type_, detail + _nulls(nulls), count, nulls, counts, brief)


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
    text = value if isinstance(value, str) else json.dumps(value)
    if not isinstance(value, str):
        return text[:SHOWN]
    return safe(text, SHOWN, name, row(value))


def _first(values: Sequence[object]) -> object:
    return next((value for value in values if value != ""), "")


def _range(type_: str, distinct: Collection[object]) -> str:
    """The least and the largest value; empty if texts of different forms cannot be compared."""
    if type_ not in _NUMERIC:
        texts = cast("Collection[str]", distinct)
        low, high = min(texts), max(texts)
        has_zone = type_ == "TIMESTAMPTZ"
        if len(set(map(len, texts))) > 1 or (has_zone and len({one[-6:] for one in texts}) > 1):
            is_utc = has_zone and all(one.endswith("Z") for one in texts)
            return f"{low}..{high}" if is_utc else ""
        return f"{low}..{high}"
    if isinstance(next(iter(distinct)), str):
        kind = float if type_ == "DOUBLE" else int
        read = list(map(kind, cast("Collection[str]", distinct)))
        return f"{_number(min(read))}..{_number(max(read))}"
    numbers = cast("Collection[float]", distinct)
    return f"{_number(min(numbers))}..{_number(max(numbers))}"


def _number(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:SHOWN]


def _nulls(nulls: int) -> str:
    return f", {nulls} null" if nulls else ""
