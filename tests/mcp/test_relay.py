"""Odd, late or unreadable messages in both directions: each request is answered once, the others go
on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mcp.speaking import Speaker, environment, heard, proxy, scripted_server, stub_in, text_of

Speak = Callable[..., Speaker]
FAILED = "upstream_failed"
LONG = "0123456789 " * 5_000


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """A proxy with a small size limit in front of a scripted server."""
    env = environment(tmp_path_factory.mktemp("relay") / "store")
    with Speaker(proxy("--max-message", "1", server=scripted_server("it")), env) as speaker:
        speaker.begin()
        speaker.ask("tools/list")
        yield speaker


def say(speaker: Speaker, *lines: Any, **how: Any) -> None:
    """Make the server write these lines, and wait until they have passed."""
    written = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    assert speaker.call("it_say", lines=written, **how)["content"] == []


def unanswered_call(speaker: Speaker, request_id: Any = None) -> Any:
    """Start a call that the server does not answer."""
    params = {"name": "it_hold", "arguments": {}}
    if request_id is None:
        return speaker.start("tools/call", params)
    speaker.send({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})
    return request_id


def result(request_id: Any, text: str) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": request_id,
        "result": {"content": [{"type": "text", "text": text}]},
    }


@pytest.mark.parametrize("name", [["a list"], {"an": "object"}, None, 7, True])
def test_a_call_whose_name_is_not_a_string_is_passed_to_the_server(one: Speaker, name: Any) -> None:
    assert (
        one.ask("tools/call", {"name": name, "arguments": {}})["error"]["message"]
        == f"it has no tool {name!r}"
    )
    assert one.call("it_heard")


@pytest.mark.parametrize("request_id", [0, -1, "", "0", 1.5, 2**70, "coatcheck-0", "ü\n"])
def test_every_id_of_json_rpc_is_answered_and_its_result_slimmed(
    one: Speaker, request_id: Any
) -> None:
    unanswered_call(one, request_id)
    say(one, result(request_id, LONG))
    assert stub_in(text_of(one.answer(request_id)["result"]))["size_bytes"] == len(LONG)


def test_a_result_with_invalid_utf_8_passes_byte_for_byte(one: Speaker) -> None:
    waiting = unanswered_call(one)
    say(one, result(waiting, "caf@"), hex="e9")
    assert text_of(one.answer(waiting)["result"]) == "caf\ufffd"
    assert json.dumps(result(waiting, "caf@")).encode().replace(b"@", b"\xe9") in one.lines


def test_a_large_result_with_invalid_utf_8_becomes_a_stub(one: Speaker) -> None:
    waiting = unanswered_call(one)
    say(one, result(waiting, "@" + LONG), hex="e9")
    assert stub_in(text_of(one.answer(waiting)["result"]))


@pytest.mark.parametrize("broken", ['"x', "1e", "[" * 3_000 + "]" * 3_000, "9" * 5_000])
def test_an_answer_that_cannot_be_parsed_is_an_error_at_once(one: Speaker, broken: str) -> None:
    waiting = unanswered_call(one)
    say(one, f'{{"jsonrpc":"2.0","id":{waiting},"result":{broken}}}')
    assert one.answer(waiting)["error"]["data"]["code"] == FAILED


def big(**body: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", **body, "params": {"data": "@"}})


@pytest.mark.parametrize(
    "line", [big(method="notifications/message"), big(method="from/the/future")], ids=["", "new"]
)
def test_a_notification_that_is_too_large_does_not_affect_pending_requests(
    one: Speaker, line: str
) -> None:
    waiting = unanswered_call(one)
    say(one, line, result(waiting, "still there"), hex="78", times=2 << 20)
    assert text_of(one.answer(waiting)["result"]) == "still there"


@pytest.mark.parametrize("id_first", [True, False])
def test_a_request_of_the_server_that_is_too_large_gets_an_error(
    one: Speaker, id_first: bool
) -> None:
    waiting = unanswered_call(
        one
    )  # with the same id: both sides number their requests independently
    ask = {"method": "sampling/createMessage"}
    line = (
        big(id=waiting, **ask)
        if id_first
        else json.dumps({**ask, "params": ["@"], "jsonrpc": "2.0", "id": waiting})
    )
    say(one, line, hex="78", times=2 << 20)
    say(one, result(waiting, "still there"))
    assert text_of(one.answer(waiting)["result"]) == "still there"
    errors = [
        found["error"]
        for found in heard(one, "it")
        if found.get("id") == waiting and "error" in found
    ]
    assert [error["data"]["code"] for error in errors] == [FAILED]


def test_an_answer_of_the_client_that_is_too_large_becomes_an_error(one: Speaker) -> None:
    say(one, {"jsonrpc": "2.0", "id": "sample", "method": "sampling/createMessage", "params": {}})
    one.until(lambda found: found.get("method") == "sampling/createMessage")
    one.send({"jsonrpc": "2.0", "id": "sample", "result": {"content": "x" * (2 << 20)}})
    assert [
        found["error"]["data"]["code"] for found in heard(one, "it") if found.get("id") == "sample"
    ] == [FAILED]
    assert not [found for found in one.heard if found.get("id") == "sample"]


def test_a_request_that_timed_out_gets_no_second_answer(speak: Speak) -> None:
    speaker = speak("--timeout", "1", server=scripted_server("it"))
    waiting = unanswered_call(speaker)
    assert speaker.answer(waiting)["error"]["data"]["code"] == FAILED
    say(speaker, result(waiting, "too late"))
    assert not [found for found in speaker.heard if found.get("id") == waiting]


@pytest.mark.parametrize("end", ["", None])
def test_a_page_with_an_empty_cursor_is_the_last(speak: Speak, end: str | None) -> None:
    page = {"tools": [{"name": "x", "inputSchema": {"type": "object"}}], "nextCursor": end}
    listed = speak(server=scripted_server("it", **{"tools/list": [page]})).ask("tools/list")[
        "result"
    ]["tools"]
    assert [tool["name"] for tool in listed] == [
        "x",
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]


def test_the_result_of_a_task_follows_the_rule_for_its_tool(speak: Speak) -> None:
    whole = {"content": [{"type": "text", "text": LONG}]}
    speaker = speak("--inline", "it_hold", server=scripted_server("it", **{"tasks/result": whole}))
    speaker.ask("tools/list")
    waiting = unanswered_call(speaker)
    say(
        speaker,
        {
            "jsonrpc": "2.0",
            "id": waiting,
            "result": {"task": {"taskId": "mine", "status": "working"}},
        },
    )
    assert speaker.answer(waiting)["result"]["task"]["taskId"] == "mine"
    assert speaker.ask("tasks/result", {"taskId": "mine"})["result"] == whole
    assert stub_in(text_of(speaker.ask("tasks/result", {"taskId": "another"})["result"]))


def test_links_are_kept_when_many_blocks_become_one_stub(one: Speaker) -> None:
    waiting = unanswered_call(one)
    link = {
        "type": "resource_link",
        "uri": "it://1",
        "name": "a link",
        "annotations": {"priority": 1.0},
    }
    texts = [{"type": "text", "text": f"row number {number}"} for number in range(3_000)]
    say(one, {"jsonrpc": "2.0", "id": waiting, "result": {"content": [*texts, link]}})
    stub, kept, stored = one.answer(waiting)["result"]["content"]
    assert stub_in(stub["text"])
    assert kept == link
    assert stored["uri"].startswith("art://")


def test_a_batch_is_answered_message_by_message(one: Speaker) -> None:
    calls = [
        {"jsonrpc": "2.0", "id": f"b{n}", "method": "tools/call", "params": {"name": "it_heard"}}
        for n in (1, 2)
    ]
    one.write(json.dumps([*calls, {"jsonrpc": "2.0", "method": "notifications/batched"}]).encode())
    assert [one.answer(call["id"])["id"] for call in calls] == ["b1", "b2"]
    assert "notifications/batched" in [found.get("method") for found in heard(one, "it")]


@pytest.mark.parametrize("depth", [400, 800, 950])
def test_a_call_with_arguments_of_any_depth_is_answered(one: Speaker, depth: int) -> None:
    params = {"name": "it_heard", "arguments": {"x": "@"}}
    line = json.dumps(
        {"jsonrpc": "2.0", "id": f"d{depth}", "method": "tools/call", "params": params}
    )
    one.write(line.replace('"@"', "[" * depth + '"art:000000000000"' + "]" * depth).encode())
    found = one.answer(f"d{depth}")
    assert "result" in found or "error" in found


def test_a_listing_whose_cursor_repeats_is_abandoned(speak: Speak) -> None:
    page = {"tools": [{"name": "it_heard", "inputSchema": {"type": "object"}}], "nextCursor": "0"}
    speaker = speak(server=scripted_server("it", **{"tools/list": [page]}))
    assert [one["method"] for one in heard(speaker, "it")].count("tools/list") == 2


SMALL = 20_000  # more bytes than an answer with only a stub or our own error message


@pytest.mark.parametrize(
    "error",
    [
        {"code": -32000, "message": LONG * 10},
        {"code": -32000, "message": "failed", "data": {"trace": LONG * 10}},
        {"code": "odd", "message": {"not": LONG * 10}, "data": [LONG]},
    ],
)
def test_a_large_error_of_the_server_becomes_a_stub_that_can_be_read(
    one: Speaker, error: dict[str, Any]
) -> None:
    request = unanswered_call(one)
    say(one, {"jsonrpc": "2.0", "id": request, "error": error})
    answer = one.answer(request)
    assert len(json.dumps(answer)) < SMALL
    assert answer["error"]["code"] == error["code"]
    large = answer["error"]["data"] if "data" in error else json.loads(answer["error"]["message"])
    assert "0123456789" in text_of(one.call("get_artifact", pointer=large["artifact"]))


def test_a_small_error_passes_byte_for_byte(one: Speaker) -> None:
    line = '{"id": %s,  "error":{"code":-1,"message":"' + "no " * 400 + '","data":1.50}}'
    request = unanswered_call(one)
    say(one, line % request)
    one.answer(request)
    assert (line % request).encode() in one.lines


@pytest.mark.parametrize("second", ["result", "error"])
def test_a_second_answer_to_one_request_is_not_passed_on(one: Speaker, second: str) -> None:
    request = unanswered_call(one)
    more = (
        result(request, LONG)
        if second == "result"
        else {"id": request, "error": {"code": 1, "message": LONG}}
    )
    say(one, result(request, "the answer"), more, result("of nobody", LONG))
    assert text_of(one.answer(request)["result"]) == "the answer"
    one.call("it_heard")
    assert not [message for message in one.heard if message.get("id") in (request, "of nobody")]


@pytest.mark.parametrize(
    "body",
    [
        {"result": LONG},
        {"result": {"content": LONG}},
        {
            "result": {
                "content": [],
                "structuredContent": {"content": [{"type": "text", "text": LONG}]},
            }
        },
        {
            "result": {"content": [{"type": "text", "text": LONG}]},
            "error": {"code": 1, "message": "both"},
        },
    ],
)
def test_invalid_results_are_bounded_too(one: Speaker, body: dict[str, Any]) -> None:
    request = unanswered_call(one)
    say(one, {"jsonrpc": "2.0", "id": request, **body})
    assert len(json.dumps(one.answer(request))) < SMALL


@pytest.mark.parametrize("contents", [LONG, [LONG], {"text": LONG}, None])
def test_invalid_resource_contents_are_an_error(speak: Speak, contents: Any) -> None:
    speaker = speak(
        server=scripted_server("it", **{"resources/read": {"contents": contents, "x": LONG}})
    )
    assert speaker.ask("resources/read", {"uri": "it://x"})["error"]["data"]["code"] == FAILED


def test_an_error_without_a_request_id_is_bounded(one: Speaker) -> None:
    say(one, {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": LONG}})
    answer = one.until(lambda message: "error" in message and message.get("id") is None)
    assert stub_in(answer["error"]["message"])


def test_a_tool_that_only_looks_like_ours_is_slimmed(speak: Speak) -> None:
    ours = speak(server=scripted_server("it")).ask("tools/list")["result"]["tools"]
    schema = next(tool["inputSchema"] for tool in ours if tool["name"] == "get_artifact")
    tools = [{"name": name, "inputSchema": schema} for name in ("it_say", "it_hold")]
    speaker = speak(server=scripted_server("it", **{"tools/list": {"tools": tools}}))
    speaker.ask("tools/list")
    request = unanswered_call(speaker)
    say(speaker, result(request, LONG * 2))
    assert stub_in(text_of(speaker.answer(request)["result"]))
