"""`coatcheck hot`: the hot state of a session, its history and what changed, in pipes, on terminals
and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import errors
from coatcheck.context import HotState, claim
from tests.test_cli import HOSTILE, STEERING, answer, call, on_terminal, run

SECRET = "ghp_" + "a1B2c3D4e5F6" * 3


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("COATCHECK_SESSION", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COATCHECK_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def write(
    store: Path, *states: dict[str, Any], holder: str = "dispatcher", session_id: str = "s"
) -> None:
    with coatcheck.open(store) as opened, claim(opened.session(session_id), holder) as claimed:
        for state in states:
            claimed.write(HotState.parse({"session_id": session_id} | state))


THREE = (
    {"objective": "fix it", "constraints": ["no new table"]},
    {"objective": "fix it", "constraints": ["no new table", "be quick"], "risk_level": "medium"},
    {
        "objective": "fix it",
        "constraints": ["be quick"],
        "risk_level": "medium",
        "artifact_index": [
            {
                "artifact_id": "a" * 64,
                "type": "log",
                "label": "out",
                "version": 2,
                "summary": "2 failed",
            }
        ],
    },
)


def test_the_newest_state_is_printed_with_one_value_per_line(store: Path) -> None:
    write(store, *THREE)
    shown = run("hot", "s")
    assert shown.stdout.decode().splitlines() == [
        "session_id\ts", "risk_level\tmedium", "objective\tfix it", "constraints\tbe quick",
        "artifact_index\tart:aaaaaaaaaaaa log v2 out: 2 failed",
    ]  # fmt: skip
    assert shown.stderr.startswith(b"in a prompt: ")
    assert answer("hot", "s", "2").splitlines()[3:] == [
        "constraints\tno new table",
        "constraints\tbe quick",
    ]


def test_a_state_as_json_contains_its_cost_in_a_prompt(store: Path) -> None:
    write(store, *THREE, holder="me")
    record = json.loads(answer("hot", "s", "--json"))
    assert (record["number"], record["holder"], record["steps"]) == (3, "me", [])
    assert record["state"]["artifact_index"][0]["artifact_id"] == "art:aaaaaaaaaaaa"
    assert 20 < record["tokens"] < 200
    write(store, {"open_questions": [f"question {n}" for n in range(1_000)]})
    assert json.loads(answer("hot", "s", "--json"))["steps"][0].startswith("open_questions: newest")


def test_the_budget_comes_from_the_settings(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, *THREE)
    monkeypatch.setenv("COATCHECK_BUDGET_MAX_HOT_STATE_TOKENS", "3")
    record = json.loads(answer("hot", "s", "--json"))
    assert record["tokens"] is None
    assert "max_hot_state_tokens (3)" in record["steps"][0]
    assert b"max_hot_state_tokens (3)" in run("hot", "s").stderr


def test_the_history_lists_states_and_what_each_changed(store: Path) -> None:
    write(store, *THREE)
    rows = [line.split("\t") for line in answer("hot", "s", "--history").splitlines()]
    assert [(row[0], *row[2:]) for row in rows] == [
        ("3", "dispatcher", "medium", "1", "constraints, artifact_index"),
        ("2", "dispatcher", "medium", "0", "risk_level, constraints"),
        ("1", "dispatcher", "low", "0", "-"),
    ]
    limited = [
        json.loads(line)
        for line in answer("hot", "s", "--history", "--limit", "2", "--json").splitlines()
    ]
    assert [(row["number"], row["changed"]) for row in limited] == [
        (3, ["constraints", "artifact_index"]), (2, ["risk_level", "constraints"]),
    ]  # fmt: skip


def test_a_diff_compares_the_last_two_states_or_the_given_ones(store: Path) -> None:
    write(store, *THREE)
    last = answer("hot", "s", "--diff")
    assert last.splitlines() == [
        "- constraints: no new table", "+ artifact_index: art:aaaaaaaaaaaa log v2 out: 2 failed",
    ]  # fmt: skip
    assert answer("hot", "s", "--diff", "2", "3") == answer("hot", "s", "2", "3", "--diff") == last
    assert answer("hot", "s", "--diff", "2") == last
    back = json.loads(answer("hot", "s", "--diff", "2", "1", "--json"))
    assert back == {
        "from": 2, "to": 1, "changes": [
            {"field": "risk_level", "removed": ["medium"], "added": ["low"]},
            {"field": "constraints", "removed": ["be quick"], "added": []},
        ],
    }  # fmt: skip
    same = run("hot", "s", "--diff", "2", "2")
    assert (same.returncode, same.stdout) == (0, b"")
    assert b"no difference" in same.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("s", "1", "2"),
        ("s", "--history", "1"),
        ("s", "--history", "--diff"),
        ("s", "--diff", "1", "2", "3"),
        ("s", "0"),
        (),
    ],
)
def test_wrong_usage_is_reported(store: Path, args: tuple[str, ...]) -> None:
    write(store, *THREE)
    assert call("hot", *args).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [("nobody",), ("nobody", "--history"), ("nobody", "--diff"), ("s", "9"), ("s", "--diff", "9"),
     ("s", "--diff", "1", "9"), ("first", "--diff")],
)  # fmt: skip
def test_missing_sessions_and_states_are_not_found(store: Path, args: tuple[str, ...]) -> None:
    write(store, *THREE)
    write(store, {}, session_id="first")
    result = call("hot", *args)
    assert result.exit_code == errors.CODES["not_found"].exit
    assert result.stdout == ""
    with coatcheck.open(store) as opened:
        assert {info.session_id for info in opened.sessions()} == {"s", "first"}


def test_the_session_may_come_from_the_environment(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, *THREE)
    monkeypatch.setenv("COATCHECK_SESSION", "s")
    assert answer("hot") == answer("hot", "s")


def test_a_store_given_as_an_option_must_exist(tmp_path: Path) -> None:
    assert (
        call("hot", "s", "--store", str(tmp_path / "nowhere")).exit_code
        == errors.CODES["store_unavailable"].exit
    )
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("args", [(), ("--history",), ("--diff",)])
def test_text_in_a_state_cannot_control_a_terminal_or_break_a_line(
    store: Path, args: tuple[str, ...]
) -> None:
    hostile = "".join(HOSTILE) + "\ttab\nline"
    entry = {"artifact_id": "a" * 64, "type": "log", "label": hostile, "summary": hostile}
    write(
        store,
        {},
        {"objective": hostile, "constraints": [hostile], "artifact_index": [entry]},
        holder=hostile,
    )
    code, seen, _ = on_terminal("hot", "s", *args)
    assert code == 0
    text = seen.decode()
    for style in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m"):
        text = text.replace(style, "")
    assert not STEERING & set(text) - {"\n"}
    piped = run("hot", "s", *args).stdout.decode()
    assert not STEERING & set(piped) - {"\n"}
    assert all(line.count("\t") <= 5 for line in piped.splitlines())
    assert all(line.replace("\t", "").isprintable() for line in piped.splitlines())


def test_a_secret_in_a_state_is_shown_nowhere(store: Path) -> None:
    write(store, {}, {"objective": f"use {SECRET}", "open_questions": [SECRET]}, holder=SECRET)
    for args in (
        (),
        ("--history",),
        ("--diff",),
        ("--json",),
        ("--history", "--json"),
        ("--diff", "--json"),
    ):
        shown = call("hot", "s", *args)
        assert shown.exit_code == 0
        assert SECRET not in shown.stdout + shown.stderr


def test_an_invalid_state_does_not_hide_the_others(store: Path) -> None:
    write(store, *THREE)
    with coatcheck.open(store) as opened:
        session = opened.session("s")
        session.record("hot", b"from somewhere else", token=session.claim("a"))
    assert call("hot", "s").exit_code == errors.CODES["damaged"].exit
    rows = [line.split("\t") for line in answer("hot", "s", "--history").splitlines()]
    assert [(row[0], row[-1]) for row in rows[:2]] == [
        ("4", "cannot be read"),
        ("3", "constraints, artifact_index"),
    ]
    assert answer("hot", "s", "3")
