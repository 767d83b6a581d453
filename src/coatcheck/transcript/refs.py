"""`ArtifactRef`: what a slim line says of a payload that left it, and how such refs are written and known again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.ids import pointer_of
from coatcheck.refs import Ref
from coatcheck.scope import is_text
from coatcheck.transcript.formats.values import Path

PREFIX: Final = "transcript:"
"""How the ids of the sessions begin through which transcripts hold what they refer to."""

SUMMARY: Final = 80
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SESSION: Final = re.compile(r"transcript:[0-9a-f]{32}")
_KEYS: Final = frozenset({"id", "size", "media_type", "summary", "path", "session", "encoding", "raw", "prefix"})


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One payload that left a line: which artifact it is, where it stood, and how it was written there.

    `encoding` is how the place is made again from the artifact: a style of JSON strings, "json" for a value that is
    stored as it was written, or "base64" behind a `prefix`. Where no style gives the same bytes, `raw` is the id of an
    artifact that holds them."""

    id: str
    size: int
    media_type: str
    summary: str
    path: Path
    session: str
    encoding: str
    raw: str | None = None
    prefix: str = ""

    @property
    def pointer(self) -> str:
        return pointer_of(self.id)

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "id": self.id,
            "size": self.size,
            "media_type": self.media_type,
            "summary": self.summary,
            "path": list(self.path),
            "session": self.session,
            "encoding": self.encoding,
        }
        if self.raw is not None:
            record["raw"] = self.raw
        if self.prefix:
            record["prefix"] = self.prefix
        return record

    @classmethod
    def of(
        cls, ref: Ref, path: Path, session: str, encoding: str, raw: str | None = None, prefix: str = ""
    ) -> ArtifactRef:
        summary = ref.summary if len(ref.summary) <= SUMMARY else ref.summary[: SUMMARY - 1] + "…"
        return cls(ref.artifact_id, ref.size_bytes, ref.media_type, summary, path, session, encoding, raw, prefix)


@dataclass(frozen=True, slots=True)
class Holding:
    """What stands under our key: refs, or none where it only says that what stands before it is not ours."""

    refs: tuple[ArtifactRef, ...]
    sessions: frozenset[str]


def parsed(value: object) -> Holding | None:
    """What our key holds, or None where that is not what we write."""
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if len(value) == 1 and isinstance(first, dict) and first.keys() == {"session"}:
        session = first["session"]
        return Holding((), frozenset({session})) if _is(_SESSION, session) else None
    refs = []
    for one in value:
        ref = _parsed(one)
        if ref is None:
            return None
        refs.append(ref)
    return Holding(tuple(refs), frozenset(ref.session for ref in refs))


def written(refs: Sequence[ArtifactRef], session: str) -> str:
    """The value of our key. Without refs it names the session alone."""
    records = [one.to_record() for one in refs] or [{"session": session}]
    token = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    return token if is_text(token) else json.dumps(records, separators=(",", ":"))


def is_session_id(text: str) -> bool:
    """Whether a session of this id is one by which a transcript holds its payloads."""
    return _is(_SESSION, text)


def _parsed(value: object) -> ArtifactRef | None:
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        return None
    path, raw = value.get("path"), value.get("raw")
    if not isinstance(path, list) or not all(type(step) in (str, int) for step in path):
        return None
    if not (_is(_DIGEST, value.get("id")) and _is(_SESSION, value.get("session"))):
        return None
    if type(value.get("size")) is not int or not (raw is None or _is(_DIGEST, raw)):
        return None
    texts = [value.get(key) for key in ("media_type", "summary", "encoding")] + [value.get("prefix", "")]
    if not all(isinstance(one, str) for one in texts):
        return None
    media_type, summary, encoding, prefix = map(str, texts)
    return ArtifactRef(
        value["id"], value["size"], media_type, summary, tuple(path), value["session"], encoding, raw, prefix
    )


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
