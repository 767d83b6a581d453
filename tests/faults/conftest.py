"""Fixtures of the fault tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.machine import machines


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="coatcheck-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, for tests that open thousands of stores and model syncs instead of
    waiting for them."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def on_machines() -> Iterator[None]:
    """Let the faulty disks of a test see what SQLite does to their files."""
    with machines():
        yield
