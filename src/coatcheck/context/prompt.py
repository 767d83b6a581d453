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

from coatcheck._toolkit import known_as
from coatcheck.context._bootstrap import Bootstrapped, bootstrap
from coatcheck.context._recall import Recalled
from coatcheck.context.budget import Budget, Violation
from coatcheck.context.conversation import Conversation, Told
from coatcheck.context.dialects import Breakpoint, Dialect, dialect
from coatcheck.context.prefix import SMALLEST, Prefix, Sent, breakpoints, compared
from coatcheck.context.references import refusal
from coatcheck.context.tail import Tail, Volatile
from coatcheck.context.weights import Tally, Weighed, named_documents
from coatcheck.errors import BudgetExceeded, InvalidArgument, LimitExceeded
from coatcheck.externalize import Policy, configured
from coatcheck.ids import clip
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.formats import Message
from coatcheck.transcript.formats.format import text_of
from coatcheck.transcript.prune import Pruned

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Prompt", "PromptBuilder"]

_UNSET: Final[Any] = object()
_PRIMING: Final = 3
_TOOLS: Final = 12
_RECALL_CHARS_A_TOKEN: Final = 2
_JSON: Final = "messages and tools are JSON objects"
_LIST_TOOL: Final = "list_artifacts"
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
    recalled: Recalled | None = None
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
    whatever a turn brings: by default what the hot state and recall can need, at most a quarter of the budget. A
    document that a message only names, by its address or an id, counts `document_tokens`; nobody can count it, and so
    there is no prompt, where that is not said."""

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
        document_tokens: int | None = None,
        keep_turns: int = 3,
        reserve_tokens: int | None = None,
        smallest_cache: int = SMALLEST,
        read_tool: str | None = _UNSET,
    ) -> None:
        settings = session.store.settings
        self._session = session
        self._dialect: Dialect = dialect(provider)
        self._system = system
        self._files = tuple(files)
        self._root = root
        self._tools = tuple(_plain(self._dialect.tool(tool), "a tool") for tool in tools)
        known = dict(found for tool in self._tools if (found := known_as(tool)) is not None)
        if read_tool is _UNSET:
            read_tool = known.get("get", settings["policy.read_tool"])
        self._list_tool = None if read_tool is None else known.get("list", None if self._tools else _LIST_TOOL)
        if policy is _UNSET or ("get" in known and policy is not None and policy.read_tool is not None):
            policy = replace(configured(settings) if policy is _UNSET else policy, read_tool=read_tool)
        self._policy = policy or replace(configured(settings), read_tool=read_tool)
        self._budget = Budget(**settings.section("budget")) if budget is None else budget
        self._recalls = settings["memory.artifacts.enabled"] if recall is None else recall
        self._count = count
        self._tally = Tally(count, document_tokens=document_tokens)
        self._conversation = Conversation(
            session,
            self._dialect,
            self._tally,
            policy=policy,
            keep_turns=keep_turns,
            read_tool=read_tool,
        )
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
        given, costs = self._weighed(messages)
        files = self._bootstrapped()
        system = "\n\n".join(part for part in (self._system, files.text if files else "") if part)
        violations: list[Violation] = []
        lead = self._lead(system)
        if lead is None:
            violations += self._budget.prompt_tokens(None)
        fixed = sum(one.tokens for one in lead or ()) + _PRIMING
        told = self._told(given, costs, fixed, violations)
        volatile = Volatile(
            session=self._session,
            budget=self._budget,
            count=self._count,
            weigh=self._tail_tokens,
            hot_state=hot_state,
            chunks=_listed(chunks),
            message=_last_said(given) if message is None else message,
            policy=self._policy,
            recalls=self._recalls,
            read_tool=self._read_tool,
            list_tool=self._list_tool,
        )
        used = fixed + sum(one.tokens for one in told.costs)
        tail = self._tail(volatile, self._budget.max_prompt_tokens - (0 if violations else used), violations)
        if violations or lead is None:
            raise refusal(dict.fromkeys(violations))
        if over := self._budget.prompt_tokens(used + tail.tokens):
            raise refusal(over)
        return self._prompt(system, told, tail, used + tail.tokens, lead, files)

    def _bootstrapped(self) -> Bootstrapped | None:
        if not self._files:
            return None
        return bootstrap(self._session, self._files, root=self._root, read_tool=self._read_tool)

    def _weighed(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Weighed | None]]:
        """The messages as JSON has them, and what each costs."""
        given: list[Message] = []
        costs: list[Weighed | None] = []
        for message in messages:
            one = message if type(message) is dict else _plain(message)
            try:
                cost = self._tally.weighed(one)
            except (TypeError, ValueError, RecursionError):
                one = _plain(message)
                cost = self._tally.weighed(one)
            given.append(one)
            costs.append(cost)
        return given, costs

    def _told(self, given: list[Message], costs: list[Weighed | None], fixed: int, violations: list[Violation]) -> Told:
        """The conversation in the room that is its own, whatever this turn's tail needs."""
        limit = self._budget.max_prompt_tokens
        try:
            return self._conversation.told(given, costs, limit - fixed - self._reserve)
        except BudgetExceeded as error:
            violations += error.violations
        except LimitExceeded as error:
            if None in costs:
                violations += self._uncounted(given)
            else:
                actual = fixed + sum(one.tokens for one in costs if one) + self._reserve
                violations.append(Violation("max_prompt_tokens", limit, actual, f"a prompt over it: {error.message}"))
        return Told([], [])

    def _uncounted(self, given: list[Message]) -> tuple[Violation, ...]:
        """That the prompt cannot be counted, and why where it is no fault of the counter's."""
        found = self._budget.prompt_tokens(None)
        if not any(map(named_documents, given)):
            return found
        said = (
            "a document that is only named, by its address or an id, cannot be counted: send it, or say document_tokens"
        )
        return tuple(replace(one, message=said) for one in found)

    def _tail(self, volatile: Volatile, room: int, violations: list[Violation]) -> Tail:
        try:
            tail = volatile.tail(room)
        except BudgetExceeded as error:
            violations += error.violations
            return Tail()
        if tail is None:
            limit = self._budget.max_prompt_tokens
            message = f"the tail of a prompt has no room: {max(0, room):,} tokens are left of {limit:,}"
            violations.append(Violation("max_prompt_tokens", limit, limit - room, message))
            return Tail()
        return tail

    def _prompt(
        self, system: str, told: Told, tail: Tail, total: int, lead: list[Weighed], files: Bootstrapped | None
    ) -> Prompt:
        messages = told.messages
        before_tail = self._dialect.before_tail(messages) if tail.text else len(messages)
        sent = Sent((*lead, *told.costs[:before_tail]), len(lead))
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
            ref_files=len(files.refs) if files else 0,
            bootstrapped=files,
            pruned=told.pruned,
            recalled=tail.recalled,
            refs=(*told.refs, *tail.refs, *(files.refs if files else ())),
            changes=(*(told.pruned.steps if told.pruned and told.is_new else ()), *tail.changes),
        )

    def _lead(self, system: str) -> list[Weighed] | None:
        """The tools and the system text; None where they cannot be counted."""
        parts: list[Weighed] = []
        for value, more in (({"tools": list(self._tools)}, _TOOLS), ({"system": system}, 0)):
            if any(value.values()):
                found = self._tally.weighed(value)
                if found is None:
                    return None
                parts.append(found._replace(tokens=found.tokens + more))
        return parts if self._tally.tokens(_PROBE) is not None else None

    def _tail_tokens(self, text: str) -> int | None:
        found = self._tally.weighed({"role": "user", "content": [{"type": "text", "text": text}]})
        return None if found is None else found.tokens

    def _reserved(self, settings: Any) -> int:
        recalled = settings["memory.artifacts.max_chars"] // _RECALL_CHARS_A_TOKEN if self._recalls else 0
        return min(self._budget.max_prompt_tokens // 4, self._budget.max_hot_state_tokens + recalled)


def _plain(value: Any, what: str = "a message") -> Message:
    """A message or a tool as JSON has it: providers' libraries answer objects, which hosts send back as they are."""
    try:
        found = json.loads(json.dumps(value, ensure_ascii=False, default=_object))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{what} cannot be sent: {clip(str(error))}", hint="messages and tools are JSON"
        ) from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{what} is a {type(value).__name__}, not an object", hint=_JSON)
    return found


def _object(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_none=True)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _listed(chunks: Any) -> Any:
    """The chunks as they can be looked at twice; what cannot be listed, as what no check lets pass."""
    try:
        return chunks if isinstance(chunks, str | bytes) else tuple(chunks)
    except Exception:  # noqa: BLE001 - a retriever of the host's own
        return None


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
