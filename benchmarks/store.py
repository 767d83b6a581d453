"""One caller and one artifact at a time: put, get, and put of existing content."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator

from benchmarks.bench import KB, MB, Bench, data, size_name
from benchmarks.floors import Files, Index, Writer
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved
from coatcheck._open import Durability

# Sizes, how often, and the limit of the ratio
_PUT: dict[Durability, tuple[tuple[int, int, float], ...]] = {
    "power": (
        (KB, 300, 1.2),
        (20 * KB, 300, 1.2),
        (100 * KB, 300, 1.2),
        (MB, 150, 1.4),
        (20 * MB, 20, 1.3),
    ),
    "process": ((20 * KB, 1000, 1.8), (MB, 200, 1.6)),
}
_GET = ((20 * KB, 2000, 2.0), (100 * KB, 1000, 2.0), (MB, 300, 1.5))
_PUT_AND_GET = ((20 * KB, 500, 2.0), (100 * KB, 300, 2.0), (MB, 100, 2.0))
_AGAIN = ((20 * KB, 2000, 2.0), (100 * KB, 1000, 2.0), (MB, 300, 1.3), (20 * MB, 30, 1.3))


def put(bench: Bench) -> Iterator[Row]:
    """New content, as durable as the store was opened for, against a file that is as durable."""
    for durability, sizes in _PUT.items():
        floor = Writer(bench.new_folder("floor"), durable=durability == "power")
        with bench.new_store(durability) as store:
            session = store.session("bench")
            for size, rounds, limit in sizes:
                os.sync()
                times = interleaved(
                    Side(functools.partial(data, size), floor.put),
                    Side(functools.partial(data, size), session.put),
                    bench.rounds(rounds),
                )
                yield timed_row(f"put {size_name(size)}, {durability}", times, limit)
        floor.close()


def get(bench: Bench) -> Iterator[Row]:
    """A verified get by pointer, against reading and hashing a file; both warm."""
    with bench.new_store("process") as store:
        session = store.session("bench")
        for size, rounds, limit in _GET:
            count = 20 if size >= MB else 100
            pointers = [session.put(data(size)).pointer for _ in range(count)]
            floor = Files(bench.new_folder("floor"), [data(size) for _ in range(count)])
            os.sync()
            times = interleaved(
                Side(functools.partial(random.choice, floor.paths), floor.get),
                Side(functools.partial(random.choice, pointers), session.get),
                bench.rounds(rounds),
            )
            yield timed_row(f"get {size_name(size)}", times, limit)

    yield from _put_and_get(bench)


def _put_and_get(bench: Bench) -> Iterator[Row]:
    """A verified get of what was put just before, against reading and hashing a file that was
    written just before. Only the get is timed."""
    with bench.new_store("process") as store:
        session = store.session("bench")
        for size, rounds, limit in _PUT_AND_GET:
            floor = Files(bench.new_folder("floor"), [])
            times = interleaved(
                Side(lambda floor=floor, size=size: floor.add(data(size)), floor.get),  # type: ignore[misc]
                Side(lambda size=size: session.put(data(size)).pointer, session.get),  # type: ignore[misc]
                bench.rounds(rounds),
            )
            yield timed_row(f"put, then get {size_name(size)}", times, limit)


def again(bench: Bench) -> Iterator[Row]:
    """A put that adds nothing, against hashing the bytes and one look-up in an index."""
    with bench.new_store() as store:
        session = store.session("bench")
        for size, rounds, limit in _AGAIN:
            count = 1 if size > MB else 20
            contents = [data(size) for _ in range(count)]
            for one in contents:
                session.put(one)
            session.list(limit=1)  # a read: what was put is in the catalog after
            floor = Index(bench.new_folder("floor") / "index.sqlite", contents)
            times = interleaved(
                Side(functools.partial(random.choice, contents), floor.find),
                Side(functools.partial(random.choice, contents), session.put),
                bench.rounds(rounds),
            )
            floor.close()
            yield timed_row(f"put {size_name(size)} again", times, limit)
