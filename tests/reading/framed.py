"""Contents with frames, as a store's backend gives them, that note which frames were read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coatcheck.reading import Page, Request, cursors, read_text
from coatcheck.refs import Ref
from coatcheck.storage.frames import FRAME, Framer
from coatcheck.streams import Content

KEY = bytes(range(32))


@dataclass
class Framed:
    """Bytes and what was read of them."""

    data: bytes
    frames: set[int] = field(default_factory=set)

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


def content_of(data: bytes | str) -> Content:
    return Framed(data if isinstance(data, bytes) else data.encode()).content()


def read(content: Content, request: Request | None = None, cursor: str | None = None) -> Page:
    """As a session reads: by pointer and request, by pointer and cursor, or both."""
    asked, position = request or Request(), None
    if cursor is not None:
        asked, position = cursors.unseal(KEY, content.ref.artifact_id, cursor, request)
    return read_text(content, asked, key=KEY, position=position)


def pages(content: Content, request: Request | None = None) -> Iterator[Page]:
    """All pages, each after the first by cursor alone (and its cap)."""
    request = request or Request()
    page = read(content, request)
    cap = Request(max_chars=request.max_chars)
    yield page
    while page.cursor is not None:
        page = read(content, cap, page.cursor)
        yield page
