"""Event streams in every form that the format allows, split anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.mcp.remote import MAX_RETRY, RETRY, EventStream
from coatcheck.mcp.wire import Raw, UnparsedLine

ONE = b'{"jsonrpc":"2.0","id":1,"result":{}}'
SHAPES = [
    b"data: %b\n\n",
    b"data:%b\n\n",
    b"event: message\r\nid: 7\r\ndata: %b\r\n\r\n",
    b"event: message\rdata: %b\r\r",
    b": a comment\n\n:another\nretry: 10\nid: 7\ndata:\n\ndata: %b\n\n",
    b"\xef\xbb\xbfdata: %b\n\n",
    b"event: ping\ndata: {}\n\ndata: %b\n\nevent: endpoint\ndata: /here\n\n",
    b"retry: -5\nretry: x\nid\ndata\n\nunknown: field\ndata: %b\n\n",
    b"\n\n\ndata: %b\n\ndata: a part of an event",
]


def read(
    stream: bytes, sizes: list[int], cap: int = 1 << 20
) -> tuple[list[Raw | UnparsedLine], EventStream]:
    events, found, at = EventStream(cap), [], 0
    for size in [*sizes, len(stream)]:
        found += list(events.feed(stream[at : at + size]))
        at += size
    return found, events


@given(st.sampled_from(SHAPES), st.lists(st.integers(0, 9), max_size=40))
def test_a_message_is_the_same_in_every_shape_however_the_stream_is_split(
    shape: bytes, sizes: list[int]
) -> None:
    found, _ = read(shape % ONE, sizes)
    assert [bytes(one) for one in found if not isinstance(one, UnparsedLine)] == [ONE]


@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from(["\n", "\r", "\r\n"]))
def test_data_over_several_lines_is_one_line(sizes: list[int], eol: str) -> None:
    lines = json.dumps(json.loads(ONE), indent=2).splitlines()
    (found,), _ = read((eol.join(f"data: {line}" for line in lines) + eol * 2).encode(), sizes)
    assert isinstance(found, bytes | bytearray)
    assert b"\n" not in found
    assert json.loads(found) == json.loads(ONE)


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_size_and_id_of_an_event_over_the_limit_are_reported(pieces: int) -> None:
    whole = b'{"jsonrpc":"2.0","id":1,"result":["' + b"x" * 5_000 + b'"]}'
    step = -(-len(whole) // pieces)
    lines = [whole[at : at + step] for at in range(0, len(whole), step)]
    stream = b"".join(b"data: " + line + b"\n" for line in lines) + b"\ndata: " + ONE + b"\n\n"
    (large, small), _ = read(stream, [100] * 60, cap=3_000)
    assert isinstance(large, UnparsedLine)
    assert (large.id, large.method) == (1, None)
    assert large.size >= 5_000
    assert small == ONE


def test_a_stream_is_resumed_after_the_last_complete_event() -> None:
    _, events = read(b"id: 4\ndata: {}\n\nid: 5\ndata: {", [])
    assert events.last_id == "4"
    events.begin()
    assert list(events.feed(b"data: " + ONE + b"\n\n")) == [ONE]
    assert events.last_id == "4"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"2000", 2.0), (b"0", 0.05), (b"-7", 0.05), (b"9999999", MAX_RETRY), (b"soon", RETRY)],
)
def test_the_retry_delay_of_a_stream_is_bounded(value: bytes, seconds: float) -> None:
    assert read(b"retry: " + value + b"\n\n", [])[1].retry == seconds
