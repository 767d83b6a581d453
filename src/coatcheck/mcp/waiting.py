"""The requests of a client that wait for an answer: for how long yet, and what became of those that wait no more."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from coatcheck.mcp.wire import Id, Message

K = TypeVar("K")
V = TypeVar("V")
_REMEMBERED: Final = 1_000
_TIMED: Final = frozenset(
    {
        "initialize", "server/discover", "ping", "tools/list", "tools/call", "resources/list", "resources/read",
        "resources/templates/list", "resources/subscribe", "resources/unsubscribe", "prompts/list", "prompts/get",
        "completion/complete", "logging/setLevel",
    }
)  # fmt: skip
"""What is answered soon, or tells of progress. Other requests may be meant to stay open."""


@dataclass(slots=True)
class Pending:
    """A request of the client that the other server has not answered yet."""

    method: str
    tool: str | None
    token: object
    first: bool
    meta: object
    until: float


class Waiting:
    """Who waits. Each is answered once: by the other server, or by us, and then by nobody else."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._pending: dict[Id, Pending] = {}
        self._late: OrderedDict[Id, Pending | None] = OrderedDict()  # cancelled, or (None) answered by us
        self._jobs: OrderedDict[str, str | None] = OrderedDict()  # tasks, and the tools that they run
        self._asked: set[Id] = set()  # what the other server wants to know from the client

    def begin(self, message: Message) -> None:
        assert message.id is not None
        params = message.params
        meta, tool = params.get("_meta"), params.get("name") if message.method == "tools/call" else None
        if message.method == "tasks/result":
            tool = self._jobs.get(str(params.get("taskId")))
        self._pending[message.id] = Pending(
            message.method or "",
            tool if isinstance(tool, str) else None,
            meta.get("progressToken") if isinstance(meta, dict) else None,
            params.get("cursor") is None,
            meta,
            time.monotonic() + self._timeout if message.method in _TIMED else math.inf,
        )

    def forget(self, request_id: Id) -> None:
        """It was not sent after all."""
        self._pending.pop(request_id, None)

    def answered(self, request_id: Id) -> tuple[bool, Pending | None]:
        """Whether an answer is wanted, and by whom, as far as we know. One that comes late is, unless we have answered
        in its place."""
        pending = self._pending.pop(request_id, None)
        if pending is None and request_id in self._late:
            pending = self._late.pop(request_id)
            return pending is not None, pending
        return True, pending

    def runs(self, task_id: str, tool: str | None) -> None:
        """A call goes on as a task, whose result will be asked for apart."""
        _keep(self._jobs, task_id, tool)

    def cancelled(self, request_id: Id) -> None:
        """By the client. The answer may come all the same."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            _keep(self._late, request_id, pending)

    def given_up(self, request_id: Id | None) -> list[Id]:
        """Those that no answer will come for: this one, or all where nobody knows which. They are ours to answer."""
        ids = [one for one in self._pending if request_id is None or one == request_id]
        for one in ids:
            del self._pending[one]
            if request_id is None:  # it may have been another's answer that was lost
                _keep(self._late, one, None)
        return ids

    # The clock

    def asked(self, request_id: Id) -> None:
        """The other server waits for the client: time stands still."""
        self._asked.add(request_id)

    def told(self, request_id: Id) -> None:
        self._asked.discard(request_id)

    def progressed(self, token: object) -> None:
        """A sign of life: the time begins anew."""
        for pending in self._pending.values():
            if token is not None and pending.token == token:
                pending.until = time.monotonic() + self._timeout

    def overdue(self) -> Iterator[tuple[Id, Pending]]:
        """Those whose time is over, one after the other. They are ours to answer."""
        now = time.monotonic()
        if self._asked:
            for pending in self._pending.values():
                pending.until = max(pending.until, now + self._timeout)
        for request_id in [one for one, pending in self._pending.items() if pending.until <= now]:
            late = self._pending.pop(request_id, None)  # it may have been answered while we wrote
            if late is not None:
                _keep(self._late, request_id, None)
                yield request_id, late


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)
