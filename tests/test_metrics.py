"""Metrics of model calls: counted correctly, stored, checked for warnings, and never a problem for
the agent."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, config, toolkit
from coatcheck.context import Budget, HotState, artifact_index
from coatcheck.context._bootstrap import bootstrap
from coatcheck.context.baselines import CALLS, FLOORS, labels_of, session_rises
from coatcheck.context.metrics import Baseline, Meter, PromptMetrics, calls_of, usage_of
from coatcheck.context.prompt import PromptBuilder
from coatcheck.messages import FORMATS
from coatcheck.tokens import estimate
from tests.backends import Backend

RESULT = "a line of a large tool result, and another word or two\n" * 2_000


def call(**figures: Any) -> PromptMetrics:
    return PromptMetrics(session="s", **figures)


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def answered(outcome: Any, number: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": f"c{number}",
                    "type": "function",
                    "function": {"name": "grep", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": f"c{number}", "content": outcome.text},
    ]


START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find it."}]


# Counting


def test_a_plain_prompt_has_all_figures(session: Session) -> None:
    found = Meter(session, run="r1").call(messages=START)
    assert found is not None
    record = found.to_record()
    assert list(record)[:2] == ["type", "session"]
    assert {
        "type", "session", "run", "hs_tokens", "hs_bytes", "hs_truncated", "artifacts", "artifact_types", "sys_chars",
        "user_chars", "est_tokens", "ref_files", "budget_violations", "budget_ok", "tokens_saved", "tokens_read_back",
        "tokens_stubs", "tokens_schemas", "tokens_rewritten", "tokens_net",
    } <= set(record)  # fmt: skip
    assert (found.sys_chars, found.user_chars, found.run) == (
        len("Be brief."),
        len("Find it."),
        "r1",
    )
    assert found.tokens_saved == found.tokens_net == 0
    assert found.tokens_without == found.est_tokens


def test_a_stub_saves_the_tokens_of_its_result_in_every_prompt_that_contains_it(
    session: Session,
) -> None:
    meter = Meter(session)
    outcome = session.externalize(RESULT, tool="grep")
    messages = START + answered(outcome)
    first = meter.call(messages=messages)
    second = meter.call(messages=[*messages, {"role": "user", "content": "And then?"}])
    assert first is not None
    assert second is not None
    assert first.tokens_stubs == estimate(outcome.text)
    assert first.tokens_saved == json.loads(outcome.text)["tokens"]
    assert abs(first.tokens_saved - first.tokens_stubs - outcome.tokens_saved) <= 1
    assert second.tokens_saved == first.tokens_saved
    assert second.tokens_rewritten == 0
    plain = Meter(session).call(messages=START + answered(type("Whole", (), {"text": RESULT})))
    assert plain is not None
    assert first.tokens_without == pytest.approx(plain.est_tokens, rel=0.2)


def test_pages_that_a_model_reads_back_and_the_calls_for_them_count_as_spent(
    session: Session,
) -> None:
    tools = toolkit(session, prefix="mcp_")
    outcome = session.externalize(RESULT, tool="grep")
    page = tools[0].run(pointer=outcome.ref.pointer)  # type: ignore[union-attr]
    asked = {"name": tools[0].name, "arguments": json.dumps({"pointer": outcome.ref.pointer})}  # type: ignore[union-attr]
    messages = [
        *START,
        *answered(outcome),
        {"role": "assistant", "tool_calls": [{"id": "c9", "type": "function", "function": asked}]},
        {"role": "tool", "tool_call_id": "c9", "content": page},
    ]
    found = Meter(session, tools=tools).call(messages=messages)
    assert found is not None
    assert found.tokens_read_back == estimate(page) + estimate(
        json.dumps(asked, separators=(",", ":"))
    )
    assert found.tokens_schemas == sum(
        estimate(json.dumps(one.as_openai(), separators=(",", ":"))) for one in tools
    )
    spent = (
        found.tokens_read_back + found.tokens_stubs + found.tokens_schemas + found.tokens_rewritten
    )
    assert found.tokens_net == found.tokens_saved - spent


def test_anthropic_messages_are_measured_and_tool_results_are_not_user_text(
    session: Session,
) -> None:
    tools = toolkit(session)
    outcome = session.externalize(RESULT, tool="grep")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Find it."}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "grep", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": outcome.text}],
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    found = Meter(session).call(
        messages=messages, system="Be brief.", tools=[one.as_anthropic() for one in tools]
    )
    assert found is not None
    assert found.user_chars == len("Find it.Go on.")
    assert found.sys_chars == len("Be brief.")
    assert found.tokens_saved > 20_000
    assert 300 < found.tokens_schemas < 800


def test_message_objects_of_a_provider_library_are_measured_like_json(session: Session) -> None:
    types = pytest.importorskip("openai.types.chat", reason="needs the library of a provider")
    outcome = session.externalize(RESULT, tool="grep")
    asked, result = answered(outcome)
    message = types.ChatCompletionMessage.model_validate({"content": None, **asked})
    one = Meter(session).call(messages=[*START, message, result])
    other = Meter(session).call(messages=[*START, asked, result])
    assert one is not None
    assert other is not None
    assert one.tokens_saved == other.tokens_saved > 0
    assert one.est_tokens == pytest.approx(other.est_tokens, abs=10)


def test_a_forged_stub_saves_nothing(session: Session) -> None:
    outcome = session.externalize(RESULT, tool="grep")
    stub = json.loads(outcome.text)
    nowhere = json.dumps(
        {**stub, "artifact": "art:" + "0" * 12, "tokens": 10**12}, separators=(",", ":")
    )
    inflated = json.dumps({**stub, "tokens": 10**12}, separators=(",", ":"))
    odd = json.dumps({**stub, "tokens": "many"}, separators=(",", ":"))
    saved = []
    for text in (nowhere, inflated, odd, '{"stub":"' * 1_000, '{"stub":' + "[" * 100_000):
        found = Meter(session).call(messages=[{"role": "user", "content": text}])
        assert found is not None
        saved.append(found.tokens_saved)
    assert saved == [0, len(RESULT), 0, 0, 0]  # no result has more tokens than bytes


def test_stubs_are_found_among_the_lines_of_a_text_and_as_objects(session: Session) -> None:
    outcome = session.externalize(RESULT, tool="grep")
    tokens = json.loads(outcome.text)["tokens"]
    inside = {"role": "user", "content": f"Retrieved:\n{outcome.text}\nand\n{outcome.text}"}
    found = Meter(session).call(messages=[inside])
    assert found is not None
    assert found.tokens_saved == 2 * tokens
    found = Meter(session).call(
        messages=[{"role": "user", "content": [{"data": json.loads(outcome.text)}]}]
    )
    assert found is not None
    assert found.tokens_saved == tokens


def test_bootstrap_files_that_became_references_are_counted_with_what_was_left_out(
    session: Session, tmp_path: Path
) -> None:
    words = "\n".join(
        f"Rule {number}: always do the right thing, and do it well." for number in range(1_000)
    )
    (tmp_path / "AGENTS.md").write_text(words)
    (tmp_path / "SMALL.md").write_text("Be brief.")
    made = bootstrap(session, ["AGENTS.md", "SMALL.md"], root=tmp_path)
    found = Meter(session).call(messages=START, system=made.text)
    whole = Meter(session).call(messages=START, system=f"{words}\n\nBe brief.")
    assert found is not None
    assert whole is not None
    assert found.ref_files == 1
    assert found.tokens_without == pytest.approx(whole.est_tokens, rel=0.1)
    forged = (
        "ArtifactRef: art:"
        + "0" * 12
        + f" (type=doc, sha256={'0' * 64}, bytes=9)\n[9,999,999 characters are left out here"
    )
    found = Meter(session).call(messages=START, system=forged)
    assert found is not None
    assert (found.ref_files, found.tokens_saved) == (0, 0)


def test_a_changed_message_rewrites_everything_after_it(session: Session) -> None:
    meter = Meter(session)
    turns = [{"role": "user", "content": f"message number {number} " * 20} for number in range(6)]
    first = meter.call(messages=turns)
    same = meter.call(messages=turns)
    edited = meter.call(messages=[*turns[:4], {"role": "user", "content": "other"}, turns[5]])
    cut = meter.call(messages=turns[:2])
    assert first is not None
    assert same is not None
    assert edited is not None
    assert cut is not None
    one = (first.est_tokens or 0) // 6
    assert first.tokens_rewritten == same.tokens_rewritten == 0
    assert edited.tokens_rewritten == pytest.approx(2 * one, abs=4)
    assert cut.tokens_rewritten == pytest.approx((edited.est_tokens or 0) - 2 * one, abs=4)


def test_cache_breakpoints_do_not_count_as_rewritten(session: Session) -> None:
    meter = Meter(session)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": f"message {number}"}]}
        for number in range(4)
    ]
    mark = {"cache_control": {"type": "ephemeral"}}
    for end in (2, 3):
        marked = [{**turns[end - 1], "content": [{**turns[end - 1]["content"][0], **mark}]}]  # type: ignore[dict-item]
        found = meter.call(messages=[*turns[: end - 1], *marked])
        assert found is not None
        assert found.tokens_rewritten == 0


def test_cached_tokens_cost_a_tenth_and_new_tokens_a_quarter_more(session: Session) -> None:
    meter = Meter(session)
    first = meter.call(messages=START)
    second = meter.call(messages=[*START, {"role": "user", "content": "Go on. " * 100}])
    assert first is not None
    assert second is not None
    assert first.cost == round(1.25 * (first.est_tokens or 0))
    new = (second.est_tokens or 0) - (first.est_tokens or 0)
    assert second.cost == round(0.1 * (first.est_tokens or 0) + 1.25 * new)
    counted = meter.call(
        messages=START,
        usage={"input_tokens": 10, "cache_read_input_tokens": 100, "output_tokens": 1},
    )
    assert counted is not None
    assert (counted.input_tokens, counted.cached_tokens, counted.cost) == (110, 100, 20)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, (None, None, None, None)),
        ({"prompt_tokens": 9, "completion_tokens": 2}, (9, 2, None, None)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
            (9, 2, 4, None),
        ),
        (
            {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}},
            (9, 2, 4, None),
        ),
        ({"input_tokens": 9, "output_tokens": 2}, (9, 2, None, None)),
        (
            {
                "input_tokens": 9,
                "output_tokens": 2,
                "cache_read_input_tokens": 5,
                "cache_creation_input_tokens": 6,
            },
            (20, 2, 5, 6),
        ),
        ({"usage": {"prompt_tokens": 9}}, (9, None, None, None)),
        ({"prompt_tokens": -1, "completion_tokens": True}, (None, None, None, None)),
        ("words", (None, None, None, None)),
        (7, (None, None, None, None)),
    ],
)
def test_the_usage_of_each_provider_is_read(
    usage: object, expected: tuple[int | None, ...]
) -> None:
    found = usage_of(usage)
    assert (
        found.input_tokens,
        found.output_tokens,
        found.cached_tokens,
        found.cache_write_tokens,
    ) == expected


def test_the_usage_of_openais_library_is_read() -> None:
    types = pytest.importorskip(
        "openai.types.completion_usage", reason="needs the library of a provider"
    )
    details = types.PromptTokensDetails(cached_tokens=3)
    usage = types.CompletionUsage(
        prompt_tokens=9, completion_tokens=2, total_tokens=11, prompt_tokens_details=details
    )
    assert (usage_of(usage).input_tokens, usage_of(usage).cached_tokens) == (9, 3)


def test_the_usage_of_anthropics_library_is_read() -> None:
    types = pytest.importorskip("anthropic.types", reason="needs the library of a provider")
    usage = types.Usage(
        input_tokens=9, output_tokens=2, cache_read_input_tokens=5, cache_creation_input_tokens=None
    )
    assert (usage_of(usage).input_tokens, usage_of(usage).cached_tokens) == (14, 5)


@pytest.mark.parametrize("name", ["13da966e", "189d8afc", "b6b83817"])
def test_the_tokens_that_real_sessions_would_have_sent_are_never_overstated(
    session: Session, corpus: Path, name: str
) -> None:
    text = (corpus / "transcripts" / "claude-code" / f"{name}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    whole = FORMATS["claude-code"].for_model(lines)
    slim = json.loads(json.dumps(whole))
    for message in slim:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block.get("type") == "tool_result":
                outcome = session.externalize(block["content"], policy=Policy(max_tokens=500))
                block["content"] = outcome.content
    found, original = Meter(session).call(messages=slim), Meter(session).call(messages=whole)
    assert found is not None
    assert original is not None
    assert found.est_tokens is not None
    assert found.tokens_without is not None
    assert original.est_tokens is not None
    assert found.est_tokens < 0.8 * original.est_tokens
    assert 0.85 * original.est_tokens < found.tokens_without <= 1.01 * original.est_tokens


# The hot state and the budget


def test_a_hot_state_is_counted_with_its_index_and_artifact_types(session: Session) -> None:
    index = [{"artifact_id": "a", "type": kind, "label": "l"} for kind in ("log", "code", "log")]
    state = {"session_id": "s", "risk_level": "low", "artifact_index": index}
    found = Meter(session).call(messages=START, hot_state=state)
    assert found is not None
    text = json.dumps(state, separators=(",", ":"))
    assert (found.hs_tokens, found.hs_bytes, found.artifacts) == (estimate(text), len(text), 3)
    assert dict(found.artifact_types) == {"code": 1, "log": 2}


@pytest.mark.parametrize(
    "count", [lambda text: None, lambda text: -1, lambda text: 1 / 0, lambda text: True]
)
def test_a_prompt_that_cannot_be_counted_is_a_violation(session: Session, count: Any) -> None:
    found = Meter(session, count=count).call(messages=START, hot_state={"session_id": "s"})
    assert found is not None
    assert not found.budget_ok
    assert {one["field"] for one in found.budget_violations} == {
        "max_hot_state_tokens",
        "max_prompt_tokens",
    }
    assert all(one["ambiguous"] for one in found.budget_violations)
    assert {one.reason for one in found.warnings} == {"violation"}
    assert found.est_tokens is found.tokens_without is found.cost is None


def test_a_built_prompt_is_measured_by_its_own_figures(session: Session) -> None:
    tools = toolkit(session)
    meter = Meter(session, budget=Budget(max_prompt_tokens=6_000))
    builder = PromptBuilder(
        session,
        provider="anthropic",
        system="Be brief.",
        tools=tools,
        budget=Budget(max_prompt_tokens=6_000),
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    for turn in range(3):
        call_id = f"t{turn}"
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": call_id, "name": "grep", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call_id, "content": f"{turn} {RESULT}"}
                ],
            },
        ]
        state = HotState(
            session_id="s", objective=f"turn {turn}", artifact_index=artifact_index(session)
        )
        prompt = builder.build(messages, hot_state=state)
        messages = list(prompt.history)
        found = meter.call(prompt)
        assert found is not None
        assert (found.est_tokens, found.hs_tokens, found.hs_bytes) == (
            prompt.est_tokens, prompt.hs_tokens, prompt.hs_bytes,
        )  # fmt: skip
        assert found.artifacts == prompt.artifacts == sum(found.artifact_types.values())
        assert found.tokens_saved > (turn + 1) * 20_000
        assert found.tokens_rewritten == 0
        assert found.tokens_schemas > 300
        assert found.budget_ok
        assert found.cost is not None
        assert found.cost_without is not None
        assert found.cost < found.cost_without / 10
    assert meter.failures == 0


def test_a_refused_prompt_is_a_violation_with_a_warning(session: Session) -> None:
    meter = Meter(session)
    builder = PromptBuilder(
        session, provider="openai", budget=Budget(max_prompt_tokens=50), policy=None
    )
    with pytest.raises(coatcheck.errors.BudgetExceeded) as caught:
        builder.build([{"role": "user", "content": "word " * 500}])
    found = meter.call(caught.value)
    assert found is not None
    assert not found.budget_ok
    assert found.est_tokens is not None
    assert found.est_tokens > 50
    assert {one.reason for one in found.warnings} == {"violation"}


# Warnings


def test_warnings_begin_at_their_thresholds(session: Session) -> None:
    index = [
        {
            "artifact_id": "art:" + sha256(bytes([number])).hexdigest()[:12],
            "type": "log",
            "label": "x",
            "summary": "words " * 20,
        }
        for number in range(16)
    ]
    meter = Meter(session, budget=Budget(max_prompt_tokens=9_000, max_hot_state_tokens=5_000))
    found = meter.call(
        messages=[{"role": "user", "content": "word " * 7_000}],
        hot_state={"session_id": "s", "artifact_index": index},
    )
    assert found is not None
    assert {(one.figure, one.reason, one.before) for one in found.warnings} == {
        ("hs_tokens", "over", 800), ("artifacts", "over", 15), ("est_tokens", "over", 6_750),
    }  # fmt: skip
    assert found.budget_ok


def test_a_prompt_above_three_quarters_of_its_budget_gets_a_warning(session: Session) -> None:
    words = [{"role": "user", "content": "word " * 7_000}]
    for budget, warned in ((8_000, True), (200_000, False)):
        found = Meter(session, budget=Budget(max_prompt_tokens=budget)).call(messages=words)
        assert found is not None
        assert (
            any(one.figure == "est_tokens" and one.reason == "over" for one in found.warnings)
            is warned
        )


def test_the_decisions_of_a_prompt_builder_are_recorded(session: Session) -> None:
    builder = PromptBuilder(session, provider="openai")
    call = {"id": "c", "type": "function", "function": {"name": "query", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "a row of the table\n" * 5_000}
    found = Meter(session).call(builder.build([{"role": "user", "content": "go"}, asked, result]))
    assert found is not None
    assert (found.results_left, found.results_kept) == (1, 0)
    assert found.expected_saving > 0


def test_thresholds_are_settings_and_a_count_at_the_threshold_is_not_a_warning(
    backend: Backend,
) -> None:
    tokens = Meter(backend.open().session("s")).call(messages=START)
    assert tokens is not None
    for most, warned in ((tokens.est_tokens, False), ((tokens.est_tokens or 0) - 1, True)):
        settings = config.load({"metrics": {"warn_prompt_tokens": most}})
        found = Meter(backend.open_new(settings=settings).session("s")).call(messages=START)
        assert found is not None
        assert bool(found.warnings) is warned


def test_the_size_of_a_prompt_is_the_count_of_its_provider_and_the_ratio_is_learned(
    session: Session,
) -> None:
    meter = Meter(session, budget=Budget(max_prompt_tokens=8_000))
    small = meter.call(messages=START, usage={"prompt_tokens": 7_000, "completion_tokens": 1})
    assert small is not None
    assert [one.actual for one in small.warnings] == [7_000]
    next_one = meter.call(messages=START)
    assert next_one is not None
    assert [one.actual for one in next_one.warnings] == [7_000]


def test_a_warning_is_logged_when_it_begins_and_not_on_every_call(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter(session, budget=Budget(max_prompt_tokens=10))
    for _ in range(4):
        found = meter.call(messages=START)
        assert found is not None
        assert len(found.warnings) == 1
    assert len(caplog.records) == 1
    assert "max_prompt_tokens" in caplog.text


def test_a_rise_in_a_session_names_the_figure_and_both_values() -> None:
    steady = [call(est_tokens=1_000, tokens_read_back=0)] * 7
    assert session_rises([*steady, call(est_tokens=9_000)], 50) == []  # one odd turn
    assert session_rises([*steady, *[call(est_tokens=9_000)] * 2], 50)[0].to_record() == {
        "figure": "est_tokens", "reason": "session", "before": 1_000, "actual": 9_000,
        "message": "the prompt's tokens rose from 1,000 in this session to 9,000",
    }  # fmt: skip


def test_a_rise_is_reported_once_and_again_only_when_it_continues(session: Session) -> None:
    meter = Meter(session, budget=Budget(max_prompt_tokens=10**6))
    notices = []
    for words in [100] * 8 + [2_000] * 8 + [4_500] * 4:
        found = meter.call(messages=[{"role": "user", "content": "word " * words}])
        assert found is not None
        notices += [(found.turn, one.figure) for one in found.warnings if one.reason == "session"]
    rises = [turn for turn, figure in notices if figure == "est_tokens"]
    assert len(rises) == 2
    assert rises == [10, 18]
    again = Meter(
        session, budget=Budget(max_prompt_tokens=10**6)
    )  # like another process: it knows what was reported
    found = again.call(messages=[{"role": "user", "content": "word " * 4_500}])
    assert found is not None
    assert not [
        one for one in found.warnings if one.reason == "session" and one.figure == "est_tokens"
    ]


@given(st.lists(st.integers(0, 100_000), min_size=9, max_size=40), st.integers(0, 10**9))
def test_a_single_turn_never_counts_as_a_rise(values: list[int], odd: int) -> None:
    calm = [call(est_tokens=value) for value in values]
    if session_rises([*calm, calm[-1]], 50):
        return
    before = session_rises([*calm[:-1], calm[-2], calm[-2]], 50)
    if not before and values[-1] == values[-2]:
        assert session_rises([*calm, call(est_tokens=odd)], 50) == []


@given(st.lists(st.integers(0, 50_000), min_size=8, max_size=30), st.integers(1, 300))
def test_rises_are_the_same_for_every_meter(values: list[int], percent: int) -> None:
    calls = [call(tokens_read_back=value) for value in values]
    assert session_rises(calls, percent) == session_rises(list(calls), percent)
    for one in session_rises(calls, percent):
        assert one.actual is not None
        assert one.actual - one.before >= FLOORS[one.figure][1]
        assert one.actual > one.before * (1 + percent / 100)


def test_a_release_is_compared_with_the_one_before_in_the_same_store(backend: Backend) -> None:
    store = backend.open()
    budget = Budget(max_prompt_tokens=10**6)
    for number in range(CALLS):
        meter = Meter(store.session(f"old {number}"), release="1.0", budget=budget)
        meter.call(messages=[{"role": "user", "content": "word " * 300}])
        store.session(f"old {number}").end()  # the figures of a release outlive its sessions
    notices = []
    for number in range(2 * CALLS):
        meter = Meter(store.session(f"new {number}"), release="1.1", budget=budget)
        found = meter.call(messages=[{"role": "user", "content": "word " * 3_000}])
        assert found is not None
        notices += [(number, one) for one in found.warnings if one.reason == "release"]
    assert labels_of(store) == ["1.1", "1.0"]
    assert [(number, one.figure) for number, one in notices] == [(CALLS - 1, "est_tokens")]
    assert "'1.0'" in notices[0][1].message


def test_a_release_without_growth_causes_no_warning(session: Session) -> None:
    baseline = Baseline.of("1.0", [call(est_tokens=1_000)] * CALLS)
    odd = [call(est_tokens=1_200)] * CALLS + [call(est_tokens=90_000)] * 4
    assert baseline.rises(odd, 50, {}) == []
    assert baseline.rises(odd[:3], 50, {}) == []
    assert [one.figure for one in baseline.rises([call(est_tokens=1_600)] * CALLS, 50, {})] == [
        "est_tokens"
    ]
    assert baseline.rises([call(est_tokens=1_600)] * CALLS, 50, {"est_tokens": 1_600}) == []


def test_a_baseline_can_be_read_from_its_file_and_an_invalid_one_is_refused(tmp_path: Path) -> None:
    kept = Baseline.of("1.0", [call(est_tokens=tokens) for tokens in range(20)])
    (tmp_path / "b.json").write_text(kept.to_json())
    assert Baseline.read(tmp_path / "b.json") == kept
    assert (kept.figures["est_tokens"].median, kept.figures["est_tokens"].p90) == (9, 17)
    for text in (
        "",
        "[]",
        "{}",
        '{"type":"metrics_baseline","label":1}',
        '{"type":"x"}',
        "[" * 100_000,
    ):
        with pytest.raises(coatcheck.errors.InvalidArgument):
            Baseline.from_json(text)
    with pytest.raises(coatcheck.errors.InvalidArgument):
        Baseline.read(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "1e400", "1" + "0" * 400, "true", '"9"', "null"]
)
def test_a_baseline_with_an_unusable_number_is_refused(number: str) -> None:
    for calls, median in (("20", number), (number, "7")):
        figures = f'{{"est_tokens":{{"median":{median},"p90":9}}}}'
        with pytest.raises(coatcheck.errors.InvalidArgument):
            Baseline.from_json(
                f'{{"type":"metrics_baseline","label":"1.0","calls":{calls},"figures":{figures}}}'
            )


def test_the_settings_can_name_a_baseline_file(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(Baseline.of("1.0", [call(est_tokens=10)] * CALLS).to_json())
    settings = config.load({"metrics": {"baseline": str(tmp_path / "b.json")}})
    meter = Meter(
        backend.open(settings=settings).session("s"), budget=Budget(max_prompt_tokens=10**6)
    )
    found = [
        meter.call(messages=[{"role": "user", "content": "word " * 1_000}])
        for _ in range(CALLS + 2)
    ]
    rises = [one for each in found if each for one in each.warnings if one.reason == "release"]
    assert [(one.figure, one.before) for one in rises] == [("est_tokens", 10)]


# Where metrics are stored


def test_figures_are_kept_with_their_session_in_order(backend: Backend) -> None:
    store = backend.open()
    session = store.session("s")
    meter = Meter(session, run="r", model="m")
    made = [meter.call(messages=START * number) for number in range(1, 6)]
    assert [one.turn for one in made if one] == [1, 2, 3, 4, 5]
    if backend.lasts:
        store.close()
        store = backend.open()
        session = store.session("s")
    kept = list(calls_of(session))
    assert [replace(one, at=0) for one in kept] == [replace(one, at=0) for one in made if one]
    assert [one.turn for one in calls_of(session, limit=2)] == [4, 5]
    assert Meter(session).call(messages=START).turn == 6  # type: ignore[union-attr]
    session.end()
    assert list(calls_of(store.session("s"))) == []


def test_the_settings_limit_how_many_calls_are_kept(backend: Backend) -> None:
    session = backend.open(settings=config.load({"metrics.keep": 3})).session("s")
    meter = Meter(session)
    for _ in range(5):
        meter.call(messages=START)
    assert [one.turn for one in calls_of(session)] == [3, 4, 5]


def test_a_file_and_a_logger_get_a_line_for_each_call(
    backend: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="figures")
    file = tmp_path / "metrics.jsonl"
    settings = config.load({"metrics": {"file": str(file), "logger": "figures"}})
    meter = Meter(backend.open(settings=settings).session("two\nlines \u202e é"))
    made = [meter.call(messages=START) for _ in range(3)]
    lines = file.read_text().splitlines()
    assert [PromptMetrics.from_json(line) for line in lines] == made
    assert [record.getMessage() for record in caplog.records if record.name == "figures"] == lines
    assert all(line.isascii() for line in lines)
    assert file.stat().st_mode & 0o777 == 0o600


def test_nothing_is_stored_or_sent_if_metrics_are_off(backend: Backend, tmp_path: Path) -> None:
    settings = config.load({"metrics": {"enabled": False, "file": str(tmp_path / "m.jsonl")}})
    session = backend.open(settings=settings).session("s")
    found = Meter(session).call(messages=START)
    assert found is not None
    assert found.est_tokens
    assert list(calls_of(session)) == []
    assert not (tmp_path / "m.jsonl").exists()


def test_a_failure_never_reaches_the_agent_and_is_logged_once(
    backend: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config.load({"metrics": {"file": str(tmp_path / "no" / "such" / "folder")}})
    store = backend.open(settings=settings)
    meter = Meter(store.session("s"))
    assert meter.call(messages=START) is not None
    assert meter.call(messages=START) is not None
    assert meter.failures == 2
    assert len(caplog.records) == 1
    store.close()
    assert meter.call(messages=START) is not None  # nothing can be recorded any more
    assert meter.call(messages=5) is None  # type: ignore[arg-type]
    assert meter.call(messages=[object(), {1: b"\xff"}, None]) is not None
    assert meter.failures > 4


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: (
        st.lists(children)
        | st.dictionaries(
            st.text()
            | st.sampled_from(
                ["role", "content", "type", "text", "stub", "artifact", "name", "arguments"]
            ),
            children,
        )
    ),
    max_leaves=12,
)


def test_no_message_breaks_the_meter(backend: Backend) -> None:
    @backend.examples()
    @given(ANYTHING)
    @example("thinking")
    def check(message: Any) -> None:
        session = backend.new_session()
        meter = Meter(session, tools=toolkit(session))
        meter.call(
            messages=[message, {"role": "user", "content": message}],
            hot_state=message,
            usage=message,
        )
        assert meter.failures == 0

    check()


# Records


def test_records_are_read_back_unchanged(session: Session) -> None:
    found = Meter(session, budget=Budget(max_prompt_tokens=1)).call(
        messages=START, hot_state={"artifact_index": [{"type": "log"}]}
    )
    assert found is not None
    assert PromptMetrics.from_json(found.to_json()) == found
    assert PromptMetrics.from_record({**found.to_record(), "of a later version": 1}) == found


@given(
    st.sampled_from(sorted(PromptMetrics(session="s").to_record())),
    st.none()
    | st.booleans()
    | st.text()
    | st.lists(st.integers())
    | st.dictionaries(st.text(), st.text())
    | st.floats()
    | st.integers(),
)
def test_a_record_that_was_tampered_with_is_refused_or_harmless(name: str, value: Any) -> None:
    record = {**call().to_record(), name: value}
    try:
        found = PromptMetrics.from_record(record)
    except ValueError:
        return
    json.loads(found.to_json())


def test_a_damaged_record_is_skipped(session: Session) -> None:
    meter = Meter(session)
    meter.call(messages=START)
    session.record("metrics", b"\xff not json")
    session.record("metrics", b"[" * 100_000)
    for odd in (
        '"budget_violations":[{}]',
        '"at":1' + "0" * 400,
        '"warnings":[{"reason":"over","before":1e400}]',
    ):
        session.record("metrics", f'{{"type":"prompt_metrics","session":"s",{odd}}}'.encode())
    meter.call(messages=START)
    assert [one.turn for one in calls_of(session)] == [1, 7]
    assert meter.failures == 0
    assert Meter(session).call(messages=START) is not None


def test_tool_calls_and_their_durations_are_counted(session: Session) -> None:
    executor = ToolExecutor(session, {"nap": lambda: time.sleep(0.02)})
    outcomes = executor.run_all(
        [ToolCall("a", "nap"), ToolCall("b", "nap"), ToolCall("c", "unknown")]
    )
    call = Meter(session).call(messages=[{"role": "user", "content": "hi"}], outcomes=outcomes)
    assert call is not None
    assert call.tool_calls == 3
    assert 0.04 <= call.tool_seconds < 30
    assert next(calls_of(session)).tool_seconds == call.tool_seconds
