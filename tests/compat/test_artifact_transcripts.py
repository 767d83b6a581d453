"""The drop-in for artifact-first transcripts: the published layout, shapes and settings."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coatcheck.compat.artifact_transcripts import ArtifactTranscripts, MemoryArtifacts
from coatcheck.errors import InvalidArgument

OUTPUT = "".join(f"{number}: GET /login took {number * 7 % 900} ms\n" for number in range(900))


def result(text: str, call: str = "c1", **more: Any) -> dict[str, Any]:
    message = {
        "role": "toolResult",
        "toolCallId": call,
        "toolName": "bash",
        "content": [{"type": "text", "text": text}],
    }
    return {"type": "message", "id": call, "timestamp": "2026-01-01T00:00:00Z", "message": message | more}


def call(call_id: str = "c1") -> dict[str, Any]:
    content = [{"type": "toolCall", "id": call_id, "name": "bash", "arguments": {"command": "cat access.log"}}]
    message = {"role": "assistant", "content": content}
    return {"type": "message", "id": f"m{call_id}", "timestamp": "2026-01-01T00:00:00Z", "message": message}


@pytest.fixture
def agent(tmp_path: Path) -> ArtifactTranscripts:
    return ArtifactTranscripts(tmp_path, "main")


def inline(agent: ArtifactTranscripts, name: str, lines: list[dict[str, Any]]) -> Path:
    path = agent.folder / name
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def test_sessions_and_artifacts_are_in_the_folders_of_the_agent(agent: ArtifactTranscripts, tmp_path: Path) -> None:
    agent.append("s1", call())
    agent.append("s1", result(OUTPUT))
    assert agent.path("s1") == tmp_path / "agents" / "main" / "sessions" / "s1.jsonl"
    assert agent.path("s1").stat().st_size < 3_000
    (entry,) = agent.registry()
    artifact = Path(entry["artifact"]["path"])
    assert artifact.parent == tmp_path / "agents" / "main" / "sessions" / "artifacts"
    assert artifact.read_text() == OUTPUT


def test_a_line_and_the_registry_have_the_published_reference(agent: ArtifactTranscripts) -> None:
    agent.append("s1", call())
    agent.append("s1", result(OUTPUT))
    digest = hashlib.sha256(OUTPUT.encode()).hexdigest()
    ref = agent.read("s1")[1]["message"]["details"]["artifactRef"]
    assert ref.keys() == {"id", "type", "toolName", "createdAt", "sizeBytes", "summary", "path", "hash"}
    assert (ref["hash"], ref["type"], ref["toolName"], ref["sizeBytes"]) == (digest, "tool-result", "bash", len(OUTPUT))
    assert ref["summary"].startswith("0: GET /login took 0 ms 1: GET")
    assert agent.find_by_hash(digest) == {"hash": digest, "artifact": ref, "sessionId": "s1"}
    assert agent.find_by_hash("0" * 64) is None


def test_half_a_line_of_the_registry_is_skipped(agent: ArtifactTranscripts) -> None:
    agent.append("s1", result(OUTPUT))
    with (agent.artifacts / "registry.jsonl").open("a") as registry:
        registry.write('{"hash": "ab')
    assert [entry["sessionId"] for entry in agent.registry()] == ["s1"]


@pytest.mark.parametrize("details", [{}, {"exitCode": 0}, None, "text", [1, 2], ...])
def test_payloads_come_back_exactly_on_request(agent: ArtifactTranscripts, details: Any) -> None:
    line = result(OUTPUT) if details is ... else result(OUTPUT, details=details)
    agent.append("s1", line)
    (stored,) = agent.read("s1")
    assert stored["message"]["details"]["artifactRef"]["id"].startswith("art_")
    assert agent.read("s1", rehydrate=True) == [line]


def test_inline_payloads_are_migrated_and_restored_byte_for_byte(agent: ArtifactTranscripts) -> None:
    path = inline(agent, "old.jsonl", [call(), result(OUTPUT, details={"exitCode": 0}), result("short", "c2")])
    before = path.read_bytes()
    report = agent.migrate()
    assert report.is_sound
    assert report.artifacts == 1
    assert len(path.read_bytes()) < len(before) / 4
    assert agent.read("old")[1]["message"]["details"].keys() == {"exitCode", "artifactRef"}
    assert "details" not in agent.read("old")[2]["message"]
    assert agent.undo().is_sound
    assert path.read_bytes() == before


@pytest.mark.parametrize("details", ["", '"details" : { } ,', '"details":\t{"a" :\n1 },', '"details":null ,'])
def test_lines_in_any_layout_come_back_unchanged(agent: ArtifactTranscripts, details: str) -> None:
    text = json.dumps(OUTPUT)
    line = (
        f'{{ "type":"message" , "id":"x","timestamp":"t", "message" : {{"role":"toolResult", {details} "toolName":"b",'
        f' "toolCallId" : "c1","content":[ {{"type":"text","text":{text} }}, {{"type":"text","text":{text}}}] }} }}\n'
    ).replace("\n1", " 1")
    path = agent.folder / "s.jsonl"
    path.write_text(line)
    assert agent.migrate().is_sound
    assert "artifactRef" in agent.read("s")[0]["message"]["details"]
    agent.undo()
    assert path.read_text() == line


def test_reset_and_deleted_transcripts_are_found(agent: ArtifactTranscripts) -> None:
    names = ["a.jsonl", "a.jsonl.reset.2026-01-01T00-00-00.000Z", "b.jsonl.deleted.2026-01-02T00-00-00.000Z"]
    for name in names:
        inline(agent, name, [call(), result(OUTPUT + name)])
    inline(agent, "notes.txt", [])
    assert [path.name for path in agent.files()] == names
    assert [one.status for one in agent.migrate().files] == ["externalized"] * 3
    assert {entry["sessionId"] for entry in agent.registry()} == {"a", "b"}


def test_recall_is_bounded_by_the_settings(agent: ArtifactTranscripts, tmp_path: Path) -> None:
    for number in range(12):
        agent.append("s1", result(f"report {number} about invoices\n" + OUTPUT, f"c{number}"))
    section = agent.recall("s1", "the invoices")
    assert section is not None
    assert section.startswith("## Artifact Recall\nI recently used tools that produced: ")
    assert len(section) <= 2_000
    assert 0 < section.count("\n- ") <= 8
    small = ArtifactTranscripts(
        tmp_path, "other", memory=MemoryArtifacts(maxItems=2, maxChars=900, narrativeMaxChars=50)
    )
    for number in range(5):
        small.append("s1", result(f"report {number}\n" + OUTPUT, f"c{number}"))
    bounded = small.recall("s1")
    assert bounded is not None
    assert len(bounded.splitlines()[1]) <= 50
    assert bounded.count("\n- ") <= 2
    assert len(bounded) <= 900
    off = ArtifactTranscripts(tmp_path, "third", memory=MemoryArtifacts(enabled=False))
    off.append("s1", result(OUTPUT))
    assert off.recall("s1") is None


def test_pruning_leaves_placeholders_and_compaction_an_index(agent: ArtifactTranscripts) -> None:
    lines = [line for number in range(6) for line in (call(f"c{number}"), result(OUTPUT + str(number), f"c{number}"))]
    lines.append({"type": "message", "id": "u", "timestamp": "t", "message": {"role": "user", "content": "and now?"}})
    pruned = agent.prune("s1", lines, 20_000)
    assert pruned.tokens_after <= 20_000
    assert "art:" in json.dumps(pruned.messages)
    index = agent.safeguard("s1", lines[:4])
    assert len(index.refs) == 2


def test_settings_have_their_published_names_and_defaults() -> None:
    memory = MemoryArtifacts()
    assert (memory.enabled, memory.maxItems, memory.maxChars, memory.narrativeMaxChars) == (True, 8, 2_000, 600)
    given = {"memory": {"artifacts": {"maxItems": 3, "narrativeMaxChars": 100}}}
    assert MemoryArtifacts.of(given) == MemoryArtifacts(maxItems=3, narrativeMaxChars=100)
    assert MemoryArtifacts.of({}) == MemoryArtifacts()
    with pytest.raises(InvalidArgument, match="no setting 'maxItem'"):
        MemoryArtifacts.of({"memory": {"artifacts": {"maxItem": 3}}})
    with pytest.raises(InvalidArgument, match="maxItems"):
        MemoryArtifacts(maxItems=0)


@pytest.mark.parametrize("name", ["../evil", "", "a/b", ".hidden", "x" * 300])
def test_names_that_leave_the_folder_are_refused(agent: ArtifactTranscripts, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid session id"):
        agent.append(name, call())
    with pytest.raises(InvalidArgument, match="invalid agent id"):
        ArtifactTranscripts(tmp_path, name)


def test_real_sessions_of_pi_are_migrated_and_restored(agent: ArtifactTranscripts, corpus: Path) -> None:
    found = sorted((corpus / "transcripts" / "pi").rglob("*.jsonl"))
    for path in found:
        shutil.copy(path, agent.folder / path.name)
    report = agent.migrate()
    assert report.is_sound
    assert report.artifacts > 10
    assert agent.undo().is_sound
    assert [(agent.folder / path.name).read_bytes() for path in found] == [path.read_bytes() for path in found]
