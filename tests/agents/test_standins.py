"""The stand-ins are as strict as the providers: an invalid request is refused with the same words
and shapes."""

from __future__ import annotations

import copy
import http.client
import json
from typing import Any

import anthropic
import openai
import pytest

from coatcheck import tokens
from examples.standins import Call, Fault, Reply, StandIn

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
KEYS = {"authorization": "Bearer none", "x-api-key": "none", "anthropic-version": "2023-06-01"}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "found"}
USER = {"role": "user", "content": "Find it."}
USED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "search", "input": {}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "found"}

CHAT = {
    "model": "m",
    "messages": [USER, ASKED, ANSWERED],
    "tools": [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}],
}
RESPONSES = {
    "model": "m",
    "input": [USER, CALLED, OUTPUT],
    "tools": [{"type": "function", "name": "search", "parameters": SCHEMA}],
}
MESSAGES = {
    "model": "m",
    "max_tokens": 100,
    "messages": [USER, USED, {"role": "user", "content": [RESULT]}],
    "tools": [{"name": "search", "input_schema": SCHEMA}],
}
GOOD: dict[str, dict[str, Any]] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


def post(standin: StandIn, api: str, body: Any, headers: dict[str, str] = KEYS) -> tuple[int, str]:
    connection = http.client.HTTPConnection(standin.anthropic_url.removeprefix("http://"))
    try:
        connection.request(
            "POST", PATHS[api], json.dumps(body), {**headers, "content-type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def changed(api: str, at: str, value: object) -> dict[str, Any]:
    """A good request with another value at a place such as `messages/1/role`; `...` removes it."""
    body = copy.deepcopy(GOOD[api])
    steps: list[Any] = [int(step) if step.isdigit() else step for step in at.split("/")]
    inner: Any = body
    for step in steps[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[steps[-1]]
    else:
        inner[steps[-1]] = value
    return body


@pytest.mark.parametrize("api", PATHS)
def test_a_valid_request_is_answered(api: str) -> None:
    with StandIn([Reply("hello"), Reply("again")]) as standin:
        status, answer = post(standin, api, GOOD[api])
    assert status == 200, answer
    assert "again" in answer


WRONG = [
    ("chat", "messages", [USER, ASKED], "did not have response messages: c1"),
    ("chat", "messages", [USER, ASKED, USER, ANSWERED], "did not have response messages: c1"),
    (
        "chat",
        "messages",
        [USER, ANSWERED],
        "must be a response to a preceeding message with 'tool_calls'",
    ),
    ("chat", "messages/2/tool_call_id", "c2", "must be a response"),
    (
        "chat",
        "messages/2/tool_call_id",
        ...,
        "Missing required parameter: 'messages[2].tool_call_id'",
    ),
    ("chat", "messages/2/content", None, "content"),
    (
        "chat",
        "messages/2/content",
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        "text alone",
    ),
    ("chat", "messages/2/name", "search", "Unknown parameter: 'messages[2].name'"),
    ("chat", "messages/1/tool_calls", [], "empty array"),
    ("chat", "messages/1/tool_calls/0/function/arguments", {}, "expected a string"),
    ("chat", "messages/0/role", "human", "Invalid value: 'human'"),
    ("chat", "messages", [], "empty array"),
    ("chat", "model", ..., "Missing required parameter: 'model'"),
    ("chat", "max_token", 3, "Unknown parameter: 'max_token'"),
    ("chat", "stream_options", {"include_usage": True}, "only allowed when 'stream' is enabled"),
    ("chat", "tools/0/function/name", "artifacts.get", "does not match pattern"),
    ("chat", "tools/0/function/parameters/type", "text", "Invalid schema for function 'search'"),
    ("chat", "tools/0/function/description", "x" * 1_025, "string too long"),
    ("chat", "tools/0/function/strict", True, "'additionalProperties' is required"),
    ("responses", "input", [USER, CALLED], "No tool output found for function call c1."),
    (
        "responses",
        "input",
        [USER, OUTPUT],
        "No tool call found for function call output with call_id c1.",
    ),
    (
        "responses",
        "input/2/call_id",
        "c2",
        "No tool call found for function call output with call_id c2.",
    ),
    ("responses", "input/2/output", ..., "Missing required parameter: 'input[2].output'"),
    ("responses", "input/1/arguments", {}, "Invalid type for 'input[1].arguments'"),
    ("responses", "input/1/type", "tool_call", "Invalid value: 'tool_call'"),
    ("responses", "tools/0/function", {}, "Unknown parameter"),
    ("responses", "previous_response_id", "resp_1", "not found"),
    (
        "messages",
        "messages",
        [USER, USED],
        "without `tool_result` blocks immediately after: t1",
    ),
    ("messages", "messages", [USER, USED, USER], "`tool_use` ids were found without"),
    (
        "messages",
        "messages",
        [{"role": "user", "content": [RESULT]}],
        "unexpected `tool_use_id` found in `tool_result`",
    ),
    ("messages", "messages/2/content/0/tool_use_id", "t2", "unexpected `tool_use_id`"),
    ("messages", "messages/2/content", [RESULT, RESULT], "each tool_use must have a single result"),
    ("messages", "messages/2/content", [{"type": "text", "text": "so"}, RESULT], "must come first"),
    ("messages", "messages/2/content/0/tool_call_id", "t1", "Extra inputs are not permitted"),
    ("messages", "messages/2/content/0/is_error", "no", "valid boolean"),
    (
        "messages",
        "messages/2/content/0/content",
        [{"type": "tool_use"}],
        "valid string or a list of blocks",
    ),
    ("messages", "messages/1/content/0/input", "{}", "valid dictionary"),
    ("messages", "messages/1/content/0/id", "t 1", "should match pattern"),
    ("messages", "messages/0/content", "", "non-empty content"),
    ("messages", "messages/0/content", [{"type": "text", "text": " "}], "must be non-empty"),
    ("messages", "messages/0/role", "system", "'user' or 'assistant'"),
    ("messages", "messages", [USED], "first message must use"),
    ("messages", "max_tokens", ..., "max_tokens: Field required"),
    ("messages", "stream_options", {}, "Extra inputs are not permitted"),
    ("messages", "tools/0/input_schema", ..., "input_schema.type"),
    ("messages", "tools/0/input_schema/required", ["p"], "JSON schema is invalid"),
    ("messages", "tools/0/parameters", {}, "Extra inputs are not permitted"),
    ("messages", "tools", [MESSAGES["tools"][0]] * 2, "Tool names must be unique"),  # type: ignore[index]
]


@pytest.mark.parametrize(
    ("api", "at", "value", "message"),
    WRONG,
    ids=[f"{one[0]} {one[1]} {one[3][:30]}" for one in WRONG],
)
def test_an_invalid_request_is_refused_as_by_the_provider(
    api: str, at: str, value: object, message: str
) -> None:
    with StandIn([Reply("hello")] * 3) as standin:
        status, answer = post(standin, api, changed(api, at, value))
    refusal = json.loads(answer)
    assert (status, refusal["error"]["type"]) == (400, "invalid_request_error")
    assert message in refusal["error"]["message"]
    assert set(refusal) == ({"type", "error", "request_id"} if api == "messages" else {"error"})
    if api != "messages":
        assert set(refusal["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("api", PATHS)
def test_a_key_is_required(api: str) -> None:
    with StandIn([]) as standin:
        assert post(standin, api, GOOD[api], {})[0] == 401


def test_the_sdks_raise_their_own_errors_for_refused_requests() -> None:
    with StandIn([Reply("hello")], window=50) as standin:
        with (
            openai.OpenAI(api_key="none", base_url=standin.openai_url) as client,
            pytest.raises(openai.BadRequestError, match="maximum context length") as error,
        ):
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "word " * 100}]
            )
        assert error.value.code == "context_length_exceeded"
        with (
            anthropic.Anthropic(api_key="none", base_url=standin.anthropic_url) as other,
            pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
        ):
            other.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "word " * 100}]
            )


@pytest.mark.parametrize("status", [429, 529])
def test_a_fault_says_when_to_retry(status: int) -> None:
    with StandIn([Reply("hello")], faults=[Fault(0, status)]) as standin:
        kinds = {429: anthropic.RateLimitError, 529: anthropic.InternalServerError}
        with (
            anthropic.Anthropic(
                api_key="none", base_url=standin.anthropic_url, max_retries=0
            ) as client,
            pytest.raises(kinds[status]) as error,
        ):
            client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )
        assert error.value.response.headers["retry-after"] == "0.01"
        expected = {429: "rate_limit_error", 529: "overloaded_error"}[status]
        assert error.value.body["error"]["type"] == expected  # type: ignore[index]


def streamed(api: str, reply: Reply, **options: Any) -> list[tuple[str, Any]]:
    first = {"chat": "messages", "responses": "input", "messages": "messages"}[api]
    body = {**GOOD[api], first: [USER], "stream": True, **options}
    with StandIn([reply]) as standin:
        text = post(standin, api, body)[1]
    found = []
    for event in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append(
            (
                lines.get("event", ""),
                lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]),
            )
        )
    return found


TWO = Reply("So – be it.", (Call("search", {"q": "ünder"}), Call("search", {"q": "b"})))


def test_messages_stream_their_blocks_one_after_the_other() -> None:
    events = streamed("messages", TWO)
    names = [name for name, _ in events]
    assert names == [data["type"] for _, data in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    for _, data in events:
        if data["type"] == "content_block_delta":
            parts[data["index"]] += data["delta"].get("text", "") + data["delta"].get(
                "partial_json", ""
            )
    assert (parts[0], json.loads(parts[1]), json.loads(parts[2])) == (
        "So – be it.",
        {"q": "ünder"},
        {"q": "b"},
    )
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0


def test_chat_streams_deltas_and_sends_usage_on_request() -> None:
    events = streamed("chat", TWO, stream_options={"include_usage": True})
    assert events[-1][1] == "[DONE]"
    chunks = [data for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    written = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            written[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text) for text in written.values()] == [{"q": "ünder"}, {"q": "b"}]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["prompt_tokens"] > 0) == ([], True)
    assert not any("usage" in data for _, data in streamed("chat", Reply("hi"))[:-1])


def test_responses_number_their_events_and_end_with_the_complete_response() -> None:
    events = [data for _, data in streamed("responses", TWO)]
    assert [data["sequence_number"] for data in events] == list(range(len(events)))
    assert [data["type"] for data in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    written = "".join(
        data["delta"] for data in events if data["type"] == "response.function_call_arguments.delta"
    )
    assert written == '{"q": "ünder"}{"q": "b"}'


def test_usage_counts_the_tokens_of_the_prompt() -> None:
    def used(standin: StandIn, content: str) -> int:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        found: int = json.loads(post(standin, "messages", body)[1])["usage"]["input_tokens"]
        return found

    text = "The quick brown fox jumps over the lazy dog. " * 50
    with StandIn([Reply("hello")]) as standin:
        assert used(standin, text) - used(standin, "hi") == tokens.count(text) - tokens.count("hi")
