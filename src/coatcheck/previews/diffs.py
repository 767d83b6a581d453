"""Changes and their history: diffs, `git log` with and without changes."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from itertools import islice
from os.path import commonprefix
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import is_suspect, mask

from .drafts import Draft, Section
from .excerpts import (
    Body,
    Excerpt,
    grep,
    line_pattern,
    masked_line,
    some,
    start_pattern,
    uncoloured,
)

_PARTS: Final = 20_000  # commits or files that are counted
_LISTED: Final = 40
_SAMPLE: Final = 500  # characters of the commit that is shown
_LINES: Final = 120  # lines of the largest change that a first read asks for
_IS_COMMIT: Final = line_pattern(r"^(?:\x1b\[33m)?commit ([0-9a-f]{7,64})\b")
_COMMIT: Final = start_pattern(r"(?:\x1b\[33m)?commit ([0-9a-f]{7,64})\b")
_ONE_LINE: Final = lazy_pattern(
    r"(?:[*|\\/ ]{0,12})(?=[a-f]*\d)([0-9a-f]{7,12}) (?:\([^()\n]{1,200}\) )?(\S[^\n]*)"
)
_FILE_IN_DIFF: Final = start_pattern(
    r"(?:diff --git a/[^\n]{1,1000} b/([^\n]{1,1000})$|Index: ([^\n]{1,1000})\n={2,100}$"
    r"|--- (?:a/)?([^\n\t]{1,1000})[^\n]*\n\+\+\+ (?:b/)?([^\n\t]{1,1000}))"
)
_EDITED: Final = lazy_pattern(r"([ +-])[ ]{0,6}(\d{1,6})(?: |$)")
# How edits and short histories begin. A few of the first lines may differ.
_BLANK_LINES: Final = r"(?:(?:[^\S\n]|\.)*+\n)*+"
NUMBERED_DIFF, SHORT_HISTORY = (
    lazy_pattern(rf"(?:{_BLANK_LINES}[^\n]*+\n){{0,2}}?{_BLANK_LINES}{one}", re.MULTILINE)
    for one in (_EDITED.pattern, _ONE_LINE.pattern)
)
_DAY: Final = lazy_pattern(r"(?:[A-Z][a-z]{2} ([A-Z][a-z]{2} \d{1,2}) [\d:]{8} (\d{4}).{0,10})")
_AUTHOR: Final = start_pattern(r"Author:[ \t]{1,8}([^<\n]{1,80}?) {0,4}<")
# `git log --stat`: a line for each file, and one for each commit.
_FILE_STAT: Final = start_pattern(r" (\S[^|\n]{0,300}?) +\| {1,8}(\d{1,9}) ?[+-]{0,300}$")
_COMMIT_STAT: Final = start_pattern(
    r" (\d{1,9}) files? changed(?:, (\d{1,9}) insertions?\(\+\))?(?:, (\d{1,9}) deletions?\(-\))?$"
)
_DATE: Final = start_pattern(r"(?:Author|Commit)?Date: {1,8}([^\n]{8,40})$")


class ChangedFile(NamedTuple):
    """One file of a diff: its lines added and removed, and where its part begins and ends."""

    name: str
    added: int
    removed: int
    start: int
    end: int


class _Totals(NamedTuple):
    """The totals of a diff, and its files, those with the most changed lines first."""

    text: str
    items: list[str]
    files: int


def diff(text: Excerpt) -> Draft | None:
    """Preview of the files in a diff, with the lines added and removed in each."""
    if _IS_COMMIT(text.head[:2_000]):
        return history(text)
    body = text.body
    files = _changed(body.data, [])
    if not files:
        return None
    part = _part(text, body, len(files))
    totals = _totals(files)
    largest = max(files, key=lambda file: file.added + file.removed)
    start = body.number(largest.start)
    end = min(start + _LINES, body.number(max(largest.end - 1, largest.start)))
    return Draft(
        f"diff of {totals.text}{part}",
        (Section("", totals.items, "files", totals.files),),
        scope=part,
        ask=f'lines="{start}:{end}"',
    )


def history(text: Excerpt) -> Draft | None:
    """Preview of `git log`, with or without the changes: commits, authors, dates, files, and one
    whole commit."""
    body = text.body
    commits = list(islice(_COMMIT.finditer(body.lines), _PARTS))
    if not commits or commits[0].start() > 200:
        return None
    dates = _DATE.findall(body.lines)
    authors = Counter(map(_text, _AUTHOR.findall(body.lines)))
    files = _changed(body.data, [match.start() for match in commits])
    part = _part(text, body, max(len(commits), len(files)))
    lead = f"git log of {some(len(commits), 'commit')}{part}"
    days = [_DAY.sub(r"\1 \2", masked_line(_text(dates[at]), 40)) for at in (-1, 0) if dates]
    span = dict.fromkeys(days)
    lead += f", {' to '.join(span)}" if span else ""
    totals = _totals(files) if files else None
    lead += f"; {totals.text}" if totals else _stat_totals(body)
    common = authors.most_common()
    names = [f"{masked_line(name, 30)} {times}" for name, times in common[:_LISTED]]
    sections = [Section("authors: ", names, "authors", len(common), share=0.25)]
    if totals:
        sections.append(Section("files: ", totals.items, "files", totals.files, share=0.35))
        ask = grep("commit ", "diff --git", start="^")
    else:
        subjects = _subjects(body, commits)
        sections.append(Section("subjects: ", subjects, "subjects", len(commits), share=0.35))
        sections.append(_most_changed(body))
        ask = 'grep="^commit |^    [^ ]"'
    sections.append(_sample(body, commits))
    kept = tuple(section for section in sections if section.items)
    return Draft(lead, kept, scope=part, ask=ask)


def _stat_totals(body: Body) -> str:
    """The totals that `git log --stat` reports below its commits, summed up."""
    files = added = removed = 0
    for match in islice(_COMMIT_STAT.finditer(body.lines), _PARTS):
        files += int(match[1])
        added += int(match[2] or 0)
        removed += int(match[3] or 0)
    return f"; {some(files, 'file change')}, +{added} -{removed}" if files else ""


def _most_changed(body: Body) -> Section:
    """The files of `git log --stat` with the most changed lines. Long names are cut by git."""
    changed: Counter[str] = Counter()
    for match in islice(_FILE_STAT.finditer(body.lines), _PARTS):
        changed[_text(match[1])] += int(match[2])
    items = []
    for name, lines in changed.most_common(_LISTED):
        items.append(f"{masked_line(name, 80)} ±{lines}")
    return Section("most changed: ", items, "changed files", len(changed), share=0.25)


def _subjects(body: Body, commits: list[re.Match[bytes]]) -> list[str]:
    """The first commits with the first lines of their messages."""
    found = []
    for match in commits[:_LISTED]:
        start = body.data.find(b"\n    ", match.end(), match.end() + 2_000)
        subject = masked_line(body.line(start + 1, 100), 60) if start >= 0 else ""
        found.append(f"{match[1][:7].decode()} {subject}")
    return found


def _sample(body: Body, commits: list[re.Match[bytes]]) -> Section:
    """The first commit, as much of it as fits."""
    start = commits[0].start()
    end = commits[1].start() if len(commits) > 1 else len(body.data)
    text = _text(body.data[start : min(end, start + 2 * _SAMPLE)])
    shown = mask(text)[:_SAMPLE] if is_suspect(text) else text[:_SAMPLE]
    lines = [masked_line(each, 160) for each in uncoloured(shown).split("\n") if each.strip()]
    return Section("the first commit:\n", lines, sep="\n", share=0.4)


def short_history(text: Excerpt) -> Draft | None:
    """Preview of `git log --oneline`: the number of lines, and the first."""
    first = [each for each in text.head[:4_096].split("\n", 20)[:20] if each.strip()]
    formed = sum(bool(_ONE_LINE.match(each)) for each in first)
    if len(first) < 5 or formed * 10 < len(first) * 9:
        return None
    shown = [masked_line(each, 80) for each in first]
    total = text.lines or len(shown)
    return Draft(
        f"git log, one commit a line, {text.extent}",
        (Section("", shown, "lines", total, sep="\n", is_counted=False, share=0.5),),
        ask='lines="1:60"',
    )


def numbered_diff(text: Excerpt) -> Draft | None:
    """Preview of an edit that a tool shows with line numbers: how much it changes, and where."""
    first = [each for each in text.head[:4_096].split("\n", 24)[:24] if each.strip(" .")]
    if len(first) < 4 or not (_EDITED.match(first[0]) or _EDITED.match(first[1])):
        return None
    if sum(bool(_EDITED.match(each)) for each in first) * 10 < len(first) * 9:
        return None
    whole, scope = text.everything
    changed = []
    for each in whole.split("\n"):
        match = _EDITED.match(each)
        if match is not None and match[1] != " ":
            changed.append(match)
    if not changed:
        return None
    numbers = [int(match[2]) for match in changed]
    added = sum(match[1] == "+" for match in changed)
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{part}edit of lines {min(numbers)}-{max(numbers)}: +{added} -{len(changed) - added}"
    rows = [masked_line(match.string, 120) for match in changed[:_LISTED]]
    section = Section("", rows, "changed lines", len(changed), sep="\n", share=0.5)
    return Draft(lead, (section,), scope=scope, ask='grep="^[+-]"')


def _changed(data: bytes, commits: list[int]) -> list[ChangedFile]:
    """The first `_PARTS` files of a diff in order. A part ends where the next file or commit
    begins."""
    starts: list[tuple[int, str]] = []
    for match in islice(
        _FILE_IN_DIFF.finditer(b"\n" + data), 2 * _PARTS + 2
    ):  # a file has up to two
        is_header = not (match[1] or match[2])
        if is_header and starts and data.find(b"\n@@ ", starts[-1][0], match.start()) < 0:
            continue  # the header of the file that has just begun
        starts.append((match.start(), _text(_name_in(match))))
    ends = sorted({*(at for at, _ in starts), *commits, len(data)})
    files = []
    for at, name in starts[:_PARTS]:
        end = ends[bisect_right(ends, at)]
        first = data.find(b"\n@@ ", at, end)
        added = data.count(b"\n+", first, end) if first >= 0 else 0
        removed = data.count(b"\n-", first, end) if first >= 0 else 0
        files.append(ChangedFile(name, added, removed, at, end))
    return files


def _name_in(match: re.Match[bytes]) -> bytes:
    """The file that the beginning of a part names: the new one, unless it was removed."""
    if match[1] or match[2]:
        return match[1] or match[2]
    return match[4] if match[4] and match[4] != b"/dev/null" else match[3] or b""


def _totals(files: list[ChangedFile]) -> _Totals:
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for one in files:
        added[one.name] += one.added
        removed[one.name] += one.removed
    names = list(added)
    shared = commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 - of characters, cut at a folder
    folder = shared[: shared.rfind("/") + 1]
    names.sort(key=lambda name: -added[name] - removed[name])
    items = [
        f"{masked_line(name.removeprefix(folder), 80)} +{added[name]} -{removed[name]}"
        for name in names[:_LISTED]
    ]
    where = f", in {masked_line(folder, 60)}" if folder else ""
    counts = f"+{added.total()} -{removed.total()}"
    return _Totals(f"{some(len(names), 'file')}, {counts}{where}", items, len(names))


def _part(text: Excerpt, body: Body, found: int) -> str:
    """Suffix for figures about commits or files: empty if they are from all of the content."""
    if found >= _PARTS:
        return f", only the first {_PARTS} of each are counted"
    return f", {text.within(len(body.data))}" if body.least else ""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
