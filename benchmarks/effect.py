"""What a conversation costs: recorded sessions replayed, with the cache priced in and what is used
read back.

The engine is that of `coatcheck audit` (see `coatcheck.audit` for the method and what it cannot
see). Each session is billed as it was recorded (inline) and with its results shown in other ways:

- `truncated`: the first 8,000 and the last 4,000 characters; the rest cannot be read.
- `over N tokens`: a stub for each result over a fixed limit, when it arrives, and nothing else.
- `default policy`: what Coatcheck does without settings.
- `nothing`: every result is removed and nothing is read back. No method can cost less.
- Peers, by their documented limit, preview and way of reading (`_PEERS`). Their stubs have the size
  of the preview and
  40 tokens; their tools are not charged; reading by pattern returns the lines that match, as theirs
  do.

Coding sessions are replayed through `PromptBuilder` too (see `benchmarks.built`), with its defaults
and with rewriting.

Weaknesses: tokens are estimated, for some formats without the system prompt and the tools (Claude
Code, pi and Codex record their size); what a model would have done differently after a stub is not
known; runs of several agents are replayed as one conversation (`deerflow`); the agents were not the
newest. Sessions of one source resemble each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import coatcheck
from benchmarks.bench import Bench, corpus
from benchmarks.built import built
from benchmarks.report import Row
from benchmarks.runs import Step, steps_of
from coatcheck import Policy, Session
from coatcheck.audit import Bill, Offloading, Shown, WithCoatcheck, billed, ratio_plot
from coatcheck.externalize import Situation
from coatcheck.messages.recordings import (
    RecordedCall,
    RecordedConversation,
    RecordedInput,
    Recording,
    parsed,
    recordings,
)

CODING = ("sessions/claude-code", "transcripts/claude-code", "transcripts/pi")
DATA = ("runs/secrl", "runs/livemcp", "runs/deerflow", "runs/sregym")
OTHERS = ("transcripts/openai-chat",)
DEFAULT = "default policy"
_LIMITS = (1_000, 2_000, 3_000, 5_000, 8_000)
_OLDER = re.compile(r"\.snapshot[1-3]\.")  # earlier states of a session that is there as a whole
_HEADS = (
    "shown as",
    "cost",
    "tokens",
    "over 1% worse",
    "over 5%",
    "stubs",
    "reads",
    "more calls",
    "largest",
    "lost",
)
_MATCHES, _MATCH = 20, 2_000
_NO_CORPUS = "there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)"


def recorded(folder: Path, source: str, *, files: int | None = None) -> list[Recording]:
    """The recorded sessions of one folder of the corpus, in a fixed order, or those of about this
    number of `files`."""
    found: list[Recording] = []
    paths = [
        path
        for path in sorted((folder / source).rglob("*.*"))
        if path.is_file() and not _OLDER.search(path.name)
    ]
    for path in paths[:: max(1, len(paths) // files)] if files else paths:
        own = recordings(parsed(path.read_bytes()), path.name) if path.suffix != ".txt" else []
        found += own if any(map(_has_results, own)) else map(recording_of, steps_of(path))
    return [one for one in found if _has_results(one)]


def _has_results(one: Recording) -> bool:
    return any(
        given.is_result
        for each in one.conversations
        for call in each.calls
        for given in call.inputs
    )


def recording_of(steps: Iterable[Step]) -> Recording:
    """A run in a form of its own, which no host writes."""
    calls: list[RecordedCall] = []
    new: list[RecordedInput] = []
    for step in steps:
        if step.role != "model":
            new.append(RecordedInput(step.text, step.role == "result", step.tool))
            continue
        if new or not calls:
            calls.append(RecordedCall(new))
            new = []
        calls[-1].words += step.text.replace("\\n", "\n").replace('\\"', '"') + "\n"
    return Recording("run", [RecordedConversation(calls)] if calls else [])


class Removed(Offloading):
    """Every result is removed."""

    def show(self, result: RecordedInput, situation: Situation) -> Shown:
        return Shown("")


@dataclass(frozen=True, slots=True)
class Excerpt(Offloading):
    """A result over `limit` characters is shown as its beginning and end. `reads` says what a model
    gets if it asks: the lines that match, pages from the start until it is found, the whole, or
    nothing."""

    limit: int
    head: int
    tail: int = 0
    reads: str = "lines"

    def show(self, result: RecordedInput, situation: Situation) -> Shown:
        text = result.text
        if len(text) <= self.limit:
            return Shown(text)
        words = (
            ""
            if self.reads == "nothing"
            else f"[{len(text):,} characters were stored. {'About ' * 25}]\n"
        )
        shown = f"{words}{text[: self.head]}\n[…]\n{text[len(text) - self.tail :]}"
        return Shown(shown, "" if self.reads == "nothing" else "stored", text)

    def read(self, stub: Shown, things: Sequence[str]) -> str:
        if self.reads == "whole":
            return stub.content
        if self.reads == "pages":
            return stub.content[
                : max(stub.content.index(one) + len(one) for one in things) + self.head
            ]
        lines = [line for line in stub.content.split("\n") if any(one in line for one in things)]
        return "\n".join(line[:_MATCH] for line in lines[:_MATCHES])


_PEERS = {
    "strands: over 2,500 tokens, 4,000 characters": Excerpt(10_000, 4_000),
    "deepagents: over 20,000 tokens, 10 lines": Excerpt(80_000, 500, 500),
    "agno: over 16,000 characters, 1,200 and 5 lines": Excerpt(16_000, 1_200, 400),
    "mcp-refcache: over 1,000 tokens, pages": Excerpt(4_000, 4_000, reads="pages"),
    "haystack: over 8,000 characters, 200": Excerpt(8_000, 200, reads="nothing"),
    "any limit of 2,500 tokens, the whole is read": Excerpt(10_000, 4_000, reads="whole"),
}
"""Limits and previews are those of the packages' documentation in November 2026. A token is four
characters to them."""


def ways() -> dict[str, Callable[[Session], Offloading]]:
    """The ways in which results are shown, each for a new session."""
    limits = {f"over {limit:,} tokens": partial(_limited, limit) for limit in _LIMITS}
    fixed: dict[str, Offloading] = {"truncated": Excerpt(12_000, 8_000, 4_000, "nothing")}
    return {
        "inline": lambda session: Offloading(),
        **limits,
        DEFAULT: lambda session: WithCoatcheck(session, Policy()),
        "nothing": lambda session: Removed(),
        **{name: partial(_always, one) for name, one in (fixed | _PEERS).items()},
    }


def _limited(limit: int, session: Session) -> Offloading:
    return WithCoatcheck(session, Policy(max_tokens=limit))


def _always(one: Offloading, session: Session) -> Offloading:
    return one


@dataclass(slots=True)
class Billed:
    """The bills of the sessions of some sources, for each way to show results."""

    sources: tuple[str, ...]
    bills: dict[str, list[Bill]]

    def ratio(self, way: str) -> float:
        return sum(one.cost for one in self.bills[way]) / sum(
            one.cost for one in self.bills["inline"]
        )

    def ratios(self, way: str) -> list[float]:
        pairs = zip(self.bills[way], self.bills["inline"], strict=True)
        return [one.cost / inline.cost for one, inline in pairs if inline.cost]

    def worse(self, way: str, over: float) -> int:
        return sum(one > over for one in self.ratios(way))

    def table(self) -> str:
        """The bills as Markdown."""
        lines = [_HEADS, ("---",) * len(_HEADS), *(self._cells(way) for way in self.bills)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _cells(self, way: str) -> tuple[str, ...]:
        ours, inline = total_of(self.bills[way]), total_of(self.bills["inline"])
        numbers = (
            self.worse(way, 1.01), self.worse(way, 1.05), ours.stubs, ours.reads, ours.extra_calls, ours.largest,
            ours.lost,
        )  # fmt: skip
        return (
            way,
            f"{self.ratio(way):.3f}",
            f"{ours.tokens / inline.tokens:.3f}",
            *map("{:,}".format, numbers),
        )


def total_of(bills: Iterable[Bill]) -> Bill:
    found = Bill()
    for one in bills:
        found.add(one)
    return found


def _some(folder: Path, source: str, quick: bool) -> list[Recording]:
    found = recorded(folder, source, files=6 if quick else None)
    return found[:: max(1, len(found) // 3)] if quick else found


def measured(folder: Path, source: str, *, quick: bool = False) -> Billed:
    found = _some(folder, source, quick)
    bills: dict[str, list[Bill]] = {}
    for name, way in ways().items():
        bills[name] = []
        for one in found:
            with coatcheck.open("memory:", ttl=None) as store:
                bills[name].append(billed(one, way(store.session("effect"))))
    return Billed((source,), bills)


def together(parts: Sequence[Billed]) -> Billed:
    names = parts[0].bills
    bills = {name: list(chain.from_iterable(one.bills[name] for one in parts)) for name in names}
    return Billed(tuple(source for one in parts for source in one.sources), bills)


def effect(bench: Bench) -> Iterator[Row]:
    folder = corpus()
    if folder is None:
        print(_NO_CORPUS)
        return
    sources = (*CODING, *DATA, *OTHERS)
    with ProcessPoolExecutor(
        mp_context=get_context("spawn")
    ) as pool:  # a count, not a time: all cores may share it
        parts = dict(
            zip(
                sources,
                pool.map(partial(measured, folder, quick=bench.quick), sources),
                strict=True,
            )
        )
    coding = together([parts[one] for one in CODING])
    for title, one in {"all coding sessions": coding, **parts}.items():
        print(
            f"\n{title}: {len(one.bills['inline'])} sessions, {sum(b.calls for b in one.bills['inline']):,} calls\n"
        )
        print(one.table(), flush=True)
    print(
        f"\nruns on data, with those over 1% worse in brackets\n\n{_data_table(parts)}", flush=True
    )
    if bench.plots is not None:
        _draw(bench.plots, coding, parts)
    sessions = len(coding.bills["inline"])
    yield Row("coding sessions: cost against inline", None, coding.ratio(DEFAULT), 0.90, "share")
    yield Row(
        "coding sessions over 1% worse", None, coding.worse(DEFAULT, 1.01) / sessions, 0.02, "share"
    )
    yield Row("coding sessions over 5% worse", None, coding.worse(DEFAULT, 1.05), 0, "count")
    for source in DATA:
        one = parts[source]
        best = min((f"over {limit:,} tokens" for limit in _LIMITS), key=one.ratio)
        note = f"{one.ratio(DEFAULT):.3f} against {one.ratio(best):.3f} {best}"
        yield Row(
            f"{source}: cost beyond the best fixed limit", None, one.ratio(DEFAULT) - one.ratio(best), 0.02, "share",
            note=note,
        )  # fmt: skip
    everything = together(list(parts.values()))
    pairs = zip(everything.bills[DEFAULT], everything.bills["inline"], strict=True)
    idle = [one.cost / inline.cost for one, inline in pairs if not one.stubs]
    yield Row(
        "sessions over 2% worse though nothing left",
        None,
        sum(one > 1.02 for one in idle),
        0,
        "count",
    )
    yield from _built_rows(
        bench, chain.from_iterable(_some(folder, one, bench.quick) for one in CODING)
    )


def _data_table(parts: dict[str, Billed]) -> str:
    """The cost of each source of runs, side by side, as Markdown."""
    found = {source.rpartition("/")[2]: parts[source] for source in (*DATA, *OTHERS)}
    heads = [
        "shown as",
        *(f"{name}, {len(one.bills['inline'])} runs" for name, one in found.items()),
    ]
    ways = next(iter(found.values())).bills
    costs = [
        [way, *(f"{one.ratio(way):.2f} ({one.worse(way, 1.01)})" for one in found.values())]
        for way in ways
    ]
    rows = [heads, ["---"] * len(heads), *costs]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _built_rows(bench: Bench, found: Iterable[Recording]) -> Iterator[Row]:
    """The same sessions through `PromptBuilder`, with its own counting for inline too."""
    found = [
        one
        for one in found
        if not bench.quick or sum(len(each.calls) for each in one.conversations) < 100
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        done = {
            "inline": list(pool.map(partial(built, inline=True), found)),
            "append-only": list(pool.map(built, found)),
            "rewrite=True": list(pool.map(partial(built, rewrite=True), found)),
        }
    bills = Billed(CODING, {name: [one.bill for one in some] for name, some in done.items()})
    print(
        f"\nall coding sessions through `PromptBuilder`: {len(found)} sessions\n\n{bills.table()}",
        flush=True,
    )
    if bench.plots is not None:
        title, ratios = (
            "Coding sessions through PromptBuilder, rewrite=True",
            sorted(bills.ratios("rewrite=True")),
        )
        drawn = ratio_plot(
            title, [(f"session {number}", one) for number, one in enumerate(ratios, 1)]
        )
        (bench.plots / "effect-built.svg").write_text(drawn)
    for name, most, worse, rewritten in (
        ("append-only", 0.90, 0.02, 0.0),
        ("rewrite=True", 0.80, 0.03, None),
    ):
        calls = sum(bill.calls for bill in bills.bills[name])
        title = f"PromptBuilder, {name}"
        yield Row(f"{title}: cost against inline", None, bills.ratio(name), most, "share")
        yield Row(
            f"{title}: sessions over 1% worse",
            None,
            bills.worse(name, 1.01) / len(found),
            worse,
            "share",
        )
        share = sum(one.rewritten for one in done[name]) / calls
        yield Row(f"{title}: requests that rewrite what was sent", None, share, rewritten, "share")
        yield Row(
            f"{title}: requests that are refused",
            None,
            sum(one.refused for one in done[name]),
            0,
            "count",
        )


def _draw(folder: Path, coding: Billed, parts: dict[str, Billed]) -> None:
    """Write the plots of docs/effect.md."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in coding.bills if name != "inline"]
    default = sorted(coding.ratios(DEFAULT))
    drawn = {
        "effect-coding": ("Coding sessions: cost by how results are shown", [(n, coding.ratio(n)) for n in names]),
        "effect-sessions": ("Coding sessions, default policy", [(f"session {n}", r) for n, r in enumerate(default, 1)]),
        "effect-data": (
            "Agents that work on data: cost by how results are shown",
            [(f"{source.rpartition('/')[2]}: {name}", parts[source].ratio(name)) for source in DATA for name in names
             if name not in _PEERS],
        ),
    }  # fmt: skip
    for name, (title, ratios) in drawn.items():
        (folder / f"{name}.svg").write_text(ratio_plot(title, ratios))
