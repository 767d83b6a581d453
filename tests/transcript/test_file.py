"""`Transcript`: appended messages stay complete whatever happens around them, and are read from
either end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Policy, Session
from coatcheck.errors import InvalidArgument, NotFound, StoreError, UnsupportedValue
from coatcheck.transcript import (
    FORMATS,
    Transcript,
    externalize,
    forget,
    rehydrate,
    undo,
    unpaired,
    verify,
)
from coatcheck.transcript.appender import TORN
from tests.backends import Backend, run_python
from tests.transcript import samples

LARGE = samples.LARGE


@pytest.fixture
def session(backend: Backend) -> Session:
    return backend.open().session("agent")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session.jsonl"


def result(content: Any = LARGE, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def whole(transcript: Transcript) -> bytes:
    return b"".join(line.data for line in transcript.lines(mode="whole"))


def test_a_message_is_appended_slim_and_comes_back_as_it_was(session: Session, path: Path) -> None:
    message = result()
    with Transcript(path, session) as transcript:
        done = transcript.append(message)
        assert [ref.path for ref in done.refs] == [("content",)]
        assert path.stat().st_size < len(LARGE) / 10
        (stored,) = transcript.lines()
        assert stored.data == path.read_bytes()
        assert stored.refs == done.refs
        (stub,) = transcript.messages()
        assert stub["content"].startswith('{"stub":')
        assert "artifactRefs" not in stub
        (restored,) = transcript.messages(mode="whole")
        assert restored == message
        assert (
            whole(transcript)
            == json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        )
        assert transcript.problems == []


def test_an_artifact_shown_to_the_model_can_be_read_by_its_pointer(
    session: Session, path: Path
) -> None:
    with Transcript(path, session) as transcript:
        done = transcript.append(result())
        stub = json.loads(next(transcript.messages())["content"])
        assert session.get(stub["artifact"]) == LARGE
        assert transcript.read(done.refs[0], lines="1:1").text == LARGE.splitlines(keepends=True)[0]
        assert transcript.read(stub["artifact"], grep="request 7 ").text.count("\n") <= 2


def test_payloads_are_moved_out_wherever_they_are(session: Session, path: Path) -> None:
    message = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "short",
        "details": {"diff": LARGE},
        "toolUseResult": {"stdout": LARGE + "!"},
        "structuredContent": {"rows": samples.ROWS},
        "unknown": {"deep": [{"field": LARGE + "?"}]},
    }
    with Transcript(path, session) as transcript:
        done = transcript.append(message)
        assert {ref.path[0] for ref in done.refs} == {
            "details",
            "toolUseResult",
            "structuredContent",
            "unknown",
        }
        assert list(transcript.messages(mode="whole")) == [message]


def test_a_stub_that_the_agent_made_stays_and_does_not_become_a_second_artifact(
    session: Session, path: Path
) -> None:
    outcome = session.externalize(LARGE, tool="run_tests", policy=Policy(preview_chars=77))
    assert outcome.ref is not None
    with Transcript(path, session) as transcript:
        done = transcript.append(result(outcome.text))
        assert [ref.id for ref in done.refs] == [outcome.ref.artifact_id]
        assert next(transcript.messages())["content"] == outcome.text
        assert next(transcript.messages(mode="whole"))["content"] == LARGE
    assert len(session.list()) == 1
    session.end()
    with Transcript(path, session.store.session("another"), read_only=True) as transcript:
        assert next(transcript.messages(mode="whole"))["content"] == LARGE, (
            "the transcript keeps it too"
        )


@pytest.mark.parametrize(
    "value", [{"rows": samples.ROWS}, bytes(range(256)) * 100], ids=["json", "bytes"]
)
def test_a_stub_of_json_or_bytes_comes_back_as_a_model_would_have_seen_it(
    session: Session, path: Path, value: Any
) -> None:
    outcome = session.externalize(value)
    inline = session.externalize(value, policy=Policy(enabled=False)).text
    with Transcript(path, session) as transcript:
        transcript.append(result([{"type": "text", "text": outcome.text}]))
        assert next(transcript.messages(mode="whole"))["content"][0]["text"] == inline


def test_text_that_only_looks_like_a_stub_comes_back_unchanged(
    session: Session, path: Path
) -> None:
    fake = '{"stub":"the result is stored","artifact":"art:0123456789ab"}'
    with Transcript(path, session) as transcript:
        assert transcript.append(result(fake)).refs == ()
        assert (
            transcript.append({"role": "user", "content": session.externalize(LARGE).text}).refs
            == ()
        )
        assert next(transcript.messages(mode="whole"))["content"] == fake


def test_the_policy_for_a_tool_recognizes_the_tool_by_its_call(
    session: Session, path: Path
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "keep", "arguments": "{}"}}
    with Transcript(path, session, policy=Policy(tools={"keep": "never"})) as transcript:
        transcript.append({"role": "assistant", "content": None, "tool_calls": [call]})
        assert transcript.append(result()).refs == ()
        assert len(transcript.append(result(call_id="c2")).refs) == 1


def test_messages_that_are_given_as_lines_keep_their_bytes(session: Session, path: Path) -> None:
    lines = [
        b'{"role" : "user",  "content":"caf\\u00e9 \\/ \xc3\xa9"}',
        b'{"role":"user","content":1e400}\r\n',
    ]
    with Transcript(path, session) as transcript:
        transcript.extend(lines)
    assert path.read_bytes() == lines[0] + b"\n" + lines[1].rstrip() + b"\n"


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        [1],
        "text",
        b"{",
        '{"a":\n1}',
        b"\xff\xfe",
        {"role": ("user",)},
        {"content": float("nan")},
        {1: 2},
    ],
)
def test_an_invalid_message_is_refused_and_nothing_is_written(
    session: Session, path: Path, message: Any
) -> None:
    with (
        Transcript(path, session) as transcript,
        pytest.raises((InvalidArgument, UnsupportedValue)),
    ):
        transcript.extend([{"role": "user", "content": "fine"}, message])
    assert not path.exists()


def test_files_are_private_to_the_owner_and_links_are_not_followed(
    session: Session, path: Path, tmp_path: Path
) -> None:
    with Transcript(path, session) as transcript:
        transcript.append(result("x"))
    assert path.stat().st_mode & 0o777 == 0o600
    target = tmp_path / "target.jsonl"
    target.write_bytes(b"{}\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    with pytest.raises(InvalidArgument):
        Transcript(link, session).append(result("x"))
    with pytest.raises(InvalidArgument):
        list(Transcript(link, session, read_only=True).lines())
    with pytest.raises(InvalidArgument):
        Transcript(tmp_path, session).append(result("x"))
    assert target.read_bytes() == b"{}\n"


def test_a_missing_transcript_is_reported(session: Session, path: Path) -> None:
    with pytest.raises(NotFound):
        Transcript(path, session, read_only=True)
    with Transcript(path, session) as transcript:
        with pytest.raises(NotFound):
            list(transcript.lines())
        assert not path.exists()


def test_a_transcript_without_a_session_can_be_viewed(session: Session, path: Path) -> None:
    with Transcript(path, session) as transcript:
        transcript.append(result())
    alone = Transcript(path)
    assert next(alone.messages())["content"].startswith('{"stub"')
    for refused in (
        lambda: alone.append(result()),
        lambda: list(alone.lines(mode="whole")),
        lambda: alone.read("art:0"),
    ):
        with pytest.raises(InvalidArgument):
            refused()


# Damage


def test_a_torn_last_line_is_moved_aside_when_the_file_is_next_opened(
    session: Session, path: Path
) -> None:
    with Transcript(path, session) as transcript:
        transcript.append(result("one"))
    before = path.read_bytes()
    path.write_bytes(before + b'{"role":"tool","content":"half a l')
    with Transcript(path, session) as transcript:
        (problem,) = transcript.problems
        assert (problem.kind, problem.offset) == ("torn", len(before))
        assert path.read_bytes() == before
        transcript.append(result("two"))
        assert [one["content"] for one in transcript.messages()] == ["one", "two"]
    aside = path.with_name(f".{path.name}{TORN}")
    assert aside.read_bytes() == b'{"role":"tool","content":"half a l\n'
    assert aside.stat().st_mode & 0o777 == 0o600


def test_a_complete_last_line_without_a_line_end_stays(session: Session, path: Path) -> None:
    path.write_bytes(b'{"role":"user","content":"one"}')
    with Transcript(path, session) as transcript:
        assert transcript.problems == []
        assert [one["content"] for one in transcript.messages()] == ["one"]
        transcript.append({"role": "user", "content": "two"})
        assert [one["content"] for one in transcript.messages()] == ["one", "two"]


@pytest.mark.parametrize(
    "text",
    ['{\n "messages": [\n  {"role": "user"}\n ]\n}', '[\n{"role":"user","content":"a"},\n{"role":"user"}\n]',
     "a text\nof lines", '{\n "messages": [\n  {', "# notes\n{unfinished"],
)  # fmt: skip
def test_nothing_is_moved_out_of_a_file_that_is_not_a_transcript_of_lines(
    session: Session, path: Path, text: str
) -> None:
    path.write_text(text)
    Transcript(path, session).close()
    assert path.read_text() == text


def test_a_line_that_a_power_cut_filled_with_nul_bytes_is_torn_too(
    session: Session, path: Path
) -> None:
    path.write_bytes(b'{"role":"user","content":"one"}\n' + bytes(100))
    with Transcript(path, session) as transcript:
        assert [problem.kind for problem in transcript.problems] == ["torn"]
        assert len(list(transcript.lines())) == 1


def test_a_reader_moves_nothing_and_reports_a_torn_line(session: Session, path: Path) -> None:
    data = b'{"role":"user","content":"one"}\n{"role":"us'
    path.write_bytes(data)
    transcript = Transcript(path, session, read_only=True)
    assert [one["content"] for one in transcript.messages()] == ["one"]
    assert [problem.kind for problem in transcript.problems] == ["torn"]
    assert (
        b"".join(line.data for line in transcript.lines(mode="whole")) == data == path.read_bytes()
    )


def test_broken_lines_in_the_middle_are_kept_unchanged_and_reported(
    session: Session, path: Path
) -> None:
    lines = [
        b'{"role":"user","content":"a"}',
        b"not json",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"role":"user","content":"b"}',
    ]
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(data)
    with Transcript(path, session) as transcript:
        transcript.append({"role": "user", "content": "c"})
        for mode in ("stored", "stubs", "whole"):
            assert b"".join(line.data for line in transcript.lines(mode=mode)).startswith(data)
        assert [one["content"] for one in transcript.messages()] == ["a", "b", "c"]
        assert [problem.kind for problem in transcript.problems] == ["broken"] * 3


def test_a_missing_artifact_becomes_a_placeholder_and_is_reported(
    session: Session, path: Path
) -> None:
    with Transcript(path, session) as transcript:
        done = transcript.append({**result(), "details": {"rows": samples.ROWS}})
        transcript.append(result("next"))
        own = session.store.session(done.refs[0].session)
        for ref in done.refs:
            own.forget(ref.id)
        session.end()
        first, second = transcript.messages(mode="whole")
        assert done.refs[0].pointer in first["content"]
        assert "missing" in first["details"] or done.refs[1].pointer in str(first["details"])
        assert second["content"] == "next"
        assert sorted((one.kind, one.pointer) for one in transcript.problems) == sorted(
            ("missing", ref.pointer) for ref in done.refs
        )


def test_an_artifact_that_the_transcripts_session_lost_is_read_from_the_agents(
    session: Session, path: Path
) -> None:
    with Transcript(path, session) as transcript:
        done = transcript.append(result())
        session.store.session(done.refs[0].session).end()
        assert next(transcript.messages(mode="whole"))["content"] == LARGE
        assert transcript.problems == []


def test_if_the_store_fails_the_line_is_written_whole(backend: Backend, path: Path) -> None:
    with Transcript(path, backend.open(quota_bytes=1_000).session("agent")) as transcript:
        done = transcript.append(result())
        assert done.refs == ()
        assert [problem.kind for problem in transcript.problems] == ["not stored"]
        assert next(transcript.messages())["content"] == LARGE


def test_a_full_disk_leaves_the_file_as_it_was(session: Session, path: Path) -> None:
    with Transcript(path, session) as transcript:
        transcript.append(result("one"))
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
        try:
            with pytest.raises(StoreError) as caught:
                transcript.append(result("x" * 300))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert caught.value.code == "store_full"
        assert path.read_bytes() == before
        transcript.append(result("two"))
        assert [one["content"] for one in transcript.messages()] == ["one", "two"]


# Concurrent writers


def test_threads_append_whole_lines(session: Session, path: Path) -> None:
    with Transcript(path, session) as transcript:
        workers = [
            threading.Thread(
                target=lambda n=n: [transcript.append(result(f"{n} {i}")) for i in range(40)]
            )
            for n in range(6)
        ]
        for one in workers:
            one.start()
        for one in workers:
            one.join()
        found = [one["content"] for one in transcript.messages()]
    assert sorted(found) == sorted(f"{n} {i}" for n in range(6) for i in range(40))
    for n in range(6):
        assert [one for one in found if one.startswith(f"{n} ")] == [f"{n} {i}" for i in range(40)]


def test_processes_append_whole_lines(path: Path, lasting: Backend) -> None:
    code = (
        "import sys, coatcheck\n"
        "from coatcheck.transcript import Transcript\n"
        "with coatcheck.open(sys.argv[1], durability='process') as store:\n"
        "    with Transcript(sys.argv[2], store.session('agent')) as transcript:\n"
        "        for i in range(60):\n"
        "            text = f'{sys.argv[3]} {i} ' + ('a log line\\n' * 2000 if i % 7 == 0 else '')\n"
        "            transcript.append({'role': 'tool', 'tool_call_id': str(i), 'content': text})\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, lasting.url, str(path), str(n)])
        for n in range(3)
    ]
    assert [one.wait(120) for one in workers] == [0, 0, 0]
    with Transcript(path, lasting.open().session("agent")) as transcript:
        found = [
            one["content"].split(" a log")[0].strip() for one in transcript.messages(mode="whole")
        ]
        assert transcript.problems == []
    for n in range(3):
        assert [one for one in found if one.startswith(f"{n} ")] == [f"{n} {i}" for i in range(60)]


def test_a_forked_process_has_its_own_lock(session: Session, path: Path, folder: Backend) -> None:
    code = (
        "import os, sys, coatcheck\n"
        "from coatcheck.transcript import Transcript\n"
        "store = coatcheck.open(sys.argv[1], durability='process')\n"
        "transcript = Transcript(sys.argv[2], store.session('agent'))\n"
        "transcript.append({'role': 'user', 'content': 'first'})\n"
        "child = os.fork()\n"
        "for i in range(100):\n"
        "    transcript.append({'role': 'user', 'content': f'{bool(child)} {i}'})\n"
        "if not child:\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    run_python(code, folder.url, path)
    with Transcript(path, session) as transcript:
        assert len(list(transcript.messages())) == 201
        assert transcript.problems == []


def test_appends_go_to_the_file_that_replaced_the_old_one(session: Session, path: Path) -> None:
    with Transcript(path, session) as transcript:
        transcript.append(result("one"))
        fresh = path.with_name("fresh")
        fresh.write_bytes(path.read_bytes())
        os.replace(fresh, path)
        transcript.append(result("two"))
        assert [one["content"] for one in transcript.messages()] == ["one", "two"]
        path.unlink()
        transcript.append(result("three"))
        assert [one["content"] for one in transcript.messages()] == ["three"]


@pytest.mark.parametrize("act", ["open", "append"])
def test_a_line_that_a_host_is_still_writing_is_neither_cut_nor_moved_aside(
    session: Session, path: Path, act: str
) -> None:
    """A file grows page by page while one write is under way."""
    line = b'{"role":"user","content":"one"}\n'
    transcript = Transcript(path, session)
    path.write_bytes(line * 9)
    with path.open("ab", buffering=0) as host:
        host.write(line[:20])
        rest = threading.Timer(0.03, host.write, [line[20:]])
        rest.start()
        if act == "open":
            Transcript(path, session).close()
        else:
            transcript.append({"role": "user", "content": "one"})
        rest.join()
    transcript.close()
    assert path.read_bytes() == line * (11 if act == "append" else 10)


def test_a_migration_and_appends_at_the_same_time_lose_nothing(
    session: Session, path: Path
) -> None:
    first = [json.dumps(result(f"{n} {LARGE}", f"h{n}")) + "\n" for n in range(10)]
    path.write_text("".join(first))
    done = threading.Event()

    def append() -> None:
        with Transcript(path, session) as transcript:
            for n in range(150):
                transcript.append(result(f"{n} " + (LARGE if n % 10 == 0 else ""), f"a{n}"))
        done.set()

    worker = threading.Thread(target=append)
    worker.start()
    while not done.is_set():
        assert externalize(path, session).is_sound
    worker.join()
    with Transcript(path, session) as transcript:
        ids = [one["tool_call_id"] for one in transcript.messages(mode="whole")]
        assert [one for one in ids if one[0] == "h"] == [f"h{n}" for n in range(10)]
        assert [one for one in ids if one[0] == "a"] == [f"a{n}" for n in range(150)]
        assert transcript.problems == []
    assert verify(path, session.store).is_sound


def test_a_file_that_was_slim_in_part_is_made_slim_verified_and_undone(
    session: Session, path: Path
) -> None:
    """An old transcript is continued and externalized only afterwards, so its backup has slim lines
    too."""
    store, first = (
        session.store,
        [json.dumps(result(f"{n} {LARGE}", f"h{n}")) + "\n" for n in range(3)],
    )
    path.write_text("".join(first))
    with Transcript(path, session) as transcript:
        transcript.append(result(LARGE, "a0"))
    found = path.read_bytes()
    for number in (1, 2, 3):
        assert externalize(path, session).is_sound
        assert verify(path, store).is_sound
        with path.open("a") as other:
            other.write(json.dumps(result(f"late {number} {LARGE}", f"l{number}")) + "\n")
        with Transcript(path, session) as transcript:
            transcript.append(result(f"{number} {LARGE}", f"b{number}"))
    backup = path.with_name(f".{path.name}.coatcheck-backup").read_bytes()
    assert backup.startswith(found)
    assert undo(path, store).is_sound
    ids = [json.loads(line)["tool_call_id"] for line in path.read_text().splitlines()]
    assert ids == ["h0", "h1", "h2", "a0", "l1", "b1", "l2", "b2", "l3", "b3"]
    assert all(LARGE in json.loads(line)["content"] for line in path.read_text().splitlines())
    assert not path.with_name(f".{path.name}.coatcheck-backup").exists()


def test_an_appended_transcript_is_verified_and_made_whole_like_any_other(
    session: Session, path: Path
) -> None:
    store = session.store
    with Transcript(path, session) as transcript:
        transcript.append(result())
    with Transcript(path, session) as transcript:  # a second run continues with the same session
        done = transcript.extend([result(LARGE + "2"), result("small")])
    sessions = {
        one.session_id for one in store.sessions() if one.session_id.startswith("transcript:")
    }
    assert {ref.session for one in done for ref in one.refs} == sessions
    assert verify(path, store).is_sound
    session.end()
    expected = b"".join(
        json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        for one in (result(), result(LARGE + "2"), result("small"))
    )
    with Transcript(path, session) as transcript:
        assert whole(transcript) == expected
    assert rehydrate(path, store).is_sound
    assert path.read_bytes() == expected


def test_forgetting_an_appended_transcript_releases_its_artifacts(
    session: Session, path: Path
) -> None:
    with Transcript(path, session) as transcript:
        done = transcript.append(result())
    session.end()
    assert session.store.session(done.refs[0].session).get(done.refs[0].pointer) == LARGE
    path.unlink()
    assert forget(path, session.store).is_sound
    assert session.store.session(done.refs[0].session).get(done.refs[0].pointer) is None


# Ranges


@pytest.mark.parametrize("end", [b"\n", b""])
def test_lines_are_sliced_as_a_list_would_be(session: Session, path: Path, end: bytes) -> None:
    lines = [
        json.dumps({"role": "user", "content": "x" * (number * 977 % 5_000)}).encode()
        for number in range(300)
    ]
    path.write_bytes(b"\n".join(lines) + end)
    transcript = Transcript(path, session, read_only=True)
    ends = [line + b"\n" for line in lines[:-1]] + [lines[-1] + end]
    for start in (None, 0, 1, 299, 300, 400, -1, -2, -100, -300, -500):
        for stop in (None, 0, 5, 299, 300, -1, -50, -300, -500):
            found = [line.data for line in transcript.lines(start, stop)]
            assert found == ends[start:stop], (start, stop)


def test_messages_are_sliced_by_number_from_either_end(session: Session, path: Path) -> None:
    lines: list[bytes] = []
    for number in range(120):
        lines.append(json.dumps({"role": "user", "content": str(number)}).encode())
        lines += [b'{"type":"note"}', b"broken"][: number % 3]
    path.write_bytes(b"\n".join(lines) + b"\n")
    transcript = Transcript(path, session, read_only=True)
    every = [str(number) for number in range(120)]
    for start, stop in (
        (None, None),
        (0, 5),
        (-3, None),
        (-100, -90),
        (None, -119),
        (5, -110),
        (-500, None),
        (119, None),
    ):
        assert [one["content"] for one in transcript.messages(start, stop)] == every[start:stop], (
            start,
            stop,
        )


def test_a_document_is_read_as_one_line_and_not_appended_to(session: Session, path: Path) -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(5)]
    path.write_text(json.dumps({"messages": messages}, indent=1))
    with Transcript(path, session) as transcript:
        assert len(list(transcript.lines())) == 1
        assert list(transcript.messages(-2)) == messages[-2:]
        assert transcript.messages_for_model() == messages
        with pytest.raises(InvalidArgument):
            transcript.append(messages[0])


def test_reading_the_tail_of_a_long_transcript_does_not_load_the_rest(tmp_path: Path) -> None:
    """A small version of the benchmark: the last messages of 64 MB are read."""
    path = tmp_path / "long.jsonl"
    line = json.dumps({"role": "user", "content": "y" * 8_000}).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(8_000):
            file.write(line)
        file.write(b'{"role":"user","content":"last"}\n')
    code = (
        "import sys, resource\n"
        "from coatcheck.transcript import Transcript\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "transcript = Transcript(sys.argv[1])\n"
        "assert [one['content'] for one in transcript.messages(-100)][-1] == 'last'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    assert int(run_python(code, path)) < 40 * 1_024


# Messages for a model


@pytest.mark.parametrize(
    "form", sorted(vars(samples).keys() & {"openai_chat", "openai_responses", "anthropic"})
)
def test_messages_for_a_model_have_stubs_in_the_shape_that_the_provider_expects(
    session: Session, path: Path, form: str
) -> None:
    given_messages = getattr(samples, form)()
    with Transcript(path, session) as transcript:
        transcript.extend(given_messages)
        sent = transcript.messages_for_model()
        assert transcript.format is FORMATS[form.replace("_", "-")]
        assert len(sent) == len(given_messages)
        assert len(json.dumps(sent)) < len(json.dumps(given_messages)) / 2
        assert "artifactRefs" not in json.dumps(sent)
        assert unpaired(sent, transcript.format) == unpaired(given_messages, transcript.format)
        assert list(transcript.messages(mode="whole")) == given_messages


def as_sent(messages: list[dict[str, Any]]) -> bytes:
    """Return the bytes of a conversation: each message as compact JSON on its own line."""
    return b"".join(
        json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        for one in messages
    )


def test_the_messages_for_a_snapshot_are_a_prefix_of_those_for_the_next(
    corpus: Path, tmp_path: Path, session: Session
) -> None:
    sent: list[bytes] = []
    for number in (1, 2, 3, 4):
        raw = (corpus / f"transcripts/claude-code/545b45d4.snapshot{number}.jsonl").read_bytes()
        with Transcript(tmp_path / f"{number}.jsonl", session) as transcript:
            transcript.extend(raw.splitlines())
            sent.append(as_sent(transcript.messages_for_model()))
            assert whole(transcript).rstrip(b"\n") == raw.rstrip(b"\n")
    assert all(later.startswith(earlier) for earlier, later in pairwise(sent))


def test_real_sessions_are_paired_except_for_unanswered_calls(
    corpus: Path, session: Session
) -> None:
    for path in sorted((corpus / "transcripts").glob("*/*.jsonl")):
        transcript = Transcript(path, session, read_only=True)
        problems = transcript.unpaired()
        assert all(one.endswith("has no result") for one in problems), path
        calls = {call.id for one in transcript.messages() for call in transcript.format.calls(one)}
        answered = {
            one.call_id
            for message in transcript.messages()
            for one in transcript.format.results(message)
        }
        assert len(problems) == len(calls - answered), path


def test_a_compaction_of_the_host_is_applied_on_request(corpus: Path, session: Session) -> None:
    path = corpus / "transcripts/claude-code/545b45d4.snapshot2.jsonl"
    transcript = Transcript(path, session, read_only=True)
    after = transcript.messages_for_model(compacted=True)
    assert len(after) < len(transcript.messages_for_model()) / 4
    assert after[0]["content"].startswith("This session is being continued")
    assert transcript.unpaired(compacted=True) == []


# Properties

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
LARGE_TEXTS = st.builds(
    lambda text, times: text * times, st.text(min_size=1, max_size=20), st.integers(1, 2_000)
)
VALUES = st.recursive(
    SCALARS | LARGE_TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": VALUES},
    optional={"details": VALUES, "artifactRefs": VALUES, "tool_call_id": st.text(max_size=2_000)},
)


def test_any_appended_messages_come_back(
    backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @backend.examples()
    @given(st.lists(MESSAGES, max_size=6), st.integers(0, 6))
    def check(messages: list[dict[str, Any]], cut: int) -> None:
        check_appended(
            backend.new_session(), tmp_path_factory.mktemp("any") / "session.jsonl", messages, cut
        )

    check()


def check_appended(session: Session, path: Path, messages: list[dict[str, Any]], cut: int) -> None:
    policy = Policy(max_chars=400)
    with Transcript(path, session, policy=policy, format="openai-chat") as transcript:
        for one in messages[:cut]:
            transcript.append(one)
    with Transcript(path, session, policy=policy, format="openai-chat") as transcript:
        transcript.extend(messages[cut:])
        if not messages:
            return
        assert [line.value for line in transcript.lines(mode="whole")] == messages
        assert transcript.problems == []
        stubs = [line.value for line in transcript.lines(mode="stubs")]
        assert [one["role"] for one in stubs] == [one["role"] for one in messages]
        for count in range(len(messages) + 1):
            tail = [line.value for line in transcript.lines(-count, mode="whole")] if count else []
            assert tail == messages[len(messages) - count :]
