"""FastMCP: `mcp.add_middleware(Coatcheck(store))` makes the large results of a server's tools small
for every client.

The session is the first of these: the one that the author names, the authenticated user's, the
process's on stdio and in memory (one client), and the one of FastMCP's session state on HTTP
connections with a handshake. An HTTP request with none of these passes unchanged: nothing
distinguishes its client from another.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from coatcheck import Policy, Session, Store
from coatcheck._toolkit import Purpose
from coatcheck.adapters import (
    TTL,
    Adapter,
    ContentPart,
    Kit,
    Refusal,
    are_same,
    in_thread,
    missing,
    shortened,
    within,
)
from coatcheck.ids import SCHEME

try:
    from fastmcp.exceptions import ToolError
    from fastmcp.server.context import Context
    from fastmcp.server.dependencies import get_context
    from fastmcp.server.middleware import CallNext, MiddlewareContext
    from fastmcp.server.middleware.tool_injection import ToolInjectionMiddleware
    from fastmcp.server.providers.aggregate import AggregateProvider
    from fastmcp.server.sessions import current_principal
    from fastmcp.tools.base import Tool, ToolResult
    from mcp_types import AudioContent, EmbeddedResource, ImageContent, TextContent
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS
    from pydantic import PrivateAttr
except ImportError as error:
    raise missing("fastmcp", "fastmcp>=4.1,<5") from error

__all__ = ["Coatcheck"]

_STATE: Final = "coatcheck"
_LOG: Final = logging.getLogger("coatcheck")

Naming = str | Callable[[Context], str | Awaitable[str | None] | None]
"""The name of a session, or a function that returns it for a request; None leaves the request
unchanged."""


class Coatcheck(ToolInjectionMiddleware):
    """A middleware for the authors of servers. `session` names the session, or is a function that
    returns its name for a request. Add it after a middleware that limits responses, and before one
    that caches them."""

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        session: Naming | None = None,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
    ) -> None:
        self._adapter = Adapter(store, host="fastmcp", policy=policy, ttl=ttl, only=only)
        self._naming = session
        self._process = f"process:{secrets.token_hex(16)}"
        self._first = asyncio.Lock()
        self._has_looked = self._is_warned = False
        self._take(())

    def forget(self, session: str) -> None:
        """Drop what belongs to a session that the author has named."""
        self._adapter.forget(session)

    async def on_list_tools(
        self, context: MiddlewareContext[Any], call_next: CallNext[Any, Sequence[Tool]]
    ) -> Sequence[Tool]:
        """List our tools first, and the others without output schemas: a stub has a different
        shape."""
        if self._kit.policy.enabled:
            await self._look(context.fastmcp_context)
        tools: Sequence[Tool] = await call_next(context)
        if not self._kit.policy.enabled:
            return tools
        if await self.session(context.fastmcp_context) is None:
            return [tool for tool in tools if not isinstance(tool, _ArtifactTool)]
        return [
            tool if tool.output_schema is None else tool.model_copy(update={"output_schema": None})
            for tool in tools
        ]

    async def on_call_tool(
        self, context: MiddlewareContext[Any], call_next: CallNext[Any, ToolResult]
    ) -> ToolResult:
        """Resolve pointers, run the tool, and replace what is large in its result or its error."""
        message, current = context.message, context.fastmcp_context
        if not self._kit.policy.enabled:
            return await call_next(context)
        if not self._has_looked:
            await self._look(current)
        kit = self._kit
        if ours := self.get_injected_tool(
            message.name
        ):  # past caches, which do not know our sessions
            return await ours.run(message.arguments or {})
        session = await self.session(current)
        if session is None:
            return await call_next(context)
        given = message.arguments or {}
        if current is not None and SCHEME in repr(given):
            tool = await current.fastmcp.get_tool(message.name)
            resolved = await in_thread(
                kit.arguments, session, message.name, given, tool.parameters if tool else None
            )
            if isinstance(resolved, Refusal):
                return ToolResult(
                    content=[TextContent(type="text", text=resolved.text)], is_error=True
                )
            if resolved is not given:
                context = context.copy(
                    message=message.model_copy(update={"arguments": dict(resolved)})
                )
        try:
            with within(session):
                result = await call_next(context)
        except ToolError as error:
            text = await in_thread(kit.failure, session, error, tool=message.name)
            if text != str(error):
                shortened(error, text)
            raise
        if type(result) is not ToolResult:  # a request for input, or a task
            return result
        return await in_thread(_slimmed, kit, session, result, message.name)

    async def session(self, context: Context | None) -> Session | None:
        """Return the session of a request, or None if nothing identifies its client."""
        host_id = await self._host_id(context)
        if host_id is not None:
            return await in_thread(self._adapter.session, host_id)
        if not self._is_warned:
            self._is_warned = True
            _LOG.warning(
                "results pass unchanged: an HTTP request without a user has no session; "
                "pass session=…"
            )
        return None

    async def _host_id(self, context: Context | None) -> str | None:
        if self._naming is not None:
            named: Any = self._naming
            if callable(named):
                named = named(context)
            named = await named if inspect.isawaitable(named) else named
            return None if named is None else str(named)
        principal = current_principal()
        if principal is not None:
            return "user:" + hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()
        if context is None or context.transport not in ("sse", "streamable-http"):
            return self._process
        request = context.request_context
        if request is None or request.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return None  # each request is a connection of its own
        async with self._first:
            token = await context.get_state(_STATE)
            if token is None:
                token = secrets.token_hex(16)
                await context.set_state(_STATE, token)
        return f"state:{token}"

    async def _look(self, context: Context | None) -> None:
        """Find the names of the server's tools, including those of mounted servers. They may change
        with each list."""
        if context is not None:
            self._has_looked = True
            self._take(tool.name for tool in await AggregateProvider.list_tools(context.fastmcp))

    def _take(self, taken: Iterable[str]) -> None:
        """Offer our tools beside tools with these names."""
        self._kit: Kit = self._adapter.kit(taken)
        super().__init__([_ArtifactTool.of(self, self._kit, one) for one in self._kit.tools])


class _ArtifactTool(Tool):
    """One of our tools, as FastMCP lists and runs it."""

    _middleware: Any = PrivateAttr()
    _kit: Any = PrivateAttr()

    @classmethod
    def of(cls, middleware: Coatcheck, kit: Kit, tool: Any) -> _ArtifactTool:
        about = tool.as_mcp()
        made = cls(
            name=tool.name,
            description=tool.description,
            parameters=dict(tool.parameters),
            meta=about.get("_meta"),
            annotations=about.get("annotations"),
        )
        made._middleware, made._kit = middleware, kit
        return made

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        session = await self._middleware.session(get_context())
        if session is None:
            parts = [ContentPart("[error: this connection has no artifacts]")]
        else:
            parts = await in_thread(self._kit.answer, session, self.name, arguments)
        return ToolResult(content=[_block(part) for part in parts])


def _slimmed(kit: Kit, session: Session, result: ToolResult, tool: str) -> ToolResult:
    """Return a result with stubs in place of what is large; the same object if nothing changed."""
    found = _value(result)
    if found is None:
        content = _slim_content(kit, session, result, tool)
    else:
        outcome = kit.result(session, found[0], tool=tool)
        content = None
        if outcome.content is not found[0]:
            content = [TextContent(type="text", text=outcome.text)]
    if content is None:
        return result
    return ToolResult(content=content, meta=result.meta, is_error=result.is_error)


def _slim_content(kit: Kit, session: Session, result: ToolResult, tool: str) -> list[Any] | None:
    """Return what replaces a result's blocks and its structured content, None if nothing
    changes."""
    parts = [_part(block) for block in result.content]
    slim = kit.parts(session, parts, tool=tool)
    beside = result.structured_content
    shown = beside if beside is None else kit.result(session, beside, tool=tool).content
    if shown is beside and are_same(slim, parts):
        return None
    content = [one.original or _block(one) for one in slim]
    if shown is not beside:
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        content.append(TextContent(type="text", text=text))
    return content


def _value(result: ToolResult) -> tuple[Any] | None:
    """The value that a tool has returned, if the result has it both as text and as structured
    content."""
    structured, blocks = result.structured_content, result.content
    if structured is None or len(blocks) != 1 or not isinstance(blocks[0], TextContent):
        return None
    text = blocks[0].text
    for value in (*structured.values(), structured) if len(structured) == 1 else (structured,):
        if isinstance(value, str):
            if value == text:
                return (value,)
            continue
        try:
            if json.loads(text) == value:
                return (value,)
        except ValueError:
            continue
    return None


def _part(block: Any) -> ContentPart:
    """A block as a part that a policy can judge. Links and unknown blocks are kept."""
    if isinstance(block, TextContent):
        return ContentPart(block.text, original=block)
    if isinstance(block, ImageContent | AudioContent):
        return ContentPart("", block.mime_type, base64.b64decode(block.data), original=block)
    if isinstance(block, EmbeddedResource):
        resource: Any = block.resource
        if hasattr(resource, "text"):
            return ContentPart(resource.text, original=block)
        media_type = resource.mime_type or "application/octet-stream"
        return ContentPart("", media_type, base64.b64decode(resource.blob), original=block)
    return ContentPart(kept=block, original=block)


def _block(part: ContentPart) -> TextContent | ImageContent:
    if part.media_type:
        return ImageContent(type="image", data=part.base64, mime_type=part.media_type)
    return TextContent(type="text", text=part.text)
