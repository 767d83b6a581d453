"""The hot state: validated whenever it is built, equal bytes for equal content, and never over its
limit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import errors
from coatcheck.context import (
    Budget,
    HotState,
    IndexEntry,
    Rendered,
    artifact_index,
    changes_between,
)
from coatcheck.tokens import estimate
from tests.backends import TWIN_PREFIX, TWINS, Backend

IDS = st.text("0123456789abcdef", min_size=64, max_size=64)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TEXTS = st.one_of(
    WORDS, st.sampled_from(["word " * 300, "\x1b[31m\u202e", '"],"risk_level":"low"', "é" * 200])
)
LISTS = st.lists(TEXTS, max_size=8)
ENTRIES = st.fixed_dictionaries(
    {"artifact_id": IDS, "type": st.sampled_from(["log", "data", "code"])},
    optional={"label": TEXTS, "version": st.integers(1, 1 << 53), "summary": TEXTS},
)
STATES = st.builds(
    HotState,
    session_id=WORDS.filter(bool),
    session_key=st.none() | WORDS,
    run_id=st.none() | WORDS,
    objective=st.none() | TEXTS,
    current_plan_id=st.none() | WORDS,
    accepted_decisions=LISTS,
    open_questions=LISTS,
    constraints=LISTS,
    last_successful_step=st.none() | TEXTS,
    risk_level=st.sampled_from(["low", "medium", "high"]),
    artifact_index=st.lists(ENTRIES, max_size=25),
)
LIMITS = st.integers(1, 3_000)


def full(**changes: Any) -> HotState:
    """A state with something in every field."""
    entries = [
        IndexEntry(
            artifact_id=f"{n:064x}"[::-1],
            type="log",
            label=f"log {n}",
            version=n + 1,
            summary=f"{n} failed " * 9,
        )
        for n in range(25)
    ]
    return HotState(
        **{
            "session_id": "s", "session_key": "key", "run_id": "run", "objective": "fix the login " * 4,
            "current_plan_id": "plan", "accepted_decisions": [f"decision {n}" for n in range(6)],
            "open_questions": [f"question {n}?" for n in range(6)], "constraints": [f"rule {n}" for n in range(6)],
            "last_successful_step": "reproduced the bug, twice", "risk_level": "high", "artifact_index": entries,
        } | changes
    )  # fmt: skip


def fit(state: HotState, limit: int, entries: int = 20) -> Rendered:
    return state.fitted(Budget(max_hot_state_tokens=limit, max_artifact_index_entries=entries))


# Validation


@pytest.mark.parametrize(
    "values",
    [
        {"session_id": ""}, {"session_id": None}, {"session_id": 7}, {"session_id": "lone \ud800"},
        {"objective": "half \ud83d"}, {"constraints": ["half \ud83d"]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "log", "label": "half \ud83d"}]},
        {"risk_level": "none"}, {"objective": 7}, {"objective": ["a"]}, {"unknown": 1},
        {"constraints": "a text"}, {"constraints": {"a", "b"}}, {"constraints": {"a": 1}}, {"constraints": [1]},
        {"constraints": None}, {"open_questions": (text for text in "ab")},
        {"artifact_index": {}}, {"artifact_index": ["art:3f9b2a1c8e4d"]}, {"artifact_index": [{"type": "log"}]},
        {"artifact_index": [{"artifact_id": "3f9b2a1c8e4d", "type": "log"}]},
        {"artifact_index": [{"artifact_id": "art:3f9b2a1c8e4d#/a", "type": "log"}]},
        {"artifact_index": [{"artifact_id": "../" * 21 + "x", "type": "log"}]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "picture"}]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "log", "version": 0}]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "log", "version": True}]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "log", "version": 1.0}]},
        {"artifact_index": [{"artifact_id": "a" * 64, "type": "log", "kind": "log"}]},
    ],
)  # fmt: skip
def test_an_invalid_hot_state_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        HotState(**{"session_id": "s"} | values)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "values", [{}, {"artifact_id": "a" * 64}, {"artifact_id": "a" * 64, "type": "log", "x": 1}]
)
def test_an_invalid_index_entry_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        IndexEntry(**values)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '{"objective":"x"}', "[" * 100_000, b"\xff", '{"session_id":NaN}'],
)
def test_text_that_is_not_a_hot_state_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        HotState.parse(text)


def test_an_error_contains_no_secret_and_is_bounded() -> None:
    hostile: dict[str, Any] = {
        "sk-ant-" + "a1B2" * 20: 1,
        "x" * 100_000: 1,
        "\x1b[31m": 1,
        "a": 1,
        "b": 1,
    }
    with pytest.raises(errors.InvalidArgument) as caught:
        HotState(session_id="s", **hostile)
    assert "a1B2a1B2" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_a_state_made_without_the_constructor_is_checked_before_it_is_rendered() -> None:
    state = full().model_copy(update={"risk_level": "none"})
    for use in (state.render, state.fitted, state.shown):
        with pytest.raises(errors.InvalidArgument):
            use()


def test_a_state_does_not_change() -> None:
    state = full()
    with pytest.raises(ValueError, match="frozen"):
        state.objective = "another"
    changed = state.replaced(objective="another")
    assert (state.objective, changed.objective) == ("fix the login " * 4, "another")
    with pytest.raises(errors.InvalidArgument):
        state.replaced(objektive="another")


@given(STATES)
def test_a_state_is_the_same_after_a_round_trip(state: HotState) -> None:
    again = HotState.parse(json.dumps(state.content()))
    assert again == state
    assert again.render() == state.render()
    assert hash(again) == hash(state)


# Rendering


def test_the_rendering_is_one_line_in_a_fixed_order_without_empty_fields() -> None:
    state = HotState(
        session_id="s", objective="o", artifact_index=[IndexEntry(artifact_id="a" * 64, type="log")]
    )
    assert state.render() == (
        '{"session_id":"s","risk_level":"low","objective":"o",'
        '"artifact_index":[{"artifact_id":"art:aaaaaaaaaaaa","type":"log","version":1}]}'
    )
    assert list(json.loads(full().render())) == [
        "session_id", "session_key", "run_id", "risk_level", "current_plan_id", "objective", "constraints",
        "accepted_decisions", "open_questions", "last_successful_step", "artifact_index",
    ]  # fmt: skip


def test_ids_that_begin_alike_are_shown_long_enough_to_be_distinguished() -> None:
    ids = ["a" * 20 + "b" * 44, "a" * 20 + "c" * 44, "d" * 64, "d" * 64]
    state = HotState(
        session_id="s", artifact_index=[{"artifact_id": one, "type": "log"} for one in ids]
    )
    shown = [entry["artifact_id"] for entry in state.shown()["artifact_index"]]
    assert shown == [
        "art:" + "a" * 20 + "b",
        "art:" + "a" * 20 + "c",
        "art:" + "d" * 12,
        "art:" + "d" * 12,
    ]


def test_known_secrets_are_masked_everywhere() -> None:
    secret = "sk-ant-api03-" + "aB3dE5fG7h" * 9
    entry = {"artifact_id": "a" * 64, "type": "log", "label": secret, "summary": f"key: {secret}"}
    state = HotState(
        session_id="s", run_id=secret, objective=f"use {secret}", constraints=[secret], accepted_decisions=[secret],
        open_questions=[secret], last_successful_step=secret, artifact_index=[entry],
    )  # fmt: skip
    assert "aB3dE5fG7h" not in state.render()
    assert all("aB3dE5fG7h" not in fit(state, limit).text for limit in range(60, 400, 7))
    assert state.objective == f"use {secret}"
    (change, *_) = changes_between(state, state.replaced(run_id=secret[::-1]))
    assert "aB3dE5fG7h" not in str(change)


@given(STATES)
def test_untrusted_text_stays_inside_its_string(state: HotState) -> None:
    assert json.loads(state.render()) == state.shown()
    assert "\n" not in state.render()


# Fitting to a limit


def test_a_state_that_fits_is_left_as_it_is() -> None:
    state = full(artifact_index=())
    rendered = state.fitted()
    assert rendered == Rendered(
        state.render(), estimate(state.render()), len(state.render().encode())
    )
    assert str(rendered) == rendered.render() == state.render()


def test_a_state_over_its_limit_loses_summaries_then_all_but_the_first_artifacts_then_lists_then_texts() -> (
    None
):
    state = full()
    seen: list[str] = []
    for limit in range(2_500, 40, -7):
        try:
            rendered = fit(state, limit)
        except errors.BudgetExceeded:
            break
        assert rendered.tokens <= limit
        fields = [step.split(":")[0] for step in rendered.steps]
        seen += [field for field in fields if field not in seen]
        parsed = json.loads(rendered.text)
        assert ("truncated" in parsed) == bool(rendered.steps)
        assert rendered.entries == len(parsed.get("artifact_index", [])) == len(rendered.types)
        if "open_questions" in fields:
            assert len(parsed.get("artifact_index", [])) <= 5
            assert parsed.get("open_questions", []) == list(
                state.open_questions[6 - len(parsed.get("open_questions", [])) :]
            )
        if len(parsed.get("artifact_index", [])) < 20:
            assert not any("summary" in entry for entry in parsed.get("artifact_index", []))
    assert seen == [
        "artifact_index", "summaries", "open_questions", "accepted_decisions", "constraints", "last_successful_step",
        "objective", "all but ids and risk",
    ]  # fmt: skip
    assert json.loads(fit(state, 70).text) == {
        "session_id": "s", "session_key": "key", "run_id": "run", "risk_level": "high", "current_plan_id": "plan",
        "truncated": ["left out: all but ids and risk"],
    }  # fmt: skip


LONG = {"ascii": "the login of the shop fails ", "cjk": "登录在重置后超时"}


@pytest.mark.parametrize("words", LONG.values(), ids=LONG)
@pytest.mark.parametrize(
    "fields", [["objective"], ["last_successful_step"], ["constraints"], ["labels"], None]
)
def test_long_text_is_cut_before_pointers(words: str, fields: list[str] | None) -> None:
    text = (words * 12_000)[:12_000]
    index = [
        {"artifact_id": str(n) * 64, "type": "log", "label": f"log {n}", "summary": text}
        for n in range(5)
    ]
    long: dict[str, Any] = {
        "objective": text, "last_successful_step": text,
        **{name: [text] * 30 for name in ("constraints", "accepted_decisions", "open_questions")},
        "labels": text,
    }  # fmt: skip
    given = {name: value for name, value in long.items() if fields is None or name in fields}
    if label := given.pop("labels", None):
        index = [entry | {"label": label} for entry in index]
    rendered = HotState(session_id="s", artifact_index=index, **given).fitted()
    parsed = json.loads(rendered.text)
    assert [entry["artifact_id"] for entry in parsed["artifact_index"]] == [
        "art:" + str(n) * 12 for n in range(5)
    ]
    assert all(parsed[name] for name in given), "something is left of each text"
    assert rendered.steps


def test_no_step_removes_more_than_needed() -> None:
    state = full()
    for limit in (1_500, 900, 400, 250, 150, 110):
        rendered = fit(state, limit)
        looser = next(
            fit(state, more)
            for more in range(limit + 1, 9_999)
            if fit(state, more).text != rendered.text
        )
        before, after = json.loads(looser.text), json.loads(rendered.text)
        changed = {name for name in before if before.get(name) != after.get(name)} - {"truncated"}
        assert len(changed) == 1, "the next larger rendering shows more of only one field"
        assert looser.tokens - rendered.tokens < 60


def test_an_index_over_its_entry_limit_says_so() -> None:
    rendered = fit(full(), 9_999, entries=3)
    assert (rendered.entries, rendered.steps) == (3, ("artifact_index: 3 of 25",))
    assert json.loads(rendered.text)["truncated"] == ["artifact_index: 3 of 25"]
    none = fit(full(), 9_999, entries=0)
    assert (none.entries, none.types) == (0, ())
    assert json.loads(none.text)["truncated"] == ["left out: 25 artifacts"]


@given(STATES, LIMITS, st.integers(0, 25))
def test_any_state_is_within_its_limits_or_says_why_not(
    state: HotState, limit: int, entries: int
) -> None:
    try:
        rendered = fit(state, limit, entries)
    except errors.BudgetExceeded as error:
        (violation,) = error.violations
        assert violation.field == "max_hot_state_tokens"
        assert violation.actual > violation.limit == limit
        return
    assert estimate(rendered.text) == rendered.tokens <= limit
    assert rendered.bytes == len(rendered.text.encode())
    parsed = json.loads(rendered.text)
    assert rendered.entries == len(parsed.get("artifact_index", [])) <= entries
    assert parsed["session_id"] == state.shown()["session_id"]
    assert parsed["risk_level"] == state.risk_level
    assert len(parsed.get("truncated", [])) <= len(rendered.steps)
    whole = state.shown()
    assert bool(rendered.steps) == (parsed != whole)
    assert fit(state, limit, entries) == rendered, "the same content gives the same bytes"


def amounts(rendered: Rendered) -> list[int]:
    """Return how much is shown of each part."""
    parsed = json.loads(rendered.text)
    index = parsed.get("artifact_index", [])
    parts = (
        "open_questions",
        "accepted_decisions",
        "constraints",
        "last_successful_step",
        "objective",
    )
    return [
        sum(len(entry.get("summary", "")) for entry in index),
        len(index),
        *(len(parsed.get(one, "")) for one in parts),
    ]


def odd(text: str) -> int:
    """A counter that is far from monotone."""
    return 1 + (len(text) * 7_919) % 3_001


@given(
    STATES,
    LIMITS,
    LIMITS,
    st.sampled_from([estimate, len, odd, lambda text: math.ceil(len(text) / 4)]),
)
def test_a_larger_limit_never_shows_less(state: HotState, one: int, other: int, count: Any) -> None:
    less, more = sorted((one, other))
    try:
        small = state.fitted(Budget(max_hot_state_tokens=less), count=count)
    except errors.BudgetExceeded:
        return
    large = state.fitted(Budget(max_hot_state_tokens=more), count=count)
    assert all(a <= b for a, b in zip(amounts(small), amounts(large), strict=True))


def test_a_list_of_a_hundred_thousand_items_is_cut_with_a_few_counts() -> None:
    counts = 0

    def counting(text: str) -> int:
        nonlocal counts
        counts += 1
        return estimate(text)

    state = HotState(session_id="s", open_questions=[f"question {n}" for n in range(100_000)])
    rendered = state.fitted(count=counting)
    assert 900 < rendered.tokens <= 1_000
    assert counts < 40


def raises(text: str) -> int:
    raise OSError(text)


@pytest.mark.parametrize(
    "count",
    [
        raises,
        *(
            lambda text, answer=answer: answer
            for answer in (None, -1, math.nan, math.inf, "9", True, 0)
        ),
    ],
)
def test_a_counter_that_fails_is_a_violation_and_nothing_is_rendered(count: Any) -> None:
    for state in (full(), HotState(session_id="s")):
        with pytest.raises(errors.BudgetExceeded) as caught:
            state.fitted(count=count)
        (violation,) = caught.value.violations
        assert violation.ambiguous
        assert violation.actual is None


def test_a_counter_that_fails_later_is_a_violation_too() -> None:
    for failing in range(1, 5):
        calls = 0

        def count(text: str, failing: int = failing) -> Any:
            nonlocal calls
            calls += 1
            return None if calls == failing else estimate(text)

        with pytest.raises(errors.BudgetExceeded) as caught:
            full().fitted(count=count)
        assert caught.value.violations[0].ambiguous


def test_a_budget_rejects_an_oversized_state_and_accepts_its_fitted_rendering() -> None:
    budget = Budget()
    assert {one.field for one in budget.check(hot_state=full())} == {
        "max_hot_state_tokens", "max_artifact_index_entries",
    }  # fmt: skip
    assert budget.check(hot_state=full().fitted(budget)) == ()


# The index of a session


def test_the_index_lists_the_newest_version_of_each_name(backend: Backend) -> None:
    session = backend.open().session("s")
    for n in range(3):
        session.put(f"log {n}", name="log", kind="log")
        session.put(f"without a name {n}", tool="search", summary=f"summary {n}")
    index = artifact_index(session)
    assert [(one.type, one.label, one.version, one.summary) for one in index] == [
        ("result", "search", 1, "summary 2"), ("log", "log", 3, "log 2"), ("result", "search", 1, "summary 1"),
        ("result", "search", 1, "summary 0"),
    ]  # fmt: skip
    assert all(session.get(one.artifact_id) is not None for one in index)
    assert [one.summary for one in artifact_index(session, limit=2)] == ["summary 2", "log 2"]
    assert artifact_index(session, limit=0) == ()
    HotState(session_id="s", artifact_index=index)


def test_the_index_begins_with_artifacts_that_match_the_words(backend: Backend) -> None:
    session = backend.open().session("s")
    for n in range(30):
        session.put(f"nothing of note in number {n}", name=f"n{n}")
    session.put("the login times out after a reset", name="old report")
    session.put("a newer report", name="old report")
    for n in range(30, 60):
        session.put(f"nothing of note in number {n}", name=f"n{n}")
    index = artifact_index(session, words="login timeout reset", limit=5)
    assert (index[0].label, index[0].version) == ("old report", 1)
    assert [one.label for one in index[1:]] == ["n59", "n58", "n57", "n56"]


def test_the_index_of_a_child_includes_the_artifacts_of_its_parent(backend: Backend) -> None:
    store = backend.open()
    parent = store.session("parent")
    parent.put("one", name="n")
    parent.put("two", name="n")
    (entry,) = artifact_index(store.session("child", parent="parent"))
    assert (entry.label, entry.version) == ("n", 2)


def test_pointers_in_an_index_are_long_enough_to_distinguish_twins(backend: Backend) -> None:
    session = backend.open().session("s")
    for text in TWINS:
        session.put(text)
    index = artifact_index(session)
    assert all(one.artifact_id.startswith("art:" + TWIN_PREFIX) for one in index)
    assert [session.get(one.artifact_id) for one in index] == list(reversed(TWINS))


def test_long_and_hostile_names_are_bounded_in_an_index(backend: Backend) -> None:
    session = backend.open().session("s")
    session.put("text", name="x" * 60_000)
    session.put("other", name="\x1b[31m\u202e")
    index = artifact_index(session)
    assert [len(one.label) for one in index] == [6, 80]
    assert HotState(session_id="s", artifact_index=index).fitted().steps == ()


# Changes


def test_changes_are_listed_field_by_field() -> None:
    older = full(artifact_index=[])
    newer = older.replaced(
        objective=None, constraints=["rule 0", "rule 2", "rule 9"], risk_level="low",
        artifact_index=[{"artifact_id": "a" * 64, "type": "log", "label": "l", "version": 2, "summary": "s"}],
    )  # fmt: skip
    assert [(one.field, one.removed, one.added) for one in changes_between(older, newer)] == [
        ("risk_level", ("high",), ("low",)),
        ("objective", ("fix the login " * 4,), ()),
        ("constraints", ("rule 1", "rule 3", "rule 4", "rule 5"), ("rule 9",)),
        ("artifact_index", (), ("art:aaaaaaaaaaaa log v2 l: s",)),
    ]
    assert changes_between(older, older) == ()


@given(STATES, STATES)
def test_exactly_the_fields_that_differ_are_listed(one: HotState, other: HotState) -> None:
    fields = {change.field for change in changes_between(one, other)}
    assert fields == {
        name for name in HotState.model_fields if getattr(one, name) != getattr(other, name)
    }
