"""Where bytes come from and go to: a file, or `-` for stdin and stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

STDIO: Final = "-"


@contextmanager
def writing(file: str, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Bytes out. With `private`, a file that is new can be read by its owner alone."""
    if file == STDIO:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
    with os.fdopen(handle, "wb") as target:
        yield target


@contextmanager
def reading(file: str) -> Iterator[IO[bytes]]:
    """Bytes in."""
    if file == STDIO:
        yield sys.stdin.buffer
        return
    with open(file, "rb") as source:
        yield source
