"""Results of calls that a provider's own program made go to the program, not into the context: they
pass unchanged.

The shapes are those of the providers' SDKs: Anthropic's code execution marks a call with its
`caller`, OpenAI marks a call, and sometimes the result, with the `program`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coatcheck import Store
from tests.gateway.provider import Provider, Say, Think, Use, turn
from tests.gateway.talking import BIG, RESPONSES_TOOLS, Agent, Chat, Person, Talk, post, serving
from tests.gateway.test_observe import recorded
from tests.gateway.test_stub import described

CODE = {"type": "code_execution_20250825", "tool_id": "srvtoolu_01"}
NEWER_CODE = {"type": "code_execution_20260120", "tool_id": "srvtoolu_01"}
PROGRAM = {"type": "program", "caller_id": "call_program"}
DIRECT = {"type": "direct"}


@pytest.mark.parametrize("caller", [CODE, NEWER_CODE])
@pytest.mark.parametrize("mode", ["loop", "stub"])
def test_a_result_for_anthropics_program_passes_unchanged(
    store: Store, mode: str, caller: dict[str, str], is_streamed: bool
) -> None:
    script: list[Any] = [
        turn(Use("search", {"q": "a"}, caller=caller), Use("search", {"q": "b"}, caller=DIRECT)),
        turn(Use("search", {"q": "c"})),
        turn(Say("Done.")),
    ]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode=mode, session="mine") as url,
    ):
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        talk.tools += described(store) if mode == "stub" else []
        talk.ask("go")
        talk.ask(talk.results(BIG, BIG + "b"))
        talk.ask(talk.results(BIG + "c"))
        messages = provider.seen[-1].messages
        results = [
            block["content"]
            for one in messages
            for block in one["content"]
            if "tool_use_id" in block
        ]
        assert results[0] == BIG
        assert all(one.startswith('{"stub"') for one in results[1:])


def test_a_result_for_a_program_passes_unchanged_in_chat_completions(store: Store) -> None:
    """Compatible servers may translate a call of such a program."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "search", "arguments": "{}"},
        "caller": PROGRAM,
    }
    first = {"role": "assistant", "content": None, "tool_calls": [call]}
    answers = [
        {"choices": [{"index": 0, "message": first, "finish_reason": "tool_calls"}]},
        {"choices": []},
    ]
    script = [turn(raw=json.dumps(one).encode()) for one in answers]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        body: Any = {
            "model": "m",
            "tools": Chat(url).tools,
            "messages": [{"role": "user", "content": "go"}],
        }
        post(url, "/v1/chat/completions", body)
        result = {"role": "tool", "tool_call_id": "call_1", "content": BIG}
        post(url, "/v1/chat/completions", {**body, "messages": [*body["messages"], first, result]})
        assert provider.seen[-1].messages[-1] == result


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "held"])
@pytest.mark.parametrize("names_caller", [True, False], ids=["named", "not named"])
def test_a_result_for_openais_program_passes_unchanged(
    store: Store, is_stored: bool, names_caller: bool, is_streamed: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("search", {"q": "a"}, caller=PROGRAM), Use("search", {"q": "b"})),
        turn(Say("Done.")),
        turn(Say("Bye.")),
    ]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        agent = Agent(url, is_streamed=is_streamed, is_stored=is_stored)
        agent.ask("go")
        results = agent.results(BIG, BIG + "b")
        if names_caller:
            results[0]["caller"] = PROGRAM
        agent.ask(*results)
        agent.ask("thanks")
        sent = [
            one["output"]
            for one in provider.seen[1].messages
            if one.get("type") == "function_call_output"
        ]
        assert sent[0] == BIG
        assert sent[1].startswith('{"stub"')
        later = [
            one["output"]
            for one in provider.seen[2].messages
            if one.get("type") == "function_call_output"
        ]
        assert later == ([] if is_stored else sent)


@pytest.mark.parametrize(("api", "caller"), [("anthropic", CODE), ("responses held", PROGRAM)])
def test_a_call_of_our_tools_by_a_program_is_the_clients(
    store: Store, api: Any, caller: dict[str, str]
) -> None:
    script: list[Any] = [turn(Use("list", caller=caller)), turn(Say("Done."))]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        person = Person(api, url)
        person.say("go")
        person.give("the client's own answer")
        assert "the client's own answer" in provider.seen[-1].raw.decode()
        assert len(provider.seen) == 2


def test_a_program_in_an_answer_with_our_calls_is_sent_once(store: Store) -> None:
    """The items of a program belong to the model's answer, which the ledger has as a whole."""
    program = {
        "type": "program",
        "id": "cm_1",
        "call_id": "call_program",
        "code": "search()",
        "fingerprint": "f",
    }
    call = {
        "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "list_artifacts", "arguments": "{}",
        "status": "completed",
    }  # fmt: skip
    search = {**call, "id": "fc_2", "call_id": "call_2", "name": "search", "caller": PROGRAM}
    first = {"id": "resp_1", "status": "completed", "output": [program, call, search], "usage": {}}
    last = {"id": "resp_2", "status": "completed", "output": [], "usage": {}}
    script = [turn(raw=json.dumps(first).encode()), turn(raw=json.dumps(last).encode())]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        body: Any = {
            "model": "m",
            "store": False,
            "tools": RESPONSES_TOOLS,
            "input": [{"role": "user", "content": "go"}],
        }
        shown = post(url, "/v1/responses", body).json()["output"]
        assert shown == [program, search]
        result = {"type": "function_call_output", "call_id": "call_2", "output": BIG}
        post(url, "/v1/responses", {**body, "input": [*body["input"], *shown, result]})
        sent = provider.seen[-1].messages
        assert [one.get("type", "user") for one in sent] == [
            "user", "program", "function_call", "function_call", "function_call_output", "function_call_output",
        ]  # fmt: skip
        assert sent[1] == program
        assert sent[-1] == result


def test_a_result_for_a_program_is_not_counted_as_a_possible_saving(store: Store) -> None:
    script: list[Any] = [turn(Use("search", {"q": "a"}, caller=CODE)), turn(Say("Done."))]
    with Provider(script, is_lenient=True) as provider, serving(store, provider) as url:
        talk = Talk(url, thinking=False)
        talk.ask("go")
        talk.ask(talk.results(BIG))
    assert all("could_leave" not in one for one in recorded(store))
