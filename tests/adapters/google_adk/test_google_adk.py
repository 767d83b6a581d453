"""What the plugin and the artifact service for Google ADK do beyond the adapter suite."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps.app import App
from google.adk.artifacts import artifact_util
from google.adk.errors.input_validation_error import InputValidationError
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions.in_memory_session_service import InMemorySessionService
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import BaseModel, Field

import coatcheck
from coatcheck import Store
from coatcheck.adapters.google_adk import Coatcheck, CoatcheckArtifacts
from tests.adapters.pages import figures_of, run_example, run_page
from tests.adapters.suite import LOG, fetch_log

FILE: dict[str, Any] = {
    "app_name": "app",
    "user_id": "user",
    "session_id": "session",
    "filename": "report.txt",
}
SCOPE: dict[str, Any] = {name: FILE[name] for name in ("app_name", "user_id", "session_id")}


class Scripted(BaseLlm):
    """A model that makes the calls of a script, then says "Done.", and records the requests."""

    script: list[Any]
    requests: list[LlmRequest] = Field(default_factory=list)

    async def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> Any:
        self.requests.append(llm_request)
        part = types.Part(text="Done.")
        if self.script:
            name, args = self.script.pop(0)
            part = types.Part(function_call=types.FunctionCall(name=name, args=args))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def run_agent(
    agent: LlmAgent, plugins: list[BasePlugin], prompt: str, files: Any = None
) -> list[Event]:
    """Run an agent, and return its events."""

    async def play() -> list[Event]:
        app = App(name="app", root_agent=agent, plugins=plugins)
        runner = Runner(app=app, session_service=InMemorySessionService(), artifact_service=files)
        await runner.session_service.create_session(**SCOPE)
        run = runner.run_async(
            new_message=user_message(prompt), user_id="user", session_id="session"
        )
        return [event async for event in run]

    return asyncio.run(play())


def user_message(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


def responses(contents: list[types.Content]) -> list[dict[str, Any]]:
    parts = [part for content in contents for part in content.parts or []]
    return [part.function_response.response or {} for part in parts if part.function_response]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


class Listener(BasePlugin):
    """Records the results that it sees."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        super().__init__(name)
        self.seen = seen

    async def after_tool_callback(self, *, result: Any, **_: Any) -> None:
        self.seen.append(result)


def test_other_plugins_and_callbacks_of_the_agent_get_the_whole_result(store: Store) -> None:
    seen: list[Any] = []

    def after(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> None:
        seen.append(tool_response)

    model = Scripted(model="scripted", script=[("fetch_log", {})])
    agent = LlmAgent(name="agent", model=model, tools=[fetch_log], after_tool_callback=after)
    run_agent(agent, [Listener("one", seen), Coatcheck(store), Listener("two", seen)], "Begin.")
    assert seen == [LOG] * 3
    assert "art:" in responses(model.requests[-1].contents)[0]["result"]


def test_a_callback_that_returns_a_large_result_is_bounded_too(store: Store) -> None:
    def after(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"status": "ok", "lines": LOG.splitlines()}

    model = Scripted(model="scripted", script=[("small", {})])

    def small() -> str:
        """Return little."""
        return "little"

    agent = LlmAgent(name="agent", model=model, tools=[small], after_tool_callback=after)
    run_agent(agent, [Coatcheck(store)], "Begin.")
    assert len(json.dumps(responses(model.requests[-1].contents)[0])) < 4_000


def test_the_answer_of_a_client_to_a_long_running_call_becomes_a_stub(store: Store) -> None:
    def ask_a_person(question: str) -> None:
        """Ask a person, who answers later."""

    model = Scripted(model="scripted", script=[("ask_a_person", {"question": "which log?"})])
    agent = LlmAgent(name="agent", model=model, tools=[LongRunningFunctionTool(ask_a_person)])
    sessions = InMemorySessionService()

    async def play() -> None:
        runner = Runner(
            app=App(name="app", root_agent=agent, plugins=[Coatcheck(store)]),
            session_service=sessions,
        )
        await sessions.create_session(**SCOPE)
        names = {"user_id": "user", "session_id": "session"}
        events = [
            event async for event in runner.run_async(new_message=user_message("Begin."), **names)
        ]
        call = next(call for event in events for call in event.get_function_calls())
        answer = types.FunctionResponse(id=call.id, name=call.name, response={"result": LOG})
        message = types.Content(role="user", parts=[types.Part(function_response=answer)])
        assert [event async for event in runner.run_async(new_message=message, **names)]
        assert answer.response == {"result": LOG}

    asyncio.run(play())
    assert responses(model.requests[-1].contents)[-1]["result"].startswith('{"stub"')


def test_the_result_of_a_tool_of_an_mcp_server_keeps_its_blocks(store: Store) -> None:
    def call_server() -> dict[str, Any]:
        """Call a tool of a server."""
        return {
            "content": [{"type": "text", "text": LOG}, {"type": "text", "text": "short"}],
            "isError": False,
        }

    model = Scripted(model="scripted", script=[("call_server", {})])
    run_agent(
        LlmAgent(name="agent", model=model, tools=[call_server]), [Coatcheck(store)], "Begin."
    )
    response = responses(model.requests[-1].contents)[0]
    assert [sorted(block) for block in response["content"]] == [["text", "type"]] * 2
    assert response["content"][0]["text"].startswith('{"stub"')
    assert (response["content"][1]["text"], response["isError"]) == ("short", False)


class Summary(BaseModel):
    text: str


def test_a_structured_answer_is_whole(store: Store) -> None:
    model = Scripted(
        model="scripted", script=[("fetch_log", {}), ("set_model_response", {"text": LOG})]
    )
    agent = LlmAgent(name="agent", model=model, tools=[fetch_log], output_schema=Summary)
    events = run_agent(agent, [Coatcheck(store)], "Begin.")
    final = events[-1].content
    assert final is not None
    assert json.loads((final.parts or [])[0].text or "") == {"text": LOG}


def test_an_agent_without_functions_that_must_answer_in_a_schema_gets_no_tools(
    store: Store,
) -> None:
    model = Scripted(model="scripted", script=[])
    run_agent(
        LlmAgent(name="agent", model=model, output_schema=Summary), [Coatcheck(store)], "Begin."
    )
    assert not model.requests[0].config.tools


# The artifact service


def test_versions_count_from_0_and_equal_content_is_stored_once(store: Store) -> None:
    async def play() -> None:
        service = CoatcheckArtifacts(store)
        parts = [types.Part(text=LOG), types.Part(text="short"), types.Part(text=LOG)]
        assert [await service.save_artifact(artifact=part, **FILE) for part in parts] == [0, 1, 2]
        assert [await service.load_artifact(version=number, **FILE) for number in range(3)] == parts
        assert await service.load_artifact(**FILE) == parts[2]
        assert await service.load_artifact(version=3, **FILE) is None
        assert await service.list_versions(**FILE) == [0, 1, 2]

    asyncio.run(play())
    assert store.stats().artifacts == 2


def test_a_file_that_a_tool_saves_is_not_in_the_session_of_the_run(store: Store) -> None:
    async def save(tool_context: ToolContext) -> Any:
        """Save a file."""
        return await tool_context.save_artifact("report.txt", types.Part(text="a report"))

    service = CoatcheckArtifacts(store)
    model = Scripted(model="scripted", script=[("save", {})])
    run_agent(
        LlmAgent(name="agent", model=model, tools=[save]),
        [Coatcheck(store)],
        "Begin.",
        files=service,
    )
    assert responses(model.requests[-1].contents) == [{"result": 0}]
    assert asyncio.run(service.load_artifact(**FILE)) == types.Part(text="a report")


def test_metadata_belongs_to_a_version(store: Store) -> None:
    async def play() -> None:
        service = CoatcheckArtifacts(store)
        picture = types.Part(
            inline_data=types.Blob(data=b"\x89PNG", mime_type="image/png", display_name="a.png")
        )
        for number in range(2):
            await service.save_artifact(
                artifact=picture, custom_metadata={"number": number, "long": "x" * 9_000}, **FILE
            )
        versions = await service.list_artifact_versions(**FILE)
        assert [one.custom_metadata["number"] for one in versions] == [0, 1]
        assert {one.mime_type for one in versions} == {"image/png"}
        assert await service.get_artifact_version(version=1, **FILE) == versions[1]
        assert await service.load_artifact(**FILE) == picture

    asyncio.run(play())


def test_a_deleted_file_is_gone_and_a_new_one_begins_at_0(store: Store) -> None:
    async def play() -> None:
        service = CoatcheckArtifacts(store)
        other = {**FILE, "filename": "copy.txt"}
        for text in ("one", "two", "one"):
            await service.save_artifact(artifact=types.Part(text=text), **FILE)
        await service.save_artifact(artifact=types.Part(text="one"), **other)
        await service.delete_artifact(**FILE)
        assert await service.load_artifact(**FILE) is None
        assert await service.list_artifact_keys(**SCOPE) == ["copy.txt"]
        assert await service.load_artifact(**other) == types.Part(text="one")
        assert await service.save_artifact(artifact=types.Part(text="three"), **FILE) == 0

    asyncio.run(play())


def test_files_of_a_user_are_visible_in_all_their_sessions_and_no_others(store: Store) -> None:
    async def play() -> None:
        service = CoatcheckArtifacts(store)
        note = types.Part(text="a note")
        mine: dict[str, Any] = {"app_name": "app", "user_id": "user", "filename": "user:note.txt"}
        await service.save_artifact(artifact=note, session_id="one", **mine)
        await service.save_artifact(artifact=types.Part(text="a report"), **FILE)
        assert await service.load_artifact(session_id="two", **mine) == note
        assert await service.list_artifact_keys(app_name="app", user_id="user") == ["user:note.txt"]
        assert await service.list_artifact_keys(**SCOPE) == ["report.txt", "user:note.txt"]
        assert await service.list_artifact_keys(**{**SCOPE, "user_id": "other"}) == []
        with pytest.raises(InputValidationError):
            await service.load_artifact(app_name="app", user_id="user", filename="report.txt")

    asyncio.run(play())


def test_a_reference_resolves_only_to_a_file_of_the_same_user(store: Store) -> None:
    def reference(user: str) -> types.Part:
        uri = artifact_util.get_artifact_uri("app", user, "report.txt", 0, "session")
        return types.Part(file_data=types.FileData(file_uri=uri, mime_type="text/plain"))

    async def play() -> None:
        service = CoatcheckArtifacts(store)
        link = {**FILE, "filename": "link"}
        await service.save_artifact(artifact=types.Part(text="a report"), **FILE)
        await service.save_artifact(artifact=reference("user"), **link)
        assert await service.load_artifact(**link) == types.Part(text="a report")
        with pytest.raises(InputValidationError):
            await service.save_artifact(artifact=reference("other"), **link)
        loop = types.Part(
            file_data=types.FileData(
                file_uri=artifact_util.get_artifact_uri("app", "user", "loop", 0, "session")
            )
        )
        await service.save_artifact(artifact=loop, **{**FILE, "filename": "loop"})
        with pytest.raises(InputValidationError):
            await service.load_artifact(**{**FILE, "filename": "loop"})

    asyncio.run(play())


def test_a_file_removed_by_a_rewind_is_absent(store: Store) -> None:
    async def play() -> None:
        service = CoatcheckArtifacts(store)
        await service.save_artifact(artifact=types.Part(text="one"), **FILE)
        removed = types.Part(inline_data=types.Blob(mime_type="application/octet-stream", data=b""))
        await service.save_artifact(artifact=removed, **FILE)
        assert await service.load_artifact(**FILE) is None
        assert await service.load_artifact(version=0, **FILE) == types.Part(text="one")

    asyncio.run(play())


def test_concurrent_saves_never_get_the_same_version(tmp_path: Path) -> None:
    async def save_all(services: list[CoatcheckArtifacts]) -> list[int]:
        saves = [
            one.save_artifact(artifact=types.Part(text=f"{n}"), **FILE)
            for n in range(8)
            for one in services
        ]
        return await asyncio.gather(*saves)

    with coatcheck.open(tmp_path / "store") as one, coatcheck.open(tmp_path / "store") as other:
        versions = asyncio.run(save_all([CoatcheckArtifacts(one), CoatcheckArtifacts(other)]))
    assert sorted(versions) == list(range(16))


# The page and the example


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("google-adk.md", tmp_path)


def test_the_example_shows_how_much_smaller_the_request_is() -> None:
    without, with_it = figures_of(run_example("google_adk_agent"))
    assert with_it * 50 < without
