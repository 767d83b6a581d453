"""Agents of LangChain with a scripted model: the driver of the adapter suite, for sync, async and
streaming runs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepagents.backends import StateBackend
from deepagents.middleware.filesystem import FilesystemMiddleware
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.tools import ToolRuntime
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, ToolException, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from coatcheck import Store
from coatcheck.adapters.langchain import Coatcheck
from coatcheck.parts import Part
from tests.adapters.suite import (
    Ask,
    Colleague,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    SeenResult,
)


class LangChainDriver(Driver):
    def run(self, scenario: Scenario) -> Run:
        saver = InMemorySaver()
        events: list[str] = []
        agents = [self._as_tool(one, scenario) for one in scenario.agents]
        tools = [*_tools(scenario.tools, scenario.final), *agents, *scenario.shared]
        if not scenario.hand_off:
            graph = self._agent(
                scenario.model, tools, scenario, approvals=scenario.approvals, saver=saver
            )
        else:
            graph = self._with_hand_off(scenario.hand_off, tools, scenario, saver, events)
        config = (
            {"configurable": {"thread_id": scenario.conversation}} if scenario.conversation else {}
        )
        if scenario.conversation is None:  # a checkpointer needs a thread id
            graph.checkpointer = None
        error: BaseException | None = None
        final = ""
        given: Any = {"messages": [("user", scenario.prompt)]}
        try:
            while True:
                messages, interrupts = self.invoke(graph, given, config)
                if not interrupts:
                    break
                requested = [
                    one["name"] for each in interrupts for one in each.value["action_requests"]
                ]
                events += [f"approval: {name}" for name in requested]
                given = Command(resume={"decisions": [{"type": "approve"} for _ in requested]})
            final = str(messages[-1].text)
        except BaseException as raised:  # noqa: BLE001 - a cancelled run is an outcome too
            error = raised
        return Run(scenario.model, final, error, saved_bytes(saver), tuple(events))

    def invoke(self, graph: Any, given: Any, config: Any) -> tuple[list[AnyMessage], Sequence[Any]]:
        done = graph.invoke(given, config)
        return done["messages"], done.get("__interrupt__", ())

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return tool(function)

    def content(self, parts: Sequence[Part]) -> Any:
        return [_as_block(part) for part in parts]

    def retry(self, text: str) -> Exception:
        error: Exception = ToolException(text)
        return error

    def transfer(self, agent: str) -> Ask:
        return f"transfer_to_{agent}", {}

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(conversation)

    def _agent(
        self,
        model: ScriptedModel,
        tools: Iterable[BaseTool],
        scenario: Scenario,
        *,
        approvals: frozenset[str] = frozenset(),
        saver: InMemorySaver | None = None,
        name: str | None = None,
    ) -> Any:
        ours = [Coatcheck(scenario.store, policy=scenario.policy)] if scenario.store else []
        theirs: list[Any] = (
            [HumanInTheLoopMiddleware(dict.fromkeys(approvals, True))] if approvals else []
        )
        outside = [FilesystemMiddleware(backend=StateBackend())] if scenario.offloader else []
        chat = ScriptedChat(script=model)
        return create_agent(
            chat, list(tools), middleware=[*outside, *ours, *theirs], checkpointer=saver, name=name
        )

    def _as_tool(self, colleague: Colleague, scenario: Scenario) -> BaseTool:
        agent = self._agent(colleague.model, _tools(colleague.tools), scenario)

        def delegate(task: str) -> str:
            """Give a task to another agent."""
            return str(agent.invoke({"messages": [("user", task)]})["messages"][-1].text)

        async def delegate_later(task: str) -> str:
            return str((await agent.ainvoke({"messages": [("user", task)]}))["messages"][-1].text)

        made = tool(colleague.name)(delegate)
        made.coroutine = delegate_later
        return made

    def _with_hand_off(
        self,
        other: Colleague,
        tools: list[BaseTool],
        scenario: Scenario,
        saver: InMemorySaver,
        events: list[str],
    ) -> Any:
        """A graph of two agents: a tool of the first one goes to the second."""

        @tool(f"transfer_to_{other.name}")
        def transfer(runtime: ToolRuntime) -> Any:
            """Hand the conversation over to another agent."""
            events.append(f"hand_off: {other.name}")
            answer = ToolMessage(
                "handed over", tool_call_id=runtime.tool_call_id, name=f"transfer_to_{other.name}"
            )
            messages = [*runtime.state["messages"], answer]
            return Command(goto=other.name, graph=Command.PARENT, update={"messages": messages})

        graph = StateGraph(MessagesState)
        graph.add_node(
            "first", self._agent(scenario.model, [*tools, transfer], scenario, name="first")
        )
        graph.add_node(
            other.name, self._agent(other.model, _tools(other.tools), scenario, name=other.name)
        )
        graph.add_edge(START, "first")
        return graph.compile(checkpointer=saver)


class AsyncLangChainDriver(LangChainDriver):
    def invoke(self, graph: Any, given: Any, config: Any) -> tuple[list[AnyMessage], Sequence[Any]]:
        done = asyncio.run(graph.ainvoke(given, config))
        return done["messages"], done.get("__interrupt__", ())


class StreamingLangChainDriver(LangChainDriver):
    """Streams everything at once: values, updates, messages and output of tools."""

    def invoke(self, graph: Any, given: Any, config: Any) -> tuple[list[AnyMessage], Sequence[Any]]:
        return asyncio.run(self._streamed(graph, given, config))

    async def _streamed(
        self, graph: Any, given: Any, config: Any
    ) -> tuple[list[AnyMessage], Sequence[Any]]:
        messages: list[AnyMessage] = []
        interrupts: Sequence[Any] = ()
        async for mode, chunk in graph.astream(
            given, config, stream_mode=["values", "updates", "messages", "custom"]
        ):
            if mode == "values":
                messages, interrupts = (
                    chunk.get("messages", messages),
                    chunk.get("__interrupt__", ()),
                )
        return messages, interrupts


class ScriptedChat(BaseChatModel):
    """A chat model that asks the script what to answer. Requests are in the form of chat
    completions."""

    script: Any
    bound: Any = ()

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        return self.model_copy(
            update={"bound": [convert_to_openai_tool(one)["function"] for one in tools]}
        )

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        results = [_as_result(one) for one in messages if isinstance(one, ToolMessage)]
        turn = self.script.respond(convert_to_openai_messages(messages), list(self.bound), results)
        calls = [{"name": one.name, "args": dict(one.parsed()), "id": one.id} for one in turn.calls]
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage(turn.text, tool_calls=calls))]
        )


def saved_bytes(saver: InMemorySaver) -> bytes:
    """Everything that a checkpointer has written: the values of the state, and the writes of each
    step."""
    writes = [each[2] for one in saver.writes.values() for each in one.values()]
    checkpoints = [
        each
        for one in saver.storage.values()
        for two in one.values()
        for three in two.values()
        for each in three[:2]
    ]
    return b"".join(data for _, data in [*saver.blobs.values(), *writes, *checkpoints])


def _tools(
    functions: Iterable[Callable[..., Any]], final: frozenset[str] = frozenset()
) -> list[BaseTool]:
    made = [tool(one, return_direct=one.__name__ in final) for one in functions]
    for one in made:
        one.handle_tool_error = True  # for `ToolException`, with which a tool asks for a retry
    return made


def _as_block(part: Part) -> dict[str, Any]:
    if not part.media_type:
        return {"type": "text", "text": part.text}
    kind = "image" if part.media_type.startswith("image/") else "file"
    return {"type": kind, "base64": part.base64, "mime_type": part.media_type}


def _as_result(message: ToolMessage) -> SeenResult:
    blocks = message.content if isinstance(message.content, list) else []
    media = tuple(
        base64.b64decode(one["base64"])
        for one in blocks
        if isinstance(one, dict) and "base64" in one
    )
    return SeenResult(
        id=message.tool_call_id,
        name=message.name or "",
        text=str(message.text),
        is_error=message.status == "error",
        media=media,
    )
