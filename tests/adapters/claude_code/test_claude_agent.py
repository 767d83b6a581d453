"""The adapter for the Claude Agent SDK beside a user's own options, and its example."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import AgentDefinition, ClaudeAgentOptions, HookMatcher, ResultMessage, query

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters.claude_agent import slim
from coatcheck.errors import InvalidArgument
from examples.claude_agent import agent
from examples.standins import Call, Heard, Reply, StandIn, Step
from tests.adapters.claude_code.claude import environment

LOG = "".join(f"GET /page/{i % 7} {500 if i % 21 == 4 else 200} {i} ms\n" for i in range(9_000))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def test_without_options_only_our_own_are_returned(store: Store) -> None:
    added = slim(store)
    assert set(added) == {"env", "hooks", "mcp_servers"}
    assert list(ClaudeAgentOptions(**added).mcp_servers) == ["coatcheck"]


def test_options_of_the_user_are_kept(store: Store) -> None:
    async def mine(event: Any, call_id: Any, context: Any) -> dict[str, Any]:
        return {}

    given = ClaudeAgentOptions(
        model="m",
        env={"MAX_MCP_OUTPUT_TOKENS": "9", "A": "b"},
        hooks={"PreToolUse": [HookMatcher(hooks=[mine])], "Stop": [HookMatcher(hooks=[mine])]},
        mcp_servers={"coatcheck": {"command": "other"}},
        agents={"narrow": AgentDefinition(description="d", prompt="p", tools=["Bash"])},
    )
    merged = ClaudeAgentOptions(**slim(store, given))
    assert (merged.model, merged.env, merged.agents) == ("m", given.env, given.agents)
    assert merged.hooks is not None
    assert {name: len(found) for name, found in merged.hooks.items()} == {
        "PreToolUse": 2, "Stop": 1, "PostToolUse": 1, "PostToolUseFailure": 1,
    }  # fmt: skip
    assert isinstance(merged.mcp_servers, dict)
    assert list(merged.mcp_servers) == ["coatcheck", "coatcheck_2"]
    assert merged.mcp_servers["coatcheck"] == {"command": "other"}
    assert given.hooks is not None
    assert list(given.hooks) == ["PreToolUse", "Stop"]


def test_servers_in_a_file_are_refused_with_a_hint(store: Store) -> None:
    with pytest.raises(InvalidArgument) as caught:
        slim(store, ClaudeAgentOptions(mcp_servers="servers.json"))
    assert "dict" in caught.value.hint


def test_a_disabled_policy_adds_nothing(store: Store) -> None:
    assert slim(store, policy=Policy(enabled=False)) == {}


def test_without_our_tools_only_hooks_and_the_environment_are_added(store: Store) -> None:
    added = slim(store, only=())
    assert set(added) == {"env", "hooks"}


def answer(heard: Heard) -> Reply:
    return Reply(
        "/page/4 fails." if "GET /page/4 500 4 ms" in heard.results[-1].text else "I do not know."
    )


def test_the_example_answers_with_a_small_context(store: Store, tmp_path: Path) -> None:
    (tmp_path / "access.log").write_text(LOG)
    script: list[Step] = [
        Reply("I read the log.", (Call("Bash", {"command": "cat access.log"}),)),
        lambda heard: Reply(
            "",
            (
                Call(
                    "mcp__coatcheck__get_artifact", {"pointer": pointer(heard), "grep": " 500 4 ms"}
                ),
            ),
        ),
        answer,
    ]
    with StandIn(script) as api:
        options = {
            "cwd": tmp_path,
            "env": environment(tmp_path, api.anthropic_url),
            "setting_sources": [],
        }
        assert asyncio.run(agent(store, "Which path fails?", **options)) == "/page/4 fails."
    sent = [request for request in api.requests if request.status == 200]
    assert len(sent) == 3
    assert LOG[:2_000] not in json.dumps(sent[-1].body)


def pointer(heard: Heard) -> str:
    found: str = json.JSONDecoder().raw_decode(heard.results[-1].text)[0]["artifact"]
    return found


def test_concurrent_queries_share_nothing(store: Store, tmp_path: Path) -> None:
    """Two conversations with one object of options."""
    stored: Step = Reply(
        "", (Call("mcp__coatcheck__store_artifact", {"name": "note", "value": "mine alone"}),)
    )
    listed: Step = Reply("", (Call("mcp__coatcheck__list_artifacts", {}),))

    def seen(heard: Heard) -> Reply:
        return Reply("found" if "note" in heard.results[-1].text else "nothing")

    scripts = {"Store it": [stored, listed, seen], "List them": [listed, listed, seen]}
    with StandIn([], agents=scripts) as api:
        env = environment(tmp_path, api.anthropic_url)
        given = ClaudeAgentOptions(cwd=tmp_path, env=env, setting_sources=[])
        options = ClaudeAgentOptions(**slim(store, given))

        async def both() -> list[str]:
            return await asyncio.gather(*(ask(question, options) for question in scripts))

        assert asyncio.run(both()) == ["found", "nothing"]


async def ask(question: str, options: ClaudeAgentOptions) -> str:
    found = ""
    async for message in query(prompt=question, options=options):
        found = message.result or "" if isinstance(message, ResultMessage) else found
    return found
