"""Moving results out of the context: the cost of small and large ones, 64 threads at once, and the
savings."""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import coatcheck
from benchmarks.bench import KB, MB, Bench, size_name
from benchmarks.floors import Writer
from benchmarks.peers.contents import KINDS, content
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, Times, interleaved, no_collection
from coatcheck import ToolCall, ToolExecutor
from coatcheck._open import Durability

_SMALL = "ok, 3 files changed, 14 insertions(+), 2 deletions(-); all checks passed; nothing else to do here now"
_RECORD = {
    "ok": True,
    "files": 3,
    "insertions": 14,
    "deletions": 2,
    "checks": "passed",
    "next": None,
    "took": 0.25,
}
_LOOPS = 200
_ALL = coatcheck.Policy(
    max_tokens=1_000
)  # by expected cost, results stay once a session has seen very many
_OVER = 10e-6
_CALL = 60e-6
_CROWD = 64
_CROWD_SIZE = 20 * KB
_EACH: dict[Durability, int] = {"power": 10, "process": 20}  # results of each thread in a turn


def small(bench: Bench) -> Iterator[Row]:
    """A result of 100 bytes: the cost beyond calling the function."""
    with bench.new_store("process") as store:
        session = store.session("bench")

        def text() -> str:
            return _SMALL

        def record() -> dict[str, object]:
            return _RECORD

        offloaded = session.offload(text)
        executor = ToolExecutor(session, [text])
        ways: tuple[tuple[str, Callable[[], object], Callable[[], object], float | None], ...] = (
            ("100 bytes of text", text, lambda: session.externalize(text(), tool="text"), _OVER),
            (
                "100 bytes of JSON",
                record,
                lambda: session.externalize(record(), tool="record"),
                _OVER,
            ),
            ("100 bytes, @session.offload", text, offloaded, _OVER),
            (
                "100 bytes, ToolExecutor",
                text,
                lambda: executor.run(ToolCall("c", "text", {})),
                _CALL,
            ),
        )
        for what, plain, ours, limit in ways:
            times = interleaved(_repeated(plain), _repeated(ours), bench.rounds(100))
            floor, own = (_each(one) for one in times)
            yield Row(f"externalize {what}", floor.p50, own.p50, limit, "over", times=(floor, own))


def _repeated(call: Callable[[], object]) -> Side[None]:
    def run(nothing: None) -> None:
        for _ in range(_LOOPS):
            call()

    return Side(lambda: None, run)


def _each(times: Times) -> Times:
    return Times(times.p50 / _LOOPS, times.p99 / _LOOPS, times.mean / _LOOPS)


def large(bench: Bench) -> Iterator[Row]:
    """New content in durability `process`, compared with only hashing and writing it."""
    numbers = itertools.count(1)
    for size, rounds, limit in ((20 * KB, 300, None), (MB, 60, 1.6)):
        for kind in KINDS:
            floor = Writer(bench.new_folder("floor"), durable=False)
            with bench.new_store("process") as store:
                session = store.session("bench")
                new = functools.partial(_new, kind, size, numbers)
                times = interleaved(
                    Side(lambda new=new: new().encode(), floor.put),  # type: ignore[misc]
                    Side(new, functools.partial(session.externalize, tool="search")),
                    bench.rounds(rounds),
                )
            floor.close()
            yield timed_row(f"externalize {size_name(size)} of {kind}", times, limit)


def _new(kind: str, size: int, numbers: Iterator[int]) -> str:
    return content(kind, size, next(numbers))


def crowd(bench: Bench) -> Iterator[Row]:
    """64 threads on one session compared with one: results per second, lost and duplicate
    artifacts."""
    made = itertools.count(1)
    lost = doubled = 0
    for durability, each in _EACH.items():
        total = _CROWD * bench.rounds(each)  # in each turn, of one thread or of all together
        rates: dict[int, list[float]] = {1: [], _CROWD: []}
        found: list[str] = []
        with bench.new_store(durability) as store, no_collection():
            session = store.session("bench")
            for turn in range(3 + 1):
                for count, seen in rates.items():
                    share = range(total // count)
                    texts = [
                        [content("log", _CROWD_SIZE, next(made)) for _ in share]
                        for _ in range(count)
                    ]
                    rate = _rate(session, texts, found)
                    if turn:  # the first is a warm-up
                        seen.append(rate)
            kept = [ref.artifact_id for ref in session.list()]
        one, many = statistics.median(rates[1]), statistics.median(rates[_CROWD])
        yield Row(
            f"{_CROWD} threads externalize 20 KB, {durability}",
            one,
            many,
            1.0,
            "rate",
            at_least=True,
        )
        lost += len(found) - len(_ids(set(found), kept))
        doubled += len(kept) - len(set(kept))
    yield Row(f"{_CROWD} threads: artifacts lost", None, lost, 0, "count")
    yield Row(f"{_CROWD} threads: artifacts doubled", None, doubled, 0, "count")


def _ids(pointers: set[str], kept: list[str]) -> set[str]:
    """The ids that a stub pointed to."""
    return {artifact_id for artifact_id in kept if f"art:{artifact_id[:12]}" in pointers}


def _rate(session: coatcheck.Session, texts: list[list[str]], found: list[str]) -> float:
    ready = threading.Barrier(len(texts) + 1)

    def work(own: list[str]) -> None:
        ready.wait()
        for text in own:
            ref = session.externalize(text, tool="search", policy=_ALL).ref
            assert ref is not None
            found.append(ref.pointer[:16])

    workers = [threading.Thread(target=work, args=(own,)) for own in texts]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(map(len, texts)) / (time.perf_counter() - start)


def demo(bench: Bench) -> Iterator[Row]:
    """The turns of `make demo`: the tokens that the model is sent, with Coatcheck and without."""
    if find_spec("anthropic") is None:
        print("\ndemo is skipped: anthropic is not installed")
        return
    from examples.demo import run

    turns = run()
    counts = [
        (f"turn {number}", turn.tokens_without, turn.tokens_with)
        for number, turn in enumerate(turns, 1)
    ]
    both = [turn for turn in turns if not turn.is_refused_without]
    total = sum(turn.tokens_without for turn in both), sum(turn.tokens_with for turn in both)
    counts.append((f"the {len(both)} turns that fit the window without Coatcheck", *total))
    for what, without, sent in counts:
        note = (
            f"{without / sent:.1f} times as many without"
            if without > sent
            else "Coatcheck's tools are described"
        )
        yield Row(f"demo, {what}: tokens", without, sent, None, "count", note=note)
