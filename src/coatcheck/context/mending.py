"""Calls and results as providers want them: each call answered where it must be, each answer with its call.

Conversations that were interrupted have calls without a result, and results that come late. A provider refuses both. A
missing result is said to be missing; a late one is told as a text where it came. Nothing that was sent moves, so a
conversation that grows keeps its beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from coatcheck.transcript.formats import FORMATS, Message
from coatcheck.transcript.formats.format import text_of

__all__ = ["mended"]

NO_RESULT: Final = "No result: the call was interrupted, or its result came later."
_LATE: Final = "Late result of the call {}: {}"
_RESPONSES: Final = FORMATS["openai-responses"]
_BLANK: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


def mended(messages: Sequence[Message], provider: str) -> list[Message]:
    """The messages with every call answered in its place. Those that are as they should be are the same objects."""
    if provider == "anthropic":
        return list(_anthropic(messages))
    return list(_items(messages) if provider == "openai-responses" else _chat(messages))


def _anthropic(messages: Sequence[Message]) -> Iterator[Message]:
    """Results stand first in the user message right after their call; a run of messages with one role is one to the
    provider. Of a run of the assistant's, a call that nothing behind it answers was interrupted there."""
    number = 0
    while number < len(messages):
        message = messages[number]
        if message.get("role") != "assistant":
            yield (_without_strays(message, ()) or message) if message.get("role") == "user" else message
            number += 1
            continue
        said = list(_run(messages, number, "assistant"))
        run = list(_run(messages, number + len(said), "user"))
        number += len(said) + len(run)
        answered = {one.get("tool_use_id") for message in run for one in _blocks(message) if _is_result(one)}
        asked: list[str] = []
        for one in said:
            yield one
            calls = _ids(one, "tool_use", "id")
            if calls and one is not said[-1] and answered.isdisjoint(calls):
                yield {"role": "user", "content": [_missing(call_id) for call_id in calls]}
            else:
                asked += calls
        if asked and not run:
            yield {"role": "user", "content": [_missing(call_id) for call_id in asked]}
        elif run:
            yield _answer(run, asked)
            for one in run[1:]:
                rest = _without_strays(one, asked)
                if rest is not None:
                    yield rest


def _run(messages: Sequence[Message], start: int, role: str) -> Iterator[Message]:
    return itertools.takewhile(lambda one: one.get("role") == role, itertools.islice(messages, start, None))


def _answer(run: Sequence[Message], asked: Sequence[str]) -> Message:
    """The message that answers these calls: their results first, then what else it says."""
    content = run[0].get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    own = [one for one in blocks if _answers(one, asked)]
    others = [one for message in run[1:] for one in _blocks(message) if _answers(one, asked)]
    given = _once(own + others)
    missing = [_missing(each) for each in asked if each not in given]
    rest = [_told(one) if _is_result(one) else one for one in blocks if not _answers(one, asked)]
    whole = [*given.values(), *missing, *rest]
    same = len(whole) == len(blocks) and all(a is b for a, b in zip(whole, blocks, strict=True))
    return run[0] if same else {**run[0], "content": whole}


def _once(results: list[Any]) -> dict[str, Any]:
    """Each call answered once: the first answer counts."""
    found: dict[str, Any] = {}
    for one in results:
        found.setdefault(one["tool_use_id"], one)
    return found


def _without_strays(message: Message, moved: Sequence[str]) -> Message | None:
    """A message whose results answer nothing before it: told as texts, but for those that moved to where they belong.
    None where nothing is left."""
    if not any(_is_result(one) for one in _blocks(message)):
        return message
    told = [_told(one) if _is_result(one) else one for one in _blocks(message) if not _answers(one, moved)]
    return {**message, "content": told} if told else None


def _blocks(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _ids(message: Message, kind: str, key: str) -> list[str]:
    blocks = (one for one in _blocks(message) if isinstance(one, dict) and one.get("type") == kind)
    return list(dict.fromkeys(str(one[key]) for one in blocks if one.get(key)))


def _is_result(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _answers(block: object, asked: Sequence[str]) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result" and block.get("tool_use_id") in asked


def _missing(call_id: str) -> Message:
    return {"type": "tool_result", "tool_use_id": call_id, "content": NO_RESULT, "is_error": True}


def _told(block: Message) -> Message:
    return {"type": "text", "text": _LATE.format(block.get("tool_use_id"), text_of(block.get("content")))}


def _chat(messages: Sequence[Message]) -> Iterator[Message]:
    """Tool messages stand right behind the message that called, one for each call."""
    number = 0
    while number < len(messages):
        message = messages[number]
        number += 1
        if message.get("role") == "tool":
            yield _as_user(str(message.get("tool_call_id")), message.get("content"))
            continue
        yield message
        listed = message.get("tool_calls")
        asked = [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
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


def _items(items: Sequence[Message]) -> Iterator[Message]:
    """Outputs may stand anywhere behind their call, but none without the other."""
    outputs: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        if _is_output(item):
            outputs.setdefault(_call_id(item), []).append(number)
    wanted: set[int] = set()
    for number, item in enumerate(items):
        call_id = _call_id(item)
        if _is_output(item) and number not in wanted:
            yield _as_user(call_id, item.get("output"))
            continue
        yield item
        if _RESPONSES.calls(item):
            later = [each for each in outputs.get(call_id, ()) if each > number and each not in wanted]
            if later:
                wanted.add(later[0])
            else:
                yield from _missing_output(str(item["type"]), call_id)


def _missing_output(kind: str, call_id: str) -> Iterator[Message]:
    """An output that says that there is none, in the shape that the provider takes for this kind of call."""
    said: Message = {"type": f"{kind}_output", "call_id": call_id}
    if kind == "shell_call":
        yield said | {"output": [{"stdout": "", "stderr": NO_RESULT, "outcome": {"type": "exit", "exit_code": 1}}]}
    elif kind == "apply_patch_call":
        yield said | {"status": "failed", "output": NO_RESULT}
    elif kind == "computer_call":  # nothing but a picture may stand there
        yield said | {"output": {"type": "computer_screenshot", "image_url": _BLANK}}
        yield {"role": "user", "content": f"The screenshot of the call {call_id} is blank. {NO_RESULT}"}
    else:
        yield said | {"output": NO_RESULT}


def _is_output(item: Message) -> bool:
    return str(item.get("type")).endswith("_output") and bool(_RESPONSES.results(item))


def _call_id(item: Message) -> str:
    """The id by which a call and its output match. That of a local shell may stand under another name."""
    is_local = item.get("type") == "local_shell_call_output" and "call_id" not in item
    return str(item.get("id" if is_local else "call_id"))


def _as_user(call_id: str, content: object) -> Message:
    return {"role": "user", "content": _LATE.format(call_id, text_of(content))}
