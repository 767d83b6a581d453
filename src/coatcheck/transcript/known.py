"""What a slim file is known for: the sessions that its refs name, and the manifest that fits its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterator
from itertools import zip_longest
from typing import Any, Final

import xxhash

from coatcheck.store import Store
from coatcheck.transcript.formats.values import REFS_KEY
from coatcheck.transcript.lines import opened, parts
from coatcheck.transcript.manifest import Manifest, recall
from coatcheck.transcript.place import Place, pieces
from coatcheck.transcript.splice import sessions_in

_MARK: Final = REFS_KEY.encode()


def known_manifest(store: Store, handle: int, *, is_document: bool) -> tuple[str, Manifest] | None:
    """The session and the manifest of a file that was made slim before, if its bytes are still those; else None."""
    first = next(sessions_of_file(handle, is_document=is_document), None)
    if first is None:
        return None
    for manifest in recall(store, first):
        if fits(handle, manifest):
            return first, manifest
    return None


def fits(handle: int, manifest: Manifest) -> bool:
    """Whether a file begins with the slim bytes of a manifest."""
    return _matches(handle, [(one.size, one.checksum) for one in manifest.segments], xxhash.xxh3_128)


def _matches(handle: int, stretches: list[tuple[int, str | None]], new: Callable[[], Any]) -> bool:
    start = 0
    for size, expected in stretches:
        digest = new()
        for piece in pieces(handle, start, start + size):
            digest.update(piece)
        if digest.hexdigest() != expected:
            return False
        start += size
    return bool(stretches)


def sessions_of_file(handle: int, *, is_document: bool) -> Iterator[str]:
    """The sessions that the refs of a file name, each once, in the order of the file."""
    seen: set[str] = set()
    if unmarked_until(handle) is not None:
        return
    for part in parts(opened(handle), 0, None, is_document=is_document):
        if _MARK in part:
            for session_id in sessions_in(part):
                if session_id not in seen:
                    seen.add(session_id)
                    yield session_id


def tidy(place: Place, store: Store, keep: Container[str], *, reused: str | None = None) -> None:
    """Take away what a crash left beside a file, but for what is about to be `reused`, and let go what was put for that
    alone: not the sessions to `keep`."""
    for session_id in place.unfinished():
        own = all(manifest.path == place.real_path for manifest in recall(store, session_id))
        if own and session_id != reused and session_id not in keep:
            store.session(session_id).end()
        if session_id != reused:
            place.remove_unfinished(session_id)


def begins_with(handle: int, other: int, size: int) -> bool:
    """Whether a file begins with the first bytes of another."""
    return all(one == two for one, two in zip_longest(pieces(handle, 0, size), pieces(other, 0, size)))


def is_whole_of(handle: int, manifest: Manifest) -> bool:
    """Whether a file begins with the whole bytes of a manifest."""
    return _matches(handle, [(one.whole_size, one.whole_sha256) for one in manifest.segments], hashlib.sha256)


def not_among(late: bytes, lines: bytes) -> bytes:
    """The lines of `late` from the first one on that does not follow, in `lines`, the ones before it."""
    rest = late.splitlines(keepends=True)
    for line in lines.splitlines(keepends=True):
        if rest and line == rest[0]:
            del rest[0]
    return b"".join(rest)


def unmarked_until(handle: int) -> int | None:
    """The size of a file that has our key nowhere; None where it has. Most have it not, and this is quick to tell."""
    tail, size = b"", 0
    for piece in pieces(handle, 0, os.fstat(handle).st_size):
        if _MARK in piece or _MARK in tail + piece[: len(_MARK)]:
            return None
        tail, size = piece[-len(_MARK) :], size + len(piece)
    return size
