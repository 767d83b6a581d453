"""Anthropic's formats: the Messages API, and Claude Code's session files.

`tool_use` blocks of the assistant are answered by `tool_result` blocks of the next user message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Final

from coatcheck.messages.cache import KEY, Breakpoint, marks_in
from coatcheck.messages.content import without_refs
from coatcheck.messages.dialects import NO_RESULT, Dialect, late_text, repeated_text
from coatcheck.messages.formats import Format, SessionLines, ToolResult, in_line
from coatcheck.messages.paths import Message, Path, at, blocks_of, members, replaced, text

_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_OWN_BLOCKS: Final = _THINKING | {"tool_use", "server_tool_use", "mcp_tool_use", "search_result"}
_CLAUDE_CODE_LINES: Final = frozenset(
    {"file-history-snapshot", "queue-operation", "progress", "pr-link", "attachment", "last-prompt",
     "custom-title", "ai-title", "agent-name", "permission-mode"}
)  # fmt: skip
_OPENING: Final = "The beginning of this conversation is missing."
_EMPTY: Final = "(empty)"
_MARK: Final = {"type": "ephemeral"}
_Blocks = tuple[Message, list[Any]]
"""A message with its blocks."""


class AnthropicMessages(Format):
    """Messages of the Messages API."""

    name = "anthropic"
    call_types = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})

    def fits(self, line: Message) -> bool:
        content = line.get("content")
        if line.get("role") not in ("user", "assistant") or not isinstance(content, list):
            return False
        is_answer = line.get("type") == "message" and "stop_reason" in line
        return is_answer or any(isinstance(one, dict) and _is_own(one) for one in content)

    def is_message(self, value: Message) -> bool:
        has_role = text(value.get("role")) in ("user", "assistant", "system")
        return has_role and isinstance(value.get("content"), str | list)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        return tuple(
            ToolResult(text(one.get("tool_use_id")), None, path, (*path, "content"), _is_error(one))
            for path, one in members(message)
            if "tool_use_id" in one and str(one.get("type")).endswith("tool_result")
        )

    def without_thinking(self, message: Message) -> Message | None:
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, list):
            return None
        kept = [
            one
            for one in content
            if not (isinstance(one, dict) and text(one.get("type")) in _THINKING)
        ]
        return {**message, "content": kept} if kept and len(kept) < len(content) else None


class ClaudeCode(SessionLines, AnthropicMessages):
    """Claude Code's session JSONL: Anthropic messages in envelopes, beside the host's own lines.

    One answer of the model may span several lines with the same message id, and so may the results
    of parallel calls. A tool result is there twice: as the model saw it, and as `toolUseResult`."""

    name = "claude-code"
    envelopes = frozenset({"user", "assistant"})
    new_envelope = "user"
    opaque = frozenset({"mcpMeta", "hookInfos", "attachment", "todos", "structuredPatch"})

    def fits(self, line: Message) -> bool:
        kind = line.get("type")
        if not isinstance(kind, str):
            return False
        if "role" not in line and self.message(line) is not None:
            return True
        if kind in ("user", "assistant", "system"):
            return "uuid" in line and ("parentUuid" in line or "sessionId" in line)
        return kind in _CLAUDE_CODE_LINES or (kind == "summary" and "leafUuid" in line)

    def is_shown(self, path: Path) -> bool:
        return in_line(path)[:2] == ("message", "content")

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """Return the main conversation since the last compaction, without side chains and the
        host's own errors."""
        conversation = _Conversation()
        for line in lines:
            if not isinstance(line, dict):
                continue
            if line.get("subtype") == "compact_boundary" and line.get("type") == "system":
                conversation.answer_id = None
                if compacted:
                    conversation.sent = []
                continue
            found = self.message(line)
            if found is not None and not _is_left_out(line):
                conversation.add(found)
        return conversation.sent


class _Conversation:
    """The messages that a provider is sent for the lines of Claude Code, where one message may
    span several lines."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.answer_id: object = None  # of the model's last message
        self._answer = -1  # its index in `sent`

    def add(self, message: Message) -> None:
        shown = without_refs({"role": message["role"], "content": message.get("content")})
        continued = self._continued(message, shown)
        if continued is not None and _can_join(self.sent, continued, shown):
            before = self.sent[continued]
            joined = {**before, "content": [*before["content"], *shown["content"]]}
            self.sent[continued] = joined
            return
        self.sent.append(shown)
        if message["role"] == "assistant":
            self._answer, self.answer_id = len(self.sent) - 1, message.get("id")

    def _continued(self, message: Message, shown: Message) -> int | None:
        """Return the index of the message that this one may continue."""
        if message["role"] == "assistant":  # results of its first calls may come before the rest
            is_same = self.answer_id is not None and message.get("id") == self.answer_id
            return self._answer if is_same else None
        is_next = bool(self.sent) and _has_results(shown)  # results of parallel calls
        return len(self.sent) - 1 if is_next else None


class AnthropicDialect(Dialect):
    """Prompts for the Messages API. Roles alternate and results come first, so a text of ours is a
    block at the end of the last user message."""

    name = "anthropic"
    format = AnthropicMessages()
    describes_tools = "as_anthropic"
    writes_marks = True

    def _prompt(self, system: str, messages: list[Message], marks: Sequence[Breakpoint]) -> Message:
        prompt: Message = {"system": [{"type": "text", "text": system}]} if system else {}
        prompt["messages"] = messages
        # The provider refuses a breakpoint of five minutes before one of an hour.
        hours = [
            path
            for path, mark in marks_in(messages)
            if isinstance(mark, dict) and mark.get("ttl") == "1h"
        ]
        last_hour = _position(("messages", *hours[-1])) if hours else (-2, 0)
        for one in marks:
            mark = _MARK if _position(one.path) > last_hour else {**_MARK, "ttl": "1h"}
            prompt = _marked(prompt, one.path, dict(mark))
        return prompt

    def begun(self, messages: Sequence[Message]) -> int:
        """Count answers of text alone at the end. One with thinking or calls is the model's own,
        which it paused."""
        run = takewhile(
            lambda one: one.get("role") == "assistant" and _is_text_alone(one), reversed(messages)
        )
        return sum(1 for _ in run)

    def takes_text(self, messages: Sequence[Message]) -> bool:
        before = messages[: len(messages) - self.begun(messages)]
        return not before or before[-1].get("role") != "assistant"

    def with_texts(self, messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
        end = len(messages) - self.begun(messages)
        before, last = list(messages[:end]), {"role": "user", "content": list(map(_text, texts))}
        if before and before[-1].get("role") == "user":
            last = self.joined(before.pop(), last)
        return [*before, last, *messages[end:]]

    def deferred(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**tool, "defer_loading": True}

    def adding_tools(self, names: Sequence[str]) -> Message:
        tools = [{"type": "tool_reference", "name": name} for name in names]
        return {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": tool} for tool in tools],
        }

    def without_thinking(self, message: Message) -> Message:
        """Newer models bind thinking to everything before it, and refuse it after anything else."""
        blocks = blocks_of(message)
        kept = [
            one
            for one in blocks
            if not (isinstance(one, dict) and text(one.get("type")) in _THINKING)
        ]
        if len(kept) == len(blocks):
            return message
        return {**message, "content": kept or [_text(_EMPTY)]}

    def must_join(self, before: Message, message: Message) -> bool:
        return before.get("role") == message.get("role") == "user"

    def end(self, system: str, messages: Sequence[Message]) -> Path | None:
        for number in range(len(messages) - 1, -1, -1):
            blocks = blocks_of(messages[number])
            for index in range(len(blocks) - 1, -1, -1):
                if _takes_mark(blocks[index]):
                    return ("messages", number, "content", index)
        return ("system", 0) if system else None

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        return sum(1 for _ in marks_in([*messages, *tools]))

    def mended(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Begin with the user, and put results first in the user message after their call.

        The provider reads a run of messages with one role as one. In a run of the assistant, a call
        that is not answered after the run was interrupted; messages whose calls are answered after
        the run are merged."""
        if messages and messages[0].get("role") == "assistant":
            yield {"role": "user", "content": [_text(_OPENING)]}
        runs = _runs(messages)
        seen: set[str] = set()
        asked: list[str] = []  # ids of calls that the next run must answer
        for number, run in enumerate(runs):
            yield from _answered(run.messages if run.role == "user" else [], asked)
            asked = []
            if run.role == "assistant":
                following = runs[number + 1 : number + 2]
                answer, asked = self._mended_answer(run, following, seen)
                yield from answer
            elif run.role != "user":
                yield from (message for message, _ in run.messages)
        yield from _answered([], asked)

    def _mended_answer(
        self, run: _Run, following: Sequence[_Run], seen: set[str]
    ) -> tuple[list[Message], list[str]]:
        """Return the messages for a run of the assistant, and the ids of the calls that the run
        after it must answer. `seen` are the ids of earlier calls."""
        spoken = [_without_repeats(message, blocks, seen) for message, blocks in run.messages]
        replies = [reply for one in following if one.role == "user" for reply in one.messages]
        first = _first_answered(spoken, replies)
        answered = spoken[first:]
        last = [message for message, _ in answered]
        asked = [call_id for _, blocks in answered for call_id in _call_ids(blocks)]
        joined = last[0] if len(last) == 1 else self.joined(*last)
        return [*_interrupted(spoken[:first]), joined], asked


@dataclass(frozen=True, slots=True)
class _Run:
    """Messages of one role that follow each other, with their blocks, none of which is blank."""

    role: object
    messages: list[_Blocks]


def _runs(messages: Sequence[Message]) -> list[_Run]:
    given = [_without_blanks(one, blocks_of(one)) for one in messages]
    return [
        _Run(role, list(run)) for role, run in groupby(given, key=lambda one: one[0].get("role"))
    ]


def _is_own(block: Message) -> bool:
    """Whether only Anthropic has blocks like this one."""
    kind = text(block.get("type"))
    if kind in _OWN_BLOCKS or (kind.endswith("tool_result") and "tool_use_id" in block):
        return True
    return kind in ("image", "document") and isinstance(block.get("source"), dict)


def _is_error(result: Message) -> bool:
    """Whether a tool failed. For a provider's own tool, the content is then `{"type":
    "web_search_…_error", …}`."""
    return result.get("is_error") is True or str(at(result, ("content", "type"))).endswith("_error")


def _is_left_out(line: Message) -> bool:
    """Whether a line of Claude Code is of a side chain, or an error of the host."""
    return line.get("isSidechain") is True or line.get("isApiErrorMessage") is True


def _can_join(sent: list[Message], before: int, now: Message) -> bool:
    """Whether a message continues an earlier one, after which only results came."""
    first, *between = sent[before:]
    if (
        first["role"] != now["role"]
        or not isinstance(first["content"], list)
        or not isinstance(now["content"], list)
    ):
        return False
    return all(map(_has_results, between if now["role"] == "assistant" else [first]))


def _has_results(message: Message) -> bool:
    return message["role"] == "user" and any(_is_result(one) for _, one in members(message))


def _text(words: str) -> Message:
    return {"type": "text", "text": words}


def _is_text_alone(message: Message) -> bool:
    blocks = blocks_of(message)
    return all(isinstance(one, dict) and one.get("type") == "text" for one in blocks)


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _takes_mark(block: Any) -> bool:
    if not isinstance(block, dict) or text(block.get("type")) in _THINKING:
        return False
    return not _is_blank(block)


def _without_blanks(message: Message, blocks: list[Any]) -> _Blocks:
    """Return a message without blank texts, which Anthropic refuses. A message with nothing else
    says that it is empty."""
    kept = [one for one in blocks if not _is_blank(one)]
    if kept and len(kept) == len(blocks):
        return message, blocks
    kept = kept or [_text(_EMPTY)]
    return {**message, "content": kept}, kept


def _is_blank(block: Any) -> bool:
    return (
        isinstance(block, dict)
        and block.get("type") == "text"
        and not str(block.get("text") or "").strip()
    )


def _position(path: Path) -> tuple[int, int]:
    """Return the position of a path among the blocks of a request, in the order in which the
    provider reads them."""
    return (-1, 0) if path[0] == "system" else (int(path[1]), int(path[3]) if len(path) > 3 else 0)


def _marked(request: dict[str, Any], path: Path, mark: Mapping[str, str]) -> dict[str, Any]:
    """Return a request with a breakpoint on the block at this path, unless the host has set one."""
    if path[0] == "messages":
        message = at(request, path[:2])
        request = replaced(request, path[:2], {**message, "content": blocks_of(message)})
    block = at(request, path)
    return dict(replaced(request, path, {**block, KEY: block.get(KEY) or mark}))


def _without_repeats(message: Message, blocks: list[Any], seen: set[str]) -> _Blocks:
    """Return an assistant message with calls that reuse an id turned into text: providers refuse
    them."""
    kept = list(blocks)
    for index, one in enumerate(blocks):
        call_id = one.get("id") if isinstance(one, dict) and one.get("type") == "tool_use" else None
        if not isinstance(call_id, str):
            continue
        if call_id in seen:
            kept[index] = _text(repeated_text(call_id, one.get("name"), one.get("input")))
        seen.add(call_id)
    return (message, blocks) if kept == blocks else ({**message, "content": kept}, kept)


def _call_ids(blocks: list[Any]) -> list[str]:
    calls = (
        one
        for one in blocks
        if isinstance(one, dict) and one.get("type") == "tool_use" and one.get("id")
    )
    return list(dict.fromkeys(str(one["id"]) for one in calls))


def _interrupted(spoken: Sequence[_Blocks]) -> Iterator[Message]:
    """Yield messages of the assistant whose calls have no results, each with placeholders."""
    for message, blocks in spoken:
        yield message
        yield from _answered([], _call_ids(blocks))


def _first_answered(spoken: Sequence[_Blocks], replies: Sequence[_Blocks]) -> int:
    """Return the index of the first message with a call that the replies answer, or that of the
    last message if there is none."""
    answered: set[str] = set()
    for _, blocks in replies:
        answered.update(str(one.get("tool_use_id")) for one in blocks if _is_result(one))
    for index, (_, blocks) in enumerate(spoken):
        if not answered.isdisjoint(_call_ids(blocks)):
            return index
    return len(spoken) - 1


def _answered(run: Sequence[_Blocks], asked: Sequence[str]) -> Iterator[Message]:
    """Yield a run of user messages with the results of these calls first, in the first message. The
    first result of each call counts: one that a placeholder has replaced becomes text, and so does
    one that answers none of them."""
    if asked and not run:
        run = [({"role": "user", "content": []}, [])]
    given = _first_results(run, asked)
    lead: list[Any] = [*given.values()]
    lead += [_missing(call_id) for call_id in asked if call_id not in given]
    for message, blocks in run:
        content = [*lead, *_others(blocks, asked, given)]
        lead = []
        if content or not blocks:
            yield message if content == blocks else {**message, "content": content}


def _others(
    blocks: Sequence[Any], asked: Sequence[str], given: Mapping[str, Message]
) -> Iterator[Any]:
    """Yield the blocks besides the results that were given. Other results become text."""
    for one in blocks:
        if not _is_result(one):
            yield one
        elif not _answers(one, asked) or given[one["tool_use_id"]] != one:
            yield _late(one)


def _first_results(run: Sequence[_Blocks], asked: Sequence[str]) -> dict[str, Message]:
    """Return the first result of each of these calls by its id."""
    found: dict[str, Message] = {}
    for _, blocks in run:
        for one in blocks:
            if _answers(one, asked):
                found.setdefault(one["tool_use_id"], one)
    return found


def _late(result: Message) -> Message:
    return _text(late_text(result.get("tool_use_id"), result.get("content")))


def _answers(block: Any, asked: Sequence[str]) -> bool:
    return _is_result(block) and block.get("tool_use_id") in asked


def _missing(call_id: str) -> Message:
    return {"type": "tool_result", "tool_use_id": call_id, "content": NO_RESULT, "is_error": True}
