"""Storage that fails on purpose, for tests: a store on your own disk, and backends that raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from coatcheck import _open
from coatcheck.storage import BlobStore, Catalog
from coatcheck.storage.disk import Disk
from coatcheck.store import Store

Cut = Literal["dropped", "zeroed", "torn"]
"""What a power cut does to unsynced data: all of it is lost; names and sizes survive, but bytes do
not; or a random part of it survives."""


class Crash(BaseException):
    """The machine stopped here. Not an `Exception`, so that no error handler continues after it."""


def open_on(folder: Path, disk: Disk, **options: Any) -> Store:
    """Open a folder on your own disk. Takes the options of `coatcheck.open`, except
    `durability`."""
    return _open.open_on(folder, disk, url=str(folder), **options)


def failing_blobs(blobs: BlobStore, before: Callable[[str], None]) -> BlobStore:
    """Return the same blob store, but call `before` with each method's name first; it may raise."""
    return cast(BlobStore, _Failing(blobs, before))


def failing_catalog(catalog: Catalog, before: Callable[[str], None]) -> Catalog:
    """Return the same catalog, but call `before` with each method's name first; it may raise."""
    return cast(Catalog, _Failing(catalog, before))


class _Failing:
    def __init__(self, inner: object, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._before(name)
            return found(*args, **options)

        return call
