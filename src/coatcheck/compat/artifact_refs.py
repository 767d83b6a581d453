"""Artifact references: a registry, a hot state with an index, budgets, prompt metrics and bootstrap
references."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import coatcheck
from coatcheck import Ref, Session, Store, context, media
from coatcheck.atomic import Draft
from coatcheck.checks import whole
from coatcheck.compat._ids import HINT, id_prefix
from coatcheck.compat._stores import Place, folder_of, is_store
from coatcheck.context.metrics import PromptMetrics
from coatcheck.errors import (
    AmbiguousPointer,
    CoatcheckError,
    Damaged,
    InvalidArgument,
    NotFound,
    TooLarge,
    storage_errors,
)
from coatcheck.executor import Pointer, stays_inline
from coatcheck.externalize import About, configured
from coatcheck.externalize.storing import masked
from coatcheck.ids import clip, digest_of
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import iso_time, summarize
from coatcheck.values import as_text, decode_text, encode, encode_text

ArtifactType = media.ArtifactKind
Producer = Literal["dispatcher", "executor", "planner", "system"]

MAX_BYTES: Final = 512 * 1024
MAX_CHARS: Final = 8_000
_SUMMARY: Final = 200
_SESSION: Final = "artifacts"
_BACKEND: Final = ".coatcheck"
_CONTENT, _RECORD = "content.txt", "record.json"
_WHOLE: Final = 64  # characters of an id
_READ: Final = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # opening a pipe must not block
_MARKDOWN: Final = "text/markdown"
_THRESHOLD_CHARS: Final = 8_000
_LIMITS: Final = {
    re.sub("_(.)", lambda found: found[1].upper(), one.name): one.name
    for one in fields(context.Budget)
}
_KEYS: Final = (
    "type",
    "session",
    "run",
    "hs_tokens",
    "hs_bytes",
    "hs_truncated",
    "artifacts",
    "artifact_types",
    "sys_chars",
    "user_chars",
    "est_tokens",
    "ref_files",
    "budget_violations",
    "budget_ok",
)


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """What the registry knows about an artifact. `content_uri` is where its content is stored."""

    artifact_id: str
    type: ArtifactType
    content_uri: str
    content_hash: str
    size_bytes: int
    created_at: str
    producer: Producer | None = None
    summary: str | None = None
    mime: str | None = None

    def index_entry(self, label: str | None = None, version: str | None = None) -> dict[str, Any]:
        """Return an entry for the artifact index of a hot state."""
        entry = {
            "artifact_id": self.artifact_id,
            "type": self.type,
            "label": label,
            "version": version,
        }
        entry["summary"] = self.summary
        return {name: value for name, value in entry.items() if value is not None}


class ArtifactRegistry:
    """Artifacts by their SHA-256, each in a folder `<root>/<2 hex>/<sha256>/`. The default root is
    `artifacts` in the state folder of OpenClaw: `OPENCLAW_STATE_DIR`, or else `~/.openclaw`.

    With an `s3://` address or an open store as `root`, the artifacts are kept there. `session` is a
    session for executors and meters, whose store has the hot states."""

    def __init__(self, root: Place | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        whole(max_bytes, "max_bytes", least=1)
        self._max_bytes = max_bytes
        self._is_closed_here = not isinstance(root, Store)
        if root is None:
            root = Path(os.environ.get("OPENCLAW_STATE_DIR") or "~/.openclaw") / "artifacts"
        if is_store(root):
            store = root if isinstance(root, Store) else coatcheck.open(root)
            self.session = store.lasting_session(_SESSION, ttl=None)
            self._contents: _Contents = _StoreContents(self.session)
        else:
            folder = folder_of(root, "root")
            self.session = coatcheck.open(folder / _BACKEND, ttl=None).session(_SESSION)
            self._contents = _FolderContents(folder)

    def store_text(
        self,
        text: str,
        *,
        mime: str = "text/plain",
        type: ArtifactType | None = None,  # noqa: A002
        producer: Producer | None = None,
        summary: str | None = None,
    ) -> ArtifactRecord:
        """Store a text. Content that is stored already keeps its record. Raises `TooLarge` over the
        cap."""
        given: object = text
        if not isinstance(given, str):
            raise InvalidArgument(
                f"a text must be a string, got a {given.__class__.__name__}", hint="use store_json"
            )
        stored = masked(text, configured(self.session.store.settings))
        return self._store(
            encode_text(stored), mime=mime, type=type, producer=producer, summary=summary
        )

    def store_json(
        self,
        value: Any,
        *,
        type: ArtifactType | None = None,  # noqa: A002
        producer: Producer | None = None,
        summary: str | None = None,
    ) -> ArtifactRecord:
        """Store a JSON value. Raises `InvalidArgument` if it would come back different, `TooLarge`
        over the cap."""
        if isinstance(value, bytes | bytearray | memoryview):
            raise InvalidArgument(
                "bytes are not a JSON value", hint="decode them and use store_text"
            )
        stored = masked(value, configured(self.session.store.settings))
        if isinstance(stored, str):
            data = encode_text(json.dumps(stored, ensure_ascii=False))
        else:
            _, data = encode(stored)
        return self._store(data, mime=media.JSON, type=type, producer=producer, summary=summary)

    def store_file(self, content: str | bytes) -> ArtifactRecord:
        """Store a workspace file for a reference in a prompt."""
        stored = masked(content, configured(self.session.store.settings))
        data = encode_text(stored) if isinstance(stored, str) else stored
        return self._store(data, mime=_MARKDOWN, type="doc", producer=None, summary=None)

    def get(self, artifact_id: object) -> tuple[ArtifactRecord, Any] | None:
        """Return the record and the content of an artifact, or None: a parsed value if its mime is
        that of JSON, else a text. Raises `InvalidArgument` for an invalid id."""
        prefix = id_prefix(artifact_id)
        if prefix is None:
            raise InvalidArgument("invalid artifact id", hint=HINT)
        found = self._contents.get(prefix)
        if found is None:
            return None
        record, data = found
        text = _text_of(data)
        if record.mime == media.JSON:
            try:
                return record, json.loads(text)
            except (ValueError, RecursionError):
                pass  # a text that was stored with that mime
        return record, text

    def close(self) -> None:
        """Close the store behind the registry, unless it was passed open."""
        if self._is_closed_here:
            self.session.store.close()

    def _store(
        self,
        data: bytes,
        *,
        mime: str,
        type: ArtifactType | None,  # noqa: A002
        producer: Producer | None,
        summary: str | None,
    ) -> ArtifactRecord:
        About(kind=type, media_type=mime, producer=producer, summary=summary).check()
        if len(data) > self._max_bytes:
            raise TooLarge(
                f"the artifact has {len(data):,} bytes; at most {self._max_bytes:,} can be stored"
            )
        start = data[: 4 * (_SUMMARY + CONTEXT)].decode("utf-8", "ignore")
        kind = type or media.sniff_kind(mime, start[: media.HEAD])
        shown = summarize(mask(start), _SUMMARY) if summary is None else mask(summary)
        about = About(kind=kind, media_type=mime, producer=producer or "system", summary=shown)
        return self._contents.put(data, about)


class _Contents(Protocol):
    """Where a registry keeps its artifacts."""

    def put(self, data: bytes, about: About) -> ArtifactRecord:
        """Store bytes, unless they are stored already, and return their record."""

    def get(self, prefix: str) -> tuple[ArtifactRecord, bytes] | None:
        """Return the artifact whose id begins like this. Raises `AmbiguousPointer`, and `Damaged`
        if its bytes do not match their digest."""


class _FolderContents:
    """Two files for each artifact: `<root>/<2 hex>/<sha256>/content.txt`, and `record.json` beside
    it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, data: bytes, about: About) -> ArtifactRecord:
        digest = digest_of(data)
        folder = self._root / digest[:2] / digest
        record = self._record(folder)
        if record is not None and _read(folder / _CONTENT) == data:
            return record
        written = {
            "type": about.kind,
            "size_bytes": len(data),
            "created_at": iso_time(time.time()) if record is None else record.created_at,
            "producer": about.producer,
            "summary": about.summary,
            "mime": about.media_type,
        }
        with storage_errors("writing an artifact"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(folder / _CONTENT, data)
            _write(folder / _RECORD, json.dumps(written, ensure_ascii=False).encode())
        return _record_of(folder, written)

    def get(self, prefix: str) -> tuple[ArtifactRecord, bytes] | None:
        folder = self._folder(prefix)
        record = None if folder is None else self._record(folder)
        if folder is None or record is None:
            return None
        data = _read(folder / _CONTENT)
        if data is None or digest_of(data) != folder.name:
            raise Damaged(
                f"the content of {folder.name} does not match its digest",
                hint="store the same content again",
            )
        return record, data

    def _folder(self, prefix: str) -> Path | None:
        """Return the folder of the artifact whose id begins like this."""
        shard = self._root / prefix[:2]
        if len(prefix) == _WHOLE:
            return shard / prefix
        names = os.listdir(shard) if shard.is_dir() else []
        found = sorted(name for name in names if name.startswith(prefix) and len(name) == _WHOLE)
        if len(found) > 1:
            raise AmbiguousPointer(
                f"art:{prefix} matches {len(found)} artifacts", [f"art:{name}" for name in found]
            )
        return shard / found[0] if found else None

    def _record(self, folder: Path) -> ArtifactRecord | None:
        """Return the record in a folder; None if it is missing or cannot be read, as if it had not
        been written."""
        data = _read(folder / _RECORD)
        try:
            return None if data is None else _record_of(folder, json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class _StoreContents:
    """The artifacts of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, data: bytes, about: About) -> ArtifactRecord:
        ref = self._session.ref(f"art:{digest_of(data)}")
        if ref is None or self._bytes_of(ref) != data:
            ref = self._session.put_about(data, about)
        return self._record_of(ref)

    def get(self, prefix: str) -> tuple[ArtifactRecord, bytes] | None:
        ref = self._session.ref(f"art:{prefix}")
        if ref is None:
            return None
        with self._session.open(ref) as stream:
            return self._record_of(ref), stream.read()

    def _bytes_of(self, ref: Ref) -> bytes | None:
        """Return the bytes of an artifact, or None if they are missing or damaged: putting them
        again repairs that."""
        try:
            with self._session.open(ref) as stream:
                return stream.read()
        except (Damaged, NotFound):
            return None

    def _record_of(self, ref: Ref) -> ArtifactRecord:
        return ArtifactRecord(**ref.to_record() | {"content_hash": ref.artifact_id})


def _record_of(folder: Path, written: Mapping[str, Any]) -> ArtifactRecord:
    """Return the record that was written in a folder. Raises what a record of another form
    raises."""
    return ArtifactRecord(
        artifact_id=folder.name,
        type=written["type"],
        content_uri=(folder / _CONTENT).as_uri(),
        content_hash=folder.name,
        size_bytes=int(written["size_bytes"]),
        created_at=str(written["created_at"]),
        producer=written.get("producer"),
        summary=written.get("summary"),
        mime=written.get("mime"),
    )


def _text_of(data: bytes) -> str:
    """Return stored bytes as text; as base64 if they are not text."""
    try:
        return decode_text(data)
    except UnicodeDecodeError:
        return as_text(data)


def _read(path: Path) -> bytes | None:
    """Return the bytes of a file, or None if it is missing. A link or a pipe is not read, as if it
    were missing."""
    with storage_errors("reading an artifact"):
        try:
            handle = os.open(path, _READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        with os.fdopen(handle, "rb") as file:
            return file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else None


def _write(path: Path, data: bytes) -> None:
    with Draft(path.parent) as draft:
        draft.file.write(data)
        draft.replace(path)


def artifacts_get(registry: ArtifactRegistry) -> dict[str, Callable[[str], str]]:
    """Return the tool under its name, as a `ToolExecutor` takes it. It answers JSON and never
    raises. An executor does not replace its answers by stubs."""

    @stays_inline
    def get(id: Pointer) -> str:  # noqa: A002
        """Read an artifact by its SHA-256 id: its metadata, and the first 8,000 characters of its
        content."""
        try:
            found = registry.get(id)
        except CoatcheckError as error:
            return json.dumps({"error": str(error)})
        if found is None:
            return json.dumps({"error": "no artifact has this id"})
        record, text = asdict(found[0]), as_text(found[1])
        answer = {
            "metadata": record,
            "content": text[:MAX_CHARS],
            "truncated": len(text) > MAX_CHARS,
        }
        return json.dumps(answer, ensure_ascii=False)

    return {"artifacts.get": get}


class HotState(context.HotState):
    """A hot state whose index has whole ids, and versions as texts. `risk_level` and `version` are
    left out unless they are set."""

    shows_whole_ids: ClassVar[bool] = True
    least_entries: ClassVar[tuple[int, int]] = (1_000, 0)

    def __init__(self, *, artifact_index: Any = (), **fields: Any) -> None:
        if not isinstance(artifact_index, list | tuple):
            given = "None" if artifact_index is None else f"a {type(artifact_index).__name__}"
            raise InvalidArgument(
                f"artifact_index must be a list of entries, got {given}",
                hint="leave it out if empty",
            )
        entries = [_index_entry(entry) for entry in artifact_index]
        super().__init__(**{"risk_level": None, "artifact_index": entries} | fields)


def _index_entry(entry: object) -> dict[str, Any]:
    """Return an entry of an artifact index with its whole id, and its version as a text. The rest
    is checked later."""
    if isinstance(entry, context.IndexEntry):
        entry = dict(entry)
    if not isinstance(entry, Mapping):
        raise InvalidArgument(
            f"an entry of artifact_index must be a mapping, got a {type(entry).__name__}",
            hint='e.g. {"artifact_id": record.artifact_id, "type": record.type}',
        )
    checked = dict(entry)
    prefix = id_prefix(checked.get("artifact_id"))
    if prefix is None or len(prefix) != _WHOLE:
        raise InvalidArgument(
            "artifact_id must have 64 lower-case hex characters, "
            f"got {clip(str(checked.get('artifact_id')))}",
            hint="use the artifact_id of its record",
        )
    checked["artifact_id"] = prefix
    version = checked.get("version")
    checked["version"] = None if version is None else str(version)
    return checked


def claim(
    registry: ArtifactRegistry, session_id: str, holder: str, *, idle: float = 0
) -> context.Claim:
    """Claim the hot state of a session for a dispatcher. Only the newest claim can write it, with
    `write(state)`; the one before raises `Fenced` from then on. With `idle`, so does this call, if
    another holder has claimed or written within that many seconds."""
    return context.claim(registry.session.store.session(session_id), holder, idle=idle)


def current(registry: ArtifactRegistry, session_id: str) -> HotState | None:
    """Return the hot state of a session as its dispatcher wrote it last, or None. Reading needs no
    claim."""
    snapshot = context.current(registry.session.store.session(session_id))
    return None if snapshot is None else HotState.parse(snapshot.state.content())


class ContextBudget(context.Budget):
    """The limits of a prompt, under their camelCase names. Violations are logged as warnings by
    `enforce`."""

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
    """Return workspace files for a prompt. With OPENCLAW_ARTIFACT_REFS=true, files of at least
    OPENCLAW_ARTIFACT_REFS_THRESHOLD_CHARS characters become references. The same files give the
    same text each time."""
    chars = env.get("OPENCLAW_ARTIFACT_REFS_THRESHOLD_CHARS", "")
    threshold = int(chars) if chars.isdecimal() and int(chars) else _THRESHOLD_CHARS

    def keep(_: str, content: str | bytes) -> context.Kept:
        record = registry.store_file(content)
        about = f"type={_MARKDOWN}, sha256={record.content_hash}, bytes={record.size_bytes}"
        lead = f"ArtifactRef: {record.artifact_id} ({about}, createdAt={record.created_at})"
        return context.Kept(f"{lead}\n\nSummary (head/tail excerpt):")

    made = context.bootstrap(
        registry.session,
        files,
        root=root,
        enabled=env.get("OPENCLAW_ARTIFACT_REFS", "").strip().lower() == "true",
        threshold_chars=max(
            1, threshold - 1
        ),  # there, a file with this many characters is shown whole
        read_tool=None,
        keep=keep,
    )
    return made.text
