"""OpenAI's chat completions: the checks, and the chunks that are streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from examples.standins.checks import TOOL_NAME, Refused, schema_fault
from examples.standins.script import Heard, Reply, Result, Usage, drawn, pieces

PATH: Final = "/v1/chat/completions"
CACHE_STEP: Final = 128
_CREATED: Final = 1_767_225_600
_KNOWN: Final = {
    "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata",
    "modalities", "model", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
    "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream",
    "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
}  # fmt: skip
_FIELDS: Final[dict[str, set[str]]] = {
    "system": {"content", "name"},
    "developer": {"content", "name"},
    "user": {"content", "name"},
    "assistant": {
        "content",
        "name",
        "tool_calls",
        "function_call",
        "refusal",
        "audio",
        "annotations",
    },
    "tool": {"content", "tool_call_id"},
}


def check(headers: Any, body: dict[str, Any]) -> None:
    """Raise the error that the API returns for an invalid request."""
    check_request(headers, body, _KNOWN, ("model", "messages"))
    if not isinstance(body["messages"], list) or not body["messages"]:
        raise _wrong(
            "Invalid 'messages': empty array. Expected an array with minimum length 1.",
            "messages",
            "empty_array",
        )
    for at, message in enumerate(body["messages"]):
        _check_message(message, f"messages[{at}]")
    check_tools(
        [
            tool.get("function")
            if isinstance(tool, dict) and tool.get("type") == "function"
            else None
            for tool in body.get("tools", [])
        ]
    )
    if "stream_options" in body and not body.get("stream"):
        raise _wrong(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    _check_pairs(body["messages"])


def check_request(
    headers: Any, body: dict[str, Any], known: set[str], required: tuple[str, ...]
) -> None:
    """Check what both of OpenAI's APIs require of a request."""
    if not (headers.get("authorization") or "").startswith("Bearer "):
        raise Refused(401, "You didn't provide an API key.", code="invalid_api_key")
    for name in body:
        if name not in known:
            raise _wrong(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    for name in required:
        if name not in body:
            raise _wrong(
                f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
            )


def check_tools(functions: list[Any]) -> None:
    for at, function in enumerate(functions):
        where = f"tools[{at}].function"
        if not isinstance(function, dict):
            raise _wrong(
                f"Invalid value: '{where}'. Supported values are functions.", f"tools[{at}]"
            )
        if not TOOL_NAME.fullmatch(str(function.get("name", ""))):
            raise _wrong(
                f"Invalid '{where}.name': string does not match pattern. Expected a string that matches the pattern "
                "'^[a-zA-Z0-9_-]+$'.", f"{where}.name", "invalid_value",
            )  # fmt: skip
        if odd := set(function) - {"name", "description", "parameters", "strict", "type"}:
            raise _wrong(
                f"Unknown parameter: '{where}.{min(odd)}'.",
                f"{where}.{min(odd)}",
                "unknown_parameter",
            )
        if len(function.get("description") or "") > 1_024:
            raise _wrong(
                f"Invalid '{where}.description': string too long. Expected a string with maximum length 1024.",
                f"{where}.description", "string_above_max_length",
            )  # fmt: skip
        schema = function.get("parameters", {"type": "object", "properties": {}})
        fault = schema_fault(schema) or _strictly(schema, bool(function.get("strict")))
        if fault:
            raise _wrong(
                f"Invalid schema for function '{function['name']}': {fault}.",
                f"{where}.parameters",
                "invalid_function_parameters",
            )


def _strictly(schema: dict[str, Any], strict: bool) -> str | None:
    if schema.get("type") != "object":
        return "schema must be a JSON Schema of 'type: \"object\"'"
    if strict and schema.get("additionalProperties") is not False:
        return "In context=(), 'additionalProperties' is required to be supplied and to be false"
    if strict and set(schema.get("required", [])) != set(schema["properties"]):
        return "In context=(), 'required' is required to be supplied and to include every key in properties"
    return None


def _check_message(message: Any, where: str) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _FIELDS:
        known = ", ".join(f"'{one}'" for one in _FIELDS)
        raise _wrong(
            f"Invalid value: '{role}'. Supported values are: {known}.",
            f"{where}.role",
            "invalid_value",
        )
    for name in sorted(set(message) - _FIELDS[role] - {"role"}):
        raise _wrong(
            f"Unknown parameter: '{where}.{name}'.", f"{where}.{name}", "unknown_parameter"
        )
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise _wrong(
            "Invalid value for 'content': expected a string, got null.", f"{where}.content"
        )
    if content is not None and not isinstance(content, str | list):
        raise _wrong(
            f"Invalid type for '{where}.content': expected one of a string or array of objects.",
            f"{where}.content",
            "invalid_type",
        )
    if (
        role == "tool"
        and isinstance(content, list)
        and any(part.get("type") != "text" for part in content)
    ):
        raise _wrong(
            "Invalid value: tool messages take text alone.", f"{where}.content", "invalid_value"
        )
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise _wrong(
            f"Missing required parameter: '{where}.tool_call_id'.",
            f"{where}.tool_call_id",
            "missing_required_parameter",
        )


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list) or not calls:
        raise _wrong(
            f"Invalid '{where}': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            where,
            "empty_array",
        )
    for at, call in enumerate(calls):
        function = call.get("function", {})
        if call.get("type") != "function" or not isinstance(call.get("id"), str):
            raise _wrong(
                f"Missing required parameter: '{where}[{at}].id'.",
                f"{where}[{at}]",
                "missing_required_parameter",
            )
        if set(call) != {"id", "type", "function"} or set(function) != {"name", "arguments"}:
            raise _wrong(
                f"Unknown parameter in '{where}[{at}]'.", f"{where}[{at}]", "unknown_parameter"
            )
        if not TOOL_NAME.fullmatch(str(function["name"])) or not isinstance(
            function["arguments"], str
        ):
            raise _wrong(
                f"Invalid type for '{where}[{at}].function.arguments': expected a string.",
                f"{where}[{at}]",
                "invalid_type",
            )


def _check_pairs(messages: list[dict[str, Any]]) -> None:
    """Check that the tool messages after an assistant message answer each of its calls, and nothing
    else."""
    waiting: list[str] = []
    asked: list[str] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            one = message["tool_call_id"]
            if one not in asked:
                raise _wrong(
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                    "'tool_calls'.", f"messages.[{at}].role",
                )  # fmt: skip
            waiting = [other for other in waiting if other != one]
            continue
        _check_answered(waiting, at)
        waiting = asked = [call["id"] for call in message.get("tool_calls", [])]
    _check_answered(waiting, len(messages))


def _check_answered(waiting: list[str], at: int) -> None:
    if waiting:
        raise _wrong(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(waiting)}",
            f"messages.[{at}].role",
        )


def _wrong(message: str, param: str, code: str | None = None) -> Refused:
    return Refused(400, message, param=param, code=code)


def too_long(prompt: int, window: int) -> Refused:
    return _wrong(
        f"This model's maximum context length is {window} tokens. However, your messages resulted in {prompt} tokens. "
        "Please reduce the length of the messages.", "messages", "context_length_exceeded",
    )  # fmt: skip


def heard(body: dict[str, Any]) -> Heard:
    messages = body["messages"]
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", [])
    }
    results = tuple(
        Result(message["tool_call_id"], names[message["tool_call_id"]], _text(message["content"]))
        for message in messages
        if message["role"] == "tool"
    )
    turn = sum(message["role"] == "assistant" for message in messages)
    return Heard(turn, results, tuple(tool["function"]["name"] for tool in body.get("tools", [])))


def prompt(body: dict[str, Any]) -> list[str]:
    """Return what the model reads in the order of the provider's cache: tools, then messages."""
    read = [json.dumps(tool, ensure_ascii=False) for tool in body.get("tools", [])]
    for message in body["messages"]:
        if message.get("content"):
            read.append(_text(message["content"]))
        read += [
            f"{call['function']['name']}({call['function']['arguments']})"
            for call in message.get("tool_calls", [])
        ]
    return read


def caches(body: dict[str, Any]) -> bool:
    return True


def _text(content: Any) -> str:
    return (
        content
        if isinstance(content, str)
        else "\n".join(str(part.get("text", part)) for part in content or [])
    )


def error(refused: Refused) -> dict[str, Any]:
    kinds = {429: "rate_limit_exceeded", 529: "overloaded", 503: "overloaded"}
    code = kinds.get(refused.status, refused.code)
    return {
        "error": {
            "message": refused.message,
            "type": refused.kind,
            "param": refused.param,
            "code": code,
        }
    }


def whole(body: dict[str, Any], reply: Reply, turn: int, usage: Usage) -> dict[str, Any]:
    calls = _calls(reply, turn)
    message = {
        "role": "assistant",
        "content": reply.text or None,
        "refusal": None,
        **({"tool_calls": calls} if calls else {}),
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(reply)}
    return {**_head(body, turn, "chat.completion"), "choices": [choice], "usage": _used(usage)}


def events(
    body: dict[str, Any], reply: Reply, turn: int, usage: Usage
) -> Iterator[tuple[str, str]]:
    counts = (body.get("stream_options") or {}).get("include_usage", False)
    head = _head(body, turn, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None) -> tuple[str, str]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        fields = {**head, "choices": [choice], **({"usage": None} if counts else {})}
        return "", json.dumps(fields, ensure_ascii=False)

    yield chunk({"role": "assistant", "content": "" if reply.text else None, "refusal": None})
    yield from (chunk({"content": piece}) for piece in pieces(reply.text))
    for at, call in enumerate(_calls(reply, turn)):
        begins = {
            "index": at,
            **call,
            "function": {"name": call["function"]["name"], "arguments": ""},
        }
        yield chunk({"tool_calls": [begins]})
        for piece in pieces(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
    yield chunk({}, _reason(reply))
    if counts:
        yield "", json.dumps({**head, "choices": [], "usage": _used(usage)})
    yield "", "[DONE]"


def _head(body: dict[str, Any], turn: int, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{drawn(turn, 0)}", "object": kind, "created": _CREATED + turn, "model": body["model"],
        "service_tier": "default", "system_fingerprint": None,
    }  # fmt: skip


def _calls(reply: Reply, turn: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{drawn(turn, n, 24)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.written},
        }
        for n, call in enumerate(reply.calls)
    ]


def _reason(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"


def _used(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt, "completion_tokens": usage.output, "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }  # fmt: skip
