"""A gigabyte in and out: the memory it takes, and the cost of reading a few bytes in the middle."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coatcheck
from benchmarks.bench import MB, Bench, data, write_data
from benchmarks.machine import peak
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved

_FULL = 1024 * MB
_QUICK = 64 * MB
_MEMORY = 64 * MB
_READ = 4096


def large(bench: Bench) -> Iterator[Row]:
    size = _QUICK if bench.quick else _FULL
    source, folder = bench.new_folder("source") / "large.txt", bench.new_folder("store")
    write_data(source, size)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.large", str(folder), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )
    source.unlink()
    seen = json.loads(done.stdout)
    before = seen["before"]
    yield Row(f"put {size // MB} MB: memory", before, seen["put"], _MEMORY, "memory")
    yield Row(f"open {size // MB} MB: memory", before, seen["read"], _MEMORY, "memory")
    with coatcheck.open(folder) as store:
        session = store.session("bench")
        little = session.put(data(MB)).pointer
        times = interleaved(
            _reader(session, little, MB),
            _reader(session, seen["pointer"], size),
            bench.rounds(1000),
        )
    yield timed_row(f"4 KB at an offset in {size // MB} MB against in 1 MB", times, 3.0)


def _reader(session: coatcheck.Session, pointer: str, size: int) -> Side[int]:
    def read(offset: int) -> None:
        with session.open(pointer) as stream:
            stream.seek(offset)
            assert len(stream.read(_READ)) == _READ

    return Side(lambda: random.randrange(size - _READ), read)


def _through(folder: str, source: str) -> None:
    """In a separate process: put the file, read it back, and print the peak memory of each."""
    with coatcheck.open(folder) as store:
        session = store.session("bench")
        session.get(session.put("so that everything is loaded"))
        before = peak()
        ref = session.put(Path(source))
        put = peak()
        running = hashlib.sha256()
        with session.open(ref) as stream:
            while piece := stream.read(256 * 1024):
                running.update(piece)
        assert running.hexdigest() == ref.artifact_id
        print(json.dumps({"before": before, "put": put, "read": peak(), "pointer": ref.pointer}))


if __name__ == "__main__":
    _through(*sys.argv[1:])
