"""Run every input that fuzzing has kept again, without the fuzzer. `make faults` also fuzzes for a
minute."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.counting import Counts
from tests.fuzz.__main__ import CORPUS, NAMES, ROOT
from tests.fuzz.targets import TARGETS

MINUTE = 60


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_every_target_has_a_corpus() -> None:
    assert set(NAMES) == TARGETS.keys()
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.parametrize("target", NAMES)
def test_inputs_that_fuzzing_has_kept_break_nothing(target: str) -> None:
    for path in sorted((CORPUS / target).iterdir()):
        try:
            TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.add_note(f"the input is {path}")
            raise


@pytest.mark.faults
def test_a_minute_of_fuzzing_breaks_nothing(
    long_faults: bool, counts: Counts, tmp_path: Path
) -> None:
    if not long_faults:
        pytest.skip("only in `make faults`")
    if importlib.util.find_spec("atheris") is None:
        reason = "no atheris for this Python: run `make fuzz`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(MINUTE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    counts(
        "fuzzed inputs", sum(map(int, re.findall(r"number_of_executed_units: (\d+)", done.stderr)))
    )
