"""The table of faults that `make faults` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_kills(counts, number):
    counts("kills", 1_000)
    counts("flipped bits")

def test_cuts(counts):
    counts("power cuts", 3)
    counts("kills")
    assert False

def test_that_counts_nothing_before_it_fails(counts):
    assert False

def test_without_counts():
    pass
"""


def test_the_table_of_faults_adds_up_over_workers_and_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    plugins = ["-p", "xdist", "-p", "tests.counting"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n2",
        *plugins,
        "-c",
        "/dev/null",
        str(tmp_path),
    ]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert table == [
        "| injected      | count | result |",
        "| ---           |  ---: | --- |",
        "| (not counted) |     0 | failed: test_that_counts_nothing_before_it_fails |",
        "| flipped bits  |     6 | nothing lost |",
        "| kills         | 6,001 | failed: test_cuts |",
        "| power cuts    |     3 | failed: test_cuts |",
    ], done.stdout
