"""Listings of files: `ls -l`, paths, `tree`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from os.path import commonprefix
from typing import Final

from coatcheck.deferred import lazy_pattern

from .aligned import first_lines, lines_of
from .drafts import Draft, Section
from .excerpts import Excerpt, grep, masked_line, some

_LISTED: Final = 200  # names that may be shown
_LARGEST: Final = 12
_SUFFIX: Final = lazy_pattern(r"[^/\n](\.[A-Za-z0-9]{1,7})$", re.MULTILINE)
_PATH: Final = lazy_pattern(
    r"(?:\.{0,2}/|[A-Za-z]:\\)?[\w.@+~%=,\[\]() -]{1,120}(?:[/\\][\w.@+~%=,\[\]() -]{0,200}){0,40}"
)
_MODE: Final = lazy_pattern(r"[-dlbcps](?:[r-][w-][xsStT-]){3}")
_SIZE: Final = lazy_pattern(r"(\d{1,18}(?:[.,]\d{1,3})?)([KMGTPE])?")
_COMMAND_END: Final = lazy_pattern(r"\d+ director(?:y|ies), \d+ files?\s*\Z")


def listing(text: Excerpt) -> Draft | None:
    """Preview of `ls -l`: the number of files and folders, and the largest."""
    first = first_lines(text.head)
    if sum(bool(_MODE.match(each)) for each in first) * 2 < len(first) or len(first) < 3:
        return None
    whole, scope = text.everything
    files: list[ListedFile] = []
    folders = sections = 0
    folder = ""
    for each in lines_of(whole):
        if not _MODE.match(each):
            if each.endswith(":"):
                folder, sections = each[:-1], sections + 1
            continue
        parts = each.split(None, 8)
        if len(parts) < 9 or parts[8] in (".", ".."):
            continue
        if each[0] == "d":
            folders += 1
        else:
            files.append(ListedFile(f"{folder}/{parts[8]}" if folder else parts[8], parts[4]))
    where = f" in {some(sections, 'folder')}" if sections else f", {some(folders, 'folder')}"
    sized = [one for one in files if one.size is not None]
    sized.sort(key=lambda one: (one.size or 0, one.name), reverse=True)
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    items = [f"{masked_line(one.name, 70)} {one.written}" for one in sized[:_LARGEST]]
    return Draft(
        f"{part}listing of {some(len(files), 'file')}{where}",
        (Section("largest: ", items, "files", len(files), share=0.6),),
        scope=scope,
        ask='grep=":$"' if sections > 1 else 'lines="1:60"',
    )


@dataclass(frozen=True, slots=True)
class ListedFile:
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


def paths(text: Excerpt) -> Draft | None:
    """Preview of a list of paths: how many are in each folder, and their suffixes."""
    first = first_lines(text.head)
    if len(first) < 5 or sum(map(_is_path, first)) * 5 < len(first) * 4:
        return None
    whole, scope = text.everything
    lines = lines_of(whole)
    found = [each for each in lines if each and ("/" in each or "\\" in each or " " not in each)]
    if len(found) * 5 < len(lines) * 4:
        return None
    shared = commonprefix([min(found), max(found)])  # noqa: RUF071 - of characters, cut at a folder
    shared = shared[: shared.rfind("/") + 1]
    folders: Counter[str] = Counter()
    suffixes: Counter[str] = Counter()
    start = len(shared)
    for folder, times in Counter(
        [each[start : each.find("/", start) + 1] for each in found]
    ).items():
        folders[folder or "(files)"] += times
    for suffix in _SUFFIX.findall("\n".join(found)):
        suffixes[suffix] += 1
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{part}{some(len(found), 'path')}{f' in {masked_line(shared, 60)}' if shared else ''}"
    common, largest = suffixes.most_common(), folders.most_common()
    sections = (
        Section("by folder: ", _counted(largest), "folders", len(largest), share=0.5),
        Section("by suffix: ", _counted(common), "suffixes", len(common), share=0.3),
        Section("first: ", [masked_line(each, 90) for each in found[:3]], share=0.3,
                is_counted=False),
    )  # fmt: skip
    named = [name for name, _ in largest[:2] if name != "(files)"]
    ask = f'grep="[.]{common[0][0][1:]}$"' if common else grep(*named[:1]) or 'lines="1:60"'
    return Draft(lead, tuple(one for one in sections if one.items), scope=scope, ask=ask)


def _counted(counts: list[tuple[str, int]]) -> list[str]:
    return [f"{masked_line(name, 40)} {times}" for name, times in counts[:_LISTED]]


def drawn_tree(text: Excerpt) -> Draft | None:
    """Preview of the output of `tree`: the upper level, and the totals."""
    if text.head[:4_096].count("── ") * 2 < min(text.head[:4_096].count("\n"), 20):
        return None
    whole, scope = text.everything
    top: list[str] = []
    inside: list[int] = []
    for each in lines_of(whole):
        if each[:1] in ("├", "└"):
            top.append(masked_line(each[4:], 40))
            inside.append(0)
        elif inside and "── " in each:
            inside[-1] += 1
    items = [
        (name, f"{name} ({count})") if count else name
        for name, count in zip(top[:_LISTED], inside, strict=False)
    ]
    total = _COMMAND_END.search((text.tail or text.head)[-200:])
    lead = f"tree, {total[0].strip() if total else text.extent}"
    lead += f"; {scope.removeprefix(', ')}" if scope else ""
    section = Section("", items, "names of the upper level", len(top))
    return Draft(lead, (section,), scope=scope, ask='grep="^[├└]"')
