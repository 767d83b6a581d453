"""How each peer is asked to offload a result, and to give it back: as an agent loop of its
framework would.

What a framework has made by the time the result is there (messages, events, states) is made in
`prepare`, while the clock is stopped. Limits are set so that all of them offload. `answer` is what
`run` gave.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_FEW = 1_000  # tokens: whatever is measured is larger


class Adapter(NamedTuple):
    """`run` and `read` may be coroutine functions. `model_text` is what the model gets."""

    prepare: Callable[[str, str], Any]
    run: Callable[[Any], Any]
    model_text: Callable[[Any], str]
    read: Callable[[Any], Any]


def coatcheck(folder: Path) -> Adapter:
    import coatcheck

    session = coatcheck.open(folder, durability="process").session("bench")
    return Adapter(
        lambda text, call_id: (text, call_id),
        lambda result: session.externalize(result[0], tool="search", call_id=result[1]),
        lambda outcome: str(outcome.text),
        lambda outcome: session.get(outcome.ref),
    )


def strands(folder: Path) -> Adapter:
    from strands import Agent
    from strands.hooks.events import AfterToolCallEvent
    from strands.models.model import Model
    from strands.vended_plugins.context_offloader import ContextOffloader, FileStorage

    silent = {name: lambda *args, **kwargs: None for name in Model.__abstractmethods__}
    storage = FileStorage(str(folder))
    offloader = ContextOffloader(storage=storage, max_result_tokens=_FEW + 1)
    agent = Agent(model=type("Silent", (Model,), silent)(), plugins=[offloader])

    def prepare(text: str, call_id: str) -> Any:
        return AfterToolCallEvent(
            agent=agent, selected_tool=None, tool_use={"toolUseId": call_id, "name": "search", "input": {}},
            invocation_state={}, result={"toolUseId": call_id, "status": "success", "content": [{"text": text}]},
        )  # fmt: skip

    async def run(event: Any) -> Any:
        await offloader._handle_tool_result(event)
        return event.result["content"][0]["text"]

    async def read(model_text: str) -> str:
        name = model_text.rpartition("[Stored references:]\n")[2].split()[0]
        content, _ = await FileStorage(str(folder)).retrieve(name)
        return str(content.decode())

    return Adapter(prepare, run, str, read)


def deepagents(folder: Path) -> Adapter:
    from deepagents.backends import FilesystemBackend
    from deepagents.middleware.filesystem import FilesystemMiddleware
    from langchain_core.messages import ToolMessage

    backend = FilesystemBackend(root_dir=str(folder), virtual_mode=True)
    middleware = FilesystemMiddleware(backend=backend, tool_token_limit_before_evict=_FEW)
    return Adapter(
        lambda text, call_id: ToolMessage(content=text, tool_call_id=call_id, name="search"),
        middleware._intercept_large_tool_result,
        lambda message: str(message.content),
        lambda message: (folder / "large_tool_results" / message.tool_call_id).read_text(),
    )


def agno(folder: Path) -> Adapter:
    from agno.db.sqlite import SqliteDb
    from agno.offload.store import ResultStore, result_id_for

    store = ResultStore(db=SqliteDb(db_file=str(folder / "agno.db")))

    def run(result: tuple[str, str]) -> tuple[str, str]:
        text, call_id = result
        envelope = store.offload_for_model(
            session_id="s",
            run_id="r",
            tool_call_id=call_id,
            tool_name="search",
            tool_args={},
            output=text,
        )
        return str(envelope), call_id

    return Adapter(
        lambda text, call_id: (text, call_id),
        run,
        lambda answer: str(answer[0]),
        lambda answer: store.payload(result_id_for("s", "r", answer[1])),
    )


def headroom(folder: Path) -> Adapter:
    os.environ["HEADROOM_CCR_SQLITE_PATH"] = str(folder / "ccr.db")
    from headroom.cache.compression_store import get_compression_store

    store = get_compression_store()
    return Adapter(
        lambda text, call_id: (text, call_id),
        lambda result: store.store(result[0], "", tool_name="search", tool_call_id=result[1]),
        str,
        lambda key: store.retrieve(key).original_content,
    )


def adk(folder: Path) -> Adapter:
    from google.adk.artifacts import FileArtifactService
    from google.genai.types import Part

    service = FileArtifactService(root_dir=str(folder))
    whose = {"app_name": "bench", "user_id": "u", "session_id": "s"}

    async def run(result: tuple[str, str]) -> str:
        text, call_id = result
        part = Part.from_bytes(data=text.encode(), mime_type="text/plain")
        await service.save_artifact(**whose, filename=call_id, artifact=part)
        return call_id

    async def read(call_id: str) -> str:
        part = await service.load_artifact(**whose, filename=call_id)
        return str(part.inline_data.data.decode())

    return Adapter(lambda text, call_id: (text, call_id), run, str, read)


def haystack(folder: Path) -> Adapter:
    from haystack.components.agents.state import State
    from haystack.dataclasses import ChatMessage, ToolCall
    from haystack.hooks.tool_result_offloading import (
        FileSystemToolResultStore,
        OffloadOverChars,
        ToolResultOffloadHook,
    )

    store = FileSystemToolResultStore(root=folder)
    hook = ToolResultOffloadHook(store=store, offload_strategies={"*": OffloadOverChars(_FEW)})

    def prepare(text: str, call_id: str) -> Any:
        call = ToolCall(tool_name="search", arguments={}, id=call_id)
        state = State(schema={"messages": {"type": list[ChatMessage]}})
        state.set("messages", [ChatMessage.from_tool(tool_result=text, origin=call)])
        return state

    def run(state: Any) -> Any:
        hook.run(state)
        return state.data["messages"][-1].tool_call_result

    return Adapter(
        prepare,
        run,
        lambda result: str(result.result),
        lambda result: next(folder.glob(f"*{result.origin.id}*")).read_text(),
    )


def refcache(folder: Path) -> Adapter:
    from mcp_refcache import RefCache
    from mcp_refcache.backends import SQLiteBackend
    from mcp_refcache.context import CharacterFallback

    cache = RefCache(
        name="bench", backend=SQLiteBackend(folder / "cache.db"), tokenizer=CharacterFallback()
    )

    def run(result: tuple[str, str]) -> Any:
        text, call_id = result
        reference = cache.set(call_id, text, tool_name="search")
        return cache.get(reference.ref_id)

    return Adapter(
        lambda text, call_id: (text, call_id),
        run,
        lambda response: str(response.model_dump_json()),
        lambda response: cache.resolve(response.ref_id),
    )
