"""Transcripts: savings on disk and in prompts, deduplication of snapshots, and the cost of
externalizing."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coatcheck
from benchmarks.bench import KB, MB, Bench, corpus
from benchmarks.machine import peak
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved
from coatcheck import transcript
from coatcheck.tokens import estimate
from coatcheck.transcript import Format
from coatcheck.transcript.keep import Keeper
from coatcheck.transcript.scan import binary
from coatcheck.transcript.splice import slim

_FULL = 256 * MB
_QUICK = 16 * MB
_MEMORY = 100 * MB
_SPEED = 2.0
_IMAGE = 1_600  # tokens counted for an image, which is never sent as base64 text
_SNAPSHOTS = "545b45d4.snapshot*.jsonl"


def transcripts(bench: Bench) -> Iterator[Row]:
    folder = corpus()
    if folder is None:
        print("\ntranscripts is skipped: there is no corpus (COATCHECK_CORPUS, or ../shared/data)")
    else:
        files = sorted((folder / "transcripts").glob("*/*"))
        yield from _saved(bench, files)
        yield from _shared(bench, sorted((folder / "transcripts").glob(f"*/{_SNAPSHOTS}")))
        yield from _speed(bench, files)
    yield _memory(bench)


def _saved(bench: Bench, files: list[Path]) -> Iterator[Row]:
    """Bytes of each file before and after, and the average tokens per turn."""
    with bench.new_store("process") as store:
        for file in files:
            copy = _copy(file, bench.new_folder("file"))
            report = transcript.externalize(copy, store.session("bench")).files[0]
            known = transcript.FORMATS[report.format or ""]
            yield Row(f"{file.stem}: bytes", report.bytes_before, report.bytes_after, None, "count")
            before, after = (_per_turn(_parsed(path), known) for path in (file, copy))
            yield Row(f"{file.stem}: tokens a turn", before, after, None, "count")


def _shared(bench: Bench, files: list[Path]) -> Iterator[Row]:
    """Successive snapshots of one session: common content is stored once."""
    with bench.new_store("process") as store:
        for file in files:
            transcript.externalize(_copy(file, bench.new_folder("file")), store.session("bench"))
        store.session("bench").end()
        totals = store.stats()
        title = f"{len(files)} snapshots of a session: payload bytes stored"
        yield Row(title, totals.referenced_bytes, totals.stored_bytes, None, "count")


def _speed(bench: Bench, files: list[Path]) -> Iterator[Row]:
    """All files, one after the other, against parsing and writing each of their lines."""
    files = files[::3] if bench.quick else files
    parts = [
        file.read_bytes().splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
        for file in files
    ]

    def parse_and_write(_: None) -> None:
        for lines in parts:
            for line in lines:
                if line:
                    json.dumps(json.loads(line))

    stores: list[coatcheck.Store] = []

    def prepare() -> tuple[coatcheck.Store, list[Path]]:
        folder = bench.new_folder("files")
        stores.append(bench.new_store("process"))
        return stores[-1], [_copy(file, folder, number) for number, file in enumerate(files)]

    def externalize(given: tuple[coatcheck.Store, list[Path]]) -> None:
        store, copies = given
        session = store.session("bench")
        for copy in copies:
            transcript.externalize(copy, session)

    def make_slim(given: tuple[coatcheck.Store, list[Path]]) -> None:
        store, _ = given
        for lines, known in zip(parts, formats, strict=True):
            keeper = Keeper(store, session=store.session("bench"))
            for line in lines:
                slim(line, known, keeper)

    formats = [transcript.FORMATS[file.parent.name] for file in files]
    for title, ours, limit in (
        ("lines made slim", make_slim, None),
        ("externalize in place", externalize, _SPEED),
    ):
        times = interleaved(
            Side(lambda: None, parse_and_write), Side(prepare, ours), bench.rounds(5)
        )
        yield timed_row(
            f"{title}, {len(files)} files, process, against json.loads and json.dumps", times, limit
        )
    for store in stores:
        store.close()


def _memory(bench: Bench) -> Row:
    """Peak memory for externalizing a large file, in a separate process."""
    size = _QUICK if bench.quick else _FULL
    folder = bench.new_folder("large")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transcripts", str(folder), str(size)],
        check=True,
        capture_output=True,
        text=True,
    )
    seen = json.loads(done.stdout)
    return Row(
        f"externalize {size // MB} MB: memory", seen["before"], seen["after"], _MEMORY, "memory"
    )


def _through(folder: str, size: str) -> None:
    path = Path(folder) / "large.jsonl"
    with coatcheck.open(Path(folder) / "store", durability="process") as store:
        session = store.session("bench")
        _write(path, MB)
        transcript.externalize(path, session)
        transcript.undo(path, store)
        before = peak()
        _write(path, int(size))
        report = transcript.externalize(path, session)
        assert report.is_sound
        print(json.dumps({"before": before, "after": peak(), "bytes": report.bytes_after}))


def _write(path: Path, size: int) -> None:
    """A transcript with results of 2 to 200 KB, all different."""
    rng, written = random.Random(size), 0
    words = [f"{rng.randrange(1 << 24):x}" for _ in range(4_000)]
    with path.open("wb") as file:
        while written < size:
            text = " ".join(rng.choices(words, k=rng.choice((300, 3_000, 30_000))))
            block = {"type": "tool_result", "tool_use_id": f"toolu_{written}", "content": text}
            message = {"role": "user", "content": [block]}
            line = {
                "type": "user",
                "uuid": f"{written:x}",
                "sessionId": "s",
                "message": message,
                "toolUseResult": text,
            }
            written += file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _copy(file: Path, folder: Path, number: int = 0) -> Path:
    return Path(shutil.copyfile(file, folder / f"{number}-{file.name}"))


def _parsed(file: Path) -> list[Any]:
    data = file.read_bytes()
    return (
        [json.loads(line) for line in data.splitlines() if line]
        if file.suffix == ".jsonl"
        else [json.loads(data)]
    )


def _per_turn(lines: list[Any], known: Format) -> float:
    """Average tokens per turn, if each turn sends all messages before it."""
    total = sent = turns = 0
    for message in known.for_model(lines, compacted=False):
        if known.role(message) == "assistant":
            turns += 1
            total += sent
        sent += _tokens(message)
    return total / max(1, turns)


def _tokens(value: Any) -> int:
    if isinstance(value, str):
        return _IMAGE if len(value) > 4 * KB and binary(value) else estimate(value)
    if isinstance(value, dict):
        return sum(estimate(key) + _tokens(one) for key, one in value.items())
    return sum(map(_tokens, value)) if isinstance(value, list) else 1


if __name__ == "__main__":
    _through(*sys.argv[1:])
