"""One of several servers behind a switchboard: what it can do, and the questions that are open with it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.upstreams import Upstream
from coatcheck.mcp.wire import Id, Message, rewritten

_MARK = f"coatcheck-{secrets.token_hex(6)}-"  # before our own ids: neither a client nor another proxy has such
_NUMBERS = itertools.count(1)


def new_id() -> str:
    """An id that nobody else gives a request."""
    return f"{_MARK}{next(_NUMBERS)}"


class Board(Protocol):
    """Where a server's messages go that are no answers to a question."""

    async def from_server(self, member: Member, message: Message) -> None: ...

    async def unanswered(self, member: Member, request_id: Id | None, error: UpstreamFailed) -> None: ...

    async def lost(self, member: Member, error: UpstreamFailed) -> None: ...


class Member:
    """A server, as a sink for what it sends. `lost` says why it is there no more."""

    def __init__(self, name: str, upstream: Upstream, board: Board) -> None:
        self.name = name
        self.upstream = upstream
        self.lost: UpstreamFailed | None = None
        self.capabilities: Mapping[str, Any] = {}
        self._board = board
        self._asked: dict[Id, asyncio.Future[Message]] = {}

    async def ask(self, method: str, params: Mapping[str, Any] | None, seconds: float) -> Message:
        """A question of our own. Raises `UpstreamFailed`."""
        body = {"jsonrpc": "2.0", "id": new_id(), "method": method, **({"params": params} if params else {})}
        try:
            return await asyncio.wait_for(self.answer(rewritten(Message(b"", body))), seconds)
        except TimeoutError:
            raise UpstreamFailed(f"{self.name} did not answer {method} in {seconds:g} seconds") from None

    async def answer(self, message: Message) -> Message:
        """What it answers to a request, whenever that is. Raises `UpstreamFailed`."""
        assert message.id is not None
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = answer
        try:
            await self.send(message)
            return await answer
        finally:
            self._asked.pop(message.id, None)

    async def send(self, message: Message) -> None:
        if self.lost is not None:
            raise self.lost
        await self.upstream.send(message)

    async def message(self, message: Message) -> None:
        answer = self._asked.get(message.id) if message.is_response and message.id is not None else None
        if answer is None:
            await self._board.from_server(self, message)
        elif not answer.done():
            answer.set_result(message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        for one in [request_id] if request_id is not None else list(self._asked):
            answer = self._asked.get(one)
            if answer is not None and not answer.done():
                answer.set_exception(error)
        if request_id not in self._asked:
            await self._board.unanswered(self, request_id, error)

    async def ended(self, error: UpstreamFailed) -> None:
        self.lost = error
        await self.unanswered(None, error)
        await self._board.lost(self, error)
