"""Every error number of the operating system in every part of upkeep: no sound byte is removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import StoreError
from tests.faults.world import problems

pytestmark = pytest.mark.faults

NUMBERS = sorted(errno.errorcode)
SOME = [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOENT, errno.EINTR, errno.EAGAIN, errno.ESTALE,
        errno.ENOSPC, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.EROFS]  # fmt: skip
CALLS: dict[str, ModuleType] = dict.fromkeys(
    ("open", "pread", "listdir", "stat", "unlink", "rename", "rmdir", "mkdir", "fsync", "write", "pwrite"), os
) | {"flock": fcntl}
READING = ("open", "pread", "listdir", "flock")


@contextlib.contextmanager
def failing(call: str, number: int, share: float) -> Iterator[None]:
    """Let a share of the calls of this name fail with this number, but never the release of a lock."""
    module, rng = CALLS[call], random.Random(f"{call} {number}")
    real = getattr(module, call)

    def fail(*args: Any, **options: Any) -> Any:
        if args[1:] != (fcntl.LOCK_UN,) and rng.random() < share:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, call, fail)
        yield


def look_after(store: Store, folder: Path, call: str, number: int, share: float) -> None:
    def verify() -> None:
        for problem in store.verify().problems:
            assert problem.kind not in ("damaged", "catalog"), problem

    for step in (
        verify,
        lambda: store.verify(repair=True),
        lambda: store.collect(grace=0, cold_after=0),
        lambda: coatcheck.open(folder, durability="process").close(),
    ):
        with contextlib.suppress(StoreError), failing(call, number, share):
            step()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("call", CALLS)
def test_no_error_number_makes_upkeep_remove_a_sound_byte(
    call: str, share: float, in_memory: Path, long_faults: bool
) -> None:
    folder, rng = in_memory / "store", random.Random(call)
    some = {*SOME, *(NUMBERS[::8] if call in READING else ())} if share == 1.0 else SOME[::2]
    numbers = NUMBERS if long_faults else sorted(some)
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s", ttl=None)
        held = {session.put(data): data for data in (rng.randbytes(200_000), rng.randbytes(100), b"text " * 60_000)}
        for number in numbers:
            cold = b"%d a line that compresses\n" % number * 7_000
            held[session.put(cold)] = cold
            look_after(store, folder, call, number, share)
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
