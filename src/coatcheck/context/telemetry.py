"""Figures for OpenTelemetry, if the host has its API: the conventions for generative AI, and our
own metrics.

A provider's counts are sent as `gen_ai.client.token.usage`; estimates never are. Session ids appear
only on spans: a metric with one series per session would be useless.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from coatcheck.context.metrics import PromptMetrics

_BUCKETS: Final = [4**power for power in range(14)]
_SCOPE: Final = "coatcheck"
_HISTOGRAMS: Final = (
    ("gen_ai.client.token.usage", "Number of input and output tokens used"),
    ("coatcheck.prompt.tokens", "Estimated tokens of a prompt"),
    ("coatcheck.hot_state.tokens", "Tokens of the hot state"),
)
_COUNTERS: Final = (
    ("coatcheck.tokens", "{token}", "Tokens saved by stubs, and their cost"),
    ("coatcheck.budget.violations", "{violation}", "Violated limits of a budget"),
    ("coatcheck.warnings", "{warning}", "Warnings about figures"),
)
_SPENT: Final = ("saved", "read_back", "stubs", "schemas", "rewritten")


class Telemetry:
    """The instruments of one process."""

    def __init__(self, metrics: Any, trace: Any) -> None:
        meter = metrics.get_meter(_SCOPE)
        self._trace = trace
        self._usage, self._prompt, self._state = (
            meter.create_histogram(
                name,
                unit="{token}",
                description=words,
                explicit_bucket_boundaries_advisory=_BUCKETS,
            )
            for name, words in _HISTOGRAMS
        )
        self._tokens, self._violations, self._warnings = (
            meter.create_counter(name, unit=unit, description=words)
            for name, unit, words in _COUNTERS
        )

    def record(self, call: PromptMetrics, provider: str | None) -> None:
        about = {
            "gen_ai.operation.name": "chat",
            **({"gen_ai.provider.name": provider} if provider else {}),
            **({"gen_ai.request.model": call.model} if call.model else {}),
        }
        ours = {"coatcheck.release": call.release} if call.release else {}
        for kind, used in (("input", call.input_tokens), ("output", call.output_tokens)):
            if used is not None:
                self._usage.record(used, {**about, "gen_ai.token.type": kind})
        if call.est_tokens is not None:
            self._prompt.record(call.est_tokens, ours)
        if call.hs_tokens is not None:
            self._state.record(call.hs_tokens, ours)
        for kind in _SPENT:
            self._tokens.add(
                getattr(call, f"tokens_{kind}"), {**ours, "coatcheck.token.type": kind}
            )
        for one in call.budget_violations:
            self._violations.add(1, {**ours, "coatcheck.budget.field": one["field"]})
        for notice in call.warnings:
            labels = {
                "coatcheck.warning.figure": notice.figure,
                "coatcheck.warning.reason": notice.reason,
            }
            self._warnings.add(1, {**ours, **labels})
        span = self._trace.get_current_span()
        if span.is_recording():
            span.set_attributes({**about, **_attributes(call)})


def _attributes(call: PromptMetrics) -> dict[str, Any]:
    """Return the attributes for the span of the model call."""
    attributes: dict[str, Any] = {
        "gen_ai.conversation.id": call.session,
        "gen_ai.usage.input_tokens": call.input_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": call.cache_write_tokens,
        "coatcheck.run": call.run,
        "coatcheck.turn": call.turn,
        "coatcheck.release": call.release,
        "coatcheck.prompt.tokens": call.est_tokens,
        "coatcheck.prompt.tokens_without": call.tokens_without,
        "coatcheck.hot_state.tokens": call.hs_tokens,
        "coatcheck.hot_state.truncated": call.hs_truncated,
        "coatcheck.artifacts": call.artifacts,
        "coatcheck.budget.ok": call.budget_ok,
        **{
            f"coatcheck.tokens.{kind}": getattr(call, f"tokens_{kind}") for kind in (*_SPENT, "net")
        },
    }
    return {name: value for name, value in attributes.items() if value is not None}


@cache
def telemetry() -> Telemetry | None:
    """Return the instruments, or None if the host has no OpenTelemetry."""
    try:
        from opentelemetry import metrics, trace
    except ImportError:
        return None
    return Telemetry(metrics, trace)
