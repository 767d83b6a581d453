"""Messages in the form that a provider accepts: converted from hosts, with calls and results paired, as a request.

`for_provider` converts messages of agent hosts (pi, OpenClaw, Claude Code): bare messages, or lines of a session file.
`mended` pairs calls and results. Interrupted conversations contain calls without a result, and late results; cut or
merged ones begin with an answer, or repeat a call. Providers refuse all of these. A missing result gets a placeholder;
a late result or a repeated call becomes text where it occurs. Both functions work message by message and move nothing
that was sent, so a growing conversation keeps its beginning.

`dialect` returns how a provider takes a prompt: where the system text, the tail and cache breakpoints go. The tail
changes every turn. It comes last: as a block after the last user message for Anthropic, where roles alternate and
results come first, and as a separate user message for OpenAI.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.messages.cache import Breakpoint, marks_in
from coatcheck.messages.formats import FORMATS
from coatcheck.messages.message import Format, Message, text_of

__all__ = ["NO_RESULT", "Dialect", "dialect", "for_provider", "mended"]

NO_RESULT: Final = "No result: the call was interrupted, or its result came later."
_LATE: Final = "Late result of the call {}: {}"
_REPEATED: Final = "Repeated call {}, not made again: {} with {}"
_OPENING: Final = "The beginning of this conversation is missing."
_BLANK: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)
_RESPONSES: Final = FORMATS["openai-responses"]
_PI: Final = FORMATS["pi"]
_CLAUDE_CODE: Final = FORMATS["claude-code"]
_PI_ROLES: Final = frozenset({"toolResult", "bashExecution", "custom", "hookMessage"})
_SPEAKERS: Final = frozenset({"user", "assistant"})
_PROVIDER_KEYS: Final = frozenset({"type", "tool_calls", "tool_call_id", "function_call"})
_NOT_IN_IDS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_ID: Final = 40  # OpenAI's limit
_LONGEST_ANTHROPIC_ID: Final = 64
_FOREIGN_SIGNATURE: Final = 64  # characters: a shorter signature is the name of a field of another provider
_MARK: Final = {"type": "ephemeral"}
_MARK_FOR_AN_HOUR: Final = {"type": "ephemeral", "ttl": "1h"}
_UNMARKABLE: Final = frozenset({"thinking", "redacted_thinking"})


class Dialect:
    """How a provider takes a prompt. This class is OpenAI's chat API; subclasses define the differences."""

    name = "openai"
    format: Format = FORMATS["openai-chat"]
    writes_marks = False
    """Whether breakpoints are written into the request. OpenAI caches prefixes automatically."""
    alternates = False
    """Whether consecutive user messages must be merged."""

    def request(
        self, system: str, messages: Sequence[Message], tail: str, tools: Sequence[Any], marks: Sequence[Breakpoint]
    ) -> dict[str, Any]:
        """Return the arguments of the provider's call that contain the prompt."""
        lead = [{"role": "system", "content": system}] if system else []
        end = [{"role": "user", "content": tail}] if tail else []
        request: dict[str, Any] = {"messages": [*lead, *messages, *end]}
        return {"tools": list(tools), **request} if tools else request

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        """Return the path of the last part before the tail, if these are all messages before it."""
        number = len(messages) + bool(system) - 1
        return ("messages", number) if number >= 0 else None

    def before_tail(self, messages: Sequence[Message]) -> int:
        """Return the number of messages before the tail."""
        return len(messages)

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        """Count the breakpoints that the host has set."""
        return 0

    def joined(self, one: Message, other: Message) -> Message:
        """Merge two user messages into one."""
        return {**one, "content": [*_blocks(one), *_blocks(other)]}

    def tool(self, tool: Any) -> Any:
        """Describe a tool as the provider expects it."""
        return _described(tool, "as_openai")


class _Responses(Dialect):
    name = "openai-responses"
    format = _RESPONSES

    def request(
        self, system: str, messages: Sequence[Message], tail: str, tools: Sequence[Any], marks: Sequence[Breakpoint]
    ) -> dict[str, Any]:
        end = [{"role": "user", "content": [{"type": "input_text", "text": tail}]}] if tail else []
        request: dict[str, Any] = {"input": [*messages, *end]}
        if system:
            request = {"instructions": system, **request}
        return {"tools": list(tools), **request} if tools else request

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        return ("input", len(messages) - 1) if messages else ("instructions",) if system else None

    def tool(self, tool: Any) -> Any:
        described = _described(tool, "as_openai")
        inner = described.get("function") if isinstance(described, Mapping) else None
        return {"type": "function", **inner} if isinstance(inner, Mapping) else described


class _Anthropic(Dialect):
    name = "anthropic"
    format = FORMATS["anthropic"]
    writes_marks = True
    alternates = True

    def request(
        self, system: str, messages: Sequence[Message], tail: str, tools: Sequence[Any], marks: Sequence[Breakpoint]
    ) -> dict[str, Any]:
        request: dict[str, Any] = {"messages": list(messages)}
        if system:
            request = {"system": [{"type": "text", "text": system}], **request}
        if tools:
            request = {"tools": list(tools), **request}
        last = _last_for_an_hour(messages)
        for one in marks:
            _mark(request, one.path, _MARK if last is None or _position(one.path) > last else _MARK_FOR_AN_HOUR)
        if tail:
            _append(request["messages"], self.before_tail(messages) - 1, tail)
        return request

    def before_tail(self, messages: Sequence[Message]) -> int:
        """Count up to the last user message: an answer that the host began for the model stays last."""
        users = (at for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "user")
        return next(users, -1) + 1

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        for number in range(len(messages) - 1, -1, -1):
            blocks = _blocks(messages[number])
            for index in range(len(blocks) - 1, -1, -1):
                if _takes_mark(blocks[index]):
                    return ("messages", number, "content", index)
        return ("system", 0) if system else None

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        return sum(1 for _ in marks_in([*messages, *tools]))

    def tool(self, tool: Any) -> Any:
        return _described(tool, "as_anthropic")


_DIALECTS: Final[dict[str, Dialect]] = {one.name: one for one in (Dialect(), _Responses(), _Anthropic())}
_ALIASES: Final = {"openai-chat": "openai", "chat": "openai", "responses": "openai-responses"}


def dialect(provider: str) -> Dialect:
    """Return the dialect of a provider. Raises `InvalidArgument` for an unknown name."""
    name = _ALIASES.get(str(provider), str(provider))
    if name not in _DIALECTS:
        raise InvalidArgument(f"unknown provider {clip(str(provider))}", hint="use one of: " + ", ".join(_DIALECTS))
    return _DIALECTS[name]


def _described(tool: Any, method: str) -> Any:
    describe = getattr(tool, method, None)
    return describe() if callable(describe) else tool


def _blocks(message: Mapping[str, Any]) -> list[Any]:
    """Return the blocks of a message; a text is one block."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def _takes_mark(block: Any) -> bool:
    if not isinstance(block, dict) or block.get("type") in _UNMARKABLE:
        return False
    return block.get("type") != "text" or bool(str(block.get("text", "")).strip())


def _last_for_an_hour(messages: Sequence[Message]) -> tuple[int, int] | None:
    """Find the host's last breakpoint with a time to live of one hour: the provider refuses one of five minutes before
    it."""
    found = [path for path, mark in marks_in(list(messages)) if isinstance(mark, Mapping) and mark.get("ttl") == "1h"]
    return _position(("messages", *found[-1])) if found else None


def _position(path: tuple[str | int, ...]) -> tuple[int, int]:
    """Return the position of a path among the blocks of a request, in the order in which the provider reads them."""
    return (-1, 0) if path[0] == "system" else (int(path[1]), int(path[3]) if len(path) > 3 else 0)


def _mark(request: dict[str, Any], path: tuple[str | int, ...], mark: Mapping[str, str]) -> None:
    """Set a breakpoint on a copy of the block at this path, unless the host has set one."""
    if path[0] == "system":
        request["system"] = [{**request["system"][0], "cache_control": dict(mark)}]
        return
    number, index = int(path[1]), int(path[3])
    message = request["messages"][number]
    blocks = list(_blocks(message))
    blocks[index] = {**blocks[index], "cache_control": blocks[index].get("cache_control") or dict(mark)}
    request["messages"][number] = {**message, "content": blocks}


def _append(messages: list[Message], number: int, tail: str) -> None:
    """Append the tail to the user message of this number, or insert a new user message if there is none."""
    block = {"type": "text", "text": tail}
    if number < 0:
        messages.insert(0, {"role": "user", "content": [block]})
    else:
        messages[number] = {**messages[number], "content": [*_blocks(messages[number]), block]}


def mended(messages: Sequence[Message], provider: str) -> list[Message]:
    """Return the messages with every call answered in its place. Correct messages are returned as the same objects."""
    if provider == "anthropic":
        return list(_mend_anthropic(messages))
    return list(_mend_items(messages) if provider == "openai-responses" else _mend_chat(messages))


def _mend_anthropic(messages: Sequence[Message]) -> Iterator[Message]:
    """Mend for Anthropic: the first message is the user's, and results come first in the user message after their call.

    The provider reads a run of messages with one role as one. In a run of the assistant, a call that is not answered
    after the run was interrupted; messages whose calls are answered after the run are merged."""
    if messages and messages[0].get("role") == "assistant":
        yield {"role": "user", "content": [{"type": "text", "text": _OPENING}]}
    seen: set[str] = set()
    number = 0
    while number < len(messages):
        message = messages[number]
        if message.get("role") != "assistant":
            yield (_without_strays(message, ()) or message) if message.get("role") == "user" else message
            number += 1
            continue
        spoken = [_without_repeats(one, seen) for one in _run(messages, number, "assistant")]
        run = list(_run(messages, number + len(spoken), "user"))
        number += len(spoken) + len(run)
        answered = {one.get("tool_use_id") for message in run for one in _listed(message) if _is_result(one)}
        calls = [_call_ids(one) for one in spoken]
        first = next((at for at, ids in enumerate(calls) if not answered.isdisjoint(ids)), len(spoken) - 1)
        for one, ids in zip(spoken[:first], calls, strict=False):
            yield one
            if ids:
                yield {"role": "user", "content": [_missing(call_id) for call_id in ids]}
        yield spoken[first] if first == len(spoken) - 1 else _merged(spoken[first:])
        asked = [call_id for ids in calls[first:] for call_id in ids]
        if asked and not run:
            yield {"role": "user", "content": [_missing(call_id) for call_id in asked]}
        elif run:
            yield _answer(run, asked)
            for one in run[1:]:
                rest = _without_strays(one, asked)
                if rest is not None:
                    yield rest


def _without_repeats(message: Message, seen: set[str]) -> Message:
    """Return an assistant message with calls that reuse an id turned into text: providers refuse them."""
    blocks = _listed(message)
    kept = []
    for one in blocks:
        call_id = one.get("id") if isinstance(one, dict) and one.get("type") == "tool_use" else None
        if call_id in seen:
            one = {"type": "text", "text": _REPEATED.format(call_id, one.get("name"), text_of(one.get("input")))}
        elif isinstance(call_id, str):
            seen.add(call_id)
        kept.append(one)
    same = all(new is old for new, old in zip(kept, blocks, strict=True))
    return message if same else {**message, "content": kept}


def _merged(messages: Sequence[Message]) -> Message:
    return {**messages[0], "content": [block for message in messages for block in _blocks(message)]}


def _run(messages: Sequence[Message], start: int, role: str) -> Iterator[Message]:
    return itertools.takewhile(lambda one: one.get("role") == role, itertools.islice(messages, start, None))


def _answer(run: Sequence[Message], asked: Sequence[str]) -> Message:
    """Return the message that answers these calls: their results first, then its other content. The first result of
    each call counts."""
    blocks = _blocks(run[0])
    others = [one for message in run[1:] for one in _listed(message)]
    given: dict[str, Any] = {}
    for one in [*blocks, *others]:
        if _answers(one, asked):
            given.setdefault(one["tool_use_id"], one)
    missing = [_missing(each) for each in asked if each not in given]
    rest = [_late(one) if _is_result(one) else one for one in blocks if not _answers(one, asked)]
    whole = [*given.values(), *missing, *rest]
    same = len(whole) == len(blocks) and all(a is b for a, b in zip(whole, blocks, strict=True))
    return run[0] if same else {**run[0], "content": whole}


def _without_strays(message: Message, moved: Sequence[str]) -> Message | None:
    """Return a message with results that answer no earlier call turned into text, and without those that were `moved`
    to their call; None if nothing is left."""
    if not any(_is_result(one) for one in _listed(message)):
        return message
    kept = [_late(one) if _is_result(one) else one for one in _listed(message) if not _answers(one, moved)]
    return {**message, "content": kept} if kept else None


def _listed(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _call_ids(message: Message) -> list[str]:
    blocks = (one for one in _listed(message) if isinstance(one, dict) and one.get("type") == "tool_use")
    return list(dict.fromkeys(str(one["id"]) for one in blocks if one.get("id")))


def _is_result(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _answers(block: object, asked: Sequence[str]) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result" and block.get("tool_use_id") in asked


def _missing(call_id: str) -> Message:
    return {"type": "tool_result", "tool_use_id": call_id, "content": NO_RESULT, "is_error": True}


def _late(block: Message) -> Message:
    return {"type": "text", "text": _LATE.format(block.get("tool_use_id"), text_of(block.get("content")))}


def _mend_chat(messages: Sequence[Message]) -> Iterator[Message]:
    """Mend for OpenAI's chat: tool messages come right after the message with the calls, one for each call."""
    number = 0
    while number < len(messages):
        message = messages[number]
        number += 1
        if message.get("role") == "tool":
            yield _as_user(str(message.get("tool_call_id")), message.get("content"))
            continue
        yield message
        calls = message.get("tool_calls")
        asked = [str(one.get("id")) for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
        strays: list[Message] = []
        while number < len(messages) and messages[number].get("role") == "tool" and message.get("role") == "assistant":
            result = messages[number]
            number += 1
            if result.get("tool_call_id") in asked:
                asked.remove(str(result["tool_call_id"]))
                yield result
            else:
                strays.append(_as_user(str(result.get("tool_call_id")), result.get("content")))
        yield from ({"role": "tool", "tool_call_id": call_id, "content": NO_RESULT} for call_id in asked)
        yield from strays


def _mend_items(items: Sequence[Message]) -> Iterator[Message]:
    """Mend for OpenAI's Responses: an output comes anywhere after its call, neither occurs without the other, and an id
    is not called again before its output."""
    outputs: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        if _is_output(item):
            outputs.setdefault(_call_id(item), []).append(number)
    wanted: set[int] = set()
    waiting: set[str] = set()
    for number, item in enumerate(items):
        call_id = _call_id(item)
        if _is_output(item) and number not in wanted:
            yield _as_user(call_id, item.get("output"))
            continue
        calls = _RESPONSES.calls(item)
        if calls and call_id in waiting:
            arguments = item.get("arguments", item.get("input", item.get("action")))
            yield {"role": "user", "content": _REPEATED.format(call_id, calls[0].name, text_of(arguments))}
            continue
        yield item
        waiting.discard(call_id)
        if calls:
            later = [each for each in outputs.get(call_id, ()) if each > number and each not in wanted]
            if later:
                wanted.add(later[0])
                waiting.add(call_id)
            else:
                yield from _missing_output(str(item["type"]), call_id)


def _missing_output(kind: str, call_id: str) -> Iterator[Message]:
    """Yield a placeholder output in the shape that the provider accepts for this kind of call."""
    item: Message = {"type": f"{kind}_output", "call_id": call_id}
    if kind == "shell_call":
        yield item | {"output": [{"stdout": "", "stderr": NO_RESULT, "outcome": {"type": "exit", "exit_code": 1}}]}
    elif kind == "apply_patch_call":
        yield item | {"status": "failed", "output": NO_RESULT}
    elif kind == "computer_call":  # only an image is accepted
        yield item | {"output": {"type": "computer_screenshot", "image_url": _BLANK}}
        yield {"role": "user", "content": f"The screenshot of the call {call_id} is blank. {NO_RESULT}"}
    else:
        yield item | {"output": NO_RESULT}


def _is_output(item: Message) -> bool:
    return str(item.get("type")).endswith("_output") and bool(_RESPONSES.results(item))


def _call_id(item: Message) -> str:
    """Return the id that pairs a call with its output. A local shell may use another key."""
    is_local = item.get("type") == "local_shell_call_output" and "call_id" not in item
    return str(item.get("id" if is_local else "call_id"))


def _as_user(call_id: str, content: object) -> Message:
    return {"role": "user", "content": _LATE.format(call_id, text_of(content))}


def for_provider(messages: Sequence[Any], provider: str) -> list[Any]:
    """Convert messages of a host to the provider's format. Other messages are returned as the same objects.

    Raises `InvalidArgument` for lines of Claude Code with a provider other than Anthropic."""
    given = _unwrapped(messages, provider)
    if not any(_is_pi(one, provider) for one in given):
        return given
    converters = {"anthropic": _pi_to_anthropic, "openai-responses": _pi_to_responses}
    return list(converters.get(provider, _pi_to_chat)(given))


def _unwrapped(messages: Sequence[Any], provider: str) -> list[Any]:
    """Extract the messages from lines of a session file, as the host would continue them."""
    kinds = {_envelope(one) for one in messages}
    if kinds == {None}:
        return list(messages)
    if "message" in kinds:
        return list(_PI.for_model(messages))
    if kinds & {"user", "assistant"}:
        if provider != "anthropic":
            raise InvalidArgument(
                f"lines of Claude Code are in Anthropic's format, but the provider is {provider}",
                hint='use provider="anthropic", or convert the messages first',
            )
        return list(_CLAUDE_CODE.for_model(messages))
    return list(messages)


def _envelope(line: Any) -> str | None:
    """Return the type of a line that contains a message, else None."""
    if not isinstance(line, Mapping) or "role" in line or line.get("type") not in ("message", "user", "assistant"):
        return None
    inner = line.get("message")
    return str(line["type"]) if isinstance(inner, Mapping) and isinstance(inner.get("role"), str) else None


def _is_pi(message: Any, provider: str) -> bool:
    """Whether a message is in a form that only pi writes and this provider does not accept."""
    if not _may_be_pi(message):
        return False
    role, blocks = message["role"], _pi_blocks(message)
    if role in _PI_ROLES or any(map(_is_pi_block, blocks)):
        return True
    if provider == "openai-responses" and any(one.get("type") == "text" for one in blocks):
        return True
    if role == "assistant":
        return "stopReason" in message and "api" in message
    return set(message) == {"role", "content", "timestamp"}


def _may_be_pi(message: Any) -> bool:
    if not isinstance(message, Mapping) or not _PROVIDER_KEYS.isdisjoint(message):
        return False
    return message.get("role") in _PI_ROLES or message.get("role") in _SPEAKERS


def _is_pi_block(block: Mapping[str, Any]) -> bool:
    kind = block.get("type")
    return kind == "toolCall" or "thinkingSignature" in block or (kind == "image" and "mimeType" in block)


def _pi_blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in _blocks(message) if isinstance(one, Mapping)]


def _speakers(messages: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each message with its role, or "" if it needs no conversion."""
    for one in messages:
        if not _may_be_pi(one):
            yield "", one
            continue
        shown = next(iter(_PI.for_model([{"type": "message", "message": dict(one)}])), None)
        if shown is not None:
            role = _PI.role(shown)
            is_plain = isinstance(shown.get("content"), str) and role in _SPEAKERS
            yield ("", shown) if is_plain else (role, {**shown, "role": role})


def _pi_to_anthropic(messages: Sequence[Any]) -> Iterator[Any]:
    for role, message in _speakers(messages):
        if not role:
            yield message
            continue
        blocks = [block for one in _pi_blocks(message) if (block := _anthropic_block(one)) is not None]
        if role == "tool":
            result: Message = {"type": "tool_result", "tool_use_id": _anthropic_id(message), "content": blocks}
            if message.get("isError") is True:
                result["is_error"] = True
            yield {"role": "user", "content": [result]}
        elif blocks:
            yield {"role": role, "content": blocks}


def _anthropic_block(block: Mapping[str, Any]) -> Message | None:
    kind, signature = block.get("type"), block.get("thinkingSignature")
    if kind == "text":
        text = block.get("text")
        return {"type": "text", "text": text} if isinstance(text, str) and text.strip() else None
    if kind == "toolCall":
        return {"type": "tool_use", "id": _anthropic_id(block), "name": block.get("name"), "input": _arguments(block)}
    if kind == "image" and "mimeType" in block:
        source = {"type": "base64", "media_type": block["mimeType"], "data": block.get("data")}
        return {"type": "image", "source": source}
    if kind == "thinking" and "signature" not in block:
        if not isinstance(signature, str) or len(signature) < _FOREIGN_SIGNATURE or signature.startswith("{"):
            return None  # from another provider, or incomplete
        if block.get("redacted") is True:
            return {"type": "redacted_thinking", "data": signature}
        return {"type": "thinking", "thinking": block.get("thinking", ""), "signature": signature}
    return dict(block)


def _pi_to_chat(messages: Sequence[Any]) -> Iterator[Any]:
    images: list[Message] = []  # of results, which may only contain text: they follow the last result
    for role, message in _speakers(messages):
        if role != "tool" and images:
            yield {"role": "user", "content": images}
            images = []
        if not role:
            yield message
            continue
        parts = [part for one in _pi_blocks(message) if (part := _chat_part(one)) is not None]
        texts = [one for one in parts if one["type"] == "text"]
        if role == "tool":
            images += [one for one in parts if one["type"] != "text"]
            text = "\n".join(one["text"] for one in texts)
            content = text or ("(see the image below)" if images else "(no output)")
            yield {"role": "tool", "tool_call_id": _openai_id(message), "content": content}
        elif role == "assistant":
            calls = [_chat_call(one) for one in _pi_blocks(message) if one.get("type") == "toolCall"]
            if texts or calls:
                answer: Message = {"role": "assistant", "content": texts or None}
                yield {**answer, "tool_calls": calls} if calls else answer
        elif parts:
            yield {"role": role, "content": parts}
    if images:
        yield {"role": "user", "content": images}


def _chat_call(block: Mapping[str, Any]) -> Message:
    function = {"name": block.get("name"), "arguments": _arguments_json(block)}
    return {"id": _openai_id(block), "type": "function", "function": function}


def _chat_part(block: Mapping[str, Any]) -> Message | None:
    if block.get("type") == "image" and "mimeType" in block:
        return {"type": "image_url", "image_url": {"url": _data_url(block)}}
    if block.get("type") == "text" and isinstance(block.get("text"), str) and block["text"]:
        return {"type": "text", "text": block["text"]}
    return None if block.get("type") in ("text", "toolCall", "thinking") else dict(block)


def _pi_to_responses(messages: Sequence[Any]) -> Iterator[Any]:
    for role, message in _speakers(messages):
        if not role:
            yield message
            continue
        kind = "output_text" if role == "assistant" else "input_text"
        parts: list[Message] = []
        for block in _pi_blocks(message):
            if block.get("type") not in ("toolCall", "thinking"):
                part = _responses_part(block, kind)
                parts += [part] if part is not None else []
                continue
            item = _responses_item(block)
            if item is not None:
                if parts:
                    yield {"role": role, "content": parts}
                    parts = []
                yield item
        if role == "tool":
            only_text = all(one["type"] == "input_text" for one in parts)
            output: Any = "\n".join(one["text"] for one in parts) or "(no output)" if only_text else parts
            yield {"type": "function_call_output", "call_id": _openai_id(message), "output": output}
        elif parts:
            yield {"role": role, "content": parts}


def _responses_part(block: Mapping[str, Any], kind: str) -> Message | None:
    if block.get("type") == "image" and "mimeType" in block:
        return {"type": "input_image", "image_url": _data_url(block)}
    if block.get("type") == "text":
        text = block.get("text")
        return {"type": kind, "text": text} if isinstance(text, str) and text else None
    return dict(block)


def _responses_item(block: Mapping[str, Any]) -> Message | None:
    """Convert a call, or the reasoning item that pi keeps as the signature of a thinking block."""
    if block.get("type") == "toolCall":
        arguments = _arguments_json(block)
        return {
            "type": "function_call", "call_id": _openai_id(block), "name": block.get("name"), "arguments": arguments,
        }  # fmt: skip
    signature = block.get("thinkingSignature")
    if not isinstance(signature, str) or not signature.startswith("{"):
        return None
    try:
        item = json.loads(signature)
    except (ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) and item.get("type") == "reasoning" else None


def _arguments(call: Mapping[str, Any]) -> Any:
    found = call.get("arguments")
    return found if isinstance(found, dict) else {}


def _arguments_json(call: Mapping[str, Any]) -> str:
    return json.dumps(_arguments(call), ensure_ascii=False, separators=(",", ":"))


def _data_url(block: Mapping[str, Any]) -> str:
    return f"data:{block.get('mimeType')};base64,{block.get('data')}"


def _id(block: Mapping[str, Any]) -> str:
    """Return the id of a call or a result. With OpenAI's Responses API, pi appends the id of the item."""
    found = block.get("toolCallId", block.get("id"))
    return found.partition("|")[0] if isinstance(found, str) else ""


def _hashed(found: str) -> str:
    return "call_" + hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _openai_id(block: Mapping[str, Any]) -> str:
    found = _id(block)
    return found if len(found) <= _LONGEST_ID else _hashed(found)


def _anthropic_id(block: Mapping[str, Any]) -> str:
    found = _id(block)
    is_valid = found and not _NOT_IN_IDS.search(found) and len(found) <= _LONGEST_ANTHROPIC_ID
    return found if is_valid else _hashed(found)
