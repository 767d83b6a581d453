"""The value objects that pass between the layers: `Ref`, `Blob` and what a put says about a value.

All are frozen: a ref is what was true when it was made. Times are seconds since the epoch inside, datetimes outside.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from coatcheck.ids import pointer_of

Codec = Literal["text", "json", "bytes"]
Coding = Literal["inline", "raw", "zstd"]
PRODUCERS: Final = ("dispatcher", "executor", "planner", "system")
SUMMARY_LIMIT: Final = 500
LAST_TIME: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 1  # a time to live may lie beyond every calendar


@dataclass(frozen=True, slots=True)
class Blob:
    """Stored bytes: their digest and size, how and where they are kept, and a checksum for each frame.

    `place` is the backend's own name for the copy that the catalog points at: a blob that is healed or compressed gets
    a new place, so that nobody removes a copy which somebody else has just written. `used` is when it was last put or
    read, as far as the catalog knows.
    """

    digest: str
    size: int
    coding: Coding = "inline"
    place: str = ""
    frames: bytes = b""
    used: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Ref:
    """What a pointer stands for: one artifact, as one session holds it.

    `request` is what was asked of its parents, where it was derived from them. Two refs are equal where they are the
    same put: what time does to one (expiry, address) does not count."""

    artifact_id: str
    session_id: str
    size_bytes: int
    media_type: str
    kind: str
    codec: Codec = "bytes"
    name: str | None = None
    tool: str | None = None
    call_id: str | None = None
    producer: str = "system"
    parents: tuple[str, ...] = ()
    summary: str = ""
    created: float = 0.0
    expires: float | None = field(default=None, compare=False)
    pinned: bool = False
    granted_by: str | None = None
    request: str | None = None
    content_uri: str = field(default="", compare=False)
    pointer_length: int = field(default=12, compare=False)

    @property
    def pointer(self) -> str:
        return pointer_of(self.artifact_id, self.pointer_length)

    @property
    def content_hash(self) -> str:
        return "sha256:" + self.artifact_id

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def expires_at(self) -> datetime | None:
        """When this ref expires if the session is not used before; None where it is pinned or has no time to live."""
        return None if self.expires is None else datetime.fromtimestamp(min(self.expires, LAST_TIME), UTC)

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def as_told(self, expires: float | None, content_uri: str, pointer_length: int) -> Ref:
        """This ref with what depends on the moment. Spelled out: `replace` would cost a put more than its hash."""
        return Ref(
            self.artifact_id, self.session_id, self.size_bytes, self.media_type, self.kind, self.codec, self.name,
            self.tool, self.call_id, self.producer, self.parents, self.summary, self.created, expires, self.pinned,
            self.granted_by, self.request, content_uri, pointer_length,
        )  # fmt: skip

    def to_record(self) -> dict[str, Any]:
        """The registry's JSON record of this artifact."""
        return {
            "artifact_id": self.artifact_id,
            "type": self.kind,
            "content_uri": self.content_uri,
            "content_hash": self.content_hash,
            "size_bytes": self.size_bytes,
            "created_at": self.created_at.isoformat().replace("+00:00", "Z"),
            "producer": self.producer,
            "summary": self.summary,
            "mime": self.media_type,
        }


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which bytes of an artifact a session has been shown: ranges in order, of how many bytes."""

    ranges: tuple[tuple[int, int], ...]
    size: int

    @property
    def shown(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def share(self) -> float:
        """From 0.0, nothing, to 1.0, all of it."""
        return self.shown / self.size if self.size else 1.0

    def __str__(self) -> str:
        return f"{self.shown:,} of {self.size:,} bytes shown"


def summarize(text: str, limit: int = 200) -> str:
    """The first characters of a text on one line: every line end becomes a blank."""
    return " ".join(text[: limit + 1].splitlines())[:limit] if text else ""
