"""A badly behaved MCP server on stdio. It uses only the standard library.

Run as a script. Each tool fails in its own way, or returns a result of a shape that is rare in real
servers.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

LOCK = threading.Lock()
HELD: dict[str, Any] = {}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ROWS = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "object"}}},
    "required": ["rows"],
}
ANY = {"type": "object", "additionalProperties": True}
TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": name, "inputSchema": ANY}
    for name in (
        "text",
        "blocks",
        "die",
        "hang",
        "junk",
        "huge",
        "late",
        "spawn",
        "error",
        "wait",
        "deep",
        "picture",
    )
] + [
    {"name": "echo", "inputSchema": ANY, "x-unknown": {"kept": [1, 2.50]}},
    {
        "name": "typed",
        "inputSchema": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "rows": {"type": "array", "items": {"type": "object"}},
                "data": {"type": "string", "contentEncoding": "base64"},
            },
        },
    },
    {"name": "roomy", "inputSchema": ANY, "_meta": {"anthropic/maxResultSizeChars": 200_000}},
    {"name": "table", "inputSchema": ANY, "outputSchema": ROWS},
    {"name": "small_table", "inputSchema": ANY, "outputSchema": ROWS},
]


def write(line: str) -> None:
    with LOCK:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def answer(request_id: Any, result: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}))


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **more}


def rows(count: int) -> dict[str, Any]:
    return {"rows": [{"id": number, "name": f"row number {number}"} for number in range(count)]}


def words(size: int) -> str:
    return "".join(f"{number} the quick brown fox\n" for number in range(size // 20 + 1))[:size]


RESULT = '{"content":[{"type":"text","text":"'


def huge(request_id: Any, size: int, id_first: bool, is_error: bool) -> None:
    """Write a result, or an error, in pieces, so that this process stays small."""
    kind, start, end = (
        ("error", '{"code":-32000,"message":"', '"}') if is_error else ("result", RESULT, '"}]}')
    )
    head = (
        f'{{"jsonrpc":"2.0","id":{json.dumps(request_id)},"{kind}":' if id_first else f'{{"{kind}":'
    )
    tail = "}" if id_first else f',"jsonrpc":"2.0","id":{json.dumps(request_id)}}}'
    with LOCK:
        sys.stdout.write(head + start)
        piece = "x" * (1 << 20)
        for _ in range(size >> 20):
            sys.stdout.write(piece)
        sys.stdout.write(end + tail + "\n")
        sys.stdout.flush()


def blocks(size: int) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "a small one", "annotations": {"audience": ["user"]}},
        {
            "type": "image",
            "data": PIXEL * (size // len(PIXEL) + 1),
            "mimeType": "image/png",
            "_meta": {"kept": True},
        },
        {"type": "text", "text": words(size)},
        {"type": "audio", "data": base64.b64encode(b"\0" * size).decode(), "mimeType": "audio/wav"},
        {
            "type": "resource",
            "resource": {"uri": "odd://big", "mimeType": "text/plain", "text": words(size)},
        },
        {"type": "resource_link", "uri": "odd://link", "name": "a link"},
        {"type": "from-the-future", "payload": {"kept": 1.0}},
    ]


def call(request_id: Any, name: str, given: dict[str, Any], meta: dict[str, Any]) -> None:
    size = int(given.get("size", 0))
    if name == "die":
        sys.stderr.write("odd: dying\n")
        os._exit(int(given.get("status", 3)))
    elif name == "hang":
        threading.Event().wait()
    elif name == "junk":
        write("this is not JSON")
        write('["neither", "is", "this"]')
        write("")
        answer(request_id, text("after the junk"))
    elif name == "deep":
        write("[" * 100_000)
        answer(request_id, text("after the brackets"))
    elif name == "huge":
        huge(request_id, size, bool(given.get("id_first")), bool(given.get("is_error")))
    elif name == "wait":
        token = meta.get("progressToken")
        for number in range(int(given.get("times", 3))):
            time.sleep(float(given.get("pause", 0)))
            params = {
                "progressToken": token,
                "progress": number + 1,
                "total": 3,
                "x-unknown": "kept",
            }
            write(
                json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
            )
        answer(request_id, text("done"))
    elif name == "spawn":
        deaf = (
            "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            if given.get("deaf")
            else ""
        )
        code = f"{deaf}print('ready', flush=True)\nimport time\nwhile True: time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline() if child.stdout else None
        answer(request_id, text(f"{os.getpid()} {child.pid}"))
    elif name == "error":
        answer(request_id, text(words(size), isError=True, _meta={"kept": [1.0]}))
    elif name in ("table", "small_table"):
        value = rows(size)
        answer(request_id, text(json.dumps(value, indent=1), structuredContent=value))
    elif name == "picture":
        with open(given["path"], "rb") as file:
            data = base64.b64encode(file.read()).decode()
        answer(request_id, {"content": [{"type": "image", "data": data, "mimeType": "image/png"}]})
    elif name == "blocks":
        answer(
            request_id,
            {"content": blocks(size), "_meta": {"kept": True}, "fromTheFuture": {"kept": 1}},
        )
    elif name in ("text", "roomy"):
        answer(request_id, text(words(size)))
    else:
        answer(request_id, text(json.dumps({"name": name, "arguments": given})))


def handle(message: dict[str, Any]) -> None:
    method, request_id, params = (
        message.get("method"),
        message.get("id"),
        message.get("params") or {},
    )
    if method == "initialize":
        answer(
            request_id,
            {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {
                    "tools": {},
                    "resources": {},
                    "experimental": {"odd": {"kept": 1}},
                },
                "serverInfo": {"name": "odd", "version": "1"},
                "instructions": "be careful",
                "fromTheFuture": True,
            },
        )
    elif method == "tools/list":
        start = int(params.get("cursor", 0))
        end = start + 6
        page: dict[str, Any] = {"tools": TOOLS[start:end]}
        answer(request_id, page | ({"nextCursor": str(end)} if end < len(TOOLS) else {}))
    elif method == "tools/call":
        given, meta = params.get("arguments") or {}, params.get("_meta") or {}
        if params["name"] == "late":
            HELD["late"] = request_id  # answered on odd/release, even if it was cancelled
            return
        threading.Thread(
            target=call, args=(request_id, params["name"], given, meta), daemon=True
        ).start()
    elif method == "resources/read":
        size = int(params["uri"].rpartition("/")[2])
        contents = [
            {
                "uri": params["uri"],
                "mimeType": "text/plain",
                "text": words(size),
                "_meta": {"kept": 1},
            },
            {
                "uri": params["uri"],
                "mimeType": "application/zip",
                "blob": base64.b64encode(b"\7" * size).decode(),
            },
            {"uri": params["uri"], "mimeType": "image/png", "blob": PIXEL},
        ]
        answer(request_id, {"contents": contents})
    elif method == "odd/verbatim":
        result = '{"number":1.50,"twice":1e2,"half":"\\ud800"}'
        write(f'{{"id":{json.dumps(request_id)},  "result" : {result} ,"jsonrpc":"2.0","odd":[]}}')
    elif method == "odd/release":
        answer(HELD.pop("late"), text("too late"))
        answer(request_id, {})
    elif method == "notifications/cancelled":
        sys.stderr.write(f"odd: cancelled {json.dumps(params)}\n")
        sys.stderr.flush()
    elif request_id is not None and method is not None:
        error = {
            "code": -32601,
            "message": "Method not found",
            "data": {"method": method, "kept": 1.0},
        }
        write(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}))


def main() -> None:
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        try:
            message = json.loads(line)
        except ValueError:
            write(
                json.dumps(
                    {
                        "jsonrpc": "2.0",
                        "id": None,
                        "error": {"code": -32700, "message": "Parse error"},
                    }
                )
            )
            continue
        handle(message)
    if "--stubborn" in sys.argv:
        threading.Event().wait()


if __name__ == "__main__":
    main()
