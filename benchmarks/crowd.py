"""Concurrency: eight threads in one process, and eight processes, compared with one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import coatcheck
from benchmarks.bench import KB, Bench, text
from benchmarks.report import Row
from benchmarks.timing import Times, no_collection

_MANY = 8
_SIZE = 20 * KB


def threads(bench: Bench) -> Iterator[Row]:
    """Throughput of one thread and of eight, taking turns. With group commit, eight share their
    syncs."""
    each = bench.rounds(100)
    rates: dict[int, list[float]] = {1: [], _MANY: []}
    with bench.new_store() as store, no_collection():
        session = store.session("bench")
        for turn in range(bench.rounds(10) + 1):
            for count, seen in rates.items():
                rate = _threads_rate(session, count, each)
                if turn:  # the first is a warm-up
                    seen.append(rate)
    one, many = statistics.median(rates[1]), statistics.median(rates[_MANY])
    yield Row(f"{_MANY} threads put 20 KB, power", one, many, 2.0, "rate", at_least=True)


def _threads_rate(session: coatcheck.Session, count: int, each: int) -> float:
    ready = threading.Barrier(count + 1)

    def work() -> None:
        texts = [text(_SIZE) for _ in range(each)]
        ready.wait()
        for one in texts:
            session.put(one)

    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return count * each / (time.perf_counter() - start)


def processes(bench: Bench) -> Iterator[Row]:
    """Throughput of one process and of eight, taking turns, with errors and the wait of the
    slowest."""
    each = bench.rounds(100)
    with bench.new_store() as store:
        folder = Path(store.url)
    workers = [_Worker(folder) for _ in range(_MANY)]
    rates: dict[int, list[float]] = {1: [], _MANY: []}
    took: list[float] = []
    errors = 0
    for turn in range(bench.rounds(10) + 1):
        for count, seen in rates.items():
            for worker in workers[:count]:
                worker.prepare(each)
            start = time.perf_counter()
            for worker in workers[:count]:
                worker.start()
            answers = [worker.answer() for worker in workers[:count]]
            rate = count * each / (time.perf_counter() - start)
            errors += sum(failed for _, failed in answers)
            if turn:  # the first is a warm-up
                seen.append(rate)
                if count == _MANY:
                    took += [one for times, _ in answers for one in times]
    for worker in workers:
        worker.close()
    waits = Times.of(took)
    one, many = statistics.median(rates[1]), statistics.median(rates[_MANY])
    yield Row(f"{_MANY} processes put 20 KB, power", one, many, 1.0, "rate", at_least=True)
    yield Row(f"{_MANY} processes: p99 against p50", waits.p50, waits.p99, 20.0)
    yield Row(f"{_MANY} processes: errors", None, errors, 0, "count")


class _Worker:
    """A process with the store open, that puts on request."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.crowd", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def prepare(self, each: int) -> None:
        """Tell the process to create its texts, and wait until it has."""
        self._tell(str(each))
        self._answer()

    def start(self) -> None:
        self._tell("go")

    def answer(self) -> tuple[list[float], int]:
        """The time of each put, and the number of errors."""
        result = json.loads(self._answer())
        return result["times"], result["errors"]

    def close(self) -> None:
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _work(folder: str) -> None:
    with coatcheck.open(folder) as store, no_collection():
        session = store.session(f"worker {os.getpid()}")
        while line := sys.stdin.readline():
            texts = [text(_SIZE) for _ in range(int(line))]
            print("ready", flush=True)
            sys.stdin.readline()
            times, errors = [], 0
            for one in texts:
                start = time.perf_counter()
                try:
                    session.put(one)
                except Exception as error:  # noqa: BLE001 - any error at all is what this counts
                    print(f"{type(error).__name__}: {error}", file=sys.stderr)
                    errors += 1
                times.append(time.perf_counter() - start)
            print(json.dumps({"times": times, "errors": errors}), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1])
