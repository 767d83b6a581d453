"""Budgets: every violation is reported, a failed count counts as one, and nothing over the budget
gets through."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Session
from coatcheck.context import Budget, HotState, PromptBuilder
from coatcheck.context.metrics import Meter
from coatcheck.errors import BudgetExceeded, InvalidArgument, LimitExceeded
from coatcheck.tokens import counted, estimate
from tests.backends import Backend


class Raising:
    """An invalid part of a host's own class."""

    @property
    def text(self) -> str:
        raise RuntimeError("the text is gone")


@pytest.fixture
def session(backend: Backend) -> Session:
    return backend.open().session("s")


def raises(text: str) -> int:
    raise RuntimeError("the tokenizer is gone")


BROKEN: dict[str, Callable[[str], Any]] = {
    "raises": raises,
    "none": lambda text: None,
    "negative": lambda text: -1,
    "nan": lambda text: float("nan"),
    "infinite": lambda text: float("inf"),
    "bool": lambda text: True,
    "text": lambda text: "12",
    "zero": lambda text: 0,
    "list": lambda text: [1],
    "endless": lambda text: 10**5_000,
}
broken = pytest.mark.parametrize("count", BROKEN.values(), ids=BROKEN)


@broken
def test_a_failing_counter_counts_nothing(count: Callable[[str], Any]) -> None:
    assert counted(count, "some words") is None


def test_counts_are_rounded_up_and_whole_numbers_of_any_type_pass() -> None:
    class Whole:
        def __index__(self) -> int:
            return 7

    assert counted(lambda text: 2.1, "words") == 3  # type: ignore[arg-type,return-value]
    assert counted(lambda text: Whole(), "words") == 7  # type: ignore[arg-type,return-value]
    assert counted(lambda text: 0, "") == 0


def test_the_default_limits_match_the_design() -> None:
    assert Budget() == Budget(
        max_hot_state_tokens=1_000, max_artifact_index_entries=20, max_prompt_tokens=8_000, max_rag_chunks=10,
        max_inline_artifact_chars=2_000,
    )  # fmt: skip


@pytest.mark.parametrize("value", [-1, 1.5, "8000", None, True, float("nan")])
@pytest.mark.parametrize(
    "field",
    ["max_hot_state_tokens", "max_artifact_index_entries", "max_prompt_tokens", "max_rag_chunks",
     "max_inline_artifact_chars"],
)  # fmt: skip
def test_an_invalid_limit_is_refused_when_the_budget_is_made(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument):
        Budget(**{field: value})  # type: ignore[arg-type]


def test_limits_are_inclusive() -> None:
    budget = Budget(
        max_prompt_tokens=10, max_rag_chunks=2, max_inline_artifact_chars=5, max_hot_state_tokens=10
    )
    assert budget.check(prompt=10, chunks=["12345", "1"], artifacts=["12345"], hot_state={}) == ()


def test_every_violation_has_field_limit_actual_and_message() -> None:
    state = {"objective": "word " * 3_000, "artifact_index": [{}] * 21}
    found = Budget().check(
        hot_state=state, prompt=8_001, chunks=["a"] * 10 + ["b" * 2_001], artifacts=["c" * 2_002]
    )
    found_fields = [(one.field, one.limit, one.actual) for one in found]
    tokens = estimate(json.dumps(state, ensure_ascii=False, separators=(",", ":")))
    assert found_fields == [
        ("max_hot_state_tokens", 1_000, tokens),
        ("max_artifact_index_entries", 20, 21),
        ("max_prompt_tokens", 8_000, 8_001),
        ("max_rag_chunks", 10, 11),
        ("max_inline_artifact_chars", 2_000, 2_001),
        ("max_inline_artifact_chars", 2_000, 2_002),
    ]
    assert not any(one.ambiguous for one in found)
    assert found[2].message == "a prompt of 8,001 tokens is over max_prompt_tokens (8,000)"


@broken
def test_a_failing_counter_is_a_violation_of_every_check_that_counts(
    count: Callable[[str], Any],
) -> None:
    found = Budget().check(hot_state={"a": 1}, prompt="hello", count=count)
    assert {one.field for one in found} == {"max_hot_state_tokens", "max_prompt_tokens"}
    assert all(one.ambiguous and one.actual is None for one in found)


@pytest.mark.parametrize(
    "parts",
    [
        {"hot_state": object()}, {"hot_state": "no JSON"}, {"hot_state": {"artifact_index": 7}},
        {"prompt": float("nan")}, {"prompt": -3}, {"prompt": True}, {"chunks": "a text, not a list"},
        {"prompt": float("inf")}, {"prompt": 10**5_000}, {"chunks": [Raising()]}, {"artifacts": [Raising()]},
        {"chunks": 7}, {"chunks": [object()]}, {"artifacts": [None]}, {"artifacts": 7},
    ],
)  # fmt: skip
def test_parts_that_cannot_be_counted_are_ambiguous_and_never_pass(
    session: Session, parts: dict[str, Any]
) -> None:
    found = Budget().check(**parts)
    assert found
    assert any(one.ambiguous for one in found)
    with pytest.raises(BudgetExceeded):
        Budget().enforce(session=session, **parts)


def test_parts_that_fail_while_they_are_listed_are_ambiguous(session: Session) -> None:
    def failing() -> Any:
        yield "a chunk"
        raise RuntimeError("the retriever is gone")

    for name in ("chunks", "artifacts"):
        assert Budget().check(**{name: failing()})[0].ambiguous
        with pytest.raises(BudgetExceeded):
            Budget().enforce(session=session, **{name: failing()})


def test_a_builder_logs_each_violation_that_it_fixes_once(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = [f"chunk {number} " + "x " * 1_500 for number in range(12)]
    state = HotState(session_id="s", objective="w " * 9_000)
    builder = PromptBuilder(session, provider="openai", recall=False)
    prompt = builder.build([{"role": "user", "content": "hi"}], hot_state=state, chunks=chunks)
    logged = [record.message.partition(": ")[2] for record in caplog.records]
    assert logged == [one.message for one in Budget().check(hot_state=state, chunks=chunks)]
    assert len(logged) == 14
    assert prompt.changes
    assert prompt.violations == ()
    builder.build(
        [{"role": "user", "content": "hi"}], hot_state=HotState(session_id="s", objective="w")
    )
    assert len(caplog.records) == 14


def test_violations_are_logged_when_the_budget_is_enforced(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    budget = Budget(max_prompt_tokens=100, max_inline_artifact_chars=500)
    budget.check(prompt=200)
    assert caplog.records == []
    budget.enforce(session=session, artifacts=["x" * 900])
    assert (
        "inline artifact 1 of 900 characters is over max_inline_artifact_chars (500)"
        in caplog.messages[0]
    )
    with pytest.raises(BudgetExceeded):
        budget.enforce(prompt=200)
    assert "a prompt of 200 tokens is over max_prompt_tokens (100)" in caplog.messages[1]
    builder = PromptBuilder(session, provider="openai", budget=budget)
    with pytest.raises(BudgetExceeded) as caught:
        builder.build([{"role": "user", "content": "word " * 500}])
    assert [record.message.partition(": ")[2] for record in caplog.records[2:]] == [
        one.message for one in caught.value.violations
    ]
    Meter(session, budget=budget).call(caught.value)
    assert len(caplog.records) == 2 + len(caught.value.violations), (
        "each violation is logged only once"
    )
    assert {(record.name, record.levelname) for record in caplog.records} == {
        ("coatcheck", "WARNING")
    }


def test_enforcing_without_a_session_raises_an_error_with_every_violation() -> None:
    with pytest.raises(LimitExceeded) as caught:
        Budget().enforce(prompt=9_000, artifacts=["x" * 3_000])
    assert isinstance(caught.value, BudgetExceeded)
    assert [one.field for one in caught.value.violations] == [
        "max_prompt_tokens",
        "max_inline_artifact_chars",
    ]
    assert "and 1 more" in str(caught.value)


def test_oversized_parts_become_references_that_read_back_exactly(session: Session) -> None:
    large, many = "large " * 1_000, [f"chunk number {n}" for n in range(14)]
    done = Budget().enforce(session=session, artifacts=["small", large], chunks=many)
    assert done.artifacts[0] == "small"
    stub = json.loads(done.artifacts[1])
    assert session.get(stub["artifact"]) == large
    assert done.chunks == tuple(many[:10])
    assert done.rest is not None
    pointers = [word for word in done.rest.split() if word.startswith("art:")]
    assert [session.get(pointer) for pointer in pointers] == many[10:]
    assert len(done.refs) == 5
    assert done.changes == (
        "4 of 14 retrieved chunks became pointers", f"inline artifact of 6,000 characters became {stub['artifact']}",
    )  # fmt: skip


def test_a_hot_state_that_is_over_is_cut_by_its_own_steps(session: Session) -> None:
    state = HotState(
        session_id="s", objective="find it", constraints=[f"never do {n}" * 20 for n in range(200)]
    )
    done = Budget().enforce(session=session, hot_state=state)
    assert Budget().check(hot_state=done.hot_state) == ()
    assert done.hot_state.steps


def test_a_hot_state_that_was_rendered_elsewhere_becomes_a_reference(session: Session) -> None:
    rendered = HotState(session_id="s", objective="word " * 3_000).fitted(
        Budget(max_hot_state_tokens=20_000)
    )
    done = Budget().enforce(session=session, hot_state=rendered)
    assert session.get(done.refs[0]) == rendered.text
    assert Budget().check(hot_state=done.hot_state) == ()


def test_parts_that_cannot_become_references_are_refused(session: Session) -> None:
    with pytest.raises(BudgetExceeded):
        Budget().enforce(session=session, prompt=8_001)
    with pytest.raises(BudgetExceeded):
        Budget(max_inline_artifact_chars=20).enforce(session=session, artifacts=["x" * 21])


def test_nothing_over_the_budget_gets_through_if_the_store_fails(backend: Backend) -> None:
    session = backend.open().session("full", quota_bytes=10)
    try:
        done = Budget().enforce(
            session=session, artifacts=["word " * 5_000], chunks=["a chunk of words"] * 12
        )
    except BudgetExceeded:
        return
    assert Budget().check(artifacts=done.artifacts, chunks=done.chunks) == ()
    assert done.refs == ()
    assert "could not be stored" in str(done.rest)


def test_the_result_of_enforce_is_always_within_the_budget(backend: Backend) -> None:
    @backend.examples()
    @given(
        st.lists(st.text(max_size=400), max_size=12),
        st.lists(st.text(max_size=400), max_size=5),
        st.integers(0, 8),
        st.integers(400, 700),
    )
    def check(chunks: list[str], artifacts: list[str], most: int, chars: int) -> None:
        budget = Budget(max_rag_chunks=most, max_inline_artifact_chars=chars)
        session = backend.new_session()
        longer = [text * 4 for text in artifacts]
        done = budget.enforce(
            session=session, chunks=[text * 3 for text in chunks], artifacts=longer
        )
        assert budget.check(chunks=done.chunks, artifacts=done.artifacts) == ()
        for text, shown in zip(longer, done.artifacts, strict=True):
            assert shown == text or session.get(json.loads(shown)["artifact"]) == text

    check()
