"""Large results leave the messages when they are first sent, and stay away: the stub is the same in every later prompt.

What became of a message is remembered by its digest, so that a conversation is judged once, not once a turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coatcheck.context.cache_marks import bare, marked
from coatcheck.externalize import Outcome, Policy
from coatcheck.refs import Ref
from coatcheck.transcript.formats import Format, Message, Path, Result, at, replaced

if TYPE_CHECKING:
    from coatcheck.session import Session

_REMEMBERED: Final = 16_384
_TAKE_TEXT: Final = frozenset(
    {None, "tool_result", "mcp_tool_result", "function_call_output", "custom_tool_call_output", "mcp_call"}
)
_STREAMS: Final = ("stdout", "stderr")


class Slim(NamedTuple):
    """A message as it is sent, and what it points at that stood in it."""

    message: Message
    refs: tuple[Ref, ...] = ()


class _Known(NamedTuple):
    """What stands in place of which contents of a message, and what that points at."""

    stubs: tuple[tuple[Path, Any], ...]
    refs: tuple[Ref, ...]


class Slimmer:
    """Externalizes the results of one session's messages."""

    def __init__(self, session: Session, policy: Policy | None, known: Format) -> None:
        self._session = session
        self._policy = policy
        self._format = known
        self._known: OrderedDict[tuple[bytes, str], _Known] = OrderedDict()

    def slim(self, messages: Sequence[Message], digests: Sequence[bytes]) -> list[Slim]:
        """The messages with stubs in place of what the policy finds too large; those without are the same objects."""
        tools: dict[str, str] = {}
        done = []
        for message, digest in zip(messages, digests, strict=True):
            tools.update((call.id, call.name) for call in self._format.calls(message))
            results = self._format.results(message) if self._policy is not None else ()
            done.append(self._slim(message, digest, results, tools) if results else Slim(message))
        return done

    def _slim(self, message: Message, digest: bytes, results: Sequence[Result], tools: Mapping[str, str]) -> Slim:
        names = [result.name or tools.get(result.call_id) for result in results]
        key = (digest, "\0".join(map(str, names)))
        known = self._known.get(key)
        if known is None:
            known, failed = self._left(message, results, names)
            if not failed:  # else the next prompt tries again
                self._known[key] = known
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        new = message
        for path, content in known.stubs:
            new = dict(replaced(new, path, marked(content, at(message, path))))
        return Slim(new, known.refs)

    def _left(self, message: Message, results: Sequence[Result], names: Sequence[str | None]) -> tuple[_Known, bool]:
        """What leaves a message, without a host's breakpoints: those are the turn's; and whether storing it failed."""
        stubs: list[tuple[Path, Any]] = []
        refs: list[Ref] = []
        failed = False
        for result, name in zip(results, names, strict=True):
            for path in _places(message, result):
                outcome = self._outcome(bare(at(message, path)), name, result.call_id)
                if outcome is not None:
                    stubs.append((path, outcome.content))
                    refs += outcome.refs
                    failed = failed or outcome.failure is not None
        return _Known(tuple(stubs), tuple(refs)), failed

    def _outcome(self, content: Any, tool: str | None, call_id: str) -> Outcome | None:
        """What stands in place of content; None where it stays."""
        policy = self._policy
        assert policy is not None
        if not isinstance(content, str | list) or (isinstance(content, str) and len(content) <= policy.safe_chars):
            return None
        outcome = self._session.externalize(content, tool=tool, call_id=call_id or None, policy=policy)
        return outcome if outcome.content is not content else None


def _places(message: Message, result: Result) -> Iterator[Path]:
    """Where the payloads of a result stand that the provider takes a text for: all of its content as a rule. What its
    own tools answered (searches, programs that it ran) has shapes that it wants back; of a shell, its streams go."""
    content = at(message, result.content_path)
    holder = at(message, result.path)
    kind = holder.get("type") if isinstance(holder, dict) else None
    if isinstance(content, str) or kind in _TAKE_TEXT:
        yield result.content_path
    elif kind == "shell_call_output" and isinstance(content, list):
        for number, one in enumerate(content):
            yield from (
                (*result.content_path, number, name) for name in _STREAMS if isinstance(one, dict) and name in one
            )
