"""`python -m benchmarks [names…] [--quick] [--save] [--json FILE]`: run the cases and print their
tables."""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import (
    crowd,
    effect,
    eyes,
    fleet,
    gateway,
    imports,
    large,
    long_transcript,
    machine,
    offload,
    pages,
    programs,
    prompts,
    proxy,
    quality,
    questions,
    reading,
    replay,
    results,
    scale,
    store,
    transcripts,
)
from benchmarks.bench import Bench
from benchmarks.peers import compare
from benchmarks.report import Row, table
from benchmarks.results import Results, Table

CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "put": store.put,
    "get": store.get,
    "again": store.again,
    "scale": scale.scale,
    "large": large.large,
    "threads": crowd.threads,
    "processes": crowd.processes,
    "import": imports.imports,
    "lines": reading.lines,
    "grep": reading.grep,
    "sql": reading.sql,
    "search": quality.search,
    "tokens": quality.estimates,
    "transcripts": transcripts.transcripts,
    "recall": prompts.recall_of_chunks,
    "prompt": prompts.prompt,
    "replay": replay.replay,
    "long": long_transcript.long_transcript,
    "proxy": proxy.proxied,
    "gateway": gateway.gateway,
    "console": pages.pages,
    "fleet": fleet.fleet,
    "small": offload.small,
    "externalize": offload.large,
    "peers": compare.peers,
    "crowd": offload.crowd,
    "demo": offload.demo,
    "eyes": eyes.eyes,
    "questions": questions.questions,
    "programs": programs.programs,
    "effect": effect.effect,
}
DOCS = Path(__file__).resolve().parents[1] / "docs"
WITH = {"eyes": ["questions"]}
"""Cases that run after another one when it is asked for: both are about what the model sees."""
NOT_QUICK = ("peers",)
"""Cases that compare with other programs alone: a quick run leaves them out, unless they are
named."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Compare our times with the floor, in one run."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(CASES)}; default: all"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the rounds, no peers: to check that it works",
    )
    parser.add_argument(
        "--save", action="store_true", help="keep the results, and show them in the documentation"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to this file"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="write the plots of `effect` into this folder"
    )
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.names if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(CASES)}")
    if asked.save and asked.quick:
        parser.error("--save keeps results of full rounds: leave out --quick")
    build = Path("build")  # on the disk of the working directory, and not in git
    build.mkdir(exist_ok=True)
    now = Results(machine.facts(build), {})
    print("  ".join(f"{what}: {fact}" for what, fact in now.machine.items()), flush=True)
    chosen = [part for one in asked.names for part in (one, *WITH.get(one, []))]
    chosen = chosen or [name for name in CASES if not (asked.quick and name in NOT_QUICK)]
    plots = DOCS if asked.save and asked.plot is None else asked.plot
    for name in chosen:
        folder = Path(tempfile.mkdtemp(prefix="benchmarks-", dir=build)).absolute()
        try:
            now.tables[name] = _measured(name, Bench(folder, asked.quick, plots))
        finally:
            shutil.rmtree(folder)
    _summarize(now)
    print(results.compared(results.last(), now))
    if asked.json:
        asked.json.write_text(now.to_json(), "utf-8")
    if asked.save:
        results.save(now)


def _measured(name: str, bench: Bench) -> Table:
    start, used = time.perf_counter(), _cpu_seconds()
    rows = tuple(CASES[name](bench))
    done = Table(rows, time.perf_counter() - start, _cpu_seconds() - used)
    if rows:
        print(f"\n{name} ({done.seconds:.0f} s)\n{table(rows)}", flush=True)
    return done


def _summarize(now: Results) -> None:
    judged = [row for one in now.tables.values() for row in one.rows if row.limit is not None]
    print(f"\n{sum(row.ok is True for row in judged)} of {len(judged)} rows are within their limit")
    longest = sorted(now.tables.items(), key=lambda one: -one[1].seconds)[:8]
    total = sum(one.seconds for one in now.tables.values())
    shown = ", ".join(
        f"{name} {one.seconds:.0f} s (CPU {one.cpu_seconds:.0f} s)" for name, one in longest
    )
    print(f"it took {total:.0f} s; the longest: {shown}")


def _cpu_seconds() -> float:
    """Seconds of CPU of this process and of the children that have ended."""
    found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)


if __name__ == "__main__":
    main()
