"""The adapter for the OpenAI Agents SDK: `agent = slim(agent, store)`.

`slim` returns a copy of the agent, with copies of its tools: nothing that another agent may share
is changed. In the copy, large results become stubs before they reach the run's items and its
session, and pointers in arguments become values. The agents that it hands over to or uses as tools
are copied too, and the tools of MCP servers are covered.

The session of a run is the one of the `within` around it, else the one of `RunConfig.group_id`.
Without either, a run has a private one, and finds what earlier runs of the conversation have stored
by its history: see `_history`.
"""

from __future__ import annotations

import base64
import copy
import functools
import inspect
import json
import mimetypes
import types
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final, TypeVar

from coatcheck import CoatcheckError, Policy, Session, Store
from coatcheck._toolkit import Purpose, Tool
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
    widened_schema,
    within,
)
from coatcheck.adapters._history import HistoryItem, PastCall, note, past_calls, recall, turn_of
from coatcheck.ids import SCHEME
from coatcheck.store import private_id

TESTED: Final = "openai-agents>=0.24,<1"

try:
    from agents import (
        Agent,
        AgentHooks,
        FunctionTool,
        Handoff,
        ToolOutputFileContent,
        ToolOutputImage,
        ToolOutputText,
    )
    from agents.strict_schema import ensure_strict_json_schema
    from agents.tool import (
        FunctionToolCustomDataContext,
        resolve_function_tool_failure_error_function,
    )
    from agents.tool_context import ToolContext
except ImportError as error:
    raise missing("openai-agents", TESTED) from error

AnyAgent = TypeVar("AnyAgent", bound="Agent[Any]")
Invoke = Callable[[ToolContext[Any], str], Awaitable[Any]]

_MARK: Final = "_coatcheck"  # on our copies
_SHAPES: Final = {"text": ToolOutputText, "image": ToolOutputImage, "file": ToolOutputFileContent}


def slim(
    agent: AnyAgent,
    store: Store | Session | str | Path,
    *,
    policy: Policy | None = None,
    ttl: float | None = TTL,
    only: Iterable[Purpose] | None = None,
) -> AnyAgent:
    """Return a copy of an agent that gets stubs for large results. The agent itself is not changed.

    Agents that it hands over to or uses as tools are copied too. Call it once the agent has all its
    tools: what is added to the agent later is not in the copy. If an agent was slimmed before, the
    last call counts."""
    adapter = Adapter(store, host="openai-agents", policy=policy, ttl=ttl, only=only)
    if not adapter.policy.enabled:
        return agent
    slimming = _Slimming(adapter)
    copied: AnyAgent = slimming.agent(agent)
    slimming.watch()
    return copied


def forget(store: Store, group_id: str) -> None:
    """End the session of a conversation that was deleted."""
    Adapter(store, host="openai-agents").forget(group_id)


class _Slimming:
    """What one call of `slim` does to the agents that it reaches. It copies each of them once."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.runs = _Runs(adapter)
        # By the `id` of the original, which the copy keeps alive.
        self._copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = RLock()

    def agent(self, agent: Any) -> Any:
        """Return the copy of an agent, made once."""
        with self._lock:
            mark = _mark_of(agent)
            if mark is not None and mark.slimming is self:
                return agent
            found = self._copies.get(id(agent))
            return self._copied_agent(agent) if found is None else found

    def _copied_agent(self, agent: Any) -> Any:
        copied = copy.copy(agent)
        object.__setattr__(copied, _MARK, _Mark(self, agent))
        self._copies[id(agent)] = copied  # before the others: they may hand over to it
        theirs = [tool for tool in agent.tools if not isinstance(tool, _ArtifactTool)]
        taken = [tool.name for tool in theirs] + [_name_of(one) for one in agent.handoffs]
        names = _Names(self.adapter, taken)
        ours = [self._artifact_tool(tool, names) for tool in names.kit.tools]
        copied.tools = [*(self.tool(tool, names) for tool in theirs), *ours]
        copied.handoffs = [self.hand_off(one) for one in agent.handoffs]
        self._wrap_servers(copied, names)
        if isinstance(copied, Agent) and isinstance(copied.hooks, _Watching):
            copied.hooks = copied.hooks.hooks
        return copied

    def watch(self) -> None:
        """Watch what the models of the agents are sent. Agents with the same name are left out: the
        SDK may refuse to save a run if they have hooks."""
        agents = [one for one in self._copies.values() if isinstance(one, Agent)]
        names = Counter(agent.name for agent in agents)
        for agent in agents:
            if names[agent.name] == 1:
                agent.hooks = _Watching(self.runs, agent.hooks)

    def tool(self, tool: Any, names: _Names) -> Any:
        """Return the copy of a tool. Its inside is wrapped, so that the SDK still finds its own
        marks and its own handling of errors. Hosted tools stay as they are."""
        if not isinstance(tool, FunctionTool):
            return tool
        mark = _mark_of(tool)
        tool = tool if mark is None else mark.original
        copied = copy.copy(tool)
        object.__setattr__(copied, _MARK, _Mark(self, tool))
        invoker: Any = copied.on_invoke_tool
        is_own_invoker = (
            hasattr(invoker, "_invoke_tool_impl") and invoker is not tool.on_invoke_tool
        )
        inside = invoker._invoke_tool_impl if is_own_invoker else tool.on_invoke_tool
        other = getattr(tool, "_agent_instance", None)
        if isinstance(other, Agent) and _runs_agent(inside):
            copied._agent_instance = self.agent(other)
            inside = _with_agent(inside, copied._agent_instance)
        if is_own_invoker:
            invoker._invoke_tool_impl = self._wrapped(tool, inside, names)
        else:
            copied.on_invoke_tool = self._wrapped(tool, inside, names)
        copied.custom_data_extractor = self._noting(tool.custom_data_extractor)
        schema = _with_pointers(tool.params_json_schema)
        copied.params_json_schema = (
            ensure_strict_json_schema(schema) if tool.strict_json_schema else schema
        )
        return copied

    def hand_off(self, target: Any) -> Any:
        """Return the copy of an agent to hand over to, or of the SDK's object for it."""
        if not isinstance(target, Handoff):
            return self.agent(target)
        mark = _mark_of(target)
        target = target if mark is None else mark.original
        invoke = target.on_invoke_handoff
        known = getattr(target, "_agent_ref", None)
        agent = None if known is None else known()
        copied_agent = None if agent is None else self.agent(agent)

        @functools.wraps(invoke)
        async def handed_over(*args: Any, **kwargs: Any) -> Any:
            chosen = await invoke(*args, **kwargs)
            return copied_agent if chosen is agent else self.agent(chosen)

        copied = copy.copy(target)
        object.__setattr__(copied, _MARK, _Mark(self, target))
        copied.on_invoke_handoff = handed_over
        if copied_agent is not None:
            # A run that is restored from JSON finds its agents there.
            copied._agent_ref = weakref.ref(copied_agent)
        return copied

    def _wrap_servers(self, copied: Any, names: _Names) -> None:
        """Wrap the tools of MCP servers, which the SDK makes again for each turn."""
        get_tools = type(copied).get_mcp_tools

        @functools.wraps(get_tools)
        async def slimmed_tools(*args: Any, **kwargs: Any) -> Any:
            tools = await get_tools(copied, *args, **kwargs)
            names.add(tool.name for tool in tools)
            return [self.tool(tool, names) for tool in tools]

        object.__setattr__(copied, "get_mcp_tools", slimmed_tools)

    def _wrapped(self, tool: FunctionTool, inside: Invoke, names: _Names) -> Invoke:
        schema = dict(tool.params_json_schema)

        @functools.wraps(inside)
        async def invoke(ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002 - the name of the framework
            if not self._covers(ctx):
                return await inside(ctx, input)
            arguments = _arguments(input)
            session = await self._session(ctx, recalls=arguments is not None)
            if arguments is not None:
                resolved = await in_thread(
                    names.kit.arguments, session, tool.name, arguments, schema
                )
                if isinstance(resolved, Refusal):
                    return resolved.text
                if resolved is not arguments:
                    input = json.dumps(resolved)  # noqa: A001 - likewise
                    ctx._function_tool_arguments = None  # an approval has parsed the pointers
            return await _run_slimmed(tool, inside, ctx, input, kit=names.kit, session=session)

        return invoke

    def _artifact_tool(self, tool: Tool, names: _Names) -> FunctionTool:
        async def invoke(ctx: ToolContext[Any], input: str) -> Any:  # noqa: A002 - the name of the framework
            session = await self._session(ctx, recalls=True)
            parts = await in_thread(names.kit.answer, session, ours.name, _parsed(input))
            return parts[0].text if len(parts) == 1 else [_as_output(one) for one in parts]

        ours = _ArtifactTool(
            tool.name, tool.description, dict(tool.parameters), invoke, strict_json_schema=False
        )
        object.__setattr__(ours, _MARK, _Mark(self, ours))
        ours.custom_data_extractor = self._noting(None)
        names.ours.append(ours)
        return ours

    def _covers(self, ctx: Any) -> bool:
        """Whether the agent of this call has our tools. Someone may have given a copy of a tool to
        another agent, whose model could not open a stub."""
        if not self.adapter.kit().tools:
            return True
        tools = getattr(getattr(ctx, "agent", None), "tools", ())
        marks = [_mark_of(one) for one in tools if isinstance(one, _ArtifactTool)]
        return any(mark is not None and mark.slimming is self for mark in marks)

    async def _session(self, ctx: ToolContext[Any], *, recalls: bool) -> Session:
        """Return the session of a call. With `recalls`, a private one is first granted what earlier
        runs of the conversation have stored."""
        run = self.runs.private(ctx)
        if run is None:
            return await in_thread(self.adapter.session, _group_of(ctx))
        if recalls:
            return await in_thread(run.recalled_session, ctx)
        return await in_thread(run.opened_session)

    def _noting(self, extractor: Any) -> Any:
        """Return an extractor of custom data that also notes the output that the model gets."""

        async def extract(done: FunctionToolCustomDataContext) -> Any:
            ctx, output = done.tool_context, _text_in(done.raw_item.get("output"))
            run = self.runs.private(ctx)
            if run is not None and SCHEME in output:
                await in_thread(run.note_output, ctx, output)
            found = None if extractor is None else extractor(done)
            return await found if inspect.isawaitable(found) else found

        return extract


@dataclass(frozen=True)
class _Mark:
    """What one of our copies was made by, and from."""

    slimming: _Slimming
    original: Any

    def __deepcopy__(self, memo: Any) -> _Mark:
        return self  # a store cannot be copied


class _Runs:
    """The runs of the agents that one call of `slim` has copied. A run is known by its `Usage`, an
    object that all of its calls share, those of nested agents too."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._runs: dict[int, tuple[weakref.ref[Any], _Run]] = {}

    def __deepcopy__(self, memo: Any) -> _Runs:
        return self

    def of(self, context: Any) -> _Run:
        usage = context.usage
        known = self._runs.get(id(usage))
        if known is not None and known[0]() is usage:
            return known[1]
        run = _Run(self._adapter)
        number = id(usage)
        self._runs[number] = weakref.ref(usage, lambda _: self._runs.pop(number, None)), run
        return run

    def private(self, ctx: Any) -> _Run | None:
        """Return the run of a call if it has a private session: neither a group nor a `within`
        around it names another."""
        run, shared = self.of(ctx), self._adapter.shared_session()
        if shared is not None:
            return run if shared is run.session else None
        return None if _group_of(ctx) else run


class _Run:
    """A run without a name: its private session, and the history that it continues."""

    def __init__(self, adapter: Adapter) -> None:
        self.session: Session | None = None
        self.sent: dict[int, list[Any]] = {}
        """What the models of the run were sent last, by the id of the agent."""
        self._adapter = adapter
        self._noted: set[str] = set()  # pointers of the session
        self._recalled: set[PastCall] = set()
        self._lock = Lock()

    def opened_session(self) -> Session:
        """Return the session. It is made once, even if the first calls are parallel."""
        with self._lock:
            if self.session is None:
                self.session = self._adapter.session(None)
            return self.session

    def recalled_session(self, ctx: ToolContext[Any]) -> Session:
        """Return the session, after it was granted what the history proves: the input of the run,
        what its models were sent since, and this call, which may have waited for an approval."""
        session = self.opened_session()
        with self._lock, suppress(CoatcheckError), self._adapter.store.batching:
            for call in self._past_calls(ctx):
                if not call.pointers or call in self._recalled:
                    continue
                with suppress(CoatcheckError):  # then the pointers are not found
                    recall(self._adapter, session, call)
                    self._recalled.add(call)
        return session

    def _past_calls(self, ctx: ToolContext[Any]) -> Iterator[PastCall]:
        key = self._adapter.store.secret
        if isinstance(getattr(ctx.agent, "hooks", None), _Watching):
            yield PastCall(_turn(key, ctx), ctx.tool_call_id, ctx.tool_name, ctx.tool_arguments)
        for history in (ctx.turn_input, *self.sent.values()):
            yield from past_calls(key, _items(history))

    def note_output(self, ctx: ToolContext[Any], output: str) -> None:
        """Note an output that names artifacts, whether or not this run has them: if it does not, an
        equal output proves nothing."""
        call = PastCall("", ctx.tool_call_id, ctx.tool_name, ctx.tool_arguments, output)
        session = self.session
        if session is None or call.pointers <= self._noted:
            return
        with suppress(CoatcheckError):  # then the pointers end with the run
            self._note(ctx, session.session_id, call)
            self._noted |= {one for one in call.pointers if session.ref(one) is not None}

    def note_calls(self, context: Any, calls: Iterable[Any]) -> None:
        """Note calls that name artifacts and may wait for an approval: the run may be saved, and
        continue in another process. A run without a session of its own cannot have stored them."""
        session_id = private_id() if self.session is None else self.session.session_id
        for one in calls:
            with suppress(CoatcheckError):
                self._note(context, session_id, PastCall("", one.call_id, one.name, one.arguments))

    def _note(self, context: Any, session_id: str, call: PastCall) -> None:
        turn = _turn(self._adapter.store.secret, context)
        note(self._adapter, session_id, replace(call, turn=turn))


class _Watching(AgentHooks[Any]):
    """The hooks of an agent, which also see what its model is sent and what it calls."""

    def __init__(self, runs: _Runs, hooks: AgentHooks[Any] | None) -> None:
        self.hooks = hooks
        self._runs = runs
        self._others: AgentHooks[Any] = AgentHooks() if hooks is None else hooks

    async def on_start(self, context: Any, agent: Any) -> None:
        await self._others.on_start(context, agent)

    async def on_end(self, context: Any, agent: Any, output: Any) -> None:
        await self._others.on_end(context, agent, output)

    async def on_handoff(self, context: Any, agent: Any, source: Any) -> None:
        await self._others.on_handoff(context, agent, source)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        await self._others.on_tool_start(context, agent, tool)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        await self._others.on_tool_end(context, agent, tool, result)

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        self._runs.of(context).sent[id(agent)] = list(input_items)
        await self._others.on_llm_start(context, agent, system_prompt, input_items)

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        calls = [one for one in response.output if one.type == "function_call"]
        calls = [one for one in calls if SCHEME in one.arguments and _may_wait(agent, one.name)]
        if calls:
            await in_thread(self._runs.of(context).note_calls, context, calls)
        await self._others.on_llm_end(context, agent, response)


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
        """Note the tools of a server. If one has the name of one of ours, ours are renamed before
        they are sent."""
        self._taken |= set(names)
        for ours, tool in zip(self.ours, self.kit.tools, strict=True):
            ours.name = tool.name


class _ArtifactTool(FunctionTool):
    """One of our tools."""


def _mark_of(one: Any) -> _Mark | None:
    return getattr(one, _MARK, None)


def _may_wait(agent: Any, name: str) -> bool:
    """Whether a call of this tool may wait for an approval: of the call, or of one inside its
    agent. The tools of MCP servers are not in the list."""
    tool = next((one for one in agent.tools if one.name == name), None)
    needs_approval = getattr(tool, "needs_approval", True)
    return needs_approval is not False or getattr(tool, "_agent_instance", None) is not None


def _group_of(ctx: Any) -> str | None:
    return getattr(getattr(ctx, "run_config", None), "group_id", None) or None


def _runs_agent(invoke: Any) -> bool:
    """Whether this is the function of an agent's tool, which closes over the agent that it runs."""
    return "self" in getattr(getattr(invoke, "__code__", None), "co_freevars", ())


def _with_agent(invoke: Any, agent: Any) -> Any:
    """Return the function of an agent's tool with another agent in place of its own. The SDK has no
    public way to do that."""
    cells = dict(zip(invoke.__code__.co_freevars, invoke.__closure__, strict=True))
    cells["self"] = types.CellType(agent)
    changed = types.FunctionType(
        invoke.__code__,
        invoke.__globals__,
        invoke.__name__,
        invoke.__defaults__,
        tuple(cells.values()),
    )
    return functools.update_wrapper(changed, invoke)


def _turn(key: bytes, context: Any) -> str:
    return turn_of(key, _items(context.turn_input))


def _items(history: Iterable[Any]) -> Iterator[HistoryItem]:
    """Yield the messages, calls and outputs of a history, without what differs between its
    forms."""
    for one in history:
        if not isinstance(one, dict):
            continue
        kind, call_id = one.get("type", "message"), str(one.get("call_id"))
        if kind == "function_call":
            yield HistoryItem("call", str(one.get("name")), call_id, str(one.get("arguments")))
        elif kind == "function_call_output":
            yield HistoryItem("output", "", call_id, _text_in(one.get("output")))
        elif kind == "message":
            yield HistoryItem("message", str(one.get("role")), "", _text_in(one.get("content")))


def _text_in(content: Any) -> str:
    """Return the text of a message or an output, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(one["text"]) for one in parts if isinstance(one, dict) and "text" in one)


async def _run_slimmed(
    tool: FunctionTool,
    inside: Invoke,
    ctx: ToolContext[Any],
    arguments: str,
    *,
    kit: Kit,
    session: Session,
) -> Any:
    """Run a tool, and return its result with stubs in place of what is large. What a program reads
    stays."""
    about = {"tool": tool.name, "call_id": getattr(ctx, "tool_call_id", None)}
    try:
        with within(session):
            value = await inside(ctx, arguments)
    except Exception as error:
        if resolve_function_tool_failure_error_function(tool, ctx) is None:
            raise
        text = str(error)  # the model gets it
        shown = await in_thread(kit.failure, session, text, **about)
        if shown != text:
            shortened(error, shown)
        raise
    if tool.output_json_schema is not None or _ends_the_run(ctx, tool.name):
        return value
    return value if kit.is_small(value) else await in_thread(_slimmed, kit, session, value, about)


def _slimmed(kit: Kit, session: Session, value: Any, about: dict[str, Any]) -> Any:
    """Return what the model gets for a result: text, structured outputs of the SDK, or any other
    value."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    outputs = [_structured(one) for one in items]
    if not items or None in outputs:
        return kit.result(session, value, **about).content
    parts = [_part(one) for one in outputs]
    done = kit.parts(session, parts, **about)
    if are_same(done, parts):
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
        head, body = (
            mimetypes.guess_type(output.filename or "")[0] or "application/octet-stream",
            head,
        )
    try:
        decoded = base64.b64decode(body, validate=True)
    except ValueError:
        decoded = b""
    media_type = head.removeprefix("data:").partition(";")[0]
    return (
        ContentPart(media_type=media_type, data=decoded)
        if decoded and media_type
        else ContentPart(kept=output)
    )


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
    """Allow pointers at the top and in objects that the schema defines: strict schemas bind the
    model."""
    inner = {
        name: widened_schema(one) if isinstance(one, dict) else one
        for name, one in schema.get("$defs", {}).items()
    }
    return {**widened_schema(schema), **({"$defs": inner} if inner else {})}


def _ends_the_run(ctx: Any, name: str) -> bool:
    """Whether the result of this tool may be the final output, which is for the user."""
    behavior = getattr(getattr(ctx, "agent", None), "tool_use_behavior", None)
    return behavior == "stop_on_first_tool" or (
        isinstance(behavior, dict) and name in behavior["stop_at_tool_names"]
    )


def _name_of(target: Any) -> str:
    return str(
        target.tool_name if isinstance(target, Handoff) else Handoff.default_tool_name(target)
    )
