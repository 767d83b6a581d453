"""The value objects that pass between the layers: `Ref`, `Blob` and `Coverage`.

All are frozen: a ref describes the moment when it was made. Times are seconds since the epoch
inside, datetimes outside.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from coatcheck.ids import SCHEME

Codec = Literal["text", "json", "bytes"]
Coding = Literal["inline", "raw", "zstd"]
PRODUCERS: Final = ("dispatcher", "executor", "planner", "system")
SUMMARY_LIMIT: Final = 500  # characters
RECORD_LIMIT: Final = 1 << 20  # bytes
METADATA_LIMIT: Final = 4_096  # bytes of JSON
FENCED_SERIES: Final = frozenset({"hot"})
"""The series that accept records only under a claim."""

LAST_TIME: Final = (
    datetime.max.replace(tzinfo=UTC).timestamp() - 1
)  # a time to live may end after the last datetime


@dataclass(frozen=True, slots=True)
class Blob:
    """Stored bytes: their digest and size, how and where they are kept, and a checksum for each
    frame.

    `place` is the backend's own name for the copy that the catalog points at. A blob that is
    repaired or compressed gets a new place, so that nobody removes a copy that another process has
    just written. `used` is when it was last put or read, as far as the catalog knows.
    """

    digest: str
    size: int
    coding: Coding = "inline"
    place: str = ""
    frames: bytes = b""
    used: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Ref:
    """The value object behind a pointer: one artifact in one session.

    `request` is the read that derived it from its parents, if it was derived. Refs of the same put
    are equal: expiry, address and pointer length do not count."""

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
    metadata_json: str | None = None

    @property
    def pointer(self) -> str:
        return SCHEME + self.artifact_id[: self.pointer_length]

    @property
    def metadata(self) -> dict[str, Any]:
        """The small JSON object given at the put, for the host's own use; {} if there is none."""
        return json.loads(self.metadata_json) if self.metadata_json else {}

    @property
    def content_hash(self) -> str:
        return "sha256:" + self.artifact_id

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def expires_at(self) -> datetime | None:
        """When this ref expires if the session is not used before; None if it is pinned or has no
        time to live."""
        return (
            None
            if self.expires is None
            else datetime.fromtimestamp(min(self.expires, LAST_TIME), UTC)
        )

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def to_record(self) -> dict[str, Any]:
        """The JSON record of this artifact, as a registry stores it."""
        return {
            "artifact_id": self.artifact_id,
            "type": self.kind,
            "content_uri": self.content_uri,
            "content_hash": self.content_hash,
            "size_bytes": self.size_bytes,
            "created_at": iso_time(self.created),
            "producer": self.producer,
            "summary": self.summary,
            "mime": self.media_type,
        }


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which bytes of an artifact a session has been shown: ordered ranges, and the size of the
    artifact."""

    ranges: tuple[tuple[int, int], ...]
    size: int

    @property
    def shown(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def share(self) -> float:
        """The part that was shown, from 0.0 to 1.0."""
        return self.shown / self.size if self.size else 1.0

    def __str__(self) -> str:
        return f"{self.shown:,} of {self.size:,} bytes shown"


def iso_time(seconds: float | None) -> str | None:
    """Format a time as ISO 8601. Times beyond the calendar become its last second."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(min(seconds, LAST_TIME), UTC).isoformat().replace("+00:00", "Z")


def summarize(text: str, limit: int = 200) -> str:
    """The first characters of a text on one line: every line end becomes a space."""
    return " ".join(text[: limit + 1].splitlines())[:limit] if text else ""
