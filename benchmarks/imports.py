"""The cost of `import coatcheck` in a new interpreter, and a check that it loads no extras."""

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


def imports(bench: Bench) -> Iterator[Row]:
    """Wall time of fresh interpreters in turns, less that of one that imports nothing. All find compiled bytecode,
    whatever the environment says of writing it."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bench.new_folder("bytecode"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    took: dict[str, list[float]] = {statement: [] for statement in _STATEMENTS}
    for turn in range(bench.rounds(30) + 1):
        for statement, samples in took.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
            if turn:  # the first compiles, and fills the caches
                samples.append(time.perf_counter() - start)
    bare, peer, ours = (statistics.median(took[statement]) for statement in _STATEMENTS)
    yield Row("import coatcheck against import pydantic", peer - bare, ours - bare, 2.0)
    yield Row("modules of extras that it loads", None, len(_extras()), 0, "count")


def _extras() -> set[str]:
    """Top-level modules that `import coatcheck` adds, less the standard library and the core's dependencies."""
    tell = "import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    bare, ours = (
        set(json.loads(subprocess.check_output([sys.executable, "-c", f"{head}; {tell}"])))
        for head in ("pass", "from coatcheck import open")
    )
    return ours - bare - _CORE - sys.stdlib_module_names
