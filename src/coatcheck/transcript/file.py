"""`Transcript`: a session's messages on disk, appended and read. Payloads over the policy are refs; nothing is lost.

Reading is lazy and by position: opening reads next to nothing, the last messages are read from the end, and no index is
kept, so any number of processes may append meanwhile. What a line refers to is durable before the line is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from coatcheck.errors import InvalidArgument, NotFound, StoreUnavailable, storage_error
from coatcheck.externalize.policy import Policy
from coatcheck.ids import clip
from coatcheck.session import Session
from coatcheck.storage.disk import Disk
from coatcheck.transcript.appending import Appender
from coatcheck.transcript.backwards import lines_between, starts_backwards
from coatcheck.transcript.formats import FORMATS, PLAIN, Format, Message, detect
from coatcheck.transcript.lines import Layout, layout_of, opened
from coatcheck.transcript.refs import ArtifactRef
from coatcheck.transcript.scan import parse
from coatcheck.transcript.splice import bare, refs_of, whole
from coatcheck.transcript.turns import unpaired
from coatcheck.transcript.writing import Restorer, Writer, serialized

if TYPE_CHECKING:
    from coatcheck.reading import Page

Mode = Literal["stored", "stubs", "whole"]
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_PROBLEMS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a line: "missing", "damaged", "broken", "torn" or "not stored". `offset` is where
    the line begins in the file, `pointer` the artifact that it is about."""

    kind: str
    offset: int
    message: str
    pointer: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line: where it begins in the file, and its bytes in the mode that was asked for, with their end."""

    offset: int
    data: bytes

    @property
    def value(self) -> Any:
        """The line's JSON, or None where it is none."""
        return _parsed(self.data)

    @property
    def refs(self) -> tuple[ArtifactRef, ...]:
        """The refs of a line as it is stored."""
        return refs_of(self.data)


@dataclass(frozen=True, slots=True)
class Appended:
    """A message that is in the file: where its line begins, how long it is, and what left it."""

    offset: int
    size: int
    refs: tuple[ArtifactRef, ...] = ()


class Transcript:
    """The transcript at a path, for a session. A context manager, or closed with `close`.

    `format` is a format or its name; without it, it is told by content. `policy` decides what leaves a line, by default
    that of the store's settings. Without a session nothing can be appended, and lines are read as they are stored or
    with their stubs. With `read_only`, nothing on disk changes; else a torn last line is moved aside at once.
    `problems` is what was found wrong so far."""

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
            raise InvalidArgument(f"{clip(str(path))} names no file")
        self._session = session
        self._given = _named(format)
        self._layout = Layout(None)
        self._looked_at = 0
        self._problems: dict[tuple[str, int, str | None], Problem] = {}
        durable = session is None or session.store.settings["store.durability"] == "power"
        self._appender = None if read_only or session is None else Appender(self.path, Disk(durable=durable))
        self._writer = None if self._appender is None or session is None else Writer(session, policy, self.path)
        if self._appender is not None:
            self._recover(self._appender)
        elif not os.path.lexists(self.path):
            raise NotFound(f"there is no transcript {clip(self.path.name)}", hint="name a file that is there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Transcript({str(self.path)!r})"

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()

    @property
    def format(self) -> Format:
        """The format: the one that was named, else the one that the first lines have."""
        return self._given or self._found_layout().format or PLAIN

    @property
    def problems(self) -> list[Problem]:
        return list(self._problems.values())

    # Writing

    def append(self, message: object) -> Appended:
        """Append one message: a dict, a model, or a line of JSON as it is to be stored. When this returns it is as
        durable as the store was opened for; if it raises, the file is as it was.

        Payloads over the policy leave the line, wherever they are. A stub that the agent's session made for a result
        stays as the model saw it, and the line refers to what it stands for. Where the store fails, the line is written
        whole, and `problems` says so."""
        return self.extend([message])[0]

    def extend(self, messages: Iterable[object]) -> list[Appended]:
        """Append messages in one go: one write, one sync."""
        if self._appender is None or self._writer is None:
            raise InvalidArgument("this transcript is open for reading alone", hint="open it with a session")
        lines = [serialized(one) for one in messages]
        if not lines:
            return []
        known = self._writing_format(lines)
        slim = self._writer.slim(lines, known)
        offset = self._appender.append(b"".join(one.text + b"\n" for one in slim))
        done = []
        for one in slim:
            if one.failure is not None:
                self._note("not stored", offset, f"a payload stayed in its line: {one.failure}")
            done.append(Appended(offset, len(one.text) + 1, one.refs))
            offset += len(one.text) + 1
        return done

    # Reading

    def lines(self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stored") -> Iterator[Line]:
        """The lines from `start` to `stop`, as in a slice: negative numbers count from the end.

        "stored" is as they are in the file, "stubs" without our refs, "whole" as they were before anything left them,
        byte for byte. What cannot be had stands as a placeholder, and is told in `problems`. Lines that are no JSON
        pass as they are."""
        restorer = self._restorer(mode)
        with self._reading() as (handle, size):
            if self._found_layout().is_document:
                whole_file = [(0, b"".join(data for _, data in lines_between(handle, 0, size)))]
                pairs: Iterable[tuple[int, bytes]] = whole_file[start:stop]
            else:
                first = _offset(handle, size, start, 0)
                last = _offset(handle, size, stop, size)
                pairs = lines_between(handle, first, last)
            for offset, data in pairs:
                yield Line(offset, self._in_mode(offset, data, mode, restorer))

    def messages(self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stubs") -> Iterator[Message]:
        """The messages that live in the lines, from `start` to `stop` as in a slice. The last hundred are
        `messages(-100)`, and cost no more than those. Lines without a message are passed over; those that are no JSON
        are told in `problems` too."""
        known = self.format
        if self._found_layout().is_document:
            found = [one for line in self.lines(mode=mode) for one in self._inside(line, known)]
            yield from found[start:stop]
            return
        negative = (start is not None and start < 0) or (stop is not None and stop < 0)
        if not negative:
            every = (one for line in self.lines(mode=mode) for one in self._inside(line, known))
            yield from islice(every, start, stop)
            return
        first, skipped, last = self._from_the_end(start, stop, known)
        restorer = self._restorer(mode)
        with self._reading() as (handle, size):
            pairs = lines_between(handle, first, size if last is None else last)
            lines = (Line(offset, self._in_mode(offset, data, mode, restorer)) for offset, data in pairs)
            yield from islice((one for line in lines for one in self._inside(line, known)), skipped, None)

    def messages_for_model(self, *, compacted: bool = False) -> list[Message]:
        """What a model is sent of this conversation, in the provider's shape, with stubs where payloads were.

        Everything that was said, in order: what more lines make of it begins with what fewer did, so that a provider's
        cache holds. With `compacted`, what the host would go on with after its last compaction instead. Nothing is
        invented: calls that nobody answered stand as they are, and `unpaired` names them."""
        values = (value for line in self.lines() if (value := self._value(line)) is not None)
        return self.format.for_model(values, compacted=compacted)

    def unpaired(self, *, compacted: bool = False) -> list[str]:
        """What a provider would refuse of `messages_for_model`: calls without a result, results without a call."""
        return unpaired(self.messages_for_model(compacted=compacted), self.format)

    def read(self, target: ArtifactRef | str, /, **request: Any) -> Page:
        """One page of a payload, as `Session.read` gives it: `lines`, `grep`, `query`, `max_chars`, a `cursor`."""
        if self._session is None:
            raise InvalidArgument("payloads are read with a session", hint="open the transcript with one")
        if isinstance(target, ArtifactRef):
            return self._session.store.session(target.session).read(target.pointer, **request)
        return self._session.read(target, **request)

    def _from_the_end(self, start: int | None, stop: int | None, known: Format) -> tuple[int, int, int | None]:
        """Where to begin, how many messages to pass over there, and where to stop, for a slice with negative bounds."""
        with self._reading() as (handle, size):
            if start is not None and start >= 0:
                last = self._message_start(handle, size, -(stop or 0), known)[0]
                return 0, start, last
            first, over = self._message_start(handle, size, -(start or 0), known) if start is not None else (0, 0)
            if stop is None:
                return first, over, None
            if stop < 0:
                return first, over, self._message_start(handle, size, -stop, known)[0]
        raise InvalidArgument("a slice from the end to a number from the start needs all of it", hint="list them first")

    def _message_start(self, handle: int, size: int, wanted: int, known: Format) -> tuple[int, int]:
        """Where the line of the n-th message from the end begins, and how many of its messages come before."""
        end = size
        if not wanted:
            return size, 0
        for begin in starts_backwards(handle, size):
            data = b"".join(piece for _, piece in lines_between(handle, begin, end))
            count = sum(1 for _ in self._inside(Line(begin, data), known))
            if count >= wanted:
                return begin, count - wanted
            wanted, end = wanted - count, begin
        return 0, 0

    def _inside(self, line: Line, known: Format) -> Iterator[Message]:
        value = self._value(line)
        if value is not None:
            yield from (message for _, message in known.messages(value))

    def _value(self, line: Line) -> Any:
        value = _parsed(line.data)
        if value is None and line.data.strip():
            is_torn = not line.data.endswith(b"\n")
            said = "the last line is not finished" if is_torn else "this line is no JSON"
            self._note("torn" if is_torn else "broken", line.offset, said)
        return value

    def _in_mode(self, offset: int, data: bytes, mode: Mode, restorer: Restorer | None) -> bytes:
        if mode == "stored":
            return data
        if restorer is None:
            return bare(data)
        done = whole(data, restorer.fetch, missing=restorer.missing)
        for ref, error in restorer.taken():
            self._note("damaged" if error.code == "damaged" else "missing", offset, str(error), ref.pointer)
        return done

    def _restorer(self, mode: Mode) -> Restorer | None:
        if mode not in ("stored", "stubs", "whole"):
            raise InvalidArgument(f"no mode is called {clip(str(mode))}", hint="stored, stubs or whole")
        if mode != "whole":
            return None
        if self._session is None:
            raise InvalidArgument("whole lines are read with a session", hint="open the transcript with one")
        return Restorer(self._session)

    # What both need

    def _found_layout(self) -> Layout:
        """What the file is. Where its first lines do not tell, it is asked again when it has grown."""
        if self._layout.format is not None:
            return self._layout
        try:
            with self._reading() as (handle, size):
                if size > 2 * self._looked_at:
                    with opened(handle) as file:
                        self._layout, self._looked_at = layout_of(file), size
        except NotFound:
            pass
        return self._layout

    def _writing_format(self, lines: list[bytes]) -> Format:
        layout = self._found_layout()
        if layout.is_document:
            raise InvalidArgument(
                f"{clip(self.path.name)} is one JSON document: nothing can be appended", hint="use a file of JSON lines"
            )
        found = self._given or layout.format
        return found or detect([_parsed(one) for one in lines[:200]]) or PLAIN

    @contextmanager
    def _reading(self) -> Iterator[tuple[int, int]]:
        """The file that is at the path now, and its size: what comes after is for the next time."""
        try:
            handle = os.open(self.path, _READ)
        except FileNotFoundError:
            raise NotFound(f"there is no transcript {clip(self.path.name)}", hint="append to it first") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise InvalidArgument(f"{clip(self.path.name)} is a link", hint="name the file itself") from None
            raise storage_error(error, "reading a transcript") from error
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode):
                raise InvalidArgument(f"{clip(self.path.name)} is not a file", hint="name a transcript")
            yield handle, info.st_size
        finally:
            os.close(handle)

    def _recover(self, appender: Appender) -> None:
        try:
            torn = appender.recover()
        except StoreUnavailable as error:  # a file that we may only read can still be read
            self._note("torn", 0, str(error))
            return
        if torn is not None:
            where = "left where it is" if torn.kept_in is None else f"moved to {torn.kept_in.name}"
            self._note("torn", torn.offset, f"an unfinished line of {torn.size:,} bytes was {where}")

    def _note(self, kind: str, offset: int, message: str, pointer: str | None = None) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.setdefault((kind, offset, pointer), Problem(kind, offset, message, pointer))


def _named(given: Format | str | None) -> Format | None:
    if given is None or isinstance(given, Format):
        return given
    if given not in FORMATS:
        raise InvalidArgument(f"no format is called {clip(given)}", hint="one of: " + ", ".join(FORMATS))
    return FORMATS[given]


def _offset(handle: int, size: int, number: int | None, default: int) -> int:
    """Where the line of a number begins, as in a slice."""
    if number is None:
        return default
    if number < 0:
        return next(islice(starts_backwards(handle, size), -number - 1, None), 0)
    return next((begin for begin, _ in islice(lines_between(handle, 0, size), number, None)), size)


def _parsed(data: bytes) -> Any:
    try:
        found = parse(data.decode())
    except UnicodeDecodeError:
        return None
    return found[0] if found is not None else None
