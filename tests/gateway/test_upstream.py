"""The client for providers, against servers that answer with given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coatcheck.gateway.upstream import ProviderAnswer, ProviderClient, ProviderFailure

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Answering:
    """Answers each request with the next bytes; None closes the connection instead. `requests` is
    what arrived."""

    def __init__(self, *answers: bytes | None, context: ssl.SSLContext | None = None) -> None:
        self._answers = list(answers)
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = threading.Event()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Answering:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                self.connections += 1
                with contextlib.suppress(OSError), one:
                    one.settimeout(30)
                    with (
                        self._context.wrap_socket(one, server_side=True)
                        if self._context
                        else one as connection
                    ):
                        self._converse(connection)
                self.closed.set()

    def _converse(self, one: socket.socket) -> None:
        while (request := self._request(one)) and self._answers:
            self.requests.append(request)
            answer = self._answers.pop(0)
            if answer is None:
                return
            one.sendall(answer)
            if b"\r\nx-breaks: 1\r\n" in answer:
                return

    @staticmethod
    def _request(one: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data or not _is_whole(data):
            piece = one.recv(1 << 16)
            if not piece:
                return b""
            data += piece
        return data


def _is_whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"transfer-encoding" in fields:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(fields.get(b"content-length", b"0"))


def talk(work: Callable[[ProviderClient], Awaitable[Any]], **options: Any) -> Any:
    """Run something with a client that is closed afterwards."""

    async def run() -> Any:
        client = ProviderClient(**options)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def sent(client: ProviderClient, url: str, **how: Any) -> AsyncIterator[ProviderAnswer]:
    given: Any = {"target": "/v1/x", "headers": [], "content": b"body", **how}
    answer = await client.send("POST", url, given["target"], given["headers"], given["content"])
    try:
        yield answer
    finally:
        answer.close()


async def read(client: ProviderClient, url: str) -> tuple[int, bytes]:
    async with sent(client, url) as answer:
        return answer.status, await answer.read()


def fetched(url: str, **how: Any) -> tuple[ProviderAnswer, bytes]:
    async def work(client: ProviderClient) -> tuple[ProviderAnswer, bytes]:
        async with sent(client, url, **how) as answer:
            return answer, b"".join([chunk async for chunk in answer.chunks()])

    found: tuple[ProviderAnswer, bytes] = talk(work)
    return found


def test_path_headers_and_body_are_sent_unchanged() -> None:
    headers = [
        (b"x-one", b"a"),
        (b"x-one", "é".encode()),
        (b"cookie", b"a=b; c"),
        (b"authorization", b"Bearer sk-1"),
    ]
    with Answering(OK) as server:
        fetched(server.url, target="/v1/a%2Fb//c?x=%zz&y=+", headers=headers)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    assert line == b"POST /v1/a%2Fb//c?x=%zz&y=+ HTTP/1.1"
    assert {one.partition(b": ")[0].lower() for one in fields} == {
        b"host", b"x-one", b"cookie", b"authorization", b"content-length",
    }  # fmt: skip
    assert [one.partition(b": ")[2] for one in fields if one.lower().startswith(b"x-one")] == [
        b"a",
        "é".encode(),
    ]
    assert body == b"body"


def test_a_url_may_have_a_path() -> None:
    with Answering(OK) as server:
        fetched(f"{server.url}/prefix", target="/v1/x")
    assert server.requests[0].startswith(b"POST /prefix/v1/x HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("target", "headers"),
    [("/v1/x", [(b"x-one", b"\xe9")]), ("http://other/v1/x", [])],
    ids=["header", "path"],
)
def test_a_request_that_cannot_be_sent_unchanged_is_refused(target: str, headers: Any) -> None:
    with Answering(OK) as server:
        with pytest.raises(ValueError):
            fetched(server.url, target=target, headers=headers)
        assert server.connections == 0


def test_large_and_streamed_bodies_arrive_completely() -> None:
    large = os.urandom(5 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    with Answering(OK, OK, OK) as server:
        fetched(server.url, content=large)
        fetched(server.url, content=pieces())
        fetched(server.url, content=pieces(), headers=[(b"content-length", b"6")])
    assert server.requests[0].endswith(b"\r\n\r\n" + large)
    assert server.requests[1].endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert server.requests[2].endswith(b"\r\n\r\nonetwo")


def test_a_response_passes_unchanged_and_can_be_read_decoded() -> None:
    packed = gzip.compress(b"hello")
    head = b"HTTP/1.1 203 Odd\r\nX-Case: a\r\nx-case: b\r\nContent-Encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    with Answering(*[head % len(packed) + packed] * 2) as server:
        answer, body = fetched(server.url)
        assert (answer.status, body) == (203, packed)
        assert answer.headers[:3] == [
            (b"X-Case", b"a"),
            (b"x-case", b"b"),
            (b"Content-Encoding", b"gzip"),
        ]
        assert talk(lambda client: read(client, server.url)) == (203, b"hello")


@pytest.mark.parametrize("coding", [b"gzip", b"zstd", b"br"])
def test_a_damaged_or_unknown_encoding_is_an_error(coding: bytes) -> None:
    damaged = (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: " + coding + b"\r\ncontent-length: 4\r\n\r\nabcd"
    )
    with Answering(damaged) as server, pytest.raises(ProviderFailure):
        talk(lambda client: read(client, server.url))


def test_redirects_are_not_followed_and_cookies_not_kept() -> None:
    moved = (
        b"HTTP/1.1 302 Found\r\nlocation: /other\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
    )

    async def work(client: ProviderClient) -> list[int]:
        return [(await read(client, server.url))[0] for _ in range(2)]

    with Answering(moved, OK) as server:
        assert talk(work) == [302, 200]
    assert b"cookie" not in server.requests[1].lower()


def test_proxies_and_passwords_in_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Answering(OK) as server:
        assert fetched(server.url)[1] == b"ok"
    assert b"authorization" not in server.requests[0].lower()


def test_a_proxy_is_used_if_it_is_set() -> None:
    with Answering(OK) as proxy:
        assert talk(lambda client: read(client, "http://provider.invalid"), proxy=proxy.url) == (
            200,
            b"ok",
        )
    assert proxy.requests[0].startswith(b"POST http://provider.invalid/v1/x HTTP/1.1\r\n")


def test_a_connection_is_reused_unless_an_answer_was_abandoned() -> None:
    async def work(client: ProviderClient) -> None:
        for _ in range(2):
            assert await read(client, server.url) == (200, b"ok")
        async with sent(client, server.url):
            pass
        assert await read(client, server.url) == (200, b"ok")

    unfinished = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nx-breaks: 1\r\n\r\n"
    with Answering(OK, OK, unfinished, OK) as server:
        talk(work)
        assert server.connections == 2


def test_a_connection_that_is_closed_without_an_answer_is_lost() -> None:
    with Answering(None) as server, pytest.raises(ProviderFailure) as failure:
        fetched(server.url)
    assert failure.value.is_lost


def test_a_port_where_nothing_listens_is_not_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(ProviderFailure) as failure:
        fetched(f"http://127.0.0.1:{port}")
    assert not failure.value.is_lost


@pytest.mark.parametrize(
    "rest", [b"content-length: 9\r\n\r\nab", b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n4\r\n"]
)
def test_an_answer_that_breaks_off_is_an_error_after_everything_that_arrived(rest: bytes) -> None:
    async def work(client: ProviderClient) -> bytes:
        found = b""
        async with sent(client, server.url) as answer:
            await asyncio.to_thread(server.closed.wait, 30)
            await asyncio.sleep(0)  # so that the connection is closed before the first read
            with pytest.raises(ProviderFailure):  # noqa: PT012 - the chunks before the error matter
                async for chunk in answer.chunks():
                    found += chunk
        return found

    with Answering(b"HTTP/1.1 200 OK\r\nx-breaks: 1\r\n" + rest) as server:
        assert talk(work) == b"ab"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path / "certificate.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def test_only_trusted_certificates_are_accepted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Answering(OK, context=context) as server:
        with pytest.raises(ProviderFailure, match="Certificate"):
            fetched(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetched(server.url)[1] == b"ok"
    assert len(server.requests) == 1
