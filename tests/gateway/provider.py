"""A strict provider on loopback: the three APIs with a scripted model, streaming and not.

It refuses what the providers refuse: unpaired calls and results, unknown fields, and thinking that
is sent back after another history than the one it was signed for. It keeps a prefix cache, and
reports reads and writes. A script decides what the model answers and what goes wrong: pauses, odd
splits, statuses, errors inside a stream, broken connections. Every request is recorded, and tests
make their assertions on that log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Self

import uvicorn

from benchmarks.provider_rules import BoundThinking, refused
from examples.standins import anthropic as messages_api
from examples.standins import openai_chat, openai_responses
from examples.standins.checks import Refused

Api = Literal["anthropic", "chat", "responses"]
PATHS: dict[str, Api] = {
    "/v1/messages": "anthropic", "/v1/messages/count_tokens": "anthropic",
    "/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/responses/input_tokens": "responses",
    "/v1/responses/compact": "responses",
}  # fmt: skip
_LOOK_BACK = 20
_PER_TOKEN = 4
_CREATED = 1_790_000_000


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Think:
    text: str = "hmm"


@dataclass(frozen=True)
class Use:
    """A call. `name` may be a purpose ("get", "list", "store") of our tools: the name in the
    request is looked up. `caller` is the program of the provider that makes the call."""

    name: str
    input: dict[str, Any] | str = field(default_factory=dict)
    caller: dict[str, str] | None = None


@dataclass(frozen=True)
class Turn:
    """What the model answers to one request, and how."""

    blocks: tuple[Say | Think | Use, ...] = ()
    stop: str | None = None
    status: int = 200
    retry_after: str | None = None
    piece: int = 7
    """Characters per delta."""
    cut: int = 0
    """Bytes per chunk on the wire; 0 sends one event per chunk."""
    ends: bytes = b"\n"
    """The line ending."""
    break_after: int | None = None
    """The connection breaks after this number of events."""
    break_inside: bool = False
    error_after: int | None = None
    """An error event of the API after this number of events."""
    pause_after: int | None = None
    pause: threading.Event | None = None
    raw: bytes | None = None
    """The whole body of the answer, sent unchanged."""
    content_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()
    """Further members of Anthropic's message; `stop_details` is at the end of a stream."""


def turn(*blocks: Say | Think | Use, **how: Any) -> Turn:
    return Turn(tuple(blocks), **how)


@dataclass
class Seen:
    """One request as it arrived, and what happened to it."""

    path: str
    query: str
    headers: dict[str, str]
    raw: bytes
    body: Any = None
    earlier: list[Any] = field(default_factory=list)
    """Items that the provider keeps and that the request continues."""
    status: int = 0
    problem: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.body["input" if "input" in self.body else "messages"]
        return found

    @property
    def tools(self) -> list[str]:
        return [(tool.get("function") or tool)["name"] for tool in self.body.get("tools", [])]


Script = Sequence[Turn | Callable[[Seen], Turn]] | Callable[[Seen], Turn]


class Provider:
    """`with Provider([turn(Say("hello"))]) as provider:` then send requests to `provider.url`."""

    def __init__(
        self, script: Script = (), *, is_lenient: bool = False, repeats_ids: bool = False
    ) -> None:
        """With `repeats_ids`, each answer numbers its calls from 0, as some compatible servers
        do."""
        self.script = script
        self._repeats_ids = repeats_ids
        self.seen: list[Seen] = []
        self.open = 0
        self._is_lenient = is_lenient
        self._next = 0
        self._ids = count(1)
        self._bound = BoundThinking()
        self._cached: set[str] = set()
        self._responses: dict[str, tuple[list[Any], list[Any]]] = {}
        self._lock = threading.Lock()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._server, self._thread = serve_in_thread(self._app)
        self.url = f"http://127.0.0.1:{port_of(self._server)}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    @property
    def answered(self) -> list[Seen]:
        """Requests for an answer that were accepted."""
        return [
            one
            for one in self.seen
            if one.status == 200 and one.path in PATHS and "count" not in one.path
        ]

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.seen if one.problem]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while True:
            event = await receive()
            raw += event.get("body", b"")
            if not event.get("more_body"):
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        seen = Seen(scope["path"], scope["query_string"].decode(), headers, raw)
        self.open += 1
        try:
            async with asyncio.TaskGroup() as group:
                disconnected = group.create_task(_disconnected(receive))
                answer = group.create_task(self._answer(seen, send))
                done, _ = await asyncio.wait(
                    {disconnected, answer}, return_when=asyncio.FIRST_COMPLETED
                )
                answer.cancel()
                disconnected.cancel()
                if answer in done:
                    await answer
        finally:
            self.open -= 1

    async def _answer(self, seen: Seen, send: Any) -> None:
        api = PATHS.get(seen.path)
        with self._lock:
            self.seen.append(seen)
            try:
                one, answer, usage = self._checked_and_answered(api, seen)
            except Refused as error:
                seen.status, seen.problem = error.status, error.message
                wrong = (messages_api if api == "anthropic" else openai_chat).error(error)
                one, answer, usage = (
                    Turn(status=error.status, raw=json.dumps(wrong).encode()),
                    None,
                    {},
                )
        seen.status = one.status
        if one.raw is not None or answer is None:
            await _whole(send, one, one.raw or b"{}")
        elif seen.body.get("stream"):
            events = list(_EVENTS[api or "anthropic"](seen.body, answer, usage, one))
            await _streamed(send, one, events, api == "anthropic")
        else:
            await _whole(send, one, json.dumps(answer).encode())
        seen.ended = True

    def _checked_and_answered(
        self, api: Api | None, seen: Seen
    ) -> tuple[Turn, dict[str, Any] | None, dict[str, int]]:
        if api is None:
            return Turn(raw=b'{"data": []}'), None, {}
        try:
            seen.body = body = json.loads(seen.raw)
        except (ValueError, RecursionError):
            raise Refused(400, "The request body is not valid JSON") from None
        before, after = self._responses.get(str(body.get("previous_response_id")), ([], []))
        seen.earlier = [*before, *after]
        if not self._is_lenient:
            self._check(api, seen)
        elif api == "anthropic" and (wrong := self._bound.refused(body)):
            raise Refused(400, "; ".join(wrong))
        usage = self._usage(api, body)
        if seen.path.endswith(("count_tokens", "input_tokens")):
            return Turn(raw=json.dumps({"input_tokens": sum(usage.values())}).encode()), None, usage
        with_script = self.script if callable(self.script) else self.script[self._next]
        self._next += 1
        one = with_script(seen) if callable(with_script) else with_script
        if one.status != 200:
            kinds = {429: "rate_limit_error", 529: "overloaded_error"}
            error = {
                "type": kinds.get(one.status, "api_error"),
                "message": f"refused with {one.status}",
            }
            return Turn(status=one.status, retry_after=one.retry_after, headers=one.headers,
                        raw=one.raw or json.dumps({"type": "error", "error": error}).encode()), None, {}  # fmt: skip
        if one.raw is not None:
            return one, None, {}
        answer = {
            "anthropic": self._message,
            "chat": self._completion,
            "responses": self._response,
        }[api](body, one)
        usage["output"] = (
            sum(len(json.dumps(asdict_block(block))) for block in one.blocks) // _PER_TOKEN + 1
        )
        seen.usage = usage
        answer["usage"] = _USAGE[api](usage)
        if api == "anthropic":
            signed = self._bound.answered(body, {"role": "assistant", "content": answer["content"]})
            answer["content"] = signed["content"]
        return one, answer, usage

    def _check(self, api: Api, seen: Seen) -> None:
        body = seen.body
        if api == "anthropic":
            known = {
                name: value
                for name, value in body.items()
                if name not in ("diagnostics", "context_management")
            }
            counts = seen.path.endswith("count_tokens")
            messages_api.check(seen.headers, {**known, "max_tokens": 1} if counts else known)
            wrong = self._bound.refused(body) or [
                one for one in refused({"system": [], **body}) if "twice in a row" not in one
            ]
            if wrong:
                raise Refused(400, "; ".join(wrong))
        elif api == "chat":
            openai_chat.check(seen.headers, body)
        else:
            whole = {
                name: value
                for name, value in body.items()
                if name not in ("previous_response_id", "conversation")
            }
            if body.get("previous_response_id") and not seen.earlier:
                raise Refused(
                    400, "Previous response not found.", code="previous_response_not_found"
                )
            items = [*seen.earlier, *input_items(body)]
            openai_responses.check(
                seen.headers, {"model": "m", "tools": [], **whole, "input": items}
            )
            _check_reasoning(items)

    def _usage(self, api: Api, body: dict[str, Any]) -> dict[str, int]:
        """Count the prompt, with a cache. Anthropic reads and writes only at the marks of the
        request, and looks back 20 positions; OpenAI takes the longest prefix."""
        parts, marks = _parts(api, body)
        digests, sizes, running = [], [], hashlib.sha256()
        for part in parts:
            running.update(part.encode() + b"\0")
            digests.append(running.hexdigest())
            sizes.append(len(part) // _PER_TOKEN + 1)
        ends = marks if api == "anthropic" else range(len(parts))
        found = -1
        for end in ends:
            first = end - _LOOK_BACK if api == "anthropic" else -1
            hits = [at for at in range(end, max(first, -1), -1) if digests[at] in self._cached]
            found = max(found, hits[0] if hits else -1)
        last = max(ends, default=-1)
        self._cached.update(digests[at] for at in ends)
        read, until = sum(sizes[: found + 1]), sum(sizes[: last + 1])
        return {"read": read, "write": until - read, "input": sum(sizes) - until}

    def _id(self, start: str) -> str:
        return f"{start}{next(self._ids):06d}"

    def _call_id(self, start: str, number: int) -> str:
        return f"{start}{number}" if self._repeats_ids else self._id(start)

    def _name(self, body: dict[str, Any], name: str) -> str:
        """Return the name under which the request offers our tool for a purpose."""
        words = {
            "get": "Read a stored artifact",
            "list": "List stored artifacts",
            "store": "Store text or JSON",
        }
        if name not in words:
            return name
        for tool in [*body.get("tools", []), *_additional(body)]:
            inner = tool.get("function") or tool
            if str(inner.get("description", "")).startswith(words[name]):
                return str(inner["name"])
        raise Refused(500, f"no tool of ours to {name} in the request")

    def _message(self, body: dict[str, Any], one: Turn) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for block in one.blocks:
            if isinstance(block, Say):
                content.append({"type": "text", "text": block.text})
            elif isinstance(block, Think):
                content.append({"type": "thinking", "thinking": block.text, "signature": ""})
            else:
                given = json.loads(block.input) if isinstance(block.input, str) else block.input
                name, call_id = self._name(body, block.name), self._call_id("toolu_", len(content))
                content.append(
                    {
                        "type": "tool_use",
                        "id": call_id,
                        "name": name,
                        "input": given,
                        **_caller(block),
                    }
                )
        calls = any(isinstance(block, Use) for block in one.blocks)
        return {
            "id": self._id("msg_"), "type": "message", "role": "assistant", "model": body["model"], "content": content,
            "stop_reason": one.stop or ("tool_use" if calls else "end_turn"), "stop_sequence": None, **dict(one.more),
        }  # fmt: skip

    def _completion(self, body: dict[str, Any], one: Turn) -> dict[str, Any]:
        text = "".join(block.text for block in one.blocks if isinstance(block, Say)) or None
        calls: list[dict[str, Any]] = []
        for block in one.blocks:
            if isinstance(block, Use):
                written = (
                    block.input
                    if isinstance(block.input, str)
                    else json.dumps(block.input, ensure_ascii=False)
                )
                function = {"name": self._name(body, block.name), "arguments": written}
                calls.append(
                    {
                        "id": self._call_id("call_", len(calls)),
                        "type": "function",
                        "function": function,
                    }
                )
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        stop = one.stop or ("tool_calls" if calls else "stop")
        return {
            "id": self._id("chatcmpl-"), "object": "chat.completion", "created": _CREATED, "model": body["model"],
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": stop}],
        }  # fmt: skip

    def _response(self, body: dict[str, Any], one: Turn) -> dict[str, Any]:
        output: list[dict[str, Any]] = []
        for block in one.blocks:
            if isinstance(block, Say):
                part = {
                    "type": "output_text",
                    "text": block.text,
                    "annotations": [],
                    "logprobs": [],
                }
                output.append({"id": self._id("msg_"), "type": "message", "status": "completed", "role": "assistant",
                               "content": [part]})  # fmt: skip
            elif isinstance(block, Think):
                output.append({"id": self._id("rs_"), "type": "reasoning", "summary": [],
                               "encrypted_content": self._id("enc-")})  # fmt: skip
            else:
                written = (
                    block.input
                    if isinstance(block.input, str)
                    else json.dumps(block.input, ensure_ascii=False)
                )
                output.append({"id": self._id("fc_"), "type": "function_call", "status": "completed",
                               "call_id": self._call_id("call_", len(output)), "arguments": written,
                               "name": self._name(body, block.name), **_caller(block)})  # fmt: skip
        response_id = self._id("resp_")
        before, after = self._responses.get(str(body.get("previous_response_id")), ([], []))
        if body.get("store", True):
            self._responses[response_id] = ([*before, *after, *input_items(body)], output)
        return {
            "id": response_id, "object": "response", "created_at": _CREATED, "model": body["model"],
            "status": one.stop or "completed", "error": None, "incomplete_details": None,
            "instructions": body.get("instructions"), "metadata": {}, "output": output, "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"), "store": body.get("store", True),
            "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools", []), "temperature": 1.0,
            "top_p": 1.0, "text": {"format": {"type": "text"}},
        }  # fmt: skip


def _caller(block: Use) -> dict[str, Any]:
    return {} if block.caller is None else {"caller": block.caller}


def asdict_block(block: Say | Think | Use) -> dict[str, Any]:
    return (
        {"text": block.text}
        if isinstance(block, Say | Think)
        else {"name": block.name, "input": block.input}
    )


def input_items(body: dict[str, Any]) -> list[Any]:
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _additional(body: dict[str, Any]) -> list[Any]:
    items = body.get("input")
    first: dict[str, Any] = (
        items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
    )
    return list(first.get("tools") or ())


def _check_reasoning(items: list[Any]) -> None:
    """Check that each reasoning item comes with the item that followed it."""
    for at, item in enumerate(items):
        follows = items[at + 1] if at + 1 < len(items) else {}
        if item.get("type") == "reasoning" and follows.get("type") not in (
            "function_call",
            "reasoning",
            "message",
        ):
            raise Refused(
                400,
                f"Item '{item['id']}' of type 'reasoning' was provided without its required following item.",
            )


def _parts(api: Api, body: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The parts of a prompt in the order of the cache, and the indexes of those with a mark."""
    parts: list[str] = []
    marks: list[int] = []

    def add(value: Any) -> None:
        marked = isinstance(value, dict) and "cache_control" in value
        bare = (
            {name: one for name, one in value.items() if name != "cache_control"}
            if marked
            else value
        )
        parts.append(json.dumps(bare, sort_keys=True))
        if marked:
            marks.append(len(parts) - 1)

    for tool in body.get("tools", []):
        add(tool)
    if api == "responses":
        for item in [body.get("instructions"), *input_items(body)]:
            add(item)
        return parts, marks
    system = body.get("system", [])
    for block in [{"type": "text", "text": system}] if isinstance(system, str) else system:
        add(block)
    for message in body["messages"]:
        if api == "chat":
            add(message)
            continue
        content = message["content"]
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            add({"role": message["role"], **block})
    if "cache_control" in body:
        marks.append(len(parts) - 1)
    return parts, marks


_USAGE: dict[str, Callable[[dict[str, int]], dict[str, Any]]] = {
    "anthropic": lambda used: {
        "input_tokens": used["input"], "cache_read_input_tokens": used["read"],
        "cache_creation_input_tokens": used["write"], "output_tokens": used["output"],
    },
    "chat": lambda used: {
        "prompt_tokens": used["input"] + used["read"] + used["write"], "completion_tokens": used["output"],
        "total_tokens": sum(used.values()), "prompt_tokens_details": {"cached_tokens": used["read"]},
    },
    "responses": lambda used: {
        "input_tokens": used["input"] + used["read"] + used["write"], "output_tokens": used["output"],
        "total_tokens": sum(used.values()), "input_tokens_details": {"cached_tokens": used["read"]},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}  # fmt: skip
Event = tuple[str, Any]


def _pieces(text: str, size: int) -> Iterator[str]:
    yield from (text[at : at + size] for at in range(0, len(text), size))


def _message_events(
    body: Any, answer: dict[str, Any], used: dict[str, int], one: Turn
) -> Iterator[Event]:
    usage = answer["usage"]
    yield (
        "message_start",
        {
            "message": {
                **answer,
                "content": [],
                "stop_reason": None,
                "usage": usage | {"output_tokens": 1},
            }
        },
    )
    yield "ping", {}
    for at, block in enumerate(answer["content"]):
        empty: dict[str, dict[str, Any]] = {
            "text": {"text": ""},
            "thinking": {"thinking": "", "signature": ""},
            "tool_use": {"input": {}},
        }
        yield (
            "content_block_start",
            {"index": at, "content_block": {**block, **empty[block["type"]]}},
        )
        deltas: list[dict[str, Any]] = []
        if block["type"] == "text":
            deltas = [
                {"type": "text_delta", "text": piece} for piece in _pieces(block["text"], one.piece)
            ]
        elif block["type"] == "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": piece}
                for piece in _pieces(block["thinking"], one.piece)
            ]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            given = [use for use in one.blocks if isinstance(use, Use)]
            number = sum(1 for other in answer["content"][:at] if other["type"] == "tool_use")
            raw = given[number].input
            written = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
            deltas = [
                {"type": "input_json_delta", "partial_json": piece}
                for piece in ["", *_pieces(written, one.piece)]
            ]
        yield from (("content_block_delta", {"index": at, "delta": delta}) for delta in deltas)
        yield "content_block_stop", {"index": at}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    end |= {"stop_details": answer["stop_details"]} if "stop_details" in answer else {}
    yield "message_delta", {"delta": end, "usage": usage}
    yield "message_stop", {}


def _chat_events(
    body: Any, answer: dict[str, Any], used: dict[str, int], one: Turn
) -> Iterator[Event]:
    head = {name: answer[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    choice = answer["choices"][0]
    counts = (body.get("stream_options") or {}).get("include_usage", False)

    def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        return "", {**head, "choices": choices, **({"usage": None} if counts else {})}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(choice["message"]["content"] or "", one.piece):
        yield chunk({"content": piece})
    for at, call in enumerate(choice["message"].get("tool_calls", [])):
        yield chunk(
            {
                "tool_calls": [
                    {"index": at, **call, "function": {**call["function"], "arguments": ""}}
                ]
            }
        )
        for piece in _pieces(call["function"]["arguments"], one.piece):
            yield chunk({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
    yield chunk({}, choice["finish_reason"])
    if counts:
        yield "", {**head, "choices": [], "usage": answer["usage"]}
    yield "", "[DONE]"


def _response_events(
    body: Any, answer: dict[str, Any], used: dict[str, int], one: Turn
) -> Iterator[Event]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for at, item in enumerate(answer["output"]):
        where = {"output_index": at, "item_id": item["id"]}
        forms: dict[str, dict[str, Any]] = {
            "message": {"content": []},
            "function_call": {"arguments": ""},
        }
        empty = forms.get(item["type"], {})
        yield "response.output_item.added", {"output_index": at, "item": {**item, **empty}}
        if item["type"] == "message":
            part = item["content"][0]
            yield (
                "response.content_part.added",
                {**where, "content_index": 0, "part": {**part, "text": ""}},
            )
            for piece in _pieces(part["text"], one.piece):
                yield (
                    "response.output_text.delta",
                    {**where, "content_index": 0, "delta": piece, "logprobs": []},
                )
            yield (
                "response.output_text.done",
                {**where, "content_index": 0, "text": part["text"], "logprobs": []},
            )
            yield "response.content_part.done", {**where, "content_index": 0, "part": part}
        elif item["type"] == "function_call":
            for piece in _pieces(item["arguments"], one.piece):
                yield "response.function_call_arguments.delta", {**where, "delta": piece}
            yield (
                "response.function_call_arguments.done",
                {**where, "name": item["name"], "arguments": item["arguments"]},
            )
        yield "response.output_item.done", {"output_index": at, "item": item}
    yield "response.completed", {"response": answer}


_EVENTS: dict[str, Callable[..., Iterator[Event]]] = {
    "anthropic": _message_events, "chat": _chat_events, "responses": _response_events,
}  # fmt: skip


def written_events(events: Sequence[Event], ends: bytes = b"\n") -> list[bytes]:
    """Return events as bytes. Events of OpenAI's Responses API are numbered."""
    found = []
    for number, (name, data) in enumerate(events):
        if name.startswith("response."):
            data = {**data, "sequence_number": number}
        text = (
            data
            if isinstance(data, str)
            else json.dumps({"type": name, **data} if name else data, ensure_ascii=False)
        )
        start = f"event: {name}".encode() + ends if name else b""
        found.append(start + b"data: " + text.encode() + ends + ends)
    return found


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(one: Turn, kind: str) -> list[tuple[bytes, bytes]]:
    found = [("content-type", one.content_type or kind), ("request-id", "req_1"), *one.headers]
    found += [("retry-after", one.retry_after)] if one.retry_after is not None else []
    return [(name.encode(), value.encode()) for name, value in found]


async def _whole(send: Any, one: Turn, body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": one.status,
            "headers": _headers(one, "application/json"),
        }
    )
    if one.break_after is not None:
        await send(
            {"type": "http.response.body", "body": body[: one.break_after], "more_body": True}
        )
        raise ConnectionError("broken by the script")
    await send({"type": "http.response.body", "body": body})


async def _streamed(send: Any, one: Turn, events: list[Event], is_anthropic: bool) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": _headers(one, "text/event-stream"),
        }
    )
    async for chunk in _chunks(one, events, is_anthropic):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _chunks(one: Turn, events: list[Event], is_anthropic: bool) -> AsyncIterator[bytes]:
    left = b""
    for number, data in enumerate(written_events(events, one.ends)):
        if number == one.error_after:
            error = {"type": "overloaded_error", "message": "Overloaded"}
            yield written_events(
                [("error", {"error": error}) if is_anthropic else ("", {"error": error})]
            )[0]
            return
        if number == one.break_after:
            if one.break_inside:
                yield data[: len(data) // 2]
            raise ConnectionError("broken by the script")
        if number == one.pause_after and one.pause is not None:
            await asyncio.to_thread(one.pause.wait, 20)
        left += data
        if not one.cut:
            yield left
            left = b""
        while one.cut and len(left) >= one.cut:
            yield left[: one.cut]
            left = left[one.cut :]
    if left:
        yield left


def serve_in_thread(app: Any, lifespan: Any = "off") -> tuple[uvicorn.Server, threading.Thread]:
    """Serve an application on a free port of loopback, and return when it listens."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level=os.environ.get("COATCHECK_TEST_LOG", "critical"),
        ws="none",
        lifespan=lifespan,
        interface="asgi3",
    )
    server = uvicorn.Server(config)
    started = threading.Event()
    begin = server.startup

    async def startup(sockets: Any = None) -> None:
        await begin(sockets)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(20)
    return server, thread


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
