"""Contents for tests: from a store, from plain bytes, and ones that record which frames were
read."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coatcheck import Session
from coatcheck.content import Content
from coatcheck.ids import digest_of
from coatcheck.reading import Page, Request, read_text
from coatcheck.reading.page import unseal
from coatcheck.refs import Ref
from coatcheck.storage.frames import FRAME, Framer

KEY = bytes(range(32))


@dataclass
class Framed:
    """Bytes that count how often each of their frames is read."""

    data: bytes
    frames: Counter[int] = field(default_factory=Counter)

    def content(self) -> Content:
        framer = Framer()
        framer.update(self.data)
        digest, size, frames = framer.finish()
        return Content(Ref(digest, "test", size, "text/plain", "log"), frames, self._read)

    def _read(self, offset: int, length: int) -> bytes:
        data = self.data[offset : offset + length]
        if data:
            self.frames.update(range(offset // FRAME, (offset + len(data) - 1) // FRAME + 1))
        return data


kept_in: Session | None = None
"""The session that contents are stored in before they are read; None to read them from memory."""


def kept(session: Session, data: bytes, **about: Any) -> Content:
    return session.content(session.put(data, **about))


def content_of(data: bytes | str) -> Content:
    """The content of a text, with frames if it has more than one."""
    data = data if isinstance(data, bytes) else data.encode()
    return (
        kept(kept_in, data, media_type="text/plain", kind="log")
        if kept_in
        else Framed(data).content()
    )


def make_content(data: bytes, media_type: str = "application/octet-stream") -> Content:
    if kept_in:
        return kept(kept_in, data, media_type=media_type, kind="data")
    ref = Ref(digest_of(data), "test", len(data), media_type, "data")
    return Content(ref, b"", lambda offset, length: data[offset : offset + length])


def read(content: Content, request: Request | None = None, cursor: str | None = None) -> Page:
    """Read as a session does: by request, by cursor, or both."""
    asked, position = request or Request(), None
    if cursor is not None:
        asked, position = unseal(KEY, content.ref.artifact_id, cursor, request)
    return read_text(content, asked, content.ref.pointer, key=lambda: KEY, position=position)


def pages(content: Content, request: Request | None = None) -> Iterator[Page]:
    """Yield all pages. Each page after the first is read by cursor and limit only."""
    request = request or Request()
    page = read(content, request)
    cap = Request(max_chars=request.max_chars)
    yield page
    while page.cursor is not None:
        page = read(content, cap, page.cursor)
        yield page
