"""Conversations for hypothesis, written in each format: turns with calls, results and errors, and
with faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]
FORMATS = ("openai-chat", "openai-responses", "anthropic", "pi", "langchain")


@dataclass(frozen=True)
class Step:
    """One tool call: its id, its argument, its result (None if it never came), and whether that is
    an error."""

    call_id: str
    argument: str
    result: str | None
    is_error: bool = False


@dataclass(frozen=True)
class Turn:
    """The user's text (None in the middle of the model's work), the model's answer, and its
    calls."""

    request: str | None
    answer: str
    steps: tuple[Step, ...] = ()
    thought: str = ""


def texts(most: int = 60) -> st.SearchStrategy[str]:
    words = st.sampled_from(
        ["alpha", "beta\n", "日本", '{"stub":"', "art:0123456789ab", "x" * 50, "\u2028", '"\\']
    )
    return st.builds(lambda word, times: f"{word} " * times, words, st.integers(0, most))


def conversations(*, odd_ids: bool = False, max_turns: int = 12) -> st.SearchStrategy[list[Turn]]:
    ids = st.uuids().map(str) if not odd_ids else st.sampled_from(["", "a", "b", "c" * 1_500])
    step = st.builds(
        Step,
        ids,
        texts(30),
        texts() if not odd_ids else st.none() | texts(),
        st.booleans() if odd_ids else st.just(False),
    )
    turn = st.builds(
        Turn,
        st.none() | texts(20),
        texts(20),
        st.lists(step, max_size=3).map(tuple),
        st.just("") | texts(40),
    )
    return st.lists(turn, max_size=max_turns)


def written(turns: list[Turn], form: str) -> list[Message]:
    """Return a conversation as messages of a format. It begins with the user."""
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        request = turn.request if turn.request is not None or number else "begin"
        messages += _TURNS[form](request, turn)
    return messages


def _chat(request: str | None, turn: Turn) -> Iterator[Message]:
    if request is not None:
        yield {"role": "user", "content": request}
    calls = [
        {
            "id": one.call_id,
            "type": "function",
            "function": {"name": "run", "arguments": json.dumps({"a": one.argument})},
        }
        for one in turn.steps
    ]
    yield {"role": "assistant", "content": turn.answer, **({"tool_calls": calls} if calls else {})}
    for one in turn.steps:
        if one.result is not None:
            status = {"status": "error"} if one.is_error else {}
            yield {"role": "tool", "tool_call_id": one.call_id, "content": one.result, **status}


def _responses(request: str | None, turn: Turn) -> Iterator[Message]:
    if request is not None:
        yield {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": request}],
        }
    yield {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": turn.answer}],
    }
    for one in turn.steps:
        arguments = json.dumps({"a": one.argument})
        yield {
            "type": "function_call",
            "call_id": one.call_id,
            "name": "run",
            "arguments": arguments,
        }
    for one in turn.steps:
        if one.result is not None:
            status = {"status": "failed"} if one.is_error else {}
            yield {
                "type": "function_call_output",
                "call_id": one.call_id,
                "output": one.result,
                **status,
            }


def _anthropic(request: str | None, turn: Turn) -> Iterator[Message]:
    if request is not None:
        yield {"role": "user", "content": request}
    thought = (
        [{"type": "thinking", "thinking": turn.thought, "signature": "s"}] if turn.thought else []
    )
    calls = [
        {"type": "tool_use", "id": one.call_id, "name": "run", "input": {"a": one.argument}}
        for one in turn.steps
    ]
    yield {
        "role": "assistant",
        "content": [*thought, {"type": "text", "text": turn.answer}, *calls],
    }
    results = [
        {
            "type": "tool_result",
            "tool_use_id": one.call_id,
            "content": one.result,
            "is_error": one.is_error,
        }
        for one in turn.steps
        if one.result is not None
    ]
    if results:
        yield {"role": "user", "content": results}


def _pi(request: str | None, turn: Turn) -> Iterator[Message]:
    if request is not None:
        yield {"role": "user", "content": [{"type": "text", "text": request}]}
    calls = [
        {"type": "toolCall", "id": one.call_id, "name": "run", "arguments": {"a": one.argument}}
        for one in turn.steps
    ]
    yield {"role": "assistant", "content": [{"type": "text", "text": turn.answer}, *calls]}
    for one in turn.steps:
        if one.result is not None:
            content = [{"type": "text", "text": one.result}]
            yield {"role": "toolResult", "toolCallId": one.call_id, "toolName": "run", "content": content,
                   "isError": one.is_error}  # fmt: skip


def _langchain(request: str | None, turn: Turn) -> Iterator[Message]:
    if request is not None:
        yield {"type": "human", "data": {"content": request}}
    calls = [{"id": one.call_id, "name": "run", "args": {"a": one.argument}} for one in turn.steps]
    yield {"type": "ai", "data": {"content": turn.answer, "tool_calls": calls}}
    for one in turn.steps:
        if one.result is not None:
            status = "error" if one.is_error else "success"
            yield {
                "type": "tool",
                "data": {"content": one.result, "tool_call_id": one.call_id, "status": status},
            }


_TURNS = {
    "openai-chat": _chat,
    "openai-responses": _responses,
    "anthropic": _anthropic,
    "pi": _pi,
    "langchain": _langchain,
}
