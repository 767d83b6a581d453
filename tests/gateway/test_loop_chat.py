"""`loop` on OpenAI's chat completions: our tools are answered inside, and the client sees one
answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from coatcheck import Store
from tests.gateway.provider import Provider, Say, Seen, Use, turn
from tests.gateway.talking import BIG, Chat, assert_only_grows, post, serving


def get(seen: Seen, **arguments: Any) -> Use:
    texts = [one["content"] for one in seen.messages if one["role"] == "tool"]
    stub = next(text for text in reversed(texts) if text.startswith('{"stub"'))
    return Use("get", {"pointer": json.loads(stub)["artifact"], **arguments})


SEARCH = turn(Use("search", {"q": "jobs"}))


def test_a_read_is_answered_inside_and_the_client_sees_one_answer(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(Say("Looking."), get(seen, lines="5:5")),
        turn(Say("It is job 31676.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url, is_streamed=is_streamed)
        chat.ask({"role": "system", "content": "Be brief."}, "find it")
        answer = chat.ask(*chat.results(BIG))
        assert answer["content"] == "Looking.\n\nIt is job 31676."
        assert "tool_calls" not in answer
        chat.ask("thanks")
        assert_only_grows(provider)
        assert "job 31676" in provider.answered[2].messages[-1]["content"]
        assert len(provider.answered[-1].raw) < 8_000


def test_a_mixed_turn_gives_the_client_its_own_calls_and_keeps_our_results(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(
            Say("Both."),
            get(seen),
            Use("search", {"q": "a"}),
            Use("list"),
            Use("search", {"q": "b"}),
        ),
        turn(Say("Done.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url, is_streamed=is_streamed)
        chat.ask("find it")
        answer = chat.ask(*chat.results(BIG))
        assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [
            '{"q": "a"}',
            '{"q": "b"}',
        ]
        chat.ask(*chat.results("one", "two"))
        chat.ask("thanks")
        assert_only_grows(provider)
        last = provider.answered[2].messages
        assert [one["role"] for one in last[-5:]] == ["assistant", "tool", "tool", "tool", "tool"]


def test_usage_is_sent_on_request_with_the_prompt_of_the_last_step(store: Store) -> None:
    script: list[Any] = [turn(Use("list")), turn(Say("Nothing.")), turn(Say("Bye."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url, stream_options={"include_usage": True})
        chat.ask("what is there?")
        usage = chat.chunks[-1].usage
        first, last = (one.usage for one in provider.answered)
        assert chat.chunks[-1].choices == []
        assert usage.completion_tokens == first["output"] + last["output"]
        assert usage.prompt_tokens == last["input"] + last["read"] + last["write"]
        other = Chat(url)
        other.held = [*chat.held]
        other.ask("again")
        assert all(one.usage is None for one in other.chunks)
        assert provider.answered[-1].body["stream_options"] == {"include_usage": True}
        assert_only_grows(provider)


def test_a_required_call_must_use_one_of_the_clients_tools(store: Store) -> None:
    with Provider([SEARCH]) as provider, serving(store, provider, mode="loop") as url:
        Chat(url, tool_choice="required").ask("go")
        assert provider.answered[0].body["tool_choice"] == {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "search"}}],
            },
        }


def test_several_answers_are_refused_only_in_an_adopted_conversation(store: Store) -> None:
    with (
        Provider([turn(Say("Hello.")), turn(Say("Hello."))]) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        chat = Chat(url, is_streamed=False)
        chat.more = {"n": 2}
        chat.ask("another")
        assert provider.answered[0].tools == ["search"]
        chat = Chat(url, is_streamed=False)
        chat.ask("go")
        chat.more = {"n": 2}
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            chat.ask("again")


def test_text_before_a_call_of_our_tools_is_not_in_structured_output(
    store: Store, is_streamed: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    script: list[Any] = [turn(Say("Let me see."), Use("list")), turn(Say("{}")), turn(Say("{}"))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url, is_streamed=is_streamed, response_format=form)
        assert chat.ask("go")["content"] == "{}"
        chat.ask("again")
        assert_only_grows(provider)


def test_unknown_fields_of_an_answer_are_sent_back(store: Store) -> None:
    """Compatible servers put their reasoning into fields of their own."""
    call = {
        "index": 0,
        "id": "call_x",
        "type": "function",
        "function": {"name": "list_artifacts", "arguments": "{}"},
    }
    chunks: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": "", "reasoning_content": "I should "}},
        {"delta": {"reasoning_content": "look."}},
        {"delta": {"tool_calls": [call]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    ]
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    raw = b"".join(
        f"data: {json.dumps({**head, 'choices': [{'index': 0, **one}]})}\n\n".encode()
        for one in chunks
    )
    script: list[Any] = [
        turn(raw=raw + b"data: [DONE]\n\n", content_type="text/event-stream"),
        turn(Say("Done.")),
    ]
    with (
        Provider(script, is_lenient=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        with openai.OpenAI(api_key="sk-test", base_url=f"{url}/v1", max_retries=0) as client:
            request: Any = {
                "model": "m",
                "messages": [{"role": "user", "content": "go"}],
                "tools": Chat(url).tools,
            }
            text = [
                one.choices[0].delta.content
                for one in client.chat.completions.create(**request, stream=True)
            ]
        assert "".join(one or "" for one in text) == "Done."
        assert provider.answered[1].messages[1]["reasoning_content"] == "I should look."


def test_an_answer_without_calls_of_our_tools_passes_byte_for_byte(store: Store) -> None:
    raw = b'data: {"id":"c1","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"\\u0041"},"big":12345678901234567890}]}\n\n'
    end = b'data: {"id":"c1","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    script: list[Any] = [turn(raw=raw + end, content_type="text/event-stream")]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        body = {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": "go"}],
            "tools": Chat(url).tools,
        }
        answer = post(
            url, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        assert answer.content.startswith(raw)
