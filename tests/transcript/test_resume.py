"""A pointer in a transcript opens as long as the transcript exists, whatever became of the agent's session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck import Policy, Session, Store, toolkit, transcript
from coatcheck.errors import Expired, NotFound
from coatcheck.transcript import Transcript
from tests.backends import TWINS, Backend, Clock

LOG = "2026-01-02 03:04:05 INFO request took 7 ms\n" * 2_000
WEEKS = 30 * 86_400.0


def write(path: Path, *results: str) -> Path:
    """A transcript of OpenAI's messages with these results."""
    lines: list[dict[str, object]] = [{"role": "user", "content": "Which requests were slow?"}]
    for number, result in enumerate(results):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read_log", "arguments": "{}"}}
        lines.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pointers(path: Path) -> list[str]:
    """The pointers of the stubs in a transcript, as a model is sent them."""
    with Transcript(path, read_only=True) as log:
        results = [one for one in log.messages_for_model() if one["role"] == "tool"]
    return [json.loads(one["content"])["artifact"] for one in results]


def pass_time(store: Store, clock: Clock) -> None:
    """Let every session expire, and everything that has expired go, tombstones too."""
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


def test_a_stub_of_a_parents_artifact_opens_in_the_child_that_wrote_it_down(
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


def test_a_child_reads_what_the_transcript_of_its_parent_has(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    pass_time(store, clock)
    assert store.session("child", parent="agent").get(pointers(path)[0]) == LOG


def test_no_other_session_reads_what_a_transcript_holds(
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


def test_what_no_model_was_shown_is_not_the_sessions_to_read(
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
        clock.advance(3_601)
        assert session.get(pointer) == LOG
        clock.advance(3_601)
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


def test_what_a_session_forgets_stays_forgotten_though_its_transcript_has_it(
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


def test_a_session_with_another_name_goes_on_with_a_transcript(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, agent)
    with path.open("ab") as file:
        file.write(json.dumps({"role": "tool", "tool_call_id": "c9", "content": LOG * 2}).encode() + b"\n")
    pass_time(store, clock)
    (report,) = transcript.externalize(path, store.session("next")).files
    assert report.status == "externalized"
    pass_time(store, clock)
    found = pointers(path)
    assert [store.session("next").get(one) for one in found] == [LOG, LOG * 2]
    assert [store.session("agent").get(one) for one in found] == [LOG, None]


def test_what_a_transcript_holds_can_be_pinned_and_granted(
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


def test_a_pointer_in_a_transcript_never_opens_another_artifact_that_begins_alike(
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


def test_the_command_line_opens_a_pointer_of_a_transcript_long_after(tmp_path: Path, folder: Backend) -> None:
    store = folder.open(clock=Clock(1_000_000.0))
    path = write(tmp_path / "session.jsonl", LOG)
    transcript.externalize(path, store.session("agent"))
    folder.close()
    command = [sys.executable, "-m", "coatcheck", "get", "--store", folder.url, "--session", "agent", pointers(path)[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, LOG)


def test_stubs_that_a_host_wrote_down_itself_open_after_the_session_has_expired(
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


def test_stubs_open_after_the_session_has_expired_though_nothing_else_leaves_the_file(
    tmp_path: Path, store: Store, agent: Session, clock: Clock
) -> None:
    stub = agent.externalize(LOG, tool="read_log").text
    path = write(tmp_path / "session.jsonl", stub, "a small result")
    before = path.read_bytes()
    for _ in range(2):
        report = transcript.externalize(path, agent)
        assert [file.status for file in report.files] == ["unchanged"]
    assert path.read_bytes() == before
    assert len([info for info in store.sessions() if info.session_id.startswith("transcript:")]) == 1
    pass_time(store, clock)
    pointer = json.loads(stub)["artifact"]
    assert store.session("agent").get(pointer) == LOG
    transcript.externalize(path, store.session("agent"))
    assert store.session("agent").get(pointer) == LOG
    transcript.forget(path, store)
    assert store.session("agent").get(pointer) is None


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
