"""Artifacts as real files, for tools that take nothing else.

A file's name is made of digests alone, whatever an artifact or a session is called. Files are read-only, for their
owner alone, and appear whole or not at all. This process remembers those it made, so that the end of a session
removes them; what another process made, that one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from coatcheck import media
from coatcheck.errors import storage_errors
from coatcheck.ids import SCHEME
from coatcheck.refs import Ref
from coatcheck.scope import Scope

if TYPE_CHECKING:
    from coatcheck.store import Store

_CHUNK: Final = 1 << 20
_PRUNED: Final = 64  # after so many files, those that are gone are forgotten
_SUFFIXES: Final = {
    media.JSON: ".json", media.JSONL: ".jsonl", "text/csv": ".csv", "text/tab-separated-values": ".tsv",
    "text/markdown": ".md", "text/html": ".html", "application/xml": ".xml", "text/x-python": ".py",
    "text/x-diff": ".diff", "application/pdf": ".pdf", "image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif",
    "image/webp": ".webp", "application/zip": ".zip", "application/gzip": ".gz", "application/zstd": ".zst",
    "application/vnd.apache.parquet": ".parquet", "application/vnd.sqlite3": ".sqlite", media.TEXT: ".txt",
}  # fmt: skip

_lock = threading.Lock()
_made: WeakKeyDictionary[Store, dict[str, set[Path]]] = WeakKeyDictionary()


def materialize(store: Store, scope: Scope, target: Ref | str, folder: str | Path) -> Path:
    """Write an artifact, or the part that a fragment names, into a folder, which is made where it is missing."""
    ref = store.content(scope, target).ref
    is_part = isinstance(target, str) and target.startswith(SCHEME) and "#/" in target
    suffix = _SUFFIXES.get(media.JSON if is_part else ref.media_type.partition(";")[0], ".bin")
    with store.open(scope, target) as stream, storage_errors("writing a file for a tool"):
        where = Path(folder).absolute()
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = where / f".{os.urandom(16).hex()}"
        digest = hashlib.sha256()
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o400)
        try:
            with open(file, "wb") as out:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            mine = hashlib.sha256(scope.session_id.encode()).hexdigest()[:8]
            path = where / f"{digest.hexdigest()[:32]}-{mine}{suffix}"
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    with _lock:
        paths = _made.setdefault(store, {}).setdefault(scope.session_id, set())
        if len(paths) % _PRUNED == _PRUNED - 1:  # a tool's own temporary folder takes its files along
            paths.intersection_update({one for one in paths if one.exists()})
        paths.add(path)
    return path


def remove_files(store: Store, scope: Scope) -> None:
    """Remove the files of a session. One that is gone, or cannot be removed, stops nothing."""
    with _lock:
        paths = _made.get(store, {}).pop(scope.session_id, set())
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
