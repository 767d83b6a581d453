"""`coatcheck transcript` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import coatcheck
from coatcheck import errors
from tests.test_cli import answer, call, on_terminal, run
from tests.transcript.samples import LARGE, SAMPLES, as_lines


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("COATCHECK_STORE", str(folder))
    monkeypatch.delenv("COATCHECK_SESSION", raising=False)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "session.jsonl"
    path.write_bytes(as_lines(SAMPLES["claude-code"]))
    return path


def test_without_write_externalize_only_says_what_would_be_saved(file: Path, store: Path) -> None:
    before = file.read_bytes()
    result = call("transcript", "externalize", str(file))
    status, known, artifacts, size, after, tokens, path = result.stdout.rstrip("\n").split("\t")
    assert (status, known, path) == ("would shrink", "claude-code", str(file))
    assert int(artifacts) >= 4
    assert int(after) < int(size) == len(before)
    assert int(tokens) > 1_000
    assert "--write" in result.stderr
    assert file.read_bytes() == before
    assert not store.exists()


def test_with_write_externalize_shrinks_the_file_and_rehydrate_restores_its_bytes(
    file: Path, tmp_path: Path
) -> None:
    before = file.read_bytes()
    report = json.loads(answer("transcript", "externalize", "--write", "--json", str(file)))
    assert report["files"][0]["status"] == "externalized"
    assert file.stat().st_size == report["bytes_after"] < len(before)
    assert run("transcript", "rehydrate", str(file)).stdout == before
    answer("transcript", "rehydrate", str(file), "-o", str(tmp_path / "whole.jsonl"))
    assert (tmp_path / "whole.jsonl").read_bytes() == before
    assert answer("transcript", "verify", str(file)).startswith("verified\tclaude-code\t")
    assert answer("transcript", "externalize", "--write", str(file)).startswith("unchanged\t")
    answer("transcript", "rehydrate", "--in-place", str(file))
    assert file.read_bytes() == before


def test_show_lists_the_refs_and_their_places(file: Path) -> None:
    answer("transcript", "externalize", "--write", str(file))
    rows = [line.split("\t") for line in answer("transcript", "show", str(file)).splitlines()]
    assert ["6", "yes", "/toolUseResult/stdout"] in [[row[0], row[4], row[5]] for row in rows]
    first = json.loads(answer("transcript", "show", "--json", str(file)).splitlines()[0])
    assert list(first) == ["line", "artifact", "media_type", "bytes", "held", "place", "summary"]
    assert coatcheck.is_pointer(first["artifact"])
    assert answer("get", rows[-1][1]).strip() != ""


def test_undo_and_forget(file: Path) -> None:
    before = file.read_bytes()
    answer("transcript", "externalize", "--write", str(file))
    refused = call("transcript", "forget", str(file))
    assert refused.exit_code == 2
    assert "still has refs" in refused.stderr
    assert answer("transcript", "undo", str(file)).startswith("restored\t")
    assert file.read_bytes() == before
    answer("transcript", "externalize", "--write", str(file))
    assert answer("transcript", "forget", "--force", str(file)).startswith("forgotten\t")
    missing = call("transcript", "verify", str(file))
    assert missing.exit_code == errors.CODES["not_found"].exit
    assert "art:" in missing.stderr


def test_missing_artifacts_are_reported_on_stderr_and_by_the_exit_code(file: Path) -> None:
    answer("transcript", "externalize", "--write", str(file))
    answer("transcript", "forget", "--force", str(file))
    done = run("transcript", "rehydrate", str(file))
    assert done.returncode == errors.CODES["not_found"].exit
    assert b"is missing here" in done.stdout
    assert len(done.stdout.splitlines()) == len(SAMPLES["claude-code"])
    assert done.stderr.startswith(b"coatcheck: ")
    assert LARGE.encode() not in done.stdout


def test_several_files_and_folders_get_a_line_each_and_a_failure_does_not_stop_the_rest(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    for name, lines in SAMPLES.items():
        (folder / f"{name}.jsonl").write_bytes(as_lines(lines))
    result = call(
        "transcript", "externalize", "--write", str(folder), str(tmp_path / "missing.jsonl")
    )
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["externalized"] * 7 + [
        "failed"
    ]
    assert result.exit_code == 1
    assert "missing.jsonl: No such file" in result.stderr
    assert answer("transcript", "verify", "--remove-backup", str(folder)).count("verified\t") == 7
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []


def test_a_file_is_written_to_one_place_only(file: Path) -> None:
    assert call("transcript", "rehydrate", "--in-place", "-o", "x", str(file)).exit_code == 2
    assert call("transcript", "rehydrate", str(file), str(file)).exit_code == 2
    assert call("transcript", "rehydrate", str(file.parent)).exit_code == 2


def test_a_terminal_gets_a_table_and_a_progress_bar_but_no_control_sequences_of_file_names(
    tmp_path: Path,
) -> None:
    file = tmp_path / "odd\x1b[31m\u202ename.jsonl"
    file.write_bytes(as_lines(SAMPLES["pi"]) * 3)
    code, seen, _ = on_terminal("transcript", "externalize", "--write", str(file))
    assert code == 0
    assert b"externalized" in seen
    assert b"before bytes" in seen
    assert b"\x1b[31m" not in seen
    code, bar, _ = on_terminal("transcript", "verify", str(file), stream="stderr")
    assert code == 0
    assert b"verifying" in bar


def test_verify_says_how_many_files_are_sound(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("pi", "openai-chat", "anthropic"):
        (folder / f"{name}.jsonl").write_bytes(as_lines(SAMPLES[name]))
    answer("transcript", "externalize", "--write", str(folder))
    assert call("transcript", "verify", str(folder)).stderr.splitlines()[-1] == "3 files are sound"
    assert (
        call("transcript", "verify", str(folder / "pi.jsonl")).stderr.splitlines()[-1]
        == "1 file is sound"
    )
    answer("transcript", "forget", "--force", str(folder / "pi.jsonl"))
    assert "2 of 3 files are sound" in call("transcript", "verify", str(folder)).stderr


def test_undo_of_a_folder_says_that_the_files_grew(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("pi", "openai-chat"):
        (folder / f"{name}.jsonl").write_bytes(as_lines(SAMPLES[name]))
    assert "bytes less in them" in call("transcript", "externalize", "--write", str(folder)).stderr
    grown = call("transcript", "undo", str(folder)).stderr
    assert "bytes more in them" in grown
    assert "-" not in grown.splitlines()[-1]
