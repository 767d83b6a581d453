"""Several servers behind one proxy, seen from both sides: routing, cancellation and the end of a
server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.speaking import Speaker, environment, heard, proxy, scripted_server

Board = Callable[..., Speaker]
FAILED = "upstream_failed"
RESOURCES: dict[str, Any] = {
    "resources/list": {"resources": []},
    "resources/templates/list": {"resourceTemplates": []},
}
NOT_FOUND = {"code": -32002, "message": "Resource not found"}
NO_TASK = {"code": -32602, "message": "no such task"}
UNKNOWN = {"code": -32601, "message": "Method not found"}


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """Start a proxy in front of scripted servers, by name."""
    with ExitStack() as stack:

        def start(*options: str, version: str = "2025-06-18", **servers: dict[str, Any]) -> Speaker:
            config = tmp_path / "servers.json"
            commands = {name: scripted_server(name, **answers) for name, answers in servers.items()}
            entries = {
                name: {"command": words[0], "args": words[1:]} for name, words in commands.items()
            }
            config.write_text(json.dumps({"mcpServers": entries}))
            inline = [word for name in servers for word in ("--inline", f"{name}_heard")]
            command = proxy("--config", str(config), *inline, *options)
            speaker = stack.enter_context(Speaker(command, environment(tmp_path / "store")))
            speaker.hello = speaker.begin(version)["result"]  # type: ignore[attr-defined]
            return speaker

        yield start


def say(speaker: Speaker, server: str, *bodies: dict[str, Any]) -> None:
    """Make a server send these messages, and wait until they have passed."""
    lines = [json.dumps({"jsonrpc": "2.0", **body}) for body in bodies]
    assert speaker.call(f"{server}_say", lines=lines)["content"] == []


def methods(speaker: Speaker, server: str) -> list[str]:
    return [one["method"] for one in heard(speaker, server) if "method" in one]


def test_requests_of_two_servers_with_the_same_id_each_get_their_own_answer(board: Board) -> None:
    client = board(a={}, b={})
    meta = {"_meta": {"progressToken": 5}}
    for server in "ab":
        say(
            client,
            server,
            {"id": 1, "method": "sampling/createMessage", "params": {"from": server, **meta}},
        )
    asked = [client.until(lambda one: one.get("method") == "sampling/createMessage") for _ in "ab"]
    assert (
        len({one["id"] for one in asked})
        == len({one["params"]["_meta"]["progressToken"] for one in asked})
        == 2
    )
    for one in asked:
        token = one["params"]["_meta"]["progressToken"]
        client.tell("notifications/progress", {"progressToken": token, "progress": 1})
        client.send({"jsonrpc": "2.0", "id": one["id"], "result": {"to": one["params"]["from"]}})
    for server in "ab":
        seen = [
            one
            for one in heard(client, server)
            if one.get("id") == 1 or "progress" in one.get("method", "")
        ]
        assert [one.get("params", {}).get("progressToken") for one in seen] == [5, None]
        assert seen[1]["result"] == {"to": server}


def test_a_server_cancels_its_request_under_the_id_that_the_client_knows(board: Board) -> None:
    client = board(a={}, b={})
    say(client, "b", {"id": "x", "method": "elicitation/create", "params": {}})
    asked = client.until(lambda one: one.get("method") == "elicitation/create")
    say(
        client, "a", {"method": "notifications/cancelled", "params": {"requestId": "x"}}
    )  # not its own
    say(
        client,
        "b",
        {"method": "notifications/cancelled", "params": {"requestId": "x", "reason": "why"}},
    )
    back = client.until(lambda one: one.get("method") == "notifications/cancelled")
    assert back["params"] == {"requestId": asked["id"], "reason": "why"}


@pytest.mark.parametrize("request_id", [0, "", "1", 1.5, "coatcheck-1"])
def test_a_call_is_answered_under_any_valid_id(board: Board, request_id: Any) -> None:
    client = board(a={}, b={})
    params = {"name": "b_heard", "arguments": {}}
    client.send({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params})
    assert client.answer(request_id)["result"]


@pytest.mark.parametrize(
    "line", [b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}', b"{nonsense", b"[]", b"[1]"]
)
def test_an_invalid_request_is_refused_and_reaches_no_server(board: Board, line: bytes) -> None:
    client = board(a={}, b={})
    client.write(line)
    assert client.until(lambda one: "error" in one)["error"]["code"] in (-32600, -32700)
    assert methods(client, "a") == ["initialize", "notifications/initialized", "tools/list"]


def test_a_cancelled_call_is_cancelled_only_at_its_server(board: Board) -> None:
    client = board(a={}, b={})
    client.ask("tools/list")
    waiting = client.start("tools/call", {"name": "b_hold", "arguments": {}})
    assert "tools/call" in methods(client, "b")
    client.tell("notifications/cancelled", {"requestId": waiting})
    assert "notifications/cancelled" in methods(client, "b")
    assert "notifications/cancelled" not in methods(client, "a")


def test_an_unknown_method_has_no_timeout_and_can_be_cancelled(board: Board) -> None:
    client = board(a={"new/wait": UNKNOWN}, b={})
    waiting = client.start("new/wait", {"_meta": {"progressToken": "t"}})
    while "new/wait" not in methods(client, "b"):
        pass
    asked = next(one for one in heard(client, "b") if one.get("method") == "new/wait")
    client.tell("notifications/cancelled", {"requestId": waiting})
    while "notifications/cancelled" not in methods(client, "b"):
        pass
    cancelled = next(
        one for one in heard(client, "b") if one.get("method") == "notifications/cancelled"
    )
    assert cancelled["params"]["requestId"] == asked["id"]


def test_a_task_is_found_at_the_server_that_has_it(board: Board) -> None:
    tasks: dict[str, Any] = {"capabilities": {"tasks": {"list": {}}}}
    mine = {
        "tasks/get": {"taskId": "t", "status": "working"},
        "tasks/list": {"tasks": [{"taskId": "t"}]},
    }
    client = board(
        a={**tasks, "tasks/get": NO_TASK, "tasks/list": {"tasks": [{"taskId": "s"}]}},
        b={**tasks, **mine},
        c={},
    )
    assert client.ask("tasks/get", {"taskId": "t"})["result"]["status"] == "working"
    assert [one["taskId"] for one in client.ask("tasks/list")["result"]["tasks"]] == ["s", "t"]


def test_an_unlisted_uri_is_looked_up_at_every_server(board: Board) -> None:
    has = {"capabilities": {"resources": {"subscribe": True}}, **RESOURCES}
    found = {"contents": [{"uri": "x://1", "text": "here"}]}
    client = board(
        a={**has, "resources/read": NOT_FOUND, "resources/subscribe": NOT_FOUND},
        b={**has, "resources/read": found, "resources/subscribe": {}},
    )
    assert client.ask("resources/read", {"uri": "x://1"})["result"] == found
    assert client.ask("resources/subscribe", {"uri": "x://1"})["result"] == {}


def test_the_most_specific_template_decides_which_server_reads_a_uri(board: Board) -> None:
    def has(template: str, text: str) -> dict[str, Any]:
        templates = {"resourceTemplates": [{"uriTemplate": template, "name": "t"}]}
        read = {"contents": [{"uri": "x://items/5", "text": text}]}
        return {
            "capabilities": {"resources": {}}, "resources/list": {"resources": []},
            "resources/templates/list": templates, "resources/read": read,
        }  # fmt: skip

    client = board(
        a=has("x://{+a_long_name_for_a_path}", "a"),
        b=has("x://items/{id}", "b"),
        c=has("x://items/{id}/parts", "c"),
    )
    assert (
        client.ask("resources/read", {"uri": "x://items/5"})["result"]["contents"][0]["text"] == "b"
    )


def test_the_end_of_a_server_cancels_its_requests_and_reports_changed_lists(board: Board) -> None:
    client = board(a={"capabilities": {"prompts": {}}, "prompts/list": {"prompts": []}}, b={})
    assert client.hello["capabilities"]["tools"] == {"listChanged": True}  # type: ignore[attr-defined]
    client.ask("tools/list")
    say(client, "a", {"id": 1, "method": "elicitation/create", "params": {}})
    asked = client.until(lambda one: one.get("method") == "elicitation/create")
    client.start("tools/call", {"name": "a_end", "arguments": {}})
    back = client.until(lambda one: one.get("method") == "notifications/cancelled")
    assert back["params"]["requestId"] == asked["id"]
    client.until(lambda one: one.get("method") == "notifications/tools/list_changed")
    client.until(lambda one: one.get("method") == "notifications/prompts/list_changed")
    assert [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]][:1] == ["b_say"]


def test_the_timeout_resumes_when_the_server_that_paused_it_has_ended(board: Board) -> None:
    client = board("--timeout", "2", a={}, b={})
    client.ask("tools/list")
    say(client, "a", {"id": 1, "method": "elicitation/create", "params": {}})
    client.start("tools/call", {"name": "a_end", "arguments": {}})
    assert client.call("b_hold")["data"]["code"] == FAILED


def test_a_tool_keeps_the_name_that_it_was_given_first(board: Board) -> None:
    def has(server: str) -> dict[str, Any]:
        names = ["shared", f"{server}_say", f"{server}_heard", f"{server}_hold", f"{server}_end"]
        return {
            "tools/list": {
                "tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]
            }
        }

    client = board(a=has("a"), b=has("b"))
    client.ask("tools/list")
    assert "b has no tool 'shared'" in client.call("b_shared")["message"]
    assert FAILED in client.call("a_end")["data"]["code"]
    assert "shared" in [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]]
    assert "b has no tool 'shared'" in client.call("b_shared")["message"]
    assert "b has no tool 'shared'" in client.call("shared")["message"]


@pytest.mark.parametrize("cursor", ["", "0"])
def test_paging_stops_when_a_cursor_is_empty_or_repeats(board: Board, cursor: str) -> None:
    page = {"tools": [{"name": "x", "inputSchema": {"type": "object"}}], "nextCursor": cursor}
    client = board(a={"tools/list": [page]}, b={})
    names = [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]]
    assert names.count("x") == 1
    assert "b_heard" in names


def test_the_pages_of_all_servers_are_merged(board: Board) -> None:
    def page(*names: str, **more: str) -> dict[str, Any]:
        return {
            "tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names],
            **more,
        }

    client = board(
        a={"tools/list": [page("x", nextCursor="1"), page("y", nextCursor="2"), page("z")]}, b={}
    )
    names = [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]]
    assert names == [
        "x",
        "y",
        "z",
        "b_say",
        "b_heard",
        "b_hold",
        "b_end",
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]


@pytest.mark.parametrize(
    ("wanted", "spoken"), [("2024-11-05", "2024-11-05"), ("2025-06-18", "2025-11-25")]
)
def test_the_clients_protocol_version_is_used_if_a_server_supports_it(
    board: Board, wanted: str, spoken: str
) -> None:
    client = board(version=wanted, a={"version": spoken}, b={"version": "2025-11-25"})
    assert client.hello["protocolVersion"] == spoken  # type: ignore[attr-defined]


def test_a_log_level_that_every_server_refuses_is_refused(board: Board) -> None:
    logs = {
        "capabilities": {"logging": {}},
        "logging/setLevel": {"code": -32602, "message": "no such level"},
    }
    assert (
        board(a=logs, b={}).ask("logging/setLevel", {"level": "loud"})["error"]["message"]
        == "no such level"
    )


def test_a_server_that_does_not_start_does_not_block_the_others(board: Board) -> None:
    client = board("--timeout", "4", a={"silent": True}, b={})
    assert [tool["name"] for tool in client.ask("tools/list")["result"]["tools"]][:1] == ["b_say"]
    assert "handshake" in client.complained("coatcheck: a:")
