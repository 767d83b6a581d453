"""`open` and `default`: the only code that names concrete backends. Each backend is imported when
it is used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit

from coatcheck.checks import check_name
from coatcheck.config import Settings, load
from coatcheck.errors import InvalidArgument, StoreUnavailable, storage_errors
from coatcheck.ids import digest_of
from coatcheck.session import Session
from coatcheck.storage import BlobStore, Catalog, PassageIndex
from coatcheck.storage.passages import NAME as SEARCH
from coatcheck.storage.passages import Passages
from coatcheck.store import Store
from coatcheck.trust import data_folder

if TYPE_CHECKING:
    from coatcheck.storage.disk import Disk

_Connect = Callable[[str | None], tuple[BlobStore, Catalog, PassageIndex]]
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

    `url` is a folder, `memory:`, or `s3://bucket/prefix?catalog=postgresql://…` for a fleet. With
    `durability="power"`, acknowledged writes survive a power cut; with `"process"`, the end of the
    process. `ttl` is the time to live of new sessions; `quota_bytes` limits the whole store,
    `max_artifact_bytes` one artifact. With `tenant`, only the store of that tenant is opened, the
    same as `store.tenant` returns. Other options come from `settings`, by default read from the
    environment (COATCHECK_STORE, …) and `coatcheck.toml`. The default url is the user's data
    folder."""
    options = {
        "store.url": _UNSET if url is None else os.fspath(url),
        "store.durability": durability,
        "store.tenant": tenant,
        "store.grace": grace,
        "store.max_artifact_bytes": max_artifact_bytes,
        "store.quota_bytes": quota_bytes,
        "session.ttl": ttl,
    }
    given = {key: value for key, value in options.items() if value is not _UNSET}
    settings = (load() if settings is None else settings).override(given)
    place, tenant = place_in(settings), settings["store.tenant"]
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
    }
    if place == "memory:":
        return _opened(_connect_memory, tenant, **backend)
    if place.startswith("s3:"):
        from coatcheck.storage import fleet

        found = fleet.parse(place)
        backend["url"] = repr(found)  # without its secrets
        return _opened(
            lambda name: fleet.open_fleet(found, tenant=name or "", create=create),
            tenant,
            **backend,
        )
    from coatcheck.storage.disk import Disk

    root, disk = _folder(place), Disk(durable=settings["store.durability"] == "power")
    own = _folder_of(root, tenant)
    if not create and not (own.is_dir() and any(own.iterdir())):
        raise StoreUnavailable(
            f"there is no store at {str(own)!r}", hint="check the url, or create the store first"
        )
    if tenant is not None and not own.is_dir():
        open_on(root, disk, **backend).close()
    return open_on(root, disk, tenant, **backend)


def place_in(settings: Settings) -> str:
    """Return where the store of these settings is: by default the user's data folder."""
    return settings["store.url"] or str(data_folder() / "coatcheck")


def _opened(connect: _Connect, tenant: str | None, **options: Any) -> Store:
    """The store of a tenant, or the store that has tenants. Tenants share nothing."""

    def open_tenant(name: str, quota_bytes: int | None) -> Store:
        return Store(*connect(name), session_type=Session, **options | {"quota_bytes": quota_bytes})

    if tenant is not None:
        return open_tenant(tenant, options["quota_bytes"])
    return Store(*connect(None), session_type=Session, tenants=open_tenant, **options)


def _connect_memory(tenant: str | None) -> tuple[BlobStore, Catalog, PassageIndex]:
    from coatcheck.storage.memory import MemoryBlobs, MemoryCatalog

    return MemoryBlobs(), MemoryCatalog(), Passages(None)


def open_on(root: Path, disk: Disk, tenant: str | None = None, **options: Any) -> Store:
    """Open a store in a folder. All of its changes go through this disk. A tenant's store is in a
    folder of its own, named by a digest."""

    def connect(name: str | None) -> tuple[BlobStore, Catalog, PassageIndex]:
        from coatcheck.storage.folder import open_folder_store

        own = _folder_of(root, name)
        with storage_errors("opening the store" if name is None else "opening a tenant's store"):
            if name is not None:
                own.parent.mkdir(mode=0o700, exist_ok=True)
            blobs, catalog = open_folder_store(own, disk)
        # The full-text index is beside the catalog; in memory where nothing can be written.
        return blobs, catalog, Passages(None if catalog.is_read_only else own / SEARCH)

    return _opened(connect, tenant, **options)


def _folder_of(root: Path, tenant: str | None) -> Path:
    return root if tenant is None else root / TENANTS / digest_of(tenant.encode())


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
