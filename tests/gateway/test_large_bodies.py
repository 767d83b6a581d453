"""Large bodies at the gateway: their memory is bounded for each tenant, and they block nothing
else."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from coatcheck import Store, lanes
from coatcheck.gateway import Gateway, GatewaySettings, launch
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.limits import Shares
from tests.backends import wait_until
from tests.gateway.provider import Provider, Say, turn
from tests.gateway.talking import KEYS, Talk

MIB = 1 << 20
TOKENS = {name: f"a-token-of-the-tenant-{name}" for name in ("greedy", "other")}


@contextlib.contextmanager
def served(
    store: Store, provider: Provider, *, patience: float = 0.2, **settings: Any
) -> Iterator[str]:
    """Serve a gateway with a token for each tenant. Requests wait `patience` seconds for memory."""
    given = GatewaySettings(
        anthropic=provider.url, openai=provider.url, max_body=16 * MIB, **settings
    )
    keyring = Keyring(given={token: Access(name, "write", name) for name, token in TOKENS.items()})
    gateway = Gateway(store, given, keyring=keyring)
    gateway.memory = Shares(12 * given.max_body, "memory for large bodies", patience=patience)
    with launch.local_server() as server, launch.beside(gateway, server):
        yield server.url


def large(size: int) -> bytes:
    """A request of about this many bytes."""
    messages = [{"role": "user", "content": "go " + "x" * size}]
    return json.dumps(
        {"model": "m", "max_tokens": 9, "messages": messages, "tools": Talk("").tools}
    ).encode()


def post(url: str, body: bytes, tenant: str = "other", **headers: str) -> httpx2.Response:
    given = {
        **KEYS,
        "content-type": "application/json",
        "x-coatcheck-token": TOKENS[tenant],
        **headers,
    }
    return httpx2.post(f"{url}/v1/messages", content=body, headers=given, timeout=60)


@contextlib.contextmanager
def unfinished(url: str, length: int) -> Iterator[None]:
    """Begin a request of the greedy tenant that declares a long body, and sends nothing of it."""
    host = url.removeprefix("http://")
    name, _, port = host.partition(":")
    lines = [
        "POST /v1/messages HTTP/1.1",
        f"Host: {host}",
        f"x-coatcheck-token: {TOKENS['greedy']}",
        f"Content-Length: {length}",
        "Expect: 100-continue",
    ]
    with socket.create_connection((name, int(port)), timeout=60) as one:
        one.sendall("\r\n".join((*lines, "", "")).encode())
        assert one.recv(4_096).startswith(b"HTTP/1.1 100")  # the gateway has begun to read
        yield


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_a_tenant_that_uses_its_memory_gets_429_and_another_is_served(
    store: Store, is_packed: bool
) -> None:
    body = large(4 * MIB)
    headers = {"content-encoding": "gzip"} if is_packed else {}
    sent = gzip.compress(body) if is_packed else body
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        served(store, provider, mode="loop") as url,
        unfinished(url, 16 * MIB),
    ):
        refused = post(url, sent, "greedy", **headers)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"] == (
            "your share of the memory for large bodies is in use; let some of them finish, then send this request again"
        )
        assert post(url, sent, "other", **headers).status_code == 200
        assert post(url, large(1_000), "greedy").status_code == 200, (
            "a small request needs no share"
        )


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_a_body_without_room_passes_unread_in_observe_mode(store: Store, is_packed: bool) -> None:
    body = large(4 * MIB)
    headers = {"content-encoding": "gzip"} if is_packed else {}
    sent = gzip.compress(body) if is_packed else body
    with (
        Provider([turn(raw=b"{}")], is_lenient=True) as provider,
        served(store, provider) as url,
        unfinished(url, 16 * MIB),
    ):
        post(url, sent, "greedy", **headers)
        assert provider.seen[-1].raw == sent


def test_packed_bodies_that_wait_for_one_another_are_all_answered(store: Store) -> None:
    sent = gzip.compress(large(9 * MIB))
    statuses: list[int] = []

    def ask(url: str) -> None:
        statuses.append(post(url, sent, **{"content-encoding": "gzip"}).status_code)

    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        served(store, provider, mode="loop", patience=60.0) as url,
    ):
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert post(url, large(9 * MIB)).status_code == 200, "all of the memory was returned"
    assert statuses == [200] * 3


def test_a_packed_body_is_unpacked_beside_other_requests(store: Store) -> None:
    """All threads that could unpack it are in use, so it waits; nothing else does."""
    sent = gzip.compress(large(9 * MIB))
    statuses: list[int] = []
    proceed = threading.Event()

    def ask(url: str) -> None:
        statuses.append(post(url, sent, **{"content-encoding": "gzip"}).status_code)

    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        served(store, provider, mode="loop") as url,
    ):
        for _ in range(lanes.LONG):
            lanes._long._executor.submit(proceed.wait)
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        try:
            wait_until(lambda: lanes._long._executor._work_queue.qsize() > 0)
            assert (
                httpx2.get(
                    f"{url}/healthz", headers={"x-coatcheck-token": TOKENS["other"]}
                ).status_code
                == 200
            )
            assert post(url, large(1_000)).status_code == 200
            assert statuses == []
        finally:
            proceed.set()
            thread.join()
    assert statuses == [200]
