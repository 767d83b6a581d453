"""The types of columns as SQL calls them, without a database: what a stub says, SQL must say.

The rules are those by which DuckDB reads JSON and CSV, and `reading.sql_child` loads tables;
`tests/reading/test_sql_types.py` compares them with what SQL says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from coatcheck.deferred import lazy_pattern

TEXT: Final = "VARCHAR"
_MOST_FIELDS: Final = 200  # an object with more keys is a MAP

_MONTH, _OF_MONTH = r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_DAY: Final = rf"\d{{4}}-{_MONTH}-{_OF_MONTH}"
_CLOCK: Final = r"(?:[01]?\d|2[0-3]):[0-5]\d"
_SECONDS: Final = r":[0-5]\d(?:\.\d{1,9})?"
_MOMENT: Final = rf"{_DAY}[ T]{_CLOCK}(?:{_SECONDS})?"
_ZONE: Final = r"(?:Z|[+-]\d\d(?::?\d\d)?)"
_TIME: Final = rf"{_CLOCK}(?:{_SECONDS})?"
_CSV_FORMS: Final = (
    ("BOOLEAN", r"(?i:true|false|t|f|yes|no|y|n)"),
    ("BIGINT", r"\s*-?(?:0|[1-9]\d*)\s*"),
    ("DOUBLE", r"\s*-?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*"),
    ("DATE", _DAY),
    ("DATE", rf"\d{{4}}[/.]{_MONTH}[/.]{_OF_MONTH}"),
    ("DATE", rf"{_OF_MONTH}[-/.]{_MONTH}[-/.]\d{{2}}(?:\d\d)?"),
    ("DATE", rf"{_MONTH}[-/.]{_OF_MONTH}[-/.]\d{{2}}(?:\d\d)?"),
    ("TIME", _TIME),
    ("TIMESTAMP", _MOMENT),
    ("TIMESTAMPTZ", rf"{_MOMENT} ?{_ZONE}"),
)
_JSON_FORMS: Final = (
    ("DATE", _DAY),
    ("TIME", _TIME),
    ("TIMESTAMP", rf"{_DAY}(?: {_CLOCK}{_SECONDS}|T{_CLOCK}:[0-5]\d)"),
    ("TIMESTAMPTZ", rf"{_MOMENT} ?{_ZONE}"),
    ("UUID", r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
)
# A pattern matches all values of a column at once, each with a line feed after it: that takes a
# fifth of the time of one match for each value.
_CSV_PATTERNS: Final = [(kind, lazy_pattern(rf"(?:{form}\n)*+")) for kind, form in _CSV_FORMS]
_JSON_PATTERNS: Final = [(kind, lazy_pattern(rf"(?:{form}\n)*+")) for kind, form in _JSON_FORMS]


def type_of_texts(texts: Iterable[Any]) -> str:
    """The type of a column of CSV. An empty cell is NULL."""
    known = {str(text) for text in texts if text is not None and text != ""}
    if not known:
        return TEXT
    kind = _form_of(known, _CSV_PATTERNS)
    return _type_of_csv_integers(known) if kind == "BIGINT" else kind


def type_of_strings(strings: Iterable[Any]) -> str:
    """The type of a column of strings in JSON, or of dates and times in Python's `repr`."""
    known = {string if isinstance(string, str) else _written(string) for string in strings}
    return _form_of(known, _JSON_PATTERNS)


def _form_of(texts: Collection[str], patterns: Sequence[tuple[str, Any]]) -> str:
    """The first form that all texts have."""
    first = next(iter(texts)) + "\n"
    whole = ""
    for kind, pattern in patterns:
        if pattern.fullmatch(first) is None:
            continue
        whole = whole or "\n".join(texts) + "\n"
        if pattern.fullmatch(whole) and whole.count("\n") == len(texts):
            return kind
    return TEXT


def _type_of_csv_integers(texts: Iterable[str]) -> str:
    longest = max(len(text.strip()) for text in texts)
    if longest <= 18:  # digits, perhaps with a sign
        return "BIGINT"
    is_small = longest <= 20 and all(-(1 << 63) <= int(text) < 1 << 63 for text in texts)
    return "BIGINT" if is_small else "HUGEINT"


def _written(value: Any) -> str:
    """The text of a date or a time in Python's `repr`, as it is stored."""
    return value.isoformat(" ") if isinstance(value, datetime) else str(value)


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
        return type_of_integers(known)
    return type_of_strings(known) if kind == TEXT else kind


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


def type_of_integers(values: Iterable[int]) -> str:
    """The type of a column of integers in JSON."""
    numbers = set(values)
    low, high = min(numbers), max(numbers)
    if low >= -(1 << 63) and high < 1 << 63:
        return "BIGINT"
    return "HUGEINT" if low >= 0 and high < 1 << 64 else "DOUBLE"


def _type_inside(values: Iterable[Any]) -> str:
    """The type of what an array or an object has in it: there, values of several kinds are JSON."""
    known = [value for value in values if value is not None]
    kinds = {_kind(value) for value in known}
    if not kinds or (len(kinds) > 1 and kinds != {"BIGINT", "DOUBLE"}):
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
