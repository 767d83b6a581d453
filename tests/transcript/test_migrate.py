"""Files and folders: externalized in place, rehydrated, verified, undone and forgotten."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, Session, Store, transcript
from coatcheck.errors import Damaged, InvalidArgument, StoreUnavailable
from coatcheck.transcript import migrate, swap
from tests.backends import Backend, Clock
from tests.transcript.samples import LARGE, SAMPLES, as_lines

ODD = [
    b"\n",
    b"not json\n",
    b'{"type":"message","message":{"role":"toolResult","toolCallId":"","content":[{"type":"text","text":"cut\n',
    b"\xff\xfe\x00\n",
    b"\r\n",
    as_lines([{"type": "message", "timestamp": "t", "message": {"role": "toolResult", "toolCallId": "x" * 1_500,
              "content": [{"type": "text", "text": LARGE}]}}]).replace(b"\n", b"\r\n"),
    as_lines([{"type": "message", "timestamp": "t", "message": {"role": "toolResult", "toolCallId": "x" * 1_500,
              "content": [{"type": "text", "text": LARGE}]}}])[:-1],
]  # fmt: skip


@pytest.fixture
def disk(backend: Backend) -> Store:
    return backend.open()


@pytest.fixture
def session(disk: Store) -> Session:
    return disk.session("agent")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A transcript with odd lines in the middle, and without a line end at the end."""
    path = tmp_path / "session.jsonl"
    lines = as_lines(SAMPLES["pi"]).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], *ODD[:-1], *lines[3:], ODD[-1]]))
    path.chmod(0o640)
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_600_000_000_987_654_321))
    return path


def only(report: transcript.Report) -> transcript.FileReport:
    (one,) = report.files
    return one


def whole(path: Path, store: Store) -> bytes:
    target = io.BytesIO()
    report = transcript.rehydrate(path, store, to=target)
    assert report.is_sound, report.problems
    return target.getvalue()


def result(text: str = LARGE, **more: Any) -> bytes:
    message = {
        "role": "toolResult",
        "toolCallId": "c",
        "content": [{"type": "text", "text": text}],
        **more,
    }
    return as_lines([{"type": "message", "timestamp": "t", "message": message}])


def append_line(path: Path, text: str) -> bytes:
    """Append a line as hosts do: open, append, close. Return it."""
    with path.open("ab") as out:
        out.write(line := result(text))
    return line


def beside(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir() if one.name.startswith("."))


def test_a_dry_run_says_what_would_be_saved_and_changes_nothing(
    file: Path, session: Session
) -> None:
    before = file.read_bytes()
    plan = only(transcript.externalize(file, session, dry_run=True))
    assert (plan.status, plan.format, plan.parts) == (
        "would shrink",
        "pi",
        len(before.splitlines(keepends=True)),
    )
    assert (plan.bytes_before, plan.backup) == (len(before), None)
    assert session.store.stats().artifacts == 0
    assert file.read_bytes() == before
    assert beside(file) == []
    done = only(transcript.externalize(file, session))
    assert (done.artifacts, done.bytes_after, done.tokens_saved) == (
        plan.artifacts,
        plan.bytes_after,
        plan.tokens_saved,
    )
    assert file.stat().st_size == plan.bytes_after < plan.bytes_before / 2


def test_every_byte_comes_back_and_nothing_else_about_the_file_changes(
    file: Path, session: Session
) -> None:
    before, info = file.read_bytes(), file.stat()
    report = only(transcript.externalize(file, session))
    assert report.status == "externalized"
    now = file.stat()
    assert stat.S_IMODE(now.st_mode) == 0o640
    assert (now.st_mtime_ns, now.st_uid, now.st_gid) == (info.st_mtime_ns, info.st_uid, info.st_gid)
    assert whole(file, session.store) == before
    assert report.backup is not None
    assert Path(report.backup).read_bytes() == before
    assert stat.S_IMODE(os.stat(report.backup).st_mode) == 0o600


@pytest.mark.parametrize("padding", [0, 20_000])
def test_a_result_belongs_to_the_nearest_call_before_it_if_ids_repeat(
    padding: int, tmp_path: Path, session: Session
) -> None:
    path, lines = tmp_path / "chat.jsonl", []
    for number, tool in enumerate(("alpha", "beta", "gamma")):
        function = {"name": tool, "arguments": json.dumps({"text": "x" * padding})}
        call = {"id": "call_0", "type": "function", "function": function}
        lines.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines.append({"role": "tool", "tool_call_id": "call_0", "content": f"{number} {LARGE}"})
    path.write_bytes(as_lines(lines))
    assert transcript.externalize(path, session).is_sound
    found = {
        str(session.get(ref))[0]: ref.tool
        for ref in session.list()
        if LARGE in str(session.get(ref))
    }
    assert found == {"0": "alpha", "1": "beta", "2": "gamma"}


def test_running_again_changes_nothing(file: Path, session: Session) -> None:
    transcript.externalize(file, session)
    slim, info, artifacts = file.read_bytes(), file.stat(), session.store.stats()
    assert only(transcript.externalize(file, session)).status == "unchanged"
    assert (file.read_bytes(), file.stat().st_ino, session.store.stats()) == (
        slim,
        info.st_ino,
        artifacts,
    )


def test_verify_checks_the_file_before_it_removes_the_backup(file: Path, session: Session) -> None:
    before = file.read_bytes()
    transcript.externalize(file, session)
    assert only(transcript.verify(file, session.store)).status == "verified"
    assert beside(file) == [".session.jsonl.coatcheck-backup"]
    report = only(transcript.verify(file, session.store, remove_backup=True))
    assert (report.status, report.backup, report.bytes_after) == ("verified", None, len(before))
    assert beside(file) == []
    assert only(transcript.verify(file, session.store)).status == "verified"


def test_undo_restores_the_file_and_releases_everything(file: Path, session: Session) -> None:
    before = file.read_bytes()
    transcript.externalize(file, session)
    assert only(transcript.undo(file, session.store)).status == "restored"
    assert file.read_bytes() == before
    assert beside(file) == []
    assert [one.session_id for one in session.store.sessions()] == ["agent"]
    assert only(transcript.undo(file, session.store)).status == "unchanged"


@pytest.mark.parametrize("undo", [transcript.undo, transcript.rehydrate])
def test_the_backup_and_the_artifacts_stay_if_the_restored_file_does_not_read_back(
    undo: Any, file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()
    transcript.externalize(file, session)
    replace = swap.SwapFile.replace

    def replace_badly(*args: Any, **options: Any) -> None:
        replace(*args, **options)
        file.write_bytes(b"x" + file.read_bytes()[1:])

    monkeypatch.setattr(swap.SwapFile, "replace", replace_badly)
    with contextlib.suppress(Damaged):
        undo(file, session.store)
    assert ".session.jsonl.coatcheck-backup" in beside(file)
    assert file.with_name(".session.jsonl.coatcheck-backup").read_bytes() == before
    assert len(list(session.store.sessions())) == 2


def test_undo_keeps_a_backup_with_secrets_that_was_changed_since(
    file: Path, session: Session
) -> None:
    key = "sk-ant-api03-" + "Ab3" * 31
    file.write_bytes(result("s" + LARGE + key))
    transcript.externalize(file, session, policy=Policy(max_chars=1_000, redact="store"))
    backup = file.with_name(".session.jsonl.coatcheck-backup")
    backup.write_bytes(backup.read_bytes().replace(LARGE.encode()[:20], b"another text there! ", 1))
    report = only(transcript.undo(file, session.store))
    assert report.status == "restored"
    assert key not in file.read_text()
    assert key in backup.read_text()
    assert report.backup == str(backup)


def test_lines_that_a_host_appended_are_externalized_later_and_survive_undo(
    file: Path, session: Session
) -> None:
    before = file.read_bytes()
    transcript.externalize(file, session)
    more = [
        b"\n" + result("a" + LARGE),
        result("small"),
        b'{"torn',
        b' line"}\n' + result("b" + LARGE),
    ]
    for number, lines in enumerate(more):
        with file.open("ab") as out:
            out.write(lines)
        before += lines
        assert whole(file, session.store) == before
        assert only(transcript.verify(file, session.store)).is_sound
        if number != 2:
            transcript.externalize(file, session)
        assert whole(file, session.store) == before
        assert only(transcript.verify(file, session.store)).is_sound
    assert file.stat().st_size < len(before) / 2
    assert file.with_name(".session.jsonl.coatcheck-backup").read_bytes() == before
    with file.open("ab") as out:
        out.write(result("c" + LARGE))
    assert only(transcript.undo(file, session.store)).status == "restored"
    assert file.read_bytes() == before + result("c" + LARGE)


def test_after_a_backup_was_removed_a_new_one_covers_only_later_lines(
    file: Path, session: Session
) -> None:
    before = file.read_bytes() + b"\n" + result("a" + LARGE)
    transcript.externalize(file, session)
    transcript.verify(file, session.store, remove_backup=True)
    with file.open("ab") as out:
        out.write(b"\n" + result("a" + LARGE))
    report = only(transcript.externalize(file, session))
    assert report.backup is not None
    assert Path(report.backup).read_bytes() == b"\n" + result("a" + LARGE)
    assert only(transcript.verify(file, session.store, remove_backup=True)).backup is None
    assert only(transcript.undo(file, session.store)).status == "restored"
    assert file.read_bytes() == before


def test_lines_written_to_the_old_file_are_carried_over(file: Path, session: Session) -> None:
    """A process that had the file open keeps writing to the file that has become the backup."""
    before = file.read_bytes() + b"\n"
    file.write_bytes(before)
    with file.open("ab", buffering=0) as held:
        transcript.externalize(file, session)
        held.write(result("late"))
        assert (
            "bytes were written to a file that this one replaced"
            in transcript.verify(file, session.store).problems[0]
        )
        transcript.externalize(file, session)
        assert whole(file, session.store) == before + result("late")
        assert transcript.verify(file, session.store).is_sound
        transcript.externalize(file, session)
        assert whole(file, session.store) == before + result("late")
        held.write(result("later"))
        assert only(transcript.undo(file, session.store)).status == "restored"
    assert file.read_bytes() == before + result("late") + result("later")


def test_a_line_that_a_process_writes_after_the_file_was_replaced_is_moved_by_the_next_run(
    file: Path, session: Session
) -> None:
    """Each run leaves the process with a file that has another name by now."""
    store, lines = session.store, file.read_bytes() + b"\n"
    file.write_bytes(lines)
    runs: list[Callable[[], transcript.Report]] = [
        lambda: transcript.externalize(file, session),
        lambda: transcript.externalize(
            file, session
        ),  # of the lines that were appended since the first one
        lambda: transcript.undo(file, store),
        lambda: transcript.externalize(file, session),
        lambda: transcript.rehydrate(file, store),
    ]
    for number, run in enumerate(runs):
        with file.open("ab", buffering=0) as held:
            lines += append_line(file, f"{number} " + LARGE)
            assert "another process may still write" in only(run()).note
            lines += (late := result(f"late {number}"))
            held.write(late)
        assert whole(file, store) != lines
        assert "another process" not in only(transcript.externalize(file, session)).note
        assert whole(file, store) == lines
        assert transcript.verify(file, store).is_sound
    assert transcript.undo(file, store).is_sound
    assert file.read_bytes() == lines
    assert beside(file) == []


def test_a_late_line_that_equals_another_one_is_kept(file: Path, session: Session) -> None:
    before = file.read_bytes() + b"\n"
    file.write_bytes(before)
    transcript.externalize(file, session)
    with file.open("ab", buffering=0) as held:
        transcript.undo(file, session.store)
        held.write(result("yes"))
        append_line(file, "yes")
    transcript.undo(file, session.store)
    assert file.read_bytes() == before + result("yes") * 2


def test_half_a_late_line_waits_for_its_other_half(file: Path, session: Session) -> None:
    before = file.read_bytes() + b"\n"
    file.write_bytes(before)
    transcript.externalize(file, session)
    with file.open("ab", buffering=0) as held:
        transcript.undo(file, session.store)
        held.write(result("late")[:50])
        transcript.undo(file, session.store)
        assert file.read_bytes() == before
        append_line(file, "of another process")
        held.write(result("late")[50:])
    transcript.undo(file, session.store)
    assert file.read_bytes() == before + result("of another process") + result("late")


def test_a_document_that_a_host_rewrites_after_it_was_replaced_is_kept_beside_the_file(
    tmp_path: Path, session: Session
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(before := json.dumps(SAMPLES["openai-chat"]))
    transcript.externalize(path, session)
    with path.open("r+b", buffering=0) as held:
        assert "another process" in only(transcript.undo(path, session.store)).note
        held.truncate()
        held.write(b'[{"role":"user","content":"rewritten"}]')
    for _ in range(2):
        note = only(transcript.undo(path, session.store)).note
        (old,) = path.with_name(".chat.json.coatcheck-old").iterdir()
        assert (
            f"a process rewrote the file as it was before: see '.chat.json.coatcheck-old/{old.name}'"
            in note
        )
    assert path.read_text() == before
    assert b"rewritten" in old.read_bytes()


def test_without_leases_a_replaced_file_is_kept_for_an_hour(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", unsupported)  # as on a network file system
    before = file.read_bytes() + b"\n"
    file.write_bytes(before)
    transcript.externalize(file, session)
    with file.open("ab", buffering=0) as held:
        assert "another process may still write" in only(transcript.undo(file, session.store)).note
        held.write(result("late"))
    transcript.undo(file, session.store)
    assert file.read_bytes() == before + result("late")
    assert beside(file) != []
    later = time.time() + 3_700
    monkeypatch.setattr("time.time", lambda: later)
    transcript.undo(file, session.store)
    assert file.read_bytes() == before + result("late")
    assert beside(file) == []


def test_without_hard_links_a_file_that_a_process_has_open_is_left_alone(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", unsupported)  # as on FAT
    before = file.read_bytes()
    with file.open("ab", buffering=0), pytest.raises(StoreUnavailable, match="no hard links"):
        transcript.externalize(file, session)
    assert file.read_bytes() == before
    assert only(transcript.externalize(file, session)).status == "externalized"
    slim = file.read_bytes()
    with file.open("ab", buffering=0), pytest.raises(StoreUnavailable, match="no hard links"):
        transcript.undo(file, session.store)
    assert file.read_bytes() == slim
    assert transcript.undo(file, session.store).is_sound
    assert file.read_bytes() == before
    assert beside(file) == []


def test_a_missing_artifact_is_reported_and_has_a_placeholder(file: Path, session: Session) -> None:
    before = file.read_bytes()
    transcript.externalize(file, session)
    store = session.store
    (owner,) = [
        one.session_id for one in store.sessions() if one.session_id.startswith("transcript:")
    ]
    gone = store.session(owner).list()[0]
    for info in list(store.sessions()):
        store.session(info.session_id).forget(gone)
    slim = file.read_bytes()
    target = io.BytesIO()
    report = only(transcript.rehydrate(file, store, to=target))
    assert gone.pointer in report.problems[0]
    assert b"[" + gone.pointer.encode() + b" is missing here" in target.getvalue()
    lines, found = before.split(b"\n"), target.getvalue().split(b"\n")
    assert [new for new, old in zip(found, lines, strict=True) if new != old] == [
        new for new in found if b"is missing here" in new
    ]
    assert only(transcript.verify(file, store)).status == "failed"
    assert only(transcript.verify(file, store, remove_backup=True)).backup is not None
    assert only(transcript.rehydrate(file, store)).status == "failed"
    assert file.read_bytes() == slim
    report = only(transcript.undo(file, store))
    assert (report.status, report.note[:15]) == ("restored", "from the backup")
    assert file.read_bytes() == before


def test_undo_leaves_the_file_alone_if_neither_store_nor_backup_is_complete(
    file: Path, session: Session
) -> None:
    transcript.externalize(file, session)
    transcript.verify(file, session.store, remove_backup=True)
    transcript.forget(file, session.store, force=True)
    session.end()
    slim = file.read_bytes()
    assert only(transcript.undo(file, session.store)).status == "failed"
    assert file.read_bytes() == slim


def test_an_edited_file_is_not_verified(file: Path, session: Session) -> None:
    transcript.externalize(file, session)
    file.write_bytes(file.read_bytes().replace(b"not json", b"now json"))
    report = only(transcript.verify(file, session.store))
    assert (report.status, report.note) == ("failed", "no record of the original bytes")
    with pytest.raises(InvalidArgument, match="not a backup of this file"):
        transcript.externalize(file, session)


def test_the_artifacts_of_a_transcript_outlive_every_session_and_collection(
    file: Path, store: Store, clock: Clock
) -> None:
    before = file.read_bytes()
    session = store.session("agent")
    transcript.externalize(file, session)
    shown = {ref.artifact_id for ref in session.list()}
    assert shown
    clock.advance(10**9)
    assert store.collect(grace=0).artifacts == 0
    assert {ref.artifact_id for ref in session.list()} == shown
    assert whole(file, store) == before
    session.end()
    assert session.list() == []
    assert whole(file, store) == before
    transcript.rehydrate(file, store)
    assert transcript.forget(file, store).artifacts > 0
    store.collect(grace=0)
    assert store.stats().artifacts == 0


def test_only_transcripts_that_are_gone_or_whole_can_be_forgotten(
    file: Path, session: Session
) -> None:
    transcript.externalize(file, session)
    with pytest.raises(InvalidArgument):
        transcript.forget(file, session.store)
    slim = file.read_bytes()
    file.unlink()
    assert only(transcript.forget(file, session.store)).status == "forgotten"
    assert [one.session_id for one in session.store.sessions()] == ["agent"]
    file.write_bytes(slim)
    assert only(transcript.verify(file, session.store)).status == "failed"


def test_a_file_that_was_moved_can_be_forgotten_where_it_is(file: Path, session: Session) -> None:
    transcript.externalize(file, session)
    moved = file.rename(file.with_name("archive.jsonl"))
    file.with_name(".session.jsonl.coatcheck-backup").unlink()
    assert only(transcript.verify(moved, session.store)).status == "verified"
    assert only(transcript.externalize(moved, session)).status == "unchanged"
    moved.unlink()
    assert only(transcript.forget(file, session.store)).note == "nothing to release"
    assert only(transcript.forget(moved, session.store)).note == ""


def test_artifacts_shown_to_the_model_can_be_read_in_the_agents_session(
    file: Path, session: Session
) -> None:
    transcript.externalize(file, session)
    shown = [ref for ref in session.list() if session.get(ref) == LARGE]
    stub = json.loads(
        json.loads(file.read_bytes().splitlines()[9])["message"]["content"][0]["text"]
    )
    assert stub["artifact"] == shown[0].pointer


def test_links_are_not_followed(file: Path, session: Session, tmp_path: Path) -> None:
    link = tmp_path / "folder" / "link.jsonl"
    link.parent.mkdir()
    link.symlink_to(file)
    with pytest.raises(InvalidArgument):
        transcript.externalize(link, session)
    assert transcript.externalize(link.parent, session).files == ()
    file.with_name(".session.jsonl.coatcheck-backup").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidArgument):
        transcript.externalize(file, session)
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_hard_link_to_a_file_is_kept(file: Path, session: Session) -> None:
    before = file.read_bytes()
    other = file.with_name("other name")
    os.link(file, other)
    report = only(transcript.externalize(file, session))
    assert report.backup is not None
    assert Path(report.backup).read_bytes() == other.read_bytes() == before
    assert stat.S_IMODE(other.stat().st_mode) == 0o640
    assert transcript.undo(file, session.store).is_sound
    assert file.read_bytes() == before


def test_files_that_are_not_transcripts_stay_unchanged(tmp_path: Path, session: Session) -> None:
    for name, data in (
        ("a.json", b'{"a": 1}'),
        ("b.jsonl", b""),
        ("c.json", b"[1,2"),
        ("d.jsonl", b"\x00" * 9_000),
    ):
        (tmp_path / name).write_bytes(data)
        assert only(transcript.externalize(tmp_path / name, session)).status == "no transcript"
        assert (tmp_path / name).read_bytes() == data
    with pytest.raises(FileNotFoundError):
        transcript.externalize(tmp_path / "missing.jsonl", session)
    with pytest.raises(InvalidArgument):
        transcript.externalize(tmp_path / "a.json", session, format="nonsense")


def test_a_folder_is_processed_and_one_bad_file_does_not_stop_the_rest(
    tmp_path: Path, session: Session
) -> None:
    folder = tmp_path / "sessions"
    for name, lines in SAMPLES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "one.jsonl").write_bytes(as_lines(lines))
        (folder / name / "two.json").write_text(json.dumps(lines, indent=2))
    (folder / "notes.txt").write_bytes(as_lines(SAMPLES["pi"]))
    os.mkfifo(folder / "pipe.jsonl")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = transcript.externalize(folder, session)
    assert sorted(one.status for one in report.files) == ["externalized"] * 14 + ["failed"]
    assert {one.format for one in report.files if one.format} == set(SAMPLES)
    assert report.bytes_after < report.bytes_before / 2
    assert transcript.verify(folder, session.store, remove_backup=True).problems == (
        f"{folder / 'pipe.jsonl'}: 'pipe.jsonl' is not a file (pass a transcript file, or a folder of them)",
    )
    transcript.rehydrate(folder, session.store)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_locked_by_another_process_is_left_alone(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.transcript.swap._LOCK_TIMEOUT", 0.0)
    source = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", source, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StoreUnavailable):
            transcript.externalize(file, session)
        other.communicate()
    assert transcript.externalize(file, session).is_sound


def test_lines_that_are_appended_meanwhile_are_not_lost(file: Path, session: Session) -> None:
    """Another process appends as hosts do, opening the file for each line, while it is externalized
    and restored."""
    file.write_bytes(before := file.read_bytes() + b"\n")
    source = (
        "import sys\nfor number in range(400):\n"
        " with open(sys.argv[1], 'ab') as f:\n"
        '  f.write(b\'{"type":"message","message":{"role":"user","content":"%d"}}\\n\' % number)\n'
    )
    with subprocess.Popen([sys.executable, "-c", source, str(file)]) as other:
        while other.poll() is None:
            transcript.externalize(file, session)
            transcript.undo(file, session.store)
        assert other.returncode == 0
    transcript.externalize(file, session)
    assert transcript.undo(file, session.store).is_sound
    text = file.read_bytes()
    assert text.startswith(before)
    contents = [json.loads(line)["message"]["content"] for line in text[len(before) :].splitlines()]
    assert sorted(map(int, contents)) == list(range(400))


def test_every_shared_transcript_comes_back(
    corpus: Path, tmp_path: Path, session: Session, long_faults: bool
) -> None:
    folder = tmp_path / "transcripts"

    def left_out(parent: str, names: list[str]) -> list[str]:
        """In the short form, leave out the largest files of lines."""
        paths = [Path(parent, name) for name in names if name.endswith(".jsonl")]
        return (
            [] if long_faults else [path.name for path in paths if path.stat().st_size > 2_200_000]
        )

    shutil.copytree(corpus / "transcripts", folder, copy_function=shutil.copyfile, ignore=left_out)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(before) >= (17 if long_faults else 12)
    report = transcript.externalize(folder, session)
    assert report.is_sound
    assert [one.path for one in report.files if one.status == "no transcript"] == []
    assert report.bytes_after < report.bytes_before * 0.7
    assert {one.status for one in transcript.externalize(folder, session).files} == {"unchanged"}
    assert transcript.verify(folder, session.store).is_sound
    strict = Policy(max_chars=600)
    for path, data in before.items():
        assert whole(path, session.store) == data
        if len(data) > 500_000:
            continue
        copy = tmp_path / path.name
        copy.write_bytes(data)
        assert transcript.externalize(copy, session, policy=strict).bytes_after <= len(data)
        assert transcript.undo(copy, session.store).is_sound
        assert copy.read_bytes() == data
    assert transcript.undo(folder, session.store).is_sound
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("depth", [490, 600, 900, *range(940, 1_000, 4), 100_000])
def test_a_line_that_is_nested_too_deep_passes_unchanged_and_the_rest_continues(
    depth: int, tmp_path: Path, session: Session
) -> None:
    good = json.dumps({"role": "tool", "tool_call_id": "c1", "content": LARGE}) + "\n"
    deep = f'{{"role":"tool","tool_call_id":"c2","content":{json.dumps(LARGE)},"extra":{"[" * depth + "]" * depth}}}\n'
    folder = tmp_path / "folder"
    folder.mkdir()
    files = {
        "a.jsonl": good + deep + good,
        "b.jsonl": deep,
        "c.json": f"[{good},{deep}]",
        "d.jsonl": good,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    report = transcript.externalize(folder, session)
    assert report.is_sound
    done = {Path(one.path).name: one.status for one in report.files}
    assert (done["a.jsonl"], done["d.jsonl"]) == ("externalized", "externalized")
    assert transcript.externalize(folder, session).is_sound
    assert transcript.verify(folder, session.store).is_sound
    assert whole(folder / "a.jsonl", session.store) == files["a.jsonl"].encode()
    assert transcript.undo(folder, session.store).is_sound
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


@pytest.mark.parametrize("depth", [490, 600, 900, *range(940, 1_000, 4), 100_000])
def test_a_line_that_is_nested_too_deep_is_appended_as_it_is_or_refused(
    depth: int, tmp_path: Path, session: Session
) -> None:
    good = json.dumps({"role": "tool", "tool_call_id": "c1", "content": LARGE})
    deep = f'{{"role":"tool","tool_call_id":"c2","content":{json.dumps(LARGE)},"extra":{"[" * depth + "]" * depth}}}'
    expected = [good]
    with transcript.Transcript(tmp_path / "log.jsonl", session) as log:
        log.append(good)
        with contextlib.suppress(InvalidArgument):
            log.append(deep)
            expected.append(deep)
        log.append(good)
        expected.append(good)
        assert [line.data.decode().rstrip("\n") for line in log.lines(mode="whole")] == expected


def test_a_payload_that_a_host_repeats_is_one_artifact(tmp_path: Path, session: Session) -> None:
    path, store = tmp_path / "session.jsonl", session.store
    path.write_bytes(
        as_lines([{"type": "file-history-snapshot", "toolUseResult": {"stdout": LARGE}}] * 3)
    )
    before = path.read_bytes()
    assert only(transcript.externalize(path, session, format="claude-code")).artifacts == 1
    assert [ref.path for _, ref in migrate.refs_in(path)] == [("toolUseResult", "stdout")] * 3
    assert store.stats().referenced_bytes == len(LARGE.encode())
    assert whole(path, store) == before


def test_a_file_that_cannot_be_synced_is_not_replaced(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSync:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fsync(self, handle: int) -> None:
            raise OSError("the disk is broken")

    before = file.read_bytes()
    monkeypatch.setattr(swap, "os", NoSync())
    with pytest.raises(OSError, match="broken"):
        transcript.externalize(file, session)
    assert file.read_bytes() == before
    assert beside(file) == []
    monkeypatch.undo()
    assert only(transcript.externalize(file, session)).status == "externalized"
    assert whole(file, session.store) == before
