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
# The file, in one of three notations, and the rest of the line.
_LINES: Final = lazy_pattern(
    r"\n(?:((?:[A-Za-z]:)?[^\s:()\"'<>|]{1,200}):\d{1,7}(?::\d{1,5})?(?=[:\s]|$)"
    r"|([^\s:()\"'<>|]{1,200})\(\d{1,7},\d{1,5}\):"
    r"|([^\s:()\"'<>|]{1,200}?\.\w{1,8})-\d{1,7}-)([^\n]*)",
    re.MULTILINE,
)
_NUMBERED: Final = lazy_pattern(r"[:(-]\d")
_SEVERITIES: Final = lazy_pattern(r"\n[^\n]{0,30}?\b(error|warning)\b", re.IGNORECASE)
_CODES: Final = lazy_pattern(
    r"\n[^\n]{0,300}?(?:\b(?:error|warning)\b:? +([A-Z]{1,5}\d{1,5})\b"
    r"|\[([a-z][\w-]{2,40})\][ \t]*$|: ([A-Z]{1,4}\d{3,4})\b)",
    re.MULTILINE,
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
    located = _located(whole)
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
    """The file that a line begins with, followed by a number; empty if there is none."""
    match = _LINES.match(f"\n{row}")
    name = next(one for one in match.groups() if one) if match else ""
    return name if _is_file(name) else ""


def _is_file(name: str) -> bool:
    """Whether a name before a number is one of a file. Times and addresses are not."""
    has_mark = "." in name or "/" in name
    return has_mark and any(map(str.isalpha, name)) and not name.startswith(("http", "["))


def _located(whole: str) -> _Located:
    """Count the lines that begin with a file."""
    found = _Located()
    rests: dict[str, list[str]] = {}
    for one, two, three, rest in _LINES.findall(f"\n{whole}"):
        rests.setdefault(one or two or three, []).append(rest)
    texts: list[str] = []
    for name, after in rests.items():
        if _is_file(name):
            found.files[name] += len(after)
            texts += after
    joined = "\n" + "\n".join(texts)
    found.severities.update(word.lower() for word in _SEVERITIES.findall(joined))
    codes = Counter(one or two or three for one, two, three in _CODES.findall(joined))
    found.codes.update(codes)
    for code, _ in codes.most_common(_LISTED):
        at = joined.find(code)
        row = joined[joined.rfind("\n", 0, at) + 1 : joined.find("\n", at) % (len(joined) + 1)]
        found.examples[code] = row.partition(": ")[2].strip() or row.strip()
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
