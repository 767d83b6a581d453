"""`Transcript`: a session's messages on disk, appended and read. Payloads over the policy are
stored as refs.

Reading is lazy and by position: opening reads next to nothing, the last messages are read from the
end, and there is no index, so any number of processes may append at the same time. What a line
refers to is durable before the line is.

A line that a crash left unfinished at the end is moved to a file beside it when the transcript is
next opened.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from coatcheck.checks import one_of
from coatcheck.errors import (
    AmbiguousPointer,
    CoatcheckError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    StoreError,
    StoreUnavailable,
    storage_error,
)
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.stub import may_contain_stub, pointer_in_stub
from coatcheck.ids import SCHEME, clip
from coatcheck.messages import PLAIN, Format, Message, detect, named_format
from coatcheck.messages.pairing import unpaired
from coatcheck.messages.paths import Path as JsonPath
from coatcheck.messages.paths import at, texts
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.storage.disk import Disk
from coatcheck.transcript.appender import Appender
from coatcheck.transcript.keep import Keeper, Manifest, fetch_from, record_manifest
from coatcheck.transcript.lines import (
    Layout,
    layout_of,
    lines_backwards,
    lines_between,
    open_to_read,
    opened,
    pieces,
    starts_backwards,
)
from coatcheck.transcript.scan import parse, parsed
from coatcheck.transcript.splice import (
    MARK,
    ArtifactRef,
    Fetch,
    Slimmed,
    bare,
    refs_of,
    sessions_in,
    slim,
    whole,
    with_refs,
)
from coatcheck.values import encode

if TYPE_CHECKING:
    from coatcheck.reading import Page

Mode = Literal["stored", "stubs", "whole"]
_MAX_PROBLEMS: Final = 1_000
_SCHEME: Final = SCHEME.encode()
_POINTER: Final = re.compile(rb"art:[0-9a-f]{12,64}(?![0-9a-f])")
_MAX_MISSES: Final = 1_000  # pointers in one line that may resolve to nothing
_SEARCHED: Final = 8 << 20  # bytes at the end of a file that are searched for its session


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a line. `kind` is "missing", "damaged", "broken", "torn" or "not stored",
    `offset` is where the line begins in the file, `pointer` is the artifact concerned."""

    kind: str
    offset: int
    message: str
    pointer: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its offset in the file, and its bytes in the requested mode, with the line end."""

    offset: int
    data: bytes

    @property
    def value(self) -> Any:
        """The line's JSON value, or None if it is not JSON."""
        return parsed(self.data)

    @property
    def refs(self) -> tuple[ArtifactRef, ...]:
        """The refs of a line in the mode "stored"."""
        return refs_of(self.data)


@dataclass(frozen=True, slots=True)
class Appended:
    """An appended message: offset and size of its line, and refs to its payloads."""

    offset: int
    size: int
    refs: tuple[ArtifactRef, ...] = ()


class Transcript:
    """The transcript at a path, for a session. A context manager, or closed with `close`.

    `format` is a format or its name; by default it is detected from the content. `policy` decides
    what is moved out of a line, by default the store's setting. Without a session nothing can be
    appended, and lines can be read as stored or with stubs only. With `read_only`, nothing on disk
    changes; otherwise an unfinished last line is moved aside at once. `problems` lists what was
    found so far."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        session: Session | None = None,
        *,
        format: Format | str | None = None,  # noqa: A002 - what users call it
        policy: Policy | None = None,
        read_only: bool = False,
    ) -> None:
        self.path = Path(path)
        if not self.path.name:
            raise InvalidArgument(f"{clip(str(path))} is not a file name")
        self._session = session
        self._given = named_format(format)
        self._layout = Layout(None)
        self._detected_at = 0  # size of the file when its layout was last looked at
        self._problems: dict[tuple[str, int, str | None], Problem] = {}
        durable = session is None or session.store.settings["store.durability"] == "power"
        self._appender = (
            None if read_only or session is None else Appender(self.path, Disk(durable=durable))
        )
        self._writer = (
            None
            if self._appender is None or session is None
            else _Writer(session, policy, self.path)
        )
        if self._appender is not None:
            self._recover(self._appender)
        elif not os.path.lexists(self.path):
            raise NotFound(f"transcript not found: {clip(self.path.name)}", hint="check the path")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Transcript({str(self.path)!r})"

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()

    @property
    def format(self) -> Format:
        """The given format, or else the one detected from the first lines."""
        return self._given or self._found_layout().format or PLAIN

    @property
    def problems(self) -> list[Problem]:
        return list(self._problems.values())

    def append(self, message: object) -> Appended:
        """Append one message: a dict, a model, or a line of JSON to store as it is. When this
        returns, the line is as durable as the store was opened for. If it raises, the file is
        unchanged.

        Payloads over the policy are moved to the store, wherever they are in the line. A stub that
        the agent's session made for a result stays as the model saw it, and the line refers to its
        artifact. If the store fails, the line is written whole, and `problems` reports it."""
        return self.extend([message])[0]

    def extend(self, messages: Iterable[object]) -> list[Appended]:
        """Append several messages with one write and one sync."""
        if self._appender is None or self._writer is None:
            raise InvalidArgument(
                "the transcript is open for reading only", hint="open it with a session"
            )
        lines = [_serialized(one) for one in messages]
        if not lines:
            return []
        fmt = self._writing_format(lines)
        slim = self._writer.slim(lines, fmt)
        offset = self._appender.append(b"".join(one.text + b"\n" for one, _ in slim))
        done = []
        for one, failure in slim:
            if failure is not None:
                self._note("not stored", offset, f"a payload was left in its line: {failure}")
            done.append(Appended(offset, len(one.text) + 1, one.refs))
            offset += len(one.text) + 1
        return done

    def lines(
        self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stored"
    ) -> Iterator[Line]:
        """Yield the lines from `start` to `stop`, as in a slice: negative numbers count from the
        end.

        "stored" gives them as they are in the file, "stubs" without our refs, "whole" as they were
        given, byte for byte. A payload that cannot be read is replaced by a placeholder and listed
        in `problems`. Lines that are not JSON are unchanged."""
        restorer = self._restorer(mode)
        with self._reading() as (handle, size):
            if self._found_layout().is_document:
                pairs: Iterable[tuple[int, bytes]] = [(0, b"".join(pieces(handle, 0, size)))][
                    start:stop
                ]
            else:
                first = _offset(handle, size, start, 0)
                last = _offset(handle, size, stop, size)
                pairs = lines_between(handle, first, last)
            for pair in pairs:
                yield self._line(pair, mode, restorer)

    def messages(
        self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stubs"
    ) -> Iterator[Message]:
        """Yield the messages in the lines, from `start` to `stop` as in a slice. `messages(-100)`
        reads only the end of the file. Lines without a message are skipped; those that are not JSON
        are listed in `problems`."""
        fmt = self.format
        if self._found_layout().is_document:
            inside = [one for line in self.lines(mode=mode) for one in self._inside(line, fmt)]
            yield from inside[start:stop]
            return
        after, skipped = 0, start or 0
        if start is not None and start < 0:
            if stop is not None and stop >= 0:
                raise InvalidArgument(
                    "a slice cannot begin from the end and stop at a positive number",
                    hint="list the messages first",
                )
            after, skipped = self._message_start(-start, fmt)
        with self._reading() as (handle, size):
            every = self._messages_between(handle, after, size, mode)
            wanted = islice(every, skipped, None)
            if stop is None:
                yield from wanted
            elif stop >= 0:
                yield from islice(wanted, max(0, stop - skipped))
            else:
                yield from _all_but_last(wanted, -stop)

    def _messages_between(self, handle: int, start: int, end: int, mode: Mode) -> Iterator[Message]:
        fmt, restorer = self.format, self._restorer(mode)
        for pair in lines_between(handle, start, end):
            yield from self._inside(self._line(pair, mode, restorer), fmt)

    def messages_for_model(self, *, compacted: bool = False) -> list[Message]:
        """Return this conversation as it is sent to a model, in the provider's form, with stubs in
        place of payloads.

        This is the whole conversation in order. The result for more lines begins with the result
        for fewer, so that a provider's cache stays valid. With `compacted`, it is what the host
        continues with after its last compaction. Nothing is added: calls without a result stay as
        they are, and `unpaired` lists them."""
        values = (value for line in self.lines() if (value := self._value(line)) is not None)
        return self.format.for_model(values, compacted=compacted)

    def unpaired(self, *, compacted: bool = False) -> list[str]:
        """List what a provider would refuse in `messages_for_model`: calls without a result,
        results without a call."""
        return unpaired(self.messages_for_model(compacted=compacted), self.format)

    def read(self, target: ArtifactRef | str, /, **request: Any) -> Page:
        """Read one page of a payload, with the arguments of `Session.read`: `lines`, `grep`,
        `query`, `cursor`, …"""
        if self._session is None:
            raise InvalidArgument(
                "reading a payload needs a session", hint="open the transcript with one"
            )
        if isinstance(target, ArtifactRef):
            return self._session.store.session(target.session).read(target.pointer, **request)
        return self._session.read(target, **request)

    def _message_start(self, wanted: int, fmt: Format) -> tuple[int, int]:
        """Return the offset of the line with the n-th message from the end, and how many messages
        come before it there."""
        with self._reading() as (handle, size):
            for begin, data in lines_backwards(handle, size):
                count = sum(1 for _ in self._inside(Line(begin, data), fmt))
                if count >= wanted:
                    return begin, count - wanted
                wanted -= count
        return 0, 0

    def _inside(self, line: Line, fmt: Format) -> Iterator[Message]:
        value = self._value(line)
        if value is not None:
            yield from (message for _, message in fmt.messages(value))

    def _value(self, line: Line) -> Any:
        value = parsed(line.data)
        if value is None and line.data.strip():
            is_torn = not line.data.endswith(b"\n")
            message = "the last line is not finished" if is_torn else "the line is not JSON"
            self._note("torn" if is_torn else "broken", line.offset, message)
        return value

    def _line(self, pair: tuple[int, bytes], mode: Mode, fetch: Fetch | None) -> Line:
        offset, data = pair
        if mode == "stored":
            return Line(offset, data)

        def missing(ref: ArtifactRef, error: CoatcheckError) -> None:
            self._note(
                "damaged" if error.code == "damaged" else "missing", offset, str(error), ref.pointer
            )

        return Line(offset, bare(data) if fetch is None else whole(data, fetch, missing=missing))

    def _restorer(self, mode: Mode) -> Fetch | None:
        """Return a function that fetches payloads from the transcript's own session, or else from
        the agent's."""
        one_of(mode, "mode", ("stored", "stubs", "whole"))
        session = self._session
        if mode != "whole":
            return None
        if session is None:
            raise InvalidArgument(
                "reading whole lines needs a session", hint="open the transcript with one"
            )
        own = fetch_from(session.store)

        def fetch(session_id: str, artifact_id: str) -> bytes:
            try:
                return own(session_id, artifact_id)
            except NotFound as error:
                with suppress(NotFound), session.open(artifact_id) as stream:
                    return stream.read()
                raise error from None

        return fetch

    def _found_layout(self) -> Layout:
        """Return the layout of the file. While it is unknown, look again each time the file has
        doubled."""
        if self._layout.format is not None:
            return self._layout
        try:
            with self._reading() as (handle, size):
                if size > 2 * self._detected_at:
                    with opened(handle) as file:
                        self._layout = replace(layout_of(file), document=None)
                    self._detected_at = size
        except NotFound:
            pass
        return self._layout

    def _writing_format(self, lines: list[bytes]) -> Format:
        layout = self._found_layout()
        if layout.is_document:
            raise InvalidArgument(
                f"cannot append to {clip(self.path.name)}: it is one JSON document",
                hint="use a file of JSON lines",
            )
        found = self._given or layout.format
        return found or detect([parsed(one) for one in lines[:200]]) or PLAIN

    @contextmanager
    def _reading(self) -> Iterator[tuple[int, int]]:
        """Open the file that is at the path now. Yield its descriptor and its size: lines appended
        later are not read."""
        try:
            with open_to_read(self.path) as handle:
                yield handle, os.fstat(handle).st_size
        except FileNotFoundError:
            raise NotFound(
                f"transcript not found: {clip(self.path.name)}", hint="append to it first"
            ) from None
        except OSError as error:
            raise storage_error(error, "reading a transcript") from error

    def _recover(self, appender: Appender) -> None:
        try:
            torn = appender.recover()
        except StoreUnavailable as error:  # a read-only file can still be read
            self._note("torn", 0, str(error))
            return
        if torn is not None:
            where = "left in place" if torn.kept_in is None else f"moved to {torn.kept_in.name}"
            self._note(
                "torn", torn.offset, f"an unfinished line of {torn.size:,} bytes was {where}"
            )

    def _note(self, kind: str, offset: int, message: str, pointer: str | None = None) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems.setdefault(
                (kind, offset, pointer), Problem(kind, offset, message, pointer)
            )


def _offset(handle: int, size: int, number: int | None, default: int) -> int:
    """Return the offset of the line with this number, as in a slice."""
    if number is None:
        return default
    if number < 0:
        return next(islice(starts_backwards(handle, size), -number - 1, None), 0)
    return next((begin for begin, _ in islice(lines_between(handle, 0, size), number, None)), size)


def _all_but_last(messages: Iterator[Message], count: int) -> Iterator[Message]:
    waiting = deque(islice(messages, count))  # each waits for `count` messages after it
    for one in messages:
        waiting.append(one)
        yield waiting.popleft()


def _serialized(message: object) -> bytes:
    """Return a message as one line of JSON, without the line end. A string or bytes are a line
    already.

    Raises `InvalidArgument` if the message is not a JSON object on one line."""
    if isinstance(message, str | bytes):
        return _checked(message)
    codec, data = encode(message)
    if codec != "json" or not data.startswith(b"{"):
        raise InvalidArgument(
            f"a message must be a dict or a line of JSON, got {type(message).__name__}",
            hint="append a dict, or its JSON on one line",
        )
    try:
        data.decode()
    except UnicodeDecodeError:  # a lone surrogate: UTF-8 cannot encode it, JSON can escape it
        return json.dumps(
            json.loads(data.decode("utf-8", "surrogatepass")), separators=(",", ":")
        ).encode()
    return data


def _checked(line: str | bytes) -> bytes:
    try:
        text = line if isinstance(line, str) else line.decode()
        data = text.encode().rstrip(b"\r\n")
    except UnicodeError:
        raise InvalidArgument("a line must be UTF-8", hint="append the message as a dict") from None
    found = parse(text)
    if found is None or not isinstance(found[0], dict) or b"\n" in data:
        raise InvalidArgument(
            f"{clip(text)} is not a JSON object on one line, or is nested too deep",
            hint="append the message as a dict, nested less than 500 levels deep",
        )
    return data


class _Writer(Keeper):
    """Makes the lines of one transcript. Their payloads are durable when `slim` returns.

    It continues the session that the file names. A new session is recorded under the file's path
    before the first put, so that `forget` finds it after a crash."""

    def __init__(self, session: Session, policy: Policy | None, path: Path) -> None:
        super().__init__(session.store, None, session=session, policy=policy)
        self._session = session
        self._path = path
        self._lock = threading.RLock()
        self._format: str | None = None
        self._recorded = False
        self._held: set[str] = set()  # pointers whose artifacts the transcript has

    def slim(self, lines: Sequence[bytes], fmt: Format) -> list[tuple[Slimmed, str | None]]:
        """Return lines without their line ends, each with the reason if a payload could not be
        stored."""
        with self._lock:
            return self._slimmed(lines, fmt)

    def _slimmed(self, lines: Sequence[bytes], fmt: Format) -> list[tuple[Slimmed, str | None]]:
        if not any(len(line) >= self.least or MARK in line or _SCHEME in line for line in lines):
            self.passes(lines)
            return [(Slimmed(line), None) for line in lines]
        if self._format is None:
            self._format = fmt.name
            self._recorded = any(self.is_ours({one}) for one in _sessions_near_the_end(self._path))
        try:
            with self.store.batching:
                return [self._written(line, fmt) for line in lines]
        except (
            StoreError,
            LimitExceeded,
        ) as error:  # puts of the batch are not durable: no line may refer to them
            self._held.clear()
            return [(Slimmed(line), str(error)) for line in lines]

    def _written(self, line: bytes, fmt: Format) -> tuple[Slimmed, str | None]:
        try:
            done = slim(line, fmt, self)
            text, refs = done.text, done.refs
            if text is not line or MARK not in line:
                more = self._stub_refs(line, fmt)
                if more:
                    text, refs = with_refs(text, more, self.session_id), (*refs, *more)
            self._held |= {ref.pointer for ref in refs if fmt.is_shown(ref.path)}
            if self._hold_pointers(text) and MARK not in text:
                text = with_refs(text, (), self.session_id)
        except (StoreError, LimitExceeded) as error:
            return Slimmed(line), str(error)
        return Slimmed(text, refs), None

    def _stub_refs(self, line: bytes, fmt: Format) -> list[ArtifactRef]:
        """Return refs to the artifacts of stubs in the results of a line, if they are this
        session's own."""
        if not may_contain_stub(line):
            return []
        found = parse(line.decode("utf-8", "replace"))
        if found is None:
            return []
        refs: list[ArtifactRef] = []
        for base, message in fmt.messages(found[0]):
            for result in fmt.results(message):
                path = (*base, *result.content_path)
                refs += self._refs_in(at(message, result.content_path), path)
        return refs

    def _refs_in(self, content: object, path: JsonPath) -> Iterator[ArtifactRef]:
        """Yield refs to the artifacts of stubs in the content of a result, which is at a path."""
        for text_path, text in texts(content, path):
            ref = self._stub_ref(text)
            if ref is not None:
                self._take(ref)
                yield ArtifactRef.of(ref, text_path, self.session_id, self._encoding(ref))

    def _stub_ref(self, text: str) -> Ref | None:
        pointer = pointer_in_stub(text)
        with suppress(CoatcheckError):
            return self._session.ref(pointer) if pointer is not None else None
        return None

    def _hold_pointers(self, line: bytes) -> bool:
        """Grant the transcript what other pointers in a line open: placeholders, answers of our
        tools, quotations. Return whether there is anything new. Only pointers that this session can
        open count."""
        misses, before = 0, len(self._held)
        for pointer in dict.fromkeys(pointers_in(line)):
            if pointer in self._held or misses == _MAX_MISSES:
                continue
            with suppress(AmbiguousPointer, NotFound):
                ref = self._session.ref(pointer)
                if ref is None:
                    misses += 1
                    continue
                self._take(ref)
                self._held.add(pointer)
        return len(self._held) > before

    def _encoding(self, ref: Ref) -> str:
        """How a model would be sent this artifact: as text if it is text, else as base64."""
        if ref.codec != "bytes":
            return "utf8"
        with self._session.open(ref) as stream:
            try:
                stream.read().decode()
            except UnicodeDecodeError:
                return "base64"
        return "utf8"

    def _take(self, ref: Ref) -> None:
        """Grant an artifact of the agent's session to the transcript, if it does not have it
        yet."""
        held = self.own_session().ref(ref)
        if held is None or held.granted_by != self._session.session_id:
            self._session.grant(ref, to=self.session_id)

    def own_session(self) -> Session:
        if not self._recorded:
            self._recorded = True
            where = os.path.join(os.path.realpath(self._path.parent), self._path.name)
            record_manifest(super().own_session(), Manifest(where, self._format or ""))
        return super().own_session()


def pointers_in(line: bytes) -> list[str]:
    """Return the pointers anywhere in a line or a document of JSON, in order."""
    return [one.decode() for one in _POINTER.findall(line)] if _SCHEME in line else []


def _sessions_near_the_end(path: Path) -> Iterator[str]:
    """Yield the sessions that the last lines of a file name, the newest first."""
    with suppress(OSError, InvalidArgument), open_to_read(path) as handle:
        size = os.fstat(handle).st_size
        for begin, line in lines_backwards(handle, size):
            yield from sessions_in(line)
            if size - begin > _SEARCHED:
                return
