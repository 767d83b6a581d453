"""When a result leaves the context by expected cost: sizes, tools, context, prices, and what a
store has learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Limit, Policy, Session, errors, toolkit
from coatcheck.externalize import Prices, Situation
from coatcheck.externalize.decision import LEAST_TOKENS, Estimate, use_of
from coatcheck.models import model

WORDS = "one two three four five six seven eight nine ten "


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def text(tokens: int) -> str:
    return WORDS * (tokens // 10)


def test_the_same_result_leaves_a_small_context_and_stays_in_a_large_one(session: Session) -> None:
    rows = text(2_000)
    small = session.externalize(rows, tool="query", situation=Situation(context_tokens=5_000))
    large = session.externalize(rows, tool="query", situation=Situation(context_tokens=150_000))
    assert small.is_stub
    assert small.why is not None
    assert small.why.expected_saving > 0
    assert not large.is_stub
    assert large.text == rows
    assert large.why is not None
    assert not large.why.leaves


def test_code_that_is_read_to_be_edited_stays_longer_than_rows(session: Session) -> None:
    situation = Situation(context_tokens=60_000)
    limits = {}
    for tool in ("Read", "query"):
        why = session.externalize("small but not tiny " * 10, tool=tool, situation=situation).why
        assert why is not None
        assert why.limit_tokens is not None
        limits[tool] = why.limit_tokens
    assert limits["Read"] > limits["query"]


@pytest.mark.parametrize("tool", ["Task", "run_subagent", "Skill", "mcp__team__agent"])
def test_reports_of_sub_agents_and_skills_never_leave(session: Session, tool: str) -> None:
    outcome = session.externalize(
        text(50_000), tool=tool, situation=Situation(context_tokens=1_000)
    )
    assert not outcome.is_stub
    assert outcome.why is not None
    assert outcome.why.reason == "report"


@pytest.mark.parametrize(
    ("tool", "use"),
    [
        ("Read", "file"), ("read_file", "file"), ("mcp__fs__read_multiple_files", "file"), ("readTextFile", "file"),
        ("Grep", "search"), ("search_code", "search"), ("Bash", "command"), ("run_command", "command"),
        ("read_graph", "data"), ("execute_sql", "data"), ("browser_snapshot", "data"), ("TaskOutput", "data"),
        ("", "data"), (None, "data"),
    ],
)  # fmt: skip
def test_the_name_of_a_tool_says_what_agents_do_with_its_results(
    tool: str | None, use: str
) -> None:
    assert use_of(tool) == use


def test_explicit_limits_decide_alone(session: Session) -> None:
    early, late = Situation(context_tokens=0), Situation(context_tokens=500_000)
    for situation in (early, late):
        assert not session.externalize(
            text(2_900), policy=Policy(max_tokens=3_000), situation=situation
        ).is_stub
        over = session.externalize(
            text(5_000), policy=Policy(max_tokens=3_000), situation=situation
        )
        assert over.is_stub
        assert over.why is not None
        assert (over.why.reason, over.why.limit_tokens) == ("limit", 3_000)
        rule = Policy(tools={"t": Limit(max_tokens=100)})
        assert session.externalize(text(200), tool="t", policy=rule, situation=situation).is_stub


def test_the_decision_is_the_cheaper_side_and_says_so(session: Session) -> None:
    for tokens in (600, 1_500, 4_000, 20_000):
        for context in (2_000, 30_000, 120_000):
            outcome = session.externalize(
                text(tokens), tool="Bash", situation=Situation(context_tokens=context)
            )
            why = outcome.why
            assert why is not None
            assert why.leaves == outcome.is_stub
            if why.leaves:
                assert why.stub_cost < why.inline_cost
            assert f"{why.tokens:,} tokens" in str(why)


def test_prices_of_the_model_move_the_limit(session: Session) -> None:
    context = Situation(context_tokens=100_000)
    usual = session.externalize(text(300), tool="query", situation=context).why
    cheap = session.externalize(
        text(300),
        tool="query",
        situation=Situation(context_tokens=100_000, prices=Prices(read=0.01)),
    ).why
    assert usual is not None
    assert cheap is not None
    assert usual.limit_tokens is not None
    assert cheap.limit_tokens is not None
    assert cheap.limit_tokens < usual.limit_tokens


def test_the_context_of_a_session_is_estimated_from_its_results(session: Session) -> None:
    first = session.externalize(text(500), tool="Read").why
    for _ in range(40):
        session.externalize(text(900), tool="Read")
    later = session.externalize(text(500), tool="Read").why
    assert first is not None
    assert later is not None
    assert later.context_tokens > first.context_tokens + 20_000


def test_the_assumed_context_of_a_session_is_bounded(session: Session) -> None:
    for _ in range(60):
        session.externalize(text(3_000), tool="Task")
    why = session.externalize(text(500), tool="query").why
    assert why is not None
    assert why.context_tokens <= 100_000


def test_the_first_stub_pays_for_the_tools_that_it_needs(session: Session) -> None:
    without, added = (
        session.externalize(
            text(300), tool="query", situation=Situation(context_tokens=5_000, tool_tokens=tokens)
        ).why
        for tokens in (0, 390)
    )
    assert without is not None
    assert added is not None
    assert (added.limit_tokens or 0) >= (without.limit_tokens or 0) + 390


def test_a_store_learns_how_often_results_of_a_tool_are_read(tmp_path: Path) -> None:
    situation = Situation(context_tokens=5_000)

    def limit(session: Session) -> int:
        why = session.externalize(text(300), tool="logs", situation=situation).why
        assert why is not None
        assert why.limit_tokens is not None
        return why.limit_tokens

    with coatcheck.open(tmp_path) as store:
        session = store.session("s")
        read = toolkit(session)[0]
        before = limit(session)
        for number in range(20):
            ref = session.externalize(
                text(20_000) + str(number), tool="logs", situation=situation
            ).ref
            assert ref is not None
            for line in range(1, 5):
                read.run(pointer=ref.pointer, lines=f"{line}:{line}")
        after = limit(session)
    assert after > before
    with coatcheck.open(tmp_path) as store:  # another process starts with what this one has learned
        assert limit(store.session("t")) > before


def test_a_result_that_a_host_passes_again_is_decided_as_before_and_counted_once(
    session: Session,
) -> None:
    def decided(call_id: str) -> float:
        content, situation = text(12_000) + call_id[-1], Situation(context_tokens=2_000)
        outcome = session.externalize(
            content, tool="read_file", call_id=call_id, situation=situation
        )
        assert outcome.ref is not None
        assert outcome.why is not None
        return outcome.why.expected_reads

    first = decided("first")
    assert [decided("first") for _ in range(50)] == [first] * 50
    assert first / 2 < decided("second") < first, "one stub was not read, not 51"
    assert decided("first") == first


def test_a_store_that_cannot_be_written_still_decides(session: Session) -> None:
    outcome = session.externalize(text(9_000), tool="query")
    session.store.close()
    again = session.externalize(text(9_000), tool="query")
    assert outcome.is_stub
    assert again.failure is not None


@given(
    context=st.integers(0, 2_000_000),
    calls=st.none() | st.floats(0, 500),
    read=st.floats(0, 1),
    rate=st.floats(0.25, 4),
    use=st.sampled_from(["file", "search", "command", "data"]),
)
def test_a_stub_pays_off_from_the_break_even_point_on(
    context: int, calls: float | None, read: float, rate: float, use: str
) -> None:
    situation = Situation(context_tokens=context, calls_to_come=calls, prices=Prices(read=read))
    expected = Estimate(use, situation, rate)
    limit = expected.break_even()
    assert limit >= LEAST_TOKENS
    if limit < 1_000_000:
        for tokens in (limit, limit + 1, 2 * limit, 10 * limit):
            assert expected.stub_cost(tokens) <= expected.inline_cost(tokens)


@pytest.mark.parametrize(
    ("name", "read", "window"),
    [
        ("claude-opus-5-5-20260922", 0.05, 1_000_000), ("anthropic/claude-fable-5-2", 0.025, 1_000_000),
        ("claude-sonnet-5", 0.1, 1_000_000), ("gpt-4o-mini", 0.5, 128_000), ("unheard-of", 0.1, 200_000),
        (None, 0.1, 200_000),
    ],
)  # fmt: skip
def test_models_are_recognized_by_the_beginning_of_their_name(
    name: str | None, read: float, window: int
) -> None:
    found = model(name)
    assert (found.prices.read, found.window) == (read, window)


def test_bad_prices_and_calls_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="read must be a number of at least 0, got -1"):
        Prices(read=-1)
    with pytest.raises(errors.InvalidArgument, match="expected_calls"):
        Policy(expected_calls=-3)
    with pytest.raises(errors.InvalidArgument, match="prices must be Prices or None"):
        Policy(prices={"read": 1})  # type: ignore[arg-type]
