"""Move artifacts between stores: export to JSON lines, import from them, and copy from one store to
another.

An export begins with a header line and ends with an end line. Between them come the sessions, each
with its refs and then its records, oldest first. The bytes of an artifact come before the first ref
to it, in base64 lines of bounded length. Claims are not exported: they belong to the processes that
use this store.

An import is untrusted: every blob is hashed again, and nothing in a line is ever used as a path. An
archive gives access only to the bytes that it contains, and writes only to its own sessions, unless
the caller maps them.

A copy works between any backends: pointers, names, sessions and expiry stay valid. Every artifact
is hashed on its way and read back. Refs that the target has already are skipped, so a copy that was
interrupted can be repeated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain
from typing import IO, Any, Final, Literal

from coatcheck.checks import check_name, seconds, whole
from coatcheck.collect import Progress
from coatcheck.errors import Damaged, Fenced, InvalidArgument, NotFound
from coatcheck.ids import clip, digest_of, is_encodable, is_prefix
from coatcheck.intake import About, Parts, discard, metadata_text
from coatcheck.redaction import mask
from coatcheck.refs import FENCED_SERIES, LAST_TIME, RECORD_LIMIT, SUMMARY_LIMIT, Blob, Ref
from coatcheck.storage import TRANSCRIPT, BlobStore, Catalog, Entry, Record, SessionInfo

FORMAT: Final = 2
_Earlier = Literal["complete", "interrupted"]
ORIGIN: Final = "coatcheck:import"
"""The series that marks an imported session, with the session's creation time in its archive. A
second record follows when the import is complete."""

_KNOWN: Final = (1, FORMAT)  # format 1 had no records
_PIECE: Final = 192 * 1024  # bytes on one line
_CHUNK: Final = 1 << 20
_PAGE: Final = 256
_LONGEST_LINE: Final = 4 * 1024 * 1024
_FOREVER: Final = 1e12  # seconds
_SESSION: Final = ("session_id", "parent", "ttl", "quota", "created", "used")
_BLOB: Final = ("digest", "size")
_REF: Final = (
    "media_type", "kind", "codec", "name", "tool", "call_id", "producer", "summary", "created",
    "expires", "pinned", "granted_by", "request", "artifact_id", "parents",
)  # fmt: skip


def export_lines(
    blobs: BlobStore, catalog: Catalog, target: IO[bytes], *, progress: Progress | None = None
) -> int:
    """Write a store as JSON lines and return the number of refs."""
    return _Export(blobs, catalog, target, progress).write_all()


@dataclass
class _Export:
    """Writes the lines of an export."""

    blobs: BlobStore
    catalog: Catalog
    target: IO[bytes]
    progress: Progress | None
    refs: int = 0
    _written: set[str] = field(default_factory=set)  # digests of blobs

    def write_all(self) -> int:
        total = self.catalog.totals().refs
        self._write("coatcheck", FORMAT)
        for session in self._sessions():
            self._write("session", _fields(session, _SESSION))
            for entry in reversed(self.catalog.find(session.session_id, content=True)):
                if entry.gone:
                    continue
                self._write_entry(entry)
                if self.progress:
                    self.progress(self.refs, max(self.refs, total))
            self._write_records(session)
        self._write("end", self.refs)
        return self.refs

    def _sessions(self) -> list[SessionInfo]:
        """The sessions. Transcripts come last: they lend artifacts only to sessions that the import
        has seen already."""
        return sorted(
            self.catalog.sessions(), key=lambda one: one.session_id.startswith(TRANSCRIPT)
        )

    def _write_entry(self, entry: Entry) -> None:
        """Write a ref, after its blob if that was not written before."""
        if entry.blob.digest not in self._written:
            self._write("blob", _fields(entry.blob, _BLOB))
            for piece in _pieces(self.blobs, entry, _PIECE):
                self._write("data", base64.b64encode(piece).decode())
            self._written.add(entry.blob.digest)
        names = (*_REF, "metadata_json") if entry.ref.metadata_json else _REF
        self._write("ref", _fields(entry.ref, names))
        self.refs += 1

    def _write_records(self, session: SessionInfo) -> None:
        for series in self.catalog.series(session.session_id):
            if series == ORIGIN:
                continue
            for one in _all_records(self.catalog, session.session_id, series):
                body = base64.b64encode(one.body).decode()
                self._write("record", {"series": series, "at": one.at, "body": body})

    def _write(self, kind: str, value: object) -> None:
        line = json.dumps({kind: value}, ensure_ascii=False)
        self.target.write(line.encode("utf-8", "surrogatepass") + b"\n")


def _fields(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def import_lines(
    into: Parts,
    source: IO[bytes],
    *,
    now: float,
    sessions: Mapping[str, str] | None = None,
    merge: bool = False,
    progress: Progress | None = None,
) -> int:
    """Import an archive and return the number of new refs.

    Each session of the archive becomes a new session. One that exists already is refused, unless
    `sessions` maps it, `merge` allows all, or an earlier import of the same session created it."""
    lines = _Lines(source)
    header = lines.next()
    if header is None or "coatcheck" not in header:
        raise InvalidArgument("not an export of a store: the first line is not a header")
    if header["coatcheck"] not in _KNOWN:
        raise InvalidArgument(
            f"this export has format {clip(str(header['coatcheck']))}; "
            f"this version reads up to {FORMAT}"
        )
    archive = _Import(into, lines, sessions or {}, merge, now)
    count = 0
    while "end" not in (line := lines.must()):
        count += archive.add(lines.parsed(line))
        if progress:
            progress(count, count)
    archive.finish()
    return count


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
        """The bytes of a blob, on the lines that follow."""
        while size:
            try:
                piece = base64.b64decode(self.must()["data"], validate=True)
            except (KeyError, TypeError, binascii.Error) as error:
                raise self.wrong("the bytes of a blob are missing") from error
            size -= len(piece)
            if not piece or size < 0:
                raise self.wrong("the size of a blob does not match its header")
            yield piece

    def parsed(self, line: dict[str, Any]) -> _Item:
        """Return what a line describes. All fields must be there, with the types that the dataclass
        declares."""
        kind = next((one for one in _PARSERS if one in line), None)
        if kind is None:
            raise self.wrong("expected a session, a blob, a ref or a record")
        try:
            return _PARSERS[kind](line[kind])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise self.wrong(f"a {kind} with an invalid field: {clip(reason)}") from error

    def wrong(self, what: str, *, hint: str = "") -> InvalidArgument:
        return InvalidArgument(
            f"line {self.number} of the export: {what}",
            hint=hint or "everything before this line was imported; fix it and import again",
        )


def _origin(info: SessionInfo) -> bytes:
    """What marks a session as imported: its creation time in the archive."""
    return repr(info.created).encode()


def _session(given: Any) -> SessionInfo:
    info: SessionInfo = _validated(SessionInfo, {name: given[name] for name in _SESSION})
    _check_names("session id", info.session_id, info.parent)
    seconds(info.ttl, "ttl", optional=True)
    whole(info.quota, "quota", optional=True)
    _check_times(info.created, info.used)
    return info


def _blob(given: Any) -> Blob:
    blob: Blob = _validated(Blob, {name: given[name] for name in _BLOB})
    whole(blob.size, "size")
    return blob


def _ref(given: Any) -> Ref:
    ref: Ref = _validated(
        Ref, {name: given[name] for name in _REF} | {"session_id": "", "size_bytes": 0}
    )
    if (metadata := given.get("metadata_json")) is not None:
        ref = replace(ref, metadata_json=metadata_text(json.loads(metadata)))
    About(
        ref.name, ref.tool, ref.kind, ref.media_type, ref.summary, ref.producer, ref.call_id
    ).check()
    if (
        not is_encodable(ref.summary)
        or not is_prefix(ref.artifact_id)
        or len(ref.artifact_id) != 64
    ):
        raise ValueError("summary or artifact_id")
    _check_names("name", ref.granted_by, ref.request, *ref.parents)
    seconds(ref.expires, "expires", optional=True)
    _check_times(ref.created)
    return replace(ref, summary=mask(ref.summary)[:SUMMARY_LIMIT])


def _record(given: Any) -> tuple[str, Record]:
    body = base64.b64decode(given["body"], validate=True)
    record: Record = _validated(Record, {"seq": 0, "at": given["at"], "token": None, "body": body})
    _check_names("series", given["series"])
    _check_times(record.at)
    if len(body) > RECORD_LIMIT:
        raise ValueError(f"{len(body)} bytes")
    return given["series"], record


_Item = SessionInfo | Blob | Ref | tuple[str, Record]
_PARSERS: Final[dict[str, Callable[[Any], _Item]]] = {
    "session": _session, "blob": _blob, "ref": _ref, "record": _record,
}  # fmt: skip


def _validated(kind: type, fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from error


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter  # here, so that importing coatcheck stays quick

    return TypeAdapter(kind)


def _check_names(what: str, *names: str | None) -> None:
    for name in names:
        if name is not None:
            check_name(name, what)


def _check_times(*times: float) -> None:
    for time in times:
        if not 0 <= time <= LAST_TIME:
            raise ValueError(f"{time} is not a valid time")


class _Target:
    """A session that refs and records are added to. `put` adds an entry to the catalog; with
    `read_back`, new copies are read before that."""

    def __init__(
        self, side: Parts, info: SessionInfo, put: Callable[..., bool], *, read_back: bool = False
    ) -> None:
        self._side = side
        self.info = info
        self._put = put
        self._read_back = read_back
        entries = list(_all_refs(side.catalog, info.session_id))
        self.known = {_identity(entry.ref) for entry in entries}
        self.present = {_identity(entry.ref) for entry in entries if not entry.gone}
        self._had: dict[str, tuple[float, Counter[tuple[float, str]]]] = {}

    def has(self, ref: Ref) -> bool:
        return _identity(ref) in self.present

    def add_known(self, ref: Ref) -> bool:
        """Add a ref to bytes that the store has. Return False if it does not have them."""
        known = self._side.catalog.blob(ref.artifact_id)
        return known is not None and self._put(
            Entry(replace(ref, size_bytes=known.size), known, self.info), reuse=True
        )

    def add_bytes(
        self, chunks: Iterable[bytes], size: int, ref_of: Callable[[str], Ref | None]
    ) -> int:
        """Store bytes with the ref that `ref_of` returns for their digest; None means that it is
        there already. Return the number of new refs."""
        blobs, catalog = self._side.blobs, self._side.catalog
        if size <= catalog.inline_limit:
            data = b"".join(chunks)
            ref = ref_of(digest_of(data))
            if ref is not None:
                self._put(Entry(ref, Blob(ref.artifact_id, len(data)), self.info, data))
            return int(ref is not None)
        with blobs.stage(chunks) as staged:
            ref = ref_of(staged.digest)
            if ref is None or self.add_known(ref):
                return int(ref is not None)
            blob = staged.publish()
            try:
                if self._read_back:
                    _check_copy(blobs, blob)
                self._put(Entry(ref, blob, self.info))
            except BaseException:
                discard(blobs, catalog, blob)
                raise
        return 1

    def is_new(self, series: str, record: Record) -> bool:
        """Whether a record is new to the session. One that is older than the newest of its series
        is not new, even if it is gone by now: the current record must stay current."""
        if series not in self._had:
            records = _all_records(self._side.catalog, self.info.session_id, series)
            had = Counter((one.at, digest_of(one.body)) for one in records)
            self._had[series] = max((at for at, _ in had), default=0.0), had
        newest, left = self._had[series]
        known = (record.at, digest_of(record.body))
        if left[known]:
            left[known] -= 1
            return False
        return record.at >= newest


@dataclass
class _Import:
    """Adds what the lines of an archive describe to the store.

    `_ids` are the sessions of the archive and those that the caller named. Only they can be
    parents, and transcripts lend artifacts only to them: an archive must not give a session access
    to another one. `_brought` are the digests of all bytes that the archive has brought so far.

    If an earlier import created a session, this must be the same archive again; the author of a
    different one may know the creation time. After a complete import, only refs that the session
    had may be added again. After an interrupted one, new refs may follow once the archive has
    repeated everything that the session has (`_unseen`)."""

    store: Parts
    lines: _Lines
    mapped: Mapping[str, str]
    merge: bool
    now: float
    _ids: set[str] = field(default_factory=set)
    _parents: dict[str, str] = field(default_factory=dict)
    _brought: set[str] = field(default_factory=set)
    _into: _Target | None = None
    _earlier: _Earlier | None = None
    _unseen: set[tuple[Any, ...]] = field(default_factory=set)
    _unfinished: list[SessionInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_names("session id", *self.mapped, *self.mapped.values())
        self._ids.update(self.mapped.values())

    def add(self, item: _Item) -> int:
        """Add the item of a line. Return the number of new refs."""
        if isinstance(item, SessionInfo):
            info, self._earlier = self._open(item)
            self._into = _Target(self.store, info, self.store.add)
            self._unseen = set(self._into.present)
            return 0
        if self._into is None:
            raise self.lines.wrong("a ref or blob comes before the first session")
        if isinstance(item, Blob):
            return self._add_blob(self._into, item)
        if isinstance(item, Ref):
            return self._add_ref(self._into, self._placed(self._into, item))
        self._add_record(self._into, *item)
        return 0

    def finish(self) -> None:
        """Set the parents, now that all sessions are known, and mark the sessions as completely
        imported."""
        for child, parent in self._parents.items():
            info = self.store.catalog.session(child)
            if info is not None and parent in self._ids and info.parent != parent:
                self._check_lineage(child)
                self.store.catalog.open_session(replace(info, parent=parent))
        for info in self._unfinished:
            self.store.catalog.record(info, ORIGIN, b"complete", at=info.created)

    def _open(self, info: SessionInfo) -> tuple[SessionInfo, _Earlier | None]:
        """Return the session of this store for the lines that follow, created if it is new, and the
        earlier import that restricts what they may add."""
        target = self.mapped.get(info.session_id, info.session_id)
        known = self.store.catalog.session(target)
        allowed = self.merge or info.session_id in self.mapped
        earlier = None if known is None else self._earlier_import(known, info)
        if known is not None and not (allowed or earlier):
            raise self._exists(target)
        if allowed or earlier != "complete":
            self._ids.add(target)
            if info.parent is not None and (known is None or earlier):
                self._parents[target] = self.mapped.get(info.parent, info.parent)
                self._check_lineage(target)
        if known is None:
            return self._created(info, target), None
        if earlier == "interrupted":
            self._unfinished.append(known)
        return known, None if allowed else earlier

    def _earlier_import(self, known: SessionInfo, info: SessionInfo) -> _Earlier | None:
        """The earlier import that created a session, if it was one of this session of the
        archive."""
        marks = self.store.catalog.records(known.session_id, ORIGIN, limit=2)
        if not marks or marks[0].body != _origin(info):
            return None
        return "interrupted" if len(marks) == 1 else "complete"

    def _created(self, info: SessionInfo, session_id: str) -> SessionInfo:
        """Create a session, marked as imported."""
        created, used = min(info.created, self.now), min(info.used, self.now)
        new = replace(info, session_id=session_id, parent=None, created=created, used=used)
        self.store.catalog.record(new, ORIGIN, _origin(info), at=created)
        self.store.catalog.touch({session_id: used}, {})
        self._unfinished.append(new)
        return new

    def _exists(self, session_id: str) -> InvalidArgument:
        return self.lines.wrong(
            f"the session {clip(session_id)} exists already",
            hint="map it with sessions={old: new} (--session OLD=NEW), or allow merge (--merge)",
        )

    def _is_known(self, into: _Target, ref: Ref) -> bool:
        """Return whether the session has this ref. Raise if it does not and the archive may not add
        it."""
        identity = _identity(ref)
        self._unseen.discard(identity)
        if identity not in into.known:
            self._check_adding(into)
        return identity in into.present

    def _check_adding(self, into: _Target) -> None:
        if self._earlier == "complete" or (self._earlier == "interrupted" and self._unseen):
            raise self._exists(into.info.session_id)

    def _check_lineage(self, session_id: str) -> None:
        seen = {session_id}
        above = self._parents.get(session_id)
        while above is not None:
            if above in seen:
                raise self.lines.wrong(f"session {clip(session_id)} would be its own ancestor")
            seen.add(above)
            known = self.store.catalog.session(above)
            above = self._parents.get(above, known.parent if known else None)

    def _placed(self, into: _Target, ref: Ref) -> Ref:
        """Return a ref of the archive as one of the session."""
        session_id = into.info.session_id
        by = ref.granted_by and self.mapped.get(ref.granted_by, ref.granted_by)
        if session_id.startswith(TRANSCRIPT) and by not in self._ids:
            by = None
        return replace(ref, session_id=session_id, granted_by=by)

    def _add_blob(self, into: _Target, blob: Blob) -> int:
        """Add a blob with the ref that follows it."""

        def ref_of(digest: str) -> Ref | None:
            if digest != blob.digest:
                raise self.lines.wrong("the bytes of a blob do not match their digest")
            self._brought.add(digest)
            ref = self.lines.parsed(self.lines.must())
            if not isinstance(ref, Ref) or ref.artifact_id != digest:
                raise self.lines.wrong("the first ref to a blob must follow its bytes")
            ref = self._placed(into, ref)
            return None if self._is_known(into, ref) else replace(ref, size_bytes=blob.size)

        self.store.check_size(blob.size)
        return into.add_bytes(self.lines.data(blob.size), blob.size, ref_of)

    def _add_ref(self, into: _Target, ref: Ref) -> int:
        """Add a ref whose bytes came earlier."""
        # Checked first: the answer must not depend on what the store has.
        if ref.artifact_id not in self._brought:
            raise self.lines.wrong(f"the bytes of {clip(ref.artifact_id)} are not in the export")
        if self._is_known(into, ref):
            return 0
        if not into.add_known(ref):
            raise self.lines.wrong(
                f"the bytes of {clip(ref.artifact_id)} were removed during the import"
            )
        return 1

    def _add_record(self, into: _Target, series: str, record: Record) -> None:
        catalog, info = self.store.catalog, into.info
        if series == ORIGIN or not into.is_new(series, record):
            return
        self._check_adding(into)
        if series not in FENCED_SERIES:
            catalog.record(info, series, record.body, at=record.at)
            return
        try:
            token = catalog.claim(info, "coatcheck import", at=info.used, idle=_FOREVER)
        except Fenced as error:
            raise Fenced(
                f"the session {clip(info.session_id)} is claimed: {error.message}",
                hint="import into another session, or wait until the claim is released",
            ) from error
        catalog.record(info, series, record.body, at=record.at, token=token)
        with suppress(Fenced):
            catalog.claim(info, "", at=info.used, instead_of=token)


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did: the number of sessions, of refs that are new in the target and of refs that
    it had already; the artifacts and bytes that were copied; and the ids whose bytes the source has
    lost."""

    sessions: int = 0
    refs: int = 0
    known: int = 0
    artifacts: int = 0
    bytes: int = 0
    lost: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def copy(source: Parts, target: Parts, *, progress: Progress | None = None) -> CopyReport:
    """Copy every session and every live ref. Raises what the target raises; bytes that the source
    has lost are listed in the report."""
    total = source.catalog.totals().refs
    counts = Counter[str]()
    lost: list[str] = []
    for session in source.catalog.sessions():
        counts["sessions"] += 1
        if target.catalog.session(session.session_id) is None:
            target.catalog.open_session(session)
        into = _Target(target, session, target.catalog.put, read_back=True)
        for entry in reversed(list(_all_refs(source.catalog, session.session_id))):
            if entry.gone:
                continue
            try:
                counts += _copy_ref(source, into, entry.ref)
            except (Damaged, NotFound):
                lost.append(entry.ref.artifact_id)
                continue
            if progress:
                done = counts["refs"] + counts["known"]
                progress(done, max(done, total))
        _copy_records(source.catalog, into, target.catalog)
    return CopyReport(**counts, lost=tuple(lost))


def _copy_records(source: Catalog, into: _Target, target: Catalog) -> None:
    """Copy the records of a session that the target does not have."""
    session_id = into.info.session_id
    for series in source.series(session_id):
        for one in _all_records(source, session_id, series):
            if into.is_new(series, one):
                target.record(into.info, series, one.body, at=one.at)


def _copy_ref(source: Parts, into: _Target, ref: Ref) -> Counter[str]:
    """Add a ref to the target, unless it is there, with its bytes if they are missing there. Return
    what was copied."""
    if into.has(ref):
        return Counter(known=1)
    if into.add_known(ref):
        return Counter(refs=1)

    def ref_of(digest: str) -> Ref:
        if digest != ref.artifact_id:
            raise Damaged(f"the bytes of {ref.pointer} do not match their digest")
        return ref

    entries = source.catalog.find(ref.session_id, prefix=ref.artifact_id, content=True)
    into.add_bytes(
        chain(*(_pieces(source.blobs, entry, _CHUNK) for entry in entries)), ref.size_bytes, ref_of
    )
    return Counter(refs=1, artifacts=1, bytes=ref.size_bytes)


def _pieces(blobs: BlobStore, entry: Entry, size: int) -> Iterator[bytes]:
    """The bytes of an entry, in pieces of this size."""
    blob, content = entry.blob, entry.content
    if content is None and blob.coding == "inline":
        raise NotFound(f"the bytes of {entry.ref.pointer} are missing", hint="")
    for at in range(0, blob.size, size):
        yield blobs.read(blob, at, size) if content is None else content[at : at + size]


def _check_copy(blobs: BlobStore, blob: Blob) -> None:
    running = hashlib.sha256()
    for at in range(0, blob.size, _CHUNK):
        running.update(blobs.read(blob, at, _CHUNK))
    if running.hexdigest() != blob.digest:
        raise Damaged(
            f"blob {blob.digest} was not stored correctly", hint="check the target, and copy again"
        )


def _identity(ref: Ref) -> tuple[Any, ...]:
    """The fields that identify a ref of a session, in any store."""
    return (ref.artifact_id, ref.name, ref.codec, ref.tool, ref.call_id, ref.created)


def _all_refs(catalog: Catalog, session_id: str) -> Iterator[Entry]:
    """Every ref of a session, newest first, a page at a time."""
    before: int | None = None
    while page := catalog.find(session_id, before=before, limit=_PAGE):
        yield from page
        before = page[-1].seq


def _all_records(catalog: Catalog, session_id: str, series: str) -> Iterator[Record]:
    """Every record of a series, a page at a time."""
    last = 0
    while page := catalog.records(session_id, series, after=last, limit=64):
        yield from page
        last = page[-1].seq
