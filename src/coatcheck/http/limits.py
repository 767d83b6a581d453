"""Limits on what clients use while their requests arrive: `Shares` of tenants, and the `Pace` of a
body."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Message, Receive

PATIENCE: Final = 30.0
"""Seconds that a request waits for its share."""
_MIB: Final = 1 << 20


class Busy(Exception):
    """A request waited for its share in vain. `is_own` says that its own tenant uses the share."""

    def __init__(self, what: str, *, is_own: bool) -> None:
        if is_own:
            self.hint = "let some of them finish, then send this request again"
            super().__init__(f"your share of the {what} is in use")
        else:
            self.hint = "send this request again later"
            super().__init__(f"all {what} are in use by others")
        self.is_own = is_own


class Shares:
    """A limited amount of something, such as places for uploads, that tenants share.

    A tenant gets at most half of what the others leave free. So it can never use up everything: the
    next tenant still gets at most half of the rest, and so on. A request that gets nothing waits up
    to `patience` seconds. For one event loop."""

    def __init__(self, total: int, what: str, *, patience: float = PATIENCE) -> None:
        self._total = total
        self._what = what
        self._patience = patience
        self._taken: Counter[str | None] = Counter()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def held(self, tenant: str | None, amount: int = 1) -> AsyncIterator[None]:
        """Take an amount for the time of a context. Raises `Busy`."""
        await self.take(tenant, amount)
        try:
            yield
        finally:
            self.release(tenant, amount)

    async def take(self, tenant: str | None, amount: int = 1) -> None:
        """Wait until a tenant may have this amount, at most half of the total. Raises `Busy`."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._may_take(tenant, amount):
                    await self._released.wait()
        except TimeoutError:
            raise Busy(self._what, is_own=self._taken[tenant] > 0) from None
        self._taken[tenant] += amount

    def release(self, tenant: str | None, amount: int = 1) -> None:
        """Return an amount that a tenant has taken."""
        self._taken[tenant] -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._released.set()
        self._released = asyncio.Event()

    def _may_take(self, tenant: str | None, amount: int) -> bool:
        own = self._taken[tenant]
        others = self._taken.total() - own
        return own + amount <= (self._total - others) // 2


class Pace:
    """The time that a client has for its body: `seconds` at the start, and as much again for each
    megabyte, but never more than `seconds` at once. Only the time that the server spends waiting
    counts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = seconds

    async def next(self, receive: Receive) -> Message:
        """Return the next event of a request. Raises `TimeoutError` if the client was too slow."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(self._left):
            event = await receive()
        earned = self._seconds * len(event.get("body", b"")) / _MIB
        self._left = min(self._seconds, self._left - (clock() - began) + earned)
        return event
