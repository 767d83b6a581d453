"""What a conversation costs: recorded runs replayed through the externalizer and the toolkit, with the cache priced in.

Every answer of the model is one call. A call reads what the previous call sent at the price of a cached token, writes
what is new, and pays for its output. A result that became a stub has to be read back when a later answer visibly uses
something that neither the stub nor an earlier page shows: a name, number or address, or a whole line. A read back is
one more call, which sends the context again; its page is what the tool really returns for a grep for these things. A
page stays in the conversation like every other result.

What this cannot see: uses that leave no trace in the answer, questions that a model would ask differently, and the
quality of answers. It charges a read for each use, also where a model would have remembered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import coatcheck
from benchmarks.bench import Bench, corpus
from benchmarks.eyes import DISTINCT, THING
from benchmarks.report import Row
from benchmarks.runs import Run, Step, runs
from coatcheck import Policy, Session, tokens, toolkit
from coatcheck._toolkit import Tool

READ, WRITE, OUTPUT = 0.1, 1.25, 5.0
SCHEMAS = 420
_ASKING = 60
"""Tokens of the words and arguments with which a model asks for a page."""

_LINE = 30
_ASKED = 12
_LIMITS = (1_000, 2_000, 3_000, 5_000, 8_000, 16_000)

Offload = Callable[[Session, str], tuple[str, str | None]]
"""Return the text that the model gets for a result, and the pointer if that is a stub."""


@cache
def _tokens(text: str) -> int:
    return tokens.exact(text)


@dataclass(slots=True)
class Bill:
    """The cost of one run, in the price of an input token, and what happened."""

    cost: float = 0.0
    largest: int = 0
    calls: int = 0
    stubs: int = 0
    reads: int = 0

    def call(self, sent: int, new: int, output: int) -> None:
        """Add a call: what was sent before is read from the cache, the rest is written."""
        self.cost += READ * sent + WRITE * new + OUTPUT * output
        self.largest = max(self.largest, sent + new)
        self.calls += 1


@dataclass(slots=True)
class _Stub:
    pointer: str
    content: str
    shown: str
    pages: list[str] = field(default_factory=list)

    def shows(self, thing: str) -> bool:
        return thing in self.shown or any(thing in page for page in self.pages)


def turns(run: Run) -> Iterator[tuple[list[Step], str]]:
    """The steps before each call of the model, and its answer."""
    new: list[Step] = []
    answer: list[str] = []
    for step in run.steps:
        if step.role == "model":
            answer.append(step.text)
            continue
        if answer:
            yield new, "\n".join(answer)
            new, answer = [], []
        new.append(step)
    if answer:
        yield new, "\n".join(answer)


def billed(run: Run, session: Session, offload: Offload | None) -> Bill:
    """What a run costs; `offload` is None for a conversation without Coatcheck."""
    bill = Bill()
    read = toolkit(session)[0]
    stubs: list[_Stub] = []
    sent, known = 0, ""
    new = SCHEMAS if offload else 0
    for steps, answer in turns(run):
        for step in steps:
            text, pointer = offload(session, step.text) if offload and step.role == "result" else (step.text, None)
            if pointer is not None:
                stubs.append(_Stub(pointer, step.text, text))
                bill.stubs += 1
            known += text + "\n"
            new += _tokens(text)
        for stub in stubs:
            if things := _unseen(stub, answer, known):
                page = _page(read, stub, things)
                stub.pages.append(page)
                known += page + "\n"
                bill.call(sent, new, _ASKING)
                bill.reads += 1
                sent, new = sent + new, _ASKING + _tokens(page)
        output = _tokens(answer)
        bill.call(sent, new, output)
        sent, new = sent + new, output
        known += answer + "\n"
    return bill


def _unseen(stub: _Stub, answer: str, known: str) -> list[str]:
    """The things of a stored result that an answer uses and that the model has not seen anywhere."""
    words = [word for word in THING.findall(answer) if DISTINCT.search(word)]
    lines = [line.strip() for line in re.split(r"\n|\\n", answer)]
    used = dict.fromkeys([line for line in lines if len(line) >= _LINE] + words)
    return [one for one in used if one in stub.content and not stub.shows(one) and one not in known][:_ASKED]


def _page(read: Tool, stub: _Stub, things: list[str]) -> str:
    """One read for all the things that an answer uses."""
    return read.run(pointer=stub.pointer, grep="|".join(re.escape(thing[:80]) for thing in things))


def by_limit(limit: int) -> Offload:
    return partial(_externalized, Policy(max_tokens=limit))


def _externalized(policy: Policy, session: Session, text: str) -> tuple[str, str | None]:
    outcome = session.externalize(text, policy=policy)
    return outcome.text, outcome.ref.pointer if outcome.ref else None


def truncated(session: Session, text: str) -> tuple[str, str | None]:
    """Both ends of a result, and nothing to read the rest with."""
    return (text if len(text) < 12_000 else f"{text[:8_000]}\n[…]\n{text[-4_000:]}"), None


def effect(bench: Bench) -> Iterator[Row]:
    folder = corpus()
    if folder is None:
        print("there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)")
        return
    ways: dict[str, Offload | None] = {
        "inline": None,
        "truncated": truncated,
        **{f"over {limit:,} tokens": by_limit(limit) for limit in _LIMITS},
        "default policy": partial(_externalized, Policy()),
    }
    recorded = list(runs(folder, quick=bench.quick))
    bills: dict[str, list[Bill]] = {}
    for number, (name, way) in enumerate(ways.items()):
        with coatcheck.open("memory:") as store:
            bills[name] = [billed(run, store.session(f"{number}-{at}"), way) for at, run in enumerate(recorded)]
    for source in dict.fromkeys(run.source for run in recorded):
        mine = [at for at, run in enumerate(recorded) if run.source == source]
        inline = [bills["inline"][at] for at in mine]
        for name in ways:
            ours = [bills[name][at] for at in mine]
            yield _row(source, name, inline, ours)


def _row(source: str, name: str, inline: list[Bill], ours: list[Bill]) -> Row:
    worse = sum(one.cost > 1.01 * base.cost for one, base in zip(ours, inline, strict=True))
    return Row(
        f"{source}: {name}", sum(one.cost for one in inline), sum(one.cost for one in ours), None, "count",
        note=f"{worse} of {len(ours)} runs over 1% worse, {sum(one.stubs for one in ours)} stubs, "
        f"{sum(one.reads for one in ours)} reads, largest context {max(one.largest for one in ours):,}",
    )  # fmt: skip
