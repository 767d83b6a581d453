"""SIGKILL while a transcript is externalized, grows and is restored: it is always readable, and
nothing is lost."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import coatcheck
from coatcheck import transcript
from tests import warm
from tests.counting import Counts
from tests.faults.migrant import line
from tests.faults.world import ROOT, chosen_seed, problems

pytestmark = pytest.mark.faults


def test_a_transcript_survives_kill_9_at_any_instant(
    tmp_path: Path, long_faults: bool, counts: Counts
) -> None:
    wanted = 200 if long_faults else 4
    seed = chosen_seed()
    rng = random.Random(seed)
    start = _begin(tmp_path, rng)
    try:
        for number in range(wanted):
            with subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.faults.migrant",
                    "loop",
                    str(tmp_path),
                    str(rng.randrange(1 << 32)),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                process.stdout.readline()
                time.sleep(rng.random() * rng.choice((0.02, 0.1, 0.4)))
                alive = process.poll() is None
                process.kill()
                counts("kills while transcripts are rewritten")
                assert alive, process.stderr.read().decode()[-3000:]
            _check(tmp_path, start, is_last=number % 10 == 9 or number == wanted - 1)
    except BaseException as error:
        error.add_note(f"COATCHECK_SEED={seed}")
        raise


@pytest.mark.parametrize(
    "verbs", [("externalize",), ("externalize", "grow", "externalize"), ("externalize", "undo")]
)
def test_a_migration_killed_before_any_step_succeeds_when_run_again(
    tmp_path: Path, long_faults: bool, verbs: tuple[str, ...], counts: Counts
) -> None:
    seed = chosen_seed()
    rng = random.Random(seed)
    steps = _steps(tmp_path / "count", rng, verbs)
    assert steps > 5
    chosen = range(1, steps + 1) if long_faults else sorted(rng.sample(range(1, steps + 1), 3))
    for step in chosen:
        folder = tmp_path / str(step)
        folder.mkdir()
        start = _begin(folder, rng)
        try:
            counts("kills while transcripts are rewritten")
            assert _run(folder, step, verbs).returncode == 9
            _check(folder, start, is_last=True)
        except BaseException as error:
            error.add_note(f"COATCHECK_SEED={seed}, step {step} of {steps}")
            raise
        shutil.rmtree(folder)


def _begin(folder: Path, rng: random.Random) -> bytes:
    start = b"".join(line(number, rng) for number in range(40)) + b"broken\n"
    (folder / "session.jsonl").write_bytes(start)
    return start


def _steps(folder: Path, rng: random.Random, verbs: tuple[str, ...]) -> int:
    """Return the number of steps."""
    folder.mkdir()
    _begin(folder, rng)
    return int(_run(folder, 0, verbs).stdout)


def _run(folder: Path, step: int, verbs: tuple[str, ...]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        warm.command("tests.faults.migrant", "step", str(folder), "1", str(step), *verbs),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=False,
    )


def _check(folder: Path, start: bytes, *, is_last: bool) -> None:
    path, log = folder / "session.jsonl", folder / "log"
    logged = log.read_bytes() if log.exists() else b""
    with coatcheck.open(folder / "store", durability="process") as store:
        logged += _check_lines(path, store, start + logged)
        log.write_bytes(logged)
        if not is_last:
            return
        session = store.session("agent")
        assert transcript.externalize(path, session).is_sound
        assert path.stat().st_size < len(start + logged) / 2
        assert transcript.verify(path, store).is_sound
        _check_lines(path, store, start + logged)
        assert transcript.undo(path, store).is_sound
        assert path.read_bytes().startswith(start + logged)
        assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []
        transcript.forget(path, store)
        assert [
            one.session_id for one in store.sessions() if one.session_id.startswith("transcript:")
        ] == []
        assert problems(store) == []


def _check_lines(path: Path, store: coatcheck.Store, expected: bytes) -> bytes:
    """Check that every logged line is there; return the line that was not logged yet, of which
    there is at most one."""
    target = io.BytesIO()
    report = transcript.rehydrate(path, store, to=target)
    assert report.is_sound, report.problems
    assert target.getvalue().startswith(expected)
    more = target.getvalue()[len(expected) :]
    assert more.count(b"\n") <= 1
    return more
