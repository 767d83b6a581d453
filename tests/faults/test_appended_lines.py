"""Hosts append lines, without a lock, while a transcript is rewritten: every line is there
afterwards, once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import coatcheck
from coatcheck import transcript
from tests import warm
from tests.counting import Counts
from tests.faults.migrant import line
from tests.faults.world import ROOT, chosen_seed

pytestmark = pytest.mark.faults

LINES = 400
ROUNDS = 5  # of externalize and undo, while hosts append


@pytest.mark.parametrize(
    "hosts", [(1,), (7,), (1, 3)], ids=["one line", "several lines", "two hosts"]
)
@pytest.mark.parametrize("durability", ["power", "process"])
def test_no_line_is_lost_that_a_host_appends_while_a_transcript_is_rewritten(
    hosts: tuple[int, ...],
    durability: Literal["power", "process"],
    tmp_path: Path,
    long_faults: bool,
    counts: Counts,
) -> None:
    """`hosts` has the largest number of lines that each host writes before it closes the file."""
    rng = random.Random(seed := chosen_seed())
    try:
        for number in range(60 if long_faults else 1):
            folder = tmp_path / str(number)
            folder.mkdir()
            with coatcheck.open(folder / "store", durability=durability) as store:
                counts(
                    "lines appended while transcripts are rewritten",
                    _run(folder, store, hosts, rng),
                )
    except BaseException as error:
        error.add_note(f"COATCHECK_SEED={seed}, run {number}")
        raise


def _run(folder: Path, store: coatcheck.Store, hosts: tuple[int, ...], rng: random.Random) -> int:
    path, session = folder / "session.jsonl", store.session("agent")
    path.write_bytes(start := b"".join(line(number, rng) for number in range(20)))
    steps: list[Callable[[], transcript.Report]] = [
        lambda: transcript.externalize(path, session),
        lambda: transcript.undo(path, store),
        lambda: transcript.externalize(path, session),
        lambda: transcript.rehydrate(path, store),
    ]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.faults.appending_host",
                str(path),
                str(number),
                str(LINES),
                str(held),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number, held in enumerate(hosts)
    ]
    wanted = []
    try:
        for step in steps * ROUNDS:
            assert step().is_sound
    finally:
        for number, host in enumerate(started):
            output, _ = host.communicate()
            wanted += [f"{number} {count}" for count in range(int(output or b"0"))]
    for step in steps:  # the last lines may have been written to a file that had been replaced
        assert step().is_sound
    transcript.undo(path, store)
    data = path.read_bytes()
    assert data.startswith(start)
    found = [json.loads(text)["message"]["content"] for text in data[len(start) :].splitlines()]
    assert sorted(found) == sorted(wanted)
    assert [
        one.name for one in folder.iterdir() if one.name.startswith(".session.jsonl.coatcheck-old")
    ] == []
    return len(found)


@pytest.mark.parametrize(
    "verbs",
    [
        ("hold", "externalize", "late", "externalize"),
        ("externalize", "hold", "undo", "late", "undo"),
        ("externalize", "hold", "undo", "late", "externalize"),
    ],
    ids=" ".join,
)
def test_a_late_line_is_moved_once_whatever_step_a_run_is_killed_at(
    verbs: tuple[str, ...], tmp_path: Path, long_faults: bool, counts: Counts
) -> None:
    rng = random.Random(seed := chosen_seed())
    steps = int(_killed(tmp_path / "count", 0, verbs, rng).stdout)
    chosen = range(1, steps + 1) if long_faults else sorted(rng.sample(range(1, steps + 1), 3))
    for step in chosen:
        folder = tmp_path / str(step)
        try:
            counts("kills while transcripts are rewritten")
            assert _killed(folder, step, verbs, rng).returncode == 9
            _check(folder)
        except BaseException as error:
            error.add_note(f"COATCHECK_SEED={seed}, step {step} of {steps}")
            raise


def _killed(
    folder: Path, step: int, verbs: tuple[str, ...], rng: random.Random
) -> subprocess.CompletedProcess[bytes]:
    folder.mkdir()
    start = b"".join(line(number, rng) for number in range(20))
    (folder / "session.jsonl").write_bytes(start)
    (folder / "start").write_bytes(start)
    command = warm.command("tests.faults.migrant", "step", str(folder), "1", str(step), *verbs)
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)


def _check(folder: Path) -> None:
    path, log = folder / "session.jsonl", folder / "log"
    late = log.read_bytes() if log.exists() else b""
    with coatcheck.open(folder / "store", durability="process") as store:
        assert transcript.externalize(path, store.session("agent")).is_sound
        assert transcript.verify(path, store).is_sound
        assert transcript.undo(path, store).is_sound
    assert path.read_bytes() == (folder / "start").read_bytes() + late
    assert [one.name for one in folder.iterdir() if one.name.startswith(".session")] == []
