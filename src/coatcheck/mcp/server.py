"""The MCP server for a store: the three tools, and artifacts as resources, rendered for the protocol."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourcesListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from coatcheck import Session, Store, __version__, toolkit
from coatcheck.errors import CODES, CoatcheckError, NotFound
from coatcheck.mcp import resources

T = TypeVar("T")
Context = ServerRequestContext[Any, Any]

INSTRUCTIONS: Final = (
    "Stored artifacts: results that are too large for the context. A pointer (art:…) stands for one. "
    "get_artifact reads a page, a part or an answer to a query; list_artifacts finds what is there."
)
_CONNECTIONS: Final = 1_000
_TICK: Final = 1.0
_FAILED: Final = ("[error", "[no artifact found")
_STORED: Final = re.compile(r"\[stored (art:[0-9a-f]{12,64})")
_READ: Final = re.compile(r"\[(art:[0-9a-f]{12,64})")
_LEVELS: Final = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_POINTER_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "pointer": {"type": "string"},
        "artifact_id": {"type": "string"},
        "name": {"type": "string"},
        "media_type": {"type": "string"},
        "size_bytes": {"type": "integer"},
    },
}


class Sessions:
    """The session of each client: one for each connection, or one that has a name for all of them.

    From 2026-07-28 on, HTTP knows no connections: those requests share a session."""

    def __init__(self, store: Store, session_id: str, *, named: bool, ttl: float) -> None:
        self._store = store
        self._session_id = session_id
        self._named = named
        self._ttl = ttl
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Session] = OrderedDict()

    def of(self, context: Context) -> Session:
        connection = context.request.headers.get("mcp-session-id") if context.request is not None else None
        session_id = self._session_id
        if connection and not self._named:
            session_id += "-" + hashlib.sha256(connection.encode()).hexdigest()[:16]
        with self._lock:
            session = self._open.get(session_id)
            if session is None:
                session = self._open[session_id] = self._store.session(session_id, ttl=self._ttl)
                while len(self._open) > _CONNECTIONS:
                    self._open.popitem(last=False)
        return session


class _Server(Server[Any]):
    """Tells on every transport that the list of resources changes."""

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *args: Any, **extra: Any
    ) -> InitializationOptions:
        options = notification_options or NotificationOptions(resources_changed=True)
        return super().create_initialization_options(options, *args, **extra)


def make_server(sessions: Sessions) -> Server[Any]:
    """The server, for any transport."""
    handlers = _Handlers(sessions)
    server = _Server(
        "coatcheck",
        version=__version__,
        title="Coatcheck",
        instructions=INSTRUCTIONS,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
        on_completion=handlers.complete,
        on_subscriptions_listen=ListenHandler(handlers.bus),
    )
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, handlers.set_level)
    return server


class _Handlers:
    """What is asked of the server, one method each."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._levels: OrderedDict[str, str] = OrderedDict()
        self.bus = InMemorySubscriptionBus()

    # Tools

    async def list_tools(self, context: Context, params: Any) -> types.ListToolsResult:
        tools = [tool.as_mcp() for tool in toolkit(self._sessions.of(context))]
        tools[2]["outputSchema"] = _POINTER_SCHEMA  # a program that stores goes on with the pointer
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in tools])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        session = self._sessions.of(context)
        tool = next((one for one in toolkit(session) if one.name == params.name), None)
        if tool is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"there is no tool {params.name[:80]!r}")
        began = time.monotonic()
        text = await self._with_progress(context, functools.partial(tool.run, **(params.arguments or {})))
        failed = text.startswith(_FAILED)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        structured = None
        match = _STORED.match(text) or _READ.match(text)
        ref = await _in_thread(lambda: session.ref(match[1])) if match else None
        if ref is not None:
            content.append(resources.link_of(ref))
        if not tool.read_only:
            structured = {} if ref is None else {
                "pointer": ref.pointer, "artifact_id": ref.artifact_id, "name": ref.name or "",
                "media_type": ref.media_type, "size_bytes": ref.size_bytes,
            }  # fmt: skip
            if ref is not None:
                await self._changed(context)
        said = f"{tool.name}: {len(text):,} characters in {time.monotonic() - began:.3f} s"
        await self._log(context, "warning" if failed else "debug", said)
        return types.CallToolResult.model_validate(
            {
                "content": content,
                "isError": failed,
                **({"structuredContent": structured} if structured is not None else {}),
            }
        )

    async def _with_progress(self, context: Context, call: Callable[[], str]) -> str:
        """Run a tool in a thread; who asked for progress is told each second that it still runs."""
        done: list[str] = []

        async def tick() -> None:
            seconds = 0.0
            while True:
                await anyio.sleep(_TICK)
                seconds += _TICK
                await context.session.report_progress(seconds, None, f"reading for {seconds:.0f} s")

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            done.append(await _in_thread(call))
            group.cancel_scope.cancel()
        return done[0]

    # Resources

    async def list_resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        session, cursor = self._sessions.of(context), params.cursor if params else None
        found, following = await self._asked(context, lambda: resources.listed(session, cursor))
        return types.ListResourcesResult(
            resources=[types.Resource.model_validate(one) for one in found], next_cursor=following
        )

    async def list_templates(self, context: Context, params: Any) -> types.ListResourceTemplatesResult:
        found = [types.ResourceTemplate.model_validate(one) for one in resources.TEMPLATES]
        return types.ListResourceTemplatesResult(resource_templates=found)

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        session = self._sessions.of(context)
        contents = await self._asked(context, lambda: resources.read(session, str(params.uri)), uri=str(params.uri))
        return types.ReadResourceResult.model_validate({"contents": contents})

    async def complete(self, context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        session, ref, argument = self._sessions.of(context), params.ref, params.argument
        values: list[str] = []
        total = 0
        if isinstance(ref, types.ResourceTemplateReference):
            values, total = await self._asked(
                context, lambda: resources.completed(session, ref.uri, argument.name, argument.value)
            )
        completion = types.Completion(values=values, total=total, has_more=total > len(values))
        return types.CompleteResult(completion=completion)

    async def _asked(self, context: Context, call: Callable[[], T], **data: str) -> T:
        try:
            return await _in_thread(call)
        except CoatcheckError as error:
            code = CODES[error.code].mcp
            if isinstance(error, NotFound) and context.protocol_version in MODERN_PROTOCOL_VERSIONS:
                code = types.INVALID_PARAMS  # the code of its own was retired
            raise MCPError(code=code, message=str(error), data={"code": error.code, **data}) from error

    async def _changed(self, context: Context) -> None:
        await self.bus.publish(ResourcesListChanged())
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await context.session.send_resource_list_changed()

    # Logging

    async def set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        self._levels[self._sessions.of(context).session_id] = params.level
        while len(self._levels) > _CONNECTIONS:
            self._levels.popitem(last=False)
        return types.EmptyResult()

    async def _log(self, context: Context, level: types.LoggingLevel, said: str) -> None:
        """Tell a client that wants to know. From 2026-07-28 on it says so with each request, and the SDK looks."""
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            wanted = self._levels.get(self._sessions.of(context).session_id)
            if wanted is None or _LEVELS.index(level) < _LEVELS.index(wanted):
                return
        send: Callable[..., Awaitable[None]] = context.session.send_log_message
        await send(level, said, logger="coatcheck", related_request_id=context.request_id)


async def _in_thread(call: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(call)
