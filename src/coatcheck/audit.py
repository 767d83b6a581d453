"""What recorded sessions cost, and what they would have cost with Coatcheck, reads back included.

Every answer of the model is one call. A call reads what the call before sent from the provider's
cache, writes what is new to it, and pays for its output; after a gap longer than the life of the
cache, all of it is written again. Results go through the externalizer as they arrive, with the
context and the prices of that moment.

A result that became a stub has to be read back when a later answer visibly uses something that the
model has not seen elsewhere: a name, number or address, or a whole line. The reads of one answer
are one more call, which sends the context again, and its pages are what the tool really returns for
a grep for these things. Pages stay, like results. Tools are described from the first stub on.

What this cannot see: uses that leave no trace in the answer, questions that a model would ask
differently, compactions that would have come later, and the quality of answers. It charges each
use, even where a model would have remembered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import coatcheck
from coatcheck._toolkit import toolkit
from coatcheck.externalize import Policy, Situation
from coatcheck.externalize.decision import QUESTION_TOKENS
from coatcheck.externalize.policy import configured
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.externalize.shorter import ShownResult, shorter
from coatcheck.messages.content import dumped
from coatcheck.messages.recordings import (
    RecordedCall,
    RecordedConversation,
    RecordedInput,
    Recording,
    parsed,
)
from coatcheck.messages.recordings import recordings as recordings_in
from coatcheck.models import USUAL_PRICES, Prices
from coatcheck.regular import read_regular
from coatcheck.session import Session
from coatcheck.tokens import estimate
from coatcheck.transcript.migrate import files_in

__all__ = [
    "Audited",
    "Bill",
    "Offloading",
    "Shown",
    "WithCoatcheck",
    "audit",
    "billed",
    "ratio_plot",
    "total",
]

HOSTS: Final = ("~/.claude/projects", "~/.codex/sessions", "~/.pi/agent/sessions")
"""Where Claude Code, Codex and pi keep their sessions."""

WORSE: Final = 1.01
"""A session counts as worse if the ratio of its cost to its cost inline is larger than this."""

THING: Final = re.compile(r"[A-Za-z0-9][\w.:/@%+-]{4,100}[A-Za-z0-9]")
DISTINCT: Final = re.compile(r"\d|[a-z][A-Z]|[A-Za-z0-9][._/@:-][A-Za-z0-9]")
"""What distinguishes a name, number or address from a word."""

_LINE: Final = 30  # characters of a line that is recognized as a whole
_ASKED: Final = 12  # things that one read asks for
_LONGEST: Final = 80  # characters of a thing in the pattern
_NAMED: Final = 60  # bars of a plot that still have names
_UNPRINTABLE: Final = re.compile(
    r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)  # not allowed in XML
_NOT_A_CONVERSATION: Final = "no recorded conversation"


@dataclass(slots=True)
class Bill:
    """What calls cost, as a multiple of the price of an input token, and what happened in them."""

    cost: float = 0.0
    calls: int = 0
    tokens: int = 0
    """Input tokens of all calls, cached ones included."""
    largest: int = 0
    """Tokens of the largest context."""
    stubs: int = 0
    reads: int = 0
    extra_calls: int = 0
    """Calls made only to read back."""
    kept_out: int = 0
    """Tokens of results that never entered the context."""
    lost: int = 0
    """Answers that used something that cannot be read back."""

    def add(self, other: Bill) -> None:
        for one in fields(self):
            pick: Callable[[Any, Any], Any] = max if one.name == "largest" else lambda a, b: a + b
            setattr(self, one.name, pick(getattr(self, one.name), getattr(other, one.name)))


@dataclass(slots=True)
class Shown:
    """What a model gets for a result: the result itself, or something shorter. `pointer` is set if
    the rest can be read back, '' if it is lost."""

    text: str
    pointer: str | None = None
    content: str = ""
    without: set[str] = field(default_factory=set)
    """Things that the content does not contain, so that they are looked for only once."""


class Offloading:
    """How results are shown to a model. This one shows them as they are."""

    tool_tokens: int = 0
    """Tokens of its tool descriptions, which count from the first stub on."""

    def begin(self) -> None:
        """Begin a new conversation."""

    def show(self, result: RecordedInput, situation: Situation) -> Shown:
        return Shown(result.text)

    def read(self, stub: Shown, things: Sequence[str]) -> str:
        """Return the page that a model gets if it asks for these things."""
        raise NotImplementedError


class WithCoatcheck(Offloading):
    """Results as Coatcheck shows them: repeated and changed ones in short form unless a limit is
    named, those that the policy offloads as stubs. The default policy comes from the settings."""

    def __init__(
        self, session: Session, policy: Policy | None = None, *, tool_tokens: int | None = None
    ) -> None:
        self._session = session
        policy = policy or configured(session.store.settings)
        self._policy = replace(policy, files=None)
        tools = toolkit(session)
        self._read = tools[0]
        described = sum(estimate(dumped(tool.as_anthropic())) for tool in tools)
        self.tool_tokens = described if tool_tokens is None else tool_tokens
        self._shown: list[ShownResult] = []

    def begin(self) -> None:
        self._shown = []

    def show(self, result: RecordedInput, situation: Situation) -> Shown:
        policy, text, tool, call_id = self._policy, result.text, result.tool, result.call_id
        if policy.decides_by_cost(tool):
            short = shorter(text, tool, result.arguments, self._shown)
            if short is not None:
                return Shown(short)
        situation = replace(situation, calls_to_come=policy.expected_calls)
        outcome = self._session.externalize(
            text,
            tool=tool or None,
            call_id=call_id or None,
            policy=policy,
            situation=situation,
            source=UNCOUNTED,
        )
        if outcome.ref is not None:
            return Shown(outcome.text, outcome.ref.pointer, text)
        self._shown.append(ShownResult(outcome.text, tool, call_id, result.arguments))
        return Shown(outcome.text)

    def read(self, stub: Shown, things: Sequence[str]) -> str:
        assert stub.pointer is not None
        return self._read.run(
            pointer=stub.pointer, grep="|".join(re.escape(one[:_LONGEST]) for one in things)
        )


def billed(recording: Recording, offloading: Offloading, prices: Prices = USUAL_PRICES) -> Bill:
    """Return what a recorded session costs if its results are shown in this way."""
    bill = Bill()
    for conversation in recording.conversations:
        offloading.begin()
        _Replay(offloading, prices, bill).run(conversation)
    return bill


class _Replay:
    """One conversation, call by call. What was sent is never changed."""

    def __init__(self, offloading: Offloading, prices: Prices, bill: Bill) -> None:
        self._offloading, self._prices, self._bill = offloading, prices, bill
        self._sent = self._new = 0
        self._known: list[str] = []  # what the model has seen
        self._stubs: list[Shown] = []
        self._seen: set[str] = set()  # things that are in `known`

    def run(self, conversation: RecordedConversation) -> None:
        self._new = conversation.base_tokens
        for call in conversation.calls:
            for one in call.inputs:
                self._add(one)
            is_cold = call.gap > self._prices.cache_seconds
            pages = self._pages(call) if self._stubs else []
            if pages:
                self._call(QUESTION_TOKENS * len(pages), is_cold)
                is_cold = False
                self._new += sum(map(estimate, pages))
                self._known += pages
                self._bill.reads += len(pages)
                self._bill.extra_calls += 1
            self._call(call.output_tokens, is_cold)
            self._known.append(call.written)

    def _add(self, given: RecordedInput) -> None:
        text = given.text
        if given.is_result:
            tool_tokens = 0 if self._stubs else self._offloading.tool_tokens
            context = self._sent + self._new
            situation = Situation(
                context_tokens=context, prices=self._prices, tool_tokens=tool_tokens
            )
            shown = self._offloading.show(given, situation)
            text = shown.text
            if text is not given.text:
                self._bill.kept_out += max(0, estimate(given.text) - estimate(text))
            if shown.pointer is not None:
                self._new += tool_tokens
                self._stubs.append(shown)
                self._bill.stubs += 1
        self._known.append(text)
        self._new += estimate(text) + given.image_tokens

    def _call(self, output: int, is_cold: bool) -> None:
        prices, bill, whole = self._prices, self._bill, self._sent + self._new
        read = 0 if is_cold else self._sent
        bill.cost += prices.read * read + prices.write * (whole - read) + prices.output * output
        bill.calls += 1
        bill.tokens += whole
        bill.largest = max(bill.largest, whole)
        self._sent, self._new = whole, output

    def _pages(self, call: RecordedCall) -> list[str]:
        """Return the pages that a model has to ask for before it can write this answer."""
        pages: list[str] = []
        used = things_in(call.written)
        for stub in self._stubs:
            things = self._unseen(stub, used)
            if not things:
                continue
            self._seen.update(things)
            if stub.pointer:
                pages.append(self._offloading.read(stub, things))
            else:
                self._bill.lost += 1
        return pages

    def _unseen(self, stub: Shown, things: Iterable[str]) -> list[str]:
        """Return the things in a stored result that the model has not seen."""
        found: list[str] = []
        for one in things:
            if one in self._seen or one in stub.without:
                continue
            if one not in stub.content:
                stub.without.add(one)
            elif any(one in text for text in self._known):
                self._seen.add(one)
            else:
                found.append(one)
                if len(found) == _ASKED:
                    break
        return found


def things_in(written: str) -> tuple[str, ...]:
    """Return what an answer visibly uses: whole lines, and names, numbers and addresses."""
    lines = (line.strip() for line in written.split("\n"))
    words = (word for word in THING.findall(written) if DISTINCT.search(word))
    return tuple(dict.fromkeys([*(line for line in lines if len(line) >= _LINE), *words]))


@dataclass(frozen=True, slots=True)
class Audited:
    """A recorded session: what it cost, and what it would have cost with Coatcheck. `skipped` says
    why a file is not a recorded session; both costs are then empty."""

    path: str
    name: str
    inline: Bill = field(default_factory=Bill)
    ours: Bill = field(default_factory=Bill)
    skipped: str = ""

    @property
    def ratio(self) -> float:
        return self.ours.cost / self.inline.cost if self.inline.cost else 1.0

    @property
    def is_worse(self) -> bool:
        return self.ratio > WORSE

    def to_record(self) -> dict[str, Any]:
        if self.skipped:
            return {"path": self.path, "skipped": self.skipped}
        bills = {"inline": asdict(self.inline), "coatcheck": asdict(self.ours)}
        return {"path": self.path, "name": self.name, "ratio": self.ratio, **bills}


def audit(
    paths: Iterable[str | os.PathLike[str]],
    *,
    prices: Prices = USUAL_PRICES,
    policy: Policy | None = None,
    tool_tokens: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[Audited]:
    """Replay recorded sessions: files, or folders with them. Yields one report for each session,
    and for each file that has none. Links inside a folder are not followed, and only regular files
    are read. Nothing is written to disk.

    The default policy comes from the settings. `tool_tokens` is the size of the tools'
    descriptions, which are counted from the first stub on. `progress` gets the bytes that were read
    and their total."""
    files = list(files_in(map(os.path.realpath, paths)))  # a link that is named is meant
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
    for number, path in enumerate(files):
        if progress is not None:
            progress(sum(sizes[:number]), sum(sizes))
        try:
            found = recordings_in(parsed(read_regular(path)), path.name)
        except (OSError, RecursionError) as error:
            yield Audited(
                str(path),
                path.name,
                skipped=getattr(error, "strerror", None) or type(error).__name__,
            )
            continue
        if not found:
            yield Audited(str(path), path.name, skipped=_NOT_A_CONVERSATION)
        for recording in found:
            with coatcheck.open("memory:", ttl=None) as store:
                ours = WithCoatcheck(store.session("audit"), policy, tool_tokens=tool_tokens)
                inline = billed(recording, Offloading(), prices)
                yield Audited(str(path), recording.name, inline, billed(recording, ours, prices))


def total(audited: Iterable[Audited]) -> Audited:
    """Return the sum of several sessions."""
    found = Audited("", "total")
    for one in audited:
        found.inline.add(one.inline)
        found.ours.add(one.ours)
    return found


def usual_folders() -> list[Path]:
    """Return the existing folders where known hosts keep session files."""
    paths = [Path(one).expanduser() for one in HOSTS]
    return [path for path in paths if path.is_dir()]


def ratio_plot(
    title: str,
    ratios: Iterable[tuple[str, float]],
    *,
    one: str = "everything inline",
    over: Collection[str] | None = None,
) -> str:
    """Return an SVG with one bar for each name and ratio, and a line at 1, which is `one`. Bars of
    the names in `over` are red, by default those that cost more. Names are left out if there are
    many."""
    rows = list(ratios)
    height, left = (16, 260) if len(rows) <= _NAMED else (max(1, 800 // len(rows)), 20)
    scale = 400 / max([1.1, *(ratio for _, ratio in rows)])
    drawn = []
    for number, (name, ratio) in enumerate(rows):
        is_over = ratio > WORSE if over is None else name in over
        top, colour = 40 + number * height, "#c0392b" if is_over else "#2e7d32"
        bar = (
            f'<rect x="{left}" y="{top}" width="{ratio * scale:.1f}" '
            f'height="{max(1, height - 3)}" fill="{colour}">'
        )
        drawn.append(f"{bar}<title>{_escaped(name)}: {ratio:.3f}</title></rect>")
        if len(rows) <= _NAMED:
            drawn.append(
                f'<text x="{left - 6}" y="{top + 10}" '
                f'text-anchor="end">{_escaped(name[-40:])}</text>'
            )
            drawn.append(
                f'<text x="{left + ratio * scale + 4:.1f}" y="{top + 10}">{ratio:.2f}</text>'
            )
    at, end = left + scale, 40 + len(rows) * height
    size = f'width="{left + 460}" height="{end + 30}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{_escaped(title)}</text>', *drawn,
        (f'<line x1="{at:.1f}" y1="32" x2="{at:.1f}" y2="{end}" stroke="black" stroke-dasharray="4 '
        '3"/>'),
        f'<text x="{at:.1f}" y="{end + 16}" text-anchor="middle">1 = {_escaped(one)}</text>',
        "</svg>\n",
    ])  # fmt: skip


def _escaped(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text))
