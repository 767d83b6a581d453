"""Recorded sessions through a `PromptBuilder`, call by call, with its history kept as a host keeps
it.

What an answer uses of something that the prompt does not show, but a stub or a placeholder points
to, is read back first: with real calls of the tool, whose results stay in the history. So this is
the product as it is, with the counting of `coatcheck.audit`: the shared beginning of two prompts is
read from the cache, the rest is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import coatcheck
from benchmarks.provider_rules import refused
from coatcheck import Policy, toolkit
from coatcheck.audit import Bill, things_in
from coatcheck.context import PromptBuilder
from coatcheck.context.prompt import Prompt
from coatcheck.externalize.decision import QUESTION_TOKENS
from coatcheck.messages import Message
from coatcheck.messages.content import dumped, text_of
from coatcheck.messages.cost import SIGNATURE
from coatcheck.messages.recordings import (
    RecordedCall,
    RecordedConversation,
    RecordedInput,
    Recording,
)
from coatcheck.models import USUAL_PRICES
from coatcheck.tokens import estimate

_POINTER = re.compile(r"art:[0-9a-f]{12,64}")
_HOST_TOOL = {"name": "bash", "description": "Run a command.", "input_schema": {"type": "object"}}
_WINDOW = 10_000_000
_ASKED = 12
_WORD = "word "


class BuiltSession(NamedTuple):
    """The bill of a session, and the numbers of its requests that change what was sent before, and
    that the provider would refuse."""

    bill: Bill
    rewritten: int
    refused: int


def built(recording: Recording, *, inline: bool = False, rewrite: bool = False) -> BuiltSession:
    """Send every call of a session."""
    bill, rewritten, wrong = Bill(), 0, 0
    for conversation in recording.conversations:
        with coatcheck.open("memory:", ttl=None) as store:
            one = _Built(store.session("built"), conversation, bill, inline=inline, rewrite=rewrite)
            for call in conversation.calls:
                one.add(call)
            rewritten += one.rewritten
            wrong += one.refused
    return BuiltSession(bill, rewritten, wrong)


class _Built:
    """One conversation, as a host with a builder has it."""

    def __init__(
        self,
        session: coatcheck.Session,
        recorded: RecordedConversation,
        bill: Bill,
        *,
        inline: bool,
        rewrite: bool,
    ) -> None:
        tools = toolkit(session)
        self._read, self._bill, self._prices = tools[0], bill, USUAL_PRICES
        self._builder = PromptBuilder(
            session, provider="anthropic", system=_filler(recorded.base_tokens), window=_WINDOW, rewrite=rewrite,
            tools=[_HOST_TOOL] if inline else [_HOST_TOOL, *tools], policy=None if inline else Policy(),
            defer_tools=None if inline else True,
        )  # fmt: skip
        self._history: list[Message] = []
        self._originals: dict[
            str, str
        ] = {}  # results and arguments as they were, by the id of the call
        self._pointers: dict[str, str] = {}
        self._calls: set[str] = set()
        self._is_first = True
        self.rewritten = 0
        self.refused = 0

    def add(self, call: RecordedCall) -> None:
        is_cold = self._is_first or call.gap > self._prices.cache_seconds
        new = (
            [_user(call.inputs, self._calls)]
            if call.inputs or not self._history
            else [_text("Continue.")]
        )
        self._originals |= {
            f"result {one.call_id}": one.text for one in call.inputs if one.is_result
        }
        prompt = self._builder.build([*self._history, *new], idle_seconds=call.gap)
        asked = list(self._asked(prompt, call))
        if asked:
            self._paid(prompt, QUESTION_TOKENS * len(asked), is_cold)
            self._bill.reads += len(asked)
            self._bill.extra_calls += 1
            uses, pages = list[Any](), list[Any]()
            for number, one in enumerate(asked):
                name = f"read-{self._bill.reads}-{number}"
                uses.append({"type": "tool_use", "id": name, "name": self._read.name, "input": one})
                pages.append(
                    {"type": "tool_result", "tool_use_id": name, "content": self._read.run(**one)}
                )
            more = [{"role": "assistant", "content": uses}, {"role": "user", "content": pages}]
            prompt, is_cold = self._builder.build([*prompt.history, *more], idle_seconds=0), False
        self._paid(prompt, call.output_tokens, is_cold)
        self._history = [*prompt.history, _answer(call)]
        self._calls = {one.id for one in call.tools}
        self._originals |= {
            f"call {one.id}": "\n".join(_strings(one.arguments)) for one in call.tools
        }
        self._is_first = False

    def _paid(self, prompt: Prompt, output: int, is_cold: bool) -> None:
        prices, bill, whole = self._prices, self._bill, prompt.est_tokens
        read = 0 if is_cold else min(whole, prompt.stable_prefix.tokens)
        bill.cost += prices.read * read + prices.write * (whole - read) + prices.output * output
        bill.calls += 1
        bill.tokens += whole
        bill.largest = max(bill.largest, whole)
        bill.stubs += len(prompt.refs)
        self.rewritten += prompt.rewritten_tokens > 0
        self.refused += bool(refused(prompt.request()))

    def _asked(self, prompt: Prompt, call: RecordedCall) -> Iterable[dict[str, str]]:
        """Yield the arguments of the reads that an answer needs: one for each stored content that
        it uses."""
        shown, hidden = list[str](), list[tuple[str, str]]()
        for message in prompt.messages:
            for block in (
                message["content"]
                if isinstance(message["content"], list)
                else [{"text": message["content"]}]
            ):
                kind = block.get("type")
                text = (
                    text_of(block.get("content"))
                    if kind == "tool_result"
                    else block.get("text", "")
                )
                text = "\n".join(_strings(block["input"])) if kind == "tool_use" else text
                shown.append(text)
                name = (
                    f"result {block.get('tool_use_id')}"
                    if kind == "tool_result"
                    else f"call {block.get('id')}"
                )
                original = self._originals.get(name)
                if (
                    original is not None
                    and original != text
                    and (found := _POINTER.search(dumped(block)))
                ):
                    hidden.append((found[0], original))
        things = things_in(call.written) if hidden else ()
        for pointer, original in hidden:
            used = [
                one for one in things if one in original and not any(one in text for text in shown)
            ][:_ASKED]
            if used:
                shown += used
                yield {"pointer": pointer, "grep": "|".join(re.escape(one[:80]) for one in used)}


def _user(inputs: Iterable[RecordedInput], calls: set[str]) -> Message:
    """A user message, with the results of these calls first."""
    results, others = list[Any](), list[Any]()
    for one in inputs:
        content: list[Any] = [{"type": "text", "text": one.text}] if one.text.strip() else []
        if one.image_tokens:
            content.append(
                {
                    "type": "image",
                    "source": {"type": "url", "url": "https://example.org/picture.png"},
                }
            )
        if one.is_result and one.call_id in calls:
            only = one.text if not one.image_tokens else content
            results.append({"type": "tool_result", "tool_use_id": one.call_id, "content": only})
        else:
            others += content
    return {"role": "user", "content": [*results, *others] or [{"type": "text", "text": "(empty)"}]}


def _answer(call: RecordedCall) -> Message:
    content: list[Any] = []
    if call.thinking_tokens:
        content.append(
            {
                "type": "thinking",
                "thinking": "",
                "signature": "x" * (SIGNATURE * call.thinking_tokens),
            }
        )
    if call.words.strip():
        content.append({"type": "text", "text": call.words})
    for one in call.tools:
        arguments = one.arguments if isinstance(one.arguments, dict) else {}
        content.append({"type": "tool_use", "id": one.id, "name": one.name, "input": arguments})
    return {"role": "assistant", "content": content or [{"type": "text", "text": "(empty)"}]}


def _text(text: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


@lru_cache(maxsize=64)
def _filler(tokens: int) -> str:
    """A system prompt of this many tokens."""
    return _WORD * round(tokens / (estimate(_WORD * 1_000) / 1_000))


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)
