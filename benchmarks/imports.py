"""The cost of `import coatcheck` in a new interpreter and of whole commands, and a check that it
loads no extras."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.report import Row

_CORE = frozenset({"annotated_types", "backports", "click", "coatcheck", "pydantic", "pydantic_core", "rich",
                   "typing_extensions", "typing_inspection", "xxhash"})  # fmt: skip
_STATEMENTS = ("pass", "import pydantic", "from coatcheck import open")
_FLOOR = "import click, rich"
_COMMANDS = ("--version", "--help", "ls", "get log", "put {file}", "read log --lines 5:9", "stats")


def imports(bench: Bench) -> Iterator[Row]:
    """Wall time of fresh interpreters in turns, less that of one that imports nothing. All find
    compiled bytecode, whatever the environment says of writing it."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bench.new_folder("bytecode"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    took: dict[str, list[float]] = {statement: [] for statement in _STATEMENTS}
    for turn in range(bench.rounds(12) + 1):
        for statement, samples in took.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
            if turn:  # the first compiles, and fills the caches
                samples.append(time.perf_counter() - start)
    bare, peer, ours = (statistics.median(took[statement]) for statement in _STATEMENTS)
    yield Row("import coatcheck against import pydantic", peer - bare, ours - bare, 2.0)
    yield Row("modules of extras that it loads", None, len(_extras()), 0, "count")
    yield from _commands(bench, environment)


def _commands(bench: Bench, environment: dict[str, str]) -> Iterator[Row]:
    """CPU time of whole commands on a small store, in turns with an interpreter that imports click
    and rich. It counts what the processes use, so that other work on the machine matters little."""
    file = bench.new_folder("commands") / "log.txt"
    file.write_text("".join(f"line {number}\n" for number in range(2_000)))
    environment = {**environment, "COATCHECK_STORE": str(bench.new_folder("store") / "store")}
    words = {
        one: [sys.executable, "-m", "coatcheck", *one.format(file=file).split()]
        for one in _COMMANDS
    }
    _cpu_seconds([*words["put {file}"], "--name", "log"], environment)
    calls = {_FLOOR: [sys.executable, "-c", _FLOOR], **words}
    took: dict[str, list[float]] = {one: [] for one in calls}
    for turn in range(bench.rounds(12) + 1):
        for one, call in calls.items():
            spent = _cpu_seconds(call, environment)
            took[one] += [spent] if turn else []
    floor = statistics.median(took[_FLOOR])
    for one in _COMMANDS:
        yield Row(
            f"coatcheck {one.format(file='FILE')} against {_FLOOR}",
            floor,
            statistics.median(took[one]),
            2.0,
        )


def _cpu_seconds(call: list[str], environment: dict[str, str]) -> float:
    """Run a process and return the CPU time that it used, in user and system mode."""
    process = subprocess.Popen(
        call, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{call} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _extras() -> set[str]:
    """Top-level modules that `import coatcheck` adds, less the standard library and the core's
    dependencies."""
    tell = "import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    bare, ours = (
        set(json.loads(subprocess.check_output([sys.executable, "-c", f"{head}; {tell}"])))
        for head in ("pass", "from coatcheck import open")
    )
    return ours - bare - _CORE - sys.stdlib_module_names
