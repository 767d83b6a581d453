"""Lines with a file and a number: what `grep`, compilers and linters find."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Final

from coatcheck.deferred import lazy_pattern

from .aligned import first_lines
from .drafts import Draft, Section
from .excerpts import Excerpt, grep, masked_line, some

_LONG: Final = 50
_LISTED: Final = 200
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


@dataclass(slots=True)
class _Located:
    """How many lines name each file, each rule, and each severity, and an example of each rule."""

    files: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    severities: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


def locations(text: Excerpt) -> Draft | None:
    """Preview of lines that begin with a file and a line number: the files with the most, and
    findings by rule."""
    first = first_lines(text.head)
    if not any(_NUMBERED.search(each) for each in first[:8]):
        return None
    hits = sum(bool(_file_of(each)) for each in first)
    if len(first) < 4 or hits * 2 < len(first):
        return None
    whole, scope = text.everything
    located = _located(whole.split("\n"))
    files, total = located.files, located.files.total()
    shared = commonprefix(list(files)) if len(files) > 1 else ""  # noqa: RUF071 - of characters, cut at a folder
    folder = shared[: shared.rfind("/") + 1]
    if not folder and any(len(name) > _LONG for name in files):
        files = _short_names(_merged(files))
    where = some(len(files), "file") + (f" in {masked_line(folder, 60)}" if folder else "")
    findings = located.severities.total() + located.codes.total()
    is_report = findings > total // 2
    counted = f"{some(total, 'line')} from {where}"
    if is_report:
        kinds = [some(located.severities[one], one) for one in ("error", "warning")
                 if located.severities[one]]  # fmt: skip
        counted = f"{', '.join(kinds) or some(total, 'finding')} in {where}"
    sections = []
    if is_report and located.codes:
        sections.append(_rules(located))
    items = [
        f"{masked_line(name.removeprefix(folder), 70)} {times}"
        for name, times in files.most_common(_LISTED)
    ]
    sections.append(Section("by file: ", items, "files", len(files)))
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    most_named = files.most_common(1)[0][0].removeprefix(folder)
    ask = _first_read(located) if is_report else ""
    return Draft(part + counted, tuple(sections), scope=scope, ask=ask or grep(most_named[-60:]))


def _rules(located: _Located) -> Section:
    """The findings by rule, each with an example."""
    items = []
    for code, times in located.codes.most_common(_LISTED):
        counted = f"{masked_line(code, 40)} ×{times}"
        example = masked_line(located.examples[code], 60)
        items.append((counted, f"{counted} ({example})"))
    return Section("by rule: ", items, "rules", len(located.codes), share=0.55)


def _first_read(located: _Located) -> str:
    """The read that shows the most important findings."""
    if located.severities["error"] and located.severities["warning"]:
        return grep(" error")
    common = located.codes.most_common(1)
    return grep(common[0][0]) if common else ""


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


def _located(lines: list[str]) -> _Located:
    """Count the lines that begin with a file."""
    found = _Located()
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
            rule = code[code.lastindex or 0]
            found.codes[rule] += 1
            if rule not in found.examples:
                found.examples[rule] = each[len(name) :].partition(": ")[2].strip()
    return found


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
