"""Artifact-first transcripts for session files of OpenClaw and pi: payloads leave them for files,
and come back."""

from __future__ import annotations

import fcntl
import json
import mimetypes
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, Self, TypedDict, cast

import coatcheck
from coatcheck import Policy, Ref, Session, Store, context, media, transcript
from coatcheck.atomic import Draft
from coatcheck.checks import whole
from coatcheck.compat._ids import HINT, id_prefix, short_id
from coatcheck.compat._stores import Place, folder_of, is_store
from coatcheck.content import CHUNK
from coatcheck.errors import CoatcheckError, Damaged, InvalidArgument, NotFound, storage_errors
from coatcheck.externalize import configured
from coatcheck.ids import SCHEME, clip, digest_of
from coatcheck.redaction import mask
from coatcheck.refs import iso_time
from coatcheck.transcript.migrate import refs_in
from coatcheck.transcript.reports import failed
from coatcheck.transcript.swap import is_at, is_own, keeps_changing, write_all

ROOT: Final = "~/.openclaw"
PREVIEW_CHARS: Final = 200
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_LONGEST_NAME: Final = 200  # bytes of a session id in the name of a file
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_PATTERNS: Final = ("*.jsonl", "*.jsonl.deleted.*", "*.jsonl.reset.*")
_HEAD: Final = "## Artifact Recall"
_NARRATIVE: Final = "I recently used tools that produced: "
_LEAST_SUMMARY: Final = 8  # characters of a summary: fewer say nothing
_EVERYTHING: Final = 1_000_000  # characters: the section is cut here, not in the ranking
_ATTEMPTS: Final = 100
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPES: Final = {"result": "tool-result", "arguments": "tool-call"}

ArtifactType = Literal["tool-result", "tool-call", "message"]
"""What an artifact was a part of. Messages are everything that is neither a result nor a call, such
as a picture that a user sent."""


class ArtifactRef(TypedDict):
    """What a line and the registry say about an artifact. `hash` is the SHA-256 of its content, and
    `id` is `art_` with the first 16 characters of it."""

    id: str
    type: ArtifactType
    toolName: NotRequired[str]
    createdAt: str
    sizeBytes: int
    summary: str
    path: str
    hash: str


class ToolResultArtifactDetails(TypedDict):
    """The `details` of a tool result whose payload is an artifact, besides what the host keeps
    there."""

    artifactRef: ArtifactRef


class RegistryEntry(TypedDict):
    """One line of the registry."""

    hash: str
    artifact: ArtifactRef
    sessionId: str


class Artifact(TypedDict):
    """A stored artifact: its description and its payload. That is a text, bytes if it is not text,
    or a JSON value."""

    artifact: ArtifactRef
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryArtifacts:
    """The settings `memory.artifacts`. `of` reads them from a config file's object."""

    enabled: bool = True
    maxItems: int = 8  # noqa: N815
    maxChars: int = 2_000  # noqa: N815
    narrativeMaxChars: int = 600  # noqa: N815

    def __post_init__(self) -> None:
        given: object = self.enabled
        if not isinstance(given, bool):
            raise InvalidArgument(f"enabled must be true or false, got {clip(repr(given))}")
        whole(self.maxItems, "maxItems", least=1)
        whole(self.maxChars, "maxChars", least=300)
        whole(self.narrativeMaxChars, "narrativeMaxChars")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MemoryArtifacts:
        given: Any = config
        for name in ("memory", "artifacts"):
            given = given.get(name, {})
            if not isinstance(given, Mapping):
                raise InvalidArgument(f"{name} must be an object, got a {type(given).__name__}")
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise InvalidArgument(f"memory.artifacts has no setting {sorted(unknown)[0]!r}")
        return cls(**given)


class ArtifactTranscripts:
    """The sessions of one agent, at `<root>/agents/<agentId>/sessions/`, with their artifacts in a
    folder beside them.

    `max_chars` is the size over which a tool result leaves its line. Artifacts are kept in a store
    in their folder, or in `store`: an open store, or an `s3://` address. Either may be given in
    place of `root` too. The files in the folder are copies. A context manager; `close` closes a
    store that was opened here.

    `problems` says what could not be stored, registered or read. The message itself is always
    written."""

    def __init__(
        self,
        root: Place = ROOT,
        agent_id: str = "main",
        *,
        store: Place | None = None,
        memory: MemoryArtifacts | None = None,
        max_chars: int = 8_000,
    ) -> None:
        if is_store(root):
            root, store = ROOT, root
        self._agent_id = _checked(agent_id, "agent id")
        self.folder = folder_of(root, "root") / "agents" / self._agent_id / "sessions"
        self.artifacts = self.folder / "artifacts"
        self.memory = memory or MemoryArtifacts()
        self.problems: list[str] = []
        whole(max_chars, "max_chars", least=1)
        self._max_chars = max_chars
        with storage_errors("creating the folder of artifacts"):
            self.artifacts.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._is_shared = store is not None
        self._is_closed_here = not isinstance(store, Store)
        if store is None:
            self.store = coatcheck.open(self.artifacts / "store", ttl=None)
        else:
            self.store = store if isinstance(store, Store) else coatcheck.open(store)
        is_durable = self.store.settings["store.durability"] == "power"
        self._registry = _Registry(self.artifacts / "registry.jsonl", is_durable=is_durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._is_closed_here:
            self.store.close()

    def path(self, session_id: str) -> Path:
        return self.folder / f"{_checked(session_id, 'session id')}.jsonl"

    def files(self) -> list[Path]:
        """Return the transcripts in the folder, including those that were reset or deleted."""
        found = {path for pattern in _PATTERNS for path in self.folder.glob(pattern)}
        return sorted(path for path in found if not is_own(path.name) and not path.is_dir())

    def append(self, session_id: str, message: object) -> transcript.Appended:
        """Append a message. A large tool result becomes an artifact: its file is written, then its
        entry in the registry, then the line, which has a `details.artifactRef` and no payload."""
        path, session = self.path(session_id), self.session(session_id)
        policy = self._policy(session_id)
        with transcript.Transcript(path, session, format="pi", policy=policy) as log:
            done = log.append(message)
            self.problems += [one.message for one in log.problems]
        return done

    def read(self, session_id: str, *, rehydrate: bool = False) -> list[Any]:
        """Return the lines of a session: as they are stored, or with their original payloads. A
        line that is not JSON is None. If a payload cannot be read, a placeholder says so, and
        `problems` has the reason."""
        path, session = self.path(session_id), self.session(session_id)
        with transcript.Transcript(path, session, format="pi", read_only=True) as log:
            found = [line.value for line in log.lines(mode="whole" if rehydrate else "stored")]
            self.problems += [one.message for one in log.problems]
        return found

    def read_artifact(self, session_id: str, artifact_id: str) -> Artifact:
        """Return an artifact of a session. `artifact_id` is its hash, its id, or a pointer.

        Raises `NotFound` if the session has no such artifact, and `Damaged` if its content is not
        what was stored."""
        entry = self.find_by_hash(artifact_id, session_id)
        if entry is None:
            raise NotFound(f"no artifact {clip(artifact_id)} in session {clip(session_id)}")
        session = self.session(session_id)
        ref = session.ref(SCHEME + entry["hash"])
        if ref is not None:
            return {"artifact": entry["artifact"], "payload": session.get(ref)}
        return {"artifact": entry["artifact"], "payload": self._from_file(entry)}

    def migrate(self, paths: Iterable[str | Path] = ()) -> transcript.Report:
        """Move the inline payloads of all transcripts, or of these, to artifacts, and add what is
        missing in the registry. `undo` restores the files. A file that fails is reported, and the
        others continue."""
        return self._each(paths, self._migrated)

    def undo(self, paths: Iterable[str | Path] = ()) -> transcript.Report:
        """Restore transcripts byte for byte. Remove their artifacts from the store, the registry
        and the folder, unless another transcript of the same session refers to them."""
        return self._each(paths, self._undone)

    def registry(self) -> Iterator[RegistryEntry]:
        """Yield the entries of `artifacts/registry.jsonl`, one for each artifact of a session,
        oldest first."""
        yield from self._registry.entries()

    def find_by_hash(self, digest: str, session_id: str | None = None) -> RegistryEntry | None:
        """Return the newest entry of the registry with this hash, in any session or in one. An id
        or a pointer is accepted too."""
        prefix = id_prefix(digest)
        if prefix is None:
            raise InvalidArgument(f"{clip(str(digest))} is not the id of an artifact", hint=HINT)
        found = None
        for entry in self._registry.entries():
            if entry["hash"].startswith(prefix) and session_id in (None, entry["sessionId"]):
                found = entry
        return found

    def recall(self, session_id: str, message: str = "") -> str | None:
        """Return a section for the prompt: a narrative, and the artifacts that fit the message
        best, within the settings. What tools wrote is quoted. None if recall is off or there is
        nothing to recall."""
        if not self.memory.enabled:
            return None
        session = self.session(session_id)
        found = context.recall(
            session, message, max_items=self.memory.maxItems, max_chars=_EVERYTHING
        )
        if not found.items:
            return None
        lines: list[list[str]] = []
        for item in found.items:
            about = self._noted(session_id, item.ref)
            described = about or self._described(session_id, item.ref)
            lines.append(_recall_lines(described, has_file=about is not None))
        room = self.memory.maxChars - len(_HEAD) - 1
        first = next(
            line for line in lines[0] if len(line) <= room
        )  # before the narrative, which may be long
        summaries = [mask(item.ref.summary) for item in found.items]
        narrative = _narrative(summaries, min(self.memory.narrativeMaxChars, room - len(first) - 1))
        parts = [_HEAD, narrative, first] if narrative else [_HEAD, first]
        for choices in lines[1:]:
            left = self.memory.maxChars - len("\n".join(parts)) - 1
            parts += [line for line in choices if len(line) <= left][:1]
        return "\n".join(parts)

    def prune(self, session_id: str, messages: Sequence[Any], max_tokens: int) -> transcript.Pruned:
        """Make messages fit: old tool results become placeholders with a pointer."""
        session = self.session(session_id)
        pruned = transcript.prune(messages, max_tokens=max_tokens, session=session, format="pi")
        for one in pruned.replaced:
            ref = None if one.pointer is None else session.ref(one.pointer)
            if ref is not None:
                self._noted(session_id, ref, cast(ArtifactType, _TYPES.get(one.what, "message")))
        return pruned

    def safeguard(self, session_id: str, dropped: Sequence[Any]) -> transcript.Index:
        """Return an index of the artifacts in messages that compaction is about to drop."""
        index = transcript.safeguard(dropped, self.session(session_id), format="pi")
        for ref in index.refs:
            self._noted(session_id, ref)
        return index

    def session(self, session_id: str) -> Session:
        """Return the session of the store that can read the artifacts of a transcript."""
        return self.store.session(
            f"{self._agent_id}/{session_id}" if self._is_shared else session_id
        )

    def _each(
        self, paths: Iterable[str | Path], call: Callable[[Path, str], transcript.FileReport]
    ) -> transcript.Report:
        found = []
        for path in [Path(one) for one in paths] or self.files():
            try:
                if path.is_dir():
                    raise InvalidArgument(
                        f"{clip(path.name)} is a folder", hint="pass transcript files"
                    )
                found.append(call(path, _session_of(path)))
            except (CoatcheckError, OSError, RecursionError) as error:
                found.append(failed(path, error))
        return transcript.Report(tuple(found))

    def _migrated(self, path: Path, session_id: str) -> transcript.FileReport:
        (report,) = transcript.externalize(
            path, self.session(session_id), policy=self._policy(session_id)
        ).files
        for one in {ref.id: ref for _, ref in refs_in(path)}.values():
            ref = self.store.session(one.session).ref(one.id)
            if ref is not None:
                self._noted(session_id, ref, "tool-call" if "arguments" in one.path else None)
        return report

    def _undone(self, path: Path, session_id: str) -> transcript.FileReport:
        before = {ref.id for _, ref in refs_in(path)}
        (report,) = transcript.undo(path, self.store).files
        if report.status != "restored":
            return report
        released = before
        for other in self.files():
            if _session_of(other) == session_id:
                with suppress(CoatcheckError, OSError):  # a file that cannot be read needs nothing
                    released = released - {ref.id for _, ref in refs_in(other)}
        with storage_errors("removing artifacts from the registry"):
            self._registry.remove(session_id, released)
        return report

    def _policy(self, session_id: str) -> Policy:
        def reference(ref: Ref, part_of: str) -> Mapping[str, Any]:
            return self._artifact(session_id, ref, cast(ArtifactType, part_of))

        return configured(self.store.settings).limited(
            max_chars=self._max_chars, preview_chars=PREVIEW_CHARS, reference=reference
        )

    def _described(
        self, session_id: str, ref: Ref, part_of: ArtifactType | None = None
    ) -> ArtifactRef:
        """Return the description of an artifact."""
        about: ArtifactRef = {
            "id": short_id(ref.artifact_id),
            "type": part_of or ("tool-result" if ref.tool else "message"),
            "createdAt": str(iso_time(ref.created)),
            "sizeBytes": ref.size_bytes,
            "summary": mask(ref.summary),
            "path": str(self.artifacts / _file_name(session_id, ref)),
            "hash": ref.artifact_id,
        }
        if ref.tool is not None:
            about["toolName"] = ref.tool
        return about

    def _artifact(
        self, session_id: str, ref: Ref, part_of: ArtifactType | None = None
    ) -> ArtifactRef:
        """Return the description of an artifact, as it is in the registry. Its file and its entry
        are written if they are missing.

        If the registry cannot be written, that is noted as a problem. Raises `StoreError` if the
        file cannot be."""
        about = self._described(session_id, ref, part_of)
        entry: RegistryEntry = {"hash": ref.artifact_id, "artifact": about, "sessionId": session_id}
        self._write_file(Path(about["path"]), ref)
        try:
            return self._registry.add(entry)["artifact"]
        except OSError as error:
            self.problems.append(f"{about['id']} is not in the registry: {error.strerror or error}")
            return about

    def _noted(
        self, session_id: str, ref: Ref, part_of: ArtifactType | None = None
    ) -> ArtifactRef | None:
        """Like `_artifact`, for an artifact that is useful without a file too. None if it has
        none."""
        try:
            return self._artifact(session_id, ref, part_of)
        except CoatcheckError as error:
            self.problems.append(f"{short_id(ref.artifact_id)} has no file: {error}")
            return None

    def _write_file(self, path: Path, ref: Ref) -> None:
        if path.exists():
            return
        owner = self.store.session(ref.session_id)
        is_durable = self.store.settings["store.durability"] == "power"
        with (
            storage_errors("writing an artifact's file"),
            owner.open(ref) as stream,
            _draft(path) as draft,
        ):
            while chunk := stream.read(CHUNK):
                draft.file.write(chunk)
            draft.replace(path, durable=is_durable)

    def _from_file(self, entry: RegistryEntry) -> Any:
        """Return the content of an artifact that no model was shown: the session itself cannot read
        it, but its folder has the file."""
        name = Path(entry["artifact"]["path"]).name
        with storage_errors("reading an artifact's file"):
            data = (self.artifacts / name).read_bytes()
        if digest_of(data) != entry["hash"]:
            raise Damaged(
                f"{clip(name)} does not have the content that was stored", hint="run migrate again"
            )
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class _Registry:
    """The file `registry.jsonl`: one line for each artifact of a session, appended by any number of
    processes.

    `_known` has the entries in the first `_read` bytes of the file `_inode`, so that adding one
    does not read them all again: a migration adds thousands."""

    def __init__(self, path: Path, *, is_durable: bool) -> None:
        self._path = path
        self._is_durable = is_durable
        self._known: dict[tuple[str, str], RegistryEntry] = {}
        self._read = 0
        self._inode: tuple[int, int] | None = None

    def entries(self) -> list[RegistryEntry]:
        """Return the entries, oldest first. Lines that are not entries are skipped. Of several
        entries for an artifact of a session, the last one counts."""
        with storage_errors("reading the registry"):
            data = self._path.read_bytes() if self._path.exists() else b""
        return list(_entries(data).values())

    def add(self, entry: RegistryEntry) -> RegistryEntry:
        """Append an entry and return it. If the artifact has one that names the same file, return
        that."""
        with self._locked() as handle:
            self._catch_up(handle)
            known = self._known.get(_key(entry))
            if known is not None and known["artifact"]["path"] == entry["artifact"]["path"]:
                return known
            size = os.fstat(handle).st_size
            line = json.dumps(entry).encode() + b"\n"
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash left half a line
            write_all(handle, line)
            if self._is_durable:
                os.fsync(handle)
        return entry

    def remove(self, session_id: str, hashes: set[str]) -> None:
        """Remove the entries of these artifacts of a session, then the files that they name."""
        if not hashes or not self._path.exists():
            return
        with self._locked() as handle:
            found = _entries(os.pread(handle, os.fstat(handle).st_size, 0))
            gone = [
                entry
                for (owner, digest), entry in found.items()
                if owner == session_id and digest in hashes
            ]
            with Draft(self._path.parent) as draft:
                for entry in found.values():
                    if entry not in gone:
                        draft.file.write(json.dumps(entry).encode() + b"\n")
                draft.replace(self._path, durable=self._is_durable)
            for entry in gone:
                name = Path(entry["artifact"]["path"]).name
                if name.startswith(_stem(session_id, entry["hash"]) + "."):
                    self._path.with_name(name).unlink(missing_ok=True)

    def _catch_up(self, handle: int) -> None:
        """Read the complete lines that were added since."""
        info = os.fstat(handle)
        if self._inode != (info.st_dev, info.st_ino) or info.st_size < self._read:
            self._known, self._read, self._inode = {}, 0, (info.st_dev, info.st_ino)
        data = os.pread(handle, info.st_size - self._read, self._read)
        data = data[: data.rfind(b"\n") + 1]
        self._known.update(_entries(data))
        self._read += len(data)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file that has the name, and lock it: another process may have replaced it
        meanwhile."""
        for _ in range(_ATTEMPTS):
            handle = os.open(self._path, _APPEND, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if is_at(handle, self._path):
                    yield handle
                    return
            finally:
                os.close(handle)
        raise keeps_changing(self._path.name)


def _entries(data: bytes) -> dict[tuple[str, str], RegistryEntry]:
    """Return the entries in lines of the registry, by session and hash. The last one counts."""
    found: dict[tuple[str, str], RegistryEntry] = {}
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a crash may leave half a line
            continue
        if _is_entry(entry):
            found.pop(_key(entry), None)
            found[_key(entry)] = entry
    return found


def _is_entry(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("sessionId"), str):
        return False
    artifact, digest = value.get("artifact"), value.get("hash")
    is_hash = isinstance(digest, str) and _HASH.fullmatch(digest) is not None
    return is_hash and isinstance(artifact, dict) and isinstance(artifact.get("path"), str)


def _key(entry: RegistryEntry) -> tuple[str, str]:
    return entry["sessionId"], entry["hash"]


def _session_of(path: Path) -> str:
    """Return the session that a transcript belongs to, by the name of its file."""
    return path.name.partition(".jsonl")[0]


def _draft(path: Path) -> Draft:
    return Draft(path.parent, mode=0o400)


def _file_name(session_id: str, ref: Ref) -> str:
    """Return the name of an artifact's file, which depends on the session and the content alone."""
    suffix = (
        ".txt"
        if media.is_text(ref.media_type)
        else mimetypes.guess_extension(ref.media_type) or ".bin"
    )
    return _stem(session_id, ref.artifact_id) + suffix


def _stem(session_id: str, artifact_id: str) -> str:
    owner = os.fsencode(session_id)
    name = session_id if len(owner) <= _LONGEST_NAME else digest_of(owner)
    return f"{name}.{short_id(artifact_id)}"


def _recall_lines(about: ArtifactRef, *, has_file: bool) -> list[str]:
    """Return the line of an artifact, then shorter ones, to choose from."""
    summary, short = about["summary"], f"(artifact: {about['id']})"
    long = f"(artifact: {about['id']}, path: {about['path']})" if has_file else short
    return [
        f"- {_quoted(summary)} {long}",
        f"- {_quoted(summary[:100])} {long}",
        f"- {_quoted(summary[:100])} {short}",
        f"- {short}",
    ]


def _narrative(summaries: Sequence[str], most: int) -> str:
    """Return a sentence of at most `most` characters that quotes what tools produced. Empty if
    nothing fits."""
    sentence = ""
    for summary in summaries:
        start = f"{sentence.removesuffix('.')}; " if sentence else _NARRATIVE
        cut = summary
        while cut and len(f"{start}{_quoted(cut)}.") > most:
            cut = cut[:-1]
        if len(cut) < min(len(summary), _LEAST_SUMMARY) or not cut:
            break
        sentence = f"{start}{_quoted(cut)}."
    return sentence


def _quoted(text: str) -> str:
    """Return a text of a tool in quotes, on one line, so that it cannot be taken for a part of the
    prompt."""
    return json.dumps(text, ensure_ascii=False)


def _checked(name: object, what: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"invalid {what} {clip(repr(name))}", hint="use letters, digits and any of ._-"
        )
    return name
