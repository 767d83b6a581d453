"""One conversation in every format, with a large result in each place that the format has for
one."""

from __future__ import annotations

import base64
import json
from typing import Any

LARGE = "".join(
    f"2026-01-02T03:04:{i % 60:02} INFO request {i} took {i * 7 % 1000} ms “ok”\n"
    for i in range(400)
)
ROWS = [{"id": number, "name": f"row {number}", "ok": number % 3 == 0} for number in range(900)]
IMAGE = base64.b64encode(bytes(range(256)) * 80).decode()
CODE = "def f(x):\n    return x + 1\n\n" * 500

Line = dict[str, Any]


def openai_chat() -> list[Line]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "write", "arguments": json.dumps({"text": CODE})},
    }
    url = "data:image/png;base64," + IMAGE
    return [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "x_host": {"kept": [1, None]}},
        {"role": "tool", "tool_call_id": "call_1", "name": "write", "content": LARGE},
        {"role": "assistant", "content": "Done."},
    ]


def openai_responses() -> list[Line]:
    return [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "s" * 20_000},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "read",
            "arguments": '{"p":1}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": LARGE},
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "name": "list",
            "arguments": "{}",
            "output": json.dumps(ROWS),
        },
    ]


def anthropic() -> list[Line]:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    inner = [{"type": "text", "text": LARGE}, {"type": "image", "source": source}]
    return [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t" * 20_000, "signature": "s" * 20_000},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "write",
                    "input": {"path": "a.py", "content": CODE},
                },
                {"type": "tool_use", "id": "toolu_2", "name": "rows", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": inner,
                    "cache_control": {"type": "x"},
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": json.dumps(ROWS),
                    "is_error": True,
                },
            ],
        },
    ]


def claude_code() -> list[Line]:
    def line(kind: str, number: int, message: Line, **more: Any) -> Line:
        about = {
            "parentUuid": None,
            "isSidechain": False,
            "sessionId": "s",
            "version": "2.1.0",
            "type": kind,
        }
        return {
            **about,
            "message": message,
            "uuid": f"u{number}",
            "timestamp": "2026-01-01T00:00:00Z",
            **more,
        }

    _, answer, results = anthropic()
    halves = [{**answer, "id": "msg_1", "content": [block]} for block in answer["content"]]
    answers = [{**results, "content": [block]} for block in results["content"]]
    return [
        {
            "type": "file-history-snapshot",
            "messageId": "m",
            "snapshot": {},
            "isSnapshotUpdate": False,
        },
        line("user", 1, {"role": "user", "content": "go"}),
        *(line("assistant", 2 + number, half) for number, half in enumerate(halves)),
        line(
            "user",
            6,
            answers[0],
            toolUseResult={"stdout": LARGE, "file": {"content": CODE, "numLines": 3}},
        ),
        line("user", 7, answers[1], toolUseResult={"rows": ROWS}),
        {
            "type": "progress",
            "uuid": "p",
            "data": {"message": {"message": answers[0]}},
            "toolUseID": "toolu_1",
        },
        line(
            "assistant",
            8,
            {"role": "assistant", "content": [{"type": "text", "text": "side"}]},
            isSidechain=True,
        ),
        line(
            "assistant",
            9,
            {"role": "assistant", "id": "msg_2", "content": [{"type": "text", "text": "Done."}]},
        ),
    ]


def pi() -> list[Line]:
    def message(**fields: Any) -> Line:
        return {"type": "message", "timestamp": "2026-01-01T00:00:00Z", "message": fields}

    call = {
        "type": "toolCall",
        "id": "t1",
        "name": "edit",
        "arguments": {"path": "a", "newText": CODE},
    }
    return [
        {"type": "session", "id": "s", "timestamp": "2026-01-01T00:00:00Z", "cwd": "/w"},
        message(role="user", content=[{"type": "text", "text": "go"}]),
        message(role="assistant", content=[call]),
        message(
            role="toolResult",
            toolCallId="t1",
            toolName="edit",
            content=[{"type": "text", "text": LARGE}],
            details={"diff": LARGE, "rows": ROWS},
            isError=False,
        ),
        {
            "type": "compaction",
            "timestamp": "2026-01-01T00:00:00Z",
            "summary": "s" * 20_000,
            "firstKeptEntryIndex": 3,
        },
        message(role="bashExecution", command="ls", output=LARGE, exitCode=0),
        message(role="assistant", content=[{"type": "text", "text": "Done."}]),
    ]


def langchain() -> list[Line]:
    call = {"name": "write", "args": {"text": CODE}, "id": "c1", "type": "tool_call"}
    tool = {
        "content": LARGE,
        "name": "write",
        "tool_call_id": "c1",
        "artifact": {"rows": ROWS},
        "status": "success",
    }
    names = ["langchain", "schema", "messages"]
    return [
        {"type": "human", "data": {"content": "go", "additional_kwargs": {}, "type": "human"}},
        {
            "type": "ai",
            "data": {"content": "", "tool_calls": [call], "additional_kwargs": {}, "type": "ai"},
        },
        {"type": "tool", "data": tool},
        {"type": "tool", **tool, "tool_call_id": "c2", "status": "error", "additional_kwargs": {}},
        {
            "lc": 1,
            "type": "constructor",
            "id": [*names, "ToolMessage"],
            "kwargs": {**tool, "tool_call_id": "c3"},
        },
        {
            "lc": 1,
            "type": "constructor",
            "id": [*names, "AIMessage"],
            "kwargs": {"content": "Done.", "type": "ai"},
        },
    ]


def mcp() -> list[Line]:
    resource = {"uri": "file:///a", "mimeType": "text/x-python", "text": CODE}
    content = [
        {"type": "text", "text": LARGE},
        {"type": "image", "data": IMAGE, "mimeType": "image/png"},
        {"type": "resource", "resource": resource},
    ]
    params = {"name": "rows", "arguments": {"rows": ROWS}}
    return [
        {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params},
        {
            "jsonrpc": "2.0",
            "id": 7,
            "result": {"content": content, "structuredContent": {"rows": ROWS}},
        },
        {"content": content, "isError": True, "_meta": {"rows": ROWS}},
    ]


SAMPLES = {
    "openai-chat": openai_chat(),
    "openai-responses": openai_responses(),
    "anthropic": anthropic(),
    "claude-code": claude_code(),
    "pi": pi(),
    "langchain": langchain(),
    "mcp": mcp(),
}


def as_lines(lines: list[Line], **options: Any) -> bytes:
    """Return a JSONL file of these lines, by default as JavaScript would write it."""
    options = {"ensure_ascii": False, "separators": (",", ":"), **options}
    return b"".join(json.dumps(line, **options).encode() + b"\n" for line in lines)
