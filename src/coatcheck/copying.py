"""Copy a store to another, whatever their backends: pointers, names, sessions and expiry stay valid.

Every artifact is hashed on its way in and read back before it counts. What the target has already is passed over, so a
copy that broke off goes on where it was, and a second one brings over what is new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from coatcheck.archive import Taken, all_records, identity
from coatcheck.errors import Damaged, NotFound
from coatcheck.ids import digest_of
from coatcheck.intake import discard
from coatcheck.refs import Blob, Ref
from coatcheck.storage import BlobStore, Catalog, Entry, SessionInfo
from coatcheck.upkeep import Progress

_PIECE: Final = 1 << 20
_PAGE: Final = 256


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did: sessions looked at; refs that are new in the target, and those it had; artifacts and bytes that
    went over; and refs whose bytes the source has lost."""

    sessions: int = 0
    refs: int = 0
    known: int = 0
    artifacts: int = 0
    bytes: int = 0
    lost: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two stores."""

    blobs: BlobStore
    catalog: Catalog


def copy(source: Side, target: Side, *, progress: Progress | None = None) -> CopyReport:
    """Bring over every session and every ref that lives. Raises what the target raises; what the source has lost is
    told in the report."""
    total, report = source.catalog.totals().refs, CopyReport()
    for session in source.catalog.sessions():
        report = replace(report, sessions=report.sessions + 1)
        if target.catalog.session(session.session_id) is None:
            target.catalog.open_session(session)
        held = {identity(entry.ref) for entry in _refs(target.catalog, session.session_id) if not entry.gone}
        for entry in reversed(list(_refs(source.catalog, session.session_id))):
            if entry.gone:
                continue
            if identity(entry.ref) in held:
                report = replace(report, known=report.known + 1)
            else:
                try:
                    moved = _bring(source, target, entry.ref, session)
                except (Damaged, NotFound):
                    report = replace(report, lost=(*report.lost, entry.ref.artifact_id))
                    continue
                report = replace(report, refs=report.refs + 1, artifacts=report.artifacts + (moved is not None),
                                 bytes=report.bytes + (moved or 0))  # fmt: skip
            if progress:
                done = report.refs + report.known
                progress(done, max(done, total))
        _bring_records(source, target, session)
    return report


def _bring_records(source: Side, target: Side, session: SessionInfo) -> None:
    taken = Taken(target.catalog, session.session_id)
    for series in source.catalog.series(session.session_id):
        for one in all_records(source.catalog, session.session_id, series):
            if taken.is_new(series, one.at, one.body):
                target.catalog.record(session, series, one.body, at=one.at)


def _refs(catalog: Catalog, session_id: str) -> Iterator[Entry]:
    """Every ref of a session, newest first, a page at a time."""
    before: int | None = None
    while page := catalog.find(session_id, before=before, limit=_PAGE):
        yield from page
        before = page[-1].seq


def _bring(source: Side, target: Side, ref: Ref, session: SessionInfo) -> int | None:
    """Add a ref to the target, with its bytes where it lacks them: how many went over, None where none had to."""
    known = target.catalog.blob(ref.artifact_id)
    if known is not None and target.catalog.put(Entry(ref, known, session), reuse=True):
        return None
    if ref.size_bytes <= target.catalog.inline_limit:
        data = b"".join(_bytes(source, ref))
        if digest_of(data) != ref.artifact_id:
            raise Damaged(f"the bytes of {ref.pointer} do not match their digest")
        target.catalog.put(Entry(ref, Blob(ref.artifact_id, len(data)), session, data))
        return len(data)
    with target.blobs.stage(_bytes(source, ref)) as staged:
        if staged.digest != ref.artifact_id:
            raise Damaged(f"the bytes of {ref.pointer} do not match their digest")
        blob = staged.publish()
        try:
            _read_back(target.blobs, blob)
            target.catalog.put(Entry(ref, blob, session))
        except BaseException:
            discard(target.blobs, target.catalog, blob)
            raise
    return blob.size


def _bytes(source: Side, ref: Ref) -> Iterator[bytes]:
    for entry in source.catalog.find(ref.session_id, prefix=ref.artifact_id, content=True):
        if entry.content is not None:
            yield entry.content
        elif entry.blob.coding == "inline":
            raise NotFound(f"the bytes of {ref.pointer} are gone", hint="")
        else:
            for at in range(0, entry.blob.size, _PIECE):
                yield source.blobs.read(entry.blob, at, _PIECE)


def _read_back(blobs: BlobStore, blob: Blob) -> None:
    running = hashlib.sha256()
    for at in range(0, blob.size, _PIECE):
        running.update(blobs.read(blob, at, _PIECE))
    if running.hexdigest() != blob.digest:
        raise Damaged(f"blob {blob.digest} was not stored as it was sent", hint="check the target, and copy again")
