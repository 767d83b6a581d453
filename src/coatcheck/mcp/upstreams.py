"""What stands behind a proxy, as the relay sees it: something that takes messages, and a sink for what comes back."""

from __future__ import annotations

import contextlib
from typing import Protocol

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.stdio import say
from coatcheck.mcp.wire import Id, Message, Unread, failure


class Sink(Protocol):
    """Where an upstream delivers. It may take its time: an upstream reads on when it is done."""

    async def message(self, message: Message) -> None: ...

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """No answer to this request will come; None where nobody knows to which one."""

    async def ended(self, error: UpstreamFailed) -> None:
        """Nothing more will come."""


class Upstream(Protocol):
    """One server, or several that look like one."""

    async def start(self, sink: Sink) -> None:
        """Raises `UpstreamFailed` where it cannot be started."""

    async def send(self, message: Message) -> None:
        """Never waits for the server to read. Raises `UpstreamFailed` where it cannot be reached."""

    async def finish(self) -> None:
        """Tell the server that nothing more will be sent. What it still answers is delivered, then `ended`."""

    async def close(self) -> None:
        """End it, within seconds, whatever it does."""


async def refuse(line: Unread, error: UpstreamFailed, upstream: Upstream, sink: Sink) -> None:
    """Tell who waits for it that a server's message cannot be passed on: the client of its answer, or the server itself
    of the answer that its request will not get. Nobody waits for a notification."""
    if line.method is None:
        await sink.unanswered(line.id, error)
        return
    say(str(error))
    if line.id is not None:
        with contextlib.suppress(UpstreamFailed):
            await upstream.send(failure(line.id, error))
