"""`open` and `default`: the only code that names concrete backends. Each backend is imported when it is used."""

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
from coatcheck.ids import check_name, digest_of
from coatcheck.session import Session
from coatcheck.storage.passages import NAME as SEARCH
from coatcheck.storage.passages import Passages
from coatcheck.store import Store

if TYPE_CHECKING:
    from coatcheck.storage.disk import Disk
    from coatcheck.storage.fleet import Place
    from coatcheck.storage.sqlite import SqliteCatalog

Durability = Literal["power", "process"]
TENANTS = "tenants"

_UNSET: Final[Any] = object()

_default: Store | None = None
_default_lock = threading.Lock()


def open(
    url: str | os.PathLike[str] | None = None,
    *,
    durability: Durability = _UNSET,
    create: bool = True,
    tenant: str | None = _UNSET,
    ttl: float | None = _UNSET,
    grace: float = _UNSET,
    max_artifact_bytes: int | None = _UNSET,
    quota_bytes: int | None = _UNSET,
    settings: Settings | None = None,
    clock: Callable[[], float] = time.time,
) -> Store:
    """Open a store. A new one is created, unless `create` is False.

    `url` is a folder, `memory:`, or `s3://bucket/prefix?catalog=postgresql://…` for a fleet. With `durability="power"`,
    acknowledged writes survive a power cut, with `"process"` the end of the process. `ttl` is the time to live of new
    sessions; `quota_bytes` limits the whole store, `max_artifact_bytes` one artifact. With `tenant`, only the store of
    that tenant is opened, the same as `store.tenant` returns. Options that are not given come from `settings`, by
    default those of `coatcheck.toml` and the environment (COATCHECK_STORE, …). The default url is the user's data
    folder."""
    options = {
        "store.url": None if url is None else os.fspath(url),
        "store.durability": durability,
        "store.tenant": tenant,
        "store.grace": grace,
        "store.max_artifact_bytes": max_artifact_bytes,
        "store.quota_bytes": quota_bytes,
        "session.ttl": ttl,
    }
    given = {
        key: value for key, value in options.items() if value is not _UNSET and (key != "store.url" or url is not None)
    }
    settings = (load() if settings is None else settings).override(given)
    place, tenant = settings["store.url"] or str(_data_folder()), settings["store.tenant"]
    if tenant is not None:
        check_name(tenant, "tenant")
    backend = {
        "url": place,
        "ttl": settings["session.ttl"],
        "grace": settings["store.grace"],
        "max_artifact_bytes": settings["store.max_artifact_bytes"],
        "quota_bytes": settings["store.quota_bytes"],
        "settings": settings,
        "clock": clock,
        "session_type": Session,
    }
    if place == "memory:":
        return _in_memory(tenant, **backend)
    if place.startswith("s3:"):
        from coatcheck.storage import fleet

        found = fleet.parse(place)
        return _in_fleet(found, tenant, create=create, **backend | {"url": repr(found)})  # without its secrets
    from coatcheck.storage.disk import Disk

    root, disk = _folder(place), Disk(durable=settings["store.durability"] == "power")
    own = root if tenant is None else _folder_of(root, tenant)
    if not create and not (own.is_dir() and any(own.iterdir())):
        raise StoreUnavailable(f"there is no store at {str(own)!r}", hint="check the url, or create the store first")
    if tenant is None:
        return open_on(root, disk, **backend)
    if not own.is_dir():
        open_on(root, disk, **backend).close()
    return _folders_below(root, disk, backend)(tenant, backend["quota_bytes"])


def open_on(root: Path, disk: Disk, **options: Any) -> Store:
    """Open a store in a folder. All of its changes go through this disk."""
    from coatcheck.storage.folder import open_folder_store

    with storage_errors("opening the store"):
        blobs, catalog = open_folder_store(root, disk)
    return Store(blobs, catalog, _passages(catalog, root), tenants=_folders_below(root, disk, options), **options)


def _folders_below(root: Path, disk: Disk, options: dict[str, Any]) -> Callable[[str, int | None], Store]:
    """Each tenant is a store in a folder of its own, named by a digest. Tenants share nothing."""

    def tenant(name: str, quota_bytes: int | None) -> Store:
        from coatcheck.storage.folder import open_folder_store

        own = _folder_of(root, name)
        with storage_errors("opening a tenant's store"):
            (root / TENANTS).mkdir(mode=0o700, exist_ok=True)
            blobs, catalog = open_folder_store(own, disk)
        return Store(blobs, catalog, _passages(catalog, own), **options | {"quota_bytes": quota_bytes})

    return tenant


def _passages(catalog: SqliteCatalog, root: Path) -> Passages:
    """The full-text index beside the catalog; in memory where nothing can be written."""
    return Passages(None if catalog.is_read_only else root / SEARCH)


def _folder_of(root: Path, tenant: str) -> Path:
    return root / TENANTS / digest_of(tenant.encode())


def _in_memory(tenant: str | None, **options: Any) -> Store:
    from coatcheck.storage.memory import MemoryBlobs, MemoryCatalog

    def open_tenant(_: str, quota_bytes: int | None) -> Store:
        return Store(MemoryBlobs(), MemoryCatalog(), Passages(None), **options | {"quota_bytes": quota_bytes})

    if tenant is not None:
        return open_tenant(tenant, options["quota_bytes"])
    return Store(MemoryBlobs(), MemoryCatalog(), Passages(None), tenants=open_tenant, **options)


def _in_fleet(place: Place, tenant: str | None, *, create: bool, **options: Any) -> Store:
    from coatcheck.storage.fleet import open_fleet

    def open_tenant(name: str, quota_bytes: int | None) -> Store:
        return Store(*open_fleet(place, tenant=name, create=create), **options | {"quota_bytes": quota_bytes})

    if tenant is not None:
        return open_tenant(tenant, options["quota_bytes"])
    return Store(*open_fleet(place, create=create), tenants=open_tenant, **options)


def default() -> Store:
    """Return one store for the whole process, opened on first use as `open()` without a url would.

    If it was closed, the next call opens it again."""
    global _default
    store = _default
    if store is None or store.closed:
        with _default_lock:
            store = _default
            if store is None or store.closed:
                store = _default = open()
    return store


def _folder(place: str) -> Path:
    parts = urlsplit(place)
    if parts.scheme == "file" and not parts.netloc:
        return Path(unquote(parts.path))
    if len(parts.scheme) > 1 and place.startswith(parts.scheme + ":"):
        raise InvalidArgument(
            f"no backend for {parts.scheme!r} urls",
            hint="use a folder, memory:, or s3://bucket/prefix?catalog=postgresql://…",
        )
    if not place or "\0" in place:
        raise InvalidArgument("the url is empty or contains a null character", hint="name a folder")
    return Path(place).expanduser().absolute()


def _data_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "coatcheck"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "coatcheck"
