"""`ArtifactRef`: the record in a slim line of a payload that was moved out, and how such records are written and
read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.ids import is_encodable, pointer_of
from coatcheck.messages.paths import Path
from coatcheck.refs import Ref
from coatcheck.storage import TRANSCRIPT

PREFIX: Final = TRANSCRIPT

SUMMARY: Final = 80
ADDED: Final = ""
EXTENDED: Final = "+"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SESSION: Final = re.compile(r"transcript:[0-9a-f]{32}")
_KEYS: Final = frozenset(
    {"id", "size", "media_type", "summary", "path", "session", "encoding", "raw", "prefix", "details"}
)


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One payload that was moved out of a line: its artifact, its path in the line, and how it was written there.

    `encoding` says how to restore the text from the artifact: a style of JSON strings, "json" for a value that is
    stored as it was written, or "base64" after a `prefix`. If no style gives the same bytes, `raw` is the id of an
    artifact that contains them. If the line also has a `details.artifactRef`, `details` is what was there before: the
    JSON of the replaced value, ADDED if there was nothing, EXTENDED if it was an object that got one more member."""

    id: str
    size: int
    media_type: str
    summary: str
    path: Path
    session: str
    encoding: str
    raw: str | None = None
    prefix: str = ""
    details: str | None = None

    @property
    def pointer(self) -> str:
        return pointer_of(self.id)

    def to_record(self) -> dict[str, Any]:
        """The JSON object that a line contains."""
        record = {name: getattr(self, name) for name in self.__slots__} | {"path": list(self.path)}
        return {name: one for name, one in record.items() if one is not None and (one or name != "prefix")}

    @classmethod
    def of(
        cls, ref: Ref, path: Path, session: str, encoding: str, raw: str | None = None, prefix: str = ""
    ) -> ArtifactRef:
        summary = ref.summary if len(ref.summary) <= SUMMARY else ref.summary[: SUMMARY - 1] + "…"
        return cls(ref.artifact_id, ref.size_bytes, ref.media_type, summary, path, session, encoding, raw, prefix)


@dataclass(frozen=True, slots=True)
class LineRefs:
    """The value of our key: refs, or none if it only marks an earlier key of the same name as not ours."""

    refs: tuple[ArtifactRef, ...]
    sessions: frozenset[str]


def parse_refs(value: object) -> LineRefs | None:
    """Parse the value of our key. None if Coatcheck did not write it."""
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if len(value) == 1 and isinstance(first, dict) and first.keys() == {"session"}:
        session = first["session"]
        return LineRefs((), frozenset({session})) if _is(_SESSION, session) else None
    refs = []
    for one in value:
        ref = _parse_ref(one)
        if ref is None:
            return None
        refs.append(ref)
    return LineRefs(tuple(refs), frozenset(ref.session for ref in refs))


def dump_refs(refs: Sequence[ArtifactRef], session: str) -> str:
    """Return the value of our key as JSON. Without refs it only names the session."""
    records = [one.to_record() for one in refs] or [{"session": session}]
    token = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    return token if is_encodable(token) else json.dumps(records, separators=(",", ":"))


def is_session_id(text: str) -> bool:
    """Whether this is the id of a session that owns the payloads of a transcript."""
    return _is(_SESSION, text)


def _parse_ref(value: object) -> ArtifactRef | None:
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
    if not all(isinstance(one, str) for one in (*texts, value.get("details", ""))):
        return None
    media_type, summary, encoding, prefix = map(str, texts)
    return ArtifactRef(
        value["id"], value["size"], media_type, summary, tuple(path), value["session"], encoding, raw, prefix,
        value.get("details"),
    )  # fmt: skip


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
