"""The gateway as an ASGI application: it takes requests, relays them to the provider, and streams
the answers back.

`LocalServer` has checked Host and Origin before; the token is checked here. Upstream addresses come
only from the settings. Credentials pass through; they never appear in a record, log or error.
Anything that is not a request for an answer passes as bytes, in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

from msgspec import Raw
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from coatcheck.checks import one_of, valid, whole
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.externalize import Policy
from coatcheck.gateway.api import (
    Api,
    ClientRequest,
    LoopStep,
    Merger,
    Unreadable,
    digest,
    fields_of,
    raw_of,
    text_field,
    value_of,
)
from coatcheck.gateway.chat_api import ChatApi
from coatcheck.gateway.conversations import Origin, Sessions
from coatcheck.gateway.ledger import LIFE, Ledger, entry_key
from coatcheck.gateway.messages_api import MessagesApi
from coatcheck.gateway.own_tools import run_calls
from coatcheck.gateway.responses_api import ResponsesApi
from coatcheck.gateway.sending import MODES, Mode, RefusedRequest, Sender, readable
from coatcheck.gateway.upstream import (
    CODING_ERRORS,
    Content,
    HeaderList,
    ProviderAnswer,
    ProviderClient,
    ProviderFailure,
    decoder,
)
from coatcheck.gateway.watching import Exchange, Watcher
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.limits import Busy, Pace, Shares
from coatcheck.http.serving import is_same, is_same_user, prove
from coatcheck.ids import clip
from coatcheck.lanes import in_long_thread, in_thread
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.store import Store

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ANTHROPIC: Final = "https://api.anthropic.com"
OPENAI: Final = "https://api.openai.com"
TOKEN: Final = "COATCHECK_GATEWAY_TOKEN"
_MIB: Final = 1 << 20
_HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_NOT_SENT: Final = _HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
_OF_BODY: Final = frozenset({b"content-length", b"content-encoding"})
_OWN: Final = b"x-coatcheck-"
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"})
_RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_ATTEMPTS: Final = 3
_PAUSE: Final = 0.2  # seconds before a connection is tried again
_SESSION_NAME: Final = re.compile(r"[\w.:@+=-]{1,200}", re.ASCII)
_UNNAMED: Final = "conversation-"
_RESPONSES: Final = "coatcheck:responses"  # the session that knows the sessions of responses
_RESERVED: Final = ("coatcheck:", "transcript:", "ledger:")
_PATH_PART: Final = re.compile(r"/(s|t)/([^/]{1,300})(?=/|$)")
_LOG: Final = logging.getLogger("coatcheck")
_COPIES: Final = 5  # copies of a body in memory while it is read
_BODIES: Final = 12  # bodies of the largest size that are in memory at once, with their copies
_LAST: Final = (
    "[This was the last read in this answer. Answer with what you have; "
    "you can read on in the next turn.]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway runs. `anthropic` and `openai` are the providers' addresses, without `/v1`.

    `session` is the session of all requests that name none. `token` must be in each request, in the
    header `x-coatcheck-token` or in the path (`/t/TOKEN/v1/…`). `policy` decides about results; the
    default comes from the store's settings. `max_body` is the largest body that is read, in bytes.
    `ping` is in seconds; an answer has at most `max_steps` steps."""

    mode: Mode = "observe"
    anthropic: str = ANTHROPIC
    openai: str = OPENAI
    session: str | None = None
    token: str | None = field(default=None, repr=False)
    trusts_user: bool = False
    """Whether programs of the same user need no token. Only on Linux, where the server can tell
    them."""
    policy: Policy | None = None
    max_body: int = 64 * _MIB
    ping: float = 15.0
    max_steps: int = 8
    max_wait: float = 60.0
    """Maximum number of seconds that a step waits for an overloaded provider."""
    body_timeout: float = 60.0
    """Seconds that a client has for each megabyte of its body, and for the rest."""
    proxy: str | None = None
    """Address of an HTTP proxy to the providers. Proxies in the environment are ignored."""
    records: bool = True
    """Whether transcripts and figures are recorded."""

    def __post_init__(self) -> None:
        one_of(self.mode, "mode", MODES)
        whole(self.max_body, "max_body", least=1)
        whole(self.max_steps, "max_steps", least=1)
        for name in ("anthropic", "openai"):
            url = urlsplit(getattr(self, name))
            is_address = (
                url.scheme in ("http", "https")
                and bool(url.hostname)
                and not url.query
                and not url.fragment
            )
            valid(
                is_address and url.username is None,
                getattr(self, name),
                name,
                "an address, e.g. https://host",
            )
        if self.session is not None:
            _check_session(self.session)


def _check_session(name: str) -> str:
    if not _SESSION_NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise InvalidArgument(
            f"invalid session {clip(name, 80)}",
            hint="use up to 200 letters, digits and any of _.:@+=- for its name",
        )
    return name


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
        self.memory = Shares(_BODIES * self.settings.max_body, "memory for large bodies")
        self._tenants: dict[str | None, _Tenant] = {None: _Tenant(store, self.settings)}
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
            with self.watcher.running():
                await _Call(self, scope, receive, send).run()

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

    def likely_api(self, path: str, headers: Mapping[bytes, bytes]) -> Api:
        """Return the API of a path, or the one that the headers suggest: for errors, and for the
        address."""
        is_anthropic = b"anthropic-version" in headers or b"x-api-key" in headers
        return self.api_of(path) or self._apis["/messages" if is_anthropic else "/chat/completions"]

    def address(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """Return the provider's address for a path."""
        api = self.likely_api(path, headers)
        return (
            self.settings.anthropic if api.name == "anthropic" else self.settings.openai
        ).rstrip("/")

    def tenant(self, name: str | None) -> _Tenant:
        """Return what belongs to a tenant; a name of None means the store itself. Its store is
        opened once."""
        found = self._tenants.get(name)
        if found is None:
            store = self._store if name is None else self._store.tenant(name)
            found = self._tenants.setdefault(name, _Tenant(store, self.settings))
        return found

    def metrics(self) -> tuple[bytes, str]:
        """Return the figures for Prometheus, and their media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Tenant:
    """What belongs to one tenant: its store, its open sessions, and what was sent for them."""

    def __init__(self, store: Store, settings: GatewaySettings) -> None:
        self._store = store
        self.sender = Sender(mode=settings.mode, policy=settings.policy)
        self.sessions = Sessions(store)

    def origin_of(self, response_id: str, default: Origin) -> Origin:
        """Return the origin of an earlier response to the same client, which named no session."""
        key = digest("session", default.owner, response_id)
        try:
            found = self._responses().find([key]).get(key)
        except CoatcheckError:
            return default
        return default if found is None else replace(default, name=str(value_of(found["session"])))

    def remember(self, response_id: str, origin: Origin) -> None:
        """Note the origin of a response."""
        self._responses().write(
            digest("session", origin.owner, response_id), {"session": origin.name}
        )

    def _responses(self) -> Ledger:
        return Ledger(self._store.session(_RESPONSES, ttl=LIFE))


class _Over(Exception):
    """Nothing more is sent: the client has left, or its answer has ended with an error."""


class _Call:
    """One client request."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway = gateway
        self._settings = gateway.settings
        self._scope = scope
        self._receive = receive
        self._send_event = send
        self._headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), value)
        self._path = scope.get("path", "/")
        self._raw_path = (
            bytes(scope.get("raw_path") or self._path.encode()).partition(b"?")[0].decode("latin-1")
        )
        self._named: dict[str, str] = {}
        self._access: Access | None = None
        self.tenant = gateway.tenant(None)
        self.origin = Origin("gateway")
        self._is_begun = False
        self._started = time.time()
        self._held = 0
        """Bytes of `Gateway.memory` that this request holds."""

    # Who may do what

    async def run(self) -> None:
        try:
            self._take_prefixes()
            refused = self._refused()
            if refused is not None:
                await self._fail(*refused)
                return
            if self._path in ("", "/", "/healthz") and self._scope["method"] in ("GET", "HEAD"):
                await self.whole(200, b"ok\n", [(b"content-type", b"text/plain")])
                return
            if self._path == "/metrics" and self._scope["method"] == "GET":
                text, media_type = await in_thread(self.gateway.metrics)
                await self.whole(
                    200,
                    text,
                    [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")],
                )
                return
            if self._header(b"upgrade").lower() == "websocket":
                await self._fail(426, "WebSocket is not supported by this gateway; use HTTP")
                return
            api = self.gateway.api_of(self._path)
            if api is None or self._scope["method"] != "POST":
                await self._relay_stream()
            else:
                await self._answer(api)
        except _Over:
            pass
        except RefusedRequest as refusal:
            await self._fail(refusal.status, refusal.message, refusal.code)
        except Busy as busy:
            await self._fail(429 if busy.is_own else 503, f"{busy}; {busy.hint}", retry_after="5")
        except LimitExceeded as error:
            await self._fail(413, str(error))
        except CoatcheckError as error:
            await self._fail(400 if isinstance(error, InvalidArgument) else 503, mask(str(error)))
        except ProviderFailure as error:
            await self._fail(502, f"the provider cannot be reached: {error}")
        finally:
            await self._hold(0)

    def _take_prefixes(self) -> None:
        """Take the session and the token from the beginning of the path."""
        while (found := _PATH_PART.match(self._raw_path)) is not None:
            self._named[found[1]] = found[2]
            self._raw_path = self._raw_path[found.end() :] or "/"
            self._path = self._raw_path

    def _refused(self) -> tuple[int, str] | None:
        given = self._header(b"x-coatcheck-token") or self._named.get("t")
        if self.gateway.keyring is not None:
            self._access = self.gateway.keyring.find(given)
            if self._access is None:
                return 401, "the gateway's token is missing or wrong; send it as x-coatcheck-token"
            if not self._access.allows("metrics" if self._path == "/metrics" else "write"):
                return 403, "this token does not allow that"
        elif self._settings.token is not None and not self._has_access(given, self._settings.token):
            return (
                401,
                (
                    "the gateway's token is missing or wrong; it is part of the address that the "
                    "gateway prints"
                ),
            )
        prove(self._scope)
        return None

    def _has_access(self, given: str | None, token: str) -> bool:
        """Whether a request has the token, or needs none since a program of this user sent it."""
        if given or not self._settings.trusts_user:
            return is_same(given, token)
        return is_same_user(self._scope["client"], self._scope["server"])

    def _header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1").strip()

    def _origin(self, request: ClientRequest) -> Origin:
        """Return where a request belongs: the session that the client names, else the one by which
        it is known, within the range of its token."""
        named = (
            self._header(b"x-coatcheck-session") or self._named.get("s") or self._settings.session
        )
        if named:
            if not self._may_use(_check_session(named)):
                assert self._access is not None
                raise RefusedRequest(403, f"this token opens only sessions {self._access.limits}")
            return Origin(named)
        found = self._found_origin(request)
        start = self._access.sessions if self._access is not None else ""
        if not start:
            return found
        parent = None if found.parent is None else _safe(start + found.parent, start)
        return replace(found, name=_safe(start + found.name, start), parent=parent)

    def _may_use(self, session_id: str) -> bool:
        return self._access is None or self._access.covers(session_id)

    def _found_origin(self, request: ClientRequest) -> Origin:
        """Return the session by which a client is known, and its parent."""
        header = self._header
        for start, main, own, parent in (
            (
                "claude-code-",
                b"x-claude-code-session-id",
                b"x-claude-code-agent-id",
                b"x-claude-code-parent-agent-id",
            ),
            ("codex-", b"session-id", b"thread-id", b"x-codex-parent-thread-id"),
            ("codex-", b"session_id", b"thread_id", b"x-codex-parent-thread-id"),
        ):
            if main_id := header(main):
                child = header(own)
                if not child or child == main_id:
                    return Origin(_safe(start + main_id))
                above = header(parent)
                whose = f"{main_id}-{above}" if above and above != main_id else main_id
                return Origin(_safe(f"{start}{main_id}-{child}"), _safe(start + whose))
        owner = self._owner()
        if (
            "conversation" in request.top
        ):  # the provider keeps it, and its id separates it from others
            name = digest("conversation", owner, str(value_of(request.top["conversation"])))
            return Origin(_UNNAMED + name[:32])
        if key := text_field(
            request.top, "prompt_cache_key"
        ):  # often one key for all users of an application
            return Origin(_safe(f"key-{key}"), owner=owner)
        return Origin(_UNNAMED + digest(owner, request.first)[:32], owner=owner)

    def _owner(self) -> str:
        """Return the digest of the credentials in this request: the gateway's token by its name,
        and what the client sends to the provider."""
        token = self._access.name if self._access is not None else ""
        sent = [
            (name.lower(), value)
            for name, value in self._scope["headers"]
            if name.lower() in _CREDENTIALS
        ]
        return digest(
            "owner", token, *(part.decode("latin-1") for pair in sorted(sent) for part in pair)
        )

    # Answers

    async def _answer(self, api: Api) -> None:
        try:
            await self._hold(_COPIES * self._declared_size())
        except Busy:
            if self._settings.mode != "observe":
                raise
            await self._relay_stream()
            return
        body = await self._body()
        try:
            plain = await self._plain(body)
        except (RefusedRequest, Busy):
            if self._settings.mode != "observe":
                raise
            await self._relay(body)
            return
        exchange = await in_thread(self._prepared, api, plain)
        if self._held:
            await self._hold(min(self._held, 2 * len(plain)))  # as it came, and as it is sent
        if exchange is None or exchange.outgoing.body is plain:
            await self._relay(body, exchange)
        elif exchange.is_count or not exchange.outgoing.own:
            await self._relay(None, exchange)
        else:
            await _Answering(self, exchange).run()

    def _prepared(self, api: Api, plain: bytes) -> Exchange | None:
        """Return a request with its session and what is sent for it; None if the body passes
        unchanged and unrecorded."""
        request = readable(api, plain)
        if request is None:
            return None
        if api.name == "anthropic" and "thread" in request.top and self._settings.mode != "observe":
            message = "threads are not supported by this gateway; send the messages"
            raise RefusedRequest(400, message, code="thread_unsupported_request")
        try:
            origin = self._origin(request)
            if self._settings.mode == "observe" and not self._settings.records:
                return None
            return self._exchange(api, request, plain, origin)
        except Unreadable:  # a part of the request other than its messages
            return None

    def _exchange(
        self, api: Api, request: ClientRequest, plain: bytes, origin: Origin
    ) -> Exchange | None:
        """Return a request with what is sent for it. If the store fails, a conversation that was
        never changed passes unrecorded: None."""
        before = text_field(request.top, "previous_response_id") if origin.owner else ""
        try:
            whose = self._access.tenant if self._access is not None else None
            tenant = self.tenant = self.gateway.tenant(whose)
        except CoatcheckError as error:
            if request.has_answers and self._settings.mode != "observe":
                raise RefusedRequest(
                    503, f"the gateway cannot use its store: {mask(error.message)}"
                ) from error
            return None
        if before:
            earlier = tenant.origin_of(before, origin)
            origin = earlier if self._may_use(earlier.name) else origin
        self.origin = origin
        is_count = not self._path.rstrip("/").endswith(("/messages", "/completions", "/responses"))
        outgoing = tenant.sender.outgoing(
            api, request, plain, origin, tenant.sessions, is_count=is_count
        )
        if outgoing.home is not None:
            return Exchange(api, outgoing.home.session, outgoing, self._started, is_count=is_count)
        try:
            session = tenant.sessions.open(origin.name, origin.parent)
        except CoatcheckError:  # e.g. on a full disk
            return None
        return Exchange(api, session, outgoing, self._started, is_count=is_count)

    def _declared_size(self) -> int:
        """Return the size of a large body, 0 if the body is small or its size is not known yet."""
        declared = self._header(b"content-length")
        size = int(declared) if declared.isdecimal() else 0
        if size > self._settings.max_body:
            raise _too_large(self._settings.max_body)
        return size if size > _MIB else 0

    async def _hold(self, size: int) -> None:
        """Hold this many bytes of the memory for large bodies, instead of those that were held
        before. Waits only if they are more; then it holds none meanwhile, so that requests cannot
        block one another. Raises `Busy`."""
        memory, tenant = self.gateway.memory, None if self._access is None else self._access.tenant
        if size <= self._held:
            memory.release(tenant, self._held - size)
        else:
            memory.release(tenant, self._held)
            self._held = 0
            await memory.take(tenant, size)
        self._held = size

    async def _body(self) -> bytes:
        """Read the body of the request."""
        most, seconds = self._settings.max_body, self._settings.body_timeout
        pace = Pace(seconds)
        parts: list[bytes] = []
        size = 0
        is_complete = False
        while not is_complete:
            try:
                event = await pace.next(self._receive)
            except TimeoutError:
                message = (
                    f"the request body came too slowly; each MiB must arrive within {seconds:g} s"
                )
                raise RefusedRequest(408, message) from None
            if event["type"] == "http.disconnect":
                raise _Over
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if size > _MIB and not self._held:  # its length is not declared
                await self._hold(_COPIES * most)
            is_complete = not event.get("more_body")
        return b"".join(parts)

    async def _plain(self, body: bytes) -> bytes:
        """Return the body without its content coding. A large one waits for room in memory."""
        coding, limit = self._header(b"content-encoding").lower(), self._settings.max_body
        if coding in ("", "identity"):
            return body
        if decoder(coding) is None:
            raise RefusedRequest(
                415,
                f"the content coding {clip(coding, 20)} is not supported; use gzip, zstd or none",
            )
        size = min(limit, _MIB)
        data = _decoded(body, coding, size)
        while data is None and size < limit:
            size = min(limit, 8 * size)
            await self._hold(_COPIES * max(size, len(body)))
            data = await in_long_thread(_decoded, body, coding, size)
        if data is None:
            raise _too_large(limit)
        return data

    # Relaying

    def _request_headers(self, *, is_plain: bool) -> HeaderList:
        """Return the headers for the provider: all except those of this connection and ours. With
        `is_plain`, the body is no longer encoded."""
        listed = {one.strip().lower() for one in self._headers.get(b"connection", b"").split(b",")}
        dropped = _NOT_SENT | listed | ({b"content-encoding"} if is_plain else set())
        kept = [
            (name, value)
            for name, value in self._scope["headers"]
            if name.lower() not in dropped and not name.lower().startswith(_OWN)
        ]
        return [*kept, (b"accept-encoding", b"identity")]

    async def opened(self, content: Content, *, is_plain: bool) -> ProviderAnswer:
        """Send a request to the provider, and return the answer with its body unread."""
        query = self._scope.get("query_string", b"").decode("latin-1")
        target = self._raw_path + (f"?{query}" if query else "")
        headers = self._request_headers(is_plain=is_plain)
        if not isinstance(content, bytes):
            headers += [
                (b"content-length", value)
                for value in [self._headers.get(b"content-length")]
                if value
            ]
        send, address = self.gateway.client.send, self.gateway.address(self._path, self._headers)
        try:
            return await send(self._scope["method"], address, target, headers, content)
        except ProviderFailure as failure:
            if not failure.is_lost or not isinstance(content, bytes):
                raise
            return await send(self._scope["method"], address, target, headers, content)
        except ValueError as error:
            raise RefusedRequest(
                400, "the path or a header of the request cannot be forwarded"
            ) from error

    async def _relay_stream(self) -> None:
        """Relay a request as bytes, without parsing it."""
        has_body = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        is_read, has_left = asyncio.Event(), False

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal has_left
            try:
                while True:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        has_left = True
                        raise _Over
                    yield event.get("body", b"")
                    if not event.get("more_body"):
                        return
            finally:
                is_read.set()

        try:
            if has_body:
                response = await self.opened(chunks(), is_plain=False)
            else:
                await self._receive()
                is_read.set()
                response = await self.opened(b"", is_plain=False)
        except ProviderFailure:
            if has_left:
                raise _Over from None
            raise
        async with self.leaving(is_read):
            await self.pass_on(response, None)

    async def _relay(self, body: bytes | None, exchange: Exchange | None = None) -> None:
        """Relay a request whose body was read, and note the exchange. Without `body`, the
        exchange's body is sent."""
        async with self.leaving():
            if body is not None:
                response, read = await self.opened(body, is_plain=False), None
            else:
                assert exchange is not None
                response, read = await self.opened_bound(exchange)
            await self.pass_on(response, exchange, read)

    async def opened_bound(self, exchange: Exchange) -> tuple[ProviderAnswer, bytes | None]:
        """Send a request of an adopted conversation. If the provider refuses thinking because it is
        bound to another history (the client changed its own), send the request again without it.
        Return the response, and its body if that was read."""
        api, outgoing, attempt = exchange.api, exchange.outgoing, 1
        while (
            response := await self.opened(outgoing.body, is_plain=True)
        ).status == 400 and api.binds_thinking:
            read = b"".join([chunk async for chunk in response.chunks()])
            response.close()
            recovered = self.tenant.sender.recovered
            if attempt == _ATTEMPTS or not await in_thread(
                recovered, api, outgoing, exchange.session, read
            ):
                return response, read
            attempt += 1
        return response, None

    async def pass_on(
        self, response: ProviderAnswer, exchange: Exchange | None, read: bytes | None = None
    ) -> None:
        """Pass a response on. `read` is its body, if that was read already."""
        kept: list[bytes] = []
        try:
            await self.begin(response, is_raw=True)
            async for chunk in response.chunks() if read is None else _once(read):
                await self.send(chunk)
                if exchange is not None:
                    kept.append(chunk)
            await self.end()
        except ProviderFailure:
            if not self._is_begun:
                raise
            raise _Broken from None  # the client must see that the answer is not complete
        finally:
            response.close()
            if exchange is not None:
                self.gateway.watcher.note(
                    exchange, response.status, response.header("content-type"), b"".join(kept)
                )

    @contextlib.asynccontextmanager
    async def leaving(self, is_read: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Cancel what runs inside when the client leaves. `is_read` is set once the body of the
        request has been read: the provider may answer earlier."""
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        async def listen() -> None:
            nonlocal has_left
            if is_read is not None:
                await is_read.wait()
            while (await self._receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        listener = asyncio.create_task(listen())
        try:
            yield
        except asyncio.CancelledError:
            if not has_left:
                raise
            task.uncancel()
            raise _Over from None
        finally:
            listener.cancel()

    # Responses

    async def begin(self, response: ProviderAnswer, *, is_raw: bool) -> None:
        """Begin the response with the status and headers of the provider's response. With `is_raw`,
        its body is passed on unchanged."""
        await self._start(response.status, _headers_of(response, is_raw=is_raw))

    async def _start(self, status: int, headers: HeaderList) -> None:
        self._is_begun = True
        api = self.gateway.api_of(self._path)
        self.gateway.watcher.answers[api.name if api is not None else "other", status] += 1
        await self._send_event(
            {"type": "http.response.start", "status": status, "headers": headers}
        )

    async def send(self, data: bytes) -> None:
        if data:
            await self._send_event({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send_event({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, body: bytes, headers: HeaderList) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self.end(b"" if self._scope["method"] == "HEAD" else body)

    async def _fail(
        self, status: int, message: str, code: str = "", *, retry_after: str = ""
    ) -> None:
        """Answer with an error in the API's own form. If the response has begun, break it off."""
        if self._is_begun:
            raise _Broken
        body = self.gateway.likely_api(self._path, self._headers).error(status, message)
        if code:
            fields = value_of(body)
            fields["error"]["error_code"] = code
            body = bytes(raw_of(fields))
        kind = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        if retry_after:
            kind.append((b"retry-after", retry_after.encode()))
        if status == 413 or retry_after:
            kind.append((b"connection", b"close"))
        await self.whole(status, body, kind)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


class _Broken(ConnectionError):
    """Breaks off a response, so that the server closes the connection."""


class _Answering:
    """One answer in `loop` mode: steps until the model calls none of our tools, or also one of the
    client's."""

    def __init__(self, call: _Call, exchange: Exchange) -> None:
        self._call = call
        self._exchange = exchange
        self._api, self._session, self._outgoing = exchange.api, exchange.session, exchange.outgoing
        self._request = self._outgoing.request
        self._settings = call.gateway.settings
        self._merger: Merger = self._api.merger(self._outgoing.own, self._request)
        self._ledger = Ledger(self._session)
        self._sent = self._outgoing.messages
        self._chain: list[Raw] = []
        self._inside: list[Raw] = []
        self._last: list[Raw] = []
        self._written: set[str] = set()
        self._spent = 0
        self._first: ProviderAnswer | None = None

    async def run(self) -> None:
        try:
            async with self._call.leaving():
                await self._steps()
        finally:
            self._call.gateway.watcher.note_steps(
                self._exchange, self._merger, self._inside, self._last
            )

    async def _steps(self) -> None:
        response = await self._opened_first()
        for left in reversed(range(self._settings.max_steps)):  # further steps that are allowed
            step = await self._step(response)
            self._spent += step.output_tokens
            is_last = left == 0
            goes_on = bool(step.own) and not step.others and step.is_open and not is_last
            more = self._api.settings(self._request, self._spent, is_last=left == 1)
            results = await self._run(step, is_last=left == 1) if step.own else []
            if not goes_on or more is None:
                await self._end(
                    step, results, cut="output" if goes_on else "steps" if is_last else None
                )
                return
            shown = self._merger.next_step()
            self._chain += [*step.messages, *results]
            self._inside = list(self._chain)
            await self._record([self._merger.last_key])
            await self._call.send(shown)
            self._sent = self._api.following(self._request, self._sent, step.messages, results)
            settings = {
                **self._outgoing.settings,
                **more,
                **self._api.chained(self._request, self._merger),
            }
            response = await self._opened(
                self._api.written(self._request, self._sent, self._outgoing.tools, **settings)
            )

    async def _opened_first(self) -> ProviderAnswer:
        """Send the first step. If it is refused, the client gets the provider's own answer."""
        response, read = await self._call.opened_bound(self._exchange)
        self._sent = self._outgoing.messages
        if response.status != 200:
            await self._call.pass_on(response, self._exchange, read)
            raise _Over
        self._first = response
        if self._request.is_streamed:
            await self._call.begin(response, is_raw=False)
        return response

    async def _opened(self, body: bytes) -> ProviderAnswer:
        """Send a further step. Retry if the provider is overloaded."""
        attempt, waited = 0, 0.0
        while True:
            attempt += 1
            try:
                response: ProviderAnswer = await self._while_pinging(
                    self._call.opened(body, is_plain=True)
                )
            except ProviderFailure as error:
                if attempt == _ATTEMPTS:
                    await self._fail(502, f"the provider cannot be reached: {error}")
                await self._while_pinging(asyncio.sleep(_PAUSE * attempt))
                continue
            if response.status == 200:
                return response
            pause = _pause(response, attempt)
            if (
                response.status not in _RETRIED
                or attempt == _ATTEMPTS
                or waited + pause > self._settings.max_wait
            ):
                await self._refused(response)
            response.close()
            waited += pause
            await self._while_pinging(asyncio.sleep(pause))

    async def _refused(self, response: ProviderAnswer) -> NoReturn:
        """Pass on the refusal of a further step: as an event inside a stream, else unchanged."""
        data = await response.read()
        response.close()
        if self._request.is_streamed:
            try:
                fields_of(data)
            except Unreadable:
                await self._fail(response.status, f"the provider answered {response.status}")
            await self._call.end(self._api.wrapped_error(data))
        else:
            await self._call.whole(response.status, data, _headers_of(response))
        raise _Over

    async def _fail(self, status: int, message: str) -> NoReturn:
        """End the answer with an error."""
        if self._request.is_streamed and self._first is not None:
            await self._call.end(self._api.error_event(status, message))
            raise _Over
        raise RefusedRequest(status, message)

    async def _step(self, response: ProviderAnswer) -> LoopStep:
        """Read the answer to a step and show it."""
        merger = self._merger
        try:
            if self._request.is_streamed:
                chunks = aiter(response.plain_chunks())
                while (chunk := await self._while_pinging(anext(chunks, None))) is not None:
                    await self._call.send(merger.feed(chunk))
            else:
                merger.take(await response.read())
        except (
            ProviderFailure,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            if not isinstance(error, ProviderFailure):
                _LOG.warning("the provider's answer cannot be read: %s", type(error).__name__)
            await self._fail(502, "the connection to the provider was lost during the answer")
        finally:
            response.close()
        if merger.has_failed:
            await self._call.end()
            raise _Over
        if not merger.is_complete:
            await self._fail(502, "the provider's answer is incomplete")
        return merger.end_step()

    async def _run(self, step: LoopStep, *, is_last: bool) -> list[Raw]:
        """Run our calls, and return the messages with their results."""
        names, note = self._outgoing.names, _LAST if is_last else ""
        answers = await self._while_pinging(
            in_thread(run_calls, self._session, names, step.own, note)
        )
        return self._api.results(answers)

    async def _end(self, step: LoopStep, results: list[Raw], cut: str | None) -> None:
        """End the answer: the ledger first. Our results wait for the client's."""
        merger = self._merger
        stop = self._api.stops[cut] if cut is not None and results and not step.others else None
        end = merger.finish(stop)
        if results:
            self._inside = [*self._chain, *step.messages, *results]
        else:
            self._last = step.messages
        keys = [merger.last_key, None if step.others or not merger.texts else merger.text_key]
        if merger.steps > 1 or results:
            self._chain += [*step.messages, *results]
            await self._record(keys)
        else:
            await self._note_end(keys)
        links = self._api.links(self._request, merger, self._outgoing.adopted)
        for key, body in links.items():
            await self._link(key, body)
        for key, body in self._api.renamed(self._request, merger, results).items():
            await self._write(key, body)
        if merger.answer_id and links and self._call.origin.owner:
            with contextlib.suppress(CoatcheckError):  # then the next request must name its session
                await in_thread(self._call.tenant.remember, merger.answer_id, self._call.origin)
        if self._request.is_streamed:
            await self._call.end(end)
        else:
            assert self._first is not None
            headers = _headers_of(self._first)
            if merger.steps > 1:
                headers.append((b"x-coatcheck-usage", bytes(raw_of(merger.usages))))
            await self._call.whole(200, end, headers)

    async def _record(self, values: Sequence[str | None]) -> None:
        """Write what was sent for the answer so far, under values that the client was shown."""
        for value in values:
            if value is not None and value not in self._written:
                after = self._merger.after if value == self._merger.last_key else []
                key = entry_key(self._outgoing.prefix, value)
                await self._write(key, {"messages": self._chain, "after": after})
                await self._link(key, {})
                self._written.add(value)

    async def _note_end(self, values: Sequence[str | None]) -> None:
        """Note where the conversation is after an answer that the client has as it is. If that
        fails, the conversation continues in a new session."""
        keys = [entry_key(self._outgoing.prefix, value) for value in values if value is not None]
        if self._outgoing.conversations is None or not keys:
            return
        try:
            await in_thread(self._outgoing.conversations.note, keys, self._session)
        except CoatcheckError as error:
            _LOG.warning("the end of an answer cannot be noted: %s", mask(error.message))

    async def _link(self, key: str, body: Mapping[str, Any]) -> None:
        """Write what the next request looks for first: which conversation it continues, with
        `body`."""
        conversations = self._outgoing.conversations
        if conversations is not None:
            await self._durably(partial(conversations.note, [key], self._session, **body))
        elif body:
            await self._write(key, body)

    async def _write(self, key: str, body: Mapping[str, Any]) -> None:
        await self._durably(partial(self._ledger.write, key, body))

    async def _durably(self, write: Callable[[], object]) -> None:
        """Write to the ledger, or end the answer with an error."""
        try:
            await in_thread(write)
        except CoatcheckError as error:
            _LOG.warning(
                "an answer ends with an error, its ledger cannot be written: %s",
                mask(error.message),
            )
            await self._fail(
                503,
                "the gateway cannot write its ledger, so this answer could not be continued; "
                "try again",
            )

    async def _while_pinging(self, work: Awaitable[Any]) -> Any:
        """Wait for something, and send a ping now and then, so that the client does not give up."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._settings.ping)
                if done:
                    return task.result()
                if self._first is not None and self._request.is_streamed:
                    await self._call.send(self._api.ping)
        finally:
            if not task.done():
                task.cancel()


def _safe(name: str, start: str = "") -> str:
    """Return the session name for a name that a client did not choose as one: the name itself if it
    is valid, else its digest, after the `start` that its token requires."""
    is_name = _SESSION_NAME.fullmatch(name) and not name.startswith(_RESERVED)
    return name if is_name else f"{start}client-{digest(name)[:32]}"


def _decoded(body: bytes, coding: str, limit: int) -> bytes | None:
    """Return a body without its content coding, None if it is larger than the limit."""
    decoding = decoder(coding)
    assert decoding is not None
    try:
        data = decoding.decompress(body, limit + 1)
    except CODING_ERRORS as error:
        raise RefusedRequest(400, f"the body is not valid {coding}") from error
    if len(data) > limit:
        return None
    if not decoding.eof:
        raise RefusedRequest(400, f"the body is not valid {coding}: it is cut off")
    return data


def _too_large(limit: int) -> RefusedRequest:
    return RefusedRequest(
        413, f"the request body is larger than {limit // _MIB} MiB, the limit of this gateway"
    )


def _headers_of(response: ProviderAnswer, *, is_raw: bool = False) -> HeaderList:
    """Return the headers of a provider's response: all except those of the connection and, unless
    its body `is_raw`, those of the body."""
    dropped = _HOP if is_raw else _HOP | _OF_BODY
    return [(name, value) for name, value in response.headers if name.lower() not in dropped]


def _pause(response: ProviderAnswer, attempt: int) -> float:
    """Return how long to wait before a step is sent again, as the provider says."""
    try:
        return max(0.0, float(response.header("retry-after")))
    except ValueError:
        return float(min(8.0, 0.5 * 2**attempt))
