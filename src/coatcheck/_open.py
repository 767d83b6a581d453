"""`open` and `default`: the only code that names concrete backends, each imported when it is asked for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit

from coatcheck.config import Settings, load
from coatcheck.errors import InvalidArgument, StoreUnavailable, storage_errors
from coatcheck.ids import digest_of
from coatcheck.storage.passages import NAME as SEARCH
from coatcheck.storage.passages import Passages
from coatcheck.store import Store

if TYPE_CHECKING:
    from coatcheck.storage.disk import Disk
    from coatcheck.storage.fleet import Place

Durability = Literal["power", "process"]
TENANTS = "tenants"

_UNSAID: Final[Any] = object()

_default: Store | None = None
_default_lock = threading.Lock()


def open(
    url: str | os.PathLike[str] | None = None,
    *,
    durability: Durability = _UNSAID,
    create: bool = True,
    ttl: float | None = _UNSAID,
    grace: float = _UNSAID,
    max_artifact_bytes: int | None = _UNSAID,
    quota_bytes: int | None = _UNSAID,
    settings: Settings | None = None,
    clock: Callable[[], float] = time.time,
) -> Store:
    """Open a store, making it where it is new, unless `create` is False.

    `url` is a folder, `memory:`, or `s3://bucket/prefix?catalog=postgresql://…` for a fleet. `durability` is `power`
    (what is acknowledged survives a power cut) or `process` (it survives the process). `ttl` is the time to live of new
    sessions; `quota_bytes` bounds the whole store, `max_artifact_bytes` one artifact. What is not said here, the
    `settings` say: those of `coatcheck.toml` and of the environment (COATCHECK_STORE, …) unless others are given. Where
    nobody names a url, it is the user's data folder."""
    said = {
        "store.url": None if url is None else os.fspath(url),
        "store.durability": durability,
        "store.grace": grace,
        "store.max_artifact_bytes": max_artifact_bytes,
        "store.quota_bytes": quota_bytes,
        "session.ttl": ttl,
    }
    told = {
        key: value for key, value in said.items() if value is not _UNSAID and (key != "store.url" or url is not None)
    }
    settings = (load() if settings is None else settings).saying(told)
    place = settings["store.url"] or str(_data_folder())
    options = {
        "url": place,
        "ttl": settings["session.ttl"],
        "grace": settings["store.grace"],
        "max_artifact_bytes": settings["store.max_artifact_bytes"],
        "quota_bytes": settings["store.quota_bytes"],
        "settings": settings,
        "clock": clock,
    }
    if place == "memory:":
        return _in_memory(**options)
    if place.startswith("s3:"):
        from coatcheck.storage import fleet

        found = fleet.parse(place)
        return _in_fleet(found, create=create, **options | {"url": repr(found)})  # without its secrets
    from coatcheck.storage.disk import Disk

    root = _folder(place)
    if not create and not (root.is_dir() and any(root.iterdir())):
        raise StoreUnavailable(f"there is no store at {str(root)!r}", hint="check the place, or put something there")
    return open_on(root, Disk(durable=settings["store.durability"] == "power"), **options)


def open_on(root: Path, disk: Disk, **options: Any) -> Store:
    """A store in a folder, with all its changes made through this disk."""
    from coatcheck.storage.folder import open_folder_store

    with storage_errors("opening the store"):
        blobs, catalog = open_folder_store(root, disk)
    return Store(blobs, catalog, Passages(root / SEARCH), tenants=_folders_below(root, disk, options), **options)


def _folders_below(root: Path, disk: Disk, options: dict[str, Any]) -> Callable[[str, int | None], Store]:
    """Each tenant is a store in a folder of its own, named by a digest: nothing is shared that could tell of others."""

    def tenant(name: str, quota_bytes: int | None) -> Store:
        from coatcheck.storage.folder import open_folder_store

        own = root / TENANTS / digest_of(name.encode())
        with storage_errors("opening a tenant's store"):
            (root / TENANTS).mkdir(mode=0o700, exist_ok=True)
            blobs, catalog = open_folder_store(own, disk)
        return Store(blobs, catalog, Passages(own / SEARCH), **options | {"quota_bytes": quota_bytes})

    return tenant


def _in_memory(**options: Any) -> Store:
    from coatcheck.storage.memory import MemoryBlobs, MemoryCatalog

    def tenant(name: str, quota_bytes: int | None) -> Store:
        return Store(MemoryBlobs(), MemoryCatalog(), Passages(None), **options | {"quota_bytes": quota_bytes})

    return Store(MemoryBlobs(), MemoryCatalog(), Passages(None), tenants=tenant, **options)


def _in_fleet(place: Place, *, create: bool, **options: Any) -> Store:
    from coatcheck.storage.fleet import open_fleet

    def tenant(name: str, quota_bytes: int | None) -> Store:
        backend = open_fleet(place, tenant=name)
        return Store(*backend, **options | {"quota_bytes": quota_bytes})

    return Store(*open_fleet(place, create=create), tenants=tenant, **options)


def default() -> Store:
    """One store for the whole process, opened on first use where `open()` without a url would open it."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = open()
    return _default


def _folder(place: str) -> Path:
    parts = urlsplit(place)
    if parts.scheme == "file" and not parts.netloc:
        return Path(unquote(parts.path))
    if len(parts.scheme) > 1 and place.startswith(parts.scheme + ":"):
        raise InvalidArgument(
            f"no backend for {parts.scheme!r} urls",
            hint="a folder, memory:, or s3://bucket/prefix?catalog=postgresql://…",
        )
    if not place or "\0" in place:
        raise InvalidArgument("the store's folder has no name")
    return Path(place).expanduser().absolute()


def _data_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "coatcheck"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "coatcheck"
