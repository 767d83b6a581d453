"""The connection to a provider: `ProviderClient` sends a request, `ProviderAnswer` is the response
with its body.

Bytes and headers pass as they are. Nothing is followed, decoded or remembered: no redirects, no
cookies, no proxy and no password from the environment. Certificates are verified against those that
the system trusts. Only this module imports aiohttp.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HeaderList = list[tuple[bytes, bytes]]
Content = bytes | AsyncIterator[bytes]
CODING_ERRORS: Final = (zlib.error, zstd.ZstdError)
HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection, which are never forwarded."""
_OF_BODY: Final = frozenset({b"content-length", b"content-encoding"})
_CONNECT: Final = 20.0
_SILENT: Final = 600.0  # seconds after which we give up on a provider that sends nothing
_IDLE: Final = 15.0  # seconds that a connection waits for the next request
_HEAD: Final = 1 << 16  # bytes of a line or a field in the head of a response
_PIECE: Final = 1 << 16
"""Bytes that are written at once: asyncio copies what the socket does not take."""
_AUTOMATIC: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add."""


class ProviderFailure(Exception):
    """The provider cannot be reached, or its answer broke off. `is_lost` says that a connection was
    closed before an answer came: the provider may have closed it while it was idle."""

    def __init__(self, reason: str, *, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.is_lost = is_lost


class Decoder(Protocol):
    """Decodes a content coding piece by piece."""

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, /, max_length: int = ...) -> bytes: ...


def decoder(coding: str) -> Decoder | None:
    """Return a decoder for a content coding, None if it is not known."""
    if coding in ("gzip", "x-gzip"):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    if coding == "deflate":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS)
    return zstd.ZstdDecompressor() if coding == "zstd" else None


class ProviderAnswer:
    """A response of a provider. Its body is read once, then it is closed."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: HeaderList = list(response.raw_headers)

    def header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body as they come. Raises `ProviderFailure` if it breaks off."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # What arrived before the failure; `read_nowait` would raise it again.
            if left := content._read_nowait(-1):
                yield left
            raise _failure(error) from error

    async def plain_chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body without their content coding, which a provider may use
        unasked."""
        coding = self.header("content-encoding").strip().lower()
        decoding = decoder(coding)
        if decoding is None and coding not in ("", "identity"):
            raise ProviderFailure("unknown content coding")
        async for chunk in self.chunks():
            try:
                plain = _decoded(chunk, decoding)
            except CODING_ERRORS as error:
                raise ProviderFailure("damaged content coding") from error
            if plain:
                yield plain
        if decoding is not None and not decoding.eof:
            raise ProviderFailure("incomplete content coding")

    async def read(self) -> bytes:
        """Return the whole body without its content coding."""
        return b"".join([chunk async for chunk in self.plain_chunks()])

    def close(self) -> None:
        """Close the response. Its connection is reused if the body was read to the end."""
        self._response.close()


def headers_of(response: ProviderAnswer, *, is_raw: bool = False) -> HeaderList:
    """Return the headers of a provider's response: all except those of the connection and, unless
    its body `is_raw`, those of the body."""
    dropped = HOP if is_raw else HOP | _OF_BODY
    return [(name, value) for name, value in response.headers if name.lower() not in dropped]


class ProviderClient:
    """Sends requests. Connections are kept and used again. It belongs to the event loop that uses
    it first. `proxy` is the address of an HTTP proxy."""

    def __init__(self, *, proxy: str | None = None) -> None:
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None
        self._bases: dict[str, URL] = {}

    async def send(
        self, method: str, address: str, target: str, headers: HeaderList, content: Content
    ) -> ProviderAnswer:
        """Send a request to an address, which has no path except a prefix, and return the answer
        with its body unread. `target` is the path with the query, as it came. Raises
        `ProviderFailure`, or `ValueError` if a header cannot be sent."""
        if not target.startswith("/"):
            raise ValueError("the target of a request must begin with a slash")
        base = self._bases.setdefault(address, URL(address))
        path, _, query = target.partition("?")
        url = URL.build(
            scheme=base.scheme, authority=base.raw_authority, path=base.raw_path.rstrip("/") + path,
            query_string=query, encoded=True,
        )  # fmt: skip
        given = [(name.decode(), value.decode()) for name, value in headers]
        data: Any = None
        if not isinstance(content, bytes):
            data = content
        elif content:
            data = _Pieces(content)
        try:
            async with asyncio.timeout(_SILENT if isinstance(content, bytes) else None):
                response = await self._opened().request(
                    method, url, headers=given, data=data, allow_redirects=False, proxy=self._proxy
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(error) from error
        return ProviderAnswer(response)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE, ssl=_verifying()),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENT),
                skip_auto_headers=_AUTOMATIC,
                auto_decompress=False,
                trust_env=False,
                max_line_size=_HEAD,
                max_field_size=_HEAD,
            )
        return self._session


class _Pieces(Payload):
    """A body that is written in pieces, without a copy of the whole."""

    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/octet-stream")
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        whole = memoryview(self._value)
        for start in range(0, len(whole), _PIECE):
            await writer.write(whole[start : start + _PIECE])

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        await self.write(writer)


def _decoded(chunk: bytes, decoding: Decoder | None) -> bytes:
    """Return a chunk without its content coding. What follows the end of the coding is dropped."""
    if decoding is None:
        return chunk
    return b"" if decoding.eof else decoding.decompress(chunk)


def _verifying() -> ssl.SSLContext:
    if (
        sys.platform in ("darwin", "win32")
        and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
    ):
        import truststore

        context: ssl.SSLContext = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _failure(error: Exception) -> ProviderFailure:
    is_lost = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    is_lost = is_lost and not isinstance(error, aiohttp.ClientConnectorError | TimeoutError)
    return ProviderFailure(type(error).__name__, is_lost=is_lost)
