"""The real `claude` program, from the wheel of its SDK, against a stand-in for the API on
loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import claude_agent_sdk

from examples.standins import Call, Received, Reply, StandIn, Step

ROOT: Final = Path(__file__).resolve().parents[3]
PROGRAM: Final = Path(claude_agent_sdk.__file__).parent / "_bundled" / "claude"
MODEL: Final = "claude-sonnet-4-5"
READER: Final = "mcp__plugin_coatcheck_artifacts__get_artifact"
ROWS_SERVER: Final = Path(__file__).with_name("rows_server.py")
_PASSED_ON: Final = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


def environment(home: Path, address: str) -> dict[str, str]:
    """The environment of the program: its own home, a dummy key, and no traffic except to the
    stand-in."""
    return {
        **{name: value for name, value in os.environ.items() if name in _PASSED_ON},
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": address,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "MCP_CONNECT_TIMEOUT_MS": "120000",  # the default of 5 s is too short for a busy machine,
        "MCP_TIMEOUT": "120000",  # and so is this one of 30 s
    }


def coatcheck(home: Path, *words: str) -> str:
    """Run our own command, as a user would."""
    command = [sys.executable, "-m", "coatcheck", *words]
    env = environment(home, "")
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Shown:
    """One result as the model saw it."""

    name: str
    text: str
    is_error: bool


@dataclass(frozen=True)
class Conversation:
    """A run of the program: what it printed, and the requests that the model got."""

    answer: dict[str, Any]
    requests: list[Received] = field(repr=False)

    @property
    def session_id(self) -> str:
        return str(self.answer["session_id"])

    def of(self, begins: str) -> list[Received]:
        """The requests of the conversation whose first message has this text."""
        return [
            one
            for one in self.requests
            if begins in json.dumps(one.body["messages"][0], ensure_ascii=False)
        ]

    def shown(self, begins: str = "") -> dict[str, Shown]:
        """The results in the last request, by the id of their call."""
        messages = self.of(begins)[-1].body["messages"]
        blocks = [
            block
            for one in messages
            if isinstance(one["content"], list)
            for block in one["content"]
        ]
        names = {block["id"]: block["name"] for block in blocks if block["type"] == "tool_use"}
        return {
            block["tool_use_id"]: Shown(
                names[block["tool_use_id"]],
                _text(block.get("content", "")),
                block.get("is_error", False),
            )
            for block in blocks
            if block["type"] == "tool_result"
        }


def _text(content: Any) -> str:
    return (
        content
        if isinstance(content, str)
        else "\n".join(str(one.get("text", "")) for one in content)
    )


def claude(
    script: Sequence[Step],
    *words: str,
    home: Path,
    folder: Path,
    agents: Mapping[str, Sequence[Step]] | None = None,
    env: Mapping[str, str] | None = None,
    prompt: str = "Begin.",
) -> Conversation:
    """Run `claude -p` in a folder with a scripted model."""
    with StandIn(script, window=1_000_000, agents=agents) as api:
        command = [str(PROGRAM), "-p", prompt, "--model", MODEL, "--output-format", "json", *words]
        given = {**environment(home, api.anthropic_url), **(env or {})}
        done = subprocess.run(
            command,
            env=given,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
    answer = json.loads(done.stdout) if done.stdout else {"result": done.stderr}
    assert done.returncode == 0, str(answer["result"])[:2_000]
    return Conversation(answer, [one for one in api.requests if one.status == 200])


def call(name: str, **arguments: Any) -> Reply:
    return Reply("", (Call(name, arguments),))


class World:
    """A separate home and project."""

    def __init__(self, place: Path) -> None:
        self.home, self.folder = place / "home", place / "project"
        self.home.mkdir(parents=True)
        self.folder.mkdir()
        servers = {
            "rows": {"command": sys.executable, "args": [str(ROWS_SERVER)], "alwaysLoad": True}
        }
        self.servers = json.dumps({"mcpServers": servers})

    def run(self, steps: Sequence[Step], *words: str, **options: Any) -> Conversation:
        tools = ["--tools", "Bash,Read,Edit,Write,Grep,Agent", "--mcp-config", self.servers]
        allowed = ["--allowedTools", "Bash,Read,Edit,Write,Grep,Agent,mcp__rows"]
        return claude(
            steps, *tools, *allowed, *words, home=self.home, folder=self.folder, **options
        )

    def plug_in(self, *words: str) -> None:
        store = str(self.home / "store")
        coatcheck(
            self.home, "install", "claude-code", "--plugin", "--store", store, "--write", *words
        )


def results(conversation: Conversation, begins: str = "Begin.") -> list[Shown]:
    return list(conversation.shown(begins).values())


def stub(text: str) -> dict[str, Any]:
    """The stub at the beginning of a text: Claude Code adds a reminder after it."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    assert next(iter(found)) == "stub"
    return found
