"""`PromptBuilder`: the parts of a prompt, within a budget, in the order that keeps a provider's cache warm.

Stable parts come first (tools, system text, bootstrap files), then the conversation, which only grows, and last the
tail, which is new each turn. Large results leave at their first appearance; old ones are pruned in rare, large steps.
What does not fit, or cannot be counted, is refused: there is no prompt over the budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coatcheck.context.bootstrap import Bootstrapped, bootstrap
from coatcheck.context.budget import Budget, Violation
from coatcheck.context.counting import Tally
from coatcheck.context.dialects import Breakpoint, Dialect, dialect
from coatcheck.context.mending import mended
from coatcheck.context.prefix import SMALLEST, Prefix, Sent, breakpoints, compared, digest
from coatcheck.context.references import refusal
from coatcheck.context.slimming import Slimmer
from coatcheck.context.tail import Tail, Volatile
from coatcheck.errors import BudgetExceeded, InvalidArgument, LimitExceeded
from coatcheck.externalize import Policy, configured
from coatcheck.ids import clip
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.formats import Message
from coatcheck.transcript.formats.format import text_of
from coatcheck.transcript.prune import Pruned, prune
from coatcheck.transcript.weight import weigh

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Prompt", "PromptBuilder"]

_UNSET: Final[Any] = object()
_PRIMING: Final = 3
_TOOLS: Final = 12
_RECALL_CHARS_A_TOKEN: Final = 2
_PROBE: Final = "A counter that cannot count this can count nothing."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that is within its budget, and its figures.

    `messages` are those of the conversation as they are sent, without `tail` and without cache breakpoints;
    `request()` puts all together. `stable_prefix` is what it has in common with the prompt before, `rewritten_tokens`
    what had been sent then and is not sent again the same, the tail apart."""

    provider: str
    system: str
    messages: list[Message]
    tools: tuple[Any, ...]
    tail: str
    est_tokens: int
    tail_tokens: int
    stable_prefix: Prefix
    rewritten_tokens: int
    breakpoints: tuple[Breakpoint, ...]
    hs_tokens: int = 0
    hs_bytes: int = 0
    hs_truncated: tuple[str, ...] = ()
    artifacts: int = 0
    artifact_types: tuple[str, ...] = ()
    sys_chars: int = 0
    user_chars: int = 0
    ref_files: int = 0
    violations: tuple[Violation, ...] = ()
    bootstrapped: Bootstrapped | None = None
    pruned: Pruned | None = None
    recalled: int = 0
    refs: tuple[Ref, ...] = ()
    changes: tuple[str, ...] = ()

    def request(self, *, cache_control: bool = True) -> dict[str, Any]:
        """The arguments of the provider's call that hold this prompt: `tools`, `system` or `instructions`, and
        `messages` or `input`. For Anthropic with `cache_control` on the blocks where the breakpoints belong."""
        marks = self.breakpoints if cache_control else ()
        return dialect(self.provider).request(self.system, self.messages, self.tail, self.tools, marks)


class PromptBuilder:
    """Builds the prompts of one conversation in a session, and compares each with the one before.

    `system` and `files` (see `bootstrap`) stand first. `tools` are the toolkit's, or as the provider takes them. Limits
    come from `budget`, what leaves the conversation at once from `policy` (None: nothing does), both by default from
    the settings. `reserve_tokens` are kept free for the tail, so that the conversation is pruned at the same places
    whatever a turn brings: by default what the hot state and recall can need, at most a quarter of the budget."""

    def __init__(
        self,
        session: Session,
        *,
        provider: str,
        system: str = "",
        files: Iterable[str | Path] = (),
        root: str | Path | None = None,
        tools: Sequence[Any] = (),
        budget: Budget | None = None,
        policy: Policy | None = _UNSET,
        recall: bool | None = None,
        count: TokenCounter = estimate,
        keep_turns: int = 3,
        reserve_tokens: int | None = None,
        smallest_cache: int = SMALLEST,
        read_tool: str | None = "get_artifact",
    ) -> None:
        settings = session.store.settings
        self._session = session
        self._dialect: Dialect = dialect(provider)
        self._system = system
        self._files = tuple(files)
        self._root = root
        self._tools = tuple(self._dialect.tool(tool) for tool in tools)
        self._budget = Budget(**settings.section("budget")) if budget is None else budget
        self._slimmer = Slimmer(session, configured(settings) if policy is _UNSET else policy)
        self._recalls = settings["memory.artifacts.enabled"] if recall is None else recall
        self._count = count
        self._tally = Tally(count)
        self._keep_turns = keep_turns
        self._smallest = smallest_cache
        self._read_tool = read_tool
        self._reserve = self._reserved(settings) if reserve_tokens is None else reserve_tokens
        self._sent: Sent | None = None

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        hot_state: Any = None,
        chunks: Iterable[object] = (),
        message: str | None = None,
    ) -> Prompt:
        """The prompt for the next model call. Raises `BudgetExceeded` with every violation where there is none within
        the budget, or something cannot be counted.

        `messages` are the whole conversation in the provider's shape, as the host keeps it: without earlier tails.
        `hot_state` is a `HotState`, `chunks` are what was retrieved: texts, search hits, or mappings with a `text`.
        Recall goes by `message`, by default the last that the user said. The given messages are not changed."""
        given = [_plain(one) for one in messages]
        told = (
            bootstrap(self._session, self._files, root=self._root, read_tool=self._read_tool) if self._files else None
        )
        system = "\n\n".join(part for part in (self._system, told.text if told else "") if part)
        lead = self._lead(system)
        violations: list[Violation] = []
        if lead is None or self._tally.tokens(_PROBE) is None:
            violations += self._budget.prompt_tokens(None)
        conversation, refs, pruned = self._conversation(given, lead, violations)
        volatile = Volatile(
            session=self._session,
            budget=self._budget,
            count=self._count,
            weigh=self._tail_tokens,
            hot_state=hot_state,
            chunks=_listed(chunks),
            message=_last_said(given) if message is None else message,
            recalls=self._recalls,
            read_tool=self._read_tool,
        )
        fixed = None if lead is None else sum(tokens for _, tokens in lead) + _PRIMING
        costs = [] if violations else [self._weight(one) for one in conversation]
        tail = self._tail(volatile, fixed, costs, violations)
        if violations or fixed is None:
            raise refusal(dict.fromkeys(violations))
        total = fixed + sum(costs) + tail.tokens
        if over := self._budget.prompt_tokens(total):
            raise refusal(over)
        return self._prompt(system, conversation, tail, total, lead or [], costs, pruned, told, refs)

    def _bootstrapped(self) -> Bootstrapped | None:
        if not self._files:
            return None
        return bootstrap(self._session, self._files, root=self._root, read_tool=self._read_tool)

    def _conversation(
        self, given: list[Message], lead: list[tuple[bytes, int]] | None, violations: list[Violation]
    ) -> tuple[list[Message], list[Ref], Pruned | None]:
        """The messages as they are sent: calls paired, large results out, old ones pruned."""
        slim, refs = self._slimmer.slim(mended(given, self._dialect.name), self._dialect.format)
        if lead is None:
            return slim, refs, None
        room = self._budget.max_prompt_tokens - sum(tokens for _, tokens in lead) - _PRIMING - self._reserve
        try:
            if sum(map(self._weight, slim)) <= room:
                return slim, refs, None
            done = prune(
                slim,
                max_tokens=max(1, room),
                format=self._dialect.format,
                keep_turns=self._keep_turns,
                session=self._session,
                count=self._tally.tokens,  # type: ignore[arg-type]
                read_tool=self._read_tool,
            )
        except BudgetExceeded:
            raise
        except LimitExceeded as error:
            violations += self._too_long(slim, lead, error)
            return slim, refs, None
        return done.messages, refs, done

    def _too_long(self, slim: list[Message], lead: list[tuple[bytes, int]], error: LimitExceeded) -> list[Violation]:
        try:
            actual = sum(tokens for _, tokens in lead) + sum(map(self._weight, slim)) + _PRIMING + self._reserve
        except LimitExceeded:
            return list(self._budget.prompt_tokens(None))
        found = self._budget.prompt_tokens(actual)
        return [replace(one, message=f"{one.message}: {error.message}") for one in found]

    def _tail(self, volatile: Volatile, fixed: int | None, costs: list[int], violations: list[Violation]) -> Tail:
        known = not violations and fixed is not None
        room = self._budget.max_prompt_tokens - (fixed or 0) - sum(costs) if known else self._budget.max_prompt_tokens
        try:
            tail = volatile.tail(room)
        except BudgetExceeded as error:
            violations += error.violations
            return Tail()
        if tail is None:
            message = f"the tail has no room: {room:,} tokens are left of max_prompt_tokens"
            limit = self._budget.max_prompt_tokens
            violations.append(Violation("max_prompt_tokens", limit, limit - room, message))
            return Tail()
        return tail

    def _prompt(
        self,
        system: str,
        messages: list[Message],
        tail: Tail,
        total: int,
        lead: list[tuple[bytes, int]],
        costs: list[int],
        pruned: Pruned | None,
        told: Bootstrapped | None,
        refs: list[Ref],
    ) -> Prompt:
        before_tail = self._dialect.before_tail(messages) if tail.text else len(messages)
        parts = (*lead, *((digest(one), cost) for one, cost in zip(messages[:before_tail], costs, strict=False)))
        sent = Sent(parts, len(lead))
        standing = compared(self._sent, sent)
        own = self._dialect.own_marks(messages, self._tools)
        marks = breakpoints(self._dialect, system, messages[:before_tail], sent, standing.stable, own, self._smallest)
        self._sent = sent
        state = tail.hot_state
        return Prompt(
            provider=self._dialect.name,
            system=system,
            messages=messages,
            tools=self._tools,
            tail=tail.text,
            est_tokens=total,
            tail_tokens=tail.tokens,
            stable_prefix=standing.stable,
            rewritten_tokens=standing.rewritten,
            breakpoints=marks,
            hs_tokens=state.tokens if state else 0,
            hs_bytes=state.bytes if state else 0,
            hs_truncated=state.steps if state else (),
            artifacts=state.entries if state else 0,
            artifact_types=state.types if state else (),
            sys_chars=len(system),
            user_chars=sum(len(_said(one)) for one in messages) + len(tail.text),
            ref_files=len(told.refs) if told else 0,
            bootstrapped=told,
            pruned=pruned,
            recalled=len(tail.recalled.items) if tail.recalled else 0,
            refs=(*refs, *tail.refs, *(told.refs if told else ())),
            changes=(*(pruned.steps if pruned else ()), *tail.changes),
        )

    def _lead(self, system: str) -> list[tuple[bytes, int]] | None:
        """Digest and tokens of the tools and the system text; None where they cannot be counted."""
        parts: list[tuple[bytes, int]] = []
        for value, more in ((list(self._tools), _TOOLS), (system, _PRIMING)):
            if not value:
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            tokens = self._tally.tokens(text)
            if tokens is None:
                return None
            parts.append((digest(value), tokens + more))
        return parts

    def _weight(self, message: Message) -> int:
        return weigh(message, self._tally.tokens)  # type: ignore[arg-type]

    def _tail_tokens(self, text: str) -> int | None:
        try:
            return self._weight({"role": "user", "content": [{"type": "text", "text": text}]})
        except LimitExceeded:
            return None

    def _reserved(self, settings: Any) -> int:
        recalled = settings["memory.artifacts.max_chars"] // _RECALL_CHARS_A_TOKEN if self._recalls else 0
        return min(self._budget.max_prompt_tokens // 4, self._budget.max_hot_state_tokens + recalled)


def _plain(message: Any) -> Message:
    """A message as JSON has it: providers' libraries answer objects, which hosts send back as they are."""
    try:
        if type(message) is dict:
            json.dumps(message)
            return message
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        found = json.loads(json.dumps(message, ensure_ascii=False, default=_object))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"a message cannot be sent: {clip(str(error))}", hint="messages are JSON") from error
    if not isinstance(found, dict):
        raise InvalidArgument(
            f"a message is a {type(message).__name__}, not an object", hint="messages are JSON objects"
        )
    return found


def _object(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_none=True)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _listed(chunks: Iterable[object]) -> Sequence[object]:
    return chunks if isinstance(chunks, str) else tuple(chunks)


def _last_said(messages: Sequence[Message]) -> str:
    """What the user said last: results of tools are not the user's words."""
    for message in reversed(messages):
        if message.get("role") == "user" and (said := _said(message)).strip():
            return said
    return ""


def _said(message: Message) -> str:
    if message.get("role") != "user":
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = [one for one in content if isinstance(one, dict) and one.get("type") in ("text", "input_text")]
    return text_of(content) if content else ""
