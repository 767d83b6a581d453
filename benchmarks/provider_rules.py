"""Rules by which providers refuse a request: pairing, order, roles, empty texts, breakpoints, bound
thinking.

It knows nothing of Coatcheck: requests are judged by what the providers document. Tests and the
replay use it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

_MOST_BREAKPOINTS = 4


def refused(request: dict[str, Any]) -> list[str]:
    """Violations in a request to Anthropic, OpenAI chat or Responses; empty if there are none."""
    if "input" in request:
        return list(_responses(request["input"]))
    blocks = [
        one
        for message in request["messages"]
        for one in message.get("content") or ()
        if isinstance(one, dict)
    ]
    kinds = {one.get("type") for one in blocks}
    is_anthropic = isinstance(request.get("system"), list) or bool(
        kinds & {"tool_use", "tool_result", "thinking"}
    )
    return list(_anthropic(request) if is_anthropic else _chat(request["messages"]))


class BoundThinking:
    """Signs thinking over everything before it, and finds blocks that come back behind something
    else: newer Claude models refuse such a request.

    A block is bound to the system text, the set of tools, every earlier message without thinking,
    and the thinking block before it. Blocks may be dropped from the front or the back of the run,
    not from between others."""

    def __init__(self) -> None:
        self._signed: dict[str, tuple[str, str | None]] = {}

    def answered(self, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer to this request with its thinking signed."""
        content = answer["content"]
        if not isinstance(content, list):
            return answer
        before = [block["signature"] for _, block in _thinking(request["messages"])]
        last, signed = before[-1] if before else None, []
        for at, block in enumerate(content):
            if block.get("type") == "thinking":
                bound = _prefix(
                    request, [*request["messages"], {**answer, "content": content[:at]}]
                )
                signature = hashlib.sha256(
                    json.dumps([bound, last, block["thinking"]]).encode()
                ).hexdigest()
                self._signed[signature] = (bound, last)
                block, last = {**block, "signature": signature}, signature
            signed.append(block)
        return {**answer, "content": signed}

    def refused(self, request: dict[str, Any]) -> list[str]:
        """The thinking blocks of a request that are not where they were signed. Blocks signed
        elsewhere are ignored."""
        found, before = [], None
        for path, block in _thinking(request["messages"]):
            if block["signature"] not in self._signed:
                continue
            bound, previous = self._signed[block["signature"]]
            message, at = path
            up_to = request["messages"][message]
            prefix = [*request["messages"][:message], {**up_to, "content": up_to["content"][:at]}]
            if _prefix(request, prefix) != bound:
                found.append(
                    f"messages.{message}.content.{at}: the block is bound to a different conversation"
                )
            elif before is not None and previous != before:
                text = "bound to a different conversation, a thinking block before it is missing"
                found.append(f"messages.{message}.content.{at}: the block is {text}")
            before = block["signature"]
        return found


def _thinking(messages: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    for number, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            for at, block in enumerate(message["content"]):
                if block.get("type") == "thinking":
                    yield (number, at), block


def _prefix(request: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The digest of what a thinking block is bound to, equal for what the provider treats as
    equal."""
    tools = sorted(json.dumps(_bare(tool), sort_keys=True) for tool in request.get("tools", ()))
    turns: list[list[Any]] = []
    for message in messages:
        blocks = [block for block in _blocks(message["content"]) if block.get("type") != "thinking"]
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1] += blocks
        else:
            turns.append([message["role"], blocks])
    plain = [tools, _blocks(request.get("system", [])), [turn for turn in turns if turn[1]]]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _blocks(content: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_bare(block) for block in blocks]


def _bare(value: Any) -> Any:
    """A part of a request without breakpoints, outer whitespace of texts, and the difference of 1
    and 1.0."""
    if isinstance(value, dict):
        bare = {key: _bare(one) for key, one in value.items() if key != "cache_control"}
        if bare.get("type") == "tool_result" and "content" in bare:
            bare["content"] = _blocks(bare["content"])
        if bare.get("type") == "text":
            bare["text"] = bare["text"].strip()
        return bare
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _anthropic(request: dict[str, Any]) -> Iterator[str]:
    asked: list[str] = []
    seen: set[str] = set()
    before = None
    for number, message in enumerate(request["messages"]):
        role, content = message.get("role"), message.get("content")
        if (
            role == "system" and number and before == "user"
        ):  # since 2026, behind a message of the user
            known = {
                tool.get("name") for tool in request.get("tools", ()) if tool.get("defer_loading")
            }
            added = [one["tool"]["name"] for one in content if one.get("type") == "tool_addition"]
            yield from (
                f"message {number}: tool {name!r} is not deferred"
                for name in added
                if name not in known
            )
            continue
        if role not in ("user", "assistant"):
            yield f"message {number}: role {role!r}"
        if number == 0 and role != "user":
            yield "the first message is not the user's"
        if role == before:
            yield f"message {number}: {role!r} twice in a row"
        before = role
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks:
            yield f"message {number}: no content"
            continue
        answers = [one["tool_use_id"] for one in blocks if one.get("type") == "tool_result"]
        if role == "user" and sorted(answers) != sorted(asked):
            yield f"message {number}: calls {asked} are answered by {answers}"
        if role == "assistant" and answers:
            yield f"message {number}: a result of the assistant"
        if any(one.get("type") == "tool_result" for one in blocks[len(answers) :]):
            yield f"message {number}: a result behind something else"
        yield from (
            f"message {number}: an empty text"
            for one in blocks
            if one.get("type") == "text" and not one["text"].strip()
        )
        calls = [one["id"] for one in blocks if one.get("type") == "tool_use"]
        if calls and role == "user":
            yield f"message {number}: a call of the user"
        yield from (f"message {number}: call {each!r} twice" for each in calls if each in seen)
        seen.update(calls)
        asked = calls
    if asked:
        yield f"the last calls {asked} have no results"
    marks = sum(_marks(value) for value in request.values())
    if marks > _MOST_BREAKPOINTS:
        yield f"{marks} cache breakpoints"
    yield from (
        f"a breakpoint on {kind!r}" for kind in _marked_kinds(request) if "thinking" in kind
    )
    spans = [
        mark.get("ttl", "5m")
        for part in ("tools", "system", "messages")
        for mark in _all_marks(request.get(part))
    ]
    if spans != sorted(spans):
        yield f"breakpoints for {spans}: those of an hour come first"


def _chat(messages: list[dict[str, Any]]) -> Iterator[str]:
    asked: list[str] = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in asked:
                yield f"message {number}: a result without its call before it"
            else:
                asked.remove(message["tool_call_id"])
            if not isinstance(message.get("content"), str | list):
                yield f"message {number}: a result without text"
            continue
        if asked:
            yield f"message {number}: calls {asked} are not answered before it"
        asked = [call["id"] for call in message.get("tool_calls") or ()]
        if role not in ("system", "developer", "user", "assistant"):
            yield f"message {number}: role {role!r}"
        if not message.get("content") and not asked and not message.get("function_call"):
            yield f"message {number}: nothing in it"
    if asked:
        yield f"the last calls {asked} have no results"


def _responses(items: list[dict[str, Any]]) -> Iterator[str]:
    asked: set[str] = set()
    for number, item in enumerate(items):
        kind = str(item.get("type", "message"))
        if kind == "function_call_output":
            if item["call_id"] not in asked:
                yield f"item {number}: an output without a call before it"
            asked.discard(item["call_id"])
        elif kind == "function_call":
            if item["call_id"] in asked:
                yield f"item {number}: call {item['call_id']!r} twice"
            asked.add(item["call_id"])
        elif kind == "message" and not item.get("content"):
            yield f"item {number}: nothing in it"
    if asked:
        yield f"calls {sorted(asked)} have no output"


def _marks(value: Any) -> int:
    return sum(1 for _ in _marked_kinds(value))


def _all_marks(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _all_marks(each)
        if value.get("cache_control"):
            yield value["cache_control"]
    elif isinstance(value, list):
        for each in value:
            yield from _all_marks(each)


def _marked_kinds(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("cache_control"):
            yield str(value.get("type", ""))
        for each in value.values():
            yield from _marked_kinds(each)
    elif isinstance(value, list):
        for each in value:
            yield from _marked_kinds(each)
