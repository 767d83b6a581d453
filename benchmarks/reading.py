"""Reads: lines from the middle of a gigabyte, grep compared with RE2, SQL compared with DuckDB."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import re2  # type: ignore[import-untyped]  # it ships no types

import coatcheck
from benchmarks.bench import MB, Bench, data, write_data
from benchmarks.machine import peak
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved
from coatcheck.reading.sql import pool
from coatcheck.storage.frames import FRAME

_FULL, _QUICK = 1024 * MB, 64 * MB
_LINES = 50
_SEARCHED = 100 * MB
_ABSENT = (  # no line of `_log` matches any of them
    ("a text", "connection refused"),
    ("a text of rare letters", "QUIC handshake"),
    ("alternatives", r"(FATAL|PANIC|Traceback) .*timeout"),
    ("a class", r"\b[0-9a-f]{16,}\b"),
    ("any case", "(?i)segmentation fault"),
)
_RARE_NAME, _RARE = _ABSENT[1]
_PRESENT = r"\d"
_BACKTRACKING = "(a+)+$"
_ROWS = 250_000
_QUERY = "SELECT city, count(*) AS n, sum(amount) AS total FROM {} GROUP BY city ORDER BY city"
_DUCKDB = {"csv": "read_csv('{}')", "jsonl": "read_json('{}', format='newline_delimited')"}


def lines(bench: Bench) -> Iterator[Row]:
    """Lines at a random place of a large text, against the same of a small one and against a bare
    pread of a frame."""
    size = _QUICK if bench.quick else _FULL
    sources = [bench.new_folder("source") / "large.txt", bench.new_folder("source") / "small.txt"]
    counts = [write_data(path, length) for path, length in zip(sources, (size, MB), strict=True)]
    with bench.new_store("process") as store:
        session = store.session("bench")
        large, small = (
            _reader(session, session.put(path).pointer, count)
            for path, count in zip(sources, counts, strict=True)
        )
        title = f"{_LINES} lines in {size // MB} MB"
        yield timed_row(
            f"{title} against in 1 MB", interleaved(small, large, bench.rounds(1000)), 3.0
        )
        file = os.open(sources[0], os.O_RDONLY)
        bare = Side(
            lambda: random.randrange(size // FRAME) * FRAME, lambda at: os.pread(file, FRAME, at)
        )
        times = interleaved(bare, large, bench.rounds(1000))
        os.close(file)
    yield Row(
        f"{title} against a bare pread", times[0].p50, times[1].p50, 0.005, "over", times=times
    )


def _reader(session: coatcheck.Session, pointer: str, count: int) -> Side[int]:
    def read(first: int) -> None:
        page = session.read(pointer, lines=f"{first}:{first + _LINES - 1}")
        assert page.text.count("\n") == _LINES

    return Side(lambda: random.randrange(1, count - _LINES), read)


def grep(bench: Bench) -> Iterator[Row]:
    """Patterns that match nothing against RE2 on the same bytes in memory; then one that matches
    every line."""
    content = _log(_SEARCHED)
    source = bench.new_folder("source") / "log"
    source.write_bytes(content)
    with bench.new_store("process") as store:
        session = store.session("bench")
        pointer = session.put(source, media_type="text/plain").pointer
        for what, pattern in _ABSENT:
            floor = Side(
                functools.partial(re2.compile, pattern), lambda known: known.search(content)
            )
            times = interleaved(floor, _searcher(session, pointer, pattern), bench.rounds(12))
            yield timed_row(f"grep 100 MB for {what}", times, 2.0)
        floor = Side(
            functools.partial(re2.compile, _RARE), functools.partial(_read_and_search, source)
        )
        times = interleaved(floor, _searcher(session, pointer, _RARE), bench.rounds(12))
        yield timed_row(f"grep 100 MB for {_RARE_NAME}, against reading and RE2", times, None)
        yield _memory(Path(store.url), pointer)
        yield from _first_pages(bench, session, content, pointer)
        hostile = session.put(b"a" * MB + b"!", media_type="text/plain").pointer
        took = _seconds(lambda: session.read(hostile, grep=_BACKTRACKING))
        yield Row(f"grep {_BACKTRACKING} on a line of 1 MB", None, took, 2.0)


def _searcher(session: coatcheck.Session, pointer: str, pattern: str) -> Side[str]:
    def search(pattern: str) -> None:
        assert session.read(pointer, grep=pattern).matches == 0

    return Side(lambda: pattern, search)


def _read_and_search(path: Path, known: re2._Regexp) -> None:
    """What any grep of a file must do: read it piece by piece, and search each."""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(MB):
            known.search(piece)


def _memory(folder: Path, pointer: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.reading", str(folder), pointer]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Row("grep 100 MB: memory", seen["before"], seen["after"], 64 * MB, "memory")


def _first_pages(
    bench: Bench, session: coatcheck.Session, content: bytes, pointer: str
) -> Iterator[Row]:
    """The first page of a pattern that matches every line."""
    size = _QUICK * 4 if bench.quick else _FULL
    large = bench.new_folder("source") / "large.log"
    with large.open("wb") as file:
        for at in range(0, size, len(content)):
            file.write(content[: size - at])
    pointers = pointer, session.put(large, media_type="text/plain").pointer
    large.unlink()

    def side(pointer: str) -> Side[str]:
        return Side(lambda: pointer, lambda pointer: session.read(pointer, grep=_PRESENT))

    small, big = interleaved(side(pointers[0]), side(pointers[1]), bench.rounds(200))
    yield Row("grep 100 MB: first page where every line matches", None, small.p50, 0.02)
    yield Row(f"grep {size // MB} MB: first page where every line matches", None, big.p50, 0.02)


def sql(bench: Bench) -> Iterator[Row]:
    """A query in the child process, against DuckDB in this process on the same file."""
    if find_spec("duckdb") is None:
        print("\nsql is skipped: duckdb is not installed (the extra `sql`)")
        return
    import duckdb

    with bench.new_store("process") as store, duckdb.connect() as database:
        session = store.session("bench")
        for form, reader in _DUCKDB.items():
            source = bench.new_folder("source")
            paths = [source / f"{name}.{form}" for name in ("one", "other")]
            for path in paths:
                path.write_text(_table(form))
            pointers = [session.put(path, name=path.name).pointer for path in paths]
            here = _QUERY.format(reader.format(paths[0]))
            floor = Side(lambda here=here: here, lambda query: database.execute(query).fetchall())  # type: ignore[misc]
            title = f"SQL on {form.upper()} of {paths[0].stat().st_size // MB} MB"
            ask = functools.partial(session.read, query=_QUERY.format("artifact"))
            pool.close()  # the child of the format before
            first = _seconds(functools.partial(ask, pointers[0]))
            times = interleaved(
                floor, Side(functools.partial(pointers.__getitem__, 0), ask), bench.rounds(12)
            )
            yield Row(f"{title}, first call", times[0].p50, first, None)
            yield timed_row(f"{title}, second call on", times, 1.5)
            turns = iter(pointers * bench.rounds(200))
            times = interleaved(floor, Side(functools.partial(next, turns), ask), bench.rounds(12))
            yield timed_row(f"{title}, another file each time", times, None)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _log(size: int) -> bytes:
    """Lines of a log, never the same twice."""
    levels, verbs = (
        ("INFO", "DEBUG", "WARN", "ERROR"),
        ("handled", "refused", "queued", "forwarded", "dropped"),
    )
    out, length = [], 0
    while length < size:
        number = random.getrandbits(60)
        line = (
            f"2025-03-{number % 28 + 1:02}T{number % 24:02}:{number % 60:02}:{number % 59:02}.{number % 997:03}Z "
            f"{levels[number % 4]} worker-{number % 31} {verbs[number % 5]} request {number % 2**44:011x} of user "
            f"{number % 99_991} in {number % 1_009} ms, {number % 65_537} bytes from the upstream connection\n"
        )
        out.append(line)
        length += len(line)
    return "".join(out).encode()[:size]


def _table(form: str) -> str:
    """A table of some ten megabytes, as CSV or JSONL."""
    cities = ("Aarhus", "Bergen", "Cork", "Delft", "Evora", "Faro", "Ghent", "Hull")
    rows = [
        {
            "id": number,
            "city": random.choice(cities),
            "amount": random.randrange(10**6) / 100,
            "note": f"{random.getrandbits(96):x}",
        }
        for number in range(_ROWS)
    ]
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    return (
        "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"
    )


def _grep_alone(folder: str, pointer: str) -> None:
    """In a separate process: grep, and print the peak memory."""
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("bench")
        session.read(session.put(data(MB)), grep=_RARE)  # so that everything is loaded
        before = peak()
        assert session.read(pointer, grep=_RARE).matches == 0
        print(json.dumps({"before": before, "after": peak()}))


if __name__ == "__main__":
    _grep_alone(*sys.argv[1:])
