"""Move artifacts between stores: export to JSON lines, import from them, and copy from one store to another.

An export begins with a header line and ends with an end line. Between them come the sessions, each with its refs and
then its records, oldest first. The bytes of an artifact come before the first ref to it, in base64 lines of bounded
length. Claims are not exported: they belong to the processes that use this store.

An import is untrusted: every blob is hashed again, and nothing in a line is ever used as a path. An archive gives
access only to the bytes that it contains, and writes only to its own sessions, unless the caller maps them.

A copy works between any backends: pointers, names, sessions and expiry stay valid. Every artifact is hashed on its way
and read back. Refs that the target has already are skipped, so a copy that was interrupted can be repeated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any, Final, TypeVar, get_args

from coatcheck.checks import LARGEST
from coatcheck.collect import Progress
from coatcheck.errors import Damaged, Fenced, InvalidArgument, NotFound
from coatcheck.ids import check_name, clip, digest_of, is_encodable, is_prefix
from coatcheck.intake import About, Intake, discard
from coatcheck.redaction import mask
from coatcheck.refs import FENCED_SERIES, LAST_TIME, RECORD_LIMIT, SUMMARY_LIMIT, Blob, Codec, Ref
from coatcheck.storage import TRANSCRIPT, BlobStore, Catalog, Entry, Record, SessionInfo

FORMAT = 2
_KNOWN = (1, FORMAT)  # format 1 had no records
N = TypeVar("N", int, float)
_PIECE = 192 * 1024  # bytes on one line
_CHUNK: Final = 1 << 20
_PAGE: Final = 256
_LONGEST_LINE = 4 * 1024 * 1024
_FOREVER: Final = 1e12  # seconds
ORIGIN: Final = "coatcheck:import"
"""The series that marks an imported session, with the session's creation time in its archive."""

_REF_FIELDS = (
    "media_type", "kind", "codec", "name", "tool", "call_id", "producer", "summary", "created", "expires", "pinned",
    "granted_by", "request",
)  # fmt: skip


def export_lines(blobs: BlobStore, catalog: Catalog, target: IO[bytes], *, progress: Progress | None = None) -> int:
    """Write a store as JSON lines and return the number of refs."""
    written: set[str] = set()
    total, count = catalog.totals().refs, 0
    _write(target, {"coatcheck": FORMAT})
    # Transcripts come last: they lend artifacts only to sessions that the import has seen already.
    for session in sorted(catalog.sessions(), key=lambda one: one.session_id.startswith(TRANSCRIPT)):
        _write(target, {"session": _session_record(session)})
        for entry in reversed(catalog.find(session.session_id, content=True)):
            if entry.gone:
                continue
            if entry.blob.digest not in written:
                _write_blob(blobs, entry, target)
                written.add(entry.blob.digest)
            record = {name: getattr(entry.ref, name) for name in _REF_FIELDS}
            _write(target, {"ref": record | {"artifact_id": entry.ref.artifact_id, "parents": list(entry.ref.parents)}})
            count += 1
            if progress:
                progress(count, max(count, total))
        for series in catalog.series(session.session_id):
            if series == ORIGIN:
                continue
            for one in _all_records(catalog, session.session_id, series):
                body = base64.b64encode(one.body).decode()
                _write(target, {"record": {"series": series, "at": one.at, "body": body}})
    _write(target, {"end": count})
    return count


def import_lines(
    blobs: BlobStore,
    catalog: Catalog,
    intake: Intake,
    source: IO[bytes],
    *,
    now: float,
    sessions: Mapping[str, str] | None = None,
    merge: bool = False,
    progress: Progress | None = None,
) -> int:
    """Import an archive and return the number of new refs.

    Each session of the archive becomes a new session. One that exists already is refused, unless `sessions` maps it,
    `merge` allows all, or an earlier import of the same session created it."""
    lines = _Lines(source)
    header = lines.next()
    if header is None or "coatcheck" not in header:
        raise InvalidArgument("not an export of a store: the first line is not a header")
    if header["coatcheck"] not in _KNOWN:
        raise InvalidArgument(
            f"this export has format {clip(str(header['coatcheck']))}; this version reads up to {FORMAT}"
        )
    targets = _Sessions(catalog, dict(sessions or {}), merge, now)
    session: _Session | None = None
    brought: set[str] = set()
    count = 0
    while "end" not in (line := lines.must()):
        if "session" in line:
            info = targets.open(_session(line["session"], lines), lines)
            session = _Session(blobs, catalog, intake, lines, targets, info, brought)
            continue
        if session is None:
            raise lines.wrong("a ref or blob comes before the first session")
        if "blob" in line:
            count += session.add_blob(line["blob"])
        elif "ref" in line:
            count += session.add_ref(line["ref"])
        elif "record" in line:
            session.add_record(*_record(line["record"], lines))
        else:
            raise lines.wrong("expected a session, a blob, a ref or a record")
        if progress:
            progress(count, count)
    targets.link(lines)
    return count


class _Sessions:
    """The sessions that an archive may write to, and the parents that they get at the end.

    A parent must be a session of the archive or one that the caller named: an archive must not give a session access to
    another one."""

    def __init__(self, catalog: Catalog, mapped: dict[str, str], merge: bool, now: float) -> None:
        for old, new in mapped.items():
            check_name(old, "session id")
            check_name(new, "session id")
        self._catalog = catalog
        self._mapped = mapped
        self._merge = merge
        self._now = now
        self._ids = set(mapped.values())
        self._parents: dict[str, str] = {}

    def open(self, info: SessionInfo, lines: _Lines) -> SessionInfo:
        """Return the session of this store for the lines that follow, created if it is new."""
        allowed = self._merge or info.session_id in self._mapped
        target = self._mapped.get(info.session_id, info.session_id)
        parent = None if info.parent is None else self._mapped.get(info.parent, info.parent)
        known = self._catalog.session(target)
        ours = known is not None and self._is_from(known, info)
        if known is not None and not (allowed or ours):
            raise lines.wrong(
                f"the session {clip(target)} exists already",
                hint="map it with sessions={old: new} (--session OLD=NEW), or allow merge (--merge)",
            )
        self._ids.add(target)
        if parent is not None and (known is None or ours):
            self._parents[target] = parent
            self._check_lineage(target, lines)
        if known is not None:
            return known
        created, used = min(info.created, self._now), min(info.used, self._now)
        new = replace(info, session_id=target, parent=None, created=created, used=used)
        self._catalog.record(new, ORIGIN, repr(info.created).encode(), at=created)
        self._catalog.touch({target: used}, {})
        return new

    def granted(self, ref: Ref) -> Ref:
        """Return the ref with `granted_by` mapped to this store. A transcript lends its artifacts to that session, so
        it must be one of the archive or one that the caller named."""
        by = ref.granted_by and self._mapped.get(ref.granted_by, ref.granted_by)
        if ref.session_id.startswith(TRANSCRIPT) and by not in self._ids:
            by = None
        return ref if by == ref.granted_by else replace(ref, granted_by=by)

    def link(self, lines: _Lines) -> None:
        """Set the parents, now that all sessions are known."""
        for child, parent in self._parents.items():
            info = self._catalog.session(child)
            if info is not None and parent in self._ids and info.parent != parent:
                self._check_lineage(child, lines)
                self._catalog.open_session(replace(info, parent=parent))

    def _is_from(self, known: SessionInfo, info: SessionInfo) -> bool:
        """Whether an earlier import created this session from the same session of the same archive."""
        marks = self._catalog.records(known.session_id, ORIGIN, limit=1)
        return bool(marks) and marks[0].body == repr(info.created).encode()

    def _check_lineage(self, session_id: str, lines: _Lines) -> None:
        seen = {session_id}
        above = self._parents.get(session_id)
        while above is not None:
            if above in seen:
                raise lines.wrong(f"session {clip(session_id)} would be its own ancestor")
            seen.add(above)
            known = self._catalog.session(above)
            above = self._parents.get(above, known.parent if known else None)


class _Lines:
    """The lines of an export, parsed one at a time, with their numbers for errors."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.number = 0

    def next(self) -> dict[str, Any] | None:
        raw = self._source.readline(_LONGEST_LINE)
        if not raw:
            return None
        self.number += 1
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.wrong("not JSON, or cut off") from error
        if not isinstance(line, dict):
            raise self.wrong("not a JSON object")
        return line

    def must(self) -> dict[str, Any]:
        """The next line, which must exist: the end line has not come yet."""
        line = self.next()
        if line is None:
            raise self.wrong("the export is cut off here: it has no end line")
        return line

    def data(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            line = self.must()
            try:
                piece = base64.b64decode(line["data"], validate=True)
            except (KeyError, TypeError, binascii.Error) as error:
                raise self.wrong("the bytes of a blob are missing") from error
            left -= len(piece)
            if not piece or left < 0:
                raise self.wrong("the size of a blob does not match its header")
            yield piece

    def wrong(self, what: str, *, hint: str = "") -> InvalidArgument:
        return InvalidArgument(
            f"line {self.number} of the export: {what}",
            hint=hint or "everything before this line was imported; fix it and import again",
        )


class _Session:
    """Adds the lines of one session of an archive to a session of the store. `brought` are the digests of all bytes
    that the archive has brought so far."""

    def __init__(
        self,
        blobs: BlobStore,
        catalog: Catalog,
        intake: Intake,
        lines: _Lines,
        targets: _Sessions,
        info: SessionInfo,
        brought: set[str],
    ) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._intake = intake
        self._lines = lines
        self._targets = targets
        self._info = info
        self._brought = brought
        self._present = {_identity(entry.ref) for entry in catalog.find(info.session_id) if not entry.gone}
        self._records = _KnownRecords(catalog, info.session_id)

    def add_blob(self, header: Any) -> int:
        """Add a blob with the ref that follows it. Return the number of new refs."""
        try:
            digest, size = str(header["digest"]), int(header["size"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._lines.wrong("a blob needs a digest and a size") from error
        self._intake.check_size(size)
        if size <= self._catalog.inline_limit:
            data = b"".join(self._lines.data(size))
            ref = self._ref_of(digest, digest_of(data), size)
            if _identity(ref) in self._present:
                return 0
            self._intake.add(Entry(ref, Blob(digest, size), self._info, data))
            return 1
        with self._blobs.stage(self._lines.data(size)) as staged:
            ref = self._ref_of(digest, staged.digest, size)
            if _identity(ref) in self._present:
                return 0
            known = self._catalog.blob(digest)
            if known and self._intake.add(Entry(ref, known, self._info), reuse=True):
                return 1
            blob = staged.publish()
            try:
                self._intake.add(Entry(ref, blob, self._info))
            except BaseException:
                discard(self._blobs, self._catalog, blob)
                raise
            return 1

    def _ref_of(self, digest: str, actual: str, size: int) -> Ref:
        """Check the digest of bytes that were read, and return the ref on the line that must follow them."""
        if actual != digest:
            raise self._lines.wrong("the bytes of a blob do not match their digest")
        self._brought.add(digest)
        ref = _ref(self._lines.must().get("ref"), self._info, self._lines)
        if ref.artifact_id != digest:
            raise self._lines.wrong("the first ref to a blob must follow its bytes")
        return replace(self._targets.granted(ref), size_bytes=size)

    def add_ref(self, fields: Any) -> int:
        """Add a ref whose bytes came earlier. Return the number of new refs."""
        ref = self._targets.granted(_ref(fields, self._info, self._lines))
        if ref.artifact_id not in self._brought:  # checked first: the answer must not depend on what the store has
            raise self._lines.wrong(f"the bytes of {clip(ref.artifact_id)} are not in the export")
        if _identity(ref) in self._present:
            return 0
        known = self._catalog.blob(ref.artifact_id)
        if known is None or not self._intake.add(
            Entry(replace(ref, size_bytes=known.size), known, self._info), reuse=True
        ):
            raise self._lines.wrong(f"the bytes of {clip(ref.artifact_id)} were removed during the import")
        return 1

    def add_record(self, series: str, at: float, body: bytes) -> None:
        if series == ORIGIN or not self._records.is_new(series, at, body):
            return
        if series not in FENCED_SERIES:
            self._catalog.record(self._info, series, body, at=at)
            return
        try:
            token = self._catalog.claim(self._info, "coatcheck import", at=self._info.used, idle=_FOREVER)
        except Fenced as error:
            raise Fenced(
                f"the session {clip(self._info.session_id)} is claimed: {error.message}",
                hint="import into another session, or wait until the claim is released",
            ) from error
        self._catalog.record(self._info, series, body, at=at, token=token)
        with suppress(Fenced):
            self._catalog.claim(self._info, "", at=self._info.used, instead_of=token)


def _record(fields: Any, lines: _Lines) -> tuple[str, float, bytes]:
    try:
        check_name(fields["series"], "series")
        body = base64.b64decode(fields["body"], validate=True)
        if len(body) > RECORD_LIMIT:
            raise ValueError(f"{len(body)} bytes")
        return fields["series"], _seconds(fields["at"]), body
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a record with an invalid field: {clip(str(error))}") from error


def _write_blob(blobs: BlobStore, entry: Entry, target: IO[bytes]) -> None:
    blob = entry.blob
    _write(target, {"blob": {"digest": blob.digest, "size": blob.size}})
    for at in range(0, blob.size, _PIECE):
        piece = blobs.read(blob, at, _PIECE) if entry.content is None else entry.content[at : at + _PIECE]
        _write(target, {"data": base64.b64encode(piece).decode()})


def _write(target: IO[bytes], line: dict[str, Any]) -> None:
    target.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


def _session_record(info: SessionInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in ("session_id", "parent", "ttl", "quota", "created", "used")}


def _session(fields: Any, lines: _Lines) -> SessionInfo:
    try:
        info = SessionInfo(
            fields["session_id"], fields["parent"], _limit(fields["ttl"], float), _limit(fields["quota"], int),
            _seconds(fields["created"]), _seconds(fields["used"]),
        )  # fmt: skip
        check_name(info.session_id, "session id")
        if info.parent is not None:
            check_name(info.parent, "session id")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a session with an invalid field: {clip(str(error))}") from error
    return info


def _ref(fields: Any, session: SessionInfo, lines: _Lines) -> Ref:
    try:
        values = {name: fields[name] for name in _REF_FIELDS} | {
            "parents": tuple(fields["parents"]),
            "created": _seconds(fields["created"]),
            "expires": _limit(fields["expires"], float),
            "pinned": bool(fields["pinned"]),
        }
        ref = Ref(fields["artifact_id"], session.session_id, 0, **values)
        About(ref.name, ref.tool, ref.kind, ref.media_type, ref.summary, ref.producer, ref.call_id).check()
        texts = (ref.media_type, ref.kind, ref.producer, ref.summary)
        if not all(isinstance(text, str) for text in texts) or not is_encodable(ref.summary):
            raise ValueError("media_type, kind, producer or summary")
        if ref.codec not in get_args(Codec) or not is_prefix(ref.artifact_id) or len(ref.artifact_id) != 64:
            raise ValueError("codec or artifact_id")
        for text in (ref.granted_by, ref.request, *ref.parents):
            if text is not None:
                check_name(text)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a ref with an invalid field: {clip(str(error))}") from error
    return replace(ref, summary=mask(ref.summary)[:SUMMARY_LIMIT])


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds <= LAST_TIME:
        raise ValueError(f"{seconds} is not a valid time")
    return seconds


def _limit(value: Any, kind: type[N]) -> N | None:
    if value is None:
        return None
    number = kind(value)
    if not number >= 0 or (kind is int and number > LARGEST):
        raise ValueError(f"{number} is not a valid limit")
    return number


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did: the number of sessions, of refs that are new in the target and of refs that it had already; the
    artifacts and bytes that were copied; and the ids whose bytes the source has lost."""

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
    """Copy every session and every live ref. Raises what the target raises; bytes that the source has lost are listed
    in the report."""
    total, report = source.catalog.totals().refs, CopyReport()
    for session in source.catalog.sessions():
        report = replace(report, sessions=report.sessions + 1)
        if target.catalog.session(session.session_id) is None:
            target.catalog.open_session(session)
        present = {_identity(entry.ref) for entry in _refs(target.catalog, session.session_id) if not entry.gone}
        for entry in reversed(list(_refs(source.catalog, session.session_id))):
            if entry.gone:
                continue
            if _identity(entry.ref) in present:
                report = replace(report, known=report.known + 1)
            else:
                try:
                    moved = _copy_ref(source, target, entry.ref, session)
                except (Damaged, NotFound):
                    report = replace(report, lost=(*report.lost, entry.ref.artifact_id))
                    continue
                report = replace(report, refs=report.refs + 1, artifacts=report.artifacts + (moved is not None),
                                 bytes=report.bytes + (moved or 0))  # fmt: skip
            if progress:
                done = report.refs + report.known
                progress(done, max(done, total))
        _copy_records(source, target, session)
    return report


def _copy_records(source: Side, target: Side, session: SessionInfo) -> None:
    known = _KnownRecords(target.catalog, session.session_id)
    for series in source.catalog.series(session.session_id):
        for one in _all_records(source.catalog, session.session_id, series):
            if known.is_new(series, one.at, one.body):
                target.catalog.record(session, series, one.body, at=one.at)


def _refs(catalog: Catalog, session_id: str) -> Iterator[Entry]:
    """Every ref of a session, newest first, a page at a time."""
    before: int | None = None
    while page := catalog.find(session_id, before=before, limit=_PAGE):
        yield from page
        before = page[-1].seq


def _copy_ref(source: Side, target: Side, ref: Ref, session: SessionInfo) -> int | None:
    """Add a ref to the target, with its bytes if they are missing there. Return the bytes copied, None if none were."""
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
            raise NotFound(f"the bytes of {ref.pointer} are missing", hint="")
        else:
            for at in range(0, entry.blob.size, _CHUNK):
                yield source.blobs.read(entry.blob, at, _CHUNK)


def _read_back(blobs: BlobStore, blob: Blob) -> None:
    running = hashlib.sha256()
    for at in range(0, blob.size, _CHUNK):
        running.update(blobs.read(blob, at, _CHUNK))
    if running.hexdigest() != blob.digest:
        raise Damaged(f"blob {blob.digest} was not stored correctly", hint="check the target, and copy again")


def _identity(ref: Ref) -> tuple[Any, ...]:
    """The fields that identify a ref of a session, in any store."""
    return (ref.artifact_id, ref.name, ref.codec, ref.tool, ref.call_id, ref.created)


class _KnownRecords:
    """The records that a session had before. A record that is older than the newest of them is not new, even if it is
    gone by now: the current record must stay current."""

    def __init__(self, catalog: Catalog, session_id: str) -> None:
        self._catalog = catalog
        self._session_id = session_id
        self._present: dict[str, tuple[float, Counter[tuple[float, str]]]] = {}

    def is_new(self, series: str, at: float, body: bytes) -> bool:
        if series not in self._present:
            had = [(one.at, digest_of(one.body)) for one in _all_records(self._catalog, self._session_id, series)]
            self._present[series] = max((at for at, _ in had), default=0.0), Counter(had)
        newest, left = self._present[series]
        known = (at, digest_of(body))
        if left[known]:
            left[known] -= 1
            return False
        return at >= newest


def _all_records(catalog: Catalog, session_id: str, series: str) -> Iterator[Record]:
    """Every record of a series, a page at a time."""
    last = 0
    while page := catalog.records(session_id, series, after=last, limit=64):
        yield from page
        last = page[-1].seq
