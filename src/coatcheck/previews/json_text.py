"""JSON and JSON lines: the shape of what parses, head and tail of what does not.

JSON that was cut is parsed as far as it goes. The containers and the string around the cut become
`Cut…` types.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Final, cast

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import is_suspect, mask
from coatcheck.values import find_largest, read_repr

from .excerpts import Excerpt, Preview, about, ends, grep, line, masked_line, pack, some, sql
from .listings import ask_for_level, counts_of, level_style, tally
from .shape import SEEN, TELLING, CutDict, CutList, CutText, ShapeNode, describe, keys_of

DEEPEST: Final = 200
"""Deeper nesting is not parsed, so that a preview never depends on how deep the caller's stack
is."""

_MOST: Final = 2_000
_KEYS: Final = 200
_SAMPLE: Final = 60  # rows whose values are compared
_FEW_ROWS: Final = 20
_NAMING: Final = frozenset({str, bool, CutText})
_PARSED: Final = 256 << 10  # bytes of a document that is parsed as a whole
_PLAIN: Final = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,40}", re.ASCII)
_TELLING_KEYS: Final = (
    "name", "title", "path", "message", "summary", "body", "text", "login", "key", "url", "status",
    "type", "id",
)  # fmt: skip
_BEGINS: Final = lazy_pattern(
    r'\s{0,40}(?:\{\s{0,40}"[^"\n]{0,200}"\s{0,4}:|\[\s{0,40}\{\s{0,40}")'
)
_STRINGS: Final = lazy_pattern(rb"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"()[]{}"))
_REPR_READ: Final = 512 << 10
_REPR: Final = lazy_pattern(r"(?:^|[\n:=] ?)([\[(][\[({](?=['\"\d({\[N]|[a-zA-Z_]+\())")
_ESCAPES: Final = 13  # one more than the length of two escapes
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING: Final = str.maketrans("[{", "]}")
_SPACE: Final = lazy_pattern(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder(
    parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits)
)


class TooDeep(ValueError):
    """Nested deeper than `DEEPEST`."""


def json_document(text: Excerpt, limit: int) -> Preview:
    text = _with_whole(text)
    try:
        document = parse(text.head) if text.is_whole else parse_cut(text.head)
    except (TooDeep, RecursionError):
        return ends(text, limit, ", JSON nested too deep to outline")
    except ValueError:
        return _several_values(text, limit)
    if isinstance(document, str):
        inner = text._replace(head=document, lines=None, is_exact=True)
        return ends(inner, limit, " of a JSON string") if text.is_whole else ends(text, limit)
    if isinstance(document, dict) and "cells" in document and "nbformat" in document:
        return _notebook(text, document, limit)
    path, items = find_largest(document)
    shape, root = describe([document], limit)
    is_inside_row = isinstance(document, list) and bool(
        path
    )  # the rows of other rows would be counted too
    if isinstance(items, CutList) and not is_inside_row:
        shape = _counted(text, items, shape)
    ask, part = _ask(document, path, items)
    return Preview(shape, _shown(text, document, root) + text.scope, ask, part)


def _with_whole(text: Excerpt) -> Excerpt:
    """Return an excerpt with the whole text as its head, masked, if that is not too large to be
    parsed."""
    body = None if text.is_whole or text.size > _PARSED else text.body
    if body is None or body.least:
        return text
    head = body.data.decode("utf-8", "replace").removeprefix("\ufeff")
    if is_suspect(head):
        head = mask(head)
    return text._replace(head=head, tail="", is_whole=True, seen=text.size)


def broken_json(text: Excerpt, limit: int) -> Preview | None:
    """Preview of text that begins like JSON but is cut off or invalid: the shape of what can be
    read."""
    if _BEGINS.match(text.head) is None:
        return None
    text = _with_whole(text)
    document: object = None
    for end in (
        len(text.head),
        text.head.rfind("}") + 1,
        len(text.head) - 100,
        len(text.head) // 2,
    ):
        try:
            document = parse_cut(text.head[:end])
            break
        except (ValueError, RecursionError):
            continue
    if not isinstance(document, (dict, list)) or len(document) < 1:
        return None
    what = (
        "invalid"
        if text.is_whole and text.head.count("{") <= text.head.count("}")
        else "cut off or invalid"
    )
    shape, root = describe([document], limit - 20)
    row = next(iter(find_largest(document)[1]), None)
    key = next(iter(document), "") if isinstance(document, dict) else ""
    key = _telling_key(row).rpartition(".")[2] if isinstance(row, dict) else key
    ask = grep(f'"{key}"') if key else ""
    return Preview(
        f"JSON, {what}: {shape}",
        f"{_shown(text, document, root)} that can be read{text.scope}",
        ask,
    )


def _counted(text: Excerpt, items: list[object], shape: str) -> str:
    """Replace the number of rows seen with the number in the whole, counted by the first key of a
    row, if that tells rows apart. What they are is still that of the rows seen."""
    seen = f"[≥{len(items)}, {SEEN}"
    body = text.body
    if seen not in shape or body.least:
        return shape
    rows = [row for row in items if isinstance(row, dict) and row]
    first = next(iter(rows[0]), "") if len(rows) >= _FEW_ROWS // 2 else ""
    begin = (
        re.search(r"\{\s{0,40}" + re.escape(json.dumps(first)) + r"\s{0,4}:", text.head)
        if first
        else None
    )
    if (
        begin is None
        or not 0 <= text.head.count(begin[0]) - len(rows) <= 1
        or len(rows) < len(items) - 1
    ):
        return shape
    total, is_exact = body.occurrences(begin[0].encode())
    number = f"~{total}" if is_exact else about(total)
    return shape.replace(seen, f"[{number}, the first {len(items)}:", 1)


def _ask(document: object, keys: Sequence[str], items: list[object]) -> tuple[str, str]:
    """The first read of a document with its largest array, and the path to that array if the read
    is SQL on it."""
    if not items:
        plain = (
            [key for key in document if _PLAIN.fullmatch(key)] if isinstance(document, dict) else []
        )
        largest = max(plain, key=lambda key: len(str(document[key])), default="")  # type: ignore[index]
        return (f'query="$.{largest}"' if largest and len(plain) < _KEYS else 'query="shape"'), ""
    if not all(key.isdigit() or _PLAIN.fullmatch(key) for key in keys):
        return 'query="shape"', ""
    rows = [row for row in items[:_SAMPLE] if isinstance(row, dict)]
    path = "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in keys)
    if not rows:
        return f'query="${path}[:20]"', ""
    name = _telling_key(rows[0])
    if name and "." in name:  # what names a row is inside an object
        return f'query="${path}[*].{name}"', ""
    flat = [key for key, value in rows[0].items() if not isinstance(value, (dict, list))]
    flat.sort(
        key=lambda key: _TELLING_KEYS.index(key) if key in _TELLING_KEYS else len(_TELLING_KEYS)
    )
    is_large = len(items) > _FEW_ROWS
    grouped = (
        telling_column({key: list(map(methodcaller("get", key), rows)) for key in flat})
        if is_large
        else ""
    )
    ask = sql(flat, grouped) if flat and is_large else ""
    if ask:
        return ask, "".join(f"/{key}" for key in keys)
    return f'query="${path}[*]{f".{name}" if name else ""}"', ""


def telling_column(columns: Mapping[str, Sequence[object]]) -> str:
    """The column with few values, but two or more, all short: one with a telling name first. Empty
    if there is none."""

    def few(key: str) -> bool:
        values = columns[key]
        kinds = set(map(type, values))
        if kinds.isdisjoint(_NAMING):
            return False
        distinct = (
            set(values)
            if kinds <= _NAMING
            else {value for value in values if type(value) in _NAMING}
        )
        most = min(12, len(values) // 3)
        return 1 < len(distinct) <= most and all(len(str(value)) <= 40 for value in distinct)

    found = [key for key in columns if few(key)]
    named = [key for key in found if key.lower() in TELLING]
    return min(
        named or found, key=lambda key: len({str(value) for value in columns[key]}), default=""
    )


def _telling_key(row: Mapping[str, object]) -> str:
    """The key, or the path of two, whose value names a row; the first plain key otherwise."""
    plain = {key: value for key, value in row.items() if _PLAIN.fullmatch(key)}
    for key in _TELLING_KEYS:
        if isinstance(plain.get(key), (str, int)):
            return key
    for outer, value in plain.items():
        if isinstance(value, dict):
            for key in _TELLING_KEYS:
                if isinstance(value.get(key), (str, int)):
                    return f"{outer}.{key}"
    return next(iter(plain), "")


def _notebook(text: Excerpt, document: Mapping[str, object], limit: int) -> Preview:
    """Preview of a Jupyter notebook: its cells by type, its headings and errors."""
    cells = [cell for cell in cast("list[object]", document["cells"]) if isinstance(cell, dict)]
    types = Counter(str(cell.get("cell_type")) for cell in cells)
    least = "" if text.is_whole else "≥"
    sources = [
        source if isinstance(source := cell.get("source"), list) else [source or ""]
        for cell in cells
    ]
    lines = [each for source in sources for each in "".join(map(str, source)).split("\n")]
    titles = [
        each.lstrip("# ") for each in lines if each.startswith("#") and each.lstrip("#")[:1] == " "
    ]
    outputs = [one for cell in cells for one in cell.get("outputs") or () if isinstance(one, dict)]
    errors = [str(one.get("ename")) for one in outputs if one.get("output_type") == "error"]
    lead = (
        "notebook of "
        f"{', '.join(f'{least}{times} {name}' for name, times in types.most_common())} cells"
    )
    more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
    lead += f"; errors: {', '.join(errors[:3])}{more}" if errors else ""
    items = [line(title, 50) for title in titles]
    of = "; headings" if text.is_whole else f"; headings in the first {text.seen} bytes"
    shape, kept = (
        pack(f"{line(lead, limit * 2 // 3)}{of}: ", items, len(items), limit)
        if items
        else (lead, 0)
    )
    return Preview(
        shape,
        f"cells by type and {kept} of {len(items)} headings{text.scope}",
        'query="$.cells[*].source"',
    )


def python_rows(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the repr of Python rows: the number of rows and columns, and the first row. A lead
    stays."""
    match = _REPR.search(text.head, 0, 2_000)
    if match is None:
        return None
    lead, source = text.head[: match.start(1)], text.head[match.start(1) :]
    rows: list[object] = []
    for cut in _cuts(source, is_whole=text.is_whole):
        try:
            value, _ = read_repr(cut)
        except (ValueError, RecursionError):
            continue
        rows = value if isinstance(value, list) else [value]
        break
    if not rows:
        return None
    total = str(len(rows)) if text.is_whole else _number_of_rows(text, lead)
    before = f"{masked_line(lead, 60)} " if lead.strip() else ""
    if all(isinstance(row, dict) for row in rows):
        is_all = str(len(rows)) == total
        lead = f"{before}{total} rows (Python repr)" + (
            " × " if is_all else f", the first {len(rows)}: "
        )
        shape, root = describe(rows, limit - len(lead))
        keys = [str(key) for key in cast("dict[object, object]", rows[0])]
        of = text.all_of(f"{total} rows") if is_all else f"the first {len(rows)} of {total} rows"
        return Preview(lead + shape, f"shape of {of}{_keys(root)}", sql(keys) or grep(keys[0]))
    first = rows[0] if isinstance(rows[0], (tuple, list)) else (rows[0],)
    named = f"c1-c{len(first)}" if len(first) > 1 else "c1" if first is rows[0] else "value"
    size = f"{total} row{'' if total == '1' else 's'} × {some(len(first), 'column')}"
    head = f"{before}{size} {named} (Python repr); first: "
    cells = [masked_line(str(cell), 30) or "''" for cell in first]
    shape, kept = pack(head, cells, len(cells), limit)
    values = [cell for cell in first if isinstance(cell, str) and 3 < len(cell) < 40]
    ask = sql((), rows=20 if len(first) < 6 else 2) or grep(*values[:1])
    return Preview(shape, f"{kept} of {len(cells)} columns of the first row{text.scope}", ask)


def _number_of_rows(text: Excerpt, lead: str) -> str:
    """The number of members of the outer list. Brackets in strings do not count."""
    data = text.body.data[len(lead.encode()) : _REPR_READ]
    outside = _STRINGS.sub(b"", data).translate(None, _NOT_BRACKETS)
    depth = rows = 0
    for bracket in outside:
        if bracket in b"([{":
            depth += 1
            rows += depth == 2
        else:
            depth -= 1
            if not depth:
                return str(rows)
    return f"≥{rows}"


def _cuts(source: str, *, is_whole: bool) -> Iterator[str]:
    """Texts to try: the whole, then up to the last complete rows."""
    source = source.rstrip()
    if is_whole:
        yield source
    close = "]" if source[0] == "[" else ")"
    end = len(source)
    for _ in range(12):
        end = max(
            source.rfind("), (", 0, end), source.rfind("}, {", 0, end), source.rfind("], [", 0, end)
        )
        if end < 0:
            return
        yield source[: end + 1] + close


def json_lines(text: Excerpt, limit: int) -> Preview:
    text = _with_whole(text)
    lines = text.head.split("\n")
    partial = "" if text.is_whole else lines.pop()
    lines = [each for each in lines if each and not each.isspace()]
    records: list[object] = []
    broken = 0
    for each in lines[:_MOST]:
        try:
            records.append(parse(each))
        except (ValueError, RecursionError):
            broken += 1
    if not records:
        try:
            records = [parse_cut(partial)] if not broken else []
        except (ValueError, RecursionError):
            pass
    if not records:
        return ends(text, limit, ", not JSON lines")
    is_all = text.is_whole and len(lines) <= _MOST
    total = f"{len(records)} records"
    if not is_all:
        total = f"at least {total}" if text.lines is None else some(text.lines, "line")
    seen = f"the first {some(len(records), 'record')}"
    lead, of, shown = f"{total} · ", f"{seen}: ", f"{seen} of {total}"
    if is_all and len(records) == 1:
        lead, of = "", ""
        shown = "the only record that arrived" if text.is_part else "the only record"
    elif is_all:
        lead, of, shown = f"{total} × ", "", text.all_of(total)
    shape, root = describe(records, limit - len(lead + of))
    note = f"; {'' if is_all else 'at least '}{some(broken, 'line')} not JSON" if broken else ""
    levels = _level_counts(text, records)
    if levels is not None and limit - len(lead + of + shape) > 30:
        counts, ask = levels
        lead += f"{counts} · " if len(lead + counts + of + shape) + 3 <= limit else ""
    else:
        flat = keys_of(records)
        grouped = telling_column(
            {key: values for key, values in flat.items() if len(values) == len(records)}
        )
        ask = sql(flat, grouped) or (grep(next(iter(flat))) if flat else "")
    return Preview(lead + of + shape, f"shape of {shown}{_keys(root)}{note}", ask)


def _level_counts(text: Excerpt, records: list[object]) -> tuple[str, str] | None:
    """The lines of each level of a log in JSON, and the read that shows the worst."""
    style = level_style(text.head.split("\n", 20)[:20])
    if (
        style is None
        or len(style.left) < 5
        or not all(isinstance(one, dict) for one in records[:20])
    ):
        return None
    levels = tally(text.body, style, text.head[:8_192].encode("utf-8", "replace"))
    return (counts_of(levels, text.body.least), ask_for_level(levels)) if levels else None


def _several_values(text: Excerpt, limit: int) -> Preview:
    """Preview of several JSON values one after another, as programs print them. `parse` has checked
    their depth."""
    found: list[object] = []
    at = _SPACE.match(text.head).end()  # type: ignore[union-attr]
    try:
        while text.is_whole and at < len(text.head) and len(found) < _MOST:
            value, at = _DECODER.raw_decode(text.head, at)
            found.append(value)
            at = _SPACE.match(text.head, at).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        found = []
    if len(found) > 1:
        is_all = len(found) < _MOST
        lead = f"{'' if is_all else 'at least '}{len(found)} JSON values × "
        shape, root = describe(found, limit - len(lead))
        if len(lead + shape) <= limit:
            keys = list(keys_of(found))
            values = f"{len(found)} values"
            shown = (
                f"shape of {text.all_of(values) if is_all else f'the first {values}'}{_keys(root)}"
            )
            return Preview(
                lead + shape,
                shown,
                grep(f'"{_telling_key(dict.fromkeys(keys, ""))}"') if keys else "",
            )
    return ends(text, limit, ", not valid JSON" if text.is_whole else "")


def _shown(text: Excerpt, document: object, root: ShapeNode) -> str:
    if isinstance(document, dict) and root.children:
        least = "at least " if isinstance(document, CutDict) else ""
        count = len(root.children)
        if count == len(document):
            keys = some(count, "key")
            return f"shape: {f'the first {keys}' if least else text.all_of(keys)}"
        return f"shape: {count} of {least}{len(document)} keys"
    if isinstance(document, list) and document:
        items = some(len(document), "item")
        of = f"the first {items}" if isinstance(document, CutList) else text.all_of(items)
        return f"shape of {of}{_keys(root)}"
    return "its type"


def _keys(root: ShapeNode) -> str:
    """Number of keys of a row that are listed, if some are missing."""
    node = root
    while node.children and not node.children[0].label:
        node = node.children[0]
    return f", {len(node.children)} of {node.total} keys" if node.total > len(node.children) else ""


def parse(text: str) -> object:
    """Parse a JSON text. Raises ValueError if it is invalid."""
    from pydantic_core import (
        from_json,
    )  # twice as fast as `json`, and bounded in depth; imported on demand

    try:
        value: object = from_json(text)
    except ValueError:  # invalid, or a number of thousands of digits, or half a surrogate pair
        _unclosed("".join(_outside(text)[::2]))
        value = _DECODER.decode(text)
    return value


def _outside(text: str) -> list[str]:
    """Split a JSON text into the parts outside and inside its strings, in turn. An even number of
    parts means that the last string is cut. The parts keep their lengths."""
    if "\\" in text:
        text = text.replace("\\\\", "__").replace('\\"', "__")
    return text.split('"')


def _unclosed(outside: str) -> str:
    """The brackets still open at the end. Raises ValueError if one is closed that was not open, or
    for too many."""
    left = outside.encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    for _ in range(DEEPEST + 1):
        inner = left.replace(b"[]", b"").replace(b"{}", b"")  # the innermost pairs, all at once
        if len(inner) == len(left):
            break
        left = inner
    else:
        raise TooDeep(f"nested deeper than {DEEPEST}")
    if b"]" in left or b"}" in left:
        raise ValueError("a bracket is closed that was not open")
    if len(left) > DEEPEST:
        raise TooDeep(f"nested deeper than {DEEPEST}")
    return left.decode()


def parse_cut(text: str) -> object:
    """Parse the beginning of a JSON text: its complete values, and the containers around the cut as
    `Cut…` types."""
    parts = _outside(text)
    if len(parts) % 2 == 0:
        start = len(text) - len(parts[-1]) - 1
        stack = _unclosed("".join(parts[:-1:2]))
        before = text[:start].rstrip()[-1:]
        if before == ":" or (before in ("[", ",") and stack[-1:] == "["):
            return _close(text[:start] + _finish(text[start:]), stack, cut_text=True)
    end = len(text)
    for at in range(len(parts) - 1, -1, -1):
        start = end - len(parts[at])
        if at % 2 == 0 and (found := max(map(parts[at].rfind, ",]}"))) >= 0:
            safe = start + found + (parts[at][found] != ",")
            stack = _unclosed("".join(parts[:at:2]) + parts[at][: found + 1])
            return _close(text[:safe], stack, cut_text=False)
        end = start - 1
    _unclosed("".join(parts[::2]))
    raise ValueError("nothing in it is complete")


def _finish(string: str) -> str:
    """Close a string that was cut, perhaps inside an escape or a surrogate pair."""
    for drop in range(_ESCAPES):
        candidate = string[: len(string) - drop] + '"'
        try:
            if not "\ud800" <= json.loads(candidate)[-1:] <= "\udbff":
                return candidate
        except ValueError:
            continue
    raise ValueError("no string")


def _close(text: str, stack: str, *, cut_text: bool) -> object:
    """Parse a text with its open containers closed, and mark them as cut."""
    chain = [parse(text + stack[::-1].translate(_CLOSING))]
    for _ in stack:
        inner = chain[-1]
        if isinstance(inner, (list, dict)) and inner:
            chain.append(inner[-1] if isinstance(inner, list) else inner[next(reversed(inner))])
    last = chain.pop()
    marked: object = CutText(last) if cut_text and isinstance(last, str) else last
    for container in reversed(chain):
        if isinstance(container, list):
            marked = CutList([*container[:-1], marked])
        elif isinstance(container, dict):
            marked = CutDict({**container, next(reversed(container)): marked})
    return marked
