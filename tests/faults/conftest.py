"""Fixtures of the fault tests."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.counting import counted_in


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="coatcheck-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, for tests that open thousands of stores and model syncs instead of waiting for them."""
    with folder_in_memory() as folder:
        yield folder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark `in_child` in a forked process. An exception that a trace function raises may leave an
    exception behind that the interpreter considers as being handled, and later tests would see it."""
    if pyfuncitem.get_closest_marker("in_child") is None:
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        failure = ""
        try:
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        except BaseException as error:  # noqa: BLE001 - the parent fails with it
            failure = "".join(traceback.format_exception(error))
        with os.fdopen(writer, "w") as to_parent:
            json.dump([failure, counted_in(pyfuncitem)], to_parent)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as from_child:
        answer = from_child.read()
    status = os.waitpid(child, 0)[1]
    failure, counted = json.loads(answer) if answer else (f"the child ended with status {status}", {})
    counted_in(pyfuncitem).update(counted)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True
