"""OpenAI's chat completions, and what speaks like them: requests, and the merging of answers.

Calls are members of an assistant message, and each result is a message of its own behind it. Nothing in an answer but
the ids of its calls comes back unchanged, so an answer of text alone is found by its text and the message before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.gateway.api import (
    FIRST,
    Api,
    ClientRequest,
    HeldFacts,
    HeldResult,
    LedgerEntry,
    LoopStep,
    Merger,
    OwnCall,
    Side,
    Unreadable,
    accumulated,
    added,
    canonical,
    digest,
    fields_of,
    items_of,
    number_field,
    raw_of,
    squeezed,
    text_field,
    value_of,
)
from coatcheck.gateway.sse import COMMENT, Event, EventSplitter, event

if TYPE_CHECKING:
    from coatcheck._toolkit import Tool
    from coatcheck.externalize.blocks import ContentPart

_DONE: Final = b"[DONE]"
_SIDES: Final[dict[str, Side]] = {"assistant": "answer", "system": "system", "developer": "system"}
_HEAD: Final = ("id", "created", "model")
_OWN_FIELDS: Final = frozenset({"role", "content", "tool_calls"})
_LEAST_OUTPUT: Final = 16  # tokens that a further step needs at least
BETWEEN: Final = "\n\n"
"""What joins the texts of two steps."""


def openai_error(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return bytes(raw_of({"error": {"message": message, "type": kind, "param": None, "code": None}}))


class ChatApi(Api):
    name = "openai"
    stops = MappingProxyType({"output": "length", "steps": "stop"})
    ping = COMMENT

    def facts(self, message: dict[str, Any], size: int) -> HeldFacts:
        role, content = str(message.get("role")), message.get("content")
        side = _SIDES.get(role, "user")
        calls = [one for one in message.get("tool_calls") or () if isinstance(one, dict)]
        named = tuple((str(one.get("id")), str((one.get("function") or {}).get("name"))) for one in calls)
        keys = tuple((0, digest("call", call_id)) for call_id, _ in named)
        results: tuple[HeldResult, ...] = ()
        if role == "tool":
            call_id = str(message.get("tool_call_id"))
            length = len(content) if isinstance(content, str) else len(str(content))
            key = digest("result", call_id, canonical(content)) if length > FIRST else ""
            results = (HeldResult(0, call_id, key, length),)
        text = squeezed(_text(content)) if side == "answer" else ""
        return HeldFacts(
            side, digest(role, canonical(content), *(one[0] for one in named)), size, role, keys, results, named, text
        )

    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        return [raw_of(tool.as_openai()) for tool in tools]

    def result_content(self, raw: Raw, result: HeldResult) -> Any:
        return value_of(fields_of(raw)["content"])

    def with_results(self, raw: Raw, contents: Mapping[int, Raw]) -> Raw:
        return raw_of({**fields_of(raw), "content": contents[0]})

    def expanded(self, entry: LedgerEntry, held: Sequence[Raw], place: int | None) -> list[Raw]:
        return list(entry.messages)

    def results(self, answers: Sequence[tuple[OwnCall, list[ContentPart]]]) -> list[Raw]:
        texts = [(call.call_id, "\n".join(part.text for part in parts if part.text)) for call, parts in answers]
        return [raw_of({"role": "tool", "tool_call_id": call_id, "content": text}) for call_id, text in texts]

    def following(self, request: ClientRequest, sent: list[Raw], answer: list[Raw], results: list[Raw]) -> list[Raw]:
        return [*sent, *answer, *results]

    def first_settings(self, request: ClientRequest, own: Sequence[str]) -> dict[str, Any]:
        changed = {}
        if request.is_streamed:
            options = request.top.get("stream_options", Raw(b"null"))
            given = fields_of(options) if bytes(options)[:1] == b"{" else {}
            if bytes(given.get("include_usage", Raw(b""))) != b"true":
                changed["stream_options"] = {**given, "include_usage": True}
        choice = self._choice(request, own)
        return changed | ({} if choice is None else {"tool_choice": choice})

    def _choice(self, request: ClientRequest, own: Sequence[str]) -> Any:
        """Return the choice of tools that leaves ours out where the client requires a call of its own, and adds ours to
        those that it allows. None if it stays."""
        choice = value_of(request.top["tool_choice"]) if "tool_choice" in request.top else None
        if choice == "required":
            inner = [fields_of(tool).get("function", Raw(b"{}")) for tool in request.tools]
            names = [name for one in inner if (name := text_field(fields_of(one), "name"))]
            theirs = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": theirs}} if names else None
        allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
        if isinstance(choice, dict) and isinstance(allowed, dict) and allowed.get("mode") != "required":
            ours = [{"type": "function", "function": {"name": name}} for name in own]
            return {**choice, "allowed_tools": {**allowed, "tools": [*allowed.get("tools", ()), *ours]}}
        return None

    def settings(self, request: ClientRequest, spent: int, *, is_last: bool) -> dict[str, Any] | None:
        changed: dict[str, Any] = {"tool_choice": "none"} if is_last else {}
        for name in ("max_completion_tokens", "max_tokens"):
            most = number_field(request.top, name)
            if most is not None:
                if most - spent < _LEAST_OUTPUT:
                    return None
                changed[name] = most - spent
        return changed

    def merger(self, own: Iterable[str], request: ClientRequest) -> Merger:
        return _ChatMerger(own, request)

    def refusal(self, request: ClientRequest) -> str | None:
        if (number_field(request.top, "n") or 1) > 1:
            return "n must be 1: this conversation goes through the Coatcheck gateway, which continues one answer"
        return None

    def error(self, status: int, message: str) -> bytes:
        return openai_error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return event(self.error(status, message))

    def usage_in(self, chunks: bytes, *, is_streamed: bool) -> tuple[dict[str, Any], Any]:
        merger = _ChatMerger((), ClientRequest({}, [], [], [], "", is_streamed))
        if is_streamed:
            merger.feed(chunks)
        else:
            merger.take(chunks)
        step = merger.end_step()
        usage = merger.usages[0] if merger.usages else {}
        return usage, value_of(step.messages[0]) if step.messages and merger.is_complete else None


class _ChatMerger(Merger):
    def __init__(self, own: Iterable[str], request: ClientRequest) -> None:
        super().__init__(own, request)
        wanted = value_of(request.top.get("response_format", Raw(b"null")))
        self._is_strict = isinstance(wanted, dict) and wanted.get("type") in ("json_schema", "json_object")
        options = value_of(request.top.get("stream_options", Raw(b"null")))
        self._wants_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._head: dict[str, Raw] = {}
        self._calls_shown = 0
        self._shown_calls: list[Raw] = []
        self._has_text = False
        self._body: dict[str, Raw] = {}
        self._begin()

    def _begin(self) -> None:
        self._events = EventSplitter()
        self._message: dict[str, Any] = {}
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._places: dict[int, int | None] = {}
        self._end: list[tuple[str, Event]] = []
        self._reason = ""
        self._is_first_text = True
        self._waiting: list[bytes] = []
        self.is_complete = False

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(out for one in self._events.feed(chunk) for out in self._received(one))

    def _received(self, one: Event) -> Iterator[bytes]:
        if one.data.strip() == _DONE:
            self.is_complete = True
            self._end.append(("done", one))
            return
        try:
            fields = fields_of(one.data)
            choices = [fields_of(choice) for choice in items_of(fields["choices"])] if "choices" in fields else []
        except Unreadable:
            yield one.raw
            return
        if "error" in fields and not choices:
            self.has_failed = True
            yield one.raw
            return
        usage = value_of(fields["usage"]) if "usage" in fields else None
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

    def _of_choice(self, one: Event, fields: dict[str, Raw], choice: dict[str, Raw]) -> Iterator[bytes]:
        delta = fields_of(choice["delta"]) if "delta" in choice else {}
        changed: dict[str, Any] = dict(delta)
        values = {name: value_of(value) for name, value in delta.items()}
        if isinstance(values.get("content"), str):
            self._text.append(values["content"])
        accumulated(self._message, values, lambda name: name in _OWN_FIELDS)
        if isinstance(values.get("tool_calls"), list):
            shown = [call for call in map(self._of_call, values["tool_calls"]) if call is not None]
            if shown:
                changed["tool_calls"] = shown
            else:
                changed.pop("tool_calls")
        if self.steps > 1:
            changed.pop("role", None)
            if values.get("content"):
                changed["content"] = (BETWEEN if self._is_first_text and self._has_text else "") + values["content"]
        if values.get("content"):
            self._is_first_text = False
        reason = text_field(choice, "finish_reason") if bytes(choice.get("finish_reason", b"null")) != b"null" else ""
        if reason:
            self._reason = reason
            self._end.append(("finish", one))
        is_empty = all(value_of(raw_of(value)) in (None, "", []) for value in changed.values())
        if is_empty and (reason or self.steps > 1 or changed.keys() != delta.keys()):
            return
        out = self._chunk(one, fields, choice, delta, changed, is_end=bool(reason))
        if self._is_strict and values.get("content"):
            self._waiting.append(out)
        else:
            yield out

    def _of_call(self, call: Any) -> dict[str, Any] | None:
        """Note a part of a call, and return it as the client gets it; None if it is ours."""
        if not isinstance(call, dict):
            return None
        place = call.get("index", 0)
        function = call.get("function") or {}
        known = self._calls.get(place)
        if known is None:
            known = self._calls[place] = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
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
        is_same = all(changed.get(name) is value for name, value in delta.items() if name != "tool_calls")
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
        self.usages.append(value_of(self._body["usage"]) if "usage" in self._body else {})
        choices = items_of(self._body["choices"])
        choice = fields_of(choices[0]) if choices else {}
        self._reason = text_field(choice, "finish_reason")
        message = value_of(choice["message"]) if "message" in choice else {}
        self._message = {name: one for name, one in message.items() if name not in _OWN_FIELDS}
        self._text = [message["content"]] if isinstance(message.get("content"), str) else []
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._calls[place] = call
            is_own = (call.get("function") or {}).get("name") in self.own
            self._places[place] = None if is_own else place
        self.is_complete = True

    def end_step(self) -> LoopStep:
        own, others, calls = [], 0, []
        for place in sorted(self._calls):
            call = self._calls[place]
            function = call.get("function") or {}
            is_own = self._places[place] is None
            if is_own:
                written = str(function.get("arguments") or "{}")
                try:
                    arguments = value_of(written.encode("utf-8", "surrogatepass"))
                except Unreadable:
                    if self._reason == "length":
                        continue  # cut by the limit on output
                    arguments = written
                own.append(OwnCall(str(call.get("id")), str(function.get("name")), arguments))
            else:
                others += 1
            calls.append(call)
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text or None, **self._message}
        if calls:
            message["tool_calls"] = calls
        messages = [raw_of(message)] if text or calls else []
        spent = int((self.usages[-1] if self.usages else {}).get("completion_tokens") or 0)
        return LoopStep(messages, own, others, self._reason in ("tool_calls", "function_call", "stop"), spent)

    def _note(self, *, with_text: bool) -> None:
        text = "".join(self._text)
        if with_text and text:
            self.texts.append(text)
            self._has_text = True
        for place in sorted(self._calls):
            if self._places[place] is not None:
                self.last_key = digest("call", str(self._calls[place].get("id")))
                if self._body:
                    self._shown_calls.append(raw_of(self._calls[place]))

    def next_step(self) -> bytes:
        self._note(with_text=not self._is_strict)
        self.steps += 1
        self._begin()
        return b""

    def finish(self, stop: str | None = None) -> bytes:
        self._note(with_text=True)
        if self._body:
            return self._finished_whole(stop)
        ends = list(self._waiting)
        for kind, one in self._end:
            if kind == "done":
                ends.append(one.raw)
                continue
            if kind == "finish" and self._is_unchanged_end(one, stop):
                ends.append(one.raw)
                continue
            fields: dict[str, Any] = dict(fields_of(one.data))
            if kind == "usage":
                if self._wants_usage:
                    ends.append(
                        one.raw
                        if self.steps == 1
                        else event(bytes(raw_of({**fields, **self._head, "usage": self._total()})))
                    )
                continue
            choice: dict[str, Any] = {**fields_of(items_of(fields["choices"])[0]), "delta": {}}
            if stop is not None:
                choice["finish_reason"] = stop
            elif choice.get("finish_reason") == Raw(b'"tool_calls"') and not self._calls_shown:
                choice["finish_reason"] = "stop"
            if not self._wants_usage:
                fields.pop("usage", None)
            ends.append(event(bytes(raw_of({**fields, **self._head, "choices": [choice]}))))
        return b"".join(ends)

    def _is_unchanged_end(self, one: Event, stop: str | None) -> bool:
        if self.steps > 1 or stop is not None or self._calls_shown < len(self._calls):
            return False
        fields = fields_of(one.data)
        delta = fields_of(items_of(fields["choices"])[0]).get("delta", Raw(b"{}"))
        return ("usage" not in fields or self._wants_usage) and not any(value_of(delta).values())

    def _finished_whole(self, stop: str | None) -> bytes:
        choice: dict[str, Any] = fields_of(items_of(self._body["choices"])[0])
        message: dict[str, Any] = fields_of(choice["message"])
        message["content"] = BETWEEN.join(self.texts) or None
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
        """Return the prompt figures of the last step and the sum of all output: there is no place for more, and clients
        take the size of their context from it."""
        total: dict[str, Any] = {}
        for one in self.usages:
            total = added(total, one)
        last = self.usages[-1] if self.usages else {}
        usage = {**total, **{name: value for name, value in last.items() if name.startswith("prompt")}}
        usage["total_tokens"] = int(usage.get("prompt_tokens") or 0) + int(usage.get("completion_tokens") or 0)
        return usage


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(one.get("text", "")) for one in parts if isinstance(one, dict))
