"""Lines and messages are parsed the same, however the stream is split."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.wire import LineBuffer, UnparsedLine, encode, failure, parse, response, rewritten

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def whole(line: object) -> bytes:
    assert isinstance(line, bytes | bytearray)
    return bytes(line)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@given(st.lists(st.binary().filter(lambda line: b"\n" not in line)), st.lists(st.integers(0, 20)))
def test_lines_are_the_same_however_the_stream_is_split(
    lines: list[bytes], sizes: list[int]
) -> None:
    cutter = LineBuffer()
    found = [
        whole(line)
        for piece in cut(b"".join(line + b"\n" for line in lines), sizes)
        for line in cutter.feed(piece)
    ]
    assert found == lines
    assert list(cutter.end()) == []


@given(st.binary(min_size=1).filter(lambda line: b"\n" not in line))
def test_a_last_line_without_a_newline_is_returned(line: bytes) -> None:
    cutter = LineBuffer()
    assert list(cutter.feed(line)) == []
    assert [whole(one) for one in cutter.end()] == [line]


@given(
    st.integers(200, 30_000),
    st.lists(st.integers(0, 5_000)),
    st.integers(0, 9_999_999) | st.text(max_size=10),
    st.booleans(),
)
@example(20_000, [], "\\", False)
@example(200, [201], "\U0001f600" * 10, True)
def test_the_size_and_id_of_a_line_over_the_limit_are_reported(
    size: int, sizes: list[int], request_id: Any, first: bool
) -> None:
    named = f'"id":{json.dumps(request_id)}'
    inside = '"result":{"id":5,"text":"' + "x" * size + '"}'
    line = (
        f'{{"jsonrpc":"2.0",{named},{inside}}}'
        if first
        else f'{{{inside},"jsonrpc":"2.0",{named}}}'
    ).encode()
    cutter = LineBuffer(max_size=200)  # the id is within this
    found = [one for piece in cut(line + b"\nnext\n", sizes) for one in cutter.feed(piece)]
    assert isinstance(found[0], UnparsedLine)
    assert (found[0].size, found[0].id) == (len(line), request_id)
    assert whole(found[1]) == b"next"


@given(st.dictionaries(st.text(), JSON))
def test_an_encoded_message_is_one_line_and_parses_back(body: dict[str, Any]) -> None:
    raw = encode(body)
    assert b"\n" not in raw
    (message,) = parse(raw)
    assert message.body == body
    assert message.raw is raw


@given(st.lists(st.dictionaries(st.text(), JSON), min_size=1, max_size=3))
def test_a_batch_is_parsed_into_its_messages(bodies: list[dict[str, Any]]) -> None:
    assert [message.body for message in parse(encode(bodies))] == bodies


@given(st.binary() | JSON.filter(lambda value: not isinstance(value, dict | list)).map(encode))
def test_only_objects_are_parsed_as_messages(raw: bytes) -> None:
    for message in parse(raw):
        assert isinstance(message.body, dict)


def test_half_a_surrogate_pair_survives_in_messages_of_any_size() -> None:
    for filler in ("", "x" * 100_000):
        body = {"half": "\ud800", "filler": filler}
        (message,) = parse(bytearray(encode(body)))
        assert message.body == body
        assert json.loads(rewritten(message, more=1).raw) == {**body, "more": 1}


def test_a_message_in_a_large_line_keeps_its_bytes() -> None:
    raw = bytearray(b'{"a":  1.50, "b": "' + b"y" * 100_000 + b'"}')
    (message,) = parse(raw)
    assert bytes(message.raw) == bytes(raw)


def test_endless_brackets_are_not_a_message() -> None:
    assert parse(b"[" * 200_000) == []
    assert parse(b'{"a":' * 200_000) == []


def test_answers_have_the_shape_of_json_rpc() -> None:
    assert response("a", {"b": 1}).body == {"jsonrpc": "2.0", "id": "a", "result": {"b": 1}}
    error = failure(None, UpstreamFailed("it ended", hint="start it")).body["error"]
    assert error == {
        "code": -32000,
        "message": "it ended (start it)",
        "data": {"code": "upstream_failed"},
    }
