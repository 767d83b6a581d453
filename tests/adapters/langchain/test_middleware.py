"""The LangChain middleware, beyond the adapter suite: shapes of results, commands, and custom
graphs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain.tools import ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters.langchain import Coatcheck
from tests.adapters.langchain.driver import ScriptedChat
from tests.adapters.suite import LOG, ROWS, ScriptedModel, fetch_log, pointer_in

CONFIG: Any = {"configurable": {"thread_id": "thread"}}
PICTURE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x10\x00\x00\x00\x10\x08\x02\x00\x00\x00"
    + bytes(5_000)
).decode()
PDF = base64.b64encode(b"%PDF-1.7\n" + bytes(100_000)).decode()


@pytest.fixture
def store() -> Iterator[Store]:
    with coatcheck.open("memory:") as store:
        yield store


def messages(
    store: Store,
    tools: Any,
    *script: Any,
    middleware: Any = (),
    config: Any = CONFIG,
    **options: Any,
) -> Any:
    model = ScriptedChat(script=ScriptedModel(*script))
    agent = create_agent(model, tools, middleware=[Coatcheck(store, **options), *middleware])
    return agent.invoke({"messages": [("user", "Begin.")]}, config)["messages"]


def first(store: Store, result: Any, **options: Any) -> ToolMessage:
    """The message for a call of a tool with this result."""

    @tool
    def look() -> Any:
        """Look."""
        return result

    found = next(
        one
        for one in messages(store, [look], [("look", {})], **options)
        if isinstance(one, ToolMessage)
    )
    assert isinstance(found, ToolMessage)
    return found


PICTURES = [
    {"type": "image", "base64": PICTURE, "mime_type": "image/png"},
    {"type": "image", "source_type": "base64", "data": PICTURE, "mime_type": "image/png"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    {"type": "image_url", "image_url": f"data:image/png;base64,{PICTURE}"},
    {"type": "image", "url": "https://example.org/picture.png"},
]


@pytest.mark.parametrize("picture", PICTURES, ids=json.dumps)
def test_a_picture_beside_a_long_text_is_unchanged(store: Store, picture: Any) -> None:
    content: Any = first(store, [{"type": "text", "text": LOG}, picture]).content
    assert content[1] == picture
    assert store.session("langgraph:thread").get(pointer_in(content[0]["text"])) == LOG


FILES = [
    {"type": "file", "base64": PDF, "mime_type": "application/pdf"},
    {"type": "file", "source_type": "base64", "data": PDF, "mime_type": "application/pdf"},
    {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
    },
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "-".join(file))
def test_a_large_file_becomes_a_stub(store: Store, file: Any) -> None:
    content: Any = first(store, [{"type": "text", "text": "Here it is."}, file]).content
    assert content[0] == {"type": "text", "text": "Here it is."}
    assert store.session("langgraph:thread").get(
        pointer_in(content[1]["text"])
    ) == base64.b64decode(PDF)


LARGE = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LOG}},
    {"type": "json", "json": {"rows": ROWS}},
    {
        "type": "search_result",
        "title": "t",
        "source": "s",
        "content": [{"type": "text", "text": LOG}],
    },
]


@pytest.mark.parametrize("block", LARGE, ids=lambda block: block["type"])
def test_a_large_block_of_another_kind_becomes_a_stub(store: Store, block: Any) -> None:
    content: Any = first(store, [block]).content
    assert len(json.dumps(content)) < 2_000
    assert pointer_in(content[0]["text"])


@pytest.mark.parametrize(
    "result", ["", [], ["", "text"], [{"type": "text", "text": ""}], {"a": 1}, None, 7]
)
def test_a_small_result_is_the_same_as_without_the_middleware(store: Store, result: Any) -> None:
    assert (
        first(store, result).content == first(store, result, policy=Policy(enabled=False)).content
    )


def test_json_that_a_tool_wrote_itself_stays_the_same_text(store: Store) -> None:
    def written() -> str:
        """Return rows as text."""
        return json.dumps(ROWS)

    found = messages(store, [written], [("written", {})])
    assert store.session("langgraph:thread").get(pointer_in(str(found[2].text))) == json.dumps(ROWS)


def test_the_message_of_a_command_is_slimmed_and_the_rest_of_it_passes(store: Store) -> None:
    @tool
    def fetch(runtime: ToolRuntime) -> Any:
        """Fetch."""
        note = ToolMessage(LOG, tool_call_id="another call")
        return Command(
            update={"messages": [ToolMessage(LOG, tool_call_id=runtime.tool_call_id), note]}
        )

    found = messages(store, [fetch], [("fetch", {})])
    assert pointer_in(str(found[2].text))
    assert found[3].text == LOG


def test_an_error_message_of_another_middleware_is_bounded(store: Store) -> None:
    def fail() -> str:
        """Fail."""
        raise ValueError(LOG)

    retry = ToolRetryMiddleware(max_retries=0, on_failure="continue")
    found = messages(store, [fail], [("fail", {})], middleware=[retry])
    assert found[2].status == "error"
    assert len(str(found[2].text)) < 5_000


def test_arguments_that_do_not_fit_are_reported_without_the_payload(store: Store) -> None:
    @tool
    def add(numbers: list[int]) -> int:
        """Add."""
        return sum(numbers)

    def call(results: Any) -> Any:
        return [("add", {"numbers": pointer_in(results[0].text)})]

    found = messages(store, [fetch_log, add], [("fetch_log", {})], call)
    assert found[4].status == "error"
    assert len(str(found[4].text)) < 5_000


def test_a_custom_graph_can_use_the_tools_and_the_wrapper(store: Store) -> None:
    coat = Coatcheck(store)
    script = ScriptedModel(
        [("fetch_log", {})],
        lambda results: [
            ("get_artifact", {"pointer": pointer_in(results[0].text), "grep": "ERROR"})
        ],
    )
    tools = [tool(fetch_log), *coat.tools]
    model = ScriptedChat(script=script).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    node = ToolNode(tools, wrap_tool_call=coat.wrap_tool_call, awrap_tool_call=coat.awrap_tool_call)
    graph.add_node("tools", node)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, ["tools", END])
    graph.add_edge("tools", "model")
    graph.compile().invoke(
        {"messages": [("user", "Begin.")]}
    )  # without a thread: one private session for the run
    assert "code 4711" in script.results[-1].text


def test_callbacks_see_the_raw_value(store: Store) -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.outputs: list[str] = []

        def on_tool_end(self, output: Any, **_: Any) -> None:
            self.outputs.append(str(output.text))

    seen = Seen()
    messages(store, [fetch_log], [("fetch_log", {})], config={**CONFIG, "callbacks": [seen]})
    assert seen.outputs == [LOG]


def test_pointers_of_a_run_without_a_thread_open_only_in_that_run(store: Store) -> None:
    def read(results: Any) -> Any:
        return [("get_artifact", {"pointer": pointer_in(results[0].text), "grep": "ERROR"})]

    coat = Coatcheck(store)
    texts = []
    for script in (
        ScriptedModel([("fetch_log", {})], read),
        ScriptedModel([("fetch_log", {})], read),
    ):
        agent = create_agent(ScriptedChat(script=script), [fetch_log], middleware=[coat])
        asyncio.run(agent.ainvoke({"messages": [("user", "Begin.")]}))
        texts.append(script.results[-1].text)
    assert all("code 4711" in one for one in texts)
    private = [one.session_id for one in store.sessions() if store.session(one.session_id).list()]
    assert len(private) == 2


def test_a_middleware_inside_ours_sees_the_whole_value(store: Store) -> None:
    class Inner(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            answer = handler(request)
            assert answer.content == LOG
            return answer

    assert pointer_in(
        str(messages(store, [fetch_log], [("fetch_log", {})], middleware=[Inner()])[2].text)
    )
