"""Metrics of model calls: the size of each prompt, what stubs saved, what that cost, and warnings
when figures rise.

    meter = Meter(session, tools=toolkit(session))
    …
    answer = client.chat.completions.create(messages=messages, tools=…)
    meter.call(messages=messages, usage=answer.usage)

The figures are measured from the prompt itself, stored in the catalog, and sent where the settings
say. Nothing here breaks an agent: failures are counted, logged once, and skipped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coatcheck import __version__
from coatcheck.context.baselines import (
    Baseline,
    Release,
    ratio_to_estimate,
    read_calls,
    session_rises,
)
from coatcheck.context.budget import Budget, rendered
from coatcheck.context.figures import Notice, PromptMetrics
from coatcheck.context.scale import Part, Scale, cost_of
from coatcheck.errors import BudgetExceeded
from coatcheck.messages.cache import Sent, compared
from coatcheck.messages.cost import Cost, Usage, usage_of
from coatcheck.redaction import mask
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.config import Settings
    from coatcheck.context.prompt import Prompt
    from coatcheck.executor import ToolOutcome
    from coatcheck.session import Session

__all__ = ["Baseline", "Meter", "Notice", "PromptMetrics", "Usage", "calls_of", "usage_of"]

SERIES: Final = "metrics"
"""The series of a session that contains its calls."""
_LOG: Final = logging.getLogger("coatcheck")
_WINDOW: Final = 200  # calls in the baseline of a session
_BUILT: Final = (
    "hs_tokens", "hs_bytes", "artifacts", "sys_chars", "user_chars", "est_tokens", "ref_files",
    "budget_tokens",
)  # fmt: skip
_NEARLY_FULL: Final = 0.75  # the part of a budget from which a prompt is worth a warning
_THRESHOLDS: Final = (
    ("hs_tokens", "metrics.warn_hot_state_tokens", "a hot state of {} tokens"),
    ("artifacts", "metrics.warn_index_entries", "an index of {} artifacts"),
    ("est_tokens", "metrics.warn_prompt_tokens", "a prompt of {} tokens"),
)


def _notices(call: PromptMetrics, settings: Settings, ratio: float = 1.0) -> list[Notice]:
    """Return the warnings about one call by itself. The size of a prompt is the provider's count;
    without one it is the estimate times `ratio`, the provider's count per estimated token in
    earlier calls."""
    found = []
    for name, key, words in _THRESHOLDS:
        value: int | None = getattr(call, name)
        threshold: int = settings[key]
        if name == "est_tokens":
            value = _likely_tokens(call, ratio)
            if call.budget_tokens and settings.origin(key).source == "default":
                threshold = max(threshold, int(call.budget_tokens * _NEARLY_FULL))
        if value is not None and value > threshold:
            message = f"{words.format(f'{value:,}')} is over {threshold:,}"
            found.append(Notice(name, "over", threshold, value, message))
    found += [
        Notice(one["field"], "violation", one["limit"], one["actual"], one["message"])
        for one in call.budget_violations
    ]
    return found


def _likely_tokens(call: PromptMetrics, ratio: float) -> int | None:
    """Return the size of a prompt as the provider counted it, or as it probably would."""
    if call.est_tokens is None or call.input_tokens is None:
        return None if call.est_tokens is None else round(call.est_tokens * ratio)
    return call.input_tokens


class Meter:
    """Measures the model calls of one session. Thread-safe.

    `run` names the run, `tools` are sent with every call, `budget` (by default from the settings)
    is what prompts are checked against, `release` is the label of the figures, and `baseline` what
    they are compared with. `failures` is the number of steps that failed: measuring, storing or
    sending."""

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
        self._label: str = (
            release or self._settings["metrics.release"] or f"coatcheck {__version__}"
        )
        self._baseline = baseline
        self._scale = Scale(session, count)
        self._lock = threading.Lock()
        self._before: Sent | None = None
        self._calls: list[PromptMetrics] | None = None
        self._release: Release | None = None
        self._logged: set[str] = set()
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
        outcomes: Iterable[ToolOutcome] = (),
    ) -> PromptMetrics | None:
        """Record one model call. Return its figures, or None if they cannot be measured.

        `prompt` is the result of a `PromptBuilder`, or the `BudgetExceeded` that it raised. Without
        it, pass the `messages` as the provider gets them, the `system` text if it is separate,
        `tools` and `hot_state`. `usage` is the provider's answer or its `usage`, `outcomes` are
        those of the tool calls before it. Call this once for each model call, inside the call's
        span if there is one."""
        with self._lock:
            try:
                used = usage_of(usage)
                call = PromptMetrics(
                    session=self._session.session_id,
                    run=self._run,
                    at=round(time.time(), 3),
                    release=self._label,
                    model=model or self._model,
                    budget_tokens=self._budget.max_prompt_tokens,
                    **asdict(used),
                )
                if isinstance(prompt, BudgetExceeded):
                    call = _refused(call, prompt)
                elif prompt is not None:
                    parts = self._scale.measure(prompt.messages, prompt.system, prompt.tools)
                    call = _built(self._with_parts(call, parts, used), prompt)
                else:
                    parts = self._scale.measure(
                        messages, system, self._tools if tools is None else tools
                    )
                    call = self._with_state(self._with_parts(call, parts, used), hot_state)
                spent = [outcome.duration for outcome in outcomes]
                call = replace(call, tool_calls=len(spent), tool_seconds=round(sum(spent), 3))
            except Exception as error:  # noqa: BLE001 - figures must never stop a run
                self._failed("measuring a prompt", error)
                return None
            if not self._settings["metrics.enabled"]:
                return replace(call, warnings=tuple(_notices(call, self._settings)))
            return self._kept(self._judged(call, was_logged=isinstance(prompt, BudgetExceeded)))

    def _with_parts(self, call: PromptMetrics, parts: list[Part], used: Usage) -> PromptMetrics:
        """Return the call with the contents of its prompt, compared with the previous call."""
        sent = Sent(tuple(Cost(part.digest, part.tokens or 0) for part in parts), 0)
        comparison = compared(self._before, sent)
        self._before = sent
        prices = (
            self._settings["metrics.price_cached"],
            self._settings["metrics.price_cache_write"],
        )
        exact, stable = used.cost(*prices), comparison.stable.messages
        tokens = [part.tokens for part in parts if part.tokens is not None]
        sums: dict[str, Any] = sum((part.figures for part in parts), Counter())
        return replace(
            call,
            est_tokens=sum(tokens) if len(tokens) == len(parts) else None,
            tokens_rewritten=comparison.rewritten,
            cost=cost_of(parts, stable, prices, "tokens") if exact is None else exact,
            cost_without=cost_of(parts, stable, prices, "tokens_without"),
            **sums,
        )

    def _with_state(self, call: PromptMetrics, hot_state: Any) -> PromptMetrics:
        """Return the call with its hot state and the violations of the budget."""
        violations = self._budget.check(hot_state=hot_state, count=self._count)
        violations += self._budget.prompt_tokens(call.est_tokens)
        call = replace(call, budget_violations=tuple(one.to_record() for one in violations))
        if hot_state is None:
            return call
        text, types = rendered(hot_state)
        return replace(
            call,
            hs_tokens=None if text is None else counted(self._count, text),
            hs_bytes=0 if text is None else len(text.encode("utf-8", "surrogatepass")),
            hs_steps=tuple(getattr(hot_state, "steps", ())),
            artifacts=None if types is None else len(types),
            artifact_types=dict(Counter(sorted(types or ()))),
        )

    def _judged(self, call: PromptMetrics, *, was_logged: bool = False) -> PromptMetrics:
        """Return the call with its warnings, and log the new ones. Warnings of the previous call
        are not logged again, nor are violations that were logged when the prompt was refused."""
        percent = self._settings["metrics.warn_rise_percent"]
        known = self._tried("reading earlier figures", self._earlier) or []
        found = _notices(call, self._settings, ratio_to_estimate(known))
        found += session_rises([*known, call], percent)
        found += self._tried("comparing releases", lambda: self._release_rises(call, percent)) or []
        before = {(one.figure, one.reason) for one in known[-1].warnings} if known else set()
        for one in found:
            if (one.figure, one.reason) not in before and not (
                was_logged and one.reason == "violation"
            ):
                _LOG.warning("session %s: %s", mask(ascii(call.session))[:200], one.message)
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
            before = (
                Baseline.read(file)
                if self._baseline is None and file is not None
                else self._baseline
            )
            self._release = Release(self._session.store, self._label, before)
        return self._release.rises(call, percent)

    def _kept(self, call: PromptMetrics) -> PromptMetrics:
        """Store a call and send it on. Each step may fail without affecting the others."""
        keep = self._settings["metrics.keep"]
        body = call.to_json().encode()
        number = self._tried(
            "storing figures", lambda: self._session.record(SERIES, body, keep=keep)
        )
        call = replace(call, turn=number)
        file, logger = self._settings["metrics.file"], self._settings["metrics.logger"]
        if file is not None:
            self._tried("writing figures to a file", lambda: _append(file, call))
        if logger is not None:
            self._tried(
                "logging figures", lambda: logging.getLogger(logger).info("%s", call.to_json())
            )
        if self._settings["metrics.opentelemetry"]:
            self._tried("sending figures to OpenTelemetry", lambda: self._sent(call))
        return call

    def _sent(self, call: PromptMetrics) -> None:
        from coatcheck.context.telemetry import (
            telemetry,
        )  # only imported if there are calls to send

        found = telemetry()
        if found is not None:
            found.record(call, self._provider)

    def _tried(self, doing: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - for example a full disk, or the host's exporter
            self._failed(doing, error)
            return None

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        if doing not in self._logged:
            self._logged.add(doing)
            _LOG.warning(
                "%s failed, the agent is not affected: %s",
                doing,
                mask(f"{type(error).__name__}: {error}"),
            )


def calls_of(session: Session, *, limit: int | None = None) -> Iterator[PromptMetrics]:
    """Yield the stored figures of a session, oldest first; with `limit`, of its newest calls.
    Damaged records are skipped."""
    for record in reversed(session.records(SERIES, newest=True, limit=limit)):
        for found in read_calls([record]):
            yield replace(found, session=session.session_id, turn=record.seq, at=record.at)


def _append(path: str, call: PromptMetrics) -> None:
    """Append one line in one write, so that lines of several processes do not mix. Only the owner
    can read the file."""
    with open(
        Path(path).expanduser(), "ab", buffering=0, opener=partial(os.open, mode=0o600)
    ) as target:
        target.write(call.to_json().encode() + b"\n")


def _built(call: PromptMetrics, prompt: Prompt) -> PromptMetrics:
    """Return the call with the figures that the builder of its prompt knows more precisely."""
    left = [one for one in prompt.decisions if one.leaves]
    return replace(
        call,
        hs_steps=tuple(prompt.hs_truncated),
        artifact_types=dict(Counter(sorted(prompt.artifact_types))),
        tokens_rewritten=prompt.rewritten_tokens,
        results_left=len(left),
        results_kept=len(prompt.decisions) - len(left),
        expected_saving=round(sum(one.expected_saving for one in left), 1),
        budget_violations=tuple(one.to_record() for one in prompt.violations),
        **{name: getattr(prompt, name) for name in _BUILT},
    )


def _refused(call: PromptMetrics, error: BudgetExceeded) -> PromptMetrics:
    """Return the figures of a call that was not made: nothing was sent, and the violation has the
    prompt's size."""
    tokens = next(
        (one.actual for one in error.violations if one.field == "max_prompt_tokens"), None
    )
    violations = tuple(one.to_record() for one in error.violations)
    return replace(
        call, est_tokens=None if tokens is None else int(tokens), budget_violations=violations
    )
