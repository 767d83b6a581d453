"""The drop-in for tool artifacts: every name, field, type, default, path and text of the published
page."""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import os
import re
import stat
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import ToolCall
from coatcheck.compat import tool_artifacts
from coatcheck.compat.tool_artifacts import (
    TOOL_MESSAGE_MAX_CHARS,
    ArtifactRef,
    ArtifactStore,
    BoundedToolExecutor,
    ToolArtifactReference,
    ToolExecutionResult,
    TurnRuntimeState,
    get_global_artifact_store,
    outcome_to_model_content,
)
from coatcheck.errors import InvalidArgument, StoreUnavailable
from tests.backends import Backend, Clock

HINT = "Use the read_file tool to retrieve the full content."
LOG = "2026-01-01 ERROR\nlogin failed\n" * 1_000
SECRET = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF2hJ5"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    made = ArtifactStore(tmp_path / "base")
    yield made
    made.close()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tool_artifacts, "_global", None)
    return tmp_path


def big(lines: int) -> str:
    return "a line\n" * lines


def read_file(path: str) -> str:
    return Path(path).read_text()


# Key properties, ArtifactRef


def test_the_limit_and_the_time_to_live_are_the_published_ones() -> None:
    assert TOOL_MESSAGE_MAX_CHARS == 12_000
    parameters = inspect.signature(ArtifactStore.store).parameters
    assert list(parameters) == ["self", "session_id", "content", "tool_name", "ttl_s"]
    assert parameters["ttl_s"].default == 3_600


def test_a_ref_has_exactly_the_published_fields_and_types() -> None:
    hints = typing.get_type_hints(ArtifactRef)
    assert [(field.name, hints[field.name]) for field in fields(ArtifactRef)] == [
        ("artifact_id", str),
        ("session_id", str),
        ("file_path", str),
        ("created_at", float),
        ("ttl_s", int),
        ("size_bytes", int),
        ("tool_name", str),
        ("summary", str),
    ]
    assert isinstance(ArtifactRef.is_expired, property)


def test_the_fields_of_a_ref_describe_what_was_stored(store: ArtifactStore) -> None:
    before = time.time()
    ref = store.store(session_id="sess_abc", content=LOG, tool_name="local_search", ttl_s=3_600)
    assert re.fullmatch("art_[0-9a-f]{16}", ref.artifact_id)
    assert (ref.session_id, ref.tool_name, ref.size_bytes, ref.ttl_s) == (
        "sess_abc",
        "local_search",
        len(LOG),
        3_600,
    )
    assert before <= ref.created_at <= time.time()
    assert [type(getattr(ref, field.name)) for field in fields(ref)] == [
        str,
        str,
        str,
        float,
        int,
        int,
        str,
        str,
    ]
    assert not ref.is_expired
    assert ref.error is None


def test_the_hint_for_a_model_is_a_dict_with_the_published_text(store: ArtifactStore) -> None:
    ref = store.store("s", LOG, "grep")
    assert list(ref.to_model_hint().items()) == [
        ("artifact_reference", ref.artifact_id),
        ("summary", LOG[:200].replace("\n", " ")),
        ("hint", HINT),
        ("size_bytes", len(LOG)),
    ]


@pytest.mark.parametrize(
    "content", ["short", "", "a\nb\n\nc", "a\r\nb", " lead  two\n\n\nx\t\ty", "p" * 500, "é" * 500]
)
def test_the_summary_is_the_first_200_characters_with_spaces_for_newlines(
    store: ArtifactStore, content: str
) -> None:
    ref = store.store("s", content, "t")
    assert ref.summary == content[:200].replace("\n", " ")
    assert store.get_ref(ref.artifact_id) == ref


def test_secrets_are_masked_in_the_summary_only(store: ArtifactStore) -> None:
    ref = store.store("s", f"token={SECRET}", "t")
    assert SECRET not in str(ref.to_model_hint())
    assert store.retrieve(ref.artifact_id) == f"token={SECRET}"


# Write


def test_the_file_is_named_by_session_and_artifact(store: ArtifactStore) -> None:
    ref = store.store("sess_abc", LOG, "t")
    path = store.base_dir / "sess_abc" / f"{ref.artifact_id}.txt"
    assert ref.file_path == str(path)
    assert path.is_absolute()
    assert path.read_text() == LOG
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (
        0o400,
        0o700,
    )


def test_the_default_base_is_a_private_folder_below_the_temporary_one(temporary: Path) -> None:
    store = ArtifactStore()
    ref = store.store("s1", "x", "t")
    store.close()
    assert ref.file_path == str(temporary / "sb_artifacts" / "s1" / f"{ref.artifact_id}.txt")
    assert stat.S_IMODE((temporary / "sb_artifacts").stat().st_mode) == 0o700


def test_an_open_folder_of_this_user_becomes_private(temporary: Path) -> None:
    (temporary / "sb_artifacts").mkdir()
    (temporary / "sb_artifacts").chmod(0o777)
    ArtifactStore().close()
    assert stat.S_IMODE((temporary / "sb_artifacts").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "other user"])
def test_a_default_base_that_another_user_may_have_made_is_refused(
    temporary: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = temporary / "sb_artifacts"
    if kind == "link":
        (temporary / "elsewhere").mkdir()
        base.symlink_to(temporary / "elsewhere")
    elif kind == "file":
        base.write_text("")
    else:
        base.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: base.stat().st_uid + 1)
    with pytest.raises(
        StoreUnavailable,
        match=r"is not a folder of this user \(pass another base_dir, or set TMPDIR",
    ):
        ArtifactStore()
    assert not list((temporary / "elsewhere").glob("*"))


@pytest.mark.parametrize(
    "session_id",
    ["../../up", "..", ".", "/etc", "a/b", "a\\b", "~root", "user@host:4", ".coatcheck"],
)
def test_a_session_id_never_leaves_its_own_folder(store: ArtifactStore, session_id: str) -> None:
    ref = store.store(session_id, "content", "t")
    path = Path(ref.file_path)
    assert path.parent.parent == store.base_dir
    assert not path.parent.name.startswith(".")
    assert os.path.realpath(path) == str(path)
    assert store.retrieve(ref.artifact_id) == "content"
    assert store.cleanup_session(session_id) == 1
    assert not path.exists()


def test_two_session_ids_never_share_a_folder(store: ArtifactStore) -> None:
    ids = ["a/b", "a%2Fb", "a%252Fb", "..", "%2E.", "."]
    assert len(
        {Path(store.store(session_id, "x", "t").file_path).parent for session_id in ids}
    ) == len(ids)


@pytest.mark.parametrize("session_id", ["", "x" * 201, "é" * 100])
def test_a_session_id_that_cannot_name_a_folder_is_refused(
    store: ArtifactStore, session_id: str
) -> None:
    with pytest.raises(InvalidArgument, match="session id"):
        store.store(session_id, "x", "t")


def test_a_failed_write_does_not_raise(store: ArtifactStore) -> None:
    store.close()
    ref = store.store("s", LOG, "grep")
    assert ref.error == "the store is closed (open the store again)"
    assert (ref.artifact_id, ref.file_path, ref.size_bytes) == ("", "", len(LOG))
    assert ref.to_model_hint() == {
        "artifact_reference": "", "summary": ref.summary,
        "hint": "The full content could not be stored: the store is closed (open the store again)",
        "size_bytes": len(LOG),
    }  # fmt: skip


def test_a_folder_that_cannot_be_written_does_not_raise(store: ArtifactStore) -> None:
    (store.base_dir / "s").write_text("in the way")
    ref = store.store("s", LOG, "grep")
    assert ref.error is not None
    assert store.retrieve(ref.artifact_id) is None


@pytest.mark.parametrize("ttl_s", [-1, 0.5, None, True, "60"])
def test_a_time_to_live_is_a_whole_number_of_seconds(store: ArtifactStore, ttl_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="ttl_s must be an integer of at least 0"):
        store.store("s", LOG, "grep", ttl_s=ttl_s)


# Read


def test_content_comes_back_as_text_even_in_another_process(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ref, text = (
        store.store("s1", {"rows": [1, 2]}, "query"),
        store.store("s1", "odd \ud800\r\n", "t"),
    )
    store.close()
    again = ArtifactStore(tmp_path)
    assert again.retrieve(ref.artifact_id) == '{"rows":[1,2]}'
    assert again.retrieve(text.artifact_id) == "odd \ud800\r\n"
    assert again.get_ref(ref.artifact_id) == ref
    again.close()


@pytest.mark.parametrize(
    "unknown", ["art_0123456789abcdef", "nonsense", "", "art_../../etc", "art_", None, 5]
)
def test_nothing_is_found_for_an_unknown_id(store: ArtifactStore, unknown: Any) -> None:
    store.store("s", LOG, "t")
    assert store.retrieve(unknown) is None
    assert store.get_ref(unknown) is None


def test_an_id_is_accepted_in_its_three_spellings(store: ArtifactStore) -> None:
    ref = store.store("s", LOG, "t")
    found = store.backend.session("s").ref(f"art:{ref.artifact_id[4:]}")
    assert found is not None
    for spelling in (ref.artifact_id, found.pointer, f"art:{found.artifact_id}", found.artifact_id):
        assert store.retrieve(spelling) == LOG
        assert store.get_ref(spelling) == ref


def test_a_missing_file_is_a_missing_artifact_and_its_ref_does_not_read_it(
    store: ArtifactStore,
) -> None:
    ref = store.store("s", LOG, "t")
    Path(ref.file_path).unlink()
    assert store.retrieve(ref.artifact_id) is None
    assert store.get_ref(ref.artifact_id) == ref
    assert not Path(ref.file_path).exists()
    store.store("other session", LOG, "t")
    assert store.retrieve(ref.artifact_id) == LOG


def test_an_expired_artifact_is_not_found(store: ArtifactStore) -> None:
    short, long = store.store("s", LOG, "t", ttl_s=0), store.store("s", LOG + "x", "t")
    assert short.is_expired
    assert store.retrieve(short.artifact_id) is None
    assert store.get_ref(short.artifact_id) is None
    assert store.retrieve(long.artifact_id) == LOG + "x"


def test_storing_again_starts_a_new_time_to_live_and_never_shortens_one(tmp_path: Path) -> None:
    clock = Clock()
    with coatcheck.open(tmp_path / "s", clock=clock, ttl=None) as backend:
        store = ArtifactStore(tmp_path / "files", store=backend)
        first = store.store("s", LOG, "t", ttl_s=100)
        clock.advance(60)
        again = store.store("s", LOG, "t", ttl_s=100)
        store.store("s", LOG, "t", ttl_s=1)
        assert again.artifact_id == first.artifact_id
        assert (again.created_at - first.created_at, again.ttl_s) == (60, 100)
        clock.advance(99)
        assert store.retrieve(first.artifact_id) == LOG
        clock.advance(1)
        assert store.retrieve(first.artifact_id) is None


# Cleanup


def test_cleaning_up_a_session_removes_its_files_and_leaves_others(store: ArtifactStore) -> None:
    mine = [store.store("s1", LOG + str(number), "t") for number in range(3)]
    other = store.store("s2", LOG + "0", "t")
    orphan = Path(mine[0].file_path).parent / "orphan.txt"
    orphan.write_text("left by a crash")
    assert store.cleanup_session("s1") == 3
    assert not orphan.parent.exists()
    assert [store.get_ref(ref.artifact_id) for ref in mine[1:]] == [None, None]
    assert store.retrieve(other.artifact_id) == LOG + "0"
    assert Path(other.file_path).exists()
    assert store.cleanup_session("s1") == 0


def test_cleaning_up_removes_expired_artifacts_from_the_index_and_the_disk(
    store: ArtifactStore,
) -> None:
    short, long = store.store("s", LOG, "t", ttl_s=0), store.store("s", LOG + "x", "t")
    gone = store.store("another", LOG + "y", "t", ttl_s=0)
    assert Path(short.file_path).exists()
    assert store.cleanup_expired() == 2
    assert not Path(short.file_path).exists()
    assert not Path(gone.file_path).parent.exists()
    assert Path(long.file_path).exists()
    assert store.stats()["artifacts"] == 1
    assert store.cleanup_expired() == 0


def test_cleaning_up_touches_only_files_of_artifacts(store: ArtifactStore) -> None:
    kept = store.store("s", LOG, "t")
    orphan = Path(kept.file_path).with_name("art_" + "f" * 16 + ".txt")
    orphan.write_text("left by a crash")
    notes = store.base_dir / "notes"
    notes.mkdir()
    (notes / "mine.txt").write_text("not an artifact")
    (store.base_dir / "empty").mkdir()
    assert store.cleanup_expired() == 0
    assert not orphan.exists()
    assert Path(kept.file_path).exists()
    assert (notes / "mine.txt").exists()
    assert (store.base_dir / "empty").exists()


def test_a_cleanup_beside_writers_removes_no_file_of_a_live_artifact(store: ArtifactStore) -> None:
    done = threading.Event()
    missing: list[str] = []

    def clean() -> None:
        while not done.is_set():
            store.cleanup_expired()

    def write(writer: int) -> None:
        for number in range(60):
            content = f"{writer % 2} {number}"
            store.store(f"s{writer}", content, "t", ttl_s=0)  # its file may be removed at any time
            ref = store.store(f"s{writer}", content, "t")
            if ref.error or not Path(ref.file_path).exists():
                missing.append(f"{ref}")

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write, range(4)))
    done.set()
    cleaner.join()
    assert missing == []
    assert len(list(store.base_dir.glob("s*/art_*.txt"))) == 240


def _write_in_another_process(base: str, count: int) -> None:
    store = ArtifactStore(base)
    for number in range(count):
        store.store("s", f"{number}", "t", ttl_s=0)
        store.store("s", f"{number}", "t")
    store.close()


def test_a_cleanup_beside_another_process_ends_with_every_file(store: ArtifactStore) -> None:
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_in_another_process, args=(str(store.base_dir), 60)
    )
    writer.start()
    while writer.is_alive():
        store.cleanup_expired()
        store.cleanup_session("another session")
    writer.join()
    assert writer.exitcode == 0
    live = store.backend.session("s").list()
    assert len(live) == 60
    assert [ref.artifact_id for ref in live if store.retrieve(ref.artifact_id) is None] == []


# BoundedToolExecutor


def test_the_outcomes_have_the_published_fields() -> None:
    hints = typing.get_type_hints(ToolArtifactReference)
    assert [(field.name, hints[field.name]) for field in fields(ToolArtifactReference)] == [
        ("call_id", str),
        ("tool_name", str),
        ("artifact_id", str),
        ("summary", str),
        ("size_bytes", int),
    ]
    assert ToolExecutionResult(call_id="c", output="x").output == "x"
    state = TurnRuntimeState(session_id="sess_abc")
    assert (state.session_id, state.is_accepting_writes()) == ("sess_abc", True)


def test_an_output_at_the_limit_passes_and_one_above_it_becomes_a_reference(
    store: ArtifactStore,
) -> None:
    executor = BoundedToolExecutor({"repeat": lambda count: "x" * count}, store, "s")
    small = executor.execute("repeat", {"count": 12_000}, call_id="c1")
    assert isinstance(small, ToolExecutionResult)
    assert (small.call_id, small.tool_name, small.output) == ("c1", "repeat", "x" * 12_000)
    assert outcome_to_model_content(small) == "x" * 12_000
    large = executor.execute("repeat", {"count": 12_001}, call_id="c2")
    assert isinstance(large, ToolArtifactReference)
    assert (large.call_id, large.tool_name, large.summary, large.size_bytes) == (
        "c2",
        "repeat",
        "x" * 200,
        12_001,
    )
    assert store.retrieve(large.artifact_id) == "x" * 12_001


def test_the_serialized_json_of_an_output_is_counted_and_stored(store: ArtifactStore) -> None:
    executor = BoundedToolExecutor({"rows": lambda count: {"k": "x" * count}}, store, "s")
    assert executor.execute("rows", {"count": 11_992}) == ToolExecutionResult(
        "", "rows", {"k": "x" * 11_992}
    )
    large = executor.execute("rows", {"count": 11_993})
    assert isinstance(large, ToolArtifactReference)
    assert store.retrieve(large.artifact_id) == json.dumps(
        {"k": "x" * 11_993}, separators=(",", ":")
    )


def test_the_model_gets_the_published_reference(store: ArtifactStore) -> None:
    outcome = BoundedToolExecutor([big], store, "s").execute("big", {"lines": 5_000})
    assert isinstance(outcome, ToolArtifactReference)
    assert list(outcome_to_model_content(outcome).items()) == [
        ("artifact_reference", outcome.artifact_id),
        ("summary", big(5_000)[:200].replace("\n", " ")),
        ("hint", HINT),
        ("size_bytes", 35_000),
    ]


def test_the_model_reads_the_file_and_gets_the_full_content_inline(store: ArtifactStore) -> None:
    executor = BoundedToolExecutor([big, read_file], store, "s")
    reference = outcome_to_model_content(executor.execute("big", {"lines": 5_000}))
    ref = store.get_ref(reference["artifact_reference"])
    assert ref is not None
    for path in (ref.file_path, ref.artifact_id, f"art:{ref.artifact_id[4:]}"):
        outcome = executor.execute("read_file", {"path": path})
        assert outcome_to_model_content(outcome) == big(5_000)
        outcome = executor.execute("read_file", json.dumps({"path": path}))
        assert outcome_to_model_content(outcome) == big(5_000)


def test_any_tool_that_reads_a_stored_path_is_never_stubbed(store: ArtifactStore) -> None:
    def shell(command: dict[str, list[str]]) -> dict[str, str]:
        return {"stdout": Path(command["args"][-1].split()[-1]).read_text()[:20_000], "code": "0"}

    executor = BoundedToolExecutor([big, shell], store, "s")
    reference = executor.execute("big", {"lines": 5_000})
    assert isinstance(reference, ToolArtifactReference)
    ref = store.get_ref(reference.artifact_id)
    assert ref is not None
    outcome = executor.execute(
        "shell", {"command": {"args": ["-c", f"head -c 20000 {ref.file_path}"]}}
    )
    assert isinstance(outcome, ToolExecutionResult)
    assert len(outcome.output["stdout"]) == 20_000


def test_the_content_of_an_artifact_that_comes_back_from_another_tool_is_inline(
    store: ArtifactStore,
) -> None:
    executor = BoundedToolExecutor(
        {"search": lambda: big(5_000), "open_last": lambda: big(5_000)}, store, "s"
    )
    assert isinstance(executor.execute("search", {}), ToolArtifactReference)
    assert outcome_to_model_content(executor.execute("open_last", {})) == big(5_000)
    assert isinstance(executor.execute("search", {}), ToolArtifactReference)


def test_a_path_that_is_not_stored_does_not_keep_a_result_inline(
    store: ArtifactStore, tmp_path: Path
) -> None:
    executor = BoundedToolExecutor([read_file], store, "s")
    own = tmp_path / "big.log"
    own.write_text(big(5_000))
    expired = store.store("s", big(4_000), "t", ttl_s=0)
    for path in (own, Path(expired.file_path)):
        assert isinstance(executor.execute("read_file", {"path": str(path)}), ToolArtifactReference)


def test_results_are_stored_in_the_session_of_the_turn(store: ArtifactStore) -> None:
    executor = BoundedToolExecutor([big], store)
    outcome = executor.execute("big", {"lines": 5_000}, TurnRuntimeState(session_id="sess_abc"))
    assert isinstance(outcome, ToolArtifactReference)
    ref = store.get_ref(outcome.artifact_id)
    assert isinstance(ref, ArtifactRef)
    assert (ref.session_id, ref.tool_name, ref.ttl_s) == ("sess_abc", "big", 3_600)
    assert ref.file_path == str(store.base_dir / "sess_abc" / f"{ref.artifact_id}.txt")
    with pytest.raises(InvalidArgument, match="there is no session to store results in"):
        executor.execute("big", {"lines": 5_000})


def test_nothing_is_stored_once_the_turn_is_over(store: ArtifactStore) -> None:
    state = TurnRuntimeState(session_id="s")

    def ends_the_turn(lines: int) -> str:
        state.close()
        return big(lines)

    executor = BoundedToolExecutor([ends_the_turn], store)
    outcome = executor.execute("ends_the_turn", {"lines": 5_000}, state)
    assert not state.is_accepting_writes()
    assert isinstance(outcome, ToolExecutionResult)
    assert outcome.output == big(5_000)
    assert len(outcome_to_model_content(outcome)) <= 12_000
    assert "storing it failed: the turn is over" in outcome_to_model_content(outcome)
    assert store.stats()["artifacts"] == 0
    over = executor.execute(
        "ends_the_turn", {"lines": 1}, TurnRuntimeState(deadline=0, session_id="s")
    )
    assert over.is_error


def test_a_tool_that_outlasts_the_turn_is_abandoned(store: ArtifactStore) -> None:
    ended = threading.Event()

    def slow() -> str:
        ended.wait(60)
        return big(5_000)

    outcome = BoundedToolExecutor([slow], store, "s").execute("slow", {}, TurnRuntimeState(0.05))
    ended.set()
    assert outcome.is_error
    assert store.stats()["artifacts"] == 0


def test_a_result_that_cannot_be_stored_is_truncated(store: ArtifactStore) -> None:
    executor = BoundedToolExecutor([big], store, "s")
    store.close()
    outcome = executor.execute("big", {"lines": 5_000})
    assert isinstance(outcome, ToolExecutionResult)
    assert outcome.failure
    assert outcome.output == big(5_000)
    content = outcome_to_model_content(outcome)
    assert len(content) <= 12_000
    assert "storing it failed" in content


def test_a_slow_failing_or_unknown_tool_is_an_error(store: ArtifactStore) -> None:
    ended = threading.Event()
    tools: dict[str, Callable[..., Any]] = {"slow": lambda: ended.wait(60), "fails": lambda: 1 / 0}
    executor = BoundedToolExecutor(tools, store, "s")
    slow = executor.execute("slow", {}, timeout=0.05)
    ended.set()
    assert slow.is_error
    assert "0.05 s" in outcome_to_model_content(slow)
    assert executor.execute("fails", {}).is_error
    assert executor.execute("unknown", {}).is_error


def test_what_a_tool_yielded_before_it_failed_can_be_retrieved(store: ArtifactStore) -> None:
    def fails_later() -> Iterator[str]:
        yield big(100)
        raise RuntimeError("broken")

    outcome = BoundedToolExecutor([fails_later], store, "s").execute("fails_later", {})
    pointer = re.search(r"kept as (art:[0-9a-f]+)", outcome_to_model_content(outcome))
    assert pointer
    assert store.retrieve(pointer[1]) == big(100)


def test_calls_of_a_turn_run_together_and_async(store: ArtifactStore) -> None:
    async def slow(lines: int) -> str:
        return big(lines)

    executor = BoundedToolExecutor([big, slow], store, "s")
    calls = [ToolCall(f"c{lines}", "big", {"lines": lines}) for lines in (1, 5_000, 6_000)]
    state = TurnRuntimeState(60)
    assert [type(one) for one in executor.run_all(calls, state)] == [
        ToolExecutionResult,
        ToolArtifactReference,
        ToolArtifactReference,
    ]
    outcome = asyncio.run(executor.arun(ToolCall("c", "slow", {"lines": 7_000}), state))
    assert isinstance(outcome, ToolArtifactReference)
    assert store.retrieve(outcome.artifact_id) == big(7_000)
    assert (executor.names, [tool.name for tool in executor.tools]) == (
        ("big", "slow"),
        ["big", "slow"],
    )


def test_content_blocks_keep_their_shape_around_references(store: ArtifactStore) -> None:
    image = {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}

    def blocks() -> list[dict[str, str]]:
        return [{"type": "text", "text": big(5_000)}, image, {"type": "text", "text": "small"}]

    first, *rest = outcome_to_model_content(
        BoundedToolExecutor([blocks], store, "s").execute("blocks", {})
    )
    reference = json.loads(first["text"])
    assert (reference["size_bytes"], reference["hint"]) == (len(big(5_000)), HINT)
    assert store.retrieve(reference["artifact_reference"]) == big(5_000)
    assert rest == [image, {"type": "text", "text": "small"}]


# The global store


def test_one_global_store_serves_64_threads_and_opens_again(temporary: Path) -> None:
    with ThreadPoolExecutor(64) as threads:
        stores = set(threads.map(lambda _: get_global_artifact_store(), range(64)))
        (store,) = stores
        refs = list(
            threads.map(
                lambda number: store.store(f"s{number % 4}", big(number + 1), "t"), range(64)
            )
        )
        assert [store.retrieve(ref.artifact_id) for ref in refs] == [
            big(number + 1) for number in range(64)
        ]
    assert store.base_dir == temporary / "sb_artifacts"
    store.close()
    assert get_global_artifact_store() is not store
    assert get_global_artifact_store().retrieve(refs[0].artifact_id) == big(1)
    get_global_artifact_store().close()


def test_reads_work_in_the_global_store_after_the_state_of_the_turn_is_gone(
    temporary: Path,
) -> None:
    executor = BoundedToolExecutor([big, read_file])
    reference = executor.execute("big", {"lines": 5_000}, TurnRuntimeState(session_id="s"))
    assert isinstance(reference, ToolArtifactReference)
    again = executor.execute(
        "read_file", {"path": reference.artifact_id}, TurnRuntimeState(session_id="s")
    )
    assert outcome_to_model_content(again) == big(5_000)
    get_global_artifact_store().close()


# Other stores


def test_every_backend_can_be_behind_the_files(backend: Backend) -> None:
    shared = backend.open()
    store = ArtifactStore(shared)
    executor = BoundedToolExecutor([big, read_file], store, "s")
    reference = executor.execute("big", {"lines": 5_000})
    assert isinstance(reference, ToolArtifactReference)
    assert outcome_to_model_content(
        executor.execute("read_file", {"path": reference.artifact_id})
    ) == big(5_000)
    store.close()
    assert not store.base_dir.exists()
    elsewhere = ArtifactStore(shared if backend.url == "memory:" else backend.open())
    assert elsewhere.retrieve(reference.artifact_id) == big(5_000)
    ref = elsewhere.get_ref(reference.artifact_id)
    assert ref is not None
    assert Path(ref.file_path).read_text() == big(5_000)
    assert ref.ttl_s == 3_600
    assert elsewhere.cleanup_session("s") == 1
    assert elsewhere.retrieve(reference.artifact_id) is None
    elsewhere.close()
    assert not shared.closed


def test_an_s3_address_is_a_store_and_a_tilde_the_home_folder(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet.lending() as new_url:
        store = ArtifactStore(new_url())
        ref = store.store("s", LOG, "t")
        assert store.retrieve(ref.artifact_id) == LOG
        store.close()
    monkeypatch.setenv("HOME", str(tmp_path))
    store = ArtifactStore("~/art")
    assert Path(store.store("s", LOG, "t").file_path).is_relative_to(tmp_path / "art")
    store.close()
