"""Texts of keys and values: settings, descriptions, YAML, stanzas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from coatcheck.deferred import lazy_pattern

from .aligned import first_lines
from .columns import of_cells
from .drafts import Draft, Section
from .excerpts import Body, Excerpt, grep, masked_line, some, start_pattern

_LISTED: Final = 50
_ENTRIES: Final = 100_000  # keys or sections that are counted
_SETTINGS: Final = start_pattern(r"(?:export )?([A-Za-z_][A-Za-z0-9_.-]{0,80})=")
_WARNING: Final = start_pattern(r"(  Warning [^\n]*)")
_SETTING: Final = lazy_pattern(r"(?:export )?([A-Za-z_][A-Za-z0-9_.-]{0,80})=")
_SECTION: Final = start_pattern(r"([A-Z][\w /-]{1,40}):(?:[ \t]|$)")
_KEY: Final = start_pattern(r"([A-Za-z_][\w./-]{0,60}):(?: |$)")
_YAML: Final = lazy_pattern(r"\s*(?:- )*(?:[\w./\"'-]{1,80}:(?: |$)|- \S|---)")
_YAML_KINDS: Final = start_pattern(r"(?:- |  ){0,40}kind: (\w{1,60})$")
_DOCUMENT: Final = start_pattern(r"---(?:[ \t]|$)")
_ITEM_KEY: Final = start_pattern(r"(?:- |  )([A-Za-z_][\w.-]{0,60}):[ \t]{0,8}([^\n]*)")
_STANZA_KEY: Final = start_pattern(r"([A-Za-z][\w.-]{0,60}):[ \t]{0,8}([^\n]*)")


def _scope(text: Excerpt, body: Body) -> str:
    return f", {text.within(len(body.data))}" if body.least else ""


def _lead(scope: str) -> str:
    return f"{scope.removeprefix(', ')}: " if scope else ""


def settings(text: Excerpt) -> Draft | None:
    """Preview of lines `NAME=value`: the names."""
    first = first_lines(text.head)
    if len(first) < 5 or sum(bool(_SETTING.match(each)) for each in first) * 10 < len(first) * 9:
        return None
    body = text.body
    scope = _scope(text, body)
    names = [name.decode() for name in _SETTINGS.findall(body.lines)]
    items = [masked_line(name, 40) for name in names[:_LISTED]]
    section = Section("", items, "names", len(names), share=0.7)
    lead = f"{_lead(scope)}{some(len(names), 'setting')}"
    return Draft(lead, (section,), scope=scope, ask=grep(f"{names[0]}=", start="^"))


def _outlined(body: Body, pattern: re.Pattern[bytes]) -> Iterator[tuple[str, int]]:
    """The names that a pattern finds, with their lines."""
    number, at = 1, 0
    for match in islice(pattern.finditer(body.lines), _ENTRIES):
        number += body.data.count(b"\n", at, match.start())
        at = match.start()
        yield match[1].decode("utf-8", "replace"), number


def described(text: Excerpt) -> Draft | None:
    """Preview of `kubectl describe` and the like: the sections with their lines, and the
    warnings."""
    if re.search(r"^Name:[ \t]{2,}\S", text.head, re.MULTILINE) is None:
        return None
    body = text.body
    scope = _scope(text, body)
    sections = list(_outlined(body, _SECTION))
    if len(sections) < 4:
        return None
    objects = sum(name == "Name" for name, _ in sections)
    name = re.search(r"^Name:[ \t]+(\S[^\n]{0,80})", text.head, re.MULTILINE)
    warnings = _WARNING.findall(body.lines)
    more = f" and {objects - 1} more" if objects > 1 else ""
    lead = f"{_lead(scope)}description of {masked_line(name[1], 60) if name else ''}{more}"
    lead += f", {some(len(warnings), 'warning event')}" if warnings else ""
    others = [(title, number) for title, number in sections if title != "Name"]
    items = [f"{masked_line(title, 30)}:{number}" for title, number in others[:_LISTED]]
    parts = [Section("sections: ", items, "sections", len(others), share=0.6)]
    if warnings:
        shown = [masked_line(one.decode("utf-8", "replace"), 160) for one in warnings[-3:]]
        parts.append(Section("", shown, sep="\n", is_counted=False))
    events = [number for title, number in sections if title == "Events"]
    ask = (
        f'lines="{events[-1]}:{events[-1] + 60}"' if events else grep("Conditions:|State:|Reason:")
    )
    ask = grep("  Warning ") if warnings and objects > 1 else ask
    return Draft(lead, tuple(parts), scope=scope, ask=ask)


def yaml(text: Excerpt) -> Draft | None:
    """Preview of YAML: the upper keys with their lines, and the kinds of Kubernetes objects. Of
    stanzas, which look alike: what is in their fields."""
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
    body = text.body
    keys = _KEY.findall(body.lines)
    if _repeats(body, keys):
        return _stanzas(text, body, of=_STANZA_KEY)
    if start.lstrip().startswith("- "):
        return _stanzas(text, body, of=_ITEM_KEY, what="items of a YAML list")
    formed = sum(bool(_YAML.match(each)) for each in first)
    nested = sum(each.startswith((" ", "- ")) for each in first)
    if formed * 10 < len(first) * 8 or not nested or not keys:
        return None
    scope = _scope(text, body)
    kinds = Counter(kind.decode() for kind in _YAML_KINDS.findall(body.lines))
    del kinds["List"]
    named = list(islice(_outlined(body, _KEY), _LISTED))
    items = [f"{masked_line(name, 40)}:{number}" for name, number in named]
    objects = [f"{kind} ×{times}" if times > 1 else kind for kind, times in kinds.most_common()]
    sections = [Section("objects: ", objects, "kinds", share=0.4)] if objects else []
    sections.append(Section("keys: ", items, "upper keys", len(keys)))
    ask = (
        'grep="^(- |  )*kind:|^ {2,4}name:"'
        if kinds
        else grep(*(name for name, _ in named[:3]), start="^")
    )
    return Draft(f"YAML, {_lead(scope)}{text.extent}", tuple(sections), scope=scope, ask=ask)


def _repeats(body: Body, keys: list[bytes]) -> bool:
    """Whether upper keys repeat without a line `---` between them, which YAML does not allow."""
    documents = len(_DOCUMENT.findall(body.lines)) + 1
    return bool(keys) and Counter(keys).most_common(1)[0][1] > documents


def _field(name: str, value: object) -> str:
    return f"{name}: {value}"


def _stanzas(
    text: Excerpt,
    body: Body,
    *,
    of: re.Pattern[bytes],
    what: str = "records of lines “key: value”",
) -> Draft | None:
    """Preview of records of lines `Key: value`, such as Debian's package lists: what is in the
    fields of all records."""
    by_name: dict[bytes, list[bytes]] = {}
    for key, value in of.findall(body.lines):
        by_name.setdefault(key, []).append(value)
    first_key = next(iter(by_name), b"")
    total = len(by_name.get(first_key, ()))
    if total < 2:
        return None
    fields = {
        name.decode("utf-8", "replace"): b"\n".join(values).decode("utf-8", "replace").split("\n")
        for name, values in by_name.items()
    }
    items = []
    telling = []
    for index, (name, values) in enumerate(fields.items()):
        column = of_cells(name, values, partial(_field, name))
        shown = masked_line(name, 40)
        often = "" if len(values) == total else f" ×{len(values)}"
        items.append((shown + often, f"{shown}{often} {column.detail}"))
        telling += [index] if column.is_telling else []
    scope = _scope(text, body)
    first = first_key.decode("utf-8", "replace")
    lead = f"{_lead(scope)}{total} {what}, each from {masked_line(first, 40)} on"
    section = Section("", items[:_LISTED], "fields", len(items), first=telling)
    return Draft(
        lead, (section,), scope=scope, ask=grep(f"{first}:", start="^" if of is _STANZA_KEY else "")
    )
