"""Agents of several users that share a tool, a hand-off target or a sub-agent, as a module defines
them once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, RunConfig, RunContextWrapper, Runner, function_tool, handoff
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call

import coatcheck
from coatcheck import Store
from coatcheck.adapters.openai_agents import slim
from tests.adapters.openai_agents.drivers import model_of, text_of
from tests.adapters.suite import ScriptedModel as Script
from tests.adapters.suite import pointer_in

QUIET = RunConfig(tracing_disabled=True)
USERS = [f"user {number}" for number in range(8)]


def mail_of(user: str) -> str:
    return "\n".join(f"message {number} to {user}" for number in range(5_000))


@function_tool
def my_mail(ctx: RunContextWrapper[str]) -> str:
    """Return the mail of the user."""
    return mail_of(ctx.context)


def read_mail(call: ModelCall) -> list[Any]:
    """A model for all users: it fetches the mail, reads the last line back, and answers with it."""
    outputs = [
        text_of(one["output"]) for one in call.input if one.get("type") == "function_call_output"
    ]
    last = outputs[-1] if outputs else ""
    call_id = f"call_{secrets.token_hex(8)}"
    if '"stub"' in last:
        return [
            function_call(
                "get_artifact", {"pointer": pointer_in(last), "lines": "5000:5000"}, call_id=call_id
            )
        ]
    if last.startswith("[art:"):
        return [assistant_message(last.splitlines()[-1])]
    return [function_call("my_mail", {}, call_id=call_id)]


def reader() -> Agent[Any]:
    return Agent(
        name="reader", model=ScriptedModel([ModelStep.respond(read_mail)] * 1_000), tools=[my_mail]
    )


READER = reader()
AS_TOOL = READER.as_tool("reader", "Reads the user's mail.")
HAND_OFF = handoff(READER)


def agent_for(way: str) -> Agent[Any]:
    """The agent of one request, with something that the agents of all requests share."""
    if way == "a tool":
        return reader()
    if way == "a sub-agent":
        asks = Script([("reader", {"input": "What came last?"})], lambda results: results[-1].text)
        return Agent(name="main", model=model_of(asks), tools=[AS_TOOL])
    target = READER if way == "a hand-off target" else HAND_OFF
    return Agent(
        name="main", model=model_of(Script([("transfer_to_reader", {})])), handoffs=[target]
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(params=["a tool", "a hand-off target", "a hand-off object", "a sub-agent"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def answered(way: str, store: Store, user: str) -> str:
    agent = slim(agent_for(way), store.session(user))
    result = await Runner.run(agent, "What came last?", context=user, run_config=QUIET)
    return str(result.final_output)


def check(store: Store, answers: list[str]) -> None:
    """Each user has read their own mail, which is the only thing in their session."""
    assert answers == [f"message 4999 to {user}" for user in USERS]
    for user in USERS:
        session = store.session(user)
        assert [session.get(ref) for ref in session.list()] == [mail_of(user)]


def test_users_one_after_the_other_share_nothing_else(store: Store, way: str) -> None:
    check(store, [asyncio.run(answered(way, store, user)) for user in USERS])


def test_users_at_once_in_an_event_loop_share_nothing_else(store: Store, way: str) -> None:
    async def together() -> list[str]:
        return await asyncio.gather(*(answered(way, store, user) for user in USERS))

    check(store, asyncio.run(together()))


def test_users_at_once_in_threads_share_nothing_else(store: Store, way: str) -> None:
    with ThreadPoolExecutor(len(USERS)) as threads:
        check(store, [*threads.map(lambda user: asyncio.run(answered(way, store, user)), USERS)])


def test_users_with_stores_of_their_own_share_nothing_else(way: str) -> None:
    with coatcheck.open("memory:") as first, coatcheck.open("memory:") as second:
        for store, user in ((first, USERS[0]), (second, USERS[1])):
            agent = slim(agent_for(way), store)
            Runner.run_sync(
                agent,
                "Read it.",
                context=user,
                run_config=RunConfig(group_id="same", tracing_disabled=True),
            )
        for store, user in ((first, USERS[0]), (second, USERS[1])):
            session = store.session("openai-agents:same")
            assert [session.get(ref) for ref in session.list()] == [mail_of(user)]


def test_an_agent_that_was_never_slimmed_gets_whole_results(store: Store, way: str) -> None:
    slim(agent_for(way), store)
    seen: list[str] = []

    def look(call: ModelCall) -> list[Any]:
        seen.extend(
            text_of(one["output"])
            for one in call.input
            if one.get("type") == "function_call_output"
        )
        return (
            [assistant_message("Done.")]
            if seen
            else [function_call("my_mail", {}, call_id="call_1")]
        )

    plain = Agent(name="plain", model=ScriptedModel([ModelStep.respond(look)] * 2), tools=[my_mail])
    Runner.run_sync(plain, "Begin.", context="ada", run_config=QUIET)
    assert seen == [mail_of("ada")]
    assert READER.tools == [my_mail]
