"""OpenAI's chat completions, and compatible APIs: requests, and the merging of answers.

Calls are members of an assistant message, and each result is a message of its own after it. Only
the ids of its calls come back unchanged from an answer, so a text-only answer is found by its text
and the message before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.gateway.answer import LoopStep, Merger, OwnCall, accumulated, arguments_of
from coatcheck.gateway.api import Api
from coatcheck.gateway.ledger import LedgerEntry
from coatcheck.gateway.raw_json import (
    Unreadable,
    canonical,
    canonical_json,
    digest,
    fields_of,
    items_of,
    number_field,
    object_field,
    raw_of,
    squeezed,
    text_field,
    text_in,
    value_field,
    value_of,
)
from coatcheck.gateway.request import MessageFacts, Request, ResultFacts, Side
from coatcheck.gateway.sse import COMMENT, Event, event
from coatcheck.messages.formats import is_by_program

if TYPE_CHECKING:
    from coatcheck._toolkit import Tool
    from coatcheck.parts import Part

_DONE: Final = b"[DONE]"
_SIDES: Final[dict[str, Side]] = {"assistant": "answer", "system": "system", "developer": "system"}
_HEAD: Final = ("id", "created", "model")
_OWN_FIELDS: Final = frozenset({"role", "content", "tool_calls"})
_BETWEEN: Final = "\n\n"  # joins the texts of two steps


class ChatApi(Api):
    name = "openai"
    stops = MappingProxyType({"output": "length", "steps": "stop"})
    output_limits = ("max_completion_tokens", "max_tokens")
    ping = COMMENT

    def facts(self, message: dict[str, Any], size: int) -> MessageFacts:
        role, content = str(message.get("role")), message.get("content")
        side = _SIDES.get(role, "user")
        calls = [one for one in message.get("tool_calls") or () if isinstance(one, dict)]
        names = [str((one.get("function") or {}).get("name")) for one in calls]
        call_ids = [str(one.get("id")) for one in calls]
        answered = str(message.get("tool_call_id"))
        whole = digest(role, canonical(content), str(message.get("name")), answered, *call_ids)
        text = squeezed(text_in(content)) if side == "answer" else ""
        in_prefix = whole
        if side == "answer":
            in_prefix = digest("answer", text, *map(_call_in_prefix, calls))
        return MessageFacts(
            side=side,
            digest=whole,
            in_prefix=in_prefix,
            size=size,
            label=role,
            keys=tuple((0, digest("call", call_id)) for call_id in call_ids),
            results=(ResultFacts.of(0, answered, content),) if role == "tool" else (),
            calls=tuple(zip(call_ids, names, strict=True)),
            programs=tuple(str(one.get("id")) for one in calls if is_by_program(one)),
            text=text,
        )

    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        return [raw_of(tool.as_openai()) for tool in tools]

    def result_content(self, raw: Raw, result: ResultFacts) -> Any:
        return value_of(fields_of(raw)["content"])

    def with_results(self, raw: Raw, contents: Mapping[int, Raw]) -> Raw:
        return raw_of({**fields_of(raw), "content": contents[0]})

    def expanded(self, entry: LedgerEntry, held: Sequence[Raw], place: int | None) -> list[Raw]:
        return list(entry.messages)

    def results(self, answers: Sequence[tuple[OwnCall, list[Part]]]) -> list[Raw]:
        texts = [
            (call.call_id, "\n".join(part.text for part in parts if part.text))
            for call, parts in answers
        ]
        return [
            raw_of({"role": "tool", "tool_call_id": call_id, "content": text})
            for call_id, text in texts
        ]

    def first_settings(self, request: Request, own: Sequence[str]) -> dict[str, Any]:
        changed = {}
        if request.is_streamed:
            options = request.top.get("stream_options", Raw(b"null"))
            given = fields_of(options) if bytes(options)[:1] == b"{" else {}
            if bytes(given.get("include_usage", Raw(b""))) != b"true":
                changed["stream_options"] = {**given, "include_usage": True}
        choice = self._choice(request, own)
        if choice is not None:
            changed["tool_choice"] = choice
        return changed

    def _choice(self, request: Request, own: Sequence[str]) -> Any:
        """Return a tool choice that leaves our tools out where the client requires a call of its
        own, and adds them to those that it allows. None if the choice stays the same."""
        choice = value_field(request.top, "tool_choice")
        if choice == "required":
            inner = [fields_of(tool).get("function", Raw(b"{}")) for tool in request.tools]
            theirs = _functions(text_field(fields_of(one), "name") for one in inner)
            required = {"mode": "required", "tools": theirs}
            return {"type": "allowed_tools", "allowed_tools": required} if theirs else None
        allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
        if not isinstance(allowed, dict) or allowed.get("mode") == "required":
            return None
        tools = [*allowed.get("tools", ()), *_functions(own)]
        return {**choice, "allowed_tools": {**allowed, "tools": tools}}

    def merger(self, own: Iterable[str], request: Request) -> Merger:
        return _ChatMerger(own, request)

    def refusal(self, request: Request) -> str | None:
        if (number_field(request.top, "n") or 1) > 1:
            return (
                "n must be 1: this conversation goes through the Coatcheck gateway, "
                "which continues one answer"
            )
        return None


def _functions(names: Iterable[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names if name]


def _call_in_prefix(call: Mapping[str, Any]) -> str:
    """Return what a call adds to the digest of a prefix. Clients may encode its arguments in
    another way."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return canonical(call)
    return digest(
        str(call.get("id")), str(function.get("name")), canonical_json(function["arguments"])
    )


class _ChatMerger(Merger):
    def __init__(self, own: Iterable[str], request: Request) -> None:
        kind = object_field(request.top, "response_format").get("type")
        super().__init__(own, request, is_structured=kind in ("json_schema", "json_object"))
        self._wants_usage = object_field(request.top, "stream_options").get("include_usage") is True
        self._head: dict[str, Raw] = {}
        self._calls_shown = 0
        self._shown_calls: list[Raw] = []
        self._has_text = False
        self._body: dict[str, Raw] = {}
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._message: dict[str, Any] = {}
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._places: dict[int, int | None] = {}
        self._end: list[tuple[str, Event]] = []
        self._reason = ""
        self._is_first_text = True
        self._waiting: list[bytes] = []

    def _received(self, one: Event) -> Iterator[bytes]:
        if one.data.strip() == _DONE:
            self.is_complete = True
            self._end.append(("done", one))
            return
        try:
            fields = fields_of(one.data)
            choices = (
                [fields_of(choice) for choice in items_of(fields["choices"])]
                if "choices" in fields
                else []
            )
        except Unreadable:
            yield one.raw
            return
        if "error" in fields and not choices:
            self.has_failed = True
            yield one.raw
            return
        usage = value_field(fields, "usage")
        if isinstance(usage, dict):
            self.usages.append(usage)
        if not choices:
            if usage is not None:
                self._end.append(("usage", one))
            elif self.steps == 1:
                yield one.raw
            return
        self._head = self._head or {name: fields[name] for name in _HEAD if name in fields}
        yield from self._of_choice(one, fields, choices[0])

    def _of_choice(
        self, one: Event, fields: dict[str, Raw], choice: dict[str, Raw]
    ) -> Iterator[bytes]:
        delta = fields_of(choice["delta"]) if "delta" in choice else {}
        values = {name: value_of(value) for name, value in delta.items()}
        if isinstance(values.get("content"), str):
            self._text.append(values["content"])
        accumulated(self._message, values, lambda name: name in _OWN_FIELDS)
        changed = self._shown_delta(delta, values)
        reason = text_field(choice, "finish_reason")
        if reason:
            self._reason = reason
            self._end.append(("finish", one))
        is_empty = all(value_of(raw_of(value)) in (None, "", []) for value in changed.values())
        if is_empty and (reason or self.steps > 1 or changed.keys() != delta.keys()):
            return
        out = self._chunk(one, fields, choice, delta, changed, is_end=bool(reason))
        if self._is_structured and values.get("content"):
            self._waiting.append(out)
        else:
            yield out

    def _shown_delta(self, delta: dict[str, Raw], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a delta as the client gets it: without calls of our tools, and, after the first
        step, without a role and with a blank line before its first text."""
        changed: dict[str, Any] = dict(delta)
        if isinstance(values.get("tool_calls"), list):
            shown = [call for call in map(self._of_call, values["tool_calls"]) if call is not None]
            if shown:
                changed["tool_calls"] = shown
            else:
                changed.pop("tool_calls")
        if self.steps > 1:
            changed.pop("role", None)
        if values.get("content"):
            if self.steps > 1:
                is_between = self._is_first_text and self._has_text
                changed["content"] = (_BETWEEN if is_between else "") + values["content"]
            self._is_first_text = False
        return changed

    def _of_call(self, call: Any) -> dict[str, Any] | None:
        """Note a part of a call, and return it as the client gets it; None if it is ours."""
        if not isinstance(call, dict):
            return None
        place = call.get("index", 0)
        function = call.get("function") or {}
        known = self._calls.get(place)
        if known is None:
            known = self._calls[place] = {
                "id": "",
                "type": "function",
                "function": {"name": "", "arguments": ""},
            }
            is_own = function.get("name") in self.own
            self._places[place] = None if is_own else self._calls_shown
            self._calls_shown += not is_own
        for name, value in call.items():
            if name == "function":
                accumulated(known["function"], function, lambda name: False)
            elif name != "index" and value is not None:
                known[name] = value
        shown = self._places[place]
        return None if shown is None else {**call, "index": shown}

    def _chunk(
        self,
        one: Event,
        fields: dict[str, Raw],
        choice: dict[str, Raw],
        delta: dict[str, Raw],
        changed: dict[str, Any],
        *,
        is_end: bool,
    ) -> bytes:
        """Return a chunk as the client gets it: the same bytes where nothing changes."""
        is_extra = "usage" in fields and not self._wants_usage
        is_same = all(
            changed.get(name) is value for name, value in delta.items() if name != "tool_calls"
        )
        if "tool_calls" in delta:
            is_same = is_same and value_of(delta["tool_calls"]) == changed.get("tool_calls")
        if is_same and self.steps == 1 and not is_extra and not is_end:
            return one.raw
        body: dict[str, Any] = {**fields, **self._head, "choices": [{**choice, "delta": changed}]}
        if is_end:
            body["choices"][0]["finish_reason"] = None
        if is_extra:
            body.pop("usage")
        return event(bytes(raw_of(body)))

    def take(self, body: bytes) -> None:
        self._body = fields_of(body)
        self._head = self._head or {name: self._body[name] for name in _HEAD if name in self._body}
        self.usages.append(object_field(self._body, "usage"))
        choices = items_of(self._body["choices"])
        choice = fields_of(choices[0]) if choices else {}
        self._reason = text_field(choice, "finish_reason")
        message = object_field(choice, "message")
        self._message = {name: one for name, one in message.items() if name not in _OWN_FIELDS}
        self._text = [message["content"]] if isinstance(message.get("content"), str) else []
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._calls[place] = call
            is_own = (call.get("function") or {}).get("name") in self.own
            self._places[place] = None if is_own else place
        self.is_complete = True

    def end_step(self) -> LoopStep:
        own: list[OwnCall] = []
        calls: list[dict[str, Any]] = []
        for place in sorted(self._calls):
            call = self._calls[place]
            if self._places[place] is None:
                one = self._own_call(call)
                if one is None:
                    continue
                own.append(one)
            calls.append(call)
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text or None, **self._message}
        if calls:
            message["tool_calls"] = calls
        messages = [raw_of(message)] if text or calls else []
        return LoopStep(
            messages,
            own,
            others=len(calls) - len(own),
            is_open=self._reason in ("tool_calls", "function_call", "stop"),
            output_tokens=self._tokens_spent("completion_tokens"),
        )

    def _own_call(self, call: Mapping[str, Any]) -> OwnCall | None:
        """Return a call of our tools, None if the limit on output has cut its arguments."""
        function = call.get("function") or {}
        try:
            arguments = arguments_of(function.get("arguments"))
        except Unreadable:
            if self._reason == "length":
                return None
            arguments = function.get("arguments")
        return OwnCall(str(call.get("id")), str(function.get("name")), arguments)

    def _keep(self, *, with_text: bool) -> None:
        text = "".join(self._text)
        if with_text and text:
            self.texts.append(text)
            self._has_text = True
        for place in sorted(self._calls):
            if self._places[place] is not None:
                self.last_key = digest("call", str(self._calls[place].get("id")))
                if self._body:
                    self._shown_calls.append(raw_of(self._calls[place]))

    def finish(self, stop: str | None = None) -> bytes:
        self._keep(with_text=True)
        if self._body:
            return self._finished_whole(stop)
        ends = [self._merged_end(kind, one, stop) for kind, one in self._end]
        return b"".join([*self._waiting, *ends])

    def _merged_end(self, kind: str, one: Event, stop: str | None) -> bytes:
        """Return an event at the end of the last step as the end of the whole answer; empty if the
        client does not want it."""
        if kind == "done" or (kind == "finish" and self._is_unchanged_end(one, stop)):
            return one.raw
        fields: dict[str, Any] = dict(fields_of(one.data))
        if kind == "usage":
            if not self._wants_usage:
                return b""
            if self.steps == 1:
                return one.raw
            return event(bytes(raw_of({**fields, **self._head, "usage": self._total()})))
        choice: dict[str, Any] = {**fields_of(items_of(fields["choices"])[0]), "delta": {}}
        if stop is not None:
            choice["finish_reason"] = stop
        elif choice.get("finish_reason") == Raw(b'"tool_calls"') and not self._calls_shown:
            choice["finish_reason"] = "stop"
        if not self._wants_usage:
            fields.pop("usage", None)
        return event(bytes(raw_of({**fields, **self._head, "choices": [choice]})))

    def _is_unchanged_end(self, one: Event, stop: str | None) -> bool:
        if self.steps > 1 or stop is not None or self._calls_shown < len(self._calls):
            return False
        fields = fields_of(one.data)
        delta = fields_of(items_of(fields["choices"])[0]).get("delta", Raw(b"{}"))
        return ("usage" not in fields or self._wants_usage) and not any(value_of(delta).values())

    def _finished_whole(self, stop: str | None) -> bytes:
        choice: dict[str, Any] = fields_of(items_of(self._body["choices"])[0])
        message: dict[str, Any] = fields_of(choice["message"])
        message["content"] = _BETWEEN.join(self.texts) or None
        message.pop("tool_calls", None)
        if self._shown_calls:
            message["tool_calls"] = self._shown_calls
        choice["message"] = message
        if stop is not None:
            choice["finish_reason"] = stop
        body: dict[str, Any] = {**self._body, **self._head, "choices": [choice]}
        if self.steps > 1:
            body["usage"] = self._total()
        return bytes(raw_of(body))

    def _total(self) -> dict[str, Any]:
        return self._summed_usage("prompt", "completion")
