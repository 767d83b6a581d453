"""`Meter`: takes note of each model call of a session. What fails is counted, logged once, and left out."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck import __version__
from coatcheck.context.budget import Budget, Violation, rendered
from coatcheck.context.metrics import outlets
from coatcheck.context.metrics.baseline import Baseline, session_rises
from coatcheck.context.metrics.figures import SERIES, Notice, PromptMetrics
from coatcheck.context.metrics.measure import Measured, Scale, costs
from coatcheck.context.metrics.notices import notices_of, ratio_of
from coatcheck.context.metrics.releases import Release
from coatcheck.context.metrics.usage import Usage, usage_of
from coatcheck.context.prefix import Sent, compared
from coatcheck.errors import BudgetExceeded
from coatcheck.redaction import mask
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.context.prompt import Prompt
    from coatcheck.session import Session

_LOG: Final = logging.getLogger("coatcheck")
_WINDOW: Final = 200
"""How many calls of a session are its baseline."""


class Meter:
    """Measures the model calls of one session. May be shared between threads.

    `run` names the run, `tools` are those that every call is sent with, `budget` is what prompts are checked against
    (by default, what the settings say), `release` and `baseline` are what figures are kept under and compared with.
    `failures` counts what could not be measured, kept or sent."""

    def __init__(
        self,
        session: Session,
        *,
        run: str | None = None,
        tools: Sequence[Any] = (),
        budget: Budget | None = None,
        count: TokenCounter = estimate,
        provider: str | None = None,
        model: str | None = None,
        release: str | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self._session = session
        self._settings = session.store.settings
        self._run = run
        self._tools = tuple(tools)
        self._budget = budget or Budget(**self._settings.section("budget"))
        self._count = count
        self._provider = provider
        self._model = model
        self._label: str = release or self._settings["metrics.release"] or f"coatcheck {__version__}"
        self._baseline = baseline
        self._scale = Scale(session, count)
        self._lock = threading.Lock()
        self._before: Sent | None = None
        self._calls: list[PromptMetrics] | None = None
        self._release: Release | None = None
        self._said: set[str] = set()
        self.failures = 0

    def call(
        self,
        prompt: Prompt | BudgetExceeded | None = None,
        *,
        messages: Iterable[Any] = (),
        system: object = None,
        tools: Sequence[Any] | None = None,
        hot_state: Any = None,
        usage: object = None,
        model: str | None = None,
    ) -> PromptMetrics | None:
        """Take note of one model call; its figures, or None where they cannot be told.

        `prompt` is what a `PromptBuilder` answered, or the `BudgetExceeded` with which it refused. Without one: the
        `messages` as the provider gets them, the `system` text where it is not among them, `tools` and `hot_state`.
        `usage` is the provider's answer, or its `usage`: what it counted. Call it once for each model call, in the
        call's span where there is one."""
        with self._lock:
            try:
                call = self._measured(prompt, messages, system, tools, hot_state, usage, model)
            except Exception as error:  # noqa: BLE001 - figures are never worth a run
                self._failed("measuring a prompt", error)
                return None
            if not self._settings["metrics.enabled"]:
                return replace(call, warnings=tuple(notices_of(call, self._settings)))
            return self._kept(self._judged(call))

    def _measured(
        self,
        prompt: Prompt | BudgetExceeded | None,
        messages: Iterable[Any],
        system: object,
        tools: Sequence[Any] | None,
        hot_state: Any,
        usage: object,
        model: str | None,
    ) -> PromptMetrics:
        used = usage_of(usage)
        call = PromptMetrics(
            session=self._session.session_id,
            run=self._run,
            at=round(time.time(), 3),
            release=self._label,
            model=model or self._model,
            budget_tokens=self._budget.max_prompt_tokens,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cached_tokens=used.cached_tokens,
            cache_write_tokens=used.cache_write_tokens,
        )
        if isinstance(prompt, BudgetExceeded):
            return _refused(call, prompt)
        if prompt is not None:
            measured = self._scale.measure(
                messages=prompt.messages, system=prompt.system, tools=prompt.tools, tail=prompt.tail
            )
            return _built(self._with_parts(call, measured, used), prompt)
        tools = self._tools if tools is None else tools
        measured = self._scale.measure(messages=messages, system=system, tools=tools)
        return self._with_state(self._with_parts(call, measured, used), hot_state)

    def _with_parts(self, call: PromptMetrics, measured: Measured, used: Usage) -> PromptMetrics:
        """The call with what its prompt holds, and what of it the call before did not."""
        sent = measured.sent
        standing = compared(self._before, sent)
        self._before = sent
        prices = (self._settings["metrics.price_cached"], self._settings["metrics.price_cache_write"])
        exact = used.cost(*prices)
        return replace(
            call,
            est_tokens=measured.tokens,
            sys_chars=measured.total("sys_chars"),
            user_chars=measured.total("user_chars"),
            ref_files=measured.total("ref_files"),
            tokens_saved=measured.total("saved"),
            tokens_read_back=measured.total("read_back"),
            tokens_stubs=measured.total("stubs"),
            tokens_schemas=measured.total("schemas"),
            tokens_rewritten=standing.rewritten,
            cost=costs(measured, standing.stable.messages, *prices) if exact is None else exact,
            cost_without=costs(measured, standing.stable.messages, *prices, without=True),
        )

    def _with_state(self, call: PromptMetrics, hot_state: Any) -> PromptMetrics:
        """The call with its hot state, and with what does not keep to the budget."""
        violations: tuple[Violation, ...] = self._budget.prompt_tokens(call.est_tokens)
        if hot_state is not None:
            text, entries = rendered(hot_state)
            tokens = None if text is None else counted(self._count, text)
            call = replace(
                call,
                hs_tokens=tokens,
                hs_bytes=0 if text is None else len(text.encode("utf-8", "surrogatepass")),
                hs_steps=tuple(getattr(hot_state, "steps", ())),
                artifacts=entries,
                artifact_types=_types(text),
            )
            violations = (*self._budget.hot_state_tokens(tokens), *self._budget.index_entries(entries), *violations)
        return replace(call, budget_violations=tuple(one.to_record() for one in violations))

    def _judged(self, call: PromptMetrics) -> PromptMetrics:
        """The call with all that is worth a warning. What was worth one in the call before is not logged again."""
        percent = self._settings["metrics.warn_rise_percent"]
        known = self._tried("reading earlier figures", self._earlier) or []
        found = notices_of(call, self._settings, ratio_of(known))
        found += session_rises([*known, call], percent)
        found += self._tried("comparing releases", lambda: self._release_rises(call, percent)) or []
        before = {(one.figure, one.reason) for one in known[-1].warnings} if known else set()
        for one in found:
            if (one.figure, one.reason) not in before:
                _LOG.warning("session %s: %s", mask(ascii(call.session)[:200]), one.message)
        call = replace(call, warnings=tuple(found))
        self._calls = [*known[1 - _WINDOW :], call]
        return call

    def _earlier(self) -> list[PromptMetrics]:
        if self._calls is None:
            self._calls = list(calls_of(self._session, limit=_WINDOW))
        return self._calls

    def _release_rises(self, call: PromptMetrics, percent: float) -> list[Notice]:
        if self._release is None:
            file = self._settings["metrics.baseline"]
            before = Baseline.read(file) if self._baseline is None and file is not None else self._baseline
            self._release = Release(self._session.store, self._label, before)
        return self._release.rises(call, percent)

    def _kept(self, call: PromptMetrics) -> PromptMetrics:
        """Keep a call and send it on; each on its own, so that one that fails takes nothing from the others."""
        keep = self._settings["metrics.keep"]
        body = call.to_json().encode()
        call = call.numbered(self._tried("keeping figures", lambda: self._session.record(SERIES, body, keep=keep)))
        file, logger = self._settings["metrics.file"], self._settings["metrics.logger"]
        if file is not None:
            self._tried("writing figures to a file", lambda: outlets.append(file, call))
        if logger is not None:
            self._tried("logging figures", lambda: outlets.log(logger, call))
        if self._settings["metrics.opentelemetry"]:
            self._tried("sending figures to OpenTelemetry", lambda: self._sent(call))
        return call

    def _sent(self, call: PromptMetrics) -> None:
        from coatcheck.context.metrics.telemetry import telemetry  # only where somebody measures

        found = telemetry()
        if found is not None:
            found.record(call, self._provider)

    def _tried(self, doing: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - as above: a full disk or a host's exporter
            self._failed(doing, error)
            return None

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        if doing not in self._said:
            self._said.add(doing)
            _LOG.warning("%s failed, the agent goes on without: %s", doing, mask(f"{type(error).__name__}: {error}"))


def calls_of(session: Session, *, limit: int | None = None) -> Iterator[PromptMetrics]:
    """The figures that are kept of a session, oldest first; with `limit`, of its newest calls. What is damaged is
    passed over."""
    for record in reversed(session.records(SERIES, newest=True, limit=limit)):
        try:
            found = PromptMetrics.from_json(record.body)
        except ValueError:
            continue
        yield replace(found, session=session.session_id).numbered(record.seq, record.at)


def _built(call: PromptMetrics, prompt: Prompt) -> PromptMetrics:
    """The call with what the builder of its prompt knows better: what it counted, and what it made of the state."""
    return replace(
        call,
        hs_tokens=prompt.hs_tokens,
        hs_bytes=prompt.hs_bytes,
        hs_steps=tuple(prompt.hs_truncated),
        artifacts=prompt.artifacts,
        artifact_types=_counts(prompt.artifact_types),
        sys_chars=prompt.sys_chars,
        user_chars=prompt.user_chars,
        est_tokens=prompt.est_tokens,
        ref_files=prompt.ref_files,
        tokens_rewritten=prompt.rewritten_tokens,
        budget_violations=tuple(one.to_record() for one in prompt.violations),
    )


def _refused(call: PromptMetrics, error: BudgetExceeded) -> PromptMetrics:
    """A call that was not made: nothing was sent, and the prompt is as large as its violation says."""
    tokens = next((one.actual for one in error.violations if one.field == "max_prompt_tokens"), None)
    violations = tuple(one.to_record() for one in error.violations)
    return replace(call, est_tokens=None if tokens is None else int(tokens), budget_violations=violations)


def _types(text: str | None) -> Mapping[str, int]:
    """How many entries of each type an index has."""
    try:
        entries = json.loads(text or "{}").get("artifact_index", ())
        return _counts([str(one.get("type")) for one in entries])
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def _counts(names: Sequence[str]) -> Mapping[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
