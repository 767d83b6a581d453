"""`Policy(files=folder)`: results as files for agents that read files, and stubs that name them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, errors
from tests.backends import Clock

LOG = "".join(f"2026-01-01 12:00:{n % 60:02} INFO request {n} took {n} ms\n" for n in range(900))
ROWS = {"rows": [{"id": n, "name": f"user {n}"} for n in range(900)]}
HTML = "<!doctype html><html><body>" + "<p>one paragraph of it</p>" * 500 + "</body></html>"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(30_000)
CSV = "id,name\n" + "".join(f"{n},user {n}\n" for n in range(2_000))
SECRET = "ghp_" + "Ab3dE5" * 6
ALL = ("grep", "sed", "jq", "python3")


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "project" / ".coatcheck"


def stub_of(session: Session, value: object, folder: Path, **policy: Any) -> dict[str, Any]:
    policy = {"max_tokens": 300, "read_tool": None, "commands": ALL} | policy
    outcome = session.externalize(value, tool="t", policy=Policy(files=folder, **policy))
    found: dict[str, Any] = json.loads(outcome.text)
    return found


def test_a_stub_names_the_file_of_the_result_first_and_a_command_that_reads_it(
    session: Session, folder: Path
) -> None:
    stub = stub_of(session, LOG, folder)
    file = Path(stub["file"])
    assert list(stub)[:4] == ["stub", "file", "artifact", "kind"]
    assert file.read_text() == LOG
    assert file.parent == folder
    assert file.name == stub["artifact"].removeprefix("art:") + ".log"
    assert str(file) in stub["hint"]
    assert "get_artifact" not in json.dumps(stub)


def test_the_file_and_its_folder_are_private_read_only_and_ignored_by_git(
    session: Session, folder: Path
) -> None:
    file = Path(stub_of(session, LOG, folder)["file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    subprocess.run(["git", "init", "-q", folder.parent], check=True)
    listed = subprocess.run(
        ["git", "-C", folder.parent, "status", "--porcelain", "-uall"],
        check=True, capture_output=True,
    )  # fmt: skip
    assert listed.stdout == b""


@pytest.mark.parametrize(
    ("value", "ending"),
    [(LOG, "log"), (ROWS, "json"), (CSV, "csv"), (HTML, "html"), (PNG, "png")],
)
def test_the_ending_of_a_file_follows_from_its_content(
    session: Session, folder: Path, value: object, ending: str
) -> None:
    assert stub_of(session, value, folder)["file"].endswith(f".{ending}")


@pytest.mark.parametrize("value", [LOG, ROWS, CSV, [1] * 3_000, "one long line " * 900])
@pytest.mark.parametrize("commands", [ALL, ("grep",), ("sed", "python3"), ("grep", "sed")])
def test_the_command_of_a_hint_works_as_it_is(
    session: Session, folder: Path, value: object, commands: tuple[str, ...]
) -> None:
    if missing := [one for one in commands if shutil.which(one) is None]:
        pytest.skip(f"{missing} is not installed")
    hint = stub_of(session, value, folder, commands=commands)["hint"]
    command, found, _ = hint.partition(" reads it")
    if not found:
        assert hint.startswith("the file has all that is stored")
        return
    assert command.split()[0] in commands
    done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout
    assert not done.stderr


def test_a_hint_names_only_programs_that_this_machine_has(
    session: Session, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/sed" if name == "sed" else None)
    assert Policy(files=folder).commands == ("sed",)
    assert stub_of(session, LOG, folder, commands=None)["hint"].startswith("sed ")


def test_a_stub_says_where_secrets_are_masked(session: Session, folder: Path) -> None:
    text = f"the token is {SECRET} today\n" * 200
    stub = stub_of(session, text, folder)
    assert "secrets are masked in the preview, not in the file" in stub["hint"]
    assert SECRET in Path(stub["file"]).read_text()
    stub = stub_of(session, text, folder, redact="store")
    assert "secrets are masked in the file too" in stub["hint"]
    assert SECRET not in Path(stub["file"]).read_text()


def test_equal_results_have_equal_stubs_and_one_file(session: Session, folder: Path) -> None:
    first = stub_of(session, LOG, folder)
    inode = Path(first["file"]).stat().st_ino
    assert stub_of(session, LOG, folder) == first
    assert Path(first["file"]).stat().st_ino == inode


@pytest.mark.parametrize("change", ["removed", "edited", "linked", "writable"])
def test_a_file_that_is_gone_or_changed_is_written_again(
    session: Session, folder: Path, tmp_path: Path, change: str
) -> None:
    file = Path(stub_of(session, LOG, folder)["file"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of the user")
    file.chmod(0o600)
    if change == "edited":
        file.write_text("something else")
    if change in ("removed", "linked"):
        file.unlink()
    if change == "linked":
        file.symlink_to(elsewhere)
    stub_of(session, LOG, folder)
    assert file.read_text() == LOG
    assert not file.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    assert elsewhere.read_text() == "of the user"


def test_forgetting_an_artifact_removes_its_file(session: Session, folder: Path) -> None:
    stub = stub_of(session, LOG, folder)
    other = stub_of(session, ROWS, folder)
    session.forget(stub["artifact"])
    assert not Path(stub["file"]).exists()
    assert Path(other["file"]).exists()


def test_a_file_stays_as_long_as_another_session_has_the_artifact(
    store: Store, folder: Path
) -> None:
    one, two = store.session("one"), store.session("two")
    file = Path(stub_of(one, LOG, folder)["file"])
    stub_of(two, LOG, folder)
    one.end()
    assert file.exists()
    two.end()
    assert not file.exists()


def test_collecting_removes_the_files_of_expired_artifacts(
    store: Store, folder: Path, clock: Clock
) -> None:
    session = store.session("short", ttl=60)
    file = Path(stub_of(session, LOG, folder)["file"])
    kept = Path(stub_of(store.session("long", ttl=None), CSV, folder)["file"])
    clock.advance(61)
    store.collect(grace=0)
    assert not file.exists()
    assert kept.exists()


def test_collecting_removes_what_a_killed_process_left_in_the_folder(
    store: Store, folder: Path
) -> None:
    file = Path(stub_of(store.session("s"), LOG, folder)["file"])
    old, new = folder / f".{'a' * 32}", folder / f".{'b' * 32}"
    old.write_text("half of")
    new.write_text("half of")
    os.utime(old, (0, 0))
    store.collect()
    assert not old.exists()
    assert new.exists()
    assert file.exists()


def test_another_process_removes_the_files_too(tmp_path: Path, folder: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        file = Path(stub_of(store.session("s"), LOG, folder)["file"])
    with coatcheck.open(tmp_path / "store") as store:
        store.session("s").end()
    assert not file.exists()


@pytest.mark.parametrize("planted", ["link", "file", "other files", "ignore", "ignore link"])
def test_a_planted_folder_is_left_alone_and_the_stub_names_no_file(
    session: Session, folder: Path, tmp_path: Path, planted: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.parent.mkdir()
    if planted == "link":
        folder.symlink_to(elsewhere)
    elif planted == "file":
        folder.write_text("a file")
    else:
        folder.mkdir()
    if planted == "other files":
        (folder / "notes.txt").write_text("of the user")
    if planted == "ignore":
        (folder / ".gitignore").write_text("!*\n")
    if planted == "ignore link":
        (folder / ".gitignore").symlink_to(elsewhere / "target")
    before = sorted(folder.iterdir()) if folder.is_dir() else []
    stub = stub_of(session, LOG, folder)
    assert "file" not in stub
    assert stub["hint"].startswith("ask for less")
    assert os.listdir(elsewhere) == []
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before
    with pytest.raises(errors.InvalidArgument, match="cannot have files of artifacts"):
        session.write_file(stub["artifact"], folder)


def test_the_folder_of_one_store_is_refused_to_another(tmp_path: Path, folder: Path) -> None:
    with coatcheck.open(tmp_path / "one") as one, coatcheck.open(tmp_path / "two") as two:
        file = Path(stub_of(one.session("s"), LOG, folder)["file"])
        assert "file" not in stub_of(two.session("s"), CSV, folder)
        two.collect()
        assert file.exists()


def test_a_folder_that_cannot_be_written_costs_only_the_file(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    stub = stub_of(session, LOG, tmp_path / "file" / "folder")
    assert "file" not in stub
    assert session.get(stub["artifact"]) == LOG


def test_an_executor_needs_no_tool_of_ours_for_files(session: Session, folder: Path) -> None:
    def report() -> str:
        return LOG

    executor = ToolExecutor(session, [report], policy=Policy(files=folder, max_tokens=300))
    stub = json.loads(executor.run(ToolCall("c", "report")).text)
    assert Path(stub["file"]).read_text() == LOG
    assert "get_artifact" not in stub["hint"]


def test_every_large_block_of_a_result_has_a_file(session: Session, folder: Path) -> None:
    blocks = [{"type": "text", "text": LOG}, {"type": "text", "text": CSV}]
    policy = Policy(files=folder, max_tokens=300)
    outcome = session.externalize(blocks, tool="t", policy=policy)
    files = [json.loads(block["text"])["file"] for block in outcome.content]
    assert [Path(file).read_text() for file in files] == [LOG, CSV]


def test_a_stored_artifact_and_a_stream_have_files(session: Session, folder: Path) -> None:
    ref = session.put(LOG)
    assert Path(stub_of(session, ref, folder)["file"]).read_text() == LOG


@pytest.mark.parametrize("files", ["", "a\0b", "a\nb", 3, "x" * 400])
def test_an_invalid_folder_is_an_error_of_the_policy(files: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="files"):
        Policy(files=files)


def test_a_relative_folder_is_shown_as_it_was_given(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stub = stub_of(session, LOG, Path(".coatcheck"))
    assert stub["file"].startswith(".coatcheck/")
    assert (tmp_path / stub["file"]).read_text() == LOG


def test_a_store_in_memory_removes_its_folder_when_it_is_closed(folder: Path) -> None:
    with coatcheck.open("memory:") as store:
        file = Path(stub_of(store.session("s"), LOG, folder)["file"])
        assert file.exists()
    assert not folder.exists()


def test_a_stub_with_a_file_is_the_same_in_every_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with coatcheck.open("memory:") as store:
            stubs.append(stub_of(store.session(name), LOG, Path(".coatcheck")))
    assert stubs[0] == stubs[1]


def test_a_hint_quotes_the_path_of_a_folder_with_blanks_and_quotes(
    session: Session, tmp_path: Path
) -> None:
    stub = stub_of(session, LOG, tmp_path / 'Ann\'s $(touch files) "here"', commands=("sed",))
    command = stub["hint"].partition(" reads it")[0]
    done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout == "".join(LOG.splitlines(keepends=True)[:80])
    assert not (tmp_path / "files").exists()


def test_many_threads_write_the_same_file_without_harm(session: Session, folder: Path) -> None:
    pointer = session.put(LOG).pointer
    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(lambda _: session.write_file(pointer, folder), range(64)))
    (path,) = paths
    assert path.read_text() == LOG
    assert sorted(one.name for one in folder.iterdir()) == [".gitignore", path.name]
