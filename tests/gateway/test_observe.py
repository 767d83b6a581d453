"""`observe`: bytes pass unchanged in both directions, and every call is recorded."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx2
import pytest

from coatcheck import Session, Store
from coatcheck.context.metrics import calls_of
from tests.gateway.provider import Provider, Say, Think, Use, turn
from tests.gateway.talking import BIG, KEYS, Chat, Talk, post, serving

ODD = b'{"model" : "m","max_tokens":9,\n "messages":[{"role":"user","content":"\\u0041\\ud83d\\ude00 \\u00e9"}], "x": 1.0, "big": 123456789012345678901}'


def recorded(store: Store) -> list[dict[str, Any]]:
    """The recorded calls of all sessions, oldest first."""
    sessions = [store.session(info.session_id) for info in store.sessions()]
    return [
        json.loads(one.body) for session in sessions for one in session.records("gateway:calls")
    ]


def test_bytes_pass_unchanged_in_both_directions(store: Store) -> None:
    answer = b'{"id":"msg_1","content":[],"odd" : 1.00, "usage":{}}'
    with Provider([turn(raw=answer)], is_lenient=True) as provider, serving(store, provider) as url:
        response = post(
            url, "/v1/messages?beta=true", ODD, **{"anthropic-beta": "a,b", "x-other": "kept"}
        )
        assert response.content == answer
        assert response.headers["request-id"] == "req_1"
        seen = provider.seen[0]
        assert seen.raw == ODD
        assert seen.query == "beta=true"
        assert {name: seen.headers[name] for name in ("anthropic-beta", "x-other", "x-api-key", "authorization")} == {
            "anthropic-beta": "a,b", "x-other": "kept", "x-api-key": "sk-test", "authorization": "Bearer sk-test",
        }  # fmt: skip
        assert not [name for name in seen.headers if name.startswith("x-coatcheck")]
        assert seen.headers["host"] in provider.url


def test_a_stream_passes_live(store: Store) -> None:
    """The client gets the first events while the provider still waits."""
    pause = threading.Event()
    script = [turn(Say("one two three"), pause_after=4, pause=pause)]
    with (
        Provider(script) as provider,
        serving(store, provider) as url,
        httpx2.Client(trust_env=False) as client,
    ):
        body = {
            "model": "m",
            "max_tokens": 9,
            "stream": True,
            "messages": [{"role": "user", "content": "go"}],
        }
        with client.stream("POST", f"{url}/v1/messages", json=body, headers=KEYS) as response:
            chunks = response.iter_raw()
            assert b"message_start" in next(chunks)
            pause.set()
            assert b"message_stop" in b"".join(chunks)


@pytest.mark.parametrize("path", ["/v1/models?limit=1000", "/v1/files/abc", "/v1/unknown/thing"])
def test_other_paths_pass_unchanged(store: Store, path: str) -> None:
    with (
        Provider() as provider,
        serving(store, provider, mode="loop") as url,
        httpx2.Client(trust_env=False) as client,
    ):
        response = client.get(url + path, headers=KEYS)
        assert response.json() == {"data": []}
        assert provider.seen[0].path == path.partition("?")[0]
        response = client.post(url + "/v1/files", content=b"\x00\xff" * 1_000, headers=KEYS)
        assert provider.seen[1].raw == b"\x00\xff" * 1_000


def test_each_message_is_recorded_once(store: Store, is_streamed: bool) -> None:
    script: list[Any] = [
        turn(Think(), Use("search", {"q": "x"})),
        turn(Think(), Say("Found it.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider) as url:
        talk = Talk(url, is_streamed=is_streamed)
        talk.ask("find it")
        talk.ask(talk.results(BIG))
        talk.ask("thanks")
        assert [one.tools for one in provider.answered] == [["search"]] * 3
    calls = recorded(store)
    assert [one["messages"] for one in calls] == [1, 3, 5]
    assert [len(one["new"]) for one in calls] == [1, 2, 2]
    assert calls[1]["answer"]["content"][-1] == {"type": "text", "text": "Found it."}
    assert all("broke" not in one for one in calls)
    assert calls[1]["could_leave"][0]["tool"] == "search"
    assert calls[1]["could_leave"][0]["tokens"] > 10_000
    assert calls[0]["usage"][0]["output_tokens"] == provider.answered[0].usage["output"]


def test_usage_is_recorded_as_for_any_model_call(store: Store) -> None:
    with (
        Provider([turn(Say("Hello."))]) as provider,
        serving(store, provider, session="mine") as url,
    ):
        Chat(url, is_streamed=False).ask("hi")
    (call,) = calls_of(store.session("mine"))
    assert (
        call.input_tokens
        == provider.answered[0].usage["write"] + provider.answered[0].usage["input"]
    )
    assert call.model == "gpt-5.6"


@pytest.mark.parametrize("is_one", [True, False], ids=["one gateway", "replicas"])
def test_where_and_why_a_prefix_broke_is_recorded(store: Store, is_one: bool) -> None:
    with (
        Provider([turn(Say("One.")), turn(Say("Two.")), turn(Say("Three."))]) as provider,
        serving(store, provider, is_one=is_one, session="s") as url,
    ):
        talk = Talk(url, thinking=False, is_streamed=False)
        talk.ask("first " * 50)
        talk.ask("second")
        talk.held[2]["content"] = "another second"
        talk.ask("third")
    *_, last = recorded(store)
    if is_one:
        assert last["broke"]["part"] == 3
        assert "changed from" in last["broke"]["why"]
    else:
        assert last["broke"]["what"] == "unknown"


def test_a_moved_cache_mark_breaks_no_prefix(store: Store) -> None:
    with (
        Provider([turn(Say("One.")), turn(Say("Two."))]) as provider,
        serving(store, provider, is_one=True, session="s") as url,
    ):
        talk = Talk(url, thinking=False, is_streamed=False)
        talk.ask([{"type": "text", "text": "first", "cache_control": {"type": "ephemeral"}}])
        talk.held[0]["content"] = "first"
        talk.ask([{"type": "text", "text": "second", "cache_control": {"type": "ephemeral"}}])
    assert "broke" not in recorded(store)[-1]


def test_sessions_are_named_after_what_the_client_sends(store: Store) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    names: list[tuple[dict[str, str], str, str]] = [
        ({"x-coatcheck-session": "mine"}, "", "mine"),
        ({}, "/s/by-path", "by-path"),
        ({"x-claude-code-session-id": "abc"}, "", "claude-code-abc"),
        (
            {"x-claude-code-session-id": "abc", "x-claude-code-agent-id": "kid"},
            "",
            "claude-code-abc-kid",
        ),
        ({"session-id": "def", "thread-id": "def"}, "", "codex-def"),
    ]
    with Provider(lambda _: turn(Say("Hello."))) as provider, serving(store, provider) as url:
        for headers, path, _ in names:
            post(url, f"{path}/v1/chat/completions", body, **headers)
        post(url, "/v1/chat/completions", {**body, "prompt_cache_key": "ghi"})
        post(url, "/v1/chat/completions", body)
    known = {info.session_id: info for info in store.sessions()}
    assert {name for _, _, name in names} | {"key-ghi"} <= set(known)
    assert known["claude-code-abc-kid"].parent == "claude-code-abc"
    assert any(name.startswith("conversation-") for name in known)
    assert all(info.ttl == 30 * 86_400 for info in known.values())


def test_an_error_of_the_provider_passes_unchanged_and_is_recorded(store: Store) -> None:
    script = [
        turn(status=529, headers=(("x-should-retry", "true"),)),
        turn(status=429, retry_after="7"),
    ]
    with Provider(script) as provider, serving(store, provider) as url:
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        response = post(url, "/v1/messages", body)
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
        assert response.headers["x-should-retry"] == "true"
        assert post(url, "/v1/messages", body).headers["retry-after"] == "7"
    assert [one["status"] for one in recorded(store)] == [529, 429]


def test_credentials_are_in_no_record_log_or_file(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "sk-ant-api03-canary-0123456789abcdefghij"
    keys = {"x-api-key": canary, "authorization": f"Bearer {canary}", "x-custom-secret": canary}
    caplog.set_level(logging.DEBUG)
    with Provider([turn(Say("Hello.")), turn(status=401)]) as provider:
        with serving(store, provider, mode="loop") as url:
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "tools": Chat(url).tools,
            }
            post(url, "/v1/chat/completions", body, **keys)
            post(url, "/v1/chat/completions", body, **keys)
            answer = post(url, "/v1/chat/completions", b"{", **keys)
            assert canary not in answer.text
        assert provider.seen[0].headers["x-api-key"] == canary
    assert canary not in caplog.text
    for session in map(_session(store), [info.session_id for info in store.sessions()]):
        for series in ("gateway:calls", "metrics"):
            assert all(canary.encode() not in one.body for one in session.records(series))
    root = store.url
    store.close()
    from pathlib import Path

    for path in Path(root).rglob("*"):
        if path.is_file():
            assert canary.encode() not in path.read_bytes()


def _session(store: Store) -> Any:
    def opened(name: str) -> Session:
        return store.session(name)

    return opened
