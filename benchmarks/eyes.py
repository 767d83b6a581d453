"""What the model sees: does the stub lead to the answer, and does one read give it? On recorded
runs.

A *used thing* is a name, number or address that the model wrote after it had got a large result,
that is in this result, and that nothing before the result contains. Each is looked for in the
stored result with the tool that a model has: by a grep for the thing itself, and by a grep for a
word that the run already contained before the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

from benchmarks.bench import Bench, corpus
from benchmarks.report import Row
from benchmarks.runs import Run, runs
from coatcheck import Policy, Session, tokens, toolkit
from coatcheck.audit import DISTINCT, THING

LARGE = 3_000
"""Estimated tokens above which a result is stored: the default."""

_WORD = re.compile(r"[^\W_][\w.:/@-]{4,60}", re.ASCII)
_ESCAPE = re.compile(r"\\+[nrt]")
_SMALLER = 1_000
_PER_RESULT = 8
_TRIED = 12


@dataclass(slots=True)
class _Found:
    """What was found in some results."""

    things: int = 0
    in_stub: int = 0
    by_thing: int = 0
    by_word: int = 0
    by_first_words: int = 0
    pages: list[int] = field(default_factory=list)
    stubs: list[int] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: _Found) -> _Found:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def eyes(bench: Bench) -> Iterator[Row]:
    folder = corpus()
    if folder is None:
        print(
            "there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)"
        )
        return
    by_form = {"lines": _Found(), "a single line": _Found()}
    smaller = _Found()
    with bench.new_store("process") as store:
        for number, run in enumerate(runs(folder, quick=bench.quick)):
            for result, found in _looked_up(run, store.session(f"run-{number}")):
                if tokens.estimate(result) <= LARGE:
                    smaller += found
                else:
                    by_form["lines" if result.count("\n") > 2 else "a single line"] += found
    for form, one in by_form.items():
        print(
            f"\n{form}: {one.things} used things in {len(one.stubs)} results ({dict(one.sources)})"
        )
        print("\n".join(f"  not found: {each}" for each in one.missed[:20]))
    for form, least in (("lines", 0.99), ("a single line", 0.97)):
        yield _share(
            f"{form}: found by one grep for it", by_form[form].by_thing, by_form[form].things, least
        )
    found = by_form["lines"]
    found += by_form["a single line"]
    yield _share(
        "found by one grep for a word that the run knew", found.by_word, found.things, 0.65
    )
    yield _share(
        "the same, with one of the three nearest words", found.by_first_words, found.things, None
    )
    yield _share("in the stub itself", found.in_stub, found.things, None)
    yield Row("tokens of a page for it, median", None, median(found.pages), 400, "count")
    yield Row("tokens of a page for it, mean", None, mean(found.pages), None, "count")
    yield Row("tokens of a stub, most", None, max(found.stubs), 260, "count")
    yield Row("tokens of a stub, mean", None, mean(found.stubs), None, "count")
    yield _share(
        "results of 1,000 to 3,000 tokens: found by one grep for it",
        smaller.by_thing,
        smaller.things,
        None,
    )
    yield _share(
        "results of 1,000 to 3,000 tokens: by a word that the run knew",
        smaller.by_word,
        smaller.things,
        None,
    )


def _share(case: str, part: int, whole: int, least: float | None) -> Row:
    return Row(
        case,
        None,
        part / whole if whole else 1.0,
        least,
        "share",
        at_least=True,
        note=f"{part} of {whole}",
    )


def _looked_up(run: Run, session: Session) -> Iterator[tuple[str, _Found]]:
    """Store the large results of a run of which something was used, and look for that."""
    read = toolkit(session)[0]
    policy = Policy(max_tokens=_SMALLER)
    for at, step in enumerate(run.steps):
        if step.role != "result" or tokens.estimate(step.text) <= _SMALLER:
            continue
        before = "\n".join(one.text for one in run.steps[:at])
        later = "\n".join(one.text for one in run.steps[at + 1 :] if one.role == "model")
        things = _used(step.text, before, later)
        stub = session.externalize(step.text, policy=policy) if things else None
        if stub is None or stub.ref is None:
            continue
        ask = partial(read.run, pointer=stub.ref.pointer)
        found = _Found(stubs=[tokens.exact(stub.text)], sources=Counter({run.source: len(things)}))
        known = _known(step.text, run, at)[:_TRIED]
        by_words = [ask(grep=f"(?i){re.escape(word)}").partition("\n")[2] for word in known]
        for thing in things:
            page = ask(grep=re.escape(thing))
            is_shown = thing in page.partition("\n")[2]
            holding = [number for number, text in enumerate(by_words) if thing in text]
            found += _Found(
                things=1,
                in_stub=thing in stub.text,
                by_thing=is_shown,
                by_word=bool(holding),
                by_first_words=any(number < 3 for number in holding),
                pages=[tokens.exact(page)],
                missed=[] if is_shown else [f"{thing!r} of {run.source}: {page[:160]!r}"],
            )
        yield step.text, found


def _used(result: str, before: str, later: str) -> list[str]:
    """The first things that the model used of a result, in the order of their use."""
    things = dict.fromkeys(
        word for word in THING.findall(_ESCAPE.sub(" ", later)) if DISTINCT.search(word)
    )
    return [word for word in things if word in result and word not in before][:_PER_RESULT]


def _known(result: str, run: Run, at: int) -> list[str]:
    """Words of the steps before that occur in the result, those nearest to the call first, telling
    ones before others. A model knows the words, not how often they occur."""
    inside = result.lower()
    words: dict[str, None] = {}
    for step in reversed(run.steps[:at]):
        if step.role != "result":
            words |= dict.fromkeys(
                word for word in _WORD.findall(step.text) if word.lower() in inside
            )
    return sorted(words, key=lambda word: not DISTINCT.search(word) and word[0].islower())
