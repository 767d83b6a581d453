"""Recorded sessions as the calls that a model got: what was new in each, and what it answered.

Reads every format that `detect` knows, and Codex, whose files have items of the Responses API in
envelopes. Side chains of sub-agents, abandoned branches and the host's own errors are left out. A
compaction starts a new conversation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

from coatcheck.messages import Format, Message, detect
from coatcheck.messages.anthropic import ClaudeCode
from coatcheck.messages.content import arguments_of, dumped, text_of
from coatcheck.messages.cost import IMAGE, usage_of
from coatcheck.messages.formats import SessionLines
from coatcheck.messages.hosts import Mcp, Pi, branch
from coatcheck.messages.paths import Path, at, blocks_of, texts
from coatcheck.messages.paths import text as as_string
from coatcheck.parts import read
from coatcheck.tokens import estimate

_PER_SIGNATURE: Final = (
    0.19  # tokens of thinking per character of its signature, as providers report them
)
_SIGNATURES: Final = ("signature", "thinkingSignature", "encrypted_content", "data")
_THINKING: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_COMPACTIONS: Final = ("compact_boundary", "compaction")  # of Claude Code, of pi
_AROUND_CALL: Final = 20  # tokens besides its arguments
_CACHE_KEYS: Final = ("input", "cacheRead", "cacheWrite")  # of pi
_MILLISECONDS: Final = 1e11
_DEEPEST: Final = 8


@dataclass(frozen=True, slots=True)
class RecordedInput:
    """Something that a model was sent: words of a person or a host, or the result of a call."""

    text: str
    is_result: bool = False
    tool: str = ""
    call_id: str = ""
    arguments: Any = None
    image_tokens: int = 0


class ToolUse(NamedTuple):
    """A tool call in an answer."""

    id: str
    name: str
    arguments: Any


@dataclass
class RecordedCall:
    """One call of a model: what was new in it, and the answer. `gap` is the time since the previous
    answer, in seconds."""

    inputs: list[RecordedInput]
    words: str = ""
    tools: list[ToolUse] = field(default_factory=list)
    thinking_tokens: int = 0
    gap: float = 0.0

    @cached_property
    def written(self) -> str:
        """The words of the answer, and the strings in the arguments of its calls."""
        return "\n".join(
            [self.words, *(text for one in self.tools for text in _strings(one.arguments))]
        )

    @cached_property
    def output_tokens(self) -> int:
        called = sum(estimate(dumped(one.arguments)) + _AROUND_CALL for one in self.tools)
        return self.thinking_tokens + estimate(self.words) + called


@dataclass(slots=True)
class RecordedConversation:
    """Calls, each of which sends what the previous one sent. `base_tokens` is what the first call
    sent besides its inputs, such as the system prompt and the tools, as far as the recording shows
    it."""

    calls: list[RecordedCall] = field(default_factory=list)
    base_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded session. It has several conversations if it was compacted."""

    name: str
    conversations: list[RecordedConversation]


def parsed(data: bytes) -> list[object]:
    """Return the parsed lines of a file, or its one document. Lines that are not JSON are left
    out."""
    text = data.decode("utf-8", "replace")
    found: list[object] = []
    for line in filter(str.strip, text.split("\n")):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            if not found:
                break
    if not found:
        try:
            found = [json.loads(text)]
        except (ValueError, RecursionError):
            pass
    return found


def recordings(values: Sequence[object], name: str = "") -> list[Recording]:
    """Return the sessions in the lines of a file, or in a document. A document may have several,
    such as one for each run. Returns none if nothing is an answer of a model."""
    fmt = detect(values)
    if fmt is None or isinstance(fmt, Mcp):
        return []
    if isinstance(fmt, SessionLines):
        sessions = [_read_lines(fmt, values)]
    else:
        sessions = _read_messages(fmt, values)
    found = [one for one in sessions if _has_inputs(one)]
    if len(found) == 1:
        return [Recording(name, found[0])]
    return [Recording(f"{name} #{number}", one) for number, one in enumerate(found, 1)]


def _read_lines(fmt: SessionLines, values: Sequence[object]) -> list[RecordedConversation]:
    """Read a session file: its lines, or one list of them."""
    lines = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    entries = [one for one in lines if isinstance(one, dict)]
    if isinstance(fmt, Pi):
        entries = branch(entries)
    reader = _Reader(fmt)
    for entry in entries:
        reader.add_line(entry)
    return reader.finished()


def _read_messages(fmt: Format, values: Sequence[object]) -> list[list[RecordedConversation]]:
    """Read messages, one in each line, and documents with lists of messages. Each list is a session
    of its own; the messages that are lines are one together."""
    readers: dict[Path, _Reader] = {}
    is_one_document = len(values) == 1
    for number, line in enumerate(values):
        for path, message in fmt.messages(line):
            list_path = _path_of_list(path)
            if list_path is None:
                readers.setdefault((), _Reader(fmt)).add(message, line)
                continue
            key = list_path if is_one_document else (number, *list_path)
            readers.setdefault(key, _Reader(fmt)).add(message, {})
        if isinstance(line, dict) and () in readers:
            readers[()].note(line)
    return [reader.finished() for reader in readers.values()]


def _path_of_list(path: Path) -> Path | None:
    """Return the path of the innermost list that a path leads through."""
    for depth in range(len(path) - 1, -1, -1):
        if isinstance(path[depth], int):
            return path[:depth]
    return None


def _has_inputs(conversations: Sequence[RecordedConversation]) -> bool:
    return any(call.inputs for one in conversations for call in one.calls)


class _Reader:
    """Collects the calls of one session from its messages."""

    def __init__(self, fmt: Format) -> None:
        self._format = fmt
        self._done: list[RecordedConversation] = []
        self._tools: dict[str, ToolUse] = {}
        self._last: float | None = None  # when the last answer came
        self._restart()

    def _restart(self) -> None:
        self._now = RecordedConversation()
        self._inputs: list[RecordedInput] = []
        self._answer_id: object = None

    def finished(self) -> list[RecordedConversation]:
        if self._now.calls:
            self._done.append(self._now)
            self._restart()
        return self._done

    def add_line(self, line: Message) -> None:
        """Add a line of a session file."""
        if line.get("isSidechain") is True or line.get("isApiErrorMessage") is True:
            return
        kind = as_string(line.get("subtype", line.get("type")))
        if line.get("isCompactSummary") is True or kind in _COMPACTIONS:
            self.finished()
            summary = as_string(line.get("summary"))
            if summary:
                self._inputs.append(RecordedInput(summary))
        recorded = self._format.message(line)
        message = self._format.shown(line) if isinstance(self._format, Pi) else recorded
        if message is not None and as_string(at(recorded, ("model",))) != "<synthetic>":
            is_split = isinstance(self._format, ClaudeCode)  # an answer may span several lines
            self.add(message, line, at(recorded, ("id",)) if is_split else None)
        self.note({"usage": at(recorded, ("usage",))})

    def note(self, line: Message) -> None:
        """Take the base of a conversation from the usage of its first call, and notice a compaction
        of Codex."""
        if line.get("type") == "compacted":
            self.finished()
        total = _sent_tokens(line.get("usage") or at(line, ("payload", "info", "last_token_usage")))
        if total and len(self._now.calls) == 1 and not self._now.base_tokens:
            first = sum(estimate(one.text) + one.image_tokens for one in self._now.calls[0].inputs)
            self._now.base_tokens = max(0, total - first)

    def add(self, message: Message, line: object = None, answer_id: object = None) -> None:
        if self._format.role(message) == "assistant":
            self._add_answer(message, _seconds(line), answer_id)
        else:
            self._inputs += self._new_inputs(message)

    def _add_answer(self, message: Message, now: float | None, answer_id: object) -> None:
        body = at(message, self._format.body_path(message))
        words = "".join(f"{one}\n" for _, one in texts(at(body, ("content",)), ()))
        thinking = sum(map(_thought, [message, *blocks_of(body or {})]))
        tools = [
            ToolUse(one.id, one.name, _decoded(arguments_of(message, one)))
            for one in self._format.calls(message)
        ]
        calls = self._now.calls
        is_same = not self._inputs if answer_id is None else answer_id == self._answer_id
        if not calls or not is_same:
            if not (words or thinking or tools):
                return  # it was aborted
            gap = now - self._last if now is not None and self._last is not None else 0.0
            calls.append(RecordedCall(self._inputs, gap=gap))
            self._inputs, self._answer_id = [], answer_id
        self._last = now if now is not None else self._last
        self._tools.update((one.id, one) for one in tools)
        calls[-1].words += words
        calls[-1].tools += tools
        calls[-1].thinking_tokens += thinking

    def _new_inputs(self, message: Message) -> Iterator[RecordedInput]:
        results = self._format.results(message)
        for result in results:
            call = self._tools.get(result.call_id, ToolUse("", "", None))
            text, images = _shown(at(message, result.content_path))
            yield RecordedInput(
                text, True, result.name or call.name, result.call_id, call.arguments, images
            )
        content = at(message, (*self._format.body_path(message), "content"))
        if isinstance(content, list):
            content = [
                one for one in content if not as_string(at(one, ("type",))).endswith("tool_result")
            ]
        if content and not (results and results[0].path == ()):
            text, images = _shown(content)
            yield RecordedInput(text, image_tokens=images)


def _shown(content: object) -> tuple[str, int]:
    """Return the text in content, and the tokens of its images and files."""
    if not isinstance(content, list):
        return text_of(content), 0
    written, tokens = [], 0
    for one in content:
        part = read(one)
        if part.is_encoded or part.kind == "reference":
            tokens += part.billed or IMAGE
        else:
            written.append(text_of([one]))
    return "\n".join(written), tokens


def _thought(block: object) -> int:
    """Return the tokens of a block of thinking."""
    if not isinstance(block, dict) or as_string(block.get("type")) not in _THINKING:
        return 0
    return math.ceil(_PER_SIGNATURE * sum(len(as_string(block.get(key))) for key in _SIGNATURES))


def _decoded(found: tuple[Path, Any] | None) -> Any:
    """Return the arguments of a call, parsed if they are JSON."""
    arguments = found and found[1]
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _strings(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the strings inside arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth < _DEEPEST:
        inner: Iterable[object] = value.values() if isinstance(value, dict) else value
        for one in inner:
            yield from _strings(one, depth + 1)


def _sent_tokens(usage: object) -> int:
    """Return the input tokens of a call, cached ones included; 0 if unknown."""
    found = usage_of(usage).input_tokens
    if found is None and isinstance(usage, dict):
        found = sum(one for key in _CACHE_KEYS if isinstance(one := usage.get(key), int))
    return found or 0


def _seconds(line: object) -> float | None:
    """Return the time of a line in seconds."""
    found = line.get("timestamp") if isinstance(line, dict) else None
    if isinstance(found, str):
        try:
            return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError):
            return None
    if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
        return found / 1_000 if found > _MILLISECONDS else float(found)
    return None
