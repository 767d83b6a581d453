"""The drop-in for artifact references: the published names, shapes and defaults."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from coatcheck import ToolCall, ToolExecutor
from coatcheck.compat.artifact_refs import (
    ArtifactRecord,
    ArtifactRegistry,
    ContextBudget,
    HotState,
    artifacts_get,
    bootstrap,
    prompt_metrics,
)
from coatcheck.context.metrics import Meter
from coatcheck.errors import BudgetExceeded, InvalidArgument, TooLarge

TEXT = "# Rules\n\n" + "Always run the tests before a commit.\n" * 600
ID = "ab" * 32


@pytest.fixture
def registry(tmp_path: Path) -> ArtifactRegistry:
    return ArtifactRegistry(tmp_path / "artifacts")


def entry(**more: Any) -> dict[str, Any]:
    return {"artifact_id": ID, "type": "code", "label": "main.py"} | more


def test_a_record_has_exactly_the_nine_published_fields(registry: ArtifactRegistry) -> None:
    record = registry.store_text(TEXT, mime="text/markdown", type="doc", producer="planner", summary="the rules")
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert [field.name for field in fields(ArtifactRecord)] == [
        "artifact_id", "type", "content_uri", "content_hash", "size_bytes", "created_at", "producer", "summary", "mime",
    ]  # fmt: skip
    assert (record.artifact_id, record.content_hash, record.size_bytes) == (digest, digest, len(TEXT))
    assert (record.type, record.producer, record.summary, record.mime) == (
        "doc",
        "planner",
        "the rules",
        "text/markdown",
    )
    assert record.created_at.endswith("Z")


def test_content_is_stored_by_its_digest_in_two_levels(registry: ArtifactRegistry, tmp_path: Path) -> None:
    record = registry.store_json({"rows": [1, 2]})
    path = Path(urlsplit(record.content_uri).path)
    assert path.parent == tmp_path / "artifacts" / record.artifact_id[:2] / record.artifact_id
    assert json.loads(path.read_text()) == {"rows": [1, 2]}
    again = registry.store_json({"rows": [1, 2]})
    assert again == replace(record, created_at=again.created_at)


def test_get_returns_the_record_and_the_content(registry: ArtifactRegistry) -> None:
    record = registry.store_json({"rows": [1, 2]})
    assert registry.get(record.artifact_id) == (record, {"rows": [1, 2]})
    assert registry.get(ID) is None
    for wrong in (ID[:-1], ID.upper(), "../etc/passwd", "", None, f"art:{ID}"):
        with pytest.raises(InvalidArgument, match="64 lower-case hex"):
            registry.get(wrong)


def test_an_artifact_has_at_most_512_kilobytes(registry: ArtifactRegistry, tmp_path: Path) -> None:
    registry.store_text("x" * 512 * 1024)
    with pytest.raises(TooLarge, match=r"524,289 bytes; at most 524,288"):
        registry.store_text("x" * (512 * 1024 + 1))
    with pytest.raises(TooLarge):
        ArtifactRegistry(tmp_path / "small", max_bytes=10).store_text("x" * 11)


def test_only_a_string_is_stored_as_text(registry: ArtifactRegistry) -> None:
    with pytest.raises(InvalidArgument, match="got a dict"):
        registry.store_text({"a": 1})


def test_the_tool_answers_with_metadata_and_8000_characters(registry: ArtifactRegistry) -> None:
    tool = artifacts_get(registry)["artifacts.get"]
    record = registry.store_text(TEXT)
    answer = json.loads(tool(record.artifact_id))
    assert answer["metadata"]["artifact_id"] == record.artifact_id
    assert (answer["content"], answer["truncated"]) == (TEXT[:8_000], True)
    assert "64 lower-case hex" in json.loads(tool("nonsense"))["error"]
    assert json.loads(tool(ID)) == {"error": "no artifact has this id"}


def test_an_executor_runs_the_tool_under_its_name(registry: ArtifactRegistry) -> None:
    executor = ToolExecutor(registry.session, artifacts_get(registry))
    record = registry.store_text("short")
    outcome = executor.run(ToolCall("c1", "artifacts.get", {"id": record.artifact_id}))
    assert json.loads(outcome.text)["content"] == "short"


def test_a_hot_state_has_whole_ids_text_versions_and_no_risk_unless_set() -> None:
    state = HotState(session_id="s", objective="fix it", artifact_index=[entry(version="1.2"), entry(version=3)])
    shown = json.loads(state.render())
    assert "risk_level" not in shown
    assert [(one["artifact_id"], one["version"]) for one in shown["artifact_index"]] == [(ID, "1.2"), (ID, "3")]
    assert json.loads(HotState(session_id="s", risk_level="high").render())["risk_level"] == "high"
    assert HotState.parse(state.render()) == state
    with pytest.raises(InvalidArgument, match="risk_level"):
        HotState(session_id="s", risk_level="extreme")


def test_a_hot_state_over_its_limit_drops_long_text_before_pointers() -> None:
    index = [entry(label=f"file {number}", summary="word " * 100) for number in range(10)]
    state = HotState(session_id="s", objective="o " * 2_000, open_questions=["q " * 300] * 20, artifact_index=index)
    fitted = state.fitted()
    assert fitted.tokens <= 1_000
    assert fitted.text.count(ID) == 10


def test_a_budget_has_the_five_published_limits(caplog: pytest.LogCaptureFixture) -> None:
    budget = ContextBudget()
    assert (budget.maxHotStateTokens, budget.maxArtifactIndexEntries, budget.maxPromptTokens) == (1_000, 20, 8_000)
    assert (budget.maxRagChunks, budget.maxInlineArtifactChars) == (10, 2_000)
    tight = ContextBudget(maxPromptTokens=5)
    assert [one.field for one in tight.check(prompt="word " * 50)] == ["max_prompt_tokens"]
    with caplog.at_level(logging.WARNING, "coatcheck"), pytest.raises(BudgetExceeded):
        tight.enforce(prompt="word " * 50)
    assert "over max_prompt_tokens" in caplog.text
    with pytest.raises(InvalidArgument, match="at least 1"):
        ContextBudget(maxPromptTokens=0)
    with pytest.raises(TypeError, match="maxTokens"):
        ContextBudget(maxTokens=5)


def test_a_count_that_fails_violates_the_budget() -> None:
    def fails(text: str) -> int:
        raise RuntimeError

    (violation,) = ContextBudget().check(prompt="short", count=fails)
    assert violation.ambiguous


def test_prompt_metrics_have_exactly_the_published_keys_and_types(registry: ArtifactRegistry) -> None:
    state = HotState(session_id="s", artifact_index=[entry(), entry(type="doc"), entry(type="doc")])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    call = Meter(registry.session, run="r1").call(messages=messages, hot_state=state)
    assert call is not None
    figures = prompt_metrics(call)
    assert list(figures) == [
        "type", "session", "run", "hs_tokens", "hs_bytes", "hs_truncated", "artifacts", "artifact_types", "sys_chars",
        "user_chars", "est_tokens", "ref_files", "budget_violations", "budget_ok",
    ]  # fmt: skip
    assert (figures["type"], figures["run"], figures["artifacts"]) == ("prompt_metrics", "r1", 3)
    assert figures["artifact_types"] == ["code", "doc"]
    assert (figures["budget_violations"], figures["budget_ok"], figures["hs_truncated"]) == (0, True, False)
    assert json.loads(json.dumps(figures)) == figures


def test_long_bootstrap_files_become_references_when_switched_on(registry: ArtifactRegistry, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    (tmp_path / "SOUL.md").write_text("short")
    files = ["AGENTS.md", "SOUL.md"]
    assert TEXT.rstrip() in bootstrap(registry, files, root=tmp_path, env={})
    text = bootstrap(registry, files, root=tmp_path, env={"OPENCLAW_ARTIFACT_REFS": "true"})
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    lines = text.splitlines()
    assert lines[1].startswith(
        f"ArtifactRef: {digest} (type=text/markdown, sha256={digest}, bytes={len(TEXT)}, createdAt=20"
    )
    assert lines[2:5] == ["", "Summary (head/tail excerpt):", "# Rules"]
    assert "short" in text
    assert len(text) < 5_000
    assert registry.get(digest)
    assert text == bootstrap(registry, files, root=tmp_path, env={"OPENCLAW_ARTIFACT_REFS": "true"})


@pytest.mark.parametrize(("chars", "is_ref"), [("100", True), ("30000", False), ("", True), ("-5", True), ("x", True)])
def test_the_threshold_comes_from_the_environment(
    registry: ArtifactRegistry, tmp_path: Path, chars: str, is_ref: bool
) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    env = {"OPENCLAW_ARTIFACT_REFS": "true", "OPENCLAW_ARTIFACT_REFS_THRESHOLD_CHARS": chars}
    assert ("ArtifactRef: " in bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=env)) is is_ref
