"""`Dialect`: how a provider takes a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from coatcheck.messages.content import text_of
from coatcheck.messages.formats import Format
from coatcheck.messages.paths import Message, Path, blocks_of

if TYPE_CHECKING:
    from coatcheck.messages.cache import Breakpoint

NO_RESULT: Final = "No result: the call was interrupted, or its result came later."


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


def late_text(call_id: object, content: object) -> str:
    """Return the text that replaces a result that came too late for its call."""
    return f"Late result of the call {call_id}: {text_of(content)}"


def repeated_text(call_id: object, name: object, arguments: object) -> str:
    """Return the text that replaces a call that uses the id of another one."""
    return f"Repeated call {call_id}, not made again: {name} with {text_of(arguments)}"
