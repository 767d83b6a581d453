"""The MCP server for a store: the three tools, and artifacts as resources.

It serves one client on stdio, or clients with the token over streamable HTTP on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import re
import signal
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

import anyio
import httpx2
import mcp_types as types
from anyio.abc import TaskStatus
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourcesListChanged
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coatcheck import Ref, Session, Store, __version__, toolkit
from coatcheck._toolkit import Purpose
from coatcheck.adapters.claude_code import CALL_ID, HOOK, Hooks, parsed_event
from coatcheck.errors import CODES, CoatcheckError, InvalidArgument, NotFound, StoreError
from coatcheck.http.serving import (
    HOST,
    LocalServer,
    Probation,
    bearer,
    check_token,
    is_same,
    new_token,
    problem,
    prove,
)
from coatcheck.ids import clip
from coatcheck.lanes import in_reading_thread, in_thread
from coatcheck.mcp.resources import MAX_LABEL, MAX_URI, contents, labels, short
from coatcheck.mcp.wire import FAILED, Tasks
from coatcheck.parts import Part
from coatcheck.previews.excerpts import line
from coatcheck.reading.sandbox import kill_all
from coatcheck.refs import iso_time

T = TypeVar("T")
P = TypeVar("P")
Context = ServerRequestContext[Any, Any]

INSTRUCTIONS: Final = (
    "Stored artifacts: results that are too large for the context. A pointer (art:…) names one. "
    "get_artifact reads a page, a part or the answer to a query"
)
_LISTING: Final = "; list_artifacts lists what is stored."
MAX_CONNECTIONS: Final = 1_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSING: Final = 5.0  # seconds for the store to close after a signal
PAGE: Final = 50
_PROGRESS: Final = 1.0
_MAX_ERROR: Final = 1_000  # characters of an error,
_MAX_QUOTED: Final = 200  # and of the part of a request that it quotes
_RECENT: Final = 1_000  # artifacts whose ids and names are completed
_COMPLETIONS: Final = 100
_COMPLETED: Final = 8_000  # characters of all completions
_ABOUT: Final = re.compile(r"\[(?:stored )?(art:[0-9a-f]{12,64})")
_CURSOR: Final = re.compile(r"[0-9a-f]{64}")
_LEVELS: Final = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_STRING: Final = {"type": "string"}
_POINTER_SCHEMA: Final = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("pointer", "artifact_id", "name", "media_type"), _STRING),
        "size_bytes": {"type": "integer"},
    },
}
PATH: Final = "/mcp"
TOKEN: Final = "COATCHECK_MCP_TOKEN"  # an environment variable
_GRACE: Final = 2  # seconds for requests in progress when a signal comes
_IDLE: Final = 1_800.0  # seconds without a request after which a client's session ends
_SESSION: Final = "mcp-session-id"
_EXPOSED: Final = (_SESSION, "mcp-protocol-version", "www-authenticate")
_HANDSHAKE: Final = (60.0, 100)  # seconds for a handshake, and handshakes that may be unfinished
_BY_ID: Final = types.ResourceTemplate(
    uri_template="art://{id}{?lines,cursor,offset}",
    name="artifact",
    title="A stored artifact",
    description="By id, or at least its first 12 characters. lines=4100:4160 reads part of a text.",
)
_BY_NAME: Final = types.ResourceTemplate(
    uri_template="art://name/{name}", name="named artifact", title="The newest artifact with a name"
)


class Sessions:
    """The session of each client: one per connection, or a named one for all.

    Since 2026-07-28, HTTP has no connections: those requests share a session. With `hooks`, the
    session that a call has in Claude Code decides."""

    def __init__(
        self,
        store: Store,
        session_id: str,
        *,
        named: bool,
        ttl: float | None,
        only: Collection[Purpose] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.store = store
        self.hooks = hooks
        self.only = only or None  # the tools to offer
        self._session_id = session_id
        self._named = named
        self._ttl = ttl

    @property
    def offers_tools(self) -> bool:
        """Whether models read with our tools. If not, they have files: nothing of ours is described
        to them."""
        return self.hooks is None or bool(self.hooks.kit.tools)

    def of(self, context: Context) -> Session:
        """Return the session of a request. Asks the store: call it in a thread."""
        if self.hooks is not None:
            return self.hooks.session_of(call_id_of(context))
        return self.store.lasting_session(self.client_of(context), ttl=self._ttl)

    def client_of(self, context: Context) -> str:
        """Return what identifies the client of a request: without hooks, the id of its session."""
        connection = context.request.headers.get(_SESSION) if context.request is not None else None
        if not connection or self._named:
            return self._session_id
        return f"{self._session_id}-{hashlib.sha256(connection.encode()).hexdigest()[:16]}"


def call_id_of(context: Context) -> str | None:
    """Return the id that Claude Code gives a call by a model; calls by its hooks have none."""
    found = (context.meta or {}).get(CALL_ID)
    return found if isinstance(found, str) else None


class _Server(Server[Any]):
    """Declares on every transport that the list of resources may change."""

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *args: Any, **extra: Any
    ) -> InitializationOptions:
        options = notification_options or NotificationOptions(resources_changed=True)
        return super().create_initialization_options(options, *args, **extra)


def make_server(sessions: Sessions) -> Server[Any]:
    """Return the server, for any transport. Without tools, it offers models nothing, and answers
    only the hooks."""
    handlers = _Handlers(sessions)
    offered: dict[str, Any] = {}
    if sessions.offers_tools:
        can_list = sessions.only is None or "list" in sessions.only
        offered = {
            "instructions": INSTRUCTIONS + (_LISTING if can_list else "."),
            "on_list_resources": handlers.in_thread(list_page),
            "on_list_resource_templates": handlers.in_thread(list_templates),
            "on_read_resource": handlers.in_thread(read),
            "on_completion": handlers.in_thread(complete),
        }
    server = _Server(
        "coatcheck",
        version=__version__,
        title="Coatcheck",
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_subscriptions_listen=ListenHandler(handlers.bus),
        **offered,
    )
    server.middleware.append(_bounded)
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, handlers.set_level)
    return server


class _Handlers:
    """The request handlers."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._levels: dict[str, str] = {}
        self.bus = InMemorySubscriptionBus()

    # Tools

    async def list_tools(self, context: Context, params: Any) -> types.ListToolsResult:
        tools = toolkit(only=self._sessions.only) if self._sessions.offers_tools else []
        output = {"outputSchema": _POINTER_SCHEMA}  # programs use the pointer
        described = [tool.as_mcp() | ({} if tool.read_only else output) for tool in tools]
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in described])

    async def call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        hooks = self._sessions.hooks
        if hooks is not None and params.name == HOOK and call_id_of(context) is None:
            done = await in_thread(hooks.answer, parsed_event(params.arguments or {}))
            return types.CallToolResult(content=[types.TextContent(text=json.dumps(done))])
        session = await in_thread(self._sessions.of, context)
        tools = toolkit(session, only=self._sessions.only) if self._sessions.offers_tools else []
        tool = next((one for one in tools if one.name == params.name), None)
        if tool is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"unknown tool {clip(params.name)}")
        began, arguments = time.monotonic(), params.arguments or {}
        work = functools.partial(tool.parts, **arguments)

        async def answered() -> tuple[list[Part], Ref | None]:
            parts = await in_reading_thread(session, arguments.get("pointer"), arguments, work)
            match = _ABOUT.match(parts[0].text)
            return parts, await in_thread(session.ref, match[1]) if match else None

        (answer, *pictures), ref = await self._with_progress(context, answered())
        text = answer.text
        failed = text.startswith(FAILED)
        content: list[types.ContentBlock] = [types.TextContent(text=text)]
        content += [types.ImageContent.model_validate(picture.as_mcp()) for picture in pictures]
        structured: dict[str, Any] | None = None if tool.read_only else {}
        if ref is not None and hooks is None:  # Claude Code shows the model a link as one more text
            content.append(types.ResourceLink(**labels(ref), size=ref.size_bytes))
        if ref is not None and not tool.read_only:
            structured = {
                "pointer": ref.pointer,
                "artifact_id": ref.artifact_id,
                "name": short(ref.name or ""),
                "media_type": short(ref.media_type),
                "size_bytes": ref.size_bytes,
            }
            await self._changed(context)
        summary = f"{tool.name}: {len(text):,} characters in {time.monotonic() - began:.3f} s"
        await self._log(context, "warning" if failed else "debug", summary)
        return types.CallToolResult(content=content, is_error=failed, structured_content=structured)

    async def _with_progress(self, context: Context, call: Awaitable[T]) -> T:
        """Wait for a call, and report progress each second if the client asked for it."""
        task, seconds = asyncio.ensure_future(call), 0.0
        try:
            while not (await asyncio.wait({task}, timeout=_PROGRESS))[0]:
                seconds += _PROGRESS
                await context.session.report_progress(seconds, None, f"reading for {seconds:.0f} s")
            return await task
        finally:
            task.cancel()

    # Resources

    def in_thread(self, answer: Callable[[Session, P], T]) -> Callable[[Context, P], Awaitable[T]]:
        """Return a handler that calls `answer` in a thread, and reports its errors."""

        async def handle(context: Context, params: P) -> T:
            try:
                session = await in_thread(self._sessions.of, context)
                return await in_thread(answer, session, params)
            except CoatcheckError as error:
                code, uri = CODES[error.code].mcp, getattr(params, "uri", None)
                if (
                    isinstance(error, NotFound)
                    and context.protocol_version in MODERN_PROTOCOL_VERSIONS
                ):
                    code = types.INVALID_PARAMS  # newer versions have no code of their own for it
                data = {"code": error.code, **({} if uri is None else {"uri": str(uri)})}
                raise MCPError(code=code, message=str(error), data=data) from error

        return handle

    async def _changed(self, context: Context) -> None:
        await self.bus.publish(ResourcesListChanged())
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await context.session.send_resource_list_changed()

    # Logging

    async def set_level(
        self, context: Context, params: types.SetLevelRequestParams
    ) -> types.EmptyResult:
        self._levels[self._sessions.client_of(context)] = params.level
        if len(self._levels) > MAX_CONNECTIONS:
            del self._levels[next(iter(self._levels))]
        return types.EmptyResult()

    async def _log(self, context: Context, level: types.LoggingLevel, text: str) -> None:
        """Send a log message if the client wants it. Since 2026-07-28 each request says so, and the
        SDK checks."""
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            wanted = self._levels.get(self._sessions.client_of(context))
            if wanted is None or _LEVELS.index(level) < _LEVELS.index(wanted):
                return
        send: Callable[..., Awaitable[None]] = context.session.send_log_message
        await send(level, text, logger="coatcheck", related_request_id=context.request_id)


async def _bounded(ctx: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
    """Bound every error: it may quote a URI or a method of any length."""
    try:
        return await call_next(ctx)
    except MCPError as error:
        data = error.data
        if isinstance(data, dict):
            data = {
                key: line(one, _MAX_QUOTED) if isinstance(one, str) else one
                for key, one in data.items()
            }
        elif isinstance(data, str):
            data = line(data, _MAX_QUOTED)
        raise MCPError(
            code=error.code, message=line(error.message, _MAX_ERROR), data=data
        ) from error


# Resources


def list_templates(session: Session, params: object) -> types.ListResourceTemplatesResult:
    return types.ListResourceTemplatesResult(resource_templates=[_BY_ID, _BY_NAME])


def list_page(
    session: Session, params: types.PaginatedRequestParams | None
) -> types.ListResourcesResult:
    """Return a page of the artifacts that a session sees, newest first."""
    cursor = params.cursor if params else None
    try:
        if cursor is not None and not _CURSOR.fullmatch(cursor):
            raise NotFound("invalid cursor")
        refs = session.artifacts(after=cursor, limit=PAGE + 1)
    except NotFound as error:
        raise InvalidArgument("invalid cursor", hint="omit it to start again") from error
    resources = [
        types.Resource(
            **labels(ref),
            description=line(ref.summary, MAX_LABEL),
            size=ref.size_bytes,
            annotations=types.Annotations(last_modified=iso_time(ref.created)),
            _meta={"coatcheck/pointer": ref.pointer, "coatcheck/kind": ref.kind},
        )
        for ref in refs[:PAGE]
    ]
    following = refs[PAGE - 1].artifact_id if len(refs) > PAGE else None
    return types.ListResourcesResult(resources=resources, next_cursor=following)


def read(session: Session, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    """Return the contents of a URI: a part, and a note about the next part if there is one. Raises
    `CoatcheckError`."""
    return types.ReadResourceResult.model_validate({"contents": contents(session, str(params.uri))})


def complete(session: Session, params: types.CompleteRequestParams) -> types.CompleteResult:
    """Return completions for an argument of a template, the likeliest first, and their total
    number."""
    template, argument = getattr(params.ref, "uri", ""), params.argument
    found: list[str] = []
    if template == _BY_ID.uri_template and argument.name == "id":
        found = _matching_ids(session, argument.value)
    elif template == _BY_NAME.uri_template and argument.name == "name":
        found = _matching_names(session, argument.value)
    shown: list[str] = []
    room = _COMPLETED
    for one in found[:_COMPLETIONS]:
        if len(one) <= min(room, MAX_URI):
            shown.append(one)
            room -= len(one)
    completion = types.Completion(values=shown, total=len(found), has_more=len(found) > len(shown))
    return types.CompleteResult(completion=completion)


def _matching_ids(session: Session, text: str) -> list[str]:
    """Return the ids that begin with a text, with or without the scheme."""
    wanted = text.strip().lower().removeprefix("art:").lstrip("/")
    ids = dict.fromkeys(ref.artifact_id for ref in session.list(limit=_RECENT))
    return [one for one in ids if one.startswith(wanted)]


def _matching_names(session: Session, text: str) -> list[str]:
    """Return the names that contain a text, quoted for a URI; those that begin with it first."""
    wanted = unquote(text).lower()
    names = dict.fromkeys(ref.name for ref in session.list(limit=_RECENT) if ref.name)
    matching = [name for name in names if wanted in name.lower()]
    matching.sort(key=lambda name: not name.lower().startswith(wanted))
    return [quote(name, safe=" ") for name in matching]


# Serving


def serve_stdio(sessions: Sessions) -> None:
    """Serve the client that started this process, until it closes our stdin or a signal arrives."""
    _silence_warnings()
    server = make_server(sessions)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(_end_by_signal, sessions.store)
            async with stdio_server() as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
            tasks.cancel_scope.cancel()

    anyio.run(run)


async def _end_by_signal(store: Store, *, task_status: TaskStatus[None]) -> None:
    """Wait for a signal, close the store, and end by the signal, as without a handler.

    The thread that reads stdin cannot be interrupted, so the process does not end in any other way.
    Claude Code sends SIGINT, then SIGTERM after 0.1 s and SIGKILL after 0.5 s, so nothing but the
    store is waited for."""
    with anyio.open_signal_receiver(*_SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            kill_all()
            with suppress(StoreError), anyio.move_on_after(_CLOSING):
                await anyio.to_thread.run_sync(store.close, abandon_on_cancel=True)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def serve_http(
    sessions: Sessions,
    *,
    port: int,
    token: str | None,
    origins: Iterable[str],
    say: Callable[[str], None],
) -> None:
    """Serve over HTTP until a signal ends it. Without a token, a new one is made and printed
    once."""
    _silence_warnings()
    if token is not None:
        check_token(token, TOKEN)
    app = make_server(sessions).streamable_http_app(
        streamable_http_path=PATH,
        transport_security=TransportSecuritySettings(
            enable_dns_rebinding_protection=False
        ),  # `LocalServer` does it
        session_idle_timeout=_IDLE,
        max_sessions=MAX_CONNECTIONS,
    )
    with LocalServer(port=port, origins=origins, exposed=_EXPOSED) as server:
        secret = token or new_token()
        say(f"MCP server at {server.url}{PATH}")
        if token is None:
            say(f"token, shown only once: {secret}")
        server.run(_with_token(UnfinishedHandshakes(app, *_HANDSHAKE), secret), grace=_GRACE)


def _with_token(app: ASGIApp, token: str) -> ASGIApp:
    """Require the token, and refuse every path but our own."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http" and not is_same(bearer(scope), token):
            text = f"a bearer token is required: the one printed at the start, or from {TOKEN}"
            refusal = problem(401, "unauthorized", text, www_authenticate="Bearer")
        elif scope["type"] == "http":
            prove(scope)
            if scope["path"] != PATH:
                refusal = problem(404, "not_found", f"not found; the only path is {PATH}")
        await (refusal or app)(scope, receive, send)

    return checked


class UnfinishedHandshakes:
    """ASGI middleware that ends the sessions of clients that never finish the handshake."""

    def __init__(self, app: ASGIApp, seconds: float, max_open: int) -> None:
        self._app = app
        self._unfinished = Probation(seconds, max_open)
        self._tasks = Tasks()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = Headers(scope=scope).getlist(_SESSION) if scope["type"] == "http" else []
        for session in known:
            self._unfinished.passed(session)

        async def sent(message: Message) -> None:
            await send(message)
            is_start = message["type"] == "http.response.start" and not known
            if is_start and (session := Headers(raw=message["headers"]).get(_SESSION)) is not None:
                self._unfinished.begin(session, lambda: self._tasks.start(self._end(session)))

        await self._app(scope, receive, sent)

    async def _end(self, session: str) -> None:
        """Send the DELETE with which a client ends its session."""
        headers = {_SESSION: session, "accept": "application/json, text/event-stream"}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self._app)) as client:
            await client.delete(f"http://{HOST}{PATH}", headers=headers)


def _silence_warnings() -> None:
    """Silence warnings: about MCP logging, deprecated but used by older clients, and about refused
    requests."""
    logging.getLogger("mcp.server.transport_security").disabled = True
    if not sys.warnoptions:
        warnings.simplefilter("ignore", MCPDeprecationWarning)
