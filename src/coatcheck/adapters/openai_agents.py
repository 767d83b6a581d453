"""The adapter for the OpenAI Agents SDK: `agent = slim(agent, store)`.

Each tool of the agent is wrapped once and in place, since the SDK tells tools apart by identity: large results become
stubs before they reach the run's items and its session, and pointers in arguments become values. The tools of its MCP
servers, and the agents that it hands over to or uses as tools, are covered too. The session of a run is the one of the
`within` around it, else the one of `RunConfig.group_id`; without either, a run has a private one.
"""

from __future__ import annotations

import base64
import functools
import json
import mimetypes
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from coatcheck import Policy, Session, Store
from coatcheck._toolkit import Purpose, Tool
from coatcheck.adapters import (
    TTL,
    Adapter,
    ContentPart,
    Kit,
    Refusal,
    in_thread,
    missing,
    shortened,
    widened_schema,
    within,
)
from coatcheck.ids import SCHEME

TESTED: Final = "openai-agents>=0.24,<1"

try:
    from agents import Agent, FunctionTool, Handoff, ToolOutputFileContent, ToolOutputImage, ToolOutputText
    from agents.strict_schema import ensure_strict_json_schema
    from agents.tool import resolve_function_tool_failure_error_function
    from agents.tool_context import ToolContext
except ImportError as error:
    raise missing("openai-agents", TESTED) from error

AnyAgent = TypeVar("AnyAgent", bound="Agent[Any]")

_MARK: Final = "__coatcheck__"  # on what is wrapped already
_RUN: Final = "_coatcheck_run"  # on the usage of a run, which all of its calls share
_SHAPES: Final = {"text": ToolOutputText, "image": ToolOutputImage, "file": ToolOutputFileContent}


def slim(
    agent: AnyAgent,
    store: Store | Session | str | Path,
    *,
    policy: Policy | None = None,
    ttl: float | None = TTL,
    only: Iterable[Purpose] | None = None,
) -> AnyAgent:
    """Change an agent so that large results of its tools are stubs, and return the same agent.

    Agents that it hands over to or uses as tools are changed too. Call it once the agent has all its tools: what is
    added later is not wrapped, and a clone has to be passed again if it has MCP servers."""
    _Slimming(Adapter(store, host="openai-agents", policy=policy, ttl=ttl, only=only)).agent(agent)
    return agent


def forget(store: Store, group_id: str) -> None:
    """End the session of a conversation that was deleted."""
    Adapter(store, host="openai-agents").forget(group_id)


class _Slimming:
    """What one call of `slim` does to the agents that it reaches."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def agent(self, agent: Any) -> None:
        if getattr(agent, _MARK, None) is not None or not self.adapter.policy.enabled:
            return
        taken = {tool.name for tool in agent.tools}
        names = _Names(self.adapter, taken | {_name_of(one) for one in agent.handoffs})
        object.__setattr__(agent, _MARK, names)
        for tool in agent.tools:
            self.tool(tool, names)
        for one in agent.handoffs:
            self.hand_off(one)
        if ours := [_artifact_tool(tool, names, self) for tool in names.kit.tools]:
            agent.tools = [*agent.tools, *ours]
        self.servers(agent, names)

    def tool(self, tool: Any, names: _Names) -> None:
        """Wrap the inside of a tool, so that the SDK still finds its own marks and its own handling of errors."""
        other = getattr(tool, "_agent_instance", None)
        if isinstance(other, Agent):
            self.agent(other)
        if not isinstance(tool, FunctionTool) or isinstance(tool, _ArtifactTool):
            return
        invoker: Any = tool.on_invoke_tool
        inside = getattr(invoker, "_invoke_tool_impl", invoker)
        if getattr(inside, _MARK, None) is not None:
            return
        wrapped = self._wrapped(tool, inside, names)
        if inside is invoker:
            tool.on_invoke_tool = wrapped
        else:
            invoker._invoke_tool_impl = wrapped
        schema = _with_pointers(tool.params_json_schema)
        tool.params_json_schema = ensure_strict_json_schema(schema) if tool.strict_json_schema else schema

    def hand_off(self, target: Any) -> None:
        if isinstance(target, Agent):
            self.agent(target)
        elif isinstance(target, Handoff) and getattr(target.on_invoke_handoff, _MARK, None) is None:
            invoke = target.on_invoke_handoff

            @functools.wraps(invoke)
            async def handed_over(*args: Any, **kwargs: Any) -> Any:
                agent = await invoke(*args, **kwargs)
                self.agent(agent)
                return agent

            setattr(handed_over, _MARK, self)
            target.on_invoke_handoff = handed_over

    def servers(self, agent: Any, names: _Names) -> None:
        """Wrap the tools of MCP servers, which the SDK makes again for each turn."""
        get_tools = agent.get_mcp_tools

        @functools.wraps(get_tools)
        async def slimmed_tools(*args: Any, **kwargs: Any) -> Any:
            tools = await get_tools(*args, **kwargs)
            names.add(tool.name for tool in tools)
            for tool in tools:
                self.tool(tool, names)
            return tools

        object.__setattr__(agent, "get_mcp_tools", slimmed_tools)

    def _wrapped(self, tool: FunctionTool, inside: Any, names: _Names) -> Any:
        schema = dict(tool.params_json_schema)

        @functools.wraps(inside)
        async def invoke(ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002 - the name of the framework
            session = await self.session(ctx)
            kit, about = names.kit, {"tool": tool.name, "call_id": getattr(ctx, "tool_call_id", None)}
            given = _arguments(input)
            if given is not None:
                resolved = await in_thread(kit.arguments, session, tool.name, given, schema)
                if isinstance(resolved, Refusal):
                    return resolved.text
                if resolved is not given:
                    input = json.dumps(resolved)  # noqa: A001 - likewise
                    ctx._function_tool_arguments = None  # an approval has parsed the pointers
            try:
                with within(session):
                    value = await inside(ctx, input)
            except Exception as error:
                if resolve_function_tool_failure_error_function(tool, ctx) is not None:  # the model gets it
                    text = str(error)
                    shown = await in_thread(kit.failure, session, text, **about)
                    if shown != text:
                        shortened(error, shown)
                raise
            if kit.is_small(value) or tool.output_json_schema is not None or _ends_the_run(ctx, tool.name):
                return value
            return await in_thread(_slimmed, kit, session, value, about)

        setattr(invoke, _MARK, self)
        return invoke

    async def session(self, ctx: Any) -> Session:
        """Return the session of a run. All calls of a run without an id share a private one."""
        group = getattr(getattr(ctx, "run_config", None), "group_id", None)
        if not group:
            group = getattr(ctx.usage, _RUN, None) or f"run {secrets.token_hex(16)}"
            object.__setattr__(ctx.usage, _RUN, group)
        return await in_thread(self.adapter.session, group)


class _Names:
    """The names of the other tools of an agent, and our tools beside them."""

    def __init__(self, adapter: Adapter, taken: Iterable[str]) -> None:
        self._adapter = adapter
        self._taken = set(taken)
        self.ours: list[FunctionTool] = []

    @property
    def kit(self) -> Kit:
        return self._adapter.kit(self._taken)

    def add(self, names: Iterable[str]) -> None:
        """Note the tools of a server. If one has the name of one of ours, ours are renamed before they are sent."""
        self._taken |= set(names)
        for ours, tool in zip(self.ours, self.kit.tools, strict=True):
            ours.name = tool.name


class _ArtifactTool(FunctionTool):
    """One of our tools."""


def _artifact_tool(tool: Tool, names: _Names, slimming: _Slimming) -> FunctionTool:
    async def invoke(ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002 - the name of the framework
        session = await slimming.session(ctx)
        parts = await in_thread(names.kit.answer, session, ours.name, _parsed(input))
        return parts[0].text if len(parts) == 1 else [_as_output(one) for one in parts]

    ours = _ArtifactTool(tool.name, tool.description, dict(tool.parameters), invoke, strict_json_schema=False)
    names.ours.append(ours)
    return ours


def _slimmed(kit: Kit, session: Session, value: Any, about: dict[str, Any]) -> Any:
    """Return what the model gets for a result: text, structured outputs of the SDK, or any other value."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    outputs = [_structured(one) for one in items]
    if not items or None in outputs:
        return kit.result(session, value, **about).content
    parts = [_part(one) for one in outputs]
    done = kit.parts(session, parts, **about)
    if len(done) == len(parts) and all(new is old for new, old in zip(done, parts, strict=True)):
        return value
    kept = {id(part): one for part, one in zip(parts, items, strict=True)}
    shown = [kept[id(one)] if id(one) in kept else _as_output(one) for one in done]
    return shown if isinstance(value, list | tuple) else shown[0]


def _structured(value: Any) -> Any:
    """Return an output of the SDK as its class, or None if the value is not one."""
    if isinstance(value, tuple(_SHAPES.values())):
        return value
    shape = _SHAPES.get(str(value.get("type"))) if isinstance(value, dict) else None
    try:
        return None if shape is None else shape.model_validate(value)
    except ValueError:
        return None


def _part(output: Any) -> ContentPart:
    if isinstance(output, ToolOutputText):
        return ContentPart(output.text)
    data = output.image_url if isinstance(output, ToolOutputImage) else output.file_data
    head, comma, body = (data or "").partition(",")
    if not comma and isinstance(output, ToolOutputFileContent):
        head, body = mimetypes.guess_type(output.filename or "")[0] or "application/octet-stream", head
    try:
        decoded = base64.b64decode(body, validate=True)
    except ValueError:
        decoded = b""
    media_type = head.removeprefix("data:").partition(";")[0]
    return ContentPart(media_type=media_type, data=decoded) if decoded and media_type else ContentPart(kept=output)


def _as_output(part: ContentPart) -> Any:
    if not part.media_type:
        return ToolOutputText(text=part.text)
    return ToolOutputImage(image_url=f"data:{part.media_type};base64,{part.base64}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return text


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call if they may contain pointers."""
    given = _parsed(text) if SCHEME in text else None
    return given if isinstance(given, dict) else None


def _with_pointers(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow pointers at the top and in objects that the schema defines: strict schemas bind the model."""
    inner = {
        name: widened_schema(one) if isinstance(one, dict) else one for name, one in schema.get("$defs", {}).items()
    }
    return {**widened_schema(schema), **({"$defs": inner} if inner else {})}


def _ends_the_run(ctx: Any, name: str) -> bool:
    """Whether the result of this tool may be the final output, which is for the user."""
    behavior = getattr(getattr(ctx, "agent", None), "tool_use_behavior", None)
    return behavior == "stop_on_first_tool" or (isinstance(behavior, dict) and name in behavior["stop_at_tool_names"])


def _name_of(target: Any) -> str:
    return str(target.tool_name if isinstance(target, Handoff) else Handoff.default_tool_name(target))
