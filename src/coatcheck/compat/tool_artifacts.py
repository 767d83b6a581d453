"""Tool artifacts: a bounded tool executor over a session-scoped store with a time to live."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coatcheck
from coatcheck import Ref, Session, ToolCall, ToolExecutor
from coatcheck.checks import seconds
from coatcheck.errors import CoatcheckError
from coatcheck.executor import ArtifactReference, Result, ToolOutcome, Turn
from coatcheck.externalize import About, configured, put
from coatcheck.ids import digest_of
from coatcheck.refs import summarize
from coatcheck.values import as_text

ToolExecutionResult, ToolArtifactReference, TurnRuntimeState = Result, ArtifactReference, Turn
_TTL, _global_lock = 3_600.0, threading.Lock()
_global: ArtifactStore | None = None


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """A stored tool result. If storing failed, `error` says why, and id and path are empty."""

    artifact_id: str
    session_id: str
    file_path: str
    created_at: float
    ttl_s: float
    size_bytes: int
    tool_name: str
    summary: str
    error: str | None = None

    @property
    def is_expired(self) -> bool:
        return time.time() >= self.created_at + self.ttl_s

    def to_model_hint(self) -> str:
        if self.error:
            return f"The result of {self.tool_name} ({self.size_bytes:,} bytes) could not be stored: {self.error}"
        return (
            f'The result of {self.tool_name} is stored: read_file("{self.file_path}") reads {self.size_bytes:,} bytes.'
        )


class ArtifactStore:
    """Tool results as files, in sessions, each with its own time to live. Thread-safe."""

    def __init__(self, base_dir: str | Path) -> None:
        self._files = Path(base_dir).absolute() / "files"
        self.backend = coatcheck.open(Path(base_dir) / "store", ttl=None)

    def store(self, session_id: str, content: Any, tool_name: str, ttl_s: float = _TTL) -> ArtifactRef:
        """Store a result. A failed write does not raise: the ref has an `error`."""
        seconds(ttl_s, "ttl_s")
        try:
            session = self.backend.session(session_id)
            return self.ref_of(session, put(session, content, About(tool=tool_name, ttl=ttl_s)))
        except (CoatcheckError, OSError) as error:
            size, summary = coatcheck.approx_byte_size(content), summarize(as_text(content))
            return ArtifactRef("", session_id, "", time.time(), ttl_s, size, tool_name, summary, str(error))

    def retrieve(self, artifact_id: str) -> Any:
        """Return the content of an artifact, or None if it is unknown or has expired."""
        found = self._find(artifact_id)
        return found and found[0].get(found[1])

    def get_ref(self, artifact_id: str) -> ArtifactRef | None:
        found = self._find(artifact_id)
        return found and self.ref_of(*found)

    def cleanup_session(self, session_id: str) -> int:
        """Remove a session with its artifacts and files, and return the number of artifacts it had."""
        session = self.backend.session(session_id)
        count = len(session.list())
        session.end()
        shutil.rmtree(self._folder(session_id), ignore_errors=True)
        return count

    def cleanup_expired(self) -> int:
        """Remove expired artifacts at once, and files that belong to none. Return the number of artifacts removed."""
        count = self.backend.collect(grace=0, compress=False).refs
        sessions = [self.backend.session(info.session_id) for info in self.backend.sessions()]
        kept = {(self._folder(one.session_id), ref.artifact_id[:32]) for one in sessions for ref in one.list()}
        for path in self._files.glob("*/*"):
            if (path.parent, path.name[:32]) not in kept:
                path.unlink(missing_ok=True)
        return count

    def stats(self) -> dict[str, int]:
        return asdict(self.backend.stats())

    def close(self) -> None:
        self.backend.close()

    def ref_of(self, session: Session, ref: Ref) -> ArtifactRef:
        path, ttl = session.materialize(ref, self._folder(session.session_id)), (ref.expires or 0) - ref.created
        return ArtifactRef(
            f"art_{ref.artifact_id[:16]}", session.session_id, str(path), ref.created, ttl, ref.size_bytes,
            ref.tool or "", ref.summary[:200],
        )  # fmt: skip

    def _find(self, artifact_id: str) -> tuple[Any, Ref] | None:
        return self.backend.find("art:" + artifact_id.removeprefix("art_"))

    def _folder(self, session_id: str) -> Path:
        return self._files / digest_of(session_id.encode())[:32]


class BoundedToolExecutor(ToolExecutor):
    """Runs tools. A result over `max_chars` becomes an artifact, or is truncated if it cannot be stored."""

    def __init__(self, tools: Any, store: ArtifactStore, session_id: str, *, max_chars: int = 12_000) -> None:
        session = store.backend.session(session_id)

        def render(ref: Ref, _: str) -> str:
            found = store.ref_of(session, ref)
            fields = {"artifact_reference": found.artifact_id, "summary": found.summary}
            return json.dumps(fields | {"hint": found.to_model_hint(), "size_bytes": found.size_bytes})

        policy = configured(session.store.settings).limited(max_chars=max_chars, ttl=_TTL, render=render)
        super().__init__(session, tools, policy=policy)

    def execute(self, name: str, arguments: Any, state: Turn | None = None, **options: Any) -> ToolOutcome:
        """Run a tool, for at most `timeout` seconds. Nothing is stored once `state` takes no more writes."""
        return self.run(ToolCall("", name, arguments), turn=state, **options)


def outcome_to_model_content(outcome: ToolOutcome) -> Any:
    """Return what the model gets: a text, a reference that names the file, or blocks with such references."""
    if not isinstance(outcome, ArtifactReference):
        return outcome.text
    return json.loads(outcome.text) if isinstance(outcome.content, str) else outcome.content


def get_global_artifact_store() -> ArtifactStore:
    """Return one store for the process, in the user's cache folder. If it was closed, it is opened again."""
    global _global
    with _global_lock:
        if _global is None or _global.backend.closed:
            _global = ArtifactStore(Path.home() / ".cache" / "coatcheck" / "tool-artifacts")
        return _global
