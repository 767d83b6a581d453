"""Artifact references: a registry, a hot state with an index, budgets, prompt metrics and bootstrap references."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final

import coatcheck
from coatcheck import Ref, context
from coatcheck.context.metrics import PromptMetrics
from coatcheck.errors import CoatcheckError, InvalidArgument, TooLarge
from coatcheck.externalize import About, put
from coatcheck.refs import iso_time
from coatcheck.values import as_text

MAX_BYTES: Final = 512 * 1024
_MAX_CHARS: Final = 8_000
_ID: Final = re.compile(r"[0-9a-f]{64}")
_LIMITS: Final = {re.sub("_(.)", lambda found: found[1].upper(), one.name): one.name for one in fields(context.Budget)}
_KEYS: Final = (
    "type", "session", "run", "hs_tokens", "hs_bytes", "hs_truncated", "artifacts", "artifact_types", "sys_chars",
    "user_chars", "est_tokens", "ref_files", "budget_violations", "budget_ok",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """What the registry knows about an artifact. `content_uri` is the file with its content."""

    artifact_id: str
    type: str
    content_uri: str
    content_hash: str
    size_bytes: int
    created_at: str
    producer: str
    summary: str
    mime: str


class ArtifactRegistry:
    """Artifacts by their SHA-256, each in a folder `<root>/<2 hex>/<sha256>/`."""

    def __init__(self, root: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._root, self._max_bytes = Path(root).absolute(), max_bytes
        self.session = coatcheck.open(self._root / "store", ttl=None).session("artifacts")

    def store_text(self, text: object, *, mime: str = "text/plain", **about: Any) -> ArtifactRecord:
        """Store a text. `about` may have `type`, `producer` and `summary`. Raises `TooLarge` over the cap."""
        if not isinstance(text, str):
            raise InvalidArgument(f"a text must be a string, got a {type(text).__name__}", hint="use store_json")
        return self._stored(text, mime, **about)

    def store_json(self, value: Any, **about: Any) -> ArtifactRecord:
        return self._stored(value, "application/json", **about)

    def get(self, artifact_id: object) -> tuple[ArtifactRecord, Any] | None:
        """Return the record and the content of an artifact, or None. Raises `InvalidArgument` for an invalid id."""
        if not isinstance(artifact_id, str) or not _ID.fullmatch(artifact_id):
            raise InvalidArgument("invalid artifact id", hint="an id has 64 lower-case hex characters")
        ref = self.session.ref(f"art:{artifact_id}")
        return None if ref is None else (self._record(ref), self.session.get(ref))

    def _stored(self, value: Any, mime: str, *, type: str | None = None, **about: Any) -> ArtifactRecord:  # noqa: A002
        if (size := coatcheck.approx_byte_size(value)) > self._max_bytes:
            raise TooLarge(f"the artifact has {size:,} bytes; at most {self._max_bytes:,} can be stored")
        return self._record(put(self.session, value, About(kind=type, media_type=mime, **about)))

    def _record(self, ref: Ref) -> ArtifactRecord:
        digest = ref.artifact_id
        path = self.session.materialize(ref, self._root / digest[:2] / digest)
        return ArtifactRecord(**ref.to_record() | {"content_uri": path.as_uri(), "content_hash": digest})


def artifacts_get(registry: ArtifactRegistry) -> dict[str, Callable[[str], str]]:
    """Return the tool under its name, as a `ToolExecutor` takes it. It answers JSON and never raises."""

    def get(id: str) -> str:  # noqa: A002
        """Read an artifact by its SHA-256 id: its metadata, and the first 8,000 characters of its content."""
        try:
            found = registry.get(id)
        except CoatcheckError as error:
            return json.dumps({"error": str(error)})
        if found is None:
            return json.dumps({"error": "no artifact has this id"})
        record, text = asdict(found[0]), as_text(found[1])
        answer = {"metadata": record, "content": text[:_MAX_CHARS], "truncated": len(text) > _MAX_CHARS}
        return json.dumps(answer, ensure_ascii=False)

    return {"artifacts.get": get}


class HotState(context.HotState):
    """A hot state whose index has whole ids, and versions as texts. `risk_level` is left out unless it is set."""

    shows_whole_ids: ClassVar[bool] = True
    least_entries: ClassVar[tuple[int, int]] = (1_000, 0)

    def __init__(self, *, artifact_index: Iterable[Any] = (), **fields: Any) -> None:
        entries = [dict(entry) for entry in artifact_index]
        index = [entry | ({"version": str(entry["version"])} if "version" in entry else {}) for entry in entries]
        super().__init__(**{"risk_level": None, "artifact_index": index} | fields)


class ContextBudget(context.Budget):
    """The limits of a prompt, under their camelCase names. Violations are logged as warnings by `enforce`."""

    __slots__ = ()

    def __init__(self, **limits: int) -> None:
        super().__init__(**{_LIMITS.get(name, name): value for name, value in limits.items()})

    def __getattr__(self, name: str) -> int:
        if name not in _LIMITS:
            raise AttributeError(name)
        return int(getattr(self, _LIMITS[name]))


def prompt_metrics(metrics: PromptMetrics) -> dict[str, Any]:
    """Return the figures of a model call under the published keys, as a `Meter` measured them."""
    record = metrics.to_record() | {
        "artifact_types": sorted(metrics.artifact_types),
        "budget_violations": len(metrics.budget_violations),
    }
    return {key: record[key] for key in _KEYS}


def bootstrap(
    registry: ArtifactRegistry,
    files: Iterable[str | Path],
    *,
    root: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> str:
    """Return workspace files for a prompt. With OPENCLAW_ARTIFACT_REFS=true, long ones become references."""
    chars = env.get("OPENCLAW_ARTIFACT_REFS_THRESHOLD_CHARS", "")
    threshold = int(chars) if chars.isdecimal() and int(chars) else 8_000
    enabled = env.get("OPENCLAW_ARTIFACT_REFS", "").strip().lower() == "true"
    options: dict[str, Any] = {"enabled": enabled, "threshold_chars": threshold, "read_tool": None, "lead": _lead}
    return context.bootstrap(registry.session, files, root=root, **options).text


def _lead(ref: Ref) -> str:
    about = f"type=text/markdown, sha256={ref.artifact_id}, bytes={ref.size_bytes}, createdAt={iso_time(ref.created)}"
    return f"ArtifactRef: {ref.artifact_id} ({about})\n\nSummary (head/tail excerpt):"
