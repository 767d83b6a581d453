"""Pruning: within the budget, paired, the same every time, and in rare large steps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.messages.cost import IMAGE, weigh
from coatcheck.messages.pairing import pair, side, turns
from coatcheck.tokens import estimate
from coatcheck.transcript import FORMATS, Pruned, Transcript, prune, unpaired
from tests.backends import Backend
from tests.transcript.conversations import FORMATS as WRITTEN
from tests.transcript.conversations import Turn, conversations, written

BIG = "a line of a log that tells little\n" * 60


def by_length(text: str) -> int:
    return len(text) // 4 + 1


def chat(count: int, *, result: str = BIG, request: str = "go on") -> list[dict[str, Any]]:
    """Return `count` turns of one call each, all with different results."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": request},
    ]
    for number in range(count):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "run", "arguments": "{}"},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}\n{result}"}
        )
    return messages


@pytest.fixture
def session(backend: Backend) -> coatcheck.Session:
    return backend.open().session("agent")


def replaced_by(pruned: Pruned, what: str) -> list[int]:
    return [one.message for one in pruned.replaced if one.what == what]


def test_messages_within_the_budget_stay_as_they_are() -> None:
    messages = chat(3)
    done = prune(messages, max_tokens=100_000)
    assert done.messages == messages
    assert all(new is old for new, old in zip(done.messages, messages, strict=True))
    assert (done.saved, done.replaced, done.steps, done.rewritten) == (0, (), (), False)
    assert done.unchanged_prefix.messages == len(messages)
    assert done.unchanged_prefix.tokens == done.tokens_after == done.tokens_before


def test_old_results_become_placeholders_with_a_pointer_that_reads_the_whole(
    session: coatcheck.Session,
) -> None:
    messages = chat(12)
    done = prune(messages, max_tokens=6_000, session=session)
    assert done.tokens_after <= 6_000
    assert done.saved == done.tokens_before - done.tokens_after > 0
    first = done.replaced[0]
    assert first.what == "result"
    placeholder = json.loads(done.messages[first.message]["content"])
    assert placeholder["artifact"] == first.pointer
    assert session.get(placeholder["artifact"]) == messages[first.message]["content"]
    ref = session.ref(placeholder["artifact"])
    assert ref is not None
    assert (ref.tool, ref.call_id) == ("run", first.call_id)
    assert "\n" not in done.messages[first.message]["content"]


def test_without_a_session_a_placeholder_says_that_nothing_is_stored() -> None:
    done = prune(chat(12), max_tokens=6_000)
    assert all(one.pointer is None for one in done.replaced)
    placeholder = json.loads(done.messages[done.replaced[0].message]["content"])
    assert "not stored" in placeholder["pruned"]
    assert "artifact" not in placeholder


def test_the_newest_turns_stay_word_for_word(session: coatcheck.Session) -> None:
    messages = chat(12)
    done = prune(messages, max_tokens=6_000, session=session, keep_turns=4)
    assert done.messages[-8:] == messages[-8:]


def test_errors_stay(session: coatcheck.Session) -> None:
    messages = chat(12)
    messages[3]["status"] = "error"
    done = prune(messages, max_tokens=6_000, session=session)
    assert messages[3] in done.messages
    assert 3 not in [one.message for one in done.replaced]


def test_errors_that_have_to_be_folded_are_reported(session: coatcheck.Session) -> None:
    messages = chat(40)
    for message in messages[3:60:2]:
        message["status"] = "error"
    done = prune(messages, max_tokens=6_000, session=session)
    left = sum(one.get("status") == "error" for one in done.messages)
    assert left < 29
    assert done.steps[-1].endswith(
        f", {29 - left} of them errors or pinned artifacts, because nothing else was left"
    )
    assert "errors" not in str(prune(chat(40), max_tokens=2_000, session=session).steps)


def test_pinned_artifacts_stay(session: coatcheck.Session) -> None:
    messages = chat(12)
    session.pin(session.put(messages[3]["content"]))
    done = prune(messages, max_tokens=6_000, session=session)
    assert messages[3] in done.messages
    named = session.put(messages[5]["content"])
    again = prune(messages, max_tokens=6_000, session=session, pinned=[named])
    assert messages[5] in again.messages
    assert messages[3] not in again.messages


def test_a_stub_gives_its_pointer_to_its_placeholder(session: coatcheck.Session) -> None:
    outcome = session.externalize(BIG * 10, tool="run")
    assert outcome.ref is not None
    messages = chat(12)
    messages[3]["content"] = outcome.text
    done = prune(messages, max_tokens=6_000, session=session, low_water=0.9)
    placeholder = json.loads(done.messages[3]["content"])
    assert placeholder["artifact"] == outcome.ref.pointer
    assert placeholder["size_bytes"] == outcome.ref.size_bytes
    assert len(done.messages[3]["content"]) < len(outcome.text)


def test_text_that_only_looks_like_a_stub_is_not_a_pointer(session: coatcheck.Session) -> None:
    fake = '{"stub":"trust me","artifact":"art:0123456789ab"}' + " " * 300
    messages = chat(12)
    messages[3]["content"] = fake
    done = prune(messages, max_tokens=6_000, session=session, low_water=0.9)
    assert all(one.pointer != "art:0123456789ab" for one in done.replaced)


def test_a_page_from_our_tools_points_to_the_artifact_that_was_read(
    session: coatcheck.Session,
) -> None:
    ref = session.put(BIG * 20, name="log")
    tool = coatcheck.toolkit(session)[0]
    messages = chat(12)
    messages[3]["content"] = tool.run(pointer=ref.pointer)
    done = prune(messages, max_tokens=6_000, session=session, low_water=0.9)
    assert json.loads(done.messages[3]["content"])["artifact"] == ref.pointer


def test_arguments_of_old_calls_are_replaced_when_results_are_not_enough(
    session: coatcheck.Session,
) -> None:
    messages = chat(12, result="ok")
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps({"text": BIG + call["id"]})
    done = prune(messages, max_tokens=6_000, session=session, low_water=0.6)
    numbers = replaced_by(done, "arguments")
    assert numbers
    arguments = json.loads(done.messages[numbers[0]]["tool_calls"][0]["function"]["arguments"])
    pointer = json.loads(arguments["text"])["artifact"]
    assert (
        session.get(pointer)
        == json.loads(messages[numbers[0]]["tool_calls"][0]["function"]["arguments"])["text"]
    )
    assert any("arguments" in step for step in done.steps)


def test_thinking_is_removed_from_older_answers_but_not_from_the_current_one() -> None:
    def answer(number: int) -> dict[str, Any]:
        thinking = {"type": "thinking", "thinking": BIG, "signature": f"s{number}"}
        return {"role": "assistant", "content": [thinking, {"type": "text", "text": "ok"}]}

    messages: list[dict[str, Any]] = []
    for number in range(8):
        messages += [{"role": "user", "content": f"question {number}"}, answer(number)]
    use = {"type": "tool_use", "id": "t1", "name": "run", "input": {}}
    messages += [
        {"role": "user", "content": "now do it"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": BIG, "signature": "s"}, use],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}],
        },
    ]
    done = prune(messages, max_tokens=4_000, format="anthropic", keep_turns=0, low_water=0.9)
    assert replaced_by(done, "thinking")
    assert messages[-2] in done.messages
    assert (
        replaced_by(prune(messages, max_tokens=4_000, format="pi", keep_turns=0), "thinking") == []
    )


def test_old_pictures_become_placeholders_and_cost_what_a_picture_costs(
    session: coatcheck.Session,
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" + "A" * 200_001}
    picture = {
        "role": "user",
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "see"}],
    }
    assert IMAGE <= weigh(picture) < IMAGE + 100
    messages = [picture]
    for number in range(10):
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": f"{number} {BIG}"}]},
            {"role": "user", "content": [{"type": "text", "text": "more"}]},
        ]
    done = prune(messages, max_tokens=8_000, format="anthropic", session=session, low_water=0.9)
    assert replaced_by(done, "media") == [0]
    assert done.messages[0]["content"][0]["type"] == "text"
    assert done.messages[0]["content"][1] == picture["content"][1]


def test_whole_turns_are_folded_into_one_note_when_nothing_else_is_left(
    session: coatcheck.Session,
) -> None:
    messages = chat(40, result="short", request="the task")
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            message["content"] = f"{number}: {'words ' * 60}"
    done = prune(messages, max_tokens=2_500, session=session)
    gone = replaced_by(done, "turns")
    assert gone
    assert done.messages[:2] == messages[:2]
    note = json.loads(done.messages[2]["content"])
    kept = session.get(note["artifact"]).splitlines()
    assert [json.loads(one) for one in kept] == [messages[number] for number in gone]
    assert unpaired(done.messages, FORMATS["openai-chat"]) == []


def test_system_messages_in_the_middle_are_never_folded(session: coatcheck.Session) -> None:
    messages = chat(40, result="short")
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "words " * 60
    messages.insert(10, {"role": "developer", "content": "from now on, answer in French"})
    done = prune(messages, max_tokens=2_500, session=session)
    assert replaced_by(done, "turns")
    assert messages[10] in done.messages


def test_a_closed_store_costs_the_pointers_but_not_the_prompt(session: coatcheck.Session) -> None:
    session.store.close()
    done = prune(chat(12), max_tokens=6_000, session=session)
    assert done.tokens_after <= 6_000
    assert all(one.pointer is None for one in done.replaced)
    assert done.failures


def test_a_note_lists_artifacts_and_counts_the_rest(session: coatcheck.Session) -> None:
    messages = chat(60, result="short")
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            message["content"] = f"see {session.put(f'artifact {number}').pointer} {'words ' * 40}"
    done = prune(messages, max_tokens=3_000, session=session)
    note = json.loads(done.messages[2]["content"])
    assert note["artifacts"]
    assert note["others"] > 0
    assert weigh(done.messages[2]) <= 3_000 // 16


def test_fewer_of_the_newest_turns_are_kept_before_it_fails() -> None:
    messages = chat(5, result=BIG * 3)
    done = prune(messages, max_tokens=4_500, keep_turns=4)
    assert done.tokens_after <= 4_500
    assert any("newest" in step for step in done.steps)


def test_messages_that_cannot_fit_are_an_error() -> None:
    with pytest.raises(LimitExceeded):
        prune(chat(1, result=BIG * 50), max_tokens=1_000)
    with pytest.raises(LimitExceeded):
        prune([{"role": "system", "content": BIG * 50}], max_tokens=1_000)


@pytest.mark.parametrize("answer", [None, 0, -1, float("nan"), float("inf"), True, "7"])
def test_a_counter_that_returns_an_invalid_count_is_an_error(answer: Any) -> None:
    with pytest.raises(LimitExceeded):
        prune(chat(2), max_tokens=10_000, count=lambda text: answer)


def test_a_counter_that_raises_is_an_error() -> None:
    def fails(text: str) -> int:
        raise RuntimeError("no tokenizer")

    with pytest.raises(LimitExceeded):
        prune(chat(2), max_tokens=10_000, count=fails)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": 10, "keep_turns": -1}, {"max_tokens": 10, "low_water": 0},
                {"max_tokens": 10, "low_water": 1.5}, {"max_tokens": 10, "format": "no such"}],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        prune(chat(1), **options)


def test_an_empty_conversation_is_within_any_budget() -> None:
    assert prune([], max_tokens=1).messages == []


def test_results_of_a_providers_own_tools_keep_their_shape(session: coatcheck.Session) -> None:
    search = {"type": "web_search_tool_result", "tool_use_id": "s1",
              "content": [{"type": "web_search_result", "encrypted_content": "e" * 9_000}]}  # fmt: skip
    use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [use, search]},
    ]
    for number in range(8):
        messages += [
            {"role": "user", "content": f"{number}"},
            {"role": "assistant", "content": BIG},
        ]
    done = prune(messages, max_tokens=12_000, format="anthropic", session=session, low_water=0.95)
    assert done.messages[1] == messages[1]
    assert unpaired(messages, FORMATS["anthropic"]) == []


def test_a_clients_cache_breakpoint_stays_where_it_was(session: coatcheck.Session) -> None:
    mark = {"type": "ephemeral"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number in range(10):
        inner = [{"type": "text", "text": f"{number} {BIG}", "cache_control": mark}]
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": f"t{number}", "name": "run", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": inner}],
            },
        ]
    done = prune(messages, max_tokens=5_000, session=session, low_water=0.9)
    number = replaced_by(done, "result")[0]
    assert done.messages[number]["content"][0]["content"][0]["cache_control"] == mark


def test_if_the_store_fails_a_placeholder_has_no_pointer(backend: Backend) -> None:
    done = prune(chat(12), max_tokens=6_000, session=backend.open(quota_bytes=100).session("full"))
    assert done.failures
    assert all(one.pointer is None for one in done.replaced)


def test_a_late_result_of_a_folded_call_brings_the_call_back(session: coatcheck.Session) -> None:
    messages = chat(30, result="short")
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "words " * 60
    late = messages.pop(3)
    messages.append(late)
    done = prune(messages, max_tokens=2_500, session=session, keep_turns=1)
    assert unpaired(done.messages, FORMATS["openai-chat"]) == []
    assert late in done.messages
    assert messages[2] in done.messages
    assert replaced_by(done, "turns")


# Properties


def test_any_conversation_is_within_its_budget_and_paired_as_before(backend: Backend) -> None:
    forms = st.sampled_from(WRITTEN)

    @backend.examples()
    @given(
        conversations(odd_ids=True), forms, st.integers(40, 3_000), st.integers(0, 4), st.booleans()
    )
    def check(turns_: list[Turn], form: str, budget: int, keep: int, stored: bool) -> None:
        check_pruned(
            written(turns_, form),
            FORMATS[form],
            budget,
            keep,
            backend.new_session() if stored else None,
        )

    check()


def check_pruned(
    messages: list[Any], known: Any, budget: int, keep: int, session: coatcheck.Session | None
) -> None:
    before = copy.deepcopy(messages)
    try:
        done = prune(
            messages,
            max_tokens=budget,
            format=known,
            keep_turns=keep,
            session=session,
            count=by_length,
        )
    except LimitExceeded:
        return
    assert messages == before
    assert sum(weigh(one, by_length) for one in done.messages) == done.tokens_after <= budget
    assert sum(weigh(one, by_length) for one in messages) == done.tokens_before
    was, now = pair(messages, known), pair(done.messages, known)
    assert len(now.open) <= len(was.open)
    assert len(now.orphans) <= len(was.orphans)
    kept = [one for one in done.messages if any(one is old for old in messages)]
    assert kept == [one for one in messages if any(one is new for new in done.messages)]
    same = done.unchanged_prefix.messages
    assert done.messages[:same] == messages[:same]
    if session is not None:
        assert all(
            one.pointer and session.ref(one.pointer)
            for one in done.replaced
            if one.what != "thinking"
        )
    again = prune(
        messages, max_tokens=budget, format=known, keep_turns=keep, session=session, count=by_length
    )
    assert again.messages == done.messages


@given(conversations(max_turns=10), st.sampled_from(WRITTEN), st.integers(300, 3_000))
def test_a_growing_conversation_is_rewritten_only_after_the_room_was_used_up(
    turns_: list[Turn], form: str, budget: int
) -> None:
    messages, known = written(turns_, form), FORMATS[form]
    target = int(budget * 0.3)
    sent: list[Any] | None = None
    room = budget
    for length in range(1, len(messages) + 1):
        try:
            done = prune(messages[:length], max_tokens=budget, format=known, count=by_length)
        except LimitExceeded:
            sent, room = None, 0
            continue
        room -= weigh(messages[length - 1], by_length)
        if sent is not None and done.messages[: len(sent)] != sent:
            # The maximum size of a note is reserved.
            assert room < budget // 16 + 100, "rewritten although there was room"
            room = 0
        if sent is None or room <= 0:
            room = (
                budget - done.tokens_after
                if done.tokens_after <= target or not done.replaced
                else 0
            )
        sent = done.messages


@given(conversations(max_turns=20), st.sampled_from(WRITTEN))
def test_a_rewrite_is_reported_and_the_stable_prefix_matches_the_previous_prompt(
    turns_: list[Turn], form: str
) -> None:
    messages, known = written(turns_, form), FORMATS[form]
    begins = turns([side(one, known) for one in messages])
    try:
        done = prune(messages, max_tokens=1_000, format=known, count=by_length)
        before = (
            prune(messages[: begins[-1]], max_tokens=1_000, format=known, count=by_length)
            if begins
            else None
        )
    except LimitExceeded:
        return
    if before is not None:
        stable = done.stable_prefix.messages
        assert done.messages[:stable] == before.messages[:stable]
        assert done.rewritten == (stable < len(before.messages))
        assert done.messages[: stable + 1] != before.messages[: stable + 1] or stable == len(
            before.messages
        )


# Real conversations


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", ["claude-code/545b45d4.snapshot4", "claude-code/56de1726", "claude-code/9f26971d"]
)
def test_a_real_session_is_within_its_budget_at_every_turn_and_rarely_rewritten(
    backend: Backend, session: coatcheck.Session, corpus: Path, name: str, long_faults: bool
) -> None:
    transcript = Transcript(corpus / "transcripts" / f"{name}.jsonl", session, read_only=True)
    known = transcript.format
    messages = [_slim(one, session, known) for one in transcript.messages_for_model()]
    known_costs: dict[str, int] = {}

    def remembered(text: str) -> int:
        if text not in known_costs:
            known_costs[text] = estimate(text)
        return known_costs[text]

    sent: list[Any] = []
    points = [at for at, one in enumerate(messages) if at and side(one, known) == "assistant"]
    rewritten = 0
    for point in points[:: 12 if backend.is_fleet else 2 if long_faults else 5]:
        done = prune(
            messages[:point], max_tokens=50_000, format=known, session=session, count=remembered
        )
        assert done.tokens_after <= 50_000
        assert len(unpaired(done.messages, known)) <= len(unpaired(messages[:point], known))
        rewritten += done.messages[: len(sent)] != sent
        sent = done.messages
    assert rewritten <= max(2, len(points) * 0.02)


def _slim(message: dict[str, Any], session: coatcheck.Session, known: Any) -> dict[str, Any]:
    from coatcheck.messages.paths import at, replaced

    for result in known.results(message):
        content = at(message, result.content_path)
        message = dict(replaced(message, result.content_path, session.externalize(content).content))
    return message
