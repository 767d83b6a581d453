"""The adapter for Pydantic AI: `Agent(model, capabilities=[Coatcheck(store)])`.

Large results of tools become stubs before they enter the message history, pointers in arguments
become values before arguments are validated, and the model gets our three tools. Toolsets of MCP
servers are covered too. The run's `conversation_id` names the session; an agent that runs inside a
tool of another shares that agent's session.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    within,
)
from coatcheck.ids import SCHEME

TESTED: Final = "pydantic-ai-slim>=2.66,<3"

try:
    from pydantic import ValidationError
    from pydantic_ai import BinaryContent, ToolReturn
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, durable_operation
    from pydantic_ai.exceptions import ModelRetry, ToolFailed, ToolFailedError, ToolRetryError
    from pydantic_ai.messages import (
        ModelRequest,
        ToolReturnContent,
        ToolReturnPart,
        is_multi_modal_content,
    )
    from pydantic_ai.tools import RunContext, ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool, WrapperToolset
    from pydantic_core import SchemaValidator, core_schema, to_jsonable_python
except ImportError as error:
    raise missing("pydantic-ai", TESTED) from error

_ID: Final = "coatcheck"
_READ_AGAIN: Final = frozenset(
    {"capability-load", "tool-search"}
)  # the framework reads what these tools return
_PLAIN: Final = (str, bytes, int, float, bool, type(None))
_ANYTHING: Final = SchemaValidator(core_schema.any_schema())


@dataclass
class ShorterReturn:
    """What replaces a tool's result, and the pointers to what was stored."""

    content: ToolReturnContent
    pointers: list[str]


class Coatcheck(AbstractCapability[Any]):
    """A capability for an agent or for a single run. `store` is a store or a folder; a `Session`
    serves all runs.

    An agent has one of these unless they have different ids; a later one replaces an earlier
    one."""

    id: str | None = _ID

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
        id: str | None = _ID,  # noqa: A002 - the name of the framework
    ) -> None:
        self.id = id
        self.adapter = Adapter(store, host="pydantic-ai", policy=policy, ttl=ttl, only=only)
        self._taken: tuple[str, ...] = ()  # the names of the host's tools in the current step
        self._session: Session | None = None  # of the current run

    def forget(self, conversation_id: str) -> None:
        """End the session of a conversation that was deleted."""
        self.adapter.forget(conversation_id)

    @classmethod
    def combine(cls, capabilities: Sequence[AbstractCapability[Any]]) -> AbstractCapability[Any]:
        return capabilities[-1]

    @classmethod
    def get_serialization_name(cls) -> str | None:
        return None  # a store is not part of a spec

    def get_ordering(self) -> CapabilityOrdering | None:
        """Return an ordering where results reach us before the harness's offloader, which then has
        nothing to do."""
        harness = sys.modules.get("pydantic_ai_harness.tool_output_limits")
        return (
            None if harness is None else CapabilityOrdering(wrapped_by=(harness.ToolOutputLimits,))
        )

    async def for_run(self, ctx: RunContext[Any]) -> AbstractCapability[Any]:
        run = copy.copy(self)
        run._session = None
        return run

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any] | None:
        return _WithArtifacts(toolset, self) if self._kit.tools else None

    @property
    def _kit(self) -> Kit:
        return self.adapter.kit(self._taken)

    # Hooks of the framework. They do no I/O themselves: under durable execution, only operations
    # may.

    async def before_tool_validate(
        self, ctx: RunContext[Any], *, call: Any, tool_def: ToolDefinition, args: Any
    ) -> Any:
        """Resolve pointers. The message history keeps what the model sent."""
        if self._is_left_alone(call.tool_name) or SCHEME not in (
            args if isinstance(args, str) else repr(args)
        ):
            return args
        try:
            given = json.loads(args) if isinstance(args, str) else args
        except ValueError:
            return args
        if not isinstance(given, dict):
            return args
        resolved = await self.resolve(
            ctx, list(self._taken), call.tool_name, given, tool_def.parameters_json_schema
        )
        if isinstance(resolved, str):
            raise ToolFailed(resolved)
        return args if resolved is None else resolved

    async def on_tool_validate_error(
        self,
        ctx: RunContext[Any],
        *,
        call: Any,
        tool_def: ToolDefinition,
        args: Any,
        error: ValidationError | ModelRetry,
    ) -> Any:
        """Shorten an error that quotes its input, which may be the value behind a pointer."""
        if isinstance(error, ValidationError):
            text = error.json(include_url=False)
            shown = await self._shortened(ctx, call, text)
            if shown is not None:
                raise ModelRetry(shown) from error
        raise error

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: Any,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: Any,
    ) -> Any:
        """Share the session with agents that run inside the tool, and shorten what it reports as a
        failure."""
        try:
            if _is_durable(ctx):
                return await handler(args)
            with within(await self._session_of(ctx)):
                return await handler(args)
        except (ToolRetryError, ToolFailedError) as error:
            part = error.tool_retry if isinstance(error, ToolRetryError) else error.tool_failed
            shown = await self._shortened(ctx, call, part.content)
            if shown is not None:
                part.content = shown
            raise

    async def after_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: Any,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        result: Any,
    ) -> Any:
        if tool_def.tool_kind in _READ_AGAIN or self._is_left_alone(call.tool_name):
            return result
        whole = result if isinstance(result, ToolReturn) else ToolReturn(return_value=result)
        value, beside = [
            None
            if self._kit.is_small(part)
            else await self.slim(ctx, list(self._taken), call.tool_name, call.tool_call_id, part)
            for part in (whole.return_value, whole.content)
        ]
        if value is None and beside is None:
            return result
        if whole is not result and value is not None:
            return value.content
        pointers = [one for part in (value, beside) if part is not None for one in part.pointers]
        return replace(
            whole,
            return_value=whole.return_value if value is None else value.content,
            content=whole.content if beside is None else beside.content,
            metadata={"artifacts": pointers} if whole.metadata is None else whole.metadata,
        )

    async def before_model_request(self, ctx: RunContext[Any], request_context: Any) -> Any:
        """Replace large results of deferred calls, which the host itself brings to a run."""
        last = ctx.messages[-1] if ctx.messages else None
        if ctx.run_step > 1 or not isinstance(last, ModelRequest):
            return request_context
        parts = [
            await self._slim_part(ctx, part) if isinstance(part, ToolReturnPart) else part
            for part in last.parts
        ]
        if any(new is not old for new, old in zip(parts, last.parts, strict=True)):
            shorter = replace(last, parts=parts)
            request_context.messages = [
                shorter if one is last else one for one in request_context.messages
            ]
            ctx.messages[-1] = shorter
        return request_context

    async def _slim_part(self, ctx: RunContext[Any], part: ToolReturnPart) -> ToolReturnPart:
        if part.tool_kind in _READ_AGAIN or self._is_left_alone(part.tool_name):
            return part
        done = await self.slim(
            ctx, list(self._taken), part.tool_name, part.tool_call_id, part.content
        )
        return part if done is None else replace(part, content=done.content)

    async def _shortened(self, ctx: RunContext[Any], call: Any, text: Any) -> str | None:
        """Return a stub of the text of an error, or None if it is small."""
        done = await self.slim(ctx, list(self._taken), call.tool_name, call.tool_call_id, text)
        return None if done is None else str(done.content)

    def _is_left_alone(self, tool: str) -> bool:
        return self._kit.is_ours(tool) or not self._kit.policy.enabled

    async def _session_of(self, ctx: RunContext[Any]) -> Session:
        if self._session is None:
            self._session = await in_thread(self.adapter.session, ctx.conversation_id)
        return self._session

    # What needs the store. Under durable execution these run as steps of their own.

    @durable_operation(name="resolve")
    async def resolve(
        self,
        ctx: RunContext[Any],
        taken: list[str],
        tool: str,
        given: dict[str, Any],
        schema: dict[str, Any],
    ) -> dict[str, Any] | str | None:
        """Return the arguments with values for pointers, a text for the model, or None if nothing
        changes."""
        kit, session = self.adapter.kit(taken), await self._session_of(ctx)
        resolved = await in_thread(kit.arguments, session, tool, given, schema)
        if isinstance(resolved, Refusal):
            return resolved.text
        return None if resolved is given else dict(resolved)

    @durable_operation(name="slim")
    async def slim(
        self,
        ctx: RunContext[Any],
        taken: list[str],
        tool: str,
        call_id: str,
        value: ToolReturnContent,
    ) -> ShorterReturn | None:
        """Return what replaces a tool's result, or None if nothing changes."""
        return await in_thread(
            _slimmed, self.adapter.kit(taken), await self._session_of(ctx), tool, call_id, value
        )

    @durable_operation(name="answer")
    async def answer(
        self, ctx: RunContext[Any], taken: list[str], tool: str, given: dict[str, Any]
    ) -> ToolReturnContent:
        """Run one of our tools."""
        parts = await in_thread(
            self.adapter.kit(taken).answer, await self._session_of(ctx), tool, given
        )
        return list(map(_content, parts)) if len(parts) > 1 else parts[0].text


def _is_durable(ctx: RunContext[Any]) -> bool:
    """Whether the run is inside a durable workflow, where only operations may use the store."""
    return any(
        getattr(one, "in_durable_context", False) is True for one in ctx.capabilities.values()
    )


def _slimmed(
    kit: Kit, session: Session, tool: str, call_id: str, value: Any
) -> ShorterReturn | None:
    about: dict[str, Any] = {"tool": tool, "call_id": call_id}
    if isinstance(value, BinaryContent):
        whole = _part(value)
        (part,) = kit.parts(session, [whole], **about)
        return None if part is whole else ShorterReturn(_content(part), [])
    if isinstance(value, list | tuple) and any(map(is_multi_modal_content, value)):
        shown = _slim_parts(kit, session, value, about)
        return None if shown is None else ShorterReturn(shown, [])
    outcome = kit.result(session, _as_json(value), **about)
    if not outcome.refs and outcome.failure is None:
        return None
    return ShorterReturn(outcome.content, [ref.pointer for ref in outcome.refs])


def _slim_parts(
    kit: Kit, session: Session, values: Sequence[Any], about: dict[str, Any]
) -> list[Any] | None:
    """Return what replaces a list with pictures or files, None if nothing changes."""
    parts = [_part(one) for one in values]
    done = kit.parts(session, parts, **about)
    if are_same(done, parts):
        return None
    kept = {id(part): value for part, value in zip(parts, values, strict=True)}
    return [kept[id(one)] if id(one) in kept else _content(one) for one in done]


def _part(value: Any) -> ContentPart:
    if isinstance(value, BinaryContent):
        return ContentPart(media_type=value.media_type, data=value.data)
    return ContentPart(value) if isinstance(value, str) else ContentPart(kept=value)


def _content(part: ContentPart) -> str | BinaryContent:
    return BinaryContent(part.data, media_type=part.media_type) if part.media_type else part.text


def _as_json(value: Any) -> Any:
    """Return a value as the framework would write it for the model; the value itself if that is not
    possible."""
    if isinstance(value, _PLAIN):
        return value
    try:
        return to_jsonable_python(value, by_alias=True)
    except Exception:  # noqa: BLE001 - the framework reports what it cannot write
        return value


@dataclass
class _WithArtifacts(WrapperToolset[Any]):
    """The tools of a run, and ours after them. If names clash, ours get a prefix."""

    capability: Coatcheck

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        tools = dict(await super().get_tools(ctx))
        self.capability._taken = tuple(tools)
        for tool in self.capability._kit.tools:
            about = ToolDefinition(
                name=tool.name,
                description=tool.description,
                parameters_json_schema=dict(tool.parameters),
            )
            tools[tool.name] = _ArtifactTool(
                toolset=self, tool_def=about, max_retries=1, args_validator=_ANYTHING
            )
        return tools

    async def call_tool(
        self, name: str, tool_args: Any, ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        if not isinstance(tool, _ArtifactTool):
            return await super().call_tool(name, tool_args, ctx, tool)
        given = tool_args if isinstance(tool_args, Mapping) else {"arguments": tool_args}
        return await self.capability.answer(ctx, list(self.capability._taken), name, dict(given))


class _ArtifactTool(ToolsetTool[Any]):
    """One of our tools."""
