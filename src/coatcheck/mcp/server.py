"""The MCP server for a store: the three tools, and artifacts as resources.

A resource is `art://<id>`, read in parts of at most a page of characters, or 48 KiB if it is not text. If a part is not
the whole, a second content says so and has the URI of the next part.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourcesListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from coatcheck import Ref, Session, Store, __version__, toolkit
from coatcheck.errors import CODES, CoatcheckError, InvalidArgument, NotFound
from coatcheck.ids import clip
from coatcheck.lanes import in_long_thread, in_thread, may_take_long
from coatcheck.mcp.savings import Counts
from coatcheck.media import is_text
from coatcheck.previews.excerpts import line
from coatcheck.tokens import estimate

T = TypeVar("T")
Context = ServerRequestContext[Any, Any]

INSTRUCTIONS: Final = (
    "Stored artifacts: results that are too large for the context. A pointer (art:…) names one. "
    "get_artifact reads a page, a part or the answer to a query; list_artifacts lists what is stored."
)
MAX_CONNECTIONS: Final = 1_000
_PROGRESS: Final = 1.0
_MAX_ERROR: Final = 1_000  # characters of an error,
_MAX_QUOTED: Final = 200  # and of the part of a request that it quotes
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

PAGE: Final = 50
PART_CHARS: Final = 8_000
PART_BYTES: Final = 48 * 1024
COMPLETIONS: Final = 100
BY_ID: Final = "art://{id}{?lines,cursor,offset}"
BY_NAME: Final = "art://name/{name}"
_SCHEME: Final = "art"
_NAME: Final = "name"
_POINTER: Final = "art:"
_ID: Final = re.compile(r"[0-9a-f]{12,64}")
_CURSOR: Final = re.compile(r"[0-9a-f]{64}")
_MAX_LABEL: Final = 200  # characters of a name, a media type or a summary
_MAX_URI: Final = 1_000  # and of a URI in a response
_RECENT: Final = 1_000  # artifacts whose ids and names are completed
_COMPLETED: Final = 8_000  # characters of all completions
_PARAMETERS: Final = frozenset({"lines", "cursor", "offset"})

TEMPLATES: Final[tuple[Mapping[str, Any], ...]] = (
    {
        "uriTemplate": BY_ID,
        "name": "artifact",
        "title": "A stored artifact",
        "description": "By id, or at least its first 12 characters. lines=4100:4160 reads part of a text.",
    },
    {"uriTemplate": BY_NAME, "name": "named artifact", "title": "The newest artifact with a name"},
)


class Sessions:
    """The session of each client: one per connection, or a named one for all.

    Since 2026-07-28, HTTP has no connections: those requests share a session."""

    def __init__(self, store: Store, session_id: str, *, named: bool, ttl: float) -> None:
        self._store = store
        self._session_id = session_id
        self._named = named
        self._ttl = ttl
        self.counts = Counts()
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
                while len(self._open) > MAX_CONNECTIONS:
                    self._open.popitem(last=False)
        return session


class _Server(Server[Any]):
    """Declares on every transport that the list of resources may change."""

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *args: Any, **extra: Any
    ) -> InitializationOptions:
        options = notification_options or NotificationOptions(resources_changed=True)
        return super().create_initialization_options(options, *args, **extra)


def make_server(sessions: Sessions) -> Server[Any]:
    """Return the server, for any transport."""
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
    server.middleware.append(_bounded)
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, handlers.set_level)
    return server


class _Handlers:
    """The request handlers."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._levels: OrderedDict[str, str] = OrderedDict()
        self.bus = InMemorySubscriptionBus()

    # Tools

    async def list_tools(self, context: Context, params: Any) -> types.ListToolsResult:
        tools = [tool.as_mcp() for tool in toolkit(self._sessions.of(context))]
        tools[2]["outputSchema"] = _POINTER_SCHEMA  # programs use the pointer
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in tools])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        session = self._sessions.of(context)
        tool = next((one for one in toolkit(session) if one.name == params.name), None)
        if tool is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"unknown tool {clip(params.name)}")
        began = time.monotonic()
        arguments = params.arguments or {}
        run = in_long_thread if may_take_long(arguments.get("pointer"), arguments) else in_thread
        text = await self._with_progress(context, functools.partial(run, tool.run, **arguments))
        failed = text.startswith(_FAILED)
        if tool.read_only:
            self._sessions.counts.read_back(estimate(text))
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        structured = None
        match = _STORED.match(text) or _READ.match(text)
        ref = await in_thread(session.ref, match[1]) if match else None
        if ref is not None:
            content.append(link_of(ref))
        if not tool.read_only:
            structured = {} if ref is None else {
                "pointer": ref.pointer, "artifact_id": ref.artifact_id,
                "name": shown_name(ref) if ref.name else "",
                "media_type": shown_media_type(ref), "size_bytes": ref.size_bytes,
            }  # fmt: skip
            if ref is not None:
                await self._changed(context)
        summary = f"{tool.name}: {len(text):,} characters in {time.monotonic() - began:.3f} s"
        await self._log(context, "warning" if failed else "debug", summary)
        return types.CallToolResult.model_validate(
            {
                "content": content,
                "isError": failed,
                **({"structuredContent": structured} if structured is not None else {}),
            }
        )

    async def _with_progress(self, context: Context, call: Callable[[], Awaitable[str]]) -> str:
        """Wait for a call, and report progress each second if the client asked for it."""
        done: list[str] = []

        async def tick() -> None:
            seconds = 0.0
            while True:
                await anyio.sleep(_PROGRESS)
                seconds += _PROGRESS
                await context.session.report_progress(seconds, None, f"reading for {seconds:.0f} s")

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            done.append(await call())
            group.cancel_scope.cancel()
        return done[0]

    # Resources

    async def list_resources(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        session, cursor = self._sessions.of(context), params.cursor if params else None
        found, following = await self._in_thread(context, lambda: list_page(session, cursor))
        return types.ListResourcesResult(
            resources=[types.Resource.model_validate(one) for one in found], next_cursor=following
        )

    async def list_templates(self, context: Context, params: Any) -> types.ListResourceTemplatesResult:
        found = [types.ResourceTemplate.model_validate(one) for one in TEMPLATES]
        return types.ListResourceTemplatesResult(resource_templates=found)

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        session = self._sessions.of(context)
        contents = await self._in_thread(context, lambda: read(session, str(params.uri)), uri=str(params.uri))
        return types.ReadResourceResult.model_validate({"contents": contents})

    async def complete(self, context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        session, ref, argument = self._sessions.of(context), params.ref, params.argument
        values: list[str] = []
        total = 0
        if isinstance(ref, types.ResourceTemplateReference):
            values, total = await self._in_thread(
                context, lambda: complete(session, ref.uri, argument.name, argument.value)
            )
        completion = types.Completion(values=values, total=total, has_more=total > len(values))
        return types.CompleteResult(completion=completion)

    async def _in_thread(self, context: Context, call: Callable[[], T], **data: str) -> T:
        try:
            return await in_thread(call)
        except CoatcheckError as error:
            code = CODES[error.code].mcp
            if isinstance(error, NotFound) and context.protocol_version in MODERN_PROTOCOL_VERSIONS:
                code = types.INVALID_PARAMS  # newer versions have no code of their own for it
            raise MCPError(code=code, message=str(error), data={"code": error.code, **data}) from error

    async def _changed(self, context: Context) -> None:
        await self.bus.publish(ResourcesListChanged())
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            await context.session.send_resource_list_changed()

    # Logging

    async def set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        self._levels[self._sessions.of(context).session_id] = params.level
        while len(self._levels) > MAX_CONNECTIONS:
            self._levels.popitem(last=False)
        return types.EmptyResult()

    async def _log(self, context: Context, level: types.LoggingLevel, text: str) -> None:
        """Send a log message if the client wants it. Since 2026-07-28 each request says so, and the SDK checks."""
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            wanted = self._levels.get(self._sessions.of(context).session_id)
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
            data = {key: line(one, _MAX_QUOTED) if isinstance(one, str) else one for key, one in data.items()}
        elif isinstance(data, str):
            data = line(data, _MAX_QUOTED)
        raise MCPError(code=error.code, message=line(error.message, _MAX_ERROR), data=data) from error


@dataclass(frozen=True, slots=True)
class ResourceUri:
    """A parsed URI: an artifact, by pointer or name, and a part of it."""

    target: str
    lines: str | None = None
    cursor: str | None = None
    offset: int = 0


def uri_of(ref: Ref) -> str:
    return f"{_SCHEME}://{ref.artifact_id}"


def parse_uri(uri: str) -> ResourceUri:
    """Raises `InvalidArgument`."""
    try:
        parts = urlsplit(uri)
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
    except ValueError as error:
        raise _invalid_uri(uri) from error
    if (
        parts.scheme != _SCHEME
        or parts.fragment
        or len(dict(asked)) != len(asked)
        or not set(dict(asked)) <= _PARAMETERS
    ):
        raise _invalid_uri(uri)
    query = dict(asked)
    if parts.netloc == _NAME and len(parts.path) > 1:
        target = unquote(parts.path[1:])
        if target.startswith(_POINTER):
            raise _invalid_uri(uri)
    elif _ID.fullmatch(parts.netloc) and parts.path in ("", "/"):
        target = _POINTER + parts.netloc
    else:
        raise _invalid_uri(uri)
    offset = query.get("offset", "0")
    if not re.fullmatch(r"\d{1,18}", offset):
        raise InvalidArgument("offset must be a number", hint="omit it to start at the beginning")
    return ResourceUri(target, query.get("lines"), query.get("cursor"), int(offset))


def list_page(session: Session, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of the artifacts that a session sees, newest first, and the cursor for the next page."""
    try:
        if cursor is not None and not _CURSOR.fullmatch(cursor):
            raise NotFound("invalid cursor")
        refs = session.artifacts(after=cursor, limit=PAGE + 1)
    except NotFound as error:
        raise InvalidArgument("invalid cursor", hint="omit it to start again") from error
    page = refs[:PAGE]
    return [resource_of(ref) for ref in page], page[-1].artifact_id if len(refs) > PAGE else None


def resource_of(ref: Ref) -> dict[str, Any]:
    return {
        "uri": uri_of(ref),
        "name": shown_name(ref),
        "description": line(ref.summary, _MAX_LABEL),
        "mimeType": shown_media_type(ref),
        "size": ref.size_bytes,
        "annotations": {"lastModified": ref.created_at.isoformat().replace("+00:00", "Z")},
        "_meta": {"coatcheck/pointer": ref.pointer, "coatcheck/kind": ref.kind},
    }


def shown_name(ref: Ref) -> str:
    """Return the name of an artifact, shortened if it is very long. The id is always next to it."""
    name = ref.name or ref.pointer
    return name if len(name) <= _MAX_LABEL else line(name, _MAX_LABEL)


def shown_media_type(ref: Ref) -> str:
    return ref.media_type if len(ref.media_type) <= _MAX_LABEL else line(ref.media_type, _MAX_LABEL)


def link_of(ref: Ref) -> dict[str, Any]:
    """Return a resource link for the result of a tool: the client can open the whole artifact."""
    return {
        "type": "resource_link",
        "uri": uri_of(ref),
        "name": shown_name(ref),
        "mimeType": shown_media_type(ref),
        "size": ref.size_bytes,
    }


def read(session: Session, uri: str) -> list[dict[str, Any]]:
    """Return the contents of a URI: a part, and a note about the next part if there is one. Raises `CoatcheckError`."""
    parsed = parse_uri(uri)
    ref = session.ref(parsed.target)
    if ref is None:
        session.open(parsed.target).close()  # raises the precise error
        raise NotFound(f"no artifact at {uri[:200]!r}")
    if len(uri) > _MAX_URI:
        uri = uri_of(ref)
    if is_text(ref.media_type):
        return _text(session, ref, uri, parsed)
    if parsed.lines is not None or parsed.cursor is not None:
        raise InvalidArgument(f"{ref.pointer} is not text and has no lines", hint="use offset")
    return _bytes(session, ref, uri, parsed.offset)


def _text(session: Session, ref: Ref, uri: str, parsed: ResourceUri) -> list[dict[str, Any]]:
    if parsed.offset:
        raise InvalidArgument(f"offset cannot be used with {ref.pointer}: it is text", hint="use lines or cursor")
    page = session.read(ref, lines=parsed.lines, cursor=parsed.cursor, max_chars=PART_CHARS)
    is_whole = page.cursor is None and parsed.lines is None and parsed.cursor is None
    part = {"uri": uri, "mimeType": shown_media_type(ref) if is_whole else "text/plain", "text": page.text}
    if page.cursor is None:
        return [part]
    return [part, _note(ref, page.shown, cursor=page.cursor)]


def _bytes(session: Session, ref: Ref, uri: str, offset: int) -> list[dict[str, Any]]:
    with session.open(ref) as stream:
        stream.seek(offset)
        data = stream.read(PART_BYTES)
    part = {"uri": uri, "mimeType": shown_media_type(ref), "blob": base64.b64encode(data).decode()}
    end = offset + len(data)
    if end >= ref.size_bytes:
        return [part]
    return [part, _note(ref, f"bytes {offset:,}-{end - 1:,} of {ref.size_bytes:,}", offset=str(end))]


def _note(ref: Ref, shown: str, **parameters: str) -> dict[str, Any]:
    following = f"{uri_of(ref)}?{urlencode(parameters)}"
    return {
        "uri": following,
        "mimeType": "text/plain",
        "text": f"[only {shown} are shown here; the next part is at {following}]",
        "_meta": {"coatcheck/shown": shown, "coatcheck/next": following},
    }


def complete(session: Session, template: str, argument: str, value: str) -> tuple[list[str], int]:
    """Return completions for an argument of a template, the likeliest first, and their total number."""
    if template == BY_ID and argument == "id":
        wanted = value.strip().lower().removeprefix(_POINTER).lstrip("/")
        refs = session.list(limit=_RECENT)
        found = list(dict.fromkeys(ref.artifact_id for ref in refs if ref.artifact_id.startswith(wanted)))
    elif template == BY_NAME and argument == "name":
        wanted = unquote(value).lower()
        names = list(dict.fromkeys(ref.name for ref in session.list(limit=_RECENT) if ref.name))
        matching = [name for name in names if wanted in name.lower()]
        found = [
            quote(name, safe=" ") for name in sorted(matching, key=lambda name: not name.lower().startswith(wanted))
        ]
    else:
        found = []
    shown: list[str] = []
    room = _COMPLETED
    for one in found[:COMPLETIONS]:
        if len(one) <= min(room, _MAX_URI):
            shown.append(one)
            room -= len(one)
    return shown, len(found)


def _invalid_uri(uri: str) -> InvalidArgument:
    return InvalidArgument(f"invalid artifact URI {uri[:200]!r}", hint="use art://<id> or art://name/<name>")
