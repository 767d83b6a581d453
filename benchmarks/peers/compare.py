"""Ours and theirs in turns: one child process for each, the same content in each round, on the same
disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, size_name
from benchmarks.peers import OURS, PEERS, environment
from benchmarks.peers.contents import KINDS, content
from benchmarks.report import Row
from benchmarks.timing import Times
from coatcheck import tokens

_SIZES = ((20 * 1024, 100), (1024 * 1024, 40))
_AGAIN = 10
_QUIET = {"AGNO_TELEMETRY": "false", "HAYSTACK_TELEMETRY_ENABLED": "False", "DO_NOT_TRACK": "1"}


@dataclass(slots=True)
class Side:
    """A child, or why there is none."""

    name: str
    folder: Path
    process: subprocess.Popen[str] | None = None
    version: str = ""
    missing: str = ""
    took: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    module: str = "child"

    def start(self, python: Path | str) -> None:
        paths = [str(environment.ROOT)] + (
            [str(environment.ROOT / "src")] if self.name == OURS else []
        )
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.{self.module}", self.name, str(self.folder)],
                cwd=self.folder,
                env={**os.environ, **_QUIET, "HOME": str(self.folder.parent), "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        answer = self._answer()
        self.version, self.missing = answer.get("version", ""), answer.get("missing", "")
        if self.missing:
            self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        return self.exchange(request)

    def exchange(self, request: Any) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.close()
        lines = self._log.read_text().split("\n")
        self.missing = (
            f"the process ended: {next(filter(None, reversed(lines)), 'without a message')[:160]}"
        )
        return {"missing": self.missing}

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")


def peers(bench: Bench) -> Iterator[Row]:
    """How long it takes until a result is stored and the model's text is there, for us and each of
    them."""
    sides = list(_started(bench))
    ours, running = sides[0], [side for side in sides if not side.missing]
    numbers = itertools.count(1)
    for size, rounds in _SIZES:
        for kind in KINDS:
            for turn in range(-max(2, rounds // 10), bench.rounds(rounds)):
                number = next(numbers)
                first = number % len(running)
                for side in running[first:] + running[:first]:
                    answer = side.ask(kind=kind, size=size, number=number, call=f"call-{number}")
                    if turn >= 0 and "seconds" in answer:
                        side.took.setdefault((kind, size), []).append(answer["seconds"])
            for side in sides[1:]:
                yield _row(ours, side, kind, size)
            title = f"sha256 of {size_name(size)} of {kind} alone: few of them compute it"
            yield Row(title, None, _hashing(kind, size), None)
            running = [side for side in running if not side.missing]
    print(f"\nwhat is left in the context, and on disk\n{_facts(running, numbers)}", flush=True)
    for side in sides:
        side.close()


def _hashing(kind: str, size: int) -> float:
    data = content(kind, size, 0).encode()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        hashlib.sha256(data).digest()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _started(bench: Bench) -> Iterator[Side]:
    why, python = "", Path()
    try:
        python = environment.python()
    except (environment.Missing, OSError) as error:
        why = f"not installed: {error}"
    for name in (OURS, *PEERS):
        side = Side(name, bench.new_folder(name))
        if name == OURS:
            side.start(sys.executable)
        elif why:
            side.missing = why
        else:
            side.start(python)
        yield side


def _row(ours: Side, theirs: Side, kind: str, size: int) -> Row:
    own = Times.of(ours.took[kind, size])
    case = f"externalize {size_name(size)} of {kind} against {theirs.name}"
    samples = theirs.took.get((kind, size))
    if not samples:
        return Row(case, None, own.p50, None, note=theirs.missing)
    other = Times.of(samples)
    note = ""
    if own.p50 > other.p50:
        note = f"faster by {(own.p50 - other.p50) * 1e6:.0f} µs; see above for what it leaves out"
    return Row(case, other.p50, own.p50, 1.0, times=(other, own), note=note)


def _facts(running: list[Side], numbers: Iterator[int]) -> str:
    """A table of what each leaves behind: in the context for each kind, on disk for the same
    content again."""
    size = _SIZES[-1][0]
    heads = (
        "",
        "version",
        *(f"tokens, {kind}" for kind in KINDS),
        f"one of {size_name(size)} {_AGAIN} times",
        "exact",
    )
    lines = [heads]
    for side in running:
        left, exact = [], True
        for kind in KINDS:
            number = next(numbers)
            answer = side.ask(kind=kind, size=size, number=number, call=f"look-{number}", look=True)
            left.append(
                f"{tokens.count(answer.get('model_text', '')):,}"
                if "model_text" in answer
                else side.missing
            )
            exact = exact and bool(answer.get("exact"))
        number, before = next(numbers), _bytes_in(side.folder)
        for again in range(_AGAIN):
            side.ask(kind="log", size=size, number=number, call=f"again-{number}-{again}")
        grown = (_bytes_in(side.folder) - before) / 2**20
        lines.append((side.name, side.version, *left, f"{grown:+.1f} MB", "yes" if exact else "NO"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    whole = size_name(size)
    sent = ", ".join(f"{kind} {tokens.count(content(kind, size, 0)):,}" for kind in KINDS)
    shown = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return f"{shown}\n{whole} without any of them: {sent} tokens\n" + "\n".join(
        f"{side.name}: {PEERS[side.name].what}; {PEERS[side.name].differs}"
        for side in running
        if side.name != OURS
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
