"""`stub`: the client has our tools itself, through MCP, and large results become stubs that name
them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, Store, toolkit
from coatcheck.gateway.messages_api import MessagesApi
from coatcheck.gateway.raw_json import Unreadable
from tests.gateway.provider import Provider, Say, Think, Use, turn
from tests.gateway.talking import BIG, Chat, Talk, assert_only_grows, post, serving
from tests.screenshots import dimensions, huge_screenshot, image_in, in_shape, screenshot

NAME = "mcp__coatcheck__get_artifact"


def described(store: Store) -> list[dict[str, Any]]:
    """Our tools as described by a client that has them through MCP: with its own prefix."""
    tools = [tool.as_anthropic() for tool in toolkit(store.session("mine"))]
    return [{**tool, "name": f"mcp__coatcheck__{tool['name']}"} for tool in tools]


def test_a_large_result_becomes_a_stub_that_names_the_clients_own_tool(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("search", {"q": "x"})),
        lambda seen: turn(Think(), Use("get", {"pointer": "art:0000"})),
        turn(Think(), Say("Found.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="stub", session="mine") as url:
        talk = Talk(url, is_streamed=is_streamed)
        talk.tools += described(store)
        talk.ask("find it")
        answer = talk.ask(talk.results(BIG))
        assert answer.content[-1].name == NAME
        stub = json.loads(provider.answered[1].messages[-1]["content"][0]["content"])
        assert NAME in json.dumps(stub)
        page = toolkit(store.session("mine"))[0].run(pointer=stub["artifact"])
        talk.ask(talk.results(page))
        assert provider.answered[2].messages[-1]["content"][0]["content"] == page
        talk.ask("thanks")
        assert_only_grows(provider)
        assert provider.answered[0].tools == [tool["name"] for tool in talk.tools]
    assert store.session("mine").get(stub["artifact"]) == BIG


@pytest.mark.parametrize("client", [Talk, Chat])
def test_short_results_externalized_by_a_rule_keep_their_own_content(
    store: Store, client: type[Talk] | type[Chat]
) -> None:
    script: list[Any] = [
        turn(Use("search", {"q": "a"}), Use("search", {"q": "b"})),
        turn(Say("Found.")),
    ]
    rules = Policy(tools={"search": "always"})
    with (
        Provider(script) as provider,
        serving(store, provider, mode="loop", session="mine", policy=rules) as url,
    ):
        talk = client(url)
        talk.ask("find both")
        results: Any = talk.results("first " * 100, "second " * 100)
        talk.ask(*results) if isinstance(talk, Chat) else talk.ask(results)
        stubs = re.findall("art:[0-9a-f]{12,64}", provider.answered[1].raw.decode())
    assert [store.session("mine").get(one) for one in dict.fromkeys(stubs)] == [
        "first " * 100,
        "second " * 100,
    ]


def test_screenshots_stay_images_and_one_over_the_limit_is_scaled_once(store: Store) -> None:
    script = [turn(Use("search", {"q": "x"})), turn(Say("I see.")), turn(Say("Bye."))]
    with Provider(script) as provider, serving(store, provider, mode="stub", session="mine") as url:
        talk = Talk(url)
        talk.tools += described(store)
        talk.ask("look")
        pictures: Any = [
            in_shape("anthropic", screenshot()),
            in_shape("anthropic", huge_screenshot()),
        ]
        talk.ask(talk.results(pictures))
        same, smaller = provider.answered[1].messages[-1]["content"][0]["content"]
        assert same == pictures[0]
        assert len(smaller["source"]["data"]) <= 5 << 20
        assert dimensions(image_in(smaller)) == dimensions(huge_screenshot())
        talk.ask("thanks")
        assert_only_grows(provider)


def test_a_client_without_our_tools_is_left_alone(store: Store) -> None:
    script = [turn(Use("search", {"q": "x"})), turn(Say("Found."))]
    with Provider(script) as provider, serving(store, provider, mode="stub") as url:
        chat = Chat(url)
        chat.ask("find it")
        chat.ask(*chat.results(BIG))
        assert provider.answered[1].messages[-1]["content"] == BIG


def test_a_client_with_our_tools_gets_no_second_set_in_loop_mode(store: Store) -> None:
    with (
        Provider([turn(Say("Hello."))]) as provider,
        serving(store, provider, mode="loop", session="mine") as url,
    ):
        talk = Talk(url)
        talk.tools += described(store)
        talk.ask("hi")
        assert len(provider.answered[0].tools) == 4


def test_a_decision_is_made_once_whatever_the_client_changes_around_it(store: Store) -> None:
    """Marks, key order, outer whitespace and the form of a text do not make it a different
    result."""
    script: list[Any] = [
        turn(Think(), Use("search", {"q": "x"})),
        turn(Say("Found.")),
        turn(Say("Bye.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="stub", session="mine") as url:
        talk = Talk(url)
        talk.tools += described(store)
        talk.ask("find it")
        talk.ask(talk.results(BIG))
        held = talk.held[2]["content"][0]
        held["content"] = [{"text": BIG + "\n", "type": "text"}]
        held["cache_control"] = {"type": "ephemeral"}
        talk.ask("thanks")
        talk.held[2] = {"content": [dict(reversed(held.items()))], "role": "user"}
        talk.ask("thanks")
        assert_only_grows(provider)


def test_unchanged_parts_of_a_request_keep_their_bytes(store: Store) -> None:
    tools = json.dumps(
        [{"name": "search", "input_schema": {"type": "object"}}, *described(store)], indent=1
    )
    start = f'{{ "model":"claude-opus-5-5","max_tokens":9,"tools":{tools}, "metadata" : {{"a" :1.0,"n":12345678901234567890}},"messages":[{{"role":"user","content":"\\u00e9 \\/"}}'
    with (
        Provider(lambda _: turn(Say("Hello.")), is_lenient=True) as provider,
        serving(store, provider, mode="stub", session="mine") as url,
    ):
        post(url, "/v1/messages", (start + "]}").encode())
        call = ',{"role":"assistant","content":[ {"type":"tool_use","id":"toolu_1","name":"search","input":{"x" : 1.50}} ]}'
        result = f',{{"role":"user","content":[{{"type":"tool_result", "tool_use_id":"toolu_1", "content":{json.dumps(BIG)}, "odd":1e3}}]}}]}}'
        post(url, "/v1/messages", (start + call + result).encode())
    sent = provider.seen[1].raw.decode()
    assert '{"stub":' in json.loads(sent)["messages"][-1]["content"][0]["content"]
    for piece in (
        '{"a" :1.0,"n":12345678901234567890}',
        '{"role":"user","content":"\\u00e9 \\/"}',
        '"odd":1e3',
        call[1:],
        tools,
    ):
        assert piece in sent


def test_lone_surrogates_pass_and_other_results_still_become_stubs(store: Store) -> None:
    """JavaScript cuts strings between the halves of a pair."""
    tools = json.dumps([{"name": "search", "input_schema": {"type": "object"}}, *described(store)])
    start = f'{{"model":"m","max_tokens":9,"tools":{tools},"messages":[{{"role":"user","content":"cut \\ud83d"}}'
    with (
        Provider(lambda _: turn(Say("Hello.")), is_lenient=True) as provider,
        serving(store, provider, mode="stub", session="mine") as url,
    ):
        post(url, "/v1/messages", (start + "]}").encode())
        call = ',{"role":"assistant","content":[{"type":"tool_use","id":"toolu_1","name":"search","input":{}}]}'
        result = f',{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"toolu_1","content":{json.dumps(BIG)}}}]}}]}}'
        post(url, "/v1/messages", (start + call + result).encode())
    assert b"cut \\ud83d" in provider.seen[1].raw
    assert b"stub" in provider.seen[1].raw


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"messages": 5}', b'{"messages": ["x"]}', b"\xff{", b'{"messages"'],
)
def test_a_body_that_cannot_be_parsed_passes_unchanged(store: Store, body: bytes) -> None:
    with pytest.raises(Unreadable):
        MessagesApi().read(body)
    with (
        Provider(lambda _: turn(raw=b"{}"), is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        post(url, "/v1/messages", body)
        assert provider.seen[0].raw == body


def test_a_client_that_reads_files_needs_no_tools_of_ours(store: Store, tmp_path: Path) -> None:
    rules = Policy(max_chars=1_000, files=tmp_path / ".coatcheck")
    script = [turn(Use("search", {"q": "x"})), turn(Say("Read."))]
    with Provider(script) as provider, serving(store, provider, mode="stub", policy=rules) as url:
        talk = Talk(url)
        talk.ask("go")
        talk.ask(talk.results(BIG))
        assert provider.problems == []
        sent = provider.answered[-1]
    assert [one["name"] for one in sent.body["tools"]] == ["search"]
    stub = json.loads(sent.messages[-1]["content"][0]["content"])
    assert Path(stub["file"]).read_text() == BIG
    assert "get_artifact" not in json.dumps(stub)


def test_a_result_stays_if_its_file_cannot_be_written(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    rules = Policy(max_chars=1_000, files=tmp_path / "other")
    script = [turn(Use("search", {"q": "x"})), turn(Say("Read."))]
    with Provider(script) as provider, serving(store, provider, mode="stub", policy=rules) as url:
        talk = Talk(url)
        talk.ask("go")
        talk.ask(talk.results(BIG))
        assert provider.answered[-1].messages[-1]["content"][0]["content"] == BIG
