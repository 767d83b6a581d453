"""`python -m benchmarks [names…] [--quick] [--json FILE] [--plot FOLDER]`: run the cases and print their tables."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
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
    prompts,
    proxy,
    quality,
    questions,
    reading,
    replay,
    scale,
    store,
    transcripts,
    walks,
)
from benchmarks.bench import Bench
from benchmarks.peers import compare
from benchmarks.report import Row, table

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
    "walks": walks.walks,
    "eyes": eyes.eyes,
    "questions": questions.questions,
    "effect": effect.effect,
}
WITH = {"eyes": ["questions"]}
"""Cases that run after another one when it is asked for: both are about what the model sees."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Compare our times with the floor, in one run.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds, to check that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write the plots of `effect` into this folder")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.names if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(CASES)}")
    build = Path("build")  # on the disk of the working directory, and not in git
    build.mkdir(exist_ok=True)
    known = machine.facts(build)
    print("  ".join(f"{what}: {fact}" for what, fact in known.items()), flush=True)
    rows: list[Row] = []
    for name in [part for one in asked.names for part in (one, *WITH.get(one, []))] or CASES:
        folder = Path(tempfile.mkdtemp(prefix="benchmarks-", dir=build)).absolute()
        try:
            found = list(CASES[name](Bench(folder, asked.quick, asked.plot)))
        finally:
            shutil.rmtree(folder)
        if found:
            print(f"\n{name}\n{table(found)}", flush=True)
        rows += found
    judged = [row for row in rows if row.limit is not None]
    print(f"\n{sum(row.ok is True for row in judged)} of {len(judged)} rows are within their limit")
    if asked.json:
        record = {"machine": known, "rows": [row.to_record() for row in rows]}
        asked.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
