"""The types of columns as SQL calls them, without a database: what a preview says, SQL must say.

The rules are those by which DuckDB reads JSON and CSV; `tests/reading/test_sql_types.py` compares
them with what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from coatcheck.deferred import lazy_pattern

TEXT: Final = "VARCHAR"
_INTEGER: Final = lazy_pattern(r"\s*-?(?:0|[1-9]\d*)\s*")
_DECIMAL: Final = lazy_pattern(r"\s*-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*")
_BOOLEANS: Final = frozenset(("true", "false", "t", "f", "yes", "no", "y", "n"))
_DAY: Final = r"\d{4}-(?:0?[1-9]|1[0-2])-(?:0?[1-9]|[12]\d|3[01])"
_DATE: Final = lazy_pattern(_DAY)
_CLOCK: Final = r"(?:[01]?\d|2[0-3]):[0-5]\d"
_TIME: Final = lazy_pattern(rf"{_CLOCK}(?::[0-5]\d(?:\.\d{{1,9}})?)?")
_MOMENT: Final = rf"{_DAY}[ T]{_CLOCK}(?::[0-5]\d(?:\.\d{{1,9}})?)?"
_TIMESTAMP: Final = lazy_pattern(_MOMENT)
_JSON_TIMESTAMP: Final = lazy_pattern(
    rf"{_DAY}(?: {_CLOCK}:[0-5]\d(?:\.\d{{1,9}})?|T{_CLOCK}:[0-5]\d)"
)
_ZONED: Final = lazy_pattern(rf"{_MOMENT} ?(?:Z|[+-]\d\d(?::?\d\d)?)")
_CSV_TIMES: Final = (
    ("DATE", _DATE),
    ("DATE", lazy_pattern(r"\d{4}[/.](?:0?[1-9]|1[0-2])[/.](?:0?[1-9]|[12]\d|3[01])")),
    ("DATE", lazy_pattern(r"(?:0?[1-9]|[12]\d|3[01])[-/.](?:0?[1-9]|1[0-2])[-/.]\d{2}(?:\d\d)?")),
    ("DATE", lazy_pattern(r"(?:0?[1-9]|1[0-2])[-/.](?:0?[1-9]|[12]\d|3[01])[-/.]\d{2}(?:\d\d)?")),
    ("TIME", _TIME),
    ("TIMESTAMP", _TIMESTAMP),
    ("TIMESTAMP WITH TIME ZONE", _ZONED),
)
_UUID: Final = lazy_pattern(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MOST_FIELDS: Final = 200  # an object with more keys is a MAP


def type_of_values(values: Iterable[Any]) -> str:
    """The type of a column of JSON values."""
    known = [value for value in values if value is not None]
    if not known:
        return TEXT
    kinds = {_kind(value) for value in known}
    if kinds == {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    if len(kinds) > 1:
        return "JSON" if kinds & {"list", "object"} else TEXT
    (kind,) = kinds
    if kind == "list":
        return f"{_type_inside(item for value in known for item in value)}[]"
    if kind == "object":
        return _type_of_objects(known)
    if kind == "BIGINT":
        return _type_of_integers(known)
    return _type_of_strings(known) if kind == TEXT else kind


def _kind(value: Any) -> str:
    """The kind of a value that is not NULL."""
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, list):
        return "list"
    return "object" if isinstance(value, dict) else TEXT


def _type_inside(values: Iterable[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "JSON"
    kinds = {_kind(value) for value in known}
    if len(kinds) > 1 and kinds != {"BIGINT", "DOUBLE"}:
        return "JSON"
    return type_of_values(known)


def _type_of_objects(values: Sequence[dict[str, Any]]) -> str:
    keys = dict.fromkeys(key for value in values for key in value)
    if not keys:
        return "MAP(VARCHAR, JSON)"
    if len(keys) > _MOST_FIELDS:
        inside = _type_inside(item for value in values for item in value.values())
        return f"MAP(VARCHAR, {inside})"
    fields = []
    for key in keys:
        known = [value[key] for value in values if value.get(key) is not None]
        kind = _type_inside(known) if known else '"NULL"'
        fields.append(f"{key if key.isidentifier() else quoted(key)} {kind}")
    return f"STRUCT({', '.join(fields)})"


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def _type_of_integers(values: Sequence[int]) -> str:
    if all(-(1 << 63) <= value < 1 << 63 for value in values):
        return "BIGINT"
    return "HUGEINT" if all(0 <= value < 1 << 64 for value in values) else "DOUBLE"


def _type_of_strings(values: Sequence[Any]) -> str:
    if any(not isinstance(value, str) for value in values):
        values = [_written(value) for value in values]
    for kind, pattern in (
        ("DATE", _DATE), ("TIME", _TIME), ("TIMESTAMP", _JSON_TIMESTAMP),
        ("TIMESTAMP WITH TIME ZONE", _ZONED), ("UUID", _UUID),
    ):  # fmt: skip
        if all(pattern.fullmatch(value) for value in values):
            return kind
    return TEXT


def _written(value: Any) -> str:
    """The text of a date or a time in Python's `repr`, as it is stored."""
    return value.isoformat(" ") if isinstance(value, datetime) else str(value)


def type_of_texts(values: Iterable[Any]) -> str:
    """The type of a column of CSV. An empty cell is NULL."""
    known = [str(value) for value in values if value not in (None, "")]
    if not known:
        return TEXT
    if all(value.lower() in _BOOLEANS for value in known):
        return "BOOLEAN"
    if all(map(_INTEGER.fullmatch, known)):
        return _type_of_csv_integers([int(value) for value in known])
    if all(map(_DECIMAL.fullmatch, known)) and not any(map(_has_leading_zero, known)):
        return "DOUBLE"
    for kind, pattern in _CSV_TIMES:
        if all(map(pattern.fullmatch, known)):
            return kind
    return TEXT


def _type_of_csv_integers(values: Sequence[int]) -> str:
    is_small = all(-(1 << 63) <= value < 1 << 63 for value in values)
    return "BIGINT" if is_small else "HUGEINT"


def _has_leading_zero(text: str) -> bool:
    digits = text.strip().removeprefix("-")
    return len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
