"""Export and import: a store as JSON lines, blobs included.

A file begins with a header line and ends with one that says so. Between them come sessions, and for each its refs and
then its records, from the oldest to the newest; the bytes of an artifact stand before the first ref to it, in base64
lines of bounded length. Claims stay behind: they are for those who use this store now.
What is imported is untrusted: every blob is hashed again, and nothing in a line is ever used as a path.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, TypeVar, get_args

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip, digest_of, is_prefix
from coatcheck.intake import About, discard
from coatcheck.records import RECORD_LIMIT
from coatcheck.redaction import mask
from coatcheck.refs import LAST_TIME, SUMMARY_LIMIT, Blob, Codec, Ref
from coatcheck.scope import check_name, is_text
from coatcheck.storage import BlobStore, Catalog, Entry, Record, SessionInfo
from coatcheck.upkeep import Progress

FORMAT = 2
_KNOWN = (1, FORMAT)  # the first had no records
N = TypeVar("N", int, float)
_PIECE = 192 * 1024
_LONGEST_LINE = 4 * 1024 * 1024
_REF_FIELDS = (
    "media_type", "kind", "codec", "name", "tool", "call_id", "producer", "summary", "created", "expires", "pinned",
    "granted_by", "request",
)  # fmt: skip


def export_lines(blobs: BlobStore, catalog: Catalog, target: IO[bytes], *, progress: Progress | None = None) -> int:
    written: set[str] = set()
    total, count = catalog.totals().refs, 0
    _write(target, {"coatcheck": FORMAT})
    for session in catalog.sessions():
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
            for one in all_records(catalog, session.session_id, series):
                body = base64.b64encode(one.body).decode()
                _write(target, {"record": {"series": series, "at": one.at, "body": body}})
    _write(target, {"end": count})
    return count


def import_lines(blobs: BlobStore, catalog: Catalog, source: IO[bytes], *, progress: Progress | None = None) -> int:
    lines = _Lines(source)
    header = lines.next()
    if header is None or "coatcheck" not in header:
        raise InvalidArgument("this is no export of a store: its first line is not the header")
    if header["coatcheck"] not in _KNOWN:
        raise InvalidArgument(f"this export has format {clip(str(header['coatcheck']))}; this version knows {FORMAT}")
    session: SessionInfo | None = None
    held: set[tuple[Any, ...]] = set()
    records = Taken(catalog, "")
    count = 0
    while "end" not in (line := lines.must()):
        if "session" in line:
            session = _session(line["session"], lines)
            if catalog.session(session.session_id) is None:
                _check_parent(catalog, session, lines)
                catalog.open_session(session)
            held = {identity(entry.ref) for entry in catalog.find(session.session_id) if not entry.gone}
            records = Taken(catalog, session.session_id)
            continue
        if session is None:
            raise lines.wrong("a ref or blob stands before the first session")
        if "blob" in line:
            count += _import_blob(blobs, catalog, line["blob"], session, held, lines)
        elif "ref" in line:
            ref = _ref(line["ref"], session, lines)
            count += _import_ref(catalog, ref, session, held, lines)
        elif "record" in line:
            series, at, body = _record(line["record"], lines)
            if records.is_new(series, at, body):
                catalog.record(session, series, body, at=at)
        else:
            raise lines.wrong("neither a session nor a blob, a ref or a record")
        if progress:
            progress(count, count)
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
        """The next line of an export that has not said yet that it is at its end."""
        line = self.next()
        if line is None:
            raise self.wrong("the export is cut off here")
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
                raise self.wrong("a blob has another size than it says")
            yield piece

    def ref_of(self, digest: str, session: SessionInfo) -> Ref:
        """The ref line that must follow the bytes of a blob."""
        ref = _ref(self.must().get("ref"), session, self)
        if ref.artifact_id != digest:
            raise self.wrong("the first ref to a blob must follow its bytes")
        return ref

    def wrong(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"line {self.number} of the export: {what}",
            hint="what stands before this line is imported; mend it and import again",
        )


def _import_blob(
    blobs: BlobStore, catalog: Catalog, said: Any, session: SessionInfo, held: set[tuple[Any, ...]], lines: _Lines
) -> int:
    try:
        digest, size = str(said["digest"]), int(said["size"])
    except (KeyError, TypeError, ValueError) as error:
        raise lines.wrong("a blob needs a digest and a size") from error
    if size <= catalog.inline_limit:
        data = b"".join(lines.data(size))
        if digest_of(data) != digest:
            raise lines.wrong("the bytes of a blob do not match their digest")
        ref = replace(lines.ref_of(digest, session), size_bytes=size)
        return _add(catalog, Entry(ref, Blob(digest, size), session, data), held)
    with blobs.stage(lines.data(size)) as staged:
        if staged.digest != digest:
            raise lines.wrong("the bytes of a blob do not match their digest")
        ref = replace(lines.ref_of(digest, session), size_bytes=size)
        known = catalog.blob(digest)
        if identity(ref) in held or (known and catalog.put(Entry(ref, known, session), reuse=True)):
            return int(identity(ref) not in held)
        blob = staged.publish()
        try:
            return _add(catalog, Entry(ref, blob, session), held)
        except BaseException:
            discard(blobs, catalog, blob)
            raise


def _import_ref(catalog: Catalog, ref: Ref, session: SessionInfo, held: set[tuple[Any, ...]], lines: _Lines) -> int:
    if identity(ref) in held:
        return 0
    known = catalog.blob(ref.artifact_id)
    if known is None or not catalog.put(
        Entry(replace(ref, size_bytes=known.size), known, session), reuse=True
    ):  # fmt: skip
        raise lines.wrong(f"the bytes of {clip(ref.artifact_id)} are neither in the export nor in the store")
    return 1


def _add(catalog: Catalog, entry: Entry, held: set[tuple[Any, ...]]) -> int:
    if identity(entry.ref) in held:
        return 0
    catalog.put(entry)
    return 1


class Taken:
    """Which records of a session the store has had all along. One that is older than the newest of them is not new,
    even where it is gone meanwhile: what is current must stay so."""

    def __init__(self, catalog: Catalog, session_id: str) -> None:
        self._catalog = catalog
        self._session_id = session_id
        self._held: dict[str, tuple[float, Counter[tuple[float, str]]]] = {}

    def is_new(self, series: str, at: float, body: bytes) -> bool:
        if series not in self._held:
            had = [(one.at, digest_of(one.body)) for one in all_records(self._catalog, self._session_id, series)]
            self._held[series] = max((at for at, _ in had), default=0.0), Counter(had)
        newest, left = self._held[series]
        known = (at, digest_of(body))
        if left[known]:
            left[known] -= 1
            return False
        return at >= newest


def all_records(catalog: Catalog, session_id: str, series: str) -> Iterator[Record]:
    """Every record of a series, a page at a time."""
    last = 0
    while page := catalog.records(session_id, series, after=last, limit=64):
        yield from page
        last = page[-1].seq


def _record(said: Any, lines: _Lines) -> tuple[str, float, bytes]:
    try:
        check_name(said["series"], "series")
        body = base64.b64decode(said["body"], validate=True)
        if len(body) > RECORD_LIMIT:
            raise ValueError(f"{len(body)} bytes")
        return said["series"], _seconds(said["at"]), body
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a record that makes no sense: {clip(str(error))}") from error


def identity(ref: Ref) -> tuple[Any, ...]:
    """What makes two refs of a session the same one, whichever store they are in."""
    return (ref.artifact_id, ref.name, ref.codec, ref.tool, ref.call_id, ref.created)


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


def _session(said: Any, lines: _Lines) -> SessionInfo:
    try:
        info = SessionInfo(
            said["session_id"], said["parent"], _limit(said["ttl"], float), _limit(said["quota"], int),
            _seconds(said["created"]), _seconds(said["used"]),
        )  # fmt: skip
        check_name(info.session_id, "session id")
        if info.parent is not None:
            check_name(info.parent, "session id")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a session that makes no sense: {clip(str(error))}") from error
    return info


def _check_parent(catalog: Catalog, session: SessionInfo, lines: _Lines) -> None:
    above, seen = session.parent, {session.session_id}
    while above is not None:
        if above in seen:
            raise lines.wrong(f"session {clip(session.session_id)} would be its own ancestor")
        seen.add(above)
        known = catalog.session(above)
        above = known.parent if known else None


def _ref(said: Any, session: SessionInfo, lines: _Lines) -> Ref:
    try:
        ref = Ref(
            said["artifact_id"], session.session_id, 0, said["media_type"], said["kind"], said["codec"], said["name"],
            said["tool"], said["call_id"], said["producer"], tuple(said["parents"]), said["summary"],
            _seconds(said["created"]), _limit(said["expires"], float),
            bool(said["pinned"]), said["granted_by"],
            said["request"],
        )  # fmt: skip
        About(ref.name, ref.tool, ref.kind, ref.media_type, ref.summary, ref.producer, ref.call_id).check()
        texts = (said["media_type"], said["kind"], said["producer"], said["summary"])
        if not all(isinstance(text, str) for text in texts) or not is_text(ref.summary):
            raise ValueError("media_type, kind, producer or summary")
        if ref.codec not in get_args(Codec) or not is_prefix(ref.artifact_id) or len(ref.artifact_id) != 64:
            raise ValueError("codec or artifact_id")
        for text in (ref.granted_by, ref.request, *ref.parents):
            if text is not None:
                check_name(text)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.wrong(f"a ref that makes no sense: {clip(str(error))}") from error
    return replace(ref, summary=mask(ref.summary)[:SUMMARY_LIMIT])


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds <= LAST_TIME:
        raise ValueError(f"{seconds} is no time")
    return seconds


def _limit(value: Any, kind: type[N]) -> N | None:
    if value is None:
        return None
    number = kind(value)
    if not number >= 0 or (kind is int and number >= 1 << 63):
        raise ValueError(f"{number} is no limit")
    return number
