"""`Format`: what Coatcheck knows about one message format.

Subclasses define the differences. Everything works on parsed JSON, never raises on odd input, and
never changes its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

from coatcheck.messages import paths
from coatcheck.messages.cache import KEY
from coatcheck.messages.content import without_refs
from coatcheck.messages.paths import REFS_KEY, Message, Path, at, members, replaced, text

_MAX_DEPTH: Final = 8
_HOST_KEYS: Final = {
    "artifact",
    "details",
    "toolUseResult",
    "additional_kwargs",
    "response_metadata",
    "_meta",
}


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
        surveyed = []
        for line in lines:  # in their order: the ids of calls may repeat
            message = self.message(line)
            owners = None
            if message is not None:
                owners = self._owners(message, () if message is line else ("message",), tools)
            found = paths.places(line, least, bulk, opaque=self.opaque)
            surveyed.append([self._place(line, path, value, owners) for path, value in found])
        return surveyed

    def _place(
        self, line: object, path: Path, value: Any, owners: list[_Owner] | None
    ) -> PayloadPlace:
        """Return a possible payload with its owner, if its line is a message with these owners."""
        is_shown = self.is_shown(path)
        if owners is None:
            return PayloadPlace(path, value, is_shown, document=line)
        tool, call_id = _owner(path, owners)
        return PayloadPlace(path, value, is_shown, tool, call_id)

    def owned(
        self, places: Iterable[PayloadPlace], tools: dict[str, str]
    ) -> Iterator[PayloadPlace]:
        """Yield places with their tools and call ids, those of documents too."""
        learned: Any = None  # the last document whose calls were added to `tools`
        for place in places:
            document = place.document
            around = None if document is None else self.message_around(document, place.path)
            if around is None:
                yield place
                continue
            base, message = around
            tool, call_id = _owner(place.path, self._owners(message, base, dict(tools)))
            if call_id and not tool and document is not learned:
                learned = document
                for each_base, each in self.messages(document):
                    self._owners(each, each_base, tools)
            yield place._replace(tool=tool or tools.get(call_id or ""), call_id=call_id)

    def _owners(self, message: Message, base: Path, tools: dict[str, str]) -> list[_Owner]:
        """Return the results and calls of a message, whose path is `base`, and add its calls to
        `tools`."""
        calls = self.calls(message)
        tools.update({one.id: one.name for one in calls if one.id and one.name})
        owners: list[_Owner] = []
        for result in self.results(message):
            tool = result.name or tools.get(result.call_id)
            owners.append(((*base, *result.path), tool, result.call_id))
        owners += [((*base, *call.path), call.name, call.id) for call in calls]
        return owners

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
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), path, is_by_program(one))
            for path, one in members(message)
            if text(one.get("type")) in self.call_types
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
        block: Message = {"type": "text", "text": text}
        for _, one in members(message, path):
            if KEY in one:
                block[KEY] = one[KEY]
        return dict(replaced(message, path, [block]))

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
        if not isinstance(line, dict) or text(line.get("type")) not in self.envelopes:
            return None
        found = line.get("message")
        return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None

    def messages(self, line: object, path: Path = ()) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield (path if found is line else (*path, "message")), found
            return
        # Or a session file that was saved as one document: a list of lines, or an object with such
        # a list.
        lists: list[Path] = [()] if isinstance(line, list) else []
        if isinstance(line, dict) and "type" not in line:
            lists = [(key,) for key in line]
        for base in lists:
            for inner_path, inner in members(line, base):
                yield from self.messages(inner, (*path, *inner_path))

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        return next((one for one in self.messages(line) if path[: len(one[0])] == one[0]), None)


def is_by_program(call: Mapping[str, Any]) -> bool:
    """Whether a provider's program made a call (Anthropic's code execution, OpenAI's `program`),
    not the model.

    The result of such a call goes to the program and never enters the context. It must be sent as
    it is: the program would compute with a stub. A result in OpenAI's format may name its caller in
    the same way."""
    caller = call.get("caller")
    return isinstance(caller, Mapping) and caller.get("type") not in (None, "direct")


def _owner(path: Path, owners: list[_Owner]) -> tuple[str | None, str | None]:
    """Return the tool and the call id of the result or call that a path is in."""
    for start, tool, call_id in owners:
        if path[: len(start)] == start:
            return tool, call_id
    return None, None


def in_line(path: Path) -> Path:
    """Strip the steps that lead to a line in a document of lines: a key, and a number. A key and a
    number also lead to a block of a bare message, and are kept then."""
    if path[:1] == ("content",) and path[2:3] != ("message",):
        return path
    found = next((number for number, step in enumerate(path[:2]) if isinstance(step, int)), None)
    return path if found is None else path[found + 1 :]
