"""Real conversations in every dialect, cut and damaged as hosts do: at each step, a new builder
makes the same prompt as the running one, it begins with the previous prompt, and the strict
stand-ins accept it. The short form samples; `COATCHECK_FAULTS=long` takes every part of every
conversation."""

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
from coatcheck.context import Budget, Prompt, PromptBuilder
from coatcheck.errors import BudgetExceeded
from coatcheck.messages.paths import blocks_of
from examples.standins import anthropic, openai_chat, openai_responses
from examples.standins.checks import Refused

Message = dict[str, Any]
HEADERS = {"x-api-key": "key", "authorization": "Bearer key", "anthropic-version": "2023-06-01"}


class Event(NamedTuple):
    """A part of a conversation, independent of any dialect: a `call`, a `result`, or a text of a
    role."""

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
                text = (
                    inner
                    if isinstance(inner, str)
                    else "\n".join(part.get("text", "[picture]") for part in inner)
                )
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
            block = {
                "type": "tool_use",
                "id": event.call_id,
                "name": event.name,
                "input": json.loads(event.text),
            }
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
    """Yield the messages as they are, and as hosts damage them: start cut off, one lost, one
    doubled, two swapped."""
    yield "whole", messages
    if len(messages) > 4:
        cut, lost, doubled, swapped = (rng.randrange(1, len(messages) - 2) for _ in range(4))
        yield f"from {cut} on", messages[cut:]
        yield f"without {lost}", messages[:lost] + messages[lost + 1 :]
        yield f"{doubled} twice", messages[: doubled + 1] + messages[doubled:]
        yield (
            f"{swapped} later",
            [
                *messages[:swapped],
                messages[swapped + 1],
                messages[swapped],
                *messages[swapped + 2 :],
            ],
        )


def built(builder: PromptBuilder, history: list[Message]) -> Prompt | None:
    """Return the prompt, or None if it is refused."""
    try:
        return builder.build(history)
    except BudgetExceeded:
        return None


def wrong_steps(
    session: Session, provider: str, messages: list[Message], budget: int | None, rng: random.Random
) -> Iterator[str | None]:
    """Yield the problem with the prompt of each step, or None. Without a budget, nothing is
    rewritten."""
    api = DIALECTS[provider][1]

    def builder() -> PromptBuilder:
        limits = Budget.for_model() if budget is None else Budget(max_prompt_tokens=budget)
        return PromptBuilder(
            session, provider=provider, system="Be kind.", tools=toolkit(session), budget=limits,
            rewrite=budget is not None,
        )  # fmt: skip

    running, end, history = builder(), 0, list[Message]()
    while end < len(messages):
        start, end = end, min(len(messages), end + rng.choice((1, 1, 2, 3)))
        given = [*history, *messages[start:end]]
        prompt, other = built(running, given), built(builder(), given)
        if prompt is None or other is None:
            history = given
            if prompt is not other:
                yield f"{end}: a new builder differs"
            continue
        if prompt.request() != other.request():
            yield f"{end}: a new builder differs"
        try:
            more = {"max_tokens": 9} if api is anthropic else {}
            api.check(HEADERS, {"model": "m", **prompt.request(), **more})
        except Refused as error:
            yield f"{end}: {error.message}"
        else:
            is_kept = budget is not None or begins_with(prompt.history, history)
            yield None if is_kept else f"{end}: does not begin with the previous prompt"
        history = prompt.history


def begins_with(messages: list[Message], before: list[Message]) -> bool:
    """Return whether `messages` begins with `before`, whose last message may have gained blocks."""
    *others, last = before or [{}]
    if messages[: len(others)] != others or len(messages) < len(before):
        return False
    return not before or blocks_of(messages[len(others)])[: len(blocks_of(last))] == blocks_of(last)


@pytest.mark.faults
@pytest.mark.parametrize("provider", DIALECTS)
def test_a_new_builder_makes_the_same_prompt_as_the_running_one_and_the_provider_accepts_it(
    corpus: Path, provider: str, long_faults: bool
) -> None:
    rng = random.Random(29)
    found = list(conversations(corpus))
    short = [one for one in found if one.provider == "openai"]
    chosen = (
        found
        if long_faults
        else [one for one in found if one.provider != "openai"][::3] + rng.sample(short, 3)
    )
    most, budgets = (70, (None, 1_500, 4_000, 15_000)) if long_faults else (10, (None, 2_500))
    steps, wrong = 0, []
    for one in chosen:
        messages = DIALECTS[provider][0](one)
        starts = (
            range(0, len(messages), most)
            if long_faults
            else [rng.randrange(max(1, len(messages) - most))]
        )
        for start in starts:
            for how, history in damaged(messages[start : start + most], rng):
                budget = rng.choice(budgets)
                with coatcheck.open("memory:", ttl=None) as store:
                    for problem in wrong_steps(store.session("s"), provider, history, budget, rng):
                        steps += 1
                        if problem is not None:
                            wrong.append(f"{one.file}, {start}, {how}, {budget}, {problem}")
    assert steps > 200
    assert wrong == []


@pytest.mark.parametrize("keep_turns", [0, 1, 3])
@pytest.mark.parametrize("provider", DIALECTS)
def test_new_and_running_builders_join_a_message_to_the_note_before_it(
    provider: str, keep_turns: int
) -> None:
    session = coatcheck.open("memory:", ttl=None).session("s")

    def builder() -> PromptBuilder:
        budget = Budget(max_prompt_tokens=3_000)
        return PromptBuilder(
            session,
            provider=provider,
            budget=budget,
            keep_turns=keep_turns,
            policy=None,
            rewrite=True,
        )

    running = builder()
    messages = [
        {"role": "user", "content": "start"},
        {"role": "assistant", "content": "word " * 6_000},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "and then"},
    ]
    history: list[Message] = []
    for message in messages:
        prompt, other = built(running, [*history, message]), built(builder(), [*history, message])
        assert (prompt and prompt.request()) == (other and other.request())
        history = prompt.history if prompt else [*history, message]
