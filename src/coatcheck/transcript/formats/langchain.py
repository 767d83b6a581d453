"""LangChain messages, in all three forms that its functions write.

`{"type": "ai", "data": {…}}` (message_to_dict), flat (`model_dump`), and the constructor dumps of `dumpd`
(`{"lc": 1, "type": "constructor", "id": […, "AIMessage"], "kwargs": {…}}`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text, text_of, without_refs
from coatcheck.transcript.formats.values import REFS_KEY, Path, at, replaced

_TYPES: Final = frozenset({"human", "ai", "system", "tool", "function", "chat", "remove"})
_CHUNKS: Final = {
    f"{name}Message{chunk}": kind
    for name, kind in (("Human", "human"), ("AI", "ai"), ("System", "system"), ("Tool", "tool"),
                       ("Function", "function"), ("Chat", "chat"))
    for chunk in ("", "Chunk")
}  # fmt: skip
_ROLES: Final = {"human": "user", "ai": "assistant", "function": "tool"}
_FLAT: Final = ("additional_kwargs", "response_metadata", "tool_calls", "tool_call_id", "artifact", "example")


class LangChain(Format):
    name = "langchain"

    def fits(self, line: object) -> bool:
        return isinstance(line, dict) and _fields(line) is not None

    def is_message(self, value: Message) -> bool:
        return _fields(value) is not None

    def role(self, message: Message) -> str:
        kind = _kind(message)
        if kind == "chat":
            return text(at(message, (*_prefix(message), "role")))
        return _ROLES.get(kind, kind)

    def calls(self, message: Message) -> tuple[Call, ...]:
        base = _prefix(message)
        if _kind(message) != "ai":
            return ()
        found: list[Call] = []
        for key in ("tool_calls", "invalid_tool_calls"):
            listed = at(message, (*base, key))
            for index, one in enumerate(listed if isinstance(listed, list) else ()):
                if isinstance(one, dict):
                    found.append(Call(text(one.get("id")), text(one.get("name")), (*base, key, index)))
        return tuple(found)

    def results(self, message: Message) -> tuple[Result, ...]:
        if _kind(message) not in ("tool", "function"):
            return ()
        base = _prefix(message)
        fields = at(message, base)
        if not isinstance(fields, dict):
            return ()
        name = text(fields.get("name")) or None
        is_error = fields.get("status") == "error"
        return (Result(text(fields.get("tool_call_id")), name, (), (*base, "content"), is_error),)

    def with_content(self, message: Message, result: Result, text: str) -> Message:
        return dict(replaced(message, result.content_path, text))

    def text_of(self, message: Message, path: Path) -> str:
        return text_of(at(message, path))

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        sent = []
        for line in lines:
            for _, message in self.messages(line):
                base = _prefix(message)
                inner: Any = at(message, base)
                shown = without_refs(inner) if isinstance(inner, dict) else inner
                plain = {key: value for key, value in message.items() if key != REFS_KEY}
                sent.append(dict(replaced(plain, base, shown)) if base else shown)
        return sent


def _fields(line: Message) -> Message | None:
    """The fields of a message, wherever the form keeps them; None where it is no message of LangChain."""
    kind = text(line.get("type"))
    if line.get("lc") == 1 and kind == "constructor":
        names, kwargs = line.get("id"), line.get("kwargs")
        is_message = isinstance(names, list) and names and isinstance(names[-1], str) and names[-1] in _CHUNKS
        return kwargs if is_message and isinstance(kwargs, dict) else None
    if kind not in _TYPES and kind not in _CHUNKS:
        return None
    data = line.get("data")
    if isinstance(data, dict):
        return data if "content" in data else None
    return line if "content" in line and "role" not in line and any(key in line for key in _FLAT) else None


def _prefix(message: Message) -> Path:
    if message.get("lc") == 1 and isinstance(message.get("kwargs"), dict):
        return ("kwargs",)
    return ("data",) if isinstance(message.get("data"), dict) else ()


def _kind(message: Message) -> str:
    kind = text(message.get("type"))
    if message.get("lc") == 1:
        names = message.get("id")
        kind = names[-1] if isinstance(names, list) and names else ""
    return _CHUNKS.get(text(kind), text(kind))
