"""`loop` on Anthropic's Messages API: our tools are answered inside, and the client sees one
answer.

Each request goes to a new gateway. The provider checks thinking, pairing and fields, and keeps a
prefix cache."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from coatcheck import Store
from tests.gateway.provider import Provider, Say, Seen, Think, Use, turn
from tests.gateway.talking import BIG, Talk, assert_only_grows, serving


def pointer_in(seen: Seen) -> str:
    """The pointer of the newest stub in a request, as a model would copy it."""
    texts = [
        str(block.get("content"))
        for message in seen.messages
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result"
    ]
    return next(
        str(json.loads(text)["artifact"]) for text in reversed(texts) if text.startswith('{"stub"')
    )


def get(seen: Seen, **arguments: Any) -> Use:
    return Use("get", {"pointer": pointer_in(seen), **arguments})


SEARCH = turn(Think(), Use("search", {"q": "jobs"}))


def test_a_read_is_answered_inside_and_the_client_sees_one_answer(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(Think("first"), Say("Looking."), get(seen, lines="5:5")),
        turn(Think("second"), Say("It is job 31676.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed)
        talk.ask("find it")
        answer = talk.ask(talk.results(BIG))
        assert [block.type for block in answer.content] == ["thinking", "text", "thinking", "text"]
        assert answer.stop_reason == "end_turn"
        talk.ask("thanks")
        assert_only_grows(provider)
        page = provider.answered[2].messages[-1]["content"][0]["content"]
        assert "job 31676" in page
        assert len(provider.answered[-1].raw) < 10_000
        assert sum(len(json.dumps(one)) for one in talk.held) > len(BIG)


def test_five_turns_with_loops_and_a_mixed_turn_only_extend_the_prompt_and_read_the_cache(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(Think("a"), get(seen, lines="1:3")),
        lambda seen: turn(Think("b"), get(seen, grep="job 7919$")),
        turn(Think("c"), Say("Found.")),
        lambda seen: turn(
            Think("d"), Say("Both."), get(seen), Use("search", {"q": "more"}), Use("list")
        ),
        turn(Think("e"), Say("Done.")),
        turn(Think("f"), Use("list")),
        turn(Say("Nothing else.")),
        turn(Say("Bye.")),
    ]
    mark = {"cache_control": {"type": "ephemeral"}}
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed)
        talk.ask([{"type": "text", "text": "find it", **mark}])
        for number, say in enumerate((None, "and more?", "again", "anything else?")):
            for message in talk.held:
                for block in message["content"]:
                    block.pop("cache_control", None)
            content: list[dict[str, Any]] = (
                talk.results(BIG) if number == 0 else [{"type": "text", "text": say}]
            )
            if number == 2:
                assert [block.type for block in talk.last.content] == [
                    "thinking",
                    "text",
                    "tool_use",
                ]
                assert talk.last.stop_reason == "tool_use"
                content = talk.results("little")
            content[-1] |= mark
            talk.ask(content)
        assert_only_grows(provider)
        assert len(provider.answered) == 8
        sizes = [
            sum(one.usage[name] for name in ("read", "write", "input")) for one in provider.answered
        ]
        for before, seen in zip(sizes, provider.answered[1:], strict=False):
            assert seen.usage["read"] >= before * 0.9
        mixed = provider.answered[5].messages
        assert [block["type"] for block in mixed[-1]["content"]] == ["tool_result"] * 3
        assert [block["tool_use_id"] for block in mixed[-1]["content"]][-1] == talk.held[6][
            "content"
        ][0]["tool_use_id"]


def test_usage_is_summed_over_all_steps_and_lists_each_step(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Nothing."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        answer = talk.ask("what is there?")
        steps = [one.usage for one in provider.answered]
        assert answer.usage.output_tokens == sum(one["output"] for one in steps)
        assert answer.usage.input_tokens == sum(one["input"] for one in steps)
        ends = [event.usage for event in talk.events if event.type == "message_delta"] or [
            answer.usage
        ]
        iterations = ends[0].to_dict()["iterations"]
        assert [one["input_tokens"] for one in iterations] == [one["input"] for one in steps]


def test_indexes_are_dense_and_there_is_one_start_and_one_end(store: Store) -> None:
    script: list[Any] = [
        turn(Think(), Use("list"), Say("Between."), Use("store", {"name": "n", "value": "v"})),
        turn(Think(), Say("End.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url)
        talk.ask("go")
        kinds = [event.type for event in talk.events]
        assert (
            kinds.count("message_start")
            == kinds.count("message_stop")
            == kinds.count("message_delta")
            == 1
        )
        starts = [event.index for event in talk.events if event.type == "content_block_start"]
        assert starts == [0, 1, 2, 3]
        assert "get_artifact" not in str(talk.events)
        assert "tool_use" not in str(talk.held)


def test_an_answer_without_a_key_is_found_by_its_text(store: Store, is_streamed: bool) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Nothing is stored.")), turn(Say("Bye."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        talk.ask("what is there?")
        talk.held[-1]["content"][0]["text"] += " \n"
        talk.ask("thanks")
        assert_only_grows(provider)
        assert len(provider.answered[-1].messages) == 5


def test_an_interrupted_answer_keeps_what_was_read(store: Store) -> None:
    """The client has the thinking of the first step and part of the second step's text."""
    script: list[Any] = [
        turn(Think("one"), Say("Let me look."), Use("list")),
        turn(Say("There is nothing here that I could see."), break_after=6),
        turn(Think("two"), Say("Continued.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url)
        shown: list[Any] = []
        with anthropic.Anthropic(api_key="sk-test", base_url=url, max_retries=0) as client:
            talk.held.append({"role": "user", "content": "what is there?"})
            request: Any = {
                "model": "claude-opus-5-5",
                "max_tokens": 4_000,
                "messages": talk.held,
                "tools": talk.tools,
            }
            with pytest.raises(anthropic.APIError), client.messages.stream(**request) as stream:  # noqa: PT012
                for _ in stream:
                    shown = [
                        one.model_dump(exclude_none=True)
                        for one in stream.current_message_snapshot.content
                    ]
        assert [one["type"] for one in shown] == ["thinking", "text", "text"]
        talk.held.append(
            {
                "role": "assistant",
                "content": [
                    {k: v for k, v in one.items() if k != "parsed_output"} for one in shown
                ],
            }
        )
        talk.ask("go on")
        assert_only_grows(provider)
        sent = provider.answered[-1].messages
        assert [block["type"] for block in sent[1]["content"]] == ["thinking", "text", "tool_use"]
        assert [block["type"] for block in sent[2]["content"]] == ["tool_result"]
        assert sent[3]["content"] == [talk.held[1]["content"][-1]]


def test_thinking_that_the_client_removes_is_not_sent(store: Store) -> None:
    script: list[Any] = [
        turn(Think("one"), Use("list")),
        turn(Think("two"), Use("search", {"q": "x"})),
        turn(Think("three"), Say("Found.")),
        turn(Think("four"), Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url)
        talk.ask("go")
        talk.ask(talk.results("little"))
        for message in talk.held[:3]:
            if message["role"] == "assistant":
                message["content"] = [
                    block for block in message["content"] if block["type"] != "thinking"
                ]
        talk.ask("thanks")
        assert provider.problems == []
        sent = json.dumps(provider.answered[-1].messages)
        assert '"one"' not in sent
        assert '"three"' in sent


def test_a_conversation_that_began_elsewhere_is_never_changed(store: Store) -> None:
    with (
        Provider([turn(Say("Hello.")), turn(Say("Bye."))]) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        talk = Talk(url)
        talk.held = [
            {"role": "user", "content": "began elsewhere"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_x", "name": "search", "input": {}}],
            },
        ]
        talk.ask([{"type": "tool_result", "tool_use_id": "toolu_x", "content": BIG}])
        assert provider.answered[0].tools == ["search"]
        assert provider.answered[0].messages[-1]["content"][0]["content"] == BIG
        talk.ask("thanks")
        assert provider.answered[1].tools == ["search"]


def test_an_adopted_conversation_continues_in_every_mode(store: Store) -> None:
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(Think("a"), get(seen, lines="1:2")),
        turn(Think(), Say("Found.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider:
        with serving(store, provider, mode="loop") as url:
            talk = Talk(url)
            talk.ask("find it")
            talk.ask(talk.results(BIG))
        with serving(store, provider, mode="observe") as url:
            talk.address = url
            talk.ask("thanks")
        assert_only_grows(provider)


def test_the_limit_on_steps_is_shown_to_the_model_and_forces_an_answer(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [turn(Think(), Use("list"))] * 2 + [turn(Say("That is all."))]
    with Provider(script) as provider, serving(store, provider, mode="loop", max_steps=3) as url:
        answer = Talk(url, is_streamed=is_streamed).ask("go")
        assert answer.content[-1].text == "That is all."
        assert "last read" in provider.answered[2].messages[-1]["content"][0]["content"]
        assert provider.answered[2].body["tool_choice"] == {"type": "none"}
        assert len(provider.answered) == 3


def test_the_output_budget_is_shared_by_all_steps(store: Store) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Done."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        Talk(url, thinking=False).ask("go")
        first, second = provider.answered
        assert second.body["max_tokens"] == 4_000 - first.usage["output"]


def test_structured_output_has_only_the_text_of_the_last_step(
    store: Store, is_streamed: bool
) -> None:
    form = {
        "format": {
            "type": "json_schema",
            "schema": {"type": "object", "properties": {}, "additionalProperties": False},
        }
    }
    script: list[Any] = [
        turn(Think("a"), Say("Let me see."), Use("list")),
        turn(Think("b"), Say("{}")),
        turn(Say("{}")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, output_config=form)
        answer = talk.ask("go")
        assert [block.text for block in answer.content if block.type == "text"] == ["{}"]
        talk.ask("again")
        assert_only_grows(provider)


def test_our_tools_get_a_prefix_if_a_name_clashes(store: Store) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Done."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, thinking=False)
        talk.tools.append(
            {"name": "get_artifact", "description": "Mine.", "input_schema": {"type": "object"}}
        )
        talk.ask("go")
        assert provider.answered[0].tools[2:] == [
            "coatcheck_get_artifact", "coatcheck_list_artifacts", "coatcheck_store_artifact",
        ]  # fmt: skip


def test_count_tokens_counts_what_is_sent(store: Store) -> None:
    with Provider([SEARCH]) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url)
        talk.ask("find it")
        talk.held.append({"role": "user", "content": talk.results(BIG)})
        with anthropic.Anthropic(api_key="sk-test", base_url=url, max_retries=0) as client:
            request: Any = {"model": "claude-opus-5-5", "messages": talk.held, "tools": talk.tools}
            assert client.messages.count_tokens(**request).input_tokens < 2_000
        assert provider.seen[-1].tools[1:] == ["get_artifact", "list_artifacts", "store_artifact"]


@pytest.mark.parametrize("how", [{}, {"cut": 11}])
def test_thinking_after_an_answer_that_the_client_changed_is_never_sent_again(
    store: Store, is_streamed: bool, how: dict[str, Any]
) -> None:
    script: list[Any] = [
        turn(Think("zero"), Say("Ready.")),
        turn(Use("list")),
        turn(Say("Nothing there.")),
        turn(Think("one"), Use("search", {"q": "x"})),
        turn(Think("two"), Say("Done."), **how),
        turn(Think("three"), Use("list")),
        turn(Think("four"), Say("Still nothing.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed)
        talk.ask("hello")
        talk.ask("what is there?")
        talk.ask("search")
        talk.held[3]["content"] = [{"type": "text", "text": "Something else."}]
        talk.ask(talk.results("little"))
        assert len(provider.problems) == 1
        assert "bound to a different conversation" in provider.problems[0]
        assert _thoughts(provider.answered[-1]) == ["zero"]
        recovered = len(provider.seen)
        talk.ask("and now?")
        talk.ask("bye")
        assert len(provider.problems) == 1
        assert _thoughts(provider.seen[recovered]) == ["zero", "two"]
        assert _thoughts(provider.answered[-1]) == ["zero", "two", "three", "four"]


def test_thinking_is_left_to_the_provider_if_the_client_requests_it(store: Store) -> None:
    script: list[Any] = [
        turn(Use("list")),
        turn(Say("Nothing.")),
        turn(Think("one"), Say("Hm.")),
        turn(Say("Bye.")),
    ]
    binding = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        talk = Talk(url, thinking=False, extra_body={"thinking": binding})
        talk.ask("what is there?")
        talk.ask("think")
        talk.held[1]["content"] = [{"type": "text", "text": "Something else."}]
        with pytest.raises(anthropic.BadRequestError, match="different conversation"):
            talk.ask("bye")
        assert len(provider.problems) == 1


def test_cache_diagnostics_refer_to_the_last_step(store: Store, is_streamed: bool) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Nothing.")), turn(Say("Bye."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        talk.more["extra_body"] = {"diagnostics": {"previous_message_id": None}}
        answer = talk.ask("what is there?")
        talk.more["extra_body"] = {"diagnostics": {"previous_message_id": answer.id}}
        talk.ask("bye")
        named = [seen.body["diagnostics"]["previous_message_id"] for seen in provider.answered]
        assert named[0] is None
        assert named[1] == answer.id
        assert named[2] not in (None, answer.id)
        assert_only_grows(provider)


def test_input_transformations_of_all_steps_are_each_reported_once(
    store: Store, is_streamed: bool
) -> None:
    one, two = {"type": "thinking_dropped", "path": "a"}, {"type": "thinking_dropped", "path": "b"}
    script: list[Any] = [
        turn(Use("list"), more=(("input_transformations", [one]),)),
        turn(Say("Nothing."), more=(("input_transformations", [one, two]),)),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        answer = talk.ask("what is there?")
        ends = [event for event in talk.events if event.type == "message_delta"] or [answer]
        assert ends[0].to_dict()["input_transformations"] == [one, two]


@pytest.mark.parametrize("is_later", [True, False])
def test_the_credit_token_of_a_refusal_in_a_later_step_is_removed(
    store: Store, is_streamed: bool, is_later: bool
) -> None:
    details = {
        "type": "refusal",
        "category": None,
        "explanation": "No.",
        "fallback_credit_token": "credit",
    }
    refusal = turn(Say("I"), stop="refusal", more=(("stop_details", details),))
    script: list[Any] = [*([turn(Use("list"))] if is_later else []), refusal]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed, thinking=False)
        answer = talk.ask("what is there?")
        ends = [event.delta for event in talk.events if event.type == "message_delta"] or [answer]
        found = ends[0].to_dict()["stop_details"]
        assert found["explanation"] == "No."
        assert ("fallback_credit_token" in found) == (not is_later)


def _thoughts(seen: Seen) -> list[str]:
    return [
        block["thinking"]
        for message in seen.messages
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "thinking"
    ]
