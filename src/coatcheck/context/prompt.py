"""`PromptBuilder`: the parts of a prompt, within a budget, in the order that keeps a provider's cache warm.

Stable parts come first (tools, system text, bootstrap files), then the conversation, which only grows, and last the
tail, which changes every turn. Large results are replaced by stubs when they first appear; old ones are pruned in rare,
large steps. A prompt that does not fit the budget, or cannot be counted, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coatcheck._toolkit import function_of, known_as
from coatcheck.context._bootstrap import Bootstrapped, bootstrap
from coatcheck.context._recall import Recalled
from coatcheck.context.budget import Budget, Violation, listed, log_violations, refusal
from coatcheck.context.conversation import Conversation, SentMessages
from coatcheck.context.tail import Tail, TailParts
from coatcheck.errors import BudgetExceeded, InvalidArgument, LimitExceeded
from coatcheck.externalize import Policy, configured
from coatcheck.externalize.policy import READ_TOOL
from coatcheck.ids import clip
from coatcheck.messages import Dialect, Message, dialect, for_provider
from coatcheck.messages.cache import SMALLEST, Breakpoint, Sent, StablePrefix, breakpoints, compared
from coatcheck.messages.cost import Cost, Tally, referenced_documents
from coatcheck.messages.formats import spoken
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.prune import Pruned

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Prompt", "PromptBuilder"]

_UNSET: Final[Any] = object()
_REQUEST_TOKENS: Final = 3
_TOOLS_TOKENS: Final = 12
_RECALL_CHARS_PER_TOKEN: Final = 2
_LIST_TOOL: Final = "list_artifacts"
_PROBE: Final = "A counter that cannot count this can count nothing."
_UNCOUNTABLE: Final = (
    "a document that is only referenced, by URL or id, cannot be counted: send its content, or set document_tokens"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt within its budget, with its figures.

    `messages` are the messages of the conversation as sent, without `tail` and cache breakpoints; `request()` returns
    everything together. `stable_prefix` is the beginning that it shares with the previous prompt, `rewritten_tokens`
    the tokens of the previous prompt, without its tail, that were not sent again in the same form. `changes` has one
    line for each thing that was shortened, stored or left out for the first time in this prompt."""

    provider: str
    system: str
    messages: list[Message]
    tools: tuple[Any, ...]
    tail: str
    est_tokens: int
    tail_tokens: int
    stable_prefix: StablePrefix
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
        """Return the arguments of the provider's call that contain this prompt: `tools`, `system` or `instructions`,
        and `messages` or `input`. For Anthropic, blocks at a breakpoint have `cache_control`."""
        marks = self.breakpoints if cache_control else ()
        return dialect(self.provider).request(self.system, self.messages, self.tail, self.tools, marks)


class PromptBuilder:
    """Builds the prompts of one conversation in a session, and compares each with the previous one.

    `system` and `files` (see `bootstrap`) come first. `tools` are the toolkit's, or in the provider's format. `budget`
    sets the limits, and `policy` which results are externalized (None: none are); both default to the settings.
    `reserve_tokens` are kept free for the tail, so that the conversation is pruned at the same places whatever a turn
    adds: by default the most that hot state and recall can need, up to a quarter of the budget. `document_tokens` is
    the count of a document that a message only references by URL or id; without it such a message cannot be counted,
    and there is no prompt."""

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
        self._tools = tuple(_plain(self._dialect.tool(tool), "tool") for tool in tools)
        known = dict(found for tool in self._tools if (found := known_as(tool)) is not None)
        if read_tool is _UNSET:
            read_tool = known.get("get", settings["policy.read_tool"])
            if self._tools and read_tool not in [function_of(tool).get("name") for tool in self._tools]:
                read_tool = None  # no tool in the prompt reads artifacts
        self._list_tool = None if read_tool is None else known.get("list", None if self._tools else _LIST_TOOL)
        if policy is _UNSET:
            policy = replace(configured(settings), read_tool=read_tool)
        elif (policy is not None and policy.read_tool is not None) and (
            "get" in known or (read_tool is None and policy.read_tool == READ_TOOL)
        ):
            policy = replace(policy, read_tool=read_tool)
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
            redact=self._policy.redact,
        )
        self._smallest = smallest_cache
        self._read_tool = read_tool
        self._reserve = self._default_reserve(settings) if reserve_tokens is None else reserve_tokens
        self._sent: Sent | None = None
        self._shown_files: tuple[Ref, ...] = ()

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        hot_state: Any = None,
        chunks: Iterable[object] = (),
        message: str | None = None,
    ) -> Prompt:
        """Build the prompt for the next model call. Raises `BudgetExceeded` with every violation if it does not fit the
        budget, or if a part cannot be counted.

        `messages` are the whole conversation in the provider's format, as the host keeps it, without earlier tails.
        Messages of pi and OpenClaw, and lines of their session files, are converted; lines of Claude Code are accepted
        for Anthropic. `hot_state` is a `HotState`, `chunks` are retrieved texts, search hits, or mappings with a
        `text`. `message` is the query for recall, by default the last message of the user. The given messages are not
        changed."""
        given, costs = self._weighed(for_provider(messages, self._dialect.name))
        files = None
        if self._files:
            redact, read_tool = self._policy.redact, self._read_tool
            files = bootstrap(self._session, self._files, root=self._root, read_tool=read_tool, redact=redact)
        system = "\n\n".join(part for part in (self._system, files.text if files else "") if part)
        violations: list[Violation] = []
        lead = self._lead(system)
        if lead is None:
            violations += self._budget.prompt_tokens(None)
        fixed = sum(one.tokens for one in lead or ()) + _REQUEST_TOKENS
        sent = self._fitted(given, costs, fixed, violations)
        parts = TailParts(
            session=self._session,
            budget=self._budget,
            count=self._count,
            weigh=self._tail_tokens,
            hot_state=hot_state,
            chunks=listed(chunks),
            message=next(filter(str.strip, reversed(_user_texts(given))), "") if message is None else message,
            policy=self._policy,
            recalls=self._recalls,
            read_tool=self._read_tool,
            list_tool=self._list_tool,
        )
        used = fixed + sum(one.tokens for one in sent.costs)
        tail = self._tail(parts, self._budget.max_prompt_tokens - (0 if violations else used), violations)
        if not violations:
            violations += self._budget.prompt_tokens(used + tail.tokens)
        checked = self._budget.check(hot_state=hot_state, chunks=parts.chunks, count=self._count)
        found = tuple(dict.fromkeys(violations))
        log_violations(dict.fromkeys((*checked, *found)), self._session.session_id)  # those that were mended too
        if found or lead is None:
            raise refusal(found)
        return self._prompt(system, sent, tail, used + tail.tokens, lead, files)

    def _file_changes(self, files: Bootstrapped | None) -> Iterator[str]:
        """Yield a line for each file that became a reference and was not the same one in the previous prompt."""
        before, self._shown_files = self._shown_files, files.refs if files else ()
        known = {ref.artifact_id for ref in before}
        for one in files.files if files else ():
            if one.status == "reference" and one.ref is not None and one.ref.artifact_id not in known:
                yield f"bootstrap file {clip(one.name)} of {one.ref.size_bytes:,} bytes became {one.ref.pointer}"

    def _weighed(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Cost | None]]:
        """Return the messages as JSON objects, and their costs."""
        given: list[Message] = []
        costs: list[Cost | None] = []
        for message in messages:
            one = message if type(message) is dict else _plain(message, "message")
            try:
                cost = self._tally.weighed(one)
            except (TypeError, ValueError, RecursionError):
                one = _plain(message, "message")
                cost = self._tally.weighed(one)
            given.append(one)
            costs.append(cost)
        return given, costs

    def _fitted(
        self, given: list[Message], costs: list[Cost | None], fixed: int, violations: list[Violation]
    ) -> SentMessages:
        """Fit the conversation into its own room, which does not depend on this turn's tail."""
        limit = self._budget.max_prompt_tokens
        try:
            return self._conversation.fitted(given, costs, limit - fixed - self._reserve)
        except BudgetExceeded as error:
            violations += error.violations
        except LimitExceeded as error:
            if None in costs:
                unknown = self._budget.prompt_tokens(None)
                is_document = any(map(referenced_documents, given))  # else the counter failed
                violations += (replace(one, message=_UNCOUNTABLE) if is_document else one for one in unknown)
            else:
                actual = fixed + sum(one.tokens for one in costs if one) + self._reserve
                message = f"the conversation does not fit: {error.message}"
                violations.append(Violation("max_prompt_tokens", limit, actual, message))
        return SentMessages([], [])

    def _tail(self, parts: TailParts, room: int, violations: list[Violation]) -> Tail:
        try:
            tail = parts.fitted(room)
        except BudgetExceeded as error:
            violations += error.violations
            return Tail()
        if tail is None:
            limit = self._budget.max_prompt_tokens
            message = f"the tail of the prompt does not fit: {max(0, room):,} of {limit:,} tokens are left"
            violations.append(Violation("max_prompt_tokens", limit, limit - room, message))
            return Tail()
        return tail

    def _prompt(
        self, system: str, sent: SentMessages, tail: Tail, total: int, lead: list[Cost], files: Bootstrapped | None
    ) -> Prompt:
        messages = sent.messages
        before_tail = self._dialect.before_tail(messages) if tail.text else len(messages)
        now = Sent((*lead, *sent.costs[:before_tail]), len(lead))
        comparison = compared(self._sent, now)
        own = self._dialect.own_marks(messages, self._tools)
        marks = breakpoints(self._dialect, system, messages[:before_tail], now, comparison.stable, own, self._smallest)
        self._sent = now
        state = tail.hot_state
        return Prompt(
            provider=self._dialect.name,
            system=system,
            messages=messages,
            tools=self._tools,
            tail=tail.text,
            est_tokens=total,
            tail_tokens=tail.tokens,
            stable_prefix=comparison.stable,
            rewritten_tokens=comparison.rewritten,
            breakpoints=marks,
            hs_tokens=state.tokens if state else 0,
            hs_bytes=state.bytes if state else 0,
            hs_truncated=state.steps if state else (),
            artifacts=state.entries if state else 0,
            artifact_types=state.types if state else (),
            sys_chars=len(system),
            user_chars=sum(map(len, _user_texts(messages))) + len(tail.text),
            ref_files=len(files.refs) if files else 0,
            bootstrapped=files,
            pruned=sent.pruned,
            recalled=tail.recalled,
            refs=(*sent.refs, *tail.refs, *(files.refs if files else ())),
            changes=(*self._file_changes(files), *self._conversation.take_changes(), *tail.changes),
        )

    def _lead(self, system: str) -> list[Cost] | None:
        """Return the costs of tools and system text; None if they cannot be counted."""
        parts: list[Cost] = []
        for value, more in (({"tools": list(self._tools)}, _TOOLS_TOKENS), ({"system": system}, 0)):
            if any(value.values()):
                found = self._tally.weighed(value)
                if found is None:
                    return None
                parts.append(found._replace(tokens=found.tokens + more))
        return parts if self._tally.tokens(_PROBE) is not None else None

    def _tail_tokens(self, text: str) -> int | None:
        found = self._tally.weighed({"role": "user", "content": [{"type": "text", "text": text}]})
        return None if found is None else found.tokens

    def _default_reserve(self, settings: Any) -> int:
        recalled = settings["memory.artifacts.max_chars"] // _RECALL_CHARS_PER_TOKEN if self._recalls else 0
        return min(self._budget.max_prompt_tokens // 4, self._budget.max_hot_state_tokens + recalled)


def _plain(value: Any, what: str) -> Message:
    """Return a message or a tool as a JSON object. Providers' libraries return objects, which hosts send back."""
    try:
        found = json.loads(json.dumps(value, ensure_ascii=False, default=_dumped))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"invalid {what}: {clip(str(error))}", hint=f"a {what} must be JSON") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"a {what} must be a JSON object, got {type(value).__name__}")
    return found


def _dumped(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_none=True)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _user_texts(messages: Sequence[Message]) -> list[str]:
    """Return what the user wrote in each message, without results of tools."""
    return ["\n".join(texts) if author == "user" else "" for author, texts in map(spoken, messages)]
