"""A scripted server: the test decides every byte on the wire. It uses only the standard library.

Run as a script: `scripted_server.py NAME [JSON]`. Its tool `NAME_say` writes the given lines (each
@ in them is replaced by a number of bytes), `NAME_heard` returns all other messages it has
received, and `NAME_hold` is never answered. The JSON has the responses to other requests, by
method: a result, an error, or a list of pages. Other methods get no response.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NAME = sys.argv[1]
ANSWERS: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
HEARD: list[dict[str, Any]] = []
TOOLS = [
    {"name": f"{NAME}_{what}", "inputSchema": {"type": "object"}}
    for what in ("say", "heard", "hold", "end")
]


def write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def answer(request_id: Any, **body: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request_id, **body}).encode())


def call(request_id: Any, params: dict[str, Any]) -> None:
    given = params.get("arguments") or {}
    if params.get("name") == f"{NAME}_say":
        for line in given.get("lines", []):
            write(
                line.encode().replace(
                    b"@", bytes.fromhex(given.get("hex", "40")) * int(given.get("times", 1))
                )
            )
        answer(request_id, result={"content": []})
    elif params.get("name") == f"{NAME}_heard":
        answer(request_id, result={"content": [{"type": "text", "text": json.dumps(HEARD)}]})
    elif params.get("name") == f"{NAME}_end":
        os._exit(9)
    elif params.get("name") != f"{NAME}_hold":
        answer(
            request_id,
            error={"code": -32602, "message": f"{NAME} has no tool {params.get('name')!r}"},
        )


def handle(message: dict[str, Any]) -> None:
    method, request_id, params = (
        message.get("method"),
        message.get("id"),
        message.get("params") or {},
    )
    if params.get("name") not in (f"{NAME}_say", f"{NAME}_heard"):
        HEARD.append(message)
    if "id" not in message or method is None:
        return
    scripted = ANSWERS.get(method)
    if method == "initialize" and ANSWERS.get("silent"):
        return
    if method == "initialize":
        capabilities = {"tools": {}, **ANSWERS.get("capabilities", {})}
        info = {"name": NAME, "version": "1"}
        version = ANSWERS.get("version", params.get("protocolVersion"))
        answer(
            request_id,
            result={"protocolVersion": version, "capabilities": capabilities, "serverInfo": info},
        )
    elif method == "tools/call":
        call(request_id, params)
    elif isinstance(scripted, list):
        answer(request_id, result=scripted[int(params.get("cursor") or 0)])
    elif isinstance(scripted, dict):
        answer(request_id, **({"error": scripted} if "code" in scripted else {"result": scripted}))
    elif method == "tools/list":
        answer(request_id, result={"tools": TOOLS})


if __name__ == "__main__":
    for received in sys.stdin.buffer:
        handle(json.loads(received))
