"""The drop-in for artifact references: every name, field, type, default, path and text of the
published page."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

from coatcheck import Policy, ToolCall, ToolExecutor, context
from coatcheck.compat import artifact_refs
from coatcheck.compat.artifact_refs import (
    ArtifactRecord,
    ArtifactRegistry,
    ContextBudget,
    HotState,
    artifacts_get,
    bootstrap,
    claim,
    current,
    prompt_metrics,
)
from coatcheck.context.metrics import Meter
from coatcheck.errors import BudgetExceeded, Damaged, Fenced, InvalidArgument, TooLarge
from tests.backends import TWIN_PREFIX, TWINS, Backend

TEXT = "# Rules\n\n" + "Always run the tests before a commit.\n" * 600
ID = "ab" * 32
ON = {"OPENCLAW_ARTIFACT_REFS": "true"}
KINDS = Literal["repo", "doc", "code", "log", "data", "plan", "result"]
PRODUCERS = Literal["dispatcher", "executor", "planner", "system"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ArtifactRegistry]:
    made = ArtifactRegistry(tmp_path / "artifacts")
    yield made
    made.close()


@pytest.fixture
def any_registry(backend: Backend) -> ArtifactRegistry:
    """A registry in each backend, as an open store."""
    return ArtifactRegistry(backend.open())


def entry(**more: Any) -> dict[str, Any]:
    return {"artifact_id": ID, "type": "code", "label": "main.py"} | more


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Hot state


def test_a_hot_state_has_exactly_the_published_fields_and_only_the_first_is_required() -> None:
    assert set(HotState.model_fields) == {
        "session_id",
        "session_key",
        "run_id",
        "objective",
        "current_plan_id",
        "accepted_decisions",
        "open_questions",
        "constraints",
        "last_successful_step",
        "risk_level",
        "artifact_index",
    }
    assert json.loads(HotState(session_id="s").render()) == {"session_id": "s"}
    assert HotState(session_id="s", current_plan_id=None).current_plan_id is None
    with pytest.raises(TypeError, match="session_id"):
        HotState(objective="fix it")
    with pytest.raises(InvalidArgument, match="'mood': Extra inputs are not permitted"):
        HotState(session_id="s", mood="good")


@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_the_risk_level_is_one_of_three_and_left_out_unless_set(level: str) -> None:
    assert json.loads(HotState(session_id="s", risk_level=level).render())["risk_level"] == level
    with pytest.raises(InvalidArgument, match="risk_level"):
        HotState(session_id="s", risk_level="extreme")


@pytest.mark.parametrize("kind", typing.get_args(KINDS))
def test_an_index_entry_has_a_whole_id_a_type_and_three_optional_texts(kind: str) -> None:
    least = {"artifact_id": ID, "type": kind}
    most = least | {"label": "the plan", "version": "1.2", "summary": "two lines"}
    shown = json.loads(HotState(session_id="s", artifact_index=[least, most]).render())[
        "artifact_index"
    ]
    assert shown == [least, most]


def test_a_version_is_a_text_and_is_not_invented() -> None:
    state = HotState(
        session_id="s", artifact_index=[entry(version=3), entry(), entry(version=None)]
    )
    shown = json.loads(state.render())["artifact_index"]
    assert [one.get("version") for one in shown] == ["3", None, None]
    assert HotState.parse(state.render()) == state


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "artifact_index must be a list of entries, got None"),
        (ID, "artifact_index must be a list of entries, got a str"),
        ({"a": 1}, "artifact_index must be a list of entries, got a dict"),
        ([ID], "an entry of artifact_index must be a mapping, got a str"),
        ([{"type": "doc"}], "artifact_id must have 64 lower-case hex characters, got 'None'"),
        (
            [entry(artifact_id="art:" + ID[:12])],
            "artifact_id must have 64 lower-case hex characters, got 'art:abab",
        ),
        ([entry(type="picture")], "artifact_index.0: invalid index entry: type"),
    ],
)
def test_an_invalid_index_gets_a_clear_error(index: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        HotState(session_id="s", artifact_index=index)


def test_a_hot_state_is_capped_at_1000_tokens_and_falls_back_to_the_minimal_state() -> None:
    index = [entry(label=f"file {number}", summary="word " * 100) for number in range(10)]
    state = HotState(
        session_id="s",
        objective="o " * 2_000,
        open_questions=["q " * 300] * 20,
        artifact_index=index,
    )
    fitted = state.fitted()
    assert fitted.tokens <= 1_000
    assert fitted.text.count(ID) == 10
    assert json.loads(fitted.text)["truncated"]
    minimal = json.loads(state.fitted(ContextBudget(maxHotStateTokens=40)).text)
    assert minimal["session_id"] == "s"
    assert "artifact_index" not in minimal


def test_only_the_dispatcher_that_claimed_last_writes_the_hot_state(
    registry: ArtifactRegistry,
) -> None:
    record = registry.store_text("# Plan", type="plan")
    state = HotState(
        session_id="s1", objective="fix it", artifact_index=[record.index_entry("the plan")]
    )
    with claim(registry, "s1", "dispatcher 1") as first:
        assert first.write(state) == 1
        with claim(registry, "s1", "dispatcher 2") as second:
            with pytest.raises(Fenced):
                first.write(state.replaced(objective="take over"))
            second.write(state.replaced(objective="finish it"))
    found = current(registry, "s1")
    assert found == state.replaced(objective="finish it")
    assert current(registry, "another") is None


def test_ids_survive_the_dispatcher_and_open_the_artifact(registry: ArtifactRegistry) -> None:
    record = registry.store_text("# Plan", type="plan")
    state = HotState(session_id="s1", artifact_index=[record.index_entry()])
    claim(registry, "s1", "d").write(state)
    found = current(registry, "s1")
    assert found is not None
    assert found.render() == state.render()
    (shown,) = json.loads(found.render())["artifact_index"]
    assert shown == {"artifact_id": record.artifact_id, "type": "plan", "summary": "# Plan"}
    get = artifacts_get(registry)["artifacts.get"]
    assert json.loads(get(shown["artifact_id"]))["content"] == "# Plan"
    native = context.current(registry.session.store.session("s1"))
    assert native is not None
    (shortened,) = json.loads(native.state.render())["artifact_index"]
    assert json.loads(get(shortened["artifact_id"]))["content"] == "# Plan"


# Artifact record


def test_a_record_has_exactly_the_published_fields_types_and_defaults() -> None:
    hints = typing.get_type_hints(ArtifactRecord)
    required = [(field.name, hints[field.name]) for field in fields(ArtifactRecord)][:6]
    optional = [(field.name, hints[field.name], field.default) for field in fields(ArtifactRecord)][
        6:
    ]
    assert required == [
        ("artifact_id", str),
        ("type", KINDS),
        ("content_uri", str),
        ("content_hash", str),
        ("size_bytes", int),
        ("created_at", str),
    ]
    assert optional == [
        ("producer", PRODUCERS | None, None),
        ("summary", str | None, None),
        ("mime", str | None, None),
    ]


def test_a_record_describes_what_was_stored(registry: ArtifactRegistry) -> None:
    record = registry.store_text(
        TEXT, mime="text/markdown", type="doc", producer="planner", summary="the rules"
    )
    digest = digest_of(TEXT)
    assert (record.artifact_id, record.content_hash, record.size_bytes) == (
        digest,
        digest,
        len(TEXT),
    )
    assert (record.type, record.producer) == ("doc", "planner")
    assert (record.summary, record.mime) == ("the rules", "text/markdown")
    assert record.created_at.endswith("Z")
    with pytest.raises(
        InvalidArgument, match="the summary must have at most 500 characters, got 501"
    ):
        registry.store_text("x", summary="x" * 501)
    with pytest.raises(
        InvalidArgument,
        match="producer must be one of 'dispatcher', 'executor', 'planner', 'system'",
    ):
        registry.store_text("x", producer="me")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="kind must be one of"):
        registry.store_text("x", type="picture")  # type: ignore[arg-type]


# Artifact registry


def test_content_is_a_file_in_a_shard_and_on_disk_once(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    root = tmp_path / "artifacts"
    before = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    text = "".join(chr(33 + (number * 7_919) % 90) for number in range(400_000))
    record = registry.store_text(text)
    path = Path(urlsplit(record.content_uri).path)
    assert path.parent == root / record.artifact_id[:2] / record.artifact_id
    assert path.read_text() == text
    after = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert after - before < 402_000


def test_the_same_content_has_the_same_id_and_the_same_record(registry: ArtifactRegistry) -> None:
    record = registry.store_text("same", type="plan", summary="first")
    assert registry.store_text("same", type="doc", summary="second") == record
    assert registry.get(record.artifact_id) == (record, "same")


def test_a_registry_in_every_backend_keeps_the_first_record(any_registry: ArtifactRegistry) -> None:
    record = any_registry.store_text(TEXT, mime="text/markdown", type="plan")
    assert record == any_registry.store_text(TEXT)
    assert any_registry.get(record.artifact_id) == (record, TEXT)
    rows = any_registry.store_json({"rows": [1, 2]})
    assert any_registry.get(rows.artifact_id) == (rows, {"rows": [1, 2]})
    assert any_registry.get(ID) is None
    assert urlsplit(record.content_uri).scheme
    answer = json.loads(artifacts_get(any_registry)["artifacts.get"](record.artifact_id))
    assert (answer["content"], answer["truncated"]) == (TEXT[:8_000], True)
    state = HotState(session_id="s1", artifact_index=[record.index_entry()])
    claim(any_registry, "s1", "d").write(state)
    assert current(any_registry, "s1") == state


def test_a_registry_in_every_backend_gives_the_same_bootstrap_text(
    any_registry: ArtifactRegistry, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    first = bootstrap(any_registry, ["AGENTS.md"], root=tmp_path, env=ON)
    assert "ArtifactRef: " in first
    assert bootstrap(any_registry, ["AGENTS.md"], root=tmp_path, env=ON) == first


def test_an_artifact_has_at_most_512_kilobytes(registry: ArtifactRegistry, tmp_path: Path) -> None:
    assert artifact_refs.MAX_BYTES == 524_288
    assert inspect.signature(ArtifactRegistry).parameters["max_bytes"].default == 524_288
    registry.store_text("x" * 524_288)
    with pytest.raises(TooLarge, match=r"524,289 bytes; at most 524,288"):
        registry.store_text("x" * 524_289)
    small = ArtifactRegistry(tmp_path / "small", max_bytes=10)
    with pytest.raises(TooLarge):
        small.store_json(["é"] * 3)
    small.close()


def test_texts_and_json_values_come_back_as_they_were(registry: ArtifactRegistry) -> None:
    values: tuple[Any, ...] = ({"rows": [1, 2.5, None]}, [], "a text", 5, True, None)
    for value in values:
        assert registry.get(registry.store_json(value).artifact_id) == (
            registry.store_json(value),
            value,
        )
    for text in ("", "a\r\nb", "odd \ud800", '{"a": 1'):
        record = registry.store_text(text)
        assert registry.get(record.artifact_id) == (record, text)
    with pytest.raises(InvalidArgument, match="got a dict"):
        registry.store_text({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        registry.store_json({1: 2})
    with pytest.raises(InvalidArgument, match="bytes are not a JSON value"):
        registry.store_json(b"x")


def test_an_id_is_accepted_in_its_three_spellings(registry: ArtifactRegistry) -> None:
    record = registry.store_text("hello")
    digest = record.artifact_id
    for spelling in (digest, f"art:{digest}", f"art:{digest[:12]}", f"art_{digest[:16]}"):
        assert registry.get(spelling) == (record, "hello")
    for unknown in (ID, "art:0123456789ab", "art_0123456789abcdef"):
        assert registry.get(unknown) is None


@pytest.mark.parametrize(
    "wrong", [ID[:-1], ID.upper(), "../etc/passwd", "", None, "art:abc", "art_abc", f"{ID}/.."]
)
def test_any_other_id_is_refused(registry: ArtifactRegistry, wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="64 lower-case hex"):
        registry.get(wrong)


def test_a_short_id_that_fits_two_artifacts_is_refused(registry: ArtifactRegistry) -> None:
    ids = sorted(registry.store_text(text).artifact_id for text in TWINS)
    tool = artifacts_get(registry)["artifacts.get"]
    error = json.loads(tool(f"art:{TWIN_PREFIX}"))["error"]
    assert (
        error == f"art:{TWIN_PREFIX} matches 2 artifacts (use one of: art:{ids[0]}, art:{ids[1]})"
    )


def test_damaged_content_is_an_error_and_storing_it_again_repairs_it(
    registry: ArtifactRegistry,
) -> None:
    record = registry.store_text("the content")
    path = Path(urlsplit(record.content_uri).path)
    path.chmod(0o600)
    path.write_text("something else")
    with pytest.raises(Damaged, match="does not match its digest"):
        registry.get(record.artifact_id)
    assert registry.store_text("the content") == record
    assert registry.get(record.artifact_id) == (record, "the content")
    for broken in ("", "{", "[]", '{"type": "doc"}'):
        (path.parent / "record.json").write_text(broken)
        assert registry.get(record.artifact_id) is None
        registry.store_text("the content")
        assert registry.get(record.artifact_id) is not None


def test_a_pipe_or_a_link_in_place_of_a_file_is_a_missing_artifact(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    record = registry.store_text("the content")
    path = Path(urlsplit(record.content_uri).path).with_name("record.json")
    path.rename(tmp_path / "record.json")
    path.symlink_to(tmp_path / "record.json")
    assert registry.get(record.artifact_id) is None
    path.unlink()
    os.mkfifo(path)
    assert registry.get(record.artifact_id) is None


def test_the_default_root_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENCLAW_STATE_DIR", raising=False)
    registry = ArtifactRegistry()
    uri = registry.store_text("x").content_uri
    registry.close()
    assert uri.startswith(f"file://{tmp_path}/.openclaw/artifacts/")
    monkeypatch.setenv("OPENCLAW_STATE_DIR", str(tmp_path / "state"))
    registry = ArtifactRegistry()
    uri = registry.store_text("x").content_uri
    registry.close()
    assert uri.startswith(f"file://{tmp_path}/state/artifacts/")


def test_an_s3_address_is_a_store_and_a_tilde_the_home_folder(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet.lending() as new_url:
        registry = ArtifactRegistry(new_url())
        record = registry.store_text("x" * 200_000)
        assert record.content_uri.startswith("s3://")
        assert registry.get(record.artifact_id) == (record, "x" * 200_000)
        registry.close()
    monkeypatch.setenv("HOME", str(tmp_path))
    registry = ArtifactRegistry("~/reg")
    assert registry.store_text("x").content_uri.startswith(f"file://{tmp_path}/reg/")
    registry.close()


def test_secrets_are_masked_before_they_are_stored_if_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COATCHECK_POLICY_REDACT", "store")
    secret = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF2hJ5"
    (tmp_path / "AGENTS.md").write_text(f"token={secret}\n" * 1_000)
    registry = ArtifactRegistry(tmp_path / "reg")
    registry.store_text(f"token={secret}")
    registry.store_json({"token": secret}, summary=f"token={secret}")
    bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=ON)
    registry.close()
    stored = [path for path in (tmp_path / "reg").rglob("*") if path.is_file()]
    assert stored
    assert not [path for path in stored if secret.encode() in path.read_bytes()]


# The tool artifacts.get


def test_the_tool_answers_with_metadata_and_8000_characters(registry: ArtifactRegistry) -> None:
    assert artifact_refs.MAX_CHARS == 8_000
    tool = artifacts_get(registry)["artifacts.get"]
    assert list(inspect.signature(tool).parameters) == ["id"]
    record = registry.store_text(TEXT)
    answer = json.loads(tool(record.artifact_id))
    assert list(answer) == ["metadata", "content", "truncated"]
    assert list(answer["metadata"]) == [field.name for field in fields(ArtifactRecord)]
    assert answer["metadata"]["artifact_id"] == record.artifact_id
    assert (answer["content"], answer["truncated"]) == (TEXT[:8_000], True)
    exactly = registry.store_text("x" * 8_000)
    assert json.loads(tool(exactly.artifact_id))["truncated"] is False
    assert "64 lower-case hex" in json.loads(tool("nonsense"))["error"]
    assert json.loads(tool(ID)) == {"error": "no artifact has this id"}


@pytest.mark.parametrize(
    "policy", [None, Policy(), Policy(max_chars=1_000), Policy(max_tokens=100)]
)
def test_an_executor_returns_the_bounded_content_whatever_its_policy(
    registry: ArtifactRegistry, policy: Policy | None
) -> None:
    executor = ToolExecutor(registry.session, artifacts_get(registry), policy=policy)
    digest = registry.store_text(TEXT).artifact_id
    for spelling in (digest, f"art:{digest[:12]}", f"art_{digest[:16]}"):
        outcome = executor.run(ToolCall("c1", "artifacts.get", {"id": spelling}))
        assert json.loads(outcome.text)["content"] == TEXT[:8_000]
        assert outcome.ref is None


# Budgets


def test_a_budget_has_the_five_published_limits(caplog: pytest.LogCaptureFixture) -> None:
    budget = ContextBudget()
    names = (
        "maxHotStateTokens",
        "maxArtifactIndexEntries",
        "maxPromptTokens",
        "maxRagChunks",
        "maxInlineArtifactChars",
    )
    assert {name: getattr(budget, name) for name in names} == dict(
        zip(names, (1_000, 20, 8_000, 10, 2_000), strict=True)
    )
    tight = ContextBudget(**dict.fromkeys(names, 5))
    assert [getattr(tight, name) for name in names] == [5] * 5
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


# Metrics


def test_prompt_metrics_have_exactly_the_published_keys_and_types(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    system = bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=ON)
    state = HotState(session_id="s", artifact_index=[entry(), entry(type="doc"), entry(type="doc")])
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Why?\n{system}"},
    ]
    call = Meter(registry.session, run="r1").call(messages=messages, hot_state=state)
    assert call is not None
    figures = prompt_metrics(call)
    assert [(key, type(value)) for key, value in figures.items()] == [
        ("type", str),
        ("session", str),
        ("run", str),
        ("hs_tokens", int),
        ("hs_bytes", int),
        ("hs_truncated", bool),
        ("artifacts", int),
        ("artifact_types", list),
        ("sys_chars", int),
        ("user_chars", int),
        ("est_tokens", int),
        ("ref_files", int),
        ("budget_violations", int),
        ("budget_ok", bool),
    ]
    assert (figures["type"], figures["run"], figures["artifacts"]) == ("prompt_metrics", "r1", 3)
    assert figures["artifact_types"] == ["code", "doc"]
    assert (figures["budget_violations"], figures["budget_ok"], figures["hs_truncated"]) == (
        0,
        True,
        False,
    )
    assert (figures["sys_chars"], figures["ref_files"]) == (len(system), 1)
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.parametrize(
    ("figure", "state", "prompt"),
    [
        ("hs_tokens", {"objective": "word " * 900}, ""),
        ("artifacts", {"artifact_index": [entry()] * 16}, ""),
        ("est_tokens", {}, "word " * 7_000),
    ],
)
def test_a_call_over_a_published_threshold_warns(
    registry: ArtifactRegistry, figure: str, state: dict[str, Any], prompt: str
) -> None:
    thresholds = {"hs_tokens": 800, "artifacts": 15, "est_tokens": 6_000}
    hot = HotState(session_id="s", **state)
    call = Meter(registry.session).call(
        messages=[{"role": "user", "content": prompt}], hot_state=hot
    )
    assert call is not None
    assert (figure, thresholds[figure]) in [(one.figure, one.before) for one in call.warnings]


# Bootstrap files


def test_long_bootstrap_files_become_references_when_switched_on(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    (tmp_path / "SOUL.md").write_text("short")
    files = ["AGENTS.md", "SOUL.md"]
    assert TEXT.rstrip() in bootstrap(registry, files, root=tmp_path, env={})
    text = bootstrap(registry, files, root=tmp_path, env=ON)
    digest = digest_of(TEXT)
    found = registry.get(digest)
    assert found is not None
    lines = text.splitlines()
    about = (
        f"type=text/markdown, sha256={digest}, bytes={len(TEXT)}, createdAt={found[0].created_at}"
    )
    assert lines[:5] == [
        "--- AGENTS.md ---",
        f"ArtifactRef: {digest} ({about})",
        "",
        "Summary (head/tail excerpt):",
        "# Rules",
    ]
    assert "short" in text
    assert 4_000 < len(text) < 5_000
    assert found[1] == TEXT


def test_the_text_of_unchanged_files_never_changes(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "AGENTS.md").write_text(TEXT + "more\n")
    texts = set()
    for _ in range(3):
        registry = ArtifactRegistry(tmp_path / "artifacts")
        registry.store_text(TEXT, summary="stored by another caller")
        bootstrap(registry, ["AGENTS.md"], root=tmp_path / "other", env=ON)
        texts.add(bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=ON))
        registry.close()
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("chars", "is_ref"),
    [
        ("100", True),
        ("22808", True),
        ("22809", False),
        ("", True),
        ("0", True),
        ("-5", True),
        ("x", True),
    ],
)
def test_the_threshold_is_the_smallest_size_of_a_reference(
    registry: ArtifactRegistry, tmp_path: Path, chars: str, is_ref: bool
) -> None:
    (tmp_path / "AGENTS.md").write_text(TEXT.rstrip())
    env = ON | {"OPENCLAW_ARTIFACT_REFS_THRESHOLD_CHARS": chars}
    assert ("ArtifactRef: " in bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=env)) is is_ref


@pytest.mark.parametrize(("size", "is_ref"), [(7_999, False), (8_000, True)])
def test_the_default_threshold_is_8000_characters(
    registry: ArtifactRegistry,
    tmp_path: Path,
    size: int,
    is_ref: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "AGENTS.md").write_text("x" * size)
    for name in [name for name in os.environ if name.startswith("OPENCLAW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENCLAW_ARTIFACT_REFS", "true")
    assert ("ArtifactRef: " in bootstrap(registry, ["AGENTS.md"], root=tmp_path)) is is_ref


def test_the_cap_of_the_registry_holds_for_bootstrap_files(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text("a rule\n" * 100_000)
    text = bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=ON)
    assert (
        "[the whole file could not be stored: the artifact has 700,000 bytes; at most 524,288 can be stored]"
        in text
    )
    assert len(text) < 5_000
    assert list((tmp_path / "artifacts").glob("??")) == []


def test_a_file_that_is_not_text_is_stored_and_not_shown(
    registry: ArtifactRegistry, tmp_path: Path
) -> None:
    data = "Régles\n".encode("utf-16") * 10
    (tmp_path / "AGENTS.md").write_bytes(data)
    text = bootstrap(registry, ["AGENTS.md"], root=tmp_path, env=ON)
    assert "[not UTF-8 text: nothing of it is shown]" in text
    assert registry.get(hashlib.sha256(data).hexdigest()) is not None
