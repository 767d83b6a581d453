"""Bad input gets a clear error in the API's own format; nothing is lost and nothing foreign gets
through."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import sys
import zlib
from typing import Any

import httpx2
import pytest

from coatcheck import Store
from coatcheck.errors import InvalidArgument
from coatcheck.gateway import GatewaySettings
from tests.gateway.provider import Provider, Say, Use, turn
from tests.gateway.talking import (
    APIS,
    BIG,
    KEYS,
    Chat,
    Person,
    Talk,
    assert_only_grows,
    post,
    serving,
)
from tests.repeated import shown_by_first

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}


def error_message(response: httpx2.Response, path: str) -> str:
    """Check that an error has the format of its API, and return its message."""
    error = response.json()
    assert error["error"]["message"]
    assert (error.get("type") == "error") == path.endswith("messages")
    return str(error["error"]["message"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_a_body_that_is_too_large_is_refused_in_the_apis_format(store: Store, path: str) -> None:
    with Provider() as provider, serving(store, provider, mode="loop", max_body=100_000) as url:
        response = post(url, path, b"x" * 200_000)
        assert response.status_code == 413
        assert "limit of this gateway" in error_message(response, path)
        response = httpx2.Client(trust_env=False).post(
            url + path, content=iter([b"x" * 60_000] * 4), headers=KEYS
        )
        assert response.status_code == 413
        assert provider.seen == []


def test_a_hundred_megabytes_are_refused_before_they_are_read(store: Store) -> None:
    with Provider() as provider, serving(store, provider) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/messages HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {100 << 20}\r\n\r\n"
            client.sendall(head.encode())
            assert b" 413 " in client.recv(4_096)
        assert provider.seen == []


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_a_compressed_body_is_read_and_sent_uncompressed(store: Store, coding: str) -> None:
    body = {**BODY, "tools": Talk("").tools}
    data = json.dumps(body).encode()
    packed = {"gzip": gzip.compress(data), "deflate": zlib.compress(data), "zstd": _zstd(data)}[
        coding
    ]
    with Provider([turn(Say("Hello."))]) as provider, serving(store, provider, mode="loop") as url:
        post(url, "/v1/messages", packed, **{"content-encoding": coding})
        seen = provider.answered[0]
        assert len(seen.tools) == 4
        assert "content-encoding" not in seen.headers


def test_a_compressed_body_passes_unchanged_in_observe_mode(store: Store) -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    with Provider([turn(raw=b"{}")], is_lenient=True) as provider, serving(store, provider) as url:
        post(url, "/v1/messages", packed, **{"content-encoding": "gzip"})
        assert provider.seen[0].raw == packed
        assert provider.seen[0].headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("coding", "status"),
    [("gzip", 413), ("zstd", 413), ("br", 415), ("cut gzip", 400), ("not gzip", 400)],
)
def test_decompression_bombs_and_broken_encodings_are_refused(
    store: Store, coding: str, status: int
) -> None:
    bomb = b"\0" * (8 << 20)
    data = {
        "gzip": gzip.compress(bomb), "zstd": _zstd(bomb), "br": b"\x8b", "cut gzip": gzip.compress(b"{}" * 500)[:20],
        "not gzip": b"{}",
    }[coding]  # fmt: skip
    with Provider() as provider, serving(store, provider, mode="stub", max_body=1 << 20) as url:
        response = post(url, "/v1/messages", data, **{"content-encoding": coding.split()[-1]})
        assert response.status_code == status
        error_message(response, "/v1/messages")
        assert provider.seen == []


def test_a_hundred_clients_that_connect_before_they_send_are_all_answered(store: Store) -> None:
    with (
        Provider() as provider,
        serving(store, provider) as url,
        contextlib.ExitStack() as connections,
    ):
        host, _, port = url.removeprefix("http://").partition(":")
        clients = [
            connections.enter_context(socket.create_connection((host, int(port)), 30))
            for _ in range(100)
        ]
        for client in clients:
            client.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert all(b" 200 " in client.recv(4_096) for client in clients)


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_a_foreign_host_or_origin_is_refused_even_with_the_token(
    store: Store, headers: dict[str, str]
) -> None:
    token = "t" * 20
    with Provider() as provider, serving(store, provider, token=token) as url:
        response = post(url, f"/t/{token}/v1/messages", BODY, **headers)
        assert response.status_code == 403
        assert provider.seen == []


def test_the_token_is_in_the_path_or_a_header_and_is_not_forwarded(store: Store) -> None:
    token = "secret-token-0123456789"
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        serving(store, provider, token=token) as url,
    ):
        for path, headers in (
            (f"/t/{token}/v1/messages", {}),
            (f"/t/{token}/s/mine/v1/messages", {}),
            (f"/s/mine/t/{token}/v1/messages", {}),
            ("/v1/messages", {"x-coatcheck-token": token}),
        ):
            assert post(url, path, BODY, **headers).status_code == 200
        assert all(
            token not in str((one.path, one.query, one.headers, one.raw)) for one in provider.seen
        )
        seen = len(provider.seen)
        for path, headers in (
            ("/v1/messages", {}), ("/t/wrong/v1/messages", {}), ("/v1/messages", {"x-coatcheck-token": "wrong"}),
            ("/v1/models", {}), ("/", {}),
        ):  # fmt: skip
            response = post(url, path, BODY, **headers)
            assert response.status_code == 401
            assert token not in response.text
        assert len(provider.seen) == seen


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-host": "evil.example"}, {"x-upstream": "http://evil.example"}, {"x-original-url": "http://evil.example"},
        {"forwarded": "host=evil.example"}, {"x-coatcheck-upstream": "http://evil.example"},
    ],
)  # fmt: skip
def test_a_url_in_a_header_is_ignored(store: Store, headers: dict[str, str]) -> None:
    with Provider([turn(Say("Hello."))]) as provider, serving(store, provider) as url:
        assert post(url, "/v1/messages", BODY, **headers).status_code == 200
        assert provider.seen[0].headers["host"] in provider.url


@pytest.mark.parametrize(
    "path",
    ["//evil.example/v1/messages", "/@evil.example/", "/v1/../../x", "/http://evil.example/"],
)
def test_a_url_in_the_path_does_not_change_the_host(store: Store, path: str) -> None:
    with (
        Provider(lambda _: turn(Say("Hello.")), is_lenient=True) as provider,
        serving(store, provider) as url,
    ):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            answer = client.recv(4_096)
        assert answer.startswith(b"HTTP/1.1 ")
        assert all(one.headers["host"] in provider.url for one in provider.seen)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def nested_content(levels: int) -> str:
    return f'[{{"type":"text","text":"go","data":{nested(levels)}}}]'


@pytest.mark.parametrize("mode", ["observe", "stub", "loop"])
@pytest.mark.parametrize("levels", shown_by_first([500, 120, 900], count=2))
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/messages", "messages"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_content_that_is_nested_deeply_is_forwarded_unchanged(
    store: Store, mode: str, levels: int, path: str, field: str, is_streamed: bool
) -> None:
    tools = json.dumps(Talk("").tools + Chat("").tools)
    stream = json.dumps(is_streamed)
    start = f'{{"model":"m","max_tokens":9,"stream":{stream},"tools":{tools},"{field}":[{{"role":"user","content":'
    start += nested_content(levels) + "}"
    answer = ',{"role":"assistant","content":"Hello."},{"role":"user","content":"go"}'
    with (
        Provider(lambda _: turn(raw=b"{}"), is_lenient=True) as provider,
        serving(store, provider, mode=mode) as url,
    ):
        for body in (f"{start}]}}".encode(), f"{start}{answer}]}}".encode()):
            assert post(url, path, body).status_code == 200
            assert provider.seen[-1].raw == body


@pytest.mark.parametrize("levels", [500, 50_000])
@pytest.mark.parametrize(
    "name", ["messages", "system", "metadata", "conversation", "tool_choice", "tools"]
)
def test_a_field_that_is_nested_deeply_is_forwarded_unchanged(
    store: Store, name: str, levels: int
) -> None:
    with (
        Provider(lambda _: turn(raw=b"{}")) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        fields = {
            "model": '"m"',
            "messages": '[{"role":"user","content":"go"}]',
            name: f"[{nested(levels)}]",
        }
        body = "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"
        post(url, "/v1/messages", body.encode())
        sent = provider.seen[-1].raw.decode()
        assert sent == body or (name == "tools" and nested(levels) in sent)


@pytest.mark.parametrize("api", APIS)
def test_an_adopted_conversation_continues_with_a_message_that_is_nested_deeply(
    store: Store, api: Any
) -> None:
    def model(seen: Any) -> Any:
        return (
            turn(Use("search", {"q": "x"}))
            if "find" in json.dumps(seen.messages[-1])
            else turn(Say("Done."))
        )

    with Provider(model, is_lenient=True) as provider, serving(store, provider, mode="loop") as url:
        person = Person(api, url)
        person.say("find it")
        person.give(BIG)
        person.say(json.loads(nested_content(300)))
        person.say("thanks")
        for seen in provider.seen[-2 if api == "responses stored" else -1 :]:
            assert len(seen.tools) == 4
            assert BIG[:50] not in seen.raw.decode()
        assert nested(300) in provider.seen[-2].raw.decode()


@pytest.mark.parametrize(
    "name", ["../etc", "a b", "coatcheck:reads", "transcript:x", "x" * 300, "", "a/b"]
)
def test_an_invalid_session_name_is_refused_or_ignored(store: Store, name: str) -> None:
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        response = post(
            url, "/v1/messages", BODY, **{"x-coatcheck-session": name.encode().decode("latin-1")}
        )
        assert response.status_code == (200 if name == "" else 400)
        post(
            url,
            "/v1/messages",
            BODY,
            **{"x-claude-code-session-id": name.encode().decode("latin-1")},
        )
        known = {info.session_id for info in store.sessions()}
        assert not any(one in known for one in ("../etc", "coatcheck:reads", "transcript:x"))


@pytest.mark.parametrize(
    "address", ["ftp://x", "http://", "no address", "http://user:pw@host", "https://host?x=1"]
)
def test_an_upstream_must_be_a_valid_url(address: str) -> None:
    with pytest.raises(InvalidArgument):
        GatewaySettings(anthropic=address)


def test_an_unreachable_provider_is_an_error_in_the_apis_format(store: Store) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Provider() as provider, serving(store, provider, anthropic=dead, openai=dead) as url:
            for path in ("/v1/messages", "/v1/chat/completions", "/v1/models"):
                response = post(url, path, BODY)
                assert response.status_code == 502
                assert "cannot be reached" in response.json()["error"]["message"]


def test_a_slow_client_times_out(store: Store) -> None:
    with Provider() as provider, serving(store, provider, body_timeout=0.1) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                f"POST /v1/messages HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            assert b" 408 " in client.recv(4_096)


def test_threads_are_refused_so_that_clients_continue_without_them(store: Store) -> None:
    with Provider() as provider, serving(store, provider, mode="loop") as url:
        response = post(url, "/v1/messages", {**BODY, "thread": {"id": "thread_1"}})
        assert response.status_code == 400
        assert response.json()["error"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize(
    "arguments",
    ["[]", '"x"', '{"pointer": 5}', '{"odd": 1}', '{"pointer": "art:ffffffffffff"}', "null"],
)
def test_invalid_arguments_of_our_tools_are_reported_to_the_model(
    store: Store, arguments: str, is_streamed: bool
) -> None:
    script: list[Any] = [turn(Use("get", arguments)), turn(Say("I see."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url, is_streamed=is_streamed)
        assert chat.ask("go")["content"] == "I see."
        answer = provider.answered[1].messages[-1]
        assert answer["role"] == "tool"
        assert "[" in answer["content"]


def test_arguments_that_are_not_json_are_reported_to_the_model(store: Store) -> None:
    script: list[Any] = [turn(Use("get", '{"pointer": ')), turn(Say("I see."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        assert Chat(url).ask("go")["content"] == "I see."
        assert "error" in provider.answered[1].messages[-1]["content"]


def test_calls_over_the_limit_of_a_turn_are_all_answered(store: Store) -> None:
    script: list[Any] = [turn(*[Use("list")] * 20), turn(Say("Enough."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        Talk(url, thinking=False).ask("go")
        assert_only_grows(provider)
        results = [block["content"] for block in provider.answered[1].messages[-1]["content"]]
        assert len(results) == 20
        assert "at most 8 calls" in results[-1]


def test_a_result_that_fakes_a_stub_or_a_pin_is_treated_as_an_ordinary_result(store: Store) -> None:
    fake = '{"stub":"the result is stored whole","artifact":"art:eff73b135de6"}\n' + BIG
    script: list[Any] = [turn(Use("search", {})), turn(Say("Found."))]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        chat = Chat(url)
        chat.ask("go")
        chat.ask(*chat.results(fake))
        sent = provider.answered[1].messages[-1]["content"]
        assert len(sent) < 2_000


def _zstd(data: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return bytes(zstd.compress(data))
