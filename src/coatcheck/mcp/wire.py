"""JSON-RPC messages, one per line; the interface of an upstream server; requests and tasks in
progress.

A message keeps the bytes that it was received as. Unless it is changed it is sent on byte for byte,
so unknown methods, fields and numbers survive. A line over the size limit is not kept: its two ends
usually contain its id and method.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, Protocol, Self

from coatcheck.errors import CODES, CoatcheckError, UpstreamFailed

Id = str | int | float
Raw = bytes | bytearray

MAX_MESSAGE: Final = 64 << 20
METHOD_NOT_FOUND: Final = -32601
FAILED: Final = ("[error", "[no artifact found")
"""How the text begins when one of our tools reports a failure."""

_LARGE: Final = 1 << 16
_END: Final = 4_096
_MAX_ERROR: Final = 2_000
_MAX_PAGES: Final = 1_000
_ID_PREFIX: Final = (
    f"coatcheck-{secrets.token_hex(6)}-"  # of our own requests: unique among clients and proxies
)
_NUMBERS: Final = itertools.count(1)
_MEMBER: Final = rb'\s*"(jsonrpc|id|method)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?)\s*'
_MEMBERS: Final = re.compile(_MEMBER)
_FIRST: Final = re.compile(rb"\s*\{(?:" + _MEMBER + rb",)*")
_LAST: Final = re.compile(rb"(?:," + _MEMBER + rb")+\}\s*$|^\s*\{" + _MEMBER + rb"\}\s*$")


class Message:
    """One message: the bytes of its line, the parsed object, and what is read from it. `params`,
    `meta` and `result` are empty if they are not objects."""

    __slots__ = (
        "body",
        "error_code",
        "id",
        "is_request",
        "is_response",
        "meta",
        "method",
        "params",
        "raw",
        "result",
    )

    def __init__(self, raw: Raw, body: dict[str, Any]) -> None:
        self.raw = raw
        self.body = body
        self.id = id_of(body.get("id"))
        self.method = body["method"] if isinstance(body.get("method"), str) else None
        self.is_request = "method" in body and "id" in body
        self.is_response = "method" not in body and "id" in body
        self.params = _as_dict(body.get("params"))
        self.meta = _as_dict(self.params.get("_meta"))
        self.result = _as_dict(body.get("result"))
        self.error_code: object = _as_dict(body.get("error")).get("code")


class UnparsedLine:
    """A line that was not parsed, because it is too long or not JSON: its size and its two ends.

    Implementations write the id and the method first or last, so the ends usually contain them."""

    def __init__(self, size: int, head: bytes, tail: bytes) -> None:
        self.size = size
        self.head = head
        self.tail = tail
        ends = [found[0] for found in (_LAST.search(tail), _FIRST.match(head)) if found is not None]
        fields = {key: value for end in ends for key, value in _MEMBERS.findall(end)}
        self.id = id_of(_loads_or_none(fields.get(b"id")))
        method = _loads_or_none(fields.get(b"method"))
        self.method = method if isinstance(method, str) else None

    @classmethod
    def of(cls, line: Raw) -> Self:
        return cls(len(line), bytes(line[:_END]), bytes(line[-_END:]))


def _loads_or_none(text: bytes | None) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(text) if text is not None else None
    return None


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def id_of(value: object) -> Id | None:
    """Return `value` if it is a valid JSON-RPC id, else None."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


class LineBuffer:
    """Split a stream of bytes into lines, buffering at most `max_size` bytes."""

    def __init__(self, max_size: int = MAX_MESSAGE) -> None:
        self._max_size = max_size
        self._buffer = bytearray()
        self._size = 0  # of a line over the limit
        self._head = b""

    def feed(self, chunk: bytes) -> Iterator[Raw | UnparsedLine]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if not self._buffer and not self._size and end - start <= self._max_size:
                yield chunk[start:end]
            else:
                self._append(chunk[start:end])
                yield self._take()
            start = end + 1
        if start < len(chunk):
            self._append(chunk[start:] if start else chunk)

    def end(self) -> Iterator[Raw | UnparsedLine]:
        """Yield the rest of a stream that does not end with a newline."""
        if self._buffer or self._size:
            yield self._take()

    def _append(self, piece: bytes) -> None:
        self._buffer += piece
        if self._size:
            self._size += len(piece)
            del self._buffer[:-_END]
        elif len(self._buffer) > self._max_size:
            self._size, self._head = len(self._buffer), bytes(self._buffer[:_END])
            self._buffer = self._buffer[-_END:]

    def _take(self) -> Raw | UnparsedLine:
        line, self._buffer = self._buffer, bytearray()
        if not self._size:
            return line
        found = UnparsedLine(self._size, self._head, bytes(line))
        self._size, self._head = 0, b""
        return found


async def read_lines(
    read: Callable[[], Awaitable[bytes]], max_size: int
) -> AsyncIterator[Raw | UnparsedLine]:
    """Yield the lines of a stream. `read` returns its next bytes, and none at the end."""
    lines = LineBuffer(max_size)
    while chunk := await read():
        for line in lines.feed(chunk):
            yield line
            del line  # free it now: it may be large, and the next may come late
    for line in lines.end():
        yield line


def parse(raw: Raw) -> list[Message]:
    """Parse a line: one message, several if it is a batch, none if it is not JSON-RPC."""
    try:
        value = _loads(raw)
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        return [Message(raw, value)]
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return [Message(encode(one), one) for one in value]
    return []


def _loads(raw: Raw) -> Any:
    if len(raw) >= _LARGE:
        import pydantic_core  # imported only for large messages: it parses without a copy

        try:
            return pydantic_core.from_json(bytes(raw) if isinstance(raw, bytes) else raw)
        except ValueError:  # a lone surrogate, which JSON allows
            pass
    try:
        return json.loads(raw)
    except UnicodeDecodeError:  # not UTF-8: the bytes pass unchanged, we only read them
        return json.loads(raw.decode("utf-8", "replace"))


def encode(body: object) -> bytes:
    """Encode a message as one line, without the newline."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate: valid as a JSON escape, not as UTF-8
        return json.dumps(body, separators=(",", ":")).encode()


def _message(**fields: Any) -> Message:
    body = {"jsonrpc": "2.0", **fields}
    return Message(encode(body), body)


def notification(method: str, params: Mapping[str, Any] | None = None) -> Message:
    return _message(method=method, **({"params": params} if params else {}))


def response(request_id: Id | None, result: dict[str, Any]) -> Message:
    return _message(id=request_id, result=result)


def error_response(request_id: Id | None, number: int, text: str, **data: Any) -> Message:
    return _message(
        id=request_id, error={"code": number, "message": text, **({"data": data} if data else {})}
    )


def failure(request_id: Id | None, error: CoatcheckError) -> Message:
    """Build the response for an error of ours. Its data has the stable code of the error."""
    return error_response(
        request_id, CODES[error.code].mcp, str(error)[:_MAX_ERROR], code=error.code
    )


def rewritten(message: Message, **fields: Any) -> Message:
    """Replace top-level fields of a message."""
    body = {**message.body, **fields}
    return Message(encode(body), body)


class Sink(Protocol):
    """The receiver of an upstream's messages. An upstream reads on only after each call has
    returned."""

    async def message(self, message: Message) -> None: ...

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """No response to this request will come; None if it is not known which."""

    async def ended(self, error: UpstreamFailed) -> None:
        """Nothing more will come."""


class Upstream(Protocol):
    """One server, or several that look like one."""

    async def start(self, sink: Sink) -> None:
        """Raises `UpstreamFailed` if it cannot be started."""

    async def send(self, message: Message) -> None:
        """Send without waiting for the server to read. Raises `UpstreamFailed` if it cannot be
        reached."""

    async def finish(self) -> None:
        """Tell the server that nothing more will be sent. Its remaining responses are delivered,
        then `ended`."""

    async def close(self) -> None:
        """End it within a few seconds, whatever its state."""


def too_large(sender: str, line: UnparsedLine, max_size: int) -> UpstreamFailed:
    text = f"{sender} sent a message of {line.size:,} bytes; the limit is {max_size:,}"
    return UpstreamFailed(text, hint="request less, or raise --max-message")


async def refuse(line: UnparsedLine, error: UpstreamFailed, upstream: Upstream, sink: Sink) -> None:
    """Report that a server's message cannot be passed on: a response to the client, a request to
    the server. Nobody waits for a notification."""
    if line.method is None:
        await sink.unanswered(line.id, error)
        return
    log(str(error))
    if line.id is not None:
        with contextlib.suppress(UpstreamFailed):
            await upstream.send(failure(line.id, error))


async def answer(
    work: Awaitable[Message | None],
    request_id: Id | None,
    what: str,
    send: Callable[[Message], Awaitable[None]] | None,
) -> None:
    """Send the response to a request that `work` returns, if it returns one, or the error that it
    raises. Nobody waits for the answer to a notification or a response: then `send` is None."""
    try:
        found = await work
    except UpstreamFailed as error:
        found = failure(request_id, error)
    except Exception as error:  # noqa: BLE001 - one bad message must not stop the others
        log(f"cannot pass the {what} on: {error!r}")
        found = failure(request_id, CoatcheckError(f"the proxy could not pass the {what} on"))
    if found is not None and send is not None:
        await send(found)


def new_id() -> str:
    """Return an id for a request of our own."""
    return f"{_ID_PREFIX}{next(_NUMBERS)}"


class OwnRequests:
    """Requests to one server whose responses come back here. `label` names the server in errors."""

    def __init__(self, send: Callable[[Message], Awaitable[None]], label: str) -> None:
        self._send = send
        self._label = label
        self._open: dict[Id, asyncio.Future[Message]] = {}

    async def answer(self, message: Message) -> Message:
        """Send a request and return the response, without a timeout. Raises `UpstreamFailed`."""
        assert message.id is not None
        self._open[message.id] = answer = asyncio.Future[Message]()
        try:
            await self._send(message)
            return await answer
        finally:
            self._open.pop(message.id, None)

    async def ask(self, method: str, params: Mapping[str, Any] | None, seconds: float) -> Message:
        """Send a request of our own and return the response. Raises `UpstreamFailed`."""
        try:
            request = _message(id=new_id(), method=method, **({"params": params} if params else {}))
            return await asyncio.wait_for(self.answer(request), seconds)
        except TimeoutError:
            raise UpstreamFailed(
                f"{self._label} did not answer {method} in {seconds:g} seconds"
            ) from None

    async def pages(
        self, method: str, params: Mapping[str, Any], seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pages of a list, until a cursor leads in a circle. Raises `UpstreamFailed`."""
        cursors: list[object] = [None]
        while len(cursors) <= _MAX_PAGES:
            cursor = {"cursor": cursors[-1]} if cursors[-1] else {}
            result = (await self.ask(method, {**params, **cursor}, seconds)).result
            yield result
            following = result.get("nextCursor")
            if not following or following in cursors:
                return
            cursors.append(following)

    def answered(self, message: Message) -> bool:
        """Take a response, and return whether it was to one of these requests."""
        answer = (
            self._open.get(message.id) if message.is_response and message.id is not None else None
        )
        if answer is not None and not answer.done():
            answer.set_result(message)
        return answer is not None

    def fail(self, request_id: Id | None, error: UpstreamFailed) -> bool:
        """Fail a request, or all for None. Return whether it was one of these."""
        for one in [request_id] if request_id is not None else list(self._open):
            answer = self._open.get(one)
            if answer is not None and not answer.done():
                answer.set_exception(error)
        return request_id in self._open


class Tasks:
    """Tasks in progress, those of requests by their ids."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[None]] = set()
        self._requests: dict[Id, asyncio.Task[None]] = {}

    def start(
        self, work: Coroutine[Any, Any, None], request_id: Id | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._all.add(task)
        if request_id is not None:
            self._requests[request_id] = task
        task.add_done_callback(functools.partial(self._done, request_id))
        return task

    def _done(self, request_id: Id | None, task: asyncio.Task[None]) -> None:
        self._all.discard(task)
        if request_id is not None and self._requests.get(request_id) is task:
            del self._requests[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log(f"a message was lost: {error!r}")

    def of(self, request_id: Id | None) -> asyncio.Task[None] | None:
        return self._requests.get(request_id) if request_id is not None else None

    async def wait(self, seconds: float | None = None, *, requests_only: bool = False) -> None:
        """Wait for the tasks, at most `seconds`."""
        if tasks := set(self._requests.values()) if requests_only else self._all.copy():
            await asyncio.wait(tasks, timeout=seconds)

    async def cancel(self) -> None:
        for task in self._all:
            task.cancel()
        await asyncio.gather(*self._all, return_exceptions=True)


def log(text: str) -> None:
    """Write a line to stderr. Servers influence the text and stderr may be a terminal, so it is
    escaped."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    sys.stderr.write(f"coatcheck: {shown}\n")
    sys.stderr.flush()
