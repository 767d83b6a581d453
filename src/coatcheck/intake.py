"""The parts of a store that its sessions share: they put values, and note uses.

A put hashes a value, describes it, makes its bytes durable, then adds a row to the catalog, always
in that order. Content that is stored already is compared, not trusted: a damaged copy is replaced
by the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypeVar

from coatcheck import media
from coatcheck.checks import NAME_LIMIT, check_name, one_of, seconds
from coatcheck.content import CHUNK, Files, chunks_of, is_stream
from coatcheck.errors import (
    Damaged,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    StoreError,
    StoreUnavailable,
    TooLarge,
)
from coatcheck.ids import MIN_PREFIX, clip, is_pointer, shared_prefix
from coatcheck.refs import METADATA_LIMIT, PRODUCERS, SUMMARY_LIMIT, Blob, Codec, Ref
from coatcheck.storage import (
    BlobStore,
    Catalog,
    Entry,
    Known,
    Limits,
    PassageIndex,
    Ranges,
    SessionInfo,
    Staged,
    expiry,
    merged,
)
from coatcheck.storage.forks import RLock, watch
from coatcheck.storage.frames import FramedChunks

if TYPE_CHECKING:
    from coatcheck.values import Encoded

_TAIL = 64
_SUMMARIZED = 201  # characters
_LOOKED_AT = 320  # the text after a summary shows a secret that the summary would cut
_T = TypeVar("_T")
_HEAD = 1024  # bytes, enough for the 200 characters of a summary in any script
_SLOWEST, _QUICKEST = 30.0, 0.05  # seconds until uses are written


class About(NamedTuple):
    """What the caller of a put says about the value. None means: detect it."""

    name: str | None = None
    tool: str | None = None
    kind: str | None = None
    media_type: str | None = None
    summary: str | None = None
    producer: str | None = None
    call_id: str | None = None
    parents: tuple[str, ...] = ()
    ttl: float | None = None
    request: str | None = None
    granted_by: str | None = None
    metadata_json: str | None = None

    def check(self) -> None:
        for what, text in (("name", self.name), ("tool name", self.tool), ("call id", self.call_id),
                           ("media type", self.media_type), ("request", self.request)):  # fmt: skip
            if text is not None and not (
                type(text) is str and text.isascii() and 0 < len(text) <= NAME_LIMIT
            ):
                check_name(text, what)  # most are ASCII, and not worth a call
        if self.name is not None and is_pointer(self.name):
            raise InvalidArgument(
                f"the name {clip(self.name)} is a pointer, so it could not be looked up as a name",
                hint="choose a name that is not art: followed by hex digits",
            )
        if self.kind is not None and self.kind not in media.KINDS:
            one_of(self.kind, "kind", media.KINDS, optional=True)
        if self.producer is not None:
            one_of(self.producer, "producer", PRODUCERS, optional=True)
        if self.summary is not None and len(self.summary) > SUMMARY_LIMIT:
            raise InvalidArgument(
                f"the summary must have at most {SUMMARY_LIMIT} characters, got {len(self.summary)}"
            )
        if self.ttl is not None:
            seconds(self.ttl, "ttl", optional=True)

    def describes(self, ref: Ref) -> bool:
        """Whether a ref has everything that the caller says, and nothing that it would detect
        differently."""
        is_same = all(getattr(self, field) == getattr(ref, field) for field in _IDENTICAL)
        return is_same and all(
            getattr(self, field) in (None, getattr(ref, field)) for field in _DETECTED
        )


_IDENTICAL = ("name", "tool", "call_id", "parents", "request", "granted_by", "metadata_json")
_DETECTED = ("kind", "media_type", "producer", "summary")


class Scope(NamedTuple):
    """A session and its ancestors, nearest first: where names and pointers are looked up."""

    info: SessionInfo
    lineage: tuple[str, ...]
    """The ids of the session and its ancestors."""
    shared_with: tuple[str, ...] = ()
    """The ids of ancestors that see what this session puts."""


class Activity:
    """The last use of sessions and blobs, and the ranges that were shown: collected in memory,
    written in batches.

    A read must not cost a write, but it must keep its session alive. So uses are noted here, and
    written by a timer well before the session could expire without them, and on close."""

    rank = 0

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.RLock()
        self._sessions: dict[str, float] = {}
        self._blobs: dict[str, float] = {}
        self._shown: dict[tuple[str, str], Ranges] = {}
        self.last_uses: dict[str, float] = {}
        """When this process last used each session."""
        self.writers: list[Callable[[], None]] = []
        """Called before each flush: what else is written in batches."""
        self._timer: threading.Timer | None = None
        self._due = 0.0
        watch(self)

    def note(
        self, lineage: Iterable[str], now: float, ttl: float | None, digest: str | None = None
    ) -> None:
        """Note that a session and its ancestors were used, and perhaps a blob."""
        for session_id in lineage:
            self._sessions[session_id] = self.last_uses[session_id] = now
        if digest is not None:
            self._blobs[digest] = now
        delay = _SLOWEST if ttl is None else min(_SLOWEST, max(_QUICKEST, ttl / 10))
        if (
            self._timer is None
            or now + delay < self._due
            or (now > self._due and not self._timer.is_alive())
        ):
            self._schedule(now, delay)

    def show(self, session_id: str, digest: str, start: int, end: int) -> None:
        """Note that a session was shown these bytes of an artifact. Call `note` as well: that
        starts the timer."""
        key = (session_id, digest)
        with self._lock:
            self._shown[key] = merged([*self._shown.get(key, ()), (start, end)])

    def shown(self, session_id: str, digest: str) -> Ranges:
        """The bytes that a session was shown and that may not be in the catalog yet."""
        return self._shown.get((session_id, digest), ())

    def flush(self) -> None:
        for write in self.writers:
            write()
        with self._lock:
            self._stop_timer()
            sessions, self._sessions = self._sessions, {}
            blobs, self._blobs = self._blobs, {}
            shown, self._shown = self._shown, {}
        if sessions or blobs or shown:
            # A store that cannot be written at the moment still serves reads; the uses count in
            # this process.
            with contextlib.suppress(StoreError):
                self._catalog.touch(sessions, blobs, shown)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _schedule(self, now: float, delay: float) -> None:
        with self._lock:
            self._stop_timer()
            self._due = now + delay
            self._timer = threading.Timer(delay, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def locks(self) -> list[RLock]:
        return [self._lock]

    def before_fork(self) -> None:
        pass

    def after_fork(self) -> None:
        self._timer = None  # its thread exists only in the parent process


class Onlooker(Activity):
    """The activity of a store, for someone who only looks: it knows what was used and shown, and
    notes nothing."""

    def __init__(self, activity: Activity) -> None:
        self._seen = activity
        self.last_uses = activity.last_uses

    def note(
        self, lineage: Iterable[str], now: float, ttl: float | None, digest: str | None = None
    ) -> None:
        pass

    def show(self, session_id: str, digest: str, start: int, end: int) -> None:
        pass

    def shown(self, session_id: str, digest: str) -> Ranges:
        return self._seen.shown(session_id, digest)

    def flush(self) -> None:
        self._seen.flush()


class Parts(NamedTuple):
    """The parts of a store, which its sessions share, and the put path. `ttl` applies to new
    sessions; `make_room` collects what has expired when a quota is exceeded."""

    blobs: BlobStore
    catalog: Catalog
    passages: PassageIndex
    activity: Activity
    files: Files
    clock: Callable[[], float]
    ttl: float | None
    limits: Limits
    max_artifact_bytes: int | None
    make_room: Callable[[], object]

    def put(self, scope: Scope, value: object, about: About) -> Ref:
        # Here and below, so that a command that only reads starts quickly.
        from coatcheck.values import Encoded, encode

        if type(value) is bytes:
            return self.put_encoded([scope], Encoded("bytes", value), about)
        if isinstance(value, Path):
            named = _checked(about._replace(name=about.name or _file_name(value)))
            try:
                with value.open("rb") as stream:
                    return self._put_stream(scope, stream, named)
            except OSError as error:
                raise InvalidArgument(
                    f"cannot read {str(value)!r}: {error.strerror}",
                    hint="pass the path of a readable file",
                ) from error
        if isinstance(value, str):
            # Lone surrogates have no UTF-8 form; their three-byte form comes back unchanged.
            return self.put_encoded(
                [scope], Encoded("text", value.encode("utf-8", "surrogatepass"), value), about
            )
        if is_stream(value):
            return self._put_stream(scope, value, _checked(about))
        return self.put_encoded([scope], Encoded(*encode(value)), about)

    def put_encoded(self, scopes: Sequence[Scope], value: Encoded, about: About) -> Ref:
        """Put an encoded value into these sessions. Only the first gets `granted_by`, and its ref
        is returned."""
        about = _checked(about)
        digest = (
            hashlib.sha256(value.data).hexdigest() if value.framed is None else value.framed.digest
        )
        ref = self._put_bytes(scopes[0], value, about, digest)
        for other in scopes[1:]:
            self._put_bytes(other, value, about._replace(granted_by=None), digest, known=ref)
        return ref

    def add(self, entry: Entry, *, reuse: bool = False, heal: bool = False) -> bool:
        """Add a ref within the quotas, collecting once to make room. With `reuse`, return False if
        the blob is gone."""
        return self._within_quota(
            lambda: self.catalog.put(entry, limits=self.limits, reuse=reuse, heal=heal)
        )

    def _put_bytes(
        self, scope: Scope, value: Encoded, about: About, digest: str, *, known: Ref | None = None
    ) -> Ref:
        """Put a value into a session. `known` is a ref to it in another session, so that it is not
        described again."""
        codec, data, text, _ = value
        self.check_size(len(data))
        info = scope.info

        def describe() -> Ref:
            described = about
            if known is not None:
                described = about._replace(
                    media_type=known.media_type, kind=known.kind, summary=known.summary
                )
            return self._describe(
                scope, codec, digest, len(data), data[:_HEAD], data[-_TAIL:], described, text, data
            )

        def is_repeat(entry: Entry) -> bool:
            if not self._is_repeat(entry, digest, codec, about):
                return False
            if entry.ref.size_bytes != len(data):
                return False
            if entry.blob.coding != "inline":
                return bool(self._is_sound(entry.blob, data))
            return entry.content == data

        if len(data) <= self.catalog.inline_limit:
            entry, ids = self._within_quota(
                lambda: self.catalog.put_inline(
                    digest,
                    scope.lineage,
                    lambda: Entry(describe(), Blob(digest, len(data)), info, data),
                    is_repeat,
                    limits=self.limits,
                )
            )
            return self.ref_for_caller(entry, ids)
        found = self.catalog.look(digest, scope.lineage, blob=True)
        for entry in found.entries:
            if is_repeat(entry):
                self.catalog.confirm()
                return self.ref_for_caller(entry, found.ids)
        chunks = [data] if value.framed is None else FramedChunks([data], value.framed)
        is_same = None if found.blob is None else self._is_sound(found.blob, data)
        return self._put_copy(
            describe(), info, found, is_same, lambda: self.blobs.stage(chunks, digest)
        )

    def _put_stream(self, scope: Scope, stream: IO[bytes], about: About) -> Ref:
        chunks = chunks_of(stream)
        head = next(chunks, b"")
        if len(head) < CHUNK:
            from coatcheck.values import Encoded, decode_text

            codec = _codec_of(stream)
            value = Encoded(codec, head, decode_text(head) if codec == "text" else None)
            return self._put_bytes(scope, value, about, hashlib.sha256(head).hexdigest())
        measured = _Measured(self, scope.info, itertools.chain([head], chunks), about)
        with self.blobs.stage(measured.chunks()) as staged:
            digest, codec = staged.digest, _codec_of(stream)
            blob = self.catalog.blob(digest)  # first, so that what follows is complete
            known = self.catalog.look(digest, scope.lineage, blob=False)._replace(blob=blob)
            is_sound = None if blob is None else self._is_sound(blob)
            if is_sound:
                for entry in known.entries:
                    # Put it again, so that it is durable. Nothing is stored twice.
                    again = replace(entry, content=None)
                    if self._is_repeat(entry, digest, codec, about) and self.add(again, reuse=True):
                        return self.ref_for_caller(entry, known.ids)
            start, tail = head[:_HEAD], measured.tail
            text = (start + tail).decode("utf-8", "ignore") if codec == "text" else None
            ref = self._describe(
                scope, codec, digest, staged.size, start, tail, about, text, measured.whole
            )
            return self._put_copy(
                ref, scope.info, known, is_sound, lambda: contextlib.nullcontext(staged)
            )

    def _put_copy(
        self,
        ref: Ref,
        info: SessionInfo,
        known: Known,
        is_same: bool | None,
        stage: Callable[[], AbstractContextManager[Staged]],
    ) -> Ref:
        """Add a ref to the copy that the store has, if it is the same, or else to a new copy. Then
        remove the damaged copy that it replaces; a copy that merely could not be read stays."""
        if known.blob and is_same:
            entry = Entry(ref, known.blob, info)
            if self.add(entry, reuse=True):
                return self.ref_for_caller(entry, known.ids)
        with stage() as staged:
            entry = Entry(ref, staged.publish(), info)
            try:
                self.add(entry, heal=known.blob is not None)
            except BaseException:
                discard(self.blobs, self.catalog, entry.blob)
                raise
            if known.blob is not None and known.blob.coding != "inline" and is_same is not None:
                with contextlib.suppress(StoreError):  # the put is done; a sweep removes the rest
                    self.blobs.remove(known.blob)
            return self.ref_for_caller(entry, known.ids)

    def _within_quota(self, put: Callable[[], _T]) -> _T:
        try:
            return put()
        except QuotaExceeded:
            self.make_room()
            return put()

    def _describe(
        self,
        scope: Scope,
        codec: Codec,
        digest: str,
        size: int,
        head: bytes,
        tail: bytes,
        about: About,
        text: str | None,
        whole: bytes | None,
    ) -> Ref:
        """The ref of a value: what the caller says about it, and what is detected."""
        media_type, start = _recognized(codec, head, tail, about, text, whole)
        summary = about.summary
        if summary is None:
            is_shown = start or not size
            summary = _summary_of(start) if is_shown else f"{media_type}, {size} bytes"
        if not summary.isascii():
            summary = summary.encode("utf-8", "replace").decode()
        now = self.clock()
        return Ref(
            artifact_id=digest,
            session_id=scope.info.session_id,
            size_bytes=size,
            media_type=media_type,
            kind=about.kind or media.sniff_kind(media_type, start, name=about.name),
            codec=codec,
            name=about.name,
            tool=about.tool,
            call_id=about.call_id,
            producer=about.producer or ("executor" if about.tool else "system"),
            parents=about.parents,
            summary=summary,
            created=now,
            expires=None if about.ttl is None else now + about.ttl,
            granted_by=about.granted_by,
            request=about.request,
            metadata_json=about.metadata_json,
        )

    def _is_repeat(self, entry: Entry, digest: str, codec: Codec, about: About) -> bool:
        """Whether this put would add nothing to an entry that the session has."""
        ref = entry.ref
        if ref.artifact_id != digest or ref.codec != codec or not self.is_live(entry):
            return False
        if ref.pinned and not self.is_live(replace(entry, ref=replace(ref, pinned=False))):
            # Its session is over, so the catalog decides what becomes of the other refs.
            return False
        if about.ttl is not None or ref.expires is not None:
            return False
        if not about.describes(ref):
            return False
        if ref.name is None:
            return True
        newest = self.catalog.find(ref.session_id, name=ref.name, limit=1)
        return bool(newest) and newest[0].seq == entry.seq

    def _is_sound(self, blob: Blob, data: bytes | None = None) -> bool | None:
        """Whether a copy is sound, and equals the data if they are given; None if it cannot be
        read, which must not stop the put."""
        try:
            if data is not None:
                return self.blobs.holds(blob, data)
            return all(self.blobs.read(blob, at, CHUNK) for at in range(0, blob.size, CHUNK))
        except (Damaged, NotFound):
            return False
        except StoreUnavailable as error:
            if error.may_retry:  # then a new copy could not be stored either
                raise
            return None

    def is_live(self, entry: Entry) -> bool:
        return not entry.gone and not expiry.is_over(self.expires(entry), self.clock())

    def expires(self, entry: Entry) -> float | None:
        """When this entry expires if nothing is used from now on: its own time or its session's,
        whichever is first."""
        ref, session = entry.ref, entry.session
        used = max(session.used, ref.created, self.activity.last_uses.get(session.session_id, 0.0))
        return expiry.ref_end(expiry.session_end(session.ttl, used), ref.expires, pinned=ref.pinned)

    def ref_for_caller(self, entry: Entry, near: Iterable[str] = ()) -> Ref:
        """The ref of an entry as users see it: with its expiry, its address, and a pointer that is
        unique among the ids in `near`."""
        artifact_id, length = entry.ref.artifact_id, MIN_PREFIX
        for other in near:
            if other != artifact_id:
                length = max(length, shared_prefix(artifact_id, other) + 1)
        is_inline = entry.blob.coding == "inline"
        uri = self.catalog.uri_prefix + artifact_id if is_inline else self.blobs.uri(entry.blob)
        ref = entry.ref  # written out, since `replace` costs more than hashing
        return Ref(
            artifact_id, ref.session_id, ref.size_bytes, ref.media_type, ref.kind, ref.codec,
            ref.name, ref.tool, ref.call_id, ref.producer, ref.parents, ref.summary, ref.created,
            self.expires(entry), ref.pinned, ref.granted_by, ref.request, uri, length,
            ref.metadata_json,
        )  # fmt: skip

    def check_quotas(self, info: SessionInfo, size: int) -> None:
        """Raise `QuotaExceeded` if an artifact of this size would not fit into an empty store or
        session. This stops a stream before it fills the disk."""
        for whose, quota in (("store", self.limits.store_quota), ("session", info.quota)):
            if quota is not None and size > quota:
                raise QuotaExceeded(
                    f"the value has at least {size} bytes; the {whose}'s quota is {quota}"
                )

    def check_size(self, size: int) -> None:
        """Raise `TooLarge` if an artifact may not have this many bytes."""
        if self.max_artifact_bytes is not None and size > self.max_artifact_bytes:
            raise TooLarge(
                f"the value has at least {size} bytes; the limit for one artifact is "
                f"{self.max_artifact_bytes}",
                hint="split it, or open the store with a larger max_artifact_bytes",
            )


class _Measured:
    """The chunks of a stream that is put, checked against the limits as they come."""

    def __init__(
        self, parts: Parts, info: SessionInfo, stream: Iterable[bytes], about: About
    ) -> None:
        self._parts, self._info, self._stream, self._about = parts, info, stream, about
        self.tail = b""
        self.whole: bytes | None = None
        """All of it, if it may be JSON and is not too large."""

    def chunks(self) -> Iterator[bytes]:
        size = 0
        kept: bytearray | None = None
        for chunk in self._stream:
            if not size and self._about.media_type is None:
                kept = bytearray() if media.may_be_json(chunk, self._about.name) else None
            size += len(chunk)
            self._parts.check_size(size)
            self._parts.check_quotas(self._info, size)
            self.tail = (self.tail + chunk)[-_TAIL:]
            if size > media.CHECKED:
                kept = None
            if kept is not None:
                kept += chunk
            yield chunk
        self.whole = None if kept is None else bytes(kept)


def _recognized(
    codec: Codec, head: bytes, tail: bytes, about: About, text: str | None, whole: bytes | None
) -> tuple[str, str]:
    """The media type of a value, and the start of its text, which is empty if it is binary."""
    if text is not None:
        start = text[: media.HEAD]
        media_type = about.media_type
        return media_type or media.sniff_text(start, text[-_TAIL:], about.name, whole), start
    if about.media_type is not None:
        media_type = about.media_type
    elif codec == "json":
        media_type = media.JSON
    else:
        media_type = media.sniff_bytes(head[: media.HEAD], tail, about.name, whole)
    return media_type, media.decode_head(head)[: media.HEAD] if media.is_text(media_type) else ""


def _summary_of(start: str) -> str:
    """The start of a text as one line, with secrets masked."""
    from coatcheck.redaction import mask

    shown = mask(start[:_LOOKED_AT], 0, _SUMMARIZED)[:_SUMMARIZED]
    return " ".join(shown.splitlines())[: _SUMMARIZED - 1]


def metadata_text(metadata: object) -> str:
    """Return the metadata of a put as JSON with sorted keys. Raises `InvalidArgument`."""
    hint = (
        f"pass a JSON object of at most {METADATA_LIMIT:,} bytes, "
        "and put anything larger as an artifact"
    )
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise InvalidArgument(
            f"metadata must be a JSON object, got a {type(metadata).__name__}", hint=hint
        )
    try:
        text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"metadata must be a JSON object: {clip(str(error), 120)}", hint=hint
        ) from error
    if len(text) > METADATA_LIMIT:
        raise InvalidArgument(
            f"metadata must have at most {METADATA_LIMIT:,} bytes, got {len(text):,}", hint=hint
        )
    return text


def _codec_of(stream: IO[bytes]) -> Codec:
    """The codec of a stream that was read to its end: `text` if its attribute `is_text` says so."""
    return "text" if getattr(stream, "is_text", False) is True else "bytes"


def _checked(about: About) -> About:
    about.check()
    if about.summary is None:
        return about
    from coatcheck.redaction import mask

    summary = mask(about.summary)
    return about if summary == about.summary else about._replace(summary=summary[:SUMMARY_LIMIT])


def _file_name(path: Path) -> str | None:
    """Return the file's name as text, with replacement characters for what is not UTF-8; None if it
    is a pointer."""
    name = os.fsencode(path.name).decode("utf-8", "replace")
    return None if is_pointer(name) else name


def discard(blobs: BlobStore, catalog: Catalog, blob: Blob) -> None:
    """Remove a copy whose put failed, unless its row was written all the same. If that is unknown,
    leave it to a sweep."""
    with contextlib.suppress(StoreError):
        known = catalog.blob(blob.digest)
        if known is None or known.place != blob.place:
            blobs.remove(blob)
