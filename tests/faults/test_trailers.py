"""Trailers after a chunked body, sent to each server by clients without a token: they are ignored,
and bounded.

A trailer comes after the head of its request was checked. Nothing in it may count, and a client
must not be able to fill the memory of a server with it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.counting import Counts
from tests.http.servers import environment

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc"),
]

MIB = 1 << 20
TOKEN = "a-token-for-the-tests-of-trailers"
# Growth of a server: a few buffers of each connection, and what a first request loads.
ALLOWED = 24 * MIB


@dataclass(frozen=True)
class Server:
    """A command that serves over HTTP: the variable of its token, a path, and the header that
    carries the token."""

    words: tuple[str, ...]
    variable: str
    path: str
    header: str


SERVERS = {
    "serve": Server(
        words=("serve",),
        variable="COATCHECK_HTTP_TOKEN",
        path="/api/v1/sessions/s/artifacts",
        header=f"Authorization: Bearer {TOKEN}",
    ),
    "gateway": Server(
        words=("gateway", "--json", "--anthropic", "http://127.0.0.1:9"),  # nothing listens there
        variable="COATCHECK_GATEWAY_TOKEN",
        path="/v1/messages",
        header=f"x-coatcheck-token: {TOKEN}",
    ),
    "mcp": Server(
        words=("mcp", "--http"),
        variable="COATCHECK_MCP_TOKEN",
        path="/mcp",
        header=f"Authorization: Bearer {TOKEN}",
    ),
}


@dataclass(frozen=True)
class Running:
    """A server that runs in a process of its own."""

    server: Server
    port: int
    pid: int

    def head(self, *headers: str) -> bytes:
        """Return the head of a request with a chunked body, and the chunks of the body."""
        lines = [
            f"POST {self.server.path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            "Transfer-Encoding: chunked",
            *headers,
        ]
        return "\r\n".join((*lines, "", "5", "hello", "0", "")).encode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def peak(self) -> int:
        """Return the peak memory of the process, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.fixture(params=SERVERS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    server = SERVERS[request.param]
    command = [sys.executable, "-m", "coatcheck", *server.words, "--port", "0"]
    env = environment(tmp_path / "store", **{server.variable: TOKEN})
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if "--json" in server.words:
            url = json.loads(process.stdout.readline())["address"]
        else:
            url = process.stderr.readline().split()[-1]
        port = urlsplit(url).port
        assert port is not None
        yield Running(server, port, process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def lines() -> Iterator[bytes]:
    for first in itertools.count(0, 4_000):
        yield b"".join(
            b"X%d: %s\r\n" % (number, b"a" * 50) for number in range(first, first + 4_000)
        )


def one_long_name() -> Iterator[bytes]:
    return itertools.repeat(b"a" * 65_536)


def one_long_value() -> Iterator[bytes]:
    return itertools.chain([b"X: "], itertools.repeat(b"a" * 65_536))


def empty_lines_after_the_request() -> Iterator[bytes]:
    return itertools.chain([b"\r\n"], itertools.repeat(b"\r\n" * 32_768))


FORMS = [lines, one_long_name, one_long_value, empty_lines_after_the_request]


def send_until_refused(running: Running, pieces: Iterator[bytes], most: int) -> int:
    """Send pieces until the server closes the connection, or `most` bytes are sent. Return how many
    were."""
    sent = 0
    with running.connect() as one, contextlib.suppress(ConnectionError):
        one.sendall(running.head())
        while sent < most:
            piece = next(pieces)
            one.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize("form", FORMS)
def test_trailers_without_end_take_no_memory_and_end_the_connection(
    running: Running, form: Callable[[], Iterator[bytes]], long_faults: bool, counts: Counts
) -> None:
    connections, most = (32, 256 * MIB) if long_faults else (2, 48 * MIB)
    answered(running)  # loads what a request needs
    before = running.peak()
    sent = list[int]()

    def attack() -> None:
        sent.append(send_until_refused(running, form(), most))

    threads = [threading.Thread(target=attack) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running.peak() - before < ALLOWED
    assert len(sent) == connections
    assert max(sent) < most, "a connection was not closed"
    assert answered(running).startswith(b"HTTP/1.1 401")
    counts("connections with trailers without end", connections)


def answered(
    running: Running, *, head: tuple[str, ...] = (), trailer: tuple[str, ...] = ()
) -> bytes:
    """Send one request with these headers and trailers, and return the answer."""
    request = running.head("Connection: close", *head) + "\r\n".join((*trailer, "", "")).encode()
    return answers(running, request)


def answers(running: Running, requests: bytes) -> bytes:
    """Send requests on one connection, and return everything until the server closes it."""
    found = b""
    with running.connect() as one:
        one.sendall(requests)
        with contextlib.suppress(ConnectionResetError):
            while piece := one.recv(65_536):
                found += piece
    return found


def test_a_token_in_a_trailer_is_not_accepted(running: Running) -> None:
    assert answered(running, trailer=(running.server.header,)).startswith(b"HTTP/1.1 401")


def test_a_token_in_a_trailer_does_not_reach_the_next_request_of_the_connection(
    running: Running,
) -> None:
    first = running.head() + f"{running.server.header}\r\n\r\n".encode()
    found = answers(running, first + running.head("Connection: close") + b"\r\n")
    assert found.count(b"HTTP/1.1 401") == 2


def test_a_request_with_its_token_in_the_head_may_have_trailers(running: Running) -> None:
    trailer = (
        "Digest: sha-256=abc",
        "Authorization: Bearer another-token-that-is-wrong",
        "Host: example.org",
    )
    with_trailer = answered(running, head=(running.server.header,), trailer=trailer)
    without = answered(running, head=(running.server.header,))
    assert with_trailer.split(b"\r\n")[0] == without.split(b"\r\n")[0]
    assert not with_trailer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 403"))
