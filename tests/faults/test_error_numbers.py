"""Every error number of the operating system in every part of upkeep: no sound byte is removed, the
error is reported, and the same work without the error completes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import coatcheck
from coatcheck import Session, Store, transcript
from coatcheck.errors import CoatcheckError, StoreError
from tests.counting import Counts
from tests.faults.world import problems
from tests.transcript.samples import SAMPLES, as_lines

pytestmark = pytest.mark.faults

NUMBERS = sorted(errno.errorcode)
SOME = [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOENT, errno.EINTR, errno.EAGAIN, errno.ESTALE,
        errno.ENOSPC, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.EROFS]  # fmt: skip
CALLS: dict[str, ModuleType] = dict.fromkeys(
    ("open", "pread", "listdir", "stat", "unlink", "rename", "rmdir", "mkdir", "fsync", "write", "pwrite",
     "ftruncate", "fstat", "fstatvfs", "posix_fallocate", "fdatasync"), os
) | {"flock": fcntl}  # fmt: skip
TRANSCRIPT_CALLS = ("open", "pread", "listdir", "stat", "fstat", "unlink", "rename", "fsync", "write", "link", "fchmod",
                  "ftruncate", "utime", "flock")  # fmt: skip
READING = ("open", "pread", "listdir", "flock")


class Failing:
    """Lets a share of the calls of this name fail with this number, but never the release of a
    lock."""

    def __init__(self, call: str, number: int, share: float) -> None:
        self._call, self._number, self._share = call, number, share
        self.failed = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        module, rng = CALLS.get(self._call, os), random.Random(f"{self._call} {self._number}")
        real = getattr(module, self._call)

        def fail(*args: Any, **options: Any) -> Any:
            if args[1:] != (fcntl.LOCK_UN,) and rng.random() < self._share:
                self.failed += 1
                raise OSError(self._number, os.strerror(self._number))
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, self._call, fail)
            yield


def _upkeep(
    store: Store, folder: Path
) -> dict[str, Callable[[], list[coatcheck.collect.StoreProblem]]]:
    def reopen() -> list[Any]:
        coatcheck.open(folder, durability="process").close()
        return []

    def search() -> list[Any]:
        return list(store.session("s").search("compresses"))

    return {
        "verify": lambda: store.verify().problems,
        "repair": lambda: store.verify(repair=True).problems,
        "collect": lambda: store.collect(grace=0, cold_after=0).problems,
        "reopen": reopen,
        "search": search,
    }


def _look_after(store: Store, folder: Path, call: str, number: int, share: float) -> int:
    """Run every part of upkeep with failures, and check that each is reported. Returns the number
    of failures."""
    total = 0
    for name, step in _upkeep(store, folder).items():
        failing = Failing(call, number, share)
        outcome: object = None
        try:
            with failing():
                outcome = step()
        except StoreError as error:
            outcome = error
        total += failing.failed
        if name == "verify" and isinstance(outcome, list):
            assert not [one for one in outcome if one.kind in ("damaged", "catalog")], outcome
        if (
            failing.failed
            and share == 1.0
            and call in READING
            and name in ("verify", "repair", "collect")
        ):
            assert outcome, f"{name} did not report {call}: {errno.errorcode[number]}"
    return total


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("call", CALLS)
def test_no_error_number_makes_upkeep_remove_a_sound_byte(
    call: str, share: float, in_memory: Path, long_faults: bool, counts: Counts
) -> None:
    folder, rng = in_memory / "store", random.Random(call)
    some = {*SOME, *(NUMBERS[::8] if call in READING else ())} if share == 1.0 else SOME[::2]
    numbers = NUMBERS if long_faults else sorted(some)[:: 2 if call in READING else 3]
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s", ttl=None)
        held = {
            session.put(data): data
            for data in (rng.randbytes(200_000), rng.randbytes(100), b"text " * 60_000)
        }
        for number in numbers:
            cold = b"%d a line that compresses\n" % number * 7_000
            held[session.put(cold)] = cold
            counts("failed system calls", _look_after(store, folder, call, number, share))
            if share == 1.0 and number != errno.ENOENT:
                assert store.stats().tombstones == 0, errno.errorcode[number]
            store.collect(grace=0, compress=False)
            store.verify(repair=True)  # finds again what was temporarily missing
            for ref, data in held.items():
                assert session.get(ref) == data, errno.errorcode[number]
            assert session.forget(session.list()[0])
            del held[next(ref for ref, data in held.items() if data == cold)]
        assert problems(store) == []
    with coatcheck.open(folder) as store:
        assert [store.session("s").get(ref) for ref in held] == list(held.values())


TRANSCRIPT = as_lines(SAMPLES["openai-chat"])


def _steps(path: Path, session: Session) -> dict[str, Callable[[], object]]:
    return {
        "externalize": lambda: transcript.externalize(path, session),
        "verify": lambda: transcript.verify(path, session.store, remove_backup=True),
        "rehydrate": lambda: transcript.rehydrate(path, session.store),
        "undo": lambda: transcript.undo(path, session.store),
    }


@pytest.mark.parametrize("call", TRANSCRIPT_CALLS)
def test_no_error_number_makes_a_transcript_lose_a_byte(
    call: str, in_memory: Path, long_faults: bool, counts: Counts
) -> None:
    # ENOENT is among the latter.
    numbers = NUMBERS if long_faults else SOME[:: 6 if call == "fsync" else 4]
    with coatcheck.open(in_memory / "store", durability="process") as store:
        session = store.session("s", ttl=None)
        for number in numbers:
            for name in _steps(in_memory / "x", session):
                for share in (1.0, 0.3):
                    path = in_memory / f"{number} {name} {share}.jsonl"
                    path.write_bytes(TRANSCRIPT)
                    if name != "externalize":
                        transcript.externalize(path, session)
                    failing = Failing(call, number, share)
                    with contextlib.suppress(CoatcheckError, OSError), failing():
                        _steps(path, session)[name]()
                    counts("failed system calls", failing.failed)
                    try:
                        transcript.undo(path, store)
                        assert path.read_bytes() == TRANSCRIPT
                        assert not [one for one in in_memory.iterdir() if "coatcheck" in one.name]
                    except BaseException as error:
                        error.add_note(
                            f"{call} failed with {errno.errorcode[number]} in {name}, share {share}"
                        )
                        raise
                    path.unlink()
