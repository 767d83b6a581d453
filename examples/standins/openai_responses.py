"""OpenAI's Responses API without server state: its checks, and the events that it streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

from examples.standins.checks import Refused
from examples.standins.openai_chat import caches, check_request, check_tools, error
from examples.standins.script import Heard, Reply, Result, Usage, drawn, pieces

__all__ = [
    "CACHE_STEP",
    "PATH",
    "caches",
    "check",
    "error",
    "events",
    "heard",
    "prompt",
    "too_long",
    "whole",
]

PATH: Final = "/v1/responses"
CACHE_STEP: Final = 128
_CREATED: Final = 1_767_225_600
_KNOWN: Final = {
    "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
    "parallel_tool_calls", "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier",
    "store", "stream", "stream_options", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p",
    "truncation", "user",
}  # fmt: skip
_ITEMS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "message": ({"role", "content"}, {"id", "status", "phase"}),
    "function_call": ({"call_id", "name", "arguments"}, {"id", "status"}),
    "function_call_output": ({"call_id", "output"}, {"id", "status"}),
    "reasoning": ({"id", "summary"}, {"content", "encrypted_content", "status"}),
}
_ROLES: Final = ("user", "assistant", "system", "developer")


def check(headers: Any, body: dict[str, Any]) -> None:
    """Raise the error that the API returns for an invalid request."""
    check_request(headers, body, _KNOWN, ("model", "input"))
    if body.get("previous_response_id"):
        raise Refused(
            400,
            f"Previous response with id '{body['previous_response_id']}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    for at, item in enumerate(_items(body)):
        _check_item(item, f"input[{at}]")
    check_tools(
        [
            tool if isinstance(tool, dict) and tool.get("type") == "function" else None
            for tool in body.get("tools", [])
        ]
    )
    _check_pairs(_items(body))


def _check_item(item: Any, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind not in _ITEMS:
        known = ", ".join(f"'{one}'" for one in _ITEMS)
        raise Refused(
            400,
            f"Invalid value: '{kind}'. Supported values are: {known}.",
            param=where,
            code="invalid_value",
        )
    required, optional = _ITEMS[kind]
    for name in sorted(required - set(item)):
        raise Refused(
            400,
            f"Missing required parameter: '{where}.{name}'.",
            param=f"{where}.{name}",
            code="missing_required_parameter",
        )
    for name in sorted(set(item) - required - optional - {"type"}):
        raise Refused(
            400,
            f"Unknown parameter: '{where}.{name}'.",
            param=f"{where}.{name}",
            code="unknown_parameter",
        )
    if kind == "message" and item["role"] not in _ROLES:
        raise Refused(
            400, f"Invalid value: '{item['role']}'.", param=f"{where}.role", code="invalid_value"
        )
    texts = {"function_call": "arguments", "function_call_output": "output", "message": "content"}
    if kind in texts and not isinstance(
        item[texts[kind]], str if kind == "function_call" else str | list
    ):
        raise Refused(
            400,
            f"Invalid type for '{where}.{texts[kind]}'.",
            param=f"{where}.{texts[kind]}",
            code="invalid_type",
        )


def _check_pairs(items: list[dict[str, Any]]) -> None:
    """Check that each call has an output and each output a call, by their ids."""
    open_calls: dict[str, None] = {}
    for item in items:
        if item.get("type") == "function_call":
            open_calls[item["call_id"]] = None
        elif item.get("type") == "function_call_output":
            if item["call_id"] not in open_calls:
                raise Refused(
                    400,
                    f"No tool call found for function call output with call_id {item['call_id']}.",
                    param="input",
                )
            del open_calls[item["call_id"]]
    for call_id in open_calls:
        raise Refused(400, f"No tool output found for function call {call_id}.", param="input")


def too_long(prompt: int, window: int) -> Refused:
    message = "Your input exceeds the context window of this model. Please adjust your input and try again."
    return Refused(
        400, f"{message} ({prompt} > {window})", param="input", code="context_length_exceeded"
    )


def heard(body: dict[str, Any]) -> Heard:
    items = _items(body)
    names = {item["call_id"]: item["name"] for item in items if item.get("type") == "function_call"}
    results = tuple(
        Result(item["call_id"], names[item["call_id"]], _text(item))
        for item in items
        if item.get("type") == "function_call_output"
    )
    turn, speaks = 0, False
    for item in items:
        mine = item.get("type") in ("function_call", "reasoning") or item.get("role") == "assistant"
        turn += mine and not speaks
        speaks = mine
    return Heard(turn, results, tuple(tool["name"] for tool in body.get("tools", [])))


def prompt(body: dict[str, Any]) -> list[str]:
    tools = [json.dumps(tool, ensure_ascii=False) for tool in body.get("tools", [])]
    return [*tools, body.get("instructions") or "", *(_text(item) for item in _items(body))]


def _items(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body["input"]
    if not isinstance(given, str | list):
        raise Refused(
            400,
            "Invalid type for 'input': expected one of a string or array.",
            param="input",
            code="invalid_type",
        )
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _text(item: dict[str, Any]) -> str:
    if item.get("type") == "function_call":
        return f"{item['name']}({item['arguments']})"
    content = item.get("output", item.get("content", ""))
    return (
        content
        if isinstance(content, str)
        else "\n".join(str(part.get("text", part)) for part in content or [])
    )


def whole(body: dict[str, Any], reply: Reply, turn: int, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"resp_{drawn(turn, 0, 48)}", "object": "response", "created_at": _CREATED + turn, "model": body["model"],
        "status": "completed", "error": None, "incomplete_details": None, "instructions": body.get("instructions"),
        "max_output_tokens": None, "metadata": {}, "output": _output(reply, turn), "parallel_tool_calls": True,
        "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
        "store": body.get("store", True), "temperature": 1.0, "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools", []), "top_p": 1.0,
        "truncation": "disabled", "user": None,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.output, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.output,
        },
    }  # fmt: skip


def events(
    body: dict[str, Any], reply: Reply, turn: int, usage: Usage
) -> Iterator[tuple[str, str]]:
    numbers = count()

    def event(kind: str, **fields: Any) -> tuple[str, str]:
        return kind, json.dumps(
            {"type": kind, "sequence_number": next(numbers), **fields}, ensure_ascii=False
        )

    done = whole(body, reply, turn, usage)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for at, item in enumerate(done["output"]):
        where = {"output_index": at, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event(
            "response.output_item.added",
            output_index=at,
            item={**item, **empty, "status": "in_progress"},
        )
        if item["type"] == "message":
            part = item["content"][0]
            yield event(
                "response.content_part.added", **where, content_index=0, part={**part, "text": ""}
            )
            for piece in pieces(part["text"]):
                yield event(
                    "response.output_text.delta", **where, content_index=0, delta=piece, logprobs=[]
                )
            yield event(
                "response.output_text.done",
                **where,
                content_index=0,
                text=part["text"],
                logprobs=[],
            )
            yield event("response.content_part.done", **where, content_index=0, part=part)
        else:
            for piece in pieces(item["arguments"]):
                yield event("response.function_call_arguments.delta", **where, delta=piece)
            yield event(
                "response.function_call_arguments.done",
                **where,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield event("response.output_item.done", output_index=at, item=item)
    yield event("response.completed", response=done)


def _output(reply: Reply, turn: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{drawn(turn, 0, 48)}",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for n, call in enumerate(reply.calls):
        items.append(
            {
                "id": f"fc_{drawn(turn, n, 48)}",
                "type": "function_call",
                "status": "completed",
                "call_id": f"call_{drawn(turn, n, 24)}",
                "name": call.name,
                "arguments": call.written,
            }
        )
    return items
