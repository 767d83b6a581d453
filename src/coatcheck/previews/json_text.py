"""JSON and JSON lines: top-level keys, the rows inside with the fields of all of them, known
documents as what they are.

Everything is computed from all of the text, up to `SCANNED` bytes. Of a text that is larger, cut
off or invalid, it is computed from what can be read, and the preview says so first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from coatcheck.deferred import lazy_pattern

from .columns import Column, no_row, of_values, safe
from .drafts import Draft, Section
from .excerpts import PROSE, Excerpt, Preview, ends, grep, masked_line, some, sql
from .json_parts import CutDict, CutList, CutText, TooDeep, parse, parse_cut, parse_several
from .known_documents import known
from .levels import ask_for_level, counts_of, level_style, tally
from .places import PLAIN, Place, places
from .shape import keys_of

_MOST: Final = 2_000  # values that follow one another
_WIDE: Final = 120  # columns that are described
_KEYS: Final = 400
_FEW_ROWS: Final = 20
_PLACES: Final = 3
_VALUE: Final = 60
_NEAR: Final = 2_000
_SAMPLED: Final = 40
_INNER: Final = 8
_TELLING_KEYS: Final = (
    "name", "title", "path", "message", "summary", "body", "text", "login", "key", "url", "status",
    "type", "id",
)  # fmt: skip
_TELLING: Final = frozenset({"type", "kind", "role", "level", "status", "state", "event", "error"})
_DULL: Final = lazy_pattern(r"(?:.{0,60}_)?(?:url|href|node_id|etag)", re.IGNORECASE)
_BEGINS: Final = lazy_pattern(
    r'\s{0,40}(?:\{\s{0,40}"[^"\n]{0,200}"\s{0,4}:|\[\s{0,40}\{\s{0,40}")'
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of JSON with what is in their columns. `inner` are columns of the objects inside."""

    columns: list[Column]
    inner: list[Column]
    total_columns: int

    def grouped(self) -> str:
        """The column whose values are worth counting; empty if there is none."""
        telling = [column for column in self.columns if column.is_telling]
        return min(telling, key=lambda column: column.distinct).name if telling else ""


def json_document(text: Excerpt) -> Draft:
    whole, scope = text.everything
    try:
        document = parse_cut(whole) if scope else parse(whole)
    except (TooDeep, RecursionError):
        return _ends(text, ", JSON nested too deep to outline")
    except ValueError:
        return _several_values(text, whole)
    if isinstance(document, str):
        if not text.is_whole:
            return _ends(text, "")
        return _ends(text._replace(head=document, lines=None, is_exact=True), " of a JSON string")
    return described(document, scope)


def _ends(text: Excerpt, note: str) -> Draft:
    return Draft("", written=partial(_cut_ends, text, note))


def _cut_ends(text: Excerpt, note: str, limit: int) -> Preview:
    return ends(text, min(limit, PROSE), note)


def described(document: object, scope: str = "", *, lead: str = "", note: str = "") -> Draft:
    """Describe a JSON value. `scope` says which part of the content it is from."""
    about = known(document)
    found = [] if about is not None and about.is_complete else places(document)
    sections: list[Section] = list(about.sections) if about else []
    is_table = bool(found) and found[0].pointer == "" and bool(found[0].keys)
    if isinstance(document, dict) and not is_table and not (about and about.is_complete):
        sections.append(_keys_section(document, has_more=bool(found)))
    for index, place in enumerate(found[:_PLACES]):
        sections += _place_sections(place, is_first=index == 0, is_only=len(found) == 1)
    first = found[0] if found else None
    ask, part = about.ask if about and about.ask else _ask(document, first)
    part_lead = f"{scope.removeprefix(', ')}: " if scope else ""
    title = about.title if about else _title(document, found)
    return Draft(
        f"{part_lead}{lead}{title}",
        tuple(sections),
        shown=note,
        scope=scope,
        ask=ask,
        part=part,
        program=_program(first),
    )


def _title(document: object, found: Sequence[Place]) -> str:
    if isinstance(document, dict):
        least = "≥" if isinstance(document, CutDict) else ""
        if found and found[0].pointer == "" and found[0].keys:
            return f"JSON object of {least}{len(document)} objects by key"
        return f"JSON object, {least}{some(len(document), 'key')}"
    if isinstance(document, list):
        least = "≥" if isinstance(document, CutList) else ""
        plain = (
            ""
            if any(isinstance(item, (dict, list)) for item in document[:1])
            else (f": {_listed(document)}")
        )
        return f"JSON array of {least}{some(len(document), 'item')}{plain}"
    return f"JSON: {json.dumps(document)[:_VALUE]}"


def _keys_section(document: dict[str, object], *, has_more: bool) -> Section:
    some_of = list(islice(document.items(), _KEYS))
    items = [_key_item(str(key), value) for key, value in some_of]
    largest = max(some_of, key=lambda item: _size(item[1]), default=("", None))[0]
    return Section(
        "",
        items,
        "keys",
        len(document),
        share=0.45 if has_more else 1.0,
        ranks=[0 if key == largest else _rank_of_name(str(key)) for key, _ in some_of],
    )


def _rank_of_name(name: str) -> int:
    """How soon a key or column is shown if there is no room for all: telling names first, addresses
    last."""
    if name.lower() in _TELLING:
        return 0
    return 2 if _DULL.fullmatch(name) else 1


def _key_item(key: str, value: object) -> tuple[str, ...]:
    """A key in ever more words: alone, with the type and size of its value, with its beginning."""
    name = masked_line(key, 40) or '""'
    if isinstance(value, dict):
        return _object_item(name, value)
    if isinstance(value, list):
        return _array_item(name, value)
    if not isinstance(value, str):
        return (name, f"{name} {json.dumps(value)[:_VALUE]}")
    shown = f'{name} "{safe(value, _VALUE, key)}"'
    if len(value) > _VALUE:
        least = "≥" if isinstance(value, CutText) else ""
        shown += f" ({least}{len(value)} characters)"
    return (name, shown)


def _object_item(name: str, value: dict[str, object]) -> tuple[str, ...]:
    if not value:
        return (name, f"{name} {{}}")
    least = "≥" if isinstance(value, CutDict) else ""
    listed = ", ".join(masked_line(str(inner), 24) for inner in islice(value, 4))
    more = f", +{len(value) - 4}" if len(value) > 4 else ""
    sized = f"{name} {{{least}{some(len(value), 'key')}}}"
    variants = [name, sized, f"{name} {{{least}{listed}{more}}}"]
    if len(value) <= _INNER:
        inside = [_key_item(str(inner), one)[1] for inner, one in value.items()]
        variants.append(f"{name} {{{least}{', '.join(inside)}}}")
    return tuple(variants)


def _array_item(name: str, value: list[object]) -> tuple[str, ...]:
    if not value:
        return (name, f"{name} []")
    least = "≥" if isinstance(value, CutList) else ""
    sized = f"{name} [{least}{len(value)}]"
    if isinstance(value[0], (dict, list)):
        return (name, sized)
    return (name, sized, f"{name} [{least}{len(value)}: {_listed(value)}]")


def _listed(values: Sequence[object]) -> str:
    """The first and the last of plain values."""
    near = json.dumps([*values[:3], values[-1]], default=str, ensure_ascii=False)[:_NEAR]
    first = [_plain(value, near) for value in values[:3]]
    last = [_plain(values[-1], near)] if len(values) > 3 else []
    gap = ["…"] if len(values) > 4 else []
    return ", ".join([*first, *gap, *last])


def _plain(value: object, near: str) -> str:
    if isinstance(value, str):
        return f'"{safe(value, 24, row=near)}"'
    if isinstance(value, float) and not math.isfinite(value):
        return "a number too large to read"
    return json.dumps(value, default=str)[:24]


def rows_of(rows: Sequence[dict[str, object]]) -> Rows:
    """What is in the columns of rows."""
    by_key = keys_of(rows)
    columns: list[Column] = []
    inner: list[Column] = []
    for key, values in islice(by_key.items(), _WIDE):
        row = partial(_row_with, rows, key) if key.lower() == "value" else no_row
        column = of_values(key, values, len(rows), row)
        columns.append(column)
        if column.type == "STRUCT" and len(inner) < _WIDE:
            objects = [value for value in values if isinstance(value, dict)]
            inner += _inner_columns(key, objects, len(rows))
    return Rows(columns, inner, len(by_key))


def _inner_columns(key: str, objects: list[dict[str, object]], total: int) -> list[Column]:
    """The columns of objects inside of rows whose values repeat: they group the rows."""
    found = []
    for name, values in islice(keys_of(objects).items(), 40):
        if not values or isinstance(values[0], (dict, list)):
            continue
        column = of_values(f"{key}.{name}", values, total, no_row)
        if 1 < column.distinct < len(values) and "|" in column.detail:
            found.append(column)
    return found


def _row_with(rows: Sequence[dict[str, object]], key: str, value: object) -> str:
    """The first row with a value: beside a name such as `DB_PASSWORD`, the value is a secret."""
    row = next((one for one in rows if one.get(key) == value), {})
    plain = {
        name: inner[:300] if isinstance(inner, str) else inner
        for name, inner in islice(row.items(), _WIDE)
        if not isinstance(inner, (dict, list))
    }
    return json.dumps(plain, default=str, ensure_ascii=False)


def _place_sections(place: Place, *, is_first: bool, is_only: bool) -> list[Section]:
    """The rows at a place and their columns."""
    rows = rows_of(place.rows)
    name = masked_line(place.path, 60)
    least = "≥" if place.is_cut else ""
    if place.keys:
        keys = ", ".join(masked_line(key, 24) for key in place.keys[:3])
        label = f"{name or 'it'}: {least}{len(place.keys)} objects by key ({keys}, …), each: "
    elif not place.path:
        label = "items: "
    else:
        of = f" in {place.arrays} arrays" if place.arrays > 1 else ""
        label = f"{name}: {least}{some(len(place.rows), 'object')}{of}: "
    share = 1.0 if is_only else 0.55 if is_first else 0.3
    columns = Section(
        label,
        [column.variants for column in rows.columns],
        "columns" if is_first else "",
        rows.total_columns,
        share=share,
        first=[index for index, column in enumerate(rows.columns) if column.is_telling],
        ranks=[_rank_of_name(column.name) for column in rows.columns],
    )
    if not rows.inner or not is_first:
        return [columns]
    inner = Section("inner fields: ", [column.variants[-1] for column in rows.inner], share=0.3)
    return [columns, inner]


# The first read


def _ask(document: object, place: Place | None) -> tuple[str, str]:
    """The first read of a document: its largest rows, else its largest value. With the path to the
    part that a statement in SQL reads."""
    if place is None:
        return _ask_for_largest(document), ""
    if place.pointer is None or place.keys:
        steps = place.path if all(map(_is_step, _steps(place.path))) else ""
        return (f'query="$.{steps}"' if steps and place.keys else 'query="shape"'), ""
    row = place.rows[0]
    keys = place.pointer.split("/")[1:]
    if not all(key.isdigit() or PLAIN.fullmatch(key) for key in keys):
        return 'query="shape"', ""
    path = "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in keys)
    name = _telling_key(row)
    flat = [key for key, value in row.items() if not isinstance(value, (dict, list))]
    flat.sort(key=_rank)
    is_large = len(place.rows) > _FEW_ROWS
    if name and "." not in name and flat and is_large:
        statement = sql(flat, rows_of(place.rows).grouped())
        if statement:
            return statement, place.pointer
    return f'query="${path}[*]{f".{name}" if name else ""}"', ""


def _steps(path: str) -> list[str]:
    return path.split(".") if path else []


def _is_step(step: str) -> bool:
    return PLAIN.fullmatch(step) is not None


def _ask_for_largest(document: object) -> str:
    if not isinstance(document, dict) or len(document) >= _KEYS:
        return 'query="shape"'
    plain = [key for key in document if PLAIN.fullmatch(key)]
    largest = max(plain, key=lambda key: _size(document[key]), default="")
    return f'query="$.{largest}"' if largest else 'query="shape"'


def _size(value: object, depth: int = 3) -> int:
    """About how much text a value is."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (dict, list)) or not depth:
        return 8
    inner = list(value.values()) if isinstance(value, dict) else value
    sampled = sum(_size(one, depth - 1) for one in inner[:_SAMPLED])
    return sampled * max(1, len(inner) // _SAMPLED)


def _rank(key: str) -> int:
    return _TELLING_KEYS.index(key) if key in _TELLING_KEYS else len(_TELLING_KEYS)


def _telling_key(row: Mapping[str, object]) -> str:
    """The key, or the path of two, whose value names a row; the first plain key otherwise."""
    plain = {key: value for key, value in row.items() if PLAIN.fullmatch(key)}
    for key in _TELLING_KEYS:
        if isinstance(plain.get(key), (str, int)):
            return key
    for outer, value in plain.items():
        if not isinstance(value, dict):
            continue
        for key in _TELLING_KEYS:
            if isinstance(value.get(key), (str, int)):
                return f"{outer}.{key}"
    return next(iter(plain), "")


def _program(place: Place | None) -> str:
    """A program that counts where SQL does not reach: in the objects that are the values of one
    object."""
    if place is None or not place.keys or place.pointer is None:
        return ""
    steps = place.pointer.split("/")[1:]
    if not all(map(PLAIN.fullmatch, steps)):
        return ""
    where = "data" + "".join(f"['{step}']" for step in steps)
    grouped = rows_of(place.rows).grouped()
    if PLAIN.fullmatch(grouped):
        return f"print(Counter(v.get('{grouped}') for v in {where}.values()).most_common(20))"
    return f"print(len({where}), list({where})[:100])"


# Several values, broken values


def json_lines(text: Excerpt) -> Draft:
    """Preview of JSON lines: all records, their columns, their levels if they are a log."""
    whole, scope = text.everything
    if scope:
        whole = whole[: whole.rfind("\n") + 1]
    records, broken = _records(whole)
    if not records:
        return _ends(text, ", not JSON lines")
    note = f"{some(broken, 'line')} not JSON" if broken else ""
    rows = [record for record in records if isinstance(record, dict)]
    counted = f"≥{len(records)} records" if scope else some(len(records), "record")
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    levels = _level_counts(text, records)
    lead = f"{part}{counted}, one JSON value per line" + (f" · {levels[0]}" if levels else "")
    if len(rows) * 2 < len(records):
        return Draft(lead, (), shown=note, scope=scope)
    place = Place("", "", rows)
    columns = rows_of(rows)
    sections = _place_sections(place, is_first=True, is_only=True)
    inner = [one for one in places(rows) if one.path][: _PLACES - 1]
    for one in inner:
        sections += _place_sections(one, is_first=False, is_only=False)
    first = next(iter(columns.columns)).name if columns.columns else ""
    names = [column.name for column in columns.columns if column.type not in ("STRUCT", "JSON")]
    statement = sql(sorted(names, key=_rank), columns.grouped()) if names else ""
    ask = levels[1] if levels else statement or (grep(first) if first else "")
    return Draft(lead, tuple(sections), shown=note, scope=scope, ask=ask)


def _records(whole: str) -> tuple[list[object], int]:
    """The records of JSON lines, and the number of lines that are not JSON."""
    lines = [each for each in whole.split("\n") if each and not each.isspace()]
    try:
        together = parse(f"[{','.join(lines)}]")
        if isinstance(together, list) and len(together) == len(lines):
            return together, 0
    except (ValueError, RecursionError):
        pass
    records: list[object] = []
    broken = 0
    for each in lines:
        try:
            records.append(parse(each))
        except (ValueError, RecursionError):
            broken += 1
    return records, broken


def _level_counts(text: Excerpt, records: Sequence[object]) -> tuple[str, str] | None:
    """The lines of each level of a log in JSON, and the read that shows the worst."""
    style = level_style(text.head.split("\n", 20)[:20])
    are_objects = all(isinstance(one, dict) for one in records[:20])
    if style is None or len(style.left) < 5 or not are_objects:
        return None
    body = text.body
    levels = tally(body, style)
    return (counts_of(levels, body.least), ask_for_level(levels)) if levels else None


def broken_json(text: Excerpt) -> Draft | None:
    """Preview of text that begins like JSON but is cut off or invalid: what can be read of it."""
    if _BEGINS.match(text.head) is None:
        return None
    whole, scope = text.everything
    several = _several_values(text, whole)
    if several.written is None:
        return several
    document: object = None
    for end in (len(whole), whole.rfind("}") + 1, len(whole) - 100, len(whole) // 2):
        try:
            document = parse_cut(whole[:end])
            break
        except (ValueError, RecursionError):
            continue
    if not isinstance(document, (dict, list)) or len(document) < 1:
        return None
    is_closed = whole.count("{") <= whole.count("}")
    what = "JSON, invalid: " if is_closed and not scope else "JSON, cut off or invalid: "
    found = described(document, scope, lead=what, note="what can be read")
    first = next(iter(places(document)), None)
    key = next(iter(document), "") if isinstance(document, dict) else ""
    if first is not None:
        key = _telling_key(first.rows[0]).rpartition(".")[2]
    return replace(found, ask=grep(f'"{key}"') if key else "", part="", program="")


def _several_values(text: Excerpt, whole: str) -> Draft:
    """Preview of several JSON values one after another, as programs print them."""
    not_json = _ends(text, ", not valid JSON" if text.is_whole else "")
    try:
        found = parse_several(whole, _MOST)
    except (ValueError, RecursionError):
        return not_json
    rows = [value for value in found if isinstance(value, dict)]
    if len(found) < 2 or len(rows) < len(found):
        return not_json
    is_all = len(found) < _MOST
    values = f"{len(found)} values"
    key = _telling_key(rows[0])
    return Draft(
        f"{'' if is_all else '≥'}{len(found)} JSON values, one after another",
        tuple(_place_sections(Place("", None, rows), is_first=True, is_only=True)),
        shown="" if is_all else f"the first {values}",
        ask=grep(f'"{key}"') if key and "." not in key else "",
    )
