"""What the model sees: does the stub lead to the answer, and does one read give it? On recorded runs of data agents.

A *used thing* is a name, number or address that the model wrote after it had got a large result, that is in this
result, and that nothing before the result contains. Each is looked for in the stored result with the tool that a model
has: by a grep for the thing itself, and by a grep for a word that the run already contained before the result.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median

from benchmarks.bench import Bench, corpus
from benchmarks.report import Row
from benchmarks.runs import Run, runs
from coatcheck import Policy, Session, tokens, toolkit

LARGE = 1_000
"""Estimated tokens of a result that is stored: a third of the default, for more cases."""

_THING = re.compile(r"[A-Za-z0-9][\w.:/@%+-]{4,100}[A-Za-z0-9]")
_WORD = re.compile(r"[^\W_][\w.:/@-]{3,60}", re.ASCII)
_DISTINCT = re.compile(r"\d|[a-z][A-Z]|[A-Za-z0-9][._/@:-][A-Za-z0-9]")
_PER_RESULT = 8
_TRIED = 12
_COMMON = frozenset(
    "about after again also because been before being both could does each first from have here into just like more most "
    "need next only other over some such than that their them then there these they this those through time used using "
    "very want were what when where which while will with without would your".split()
)


@dataclass(slots=True)
class _Found:
    """What was found in the results of one form: `lines`, or a `single line`."""

    things: int = 0
    in_stub: int = 0
    by_thing: int = 0
    by_word: int = 0
    by_first_words: int = 0
    pages: list[int] = field(default_factory=list)
    stubs: list[int] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)


def eyes(bench: Bench) -> Iterator[Row]:
    folder = corpus()
    if folder is None:
        print("there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)")
        return
    found: defaultdict[str, _Found] = defaultdict(_Found)
    with bench.new_store("process") as store:
        for number, run in enumerate(runs(folder)):
            if not bench.quick or number % 10 == 0:
                _look(run, store.session(f"run-{number}"), found)
    for form, one in sorted(found.items()):
        print(f"\n{form}: {one.things} used things in {len(one.stubs)} results ({dict(one.sources)})")
        print("\n".join(f"  not found: {each}" for each in one.missed[:20]))
    least = {"lines": 0.99, "single line": 0.97}
    for form, one in sorted(found.items()):
        yield _share(f"{form}: found by one grep for it", one.by_thing, one.things, least[form])
    together = _Found(
        things=sum(one.things for one in found.values()),
        in_stub=sum(one.in_stub for one in found.values()),
        by_word=sum(one.by_word for one in found.values()),
        by_first_words=sum(one.by_first_words for one in found.values()),
        pages=[size for one in found.values() for size in one.pages],
        stubs=[size for one in found.values() for size in one.stubs],
    )
    yield _share("found by one grep for a word that the run knew", together.by_word, together.things, 0.65)
    yield _share("the same, by one of three words nearest to the call", together.by_first_words, together.things, None)
    yield _share("in the stub itself", together.in_stub, together.things, None)
    yield Row("tokens of a page for it, median", None, median(together.pages), 400, "count")
    yield Row("tokens of a page for it, mean", None, mean(together.pages), None, "count")
    yield Row("tokens of a stub, most", None, max(together.stubs), 260, "count")
    yield Row("tokens of a stub, mean", None, mean(together.stubs), None, "count")


def _share(case: str, part: int, whole: int, least: float | None) -> Row:
    return Row(case, None, part / max(1, whole), least, "share", at_least=True, note=f"{part} of {whole}")


def _look(run: Run, session: Session, found: dict[str, _Found]) -> None:
    read = toolkit(session)[0]
    policy = Policy(max_tokens=LARGE)
    for at, step in enumerate(run.steps):
        if step.role != "result" or tokens.estimate(step.text) <= LARGE:
            continue
        before = "\n".join(one.text for one in run.steps[:at])
        later = "\n".join(one.text for one in run.steps[at + 1 :] if one.role == "model")
        things = _used(step.text, before, later)
        if not things:
            continue
        stub = session.externalize(step.text, policy=policy)
        if stub.ref is None:
            continue
        one = found["lines" if step.text.count("\n") > 2 else "single line"]
        one.stubs.append(tokens.exact(stub.text))
        one.sources[run.source] += len(things)
        pages = {
            word: read.run(pointer=stub.ref.pointer, grep=re.escape(word))
            for word in _known(step.text, run, at)[:_TRIED]
        }
        for thing in things:
            one.things += 1
            page = read.run(pointer=stub.ref.pointer, grep=re.escape(thing))
            one.pages.append(tokens.exact(page))
            shown = thing in page.partition("\n")[2]
            one.by_thing += shown
            one.in_stub += thing in stub.text
            if not shown:
                one.missed.append(f"{thing!r} of {run.source}, {stub.ref.pointer}: {page[:160]!r}")
            holding = [number for number, text in enumerate(pages.values()) if thing in text.partition("\n")[2]]
            one.by_word += bool(holding)
            one.by_first_words += any(number < 3 for number in holding)


def _used(result: str, before: str, later: str) -> list[str]:
    """The first things that the model used of a result, in the order of their use."""
    things = dict.fromkeys(word for word in _THING.findall(later) if _DISTINCT.search(word))
    return [word for word in things if word in result and word not in before][:_PER_RESULT]


def _known(result: str, run: Run, at: int) -> list[str]:
    """Words of the steps before that occur in the result, those nearest to the call first, telling ones before others.
    A model knows the words, not how often they occur."""
    inside = set(_WORD.findall(result))
    words: dict[str, None] = {}
    for step in [*reversed(run.steps[:at])]:
        if step.role != "result":
            words |= dict.fromkeys(word for word in _WORD.findall(step.text) if word in inside)
    telling = [word for word in words if word.lower() not in _COMMON]
    return sorted(telling, key=lambda word: not _DISTINCT.search(word) and word[0].islower())
