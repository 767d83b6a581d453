"""OpenAI's Responses API: requests, and the merging of answers.

An answer is a list of items: reasoning, messages and calls. A client keeps them itself, or leaves
them to the provider and names the response before (`previous_response_id`) or a `conversation`.
Steps of one answer are then tied the same way, and the client's name for the answer, its first id,
is replaced by the id of its last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.gateway.answer import LoopStep, Merger, OwnCall, arguments_of
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

_ADDITIONAL: Final = "additional_tools"
_SYSTEM: Final = frozenset({"system", "developer"})
_OF_MODEL: Final = frozenset(
    {"reasoning", "program", "program_output", "mcp_list_tools", "mcp_approval_request"}
)
_WITH_ID: Final = frozenset({"reasoning", "program", "program_output"})
_ENDS: Final = frozenset({"response.completed", "response.incomplete"})
_CALLS: Final = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
)


class ResponsesApi(Api):
    name = "openai-responses"
    list_name = "input"
    joins_answers = True
    stops = MappingProxyType({"output": "incomplete", "steps": "completed"})
    output_limits = ("max_output_tokens",)
    ping = COMMENT

    def messages_in(self, top: Mapping[str, Raw]) -> list[Raw]:
        if bytes(top.get("input", b""))[:1] == b'"':
            return [raw_of({"role": "user", "content": top["input"]})]
        return super().messages_in(top)

    def read(self, body: bytes) -> Request:
        request = super().read(body)
        if not request.tools and request.messages:
            first = fields_of(request.messages[0])
            if text_field(first, "type") == _ADDITIONAL and "tools" in first:
                request.tools = items_of(first["tools"])
        return request

    def facts(self, message: dict[str, Any], size: int) -> MessageFacts:
        kind, role = str(message.get("type", "message")), str(message.get("role", ""))
        side: Side = "user"
        if role in _SYSTEM or kind == _ADDITIONAL:
            side = "system"
        elif role == "assistant" or kind in _OF_MODEL or kind.endswith("_call"):
            side = "answer"
        keys: tuple[tuple[int, str], ...] = ()
        if side == "answer" and (key := _key(message)) is not None:
            keys = ((0, key),)
        call_id, by_program = str(message.get("call_id")), is_by_program(message)
        calls = ((call_id, str(message.get("name"))),) if kind.endswith("_call") else ()
        results: tuple[ResultFacts, ...] = ()
        if kind in ("function_call_output", "custom_tool_call_output"):
            result = ResultFacts.of(0, call_id, message.get("output"), is_for_program=by_program)
            results = (result,)
        text = squeezed(text_in(message.get("content"))) if role == "assistant" else ""
        rest = {name: one for name, one in message.items() if name not in ("id", "status")}
        whole = digest(kind, role, canonical(rest))
        return MessageFacts(
            side=side,
            digest=whole,
            in_prefix=_answer_in_prefix(kind, rest, text) if side == "answer" else whole,
            size=size,
            label=role or kind,
            keys=keys,
            results=results,
            calls=calls,
            programs=(call_id,) if calls and by_program else (),
            text=text,
        )

    def written(
        self, request: Request, messages: Sequence[Raw], tools: Sequence[Raw], **more: Any
    ) -> bytes:
        changed = list(messages)
        inside = len(tools) > len(request.tools) and "tools" not in request.top and bool(changed)
        if inside and text_field(fields_of(changed[0]), "type") == _ADDITIONAL:
            changed[0] = raw_of({**fields_of(changed[0]), "tools": list(tools)})
            tools = request.tools
        if changed == request.messages and bytes(request.top["input"])[:1] == b'"':
            more["input"] = request.top["input"]
        return super().written(request, changed, tools, **more)

    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        return [raw_of(tool.as_openai_responses()) for tool in tools]

    def result_content(self, raw: Raw, result: ResultFacts) -> Any:
        return value_of(fields_of(raw)["output"])

    def with_results(self, raw: Raw, contents: Mapping[int, Raw]) -> Raw:
        return raw_of({**fields_of(raw), "output": contents[0]})

    def expanded(self, entry: LedgerEntry, held: Sequence[Raw], place: int | None) -> list[Raw]:
        known = list(entry.after)
        rest = []
        for raw in [] if place is None else held[place + 1 :]:
            text = squeezed(text_in(value_of(raw).get("content")))
            if text and any(one.startswith(text) for one in known):
                continue
            rest.append(raw)
        return [*entry.messages, *rest]

    def unspliced(self, held: Sequence[Raw]) -> list[Raw]:
        """Return the answer without reasoning that lacks the item after it, which may have been a
        call of ours."""
        kept: list[Raw] = []
        for at, raw in enumerate(held):
            is_reasoning = text_field(fields_of(raw), "type") == "reasoning"
            follows = held[at + 1] if at + 1 < len(held) else None
            if is_reasoning and (
                follows is None or text_field(fields_of(follows), "type") == "reasoning"
            ):
                continue
            kept.append(raw)
        return kept if len(kept) < len(held) else list(held)

    def results(self, answers: Sequence[tuple[OwnCall, list[Part]]]) -> list[Raw]:
        found = []
        for call, parts in answers:
            output: Any = (
                parts[0].text if len(parts) == 1 else [part.as_openai_responses() for part in parts]
            )
            found.append(
                raw_of({"type": "function_call_output", "call_id": call.call_id, "output": output})
            )
        return found

    def following(
        self, request: Request, sent: list[Raw], answer: list[Raw], results: list[Raw]
    ) -> list[Raw]:
        return results if _is_stored(request) else [*sent, *answer, *results]

    def chained(self, request: Request, merger: Merger) -> dict[str, Any]:
        assert isinstance(merger, _ResponsesMerger)
        if not _is_stored(request) or "conversation" in request.top:
            return {}
        return {"previous_response_id": merger.last_id}

    def chain(self, request: Request) -> str | None:
        before = text_field(request.top, "previous_response_id")
        if before:
            return digest("response", before)
        if "conversation" in request.top:
            value = value_of(request.top["conversation"])
            name = value.get("id") if isinstance(value, dict) else value
            return digest("conversation", str(name)) if name else None
        return None

    def links(self, request: Request, merger: Merger, adopted: str) -> dict[str, dict[str, Any]]:
        """Record the last id of the answer under its first."""
        assert isinstance(merger, _ResponsesMerger)
        if not _is_stored(request):
            return {}
        found: dict[str, dict[str, Any]] = {}
        found[digest("response", merger.first_id)] = {"id": merger.last_id, "adopted": adopted}
        if "conversation" in request.top and (key := self.chain(request)) is not None:
            found[key] = {"adopted": adopted}
        return found

    def renamed(
        self, request: Request, merger: Merger, waiting: Sequence[Raw]
    ) -> dict[str, dict[str, Any]]:
        """Record our results that wait for the result of the last call, and the calls that a
        program made: the next request may not contain these calls."""
        assert isinstance(merger, _ResponsesMerger)
        if not _is_stored(request):
            return {}
        before = digest("response", merger.first_id)
        if "conversation" in request.top:
            before = self.chain(request) or before
        found: dict[str, dict[str, Any]] = {
            digest("program", before, call_id): {} for call_id in merger.programs
        }
        if waiting and merger.last_call:
            found[digest("waiting", before, merger.last_call)] = {"messages": list(waiting)}
        return found

    def renaming(self, request: Request, link: Mapping[str, Raw]) -> dict[str, Any]:
        return {"previous_response_id": link["id"]} if "id" in link else {}

    def waiting_keys(self, request: Request) -> list[str]:
        return [
            digest("waiting", before, call_id) for before, call_id in self._calls_before(request)
        ]

    def program_keys(self, request: Request) -> dict[str, str]:
        return {
            digest("program", before, call_id): call_id
            for before, call_id in self._calls_before(request)
        }

    def _calls_before(self, request: Request) -> Iterator[tuple[str, str]]:
        """Yield the calls that only the provider has: the key of what the request continues, and
        the id of the call."""
        before = self.chain(request)
        called = {call_id for one in request.facts for call_id, _ in one.calls}
        for result in (result for one in request.facts for result in one.results):
            if before is not None and result.call_id not in called:
                yield before, result.call_id

    def first_settings(self, request: Request, own: Sequence[str]) -> dict[str, Any]:
        """Return a tool choice that leaves our tools out where the client requires a call of its
        own, and adds them to those that it allows."""
        choice = value_field(request.top, "tool_choice")
        if choice == "required":
            theirs = _functions(text_field(fields_of(tool), "name") for tool in request.tools)
            required = {"type": "allowed_tools", "mode": "required", "tools": theirs}
            return {"tool_choice": required} if theirs else {}
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return {}
        if choice.get("mode") == "required":
            return {}
        return {"tool_choice": {**choice, "tools": [*choice.get("tools", ()), *_functions(own)]}}

    def merger(self, own: Iterable[str], request: Request) -> Merger:
        return _ResponsesMerger(own, request)

    def refusal(self, request: Request) -> str | None:
        if bytes(request.top.get("background", Raw(b"false"))) == b"true":
            return "background must be false: this conversation goes through the Coatcheck gateway"
        return None

    def error_event(self, status: int, message: str) -> bytes:
        return _error_event("rate_limit_exceeded" if status == 429 else "server_error", message)

    def wrapped_error(self, body: bytes) -> bytes:
        error = value_of(body).get("error")
        if not isinstance(error, dict):
            return _error_event("server_error", "the provider refused a step")
        return _error_event(str(error.get("code") or error.get("type")), str(error.get("message")))

    def recorded(self, answer: Sequence[Raw]) -> Any:
        return [value_of(one) for one in answer]


class _ResponsesMerger(Merger):
    def __init__(self, own: Iterable[str], request: Request) -> None:
        form = object_field(request.top, "text").get("format")
        is_structured = isinstance(form, dict) and form.get("type") in (
            "json_schema",
            "json_object",
        )
        super().__init__(own, request, is_structured=is_structured)
        self.first_id = self.last_id = ""
        self.last_call = ""
        self.programs: list[str] = []
        self._last_number = -1
        self._last_place = -1
        self._output: list[Raw] = []
        self._bodies: list[dict[str, Raw]] = []
        self._begin()

    @property
    def answer_id(self) -> str:
        return self.first_id

    def _begin(self) -> None:
        super()._begin()
        self._shift: int | None = 0 if self.steps == 1 else None
        self._base = self._last_place + 1
        self._items: dict[int, Raw] = {}
        self._own_places: set[int] = set()
        self._left_out: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._end: Event | None = None
        self._status = ""
        self._waiting: list[tuple[int, Event]] = []

    def _received(self, one: Event) -> Iterator[bytes]:
        try:
            fields = fields_of(one.data)
            kind = text_field(fields, "type") or one.name
            place = number_field(fields, "output_index")
        except Unreadable:
            if one.data.strip() != b"[DONE]":
                yield one.raw
            return
        if kind in _ENDS:
            self._ended(one, fields)
        elif kind in ("response.failed", "error"):
            self.has_failed = True
            yield self._numbered(one, fields)
        elif "response" in fields:
            response = fields_of(fields["response"])
            if self.steps == 1:
                self.first_id = self.first_id or text_field(response, "id")
                yield self._numbered(one, fields, response=self._echoed(response))
        elif place is not None:
            yield from self._of_item(kind, place, fields, one)
        else:
            yield self._numbered(one, fields)

    def _ended(self, one: Event, fields: dict[str, Raw]) -> None:
        self._end = one
        self._note_end(fields_of(fields["response"]))

    def _note_end(self, response: Mapping[str, Raw]) -> None:
        """Note the status, id and usage of a step."""
        self.is_complete = True
        self._status = text_field(response, "status")
        self.last_id = text_field(response, "id")
        self.first_id = self.first_id or self.last_id
        self.usages.append(object_field(response, "usage"))

    def _note_kind(self, place: int, item: Mapping[str, Raw]) -> None:
        """Note the type of an item, and whether it is a call of ours."""
        self._kinds[place] = text_field(item, "type")
        is_direct = not is_by_program({"caller": value_field(item, "caller")})
        if (
            self._kinds[place] == "function_call"
            and text_field(item, "name") in self.own
            and is_direct
        ):
            self._own_places.add(place)

    def _of_item(
        self, kind: str, place: int, fields: dict[str, Raw], one: Event
    ) -> Iterator[bytes]:
        if "item" in fields and place not in self._kinds:
            self._note_kind(place, fields_of(fields["item"]))
        if kind == "response.output_item.done" and "item" in fields:
            self._items[place] = fields["item"]
            if place not in self._own_places and not self._is_structured:
                self._note(fields["item"])
        if place in self._own_places:
            self._shift = None
            return
        if self._is_structured:
            self._waiting.append((place, one))
            return
        yield self._placed(place, fields, one)

    def _placed(self, place: int, fields: dict[str, Raw], one: Event) -> bytes:
        hidden = sum(other < place for other in self._own_places | self._left_out)
        shown = self._base + place - hidden
        self._last_place = max(self._last_place, shown)
        return self._numbered(one, fields, output_index=None if shown == place else shown)

    def _numbered(self, one: Event, fields: Mapping[str, Raw], **changed: Any) -> bytes:
        """Return an event with the next number; the same bytes if nothing changes."""
        number = number_field(fields, "sequence_number")
        new = {name: value for name, value in changed.items() if value is not None}
        if number is not None:
            if self._shift is None:
                self._shift = self._last_number + 1 - number
            self._last_number = number + self._shift
            if self._shift:
                new["sequence_number"] = self._last_number
        return one.raw if not new else event(bytes(raw_of({**fields, **new})), one.name)

    def _echoed(self, response: Mapping[str, Raw]) -> dict[str, Any] | None:
        """Return a response with what the client sent in place of what we sent, None if it is the
        same."""
        changed: dict[str, Any] = {}
        if "tools" in response and self.own:
            tools = items_of(response["tools"])
            theirs = [tool for tool in tools if text_field(fields_of(tool), "name") not in self.own]
            if len(theirs) < len(tools):
                changed["tools"] = theirs
        if "tool_choice" in response and any(
            name.encode() in bytes(response["tool_choice"]) for name in self.own
        ):
            changed["tool_choice"] = self.request.top.get("tool_choice", Raw(b'"auto"'))
        before = self.request.top.get("previous_response_id", Raw(b"null"))
        echoed = response.get("previous_response_id", Raw(b"null"))
        if self.own and bytes(echoed) != b"null" and bytes(echoed) != bytes(before):
            changed["previous_response_id"] = before
        return {**response, **changed} if changed else None

    def _note(self, raw: Raw) -> None:
        """Note an item that the client is shown."""
        item = value_of(raw)
        key = _key(item)
        if key is not None:
            self.last_key, self.after = key, []
        elif text := squeezed(text_in(item.get("content"))):
            self.after.append(text)
        if item.get("type") in ("function_call", "custom_tool_call"):
            self.last_call = str(item.get("call_id"))
            self.programs += [self.last_call] if is_by_program(item) else []
        if item.get("type") == "message":
            self.texts.append(text_in(item.get("content")))
        self._output.append(raw)

    def _released(self, *, with_text: bool) -> bytes:
        found = []
        for place, one in self._waiting:
            if self._kinds.get(place) == "message" and not with_text:
                self._left_out.add(place)
                continue
            fields = fields_of(one.data)
            if text_field(fields, "type") == "response.output_item.done":
                self._note(fields["item"])
            found.append(self._placed(place, fields, one))
        self._waiting = []
        return b"".join(found)

    def take(self, body: bytes) -> None:
        response = fields_of(body)
        self._bodies.append(response)
        self._note_end(response)
        for place, raw in enumerate(items_of(response["output"])):
            self._items[place] = raw
            self._note_kind(place, fields_of(raw))

    def end_step(self) -> LoopStep:
        is_stored = _is_stored(self.request)
        own: list[OwnCall] = []
        others = 0
        items: list[Raw] = []
        for place in sorted(self._items):
            raw = self._items[place]
            item = value_of(raw)
            if place in self._own_places:
                one = self._own_call(item)
                if one is None:
                    continue
                own.append(one)
            elif self._kinds[place] in _CALLS:
                others += 1
            items.append(raw if is_stored else _without_id(raw, item))
        return LoopStep(
            items,
            own,
            others,
            is_open=self._status == "completed",
            output_tokens=self._tokens_spent("output_tokens"),
        )

    def _own_call(self, item: Mapping[str, Any]) -> OwnCall | None:
        """Return a call of our tools, None if the limit on output has cut its arguments."""
        try:
            arguments = arguments_of(item.get("arguments"))
        except Unreadable:
            if self._status == "incomplete":
                return None
            arguments = item.get("arguments")
        return OwnCall(str(item.get("call_id")), str(item.get("name")), arguments)

    def _keep(self, *, with_text: bool) -> None:
        for place in sorted(self._items) if self._bodies else ():
            if place not in self._own_places and (with_text or self._kinds[place] != "message"):
                self._note(self._items[place])

    def finish(self, stop: str | None = None) -> bytes:
        if self._bodies:
            self._keep(with_text=True)
            body = self._bodies[-1]
            return bytes(raw_of({**body, **self._joined(body, stop)}))
        waiting = self._released(with_text=True)
        if self._end is None:
            return waiting
        fields = fields_of(self._end.data)
        response = fields_of(fields["response"])
        echoed = self._echoed(response)
        if self.steps == 1 and not self._own_places and stop is None:
            return waiting + self._numbered(self._end, fields, response=echoed)
        return waiting + self._numbered(
            self._end, fields, response={**response, **self._joined(response, stop)}
        )

    def _joined(self, response: Mapping[str, Raw], stop: str | None) -> dict[str, Any]:
        """Return the members of the last response that cover all steps."""
        changed: dict[str, Any] = {
            **(self._echoed(response) or {}),
            "output": self._output,
            "id": self.first_id,
        }
        if self.steps > 1:
            changed["usage"] = self._summed_usage("input", "output")
        if stop == "incomplete":
            changed |= {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
            }
        return changed


def _functions(names: Iterable[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name} for name in names if name]


def _answer_in_prefix(kind: str, item: Mapping[str, Any], text: str) -> str:
    """Return what an item of the model adds to the digest of a prefix. Clients may leave out
    reasoning, and encode arguments in another way."""
    if kind == "reasoning":
        return ""
    if kind == "message":
        return digest("answer", text)
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        return digest("answer", canonical(item))
    return digest(
        "answer", kind, str(item.get("call_id")), str(item.get("name")), canonical_json(arguments)
    )


def _is_stored(request: Request) -> bool:
    """Whether the provider keeps the response, so that the next one can name it."""
    return (
        bytes(request.top.get("store", Raw(b"true"))) != b"false" or "conversation" in request.top
    )


def _error_event(code: str, message: str) -> bytes:
    return event(
        bytes(raw_of({"type": "error", "code": code, "message": message, "param": None})), "error"
    )


def _key(item: Mapping[str, Any]) -> str | None:
    """Return the key of an item: the encrypted content of reasoning, or the id of a call."""
    if item.get("type") == "reasoning":
        value = item.get("encrypted_content") or item.get("id")
        return digest("reasoning", value) if isinstance(value, str) else None
    call_id = item.get("call_id")
    return digest("call", call_id) if isinstance(call_id, str) else None


def _without_id(raw: Raw, item: Mapping[str, Any]) -> Raw:
    """Return an item without the id under which a provider that keeps nothing would look for it."""
    if item.get("type") in _WITH_ID or "id" not in item:
        return raw
    return raw_of({name: value for name, value in fields_of(raw).items() if name != "id"})
