"""A pointer in a transcript opens as long as the transcript exists, whatever happens to the agent's
session."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck import Policy, Session, Store, toolkit, transcript
from coatcheck.context import recall
from coatcheck.errors import Expired, NotFound
from coatcheck.transcript import Transcript
from tests.backends import TWINS, Backend, Clock

LOG = "2026-01-02 03:04:05 INFO request took 7 ms\n" * 2_000
WEEKS = 30 * 86_400.0


def write(path: Path, *results: str) -> Path:
    """Write a transcript of OpenAI messages with these results."""
    lines: list[dict[str, object]] = [{"role": "user", "content": "Which requests were slow?"}]
    for number, result in enumerate(results):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "read_log", "arguments": "{}"},
        }
        lines.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pointers(path: Path) -> list[str]:
    """Return the pointers of the stubs in a transcript, as they are sent to a model."""
    with Transcript(path, read_only=True) as log:
        results = [one for one in log.messages_for_model() if one["role"] == "tool"]
    return [json.loads(one["content"])["artifact"] for one in results]


def pass_time(store: Store, clock: Clock) -> None:
    """Let every session expire, and collect everything that has expired, including tombstones."""
    clock.advance(WEEKS)
    store.collect(grace=0)
    clock.advance(WEEKS)
    store.collect(grace=0)


@pytest.fixture
def agent(store: Store) -> Session:
    return store.session("agent")


def test_a_pointer_of_an_externalized_transcript_opens_after_the_session_has_expired(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG, LOG * 4)
    transcript.externalize(path, agent)
    small, large = pointers(path)
    clock.advance(3_601)
    for session in (agent, store.session("agent")):
        assert session.get(small) == LOG
        assert session.get(large) == LOG * 4
    pass_time(store, clock)
    session = store.session("agent")
    assert session.get(small) == LOG
    assert session.read(large, lines="1:1").text.count("INFO") == 1
    assert "INFO" in toolkit(session)[0].run(pointer=small)
    assert {ref.pointer for ref in session.list()} == {small, large}
    assert {ref.pointer for ref in session.list(limit=1)} <= {small, large}


def test_a_stub_that_was_appended_opens_after_the_session_has_expired(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    stub = agent.externalize(LOG, tool="read_log").text
    path = tmp_path / "session.jsonl"
    with Transcript(path, agent) as log:
        log.append({"role": "tool", "tool_call_id": "c1", "content": stub})
        log.append({"role": "tool", "tool_call_id": "c2", "content": LOG * 2})
    pass_time(store, clock)
    assert [store.session("agent").get(one) for one in pointers(path)] == [LOG, LOG * 2]


def test_a_stub_of_a_parents_artifact_opens_in_the_child_that_recorded_it(
    tmp_path: Path, store: Store, clock: Clock
) -> None:
    ref = store.session("parent").put(LOG)
    child = store.session("child", parent="parent")
    path = tmp_path / "session.jsonl"
    with Transcript(path, child) as log:
        log.append({"role": "tool", "tool_call_id": "c1", "content": child.externalize(ref).text})
    pass_time(store, clock)
    assert store.session("child").get(ref.pointer) == LOG
    assert store.session("parent").get(ref.pointer) is None


def test_a_child_reads_the_artifacts_in_the_transcript_of_its_parent(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    pass_time(store, clock)
    assert store.session("child", parent="agent").get(pointers(path)[0]) == LOG


def test_no_other_session_reads_the_artifacts_of_a_transcript(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    pointer = pointers(path)[0]
    pass_time(store, clock)
    assert store.session("other").get(pointer) is None
    with pytest.raises(NotFound) as caught:
        store.session("other").open(pointer)
    assert caught.value.code == "not_found"


def test_payloads_that_no_model_was_shown_are_not_readable_in_the_session(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = tmp_path / "session.jsonl"
    message = {"role": "tool", "tool_call_id": "c1", "content": "done", "artifact": LOG}
    path.write_text(json.dumps(message) + "\n")
    (report,) = transcript.externalize(path, agent).files
    assert report.artifacts == 1
    assert agent.list() == []
    pass_time(store, clock)
    assert store.session("agent").list() == []


def test_after_undo_or_forget_of_the_transcript_the_usual_time_to_live_applies(
    tmp_path: Path, store: Store, clock: Clock
) -> None:
    for name, let_go in (("undo", transcript.undo), ("forget", transcript.forget)):
        session = store.session(name)
        path = write(tmp_path / f"{name}.jsonl", LOG)
        transcript.externalize(path, session)
        pointer = pointers(path)[0]
        clock.advance(30 * 86_400 + 1)
        assert session.get(pointer) == LOG
        clock.advance(30 * 86_400 + 1)
        if name == "forget":
            path.unlink()
        let_go(path, store)
        with pytest.raises(Expired) as caught:
            session.open(pointer)
        assert caught.value.code == "expired"
    store.collect(grace=0)
    assert store.stats().artifacts == 0


def test_an_artifact_in_two_transcripts_opens_until_both_are_gone(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    paths = [write(tmp_path / f"{number}.jsonl", LOG) for number in (1, 2)]
    for path in paths:
        transcript.externalize(path, agent)
    (pointer,) = pointers(paths[0])
    pass_time(store, clock)
    transcript.undo(paths[0], store)
    assert store.session("agent").get(pointer) == LOG
    transcript.undo(paths[1], store)
    store.collect(grace=0)
    assert store.session("agent").get(pointer) is None


def test_an_artifact_that_a_session_forgets_stays_forgotten_although_its_transcript_has_it(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG, LOG * 2)
    before = path.read_bytes()
    transcript.externalize(path, agent)
    first, second = pointers(path)
    assert agent.forget(first) is True
    assert agent.get(first) is None
    pass_time(store, clock)
    session = store.session("agent")
    assert session.get(first) is None
    assert session.get(second) == LOG * 2
    assert session.forget(second) is True
    assert session.get(second) is None
    assert session.forget(second) is False
    transcript.rehydrate(path, store)
    assert path.read_bytes() == before


def test_a_session_that_ended_reads_nothing_until_its_transcript_is_externalized_again(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG, LOG * 2)
    transcript.externalize(path, agent)
    found = pointers(path)
    agent.end()
    assert [agent.get(one) for one in found] == [None, None]
    assert store.session("agent").list() == []
    (report,) = transcript.externalize(path, agent).files
    assert report.status == "unchanged"
    assert [agent.get(one) for one in found] == [LOG, LOG * 2]
    refs = store.stats().refs
    transcript.externalize(path, agent)
    assert store.stats().refs == refs
    pass_time(store, clock)
    assert [store.session("agent").get(one) for one in found] == [LOG, LOG * 2]


def test_a_session_with_another_name_continues_with_a_transcript(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    with path.open("ab") as file:
        file.write(
            json.dumps({"role": "tool", "tool_call_id": "c9", "content": LOG * 2}).encode() + b"\n"
        )
    pass_time(store, clock)
    (report,) = transcript.externalize(path, store.session("next")).files
    assert report.status == "externalized"
    pass_time(store, clock)
    found = pointers(path)
    assert [store.session("next").get(one) for one in found] == [LOG, LOG * 2]
    assert [store.session("agent").get(one) for one in found] == [LOG, None]


def test_the_artifacts_of_a_transcript_can_be_pinned_and_granted(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    (pointer,) = pointers(path)
    pass_time(store, clock)
    session = store.session("agent")
    assert session.pin(pointer).pinned
    session.grant(pointer, to="other")
    assert store.session("other").get(pointer) == LOG
    transcript.undo(path, store)
    pass_time(store, clock)
    assert store.session("agent").get(pointer) == LOG


def test_a_pointer_in_a_transcript_never_opens_another_artifact_with_the_same_prefix(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    stub = agent.externalize(TWINS[0], policy=Policy(max_chars=1)).text
    with Transcript(tmp_path / "session.jsonl", agent) as log:
        log.append({"role": "tool", "tool_call_id": "c0", "content": stub})
    (ref,) = agent.list()
    clock.advance(3_601)
    store.collect(grace=0)
    other = agent.put(TWINS[1])
    assert agent.get(ref) == TWINS[0]
    assert agent.get(other) == TWINS[1]
    assert agent.get(other.pointer) == TWINS[1]
    assert agent.get("art:" + ref.artifact_id[:13]) == TWINS[0]


def test_the_command_line_opens_a_pointer_of_a_transcript_long_afterwards(
    tmp_path: Path, folder: Backend
) -> None:
    store = folder.open(clock=Clock(1_000_000.0))
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, store.session("agent"))
    folder.close()
    command = [
        sys.executable,
        "-m",
        "coatcheck",
        "get",
        "--store",
        folder.url,
        "--session",
        "agent",
        pointers(path)[0],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, LOG)


def test_stubs_that_a_host_wrote_itself_open_after_the_session_has_expired(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    stub = agent.externalize("ERROR timeout\n" * 5_000, tool="read_log").text
    path = write(tmp_path / "session.jsonl", LOG, stub)
    before = path.read_bytes()
    transcript.externalize(path, agent)
    pass_time(store, clock)
    session = store.session("agent")
    assert [session.get(one) for one in pointers(path)] == [LOG, "ERROR timeout\n" * 5_000]
    transcript.undo(path, store)
    assert path.read_bytes() == before
    store.collect(grace=0)
    assert store.stats().artifacts == 0


def test_stubs_open_after_the_session_has_expired_even_if_nothing_else_leaves_the_file(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    stub = agent.externalize(LOG, tool="read_log").text
    path = write(tmp_path / "session.jsonl", stub, "a small result")
    before = path.read_bytes()
    for _ in range(2):
        report = transcript.externalize(path, agent)
        assert [file.status for file in report.files] == ["unchanged"]
    assert path.read_bytes() == before
    assert (
        len([info for info in store.sessions() if info.session_id.startswith("transcript:")]) == 1
    )
    pass_time(store, clock)
    pointer = json.loads(stub)["artifact"]
    assert store.session("agent").get(pointer) == LOG
    transcript.externalize(path, store.session("agent"))
    assert store.session("agent").get(pointer) == LOG
    transcript.forget(path, store)
    assert store.session("agent").get(pointer) is None


def test_artifacts_that_a_transcript_lends_are_listed_in_pages_found_and_recalled(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    texts = [f"result {number} mentions topic{number}\n" + LOG for number in range(5)]
    path = write(tmp_path / "session.jsonl", *texts)
    transcript.externalize(path, agent)
    pass_time(store, clock)
    session = store.session("agent")
    kept, newest = session.put(texts[2]), session.put("something new")
    listed = [ref.artifact_id for ref in session.artifacts()]
    assert listed[:2] == [newest.artifact_id, kept.artifact_id]
    assert sorted(listed) == sorted(ref.artifact_id for ref in session.list())
    assert len(listed) == 6
    for size in (1, 2, 3, 5):
        walked: list[str] = []
        while page := session.artifacts(after=walked[-1] if walked else None, limit=size):
            walked += [ref.artifact_id for ref in page]
        assert walked == listed
    with pytest.raises(NotFound):
        session.artifacts(after="0" * 64)
    assert session.get(session.search("topic3")[0].ref) == texts[3]
    assert "topic4" in toolkit(session)[1].run(query="topic4")
    assert session.count() == 6
    assert pointers(path)[4] in recall(session, "what about topic4?").text
    pass_time(store, clock)
    assert store.session("agent").count() == 5
    assert len(store.session("agent").search("topic0")) == 1


def test_a_search_does_not_find_artifacts_of_other_transcripts(
    tmp_path: Path, store: Store, agent: Session
) -> None:
    transcript.externalize(write(tmp_path / "one.jsonl", "quokka\n" + LOG), agent)
    transcript.externalize(write(tmp_path / "two.jsonl", "wallaby\n" + LOG), store.session("other"))
    assert len(agent.search("quokka")) == 1
    assert agent.search("wallaby") == []
    assert len(agent.artifacts()) == agent.count() == 1


def pruned_messages(session: Session) -> tuple[list[dict[str, object]], list[str]]:
    """Return a pruned conversation and the pointers of its placeholders."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Which requests were slow?"}]
    for number in range(20):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "read_log", "arguments": "{}"},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        page = f"page {number}\n" + "GET /login 200 31 ms\n" * 100
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": page})
    pruned = transcript.prune(messages, max_tokens=9_000, session=session)
    found = [one.pointer for one in pruned.replaced if one.pointer]
    assert len(found) > 3
    return pruned.messages, found


@pytest.mark.parametrize("how", ["appended", "externalized", "externalized with a payload"])
def test_placeholders_of_a_pruned_conversation_open_after_the_session_has_expired(
    tmp_path: Path, store: Store, agent: Session, clock: Clock, how: str
) -> None:
    messages, found = pruned_messages(agent)
    path = tmp_path / "session.jsonl"
    if how == "appended":
        with Transcript(path, agent) as log:
            log.extend(messages)
            assert list(log.messages()) == messages
    else:
        more = [{"role": "tool", "tool_call_id": "c99", "content": LOG}] if "payload" in how else []
        path.write_text("".join(json.dumps(one) + "\n" for one in [*messages, *more]))
        for _ in range(2):
            transcript.externalize(path, agent)
    pass_time(store, clock)
    session = store.session("agent")
    assert [one for one in found if session.get(one) is None] == []
    session.end()
    assert [one for one in found if session.get(one) is not None] == []
    transcript.externalize(path, session)
    assert [one for one in found if session.get(one) is None] == []
    transcript.forget(path, store, force=True)
    store.collect(grace=0)
    assert store.stats().artifacts == 0


@pytest.mark.parametrize("how", ["appended", "externalized"])
def test_pointers_in_answers_of_our_tools_open_after_the_session_has_expired(
    tmp_path: Path, store: Store, agent: Session, clock: Clock, how: str
) -> None:
    rows = agent.put([{"id": number, "text": "x" * 30} for number in range(3_000)])
    get, _, keep = toolkit(agent)
    derived = get.run(pointer=rows.pointer, query="$[*].text")
    kept = keep.run(name="note", value="my finding " * 30)
    answers = [derived, kept, f"As I said:\nart:{rows.artifact_id[:20]} has them."]
    found = [one for text in answers for one in re.findall(r"art:[0-9a-f]{12,64}", text)]
    assert len(set(found)) >= 4
    path = tmp_path / "session.jsonl"
    if how == "appended":
        with Transcript(path, agent) as log:
            for number, text in enumerate(answers):
                log.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
    else:
        transcript.externalize(write(path, *answers), agent)
    pass_time(store, clock)
    assert [one for one in found if store.session("agent").get(one) is None] == []


def test_a_pointer_that_the_session_cannot_open_keeps_nothing_alive(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    secret = store.session("other").put("secret " * 100).pointer
    path = tmp_path / "session.jsonl"
    line = {"role": "tool", "tool_call_id": "c1", "content": f"see {secret} and art:0123456789ab"}
    with Transcript(path, agent) as log:
        log.append(line)
    transcript.externalize(path, agent)
    assert json.loads(path.read_text()) == line
    assert [one for one in store.sessions() if one.session_id.startswith("transcript:")] == []
    assert agent.get(secret) is None


def test_a_line_with_very_many_pointers_is_searched_within_a_bound(
    tmp_path: Path, agent: Session
) -> None:
    ref = agent.put("kept " * 100)
    text = " ".join([ref.pointer, *(f"art:{number:012x}" for number in range(50_000))])
    path = tmp_path / "session.jsonl"
    with Transcript(path, agent, policy=Policy(enabled=False)) as log:
        log.append({"role": "user", "content": text})
        assert [one["content"] for one in log.messages()] == [text]
    assert [one.pointer for one in agent.lent()] == [ref.pointer]


def test_sessions_are_found_among_many(store: Store) -> None:
    for number in range(600):
        store.session(f"s{number}").put(f"a text of {number}")
    ref = store.session("last").put("a text of 7")
    assert sorted(store.holders(ref.pointer)) == ["last", "s7"]
    found = store.find(ref.pointer)
    assert found is not None
    assert found[0].get(found[1]) == "a text of 7"
    assert store.find("art:ffffffffffff") is None


def test_the_sessions_that_have_an_artifact_are_named_before_those_of_transcripts(
    tmp_path: Path, store: Store, agent: Session
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    (pointer,) = pointers(path)
    first, second = store.holders(pointer)
    assert first == "agent"
    assert second.startswith("transcript:")
    assert store.holders(pointer, limit=1) == ["agent"]
