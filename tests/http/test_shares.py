"""Tenants share a server: the slow or many requests of one never keep another from storing
something."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.limits import Busy, Shares
from coatcheck.http.streams import ClientGone, Upload
from tests.backends import wait_until
from tests.http.servers import ADMIN, Web, path_of, running

MIB = 1 << 20
EXTERNALIZE = "/api/v1/sessions/s/externalize"


def token_of(tenant: str) -> str:
    return f"a-token-of-the-tenant-{tenant}"


def keyring() -> Keyring:
    given = {ADMIN: Access("admin", "admin")}
    for tenant in ("greedy", "other"):
        given[token_of(tenant)] = Access(tenant, "write", tenant)
    return Keyring(given=given)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store", durability="process") as opened:
        yield opened


@contextlib.contextmanager
def unfinished(
    web: Web, count: int, *, path: str, first: bytes, length: int
) -> Iterator[list[socket.socket]]:
    """Begin this many requests of the greedy tenant that send the first bytes of their bodies and
    no more."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {web.host}",
        f"Authorization: Bearer {token_of('greedy')}",
        f"Content-Length: {length}",
    ]
    head = "\r\n".join((*lines, "", "")).encode()
    opened, threads = list[socket.socket](), list[threading.Thread]()
    try:
        for _ in range(count):
            opened.append(socket.create_connection(("127.0.0.1", web.port), timeout=60))
            opened[-1].sendall(head)  # at once: few connections may be without a token
            threads.append(threading.Thread(target=_send, args=(opened[-1], first)))
            threads[-1].start()
        with web.client() as client:
            wait_until(lambda: f"requests_running {count + 1}.0" in client.get("/metrics").text)
        yield opened
    finally:
        for one in opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in opened:
            one.close()


def _send(one: socket.socket, data: bytes) -> None:
    """Send this, in a thread of its own: a server that waits does not read all of it."""
    with contextlib.suppress(OSError):
        one.sendall(data)


@pytest.mark.parametrize(
    ("count", "first"),
    [(200, b"x" * 600), (100, b"x" * (MIB + 70_000))],
    ids=["small", "over a megabyte"],
)
def test_slow_uploads_of_one_tenant_do_not_block_another(
    store: Store, count: int, first: bytes
) -> None:
    with (
        running(store, keyring(), stall=600) as web,
        unfinished(web, count, path=path_of("s"), first=first, length=10**9),
        web.client(token_of("other")) as other,
    ):
        assert other.post(path_of("s"), content=b"small").status_code == 201
        assert other.post(path_of("s"), content=b"large" * MIB).status_code == 201


def test_slow_large_bodies_of_one_tenant_do_not_block_another(store: Store) -> None:
    first = b'{"value": "' + b"x" * (MIB + 70_000)
    with (
        running(store, keyring(), stall=600) as web,
        unfinished(web, 20, path=EXTERNALIZE, first=first, length=60 * MIB),
        web.client(token_of("other")) as other,
    ):
        assert other.post(EXTERNALIZE, json={"value": "y" * 2 * MIB}).status_code == 200


def test_a_tenant_that_uses_its_whole_share_gets_429(store: Store) -> None:
    with running(store, keyring(), patience=0.2) as web, web.client(token_of("greedy")) as greedy:
        with unfinished(web, 64, path=path_of("s"), first=b"x", length=10):
            refused = greedy.post(path_of("s"), content=b"one more")
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"] == {
                "code": "too_many_requests",
                "message": "your share of the places for uploads is in use",
                "hint": "let some of them finish, then send this request again",
            }
        wait_until(lambda: greedy.post(path_of("s"), content=b"one more").status_code == 201)


def test_a_request_that_waits_for_its_share_continues_when_another_ends(store: Store) -> None:
    statuses: list[int] = []

    def put(web: Web) -> None:
        with web.client(token_of("greedy")) as greedy:
            statuses.append(greedy.post(path_of("s"), content=b"one more").status_code)

    with (
        running(store, keyring()) as web,
        unfinished(web, 64, path=path_of("s"), first=b"x", length=2) as opened,
        web.client() as client,
    ):
        thread = threading.Thread(target=put, args=(web,))
        thread.start()
        wait_until(lambda: "requests_running 66.0" in client.get("/metrics").text)
        assert statuses == []
        opened[0].sendall(b"y")
        thread.join()
    assert statuses == [201]


# The time for a body


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> object:
            self._now += timeout or 0.0
            return select(0)

        selector.select = jump  # type: ignore[method-assign, assignment]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


async def received(pieces: Iterable[tuple[float, int]]) -> int:
    """Read a body that comes in pieces, each after a pause of some seconds. Return its size."""
    remaining = iter(pieces)

    async def receive() -> dict[str, object]:
        pause, size = next(remaining, (0.0, 0))
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": b"x" * size, "more_body": size > 0}

    upload = Upload(receive, stall=60.0)
    while await upload.next(MIB):
        pass
    return upload.size


@pytest.mark.parametrize(
    "pieces",
    [
        [(2.0, 40_000)] * 1_000,
        [(59.0, MIB)] * 20,
        [(0.0, MIB)] * 20 + [(50.0, 10)],
        [(59.0, 10)],
    ],
    ids=["steady", "in large pieces", "a pause at the end", "a small body"],
)
def test_a_body_with_a_megabyte_a_minute_is_read(pieces: list[tuple[float, int]]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        assert runner.run(received(pieces)) == sum(size for _, size in pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        itertools.repeat((2.0, 600)),
        itertools.repeat((0.01, 1)),
        itertools.chain([(0.0, MIB)] * 200, [(61.0, MIB)]),
        [(61.0, 10)],
    ],
    ids=["slow", "byte by byte", "silent after a fast start", "silent"],
)
def test_a_slower_body_is_cut_off(pieces: Iterable[tuple[float, int]]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner, pytest.raises(ClientGone) as raised:
        runner.run(received(pieces))
    assert str(raised.value) == "the client was too slow"
    assert (
        raised.value.hint
        == "each megabyte must pass within 60 seconds; try again with a faster connection"
    )


# Shares


async def taken(shares: Shares, tenant: str) -> int:
    """Take as much as a tenant gets, one by one, and return how much that was."""
    count = 0
    with contextlib.suppress(Busy):
        while True:
            await shares.take(tenant)
            count += 1
    return count


def test_each_tenant_gets_at_most_half_of_what_is_free() -> None:
    async def take_all() -> list[int]:
        shares = Shares(128, "places", patience=0.0)
        return [await taken(shares, f"tenant {number}") for number in range(9)]

    assert asyncio.run(take_all()) == [64, 32, 16, 8, 4, 2, 1, 0, 0]


@pytest.mark.parametrize("tenant", ["first", "second"])
def test_the_error_says_whether_the_own_tenant_uses_the_share(tenant: str) -> None:
    async def take_twice() -> None:
        shares = Shares(2, "places", patience=0.0)
        await shares.take("first")
        await shares.take(tenant)

    with pytest.raises(Busy) as raised:
        asyncio.run(take_twice())
    assert raised.value.is_own == (tenant == "first")
    assert str(raised.value) == (
        "your share of the places is in use"
        if tenant == "first"
        else "all places are in use by others"
    )


def test_what_is_released_can_be_taken_again() -> None:
    async def use() -> int:
        shares = Shares(10, "bytes", patience=0.0)
        for _ in range(100):
            async with shares.held("tenant", 5):
                pass
        return await taken(shares, "tenant")

    assert asyncio.run(use()) == 5
