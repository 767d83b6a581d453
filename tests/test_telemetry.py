"""OpenTelemetry metrics: they follow the conventions, work with the real SDK, and are optional."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coatcheck.context.metrics import Notice, PromptMetrics
from coatcheck.context.telemetry import Telemetry
from tests.backends import Backend, run_python

CALL = PromptMetrics(
    session="fix-login-bug", run="r", turn=3, release="1.4", model="gpt-5", est_tokens=900, hs_tokens=120,
    tokens_saved=20_000, tokens_stubs=300, tokens_read_back=50, tokens_schemas=435, tokens_rewritten=7,
    input_tokens=880, output_tokens=40, cached_tokens=800,
    budget_violations=({"field": "max_prompt_tokens", "limit": 800, "actual": 900, "message": "over"},),
    warnings=(Notice("est_tokens", "over", 800, 900, "over"),),
)  # fmt: skip


def sent(*calls: PromptMetrics) -> dict[str, list[tuple[dict[str, Any], Any]]]:
    """Return what the SDK records for these calls: the points of each metric, with their
    attributes."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    found = Telemetry(provider, trace)
    for call in calls:
        found.record(call, "openai")
    data = reader.get_metrics_data()
    assert data is not None
    metrics = [
        one
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    ]
    provider.shutdown()
    return {
        one.name: [(dict(point.attributes or {}), point) for point in one.data.data_points]
        for one in metrics
    }


def test_the_counts_of_a_provider_follow_the_conventions_for_generative_ai() -> None:
    points = sent(CALL)["gen_ai.client.token.usage"]
    about = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
    }
    assert [(attributes, point.sum) for attributes, point in points] == [
        ({**about, "gen_ai.token.type": "input"}, 880),
        ({**about, "gen_ai.token.type": "output"}, 40),
    ]
    assert list(points[0][1].explicit_bounds) == [4**power for power in range(14)]


def test_estimates_are_not_sent_as_usage() -> None:
    assert "gen_ai.client.token.usage" not in sent(PromptMetrics(session="s", est_tokens=900))


def test_our_own_figures_are_sent_without_the_session() -> None:
    points = sent(CALL, CALL)
    assert points["coatcheck.prompt.tokens"][0][1].sum == 1_800
    assert points["coatcheck.hot_state.tokens"][0][1].count == 2
    tokens = {
        attributes["coatcheck.token.type"]: point.value
        for attributes, point in points["coatcheck.tokens"]
    }
    assert tokens == {
        "saved": 40_000,
        "stubs": 600,
        "read_back": 100,
        "schemas": 870,
        "rewritten": 14,
    }
    (violations,) = points["coatcheck.budget.violations"]
    assert (violations[0]["coatcheck.budget.field"], violations[1].value) == (
        "max_prompt_tokens",
        2,
    )
    assert points["coatcheck.warnings"][0][0]["coatcheck.warning.reason"] == "over"
    labels = {
        value for each in points.values() for attributes, _ in each for value in attributes.values()
    }
    assert "fix-login-bug" not in labels
    assert "1.4" in labels


def test_figures_that_could_not_be_counted_are_not_sent() -> None:
    points = sent(PromptMetrics(session="s", est_tokens=None, hs_tokens=None))
    assert "coatcheck.prompt.tokens" not in points
    assert "coatcheck.hot_state.tokens" not in points


def test_the_span_of_the_call_gets_the_session_and_the_figures() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("chat gpt-5"):
        Telemetry(MeterProvider(), trace).record(CALL, "openai")
    (span,) = exporter.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.conversation.id"] == "fix-login-bug"
    assert attributes["gen_ai.usage.input_tokens"] == 880
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 800
    assert attributes["coatcheck.tokens.net"] == CALL.tokens_net
    assert attributes["coatcheck.budget.ok"] is False
    assert "gen_ai.usage.cache_creation.input_tokens" not in attributes


def test_a_meter_reaches_the_hosts_provider(backend: Backend) -> None:
    assert run_python(
        "import sys\n"
        "from opentelemetry import metrics\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "from opentelemetry.sdk.metrics.export import InMemoryMetricReader\n"
        "reader = InMemoryMetricReader()\n"
        "metrics.set_meter_provider(MeterProvider([reader]))\n"
        "import coatcheck\n"
        "from coatcheck.context.metrics import Meter\n"
        "meter = Meter(coatcheck.open(sys.argv[1]).session('s'))\n"
        "meter.call(messages=[{'role': 'user', 'content': 'hello'}], usage={'prompt_tokens': 5})\n"
        "scopes = reader.get_metrics_data().resource_metrics[0].scope_metrics\n"
        "print(meter.failures, scopes[0].scope.name, *sorted(one.name for one in scopes[0].metrics))",
        backend.url,
    ).split() == [
        "0", "coatcheck", "coatcheck.hot_state.tokens", "coatcheck.prompt.tokens", "coatcheck.tokens",
        "gen_ai.client.token.usage",
    ]  # fmt: skip


def test_everything_else_works_without_opentelemetry(backend: Backend) -> None:
    assert run_python(
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "import coatcheck\n"
        "from coatcheck.context.metrics import Meter, calls_of\n"
        "session = coatcheck.open(sys.argv[1]).session('s')\n"
        "meter = Meter(session)\n"
        "meter.call(messages=[{'role': 'user', 'content': 'hello'}])\n"
        "print(meter.failures, len(list(calls_of(session))))",
        backend.url,
    ).split() == ["0", "1"]
