"""`coatcheck.audit` replays recorded sessions: it charges reads and the cache, but not repeated
results."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy
from coatcheck.audit import (
    Bill,
    Offloading,
    WithCoatcheck,
    audit,
    billed,
    ratio_plot,
    total,
    usual_folders,
)
from coatcheck.externalize.decision import QUESTION_TOKENS
from coatcheck.messages.recordings import (
    RecordedCall,
    RecordedConversation,
    RecordedInput,
    Recording,
    ToolUse,
    parsed,
    recordings,
)
from coatcheck.models import Prices
from coatcheck.tokens import estimate

ROWS = "\n".join(
    f"host-{number:04}.example.org is up since {number * 37} seconds" for number in range(1_500)
)
LIMIT = Policy(max_tokens=3_000)


def result(
    text: str, call_id: str = "c1", tool: str = "query", arguments: Any = None
) -> RecordedInput:
    return RecordedInput(text, True, tool, call_id, arguments)


def session(*calls: tuple[list[RecordedInput], str], base: int = 0, gap: float = 0.0) -> Recording:
    made = [
        RecordedCall(inputs, words, gap=gap if number else 0.0)
        for number, (inputs, words) in enumerate(calls)
    ]
    return Recording("made", [RecordedConversation(made, base)])


def with_coatcheck(
    recording: Recording, policy: Policy | None = None, prices: Prices | None = None
) -> Bill:
    with coatcheck.open("memory:", ttl=None) as store:
        ours = WithCoatcheck(store.session("s"), policy or Policy())
        return billed(recording, ours, prices or Prices())


ASKED = ([RecordedInput("Is anything down?")], "I look.")
IDLE = [([RecordedInput("And now?")], "All is well.")] * 5


def test_inline_each_call_reads_the_old_prompt_from_the_cache_and_writes_the_new_part() -> None:
    recording = session(
        ([RecordedInput("Hello there")], "Hi."), ([RecordedInput("More?")], "No."), base=1_000
    )
    first, second = 1_000 + estimate("Hello there"), estimate("Hi.") + estimate("More?")
    bill = billed(recording, Offloading(), Prices())
    assert bill.cost == pytest.approx(
        1.25 * first + 0.1 * first + 1.25 * second + 5 * (estimate("Hi.") + estimate("No."))
    )
    assert (bill.calls, bill.tokens, bill.largest) == (2, first + first + second, first + second)


def test_a_stub_that_is_never_read_pays_off() -> None:
    recording = session(ASKED, ([result(ROWS)], "Nothing is down."), *IDLE)
    inline, ours = billed(recording, Offloading()), with_coatcheck(recording)
    assert ours.cost < 0.2 * inline.cost
    assert (ours.stubs, ours.reads, ours.extra_calls, ours.calls) == (1, 0, 0, inline.calls)
    assert ours.largest < estimate(ROWS) < inline.largest
    assert ours.kept_out > 0.9 * estimate(ROWS)


def test_content_that_an_answer_uses_is_read_back_and_charged_as_one_call() -> None:
    unread = session(ASKED, ([result(ROWS)], "Nothing is down."))
    read = session(
        ASKED, ([result(ROWS)], "The host-0777.example.org and host-1234.example.org are up.")
    )
    before, after = with_coatcheck(unread), with_coatcheck(read)
    assert (after.reads, after.extra_calls, after.calls) == (1, 1, before.calls + 1)
    assert after.cost > before.cost + 5 * QUESTION_TOKENS + 0.1 * before.largest


def test_content_that_was_read_or_shown_before_is_not_read_again() -> None:
    answers = [
        "Look at host-0777.example.org.",
        "I mean host-0777.example.org.",
        "host-0999.example.org, as you say.",
    ]
    recording = session(
        ASKED,
        ([result(ROWS)], answers[0]),
        ([RecordedInput("Which? Is it host-0999.example.org?")], answers[1]),
        ([RecordedInput("Sure?")], answers[2]),
    )
    assert with_coatcheck(recording).reads == 1


def test_the_reads_of_one_answer_are_one_call() -> None:
    other = ROWS.replace("host", "disk")
    answer = "host-0777.example.org and disk-0888.example.org are up."
    bill = with_coatcheck(session(ASKED, ([result(ROWS), result(other, "c2", "list")], answer)))
    assert (bill.stubs, bill.reads, bill.extra_calls) == (2, 2, 1)


def test_a_repeated_result_is_one_line_and_costs_no_read() -> None:
    text = "\n".join(f"{number}: some words of the file" for number in range(60))
    recording = session(
        ASKED,
        ([result(text)], "Hm."),
        ([result(text, "c2")], "some words of the file, line 17"),
        *IDLE,
    )
    inline, ours = billed(recording, Offloading()), with_coatcheck(recording)
    assert (ours.stubs, ours.reads, ours.calls) == (0, 0, inline.calls)
    assert ours.kept_out > 0.8 * estimate(text)
    assert with_coatcheck(recording, LIMIT).kept_out == 0  # named limits still apply


def test_a_changed_result_of_an_equal_call_is_a_diff() -> None:
    old = "\n".join(f"setting_{number} = {number * 7}" for number in range(120))
    new = old.replace("setting_50 = 350", "setting_50 = 351")
    first, second = (
        result(text, name, "read", {"path": "a"}) for text, name in ((old, "c1"), (new, "c2"))
    )
    ours = with_coatcheck(session(ASKED, ([first], "Hm."), ([second], "Oh."), base=50_000))
    assert (ours.stubs, ours.reads) == (0, 0)
    assert ours.kept_out > 0.5 * estimate(new)


def test_a_session_without_stubs_costs_the_same() -> None:
    small = [
        ([result(f"{number} files were found", f"c{number}")], "Fine.") for number in range(30)
    ]
    recording = session(ASKED, *small, base=5_000)
    assert with_coatcheck(recording) == billed(recording, Offloading())


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
inputs = st.lists(
    st.builds(RecordedInput, texts, st.booleans(), st.sampled_from(["", "read", "bash"])),
    max_size=3,
)
conversations = st.builds(
    RecordedConversation,
    st.lists(st.builds(RecordedCall, inputs, texts, gap=st.floats(0, 1_000))),
    st.integers(0, 9_999),
)


@given(st.lists(conversations, max_size=3))
def test_without_large_results_the_bills_are_equal(found: list[RecordedConversation]) -> None:
    recording = Recording("made", found)
    assert with_coatcheck(recording) == billed(recording, Offloading())


def test_tools_are_charged_once_from_the_first_stub_on() -> None:
    recording = session(ASKED, ([result(ROWS)], "Ok."), ([result(ROWS + "\nmore", "c2")], "Ok."))
    with coatcheck.open("memory:", ttl=None) as store:
        free = billed(recording, WithCoatcheck(store.session("a"), LIMIT, tool_tokens=0))
        paid = billed(recording, WithCoatcheck(store.session("b"), LIMIT, tool_tokens=1_000))
    assert paid.tokens - free.tokens == 2_000  # two of the three calls send them
    assert paid.cost - free.cost == pytest.approx(1_000 * (1.25 + 0.1))


def test_after_a_long_gap_everything_is_written_again() -> None:
    calls = [([RecordedInput("word " * 100)], "Ok.")] * 4
    warm, cold = (billed(session(*calls, gap=gap), Offloading()) for gap in (299.0, 301.0))
    sent = [
        estimate("word " * 100) * number + estimate("Ok.") * (number - 1) for number in (1, 2, 3)
    ]
    assert cold.cost - warm.cost == pytest.approx((1.25 - 0.1) * sum(sent))
    longer = billed(session(*calls, gap=301.0), Offloading(), Prices(cache_seconds=3_600))
    assert longer.cost == pytest.approx(warm.cost)


def test_a_cold_cache_is_charged_once_if_the_answer_needs_a_read() -> None:
    calls = (ASKED, ([result(ROWS)], "host-0777.example.org is up."))
    warm, cold = (with_coatcheck(session(*calls, base=10_000, gap=gap)) for gap in (0.0, 301.0))
    sent = 10_000 + estimate(ASKED[0][0].text)
    assert cold.cost - warm.cost == pytest.approx((1.25 - 0.1) * sent, rel=0.001)


def test_content_that_cannot_be_read_back_is_counted_as_lost() -> None:
    class Cut(Offloading):
        def show(self, result: RecordedInput, situation: Any) -> Any:
            from coatcheck.audit import Shown

            return Shown(result.text[:100], "", result.text)

    bill = billed(session(ASKED, ([result(ROWS)], "host-0777.example.org is up.")), Cut())
    assert (bill.lost, bill.reads, bill.extra_calls) == (1, 0, 0)


# Recordings


def claude_line(role: str, content: Any, **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {key: more.pop(key) for key in ("id", "usage") if key in more}
    message = {"role": role, "content": content, **own}
    return {"type": role, "message": message, "uuid": "u", "sessionId": "s", **more}


def claude_session() -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a.py"}}
    usage = {
        "input_tokens": 4,
        "cache_read_input_tokens": 20_000,
        "cache_creation_input_tokens": 1_000,
    }
    return [
        claude_line("user", "Fix it", timestamp="2026-01-01T10:00:00Z"),
        claude_line("assistant", [{"type": "thinking", "thinking": "", "signature": "x" * 1_000}], id="m1", usage=usage,
                    timestamp="2026-01-01T10:00:10Z"),
        claude_line("user", "A sub-agent's task", isSidechain=True),
        claude_line("assistant", [{"type": "text", "text": "Of a sub-agent"}], id="m9", isSidechain=True),
        claude_line("assistant", [call], id="m1", usage=usage, timestamp="2026-01-01T10:00:12Z"),
        claude_line("user", [{"type": "tool_result", "tool_use_id": "t1", "content": "print(1)"}]),
        claude_line("assistant", [{"type": "text", "text": "Done."}], id="m2", timestamp="2026-01-01T10:10:12Z"),
    ]  # fmt: skip


def test_an_answer_over_several_lines_is_one_call_and_side_chains_are_left_out() -> None:
    (found,) = recordings(claude_session(), "one.jsonl")
    (conversation,) = found.conversations
    first, second = conversation.calls
    assert [one.text for one in first.inputs] == ["Fix it"]
    assert first.tools == [ToolUse("t1", "Read", {"path": "a.py"})]
    assert second.inputs == [RecordedInput("print(1)", True, "Read", "t1", {"path": "a.py"})]
    assert (second.words.strip(), second.gap) == ("Done.", 600.0)
    assert first.written.split() == ["a.py"]


def test_thinking_costs_its_signature_and_the_usage_of_the_first_call_is_the_base() -> None:
    (found,) = recordings(claude_session())
    (conversation,) = found.conversations
    assert conversation.calls[0].thinking_tokens == 190
    assert conversation.base_tokens == 21_004 - estimate("Fix it")


def test_a_compaction_starts_a_new_conversation() -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "u", "sessionId": "s"}
    summary = claude_line("user", "A summary", isCompactSummary=True)
    more = claude_line("assistant", [{"type": "text", "text": "Let us continue."}], id="m3")
    (found,) = recordings([*claude_session(), boundary, summary, more])
    assert [len(one.calls) for one in found.conversations] == [2, 1]
    assert [one.text for one in found.conversations[1].calls[0].inputs] == ["A summary"]
    assert billed(found, Offloading()).largest < 21_500


def test_a_compaction_of_pi_starts_a_new_conversation_with_its_summary() -> None:
    lines: list[dict[str, Any]] = [
        {"type": "session", "id": "s", "cwd": "/", "timestamp": "2026-01-01T10:00:00Z"}
    ]
    lines += [{"type": "message", "message": one} for one in pi_messages()]
    lines.append(
        {"type": "compaction", "summary": "So far", "firstKeptEntryIndex": 2, "timestamp": "x"}
    )
    lines += [{"type": "message", "message": one} for one in pi_messages()]
    (found,) = recordings(lines)
    assert [len(one.calls) for one in found.conversations] == [2, 2]
    assert found.conversations[1].calls[0].inputs[0].text == "So far"


def pi_messages() -> list[dict[str, Any]]:
    call = {"type": "toolCall", "id": "t1", "name": "read", "arguments": {"path": "a"}}
    output = [{"type": "text", "text": "out"}]
    return [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, call]},
        {"role": "toolResult", "toolCallId": "t1", "toolName": "read", "content": output},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]


def test_aborted_answers_are_not_counted_as_calls() -> None:
    first, *rest = pi_messages()
    (found,) = recordings([first, {"role": "assistant", "content": []}, *rest])
    assert len(found.conversations[0].calls) == 2


PICTURE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    + (300).to_bytes(4, "big")
    + (250).to_bytes(4, "big")
    + b"\x08\x02\x00\x00\x00"
).decode()


def test_images_cost_what_providers_bill_for_their_pixels() -> None:
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
    }
    by_url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture, by_url]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [picture]}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    (found,) = recordings(messages)
    first, second = found.conversations[0].calls
    assert (first.inputs[0].text, first.inputs[0].image_tokens) == ("What is this?", 100 + 1_600)
    assert (second.inputs[0].text, second.inputs[0].image_tokens) == ("", 100)


def _responses() -> list[Any]:
    return [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok"}],
        },
        {"type": "function_call", "call_id": "t1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "out"},
        {
            "type": "message",
            "id": "n",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "done"}],
        },
    ]


def _codex() -> list[Any]:
    meta = {"type": "session_meta", "payload": {"id": "x", "cwd": "/"}}
    return [
        meta,
        *(
            {"type": "response_item", "timestamp": "2026-01-01T10:00:00Z", "payload": one}
            for one in _responses()
        ),
    ]


def _chat() -> list[Any]:
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "read", "arguments": '{"path": "a"}'},
    }
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "out"},
        {"role": "assistant", "content": "done"},
    ]


def _langchain() -> list[Any]:
    call = {"name": "read", "args": {"path": "a"}, "id": "t1", "type": "tool_call"}
    return [
        {"type": "human", "data": {"content": "hi"}},
        {"type": "ai", "data": {"content": "ok", "tool_calls": [call]}},
        {"type": "tool", "data": {"content": "out", "tool_call_id": "t1"}},
        {"type": "ai", "data": {"content": "done"}},
    ]


def _anthropic() -> list[Any]:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "out"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]


FORMS = {
    "responses": _responses(), "codex": _codex(), "chat": _chat(), "langchain": _langchain(), "pi": pi_messages(),
    "anthropic": _anthropic(), "document": [{"messages": _chat()}], "list": [_chat()],
}  # fmt: skip


@pytest.mark.parametrize("values", FORMS.values(), ids=FORMS)
def test_every_format_gives_the_same_calls(values: list[Any]) -> None:
    (found,) = recordings(values, "file")
    (conversation,) = found.conversations
    first, second = conversation.calls
    assert [one.text for one in first.inputs] == ["hi"]
    assert (first.words.strip(), first.tools) == ("ok", [ToolUse("t1", "read", {"path": "a"})])
    assert second.inputs == [RecordedInput("out", True, "read", "t1", {"path": "a"})]
    assert second.words.strip() == "done"


def test_a_document_with_several_runs_has_a_recording_for_each() -> None:
    found = recordings([[{"id": 1, "traj": _chat()}, {"id": 2, "traj": _chat()}]], "runs.json")
    assert [one.name for one in found] == ["runs.json #1", "runs.json #2"]
    assert all(len(one.conversations[0].calls) == 2 for one in found)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"a": 1}', b"words\n" * 9, b"\xff\xfe\x00", b"[" * 100_000]
)
def test_files_that_are_not_conversations_are_named_and_skipped(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    (found,) = audit([file])
    assert (found.path, bool(found.skipped)) == (str(file), True)
    assert found.to_record() == {"path": str(file), "skipped": found.skipped}


KEYS = [
    "type",
    "role",
    "content",
    "message",
    "tool_calls",
    "usage",
    "timestamp",
    "id",
    "text",
    "payload",
    "summary",
]
VALUES = [
    "user",
    "assistant",
    "message",
    "tool_result",
    "compaction",
    "thinking",
    "response_item",
    "ai",
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(VALUES)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)


@given(st.recursive(LEAVES, nested, max_leaves=30))
def test_odd_documents_never_raise(value: Any) -> None:
    for one in recordings([value, claude_session()[0], value]):
        assert billed(one, Offloading()).calls >= 1


def test_a_folder_is_audited_file_by_file_and_summed_up(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * 5
    long = [
        *_chat()[:2],
        {"role": "tool", "tool_call_id": "t1", "content": ROWS},
        *_chat()[3:],
        *more,
    ]
    for name, lines in {"a.jsonl": _chat(), "b.jsonl": long, "c.json": ["nothing"]}.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    seen: list[tuple[int, int | None]] = []
    first, second, third = audit([tmp_path], progress=lambda done, of: seen.append((done, of)))
    assert (first.ratio, first.is_worse, second.ours.stubs, bool(third.skipped)) == (
        1.0,
        False,
        1,
        True,
    )
    assert second.ratio < 0.5
    summed = total([first, second])
    assert summed.inline.calls == first.inline.calls + second.inline.calls
    assert summed.ours.cost == pytest.approx(first.ours.cost + second.ours.cost)
    assert summed.ours.largest == max(first.ours.largest, second.ours.largest)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.json"]


def test_the_folders_of_known_hosts_are_found_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usual_folders() == []
    (tmp_path / ".claude" / "projects").mkdir(parents=True)
    assert usual_folders() == [tmp_path / ".claude" / "projects"]


@pytest.mark.parametrize("count", [0, 1, 30, 500])
def test_a_plot_is_well_formed_with_any_names(count: int) -> None:
    names = ["a<b>&\"'\x00\x1b\ud800", "plain"]
    drawn = ratio_plot(
        "<title> & more", [(names[number % 2], number / 100) for number in range(count)]
    )
    root = ElementTree.fromstring(drawn)
    bars = [
        one
        for one in root.iter("{http://www.w3.org/2000/svg}rect")
        if one.find("{*}title") is not None
    ]
    assert len(bars) == count


# Real sessions


def _counted_tokens(lines: Sequence[Any]) -> dict[str, int]:
    """The input tokens of each answer, as the provider counted them."""
    found: dict[str, int] = {}
    for line in lines:
        message = line.get("message") if isinstance(line, dict) else None
        if (
            isinstance(message, dict)
            and message.get("role") == "assistant"
            and not line.get("isSidechain")
        ):
            usage = message.get("usage") or {}
            keys = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            if sent := sum(usage.get(key) or 0 for key in keys):
                found[message["id"]] = sent
    return found


@pytest.mark.parametrize("name", ["34b1e2a4", "bc3bf53b", "d19ec7f9", "f8190a9b"])
def test_the_calls_and_contexts_of_real_sessions_match_the_counts_of_the_provider(
    corpus: Path, name: str
) -> None:
    lines = parsed((corpus / "sessions" / "claude-code" / f"{name}.jsonl").read_bytes())
    (found,) = recordings(lines)
    bill, usage = billed(found, Offloading()), _counted_tokens(lines)
    assert bill.calls == len(usage)
    assert bill.tokens == pytest.approx(sum(usage.values()), rel=0.12)
    assert bill.largest == pytest.approx(max(usage.values()), rel=0.12)


@pytest.mark.parametrize("name", ["34b1e2a4", "bc3bf53b", "38917d7d"])
def test_the_bill_of_a_real_session_equals_a_plain_sum(corpus: Path, name: str) -> None:
    (found,) = recordings(
        parsed((corpus / "sessions" / "claude-code" / f"{name}.jsonl").read_bytes())
    )
    cost = 0.0
    for conversation in found.conversations:
        sent, contexts = conversation.base_tokens, [0]
        for call in conversation.calls:
            sent += sum(estimate(one.text) + one.image_tokens for one in call.inputs)
            contexts.append(sent)
            sent += call.output_tokens
        for (before, whole), call in zip(pairwise(contexts), conversation.calls, strict=True):
            read = 0 if call.gap > 300 else before
            cost += 0.1 * read + 1.25 * (whole - read) + 5 * call.output_tokens
    assert billed(found, Offloading()).cost == pytest.approx(cost)
    assert with_coatcheck(found, Policy(enabled=False)).cost == pytest.approx(cost)
