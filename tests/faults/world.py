"""Shared by the fault tests: the visible state of a store, and whether a folder is clean."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import coatcheck
from coatcheck import Store
from coatcheck.errors import Damaged

ROOT = Path(__file__).resolve().parent.parent.parent
State = frozenset[tuple[str, str | None, str, bool]]
"""The visible state of a store: session, name and digest of every artifact, and whether it is
pinned; and the session, series and digest of every record."""


def chosen_seed() -> int:
    """The seed of a test that damages or kills at random: `COATCHECK_SEED`, else a fixed one in
    CI."""
    return int(
        os.environ.get("COATCHECK_SEED")
        or ("1" if os.environ.get("CI") else random.randrange(1 << 32))
    )


def state_of(store: Store) -> State:
    """Read everything. Fails if a ref has no bytes or wrong ones."""
    held = set()
    for info in list(store.sessions()):
        session = store.session(info.session_id)
        for ref in session.list():
            data = session.get(ref)
            assert data is not None, f"{ref.pointer} of {info.session_id} has no bytes"
            raw = data.encode() if isinstance(data, str) else data
            assert hashlib.sha256(raw).hexdigest() == ref.artifact_id
            held.add((info.session_id, ref.name, ref.artifact_id, ref.pinned))
        for record in session.records("hot"):
            held.add((info.session_id, "hot", hashlib.sha256(record.body).hexdigest(), False))
    return frozenset(held)


def problems(store: Store, *, orphans: bool = False) -> list[str]:
    """Return what verify finds, including orphans if `orphans` is set."""
    return [
        f"{one.kind}: {one.message}"
        for one in store.verify().problems
        if orphans or one.kind != "orphan"
    ]


def assert_clean(store: Store) -> None:
    """Check after a collection that verify finds nothing, and that every file belongs to a row."""
    store.collect(grace=0)
    assert problems(store, orphans=True) == []
    if store.url.startswith("s3:"):
        return  # verify has listed the bucket
    root = Path(store.url)
    named = {
        Path(ref.content_uri.removeprefix("file://"))
        for ref in refs_of(store)
        if "#" not in ref.content_uri
    }
    assert set(files_under(root / "blobs")) == named
    assert list(files_under(root / "tmp")) == []


def refs_of(store: Store) -> Iterator[coatcheck.Ref]:
    for info in list(store.sessions()):
        yield from store.session(info.session_id).list()


def files_under(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_dir())


def is_unreadable(session: coatcheck.Session, ref: coatcheck.Ref) -> bool:
    """Return whether a get reports the bytes as damaged or missing. It must never return wrong
    bytes."""
    try:
        return session.get(ref) is None
    except Damaged:
        return True
