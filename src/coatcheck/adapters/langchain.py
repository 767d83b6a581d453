"""LangChain: `create_agent(…, middleware=[Coatcheck(store)])`. Put it first in the list, so that it
is the outermost.

Large tool results become stubs before they reach the state, so the next request, the checkpoint and
the stream have the stub. Arguments of tools may contain pointers. Results of `return_direct` tools,
interrupts and exceptions pass unchanged. In a graph of your own, use `ToolNode([*tools,
*coat.tools], wrap_tool_call=coat.wrap_tool_call, awrap_tool_call=coat.awrap_tool_call)`.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from coatcheck import Policy, Session, Store
from coatcheck.adapters import (
    LANGGRAPH,
    TTL,
    Adapter,
    ContentPart,
    Kit,
    Refusal,
    in_thread,
    missing,
    within,
)

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
    from langchain.tools.tool_node import ToolCallRequest
    from langchain_core.messages import ToolMessage
    from langchain_core.runnables import RunnableConfig
    from langchain_core.tools import BaseTool, StructuredTool
    from langgraph.types import Command
except ImportError as error:
    raise missing("langchain", "langchain>=1.4,<2") from error


class Coatcheck(AgentMiddleware[Any, Any, Any]):
    """Middleware that takes large tool results out of an agent's context.

    The config's `thread_id` names the session. A run without one has a session of its own. Agents
    that a tool runs share the session of the call."""

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        policy: Policy | None = None,
        ttl: float | None = TTL,
    ) -> None:
        super().__init__()
        self._adapter = Adapter(store, host=LANGGRAPH, policy=policy, ttl=ttl)
        self._sessions: WeakKeyDictionary[Any, dict[Any, Session]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._tools: dict[tuple[str, ...], list[BaseTool]] = {}
        self.tools: Sequence[BaseTool] = self._tools_of(self._adapter.kit())

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(self._with_tools(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        return await handler(self._with_tools(request))

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]
    ) -> Any:
        call = self._prepare(request)
        if call.answer is not None:
            return call.answer
        with within(call.session):
            answer = handler(call.request)
        return _slim(call, answer)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        call = await in_thread(self._prepare, request)
        if call.answer is not None:
            return call.answer
        with within(call.session):
            answer = await handler(call.request)
        return await in_thread(_slim, call, answer)

    def forget(self, thread_id: str) -> None:
        """End the session of a thread. Call it where you delete the thread, if its checkpointer is
        not slimmed."""
        self._adapter.forget(thread_id)

    def _with_tools(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request with our tools under their names beside the host's: LangChain drops ours if a
        name clashes."""
        kit = self._kit(request.tools)
        if kit is self._adapter.kit():
            return request
        others = [tool for tool in request.tools if not isinstance(tool, _OurTool)]
        return request.override(tools=[*self._tools_of(kit), *others])

    def _prepare(self, request: ToolCallRequest) -> _Call:
        """What to call, with values in place of pointers."""
        call, runtime = request.tool_call, request.runtime
        kit, session = (
            self._kit(runtime.tools),
            self._session(runtime.config, runtime.stream_writer),
        )
        if kit.is_ours(call["name"]):
            tool = next(one for one in self._tools_of(kit) if one.name == call["name"])
            return _Call(
                kit, session, call, request if request.tool is tool else request.override(tool=tool)
            )
        given = kit.arguments(session, call["name"], call["args"], _schema(request.tool))
        if isinstance(given, Refusal):
            words = ToolMessage(
                given.text, tool_call_id=call["id"], name=call["name"], status="error"
            )
            return _Call(kit, session, call, request, words)
        if given is not call["args"]:
            request = request.override(tool_call={**call, "args": dict(given)})
        return _Call(kit, session, call, request)

    def _kit(self, tools: Iterable[Any]) -> Kit:
        return self._adapter.kit(
            one.name for one in tools if isinstance(one, BaseTool) and not isinstance(one, _OurTool)
        )

    def _session(self, config: Mapping[str, Any], run: Any) -> Session:
        """The session of the thread, or of the run if it has none. It is kept for the run.
        LangGraph makes one stream writer for each run, which is how we recognise it."""
        thread = (config.get("configurable") or {}).get("thread_id")
        is_run = "<locals>" in getattr(
            run, "__qualname__", ""
        )  # outside of a run, it is a function of the module
        with self._lock:
            known = self._sessions.setdefault(run, {}) if is_run else {}
            if thread not in known:
                known[thread] = self._adapter.session(None if thread is None else str(thread))
            return known[thread]

    def _tools_of(self, kit: Kit) -> list[BaseTool]:
        names = tuple(tool.name for tool in kit.tools)
        if names not in self._tools:
            self._tools[names] = [self._tool(kit, tool) for tool in kit.tools]
        return self._tools[names]

    def _tool(self, kit: Kit, tool: Any) -> BaseTool:
        def answer(config: RunnableConfig, **arguments: Any) -> Any:
            session = self._session(config, None)
            blocks = [_our_block(part) for part in kit.answer(session, tool.name, arguments)]
            return blocks[0]["text"] if len(blocks) == 1 and blocks[0]["type"] == "text" else blocks

        async def answer_later(config: RunnableConfig, **arguments: Any) -> Any:
            return await in_thread(answer, config, **arguments)

        return _OurTool(
            name=tool.name,
            description=tool.description,
            args_schema=tool.parameters,
            func=answer,
            coroutine=answer_later,
        )


@dataclass(frozen=True)
class _Call:
    """A call of a tool: what the model sent, and what to run, or the answer if a pointer leads
    nowhere."""

    kit: Kit
    session: Session
    sent: Any
    request: ToolCallRequest
    answer: ToolMessage | None = None


class _OurTool(StructuredTool):
    """One of our tools. The class distinguishes it from a tool of the host with the same name."""


def _slim(call: _Call, answer: Any) -> Any:
    """The answer of a tool with stubs in place of what is large. Messages that answer another call
    stay as they are."""
    tool = call.request.tool
    if call.kit.is_ours(call.sent["name"]) or (tool is not None and tool.return_direct):
        return answer
    if isinstance(answer, list):
        return [_slim(call, one) for one in answer]
    if isinstance(answer, Command):
        return _slim_command(call, answer)
    if isinstance(answer, ToolMessage) and answer.tool_call_id == call.sent["id"]:
        return _slim_message(call, answer)
    return answer


def _slim_command(call: _Call, command: Command[Any]) -> Command[Any]:
    update = command.update
    if not isinstance(update, dict) or not isinstance(update.get("messages"), list):
        return command
    messages = [_slim(call, one) for one in update["messages"]]
    return replace(command, update={**update, "messages": messages})


def _slim_message(call: _Call, message: ToolMessage) -> ToolMessage:
    """The message with stubs in place of what is large; the same object if nothing is."""
    kit, session, tool = call.kit, call.session, call.sent["name"]
    about: Any = {"tool": tool, "call_id": call.sent["id"], "arguments": call.sent["args"]}
    content: Any = message.content
    if isinstance(content, list):
        parts = [_part(block) for block in content]
        before = {id(part): block for part, block in zip(parts, content, strict=True)}
        after = kit.parts(session, parts, **about)
        content = [before[id(part)] if id(part) in before else _our_block(part) for part in after]
    elif message.status == "error":
        content = kit.failure(session, content, tool=tool, call_id=call.sent["id"])
    else:
        value = _value(call.request.tool, content)
        outcome = kit.result(session, value, **about)
        content = content if outcome.content is value else outcome.text
    is_same = content == message.content
    return message if is_same else message.model_copy(update={"content": content})


def _schema(tool: BaseTool | None) -> Mapping[str, Any] | None:
    """The JSON schema of what a model may send to a tool, without the parameters that LangChain
    injects."""
    try:
        schema: Any = tool.tool_call_schema if tool is not None else None
        return schema if schema is None or isinstance(schema, dict) else schema.model_json_schema()
    except Exception:  # noqa: BLE001 - a schema that cannot be shown as JSON; values are then passed as they are
        return None


def _value(tool: BaseTool | None, text: str) -> Any:
    """What a tool returned before LangChain turned it into a text; the text if the tool may have
    written it itself."""
    function = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
    returns = getattr(function, "__annotations__", {}).get("return", "str")
    if returns in (str, "str", Any, "Any") or text[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
        return value if json.dumps(value, ensure_ascii=False) == text else text
    except (ValueError, RecursionError):
        return text


def _part(block: Any) -> ContentPart:
    """A content block (of LangChain, of its older versions or of a provider) as a part that can be
    judged."""
    if isinstance(block, str):
        return ContentPart(block)
    source = block.get("source") if isinstance(block.get("source"), dict) else block
    text = (
        source.get("data")
        if source.get("type") == "text" and source is not block
        else block.get("text")
    )
    if isinstance(text, str):
        return ContentPart(text)
    media_type, data = (
        source.get("mime_type") or source.get("media_type"),
        source.get("base64") or source.get("data"),
    )
    image = block.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image or block.get("url")
    if isinstance(url, str) and url.startswith("data:"):
        head, _, data = url.partition(",")
        media_type = head.removeprefix("data:").removesuffix(";base64")
    try:
        if isinstance(media_type, str) and isinstance(data, str):
            return ContentPart(media_type=media_type, data=base64.b64decode(data, validate=True))
        is_media = str(block.get("type")).startswith(("image", "audio", "video"))
        return (
            ContentPart(kept=block)
            if is_media
            else ContentPart(json.dumps(block, ensure_ascii=False))
        )
    except (binascii.Error, TypeError, ValueError):
        return ContentPart(kept=block)


def _our_block(part: ContentPart) -> Any:
    if not part.media_type:
        return {"type": "text", "text": part.text}
    return {"type": "image", "base64": part.base64, "mime_type": part.media_type}
