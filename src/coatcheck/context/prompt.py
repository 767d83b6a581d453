"""`PromptBuilder`: the parts of a prompt, within a budget, as a conversation that only grows.

Tools, system text and bootstrap files come first, then the conversation. Large results are replaced
by stubs when they first appear; the hot state, retrieved chunks and recall are appended when they
changed. What is sent is what the host keeps (`Prompt.history`), so the next prompt begins with this
one, even after a restart: providers charge for anything else, and newer models refuse it. Old
results are pruned only where the caller allows rewriting. A prompt that does not fit the budget, or
cannot be counted, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coatcheck._toolkit import Purpose, function_of, known_as
from coatcheck.checks import seconds
from coatcheck.context._bootstrap import Bootstrapped, bootstrap
from coatcheck.context.appended import (
    STARTS,
    Additions,
    Recalled,
    TurnParts,
    key_of,
    kind_of,
    last_of_each,
)
from coatcheck.context.budget import Budget, Violation, listed, log_violations, refusal
from coatcheck.context.conversation import Clearing, Conversation, SentMessages
from coatcheck.errors import BudgetExceeded, InvalidArgument, LimitExceeded
from coatcheck.externalize import Decision, Policy, configured
from coatcheck.externalize.policy import READ_TOOL
from coatcheck.ids import clip
from coatcheck.messages import Dialect, Message, dialect, for_provider
from coatcheck.messages.cache import (
    SMALLEST,
    Breakpoint,
    Comparison,
    Sent,
    StablePrefix,
    breakpoints,
    compared,
    without_marks,
)
from coatcheck.messages.content import spoken
from coatcheck.messages.cost import Cost, Tally, referenced_documents
from coatcheck.messages.pairing import in_context
from coatcheck.messages.paths import blocks_of
from coatcheck.models import model as model_facts
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.prune import Pruned

if TYPE_CHECKING:
    from coatcheck.session import Session

_UNSET: Final[Any] = object()
_REQUEST_TOKENS: Final = 3
_TOOLS_TOKENS: Final = 12
_PARTS_SHARE: Final = 4  # the part (1/4) of a budget that pruning leaves for what is appended
_LIST_TOOL: Final = "list_artifacts"
_PROBE: Final = "A counter that cannot count this can count nothing."
_CLEARS: Final = "context-management-2025-06-27"
_ADDS: Final = "mid-conversation-tool-changes-2026-07-01"
_UNCOUNTABLE: Final = (
    "a document that is only referenced, by URL or id, cannot be counted: send its content, "
    "or set document_tokens"
)
_WAYS_OUT: Final = (
    "use a larger budget (Budget.for_model), allow pruning (rewrite=True), "
    "or let the provider clear old results (clearing=Clearing())"
)
_NOT_KEPT: Final = (
    "{:,} tokens of the previous prompt are not sent again as they were: "
    "pass prompt.history with what is new"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt within its budget, with its figures.

    `history` are the messages as sent, for the host to keep: the next call of `build` takes them
    with the answer and what came after it. `messages` are the same with the host's own cache
    breakpoints. `request()` returns everything together. `appended` are the texts that were
    appended now: hot state, chunks, recall.

    `stable_prefix` is the beginning that it shares with the builder's previous prompt,
    `rewritten_tokens` the tokens of that prompt that were not sent again in the same form, and
    `cleared_tokens` an estimate of what the provider clears; `est_tokens` excludes them. `changes`
    has one line for each thing that was shortened, stored or left out now, and `decisions` why each
    new result left or stayed. `betas` are the provider's names for the features in use."""

    provider: str
    system: str
    messages: list[Message]
    history: list[Message]
    tools: tuple[Any, ...]
    appended: tuple[str, ...]
    est_tokens: int
    budget_tokens: int
    appended_tokens: int
    stable_prefix: StablePrefix
    rewritten_tokens: int
    breakpoints: tuple[Breakpoint, ...]
    cleared_tokens: int = 0
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
    context_management: Mapping[str, Any] | None = None
    betas: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def request(self, *, cache_control: bool = True) -> dict[str, Any]:
        """Return the arguments of the provider's call that contain this prompt: `tools`, `system`
        or `instructions`, and `messages` or `input`. For Anthropic, blocks at a breakpoint have
        `cache_control`; with a `Clearing` there is `context_management`. With `betas`, pass the
        request to `client.beta.messages.create`."""
        marks = self.breakpoints if cache_control else ()
        found = dialect(self.provider).request(self.system, self.messages, self.tools, marks)
        if self.context_management is not None:
            found["context_management"] = dict(self.context_management)
        return found | ({"betas": list(self.betas)} if self.betas else {})


@dataclass
class _Draft:
    """A prompt that is being built: the conversation as it is sent so far, the parts to append,
    the tokens of everything else, and the violations of the budget. `cleared` are the tokens that
    the provider clears."""

    sent: SentMessages
    parts: TurnParts
    fixed: int
    limit: int
    cleared: int
    violations: list[Violation]

    @property
    def tokens(self) -> int:
        return self.fixed + self.sent.tokens - self.cleared


class PromptBuilder:
    """Builds the prompts of one conversation in a session. It needs no memory: another builder with
    the same arguments makes the same prompt from the same history.

    `system` and `files` (see `bootstrap`, read once) come first. `tools` are the toolkit's, or in
    the provider's format; they must stay the same for a conversation. `budget` sets the limits; by
    default those of the settings, with the prompt's from the window of `model` or `window` (see
    `Budget.for_model`). `policy` says which results are externalized (None: none are). `recall`
    appends artifacts that fit the last message, by default if the settings say so.

    `rewrite` allows replacing old results where that pays off, and pruning where a conversation
    exceeds the budget; `keep_turns` is the number of newest turns that both spare. Without
    `rewrite`, a prompt over the budget is refused. `clearing` lets Anthropic clear old results.
    `defer_tools` hides our tools from the model until there is something to read with them, so that
    a conversation without stubs does not pay for them; by default where `model` is known to allow
    it and there are other tools. `document_tokens` is the count of a document that a message only
    references by URL or id; without it such a message cannot be counted, and there is no prompt."""

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
        model: str | None = None,
        window: int | None = None,
        policy: Policy | None = _UNSET,
        recall: bool | None = None,
        count: TokenCounter = estimate,
        document_tokens: int | None = None,
        rewrite: bool = False,
        keep_turns: int = 3,
        clearing: Clearing | None = None,
        defer_tools: bool | None = None,
        smallest_cache: int = SMALLEST,
        read_tool: str | None = _UNSET,
    ) -> None:
        settings = session.store.settings
        self._session = session
        self._dialect: Dialect = dialect(provider)
        _check_abilities(self._dialect, clearing, defer_tools)
        self._system = system
        self._files = tuple(files)
        self._root = root
        self._tools = tuple(_plain(self._dialect.tool(tool), "tool") for tool in tools)
        known = dict(filter(None, map(known_as, self._tools)))
        if read_tool is _UNSET:
            read_tool = _default_read_tool(self._tools, known, settings["policy.read_tool"])
        self._list_tool = None
        if read_tool is not None:
            self._list_tool = known.get("list", None if self._tools else _LIST_TOOL)
        if policy is _UNSET:
            policy = replace(configured(settings), read_tool=read_tool)
        elif policy is not None and _names_another(policy, known, read_tool):
            policy = replace(policy, read_tool=read_tool)
        self._policy = policy or replace(configured(settings), read_tool=read_tool)
        self._budget = _default_budget(settings, model, window) if budget is None else budget
        self._recalls = settings["memory.artifacts.enabled"] if recall is None else recall
        self._prices = self._policy.prices or model_facts(model or self._policy.model).prices
        self._deferred = self._deferring(known.values(), model, defer_tools)
        self._addition = self._dialect.adding_tools(self._deferred) if self._deferred else None
        self._count = count
        self._tally = Tally(count, document_tokens=document_tokens)
        self._later_tokens = self._tokens_of_deferred()
        self._conversation = Conversation(
            session,
            self._dialect,
            self._tally,
            policy=policy,
            keep_turns=keep_turns,
            read_tool=read_tool,
            redact=self._policy.redact,
            clearing=clearing,
            own_tools=tuple(known.values()),
            prices=self._prices,
            may_rewrite=rewrite,
        )
        self._rewrites = rewrite
        self._management = (
            None if clearing is None else {"edits": [clearing.edit(sorted(known.values()))]}
        )
        self._smallest = smallest_cache
        self._read_tool = read_tool
        self._bootstrapped: Bootstrapped | None = None
        self._file_changes: tuple[str, ...] = ()
        self._sent: Sent | None = None  # for the figures alone
        self._last: Message | None = None

    def build(
        self,
        history: Sequence[Mapping[str, Any]],
        *,
        hot_state: Any = None,
        chunks: Iterable[object] = (),
        message: str | None = None,
        idle_seconds: float | None = None,
    ) -> Prompt:
        """Build the prompt for the next model call. Raises `BudgetExceeded` with every violation if
        it does not fit the budget, or if a part cannot be counted.

        `history` is the conversation in the provider's format: `history` of the previous prompt,
        the answer, and what came after it. Only what is after the last answer is judged or appended
        to; the rest was sent and stays. Messages of pi and OpenClaw, and lines of their session
        files, are converted; lines of Claude Code are accepted for Anthropic. `hot_state` is a
        `HotState`, `chunks` are retrieved texts, search hits, or mappings with a `text`. `message`
        is the query for recall, by default the last message of the user. `idle_seconds` is the time
        since the last call: if the provider's cache has expired, rewriting costs less. The given
        messages are not changed."""
        seconds(idle_seconds, "idle_seconds", optional=True)
        given, costs = self._weighed(for_provider(history, self._dialect.name))
        files = self._read_files()
        system = "\n\n".join(part for part in (self._system, files.text if files else "") if part)
        key = key_of(self._session.store)
        lead = self._lead(system)
        parts = TurnParts(
            session=self._session,
            budget=self._budget,
            count=self._count,
            weigh=self._text_tokens,
            key=key,
            hot_state=hot_state,
            chunks=listed(chunks),
            message=self._question(key, given) if message is None else message,
            policy=self._policy,
            recalls=self._recalls,
            read_tool=self._read_tool,
            list_tool=self._list_tool,
        )
        draft = self._drafted(given, costs, lead, parts)
        takes_text = self._dialect.takes_text(draft.sent.messages)
        if self._rewrites and not draft.violations:
            is_cold = idle_seconds is not None and idle_seconds > self._prices.cache_seconds
            self._rewrite(draft, is_cold=is_cold)
        # Parts are fitted after a violation too, so that theirs are reported with it.
        more = self._appended(draft, files) if takes_text else Additions()
        if not draft.violations:
            draft.violations += self._budget.prompt_tokens(draft.tokens)
        fixed = self._budget.check(hot_state=hot_state, chunks=parts.chunks, count=self._count)
        found = tuple(dict.fromkeys(draft.violations))
        # Violations that were fixed are logged too.
        log_violations(dict.fromkeys((*fixed, *found)), self._session.session_id)
        if found or lead is None:
            raise refusal(found, hint=None if self._rewrites else _WAYS_OUT)
        return self._prompt(system, draft, more, lead, files)

    def _read_files(self) -> Bootstrapped | None:
        """Return the bootstrap files as the first prompt had them: a changed one would change the
        whole prefix."""
        if self._files and self._bootstrapped is None:
            redact, read_tool = self._policy.redact, self._read_tool
            done = bootstrap(
                self._session, self._files, root=self._root, read_tool=read_tool, redact=redact
            )
            self._bootstrapped = done
            self._file_changes = tuple(
                f"bootstrap file {clip(one.name)} of {one.ref.size_bytes:,} bytes "
                f"became {one.ref.pointer}"
                for one in done.files
                if one.status == "reference" and one.ref is not None
            )
        return self._bootstrapped

    def _weighed(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Cost | None]]:
        """Return the messages as JSON objects, and their costs."""
        given: list[Message] = []
        costs: list[Cost | None] = []
        plain = [
            message if type(message) is dict else _plain(message, "message") for message in messages
        ]
        for message, one, shown in zip(
            messages, plain, in_context(plain, self._dialect.format), strict=True
        ):
            try:
                cost = self._tally.weighed(shown)
            except (TypeError, ValueError, RecursionError):
                one = _plain(message, "message")
                cost = self._tally.weighed(one)
            given.append(one)
            costs.append(cost if self._addition is None else self._with_later_tools(one, cost))
        return given, costs

    def _with_later_tools(self, message: Message, cost: Cost | None) -> Cost | None:
        """Return the cost of a message, including the tools if it adds them."""
        if cost is None or message != self._addition:
            return cost
        return cost._replace(tokens=cost.tokens + self._later_tokens)

    def _drafted(
        self,
        given: list[Message],
        costs: list[Cost | None],
        lead: list[Cost] | None,
        parts: TurnParts,
    ) -> _Draft:
        """Return the conversation as it is sent, before anything is rewritten or appended. What
        cannot be counted is a violation."""
        fixed = sum(one.tokens for one in lead or ()) + _REQUEST_TOKENS
        violations: list[Violation] = []
        if lead is None:
            violations += self._budget.prompt_tokens(None)
        try:
            tool_tokens = 0 if self._addition in given else self._later_tokens
            sent = self._conversation.grown(
                given, costs, parts.key, fixed=fixed, tool_tokens=tool_tokens
            )
        except LimitExceeded:
            sent = SentMessages([], [])
            is_document = any(map(referenced_documents, given))  # else the counter failed
            for one in self._budget.prompt_tokens(None):
                violations.append(replace(one, message=_UNCOUNTABLE) if is_document else one)
        parts = replace(parts, last=last_of_each(parts.key, sent.messages))
        limit, cleared = self._budget.max_prompt_tokens, self._conversation.clearable(sent)
        return _Draft(sent, parts, fixed, limit, cleared, violations)

    def _rewrite(self, draft: _Draft, *, is_cold: bool) -> None:
        """Replace old results where that pays off, and prune the conversation if it and the parts
        do not fit. Then the parts may have to be appended again, because the pruned conversation
        does not have them."""
        self._replace_sent(
            draft, self._conversation.batched(draft.sent, draft.fixed, is_cold=is_cold)
        )
        room = draft.limit - draft.fixed + draft.cleared
        parts = draft.parts
        try:
            if draft.sent.tokens + parts.whole().tokens > room:
                whole = replace(parts, last={}).whole().tokens
                reserve = min(whole, room // _PARTS_SHARE)
                smaller = self._conversation.rewritten(draft.sent, room - reserve, parts.key)
                self._replace_sent(draft, smaller)
        except BudgetExceeded:
            pass  # fitting the parts reports it
        except LimitExceeded as error:
            message = f"the conversation does not fit: {error.message}"
            needed = draft.limit - room + draft.sent.tokens
            draft.violations.append(Violation("max_prompt_tokens", draft.limit, needed, message))
        draft.cleared = self._conversation.clearable(draft.sent) if draft.cleared else 0

    def _replace_sent(self, draft: _Draft, sent: SentMessages) -> None:
        draft.sent = sent
        draft.parts = replace(draft.parts, last=last_of_each(draft.parts.key, sent.messages))

    def _appended(self, draft: _Draft, files: Bootstrapped | None) -> Additions:
        """Append the parts that fit, and our tools if there is something to read with them."""
        room = draft.limit if draft.violations else draft.limit - draft.tokens
        more = self._fitted(draft, room) if room >= 0 else Additions()
        if not draft.violations:
            self._append_texts(draft, more.texts)
        if self._deferred and not draft.violations:
            is_needed = bool(more.texts or (files and files.refs))
            draft.sent = self._with_tools(draft.sent, is_needed=is_needed)
        return more

    def _fitted(self, draft: _Draft, room: int) -> Additions:
        try:
            found = draft.parts.fitted(room)
        except BudgetExceeded as error:
            draft.violations += error.violations
            return Additions()
        if found is None:
            limit, needed = draft.limit, draft.parts.whole().tokens
            message = (
                f"what is appended does not fit: {max(0, room):,} of {limit:,} tokens are left"
            )
            draft.violations.append(
                Violation("max_prompt_tokens", limit, limit - room + needed, message)
            )
            return Additions()
        return found

    def _append_texts(self, draft: _Draft, texts: Sequence[str]) -> None:
        if not texts:
            return
        sent = draft.sent
        messages = self._dialect.with_texts(sent.messages, texts)
        known = dict(zip(map(id, sent.messages), sent.costs, strict=True))
        costs = []
        for one, shown in zip(messages, in_context(messages, self._dialect.format), strict=True):
            cost = known.get(id(one)) or self._tally.weighed(shown)
            if cost is not None:
                costs.append(cost)
        if len(costs) < len(messages):
            draft.violations += self._budget.prompt_tokens(None)
        draft.sent = replace(sent, messages=messages, costs=costs)

    def _deferring(
        self, own: Iterable[str], model: str | None, wanted: bool | None
    ) -> tuple[str, ...]:
        """Return the names of our tools that are added to a conversation later, and mark them in
        the tools."""
        names = tuple(own)
        # The provider refuses a request with deferred tools alone.
        others = len(self._tools) > len(names)
        if wanted is None:
            wanted = model_facts(model).adds_tools and others
        if not wanted or not names or not others or self._dialect.deferred({}) is None:
            return ()
        self._tools = tuple(
            dict(self._dialect.deferred(one) or one) if one.get("name") in names else one
            for one in self._tools
        )
        return names

    def _tokens_of_deferred(self) -> int:
        """Return the tokens of our tools if they are added later, else 0."""
        if not self._deferred:
            return 0
        later = [one for one in self._tools if one.get("name") in self._deferred]
        cost = self._tally.weighed({"tools": later})
        return 0 if cost is None else cost.tokens

    def _with_tools(self, sent: SentMessages, *, is_needed: bool) -> SentMessages:
        """Return the messages with our tools added, if there is something to read with them for the
        first time."""
        messages, added = sent.messages, self._addition
        is_needed = is_needed or bool(sent.refs) or any(map(self._conversation.has_stub, messages))
        if added is None or added in messages or not is_needed:
            return sent
        cost = self._with_later_tools(added, self._tally.weighed(added))
        if cost is None:
            return sent
        end = len(messages) - self._dialect.begun(messages)
        costs = [*sent.costs[:end], cost, *sent.costs[end:]]
        return replace(sent, messages=[*messages[:end], added, *messages[end:]], costs=costs)

    def _prompt(
        self,
        system: str,
        draft: _Draft,
        more: Additions,
        lead: list[Cost],
        files: Bootstrapped | None,
    ) -> Prompt:
        sent, cleared = draft.sent, draft.cleared
        messages = sent.messages
        now = Sent((*lead, *sent.costs), len(lead))
        comparison = self._compared(now, messages)
        own = self._dialect.own_marks(messages, self._tools)
        state, file_changes = more.hot_state, self._file_changes
        self._sent, self._last, self._file_changes = now, messages[-1] if messages else None, ()
        lost = []
        if comparison.rewritten and not self._rewrites:
            lost.append(_NOT_KEPT.format(comparison.rewritten))
        user_chars = 0
        for author, texts in map(spoken, messages):
            if author == "user":
                user_chars += sum(map(len, texts))
        return Prompt(
            provider=self._dialect.name,
            system=system,
            messages=messages,
            history=list(map(without_marks, messages)) if own else list(messages),
            tools=self._tools,
            appended=more.texts,
            est_tokens=sum(one.tokens for one in now.parts) + _REQUEST_TOKENS - cleared,
            budget_tokens=self._budget.max_prompt_tokens,
            appended_tokens=more.tokens,
            stable_prefix=comparison.stable,
            rewritten_tokens=comparison.rewritten,
            breakpoints=breakpoints(self._dialect, system, messages, now, own, self._smallest),
            cleared_tokens=cleared,
            hs_tokens=state.tokens if state else 0,
            hs_bytes=state.bytes if state else 0,
            hs_truncated=state.steps if state else (),
            artifacts=state.entries if state else 0,
            artifact_types=state.types if state else (),
            sys_chars=len(system),
            user_chars=user_chars,
            ref_files=len(files.refs) if files else 0,
            bootstrapped=files,
            pruned=sent.pruned,
            recalled=more.recalled,
            refs=(*sent.refs, *more.refs, *(files.refs if files else ())),
            changes=(*file_changes, *sent.changes, *more.changes, *lost),
            context_management=self._management,
            betas=(*([_CLEARS] if self._management else ()), *([_ADDS] if self._deferred else ())),
            decisions=sent.decisions,
        )

    def _compared(self, now: Sent, messages: Sequence[Message]) -> Comparison:
        """Compare a prompt with the previous one. Blocks after those of its last message only add
        to it."""
        found, before = compared(self._sent, now), self._sent
        last = self._last
        if not found.rewritten or before is None or last is None:
            return found
        at = found.stable.messages
        if at != len(before.parts) - before.lead - 1 or at >= len(messages):
            return found
        blocks = blocks_of(last)
        same_blocks = blocks_of(messages[at])[: len(blocks)]
        if without_marks(same_blocks) == without_marks(blocks):
            return replace(found, rewritten=0)
        return found

    def _lead(self, system: str) -> list[Cost] | None:
        """Return the costs of tools and system text; None if they cannot be counted."""
        parts: list[Cost] = []
        for value, more in (({"tools": list(self._tools)}, _TOOLS_TOKENS), ({"system": system}, 0)):
            if any(value.values()):
                found = self._tally.weighed(value)
                if found is None:
                    return None
                later = self._later_tokens if "tools" in value else 0
                parts.append(found._replace(tokens=found.tokens + more - later))
        return parts if self._tally.tokens(_PROBE) is not None else None

    def _text_tokens(self, text: str) -> int | None:
        found = self._tally.weighed({"role": "user", "content": [{"type": "text", "text": text}]})
        return None if found is None else found.tokens

    def _question(self, key: bytes, messages: Sequence[Message]) -> str:
        """Return the last message of the user, without texts of ours."""
        for author, texts in map(spoken, reversed(messages)):
            if author != "user":
                continue
            own = [one for one in texts if not (one.startswith(STARTS) and kind_of(key, one))]
            found = "\n".join(own)
            if found.strip():
                return found
        return ""


def _check_abilities(dialect: Dialect, clearing: Clearing | None, defer_tools: bool | None) -> None:
    """Raise `InvalidArgument` for an option that the provider does not have."""
    if clearing is not None and dialect.name != "anthropic":
        raise InvalidArgument(
            f"clearing is Anthropic's, but the provider is {dialect.name}",
            hint="use rewrite=True",
        )
    if defer_tools and dialect.deferred({}) is None:
        raise InvalidArgument(
            f"tools cannot be added later with {dialect.name}",
            hint="leave out defer_tools",
        )


def _default_read_tool(
    tools: Sequence[Message], own: Mapping[Purpose, str], configured_name: str | None
) -> str | None:
    """Return the name of the tool that reads artifacts: ours as the host names it, else the
    configured one; None if the prompt has tools, but not this one."""
    name = own.get("get", configured_name)
    if not tools or name in [function_of(tool).get("name") for tool in tools]:
        return name
    return None


def _names_another(policy: Policy, own: Mapping[Purpose, str], read_tool: str | None) -> bool:
    """Whether stubs of this policy would name a tool that the prompt has under another name, or
    not at all."""
    if policy.read_tool is None:
        return False
    return "get" in own or (read_tool is None and policy.read_tool == READ_TOOL)


def _default_budget(settings: Any, model: str | None, window: int | None) -> Budget:
    """Return the limits in the settings. The prompt's limit comes from the window, unless the
    settings have one."""
    limits = settings.section("budget")
    is_set = settings.origin("budget.max_prompt_tokens").source != "default"
    if is_set and model is None and window is None:
        return Budget(**limits)
    del limits["max_prompt_tokens"]
    return Budget.for_model(model, window=window, **limits)


def _plain(value: Any, what: str) -> Message:
    """Return a message or a tool as a JSON object. Providers' libraries return objects, which hosts
    send back."""
    try:
        found = json.loads(json.dumps(value, ensure_ascii=False, default=_dumped))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"invalid {what}: {clip(str(error))}", hint=f"a {what} must be JSON"
        ) from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"a {what} must be a JSON object, got {type(value).__name__}")
    return found


def _dumped(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_none=True)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")
