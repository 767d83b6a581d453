"""The `[policy]` of a settings file applies to every way in which a transcript moves payloads
out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Session
from coatcheck.transcript import Transcript, externalize, prune, safeguard

SECRET = "ghp_" + "A1b2C3d4E5" * 3 + "f6G7h8"
LOG = f"line of a log, token {SECRET}\n" * 900

Open = Callable[[str], Session]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return a function that opens a session of a store beside a settings file with the given
    policy."""
    monkeypatch.chdir(tmp_path)
    stores = []

    def open_with(policy: str) -> Session:
        (tmp_path / "coatcheck.toml").write_text(f"[policy]\n{policy}\n")
        stores.append(coatcheck.open(tmp_path / "store"))
        return stores[-1].session("agent")

    yield open_with
    for one in stores:
        one.close()


def chat(content: str = LOG, tool: str = "env") -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
        *(
            {"role": role, "content": f"words {n}"}
            for n in range(8)
            for role in ("assistant", "user")
        ),
    ]


def migrated(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path = Path("migrated.jsonl")
    path.write_text("".join(json.dumps(one) + "\n" for one in messages))
    externalize(path, session)
    return [json.loads(line) for line in path.read_text().splitlines()]


def appended(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with Transcript("appended.jsonl", session) as log:
        log.extend(messages)
        assert not log.problems
    return [json.loads(line) for line in Path("appended.jsonl").read_text().splitlines()]


def stored(session: Session) -> str:
    """Return everything in the store as one text."""
    store = session.store
    holders = [store.session(one.session_id) for one in store.sessions()]
    return "\n".join(str(one.get(ref)) for one in holders for ref in one.list())


WAYS = pytest.mark.parametrize("way", [migrated, appended], ids=["externalize", "append"])
Way = Callable[[Session, list[dict[str, Any]]], list[dict[str, Any]]]


@WAYS
def test_secrets_are_masked_in_payloads_moved_out_of_a_file(opened: Open, way: Way) -> None:
    session = opened('redact = "store"')
    assert SECRET not in json.dumps(way(session, chat()))
    assert "line of a log" in stored(session)
    assert SECRET not in stored(session)


@WAYS
def test_a_tool_has_its_own_limit_in_a_file(opened: Open, way: Way) -> None:
    session = opened('[policy.tools]\nread_file = "never"\ngrep = {max_chars = 1000}')
    assert way(session, chat(tool="read_file"))[2]["content"] == LOG
    assert json.loads(way(session, chat(LOG[:2_000], tool="grep"))[-17]["content"])["stub"]


@WAYS
def test_nothing_leaves_a_file_if_the_policy_is_not_enabled(opened: Open, way: Way) -> None:
    session = opened("enabled = false")
    assert way(session, chat()) == chat()
    assert stored(session) == ""


def test_pruning_masks_secrets_before_it_stores(opened: Open) -> None:
    session = opened('redact = "store"')
    done = prune(chat(), max_tokens=1_000, session=session)
    assert done.replaced[0].pointer is not None
    assert "line of a log" in session.get(done.replaced[0].pointer)
    assert SECRET not in stored(session)


def test_pruning_spares_results_of_a_tool_set_to_never_if_others_are_enough(opened: Open) -> None:
    session = opened('[policy.tools]\nread_file = "never"')
    messages = [*chat(LOG[:6_000], tool="read_file"), *chat(LOG[:9_000]), *chat("ok")]
    done = prune(messages, max_tokens=6_000, session=session)
    assert 2 not in {one.message for one in done.replaced}
    assert done.messages[2] is messages[2]


def test_pruning_works_even_if_the_policy_is_not_enabled(opened: Open) -> None:
    session = opened("enabled = false")
    done = prune(chat(), max_tokens=1_000, session=session)
    assert done.replaced
    assert done.tokens_after <= 1_000


def test_the_safeguard_follows_the_policy_of_the_settings_file(opened: Open) -> None:
    session = opened('redact = "store"\n[policy.tools]\nread_file = "never"')
    assert safeguard(chat(tool="read_file"), session).refs == ()
    assert safeguard(chat(), session).refs
    assert SECRET not in stored(session)


def test_the_safeguard_stores_nothing_if_the_policy_is_not_enabled(opened: Open) -> None:
    session = opened("enabled = false")
    assert safeguard(chat(), session).refs == ()
    assert stored(session) == ""
