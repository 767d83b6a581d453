"""`coatcheck audit`: a table, JSON, a plot; files that are not conversations are named; nothing is
stored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from coatcheck import errors
from coatcheck.audit import Audited, Bill
from coatcheck.cli import main
from coatcheck.cli.transcript_commands import verdict
from tests.test_cli import HOSTILE, on_terminal

ROWS = "\n".join(
    f"host-{number:04}.example.org is up since {number * 37} seconds" for number in range(1_500)
)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def chat(content: str, answer: str = "Fine.", turns: int = 5) -> str:
    call = {"id": "t1", "type": "function", "function": {"name": "query", "arguments": "{}"}}
    lines: list[dict[str, Any]] = [
        {"role": "user", "content": "Is anything down?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": content},
        {"role": "assistant", "content": answer},
    ]
    lines += [
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Fine."},
    ] * turns
    return "\n".join(map(json.dumps, lines))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a session that pays off, one that does not, and a file that is not a
    session."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COATCHECK_STORE", str(tmp_path / "store"))
    made = tmp_path / "sessions"
    made.mkdir()
    (made / "large.jsonl").write_text(chat(ROWS))
    (made / "small.jsonl").write_text(chat("all hosts are up"))
    (made / "notes.json").write_text("{}")
    return made


def test_the_first_line_is_the_total_and_the_others_are_sessions_best_first(folder: Path) -> None:
    done = run(folder)
    total, best, worst = (line.split("\t") for line in done.stdout.splitlines())
    assert (total[0], best[0], worst[0]) == ("all 2", "large.jsonl", "small.jsonl")
    assert float(best[3]) < float(total[3]) < float(worst[3]) == 1.0
    assert [total[number] for number in (1, 2, 4, 5, 6)] == ["14", "1", "0", "1", "0"]
    assert best[-1] == str(folder / "large.jsonl")
    assert done.exit_code == 0


def test_a_file_that_is_not_a_conversation_is_named_on_stderr(folder: Path) -> None:
    done = run(folder)
    assert f"skipped {folder / 'notes.json'}: no recorded conversation" in done.stderr
    assert "notes.json" not in done.stdout


def test_the_verdict_says_whether_it_pays_off(folder: Path) -> None:
    assert "it pays: " in run(folder / "large.jsonl").stderr
    assert "no result is large enough" in run(folder / "small.jsonl").stderr


def test_the_verdict_says_why_it_does_not_pay_off() -> None:
    inline = Bill(cost=100.0, calls=4)
    short = Audited("a", "a", inline, Bill(cost=110.0, stubs=3, reads=3, kept_out=900))
    often = Audited("a", "a", inline, Bill(cost=110.0, stubs=3, reads=9, kept_out=900))
    assert "sessions of 4 calls are too short" in verdict(short, [short])
    assert "a stub is read 3.0 times" in verdict(often, [often])


def test_json_has_the_total_and_every_file(folder: Path) -> None:
    found = json.loads(run(folder, "--json").stdout)
    assert (found["total"]["sessions"], found["total"]["worse"]) == (2, 0)
    assert found["total"]["coatcheck"]["cost"] < found["total"]["inline"]["cost"]
    assert [Path(one["path"]).name for one in found["files"]] == [
        "large.jsonl",
        "small.jsonl",
        "notes.json",
    ]
    assert found["files"][-1]["skipped"]


def test_nothing_is_changed_or_stored(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    assert run(folder).exit_code == 0
    assert {
        path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()
    } == before


def test_the_model_determines_the_prices(folder: Path) -> None:
    usual, dearer = (
        json.loads(run(folder, "--json", *more).stdout) for more in ((), ("--model", "gpt-4o"))
    )
    assert dearer["total"]["inline"]["cost"] != usual["total"]["inline"]["cost"]
    assert "not known" in run(folder, "--model", "nonsense-9").stderr


def test_a_plot_has_a_bar_for_each_session(folder: Path) -> None:
    assert run(folder, "--plot", "cost.svg").exit_code == 0
    root = ElementTree.parse(folder.parent / "cost.svg").getroot()
    assert [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")][
        1
    ] == "small.jsonl: 1.000"


def test_without_a_path_the_folders_of_known_hosts_are_read(folder: Path) -> None:
    done = run()
    assert done.exit_code == 2
    assert "name a file or a folder" in done.stderr
    home = folder.parent / "home" / ".pi" / "agent" / "sessions"
    home.mkdir(parents=True)
    (home / "one.jsonl").write_text(chat(ROWS))
    assert run().stdout.startswith("one.jsonl\t")


def test_files_without_any_session_are_an_error(folder: Path) -> None:
    done = run(folder / "notes.json")
    assert done.exit_code == errors.CODES["invalid_argument"].exit
    assert "no recorded session" in done.stderr
    assert run(folder / "missing.jsonl").exit_code == 2


def test_names_are_escaped_on_a_terminal(folder: Path) -> None:
    names = [one.replace("/", "").replace("\0", "") for one in HOSTILE]
    for number, one in enumerate(names):
        (folder / f"{one}-{number}.jsonl").write_text(chat(ROWS))
    code, seen, _ = on_terminal("audit", str(folder))
    assert code == 0
    assert seen.split(b"\n")[0].split()[:3] == [b"sessions", b"calls", b"Coatcheck"]
    assert not any(one.encode("utf-8", "surrogateescape") in seen for one in names)


def test_links_in_a_folder_are_not_followed_and_a_pipe_does_not_block(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "theirs.jsonl").write_text(chat(ROWS))
    (folder / "link.jsonl").symlink_to(outside / "theirs.jsonl")
    (folder / "linked folder").symlink_to(outside)
    os.mkfifo(folder / "pipe.jsonl")
    done = run("--json", folder)
    found = json.loads(done.stdout)
    assert found["total"]["sessions"] == 2
    assert "theirs" not in done.stdout
    assert {"path": str(folder / "pipe.jsonl"), "skipped": "it is not a regular file"} in found[
        "files"
    ]


def test_a_link_that_is_named_is_followed(folder: Path) -> None:
    (folder.parent / "link.jsonl").symlink_to(folder / "large.jsonl")
    (folder.parent / "link").symlink_to(folder)
    for path in ("link.jsonl", "link"):
        assert run(folder.parent / path).exit_code == 0
