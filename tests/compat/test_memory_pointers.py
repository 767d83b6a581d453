"""The drop-in for memory pointers: every name, shape, default and text of the published page."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import gc
import inspect
import json
import logging
import os
import pickle
import typing
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import ToolCall, ToolExecutor
from coatcheck.compat.memory_pointers import (
    ArtifactsConfig,
    RunContext,
    approx_byte_size,
    get_artifact,
    is_pointer,
    list_artifacts,
    saved_artifacts,
    store_artifact,
    wrap_tools,
)
from coatcheck.errors import InvalidArgument
from tests.backends import Backend

ON = ArtifactsConfig(enabled=True)
SECRET = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF2hJ5"


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


# ArtifactsConfig


def test_the_settings_have_the_published_names_types_and_defaults() -> None:
    hints = typing.get_type_hints(ArtifactsConfig)
    settings = [
        (field.name, hints[field.name], field.default)
        for field in dataclasses.fields(ArtifactsConfig)
    ]
    assert settings == [
        ("enabled", bool, False),
        ("max_tool_output_bytes", int, 51_200),
        ("preview_chars", int, 200),
    ]
    config = ArtifactsConfig()
    assert (config.enabled, config.max_tool_output_bytes, config.preview_chars) == (
        False,
        51_200,
        200,
    )


def test_the_settings_are_accepted_under_their_original_names() -> None:
    config = ArtifactsConfig(enabled=True, maxToolOutputBytes=10, previewChars=5)
    assert config == ArtifactsConfig(enabled=True, max_tool_output_bytes=10, preview_chars=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enabled": "true"}, "enabled must be True or False, got 'true'"),
        ({"enabled": 1}, "enabled must be True or False, got 1"),
        (
            {"max_tool_output_bytes": 0},
            "max_tool_output_bytes must be an integer of at least 1, got 0",
        ),
        ({"previewChars": -1}, "preview_chars must be an integer of at least 0, got -1"),
        ({"maxBytes": 5}, "there is no setting 'maxBytes'"),
    ],
)
def test_an_invalid_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ArtifactsConfig(**settings)


# The conversion of results


def test_tools_are_unchanged_unless_enabled() -> None:
    assert wrap_tools([log, rows], RunContext(), ArtifactsConfig()) == [log, rows]
    assert wrap_tools({"a": log}, RunContext(), ArtifactsConfig()) == {"a": log}


def test_a_large_result_becomes_a_pointer_with_its_first_characters() -> None:
    ctx = RunContext()
    answer = json.loads(tools(ctx)["log"](lines=2_000))
    assert list(answer) == ["pointer", "preview", "sizeBytes", "name"]
    assert answer["preview"] == log(2_000)[:200]
    assert len(answer["preview"]) == 200
    assert answer["sizeBytes"] == approx_byte_size(log(2_000)) == len(log(2_000).encode())
    assert answer["name"] is None
    assert is_pointer(answer["pointer"])
    assert get_artifact(ctx, answer["pointer"]) == log(2_000)


def test_the_limit_counts_bytes_exactly_and_a_result_above_it_leaves() -> None:
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


def test_the_tools_alone_keep_the_artifacts_of_their_context() -> None:
    read, add, *_ = wrap_tools([rows, total], RunContext(), ON)
    del _
    gc.collect()
    assert add(values=json.loads(read(count=3_000))["pointer"]) == sum(range(3_000))


def test_async_tools_stay_async() -> None:
    async def slow(lines: int) -> str:
        return log(lines)

    (wrapped, *_) = wrap_tools([slow], RunContext(), ON)
    assert inspect.iscoroutinefunction(wrapped)
    assert "pointer" in json.loads(asyncio.run(wrapped(lines=2_000)))


def test_generators_stream_unchanged_beside_wrapped_tools() -> None:
    def lines() -> Iterator[str]:
        yield "a"

    async def async_lines() -> AsyncIterator[str]:
        yield "a"

    made = wrap_tools([lines, async_lines, functools.partial(lines), log], RunContext(), ON)
    assert made[:2] == [lines, async_lines]
    assert list(made[2]()) == ["a"]
    assert "pointer" in json.loads(made[3](lines=2_000))


def test_partials_and_objects_that_can_be_called_are_tools_too() -> None:
    class Reader:
        def __call__(self, lines: int) -> str:
            return log(lines)

    partial, reader, *_ = wrap_tools([functools.partial(log, 2_000), Reader()], RunContext(), ON)
    assert (partial.__name__, reader.__name__) == ("log", "Reader")
    assert "pointer" in json.loads(partial())
    assert "pointer" in json.loads(reader(lines=2_000))


def test_every_tool_of_a_list_is_returned_whatever_its_name() -> None:
    made = wrap_tools([lambda: 1, lambda: 2], RunContext(), ON)
    assert [made[0](), made[1]()] == [1, 2]
    assert len(made) == 5


# The three tools


def test_three_tools_are_added_with_the_published_parameters() -> None:
    made = wrap_tools([log], RunContext(), ON)
    assert [tool.__name__ for tool in made] == [
        "log",
        "storeArtifact",
        "getArtifact",
        "listArtifacts",
    ]
    shapes = [
        {p.name: p.default for p in inspect.signature(tool).parameters.values()}
        for tool in made[1:]
    ]
    empty = inspect.Parameter.empty
    assert shapes == [
        {"name": empty, "value": empty, "contentType": None},
        {"pointerOrName": empty},
        {},
    ]


def test_an_executor_describes_the_three_tools_with_the_published_types() -> None:
    with coatcheck.open("memory:") as store:
        made = ToolExecutor(store.session("s"), wrap_tools([], RunContext(), ON)).tools
    types = [
        {name: one["type"] for name, one in tool.parameters["properties"].items()} for tool in made
    ]
    assert types == [
        {"name": "string", "value": "string", "contentType": "string"},
        {"pointerOrName": "string"},
        {},
    ]
    assert made[0].parameters["required"] == ["name", "value"]


def test_three_tools_store_get_and_list() -> None:
    store, get, listing = wrap_tools([], RunContext(), ON)
    stored = json.loads(store(name="notes", value='{"a":[1,2]}', contentType="application/json"))
    assert list(stored) == ["pointer", "preview", "sizeBytes", "name"]
    assert stored == {
        "pointer": stored["pointer"],
        "preview": '{"a":[1,2]}',
        "sizeBytes": 11,
        "name": "notes",
    }
    assert get(pointerOrName="notes") == get(pointerOrName=stored["pointer"]) == '{"a":[1,2]}'
    (entry,) = json.loads(listing())
    assert list(entry) == ["pointer", "name", "sizeBytes", "preview", "contentType", "storedAt"]
    assert (entry["name"], entry["contentType"], entry["sizeBytes"]) == (
        "notes",
        "application/json",
        11,
    )
    assert (entry["pointer"], entry["preview"]) == (stored["pointer"], '{"a":[1,2]}')
    assert entry["storedAt"].endswith("Z")


@pytest.mark.parametrize(
    "missing", ["nothing", "art:ffffffffffff", "art:does-not-exist", "art_0123456789abcdef"]
)
def test_a_missing_artifact_is_named_by_the_tool_and_none_in_python(missing: str) -> None:
    ctx = RunContext()
    _, get, _ = wrap_tools([], ctx, ON)
    assert get(pointerOrName=missing) == f"[no artifact found for '{missing}']"
    assert get_artifact(ctx, missing) is None


def test_a_value_of_any_size_comes_back_completely_and_is_not_wrapped_again() -> None:
    store, get, listing = wrap_tools([], RunContext(), ON)
    store(name="log", value=log(10_000))
    assert get(pointerOrName="log") == log(10_000)
    assert len(json.loads(listing())) == 1


def test_an_executor_passes_pointers_to_the_tool_and_returns_the_whole_value() -> None:
    ctx = RunContext()
    pointer = store_artifact(ctx, log(2_000)).pointer
    outcome = ToolExecutor(ctx.session, wrap_tools([], ctx, ON)).run(
        ToolCall("c", "getArtifact", {"pointerOrName": pointer})
    )
    assert outcome.text == log(2_000)


def test_secrets_are_masked_in_every_preview() -> None:
    ctx = RunContext()
    made = wrap_tools({"env": lambda: f"token={SECRET}\n" * 2_000}, ctx, ON)
    assert SECRET not in made["env"]()
    assert SECRET not in made["listArtifacts"]()
    assert SECRET not in made["storeArtifact"](name="t", value=f"token={SECRET}")
    assert SECRET not in json.dumps(ctx.session_state)
    assert get_artifact(ctx, "t") == f"token={SECRET}"
    cut = [entry["preview"] for size in range(60) for entry in list_artifacts(ctx, size)]
    assert not [preview for preview in cut if SECRET[:12] in preview]


def test_the_preview_of_bytes_is_the_same_everywhere() -> None:
    ctx = RunContext()
    made = wrap_tools({"png": lambda: b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 300}, ctx, ON)
    answer = json.loads(made["png"]())
    (entry,) = json.loads(made["listArtifacts"]())
    assert entry["preview"] == answer["preview"] == "iVBORw0KGgo" + answer["preview"][11:]


# store_artifact, get_artifact, list_artifacts


def test_a_tool_can_store_under_a_name_and_the_model_reads_it_by_that_name() -> None:
    ctx = RunContext()
    ref = store_artifact(
        ctx, "the report", {"name": "report-2024-q4", "contentType": "text/markdown"}
    )
    assert (ref.name, ref.media_type) == ("report-2024-q4", "text/markdown")
    assert get_artifact(ctx, "report-2024-q4") == get_artifact(ctx, ref.pointer) == "the report"
    assert ref == store_artifact(
        ctx, "the report", name="report-2024-q4", content_type="text/markdown"
    )
    with pytest.raises(InvalidArgument, match="there is no option 'nmae'"):
        store_artifact(ctx, "x", {"nmae": "y"})


@pytest.mark.parametrize("value", ["text", "", {"a": [1, 2.5, None, True]}, [], 5, None])
def test_the_raw_value_is_preserved(value: object) -> None:
    ctx = RunContext()
    pointer = store_artifact(ctx, value).pointer
    assert get_artifact(ctx, pointer, "missing") == value


def test_an_id_is_accepted_in_its_three_spellings() -> None:
    ctx = RunContext()
    digest = store_artifact(ctx, "hello").artifact_id
    for spelling in (f"art:{digest[:12]}", f"art:{digest}", f"art_{digest[:16]}", digest):
        assert get_artifact(ctx, spelling) == "hello"


def test_an_artifact_with_two_names_is_listed_once() -> None:
    ctx = RunContext()
    store_artifact(ctx, "the same", name="one")
    store_artifact(ctx, "the same", name="two")
    assert [entry["name"] for entry in list_artifacts(ctx)] == ["two"]
    assert get_artifact(ctx, "one") == get_artifact(ctx, "two") == "the same"


def test_a_stored_none_is_not_mistaken_for_a_missing_artifact() -> None:
    ctx = RunContext()
    _, get, _ = wrap_tools([], ctx, ON)
    store_artifact(ctx, None, name="empty")
    assert get_artifact(ctx, "empty", "missing") is None
    assert get_artifact(ctx, "nothing", "missing") == "missing"
    assert get(pointerOrName="empty") is None


# Lifecycle and scope


def test_a_new_context_starts_with_an_empty_map_in_its_state() -> None:
    assert RunContext().session_state["__artifacts"] == {}


def test_the_map_has_an_entry_for_each_artifact_that_the_state_has_stored() -> None:
    ctx = RunContext()
    (read, *_) = wrap_tools([log], ctx, ON)
    ref = store_artifact(ctx, {"a": 1}, name="n")
    read(lines=2_000)
    artifacts = ctx.session_state["__artifacts"]
    assert len(artifacts) == 2
    assert artifacts[ref.artifact_id] == {
        "pointer": ref.pointer,
        "name": "n",
        "sizeBytes": 7,
        "preview": '{"a":1}',
        "contentType": "application/json",
        "storedAt": ref.to_record()["created_at"],
    }
    assert sorted(map(str, artifacts.values())) == sorted(map(str, list_artifacts(ctx)))


def test_artifacts_belong_to_a_run_unless_its_state_is_passed_on() -> None:
    state: dict[str, Any] = {}
    store_artifact(RunContext(state), "kept", name="a")
    assert get_artifact(RunContext(state), "a") == "kept"
    assert get_artifact(RunContext(), "a") is None
    assert get_artifact(RunContext({}), "a") is None


def test_artifacts_outlive_their_context_in_the_state_that_it_returned() -> None:
    def turn(state: dict[str, Any] | None) -> Any:
        ctx = RunContext(state)
        if get_artifact(ctx, "k") is None:
            store_artifact(ctx, os.urandom(4).hex(), "k")
        return ctx.session_state

    state = turn(None)
    gc.collect()
    first = get_artifact(RunContext(state), "k")
    gc.collect()
    assert first is not None
    assert get_artifact(RunContext(turn(turn(state))), "k") == first


@pytest.mark.parametrize("make", [RunContext, lambda: RunContext({})])
def test_the_artifacts_of_a_state_end_with_it(make: Any) -> None:
    ctx = make()
    pointer = store_artifact(ctx, "of this run" * 50_000).pointer
    store = ctx.session.store
    assert store.find(pointer)
    del ctx
    gc.collect()
    assert store.find(pointer) is None


def test_a_state_in_a_cycle_ends_too() -> None:
    state: dict[str, Any] = {}
    state["itself"] = state
    ctx = RunContext(state)
    pointer, store = store_artifact(ctx, "in a cycle").pointer, ctx.session.store
    del ctx, state
    gc.collect()
    assert store.find(pointer) is None


def test_a_state_that_is_collected_in_the_middle_of_a_call_to_the_store_ends_later() -> None:
    contexts = [RunContext({})]
    pointer, store = store_artifact(contexts[0], "ends later").pointer, contexts[0].session.store
    catalog: Any = store._catalog
    catalog.change("clearing the contexts", contexts.clear)
    assert store.find(pointer)
    RunContext()
    assert store.find(pointer) is None


def test_a_thousand_dropped_states_leave_nothing_behind() -> None:
    store = RunContext().session.store
    gc.collect()
    before = store.stats().stored_bytes
    for number in range(1_000):
        store_artifact(RunContext({}), f"{number} " * 1_000)
    gc.collect()
    assert store.stats().stored_bytes <= before


@pytest.mark.parametrize(
    "copied",
    [
        lambda state: json.loads(json.dumps(state)),
        lambda state: json.loads(json.dumps(state, indent=1)),
        lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301
        copy.copy,
        copy.deepcopy,
        dict,
    ],
    ids=["json", "indented", "pickle", "copy", "deepcopy", "dict"],
)
def test_a_copy_of_a_state_shares_its_artifacts_and_keeps_them(copied: Any) -> None:
    state: dict[str, Any] = {"other": [1]}
    store_artifact(RunContext(state), "kept", name="a")
    again = copied(state)
    ctx = RunContext(again)
    del state
    gc.collect()
    assert get_artifact(ctx, "a") == "kept"
    assert again["other"] == [1]


def test_a_saved_state_has_no_values_and_a_warning_says_that_they_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ctx = RunContext()
    pointer = store_artifact(ctx, "x" * 300 + "the end", name="a").pointer
    saved = json.dumps(ctx.session_state)
    assert pointer in saved
    assert "the end" not in saved
    del ctx
    gc.collect()
    with caplog.at_level(logging.WARNING, "coatcheck"):
        again = RunContext(json.loads(saved))
        RunContext(again.session_state)
    assert get_artifact(again, "a") is None
    assert again.session_state["__artifacts"] == {}
    (record,) = caplog.records
    assert record.message.startswith(
        "1 of the artifacts that a session state names are gone: without store=,"
    )


def test_saved_artifacts_can_be_restored_from_a_storage_of_ones_own() -> None:
    ctx = RunContext()
    pointer = store_artifact(ctx, rows(3), name="rows").pointer
    saved = json.dumps(saved_artifacts(ctx))
    del ctx
    gc.collect()
    again = RunContext({"__artifacts": json.loads(saved)})
    assert get_artifact(again, "rows") == get_artifact(again, pointer) == rows(3)


def test_a_state_can_move_from_memory_to_a_store(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    store_artifact(RunContext(state), "moved", name="a")
    with coatcheck.open(tmp_path) as store:
        RunContext(state, store=store)
    with coatcheck.open(tmp_path) as store:
        assert get_artifact(RunContext(json.loads(json.dumps(state)), store=store), "a") == "moved"


def test_a_state_continues_in_a_store_that_was_opened_again(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for turn in range(3):
        with coatcheck.open(tmp_path) as store:
            ctx = RunContext(state, store=store)
            assert len(list_artifacts(ctx)) == len(state["__artifacts"]) == turn
            store_artifact(ctx, f"turn {turn}")


def test_a_named_session_in_memory_outlives_its_state() -> None:
    store_artifact(RunContext(session_id="mine"), "kept", name="a")
    gc.collect()
    again = RunContext(session_id="mine")
    assert get_artifact(again, "a") == "kept"
    assert get_artifact(RunContext(json.loads(json.dumps(again.session_state))), "a") == "kept"
    again.session.end()


def test_every_backend_makes_artifacts_carry_over(backend: Backend) -> None:
    store = backend.open()
    ctx = RunContext(session_id="s", store=store)
    (read, *_) = wrap_tools([log], ctx, ON)
    pointer = json.loads(read(lines=2_000))["pointer"]
    saved = json.loads(json.dumps(ctx.session_state))
    again = store if backend.url == "memory:" else backend.open()
    assert get_artifact(RunContext(saved, store=again), pointer) == log(2_000)
    assert get_artifact(RunContext(session_id="s", store=again), pointer) == log(2_000)


def test_a_store_is_opened_once_for_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first, second = (
        RunContext(session_id="s", store="~/kept"),
        RunContext(session_id="s", store=tmp_path / "kept"),
    )
    try:
        assert first.session.store is second.session.store
        store_artifact(first, "durable", name="a")
        assert get_artifact(second, "a") == "durable"
        assert (tmp_path / "kept").is_dir()
    finally:
        first.session.store.close()


# Errors


def test_bad_input_gets_a_clear_error_and_loses_nothing() -> None:
    ctx = RunContext()
    store, get, _ = wrap_tools([], ctx, ON)
    with pytest.raises(InvalidArgument, match="there is a tool 'getArtifact' already"):
        wrap_tools([get], ctx, ON)
    with pytest.raises(InvalidArgument, match="is a pointer"):
        store_artifact(ctx, "x", name="art:0123456789ab")
    with pytest.raises(InvalidArgument, match="session_state must be a dict, got a list"):
        RunContext([])  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument,
        match="store must be a folder, an s3:// address or an open Store, got a int",
    ):
        RunContext(store=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no backend for 'gs://bucket'"):
        RunContext(store="gs://bucket")
    assert store(name="art:0123456789ab", value="x").startswith("[error: ")
    assert list_artifacts(ctx) == []


def test_secrets_are_masked_before_they_are_stored_if_the_settings_say_so(tmp_path: Path) -> None:
    from coatcheck.config import load

    (tmp_path / "coatcheck.toml").write_text('[policy]\nredact = "store"\n')
    with coatcheck.open(tmp_path / "s", settings=load(file=tmp_path / "coatcheck.toml")) as store:
        ctx = RunContext(session_id="s", store=store)
        (dump, *_) = wrap_tools([lambda: f"token={SECRET}\n" * 3_000], ctx, ON)
        assert SECRET not in dump()
        store_artifact(ctx, {"token": SECRET})
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
