"""Real conversations in every dialect, cut and damaged as hosts do: at each step a new builder gives the prompt of the
running one, and the strict stand-ins accept it. The short form samples; `COATCHECK_FAULTS=long` takes everything."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import coatcheck
from benchmarks.conversations import Conversation, conversations
from coatcheck import Session, toolkit
from coatcheck.context import Budget, PromptBuilder
from coatcheck.errors import BudgetExceeded
from examples.standins import anthropic, openai_chat, openai_responses
from examples.standins.checks import Refused

Message = dict[str, Any]
HEADERS = {"x-api-key": "key", "authorization": "Bearer key", "anthropic-version": "2023-06-01"}


class Event(NamedTuple):
    """A part of a conversation in no dialect: a `call`, a `result`, or a text of a role."""

    kind: str
    text: str
    call_id: str = ""
    name: str = ""


def events(one: Conversation) -> Iterator[Event]:
    for message in one.messages:
        if message["role"] == "tool":
            yield Event("result", message["content"] or "", message["tool_call_id"])
            continue
        content = message.get("content") or []
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if block["type"] == "text":
                yield Event(message["role"], block["text"])
            elif block["type"] == "tool_use":
                yield Event("call", json.dumps(block["input"]), block["id"], block["name"])
            elif block["type"] == "tool_result":
                inner = block.get("content") or ""
                text = inner if isinstance(inner, str) else "\n".join(part.get("text", "[picture]") for part in inner)
                yield Event("result", text, block["tool_use_id"])
        for call in message.get("tool_calls") or ():
            yield Event("call", call["function"]["arguments"], call["id"], call["function"]["name"])


def as_anthropic(one: Conversation) -> list[Message]:
    if one.provider == "anthropic":
        return one.messages
    found: list[Message] = []
    for event in events(one):
        role = {"call": "assistant", "result": "user"}.get(event.kind, event.kind)
        block: Message = {"type": "text", "text": event.text}
        if event.kind == "call":
            block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": json.loads(event.text)}
        elif event.kind == "result":
            block = {"type": "tool_result", "tool_use_id": event.call_id, "content": event.text}
        if role == "system":
            continue
        if found and found[-1]["role"] == role:
            found[-1]["content"].append(block)
        else:
            found.append({"role": role, "content": [block]})
    return found


def as_chat(one: Conversation) -> list[Message]:
    found: list[Message] = []
    for event in events(one):
        if event.kind == "result":
            found.append({"role": "tool", "tool_call_id": event.call_id, "content": event.text})
        elif event.kind == "call":
            function = {"name": event.name, "arguments": event.text}
            call = {"id": event.call_id, "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        else:
            found.append({"role": event.kind, "content": event.text})
    return found


def as_items(one: Conversation) -> list[Message]:
    def item(event: Event) -> Message:
        if event.kind == "result":
            return {"type": "function_call_output", "call_id": event.call_id, "output": event.text}
        if event.kind == "call":
            call = {"call_id": event.call_id, "name": event.name, "arguments": event.text}
            return {"type": "function_call", **call}
        return {"role": event.kind, "content": event.text}

    return [item(event) for event in events(one)]


DIALECTS: dict[str, tuple[Callable[[Conversation], list[Message]], Any]] = {
    "anthropic": (as_anthropic, anthropic),
    "openai": (as_chat, openai_chat),
    "openai-responses": (as_items, openai_responses),
}


def damaged(messages: list[Message], rng: random.Random) -> Iterator[tuple[str, list[Message]]]:
    """The messages, and what hosts make of them: cut off in front, one lost, one doubled, two swapped."""
    yield "whole", messages
    if len(messages) > 4:
        cut, lost, doubled, swapped = (rng.randrange(1, len(messages) - 2) for _ in range(4))
        yield f"from {cut} on", messages[cut:]
        yield f"without {lost}", messages[:lost] + messages[lost + 1 :]
        yield f"{doubled} twice", messages[: doubled + 1] + messages[doubled:]
        yield (
            f"{swapped} later",
            [*messages[:swapped], messages[swapped + 1], messages[swapped], *messages[swapped + 2 :]],
        )


def request(builder: PromptBuilder, messages: list[Message]) -> tuple[Any, Any]:
    """What is sent without and with cache breakpoints, which depend on the prompt before; None where it is refused."""
    try:
        prompt = builder.build(messages)
    except BudgetExceeded:
        return None, None
    return prompt.request(cache_control=False), prompt.request()


def wrong_steps(
    session: Session, provider: str, messages: list[Message], budget: int, rng: random.Random
) -> Iterator[str | None]:
    """At each step, what is wrong with its prompt; None where nothing is."""
    api = DIALECTS[provider][1]

    def builder() -> PromptBuilder:
        return PromptBuilder(
            session, provider=provider, system="Be kind.", tools=toolkit(session), recall=False,
            budget=Budget(max_prompt_tokens=budget),
        )  # fmt: skip

    running, end = builder(), 0
    while end < len(messages):
        end = min(len(messages), end + rng.choice((1, 1, 2, 3)))
        sent, marked = request(running, messages[:end])
        if request(builder(), messages[:end])[0] != sent:
            yield f"{end}: a new builder differs"
        elif sent is not None:
            try:
                api.check(HEADERS, {"model": "m", **marked, **({"max_tokens": 9} if api is anthropic else {})})
            except Refused as error:
                yield f"{end}: {error.message}"
            else:
                yield None


@pytest.mark.faults
@pytest.mark.parametrize("provider", DIALECTS)
def test_a_new_builder_gives_the_prompt_of_the_running_one_and_the_provider_accepts_it(
    corpus: Path, provider: str, long_faults: bool
) -> None:
    rng = random.Random(29)
    found = list(conversations(corpus))
    short = [one for one in found if one.provider == "openai"]
    chosen = found if long_faults else [one for one in found if one.provider != "openai"] + rng.sample(short, 3)
    most, budgets = (70, (1_500, 4_000, 15_000)) if long_faults else (16, (2_500,))
    steps, wrong = 0, []
    for one in chosen:
        messages = DIALECTS[provider][0](one)
        starts = range(0, len(messages), most) if long_faults else [rng.randrange(max(1, len(messages) - most))]
        for start in starts:
            for how, history in damaged(messages[start : start + most], rng):
                for budget in budgets:
                    with coatcheck.open("memory:", ttl=None) as store:
                        for problem in wrong_steps(store.session("s"), provider, history, budget, rng):
                            steps += 1
                            if problem is not None:
                                wrong.append(f"{one.file}, {start}, {how}, {budget}, {problem}")
    assert steps > 500
    assert wrong == []


@pytest.mark.parametrize("keep_turns", [0, 1, 3])
@pytest.mark.parametrize("provider", DIALECTS)
def test_a_message_after_a_note_is_joined_to_it_by_new_and_running_builders_alike(
    provider: str, keep_turns: int
) -> None:
    session = coatcheck.open("memory:", ttl=None).session("s")

    def builder() -> PromptBuilder:
        budget = Budget(max_prompt_tokens=3_000)
        return PromptBuilder(
            session, provider=provider, recall=False, budget=budget, keep_turns=keep_turns, policy=None
        )

    running = builder()
    messages = [
        {"role": "user", "content": "start"},
        {"role": "assistant", "content": "word " * 6_000},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "and then"},
    ]
    for end in range(1, len(messages) + 1):
        assert request(running, messages[:end])[0] == request(builder(), messages[:end])[0], end
