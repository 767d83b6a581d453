"""The drop-in for memory pointers: the published names, shapes and defaults."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck.compat.memory_pointers import (
    ArtifactsConfig,
    RunContext,
    approx_byte_size,
    get_artifact,
    is_pointer,
    list_artifacts,
    store_artifact,
    wrap_tools,
)
from coatcheck.errors import InvalidArgument

ON = ArtifactsConfig(enabled=True)


def log(lines: int) -> str:
    """Read the log."""
    return "2026-01-01 ERROR login failed é\n" * lines


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"row {number}"} for number in range(count)]


def total(values: list[dict[str, Any]]) -> int:
    return sum(row["id"] for row in values)


def tools(ctx: RunContext, config: ArtifactsConfig = ON) -> dict[str, Any]:
    given: dict[str, Any] = {"log": log, "rows": rows, "total": total}
    found: dict[str, Any] = wrap_tools(given, ctx, config)
    return found


def test_the_defaults_are_the_published_ones() -> None:
    config = ArtifactsConfig()
    assert (config.enabled, config.max_tool_output_bytes, config.preview_chars) == (False, 51_200, 200)


def test_tools_are_unchanged_unless_enabled() -> None:
    assert wrap_tools([log, rows], RunContext(), ArtifactsConfig()) == [log, rows]


def test_a_large_result_becomes_a_pointer_with_its_first_characters() -> None:
    ctx = RunContext()
    answer = json.loads(tools(ctx)["log"](lines=2_000))
    assert answer.keys() == {"pointer", "preview", "sizeBytes", "name"}
    assert answer["preview"] == log(2_000)[:200]
    assert len(answer["preview"]) == 200
    assert answer["sizeBytes"] == approx_byte_size(log(2_000)) == len(log(2_000).encode())
    assert answer["name"] is None
    assert is_pointer(answer["pointer"])
    assert get_artifact(ctx, answer["pointer"]) == log(2_000)


def test_the_limit_counts_bytes_exactly() -> None:
    ctx = RunContext()
    config = ArtifactsConfig(enabled=True, max_tool_output_bytes=100)
    (echo, *_) = wrap_tools([lambda text: text], ctx, config)
    assert echo(text="é" * 50) == "é" * 50
    assert "pointer" in json.loads(echo(text="é" * 50 + "x"))


def test_objects_keep_their_type_and_have_the_size_of_their_json() -> None:
    ctx = RunContext()
    answer = json.loads(tools(ctx)["rows"](count=3_000))
    assert get_artifact(ctx, answer["pointer"]) == rows(3_000)
    text = json.dumps(rows(3_000), separators=(",", ":"))
    assert (answer["sizeBytes"], answer["preview"]) == (len(text), text[:200])


def test_values_pass_between_tools_by_pointer() -> None:
    made = tools(RunContext())
    pointer = json.loads(made["rows"](count=3_000))["pointer"]
    assert made["total"](values=pointer) == sum(range(3_000))


def test_async_tools_stay_async() -> None:
    async def slow(lines: int) -> str:
        return log(lines)

    (wrapped, *_) = wrap_tools([slow], RunContext(), ON)
    assert inspect.iscoroutinefunction(wrapped)
    assert "pointer" in json.loads(asyncio.run(wrapped(lines=2_000)))


def test_three_tools_store_get_and_list() -> None:
    made = wrap_tools([log], RunContext(), ON)
    assert [tool.__name__ for tool in made] == ["log", "storeArtifact", "getArtifact", "listArtifacts"]
    store, get, listing = made[1:]
    stored = json.loads(store(name="notes", value={"a": [1, 2]}, contentType="application/json"))
    assert stored == {"pointer": stored["pointer"], "preview": '{"a":[1,2]}', "sizeBytes": 11, "name": "notes"}
    assert get(pointerOrName="notes") == get(pointerOrName=stored["pointer"]) == {"a": [1, 2]}
    assert get(pointerOrName="nothing") == "[no artifact found for 'nothing']"
    (entry,) = json.loads(listing())
    assert entry.keys() == {"pointer", "name", "sizeBytes", "preview", "contentType", "storedAt"}
    assert (entry["name"], entry["contentType"]) == ("notes", "application/json")


def test_a_value_of_any_size_comes_back_completely() -> None:
    store, get, listing = wrap_tools([], RunContext(), ON)
    store(name="log", value=log(10_000))
    assert get(pointerOrName="log") == log(10_000)
    assert len(json.loads(listing())) == 1


def test_an_artifact_with_two_names_is_listed_once() -> None:
    ctx = RunContext()
    store_artifact(ctx, "the same", name="one")
    store_artifact(ctx, "the same", name="two")
    assert [entry["name"] for entry in list_artifacts(ctx)] == ["two"]


def test_a_stored_none_is_not_mistaken_for_a_missing_artifact() -> None:
    ctx = RunContext()
    _, get, _ = wrap_tools([], ctx, ON)
    store_artifact(ctx, None, name="empty")
    assert get_artifact(ctx, "empty", "missing") is None
    assert get_artifact(ctx, "nothing") is None
    assert get_artifact(ctx, "nothing", "missing") == "missing"
    assert get(pointerOrName="empty") is None


def test_artifacts_belong_to_a_run_unless_its_state_is_passed_on() -> None:
    state: dict[str, Any] = {}
    store_artifact(RunContext(state), "kept", name="a")
    assert get_artifact(RunContext(state), "a") == "kept"
    assert get_artifact(RunContext(json.loads(json.dumps(state))), "a") == "kept"
    assert get_artifact(RunContext(), "a") is None
    assert get_artifact(RunContext({}), "a") is None


def test_the_artifacts_of_a_run_end_with_it() -> None:
    ctx = RunContext()
    pointer = store_artifact(ctx, "of this run").pointer
    store = ctx.session.store
    assert store.find(pointer)
    del ctx
    gc.collect()
    assert store.find(pointer) is None


def test_a_store_makes_artifacts_durable(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path) as store:
        store_artifact(RunContext(session_id="s", store=store), "durable", name="a")
    with coatcheck.open(tmp_path) as store:
        assert get_artifact(RunContext(session_id="s", store=store), "a") == "durable"


def test_bad_input_gets_a_clear_error_and_loses_nothing() -> None:
    ctx = RunContext()
    store, get, _ = wrap_tools([], ctx, ON)
    with pytest.raises(InvalidArgument, match="max_tool_output_bytes"):
        ArtifactsConfig(max_tool_output_bytes=0)
    with pytest.raises(InvalidArgument, match="there is a tool 'getArtifact' already"):
        wrap_tools([get], ctx, ON)
    with pytest.raises(InvalidArgument, match="is a pointer"):
        store_artifact(ctx, "x", name="art:0123456789ab")
    assert store(name="art:0123456789ab", value="x").startswith("[error: ")
    assert get(pointerOrName="art:ffffffffffff").startswith("[no artifact found")
    assert list_artifacts(ctx) == []


def test_secrets_are_masked_before_they_are_stored_if_the_settings_say_so(tmp_path: Path) -> None:
    from coatcheck.config import load

    (tmp_path / "coatcheck.toml").write_text('[policy]\nredact = "store"\n')
    secret = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF2hJ5"
    with coatcheck.open(tmp_path / "s", settings=load(file=tmp_path / "coatcheck.toml")) as store:
        ctx = RunContext(session_id="s", store=store)
        (dump, *_) = wrap_tools([lambda: f"token={secret}\n" * 3_000], ctx, ON)
        assert secret not in dump()
        store_artifact(ctx, {"token": secret})
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
