"""One client request: what is sent for it, and how the provider's answer is passed on.

A request that is not for an answer, or that cannot be read, passes as bytes in both directions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize import configured
from coatcheck.gateway.adoption import conversation_of, ledger_failure
from coatcheck.gateway.api import Api
from coatcheck.gateway.connection import BrokenOff, ClientLeft, Connection, RefusedRequest
from coatcheck.gateway.conversations import Origin, Sessions
from coatcheck.gateway.loop import Loop
from coatcheck.gateway.origins import origin_of
from coatcheck.gateway.outgoing import Outgoing
from coatcheck.gateway.raw_json import Unreadable, text_field
from coatcheck.gateway.request import Request
from coatcheck.gateway.upstream import Content, ProviderAnswer, ProviderFailure, headers_of
from coatcheck.http.credentials import Access
from coatcheck.http.limits import Busy
from coatcheck.lanes import in_thread
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.gateway.front import Gateway

_RECOVERIES: Final = 2  # times that a request is sent again without refused thinking


class Call:
    """One client request on its way to the provider, and the answer on its way back. `access` is
    what its token allows, None if the gateway has no keyring."""

    def __init__(self, gateway: Gateway, connection: Connection, access: Access | None) -> None:
        self.gateway = gateway
        self.connection = connection
        self.settings = gateway.settings
        self._access = access
        self.origin = Origin("gateway")
        self.sessions: Sessions | None = None

    async def answer(self, api: Api) -> None:
        """Answer a request for an answer of the model."""
        connection, changes = self.connection, self.settings.mode != "observe"
        try:
            await connection.reserve()
        except Busy:
            if changes:
                raise
            await self.relay_stream()
            return
        body = await connection.body()
        try:
            plain = await connection.plain(body)
        except (RefusedRequest, Busy):
            if changes:
                raise
            await self._relay(body)
            return
        outgoing = await in_thread(self._outgoing, api, plain)
        await connection.hold_at_most(2 * len(plain))  # as it came, and as it is sent
        if outgoing is None or outgoing.conversation is None:
            await self._relay(body, outgoing)
        elif outgoing.is_count or not outgoing.own:
            async with connection.leaving():
                response, read = await self.opened_bound(outgoing)
                await self.pass_on(response, outgoing, read)
        else:
            await Loop(self, outgoing).run()

    # What is sent

    def _outgoing(self, api: Api, plain: bytes) -> Outgoing | None:
        """Return what is sent for a request; None if the body passes unchanged and unrecorded.
        Raises `RefusedRequest`."""
        try:
            request = api.read(plain)
        except Unreadable:
            return None
        observes = self.settings.mode == "observe"
        if api.name == "anthropic" and "thread" in request.top and not observes:
            message = "threads are not supported by this gateway; send the messages"
            raise RefusedRequest(400, message, code="thread_unsupported_request")
        try:
            origin = origin_of(self.connection, request, self._access, self.settings.session)
            if observes and not self.settings.records:
                return None
            return self._changed(api, request, plain, origin)
        except Unreadable:  # a part of the request other than its messages
            return None

    def _changed(self, api: Api, request: Request, plain: bytes, origin: Origin) -> Outgoing | None:
        """Return what is sent for a request. If the store fails, a conversation that was never
        changed passes unrecorded: None."""
        try:
            sessions = self.sessions = self.gateway.sessions(self.connection.tenant)
        except CoatcheckError as error:
            if request.has_answers and self.settings.mode != "observe":
                raise RefusedRequest(
                    503, f"the gateway cannot use its store: {mask(error.message)}"
                ) from error
            return None
        before = text_field(request.top, "previous_response_id")
        if before and origin.owner:
            earlier = sessions.origin_of(before, origin)
            if self._access is None or self._access.covers(earlier.name):
                origin = earlier
        self.origin = origin
        path = self.connection.path.rstrip("/")
        is_count = not path.endswith(("/messages", "/completions", "/responses"))
        policy = self.settings.policy or configured(sessions.store.settings)
        mode = self.settings.mode
        conversation = conversation_of(api, request, origin, sessions, mode=mode, policy=policy)
        outgoing = Outgoing(api, request, plain, is_count=is_count)
        if conversation is not None:
            try:
                outgoing.change(conversation, sessions, policy)
            except StoreError as error:
                raise ledger_failure(error) from error
            return outgoing
        try:
            outgoing.session = sessions.open(origin.name, origin.parent)
        except CoatcheckError:  # e.g. on a full disk
            return None
        return outgoing

    # Sending

    async def opened(self, content: Content, *, is_plain: bool) -> ProviderAnswer:
        """Send a request to the provider, and return the answer with its body unread. A connection
        that the provider closed while it was idle is tried once more."""
        connection = self.connection
        headers = connection.forwarded_headers(is_plain=is_plain)
        if not isinstance(content, bytes) and b"content-length" in connection.headers:
            headers.append((b"content-length", connection.headers[b"content-length"]))
        address = self.gateway.address(connection)

        async def sent() -> ProviderAnswer:
            return await self.gateway.client.send(
                connection.method, address, connection.target, headers, content
            )

        try:
            return await sent()
        except ProviderFailure as failure:
            if not failure.is_lost or not isinstance(content, bytes):
                raise
            return await sent()
        except ValueError as error:
            raise RefusedRequest(
                400, "the path or a header of the request cannot be forwarded"
            ) from error

    async def opened_bound(self, outgoing: Outgoing) -> tuple[ProviderAnswer, bytes | None]:
        """Send a request of an adopted conversation. If the provider refuses thinking because it is
        bound to another history (the client changed its own), send the request again without it.
        Return the response, and its body if that was read."""
        for left in itertools.count(_RECOVERIES, -1):
            response = await self.opened(outgoing.body, is_plain=True)
            if response.status != 400 or not outgoing.api.binds_thinking:
                return response, None
            read = b"".join([chunk async for chunk in response.chunks()])
            response.close()
            if left == 0 or not await in_thread(outgoing.leave_out_refused, read):
                return response, read
        raise AssertionError("the last attempt returns")

    async def relay_stream(self) -> None:
        """Relay a request as bytes, without parsing it."""
        connection = self.connection
        headers = connection.headers
        has_body = b"content-length" in headers or b"transfer-encoding" in headers
        is_read, has_left = asyncio.Event(), False

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal has_left
            try:
                while True:
                    event = await connection.receive()
                    if event["type"] == "http.disconnect":
                        has_left = True
                        raise ClientLeft
                    yield event.get("body", b"")
                    if not event.get("more_body"):
                        return
            finally:
                is_read.set()

        try:
            if has_body:
                response = await self.opened(chunks(), is_plain=False)
            else:
                await connection.receive()
                is_read.set()
                response = await self.opened(b"", is_plain=False)
        except ProviderFailure:
            if has_left:
                raise ClientLeft from None
            raise
        async with connection.leaving(is_read):
            await self.pass_on(response)

    async def _relay(self, body: bytes, outgoing: Outgoing | None = None) -> None:
        """Relay a request whose body was read, as it came."""
        async with self.connection.leaving():
            response = await self.opened(body, is_plain=False)
            await self.pass_on(response, outgoing)

    async def pass_on(
        self,
        response: ProviderAnswer,
        outgoing: Outgoing | None = None,
        read: bytes | None = None,
    ) -> None:
        """Pass a response on, and note it if `outgoing` is given. `read` is its body, if that was
        read already."""
        connection, kept = self.connection, list[bytes]()
        try:
            await connection.begin(response.status, headers_of(response, is_raw=True))
            async for chunk in response.chunks() if read is None else _once(read):
                await connection.send(chunk)
                if outgoing is not None:
                    kept.append(chunk)
            await connection.end()
        except ProviderFailure:
            if not connection.is_begun:
                raise
            raise BrokenOff from None
        finally:
            response.close()
            if outgoing is not None:
                media_type = response.header("content-type")
                self.gateway.watcher.note(outgoing, response.status, media_type, b"".join(kept))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
