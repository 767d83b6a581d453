"""What the fault tests share: telling what a store holds, and whether a folder is left clean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import coatcheck
from coatcheck import Store
from coatcheck.errors import Damaged

ROOT = Path(__file__).resolve().parent.parent.parent
State = frozenset[tuple[str, str | None, str, bool]]
"""What a store holds, to the eye of a user: session, name and digest of every artifact, and whether it is pinned; and
the session, series and digest of every record."""


def state_of(store: Store) -> State:
    """Read everything. Fails where a ref has no bytes, or wrong ones."""
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
    """What verify finds; with `orphans`, they count too."""
    return [f"{one.kind}: {one.message}" for one in store.verify().problems if orphans or one.kind != "orphan"]


def assert_clean(store: Store) -> None:
    """After a collection: verify finds nothing, and every file is one that a row names."""
    store.collect(grace=0)
    assert problems(store, orphans=True) == []
    if store.url.startswith("s3:"):
        return  # verify has listed the bucket
    root = Path(store.url)
    named = {Path(ref.content_uri.removeprefix("file://")) for ref in refs_of(store) if "#" not in ref.content_uri}
    assert set(files_under(root / "blobs")) == named
    assert list(files_under(root / "tmp")) == []


def refs_of(store: Store) -> Iterator[coatcheck.Ref]:
    for info in list(store.sessions()):
        yield from store.session(info.session_id).list()


def files_under(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_dir())


def is_unreadable(session: coatcheck.Session, ref: coatcheck.Ref) -> bool:
    """Whether a get tells that the bytes are damaged or gone. Wrong bytes would be the one unforgivable answer."""
    try:
        return session.get(ref) is None
    except Damaged:
        return True
