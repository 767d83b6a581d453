"""Tool artifacts: a bounded tool executor over a session-scoped store of files with a time to
live."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote

import coatcheck
from coatcheck import Ref, Session, Store, ToolCall, ToolExecutor
from coatcheck.atomic import Draft
from coatcheck.checks import LARGEST, check_name, whole
from coatcheck.compat._folders import (
    BASE_NAME,
    files_in,
    folder_name,
    private_folder,
    remove_if_empty,
    session_of,
)
from coatcheck.compat._heads import head_of
from coatcheck.compat._ids import id_prefix, short_id
from coatcheck.compat._stores import Place, folder_of, is_store
from coatcheck.content import CHUNK
from coatcheck.errors import (
    CoatcheckError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
)
from coatcheck.executor import Description, Result, ToolOutcome, Turn
from coatcheck.externalize import About, Limit, Policy, configured, put
from coatcheck.externalize.storing import masked
from coatcheck.externalize.stub import head_and_tail
from coatcheck.ids import digest_of
from coatcheck.parts import as_block, is_known
from coatcheck.redaction import CONTEXT, mask
from coatcheck.values import as_text, encode_text

TOOL_MESSAGE_MAX_CHARS: Final = 12_000
DEFAULT_TTL_S: Final = 3_600
READ_TOOL: Final = "read_file"
HINT: Final = "Use the read_file tool to retrieve the full content."
_SUMMARY: Final = 200
_BACKEND: Final = ".coatcheck"  # begins with a dot, as the folder of no session does
_FILE: Final = re.compile(r"(art_[0-9a-f]{16})\.txt")
_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """A stored tool result. If storing failed, `error` says why, and id and path are empty."""

    artifact_id: str
    session_id: str
    file_path: str
    created_at: float
    ttl_s: int
    size_bytes: int
    tool_name: str
    summary: str

    @property
    def is_expired(self) -> bool:
        return time.time() >= self.created_at + self.ttl_s

    @property
    def error(self) -> str | None:
        """Why the result could not be stored, or None."""
        return None

    def to_model_hint(self) -> dict[str, Any]:
        """Return what a model gets in place of the result."""
        return _hint_of(self.artifact_id, self.summary, self.size_bytes)


@dataclass(frozen=True, slots=True)
class _Unstored(ArtifactRef):
    reason: str = ""

    @property
    def error(self) -> str | None:
        return self.reason

    def to_model_hint(self) -> dict[str, Any]:
        hint = ArtifactRef.to_model_hint(self)
        return hint | {"hint": f"The full content could not be stored: {self.reason}"}


class ArtifactStore:
    """Tool results as files, in sessions, each with its own time to live. Thread-safe.

    The files are `<base_dir>/<session_id>/<artifact_id>.txt`, by default below `sb_artifacts` in
    the system's folder for temporary files. A Coatcheck store beside them has the index. With an
    open store or an `s3://` address in place of the folder, or as `store`, artifacts are kept
    there, and the files are local copies."""

    def __init__(self, base_dir: Place | None = None, *, store: Place | None = None) -> None:
        if is_store(base_dir):
            base_dir, store = None, base_dir
        self._lock = threading.Lock()
        self._is_shared = store is not None
        self._is_closed_here = not isinstance(store, Store)
        self._copies: weakref.finalize[..., ArtifactStore] | None = None
        if base_dir is not None:
            self.base_dir = folder_of(base_dir, "base_dir")
            self.base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif store is None:
            self.base_dir = private_folder()
        else:
            self.base_dir = Path(tempfile.mkdtemp(prefix=f"{BASE_NAME}-"))
            self._copies = weakref.finalize(self, shutil.rmtree, self.base_dir, ignore_errors=True)
        if store is None:
            self.backend = coatcheck.open(self.base_dir / _BACKEND, ttl=None)
        else:
            self.backend = store if isinstance(store, Store) else coatcheck.open(store)

    def store(
        self, session_id: str, content: Any, tool_name: str, ttl_s: int = DEFAULT_TTL_S
    ) -> ArtifactRef:
        """Store a result: a text, or the JSON of any other value. A failed write does not raise:
        the ref has an `error`. Raises `InvalidArgument` for a session id that cannot name a folder,
        and for a negative `ttl_s`."""
        whole(ttl_s, "ttl_s")
        folder_name(session_id)
        policy = configured(self.backend.settings)
        text = as_text(masked(content, policy))
        ref = ArtifactRef(
            artifact_id="",
            session_id=session_id,
            file_path="",
            created_at=time.time(),
            ttl_s=ttl_s,
            size_bytes=len(encode_text(text)),
            tool_name=tool_name,
            summary=_one_line(mask(text[: _SUMMARY + CONTEXT])[:_SUMMARY]),
        )
        try:
            session = self.session(session_id, ttl_s)
            stored = put(session, text, About(tool=tool_name or None, ttl=ttl_s), policy)
            path = self.path_of(session_id, stored)
            self._write(path, lambda file: file.write(encode_text(text)))
        except (StoreError, LimitExceeded, OSError) as error:
            return _Unstored(**asdict(ref), reason=str(error))
        return replace(
            ref,
            artifact_id=short_id(stored.artifact_id),
            file_path=str(path),
            created_at=stored.created,
        )

    def retrieve(self, artifact_id: str) -> str | None:
        """Return the content of an artifact, or None if it is unknown, has expired, or its file is
        missing."""
        for session, ref in self._holders(artifact_id):
            value = session.get(ref)
            if value is not None and (
                self._is_shared or self.path_of(session.session_id, ref).is_file()
            ):
                return as_text(value)
        return None

    def get_ref(self, artifact_id: str) -> ArtifactRef | None:
        """Return the ref of an artifact without reading its file, or None if it is unknown or has
        expired."""
        for session, ref in self._holders(artifact_id):
            if self._is_shared and not self.path_of(session.session_id, ref).is_file():
                self.write_file(session, ref)  # another machine has stored it
            return self.ref_of(session, ref)
        return None

    def cleanup_session(self, session_id: str) -> int:
        """Remove the artifacts of a session, its files, and any other file in its folder. Return
        the number of artifacts."""
        folder = self.base_dir / folder_name(session_id)
        session = self.backend.session(session_id)
        count = len(session.list())
        session.end()
        for path in files_in(folder):
            if _FILE.fullmatch(path.name):
                self._remove_unless_live(path, session_id)
            else:
                path.unlink(missing_ok=True)
        remove_if_empty(folder)
        return count

    def cleanup_expired(self) -> int:
        """Remove the expired artifacts and their files, and return the number of artifacts. In a
        store that was passed to this one, expired artifacts count once its grace period is over."""
        grace = None if self._is_shared else 0
        count = self.backend.collect(grace=grace, compress=False).refs
        for folder in self.base_dir.iterdir():
            session_id = session_of(folder)
            files = [path for path in files_in(folder) if _FILE.fullmatch(path.name)]
            if session_id is None or not files:
                continue
            for path in files:
                self._remove_unless_live(path, session_id)
            remove_if_empty(folder)
        return count

    def stats(self) -> dict[str, int]:
        return asdict(self.backend.stats())

    def close(self) -> None:
        """Close the store, unless it was passed open, and remove local copies."""
        if self._is_closed_here:
            self.backend.close()
        if self._copies is not None:
            self._copies()

    def path_of(self, session_id: str, ref: Ref) -> Path:
        return self.base_dir / folder_name(session_id) / f"{short_id(ref.artifact_id)}.txt"

    def ref_of(self, session: Session, ref: Ref) -> ArtifactRef:
        ttl = LARGEST if ref.expires is None else round(ref.expires - ref.created)
        return ArtifactRef(
            artifact_id=short_id(ref.artifact_id),
            session_id=session.session_id,
            file_path=str(self.path_of(session.session_id, ref)),
            created_at=ref.created,
            ttl_s=ttl,
            size_bytes=ref.size_bytes,
            tool_name=ref.tool or "",
            summary=_one_line(head_of(session, ref, _SUMMARY)),
        )

    def write_file(self, session: Session, ref: Ref) -> None:
        """Write the file of an artifact that is in the index."""
        with session.open(ref) as stream:

            def write(file: IO[bytes]) -> None:
                stream.seek(0)
                shutil.copyfileobj(stream, file, CHUNK)

            self._write(self.path_of(session.session_id, ref), write)

    def _write(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        """Write a file under its final name, even if it exists, because a cleanup may be about to
        remove it."""
        with self._lock:
            for attempt in range(_ATTEMPTS):
                try:
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    with Draft(path.parent, mode=0o400) as draft:
                        write(draft.file)
                        draft.replace(path, durable=False)
                    return
                except FileNotFoundError:  # another process has removed the folder or the draft
                    if attempt == _ATTEMPTS - 1:
                        raise

    def _remove_unless_live(self, path: Path, session_id: str) -> None:
        """Remove the file of an artifact that the session no longer has.

        The same content may be stored again at any time. It is added to the index before its file
        is written, and the file is written under the lock that is held here, so no file of a live
        artifact is removed. If another process stores it between the check and the removal, its
        file is written again."""
        session = self.backend.session(session_id)
        pointer = "art:" + path.name.removeprefix("art_").removesuffix(".txt")
        with self._lock:
            if session.ref(pointer) is not None:
                return
            path.unlink(missing_ok=True)
        ref = session.ref(pointer)
        if ref is not None:
            with suppress(NotFound):  # it was removed again meanwhile
                self.write_file(session, ref)

    def session(self, session_id: str, ttl_s: int = DEFAULT_TTL_S) -> Session:
        """Return a session that lives at least as long as an artifact with this time to live."""
        ttl = None if self.backend.ttl is None else max(self.backend.ttl, ttl_s)
        return self.backend.lasting_session(session_id, ttl=ttl)

    def producer_of(self, artifact_id: str) -> str | None:
        """Return the name of the tool that an artifact came from, or None if it is not stored."""
        for _, ref in self._holders(artifact_id):
            return ref.tool or ""
        return None

    def _holders(self, artifact_id: str) -> Iterator[tuple[Session, Ref]]:
        """Yield the artifact of an id, in any spelling, with each session that has it."""
        prefix = id_prefix(artifact_id)
        if prefix is None:
            return
        pointer = f"art:{prefix}"
        for session_id in self.backend.holders(pointer, limit=LARGEST):
            session = self.backend.session(session_id)
            ref = session.ref(pointer)
            if ref is not None:
                yield session, ref


@dataclass(frozen=True, slots=True)
class ToolExecutionResult:
    """What a tool returned. `output` is its result; if that is a list of content blocks, large
    blocks are references.

    `failure` says why a large result could not be stored. Then `text` is its head and tail, for the
    model."""

    call_id: str
    tool_name: str = ""
    output: Any = None
    text: str | None = None
    failure: str | None = None
    duration: float = field(default=0.0, compare=False)

    @property
    def is_error(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ToolArtifactReference:
    """A large result that was stored."""

    call_id: str
    tool_name: str
    artifact_id: str
    summary: str
    size_bytes: int

    @property
    def is_error(self) -> bool:
        return False


Outcome = ToolExecutionResult | ToolArtifactReference | ToolOutcome
"""What became of a call. A failed one is a `ToolError` or `TimedOut` of `coatcheck.executor`."""


class TurnRuntimeState(Turn):
    """One turn of a session: it ends after `deadline` seconds, or with `close`. After that, nothing
    more is stored."""

    __slots__ = ("session_id",)

    def __init__(self, deadline: float | None = None, *, session_id: str | None = None) -> None:
        if session_id is not None:
            check_name(session_id, "session id")
        super().__init__(deadline)
        self.session_id = session_id


class BoundedToolExecutor:
    """Runs tools. A result over `max_chars` becomes an artifact of the session of the turn's state,
    or else of `session_id`; it is truncated if it cannot be stored. The default store is the global
    one.

    What a tool reads from a stored file is never replaced: the result of a call whose arguments
    name such a file, and the content of an artifact that comes back from another tool than the one
    that produced it."""

    def __init__(
        self,
        tools: Iterable[object] | Mapping[str, Callable[..., Any]],
        store: ArtifactStore | None = None,
        session_id: str | None = None,
        *,
        max_chars: int = TOOL_MESSAGE_MAX_CHARS,
    ) -> None:
        whole(max_chars, "max_chars", least=1)
        self._store = get_global_artifact_store() if store is None else store
        self._session_id = session_id
        self._max_chars = max_chars
        self._tools = dict(tools) if isinstance(tools, Mapping) else list(tools)
        self._runner = self._runner_in(self._store.backend.session(session_id))
        bases = {str(self._store.base_dir), os.path.realpath(self._store.base_dir)}
        self._stored_path = re.compile(
            rf"(?:{'|'.join(map(re.escape, bases))})[/\\]([^/\\\s]+)[/\\](art_[0-9a-f]{{16}})\.txt"
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self._runner.names

    @property
    def tools(self) -> tuple[Description, ...]:
        """Descriptions of the tools for a model."""
        return self._runner.tools

    def execute(
        self,
        name: str,
        arguments: Mapping[str, Any] | str,
        state: TurnRuntimeState | None = None,
        *,
        call_id: str = "",
        timeout: float | None = None,
    ) -> Outcome:
        """Run a tool, for at most `timeout` seconds and until the turn ends. Nothing is stored once
        `state` takes no more writes."""
        return self.run(ToolCall(call_id, name, arguments), state, timeout=timeout)

    def run(
        self, call: ToolCall, state: TurnRuntimeState | None = None, *, timeout: float | None = None
    ) -> Outcome:
        """Run one call and wait for it."""
        return self.run_all([call], state, timeout=timeout)[0]

    def run_all(
        self,
        calls: Sequence[ToolCall],
        state: TurnRuntimeState | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """Run the calls of a turn concurrently and return their outcomes in the same order."""
        place = self._place(state)
        located = [self._located(call, place) for call in calls]
        if len(located) == 1:
            done = [place.runner.run(located[0], timeout=timeout, turn=_waiting(state))]
        else:
            done = place.runner.run_all(located, timeout=timeout, turn=_waiting(state))
        return [
            self._bounded(call, one, place, state) for call, one in zip(located, done, strict=True)
        ]

    async def arun(
        self, call: ToolCall, state: TurnRuntimeState | None = None, *, timeout: float | None = None
    ) -> Outcome:
        """`run` for async callers."""
        return (await self.arun_all([call], state, timeout=timeout))[0]

    async def arun_all(
        self,
        calls: Sequence[ToolCall],
        state: TurnRuntimeState | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """`run_all` for async callers."""
        place = self._place(state)
        located = [self._located(call, place) for call in calls]
        done = await place.runner.arun_all(located, timeout=timeout, turn=_waiting(state))
        outcomes = []
        for call, one in zip(located, done, strict=True):
            outcomes.append(await asyncio.to_thread(self._bounded, call, one, place, state))
        return outcomes

    def _place(self, state: TurnRuntimeState | None) -> _Place:
        """Return the session in which a turn stores its results."""
        session_id = self._session_id
        if state is not None and state.session_id is not None:
            session_id = state.session_id
        if session_id is None:
            raise InvalidArgument(
                "there is no session to store results in",
                hint="pass a TurnRuntimeState with a session_id, or a session_id to the executor",
            )
        folder_name(session_id)
        try:
            session = self._store.session(session_id)
        except StoreError:  # the tools run all the same
            session = self._store.backend.unchecked_session(session_id, ttl=self._store.backend.ttl)
        runner = self._runner if session_id == self._session_id else self._runner_in(session)
        return _Place(session, runner)

    def _runner_in(self, session: Session) -> ToolExecutor:
        """Return what runs the tools and returns their results as they are."""
        policy = replace(
            configured(session.store.settings), enabled=False, ttl=float(DEFAULT_TTL_S)
        )
        return ToolExecutor(session, self._tools, policy=policy)

    def _located(self, call: ToolCall, place: _Place) -> ToolCall:
        """Return a call of `read_file` with the path of a file in place of an artifact's id, which
        is what the model was given. Other calls stay as they are."""
        arguments = _arguments_of(call)
        if call.name != READ_TOOL or arguments is None:
            return call
        for name, value in arguments.items():
            ref = _live_ref(place.session, value)
            if ref is not None:
                arguments[name] = str(self._store.path_of(place.session.session_id, ref))
        return ToolCall(call.id, call.name, arguments)

    def _bounded(
        self, call: ToolCall, outcome: ToolOutcome, place: _Place, state: TurnRuntimeState | None
    ) -> Outcome:
        """Return what becomes of a call: its result, or a reference if that is large."""
        if not isinstance(outcome, Result):
            if outcome.ref is not None:  # a part of its output, or a long error, that was stored
                self._store.write_file(place.session, outcome.ref)
            return outcome
        value, text = outcome.content, outcome.text
        result = ToolExecutionResult(call.id, call.name, value, duration=outcome.duration)
        if self._reads_stored_file(call) or self._is_read_back(call, text):
            return result
        if state is not None and not state.is_accepting_writes():
            return self._unstored(result, text)
        shown = place.session.externalize(
            value, tool=call.name, call_id=call.id or None, policy=self._policy(place)
        )
        if shown.failure is not None:
            return replace(result, text=shown.text, failure=shown.failure)
        if shown.is_stub and isinstance(shown.content, str) and shown.ref is not None:
            ref = self._store.ref_of(place.session, shown.ref)
            return ToolArtifactReference(
                call_id=call.id,
                tool_name=call.name,
                artifact_id=ref.artifact_id,
                summary=ref.summary,
                size_bytes=ref.size_bytes,
            )
        return replace(result, output=shown.content)

    def _policy(self, place: _Place) -> Policy:
        def render(ref: Ref, _: str) -> str:
            self._store.write_file(place.session, ref)
            return json.dumps(
                self._store.ref_of(place.session, ref).to_model_hint(), ensure_ascii=False
            )

        settings = place.session.store.settings
        return configured(settings).limited(
            max_chars=self._max_chars, ttl=float(DEFAULT_TTL_S), render=render
        )

    def _unstored(self, result: ToolExecutionResult, text: str) -> ToolExecutionResult:
        """Return the result of a turn that is over: nothing is stored, and the model gets at most
        `max_chars`."""
        if len(text) <= self._max_chars:
            return result
        failure = "the turn is over"
        shown = head_and_tail(text, failure, Limit(max_chars=self._max_chars), None)
        return replace(result, text=shown, failure=failure)

    def _reads_stored_file(self, call: ToolCall) -> bool:
        """Whether an argument of a call names the file of an artifact that is stored."""
        for text in _texts_in(_arguments_of(call)):
            for folder, artifact_id in self._stored_path.findall(text):
                session = self._store.backend.unchecked_session(unquote(folder), ttl=None)
                if _live_ref(session, artifact_id) is not None:
                    return True
        return False

    def _is_read_back(self, call: ToolCall, text: str) -> bool:
        """Whether a result is the content of an artifact that another tool has produced."""
        if len(text) <= self._max_chars:
            return False
        try:
            producer = self._store.producer_of(digest_of(encode_text(text)))
        except StoreError:
            return False  # storing it fails too, and reports that
        return producer is not None and producer != call.name


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a turn stores its results, and what runs its tools."""

    session: Session
    runner: ToolExecutor


def outcome_to_model_content(outcome: Outcome) -> Any:
    """Return what the model gets: a text, the reference of a stored result, or content blocks."""
    if isinstance(outcome, ToolArtifactReference):
        return _hint_of(outcome.artifact_id, outcome.summary, outcome.size_bytes)
    if not isinstance(outcome, ToolExecutionResult):
        return outcome.text
    if outcome.text is not None:
        return outcome.text
    output = outcome.output
    if isinstance(output, list) and output and all(is_known(as_block(one)) for one in output):
        return output
    return as_text(output)


_global: ArtifactStore | None = None
_global_lock = threading.Lock()


def get_global_artifact_store() -> ArtifactStore:
    """Return one store for the process, in the default folder. If it was closed, it is opened
    again."""
    global _global
    store = _global
    if store is None or store.backend.closed:
        with _global_lock:
            store = _global
            if store is None or store.backend.closed:
                store = _global = ArtifactStore()
    return store


def _hint_of(artifact_id: str, summary: str, size_bytes: int) -> dict[str, Any]:
    return {
        "artifact_reference": artifact_id,
        "summary": summary,
        "hint": HINT,
        "size_bytes": size_bytes,
    }


def _one_line(text: str) -> str:
    return text.replace("\n", " ")


def _waiting(state: TurnRuntimeState | None) -> Turn | None:
    """Return how long to wait for tools: until the deadline of a turn. If it is over already, they
    are not called."""
    if state is None or not state.is_accepting_writes():
        return state
    return Turn(state.left())


def _live_ref(session: Session, artifact_id: object) -> Ref | None:
    """Return the ref of an id in any spelling, or None if the session does not have it or the store
    fails."""
    prefix = id_prefix(artifact_id)
    try:
        return session.ref(f"art:{prefix}") if prefix else None
    except CoatcheckError:
        return None


def _arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments of a call, or None if they are not valid. The executor reports that."""
    try:
        return call.parsed()
    except InvalidArgument:
        return None


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts_in(one)
