"""Uploads over HTTP: streamed, bounded, and all or nothing, whatever the client does in the
middle."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import coatcheck
from coatcheck import Store
from coatcheck.http.serving import LocalServer
from tests.backends import Backend, wait_until
from tests.http.servers import ADMIN, Web, path_of, running, served

MIB = 1 << 20


def connection(web: Web) -> socket.socket:
    return socket.create_connection(("127.0.0.1", web.port), timeout=60)


def head(web: Web, *headers: str, method: str = "POST", path: str = path_of("s")) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {web.host}",
        f"Authorization: Bearer {ADMIN}",
        *headers,
    ]
    return "\r\n".join((*lines, "", "")).encode()


def answer_of(one: socket.socket) -> bytes:
    """Everything that a server sends until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65_536):
            found += piece
    return found


def peak(pid: int) -> int:
    """The peak memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_body_whose_last_bytes_cross_a_megabyte_is_read_completely(web: Web) -> None:
    """The server reads a megabyte at a time; bytes that arrive together with its end belong to the
    body too."""
    data = random.Random(1).randbytes(MIB + 4_000)
    value = json.dumps({"value": "x" * MIB}).encode()
    for path, body in ((path_of("s"), data), ("/api/v1/sessions/s/externalize", value)):
        with connection(web) as one:
            one.sendall(
                head(web, f"Content-Length: {len(body)}", "Connection: close", path=path)
                + body[: MIB - 1_000]
            )
            time.sleep(0.5)  # so that the rest arrives separately
            one.sendall(body[MIB - 1_000 :])
            answer = answer_of(one)
        assert answer.split(b" ", 2)[1] in (b"200", b"201"), answer
    with web.client() as client:
        assert client.get(path_of("s", hashlib.sha256(data).hexdigest())).content == data


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_upload_and_a_download_of_200_megabytes_take_little_memory(tmp_path: Path) -> None:
    piece = random.Random(1).randbytes(MIB)
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        for number in range(200):
            one = piece[number:] + piece[:number]
            digest.update(one)
            yield one

    options = {"COATCHECK_STORE_DURABILITY": "process"}
    with served(tmp_path / "store", is_warm=False, **options) as web, web.client() as client:
        assert web.process is not None
        client.post(path_of("s"), content=piece * 2)  # loads what a put needs
        before = peak(web.process.pid)
        made = client.post(path_of("s"), content=pieces(), params={"name": "large"}).json()
        assert (made["size_bytes"], made["artifact_id"]) == (200 * MIB, digest.hexdigest())
        received = hashlib.sha256()
        with client.stream("GET", path_of("s", "large")) as found:
            for one in found.iter_bytes():
                received.update(one)
        assert received.hexdigest() == made["artifact_id"]
        assert peak(web.process.pid) - before < 32 * MIB


@pytest.fixture
def opened(lasting: Backend) -> Store:
    return lasting.open()


@pytest.fixture
def web(opened: Store) -> Iterator[Web]:
    with running(opened) as found:
        yield found


def leftovers(store: Store) -> int:
    """Bytes in temporary files, and copies without a row."""
    report = store.collect(dry_run=True)
    return report.leftover_bytes + report.orphans


@pytest.mark.parametrize("size", [10, 300_000, 5 * MIB])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_client_that_disconnects_during_a_put_leaves_nothing_behind(
    web: Web, opened: Store, size: int, chunked: bool
) -> None:
    data = os.urandom(size)
    for end in ("close", "half", "reset"):
        one = connection(web)
        if chunked:
            one.sendall(
                head(web, "Transfer-Encoding: chunked")
                + f"{size:x}\r\n".encode()
                + data
                + b"\r\n5\r\nab"
            )
        else:
            one.sendall(head(web, f"Content-Length: {size + 1}") + data)
        if end == "half":
            one.shutdown(socket.SHUT_WR)
        elif end == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if end == "half":
            answer_of(one)
        one.close()
    wait_until(lambda: "coatcheck_http_abandoned_total 3.0" in metrics(web))
    assert opened.stats().refs == 0
    wait_until(lambda: leftovers(opened) == 0)
    with web.client() as client:
        assert client.post(path_of("s"), content=data).status_code == 201


def metrics(web: Web) -> str:
    with web.client() as client:
        return client.get("/metrics").text


@pytest.mark.parametrize(
    "broken",
    [b"POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"\x16\x03\x01\x02\x00" * 20,
     b"GET / HTTP/9.9\r\n\r\n", b"GET  /  HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 70_000,
     b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_invalid_http_is_answered_in_the_usual_error_format(web: Web, broken: bytes) -> None:
    with connection(web) as one:
        one.sendall(broken)
        one.shutdown(socket.SHUT_WR)
        found = answer_of(one)
    status = found.split(b"\r\n")[0]
    assert status.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))
    assert b'{"error": {"code": "' in found
    with web.client() as client:
        assert client.get("/healthz").status_code == 200


def test_a_request_cannot_hide_another_in_its_body(web: Web, opened: Store) -> None:
    hidden = head(web, method="DELETE", path="/api/v1/sessions/s")
    opened.session("s").put("kept", name="n")
    with connection(web) as one:
        both = head(
            web, f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked", "Connection: close"
        )
        one.sendall(both + b"0\r\n\r\n" + hidden)
        answer_of(one)
    assert opened.session("s").get("n") == "kept"


def test_a_slow_client_is_disconnected_and_nothing_is_stored(opened: Store) -> None:
    with running(opened, stall=0.3) as web:
        for body, path in (
            (b"x" * 100, path_of("s")),
            (b"x" * 3 * MIB, path_of("s")),
            (b"{", "/api/v1/sessions/s/externalize"),
        ):
            with connection(web) as one:
                one.sendall(
                    head(
                        web,
                        "Content-Length: 99999999" if len(body) > 1 else "Content-Length: 99",
                        path=path,
                    )
                )
                one.sendall(body)
                found = answer_of(one)
            assert found.startswith(b"HTTP/1.1 408")
            assert b'"code": "timeout"' in found
        assert opened.stats().refs == 0
        wait_until(lambda: leftovers(opened) == 0)


def test_a_client_that_reads_nothing_is_disconnected(opened: Store) -> None:
    opened.session("s").put(os.urandom(40 * MIB), name="large")
    with running(opened, stall=0.3) as web:
        with connection(web) as one:
            one.sendall(head(web, method="GET", path=path_of("s", "large")))
            wait_until(lambda: "coatcheck_http_abandoned_total 1.0" in metrics(web))
            assert len(answer_of(one)) < 40 * MIB
        with web.client() as client:
            assert client.get("/healthz").status_code == 200


def test_an_unfinished_upload_takes_no_thread_from_other_requests(web: Web, opened: Store) -> None:
    opened.session("s").put("here", name="n")
    with contextlib.ExitStack() as stack, web.client() as client:
        for _ in range(40):  # more than there are threads for uploads
            one = stack.enter_context(connection(web))
            one.sendall(head(web, f"Content-Length: {5 * MIB}") + b"x" * 2 * MIB)
        assert client.get(path_of("s", "n")).text == "here"
        assert client.get(path_of("s", "n", "/read"), params={"grep": "h"}).json()["matches"] == 1
        assert client.get("/healthz").status_code == 200


def test_quotas_and_the_size_limit_of_an_artifact_end_an_upload_early(lasting: Backend) -> None:
    def endless() -> Iterator[bytes]:
        for _ in itertools.count():
            yield b"x" * MIB

    for options, status, code in (
        ({"quota_bytes": 4 * MIB}, 507, "quota_exceeded"),
        ({"max_artifact_bytes": 4 * MIB}, 413, "too_large"),
    ):
        store = lasting.open_new(**options)
        with running(store) as web, web.client() as client:
            found = client.post(path_of("s"), content=limited(endless(), 64))
            assert (found.status_code, found.json()["error"]["code"]) == (status, code)
        assert store.stats().refs == 0
        assert leftovers(store) == 0


def limited(pieces: Iterator[bytes], most: int) -> Iterator[bytes]:
    """The pieces that a client sends before it looks at the answer."""
    return itertools.islice(pieces, most)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_json_body_that_is_too_large_is_refused(web: Web, declared: bool) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"value": "'
        for _ in range(100):
            yield b"x" * MIB
        yield b'"}'

    for path, most in (("/api/v1/sessions/s/externalize", 64 * MIB), ("/api/v1/sessions/s", MIB)):
        headers = {"content-length": str(100 * MIB + 13)} if declared else {}
        method = "POST" if "externalize" in path else "PUT"
        with web.client() as client:
            found = client.request(method, path, content=pieces(), headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (413, "too_large")
        assert f"{most:,}" in found.json()["error"]["message"]


def test_a_body_is_not_read_before_its_token_is_checked(web: Web) -> None:
    with connection(web) as one:
        one.sendall(
            f"POST {path_of('s')} HTTP/1.1\r\nHost: {web.host}\r\nContent-Length: {1 << 40}\r\n"
            "Expect: 100-continue\r\n\r\n".encode()
        )
        assert one.recv(65_536).startswith(b"HTTP/1.1 401")


def test_small_answers_are_sent_at_once() -> None:
    """Without the protocol in its listener, asyncio leaves Nagle's algorithm on, and each answer
    takes 40 ms more."""
    with LocalServer() as local, socket.create_connection(("127.0.0.1", local.port)):
        accepted, _ = local._listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_concurrent_clients_each_get_their_own_content(web: Web) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        data = random.Random(number).randbytes(200_000 + number * 100_000)
        with web.client() as client:
            for turn in range(3):
                made = client.post(
                    path_of(f"s{number}"), content=data, params={"name": f"n{turn}"}
                ).json()
                if client.get(path_of(f"s{number}", made["pointer"])).content != data:
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Shutdown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_requests_in_progress_finish(tmp_path: Path, number: int, code: int) -> None:
    begun, proceed = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def pieces() -> Iterator[bytes]:
        yield b"x" * 2 * MIB
        begun.set()
        assert proceed.wait(60)
        yield b"y" * MIB

    def upload(web: Web) -> None:
        with web.client() as client:
            found["answer"] = client.post(path_of("s"), content=pieces(), params={"name": "n"})

    with served(tmp_path / "store") as web:
        assert web.process is not None
        thread = threading.Thread(target=upload, args=(web,))
        thread.start()
        assert begun.wait(60)
        # The client may have sent its bytes before the server has accepted the connection.
        wait_until(lambda: any((tmp_path / "store" / "tmp").iterdir()))
        web.process.send_signal(number)
        wait_until(lambda: not accepts(web))
        proceed.set()
        thread.join(60)
        assert web.process.wait(60) == code
    assert found["answer"].status_code == 201
    with coatcheck.open(tmp_path / "store") as store:
        assert store.session("s").get("n") == b"x" * 2 * MIB + b"y" * MIB


def accepts(web: Web) -> bool:
    try:
        connection(web).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_server_killed_during_an_upload_has_stored_nothing_of_it(tmp_path: Path) -> None:
    with served(tmp_path / "store", is_warm=False) as web, web.client() as client:
        client.post(path_of("s"), content=b"before", params={"name": "before"})
        with connection(web) as one:
            one.sendall(head(web, f"Content-Length: {9 * MIB}") + b"x" * 5 * MIB)
            wait_until(lambda: any((tmp_path / "store" / "tmp").iterdir()))
            assert web.process is not None
            web.process.kill()
            web.process.wait(60)
    with coatcheck.open(tmp_path / "store") as store:
        assert [ref.name for ref in store.session("s").list()] == ["before"]
        store.collect()
        assert leftovers(store) == 0


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
def test_connections_without_a_token_do_not_lock_clients_out(tmp_path: Path) -> None:
    with served(tmp_path / "store", is_warm=False) as web, contextlib.ExitStack() as stack:
        assert web.process is not None
        resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(400):
            one = stack.enter_context(connection(web))
            with contextlib.suppress(OSError):  # closed already
                one.sendall(b"GET /api/v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with web.client() as client:
            assert client.get("/api/v1/sessions").status_code == 200


def test_a_client_behind_a_forwarding_proxy_keeps_its_connection(web: Web) -> None:
    headers = {"Authorization": f"Bearer {web.token}", "X-Forwarded-For": "192.0.2.7"}
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", web.port, timeout=60))
        )
        for _ in range(2):
            one.request("GET", "/api/v1/sessions", headers=headers)
            answer = one.getresponse()
            assert answer.status == 200
            answer.read()
            for _ in range(
                70
            ):  # more than may wait for their token: the oldest of those are closed
                stack.enter_context(connection(web)).sendall(b"GET / HTTP/1.1\r\n")
            with web.client() as client:
                assert client.get("/api/v1/sessions").status_code == 200


def test_a_long_read_does_not_block_short_ones_and_a_signal_ends_it(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        store.session("s", ttl=None).put("a" * 1_000_000, name="line")
        store.session("s").put("hello", name="small")
    slow = {"grep": "(a?){1000}a{1000}b"}
    with served(tmp_path / "store", "--grace", "1") as web, web.client() as client:
        assert web.process is not None

        def read() -> None:
            with contextlib.suppress(httpx2.HTTPError), web.client() as other:
                other.get(path_of("s", "line", "/read"), params=slow)

        threads = [threading.Thread(target=read) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: "coatcheck_http_requests_running 13.0" in client.get("/metrics").text)
        assert client.get(path_of("s", "small")).text == "hello"
        assert (
            client.get(path_of("s", "small", "/read"), params={"grep": "h"}).json()["matches"] == 1
        )
        web.process.terminate()
        assert web.process.wait(60) == 143
        for thread in threads:
            thread.join(60)
