"""The fuzz targets: a function for each reader of bytes that we did not write, or that a disk may
have changed.

A target takes any bytes. It raises only if a property is violated: invalid bytes are allowed, but
they must lead to an answer or to one of our errors. Targets use no clock and no randomness, so that
a failure can be repeated with its bytes alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import coatcheck
from coatcheck import Policy, Store
from coatcheck.errors import CoatcheckError, Damaged, InvalidArgument
from coatcheck.gateway.sse import EventSplitter
from coatcheck.mcp.wire import LineBuffer, UnparsedLine, encode, parse
from coatcheck.messages import FORMATS
from coatcheck.reading.page import Request, continues_slice, seal, unseal
from coatcheck.refs import Blob
from coatcheck.storage.frames import FRAME, SeekTable, check_frame, compressed, framed
from coatcheck.storage.wal import lost_frames, read_index, read_salts
from coatcheck.transcript.keep import Keeper, fetch_from
from coatcheck.transcript.splice import bare, refs_of, sessions_in, slim, whole

_KEY: Final = bytes(range(16))
_ARTIFACT: Final = "0123456789abcdef" * 4
_LINE_LIMIT: Final = 5_000  # bytes of a line; more than the kept start and end of a longer one
_FRAMED: Final = b"".join(
    b"line %d of a text that compresses\n" % number for number in range(12_000)
)
_TRANSCRIPT: Final = "transcript:" + "0" * 32


@cache
def _folder() -> Path:
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="coatcheck-fuzz-", dir=base)
    _kept.append(folder)
    return Path(folder.name)


_kept: list[object] = []


def log(data: bytes) -> None:
    """A write-ahead log and its index with any bytes: the number of lost frames is never
    negative."""
    cut = data[0] if data else 0
    (_folder() / "index").write_bytes(data[1:cut] + data[1:cut])
    (_folder() / "log").write_bytes(data[cut:])
    root = os.open(_folder(), os.O_RDONLY)
    try:
        index, salts = read_index("index", root), read_salts("log", root)
    finally:
        os.close(root)
    if index is not None:
        for found in (0, index.frames, 1 << 40):
            assert lost_frames(index, salts, found) >= 0


@cache
def _packed() -> tuple[bytes, bytes]:
    pieces = (_FRAMED[at : at + FRAME] for at in range(0, len(_FRAMED), FRAME))
    return b"".join(compressed(pieces)), framed(_FRAMED).frames


def frame(data: bytes) -> None:
    """A compressed copy with any bytes, and one that was overwritten: the right bytes, or
    `Damaged`."""
    packed, checks = _packed()
    blob = Blob("x", len(_FRAMED), "zstd", frames=checks)
    changed = bytearray(packed)
    for at in range(0, len(data) - 3, 4):
        changed[-1 - int.from_bytes(data[at : at + 3], "big") % len(changed)] = data[at + 3]
    for copy in (data, packed + data, bytes(changed)):
        with contextlib.suppress(Damaged):
            read = partial(_part, copy)
            for index, one in enumerate(SeekTable.of(len(copy), read, "x").read(0, 1, read)):
                assert len(one) <= FRAME, "a frame is too large"
                check_frame(blob, index, one)
                assert one == _FRAMED[index * FRAME : (index + 1) * FRAME]


def _part(copy: bytes, at: int, size: int) -> bytes:
    return copy[at : at + size]


def cursor(data: bytes) -> None:
    """Only cursors that we sealed are accepted, and unsealing one returns its request and
    position."""
    text = data.decode("utf-8", "surrogateescape")
    for given in (None, Request(grep="x"), Request(lines="1:2")):
        with contextlib.suppress(InvalidArgument):
            unseal(_KEY, _ARTIFACT, text, given)
            raise AssertionError("a forged cursor was accepted")
    with contextlib.suppress(InvalidArgument):
        continues_slice(text)
    cut = data[0] if data else 0
    members: dict[str, Any] = {
        "grep": data[1:cut].decode("utf-8", "replace") or None,
        "lines": data[cut : 2 * cut].decode("ascii", "replace") or None,
        "query": data[2 * cut :].decode("utf-8", "replace") or None,
    }
    for name, value in members.items():
        with contextlib.suppress(InvalidArgument):
            request = Request(**{name: value})
            position = tuple(data[:20])
            made = seal(_KEY, _ARTIFACT, request, position)
            again, at = unseal(_KEY, _ARTIFACT, made, request)
            assert at == position
            assert seal(_KEY, _ARTIFACT, again, at) == made
            with contextlib.suppress(InvalidArgument):
                unseal(_KEY, "f" * 64, made, request)
                raise AssertionError("a cursor of another artifact was accepted")


@cache
def _store() -> Store:
    return coatcheck.open("memory:")


def transcript(data: bytes) -> None:
    """A line, whole and slim: every byte comes back. A slim line that we did not write raises only
    our errors."""
    store = _store()
    keeper = Keeper(store, _TRANSCRIPT, policy=Policy(max_chars=600))
    fetch = fetch_from(store)
    for name in ("openai-chat", "anthropic", "mcp"):
        for text in (data, b'{"role":"tool","content":"' + data * 8 + b'"}'):
            slimmed = slim(text, FORMATS[name], keeper)
            assert refs_of(text) or whole(slimmed.text, fetch) == text, "a text was not restored"
            assert slim(slimmed.text, FORMATS[name], keeper).text == slimmed.text
    for read in (refs_of, sessions_in, bare):
        read(data)
    with contextlib.suppress(CoatcheckError):
        whole(data, fetch)


def wire(data: bytes) -> None:
    """Lines and messages of MCP: the same however the bytes are split. An unchanged message keeps
    its bytes."""
    step = 1 + (data[0] if data else 0)
    stretched = data[: len(data) // 2] + b"x" * _LINE_LIMIT + data[len(data) // 2 :]
    for stream in (data, stretched):
        lines = _lines(stream, len(stream) or 1)
        assert lines == _lines(stream, step)
        sizes = [len(line) if isinstance(line, bytes) else line[0] for line in lines]
        assert sum(sizes) + stream.count(b"\n") == len(stream), "bytes were lost"
    for line in (data, *_lines(data, step)):
        if isinstance(line, bytes):
            for message in parse(line):
                assert parse(encode(message.body))[0].id == message.id
                assert parse(bytes(message.raw))[0].method == message.method
            UnparsedLine.of(line)


def _lines(data: bytes, step: int) -> list[Any]:
    buffer = LineBuffer(_LINE_LIMIT)
    found = [one for at in range(0, len(data), step) for one in buffer.feed(data[at : at + step])]
    found += buffer.end()
    return [
        (one.size, one.head, one.tail, one.id, one.method)
        if isinstance(one, UnparsedLine)
        else bytes(one)
        for one in found
    ]


def events(data: bytes) -> None:
    """Server-sent events: the same however the bytes are split, and no byte is lost."""
    step = 1 + (data[0] if data else 0)
    found = _events(data, len(data) or 1)
    assert found == _events(data, step) == _events(data, 1)
    assert b"".join(event.raw for event in found[0]) + found[1] == data


def _events(data: bytes, step: int) -> tuple[list[Any], bytes]:
    splitter = EventSplitter()
    return [
        one for at in range(0, len(data), step) for one in splitter.feed(data[at : at + step])
    ], splitter.rest()


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    one.__name__: one for one in (log, frame, cursor, transcript, wire, events)
}
