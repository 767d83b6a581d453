"""Bodies that pass in pieces: an upload that a thread of the store reads, and a download by range.

Neither is ever in memory as a whole, and neither side waits for the other without a limit: a client
has `stall` seconds for each megabyte. An upload counts only if it is complete: if the client leaves
in the middle, the thread gets an error, and nothing is stored.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import concurrent.futures
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from coatcheck.content import CHUNK
from coatcheck.errors import Damaged, InvalidArgument, TooLarge
from coatcheck.http.limits import Pace
from coatcheck.ids import is_pointer, parse_pointer
from coatcheck.lanes import in_thread
from coatcheck.session import Session
from coatcheck.storage.frames import FRAME

OCTETS: Final = "application/octet-stream"
PLAIN: Final = "text/plain; charset=utf-8"
SAFE: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
"""Headers of every answer, so that no browser runs what is in a store."""
_LONGEST_NAME: Final = 200
_RANGES: Final = re.compile(r"bytes\s*=\s*(.*)", re.IGNORECASE | re.DOTALL)
_RANGE: Final = re.compile(r"(\d{1,19})-(\d{1,19})?|-(\d{1,19})")
_TAGS: Final = re.compile(r'\s*(?:W/)?"([^"]*)"\s*(?:,|$)')


Hold = Callable[[int], Awaitable[object]]
"""Waits until there is room in memory for this many bytes of a body."""


class ClientGone(Exception):
    """The client left, or was too slow, before its request was complete."""

    def __init__(
        self, message: str = "the client has disconnected", *, hint: str = "send the request again"
    ) -> None:
        super().__init__(message)
        self.hint = hint

    @classmethod
    def slow(cls, stall: float) -> ClientGone:
        """Return the error for a client that needs more than `stall` seconds for a megabyte."""
        hint = (
            f"each megabyte must pass within {stall:g} seconds; try again with a faster connection"
        )
        return cls("the client was too slow", hint=hint)


# Receiving


class Upload:
    """The body of a request, piece by piece. `read` is for threads other than the event loop's."""

    def __init__(self, receive: Receive, *, stall: float, is_text: bool = False) -> None:
        self._receive = receive
        self._stall = stall
        self._pace = Pace(stall)
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._waiting: concurrent.futures.Future[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")() if is_text else None
        self.is_text = is_text
        self._has_ended = False
        self._is_over = False
        self.size = 0

    async def next(self, size: int) -> bytes:
        """Return the next bytes, fewer than `size` only at the end. Raises `ClientGone`."""
        is_last = await self.fits(size)
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._decoder is not None:
            try:
                self._decoder.decode(piece, final=is_last)
            except UnicodeDecodeError:
                raise InvalidArgument(
                    "the body is not UTF-8", hint="leave codec=text out to store bytes"
                ) from None
        return piece

    async def fits(self, size: int) -> bool:
        """Wait for this many bytes, and return whether they are all that is left. Raises
        `ClientGone`."""
        while len(self._buffer) < size and not self._has_ended:
            try:
                self._take(await self._pace.next(self._receive))
            except TimeoutError:
                raise ClientGone.slow(self._stall) from None
        return self._has_ended and len(self._buffer) <= size

    def _take(self, message: Message) -> None:
        if message["type"] != "http.request":
            raise ClientGone
        piece = message.get("body", b"")
        self._buffer += piece
        self.size += len(piece)
        self._has_ended = not message.get("more_body", False)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes to a thread of the store. Raises `ClientGone`."""
        if self._is_over:
            raise ClientGone
        self._waiting = asyncio.run_coroutine_threadsafe(
            self.next(CHUNK if size < 0 else size), self._loop
        )
        try:
            return self._waiting.result()
        except concurrent.futures.CancelledError:
            raise ClientGone from None

    def abandon(self) -> None:
        """End the thread that reads: the request is over."""
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()


async def whole_body(
    receive: Receive, headers: Headers, *, most: int, stall: float, hold: Hold | None = None
) -> bytes:
    """Return the body of a request. With `hold`, one of more than a megabyte first waits for room.
    Raises `TooLarge` above `most` bytes, as early as possible."""
    too_large = TooLarge(
        f"the body must have at most {most:,} bytes", hint="put large content as an artifact"
    )
    given = headers.get("content-length", "")
    declared = int(given[:20]) if given.isascii() and given.isdecimal() else None
    if declared is not None and declared > most:
        raise too_large
    upload = Upload(receive, stall=stall)
    if hold is not None and not await upload.fits(CHUNK):
        await hold(most if declared is None else declared)
    body = bytearray()
    while len(body) <= most and (piece := await upload.next(CHUNK)):
        body += piece
    if len(body) > most:
        raise too_large
    return bytes(body)


# Sending


class Span(NamedTuple):
    """A range of bytes, the end excluded."""

    start: int
    end: int


class NotSatisfiable(Exception):
    """A range begins after the end of the content."""


def requested_range(header: str, size: int) -> Span | None:
    """Return the range that a header asks for. None means all of the content: for a unit other than
    bytes, and for several ranges. Raises `InvalidArgument` if it is malformed, and
    `NotSatisfiable`."""
    found = _RANGES.fullmatch(header.strip())
    if found is None:
        return None
    parts = [_RANGE.fullmatch(part.strip()) for part in found[1].split(",") if part.strip()]
    valid = [one for one in parts if one is not None]
    is_reversed = any(one[1] and one[2] and int(one[2]) < int(one[1]) for one in valid)
    if not valid or len(valid) < len(parts) or is_reversed:
        raise InvalidArgument(
            "invalid Range header", hint="write bytes=0-1023, bytes=1024- or bytes=-512"
        )
    if len(valid) > 1:
        return None
    first, last, suffix = valid[0][1], valid[0][2], valid[0][3]
    start = max(0, size - int(suffix)) if suffix else int(first)
    end = size if suffix or not last else min(size, int(last) + 1)
    if start >= size or start >= end:
        raise NotSatisfiable
    return Span(start, end)


def has_tag(header: str, etag: str, *, strong: bool = False) -> bool:
    """Whether a list of entity tags has this one. With `strong`, weak ones do not count."""
    if header.strip() == "*":
        return True
    at = 0
    while match := _TAGS.match(header, at):
        if f'"{match[1]}"' == etag and not (strong and header[at:].lstrip().startswith("W/")):
            return True
        at = match.end()
        if at == len(header):
            break
    return False


@dataclass(frozen=True, slots=True)
class ContentBody:
    """The bytes of an artifact, or of a part of one, to be sent by range."""

    size: int
    digest: str
    name: str | None
    read: Callable[[int, int], bytes]
    close: Callable[[], object]

    @classmethod
    def of(cls, session: Session, target: str) -> ContentBody:
        """Open an artifact. Raises what `session.open` raises."""
        if is_pointer(target) and parse_pointer(target).fragment:
            with session.open(target) as stream:
                data = stream.read()
            digest = hashlib.sha256(data).hexdigest()
            return cls(
                len(data),
                digest,
                None,
                lambda offset, length: data[offset : offset + length],
                lambda: None,
            )
        content = session.content(target).__enter__()
        ref = content.ref
        return cls(ref.size_bytes, ref.artifact_id, ref.name, content.read, content.__exit__)

    @property
    def etag(self) -> str:
        return f'"{self.digest}"'

    def headers(self) -> dict[str, str]:
        """The headers of all answers with this content."""
        digest = f"sha-256=:{base64.b64encode(bytes.fromhex(self.digest)).decode()}:"
        return {
            **SAFE,
            "accept-ranges": "bytes",
            "cache-control": "private, no-cache",
            "content-disposition": "attachment" + _file_name(self.name),
            "etag": self.etag,
            "repr-digest": digest,
        }


def _file_name(name: str | None) -> str:
    """The parameter of Content-Disposition for a name. It is percent-encoded, so that no name can
    end the header."""
    if name is None or len(name) > _LONGEST_NAME:
        return ""
    return f"; filename*=UTF-8''{quote(name, safe='')}"


class Download:
    """An answer with content: all of it, a range, or none for HEAD. An ASGI application for one
    request."""

    def __init__(
        self, source: ContentBody, span: Span | None, *, text: bool, is_head: bool, stall: float
    ) -> None:
        self._source = source
        self._span = span or Span(0, source.size)
        self._is_head = is_head
        self._stall = stall
        self.status = 200 if span is None else 206
        extra = {
            "content-type": PLAIN if text else OCTETS,
            "content-length": str(self._span.end - self._span.start),
        }
        headers = source.headers()
        if span is None:
            extra["content-digest"] = headers["repr-digest"]
        else:
            extra["content-range"] = f"bytes {span.start}-{span.end - 1}/{source.size}"
        self._headers = headers | extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at, end = self._span if not self._is_head else (0, 0)
        left = asyncio.ensure_future(_left(receive))
        try:
            piece = await self._piece(
                at, end
            )  # before the status is sent, so that an error gets its own
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status,
                    "headers": Headers(self._headers).raw,
                }
            )
            while True:
                at += len(piece)
                await self._send(
                    send, {"type": "http.response.body", "body": piece, "more_body": at < end}
                )
                if at >= end or left.done():
                    break
                piece = await self._piece(at, end)
        finally:
            left.cancel()
            await in_thread(self._source.close)

    async def _piece(self, at: int, end: int) -> bytes:
        if at >= end:
            return b""
        piece = await in_thread(self._source.read, at, min(FRAME - at % FRAME, end - at))
        if not piece:
            raise Damaged("the content is shorter than it was")
        return piece

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall):
                await send(message)
        except TimeoutError:
            raise ClientGone.slow(self._stall) from None


async def _left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
