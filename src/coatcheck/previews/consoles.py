"""What command-line tools print: aligned columns, listings of files, found lines, settings,
descriptions.

Each kind recognises its form from the first lines and then counts over the whole, so that a preview
names what can be asked for: the columns and the values of the most telling one, the folders, the
files with the most hits, the keys. Of very large content, only the beginning is counted, and the
preview says so before the first number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .excerpts import (
    Body,
    Excerpt,
    Kind,
    Preview,
    grep,
    line_pattern,
    masked_line,
    pack,
    some,
    uncoloured,
)

_READ: Final = 1 << 20  # bytes that are split into lines
_LISTED: Final = 200  # names that may be shown
_ENTRIES: Final = 100_000  # keys or sections that are counted
_PEEK: Final = 24
_FIRST_ROWS: Final = 'lines="1:40"'
_LEAD: Final = 12  # lines that may precede a table
_GAP: Final = lazy_pattern(r"\s{2,}|\t")
_HEADER: Final = lazy_pattern(r"[A-Z%#][A-Za-z0-9%#_()/.:'-]*(?: [A-Z(][A-Za-z0-9%_()/.-]*)?")
_RULE: Final = lazy_pattern(r"[-=+|─ ]{6,}")
_TELLING: Final = (
    "STATUS", "STATE", "PHASE", "READY", "TYPE", "REASON", "SEVERITY", "CONCLUSION", "USER",
    "NAMESPACE", "KIND",
)  # fmt: skip
_FINE: Final = frozenset(
    {
        "running",
        "active",
        "completed",
        "ready",
        "normal",
        "succeeded",
        "bound",
        "up",
        "ok",
        "true",
        "success",
        "<none>",
    }
)
_FULL: Final = lazy_pattern(r"([^/]+)/\1")  # 3/3
_FEW: Final = 12
_LONG: Final = 50
_PATH: Final = lazy_pattern(
    r"(?:\.{0,2}/|[A-Za-z]:\\)?[\w.@+~%=,\[\]() -]{1,120}(?:[/\\][\w.@+~%=,\[\]() -]{0,200}){0,40}"
)
_LOCATION: Final = lazy_pattern(
    r"(?:((?:[A-Za-z]:)?[^\s:()\"'<>|]{1,200}):\d{1,7}(?::\d{1,5})?(?=[:\s]|$)"
    r"|([^\s:()\"'<>|]{1,200})\(\d{1,7},\d{1,5}\):"
    r"|([^\s:()\"'<>|]{1,200}?\.\w{1,8})-\d{1,7}-)"
)
_NUMBERED: Final = lazy_pattern(r"[:(-]\d")
_SEVERITY: Final = lazy_pattern(r"\b(error|warning)\b", re.IGNORECASE)
_CODE: Final = lazy_pattern(
    r"\b(?:error|warning)\b:? +([A-Z]{1,5}\d{1,5})\b|\[([a-z][\w-]{2,40})\]\s*$"
    r"|: ([A-Z]{1,4}\d{3,4})\b"
)
_MODE: Final = lazy_pattern(r"[-dlbcps](?:[r-][w-][xsStT-]){3}")
_SIZE: Final = lazy_pattern(r"(\d{1,18}(?:[.,]\d{1,3})?)([KMGTPE])?")
_FOOTER: Final = lazy_pattern(
    r"\(\d{1,9} rows?\)|<[^<>]{1,200}>"
)  # of psql, and of hosts that add an exit code
_SETTING: Final = lazy_pattern(r"(?:export )?([A-Za-z_][A-Za-z0-9_.-]{0,80})=")
_SECTION: Final = line_pattern(r"^([A-Z][\w /-]{1,40}):(?:[ \t]|$)")
_KEY: Final = line_pattern(r"^([A-Za-z_][\w./-]{0,60}):(?: |$)")
_YAML: Final = lazy_pattern(r"\s*(?:- )*(?:[\w./\"'-]{1,80}:(?: |$)|- \S|---)")
_YAML_KINDS: Final = line_pattern(r"^(?:- |  )*kind: (\w{1,60})$")
_DOCUMENT: Final = line_pattern(r"^---(?:[ \t]|$)")
_COMMAND_END: Final = lazy_pattern(r"\d+ director(?:y|ies), \d+ files?\s*\Z")


def _read(text: Excerpt) -> Body:
    """The content, or the lines at its beginning if it is very large."""
    body = text.body
    if len(body.data) <= _READ and not body.least:
        return body
    start = body.data[:_READ]
    end = start.rfind(b"\n") + 1
    return Body(start[:end] if end else start, "≥")


def _part(text: Excerpt, body: Body) -> str:
    """What precedes figures and lists that are from a part of the content; empty if they are from
    all of it."""
    return f"{text.within(len(body.data))}: " if body.least else ""


def _scope(text: Excerpt, body: Body) -> str:
    """What follows the description of such a list."""
    return f", {text.within(len(body.data))}" if body.least else ""


def lines_of(body: Body) -> list[str]:
    """The lines of a text that was read."""
    found = body.data.decode("utf-8", "replace").split("\n")
    if found and not found[-1]:
        found.pop()
    return found


@lru_cache(maxsize=4)  # several kinds look at them
def _first_lines(head: str) -> list[str]:
    return [each for each in uncoloured(head[:8_192]).split("\n", _PEEK)[:_PEEK] if each.strip()]


# Aligned columns: kubectl get, docker ps, pip list, ps, df, dpkg -l, gh run list, systemctl


def _columns_in(row: str) -> list[str] | None:
    """The names of columns if a line is a header of aligned columns."""
    if not row[:1].isascii() or not ("  " in row or "\t" in row or row.upper() == row):
        return None
    cells = [cell for cell in _GAP.split(row.strip()) if cell]
    if row.upper() == row and not all(map(_HEADER.fullmatch, cells)):
        cells = row.split()
    is_header = (
        len(cells) > 1 and all(map(_HEADER.fullmatch, cells)) and len(set(cells)) == len(cells)
    )
    return cells if is_header and (row.upper() == row or len(cells) < 9) else None


@dataclass(frozen=True, slots=True)
class _Header:
    """The names of columns and the line that they are in, counted from 0. A ruled header is
    followed by a line of dashes."""

    at: int
    row: str
    names: list[str]
    is_ruled: bool


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows below a header, which is in line `number`, counted from 1."""

    number: int
    rows: list[str]


def columns(text: Excerpt, limit: int) -> Preview | None:
    """Preview of aligned columns: their names, the number of rows, and the values of the most
    telling column."""
    header = _header_in(uncoloured(text.head[:8_192]).split("\n", _LEAD + 3)[: _LEAD + 3])
    if header is None:
        return None
    body = _read(text)
    tables, other_lines = _tables_below(header, lines_of(body))
    rows = tables[0].rows
    if len(rows) < 3:
        return None
    cells = _cells_of(rows, header)
    values = {
        name: Counter(row[index] for row in cells if len(row) > index)
        for index, name in enumerate(header.names)
    }
    names = [masked_line(name, 30) for name in header.names]
    start = f"{_part(text, body)}{some(len(rows), 'row')} of "
    lead, named = pack(start, names, len(names), limit // 2)
    shown = "the columns" if named == len(names) else f"{named} of {len(names)} columns"
    after = _what_follows(tables[1:], other_lines, limit // 2)
    room = limit - len(after)
    telling = _telling(values, len(rows))
    if telling is None:
        first_cells = [row[0] for row in cells if row]  # a line of nothing but colours has none
        items = [masked_line(cell, 40) for cell in first_cells[:40]]
        shape, kept = pack(f"{lead}; first: ", items, len(rows), room)
        shown += f" and {kept} of {len(rows)} rows by name{_scope(text, body)}"
        has_name = bool(first_cells) and len(first_cells[0]) > 3
        return Preview(shape + after, shown, grep(first_cells[0]) if has_name else _FIRST_ROWS)
    counts = values[telling].most_common()
    items = [f"{masked_line(value, 40) or '(none)'} {times}" for value, times in counts[:40]]
    shape, kept = pack(f"{lead}; {telling}: ", items, len(counts), room)
    shown += f" and {kept} of {len(counts)} values of {masked_line(telling, 30)}"
    return Preview(
        shape + after, f"{shown}{_scope(text, body)}", grep(*_odd(counts)) or _FIRST_ROWS
    )


def _header_in(first: list[str]) -> _Header | None:
    """The first header of aligned columns, else the line above a rule, if a table can follow."""
    above_rule = _line_above_rule(first)
    at = above_rule
    for index, row in enumerate(first[:_LEAD]):
        if _columns_in(row) is not None:
            at = index
            break
    if at is None or at + 2 >= len(first):
        return None
    row = first[at]
    if at == above_rule:
        names = _GAP.split(row.lstrip("|/ ").rstrip())
        return _Header(at, row, names, is_ruled=True) if len(names) > 1 else None
    names = _columns_in(row) or []
    if row.upper() != row or len(names) < 3:
        return None
    return _Header(at, row, names, is_ruled=False)


def _line_above_rule(first: list[str]) -> int | None:
    for index, row in enumerate(first[1:_LEAD]):
        if _RULE.fullmatch(row.strip()):
            return index
    return None


def _tables_below(header: _Header, lines: list[str]) -> tuple[list[_Table], int]:
    """The table of the header and those after it, and the number of lines in none of them.

    A table ends at an empty line; the next one begins with a header of its own."""
    table = _Table(header.at + 1, [])
    tables = [table]
    is_over, other_lines = False, 0
    start = header.at + 1 + header.is_ruled
    for number, row in enumerate(lines[start:], start + 1):
        if row.upper() == row and _columns_in(row) is not None:
            table = _Table(number, [])
            tables.append(table)
            is_over = False
        elif not row.strip():
            is_over = bool(table.rows)
        elif is_over or _FOOTER.fullmatch(row.strip()):
            other_lines += 1
        else:
            table.rows.append(uncoloured(row))
    return tables, other_lines


def _cells_of(rows: list[str], header: _Header) -> list[list[str]]:
    """The cells of each row: cut below the names if four of five rows are aligned with them, else
    split at spaces."""
    starts = [header.row.find(name) for name in header.names]
    first = rows[:50]
    aligned = sum(_is_aligned(row, starts) for row in first)
    if aligned * 5 < len(first) * 4:
        return [row.split(None, len(starts) - 1) for row in rows]
    cells = []
    for row in rows:
        ends = [*starts[1:], len(row)]
        cells.append([row[start:end].strip() for start, end in zip(starts, ends, strict=True)])
    return cells


def _is_aligned(row: str, starts: list[int]) -> bool:
    """Whether there is a space before each column but the first."""
    return all(not row[start - 1 : start].strip() for start in starts[1:])


def _what_follows(tables: list[_Table], other_lines: int, limit: int) -> str:
    """The other tables and lines after the first table: `; then 4 service/ from line 12`."""
    parts = [
        f"{len(table.rows)} {_prefix(table.rows)}from line {table.number}"
        for table in tables
        if table.rows
    ]
    if other_lines:
        parts.append(some(other_lines, "other line"))
    return masked_line(f"; then {', '.join(parts)}", limit) if parts else ""


def bare_columns(text: Excerpt, limit: int) -> Preview | None:
    """Preview of aligned columns without a header: the values of the most telling one."""
    first = _first_lines(text.head)
    widths = Counter(len(_GAP.split(each.strip())) for each in first)
    width, times = widths.most_common(1)[0] if widths else (0, 0)
    if width < 3 or times < 5 or times * 10 < len(first) * 6:
        return None
    body = _read(text)
    lines = [each for each in lines_of(body) if each.strip()]
    rows = [row for each in lines if len(row := _GAP.split(each.strip())) == width]
    values = {str(index): Counter(row[index] for row in rows) for index in range(width)}
    few = min(_FEW, len(rows) // 3)
    several = [
        name
        for name, counts in values.items()
        if 1 < len(counts) <= few and not max(counts).isdigit()
    ]
    if not several:
        return None
    telling = min(several, key=lambda name: len(values[name]))
    counts = values[telling].most_common()
    items = [f"{masked_line(value, 40)} {count}" for value, count in counts]
    of = f" of {len(lines)} lines" if len(rows) < len(lines) else ""
    lead = f"{_part(text, body)}{some(len(rows), 'row')}{of} × {width} columns, no header"
    lead += f"; column {int(telling) + 1}: "
    shape, kept = pack(lead, items, len(counts), limit)
    example = (
        masked_line("; first: " + ", ".join(rows[0]), limit - len(shape))
        if limit - len(shape) > 40
        else ""
    )
    ask = grep(*_odd(counts)) or grep(counts[-1][0])
    return Preview(shape + example, f"{kept} of {len(counts)} values of one column", ask)


def _odd(counts: list[tuple[str, int]]) -> list[str]:
    """The values that an operator would look at: rare ones first, without those that mean that all
    is well."""
    usual = counts[0][0] if len(counts) > 1 else ""
    return [
        value
        for value, _ in reversed(counts)
        if len(value) > 2
        and value != usual
        and value.lower() not in _FINE
        and not _FULL.fullmatch(value)
    ][:4]


def _prefix(rows: list[str]) -> str:
    """What the names of all rows begin with: `service/ ` of `kubectl get all`."""
    first = {row.partition("/")[0] for row in rows}
    return f"{first.pop()}/ " if len(first) == 1 and "/" in rows[0].split(None, 1)[0] else ""


def _telling(values: dict[str, Counter[str]], rows: int) -> str | None:
    """The column whose values say most: one with a telling name, else the one with the fewest, but
    two or more."""
    several = {
        name: len(counts)
        for name, counts in values.items()
        if 1 < len(counts) <= min(_FEW, rows // 2)
    }
    named = [name for name in _TELLING if name in several]
    named += [name for name in _TELLING if name in values and len(values[name]) == 1][:1]
    return named[0] if named else min(several, key=lambda name: several[name], default=None)


# Listings of files


def listing(text: Excerpt, limit: int) -> Preview | None:
    """Preview of `ls -l`: the number of files and folders, and the largest."""
    first = _first_lines(text.head)
    if sum(bool(_MODE.match(each)) for each in first) * 2 < len(first) or len(first) < 3:
        return None
    body = _read(text)
    files: list[ListedFile] = []
    folders = sections = 0
    folder = ""
    for each in lines_of(body):
        if each.endswith(":") and not _MODE.match(each):
            folder, sections = each[:-1], sections + 1
        elif _MODE.match(each):
            parts = each.split(None, 8)
            if len(parts) < 9 or parts[8] in (".", ".."):
                continue
            folders += each[0] == "d"
            if each[0] != "d":
                files.append(ListedFile(f"{folder}/{parts[8]}" if folder else parts[8], parts[4]))
    where = f" in {some(sections, 'folder')}" if sections else f", {some(folders, 'folder')}"
    largest = sorted(
        (one for one in files if one.size is not None),
        key=lambda one: (one.size, one.name),
        reverse=True,
    )
    lead = f"{_part(text, body)}listing of {some(len(files), 'file')}{where}; largest: "
    shape, kept = pack(
        lead,
        [f"{masked_line(one.name, 70)} {one.written}" for one in largest[:40]],
        len(files),
        limit,
    )
    shown = f"{kept} of {len(files)} files{_scope(text, body)}"
    return Preview(shape, shown, 'grep=":$"' if sections > 1 else 'lines="1:60"')


class ListedFile(NamedTuple):
    """One file of a listing, with its size as written: `4096`, or `4.0K` with `ls -h`."""

    name: str
    written: str

    @property
    def size(self) -> float | None:
        """The size in bytes, approximately; None if it is not one, as for a device."""
        match = _SIZE.fullmatch(self.written)
        if match is None:
            return None
        unit = 1_024.0 ** " KMGTPE".index(match[2] or " ")
        return float(match[1].replace(",", ".")) * unit


def _is_path(row: str) -> bool:
    is_rooted = row.startswith(("/", "./", "../")) or row[1:3] == ":\\"
    return (
        ("/" in row or "\\" in row)
        and (is_rooted or " " not in row)
        and _PATH.fullmatch(row) is not None
    )


def paths(text: Excerpt, limit: int) -> Preview | None:
    """Preview of a list of paths: how many are in each folder, and their suffixes."""
    first = _first_lines(text.head)
    if len(first) < 5 or sum(map(_is_path, first)) * 5 < len(first) * 4:
        return None
    body = _read(text)
    lines = lines_of(body)
    found = [each for each in lines if each and ("/" in each or "\\" in each or " " not in each)]
    if len(found) * 5 < len(lines) * 4:
        return None
    shared = commonprefix([min(found), max(found)])  # noqa: RUF071 - of characters, cut at a folder
    shared = shared[: shared.rfind("/") + 1]
    folders: Counter[str] = Counter()
    suffixes: Counter[str] = Counter()
    for each in found:
        rest = each.removeprefix(shared)
        folders[f"{rest.partition('/')[0]}/" if "/" in rest else "(files)"] += 1
        name = rest.rpartition("/")[2]
        if "." in name[1:] and len(suffix := name.rpartition(".")[2]) < 8 and suffix.isalnum():
            suffixes[f".{suffix}"] += 1
    lead = (
        f"{_part(text, body)}{some(len(found), 'path')}"
        f"{f' in {masked_line(shared, 60)}' if shared else ''}: "
    )
    common = suffixes.most_common(5)
    more = f", +{len(suffixes) - len(common)} more" if len(suffixes) > len(common) else ""
    kinds = (
        f"; {', '.join(f'{suffix} {times}' for suffix, times in common)}{more}" if common else ""
    )
    items = [f"{masked_line(name, 40)} {times}" for name, times in folders.most_common(40)]
    shape, kept = pack(lead, items, len(folders), limit - len(kinds))
    largest = [name for name, _ in folders.most_common(2) if name != "(files)"]
    ask = f'grep="[.]{common[0][0][1:]}$"' if common else grep(*largest[:1]) or 'lines="1:60"'
    return Preview(
        shape + kinds,
        f"{kept} of {some(len(folders), 'folder')} with the number of paths{_scope(text, body)}",
        ask,
    )


def drawn_tree(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the output of `tree`: the upper level, and the totals."""
    if text.head[:4_096].count("── ") * 2 < min(text.head[:4_096].count("\n"), 20):
        return None
    body = _read(text)
    top = [each[4:] for each in lines_of(body) if each[:1] in ("├", "└")]
    total = _COMMAND_END.search((text.tail or text.head)[-200:])
    lead = f"tree, {total[0].strip() if total else text.extent}"
    lead += f"; {_part(text, body)}" if body.least else ": "
    shape, kept = pack(lead, [masked_line(name, 40) for name in top[:_LISTED]], len(top), limit)
    return Preview(
        shape,
        f"{kept} of {some(len(top), 'name')} of the upper level{_scope(text, body)}",
        'grep="^[├└]"',
    )


# Lines with a file and a number: grep, rg, compilers, linters


def _file_of(row: str) -> str:
    """The file that a line begins with, followed by a number; empty if there is none. Times and
    addresses are not files."""
    match = _LOCATION.match(row)
    name = next(one for one in match.groups() if one) if match else ""
    is_file = (
        ("." in name or "/" in name)
        and any(map(str.isalpha, name))
        and not name.startswith(("http", "["))
    )
    return name if is_file else ""


class _Located(NamedTuple):
    """How many lines name each file, each code of an error, and each severity."""

    files: Counter[str]
    codes: Counter[str]
    severities: Counter[str]


def locations(text: Excerpt, limit: int) -> Preview | None:
    """Preview of lines that begin with a file and a line number: the files with the most, and
    errors by code."""
    first = _first_lines(text.head)
    if not any(_NUMBERED.search(each) for each in first[:8]):
        return None
    hits = sum(bool(_file_of(each)) for each in first)
    if len(first) < 4 or hits * 2 < len(first):
        return None
    body = _read(text)
    located = _located(lines_of(body))
    files, total = located.files, located.files.total()
    shared = commonprefix(list(files)) if len(files) > 1 else ""  # noqa: RUF071 - of characters, cut at a folder
    folder = shared[: shared.rfind("/") + 1]
    if not folder and any(len(name) > _LONG for name in files):
        files = _short_names(_merged(files))
    where = some(len(files), "file") + (f" in {masked_line(folder, 60)}" if folder else "")
    findings = located.severities.total() + located.codes.total()
    if findings > total // 2:
        counted, ask = _findings(located, where)
    else:
        counted, ask = f"{some(total, 'line')} from {where}", ""
    items = [
        f"{masked_line(name.removeprefix(folder), 70)} {times}"
        for name, times in files.most_common(60)
    ]
    shape, kept = pack(f"{_part(text, body)}{counted}: ", items, len(files), limit)
    shown = f"{kept} of {some(len(files), 'file')} with the number of lines{_scope(text, body)}"
    most_named = files.most_common(1)[0][0].removeprefix(folder)
    return Preview(shape, shown, ask or grep(most_named[-60:]))


def _located(lines: list[str]) -> _Located:
    """Count the lines that begin with a file."""
    found = _Located(Counter(), Counter(), Counter())
    for each in lines:
        name = _file_of(each)
        if not name:
            continue
        found.files[name] += 1
        severity = _SEVERITY.search(each, len(name), len(name) + 40)
        if severity is not None:
            found.severities[severity[1].lower()] += 1
        code = _CODE.search(each, len(name))
        if code is not None:
            found.codes[next(one for one in code.groups() if one)] += 1
    return found


def _findings(located: _Located, where: str) -> tuple[str, str]:
    """The errors and warnings by severity and code, and the read that shows the most important."""
    codes, severities = located.codes, located.severities
    parts = [some(severities[name], name) for name in ("error", "warning") if severities[name]]
    counted = f"{', '.join(parts) or some(located.files.total(), 'finding')} in {where}"
    common = codes.most_common(4)
    if common:
        counted += "; " + ", ".join(f"{code} ×{times}" for code, times in common)
    if len(codes) > len(common):
        counted += f", +{len(codes) - len(common)} more"
    if severities["error"] and severities["warning"]:
        return counted, grep(" error")
    return counted, grep(common[0][0]) if common else ""


def _merged(files: Counter[str]) -> Counter[str]:
    """Count the files together that are named with and without the folder that they are in."""
    found: Counter[str] = Counter()
    ends: dict[str, str] = {}  # a name without its folder, and the longest name that ends with it
    for name in sorted(files, key=len, reverse=True):
        full = ends.get(name, name)
        found[full] += files[name]
        rest = name
        while full == name and "/" in rest:
            rest = rest.partition("/")[2]
            ends.setdefault(rest, name)
    return found


def _short_names(files: Counter[str]) -> Counter[str]:
    """Name files by their last two parts, if these are different for all of them."""
    short = Counter({"/".join(name.rsplit("/", 2)[-2:]): times for name, times in files.items()})
    return short if len(short) == len(files) else files


# Settings, descriptions and YAML


def settings(text: Excerpt, limit: int) -> Preview | None:
    """Preview of lines `NAME=value`: the names."""
    first = _first_lines(text.head)
    if len(first) < 5 or sum(bool(_SETTING.match(each)) for each in first) * 10 < len(first) * 9:
        return None
    body = _read(text)
    names = [match[1] for each in lines_of(body) if (match := _SETTING.match(each))]
    items = [masked_line(name, 40) for name in names[:_LISTED]]
    shape, kept = pack(
        f"{_part(text, body)}{some(len(names), 'setting')}: ", items, len(names), limit
    )
    return Preview(
        shape, f"{kept} of {len(names)} names{_scope(text, body)}", grep(f"{names[0]}=", start="^")
    )


def _outlined(body: Body, pattern: QuickPattern) -> Iterator[tuple[str, int]]:
    """The names that a pattern finds, with their lines."""
    number, at = 1, 0
    for match in pattern.found(body.data, _ENTRIES):
        number += body.data.count(b"\n", at, match.start())
        at = match.start()
        yield match[1].decode("utf-8", "replace"), number


def described(text: Excerpt, limit: int) -> Preview | None:
    """Preview of `kubectl describe` and the like: the sections with their lines, and the
    warnings."""
    if re.search(r"^Name:[ \t]{2,}\S", text.head, re.MULTILINE) is None:
        return None
    body = _read(text)
    sections = list(_outlined(body, _SECTION))
    if len(sections) < 4:
        return None
    objects = sum(name == "Name" for name, _ in sections)
    name = re.search(r"^Name:[ \t]+(\S[^\n]{0,80})", text.head, re.MULTILINE)
    warnings = body.data.count(b"  Warning ")
    more = f" and {objects - 1} more" if objects > 1 else ""
    lead = f"{_part(text, body)}description of {masked_line(name[1], 60) if name else ''}{more}"
    lead += f", {some(warnings, 'warning event')}; sections: " if warnings else "; sections: "
    others = [(title, number) for title, number in sections if title != "Name"]
    items = [f"{masked_line(title, 30)}:{number}" for title, number in others[:_LISTED]]
    shape, kept = pack(lead, items, len(others), limit)
    events = [number for title, number in sections if title == "Events"]
    ask = (
        f'lines="{events[-1]}:{events[-1] + 60}"' if events else grep("Conditions:|State:|Reason:")
    )
    ask = grep("  Warning ") if warnings and objects > 1 else ask
    return Preview(
        shape, f"{kept} of {len(others)} sections with their lines{_scope(text, body)}", ask
    )


def yaml(text: Excerpt, limit: int) -> Preview | None:
    """Preview of YAML: the upper keys with their lines, and the kinds of Kubernetes objects."""
    start = text.head[:4_096]
    if ":" not in start and "-" not in start:
        return None
    first = [
        each
        for each in start.split("\n", 40)[:40]
        if each.strip() and not each.lstrip().startswith("#")
    ]
    if len(first) < 5:
        return None
    formed = sum(bool(_YAML.match(each)) for each in first)
    nested = sum(each.startswith((" ", "- ")) for each in first)
    if formed * 10 < len(first) * 8 or not nested:
        return None
    body = _read(text)
    keys = list(_outlined(body, _KEY))
    if _repeats(body, keys):
        return _records(text, body, keys, limit)
    found = _YAML_KINDS.found(body.data, _ENTRIES)
    kinds = Counter(match[1].decode() for match in found if match[1] not in (b"List",))
    items = [f"{masked_line(name, 40)}:{number}" for name, number in keys[:_LISTED]]
    common = kinds.most_common(8)
    objects = ", ".join(f"{kind} ×{times}" if times > 1 else kind for kind, times in common)
    objects += f", +{len(kinds) - len(common)} more" if len(kinds) > len(common) else ""
    lead = (
        f"YAML, {text.extent}; "
        f"{_part(text, body)}{f'objects: {objects}; ' if objects else ''}keys: "
    )
    shape, kept = pack(masked_line(lead, limit - 20) + " ", items, len(keys), limit)
    ask = (
        'grep="^(- |  )*kind:|^ {2,4}name:"'
        if kinds
        else grep(*(name for name, _ in keys[:3]), start="^")
    )
    shown = f"{kept} of {some(len(keys), 'upper key')} with their lines{_scope(text, body)}"
    return Preview(shape, shown, ask) if items else None


def _repeats(body: Body, keys: list[tuple[str, int]]) -> bool:
    """Whether upper keys repeat without a line `---` between them, which YAML does not allow."""
    documents = len(_DOCUMENT.found(body.data, _ENTRIES)) + 1
    return bool(keys) and max(Counter(name for name, _ in keys).values()) > documents


def _records(text: Excerpt, body: Body, keys: list[tuple[str, int]], limit: int) -> Preview:
    """Preview of records of lines `Key: value`, such as Debian's package lists: their number and
    keys."""
    times = Counter(name for name, _ in keys)
    first = keys[0][0]
    items = [
        masked_line(name, 40) + ("" if times[name] == times[first] else f" ×{times[name]}")
        for name in times
    ]
    lead = f"{_part(text, body)}{some(times[first], 'record')} of lines “key: value”"
    lead += f", each from {masked_line(first, 40)} on: "
    shape, kept = pack(lead, items[:_LISTED], len(items), limit)
    return Preview(
        shape,
        f"{kept} of {some(len(items), 'key')}{_scope(text, body)}",
        grep(f"{first}:", start="^"),
    )


KINDS: Final = (
    Kind("aligned columns", (), columns, 130),
    Kind("file listing", ("rwx", "r--"), listing),
    Kind("tree", ("── ",), drawn_tree),
    Kind("description", ("Name:  ",), described, 130),
    Kind("paths", (), paths),
    Kind("settings", ("=",), settings),
    Kind("columns without a header", ("  ",), bare_columns),
)
