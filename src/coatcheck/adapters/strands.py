"""Strands Agents: `Agent(plugins=[Coatcheck(store)])`, and `CoatcheckStorage(store)` as a storage
backend.

A middleware of the tool stage resolves pointers, so that only the tool sees their values. A hook
after the call replaces large results and errors. It runs after all other hooks, which see the whole
result, but before Strands' own `ContextOffloader` if the agent has one too: ours wins.
"""

from __future__ import annotations

import builtins
import copy
import json
import mimetypes
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, cast
from weakref import WeakKeyDictionary

from coatcheck import CoatcheckError, Policy, Ref, Session, Store
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

try:
    from strands import Agent
    from strands.hooks import AfterToolCallEvent, HookOrder
    from strands.middleware import ExecuteToolStage
    from strands.middleware.stages import ExecuteToolContext
    from strands.plugins import Plugin
    from strands.storage import Storage
    from strands.types.events import ToolResultEvent, TypedEvent
    from strands.types.exceptions import StorageError
    from strands.types.tools import (
        AgentTool,
        ToolGenerator,
        ToolResult,
        ToolResultContent,
        ToolSpec,
        ToolUse,
    )
    from strands.vended_plugins.context_offloader import ContextOffloader
except ImportError as error:
    raise missing("strands", "strands-agents>=1.62,<2") from error

__all__ = ["STATE_KEY", "Coatcheck", "CoatcheckStorage"]

STATE_KEY: Final = "coatcheck_session"
"""The key of the invocation state with which a host names the conversation, e.g. for all agents of
a swarm."""


class Coatcheck(Plugin):
    """A plugin that takes large tool results out of an agent's context.

    The session is the one that `STATE_KEY` of the invocation state names, else the session
    manager's, else a private one of the agent object. An agent that runs inside a tool of another
    shares that agent's session."""

    name = "coatcheck"

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
    ) -> None:
        self._adapter = Adapter(store, host="strands", policy=policy, ttl=ttl, only=only)
        self._kits: WeakKeyDictionary[Any, Kit] = WeakKeyDictionary()
        self._sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()
        self._lock = Lock()
        super().__init__()

    def forget(self, session_id: str) -> None:
        """Drop what belongs to a session of a session manager. Call it where you delete the
        session: Strands does not report that."""
        self._adapter.forget(session_id)

    def init_agent(self, agent: Agent) -> None:
        kit = self._kits[agent] = self._adapter.kit(agent.tool_registry.registry)
        for tool in kit.tools:
            agent.tool_registry.register_tool(_ArtifactTool(self, kit, tool))
        agent.add_middleware(ExecuteToolStage, self._execute)
        agent.add_hook(self._before_offloader, AfterToolCallEvent, order=-1)
        agent.add_hook(self._after_call, AfterToolCallEvent, order=HookOrder.SDK_LAST)

    async def _execute(
        self,
        context: ExecuteToolContext,
        next_call: Callable[[ExecuteToolContext], AsyncGenerator[TypedEvent, None]],
    ) -> AsyncGenerator[TypedEvent, None]:
        """Run a tool with the values of the pointers in its input. The message keeps the
        pointers."""
        tool, use, session = (
            context.tool,
            context.tool_use,
            await self.session(context.agent, context.invocation_state),
        )
        if (
            tool is not None
            and not isinstance(tool, _ArtifactTool)
            and isinstance(use["input"], dict)
        ):
            schema = tool.tool_spec["inputSchema"].get("json")
            given = await in_thread(
                self._kits[context.agent].arguments, session, use["name"], use["input"], schema
            )
            if isinstance(given, Refusal):
                yield ToolResultEvent(_result(use, [{"text": given.text}], "error"))
                return
            if given is not use["input"]:
                context = context.replace(tool_use={**use, "input": given})
        events = next_call(context)
        try:
            while True:
                with within(session):  # not around the yield, where code of the host runs
                    event = await anext(events, None)
                if event is None:
                    return
                yield event
        finally:
            await events.aclose()

    async def _before_offloader(self, event: AfterToolCallEvent) -> None:
        hooks = event.agent.hooks.get_callbacks_for(event)
        if any(isinstance(getattr(one, "__self__", None), ContextOffloader) for one in hooks):
            await self._after_call(event)

    async def _after_call(self, event: AfterToolCallEvent) -> None:
        """Replace what is large in a result, or in the text of an error."""
        tool = event.selected_tool
        if isinstance(tool, _ArtifactTool) or getattr(
            tool, "delegate", False
        ):  # a delegate's result ends the run
            return
        about = {"tool": event.tool_use["name"], "call_id": event.tool_use["toolUseId"]}
        session = await self.session(event.agent, event.invocation_state)
        content = await in_thread(
            _slimmed, self._kits[event.agent], session, event.result["content"], about
        )
        if content is not event.result["content"]:
            event.result = {**event.result, "content": content}

    async def session(self, agent: Any, state: Mapping[str, Any]) -> Session:
        """Return the session of a run: inside a tool of another agent, that agent's session."""
        shared = self._adapter.shared_session()
        if shared is not None:
            return shared
        manager = getattr(agent, "_session_manager", None)  # Strands has no public way to it
        host_id: str | None = state.get(STATE_KEY) or getattr(manager, "session_id", None)
        if STATE_KEY in state:
            return await in_thread(self._adapter.session, host_id)
        return await in_thread(self._session_of, agent, host_id)

    def _session_of(self, agent: Any, host_id: str | None) -> Session:
        """Return the session of an agent object. It is made once, even if the first calls are
        parallel."""
        with self._lock:
            if agent not in self._sessions:
                self._sessions[agent] = self._adapter.session(host_id)
            return self._sessions[agent]


class _ArtifactTool(AgentTool):
    """One of our tools, as Strands describes and runs it."""

    tool_type = "coatcheck"

    def __init__(self, plugin: Coatcheck, kit: Kit, tool: Any) -> None:
        super().__init__()
        self._plugin, self._kit, self._tool = plugin, kit, tool

    @property
    def tool_name(self) -> str:
        return str(self._tool.name)

    @property
    def tool_spec(self) -> ToolSpec:
        tool = self._tool
        schema = copy.deepcopy(dict(tool.parameters))  # Strands adds to it
        return {"name": tool.name, "description": tool.description, "inputSchema": {"json": schema}}

    async def stream(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: Any
    ) -> ToolGenerator:
        session = await self._plugin.session(invocation_state["agent"], invocation_state)
        parts = await in_thread(self._kit.answer, session, tool_use["name"], tool_use["input"])
        yield ToolResultEvent(_result(tool_use, [_block(part) for part in parts], "success"))


class CoatcheckStorage(Storage):
    """A storage backend for snapshots, offloaded results and memory: equal content is stored once,
    nothing expires.

    A key is a name in one session. A write is durable before the value that it replaces is
    dropped."""

    def __init__(self, store: Store | str | Path, *, session: str = "strands-storage") -> None:
        self._session = Adapter(store, host="strands").store.session(session, ttl=None)
        self._prefix = ""

    def namespace(self, prefix: str) -> CoatcheckStorage:
        """Return a view of the keys that begin with a prefix. It sees them without it."""
        scoped = copy.copy(self)
        scoped._prefix += _checked(f"{prefix}/", prefix=True)
        return scoped

    async def write(self, key: str, data: bytes) -> None:
        await self._run(self._write, self._prefix + _checked(key), bytes(data))

    async def read(self, key: str) -> bytes | None:
        found: bytes | None = await self._run(self._read, self._prefix + _checked(key))
        return found

    async def delete(self, key: str) -> None:
        await self._run(self._drop, self._prefix + _checked(key))

    async def list(self, query: str = "") -> builtins.list[str]:
        prefix = self._prefix + _checked(query, prefix=True)
        names: builtins.list[str] = await self._run(self._session.names, prefix=prefix)
        return sorted({name[len(self._prefix) : -2] for name in names})

    async def _run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return await in_thread(call, *args, **options)
        except CoatcheckError as error:
            raise StorageError(str(error)) from error

    def _newest(self, key: str) -> tuple[int, Ref | None]:
        """The number and the ref of a key's last write. Writes use two names in turn."""
        refs = [ref for slot in (0, 1) if (ref := self._session.ref(f"{key}@{slot}"))]
        last = max(refs, key=lambda ref: int(ref.metadata["write"]), default=None)
        return (int(last.metadata["write"]), last) if last else (0, None)

    def _write(self, key: str, data: bytes) -> None:
        number, last = self._newest(key)
        name = f"{key}@{(number + 1) % 2}"
        self._session.put(
            data, name=name, media_type="application/octet-stream", metadata={"write": number + 1}
        )
        if last is not None:
            self._session.forget(f"{key}@{number % 2}")

    def _read(self, key: str) -> bytes | None:
        _, last = self._newest(key)
        return None if last is None else self._session.open(last).read()

    def _drop(self, key: str) -> None:
        for slot in (0, 1):
            while self._session.forget(f"{key}@{slot}"):
                pass


def _checked(key: str, *, prefix: bool = False) -> str:
    """A key with single slashes, as in Strands' own backends."""
    parts = [part for part in key.split("/") if part]
    if "\\" in key or ".." in parts or not (parts or prefix):
        raise StorageError(
            f"invalid storage key {key!r}: use names with '/' between them, "
            "without '..' or backslashes"
        )
    return "/".join(parts) + ("/" if prefix and parts and key.endswith("/") else "")


def _result(
    use: ToolUse, content: list[ToolResultContent], status: Literal["success", "error"]
) -> ToolResult:
    return {"toolUseId": use["toolUseId"], "status": status, "content": content}


def _slimmed(
    kit: Kit, session: Session, blocks: list[ToolResultContent], about: dict[str, Any]
) -> list[ToolResultContent]:
    """Return blocks with stubs in place of what is large; the same object if nothing changed."""
    value = _json_in(blocks[0]) if len(blocks) == 1 else None
    if value is not None:
        outcome = kit.result(session, value, **about)
        return blocks if outcome.content is value else [{"text": outcome.text}]
    parts = [_part(block) for block in blocks]
    slim = kit.parts(session, parts, **about)
    if are_same(slim, parts):
        return blocks
    return [cast(ToolResultContent, one.original) if one.original else _block(one) for one in slim]


def _json_in(block: ToolResultContent) -> Any:
    """The list or object in a block, even if Strands has written it as text, so that it can be
    passed on as such."""
    text = block.get("text", "")
    if not text.startswith(("[", "{")):
        return block.get("json")
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if json.dumps(value, ensure_ascii=False) == text else None


def _part(block: ToolResultContent) -> ContentPart:
    """A block of Bedrock's kind as a part that a policy can judge. Unknown blocks are kept."""
    if "text" in block:
        return ContentPart(block["text"], original=block)
    if "json" in block:
        return ContentPart(
            json.dumps(block["json"], ensure_ascii=False, default=str), original=block
        )
    for kind in ("image", "document"):
        media = cast(dict[str, Any], block).get(kind)
        if media and isinstance(data := media.get("source", {}).get("bytes"), bytes):
            media_type = mimetypes.guess_type(f"file.{media.get('format', '')}")[0]
            return ContentPart("", media_type or "application/octet-stream", data, original=block)
    return ContentPart(kept=block, original=block)


def _block(part: ContentPart) -> ToolResultContent:
    if part.media_type:
        image = {"format": part.media_type.removeprefix("image/"), "source": {"bytes": part.data}}
        return cast(ToolResultContent, {"image": image})
    return {"text": part.text}
