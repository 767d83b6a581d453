"""The adapter for the Claude Agent SDK passes the suite, through the real program."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from claude_agent_sdk import (
    AgentDefinition,
    ClaudeAgentOptions,
    PermissionResultAllow,
    ResultMessage,
    create_sdk_mcp_server,
    query,
    tool,
)
from pydantic import TypeAdapter, validate_call

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.claude_agent import forget, slim
from coatcheck.values import as_text
from examples.standins import Call, Heard, Reply, StandIn, Step
from tests.adapters.claude_code.claude import MODEL, environment
from tests.adapters.suite import Ability, AdapterSuite, Ask, Driver, Run, Scenario, SeenResult

THEIRS: Final = "mcp__tools__"
OURS: Final = "mcp__coatcheck__"
REMINDER: Final = re.compile(r"\n*<system-reminder>.*?</system-reminder>\n*", re.DOTALL)
COLLEAGUE: Final = re.compile(r"You are the colleague (\w+)\.")


class Always(Sequence[Step]):
    """A script of one step for every turn."""

    def __init__(self, step: Callable[[Heard], Reply]) -> None:
        self._step = step

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: Any) -> Any:
        return self._step


class Play:
    """The scripted models of a scenario behind the stand-in. Names of tools have no server in
    front, unless two tools have the same name. Text that Claude Code adds to messages is removed,
    and so are paths that vary by run."""

    def __init__(self, scenario: Scenario, home: Path) -> None:
        self.home = home
        self.models = {one.name: one.model for one in scenario.agents}
        self.main = scenario.model
        self.taken = {one.__name__ for one in scenario.tools}
        self.ids: dict[str, str] = {}  # the script's ids of calls, by agent, turn and number

    def reply(self, heard: Heard) -> Reply:
        found = COLLEAGUE.search(json.dumps(heard.body.get("system", "")))
        model = self.models[found[1]] if found else self.main
        turn = model.respond(self.messages(heard), self.tools(heard), self.results(heard))
        calls = tuple(Call(self.full(call.name), call.parsed()) for call in turn.calls)
        for number, call in enumerate(turn.calls):
            self.ids[f"{found and found[1]}/{heard.turn}/{number}"] = call.id
        return Reply(turn.text, calls)

    def full(self, name: str) -> str:
        if name in self.taken or name.startswith("mcp__"):
            return name if name.startswith("mcp__") else THEIRS + name
        return OURS + name if name.endswith("_artifact") or name == "list_artifacts" else name

    def short(self, name: str) -> str:
        bare = name.removeprefix(THEIRS).removeprefix(OURS)
        return name if bare in self.taken and not name.startswith(THEIRS) else bare

    def tools(self, heard: Heard) -> list[dict[str, Any]]:
        return [
            {
                "name": self.short(one["name"]),
                "description": one["description"],
                "parameters": {
                    key: value for key, value in one["input_schema"].items() if key != "$schema"
                },
            }
            for one in heard.body["tools"]
            if one["name"].startswith((THEIRS, OURS))
        ]

    def blocks(self, heard: Heard) -> Iterator[tuple[str, dict[str, Any]]]:
        for message in heard.body["messages"]:
            content = message["content"]
            for block in (
                [{"type": "text", "text": content}] if isinstance(content, str) else content
            ):
                yield message["role"], block

    def messages(self, heard: Heard) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        ids = self.call_ids(heard)
        for role, block in self.blocks(heard):
            if block["type"] == "text" and (text := self.clean(block["text"])):
                found.append({"role": role, "text": text})
            elif block["type"] == "tool_use":
                call = {
                    "id": ids[block["id"]],
                    "name": self.short(block["name"]),
                    "arguments": block["input"],
                }
                found.append({"role": "call", **call})
            elif block["type"] == "tool_result":
                text, media = self.content(block)
                found.append(
                    {
                        "role": "tool",
                        "id": ids[block["tool_use_id"]],
                        "text": text,
                        "media": len(media),
                    }
                )
        return found

    def results(self, heard: Heard) -> list[SeenResult]:
        ids = self.call_ids(heard)
        names = {
            block["id"]: block["name"]
            for _, block in self.blocks(heard)
            if block["type"] == "tool_use"
        }
        found = []
        for _, block in self.blocks(heard):
            if block["type"] == "tool_result":
                text, media = self.content(block)
                found.append(
                    SeenResult(
                        id=ids[block["tool_use_id"]],
                        name=self.short(names[block["tool_use_id"]]),
                        text=text,
                        is_error=block.get("is_error", False),
                        media=media,
                    )
                )
        return found

    def call_ids(self, heard: Heard) -> dict[str, str]:
        """The script's ids of the calls in a request."""
        agent = COLLEAGUE.search(json.dumps(heard.body.get("system", "")))
        found: dict[str, str] = {}
        turn = 0
        for message in heard.body["messages"]:
            if message["role"] == "assistant":
                uses = [
                    one
                    for one in message["content"]
                    if isinstance(one, dict) and one["type"] == "tool_use"
                ]
                for number, block in enumerate(uses):
                    found[block["id"]] = self.ids[f"{agent and agent[1]}/{turn}/{number}"]
                turn += 1
        return found

    def content(self, block: Mapping[str, Any]) -> tuple[str, tuple[bytes, ...]]:
        content = block.get("content", "")
        parts: list[dict[str, Any]] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        )
        texts = [self.clean(one["text"]) for one in parts if one["type"] == "text"]
        media = tuple(
            base64.b64decode(one["source"]["data"]) for one in parts if one["type"] == "image"
        )
        return "\n".join(filter(None, texts)), media

    def clean(self, text: str) -> str:
        text = REMINDER.sub("", text).replace(str(self.home), "~").rstrip("\n")
        return re.sub(
            r"~/\.claude/projects/\S+/tool-results/[\w.-]+?(-\w+)?\.(\w+)", r"saved.\2", text
        )


class ClaudeDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "cancellation": "a tool of an MCP server cannot cancel the run of its client",
        "file": "Claude Code saves a file of an MCP tool to disk, and passes on its path",
        "final_answer": "no tool's result ends a run",
        "hand_off": "an agent starts others, but hands nothing over",
        "retry": "a tool of an MCP server can only fail",
    }

    def run(self, scenario: Scenario) -> Run:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            home = Path(place)
            play = Play(scenario, home)
            with StandIn(Always(play.reply), window=1_000_000) as api:
                return asyncio.run(self._run(scenario, play, api.anthropic_url))

    async def _run(self, scenario: Scenario, play: Play, address: str) -> Run:
        events: list[str] = []

        async def approve(name: str, given: dict[str, Any], context: Any) -> PermissionResultAllow:
            events.append(f"approval: {play.short(name)}")
            return PermissionResultAllow()

        async def prompt() -> AsyncIterator[dict[str, Any]]:
            yield {
                "type": "user",
                "message": {"role": "user", "content": scenario.prompt},
                "parent_tool_use_id": None,
            }

        functions = [*scenario.tools, *(one for agent in scenario.agents for one in agent.tools)]
        made = {one.__name__: _as_tool(one) for one in functions} | {
            one.name: one for one in scenario.shared
        }
        play.taken |= made.keys()
        allowed = [THEIRS + name for name in made if name not in scenario.approvals]
        agents = {
            one.name: AgentDefinition(
                description="A colleague.", prompt=f"You are the colleague {one.name}."
            )
            for one in scenario.agents
        }
        server = create_sdk_mcp_server("tools", tools=[*made.values()])
        options = ClaudeAgentOptions(
            model=MODEL,
            cwd=play.home,
            tools=["Agent"] if agents else [],
            allowed_tools=[*allowed, "Agent"],
            mcp_servers={"tools": {**server, "alwaysLoad": True}},
            agents=agents or None,
            env=environment(play.home, address),
            setting_sources=[],
            can_use_tool=approve if scenario.approvals else None,
            session_id=scenario.conversation and session_id(scenario.conversation),
            max_buffer_size=64 << 20,  # the default of the SDK, 1 MiB, is too small for a picture
        )
        if scenario.store is not None:
            options = ClaudeAgentOptions(**slim(scenario.store, options, policy=scenario.policy))
        final, error = "", None
        try:
            async for message in query(prompt=prompt(), options=options):
                if isinstance(message, ResultMessage):
                    final = message.result or ""
        except Exception as ended:  # noqa: BLE001 - the suite looks at it
            error = ended
        saved = b"".join(one.read_bytes() for one in sorted(play.home.rglob("*.jsonl")))
        return Run(scenario.model, final, error, saved, tuple(events))

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return _as_tool(function)

    def content(self, parts: Sequence[ContentPart]) -> Any:
        return [one.as_mcp() for one in parts]

    def delegate(self, agent: str, text: str) -> Ask:
        return "Agent", {
            "description": "a task",
            "prompt": text,
            "subagent_type": agent,
            "run_in_background": False,
        }

    def delete(self, store: Store, conversation: str) -> None:
        forget(store, session_id(conversation))


def session_id(conversation: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, conversation))


def _as_tool(function: Callable[..., Any]) -> Any:
    checked: Any = validate_call(function)

    @tool(function.__name__, function.__doc__ or "", TypeAdapter(checked).json_schema())
    async def run(arguments: dict[str, Any]) -> dict[str, Any]:
        value = await asyncio.to_thread(checked, **arguments)
        is_content = (
            isinstance(value, list) and value and isinstance(value[0], dict) and "type" in value[0]
        )
        return {"content": value if is_content else [{"type": "text", "text": as_text(value)}]}

    return run


class TestClaudeAgent(AdapterSuite):
    def driver(self) -> Driver:
        return ClaudeDriver()
