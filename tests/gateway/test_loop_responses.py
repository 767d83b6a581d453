"""`loop` on OpenAI's Responses API, with the items kept by the client or by the provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coatcheck import Store
from tests.gateway.provider import Provider, Say, Seen, Think, Use, turn
from tests.gateway.talking import BIG, RESPONSES_TOOLS, Agent, assert_only_grows, post, serving


@pytest.fixture(params=[True, False], ids=["stored", "held"])
def is_stored(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def get(seen: Seen, **arguments: Any) -> Use:
    texts = [one["output"] for one in seen.messages if one.get("type") == "function_call_output"]
    stub = next(text for text in reversed(texts) if text.startswith('{"stub"'))
    return Use("get", {"pointer": json.loads(stub)["artifact"], **arguments})


def test_a_read_is_answered_inside_and_the_client_sees_one_answer(
    store: Store, is_streamed: bool, is_stored: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("search", {"q": "jobs"})),
        lambda seen: turn(Think(), get(seen, lines="5:5")),
        turn(Think(), Say("It is job 31676.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        agent = Agent(url, is_streamed=is_streamed, is_stored=is_stored)
        agent.ask("find it")
        answer = agent.ask(*agent.results(BIG))
        assert [one.type for one in answer.output] == ["reasoning", "reasoning", "message"]
        assert answer.output_text == "It is job 31676."
        assert [tool.name for tool in answer.tools] == ["search"]
        agent.ask("thanks")
        assert provider.problems == []
        assert "job 31676" in provider.answered[2].messages[-1]["output"]
        assert all(len(one.raw) < 8_000 for one in provider.answered)
        if not is_stored:
            assert_only_grows(provider)


def test_a_mixed_turn_gives_the_client_its_own_calls(
    store: Store, is_streamed: bool, is_stored: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("list"), Use("search", {"q": "a"}), Use("list")),
        turn(Think(), Say("Done.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        agent = Agent(url, is_streamed=is_streamed, is_stored=is_stored)
        answer = agent.ask("go")
        assert [one.type for one in answer.output] == ["reasoning", "function_call"]
        agent.ask(*agent.results("little"))
        agent.ask("thanks")
        assert provider.problems == []
        outputs = [
            one
            for one in provider.answered[1].messages
            if one.get("type") == "function_call_output"
        ]
        assert len(outputs) == 3
        assert outputs[-1]["output"] == "little"
        if not is_stored:
            assert_only_grows(provider)


def test_events_are_numbered_and_placed_without_gaps(store: Store) -> None:
    script: list[Any] = [turn(Think(), Use("list"), Say("Between.")), turn(Think(), Say("End."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        agent = Agent(url, is_streamed=True, is_stored=False)
        agent.ask("go")
        numbers = [one.sequence_number for one in agent.events if hasattr(one, "sequence_number")]
        assert numbers == sorted(set(numbers))
        places = [
            one.output_index for one in agent.events if one.type == "response.output_item.added"
        ]
        assert places == [0, 1, 2, 3]
        assert len({one.response.id for one in agent.events if hasattr(one, "response")}) == 1
        assert "list_artifacts" not in str(agent.events)


def test_reasoning_without_a_following_item_is_dropped_if_the_ledger_has_none(store: Store) -> None:
    with (
        Provider([turn(Say("Hello.")), turn(Say("Hello."))]) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        agent = Agent(url, is_streamed=False, is_stored=False)
        agent.ask("go")
        agent.held.append(
            {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "unknown"}
        )
        agent.ask("and?")
        assert provider.problems == []
        assert "rs_x" not in str(provider.answered[1].body)


def test_a_websocket_is_refused_so_that_clients_use_http(store: Store) -> None:
    with Provider() as provider, serving(store, provider) as url:
        answer = post(url, "/v1/responses", b"", upgrade="websocket", connection="upgrade")
        assert answer.status_code == 426
        assert provider.seen == []


def test_our_tools_are_added_to_tools_in_the_first_item(store: Store) -> None:
    body = {
        "model": "codex-mini", "store": False,
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": RESPONSES_TOOLS},
            {"role": "user", "content": "go"},
        ],
    }  # fmt: skip
    with (
        Provider([turn(Say("Hello."))], is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        post(url, "/v1/responses", body)
        sent = provider.answered[0].body
        assert "tools" not in sent
        assert [one["name"] for one in sent["input"][0]["tools"]][1:] == [
            "get_artifact",
            "list_artifacts",
            "store_artifact",
        ]


def test_a_response_that_began_elsewhere_is_not_changed(store: Store) -> None:
    body = {
        "model": "m",
        "previous_response_id": "resp_other",
        "input": "go",
        "tools": RESPONSES_TOOLS,
    }
    with (
        Provider([turn(Say("Hello."))], is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        post(url, "/v1/responses", body)
        assert provider.answered[0].body == body
