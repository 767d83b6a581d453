"""Conversations, turn by turn: what the gateway recorded, and the messages of transcripts, as parts
to look at.

Messages may come from any provider or host, and anyone may have written them. What is not
recognised is shown as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from coatcheck.externalize.stub import may_begin_with_stub
from coatcheck.gateway.watching import SERIES
from coatcheck.ids import is_pointer
from coatcheck.messages.content import dumped, text_of
from coatcheck.messages.cost import Usage, usage_of
from coatcheck.session import Session
from coatcheck.storage import Record

Kind = Literal["text", "thinking", "call", "result", "image", "other"]
SIDES: Final = {"held": "new", "sent": "sent", "inside": "inside", "answer": "answer"}
"""The sides of a call, and the members of its record that have them."""
_POINTER: Final = re.compile(r"art:[0-9a-f]{12,64}")
_READERS: Final = (
    "get_artifact",
    "list_artifacts",
    "store_artifact",
    "getArtifact",
    "listArtifacts",
    "storeArtifact",
)
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
_CALLS: Final = (
    "tool_use",
    "function_call",
    "server_tool_use",
    "mcp_tool_use",
    "custom_tool_call",
    "toolCall",
)
_IMAGES: Final = ("image", "input_image", "image_url")
_MOST_POINTERS: Final = 5
_DECODER: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class TurnPart:
    """One part of a message: words, thinking, a call, a result, an image, or something else as
    JSON. `name` is the tool of a call or a result."""

    kind: Kind
    role: str
    text: str
    name: str = ""
    call_id: str = ""

    @property
    def pointers(self) -> list[str]:
        """The pointers of artifacts in its text, a few at most."""
        found = dict.fromkeys(match[0] for match in _POINTER.finditer(self.text[:20_000]))
        return [one for one in found if is_pointer(one)][:_MOST_POINTERS]

    @property
    def is_read(self) -> bool:
        """Whether this is a call of one of our tools, or its result."""
        return self.kind in ("call", "result") and self.name.endswith(_READERS)

    @property
    def is_stub(self) -> bool:
        return self.kind == "result" and may_begin_with_stub(self.text) and bool(self.pointers)


def parts_of(message: Any) -> list[TurnPart]:
    """Return the parts of a message or an item of any format."""
    if message is None:
        return []
    if not isinstance(message, Mapping):
        return [TurnPart("other", "", text_of(message))]
    role = _text(message, "role")
    if message.get("type") not in (None, "message", "user", "assistant"):
        return [_block(message, role)]
    if role in ("tool", "toolResult"):
        call_id = message.get("tool_call_id") or message.get("toolCallId") or ""
        name = message.get("name") or message.get("toolName") or ""
        content = text_of(message.get("content"))
        return [TurnPart("result", role, content, name=str(name), call_id=str(call_id))]
    found: list[TurnPart] = []
    thinking = _text(message, "reasoning_content") or _text(message, "reasoning")
    if thinking:
        found.append(TurnPart("thinking", role, thinking))
    found += _content_parts(message.get("content"), role)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        found += [_call(one, role) for one in calls]
    return found


def _content_parts(content: Any, role: str) -> list[TurnPart]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [TurnPart("text", role, content)]
    if isinstance(content, list):
        return [_block(one, role) for one in content]
    return [TurnPart("other", role, dumped(content))]


def _block(block: Any, role: str) -> TurnPart:
    if not isinstance(block, Mapping):
        return TurnPart("text", role, text_of(block))
    kind = block.get("type")
    if kind in _TEXTS:
        return TurnPart("text", role, str(block.get("text") or block.get("refusal") or ""))
    if kind in ("thinking", "redacted_thinking", "reasoning"):
        words = block.get("thinking") or text_of(block.get("summary") or block.get("content") or "")
        return TurnPart("thinking", role or "assistant", str(words) or "(hidden by the provider)")
    if kind in _CALLS:
        return _call(block, role or "assistant")
    result = _result(block, role or "tool")
    if result is not None:
        return result
    if kind in _IMAGES:
        return TurnPart("image", role, f"an image, {len(dumped(block)):,} characters of JSON")
    return TurnPart("other", role, dumped(block))


def _result(block: Mapping[str, Any], role: str) -> TurnPart | None:
    """Return the result of a call, None if the block is something else."""
    call_id = block.get("tool_use_id") or block.get("call_id")
    if not isinstance(call_id, str):
        return None
    for name in ("content", "output"):
        if name in block:
            return TurnPart("result", role, text_of(block[name]), call_id=call_id)
    return None


def _call(block: Any, role: str) -> TurnPart:
    if not isinstance(block, Mapping):
        return TurnPart("other", role, dumped(block))
    inner = block.get("function") if isinstance(block.get("function"), Mapping) else block
    assert isinstance(inner, Mapping)
    arguments: Any = next((inner[name] for name in ("input", "arguments") if name in inner), {})
    written = arguments if isinstance(arguments, str) else dumped(arguments)
    call_id = block.get("call_id") or block.get("id") or ""
    return TurnPart("call", role, written, str(inner.get("name") or "tool"), str(call_id))


@dataclass(slots=True)
class ModelTurn:
    """One call of a model, as the gateway recorded it. `held` is what was new in the client's
    request, `sent` what the provider got for it, `inside` the steps that the client did not see,
    `answer` what it was shown."""

    number: int
    at: float
    seconds: float = 0.0
    api: str = ""
    model: str = ""
    mode: str = ""
    status: int = 200
    steps: int = 1
    usage: Usage = field(default_factory=Usage)
    error: Mapping[str, Any] | None = None
    broke: Mapping[str, Any] | None = None
    could_leave: Sequence[Any] = ()
    artifact: str = ""
    """The pointer of the record, if it is too large to be listed."""
    held: list[TurnPart] = field(default_factory=list)
    sent: list[TurnPart] = field(default_factory=list)
    inside: list[TurnPart] = field(default_factory=list)
    answer: list[TurnPart] = field(default_factory=list)
    repeated: set[int] = field(default_factory=set)
    """The numbers of held parts that the call before has shown as its answer."""

    def name_tools(self, names: dict[str, str]) -> None:
        """Name the tool of each result, from its own calls, which are added to `names`, and from
        `names`."""
        for side in SIDES:
            setattr(self, side, named(getattr(self, side), names))

    @property
    def replaced(self) -> dict[str, int]:
        """The numbers of sent results, by the id of their call, whose text differs from what the
        client keeps."""
        sent = {
            part.call_id: (number, part.text)
            for number, part in enumerate(self.sent)
            if part.kind == "result"
        }
        held = {part.call_id: part.text for part in self.held if part.kind == "result"}
        return {
            call: sent[call][0]
            for call, text in held.items()
            if call in sent and sent[call][1] != text
        }

    @property
    def differs(self) -> bool:
        """Whether the provider got something other than what the client keeps."""
        return bool(self.sent) and [part.text for part in self.sent] != [
            part.text for part in self.held
        ]

    @property
    def missed(self) -> int | None:
        """Input tokens that were neither read from the provider's cache nor written to it."""
        used = self.usage
        if used.input_tokens is None:
            return None
        return max(
            0, used.input_tokens - (used.cached_tokens or 0) - (used.cache_write_tokens or 0)
        )


def turns_of(session: Session, *, after: int = 0, limit: int = 50) -> list[ModelTurn]:
    """Return recorded calls of a session, oldest first. Damaged records are left out."""
    records = session.records(SERIES, after=after, limit=limit)
    found = [turn for record in records if (turn := turn_of(record)) is not None]
    return _followed(found)


def turn_of(record: Record, body: bytes | None = None) -> ModelTurn | None:
    """Return the call of a record; `body` is its whole content, if the record only points at it."""
    try:
        value = _DECODER.decode(record.body if body is None else body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(value, dict):
        return None
    usages = _list(value, "usage")
    turn = ModelTurn(
        number=record.seq,
        at=record.at,
        seconds=_number(value.get("seconds")),
        api=_text(value, "api"),
        model=_text(value, "model"),
        mode=_text(value, "mode"),
        status=int(_number(value.get("status"))),
        steps=int(_number(value.get("steps"))) or 1,
        usage=usage_of(usages[-1] if usages else {}),
        error=_object(value, "error"),
        broke=_object(value, "broke"),
        could_leave=_list(value, "could_leave"),
    )
    for side, name in SIDES.items():
        messages = _listed(value.get(name))
        setattr(turn, side, [part for one in messages for part in parts_of(one)])
    artifact = _text(value, "artifact")
    if body is None and is_pointer(artifact):
        turn.artifact = artifact
    return turn


def _listed(value: Any) -> Iterator[Any]:
    """The messages of a member: a list of them, one, or an answer with a list of items."""
    if isinstance(value, dict) and isinstance(value.get("output"), list) and "role" not in value:
        yield from value["output"]
    elif isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _followed(turns: list[ModelTurn]) -> list[ModelTurn]:
    """Name the tool of each result, from the calls before it, and note what a call repeats from the
    one before."""
    names: dict[str, str] = {}
    known: set[tuple[str, str]] = set()
    for turn in turns:
        turn.name_tools(names)
        turn.repeated = {
            number
            for number, part in enumerate(turn.held)
            if part.role == "assistant" and (part.kind, part.text.strip()) in known
        }
        known = {(part.kind, part.text.strip()) for part in (*turn.inside, *turn.answer)}
    return turns


def named(parts: Sequence[TurnPart], names: dict[str, str]) -> list[TurnPart]:
    """Return parts with the tools of results, from `names` and from the calls among them, which are
    added to it."""
    found = []
    for part in parts:
        if part.kind == "call":
            names[part.call_id] = part.name
        elif part.kind == "result" and not part.name and part.call_id in names:
            part = TurnPart("result", part.role, part.text, names[part.call_id], part.call_id)
        found.append(part)
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _object(value: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    found = value.get(name)
    return found if isinstance(found, dict) else None


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else []


def _text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    return found if isinstance(found, str) else ""
