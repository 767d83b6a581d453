"""Drafts: what a kind of content found out, before it is known how much room there is to say it.

A draft is made once, from all of the content, and rendered for any limit. It has a lead and
sections. Each section is a list, of which as many items are shown as fit: first all of them in few
words, then one after another in more words. Every list ends with the number of items that are
missing, so nothing from a part looks complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .excerpts import Excerpt, Preview, line


@dataclass(frozen=True, slots=True)
class Section:
    """One list of a preview.

    Each item is a text, or the same in ever more words. `total` is the number of all items, if
    `items` are only the first of them. `noun` names the items in what the preview covers; a section
    without one is not mentioned there. With `is_counted` false, a list that is cut does not say how
    many items are missing, since the lead does. `share` is the part of the whole room that the
    section may use before the sections after it. The items at the indices in `first` are the first
    ones that get more words. If not all items fit, those with the lowest of `ranks` are shown, in
    the order of `items`."""

    label: str
    items: Sequence[str | tuple[str, ...]]
    noun: str = ""
    total: int | None = None
    sep: str = ", "
    share: float = 1.0
    is_counted: bool = True
    first: Sequence[int] = ()
    ranks: Sequence[int] = ()

    @property
    def size(self) -> int:
        return len(self.items) if self.total is None else self.total

    def render(self, room: int) -> tuple[str, int]:
        """The list in at most `room` characters, and the number of items in it."""
        variants = [(item,) if isinstance(item, str) else item for item in self.items]
        kept = self._fitting([item[0] for item in variants], room)
        if not kept:
            return "", 0
        chosen = {index: variants[index][0] for index in sorted(kept)}
        spare = room - len(self._written(list(chosen.values())))
        order = [index for index in self.first if index in chosen]
        order += [index for index in kept if index not in self.first]
        for level in range(1, max(map(len, variants))):
            for index in order:
                if level >= len(variants[index]):
                    continue
                longer = variants[index][level]
                cost = len(longer) - len(chosen[index])
                if cost <= spare:
                    chosen[index] = longer
                    spare -= cost
        return self._written(list(chosen.values())), len(chosen)

    def _fitting(self, texts: Sequence[str], room: int) -> list[int]:
        """The indices of the items that fit in their shortest form, those with the lowest ranks
        first."""
        order: Sequence[int] = range(len(texts))
        if self.ranks:
            order = sorted(order, key=lambda index: self.ranks[index])
        length, kept = len(self.label), 0
        for number, index in enumerate(order, 1):
            length += len(texts[index]) + (len(self.sep) if number > 1 else 0)
            if length > room:
                break
            if length + len(self._rest(number)) <= room:
                kept = number
        return list(order[:kept])

    def _written(self, texts: Sequence[str]) -> str:
        return self.label + self.sep.join(texts) + self._rest(len(texts))

    def _rest(self, kept: int) -> str:
        missing = self.size - kept
        return f"{self.sep}+{missing} more" if missing > 0 and self.is_counted else ""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a kind of content found out.

    `shown` says what the lead is from, in our own words, never in those of the content. `scope` is
    the suffix for figures that are from a part of the content; empty if they are from all of it.
    `ask` and `part` are the first read. `program` is one that a careful engineer would run
    first, where counting or grouping is likely. `written` replaces all of them for a form that
    depends on the limit."""

    lead: str
    sections: Sequence[Section] = field(default_factory=tuple)
    shown: str = ""
    scope: str = ""
    ask: str = ""
    part: str = ""
    program: str = ""
    written: Callable[[int], Preview | None] | None = None

    def render(self, limit: int) -> Preview | None:
        """The preview in at most `limit` characters; None if a form finds that it does not fit."""
        if self.written is not None:
            return self.written(limit)
        lead = self.lead if len(self.lead) <= limit else line(self.lead, limit)
        left = limit - len(lead)
        shown = [("", 0)] * len(self.sections)
        for use_all in (False, True):
            for index, section in enumerate(self.sections):
                before = len(shown[index][0])
                room = left + before if use_all else min(left, round(section.share * limit))
                found = section.render(room - 1)
                if found[1] and len(found[0]) + 1 <= left + before:
                    shown[index] = (f"\n{found[0]}", found[1])
                    left += before - len(shown[index][0])
        text = "".join([lead, *(part for part, _ in shown)]).lstrip("\n")
        counts = [
            f"{kept} of {section.size} {section.noun}"
            for section, (_, kept) in zip(self.sections, shown, strict=True)
            if section.noun
        ]
        covered = ", ".join([one for one in (self.shown, *counts) if one]) + self.scope
        return Preview(text, covered, self.ask, self.part, self.program)


Form = Callable[["Excerpt"], Draft | None]
"""Describe a text; None for a text without this form."""


def limited(form: Callable[[Excerpt, int], Preview | None]) -> Form:
    """A form that writes its preview for a limit, which needs no draft."""
    return lambda text: Draft("", written=partial(form, text))


class Kind(NamedTuple):
    """One kind of content, a row of the table that `preview` goes through until a form fits.

    `cues` are texts, at least one of which is near the beginning or end of all such content.
    `begins` is a pattern for how it begins. Without them, the form is always tried."""

    name: str
    cues: tuple[str, ...]
    form: Form
    begins: re.Pattern[str] | None = None
