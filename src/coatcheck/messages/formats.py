"""`Format`: what Coatcheck knows about one message format. `Dialect`: how a provider takes a
prompt. `pair`: which tool result answers which call.

Subclasses define the differences. Everything works on parsed JSON, never raises on odd input, and
never changes its input.

A turn is one answer of the model with the results of its calls, and the input just before it. A
late result is in a later turn than its call: those two turns can only be removed together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from coatcheck.externalize.stub import is_stub
from coatcheck.ids import clip
from coatcheck.messages import paths
from coatcheck.messages.cache import KEY
from coatcheck.messages.paths import (
    REFS_KEY,
    Message,
    Path,
    at,
    blocks_of,
    members,
    replaced,
    text,
    with_blocks,
)
from coatcheck.parts import Part, is_known, read, write

if TYPE_CHECKING:
    from coatcheck.messages.cache import Breakpoint

_MAX_DEPTH: Final = 8
_DEEPEST_CALL: Final = 12
_HOST_KEYS: Final = {
    "artifact",
    "details",
    "toolUseResult",
    "additional_kwargs",
    "response_metadata",
    "_meta",
}
_AUTHORS: Final = {"user": "user", "system": "system", "developer": "system"}
_TEXT_RESULTS: Final = frozenset(
    {
        None,
        "tool_result",
        "mcp_tool_result",
        "function_call_output",
        "custom_tool_call_output",
        "mcp_call",
    }
)
_STREAMS: Final = ("stdout", "stderr")
_ARGUMENTS: Final = (
    ("function", "arguments"),
    ("custom", "input"),
    ("arguments",),
    ("input",),
    ("args",),
)
NO_RESULT: Final = "No result: the call was interrupted, or its result came later."


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a message: its id ('' if it has none), the tool, the path in the message, and
    whether a provider's program made it."""

    id: str
    name: str
    path: Path
    is_by_program: bool = False


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool result in a message: the id of its call, the tool if the message names it, the paths
    of the result and of its content, whether it reports an error, and whether the message says that
    it is for a provider's program."""

    call_id: str
    name: str | None
    path: Path
    content_path: Path
    is_error: bool = False
    is_for_program: bool = False


class PayloadPlace(NamedTuple):
    """A value of a line that may be moved out: its path, whether it is sent to a model, and the
    tool and the id of the call that it belongs to, as far as they are known."""

    path: Path
    value: Any
    is_shown: bool
    tool: str | None = None
    call_id: str | None = None
    document: Any = None
    """The line, if it is not a message itself."""


_Owner = tuple[Path, str | None, str]
"""The path of a result or a call in a line, its tool, and the id of the call."""


class Format:
    """One message format. A line is one parsed line of a file, or a whole JSON document."""

    name: ClassVar[str] = ""
    opaque: ClassVar[frozenset[str]] = frozenset()
    """Additional keys whose value may be moved out of a line as a whole."""
    roles: ClassVar[Mapping[str, str]] = {}
    """Roles whose names differ from the usual ones."""
    call_types: ClassVar[frozenset[str]] = frozenset()
    """The types of the content blocks that are tool calls."""

    def __repr__(self) -> str:
        return f"<format {self.name}>"

    def fits(self, line: Message) -> bool:
        """Whether a line clearly has this format. Called with every line for every format, so it
        calls few other functions."""
        return self.is_message(line)

    def message(self, line: object) -> Message | None:
        """Return the message in this line, or None."""
        return line if isinstance(line, dict) and self.is_message(line) else None

    def inner(self, line: Message) -> Message | None:
        """Return the message in a line of a session file, or the message itself. None for a line
        without one."""
        return line

    def wrapped(self, message: Message) -> Message:
        """Return a message as a line of a session file."""
        return message

    def is_message(self, value: Message) -> bool:
        """Whether this object itself is a message."""
        return isinstance(value.get("role"), str)

    def messages(self, line: object, path: Path = ()) -> Iterator[tuple[Path, Message]]:
        """Yield every message of a line or a document in order, each with its path. `path` leads to
        the line."""
        found = self.message(line)
        if found is not None:
            yield path, found
        elif len(path) <= _MAX_DEPTH and isinstance(line, dict | list):
            for key, one in line.items() if isinstance(line, dict) else enumerate(line):
                if isinstance(one, dict | list) and key != REFS_KEY:
                    yield from self.messages(one, (*path, key))

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        """Return the message in `messages` that contains a path, or None."""
        for depth in range(min(len(path), _MAX_DEPTH + 1) + 1):
            found = self.message(line)
            if found is not None:
                return path[:depth], found
            if depth == len(path) or path[depth] == REFS_KEY:
                break
            line = at(line, path[depth : depth + 1])
        return None

    def places(self, line: object, least: int = 0, bulk: int | None = None) -> list[Path]:
        """Return the paths of possible payloads, see `paths.places`."""
        found = paths.places(line, least, least if bulk is None else bulk, opaque=self.opaque)
        return [path for path, _ in found]

    def survey(
        self, lines: Sequence[Any], least: int, bulk: int, tools: dict[str, str]
    ) -> list[list[PayloadPlace]]:
        """Return the possible payloads of each line, see `paths.places`. `tools` maps the ids of
        earlier calls to their tools; the calls of these lines are added. Payloads of documents are
        not assigned to calls: see `owned`."""
        owners: list[list[_Owner] | None] = []
        for line in lines:  # one after the other: the ids of calls may repeat
            message = self.message(line)
            base = () if message is None or message is line else ("message",)
            owners.append(None if message is None else self._owners(message, base, tools))
        found = [paths.places(line, least, bulk, opaque=self.opaque) for line in lines]
        return [
            [
                PayloadPlace(
                    path,
                    value,
                    self.is_shown(path),
                    *_owner(path, known),
                    line if known is None else None,
                )
                for path, value in some
            ]
            for line, some, known in zip(lines, found, owners, strict=True)
        ]

    def owned(
        self, places: Iterable[PayloadPlace], tools: dict[str, str]
    ) -> Iterator[PayloadPlace]:
        """Yield places with their tools and call ids, those of documents too."""
        learned: Any = None
        for place in places:
            document, around = place.document, None
            if document is not None:
                around = self.message_around(document, place.path)
            if around is not None:
                tool, call_id = _owner(place.path, self._owners(around[1], around[0], dict(tools)))
                if call_id and not tool and document is not learned:
                    learned = document
                    for base, message in self.messages(document):
                        self._owners(message, base, tools)
                place = place._replace(tool=tool or tools.get(call_id or ""), call_id=call_id)
            yield place

    def _owners(self, message: Message, base: Path, tools: dict[str, str]) -> list[_Owner]:
        """Return the results and calls of a message, whose path is `base`, and add its calls to
        `tools`."""
        calls, results = self.calls(message), self.results(message)
        tools.update({one.id: one.name for one in calls if one.id and one.name})
        found: list[_Owner] = [
            ((*base, *one.path), one.name or tools.get(one.call_id), one.call_id) for one in results
        ]
        return found + [((*base, *one.path), one.name, one.id) for one in calls]

    def is_shown(self, path: Path) -> bool:
        """Whether a model is sent the value at this path of a line. Hosts store more than that."""
        return _HOST_KEYS.isdisjoint(path)

    def details_path(self, line: object, path: Path) -> Path | None:
        """Return where the host keeps details of the tool result whose content is at a path. None
        if it keeps none."""
        return None

    def role(self, message: Message) -> str:
        """Return "user", "assistant", "system" or "tool", or else the message's own role."""
        role = text(message.get("role"))
        return self.roles.get(role, role)

    def calls(self, message: Message) -> tuple[Call, ...]:
        """Return the tool calls in a message."""
        blocks = (
            (path, one)
            for path, one in members(message)
            if text(one.get("type")) in self.call_types
        )
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), path, is_by_program(one))
            for path, one in blocks
        )

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        """Return the tool results in a message."""
        return ()

    def outputs(self, message: Message) -> tuple[ToolResult, ...]:
        """Return output that the model is shown without a call, such as from a command that the
        user ran."""
        return ()

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        """Return the message with a text as the content of one result. A cache breakpoint in the
        content is kept."""
        path = result.content_path
        if not isinstance(at(message, path), list):
            return dict(replaced(message, path, text))
        marks = [{KEY: one[KEY]} for _, one in members(message, path) if KEY in one]
        return dict(
            replaced(message, path, [{"type": "text", "text": text} | (marks[-1] if marks else {})])
        )

    def without_thinking(self, message: Message) -> Message | None:
        """Return the message without thinking blocks. None if the provider refuses that, or nothing
        would be left."""
        return None

    def user_message(self, text: str, like: Message) -> Message | None:
        """Return a user message in the form of `like`. None if the format has no conversation."""
        return {"role": "user", "content": text}

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """Return what a provider is sent for these lines, without our refs and the host's fields.

        Compactions are applied if the format has them. With `compacted=False` they are not: the
        result for more lines then always begins with the result for fewer."""
        return [self._sent(message) for line in lines for _, message in self.messages(line)]

    def _sent(self, message: Message) -> Message:
        shown, path = without_refs(message), self.body_path(message)
        return dict(replaced(shown, path, without_refs(at(shown, path)))) if path else shown

    def body_path(self, message: Message) -> Path:
        """Return the path of the object in a message that has its content."""
        return ()


class SessionLines(Format):
    """A format whose lines are envelopes around messages, one message per line at most."""

    envelopes: ClassVar[frozenset[str]] = frozenset()
    """The types of the lines that contain a message."""
    new_envelope: ClassVar[str] = ""
    """The type of a new line for a message of the user."""

    def inner(self, line: Message) -> Message | None:
        return line if isinstance(line.get("role"), str) else self.message(line)

    def wrapped(self, message: Message) -> Message:
        return {"type": self.new_envelope, "message": message}

    def message(self, line: object) -> Message | None:
        found = (
            line.get("message")
            if isinstance(line, dict) and text(line.get("type")) in self.envelopes
            else None
        )
        return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None

    def messages(self, line: object, path: Path = ()) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield (path if found is line else (*path, "message")), found
        elif isinstance(line, list) or (isinstance(line, dict) and "type" not in line):
            # A session file that was saved as one document: a list of lines, or an object with such
            # a list.
            for base in [()] if isinstance(line, list) else [(key,) for key in line]:
                for inner_path, inner in members(line, base):
                    yield from self.messages(inner, (*path, *inner_path))

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        return next((one for one in self.messages(line) if path[: len(one[0])] == one[0]), None)


class Dialect:
    """How a provider takes a prompt: where the system text, texts of ours and cache breakpoints go,
    and how calls and results are paired."""

    name: ClassVar[str]
    format: ClassVar[Format]
    describes_tools: ClassVar[str] = "as_openai"
    """The method of our tools that describes them for this provider."""
    writes_marks: ClassVar[bool] = False
    """Whether breakpoints are written into the request. OpenAI caches prefixes automatically."""

    def request(
        self,
        system: str,
        messages: Sequence[Message],
        tools: Sequence[Any],
        marks: Sequence[Breakpoint],
    ) -> dict[str, Any]:
        """Return the arguments of the provider's call that contain the prompt."""
        prompt = self._prompt(system, list(messages), marks)
        return {"tools": list(tools), **prompt} if tools else prompt

    def _prompt(self, system: str, messages: list[Message], marks: Sequence[Breakpoint]) -> Message:
        raise NotImplementedError

    def end(self, system: str, messages: Sequence[Message]) -> Path | None:
        """Return the path of the last part of a prompt with these messages."""
        raise NotImplementedError

    def mended(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield the messages with every call answered in its place. Correct messages are yielded as
        the same objects.

        Interrupted conversations contain calls without a result, and late results; cut or merged
        ones begin with an answer, or repeat a call. Providers refuse all of these. A missing result
        gets a placeholder; a late result or a repeated call becomes text where it occurs. Nothing
        that was sent moves: with more messages after them, messages that were yielded are yielded
        again."""
        raise NotImplementedError

    def unanswered(self, messages: Sequence[Message]) -> range:
        """Return the numbers of the messages after the model's last answer: the only ones that no
        provider was sent. An answer that the host began for the model (a prefill) is not among
        them."""
        end = len(messages) - self.begun(messages)
        answers = (number for number in range(end - 1, -1, -1) if self.is_answer(messages[number]))
        return range(next(answers, -1) + 1, end)

    def previous_end(self, messages: Sequence[Message]) -> int:
        """Return the number of messages that the previous prompt had: those before the model's last
        answer."""
        start = self.unanswered(messages).start
        before = (
            number for number in range(start - 1, -1, -1) if not self.is_answer(messages[number])
        )
        return next(before, -1) + 1

    def begun(self, messages: Sequence[Message]) -> int:
        """Return the number of messages at the end that the host began for the model."""
        return 0

    def is_answer(self, message: Message) -> bool:
        """Whether a message is the model's, or a part of its answer."""
        return message.get("role") == "assistant"

    def takes_text(self, messages: Sequence[Message]) -> bool:
        """Whether a text of ours can be appended: not after an answer that the provider paused."""
        return True

    def with_texts(self, messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
        """Return the messages with texts of ours appended, in the user's role."""
        return [*messages, *({"role": "user", "content": text} for text in texts)]

    def deferred(self, tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a tool's description in a form that the model sees only once it is added. None if
        the provider has no such form."""
        return None

    def adding_tools(self, names: Sequence[str]) -> Message:
        """Return the message that adds deferred tools to a conversation."""
        raise NotImplementedError

    def without_thinking(self, message: Message) -> Message:
        """Return an answer without thinking that the provider would find in another place than
        where it was made."""
        return message

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        """Count the breakpoints that the host has set."""
        return 0

    def must_join(self, before: Message, message: Message) -> bool:
        """Whether two messages that pruning made neighbours must be merged into one."""
        return False

    def joined(self, *messages: Message) -> Message:
        """Merge messages of one role into one."""
        return {**messages[0], "content": [block for one in messages for block in blocks_of(one)]}

    def tool(self, tool: Any) -> Any:
        """Describe a tool as the provider expects it."""
        describe = getattr(tool, self.describes_tools, None)
        return describe() if callable(describe) else tool


def is_by_program(call: Mapping[str, Any]) -> bool:
    """Whether a provider's program made a call (Anthropic's code execution, OpenAI's `program`),
    not the model.

    The result of such a call goes to the program and never enters the context. It must be sent as
    it is: the program would compute with a stub. A result in OpenAI's format may name its caller in
    the same way."""
    caller = call.get("caller")
    return isinstance(caller, Mapping) and caller.get("type") not in (None, "direct")


def program_results(messages: Sequence[Message], fmt: Format) -> set[tuple[int, int]]:
    """Return the results that are for a provider's program, each as the number of its message and
    of the result."""
    found = {
        (number, place)
        for number, message in enumerate(messages)
        for place, result in enumerate(fmt.results(message))
        if result.is_for_program
    }
    if any(call.is_by_program for message in messages for call in fmt.calls(message)):
        paired = pair(messages, fmt).call_of
        found |= {place for place, (_, call) in paired.items() if call.is_by_program}
    return found


def in_context(messages: Sequence[Message], fmt: Format) -> list[Message]:
    """Return the messages as a model sees them, for counting: results for a provider's program are
    empty. Messages without such results are the same objects."""
    found = list(messages)
    for number, place in program_results(messages, fmt):
        found[number] = fmt.with_content(found[number], fmt.results(found[number])[place], "")
    return found


def _owner(path: Path, owners: list[_Owner] | None) -> tuple[str | None, str | None]:
    """Return the tool and the call id of the result or call that a path is in."""
    return next(
        ((tool, call_id) for start, tool, call_id in owners or () if path[: len(start)] == start),
        (None, None),
    )


def in_line(path: Path) -> Path:
    """Strip the steps that lead to a line in a document of lines: a key, and a number. A key and a
    number also lead to a block of a bare message, and are kept then."""
    if path[:1] == ("content",) and path[2:3] != ("message",):
        return path
    found = next((number for number, step in enumerate(path[:2]) if isinstance(step, int)), None)
    return path if found is None else path[found + 1 :]


def dumped(value: object) -> str:
    """Return a value as compact JSON, whatever a host put in it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        return f"[{type(value).__name__}]"


def text_of(content: object) -> str:
    """Return what a model reads in content: a string, the texts of blocks, or JSON."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if (
        isinstance(content, list)
        and content
        and all(isinstance(one, str | dict) for one in content)
    ):
        return "\n".join(one if isinstance(one, str) else _block_text(one) for one in content)
    return dumped(content)


def _block_text(block: Message) -> str:
    kind, inner = text(block.get("type")), block.get("content")
    if isinstance(inner, list | str) and kind in ("tool_result", "search_result"):
        return text_of(inner)
    part = read(block)
    if not part.has_payload:
        return dumped(block)
    if part.is_encoded:
        return f"[{kind[:40]} of {len(part.encoded):,} characters]"
    return part.text


def plain_text(content: object) -> str | None:
    """Return content that is a string or a single text block as a string, else None."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = (
            content[0].get("text") if content[0].get("type") in ("text", "input_text") else None
        )
    return content if isinstance(content, str) else None


def is_replaceable(message: Message, result: ToolResult) -> bool:
    """Whether a provider accepts a text in place of this result's content. Results of a provider's
    own tools have shapes that cannot be replaced."""
    content = at(message, result.content_path)
    if not isinstance(content, list):
        return isinstance(content, str)
    return bool(content) and all(isinstance(one, str) or is_known(one) for one in content)


def text_paths(message: Message, result: ToolResult) -> Iterator[Path]:
    """Yield the paths in a result where the provider accepts text instead: usually its whole
    content. Results of the provider's own tools (searches, code execution) must keep their shape;
    for a shell, the streams may be replaced."""
    content, holder = at(message, result.content_path), at(message, result.path)
    kind = holder.get("type") if isinstance(holder, dict) else None
    if isinstance(content, str) or kind in _TEXT_RESULTS:
        yield result.content_path
    elif kind == "shell_call_output":
        for path, one in members(message, result.content_path):
            yield from ((*path, name) for name in _STREAMS if name in one)


def spoken(message: object) -> tuple[str, list[str]]:
    """Return who wrote a message, "user" or "system", and the texts they wrote, without results of
    tools and data. For anyone else, both are empty."""
    role = message.get("role") if isinstance(message, Mapping) else None
    author = _AUTHORS.get(role, "") if isinstance(role, str) else ""
    content = message.get("content") if isinstance(message, Mapping) and author else None
    if isinstance(content, str):
        return author, [content]
    blocks = content if isinstance(content, list) else []
    outputs = ("tool_result", "function_call_output")
    found = (
        one.get("text") if isinstance(one, Mapping) and one.get("type") not in outputs else one
        for one in blocks
    )
    return author, [one for one in found if isinstance(one, str)]


def calls_named(
    value: object, names: Collection[str], depth: int = 0
) -> Iterator[Mapping[str, Any]]:
    """Yield the calls of these tools in a message of any format."""
    if not isinstance(value, Mapping | list) or depth >= _DEEPEST_CALL or not names:
        return
    if isinstance(value, Mapping) and ("arguments" in value or "input" in value):
        name = value.get("name")
        if isinstance(name, str) and name in names:
            yield value
            return
    for one in value.values() if isinstance(value, Mapping) else value:
        yield from calls_named(one, names, depth + 1)


def arguments_of(message: Message, call: Call) -> tuple[Path, Any] | None:
    """Return the path of a call's arguments and their value: an object, or its JSON. None if it has
    none."""
    for path in ((*call.path, *path) for path in _ARGUMENTS):
        found = at(message, path)
        if isinstance(found, dict | list | str) and found:
            return path, found
    return None


def attachments(message: Message) -> Iterator[tuple[Path, Part]]:
    """Yield the base64 images and documents in a message's own content, each with its path."""
    for path, one in members(message):
        part = read(one)
        if part.is_encoded:
            yield path, part


def without_refs(message: Message) -> Message:
    """Return a message as sent to a model: without our key, and with text blocks where a stub
    replaces an image."""
    plain = (
        {key: value for key, value in message.items() if key != REFS_KEY}
        if REFS_KEY in message
        else message
    )
    content = plain.get("content")
    return (
        with_blocks(plain, content, list(map(_shown, content)))
        if isinstance(content, list)
        else plain
    )


def _shown(block: Any) -> Any:
    """A block that a provider accepts: one with a stub in place of its data becomes a text
    block."""
    if not isinstance(block, dict):
        return block
    content = block.get("content")
    if isinstance(content, list):
        return with_blocks(block, content, list(map(_shown, content)))
    part = read(block)
    if not is_stub(part.encoded):
        return block
    return write(part.with_text(part.encoded))


@dataclass(frozen=True, slots=True)
class Pairing:
    """`call_of` maps (message number, result number) to the message number and call that the result
    answers. `open` are calls without a result, `orphans` results without a call."""

    call_of: dict[tuple[int, int], tuple[int, Call]] = field(default_factory=dict)
    open: tuple[tuple[int, Call], ...] = ()
    orphans: tuple[tuple[int, ToolResult], ...] = ()


def pair(messages: Sequence[Message], fmt: Format) -> Pairing:
    """Pair each result with the nearest earlier call that has its id and no result yet. Ids may be
    empty or repeat."""
    waiting: dict[str, list[tuple[int, int, Call]]] = {}
    call_of: dict[tuple[int, int], tuple[int, Call]] = {}
    orphans: list[tuple[int, ToolResult]] = []
    for number, message in enumerate(messages):
        for place, call in enumerate(fmt.calls(message)):
            waiting.setdefault(call.id, []).append((number, place, call))
        for place, result in enumerate(fmt.results(message)):
            calls = waiting.get(result.call_id)
            if calls:
                # Calls of one message are answered in their order, those of the newest message
                # first.
                index = next(index for index, one in enumerate(calls) if one[0] == calls[-1][0])
                call_number, _, call = calls.pop(index)
                call_of[number, place] = (call_number, call)
            elif result.call_id or result.content_path != (
                "output",
            ):  # else a provider's own call, with its result
                orphans.append((number, result))
    left = sorted((one for calls in waiting.values() for one in calls), key=lambda one: one[:2])
    return Pairing(call_of, tuple((number, call) for number, _, call in left), tuple(orphans))


def unpaired(messages: Sequence[Message], fmt: Format) -> list[str]:
    """Return what a provider would refuse: calls without a result, results without a call, and for
    Anthropic results that are not in the message after their call. Empty if everything is
    paired."""
    found = pair(messages, fmt)
    problems = [
        f"message {number}: call {clip(call.id, 40)} has no result" for number, call in found.open
    ]
    problems += [
        f"message {number}: result {clip(one.call_id, 40)} has no call"
        for number, one in found.orphans
    ]
    if fmt.name in ("anthropic", "claude-code"):
        problems += [
            f"message {number}: result {clip(call.id, 40)} is {number - call_number} messages "
            "after its call"
            for (number, _), (call_number, call) in found.call_of.items()
            if number
            not in (
                call_number,
                call_number + 1,
            )  # a provider's own tools answer in the same message
        ]
    return problems


def late_text(call_id: object, content: object) -> str:
    """Return the text that replaces a result that came too late for its call."""
    return f"Late result of the call {call_id}: {text_of(content)}"


def repeated_text(call_id: object, name: object, arguments: object) -> str:
    """Return the text that replaces a call that uses the id of another one."""
    return f"Repeated call {call_id}, not made again: {name} with {text_of(arguments)}"


def side(message: Message, fmt: Format) -> str:
    """Return "system", "user", "assistant", or "result" for a message with tool results."""
    if fmt.results(message):
        return "result"
    role = fmt.role(message)
    if role in ("system", "developer"):
        return "system"
    return "assistant" if role in ("assistant", "model") or fmt.calls(message) else "user"


def turns(sides: Sequence[str]) -> list[int]:
    """Return the numbers of the messages that begin a turn, from the side of each message. System
    messages at the start belong to no turn."""
    lead = next((number for number, one in enumerate(sides) if one != "system"), len(sides))
    found: list[int] = []
    for number in range(lead, len(sides)):
        one, before = sides[number], sides[number - 1] if number > lead else None
        is_input = before is None or (
            one in ("user", "system") and before in ("assistant", "result")
        )
        if is_input or (one == "assistant" and before == "result"):
            found.append(number)
    return found
