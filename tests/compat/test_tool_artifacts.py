"""The drop-in for tool artifacts: the published names, shapes and defaults."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coatcheck.compat import tool_artifacts
from coatcheck.compat.tool_artifacts import (
    ArtifactRef,
    ArtifactStore,
    BoundedToolExecutor,
    ToolArtifactReference,
    ToolExecutionResult,
    TurnRuntimeState,
    get_global_artifact_store,
    outcome_to_model_content,
)
from coatcheck.errors import InvalidArgument

LOG = "2026-01-01 ERROR\nlogin failed\n" * 1_000


def big(lines: int) -> str:
    return "a line\n" * lines


def test_a_ref_has_the_published_fields(tmp_path: Path) -> None:
    ref = ArtifactStore(tmp_path).store("s1", LOG, "grep")
    assert re.fullmatch("art_[0-9a-f]{16}", ref.artifact_id)
    assert (ref.session_id, ref.tool_name, ref.size_bytes, ref.ttl_s) == ("s1", "grep", len(LOG), 3_600)
    assert abs(ref.created_at - time.time()) < 60
    assert isinstance(ref.created_at, float)
    assert ref.summary == LOG.replace("\n", " ")[:200]
    assert Path(ref.file_path).read_text() == LOG
    assert not ref.is_expired
    assert ref.error is None
    assert "read_file" in ref.to_model_hint()
    assert ref.file_path in ref.to_model_hint()


def test_results_are_found_by_their_id_even_in_another_process(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.store("s1", {"rows": [1, 2]}, "query")
    store.close()
    again = ArtifactStore(tmp_path)
    assert again.retrieve(ref.artifact_id) == {"rows": [1, 2]}
    assert again.get_ref(ref.artifact_id) == ref
    for unknown in ("art_0123456789abcdef", "nonsense", "", "art_../../etc"):
        assert again.retrieve(unknown) is None
        assert again.get_ref(unknown) is None


def test_the_time_to_live_counts_from_creation(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    short, long = store.store("s", LOG, "t", ttl_s=0.2), store.store("s", LOG + "x", "t")
    assert store.retrieve(short.artifact_id) == LOG
    time.sleep(0.25)
    assert short.is_expired
    assert store.retrieve(short.artifact_id) is None
    assert store.get_ref(short.artifact_id) is None
    assert store.cleanup_expired() == 1
    assert not Path(short.file_path).exists()
    assert Path(long.file_path).exists()
    assert store.stats()["artifacts"] == 1


def test_cleaning_up_a_session_removes_its_files_and_leaves_others(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    mine = [store.store("s1", LOG + str(number), "t") for number in range(3)]
    other = store.store("s2", LOG + "0", "t")
    orphan = Path(mine[0].file_path).parent / ("f" * 32 + "-00000000.txt")
    orphan.write_text("left by a crash")
    assert store.cleanup_session("s1") == 3
    assert not any(Path(ref.file_path).exists() for ref in mine)
    assert not orphan.exists()
    assert store.retrieve(other.artifact_id) == LOG + "0"
    assert Path(other.file_path).exists()
    assert store.cleanup_session("s1") == 0


def test_files_without_an_artifact_are_swept(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = store.store("s", LOG, "t")
    orphan = Path(kept.file_path).parent / ("f" * 32 + "-00000000.txt")
    orphan.write_text("left by a crash")
    assert store.cleanup_expired() == 0
    assert not orphan.exists()
    assert Path(kept.file_path).exists()


def test_a_failed_write_does_not_raise(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.close()
    ref = store.store("s", LOG, "grep")
    assert ref.error
    assert "closed" in ref.error
    assert ref.file_path == ""
    assert ref.summary
    assert "could not be stored" in ref.to_model_hint()
    with pytest.raises(InvalidArgument, match="ttl_s"):
        store.store("s", LOG, "grep", ttl_s=-1)


def test_small_results_pass_and_large_ones_become_references(tmp_path: Path) -> None:
    executor = BoundedToolExecutor([big], ArtifactStore(tmp_path), "s")
    small = executor.execute("big", {"lines": 2})
    assert isinstance(small, ToolExecutionResult)
    assert outcome_to_model_content(small) == big(2)
    assert len(big(1_714)) <= 12_000 < len(big(1_715))
    assert outcome_to_model_content(executor.execute("big", {"lines": 1_714})) == big(1_714)
    large = executor.execute("big", {"lines": 1_715})
    assert isinstance(large, ToolArtifactReference)
    assert large.duration > 0
    content = outcome_to_model_content(large)
    assert content.keys() == {"artifact_reference", "summary", "hint", "size_bytes"}
    assert content["size_bytes"] == len(big(1_715))
    path = re.search(r'read_file\("([^"]+)"\)', content["hint"])
    assert path
    assert Path(path[1]).read_text() == big(1_715)


def test_results_are_found_in_the_store_of_the_executor(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    content = outcome_to_model_content(BoundedToolExecutor([big], store, "s").execute("big", {"lines": 5_000}))
    ref = store.get_ref(content["artifact_reference"])
    assert isinstance(ref, ArtifactRef)
    assert (ref.session_id, ref.tool_name, ref.ttl_s) == ("s", "big", 3_600)
    assert store.retrieve(ref.artifact_id) == big(5_000)


def test_a_result_that_cannot_be_stored_is_truncated(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    executor = BoundedToolExecutor([big], store, "s")
    store.close()
    outcome = executor.execute("big", {"lines": 5_000})
    assert isinstance(outcome, ToolExecutionResult)
    assert outcome.failure
    assert len(outcome.text) <= 12_000
    assert "storing it failed" in outcome.text


def test_nothing_is_stored_once_the_turn_is_over(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    state = TurnRuntimeState()

    def ends_the_turn() -> str:
        state.close()
        return big(5_000)

    executor = BoundedToolExecutor([ends_the_turn], store, "s")
    assert state.is_accepting_writes()
    outcome = executor.execute("ends_the_turn", {}, state)
    assert not state.is_accepting_writes()
    assert outcome.ref is None
    assert outcome.is_error
    assert store.stats()["artifacts"] == 0
    assert TurnRuntimeState(deadline=0).is_accepting_writes() is False


def test_a_slow_failing_or_unknown_tool_is_an_error(tmp_path: Path) -> None:
    tools = {"slow": lambda: time.sleep(1), "fails": lambda: 1 / 0}
    executor = BoundedToolExecutor(tools, ArtifactStore(tmp_path), "s")
    slow = executor.execute("slow", {}, timeout=0.05)
    assert slow.is_error
    assert "0.05 s" in slow.text
    assert executor.execute("fails", {}).is_error
    assert executor.execute("unknown", {}).is_error


def test_one_global_store_serves_64_threads_and_opens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tool_artifacts, "_global", None)
    with ThreadPoolExecutor(64) as threads:
        stores = set(threads.map(lambda _: get_global_artifact_store(), range(64)))
        (store,) = stores
        refs = list(threads.map(lambda number: store.store(f"s{number % 4}", big(number + 1), "t"), range(64)))
        assert [store.retrieve(ref.artifact_id) for ref in refs] == [big(number + 1) for number in range(64)]
    store.close()
    assert get_global_artifact_store() is not store
    assert get_global_artifact_store().retrieve(refs[0].artifact_id) == big(1)
    get_global_artifact_store().close()


def test_content_blocks_keep_their_shape_around_references(tmp_path: Path) -> None:
    def blocks() -> list[dict[str, str]]:
        return [{"type": "text", "text": big(5_000)}, {"type": "text", "text": "small"}]

    outcome = BoundedToolExecutor([blocks], ArtifactStore(tmp_path), "s").execute("blocks", {})
    first, second = outcome_to_model_content(outcome)
    assert json.loads(first["text"])["size_bytes"] == len(big(5_000))
    assert second == {"type": "text", "text": "small"}
