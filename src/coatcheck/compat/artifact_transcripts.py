"""Artifact-first transcripts for session files of OpenClaw and pi: payloads leave them for files, and come back."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import coatcheck
from coatcheck import Policy, Ref, Session, context, transcript
from coatcheck.checks import whole
from coatcheck.errors import InvalidArgument
from coatcheck.externalize import configured
from coatcheck.refs import iso_time

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PATTERNS: Final = ("*.jsonl", "*.jsonl.deleted.*", "*.jsonl.reset.*")
_HEAD: Final = "## Artifact Recall"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryArtifacts:
    """The settings `memory.artifacts`. `of` reads them from a config file's object."""

    enabled: bool = True
    maxItems: int = 8  # noqa: N815
    maxChars: int = 2_000  # noqa: N815
    narrativeMaxChars: int = 600  # noqa: N815

    def __post_init__(self) -> None:
        whole(self.maxItems, "maxItems", least=1)
        whole(self.maxChars, "maxChars", least=300)
        whole(self.narrativeMaxChars, "narrativeMaxChars")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MemoryArtifacts:
        given = config.get("memory", {}).get("artifacts", {})
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise InvalidArgument(f"memory.artifacts has no setting {sorted(unknown)[0]!r}")
        return cls(**given)


class ArtifactTranscripts:
    """The sessions of one agent, at `<root>/agents/<agentId>/sessions/`, with their artifacts in a folder beside them.

    `max_chars` is the size from which a tool result leaves its line."""

    def __init__(
        self, root: str | Path, agent_id: str = "main", *, memory: MemoryArtifacts | None = None, max_chars: int = 8_000
    ) -> None:
        self.folder = Path(root).absolute() / "agents" / _checked(agent_id, "agent id") / "sessions"
        self.artifacts = self.folder / "artifacts"
        self.memory = memory or MemoryArtifacts()
        self.store = coatcheck.open(self.artifacts / "store", ttl=None)
        self._max_chars = max_chars

    def path(self, session_id: str) -> Path:
        return self.folder / f"{_checked(session_id, 'session id')}.jsonl"

    def files(self) -> list[Path]:
        """Return the transcripts in the folder, including those that were reset or deleted."""
        return sorted(path for pattern in _PATTERNS for path in self.folder.glob(pattern))

    def append(self, session_id: str, message: object) -> None:
        """Append a message. A large tool result becomes an artifact, with a `details.artifactRef` in its line."""
        path, session = self.path(session_id), self.session(session_id)
        with transcript.Transcript(path, session, format="pi", policy=self._policy(session)) as log:
            log.append(message)

    def read(self, session_id: str, *, rehydrate: bool = False) -> list[Any]:
        """Return the lines of a session: as they are stored, or with their original payloads."""
        with transcript.Transcript(self.path(session_id), self.session(session_id), read_only=True) as log:
            return [line.value for line in log.lines(mode="whole" if rehydrate else "stored")]

    def migrate(self, paths: Sequence[Path] = ()) -> transcript.Report:
        """Move the inline payloads of all transcripts, or of these, to artifacts. `undo` restores the files."""
        found = [(path, self.session(path.name.partition(".jsonl")[0])) for path in paths or self.files()]
        done = [transcript.externalize(path, session, policy=self._policy(session)) for path, session in found]
        return transcript.Report(tuple(one for report in done for one in report.files))

    def undo(self, paths: Sequence[Path] = ()) -> transcript.Report:
        """Restore transcripts byte for byte, and drop what the store kept for them."""
        done = [transcript.undo(path, self.store) for path in paths or self.files()]
        return transcript.Report(tuple(one for report in done for one in report.files))

    def registry(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of `artifacts/registry.jsonl`, oldest first: hash, artifact and sessionId."""
        path = self.artifacts / "registry.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # a crash may leave half a line
                yield json.loads(line)

    def find_by_hash(self, digest: str) -> dict[str, Any] | None:
        """Return the newest entry of the registry with this hash."""
        return next((entry for entry in reversed([*self.registry()]) if entry["hash"] == digest), None)

    def recall(self, session_id: str, message: str = "") -> str | None:
        """Return a section for the prompt: a narrative, and the artifacts that fit the message best, within the
        settings. None if recall is off or there is nothing to recall."""
        session, most = self.session(session_id), self.memory.maxChars
        found = context.recall(session, message, max_items=self.memory.maxItems) if self.memory.enabled else None
        if found is None or not found.items:
            return None
        refs = [item.ref for item in found.items]
        narrative = f"I recently used tools that produced: {'; '.join(ref.summary for ref in refs)}."
        parts = [_HEAD, narrative[: self.memory.narrativeMaxChars]]
        for ref in refs:
            line = f"- {ref.summary} (artifact: {_id(ref)}, path: {self._file(session, ref)})"
            parts += [line] if len("\n".join([*parts, line])) <= most else []
        return "\n".join(parts)[:most]

    def prune(self, session_id: str, messages: Sequence[Any], max_tokens: int) -> transcript.Pruned:
        """Make messages fit: old tool results become placeholders with a pointer."""
        return transcript.prune(messages, max_tokens=max_tokens, session=self.session(session_id), format="pi")

    def safeguard(self, session_id: str, dropped: Sequence[Any]) -> transcript.Index:
        """Return an index of the artifacts in messages that compaction is about to drop."""
        return transcript.safeguard(dropped, self.session(session_id), format="pi")

    def session(self, session_id: str) -> Session:
        return self.store.session(session_id)

    def _policy(self, session: Session) -> Policy:
        def reference(ref: Ref) -> dict[str, Any]:
            about = {"id": _id(ref), "type": "tool-result", "toolName": ref.tool, "createdAt": iso_time(ref.created),
                     "sizeBytes": ref.size_bytes, "summary": ref.summary, "path": self._file(session, ref),
                     "hash": ref.artifact_id}  # fmt: skip
            entry = {"hash": ref.artifact_id, "artifact": about, "sessionId": session.session_id}
            with (self.artifacts / "registry.jsonl").open("a") as registry:
                registry.write(json.dumps(entry) + "\n")
            return about

        return configured(self.store.settings).limited(max_chars=self._max_chars, reference=reference)

    def _file(self, session: Session, ref: Ref) -> str:
        return str(session.materialize(ref, self.artifacts))


def _id(ref: Ref) -> str:
    return f"art_{ref.artifact_id[:16]}"


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"invalid {what} {name!r}", hint="use letters, digits and any of ._-")
    return name
