"""Fixtures of the fault tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, for tests that open thousands of stores and model syncs instead of waiting for them."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="coatcheck-", dir=base) as folder:
        yield Path(folder)
