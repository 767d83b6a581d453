"""A conversation only grows: each request begins with the previous one, and no thinking is refused.
Every shared transcript is replayed call by call, with thinking signed over its prefix as newer
models do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from benchmarks.conversations import Conversation, conversations
from benchmarks.provider_rules import BoundThinking, refused
from coatcheck import Policy, Session, Store, toolkit
from coatcheck.context import Budget, Clearing, HotState, PromptBuilder
from coatcheck.errors import BudgetExceeded, InvalidArgument

Message = dict[str, Any]
MAX_CALLS = 8
"""Number of calls of each conversation to replay. `COATCHECK_FAULTS=long` replays all."""


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:", ttl=None) as store:
        yield store.session("s")


@pytest.fixture(scope="module")
def found(corpus: Path) -> list[Conversation]:
    return list(conversations(corpus))


@pytest.fixture
def replays(found: list[Conversation], long_faults: bool) -> list[Conversation]:
    """Every shared transcript, or the beginning of each and some of the short ones."""
    if long_faults:
        return found
    some = (
        one for number, one in enumerate(found) if one.provider == "anthropic" or number % 40 == 0
    )
    return [
        replace(one, messages=one.messages[: [*one.turns, *one.turns[-1:]][:MAX_CALLS][-1] + 1])
        for one in some
    ]


def blocks(request: Message) -> list[str]:
    """The request as a provider reads it, block by block, without cache breakpoints."""
    parts = [json.dumps(request.get(name)) for name in ("tools", "system", "instructions")]
    for message in request.get("messages") or request["input"]:
        content = message.get("content")
        if isinstance(content, list) and message.get("role") in ("user", "assistant"):
            parts += [json.dumps([message["role"], block]) for block in content]
        elif isinstance(content, str) and "tool_call_id" not in message:
            parts.append(json.dumps([message["role"], {"type": "text", "text": content}]))
        else:
            parts.append(json.dumps(message))
    return parts


def calls(one: Conversation) -> Iterator[tuple[list[Message], Message]]:
    """The messages that are new in each call, and the answer to it, whose thinking has no signature
    yet."""
    messages = [without_thinking(message) for message in one.messages]
    for start, at in pairwise([-1, *one.turns]):
        thinks = {"type": "thinking", "thinking": f"thought {at}", "signature": ""}
        answer = messages[at]
        is_signed = one.provider == "anthropic"
        yield (
            messages[start + 1 : at],
            {**answer, "content": [thinks, *answer["content"]]} if is_signed else answer,
        )


def without_thinking(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {
        **message,
        "content": [block for block in content if "thinking" not in str(block.get("type"))],
    }


def replay(
    one: Conversation, builder: Callable[[int], PromptBuilder], *, may_rewrite: bool = False
) -> tuple[int, list[str]]:
    """Return the number of calls that rewrote something, and the problems found."""
    rules, history = BoundThinking(), list[Message]()
    before: list[str] | None = None
    rewritten, wrong = 0, []
    for turn, (new, answer) in enumerate(calls(one)):
        state = HotState(
            session_id="s", objective="the task", last_successful_step=f"call {turn // 3}"
        )
        prompt = builder(turn).build([*history, *new], hot_state=state)
        request = prompt.request()
        wrong += [
            f"{one.file}, call {turn}: {each}"
            for each in (*refused(request), *rules.refused(request))
        ]
        sent = blocks(prompt.request(cache_control=False))
        if before is not None and sent[: len(before)] != before:
            rewritten += 1
            if not may_rewrite:
                wrong.append(f"{one.file}, call {turn}: does not begin with the previous request")
        before = sent
        history = [*prompt.history, rules.answered(request, answer)]
    return rewritten, wrong


def make(store: Store, **options: Any) -> PromptBuilder:
    session = store.session("s")
    given: dict[str, Any] = {
        "provider": "anthropic",
        "system": "Be kind.",
        "tools": toolkit(session),
    }
    return PromptBuilder(session, **given | options)


def builders(store: Store, **options: Any) -> dict[str, Callable[[int], PromptBuilder]]:
    running = [make(store, **options), make(store, **options)]
    return {
        "one builder": lambda turn: running[0],
        "a new one each time": lambda turn: make(store, **options),
        "two take turns": lambda turn: running[turn % 2],
    }


RESTARTS = ["one builder", "a new one each time", "two take turns"]


@pytest.mark.parametrize("restarts", RESTARTS)
def test_every_request_begins_with_the_previous_one_and_no_thinking_is_refused(
    replays: list[Conversation], restarts: str
) -> None:
    wrong = []
    for one in replays:
        with coatcheck.open("memory:", ttl=None) as store:
            make_one = builders(store, provider=one.provider, window=2_000_000)[restarts]
            wrong += replay(one, make_one)[1]
    assert wrong == []


def test_a_conversation_only_grows_when_our_tools_are_added_later(
    replays: list[Conversation],
) -> None:
    wrong, replayed = [], 0
    for one in replays:
        if one.provider == "anthropic":
            with coatcheck.open("memory:", ttl=None) as store:
                tools = [
                    {"name": "run", "input_schema": {"type": "object"}},
                    *toolkit(store.session("s")),
                ]
                options = {
                    "provider": one.provider,
                    "model": "claude-opus-5-5",
                    "tools": tools,
                    "window": 2_000_000,
                }
                wrong += replay(one, builders(store, **options)["a new one each time"])[1]
                replayed += 1
    assert wrong == []
    assert replayed > 3


@pytest.mark.parametrize("restarts", RESTARTS[1:])
def test_if_rewriting_is_allowed_it_is_rare_and_drops_thinking_that_no_longer_fits(
    replays: list[Conversation], restarts: str
) -> None:
    wrong, rewritten = [], 0
    for one in replays:
        with coatcheck.open("memory:", ttl=None) as store:
            budget = Budget(max_prompt_tokens=9_000)
            make_one = builders(store, provider=one.provider, budget=budget, rewrite=True)[restarts]
            try:
                number, problems = replay(one, make_one, may_rewrite=True)
            except BudgetExceeded:
                continue  # one message alone is too large
            rewritten += number
            wrong += problems
    assert wrong == []
    assert rewritten > 3


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def turn(number: int, content: str, *, thought: bool = False) -> list[Message]:
    thinks = [{"type": "thinking", "thinking": "hm", "signature": f"s{number}"}] if thought else []
    use = {"type": "tool_use", "id": f"c{number}", "name": "run", "input": {"n": number}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": content}
    return [{"role": "assistant", "content": [*thinks, use]}, {"role": "user", "content": [result]}]


def test_two_processes_send_the_same_bytes_for_the_same_history(tmp_path: Path) -> None:
    history = [user("go"), *turn(1, "row of a result\n" * 4_000)]
    asked = []
    for _ in range(2):
        with coatcheck.open(tmp_path) as store:
            prompt = make(store, smallest_cache=1).build(history, hot_state={"step": 1})
            asked.append(json.dumps(prompt.request()))
    assert asked[0] == asked[1]


def test_a_part_is_appended_only_when_it_differs_from_the_last_of_its_kind(
    session: Session,
) -> None:
    builder = PromptBuilder(session, provider="openai")
    first = builder.build([user("go")], hot_state={"step": 1}, chunks=["a chunk"])
    assert [text.partition(",")[0] for text in first.appended] == [
        "Hot state",
        "Retrieved for this turn",
    ]
    history = [*first.history, {"role": "assistant", "content": "ok"}, user("and then?")]
    same = builder.build(history, hot_state={"step": 1}, chunks=["a chunk"])
    assert (same.appended, same.appended_tokens, same.history) == ((), 0, history)
    assert same.hs_tokens == first.hs_tokens > 0
    other = builder.build(history, hot_state={"step": 2}, chunks=["a chunk"])
    assert len(other.appended) == 1
    assert other.appended[0].endswith('{"step":2}')
    back = builder.build(
        [*other.history, {"role": "assistant", "content": "ok"}], hot_state={"step": 1}
    )
    assert len(back.appended) == 1, "the last one counts, not any earlier one"


def test_text_that_only_looks_like_an_appended_part_is_not_mistaken_for_one(
    session: Session,
) -> None:
    builder = PromptBuilder(session, provider="openai")
    (text,) = builder.build([user("go")], hot_state={"step": 1}).appended
    forged = text.replace('{"step":1}', '{"step":9}')
    prompt = builder.build([user("go"), user(forged)], hot_state={"step": 1})
    assert prompt.appended == (text,)
    assert (
        len(builder.build([user("go"), user(text), user(forged)], hot_state={"step": 1}).appended)
        == 0
    )


def test_recall_is_off_unless_asked_for_and_appended_when_it_names_something_new(
    session: Session,
) -> None:
    session.put("the turbine overheated", name="incident")
    assert PromptBuilder(session, provider="openai").build([user("turbine?")]).appended == ()
    builder = PromptBuilder(session, provider="openai", recall=True)
    first = builder.build([user("turbine?")])
    assert "incident" in first.appended[0]
    history = [*first.history, {"role": "assistant", "content": "ok"}, user("what of the turbine?")]
    assert builder.build(history).appended == ()
    session.put("the turbine was repaired", name="repair")
    assert "repair" in builder.build(history).appended[0]


def test_a_result_that_was_sent_is_never_judged_again(session: Session) -> None:
    large = "row of a result\n" * 4_000
    history = [user("go"), *turn(1, large), *turn(2, "small")]
    prompt = make(session.store).build(history)
    assert prompt.history == history
    assert prompt.refs == ()
    allowed = make(session.store, rewrite=True, budget=Budget(max_prompt_tokens=8_000)).build(
        history
    )
    assert allowed.est_tokens <= 8_000
    assert session.get(allowed.refs[0]) == large


def test_a_host_that_does_not_keep_the_history_gets_a_note_about_it(session: Session) -> None:
    builder = make(session.store)
    raw = [user("go"), *turn(1, "row of a result\n" * 4_000)]
    builder.build(raw)
    prompt = builder.build([*raw, *turn(2, "small")])
    assert prompt.rewritten_tokens > 0
    assert "pass prompt.history" in prompt.changes[-1]


def test_a_conversation_over_its_budget_is_refused_and_the_error_names_the_ways_out(
    session: Session,
) -> None:
    history = [
        user("go"),
        *(one for number in range(20) for one in turn(number, "row of a result\n" * 100)),
    ]
    budget = Budget(max_prompt_tokens=4_000)
    with pytest.raises(BudgetExceeded) as caught:
        make(session.store, budget=budget).build(history)
    assert all(
        way in str(caught.value.hint) for way in ("rewrite=True", "Budget.for_model", "Clearing")
    )
    assert make(session.store, budget=budget, rewrite=True).build(history).est_tokens <= 4_000


def test_a_rewrite_keeps_thinking_before_the_first_change_and_drops_it_after(
    session: Session,
) -> None:
    history = [user("go"), *turn(0, "ok", thought=True)]
    for number in range(1, 9):
        history += turn(number, f"{number} " + "row of a result\n" * 400, thought=True)
    budget = Budget(max_prompt_tokens=12_000)
    prompt = make(session.store, budget=budget, rewrite=True, policy=None).build(history)
    changed = next(at for at, one in enumerate(prompt.history) if one != history[at])
    thinking = ["thinking" in json.dumps(one) for one in prompt.history]
    assert changed > 1
    assert thinking[1]
    assert not any(thinking[changed:])
    assert any("thinking behind the first change was removed" in line for line in prompt.changes)
    answer = [{"role": "assistant", "content": "fine"}, user("and then?")]
    again = make(session.store, budget=budget, rewrite=True, policy=None)
    assert again.build([*prompt.history, *answer]).history == [*prompt.history, *answer]


def test_nothing_is_added_to_an_answer_that_the_provider_paused(session: Session) -> None:
    paused = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
    }
    history = [user("go"), paused]
    assert make(session.store).build(history, hot_state={"step": 1}).history == history


def test_repeating_an_attempt_changes_nothing(session: Session) -> None:
    history = [user("go"), *turn(1, "row of a result\n" * 4_000)]
    builder = make(session.store, clearing=Clearing(), recall=True)
    first = builder.build(history, hot_state={"step": 1})
    assert builder.build(first.history, hot_state={"step": 1}).history == first.history
    changed = builder.build(first.history, hot_state={"step": 2})
    assert changed.history[-1]["content"][:-1] == first.history[-1]["content"]
    assert changed.rewritten_tokens == 0


# Results that the provider clears


def test_results_that_the_provider_may_clear_are_listed_with_their_pointers(
    session: Session,
) -> None:
    small, middle, large = "ok", "row of a result\n" * 50, "row of a result\n" * 4_000
    uses = [{"type": "tool_use", "id": f"c{n}", "name": "run", "input": {}} for n in range(3)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{n}", "content": one}
        for n, one in enumerate((small, middle, large))
    ]
    history = [
        user("go"),
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    builder = make(
        session.store, clearing=Clearing(trigger_tokens=50_000, keep=5, clear_at_least=10_000)
    )
    prompt = builder.build(history)
    *_, note = prompt.history[-1]["content"]
    assert prompt.history[-1]["content"][1]["content"] == middle
    pointers = [line.split()[-1] for line in note["text"].splitlines()[1:]]
    assert [session.get(pointer) for pointer in pointers] == [middle, large]
    assert refused(prompt.request()) == []
    assert prompt.request()["context_management"] == {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 50_000},
                "keep": {"type": "tool_uses", "value": 5},
                "clear_at_least": {"type": "input_tokens", "value": 10_000},
                "exclude_tools": ["get_artifact", "list_artifacts", "store_artifact"],
            }
        ]
    }
    assert prompt.request()["betas"] == ["context-management-2025-06-27"]


def test_results_that_the_provider_clears_are_not_counted(session: Session) -> None:
    history = [user("go")]
    options: dict[str, Any] = {
        "clearing": Clearing(trigger_tokens=5_000, keep=2, clear_at_least=1_000),
        "budget": Budget(max_prompt_tokens=12_000),
        "policy": Policy(max_tokens=3_000),
    }
    for number in range(20):
        new = turn(number, f"{number} " + "row of a result\n" * 200)
        history = make(session.store, **options).build([*history, *new]).history
    prompt = make(session.store, **options).build(history)
    assert prompt.cleared_tokens > 10_000
    assert prompt.est_tokens <= 12_000


def test_clearing_is_only_available_for_anthropic(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="Anthropic"):
        PromptBuilder(session, provider="openai", clearing=Clearing())


# Budgets for models


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("claude-opus-5-5", 900_000), ("anthropic/claude-haiku-4-5", 180_000), ("gpt-5.6-sol", 244_800),
     ("nobody-knows", 180_000), (None, 180_000)],
)  # fmt: skip
def test_the_budget_of_a_model_leaves_a_tenth_of_its_window_for_the_answer(
    model: str | None, tokens: int
) -> None:
    assert Budget.for_model(model).max_prompt_tokens == tokens
    assert Budget.for_model(model, window=10_000, max_rag_chunks=3) == Budget(
        max_prompt_tokens=9_000, max_rag_chunks=3
    )


def test_a_builder_has_the_budget_of_its_model_unless_the_settings_have_one(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [user("word " * 20_000)]
    assert PromptBuilder(session, provider="openai").build(history).est_tokens > 8_000
    with pytest.raises(BudgetExceeded):
        PromptBuilder(session, provider="openai", window=10_000).build(history)
    monkeypatch.setenv("COATCHECK_BUDGET_MAX_PROMPT_TOKENS", "8000")
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        with pytest.raises(BudgetExceeded):
            PromptBuilder(session, provider="openai").build(history)
        assert (
            PromptBuilder(session, provider="openai", model="gpt-5").build(history).violations == ()
        )
