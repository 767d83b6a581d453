"""Calls and results are paired as providers require, whatever was interrupted, and nothing that was
sent moves."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.provider_rules import refused
from coatcheck.image_size import pixels
from coatcheck.messages import dialect
from coatcheck.messages.dialects import NO_RESULT

Message = dict[str, Any]
FIELDS = {"anthropic": "messages", "openai": "messages", "openai-responses": "input"}


def use(*ids: str, words: str = "") -> Message:
    texts = [{"type": "text", "text": words}] if words else []
    return {
        "role": "assistant",
        "content": texts + [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ids],
    }


def result(call_id: str, content: Any = "done") -> Message:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def user(*blocks: Message | str) -> Message:
    return {
        "role": "user",
        "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks],
    }


def mended(messages: list[Message], provider: str) -> list[Message]:
    return list(dialect(provider).mended(messages))


def accepted(messages: list[Message], provider: str) -> bool:
    request: dict[str, Any] = {FIELDS[provider]: messages}
    return refused({"system": [], **request} if provider == "anthropic" else request) == []


def test_correct_messages_are_the_same_objects() -> None:
    messages = [
        user("go"),
        use("a", "b"),
        user(result("a"), result("b"), "and then"),
        use(words="fine"),
    ]
    assert all(new is old for new, old in zip(mended(messages, "anthropic"), messages, strict=True))
    chat = [
        {"role": "user", "content": "go"},
        call("a"),
        tool("a"),
        {"role": "assistant", "content": "fine"},
    ]
    assert all(new is old for new, old in zip(mended(chat, "openai"), chat, strict=True))
    items = [{"role": "user", "content": "go"}, item("a"), item("b"), output("b"), output("a")]
    assert all(
        new is old for new, old in zip(mended(items, "openai-responses"), items, strict=True)
    )


@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_blank_texts_are_not_sent_to_anthropic(blank: str) -> None:
    calls = {
        "role": "assistant",
        "content": [{"type": "text", "text": blank}, *use("a")["content"]],
    }
    messages = [user("go", blank), calls, user(result("a"), blank), use(words="fine"), user(blank)]
    sent = mended(messages, "anthropic")
    assert sent == [user("go"), use("a"), user(result("a")), use(words="fine"), user("(empty)")]
    contents: list[Any] = [blank, []]
    for content in contents:
        sent = mended([{"role": "user", "content": content}], "anthropic")
        assert sent == [user("(empty)")]
        assert accepted(sent, "anthropic")


@pytest.mark.parametrize(
    "messages",
    [
        [user("go"), use("a"), user("never mind")],
        [user("go"), use("a")],
        [user("go"), use("a"), {"role": "user", "content": "as a text"}],
        [user("go"), use("a", "b"), user(result("b"))],
        [user("go"), use("a"), user("first some words", result("a"))],
        [user("go"), use("a"), user(result("a"), result("a", "again"))],
        [user("go", result("nobody asked")), use(words="hm"), user(result("nobody"))],
    ],
)
def test_anthropic_accepts_an_interrupted_conversation_after_repair(
    messages: list[Message],
) -> None:
    assert accepted(mended(messages, "anthropic"), "anthropic")


def test_a_conversation_that_begins_with_an_answer_gets_a_user_message_before_it() -> None:
    messages = [use("a"), user(result("a")), use(words="fine")]
    opening, *rest = mended(messages, "anthropic")
    assert opening["role"] == "user"
    assert all(new is old for new, old in zip(rest, messages, strict=True))
    assert accepted([opening, *rest], "anthropic")


def test_a_call_that_reuses_an_id_becomes_text_and_so_does_its_result() -> None:
    messages = [
        user("go"),
        use("a"),
        use("a"),
        user(result("a")),
        use("a", "b"),
        user(result("a", "more"), result("b")),
    ]
    done = mended(messages, "anthropic")
    assert accepted(done, "anthropic")
    assert [block["type"] for block in done[1]["content"]] == ["tool_use", "text"]
    assert done[3]["content"][0]["text"] == "Repeated call a, not made again: f with {}"
    assert done[4]["content"] == [
        result("b"),
        {"type": "text", "text": "Late result of the call a: more"},
    ]


def test_an_unanswered_call_does_not_split_a_run_of_calls() -> None:
    messages = [user("go"), use("a"), use("b"), use(words="hm"), user(result("a"))]
    done = mended(messages, "anthropic")
    assert accepted(done, "anthropic")
    assert [block["tool_use_id"] for block in done[-1]["content"]] == ["a", "b"]


def test_a_missing_result_gets_a_placeholder_and_a_late_one_becomes_text_where_it_occurs() -> None:
    messages = [
        user("go"),
        use("a"),
        user("wait"),
        use("b"),
        user(result("b"), result("a", "the late answer")),
    ]
    done = mended(messages, "anthropic")
    assert accepted(done, "anthropic")
    assert done[2]["content"][0] == {**result("a", NO_RESULT), "is_error": True}
    assert done[4]["content"] == [
        result("b"), {"type": "text", "text": "Late result of the call a: the late answer"},
    ]  # fmt: skip


def test_results_in_neighbouring_user_messages_go_where_they_belong() -> None:
    messages = [user("go"), use("a", "b"), user(result("a")), user(result("b"), "and a word")]
    done = mended(messages, "anthropic")
    assert done[2]["content"] == [result("a"), result("b")]
    assert done[3] == user("and a word")


def test_calls_in_neighbouring_assistant_messages_become_one_message_and_are_answered_after_it() -> (
    None
):
    thinks = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
    }
    messages = [user("go"), thinks, use("a"), use("b"), user(result("b"), result("a"))]
    assert mended(messages, "anthropic") == [user("go"), thinks, use("a", "b"), messages[-1]]
    lost = mended([*messages[:-1], user(result("a"))], "anthropic")
    assert lost[:-1] == [user("go"), thinks, use("a", "b")]
    assert lost[-1]["content"] == [result("a"), {**result("b", NO_RESULT), "is_error": True}]


def test_a_call_that_the_assistant_abandoned_is_answered_where_it_was_interrupted() -> None:
    done = mended([user("go"), use("a"), use("b"), user(result("b"))], "anthropic")
    assert accepted(done, "anthropic")
    assert done[2]["content"] == [{**result("a", NO_RESULT), "is_error": True}]
    assert done[-1] == user(result("b"))


def call(*ids: str) -> Message:
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def tool(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


@pytest.mark.parametrize(
    "messages",
    [
        [call("a"), {"role": "user", "content": "never mind"}],
        [call("a", "b"), tool("b"), {"role": "user", "content": "and a?"}, tool("a")],
        [tool("nobody"), {"role": "user", "content": "x"}],
        [call("a"), tool("a"), tool("a"), tool("other")],
    ],
)
def test_chat_completions_accept_an_interrupted_conversation_after_repair(
    messages: list[Message],
) -> None:
    assert accepted(mended([{"role": "user", "content": "go"}, *messages], "openai"), "openai")


def item(call_id: str) -> Message:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str) -> Message:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


@pytest.mark.parametrize(
    "items",
    [
        [item("a")],
        [output("a"), item("a")],
        [item("a"), output("a"), output("a")],
        [output("x")],
        [item("a"), item("a"), output("a")],
        [item("a"), item("a"), output("a"), output("a")],
        [item("a"), item("a")],
        [item("a"), output("a"), item("a"), output("a")],
    ],
)
def test_the_responses_api_accepts_an_interrupted_conversation_after_repair(
    items: list[Message],
) -> None:
    assert accepted(
        mended([{"role": "user", "content": "go"}, *items], "openai-responses"), "openai-responses"
    )


MISSING: dict[str, Any] = {
    "function_call": {"output": NO_RESULT},
    "custom_tool_call": {"output": NO_RESULT},
    "local_shell_call": {"output": NO_RESULT},
    "shell_call": {
        "output": [{"stdout": "", "stderr": NO_RESULT, "outcome": {"type": "exit", "exit_code": 1}}]
    },
    "apply_patch_call": {"output": NO_RESULT, "status": "failed"},
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_output_has_the_shape_that_its_call_requires(kind: str) -> None:
    asked = {"type": kind, "call_id": "a", "name": "f"}
    assert mended([asked], "openai-responses") == [
        asked,
        {"type": f"{kind}_output", "call_id": "a", **MISSING[kind]},
    ]


def test_a_missing_screenshot_is_a_blank_image_with_a_note() -> None:
    done = mended(
        [{"type": "computer_call", "call_id": "a", "action": {"type": "screenshot"}}],
        "openai-responses",
    )
    picture = done[1]["output"]
    assert (done[1]["type"], picture["type"]) == ("computer_call_output", "computer_screenshot")
    data = base64.b64decode(picture["image_url"].removeprefix("data:image/png;base64,"))
    assert pixels(data) == (1, 1)
    assert done[2]["role"] == "user"
    assert NO_RESULT in done[2]["content"]


def test_the_output_of_a_local_shell_may_use_the_id_of_its_call() -> None:
    items = [
        {"type": "local_shell_call", "call_id": "a"},
        {"type": "local_shell_call_output", "id": "a", "output": ""},
    ]
    assert mended(items, "openai-responses") == items


IDS = st.sampled_from("abcd")
TURNS = st.lists(
    st.tuples(
        st.lists(IDS, max_size=3, unique=True),
        st.lists(IDS, max_size=4),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


def conversation(turns: list[Any]) -> list[Message]:
    """Anthropic messages with separate ids for each turn; some results are lost, some late, some
    after words."""
    messages = [user("go")]
    for number, (asked, answered, speaks, leads) in enumerate(turns):
        messages.append(use(*(f"{number}{i}" for i in asked), words="thinking aloud"))
        blocks: list[Any] = [
            result(f"{number - late}{i}") for i in answered for late in (0, 1) if leads or not late
        ]
        words = ["some words"] if speaks or not blocks else []
        messages.append(user(*words, *blocks) if leads else user(*blocks, *words))
    return messages


@given(TURNS)
def test_the_provider_accepts_a_conversation_whatever_was_lost(turns: list[Any]) -> None:
    assert accepted(mended(conversation(turns), "anthropic"), "anthropic")


@given(TURNS)
def test_a_conversation_that_grows_keeps_its_beginning(turns: list[Any]) -> None:
    messages = conversation(turns)
    whole = mended(messages, "anthropic")
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            sent = mended(messages[:at], "anthropic")
            assert whole[: len(sent)] == sent


ROLES = st.sampled_from(["user", "assistant", "both"])
DAMAGED = st.lists(
    st.tuples(ROLES, st.lists(IDS, max_size=3), st.lists(IDS, max_size=3)), max_size=8
)


def damaged(provider: str, parts: list[Any]) -> list[Message]:
    """Calls and results in any order: lost, doubled, late, and before their calls."""
    found: list[Message] = []
    for number, (role, asked, answered) in enumerate(parts):
        if provider == "anthropic":
            found += [use(*asked, words=f"answer {number}")] if role != "user" else []
            found += (
                [user(*map(result, answered), f"words {number}")] if role != "assistant" else []
            )
        elif provider == "openai":
            found += (
                [call(*dict.fromkeys(asked)) | {"content": f"answer {number}"}]
                if role != "user"
                else []
            )
            found += (
                [*map(tool, answered), {"role": "user", "content": "go on"}]
                if role != "assistant"
                else []
            )
        else:
            found += [item(one) for one in asked] if role != "user" else []
            found += [output(one) for one in answered] if role != "assistant" else []
    return found


@pytest.mark.parametrize("provider", FIELDS)
@given(DAMAGED, DAMAGED)
def test_repaired_messages_are_kept_unchanged_when_more_follow(
    provider: str, parts: list[Any], more: list[Any]
) -> None:
    sent = mended(damaged(provider, parts), provider)
    assert mended(sent, provider) == sent
    grown = mended([*sent, *damaged(provider, more)], provider)
    assert grown[: len(sent)] == sent
    assert (
        accepted(grown, provider)
        or not grown
        or "twice in a row" in str(refused({"system": [], "messages": grown}))
    )


def test_a_result_that_comes_after_its_placeholder_becomes_text_and_is_not_lost() -> None:
    sent = mended([user("go"), use("a")], "anthropic")
    done = mended([*sent, user(result("a", "the late answer"))], "anthropic")
    assert done[: len(sent)] == sent
    assert "the late answer" in done[-1]["content"][0]["text"]


@given(TURNS)
def test_the_messages_given_are_not_changed(turns: list[Any]) -> None:
    messages = conversation(turns)
    before = json.dumps(messages)
    mended(messages, "anthropic")
    assert json.dumps(messages) == before
