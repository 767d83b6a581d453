"""Coding sessions through `PromptBuilder`, message by message, with reads back as real calls of our tool.

The engine of `effect` replays results one by one and is fast; this one builds every request, so it also covers what
only a builder does: rewriting where that pays, tools that are added later, and what a provider would refuse. A session
is read as Claude Code recorded it: the lines of one answer together, a compaction starts a new conversation, and the
usage of the first call gives the size of the system prompt and the tools. Each answer that uses something that the
prompt does not show first reads it with one call for all of it, as in `coatcheck.audit`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import coatcheck
from benchmarks.provider_rules import BoundThinking, refused
from coatcheck import Policy, Session, toolkit
from coatcheck.audit import things_used
from coatcheck.context import Budget, PromptBuilder
from coatcheck.context.prompt import Prompt
from coatcheck.externalize.decision import QUESTION_TOKENS
from coatcheck.messages import Message
from coatcheck.messages.cost import usage_of
from coatcheck.models import USUAL_PRICES
from coatcheck.tokens import estimate

MODEL = "claude-opus-5"
"""A model with the usual prices that takes tools in the middle of a conversation."""

_OTHER: Message = {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object"}}
_LARGEST_BASE = 60_000
_ASKED, _LONGEST = 12, 80
_UNLIMITED = Budget(max_prompt_tokens=1 << 30)


@dataclass(slots=True)
class Answer:
    """A message of a session and when it was written, in seconds."""

    message: Message
    time: float | None = None


@dataclass(slots=True)
class Segment:
    """The messages between two compactions, and the tokens that were sent before them."""

    messages: list[Answer] = field(default_factory=list)
    base_tokens: int = 0


@dataclass(slots=True)
class Total:
    """What the requests of some sessions cost, in the price of an input token, and what was wrong with them."""

    cost: float = 0.0
    calls: int = 0
    reads: int = 0
    stubs: int = 0
    rewrites: int = 0
    largest: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """CPU time of each build."""


def segments(path: Path) -> list[Segment]:
    """Read a session file of Claude Code."""
    found, last = [Segment()], ""
    for line in map(_parsed, path.read_text().split("\n")):
        message = line.get("message")
        is_summary = line.get("isCompactSummary") is True
        if line.get("subtype") == "compact_boundary" or is_summary:
            found.append(Segment())
        if not isinstance(message, dict) or line.get("type") not in ("user", "assistant") or line.get("isSidechain"):
            continue
        blocks = _blocks(message.get("content"))
        if not blocks or message.get("model") == "<synthetic>":
            continue
        segment, role = found[-1], message["role"]
        if role == "assistant" and not any(one.message["role"] == role for one in segment.messages):
            known = sum(estimate(json.dumps(one.message)) for one in segment.messages)
            segment.base_tokens = min(_LARGEST_BASE, max(0, (usage_of(message).input_tokens or 0) - known))
        same = _continued(segment, role, str(message.get("id")) if role == "assistant" else "", last)
        if same is None:
            segment.messages.append(Answer({"role": role, "content": blocks}, _time(line.get("timestamp"))))
        else:
            same.message["content"] += blocks
        last = str(message.get("id")) if role == "assistant" else last
    return [one for one in found if any(each.message["role"] == "assistant" for each in one.messages)]


def _continued(segment: Segment, role: str, answer_id: str, last: str) -> Answer | None:
    """Return the message that more blocks belong to: results of parallel calls, or the rest of an answer."""
    if role == "user":
        before = segment.messages[-1] if segment.messages else None
        return before if before is not None and before.message["role"] == role else None
    answers = (one for one in reversed(segment.messages) if one.message["role"] == role)
    return next(answers, None) if answer_id == last else None


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _blocks(content: object) -> list[Message]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kept = [dict(one) for one in blocks or () if isinstance(one, dict)] if isinstance(blocks, list) else []
    return [one for one in kept if one.get("type") != "text" or str(one.get("text", "")).strip()]


def _time(text: object) -> float | None:
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None


def replayed(found: Iterable[Segment], session: Session, total: Total, *, inline: bool = False, **options: Any) -> None:
    """Send every call of a session and add up what it costs. `options` are those of the builder."""
    for number, segment in enumerate(found):
        one = session.store.session(f"{session.session_id}-{number}")
        _Replay(one, segment.base_tokens, total, inline=inline, **options).run(segment)


class _Replay:
    """One conversation."""

    def __init__(self, session: Session, base: int, total: Total, *, inline: bool, **options: Any) -> None:
        self._session, self._total, self._inline = session, total, inline
        self._read = toolkit(session)[0]
        self._builder = PromptBuilder(
            session, provider="anthropic", model=MODEL, system=" a" * int(base / _filler()), budget=_UNLIMITED,
            tools=[_OTHER] if inline else [_OTHER, *toolkit(session)], policy=None if inline else Policy(), **options,
        )  # fmt: skip
        self._deferred = 0 if inline else sum(estimate(json.dumps(tool.as_anthropic())) for tool in toolkit(session))
        self._rules = BoundThinking()
        self._history: list[Message] = []
        self._hidden: dict[str, str] = {}
        self._asked = 0
        self._has_sent = False

    def run(self, segment: Segment) -> None:
        before: float | None = None
        for one in segment.messages:
            message = one.message
            if message["role"] == "user":
                self._history.append(message)
                continue
            idle = None if before is None or one.time is None else max(0.0, one.time - before)
            prompt = self._call(idle)
            if things := self._unseen(message, prompt):
                self._total.cost += USUAL_PRICES.output * QUESTION_TOKENS * len(things)
                self._history += self._reading(things)
                prompt = self._call(0.0)
            self._total.cost += USUAL_PRICES.output * _output(message)
            self._history.append(self._rules.answered(prompt.request(), _signed(message)))
            before = one.time

    def _call(self, idle: float | None) -> Prompt:
        total, prices = self._total, USUAL_PRICES
        started = process_time()
        prompt = self._builder.build(self._history or [{"role": "user", "content": "go"}], idle_seconds=idle)
        total.seconds.append(process_time() - started)
        request = prompt.request()
        total.wrong += [*refused(request), *self._rules.refused(request)]
        is_cold = idle is not None and idle > prices.cache_seconds
        unnamed = 0 if any(one["role"] == "system" for one in prompt.messages) else self._deferred
        tokens = prompt.est_tokens - unnamed
        stable = min(tokens, prompt.stable_prefix.tokens) if self._has_sent and not is_cold else 0
        total.cost += prices.read * stable + prices.write * (tokens - stable)
        total.calls += 1
        total.rewrites += prompt.rewritten_tokens > 0
        total.largest = max(total.largest, tokens)
        replaced = prompt.pruned.replaced if prompt.pruned is not None else ()
        for pointer in (*(ref.pointer for ref in prompt.refs), *(one.pointer for one in replaced)):
            if pointer and pointer not in self._hidden:
                value = self._session.get(pointer)
                self._hidden[pointer] = value if isinstance(value, str) else json.dumps(value, default=str)
                total.stubs += 1
        self._history, self._has_sent = list(prompt.history), True
        return prompt

    def _unseen(self, answer: Message, prompt: Prompt) -> dict[str, list[str]]:
        """Return what an answer uses and the prompt does not show, by the artifact that has it."""
        if not self._hidden:
            return {}
        shown = "\n".join(text for message in prompt.messages for text in _texts(message))
        found: dict[str, list[str]] = {}
        for thing in things_used("\n".join(_texts(answer))):
            if thing not in shown:
                pointer = next((pointer for pointer, text in self._hidden.items() if thing in text), None)
                if pointer is not None and len(found.setdefault(pointer, [])) < _ASKED:
                    found[pointer].append(thing)
        return found

    def _reading(self, things: dict[str, list[str]]) -> list[Message]:
        """Return one answer that asks for all of it, and the pages."""
        calls, results = [], []
        for pointer, wanted in things.items():
            self._asked += 1
            self._total.reads += 1
            given = {"pointer": pointer, "grep": "|".join(re.escape(one[:_LONGEST]) for one in wanted)}
            name, call_id = self._read.name, f"read_{self._session.session_id}_{self._asked}"
            calls.append({"type": "tool_use", "id": call_id, "name": name, "input": given})
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": self._read.run(**given)})
        return [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


def _signed(message: Message) -> Message:
    """Return an answer whose thinking the stand-in can sign: hosts leave the text of some blocks out."""
    blocks = [{**one, "thinking": one.get("thinking", "")} if _thinks(one) else one for one in message["content"]]
    return {**message, "content": [one for one in blocks if one.get("type") != "redacted_thinking"]}


def _thinks(block: Message) -> bool:
    return block.get("type") == "thinking"


def _texts(message: Message) -> Iterator[str]:
    """Yield what a model reads in a message: texts, arguments as they are written, results."""
    content = message["content"]
    for one in [content] if isinstance(content, str) else content:
        if isinstance(one, str):
            yield one
        elif one.get("type") == "tool_use":
            yield from _strings(one["input"])
        elif one.get("type") == "tool_result":
            yield from _texts({"content": one.get("content") or []})
        else:
            yield str(one.get("text", ""))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)
    else:
        yield str(value)


def _output(message: Message) -> int:
    """Tokens of an answer: thinking by its signature, as providers bill it."""
    found = 0
    for one in message["content"]:
        if one.get("type") in ("thinking", "redacted_thinking"):
            found += len(one.get("signature") or one.get("data") or "") // 5
        else:
            found += estimate(json.dumps(one.get("input", one.get("text", "")), ensure_ascii=False))
    return found


@cache
def _filler() -> float:
    """Tokens of one word of the text that takes the place of a system prompt."""
    return estimate(" a" * 10_000) / 10_000


def compared(paths: Iterable[Path], **options: Any) -> list[tuple[Total, Total]]:
    """Return what each session costs inline, and through a builder with these options."""
    found = []
    for path in paths:
        parts = segments(path)
        inline, ours = Total(), Total()
        with coatcheck.open("memory:", ttl=None) as store:
            replayed(parts, store.session("inline"), inline, inline=True)
            replayed(parts, store.session("ours"), ours, **options)
        if inline.cost:
            found.append((inline, ours))
    return found
