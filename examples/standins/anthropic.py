"""Anthropic's Messages API: its checks, and the events that it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from examples.standins.checks import Refused, schema_fault
from examples.standins.script import Heard, Reply, Result, Usage, drawn, pieces

PATH: Final = "/v1/messages"
CACHE_STEP: Final = 1
_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_REQUIRED: Final = ("model", "max_tokens", "messages")
_OPTIONAL: Final = {
    "cache_control", "container", "inference_geo", "metadata", "output_config", "service_tier", "stop_sequences",
    "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
}  # fmt: skip
_BLOCKS: Final[dict[str, dict[str, tuple[set[str], set[str]]]]] = {
    "user": {
        "text": ({"text"}, {"cache_control", "citations"}),
        "image": ({"source"}, {"cache_control"}),
        "document": ({"source"}, {"cache_control", "citations", "context", "title"}),
        "tool_result": ({"tool_use_id"}, {"cache_control", "content", "is_error"}),
    },
    "assistant": {
        "text": ({"text"}, {"cache_control", "citations"}),
        "thinking": ({"thinking", "signature"}, set()),
        "redacted_thinking": ({"data"}, set()),
        "tool_use": ({"id", "name", "input"}, {"cache_control", "caller"}),
    },
}
_IN_RESULTS: Final = {"text", "image", "document", "search_result", "tool_reference"}
_BREAKPOINTS: Final = 4
_BETAS: Final = {"context_management": "context-management-", "defer_loading": "advanced-tool-use-"}
"""Fields that a request may have if its `anthropic-beta` header names the feature."""


def check(headers: Any, body: dict[str, Any]) -> None:
    """Raise the error that the API returns for an invalid request."""
    if not headers.get("x-api-key") and not headers.get("authorization"):
        raise Refused(401, "x-api-key header is required", "authentication_error")
    if not headers.get("anthropic-version"):
        raise Refused(400, "anthropic-version: header is required")
    for name in _REQUIRED:
        if name not in body:
            raise Refused(400, f"{name}: Field required")
    allowed = {name for name, beta in _BETAS.items() if beta in headers.get("anthropic-beta", "")}
    for name in body:
        if name not in _REQUIRED and name not in _OPTIONAL and name not in allowed:
            raise Refused(400, f"{name}: Extra inputs are not permitted")
    if not isinstance(body["max_tokens"], int) or body["max_tokens"] < 1:
        raise Refused(400, "max_tokens: Input should be greater than or equal to 1")
    if not isinstance(body["messages"], list) or not body["messages"]:
        raise Refused(400, "messages: at least one message is required")
    for at, message in enumerate(body["messages"]):
        _check_message(message, f"messages.{at}")
    if body["messages"][0]["role"] != "user":
        raise Refused(400, 'messages: first message must use the "user" role')
    _check_tools(body.get("tools", []), allowed)
    if json.dumps(body).count('"cache_control"') > _BREAKPOINTS:
        raise Refused(400, "A maximum of 4 blocks with cache_control may be provided.")
    _check_pairs(body["messages"])


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in _BLOCKS:
        raise Refused(400, f"{where}.role: Input should be 'user' or 'assistant'")
    if set(message) != {"role", "content"}:
        odd = next(iter(set(message) ^ {"role", "content"}))
        raise Refused(
            400,
            f"{where}.{odd}: "
            + ("Extra inputs are not permitted" if odd in message else "Field required"),
        )
    if not isinstance(message["content"], str | list) or not message["content"]:
        raise Refused(400, f"{where}: all messages must have non-empty content")
    results_are_over = False
    for at, block in enumerate(_blocks(message)):
        _check_block(block, message["role"], f"{where}.content.{at}")
        if block["type"] == "tool_result" and results_are_over:
            raise Refused(
                400,
                f"{where}.content.{at}: `tool_result` blocks must come first in the content of a message",
            )
        results_are_over = block["type"] != "tool_result"


def _check_block(block: Any, role: str, where: str) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _BLOCKS[role]:
        known = ", ".join(f"'{one}'" for one in _BLOCKS[role])
        raise Refused(
            400,
            f"{where}: Input tag '{kind}' found using 'type' does not match any of the expected tags: {known}",
        )
    required, optional = _BLOCKS[role][kind]
    for name in sorted(required - set(block)):
        raise Refused(400, f"{where}.{kind}.{name}: Field required")
    for name in sorted(set(block) - required - optional - {"type"}):
        raise Refused(400, f"{where}.{kind}.{name}: Extra inputs are not permitted")
    if kind == "text" and (not isinstance(block["text"], str) or not block["text"].strip()):
        raise Refused(
            400, f"{where}: text content blocks must be non-empty and contain non-whitespace text"
        )
    for name in ("id", "tool_use_id"):
        if name in block and not _ID.fullmatch(str(block[name])):
            raise Refused(
                400, f"{where}.{kind}.{name}: String should match pattern '^[a-zA-Z0-9_-]+$'"
            )
    if kind == "tool_use" and not isinstance(block["input"], dict):
        raise Refused(400, f"{where}.{kind}.input: Input should be a valid dictionary")
    if kind == "tool_result" and not _is_content(block.get("content", "")):
        raise Refused(
            400, f"{where}.{kind}.content: Input should be a valid string or a list of blocks"
        )
    if not isinstance(block.get("is_error", False), bool):
        raise Refused(400, f"{where}.{kind}.is_error: Input should be a valid boolean")


def _is_content(content: object) -> bool:
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(isinstance(one, dict) and one.get("type") in _IN_RESULTS for one in content)


def _check_tools(tools: list[Any], allowed: set[str]) -> None:
    names: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"tools.{at}.custom"
        if not isinstance(tool, dict) or not _NAME.fullmatch(str(tool.get("name", ""))):
            raise Refused(
                400, f"{where}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
            )
        if (
            odd := set(tool)
            - {"name", "description", "input_schema", "cache_control", "type", "strict"}
            - allowed
        ):
            raise Refused(400, f"{where}.{min(odd)}: Extra inputs are not permitted")
        schema = tool.get("input_schema")
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise Refused(400, f"{where}.input_schema.type: Input should be 'object'")
        if fault := schema_fault(schema):
            raise Refused(
                400,
                f"{where}.input_schema: JSON schema is invalid. It must match JSON Schema draft 2020-12: {fault}",
            )
        if tool["name"] in names:
            raise Refused(400, "tools: Tool names must be unique.")
        names.add(tool["name"])


def _check_pairs(messages: list[dict[str, Any]]) -> None:
    """Check that each call has a result in the next message, and each result a call in the one
    before."""
    asked: list[str] = []
    for at, message in enumerate(messages):
        found = [
            block["tool_use_id"] for block in _blocks(message) if block["type"] == "tool_result"
        ]
        for n, one in enumerate(found):
            if one not in asked:
                raise Refused(
                    400,
                    f"messages.{at}.content.{n}: unexpected `tool_use_id` found in `tool_result` blocks: {one}. Each "
                    "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                )
            if one in found[:n]:
                raise Refused(
                    400,
                    f"messages.{at}.content.{n}: each tool_use must have a single result. Found multiple `tool_result` "
                    f"blocks with id: {one}",
                )
        _check_answered(at - 1, [one for one in asked if one not in found])
        asked = [block["id"] for block in _blocks(message) if block["type"] == "tool_use"]
        if len(set(asked)) < len(asked):
            raise Refused(400, f"messages.{at}: `tool_use` ids must be unique")
    _check_answered(len(messages) - 1, asked)


def _check_answered(at: int, unanswered: list[str]) -> None:
    if unanswered:
        raise Refused(
            400,
            f"messages.{at}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(unanswered)}. Each `tool_use` block must have a corresponding `tool_result` block in the next "
            "message.",
        )


def too_long(prompt: int, window: int) -> Refused:
    return Refused(400, f"prompt is too long: {prompt} tokens > {window} maximum")


def heard(body: dict[str, Any]) -> Heard:
    messages = body["messages"]
    blocks = [block for message in messages for block in _blocks(message)]
    names = {block["id"]: block["name"] for block in blocks if block["type"] == "tool_use"}
    results = tuple(
        Result(
            block["tool_use_id"],
            names[block["tool_use_id"]],
            _text(block),
            block.get("is_error", False),
        )
        for block in blocks
        if block["type"] == "tool_result"
    )
    turn = sum(message["role"] == "assistant" for message in messages)
    begins = "\n".join(map(_text, _blocks(messages[0])))
    return Heard(turn, results, tuple(tool["name"] for tool in body.get("tools", [])), begins, body)


def prompt(body: dict[str, Any]) -> list[str]:
    """Return what the model reads in the order of the provider's cache: tools, system, messages."""
    system = body.get("system", "")
    return [
        *(json.dumps(tool, ensure_ascii=False) for tool in body.get("tools", [])),
        *([system] if isinstance(system, str) else [block["text"] for block in system]),
        *(_text(block) for message in body["messages"] for block in _blocks(message)),
    ]


def caches(body: dict[str, Any]) -> bool:
    return '"cache_control"' in json.dumps(body)


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(block: dict[str, Any]) -> str:
    if block["type"] == "text":
        return str(block["text"])
    if block["type"] == "tool_use":
        return f"{block['name']}({json.dumps(block['input'], ensure_ascii=False)})"
    content = block.get("content", "")
    return (
        content
        if isinstance(content, str)
        else "\n".join(str(one.get("text", one)) for one in content)
    )


def error(refused: Refused) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 529: "overloaded_error"}
    kind = kinds.get(refused.status, refused.kind)
    return {
        "type": "error",
        "error": {"type": kind, "message": refused.message},
        "request_id": "req_standin",
    }


def whole(body: dict[str, Any], reply: Reply, turn: int, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{drawn(turn, 0)}", "type": "message", "role": "assistant", "model": body["model"],
        "content": _content(reply, turn), "stop_reason": _reason(reply), "stop_sequence": None, "usage": _used(usage),
    }  # fmt: skip


def events(
    body: dict[str, Any], reply: Reply, turn: int, usage: Usage
) -> Iterator[tuple[str, str]]:
    def event(kind: str, **fields: Any) -> tuple[str, str]:
        return kind, json.dumps({"type": kind, **fields}, ensure_ascii=False)

    begun = {**whole(body, Reply(), turn, usage), "content": [], "stop_reason": None}
    yield event("message_start", message={**begun, "usage": {**_used(usage), "output_tokens": 1}})
    for at, block in enumerate(_content(reply, turn)):
        if block["type"] == "text":
            yield event("content_block_start", index=at, content_block={"type": "text", "text": ""})
            yield event("ping")
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            yield event("content_block_start", index=at, content_block={**block, "input": {}})
            written = json.dumps(block["input"], ensure_ascii=False)
            deltas = [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in ["", *pieces(written)]
            ]
        yield from (event("content_block_delta", index=at, delta=delta) for delta in deltas)
        yield event("content_block_stop", index=at)
    stop = {"stop_reason": _reason(reply), "stop_sequence": None}
    yield event("message_delta", delta=stop, usage={"output_tokens": usage.output})
    yield event("message_stop")


def _content(reply: Reply, turn: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text else []
    for n, call in enumerate(reply.calls):
        arguments = json.loads(call.written)
        blocks.append(
            {
                "type": "tool_use",
                "id": f"toolu_01{drawn(turn, n)}",
                "name": call.name,
                "input": arguments,
            }
        )
    return blocks


def _reason(reply: Reply) -> str:
    return "tool_use" if reply.calls else "end_turn"


def _used(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written, "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": usage.written, "output_tokens": usage.output, "service_tier": "standard",
    }  # fmt: skip
