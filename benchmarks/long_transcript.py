"""A one-gigabyte transcript: open it, read its last hundred messages, append one more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import coatcheck
from benchmarks.bench import KB, MB, Bench, text
from benchmarks.machine import peak
from benchmarks.report import Row
from coatcheck.transcript import Transcript

_FULL = 1024 * MB
_QUICK = 64 * MB
_MEMORY = 100 * MB
_OPEN = 0.05
_LAST = 100


def long_transcript(bench: Bench) -> Iterator[Row]:
    size = _QUICK if bench.quick else _FULL
    folder = bench.new_folder("transcript")
    path, store = folder / "session.jsonl", folder / "store"
    _write(path, size)
    with (
        coatcheck.open(store, durability="process") as opened,
        Transcript(path, opened.session("agent")) as transcript,
    ):
        transcript.extend([_result(number, 64 * KB) for number in range(_LAST)])
    os.sync()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_transcript", str(store), str(path)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    name = f"transcript of {size // MB} MB"
    yield Row(f"{name}: open", None, seen["open"], _OPEN)
    yield Row(f"{name}: last {_LAST} messages with stubs", None, seen["stubs"], None)
    yield Row(f"{name}: last {_LAST} messages whole", None, seen["whole"], None)
    yield Row(f"{name}: append one more", None, seen["append"], None)
    yield Row(f"{name}: memory for all that", seen["before"], seen["after"], _MEMORY, "memory")


def _write(path: Path, size: int) -> None:
    """Lines as agents write them, of a megabyte that repeats."""
    lines = [json.dumps(_result(number, 8 * KB)).encode() + b"\n" for number in range(128)]
    block = b"".join(lines)
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)


def _result(number: int, size: int) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text(size)}


def _through(store: str, path: str) -> None:
    """In a separate process: open, read and append, and print the time of each and the memory of
    all."""
    with coatcheck.open(store) as opened:
        session = opened.session("agent")
        session.get(session.put("so that everything is loaded"))
        before, times = peak(), [time.perf_counter()]
        transcript = Transcript(path, session)
        times.append(time.perf_counter())
        assert len(list(transcript.messages(-_LAST))) == _LAST
        times.append(time.perf_counter())
        assert sum(1 for _ in transcript.messages(-_LAST, mode="whole")) == _LAST
        times.append(time.perf_counter())
        transcript.append(_result(_LAST, 64 * KB))
        times.append(time.perf_counter())
        transcript.close()
        took = [after - since for since, after in pairwise(times)]
        figures = dict(zip(("open", "stubs", "whole", "append"), took, strict=True))
        print(json.dumps({**figures, "before": before, "after": peak()}))


if __name__ == "__main__":
    _through(*sys.argv[1:])
