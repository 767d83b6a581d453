"""The cost of a prompt: repeated results, tools that are added with the first stub, and old results
that are replaced together when it pays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import coatcheck
from benchmarks.provider_rules import refused
from coatcheck import Policy, Session, toolkit
from coatcheck.context import Prompt, PromptBuilder
from coatcheck.errors import InvalidArgument

Message = dict[str, Any]
CODE = "\n".join(f"{n:>6}→    total += weight[{n}] * value[{n}]" for n in range(1, 41))
RUN: Message = {"name": "Read", "input_schema": {"type": "object"}}


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:", ttl=None) as store:
        yield store.session("s")


def turn(number: int, content: str, *, path: str = "a.py", thought: bool = False) -> list[Message]:
    thinks = (
        [{"type": "thinking", "thinking": "hm", "signature": f"signed {number}"}] if thought else []
    )
    use = {"type": "tool_use", "id": f"c{number}", "name": "Read", "input": {"path": path}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": content}
    return [{"role": "assistant", "content": [*thinks, use]}, {"role": "user", "content": [result]}]


def result_of(prompt: Prompt, number: int) -> str:
    blocks = [
        block
        for message in prompt.messages
        for block in message["content"]
        if isinstance(block, dict)
    ]
    return next(
        str(block["content"]) for block in blocks if block.get("tool_use_id") == f"c{number}"
    )


def make(session: Session, **options: Any) -> PromptBuilder:
    given: dict[str, Any] = {
        "provider": "anthropic",
        "system": "Be kind.",
        "tools": [RUN, *toolkit(session)],
    }
    return PromptBuilder(session, **given | options)


def test_a_result_that_the_conversation_shows_becomes_one_line(session: Session) -> None:
    builder = make(session)
    first = builder.build([{"role": "user", "content": "go"}, *turn(1, CODE)])
    second = builder.build([*first.history, *turn(2, CODE)])
    assert result_of(second, 2).startswith("[Nothing new: ")
    assert "c1" in result_of(second, 2)
    assert second.messages[: len(first.messages)] == first.messages
    part = make(session).build([*second.history, *turn(3, "\n".join(CODE.split("\n")[10:40]))])
    assert "lines 11-40" in result_of(part, 3), "a new builder finds it in the history"


def test_a_changed_result_of_the_same_call_becomes_a_diff(session: Session) -> None:
    builder = make(session)
    first = builder.build([{"role": "user", "content": "go"}, *turn(1, CODE)])
    new = CODE.replace("weight[30]", "weights[30]")
    second = builder.build([*first.history, *turn(2, new)])
    assert result_of(second, 2).startswith("[Changed: ")
    assert "weights[30]" in result_of(second, 2)
    other = builder.build([*first.history, *turn(3, new, path="b.py")])
    assert result_of(other, 3).startswith("[Lines 1-40"), "nothing is known about another file"


@pytest.mark.parametrize(
    "policy",
    [Policy(max_tokens=9_000), Policy(enabled=False), Policy(tools={"Read": "never"}), None],
)
def test_explicit_limits_and_rules_leave_repeated_results_alone(
    session: Session, policy: Policy | None
) -> None:
    builder = make(session, policy=policy)
    first = builder.build([{"role": "user", "content": "go"}, *turn(1, CODE)])
    assert result_of(builder.build([*first.history, *turn(2, CODE)]), 2) == CODE


def test_a_prompt_explains_why_each_new_result_was_replaced_or_kept(session: Session) -> None:
    builder = make(session)
    history = [
        {"role": "user", "content": "go"},
        *turn(1, "a line of text that fills the result\n" * 6_000),
    ]
    prompt = builder.build(history)
    (why,) = prompt.decisions
    assert why.leaves
    assert why.reason == "cost"
    assert why.expected_saving > 0
    assert builder.build([*prompt.history, *turn(2, "ok")]).decisions[0].leaves is False


def test_our_tools_are_added_with_the_first_stub_and_stay(session: Session) -> None:
    builder = make(session, model="claude-opus-5-5")
    first = builder.build([{"role": "user", "content": "go"}, *turn(1, "small")])
    described = {
        tool["name"]: tool.get("defer_loading", False) for tool in first.request()["tools"]
    }
    assert described == {
        "Read": False,
        "get_artifact": True,
        "list_artifacts": True,
        "store_artifact": True,
    }
    assert "mid-conversation-tool-changes-2026-07-01" in first.request()["betas"]
    assert all(message["role"] != "system" for message in first.messages)
    second = builder.build(
        [*first.history, *turn(2, "a line of text that fills the result\n" * 6_000)]
    )
    assert second.messages[-1]["role"] == "system"
    added = [block["tool"]["name"] for block in second.messages[-1]["content"]]
    assert added == ["get_artifact", "list_artifacts", "store_artifact"]
    third = make(session, model="claude-opus-5-5").build(
        [*second.history, *turn(3, "a line of another text\n" * 9_000)]
    )
    assert sum(message["role"] == "system" for message in third.messages) == 1
    for prompt in (first, second, third):
        assert refused(prompt.request()) == []
    sent = [
        json.dumps(one.request(cache_control=False)["messages"])[:-1]
        for one in (first, second, third)
    ]
    assert sent[1].startswith(sent[0])
    assert sent[2].startswith(sent[1])


def test_tools_that_are_not_added_yet_do_not_count(session: Session) -> None:
    history: list[Message] = [{"role": "user", "content": "go"}]
    described = make(session, model="claude-opus-5-5", defer_tools=False).build(history)
    deferred = make(session, model="claude-opus-5-5").build(history)
    assert deferred.est_tokens + 200 < described.est_tokens
    stub = turn(1, "a line of text that fills the result\n" * 6_000)
    both = [
        make(session, model="claude-opus-5-5", defer_tools=later).build([*history, *stub])
        for later in (True, False)
    ]
    assert abs(both[0].est_tokens - both[1].est_tokens) < 100


def test_a_hot_state_needs_our_tools_from_the_start(session: Session) -> None:
    prompt = make(session, model="claude-opus-5-5").build(
        [{"role": "user", "content": "go"}], hot_state={"step": 1}
    )
    assert [message["role"] for message in prompt.messages] == ["user", "system"]


@pytest.mark.parametrize(
    "options",
    [
        {"model": "claude-opus-4-5"}, {"model": None}, {"model": "claude-opus-5-5", "defer_tools": False},
        {"model": "gpt-5", "provider": "openai", "tools": []}, {"model": "claude-opus-5-5", "tools": []},
    ],
)  # fmt: skip
def test_tools_are_described_from_the_start_if_they_cannot_be_added_later(
    session: Session, options: Any
) -> None:
    if (
        options.get("tools") == []
    ):  # only ours: the provider refuses a request whose tools are all deferred
        options = {**options, "tools": toolkit(session)}
    prompt = make(session, **options).build([{"role": "user", "content": "go"}])
    assert not any("defer_loading" in tool for tool in prompt.request()["tools"])
    assert "betas" not in prompt.request()


def test_old_results_are_replaced_together_when_it_pays_and_thinking_goes_with_them(
    session: Session,
) -> None:
    builder = make(session, rewrite=True, system="word " * 40_000)
    history: list[Message] = [{"role": "user", "content": "go"}]
    steps: list[int] = []
    for number in range(60):
        body = f"result {number}\n" + "".join(
            f"value {number * 1_000 + at} of the measurement\n" for at in range(150)
        )
        prompt = builder.build([*history, *turn(number, body, path=f"{number}.py", thought=True)])
        assert refused(prompt.request()) == []
        if prompt.rewritten_tokens:
            steps.append(number)
            assert any("placeholders" in change for change in prompt.changes)
            assert any("thinking" in change for change in prompt.changes)
        history = list(prompt.history)
    assert 1 <= len(steps) <= 9, "rewrites are rare and large"
    pointer = result_of(prompt, 0)
    assert "art:" in pointer
    assert "value 149 of" in str(session.get(pointer[pointer.index("art:") :][:16]))


def test_a_provider_without_deferred_tools_is_refused(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="openai"):
        make(session, provider="openai", defer_tools=True)


def test_our_tools_are_added_when_old_results_become_placeholders(session: Session) -> None:
    history: list[Message] = [{"role": "user", "content": "go"}]
    for number in range(26):
        history += turn(
            number, "".join(f"value {number * 1_000 + at} of the measurement\n" for at in range(90))
        )
    options: dict[str, Any] = {"model": "claude-opus-5-5", "system": "word " * 40_000}
    kept = make(session, policy=None, **options).build(history)
    assert all(message["role"] != "system" for message in kept.messages)
    done = make(session, rewrite=True, **options).build(
        [*kept.history, *turn(30, "ok")], idle_seconds=3_600
    )
    assert '"pruned"' in result_of(done, 0)
    assert done.messages[-1]["role"] == "system"
    assert refused(done.request()) == []


def test_without_permission_nothing_is_rewritten(session: Session) -> None:
    builder = make(session, system="word " * 40_000)
    history: list[Message] = [{"role": "user", "content": "go"}]
    for number in range(40):
        body = f"result {number}\n" + "value of the measurement\n" * 60
        prompt = builder.build([*history, *turn(number, body, path=f"{number}.py")])
        assert prompt.rewritten_tokens == 0
        history = list(prompt.history)


def test_with_a_cold_cache_old_results_are_replaced_earlier(session: Session) -> None:
    history: list[Message] = [{"role": "user", "content": "go"}]
    for number in range(26):
        body = f"result {number}\n" + "".join(
            f"value {number * 1_000 + at} of the measurement\n" for at in range(90)
        )
        history += turn(number, body, path=f"{number}.py")
    system = "word " * 40_000
    kept = make(session, policy=None, system=system).build(history).history
    warm = make(session, rewrite=True, system=system).build(
        [*kept, *turn(30, "ok")], idle_seconds=10
    )
    cold = make(session, rewrite=True, system=system).build(
        [*kept, *turn(30, "ok")], idle_seconds=3_600
    )
    assert cold.est_tokens < warm.est_tokens
    with pytest.raises(InvalidArgument, match="idle_seconds"):
        make(session).build(history, idle_seconds=-1)
