"""Formats: detected by content; they find payloads, and pair calls with results."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArgument
from coatcheck.messages import FORMATS, detect, dialect, for_provider
from coatcheck.messages.content import attachments, is_replaceable, text_of
from coatcheck.messages.paths import at, replaced
from tests.transcript.samples import CODE, IMAGE, LARGE, ROWS, SAMPLES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["type", "role", "content", "message", "data", "kwargs", "lc", "id", "tool_calls", "function", "result",
             "jsonrpc", "params", "uuid", "parentUuid", "parentId", "output", "call_id", "toolCallId", "arguments"]
        )
        | st.text(max_size=5),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip
PAIRS = {
    "openai-chat": (["call_1"], ["call_1"]),
    "openai-responses": (["call_1"], ["call_1", ""]),
    "anthropic": (["toolu_1", "toolu_2"], ["toolu_1", "toolu_2"]),
    "claude-code": (["toolu_1", "toolu_2"], ["toolu_1", "toolu_2"]),
    "pi": (["t1"], ["t1"]),
    "langchain": (["c1"], ["c1", "c2", "c3"]),
    "mcp": (["7"], ["7", ""]),
}
PAYLOADS = {
    "openai-chat": {"data:image/png;base64," + IMAGE, json.dumps({"text": CODE}), LARGE},
    "openai-responses": {LARGE, json.dumps(ROWS)},
    "anthropic": {CODE, LARGE, IMAGE, json.dumps(ROWS)},
    "claude-code": {CODE, LARGE, IMAGE, json.dumps(ROWS), str(ROWS)},
    "pi": {CODE, LARGE, str(ROWS)},
    "langchain": {CODE, LARGE, str(ROWS)},
    "mcp": {LARGE, IMAGE, CODE, str(ROWS)},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_detected_by_content(name: str) -> None:
    assert detect(SAMPLES[name]) is FORMATS[name]
    assert detect([SAMPLES[name]]) is FORMATS[name]
    assert detect([{"messages": SAMPLES[name], "model": "m"}]) is FORMATS[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_and_results_are_found_with_their_ids(name: str) -> None:
    known = FORMATS[name]
    messages = [message for line in SAMPLES[name] for _, message in known.messages(line)]
    calls = [call.id for message in messages for call in known.calls(message)]
    results = [result.call_id for message in messages for result in known.results(message)]
    assert (calls, results) == PAIRS[name]
    assert {known.role(message) for message in messages} <= {"user", "assistant", "system", "tool"}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_message_around_a_place_is_the_one_that_contains_it(name: str) -> None:
    known = FORMATS[name]
    for line in (*SAMPLES[name], SAMPLES[name], {"messages": SAMPLES[name], "model": "m"}):
        messages = list(known.messages(line))
        for path in [*known.places(line, 3), (), ("nowhere", 3)]:
            found = [(base, message) for base, message in messages if path[: len(base)] == base]
            around = known.message_around(line, path)
            assert ([] if around is None else [around]) == found[:1]


@pytest.mark.parametrize("name", SAMPLES)
def test_payloads_are_found_wherever_they_are(name: str) -> None:
    known = FORMATS[name]
    found = {str(at(line, path)) for line in SAMPLES[name] for path in known.places(line, 5_000)}
    assert found >= {payload for payload in PAYLOADS[name] if payload != str(ROWS)}
    if str(ROWS) in PAYLOADS[name]:
        assert any("'row 899'" in one for one in found)


@pytest.mark.parametrize("name", SAMPLES)
def test_words_thinking_signatures_and_summaries_stay(name: str) -> None:
    known = FORMATS[name]
    for line in SAMPLES[name]:
        for path in known.places(line, 1_000):
            assert not {"thinking", "signature", "encrypted_content", "summary"} & set(path)


@pytest.mark.parametrize("name", SAMPLES)
def test_replacing_the_text_of_a_result_keeps_the_rest_of_its_message(name: str) -> None:
    known = FORMATS[name]
    seen = 0
    for line in SAMPLES[name]:
        for _, message in known.messages(line):
            before = copy.deepcopy(message)
            for result in known.results(message):
                changed = known.with_content(message, result, "short")
                assert text_of(at(changed, result.content_path)) == "short"
                assert (
                    replaced(changed, result.content_path, at(message, result.content_path))
                    == message
                )
                assert [one.call_id for one in known.results(changed)] == [
                    one.call_id for one in known.results(message)
                ]
                seen += 1
            assert message == before
    assert seen == len(PAIRS[name][1])


def test_errors_are_recognized() -> None:
    for name, expected in (
        ("anthropic", [False, True]),
        ("langchain", [False, True, False]),
        ("mcp", [False, True]),
    ):
        known = FORMATS[name]
        messages = [message for line in SAMPLES[name] for _, message in known.messages(line)]
        assert [one.is_error for message in messages for one in known.results(message)] == expected


def test_claude_code_sends_one_message_for_the_lines_of_one_answer() -> None:
    sent = FORMATS["claude-code"].for_model(SAMPLES["claude-code"])
    assert [(one["role"], len(one["content"])) for one in sent] == [
        ("user", 2), ("assistant", 3), ("user", 2), ("assistant", 1),
    ]  # fmt: skip
    assert all(set(one) == {"role", "content"} for one in sent)


def test_a_compaction_replaces_the_messages_before_it() -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None}
    lines = [*SAMPLES["claude-code"], boundary, *SAMPLES["claude-code"][1:2]]
    assert FORMATS["claude-code"].for_model(lines) == [{"role": "user", "content": "go"}]
    assert len(FORMATS["claude-code"].for_model(lines, compacted=False)) == 5
    sent = FORMATS["pi"].for_model(SAMPLES["pi"])
    assert [one["role"] for one in sent] == ["user", "toolResult", "user", "assistant"]
    assert "s" * 20_000 in sent[0]["content"][0]["text"]


def test_the_last_branch_of_a_tree_of_entries_is_sent() -> None:
    def entry(number: int, parent: int | None, text: str) -> dict[str, Any]:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        up = None if parent is None else str(parent)
        return {
            "type": "message",
            "id": str(number),
            "parentId": up,
            "timestamp": "t",
            "message": message,
        }

    entries = [entry(1, None, "a"), entry(2, 1, "dropped"), entry(3, 1, "b"), entry(4, 3, "c")]
    sent = FORMATS["pi"].for_model(entries)
    assert [one["content"][0]["text"] for one in sent] == ["a", "b", "c"]
    summary = {"type": "compaction", "id": "5", "parentId": "4", "timestamp": "t", "summary": "s"}
    sent = FORMATS["pi"].for_model([*entries, {**summary, "firstKeptEntryId": "4"}])
    assert [one["content"][0]["text"][-1] for one in sent] == ["s", "c"]


def test_messages_with_only_role_and_content_are_detected_as_chat() -> None:
    assert (
        detect([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        is FORMATS["openai-chat"]
    )
    assert detect([{"a": 1}, [1, 2], None, "x", 3]) is None
    assert detect([]) is None


def test_odd_ids_are_kept_as_they_are() -> None:
    long = "x" * 1_500
    known = FORMATS["openai-chat"]
    message = {
        "role": "assistant",
        "tool_calls": [{"id": long}, {"id": ""}, {"id": long}, {}, None, 3],
    }
    assert [one.id for one in known.calls(message)] == [long, "", long, ""]
    assert known.results({"role": "tool", "content": "x"})[0].call_id == ""


@given(JSON)
def test_no_format_fails_on_any_json(value: Any) -> None:
    before = json.dumps(value)
    detect([value])
    for known in FORMATS.values():
        assert not isinstance(value, dict) or known.fits(value) in (True, False)
        for path in known.places(value, 3):
            assert at(value, path) is not None
        for _, message in known.messages(value):
            known.role(message)
            known.calls(message)
            for result in known.results(message):
                text_of(at(message, result.content_path))
                is_replaceable(message, result)
                known.with_content(message, result, "x")
            list(attachments(message))
        known.for_model([value, value])
    for provider in ("anthropic", "openai", "openai-responses"):
        with suppress(InvalidArgument):  # lines of Claude Code for OpenAI
            for_provider([value, value], provider)
        list(dialect(provider).mended([value, value] if isinstance(value, dict) else []))
    assert json.dumps(value) == before


def test_every_shared_transcript_is_recognised(corpus: Path) -> None:
    for file in sorted((corpus / "transcripts").glob("*/*")):
        data = file.read_bytes()
        lines = (
            [json.loads(data)]
            if file.suffix == ".json"
            else map(json.loads, filter(str.strip, data.decode().split("\n")))
        )
        found = detect(lines)
        assert found is not None
        assert found.name == file.parent.name


@pytest.mark.parametrize(
    ("path", "is_shown"),
    [
        (("content", 0, "text"), True),
        (("content",), True),
        (("output",), True),
        (("details", "stdout"), False),
        (("message", "content", 0, "text"), True),
        (("message", "details", "stdout"), False),
        ((3, "content", 0, "text"), True),
        ((3, "message", "content", 0, "text"), True),
        (("messages", 3, "content", 0, "text"), True),
        (("messages", 3, "details", "stdout"), False),
        (("content", 3, "message", "content", 0, "text"), True),
        (("content", 3, "message", "details", "stdout"), False),
    ],
)
def test_pi_shows_the_content_of_messages_bare_in_lines_and_in_documents(
    path: tuple[str | int, ...], is_shown: bool
) -> None:
    assert FORMATS["pi"].is_shown(path) is is_shown
