"""The gateway as an ASGI application: it takes requests, relays them to the provider, and streams the answers back.

`LocalServer` checks Host and Origin before it; the token is checked here. Upstream addresses come from the settings
alone. Credentials pass through; they are in no record, log or error. Anything that is not a request for an answer
passes as bytes, in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from msgspec import Raw
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from coatcheck.checks import one_of, valid, whole
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.externalize import Policy
from coatcheck.gateway.api import Api, ClientRequest, LoopStep, Merger, Unreadable, digest, raw_of, text_field, value_of
from coatcheck.gateway.chat_api import ChatApi
from coatcheck.gateway.ledger import LIFE, Ledger, NotRemembered, entry_body
from coatcheck.gateway.messages_api import MessagesApi
from coatcheck.gateway.responses_api import ResponsesApi
from coatcheck.gateway.sending import MODES, Mode, Outgoing, OwnTools, RefusedRequest, Sender, readable
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
from coatcheck.http.serving import is_same, prove
from coatcheck.ids import clip
from coatcheck.lanes import in_thread
from coatcheck.messages.cost import BoundedCache
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session
    from coatcheck.store import Store

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ANTHROPIC: Final = "https://api.anthropic.com"
OPENAI: Final = "https://api.openai.com"
TOKEN: Final = "COATCHECK_GATEWAY_TOKEN"
_MIB: Final = 1 << 20
_HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_NOT_SENT: Final = _HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
_OWN: Final = b"x-coatcheck-"
_RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_ATTEMPTS: Final = 3
_PAUSE: Final = 0.2  # seconds before a connection is tried again
_OPENED: Final = 1_024  # sessions that are remembered
_REOPENED: Final = 60.0  # seconds after which a session is opened again
_CALLS: Final = 8  # calls of ours in one step that are answered
_SESSION_NAME: Final = re.compile(r"[\w.:@+=-]{1,200}", re.ASCII)
_UNNAMED: Final = "conversation-"
_RESPONSES: Final = "coatcheck:responses"  # the session that knows the sessions of responses
_RESERVED: Final = ("coatcheck:", "transcript:", "ledger:")
_PATH_PART: Final = re.compile(r"/(s|t)/([^/]{1,300})(?=/|$)")
_LOG: Final = logging.getLogger("coatcheck")
_LAST: Final = "[This was the last read in this answer. Answer with what you have; you can read on in the next turn.]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway runs. `anthropic` and `openai` are the providers' addresses, without `/v1`.

    `session` is the session of all requests that name none. `token` must be in each request, in the header
    `x-coatcheck-token` or in the path (`/t/TOKEN/v1/…`). `policy` decides about results, by default that of the store's
    settings. `max_body` is the largest body that is read, in bytes. `ping` is in seconds; an answer has at most
    `max_steps` steps."""

    mode: Mode = "observe"
    anthropic: str = ANTHROPIC
    openai: str = OPENAI
    session: str | None = None
    token: str | None = field(default=None, repr=False)
    policy: Policy | None = None
    max_body: int = 64 * _MIB
    ping: float = 15.0
    max_steps: int = 8
    max_wait: float = 60.0
    """Seconds that a step waits at most for a provider that is overloaded."""
    body_timeout: float = 60.0
    """Seconds without a byte after which a client that sends its body is given up."""
    proxy: str | None = None
    """Address of an HTTP proxy to the providers. None is taken from the environment."""
    records: bool = True
    """Whether transcripts and figures are recorded."""

    def __post_init__(self) -> None:
        one_of(self.mode, "mode", MODES)
        whole(self.max_body, "max_body", least=1)
        whole(self.max_steps, "max_steps", least=1)
        for name in ("anthropic", "openai"):
            url = urlsplit(getattr(self, name))
            is_address = url.scheme in ("http", "https") and bool(url.hostname) and not url.query and not url.fragment
            valid(is_address and url.username is None, getattr(self, name), name, "an address, e.g. https://host")
        if self.session is not None:
            _check_session(self.session)


def _check_session(name: str) -> str:
    if not _SESSION_NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise InvalidArgument(
            f"invalid session {clip(name, 80)}", hint="use up to 200 letters, digits and any of _.:@+=- for its name"
        )
    return name


class Gateway:
    """An ASGI application. It has no state of its own: any other with the same store can take the next request.

    With a keyring, each request needs one of its tokens, which names the tenant and the sessions that it may use."""

    def __init__(
        self, store: Store, settings: GatewaySettings | None = None, *, keyring: Keyring | None = None
    ) -> None:
        self.settings = settings or GatewaySettings()
        self._store = store
        self.keyring = keyring
        self.watcher = Watcher(store, policy=self.settings.policy, is_enabled=self.settings.records)
        self.client = ProviderClient(proxy=self.settings.proxy)
        self._tenants: dict[str | None, _Tenant] = {None: _Tenant(store, self.settings)}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self.watcher)
        ProcessCollector(registry=self._registry)
        anthropic, chat, responses = MessagesApi(), ChatApi(), ResponsesApi()
        self._apis: dict[str, Api] = {
            "/messages": anthropic, "/messages/count_tokens": anthropic, "/chat/completions": chat,
            "/responses": responses, "/responses/input_tokens": responses, "/responses/compact": responses,
        }  # fmt: skip
        self._errors: dict[bool, Api] = {True: anthropic, False: chat}

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
        """Write what was not recorded yet, and close the connections."""
        await self.watcher.finish()
        await self.client.close()

    def api_of(self, path: str) -> Api | None:
        """Return the API of a path, None if it is relayed as bytes."""
        return self._apis.get(path.removeprefix("/v1").rstrip("/"))

    def error_api(self, path: str, headers: Mapping[bytes, bytes]) -> Api:
        """Return the API whose form an error has."""
        found = self.api_of(path)
        return found or self._errors[b"anthropic-version" in headers or b"x-api-key" in headers]

    def address(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """Return the provider's address for a path."""
        api = self.error_api(path, headers)
        return (self.settings.anthropic if api.name == "anthropic" else self.settings.openai).rstrip("/")

    def tenant(self, name: str | None, *, is_quick: bool = False) -> _Tenant:
        """Return what belongs to a tenant, None for the store itself. Its store is opened once; with `is_quick`, raises
        `NotRemembered` if it is not open."""
        found = self._tenants.get(name)
        if found is None:
            if is_quick:
                raise NotRemembered
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
        self._sessions: BoundedCache[tuple[str, str | None], tuple[float, Session | None]] = BoundedCache(_OPENED)

    def session(self, name: str, parent: str | None, *, is_quick: bool = False) -> Session:
        """Open a session. It lives 30 days after its last use, or longer if it did before. A session that was opened a
        moment ago is used again, so that a request does not wait for what is being written. With `is_quick`, raises
        `NotRemembered` for others."""
        opened, known = self._sessions.get((name, parent), (0.0, None))
        if known is not None and time.monotonic() - opened < _REOPENED:
            return known
        if is_quick:
            raise NotRemembered
        ttl = None if self._store.ttl is None else max(LIFE, self._store.ttl)
        found = self._store.lasting_session(name, parent=parent, ttl=ttl)
        return self._sessions.keep((name, parent), (time.monotonic(), found))[1] or found

    def session_of(self, response_id: str, default: str) -> str:
        """Return the session of an earlier response whose client named none."""
        try:
            key = digest("session", response_id)
            found = Ledger(self._store.session(_RESPONSES, ttl=LIFE)).find([key]).get(key)
            return default if found is None else str(value_of(found["session"]))
        except CoatcheckError:
            return default

    def remember(self, response_id: str, session: Session) -> None:
        """Note the session of a response."""
        key = digest("session", response_id)
        Ledger(self._store.session(_RESPONSES, ttl=LIFE)).write(key, {"session": session.session_id})


class _Left(Exception):
    """The client has closed its connection."""


class _Call:
    """One request of a client."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._scope = scope
        self._receive = receive
        self._send_event = send
        self._headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.lower(), value)
        self._path = scope.get("path", "/")
        self._raw_path = bytes(scope.get("raw_path") or self._path.encode()).partition(b"?")[0].decode("latin-1")
        self._named: dict[str, str] = {}
        self._access: Access | None = None
        self.tenant = gateway.tenant(None)
        self.is_unnamed = False
        self._is_begun = False
        self._started = time.time()

    # Who may do what

    async def run(self) -> None:
        try:
            self._take_prefixes()
            refused = self._refused()
            if refused is not None:
                await self._fail(*refused)
                return
            if self._path in ("", "/", "/healthz") and self._scope["method"] in ("GET", "HEAD"):
                await self._whole(200, b"ok\n", [(b"content-type", b"text/plain")])
                return
            if self._path == "/metrics" and self._scope["method"] == "GET":
                text, media_type = await in_thread(self._gateway.metrics)
                await self._whole(200, text, [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")])
                return
            if self._header(b"upgrade").lower() == "websocket":
                await self._fail(426, "WebSocket is not supported by this gateway; use HTTP")
                return
            api = self._gateway.api_of(self._path)
            if api is None or self._scope["method"] != "POST":
                await self._relay_stream()
            else:
                await self._answer(api)
        except _Left:
            pass
        except RefusedRequest as refusal:
            await self._fail(refusal.status, refusal.message)
        except LimitExceeded as error:
            await self._fail(413, str(error))
        except CoatcheckError as error:
            await self._fail(400 if isinstance(error, InvalidArgument) else 503, mask(str(error)))
        except ProviderFailure as error:
            await self._fail(502, f"the provider cannot be reached: {error}")

    def _take_prefixes(self) -> None:
        """Take the session and the token from the beginning of the path."""
        while (found := _PATH_PART.match(self._raw_path)) is not None:
            self._named[found[1]] = found[2]
            self._raw_path = self._raw_path[found.end() :] or "/"
            self._path = self._raw_path

    def _refused(self) -> tuple[int, str] | None:
        given = self._header(b"x-coatcheck-token") or self._named.get("t")
        if self._gateway.keyring is not None:
            self._access = self._gateway.keyring.find(given)
            if self._access is None:
                return 401, "the token of the gateway is missing or wrong; send it as x-coatcheck-token"
            if not self._access.allows("metrics" if self._path == "/metrics" else "write"):
                return 403, "this token does not allow that"
        elif self._settings.token is not None and not is_same(given, self._settings.token):
            return 401, "the token of the gateway is missing or wrong; it is in the address that it prints"
        prove(self._scope)
        return None

    def _header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1").strip()

    def _session_name(self, request: ClientRequest | None) -> tuple[str, str | None]:
        """Return the session of a request, and its parent: what the client names first, else what it is known by, in
        the range of its token."""
        named = self._header(b"x-coatcheck-session") or self._named.get("s") or self._settings.session
        if named:
            if not self._may_use(_check_session(named)):
                assert self._access is not None
                raise RefusedRequest(403, f"this token opens only sessions {self._access.limits}")
            return named, None
        name, parent = self._found_name(request)
        self.is_unnamed = name.startswith(_UNNAMED)
        start = self._access.sessions if self._access is not None else ""
        return (_safe(start + name, start), parent and _safe(start + parent, start)) if start else (name, parent)

    def _may_use(self, session_id: str) -> bool:
        return self._access is None or self._access.covers(session_id)

    def _found_name(self, request: ClientRequest | None) -> tuple[str, str | None]:
        """Return the session by which a client is known, and its parent."""
        header = self._header
        for start, main, own, parent in (
            ("claude-code-", b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
            ("codex-", b"session-id", b"thread-id", b"x-codex-parent-thread-id"),
            ("codex-", b"session_id", b"thread_id", b"x-codex-parent-thread-id"),
        ):
            if main_id := header(main):
                child = header(own)
                if not child or child == main_id:
                    return _safe(start + main_id), None
                above = header(parent)
                whose = f"{main_id}-{above}" if above and above != main_id else main_id
                return _safe(f"{start}{main_id}-{child}"), _safe(start + whose)
        if request is not None and (key := text_field(request.top, "prompt_cache_key")):
            return _safe(f"key-{key}"), None
        if request is None:
            return "gateway", None
        if "conversation" in request.top:
            return _UNNAMED + digest("conversation", str(value_of(request.top["conversation"])))[:32], None
        return _UNNAMED + request.first[:32], None

    # Answers

    async def _answer(self, api: Api) -> None:
        body = await self._body()
        try:
            plain = self._plain(body)
        except RefusedRequest:
            if self._settings.mode != "observe":
                raise
            await self._relay(api, body, None, None)
            return
        request = readable(api, plain) if len(plain) <= _MIB else None
        if request is None and len(plain) <= _MIB:
            await self._relay(api, body, None, None)
            return
        try:
            prepared = self._prepared(api, plain, request, is_quick=True)
        except NotRemembered:
            prepared = await in_thread(self._prepared, api, plain, request, is_quick=False)
        if prepared is None:
            await self._relay(api, body, None, None)
            return
        is_count = not self._path.rstrip("/").endswith(("/messages", "/completions", "/responses"))
        request, session, outgoing = prepared
        exchange = Exchange(api, session, request, outgoing, self._started, is_count=is_count)
        if outgoing.body is plain:
            await self._relay(api, body, exchange, None)
        elif is_count or not outgoing.own:
            await self._relay(api, outgoing.body, exchange, plain)
        else:
            await _Answering(self, api, request, outgoing, session, exchange).run()

    def _prepared(
        self, api: Api, plain: bytes, read: ClientRequest | None, *, is_quick: bool
    ) -> tuple[ClientRequest, Session, Outgoing] | None:
        """Return the request, its session, and what is sent for it; None if the body passes as it came. `read` is the
        request if it was read already. With `is_quick`, raises `NotRemembered` if this takes long."""
        if read is None and is_quick:
            raise NotRemembered
        request = read or readable(api, plain)
        if request is None:
            return None
        if api.name == "anthropic" and "thread" in request.top and self._settings.mode != "observe":
            raise _unsupported_thread()
        name, parent = self._session_name(request)
        if self._settings.mode == "observe" and not self._settings.records:
            return None
        before = text_field(request.top, "previous_response_id") if self.is_unnamed else ""
        if before and is_quick:
            raise NotRemembered
        try:
            whose = self._access.tenant if self._access is not None else None
            tenant = self.tenant = self._gateway.tenant(whose, is_quick=is_quick)
            if before and self._may_use(found := tenant.session_of(before, name)):
                name = found
            session = tenant.session(name, parent, is_quick=is_quick)
            return request, session, tenant.sender.outgoing(api, request, plain, session, is_quick=is_quick)
        except CoatcheckError as error:
            if request.has_answers and self._settings.mode != "observe":
                raise RefusedRequest(503, f"the gateway cannot use its store: {mask(error.message)}") from error
            return None

    async def _body(self) -> bytes:
        """Read the body of the request."""
        parts: list[bytes] = []
        size = 0
        declared = self._header(b"content-length")
        if declared.isdigit() and int(declared) > self._settings.max_body:
            raise _too_large(self._settings.max_body)
        timeout, clock = self._settings.body_timeout, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(timeout) as limit:
                while True:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise _Left
                    parts.append(event.get("body", b""))
                    size += len(parts[-1])
                    if size > self._settings.max_body:
                        raise _too_large(self._settings.max_body)
                    if not event.get("more_body"):
                        return b"".join(parts)
                    limit.reschedule(clock() + timeout)
        except TimeoutError:
            raise RefusedRequest(408, "the body of the request did not arrive in time") from None

    def _plain(self, body: bytes) -> bytes:
        """Return the body without its content coding."""
        coding = self._header(b"content-encoding").lower()
        if coding in ("", "identity"):
            return body
        try:
            return _decoded(body, coding, self._settings.max_body)
        except (*CODING_ERRORS, EOFError) as error:
            raise RefusedRequest(400, f"the body is not valid {clip(coding, 20)}") from error

    # Relaying

    def request_headers(self, *, is_plain: bool = False) -> HeaderList:
        """Return the headers for the provider: all but those of this connection, and ours. With `is_plain`, the body is
        not encoded any more."""
        listed = {one.strip().lower() for one in self._headers.get(b"connection", b"").split(b",")}
        dropped = _NOT_SENT | listed | ({b"content-encoding"} if is_plain else set())
        kept = [
            (name, value)
            for name, value in self._scope["headers"]
            if name.lower() not in dropped and not name.lower().startswith(_OWN)
        ]
        return [*kept, (b"accept-encoding", b"identity")]

    async def opened(self, content: Content, *, is_plain: bool) -> ProviderAnswer:
        """Send a request to the provider, and return the answer with its body still to read."""
        query = self._scope.get("query_string", b"").decode("latin-1")
        target = self._raw_path + (f"?{query}" if query else "")
        headers = self.request_headers(is_plain=is_plain)
        if not isinstance(content, bytes):
            headers += [(b"content-length", value) for value in [self._headers.get(b"content-length")] if value]
        send, address = self._gateway.client.send, self._gateway.address(self._path, self._headers)
        try:
            return await send(self._scope["method"], address, target, headers, content)
        except ProviderFailure as failure:
            if not failure.is_lost or not isinstance(content, bytes):
                raise
            return await send(self._scope["method"], address, target, headers, content)
        except ValueError as error:
            raise RefusedRequest(400, "the path or a header of the request cannot be sent on") from error

    async def _relay_stream(self) -> None:
        """Pass a request as bytes, without reading it."""
        has_body = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        is_read, has_left = asyncio.Event(), False

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal has_left
            try:
                while True:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        has_left = True
                        raise _Left
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
                raise _Left from None
            raise
        async with self.leaving(is_read):
            await self.pass_on(response, None)

    async def _relay(self, api: Api, body: bytes, exchange: Exchange | None, held: bytes | None) -> None:
        """Pass a request whose body was read, and note the exchange. `held` is the body before it was changed."""
        async with self.leaving():
            if exchange is None or held is None:
                response, read = await self.opened(body, is_plain=held is not None), None
            else:
                response, read = await self.opened_bound(api, exchange.outgoing, exchange.session)
            await self.pass_on(response, exchange, read)

    async def opened_bound(self, api: Api, outgoing: Outgoing, session: Session) -> tuple[ProviderAnswer, bytes | None]:
        """Send a request of an adopted conversation. If the provider refuses thinking that it has bound to another
        history, since the client changed its own, the request is sent again without. Return the response, and its body
        if that was read."""
        attempt = 1
        while (response := await self.opened(outgoing.body, is_plain=True)).status == 400 and api.binds_thinking:
            read = b"".join([chunk async for chunk in response.chunks()])
            response.close()
            sender = self.tenant.sender
            if attempt == _ATTEMPTS or not await in_thread(sender.recovered, api, outgoing, session, read):
                return response, read
            attempt += 1
        return response, None

    async def pass_on(self, response: ProviderAnswer, exchange: Exchange | None, read: bytes | None = None) -> None:
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
                self._gateway.watcher.note(exchange, response.status, response.header("content-type"), b"".join(kept))

    @contextlib.asynccontextmanager
    async def leaving(self, is_read: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Cancel what runs inside when the client leaves. `is_read` is set when the body of the request was read: the
        provider may answer before."""
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
            raise _Left from None
        finally:
            listener.cancel()

    # Responses

    async def begin(self, response: ProviderAnswer, *, is_raw: bool) -> None:
        """Begin the response with the status and the headers of the provider's."""
        dropped = _HOP | (set() if is_raw else {b"content-length", b"content-encoding"})
        headers = [(name, value) for name, value in response.headers if name.lower() not in dropped]
        await self._start(response.status, headers)

    async def _start(self, status: int, headers: HeaderList) -> None:
        self._is_begun = True
        api = self._gateway.api_of(self._path)
        self._gateway.watcher.answers[api.name if api is not None else "other", status] += 1
        await self._send_event({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        if data:
            await self._send_event({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send_event({"type": "http.response.body", "body": data, "more_body": False})

    async def _whole(self, status: int, body: bytes, headers: HeaderList) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self.end(b"" if self._scope["method"] == "HEAD" else body)

    async def whole(self, status: int, body: bytes, response: ProviderAnswer, more: HeaderList) -> None:
        """Answer with a body of ours and the headers of the provider's response."""
        dropped = _HOP | {b"content-length", b"content-encoding"}
        headers = [(name, value) for name, value in response.headers if name.lower() not in dropped]
        await self._whole(status, body, [*headers, *more])

    async def _fail(self, status: int, message: str) -> None:
        """Answer with an error in the API's own form; inside a response, break it off."""
        if self._is_begun:
            raise _Broken
        api = self._gateway.error_api(self._path, self._headers)
        body = api.error(status, message)
        if message == _NO_THREADS:
            fields = value_of(body)
            fields["error"]["error_code"] = "thread_unsupported_request"
            body = bytes(raw_of(fields))
        kind = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        if status == 413:
            kind.append((b"connection", b"close"))
        await self._whole(status, body, kind)

    @property
    def gateway(self) -> Gateway:
        return self._gateway


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


class _Broken(ConnectionError):
    """Ends a response in the middle, so that the server closes the connection."""


_NO_THREADS: Final = "threads are not supported by this gateway; send the messages"


class _Answering:
    """One answer in `loop` mode: steps until the model calls none of our tools, or one of the client's too."""

    def __init__(
        self, call: _Call, api: Api, request: ClientRequest, outgoing: Outgoing, session: Session, exchange: Exchange
    ) -> None:
        self._call = call
        self._api = api
        self._request = request
        self._outgoing = outgoing
        self._session = session
        self._exchange = exchange
        self._settings = call.gateway.settings
        self._merger: Merger = api.merger(outgoing.own, request)
        self._ledger = Ledger(session)
        self._sent = outgoing.messages
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
            self._call.gateway.watcher.note_steps(self._exchange, self._merger, self._inside, self._last)

    async def _steps(self) -> None:
        body = self._outgoing.body
        for number in range(1, self._settings.max_steps + 1):
            response = await self._opened(body, number)
            if response is None:
                return
            step = await self._step(response)
            if step is None:
                return
            self._spent += step.output_tokens
            is_last = number == self._settings.max_steps
            goes_on = bool(step.own) and not step.others and step.is_open and not is_last
            more = self._api.settings(self._request, self._spent, is_last=number + 1 == self._settings.max_steps)
            results = await self._run(step, is_last=number + 1 == self._settings.max_steps) if step.own else []
            if not goes_on or more is None:
                await self._end(step, results, cut="output" if goes_on else "steps" if is_last else None)
                return
            shown = self._merger.next_step()
            self._chain += [*step.messages, *results]
            self._inside = list(self._chain)
            if not await self._record([self._merger.last_key]):
                return
            await self._call.send(shown)
            self._sent = self._api.following(self._request, self._sent, step.messages, results)
            settings = {**self._outgoing.settings, **more, **self._api.chained(self._request, self._merger)}
            body = self._api.written(self._request, self._sent, self._outgoing.tools, **settings)

    async def _opened(self, body: bytes, number: int) -> ProviderAnswer | None:
        """Send a step. The first one is answered as the provider answers it; a later one is tried again if the provider
        is overloaded. None if it has failed, and the client knows."""
        waited, read = 0.0, None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response: ProviderAnswer
                if number == 1:
                    response, read = await self._call.opened_bound(self._api, self._outgoing, self._session)
                    self._sent = self._outgoing.messages
                else:
                    response = await self._while_pinging(self._call.opened(body, is_plain=True))
            except ProviderFailure as error:
                if number == 1:
                    raise
                if attempt < _ATTEMPTS:
                    await self._while_pinging(asyncio.sleep(_PAUSE * attempt))
                    continue
                await self._fail(502, f"the provider cannot be reached: {error}")
                return None
            if response.status == 200:
                if self._first is None:
                    self._first = response
                    if self._request.is_streamed:
                        await self._call.begin(response, is_raw=False)
                return response
            if number == 1:
                await self._call.pass_on(response, self._exchange, read)
                return None
            pause = _pause(response, attempt)
            if response.status not in _RETRIED or attempt == _ATTEMPTS or waited + pause > self._settings.max_wait:
                await self._refused(response)
                return None
            response.close()
            waited += pause
            await self._while_pinging(asyncio.sleep(pause))
        return None

    async def _refused(self, response: ProviderAnswer) -> None:
        """Pass on that a later step was refused: as an event inside a stream, else as it is."""
        data = await response.read()
        response.close()
        if not self._request.is_streamed:
            await self._call.whole(response.status, data, response, [])
            return
        try:
            value_of(data)
            await self._call.end(self._api.wrapped_error(data))
        except Unreadable:
            await self._fail(response.status, f"the provider answered {response.status}")

    async def _fail(self, status: int, message: str) -> None:
        if self._request.is_streamed and self._first is not None:
            await self._call.end(self._api.error_event(status, message))
        else:
            raise RefusedRequest(status, message)

    async def _step(self, response: ProviderAnswer) -> LoopStep | None:
        """Read the answer to a step and show it. None if it broke, and the client knows."""
        merger = self._merger
        try:
            if self._request.is_streamed:
                chunks = aiter(response.plain_chunks())
                while (chunk := await self._while_pinging(anext(chunks, None))) is not None:
                    await self._call.send(merger.feed(chunk))
            else:
                merger.take(await response.read())
        except (ProviderFailure, ValueError, KeyError, TypeError, AttributeError) as error:
            if not isinstance(error, ProviderFailure):
                _LOG.warning("an answer of the provider cannot be read: %s", type(error).__name__)
            await self._fail(502, "the connection to the provider broke in the middle of an answer")
            return None
        finally:
            response.close()
        if merger.has_failed:
            await self._call.end()
            return None
        if not merger.is_complete:
            await self._fail(502, "the provider ended the answer in the middle")
            return None
        return merger.end_step()

    async def _run(self, step: LoopStep, *, is_last: bool) -> list[Raw]:
        """Run our calls, and return the messages with their results."""
        assert self._outgoing.adoption is not None
        tools = OwnTools(self._session, self._outgoing.adoption.names, most=_CALLS)
        answers = await self._while_pinging(in_thread(tools.run, step.own, _LAST if is_last else ""))
        return self._api.results(answers)

    async def _end(self, step: LoopStep, results: list[Raw], cut: str | None) -> None:
        """End the answer: the ledger first. Results of ours wait for those of the client."""
        merger = self._merger
        stop = self._api.stops[cut] if cut is not None and results and not step.others else None
        end = merger.finish(stop)
        if results:
            self._inside = [*self._chain, *step.messages, *results]
        else:
            self._last = step.messages
        if merger.steps > 1 or results:
            self._chain += [*step.messages, *results]
            keys = [merger.last_key, None if step.others or not merger.texts else merger.text_key]
            if not await self._record(keys):
                return
        records = self._api.renamed(self._request, merger, self._outgoing.adopted, results)
        for key, body in records.items():
            if not await self._written_down(key, body):
                return
        if merger.answer_id and records and self._call.is_unnamed:
            with contextlib.suppress(CoatcheckError):  # then the next request must name its session
                await in_thread(self._call.tenant.remember, merger.answer_id, self._session)
        if self._request.is_streamed:
            await self._call.end(end)
        else:
            assert self._first is not None
            await self._call.whole(200, end, self._first, self._usage_header())

    def _usage_header(self) -> HeaderList:
        if self._merger.steps == 1:
            return []
        return [(b"x-coatcheck-usage", bytes(raw_of(self._merger.usages)))]

    async def _record(self, keys: Sequence[str | None]) -> bool:
        """Write what was sent for the answer so far. Return False if that failed, and the client knows."""
        body = entry_body(self._chain, self._merger.after)
        for key in keys:
            if key is not None and key not in self._written:
                after = body if key == self._merger.last_key else {**body, "after": []}
                if not await self._written_down(key, after):
                    return False
                self._written.add(key)
        return True

    async def _written_down(self, key: str, body: Mapping[str, Any]) -> bool:
        try:
            await in_thread(self._ledger.write, key, body)
        except CoatcheckError as error:
            _LOG.warning("an answer ends with an error, its ledger cannot be written: %s", mask(error.message))
            await self._fail(
                503, "the gateway cannot write its ledger, so this answer could not be continued; try again"
            )
            return False
        return True

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
    """Return the name of a session that a client chose without knowing it; its digest if it cannot be one, behind the
    `start` that its token wants."""
    is_name = _SESSION_NAME.fullmatch(name) and not name.startswith(_RESERVED)
    return name if is_name else f"{start}client-{digest(name)[:32]}"


def _too_large(limit: int) -> RefusedRequest:
    return RefusedRequest(413, f"the body of the request has more than {limit // _MIB} MiB, the limit of this gateway")


def _unsupported_thread() -> RefusedRequest:
    return RefusedRequest(400, _NO_THREADS)


def _pause(response: ProviderAnswer, attempt: int) -> float:
    """Return how long to wait before a step is sent again, as the provider says."""
    try:
        return max(0.0, float(response.header("retry-after")))
    except ValueError:
        return float(min(8.0, 0.5 * 2**attempt))


def _decoded(body: bytes, coding: str, limit: int) -> bytes:
    """Decode a body, at most `limit` bytes."""
    decoding = decoder(coding)
    if decoding is None:
        raise RefusedRequest(415, f"the content coding {clip(coding, 20)} is not supported; send gzip, zstd or none")
    data = decoding.decompress(body, limit + 1)
    if len(data) > limit:
        raise _too_large(limit)
    if not decoding.eof:
        raise EOFError("cut")
    return data
