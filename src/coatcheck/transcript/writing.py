"""Between a message and its line: how it is written, what leaves it, and how that comes back."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, NotFound, StoreError
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.stub import is_stub
from coatcheck.ids import clip, is_pointer
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.transcript.backwards import lines_between, starts_backwards
from coatcheck.transcript.formats import REFS_KEY, Format, at
from coatcheck.transcript.formats import Path as JsonPath
from coatcheck.transcript.keep import Keeper, fetch_from
from coatcheck.transcript.manifest import Manifest, remember
from coatcheck.transcript.refs import ArtifactRef
from coatcheck.transcript.scan import parse
from coatcheck.transcript.splice import holding, sessions_in, slim
from coatcheck.values import encode

_MARK: Final = REFS_KEY.encode()
_STUB: Final = (b'{\\"stub\\":\\"', b"{\\u0022stub")  # how a stub looks inside a JSON string
_STUBS: Final = Policy(preview_chars=2_000)
_LOOKED_AT: Final = 8 << 20  # bytes at the end of a file where its session is looked for


@dataclass(frozen=True, slots=True)
class Written:
    """A line without its end, the refs that it has, and why a payload could not leave it."""

    text: bytes
    refs: tuple[ArtifactRef, ...] = ()
    failure: str | None = None


def serialized(message: object) -> bytes:
    """A message as one line of JSON, without the line's end. A text or bytes are a line already, and stay as they are.

    Raises `InvalidArgument` for what is no JSON object, or would not come back the same."""
    if isinstance(message, str | bytes):
        return _checked(message)
    codec, data = encode(message)
    if codec != "json" or not data.startswith(b"{"):
        raise InvalidArgument(
            f"a {type(message).__name__} is no message", hint="append a dict, or its JSON on one line"
        )
    try:
        data.decode()
    except UnicodeDecodeError:  # half a pair of surrogates: no UTF-8 has it, JSON's escapes do
        return json.dumps(json.loads(data.decode("utf-8", "surrogatepass")), separators=(",", ":")).encode()
    return data


def _checked(line: str | bytes) -> bytes:
    try:
        text = line if isinstance(line, str) else line.decode()
        data = text.encode().rstrip(b"\r\n")
    except UnicodeError:
        raise InvalidArgument("a line of a transcript is UTF-8", hint="append the message as a dict") from None
    found = parse(text)
    if found is None or not isinstance(found[0], dict) or b"\n" in data:
        raise InvalidArgument(f"{clip(text)} is no JSON object on one line", hint="append the message as a dict")
    return data


class Writer:
    """Makes the lines of one transcript. What leaves them is durable when `slim` returns."""

    def __init__(self, session: Session, policy: Policy | None, path: Path) -> None:
        self._session = session
        self._path = path
        self._mutex = threading.Lock()
        self._keeper = _FileKeeper(session, policy, path)
        self._looked = False

    def slim(self, lines: Sequence[bytes], known: Format) -> list[Written]:
        with self._mutex:
            if not any(self._may_change(line) for line in lines):
                return [self._line(line, known) for line in lines]
            if not self._looked:
                self._looked = True
                self._keeper.resume(known)
            try:
                with self._session.store.batching:
                    return [self._line(line, known) for line in lines]
            except (StoreError, LimitExceeded) as error:  # what was put is not acknowledged, so no line may name it
                return [Written(line, failure=str(error)) for line in lines]

    def _may_change(self, line: bytes) -> bool:
        return len(line) >= self._keeper.least or _MARK in line or any(one in line for one in _STUB)

    def _line(self, line: bytes, known: Format) -> Written:
        try:
            done = slim(line, known, self._keeper)
            text, refs = done.text, done.refs
            if text is not line or _MARK not in line:
                held = self._held(line, known)
                if held:
                    text, refs = holding(text, held, self._keeper.session_id), (*refs, *held)
        except (StoreError, LimitExceeded) as error:
            return Written(line, failure=str(error))
        return Written(text, refs)

    def _held(self, line: bytes, known: Format) -> list[ArtifactRef]:
        """Refs to what stubs in the results of a line stand for, where they are this session's own."""
        if not any(one in line for one in _STUB):
            return []
        found = parse(line.decode())
        if found is None:
            return []
        refs = []
        for base, message in known.messages(found[0]):
            for result in known.results(message):
                where = (*base, *result.content_path)
                for path, text in _texts(at(found[0], where), where):
                    ref = self._stubbed(text)
                    if ref is not None:
                        self._keeper.take(ref)
                        refs.append(ArtifactRef.of(ref, path, self._keeper.session_id, self._encoding(ref)))
        return refs

    def _stubbed(self, text: str) -> Ref | None:
        if not is_stub(text, _STUBS):
            return None
        try:
            said = json.loads(text)
            pointer = said.get("artifact")
            return self._session.ref(pointer) if isinstance(pointer, str) and is_pointer(pointer) else None
        except (ValueError, AttributeError, CoatcheckError):
            return None

    def _encoding(self, ref: Ref) -> str:
        """How a model would be sent this artifact: as the text that it is, else as base64."""
        if ref.codec != "bytes":
            return "utf8"
        with self._session.open(ref) as stream:
            try:
                stream.read().decode()
            except UnicodeDecodeError:
                return "base64"
        return "utf8"


def _texts(content: object, path: JsonPath) -> Iterator[tuple[JsonPath, str]]:
    if isinstance(content, str):
        yield path, content
    elif isinstance(content, list):
        for index, one in enumerate(content):
            if isinstance(one, dict) and isinstance(one.get("text"), str):
                yield (*path, index, "text"), one["text"]


class _FileKeeper(Keeper):
    """A keeper for lines that are appended: it goes on with the session that the file has, and records a new one under
    the file's name before anything is put, so that a crash leaves nothing that nobody finds."""

    def __init__(self, session: Session, policy: Policy | None, path: Path) -> None:
        super().__init__(session.store, None, session=session, policy=policy)
        self._from = session
        self._path = path
        self._format = ""
        self._recorded = False

    def resume(self, known: Format) -> None:
        self._format = known.name
        for session_id in _sessions_near_the_end(self._path):
            if self.is_ours({session_id}):
                self._recorded = True
                return

    def take(self, ref: Ref) -> None:
        """Let the transcript hold what the agent's session has."""
        self.hold()
        self._from.grant(ref, to=self.session_id)

    def hold(self) -> None:
        self._record()
        super().hold()

    def _held(self) -> Session:
        self._record()
        return super()._held()

    def _record(self) -> None:
        if not self._recorded:
            self._recorded = True
            where = os.path.join(os.path.realpath(self._path.parent), self._path.name)
            remember(self.store, self.session_id, Manifest(where, self._format))


def _sessions_near_the_end(path: Path) -> Iterator[str]:
    """The sessions that the last lines of a file name, the newest first."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        end = size = os.fstat(handle).st_size
        for begin in starts_backwards(handle, size):
            line = b"".join(data for _, data in lines_between(handle, begin, end))
            if _MARK in line:
                yield from sessions_in(line)
            if size - begin > _LOOKED_AT:
                return
            end = begin
    finally:
        os.close(handle)


class Restorer:
    """Fetches what lines refer to: from the transcript's own session, else from the agent's. Notes what neither has."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetch = fetch_from(session.store)
        self._missing: list[tuple[ArtifactRef, CoatcheckError]] = []

    def fetch(self, session_id: str, artifact_id: str) -> bytes:
        try:
            return self._fetch(session_id, artifact_id)
        except NotFound:
            try:
                with self._session.open(artifact_id) as stream:
                    return stream.read()
            except NotFound:
                pass
            raise

    def missing(self, ref: ArtifactRef, error: CoatcheckError) -> None:
        self._missing.append((ref, error))

    def taken(self) -> list[tuple[ArtifactRef, CoatcheckError]]:
        """What was missing since this was last asked."""
        found, self._missing = self._missing, []
        return found
