"""The gateway as an ASGI application: it checks who may send a request, and answers it.

`LocalServer` has checked Host and Origin before; the token is checked here. Upstream addresses come
only from the settings. Credentials pass through; they never appear in a record, log or error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.gateway.api import Api
from coatcheck.gateway.call import Call
from coatcheck.gateway.chat_api import ChatApi
from coatcheck.gateway.connection import (
    BODIES,
    BrokenOff,
    ClientLeft,
    Connection,
    Receive,
    RefusedRequest,
    Scope,
    Send,
)
from coatcheck.gateway.conversations import Sessions
from coatcheck.gateway.messages_api import MessagesApi
from coatcheck.gateway.raw_json import raw_of, value_of
from coatcheck.gateway.responses_api import ResponsesApi
from coatcheck.gateway.settings import GatewaySettings
from coatcheck.gateway.upstream import HeaderList, ProviderClient, ProviderFailure
from coatcheck.gateway.watching import Watcher
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.limits import Busy, Shares
from coatcheck.http.serving import is_same, is_same_user, prove
from coatcheck.lanes import in_thread
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.store import Store

_PLAIN: Final[HeaderList] = [(b"content-type", b"text/plain")]
_ERROR: Final[HeaderList] = [
    (b"content-type", b"application/json"),
    (b"x-content-type-options", b"nosniff"),
]


class Gateway:
    """An ASGI application. It has no state of its own: any other gateway on the same store can take
    the next request.

    With a keyring, each request needs one of its tokens, which names the tenant and the sessions
    that it may use."""

    def __init__(
        self,
        store: Store,
        settings: GatewaySettings | None = None,
        *,
        keyring: Keyring | None = None,
    ) -> None:
        self.settings = settings or GatewaySettings()
        self._store = store
        self.keyring = keyring
        self.watcher = Watcher(store, policy=self.settings.policy, is_enabled=self.settings.records)
        self.client = ProviderClient(proxy=self.settings.proxy)
        self.memory = Shares(BODIES * self.settings.max_body, "memory for large bodies")
        self._sessions: dict[str | None, Sessions] = {None: Sessions(store)}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self.watcher)
        ProcessCollector(registry=self._registry)
        anthropic, chat, responses = MessagesApi(), ChatApi(), ResponsesApi()
        self._apis: dict[str, Api] = {
            "/messages": anthropic, "/messages/count_tokens": anthropic, "/chat/completions": chat,
            "/responses": responses, "/responses/input_tokens": responses,
            "/responses/compact": responses,
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            connection = Connection(
                scope, receive, send, settings=self.settings, memory=self.memory
            )
            connection.began = lambda status: self._count(connection, status)
            with self.watcher.running():
                await self._handle(connection)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.shutdown":
                await self.close()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    async def close(self) -> None:
        """Write what is not recorded yet, and close the connections."""
        await self.watcher.finish()
        await self.client.close()

    def api_of(self, path: str) -> Api | None:
        """Return the API of a path, None if it is relayed as bytes."""
        return self._apis.get(path.removeprefix("/v1").rstrip("/"))

    def likely_api(self, connection: Connection) -> Api:
        """Return the API of a request's path, or the one that its headers suggest: for errors, and
        for the address."""
        headers = connection.headers
        is_anthropic = b"anthropic-version" in headers or b"x-api-key" in headers
        likely = self._apis["/messages" if is_anthropic else "/chat/completions"]
        return self.api_of(connection.path) or likely

    def address(self, connection: Connection) -> str:
        """Return the provider's address for a request."""
        is_anthropic = self.likely_api(connection).name == "anthropic"
        address = self.settings.anthropic if is_anthropic else self.settings.openai
        return address.rstrip("/")

    def sessions(self, tenant: str | None) -> Sessions:
        """Return the sessions of a tenant, whose store is opened once. None means the store
        itself."""
        found = self._sessions.get(tenant)
        if found is None:
            store = self._store if tenant is None else self._store.tenant(tenant)
            found = self._sessions.setdefault(tenant, Sessions(store))
        return found

    def metrics(self) -> tuple[bytes, str]:
        """Return the figures for Prometheus, and their media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    async def _handle(self, connection: Connection) -> None:
        """Answer a request, or send an error in the API's own form."""
        try:
            await self._route(connection)
        except ClientLeft:
            pass
        except RefusedRequest as refusal:
            await self._fail(connection, refusal.status, refusal.message, code=refusal.code)
        except Busy as busy:
            status, message = 429 if busy.is_own else 503, f"{busy}; {busy.hint}"
            await self._fail(connection, status, message, retry_after="5")
        except LimitExceeded as error:
            await self._fail(connection, 413, str(error))
        except CoatcheckError as error:
            status = 400 if isinstance(error, InvalidArgument) else 503
            await self._fail(connection, status, mask(str(error)))
        except ProviderFailure as error:
            await self._fail(connection, 502, f"the provider cannot be reached: {error}")
        finally:
            await connection.hold(0)

    async def _route(self, connection: Connection) -> None:
        path, method = connection.path, connection.method
        access = self._access(connection)
        if path in ("", "/", "/healthz") and method in ("GET", "HEAD"):
            await connection.whole(200, b"ok\n", _PLAIN)
            return
        if path == "/metrics" and method == "GET":
            text, media_type = await in_thread(self.metrics)
            headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")]
            await connection.whole(200, text, headers)
            return
        if connection.header(b"upgrade").lower() == "websocket":
            raise RefusedRequest(426, "WebSocket is not supported by this gateway; use HTTP")
        call = Call(self, connection, access)
        api = self.api_of(path)
        if api is None or method != "POST":
            await call.relay_stream()
        else:
            await call.answer(api)

    def _access(self, connection: Connection) -> Access | None:
        """Return what a request's token allows, None if the gateway has no keyring. Raises
        `RefusedRequest`."""
        access: Access | None = None
        given = connection.header(b"x-coatcheck-token") or connection.named_token
        if self.keyring is not None:
            access = self.keyring.find(given)
            if access is None:
                raise RefusedRequest(
                    401, "the gateway's token is missing or wrong; send it as x-coatcheck-token"
                )
            if not access.allows("metrics" if connection.path == "/metrics" else "write"):
                raise RefusedRequest(403, "this token does not allow that")
            connection.tenant = access.tenant
        elif not self._has_token(connection, given):
            raise RefusedRequest(
                401,
                "the gateway's token is missing or wrong; it is part of the address that the "
                "gateway prints",
            )
        prove(connection.scope)
        return access

    def _has_token(self, connection: Connection, given: str | None) -> bool:
        """Whether a request has the token, or needs none since a program of this user sent it."""
        token = self.settings.token
        if token is None:
            return True
        if given or not self.settings.trusts_user:
            return is_same(given, token)
        return is_same_user(connection.scope["client"], connection.scope["server"])

    def _count(self, connection: Connection, status: int) -> None:
        api = self.api_of(connection.path)
        self.watcher.answers["other" if api is None else api.name, status] += 1

    async def _fail(
        self,
        connection: Connection,
        status: int,
        message: str,
        *,
        code: str = "",
        retry_after: str = "",
    ) -> None:
        """Answer with an error in the API's own form. If the response has begun, break it off."""
        if connection.is_begun:
            raise BrokenOff
        body = self.likely_api(connection).error(status, message)
        if code:
            fields = value_of(body)
            fields["error"]["error_code"] = code
            body = bytes(raw_of(fields))
        headers = list(_ERROR)
        if retry_after:
            headers.append((b"retry-after", retry_after.encode()))
        if status == 413 or retry_after:
            headers.append((b"connection", b"close"))
        await connection.whole(status, body, headers)
