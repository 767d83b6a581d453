"""How a value comes in: hash, describe, make durable, then name it in the catalog. In that order, always.

Content that is there already is compared, not trusted: a copy that rotted is replaced by the one that was just handed
in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from coatcheck import media
from coatcheck.errors import Damaged, InvalidArgument, NotFound, QuotaExceeded, StoreError, TooLarge
from coatcheck.ids import MIN_PREFIX, clip, digest_of
from coatcheck.redaction import mask
from coatcheck.refs import PRODUCERS, SUMMARY_LIMIT, Blob, Codec, Ref, summarize
from coatcheck.scope import Lookup, Scope, check_name, is_seconds
from coatcheck.storage import BlobStore, Catalog, Entry, Limits
from coatcheck.storage.frames import FramedChunks
from coatcheck.streams import CHUNK, chunks_of, is_stream
from coatcheck.values import Encoded, decode_text, encode

_TAIL = 64
_SUMMARIZED, _LOOKED_AT = 201, 320  # characters; those beyond a summary show a secret that it would cut
_T = TypeVar("_T")
_HEAD = 1024  # bytes that hold the 200 characters of a summary, whatever the script


@dataclass(frozen=True, slots=True)
class About:
    """What a put says of a value, besides the value. None means: see for yourself."""

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

    def check(self) -> None:
        for what, text in (("name", self.name), ("tool name", self.tool), ("call id", self.call_id),
                           ("media type", self.media_type), ("request", self.request)):  # fmt: skip
            if text is not None:
                check_name(text, what)
        if self.kind is not None and self.kind not in media.KINDS:
            raise InvalidArgument(f"{clip(self.kind)} is no kind", hint="one of " + ", ".join(media.KINDS))
        if self.producer is not None and self.producer not in PRODUCERS:
            raise InvalidArgument(f"{clip(self.producer)} is no producer", hint="one of " + ", ".join(PRODUCERS))
        if self.summary is not None and len(self.summary) > SUMMARY_LIMIT:
            raise InvalidArgument(f"the summary has {len(self.summary)} characters; at most {SUMMARY_LIMIT} are kept")
        if self.ttl is not None and not is_seconds(self.ttl):
            raise InvalidArgument(f"a time to live of {self.ttl!r} is no number of seconds")


class Intake:
    """The put path of a store."""

    def __init__(
        self,
        blobs: BlobStore,
        catalog: Catalog,
        lookup: Lookup,
        *,
        limits: Limits,
        max_artifact_bytes: int | None,
        clock: Callable[[], float],
        make_room: Callable[[], object],
    ) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._lookup = lookup
        self._limits = limits
        self._max = max_artifact_bytes
        self._clock = clock
        self._make_room = make_room

    def put(self, scope: Scope, value: object, about: About) -> Ref:
        if isinstance(value, Path):
            named = _checked(replace(about, name=about.name or _file_name(value)))
            try:
                with value.open("rb") as stream:
                    return self._put_stream(scope, stream, named)
            except OSError as error:
                raise InvalidArgument(
                    f"cannot read {str(value)!r}: {error.strerror}", hint="name a file to store"
                ) from error
        if is_stream(value):
            return self._put_stream(scope, value, _checked(about))
        return self.put_encoded(scope, Encoded(*encode(value), value if isinstance(value, str) else None), about)

    def put_encoded(self, scope: Scope, value: Encoded, about: About, also: Iterable[Scope] = ()) -> Ref:
        """Put a value that the caller has encoded, into further sessions too. Its digest is computed here, always."""
        about, digest = _checked(about), digest_of(value.data)
        ref = self._put_bytes(scope, value, about, digest)
        for other in also:
            self._put_bytes(other, value, about, digest)
        return ref

    def add(self, entry: Entry) -> bool:
        """A further ref to a blob that the catalog knows. False where that is gone meanwhile."""
        return self._add(replace(entry, content=None), reuse=True)

    def _put_bytes(self, scope: Scope, value: Encoded, about: About, digest: str) -> Ref:
        codec, data, text, frames = value
        self._check_size(len(data))
        info = scope.info
        is_small = len(data) <= self._catalog.inline_limit
        ref: Ref | None = None
        if is_small and self._catalog.is_far:
            ref = self._describe(scope, codec, digest, len(data), data[:_HEAD], data[-_TAIL:], about, text)
            entry = Entry(ref, Blob(digest, len(data)), info, data)
            new = self._within_quota(lambda: self._catalog.put_new(entry, limits=self._limits))
            if new is not None:
                return self._lookup.told(entry, self._all_near(scope, digest, new))
        near = self._near(info.session_id, digest[:MIN_PREFIX])
        ids = self._all_near(scope, digest, _ids(near))
        settled = not self._catalog.behind()  # asked after: then what was found is durable too
        if near and settled:
            for entry in near:
                if self._is_repeat(entry, digest, codec, about) and self._holds(entry, data):
                    return self._lookup.told(entry, ids)
        if ref is None:
            ref = self._describe(scope, codec, digest, len(data), data[:_HEAD], data[-_TAIL:], about, text)
        if is_small:
            entry = Entry(ref, Blob(digest, len(data)), info, data)
            self._add(entry)
            return self._lookup.told(entry, ids)
        known = self._catalog.blob(digest, settled=False)
        if known and self._blob_holds(known, data):
            entry = Entry(ref, known, info)
            if self._add(entry, reuse=True):
                return self._lookup.told(entry, ids)
        chunks = [data] if frames is None else FramedChunks([data], frames)
        with self._blobs.stage(chunks, digest) as staged:
            return self._lookup.told(self._publish(Entry(ref, staged.publish(), info), instead_of=known), ids)

    def _put_stream(self, scope: Scope, stream: IO[bytes], about: About) -> Ref:
        chunks = chunks_of(stream)
        head = next(chunks, b"")
        if len(head) < CHUNK:
            codec = _codec_of(stream)
            value = Encoded(codec, head, decode_text(head) if codec == "text" else None)
            return self._put_bytes(scope, value, about, digest_of(head))
        tail = head[-_TAIL:]

        def measured() -> Iterator[bytes]:
            nonlocal tail
            size, chunk = 0, head
            while chunk:
                size += len(chunk)
                self._check_size(size)
                tail = (tail + chunk)[-_TAIL:]
                yield chunk
                chunk = next(chunks, b"")

        info = scope.info
        with self._blobs.stage(measured()) as staged:
            digest = staged.digest
            near = self._catalog.find(info.session_id, prefix=digest[:MIN_PREFIX])
            codec = _codec_of(stream)
            text = (head[:_HEAD] + tail).decode("utf-8", "ignore") if codec == "text" else None
            ref = self._describe(scope, codec, digest, staged.size, head[:_HEAD], tail, about, text)
            ids = self._all_near(scope, digest, _ids(near))
            known = self._catalog.blob(digest)
            if known and self._is_sound(known):
                for entry in near:
                    if self._is_repeat(entry, digest, codec, about):
                        return self._lookup.told(entry, ids)
                entry = Entry(ref, known, info)
                if self._add(entry, reuse=True):
                    return self._lookup.told(entry, ids)
            return self._lookup.told(self._publish(Entry(ref, staged.publish(), info), instead_of=known), ids)

    def _near(self, session_id: str, prefix: str) -> list[Entry]:
        """What the session holds under a prefix, with content where that can be read: else it is about to be healed."""
        try:
            return self._catalog.find(session_id, prefix=prefix, content=True, settled=False)
        except Damaged:
            return self._catalog.find(session_id, prefix=prefix, settled=False)

    def _all_near(self, scope: Scope, digest: str, own: Collection[str]) -> Collection[str]:
        """What the new pointer must be told apart from: ids of the session and of its ancestors."""
        if not scope.ancestors:
            return own
        return {*own, *self._catalog.near(scope.ancestors, [digest], settled=False)}

    def _publish(self, entry: Entry, *, instead_of: Blob | None) -> Entry:
        """Name a new copy in the catalog. One that it replaces, since that did not hold the data, goes after."""
        try:
            self._add(entry, heal=instead_of is not None)
        except BaseException:
            discard(self._blobs, self._catalog, entry.blob)
            raise
        if instead_of is not None and instead_of.coding != "inline":
            self._blobs.remove(instead_of)
        return entry

    def _add(self, entry: Entry, *, reuse: bool = False, heal: bool = False) -> bool:
        return self._within_quota(lambda: self._catalog.put(entry, limits=self._limits, reuse=reuse, heal=heal))

    def _within_quota(self, put: Callable[[], _T]) -> _T:
        try:
            return put()
        except QuotaExceeded:
            self._make_room()
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
    ) -> Ref:
        if text is not None:
            start = text[: media.HEAD]
            media_type = about.media_type or media.sniff_text(start, text[-_TAIL:], about.name)
        else:
            media_type = about.media_type or (
                media.JSON if codec == "json" else media.sniff_bytes(head[: media.HEAD], tail, about.name)
            )
            start = media.decode_head(head)[: media.HEAD] if media.is_text(media_type) else ""
        summary = about.summary
        if summary is None:
            shown = mask(start[:_LOOKED_AT], 0, _SUMMARIZED)
            summary = summarize(shown) if start or not size else f"{media_type}, {size} bytes"
        now = self._clock()
        return Ref(
            digest,
            scope.session_id,
            size,
            media_type,
            about.kind or media.sniff_kind(media_type, start, name=about.name),
            codec,
            about.name,
            about.tool,
            about.call_id,
            about.producer or ("executor" if about.tool else "system"),
            about.parents,
            summary if summary.isascii() else summary.encode("utf-8", "replace").decode(),
            now,
            None if about.ttl is None else now + about.ttl,
            request=about.request,
        )

    def _is_repeat(self, entry: Entry, digest: str, codec: Codec, about: About) -> bool:
        """Whether putting this again would add nothing to what the session holds."""
        ref = entry.ref
        if ref.artifact_id != digest or ref.codec != codec or not self._lookup.is_live(entry):
            return False
        if about.ttl is not None or ref.expires is not None:
            return False
        said = (about.name, about.tool, about.call_id, about.parents, about.request, None)
        if said != (ref.name, ref.tool, ref.call_id, ref.parents, ref.request, ref.granted_by):
            return False
        guessed = ((about.kind, ref.kind), (about.media_type, ref.media_type), (about.summary, ref.summary),
                   (about.producer, ref.producer))  # fmt: skip
        if any(new is not None and new != old for new, old in guessed):
            return False
        if ref.name is None:
            return True
        newest = self._catalog.find(ref.session_id, name=ref.name, limit=1, settled=False)
        return bool(newest) and newest[0].seq == entry.seq

    def _holds(self, entry: Entry, data: bytes) -> bool:
        return entry.content == data if entry.blob.coding == "inline" else self._blob_holds(entry.blob, data)

    def _blob_holds(self, blob: Blob, data: bytes) -> bool:
        try:
            return self._blobs.holds(blob, data)
        except (Damaged, NotFound):
            return False

    def _is_sound(self, blob: Blob) -> bool:
        try:
            return all(self._blobs.read(blob, at, CHUNK) for at in range(0, blob.size, CHUNK))
        except (Damaged, NotFound):
            return False

    def _check_size(self, size: int) -> None:
        if self._max is not None and size > self._max:
            raise TooLarge(
                f"the value has {size} bytes or more; this store takes at most {self._max} in one artifact",
                hint="split it, or open the store with a larger max_artifact_bytes",
            )


def _ids(entries: list[Entry]) -> list[str]:
    return [entry.ref.artifact_id for entry in entries]


def _codec_of(stream: IO[bytes]) -> Codec:
    """How to read a stream's bytes back: as text where it says, at its end, that all of it was (`is_text`)."""
    return "text" if getattr(stream, "is_text", False) is True else "bytes"


def _checked(about: About) -> About:
    about.check()
    if about.summary is not None and (summary := mask(about.summary)) != about.summary:
        return replace(about, summary=summary[:SUMMARY_LIMIT])
    return about


def _file_name(path: Path) -> str:
    """The file's name as text. A file system takes any bytes; what is not UTF-8 becomes a replacement character."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def discard(blobs: BlobStore, catalog: Catalog, blob: Blob) -> None:
    """Remove a copy whose put failed, unless its row made it all the same. In doubt it stays, for a sweep to decide."""
    with contextlib.suppress(StoreError):
        known = catalog.blob(blob.digest)
        if known is None or known.place != blob.place:
            blobs.remove(blob)
