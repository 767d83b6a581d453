"""Anthropic's Messages API: requests, and the merging of answers.

A call is a block of the assistant, and its result a block of the next user message. Thinking is
bound to everything before it, so it is sent back byte for byte, and left out only where the client
leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Raw

from coatcheck.gateway.answer import LoopStep, Merger, OwnCall, accumulated, added
from coatcheck.gateway.api import Api
from coatcheck.gateway.ledger import LedgerEntry
from coatcheck.gateway.raw_json import (
    Unreadable,
    canonical,
    digest,
    fields_of,
    items_of,
    number_field,
    object_field,
    raw_of,
    squeezed,
    text_field,
    value_field,
    value_of,
)
from coatcheck.gateway.request import MessageFacts, Request, ResultFacts
from coatcheck.gateway.sse import Event, event
from coatcheck.messages.formats import is_by_program

if TYPE_CHECKING:
    from coatcheck._toolkit import Tool
    from coatcheck.parts import Part

_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_DELTAS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
}
_THINKING: Final = ("thinking", "redacted_thinking")
_MARK: Final = "cache_control"
_DIAGNOSTICS: Final = "diagnostics"
_TRANSFORMED: Final = "input_transformations"
_CREDIT: Final = (
    "fallback_credit_token",
    "fallback_has_prefill_claim",
)  # valid only for the exact body of a request
_BOUND: Final = b"bound to a different conversation"
_PLACE: Final = re.compile(r"messages\.(\d+)\.content\.(\d+)")


class MessagesApi(Api):
    name = "anthropic"
    joins_answers = True
    binds_thinking = True
    stops = MappingProxyType({"output": "max_tokens", "steps": "end_turn"})
    output_limits = ("max_tokens",)
    no_calls: ClassVar[Any] = {"type": "none"}
    error_name = "error"
    ping = event(b'{"type": "ping"}', "ping")

    def facts(self, message: dict[str, Any], size: int) -> MessageFacts:
        role = message.get("role")
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        placed = [(place, one) for place, one in enumerate(blocks) if isinstance(one, dict)]
        label = ", ".join(dict.fromkeys(str(block.get("type")) for _, block in placed))
        whole = digest(str(role), canonical(content))
        facts = MessageFacts(
            side="system" if role == "system" else "user",
            digest=whole,
            in_prefix=whole,
            size=size,
            label=f"{role}: {label}"[:200],
            blocks=len(blocks),
            thinks="thinking" in label,
        )
        if role == "assistant":
            return _answer_facts(facts, placed)
        results = []
        for place, block in placed:
            if block.get("type") == "tool_result":
                call_id = str(block.get("tool_use_id"))
                results.append(ResultFacts.of(place, call_id, block.get("content", "")))
        return replace(facts, results=tuple(results))

    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        return [raw_of(tool.as_anthropic()) for tool in tools]

    def result_content(self, raw: Raw, result: ResultFacts) -> Any:
        block = fields_of(items_of(fields_of(raw)["content"])[result.place])
        return value_of(block["content"]) if "content" in block else ""

    def with_results(self, raw: Raw, contents: Mapping[int, Raw]) -> Raw:
        message = fields_of(raw)
        blocks = items_of(message["content"])
        for place, content in contents.items():
            block = fields_of(blocks[place])
            marks = [] if _MARK in block else list(_marks(value_field(block, "content")))
            blocks[place] = raw_of(
                {**block, "content": content} | ({_MARK: marks[-1]} if marks else {})
            )
        return raw_of({**message, "content": blocks})

    def expanded(self, entry: LedgerEntry, held: Sequence[Raw], place: int | None) -> list[Raw]:
        blocks = [block for message in held for block in _blocks(message)]
        values = [value_of(block) for block in blocks]
        kept = {_thinking(block) for block in values}
        sent = [_with_thinking(message, kept) for message in entry.messages]
        rest = [] if place is None else list(_behind(blocks[place + 1 :], entry.after))
        if rest and _is_answer(sent[-1]):
            sent[-1] = _joined(sent[-1], rest)
        elif rest:
            sent.append(raw_of({"role": "assistant", "content": rest}))
        marks = [block.get(_MARK) for block in values if isinstance(block, dict)]
        last_mark = next((mark for mark in reversed(marks) if mark), None)
        if last_mark is not None and not rest:
            sent[-1] = _marked(sent[-1], last_mark)
        return sent

    def append(self, sent: list[Raw], message: Raw, *, is_behind_own: bool) -> None:
        """Add a message. Our results go before the client's, in the same message."""
        if is_behind_own and _role(sent[-1]) == _role(message) == "user":
            fields = fields_of(message)
            sent[-1] = raw_of({**fields, "content": [*_blocks(sent[-1]), *_blocks(message)]})
        else:
            sent.append(message)

    def results(self, answers: Sequence[tuple[OwnCall, list[Part]]]) -> list[Raw]:
        blocks = []
        for call, parts in answers:
            content: Any = (
                parts[0].text if len(parts) == 1 else [part.as_anthropic() for part in parts]
            )
            blocks.append({"type": "tool_result", "tool_use_id": call.call_id, "content": content})
        return [raw_of({"role": "user", "content": blocks})]

    def following(
        self, request: Request, sent: list[Raw], answer: list[Raw], results: list[Raw]
    ) -> list[Raw]:
        """Return the messages of the next step. The client's last mark moves to the end of our
        results; otherwise each step would pay for the ones before it."""
        for at in range(len(sent) - 1, -1, -1):
            if b'"cache_control"' not in bytes(sent[at]):
                continue
            bare, mark = _without_last_mark(sent[at])
            if mark is not None:
                return [
                    *sent[:at],
                    bare,
                    *sent[at + 1 :],
                    *answer,
                    *results[:-1],
                    _marked(results[-1], mark),
                ]
        return [*sent, *answer, *results]

    def least_output(self, request: Request) -> int:
        """Return the minimum output of a further step: more than its thinking may use."""
        budget = object_field(request.top, "thinking").get("budget_tokens")
        return max(super().least_output(request), budget + 1 if isinstance(budget, int) else 0)

    def unbound(self, request: Request, sent: Sequence[Raw], error: bytes) -> list[str]:
        """Return the keys of refused thinking. With `drop_block` the provider leaves it out
        itself."""
        if _BOUND not in error or b"drop_block" in bytes(request.top.get("thinking", Raw(b""))):
            return []
        found = _PLACE.search(error.decode("utf-8", "replace"))
        first = (int(found[1]), int(found[2])) if found else (0, 0)
        every = list(_thinking_in(sent))
        return [key for place, key in every if place >= first] or [key for _, key in every]

    def without_thinking(self, sent: Sequence[Raw], keys: Collection[str]) -> list[Raw]:
        changed = {number for (number, _), key in _thinking_in(sent) if key in keys}
        left = []
        for number, message in enumerate(sent):
            if number not in changed:
                left.append(message)
                continue
            blocks = [block for block in _blocks(message) if _thinking(value_of(block)) not in keys]
            left += [raw_of({**fields_of(message), "content": blocks})] if blocks else []
        return left

    def chained(self, request: Request, merger: Merger) -> dict[str, Any]:
        assert isinstance(merger, _MessagesMerger)
        return (
            _with_previous(request, merger.ids[-1])
            if _DIAGNOSTICS in request.top and merger.ids
            else {}
        )

    def renamed(
        self, request: Request, merger: Merger, waiting: Sequence[Raw]
    ) -> dict[str, dict[str, Any]]:
        """Record the last id of the answer under its first, for clients that ask why the cache was
        missed."""
        assert isinstance(merger, _MessagesMerger)
        ids = merger.ids
        return (
            {digest("message", ids[0]): {"id": ids[-1]}}
            if _DIAGNOSTICS in request.top and len(ids) > 1
            else {}
        )

    def named_before(self, request: Request) -> str | None:
        before = object_field(request.top, _DIAGNOSTICS).get("previous_message_id")
        return digest("message", before) if isinstance(before, str) else None

    def renaming(self, request: Request, link: Mapping[str, Raw]) -> dict[str, Any]:
        return _with_previous(request, value_of(link["id"])) if "id" in link else {}

    def merger(self, own: Iterable[str], request: Request) -> Merger:
        return _MessagesMerger(own, request)

    def error(self, status: int, message: str) -> bytes:
        kind = _ERRORS.get(status, "api_error")
        return bytes(raw_of({"type": "error", "error": {"type": kind, "message": message}}))


class _Block:
    """A block of a streamed answer."""

    def __init__(self, start: dict[str, Raw], is_own: bool) -> None:
        self.fields = start
        self.is_own = is_own
        self.kind = text_field(start, "type")
        self.parts: dict[str, list[str]] = {}
        self.other: dict[str, Any] = {}
        self.written: list[str] = []
        self.is_done = False

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta.get("type")
        name = _DELTAS.get(str(kind))
        if kind == "input_json_delta":
            self.written.append(str(delta.get("partial_json", "")))
        elif name is not None:
            self.parts.setdefault(name, []).append(str(delta.get(name, "")))
        elif kind == "citations_delta":
            self.other["citations"] = [*self.other.get("citations", []), delta.get("citation")]
        else:
            accumulated(self.other, delta, lambda name: name == "type")

    def raw(self) -> Raw:
        """Return the whole block. Raises `Unreadable` if the arguments of a call are not
        complete."""
        changed: dict[str, Any] = dict(self.fields)
        for name, texts in self.parts.items():
            start = text_field(self.fields, name) if name != "signature" else ""
            changed[name] = start + "".join(texts)
        written = "".join(self.written)
        if written.strip():
            value_of(written.encode("utf-8", "surrogatepass"))
            changed["input"] = Raw(written.encode("utf-8", "surrogatepass"))
        return raw_of(changed | self.other)


class _MessagesMerger(Merger):
    def __init__(self, own: Iterable[str], request: Request) -> None:
        output = bytes(request.top.get("output_config", b""))
        super().__init__(
            own, request, is_structured=b'"format"' in output or "output_format" in request.top
        )
        self._shown = 0
        self._is_begun = False
        self._wholes: list[dict[str, Raw]] = []
        self._content: list[Raw] = []
        self._transformed: list[Any] = []
        self.ids: list[str] = []
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._blocks: dict[int, _Block] = {}
        self._places: dict[int, int | None] = {}
        self._end: list[Event] = []
        self._stop = ""
        self._waiting: list[tuple[int, Event]] = []

    # Streamed

    def _received(self, one: Event) -> Iterator[bytes]:
        try:
            fields = fields_of(one.data)
            kind = text_field(fields, "type") or one.name
            place = number_field(fields, "index")
        except Unreadable:
            yield one.raw
            return
        if kind == "message_start":
            message = fields_of(fields["message"])
            self._started(message)
            if not self._is_begun:
                self._is_begun = True
                yield one.raw
        elif kind in ("message_delta", "message_stop"):
            self._ends(kind, fields, one)
        elif kind == "error":
            self.has_failed = True
            yield one.raw
        elif place is not None:
            yield from self._of_block(kind, place, fields, one)
        elif kind != "ping" or self._is_begun:
            yield one.raw

    def _started(self, message: dict[str, Raw]) -> None:
        """Note usage, id and transformations of a step."""
        self.usages.append(object_field(message, "usage"))
        self.ids += [found] if (found := text_field(message, "id")) else []
        self._note_transformed(message)

    def _note_transformed(self, fields: dict[str, Raw]) -> None:
        """Note what the provider has changed. Each step repeats what earlier steps reported."""
        found = value_field(fields, _TRANSFORMED)
        self._transformed += (
            [one for one in found if one not in self._transformed]
            if isinstance(found, list)
            else []
        )

    def _ends(self, kind: str, fields: dict[str, Raw], one: Event) -> None:
        self._end.append(one)
        if kind == "message_stop":
            self.is_complete = True
            return
        self._note_transformed(fields)
        if "usage" in fields and self.usages:
            self.usages[-1] = {**self.usages[-1], **value_of(fields["usage"])}
        if "delta" in fields:
            self._stop = text_field(fields_of(fields["delta"]), "stop_reason")

    def _of_block(
        self, kind: str, place: int, fields: dict[str, Raw], one: Event
    ) -> Iterator[bytes]:
        if kind == "content_block_start":
            start = fields_of(fields["content_block"])
            block = self._blocks[place] = _Block(start, self._is_own(start))
            self._places[place] = (
                None if self._is_structured or block.is_own else self._next_place()
            )
        known = self._blocks.get(place)
        if known is None:
            yield one.raw
            return
        if kind == "content_block_delta":
            known.add(value_of(fields["delta"]))
        elif kind == "content_block_stop":
            known.is_done = True
            if not known.is_own and not self._is_structured:
                self._note(known.raw())
        if self._is_structured and not known.is_own:
            self._waiting.append((place, one))
        elif (shown := self._places[place]) is not None:
            yield _moved(one, fields, place, shown)

    def _next_place(self) -> int:
        self._shown += 1
        return self._shown - 1

    def _is_own(self, block: Mapping[str, Raw]) -> bool:
        if text_field(block, "type") != "tool_use" or text_field(block, "name") not in self.own:
            return False
        return not is_by_program({"caller": value_field(block, "caller")})

    def _note(self, raw: Raw) -> None:
        """Note a block that the client is shown."""
        block = value_of(raw)
        key = _key(block)
        if key is not None:
            self.last_key, self.after = key, []
        else:
            self.after.append(_shown(block))
        if block.get("type") == "text":
            self.texts.append(str(block.get("text")).strip())

    def _released(self, *, with_text: bool) -> bytes:
        found = []
        for place, one in self._waiting:
            known = self._blocks[place]
            if known.kind == "text" and not with_text:
                continue
            fields = fields_of(one.data)
            if text_field(fields, "type") == "content_block_start":
                self._places[place] = self._next_place()
            elif text_field(fields, "type") == "content_block_stop":
                self._note(known.raw())
            found.append(_moved(one, fields, place, self._places[place] or 0))
        self._waiting = []
        return b"".join(found)

    # Whole

    def take(self, body: bytes) -> None:
        top = fields_of(body)
        self._wholes.append(top)
        self._started(top)
        self._stop = text_field(top, "stop_reason")
        for place, raw in enumerate(items_of(top["content"])):
            start = fields_of(raw)
            block = self._blocks[place] = _Block(start, self._is_own(start))
            block.is_done = True
        self.is_complete = True

    # Steps

    def end_step(self) -> LoopStep:
        blocks: list[Raw] = []
        own: list[OwnCall] = []
        others = 0
        for place in sorted(self._blocks):
            block = self._blocks[place]
            if not block.is_done:
                continue
            try:
                raw = block.raw()
            except Unreadable:
                continue  # cut by the limit on output
            value = value_of(raw)
            if block.kind == "text" and not str(value.get("text")).strip():
                continue
            if block.is_own:
                own.append(
                    OwnCall(str(value.get("id")), str(value.get("name")), value.get("input"))
                )
            elif block.kind == "tool_use":
                others += 1
            blocks.append(raw)
        messages = [raw_of({"role": "assistant", "content": blocks})] if blocks else []
        return LoopStep(
            messages, own, others, self._stop == "tool_use", self._tokens_spent("output_tokens")
        )

    def _keep(self, *, with_text: bool) -> None:
        for place in sorted(self._blocks) if self._wholes else ():
            block = self._blocks[place]
            if block.is_own or (block.kind == "text" and not with_text):
                continue
            self._content.append(block.raw())
            self._note(self._content[-1])

    def finish(self, stop: str | None = None) -> bytes:
        if self._wholes:
            return self._finished_whole(stop)
        waiting = self._released(with_text=True)
        if self.steps == 1 and stop is None:
            return waiting + b"".join(one.raw for one in self._end)
        return waiting + b"".join(self._merged_end(one, stop) for one in self._end)

    def _merged_end(self, one: Event, stop: str | None) -> bytes:
        """Return an event at the end of the last step as the end of the whole answer."""
        fields: dict[str, Any] = dict(fields_of(one.data))
        if "usage" not in fields and "delta" not in fields:
            return one.raw
        if "usage" in fields:
            fields["usage"] = self._total()
        if "delta" in fields:
            end = self._without_credit(fields_of(fields["delta"]))
            fields["delta"] = end if stop is None else {**end, "stop_reason": stop}
            if self._transformed:
                fields[_TRANSFORMED] = self._transformed
        return event(bytes(raw_of(fields)), one.name)

    def _finished_whole(self, stop: str | None) -> bytes:
        self._keep(with_text=True)
        first, last = self._wholes[0], self._wholes[-1]
        body: dict[str, Any] = {
            **last,
            **{name: first[name] for name in ("id", "model") if name in first},
        }
        body = self._without_credit(body) | {"content": self._content}
        body |= {_TRANSFORMED: self._transformed} if self._transformed else {}
        if self.steps > 1:
            body["usage"] = self._total()
        if stop is not None:
            body["stop_reason"] = stop
        return bytes(raw_of(body))

    def _without_credit(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """Return the end of an answer. A credit for a further step is of no use: the client does
        not have its body."""
        details = (
            value_of(end["stop_details"]) if self.steps > 1 and "stop_details" in end else None
        )
        if not isinstance(details, dict):
            return dict(end)
        return {
            **end,
            "stop_details": {name: one for name, one in details.items() if name not in _CREDIT},
        }

    def _total(self) -> dict[str, Any]:
        """Return the sums of all steps, and the steps: Claude Code takes the size of its context
        from the last."""
        total: dict[str, Any] = {}
        steps: list[Any] = []
        for one in self.usages:
            own = one.get("iterations")
            steps += own if isinstance(own, list) and own else [{"type": "message", **_counts(one)}]
            total = added(
                total, {name: value for name, value in one.items() if name != "iterations"}
            )
        return {**total, "iterations": steps}


def _with_previous(request: Request, message_id: str) -> dict[str, Any]:
    """Return the id of the answer that the provider compares a request with, if the client asks for
    that."""
    given = value_of(request.top[_DIAGNOSTICS])
    return (
        {_DIAGNOSTICS: {**given, "previous_message_id": message_id}}
        if isinstance(given, dict)
        else {}
    )


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in usage.items()
        if name.endswith("tokens") or name == "cache_creation"
    }


def _answer_facts(
    facts: MessageFacts, blocks: Sequence[tuple[int, dict[str, Any]]]
) -> MessageFacts:
    """Return the facts of a message with those of an answer, whose blocks come with their
    places."""
    keys: list[tuple[int, str]] = []
    calls: list[tuple[str, str]] = []
    programs: list[str] = []
    texts: list[str] = []
    others: list[str] = []
    for place, block in blocks:
        kind, call_id = block.get("type"), str(block.get("id"))
        key = _key(block)
        if key:
            keys.append((place, key))
        if kind == "text":
            texts.append(str(block.get("text")).strip())
        elif kind not in _THINKING:
            others.append(canonical(block))
        if kind == "tool_use":
            calls.append((call_id, str(block.get("name"))))
            if is_by_program(block):
                programs.append(call_id)
    text = squeezed("".join(texts))
    return replace(
        facts,
        side="answer",
        in_prefix=digest("answer", text, *others),
        keys=tuple(keys),
        calls=tuple(calls),
        programs=tuple(programs),
        text=text,
    )


def _key(block: Mapping[str, Any]) -> str | None:
    """Return the key of a block: the signature of thinking, or the id of a call."""
    thinking = _thinking(block)
    if thinking:
        return thinking
    return digest("call", str(block.get("id"))) if block.get("type") == "tool_use" else None


def _thinking(block: Any) -> str | None:
    if not isinstance(block, dict) or block.get("type") not in _THINKING:
        return None
    value = block.get("signature") or block.get("data")
    return digest("signature", value) if isinstance(value, str) else None


def _thinking_in(messages: Sequence[Raw]) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the place and key of each thinking block."""
    for number, message in enumerate(messages):
        if b"thinking" in bytes(message) and _is_answer(message):
            for at, block in enumerate(_blocks(message)):
                if key := _thinking(value_of(block)):
                    yield (number, at), key


def _with_thinking(message: Raw, kept: Collection[str | None]) -> Raw:
    """Return a message of the ledger with only the thinking that the client has kept."""
    fields = fields_of(message)
    blocks = items_of(fields["content"])
    wanted = [block for block in blocks if _is_kept(block, kept)]
    return message if len(wanted) == len(blocks) else raw_of({**fields, "content": wanted})


def _is_kept(block: Raw, kept: Collection[str | None]) -> bool:
    """Whether a block of the ledger is sent: thinking that the client has left out is left out
    too."""
    if b"thinking" not in bytes(block)[:200] and b"thinking" not in bytes(block)[-200:]:
        return True
    key = _thinking(value_of(block))
    return key is None or key in kept


def _shown(block: Mapping[str, Any]) -> str:
    """Return what identifies a block without a key."""
    if block.get("type") == "text":
        return "t:" + str(block.get("text")).strip()
    return "d:" + digest(canonical(block))


def _behind(blocks: Sequence[Raw], after: Sequence[str]) -> Iterator[Raw]:
    """Yield the blocks after the key that the ledger does not have: the client may have cut,
    dropped or joined texts."""
    known = list(after)
    for raw in blocks:
        block = value_of(raw)
        shown = _shown(block)
        if shown in known:
            del known[: known.index(shown) + 1]
            continue
        if not known or not shown.startswith("t:") or not known[0].startswith("t:"):
            yield raw
        elif known[0].startswith(shown):
            known.clear()
        elif shown.startswith(known[0]):
            text = shown.removeprefix(known.pop(0)).strip()
            if text:
                yield raw_of({**block, "text": text})
        else:
            yield raw


def _role(message: Raw) -> str:
    return text_field(fields_of(message), "role")


def _is_answer(message: Raw) -> bool:
    return _role(message) == "assistant"


def _blocks(message: Raw) -> list[Raw]:
    content = fields_of(message).get("content", Raw(b"[]"))
    return (
        items_of(content)
        if bytes(content)[:1] == b"["
        else [raw_of({"type": "text", "text": content})]
    )


def _joined(message: Raw, blocks: Sequence[Raw]) -> Raw:
    return raw_of({**fields_of(message), "content": [*_blocks(message), *blocks]})


def _marked(message: Raw, mark: Any) -> Raw:
    """Return a message with a mark on its last block that can carry one."""
    fields, blocks = fields_of(message), _blocks(message)
    for at in range(len(blocks) - 1, -1, -1):
        block = fields_of(blocks[at])
        if text_field(block, "type") not in _THINKING:
            blocks[at] = raw_of({**block, _MARK: mark})
            break
    return raw_of({**fields, "content": blocks})


def _without_last_mark(message: Raw) -> tuple[Raw, Any]:
    fields, blocks = fields_of(message), _blocks(message)
    for at in range(len(blocks) - 1, -1, -1):
        block = fields_of(blocks[at])
        if _MARK in block:
            mark = block.pop(_MARK)
            blocks[at] = raw_of(block)
            return raw_of({**fields, "content": blocks}), mark
    return message, None


def _marks(content: Any) -> Iterator[Any]:
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get(_MARK):
            yield block[_MARK]


def _moved(one: Event, fields: dict[str, Raw], place: int, shown: int) -> bytes:
    """Return an event with another index; the same bytes if it is the same."""
    if place == shown:
        return one.raw
    return event(bytes(raw_of({**fields, "index": shown})), one.name)
