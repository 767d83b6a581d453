"""Microsoft Agent Framework: `Agent(client, context_providers=[Coatcheck(store)])`.

One context provider adds our tools and a function middleware to each run. The middleware resolves
pointers before a function runs, and replaces large results after it. Approvals and the history keep
the pointers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
    from agent_framework import (
        AgentSession,
        Content,
        ContextProvider,
        FunctionInvocationContext,
        FunctionMiddleware,
        FunctionTool,
        MiddlewareFailure,
        MiddlewareTermination,
        SessionContext,
        UserInputRequiredException,
    )
except ImportError as error:
    raise missing("agent-framework-core", "agent-framework-core>=1.23,<2") from error

__all__ = ["Coatcheck"]

_SHOWN: Final = "original_arguments_for_messages"
"""The key under which the framework looks for the arguments that an approval was given for."""

_SECURED: Final = "security_original_runtime_kwargs"
"""The mark of the framework's security middleware, which ends the run if arguments change after its
check."""


class Coatcheck(ContextProvider):
    """A context provider that takes large function results out of an agent's context.

    The `AgentSession` names the session. A run without one has a private session. An agent that
    runs inside a tool of another shares that agent's session, with or without
    `propagate_session`."""

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
        source_id: str = "coatcheck",
    ) -> None:
        super().__init__(source_id)
        self._adapter = Adapter(store, host="agent-framework", policy=policy, ttl=ttl, only=only)

    def forget(self, session_id: str) -> None:
        """Drop what belongs to a session. Call it where you delete the session: the framework does
        not report that."""
        self._adapter.forget(session_id)

    async def before_run(
        self, *, agent: Any, session: AgentSession, context: SessionContext, state: dict[str, Any]
    ) -> None:
        kit = self._adapter.kit(_names(agent, context))
        if not kit.policy.enabled:
            return
        found = await in_thread(self._adapter.session, session.session_id)
        context.extend_tools(self.source_id, [_tool(kit, found, one) for one in kit.tools])
        context.extend_middleware(self.source_id, _Results(kit, found))


class _Results(FunctionMiddleware):
    """Resolves the pointers in a call, and replaces what is large in its result, for one run."""

    def __init__(self, kit: Kit, session: Session) -> None:
        self._kit, self._session = kit, session

    async def process(
        self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        kit, session, name = self._kit, self._session, context.function.name
        if kit.is_ours(name):
            await call_next()
            return
        given = context.arguments
        if isinstance(given, Mapping) and SCHEME in repr(given):
            resolved = await in_thread(
                kit.arguments, session, name, given, context.function.parameters()
            )
            if resolved is not given and _SECURED in context.metadata:
                resolved = Refusal(
                    f"[error: {name} was not called: it takes no pointers here, "
                    "pass the text itself]"
                )
            if isinstance(resolved, Refusal):
                context.result = [Content.from_text(resolved.text)]
                return
            if resolved is not given:
                context.metadata.setdefault(_SHOWN, dict(given))
                context.arguments = dict(resolved)
        call_id = context.metadata.get("call_id")
        try:
            with within(session):
                await call_next()
        except (MiddlewareFailure, MiddlewareTermination, UserInputRequiredException):
            raise
        except Exception as error:
            text = await in_thread(kit.failure, session, error, tool=name, call_id=call_id)
            if text != str(error):
                shortened(error, text)
            raise
        context.result = await in_thread(
            _slimmed, kit, session, context.result, {"tool": name, "call_id": call_id}
        )


def _names(agent: Any, context: SessionContext) -> set[str]:
    """The names of the functions that the model is offered beside ours."""
    found: set[str] = set()
    options = (getattr(agent, "default_options", None) or {}, context.options)
    for one in (
        *(tool for option in options for tool in option.get("tools") or ()),
        *context.tools,
    ):
        found.add(str(getattr(one, "name", None) or getattr(one, "__name__", "")))
    for server in getattr(agent, "mcp_tools", ()):
        found |= {function.name for function in server.functions}
    return found


def _tool(kit: Kit, session: Session, tool: Any) -> FunctionTool:
    async def run(**arguments: Any) -> list[Content]:
        parts = await in_thread(kit.answer, session, tool.name, arguments)
        return [_content(part) for part in parts]

    return FunctionTool(
        name=tool.name, description=tool.description, func=run, input_model=dict(tool.parameters)
    )


def _slimmed(kit: Kit, session: Session, result: Any, about: dict[str, Any]) -> Any:
    """Return a result with stubs in place of what is large; the same object if nothing changed."""
    if isinstance(result, Content):  # a request to the user
        return result
    if not isinstance(result, list) or not all(isinstance(one, Content) for one in result):
        outcome = kit.result(session, result, **about)
        return result if outcome.content is result else outcome.text
    value = _json_in(result[0]) if len(result) == 1 else None
    if value is not None:
        outcome = kit.result(session, value, **about)
        return result if outcome.content is value else [Content.from_text(outcome.text)]
    parts = [_part(one) for one in result]
    slim = kit.parts(session, parts, **about)
    if are_same(slim, parts):
        return result
    return [one.original or _content(one) for one in slim]


def _json_in(content: Content) -> Any:
    """The list or object that the framework has written as text, to be passed on as such. None if
    it is neither."""
    text = content.text or "" if content.type == "text" else ""
    if not text.startswith(("[", "{")):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if text in (json.dumps(value), json.dumps(value, ensure_ascii=False)) else None


def _part(content: Content) -> ContentPart:
    """A content as a part that a policy can judge. Links, errors and unknown contents are kept."""
    if content.type == "text":
        return ContentPart(content.text or "", original=content)
    head, _, data = (content.uri or "").partition(";base64,")
    if content.type == "data" and head.startswith("data:"):
        media_type = content.media_type or "application/octet-stream"
        return ContentPart("", media_type, base64.b64decode(data), original=content)
    return ContentPart(kept=content, original=content)


def _content(part: ContentPart) -> Content:
    return (
        Content.from_data(part.data, part.media_type)
        if part.media_type
        else Content.from_text(part.text)
    )
