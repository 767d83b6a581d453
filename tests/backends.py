"""The three backends for tests, and a clock that tests can set."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import obstore
import psycopg
import pytest
from hypothesis import settings
from obstore.store import S3Store

import coatcheck
from coatcheck import Ref, Session, Store
from coatcheck.storage.fleet import Place, parse
from tests.servers import Server, url_of

if TYPE_CHECKING:
    from obstore.store import S3Config

START = 1_750_000_000.0

# An artifact of this size is a file of its own in a folder store; a small one is kept in the
# database.
LARGE = 300_000

# Two texts whose ids share the first 12 characters.
TWINS = ("coat 5287776", "coat 23863487")
TWIN_PREFIX = "96dbffe64f9f"

# New processes that have imported what a store needs and inherit nothing else from the test.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "coatcheck.storage.folder", "psycopg_pool", __name__])

# Emptied schemas that are not reused yet: a process that a test killed may still be running its
# last statement.
_RESTING = 3


class Clock:
    """A clock that moves only when a test advances it."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true. The limit is far beyond what a busy machine takes."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not true within {seconds} s"
        time.sleep(0.005)


@dataclass
class Backend:
    """Opens stores at one URL and closes them at the end. `new_url` returns unused URLs of the same
    kind."""

    url: str
    new_url: Callable[[], str]
    opened: list[Store] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def is_folder(self) -> bool:
        return self.lasts and not self.is_fleet

    @property
    def is_fleet(self) -> bool:
        return self.url.startswith("s3:")

    @property
    def lasts(self) -> bool:
        """Whether the content is still there when the store is opened again, even by another
        process."""
        return self.url != "memory:"

    @property
    def path(self) -> Path:
        assert self.is_folder
        return Path(self.url)

    def open(self, **options: Any) -> Store:
        return self._opened(self.url, options)

    def open_new(self, **options: Any) -> Store:
        """Open an empty store at another place."""
        return self._opened(self.new_url(), options)

    def _opened(self, url: str, options: dict[str, Any]) -> Store:
        store = coatcheck.open(url, **{"durability": "process"} | options)
        self.opened.append(store)
        return store

    def new_session(self, **options: Any) -> Session:
        """An empty session of a shared store, for one hypothesis example."""
        store = self.opened[0] if self.opened else self.open()
        return store.session(f"session {next(self._numbers)}", **options)

    def examples(self) -> settings:
        """The number of hypothesis examples; a fifth for a fleet, which is slower."""
        most = settings().max_examples
        return settings(max_examples=most // 5 if self.is_fleet else most)

    def places_of(self, needle: bytes) -> list[str]:
        """The files, or the tables and objects, that contain these bytes."""
        return (
            files_with(self.path, needle) if self.is_folder else _in_fleet(parse(self.url), needle)
        )

    def size_of(self, ref: Ref) -> int:
        """The size of the file or object of an artifact."""
        return len(self._stored_copy(ref).read())

    def damage(self, ref: Ref, harm: Callable[[bytes], bytes | None]) -> None:
        """Change the file or object of an artifact behind the store's back; None removes it."""
        stored = self._stored_copy(ref)
        stored.write(harm(stored.read()))
        for store in self.opened if self.is_fleet else ():
            store._blobs._cache.clear()  # type: ignore[attr-defined]

    def _stored_copy(self, ref: Ref) -> _File | _Object:
        if self.is_folder:
            assert ref.content_uri.startswith("file://")
            return _File(Path(ref.content_uri.removeprefix("file://")))
        place = parse(self.url)
        return _Object(
            bucket_of(place), ref.content_uri.removeprefix(f"s3://{place.bucket}/{place.prefix}")
        )

    def edit_catalog(self, *statements: str) -> None:
        """Change rows behind the store's back."""
        if self.is_folder:
            edit_catalog(self.path, *statements)
            return
        place = parse(self.url)
        with psycopg.connect(place.catalog, options=f"-c search_path={place.schema}") as db:
            for statement in statements:
                db.execute(statement.encode())

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@dataclass
class _File:
    path: Path

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, data: bytes | None) -> None:
        self.path.unlink() if data is None else self.path.write_bytes(data)


@dataclass
class _Object:
    bucket: S3Store
    path: str

    def read(self) -> bytes:
        return bytes(obstore.get(self.bucket, self.path).bytes())

    def write(self, data: bytes | None) -> None:
        if data is None:
            obstore.delete(self.bucket, self.path)
        else:
            obstore.put(self.bucket, self.path, data)


@dataclass
class Fleet:
    """The servers of a fleet, and unused URLs on them."""

    s3: Server
    database: Server
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _emptied: deque[str] = field(default_factory=deque)
    _admin: psycopg.Connection | None = None

    def new_url(self) -> str:
        """A URL with a new prefix and schema."""
        name = self._new_name()
        return url_of(self.s3, self.database, name, name)

    @contextmanager
    def lending(self) -> Iterator[Callable[[], str]]:
        """A source of URLs with a new prefix and an empty schema, for tests that change only rows:
        their schemas are emptied afterwards and lent again, which takes far less time than creating
        one."""
        lent: list[str] = []

        def new_url() -> str:
            prefix = self._new_name()
            lent.append(self._emptied.popleft() if len(self._emptied) >= _RESTING else prefix)
            return url_of(self.s3, self.database, prefix, lent[-1])

        yield new_url
        for schema in lent:
            with suppress(psycopg.Error):  # such a schema is not used again
                self._empty(schema)
                self._emptied.append(schema)

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()

    def _new_name(self) -> str:
        return f"t{os.getpid()}_{next(self._numbers)}"

    def _empty(self, schema: str) -> None:
        if self._admin is None or self._admin.closed:
            # As a replica, so that no trigger counts what is deleted.
            options = "-c session_replication_role=replica -c lock_timeout=10s"
            self._admin = psycopg.connect(self.database.url, autocommit=True, options=options)
        found = self._admin.execute(
            "SELECT format('DELETE FROM %%I.%%I;', schemaname, tablename) FROM pg_tables"
            " WHERE schemaname = %(schema)s AND tablename <> 'applied_step' UNION ALL"
            " SELECT format('SELECT setval(%%L, 1, false);', format('%%I.%%I', schemaname, sequencename))"
            " FROM pg_sequences WHERE schemaname = %(schema)s AND last_value IS NOT NULL",
            {"schema": schema},
        ).fetchall()
        self._admin.execute("".join(statement for (statement,) in found).encode())


def run_python(code: str, *args: object, **options: Any) -> str:
    """Run code in another Python process and return its output. Tests read the files of an open
    store this way: closing `catalog.sqlite` in a process that has it open would drop SQLite's
    locks."""
    return _output_of([sys.executable, "-c", code, *map(str, args)], **options)


def _run_bare_python(code: str, *args: object) -> str:
    """The same without installed packages, which makes Python start in a third of the time."""
    return _output_of([sys.executable, "-I", "-S", "-c", code, *map(str, args)])


def _output_of(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def digests_of_files(root: Path) -> str:
    """The name and SHA-256 of every file of a store, except SQLite's shared memory, which readers
    change."""
    return _run_bare_python(
        "import hashlib, pathlib, sys\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).rglob('*')):\n"
        "    if path.is_file() and not path.name.endswith('-shm'):\n"
        "        print(path, hashlib.sha256(path.read_bytes()).hexdigest())",
        root,
    )


def files_with(root: Path, needle: bytes) -> list[str]:
    """The files below a folder that contain these bytes."""
    return _run_bare_python(
        "import pathlib, sys\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).rglob('*')):\n"
        "    if path.is_file() and bytes.fromhex(sys.argv[2]) in path.read_bytes():\n"
        "        print(path.name)",
        root,
        needle.hex(),
    ).split()


def bucket_of(place: Place) -> S3Store:
    options = cast("S3Config", place.options)
    return S3Store(
        place.bucket, prefix=place.prefix, config=options, client_options={"allow_http": True}
    )


def _in_fleet(place: Place, needle: bytes) -> list[str]:
    found = []
    with psycopg.connect(place.catalog) as db:
        tables = db.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s", (place.schema,)
        ).fetchall()
        for (table,) in tables:
            rows = db.execute(f'SELECT t::text FROM "{place.schema}"."{table}" t').fetchall()
            if any(needle.decode("latin-1") in row or needle.hex() in row for (row,) in rows):
                found.append(table)
    bucket = bucket_of(place)
    objects = [one["path"] for page in obstore.list(bucket) for one in page]
    return found + [path for path in objects if needle in bytes(obstore.get(bucket, path).bytes())]


def edit_catalog(root: Path, *statements: str) -> None:
    """Change the rows of a store behind its back, in another process."""
    _run_bare_python(
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "for statement in sys.argv[2:]:\n"
        "    db.execute(statement)\n"
        "db.close()",
        root / "catalog.sqlite",
        *statements,
    )


def released_by(kind: type[Any], module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of refs that each change of a catalog releases. Limits
    batches to three refs."""
    monkeypatch.setattr(module, "BATCH", 3)
    counts: list[int] = []
    let_go = kind._let_go_of

    def counting(self: Any, refs: Sequence[Any]) -> Any:
        counts.append(len(refs))
        return let_go(self, refs)

    monkeypatch.setattr(kind, "_let_go_of", counting)
    return counts
