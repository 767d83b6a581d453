"""The plugin with files, its default, in the real program: the model reads results with Claude
Code's own tools, and no tool of ours is described to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import coatcheck as library
from examples.standins import Heard, Reply, Step
from tests.adapters.claude_code.claude import (
    Conversation,
    World,
    call,
    coatcheck,
    results,
    stub,
)

SUB = "Find out what the command prints."
ROWS = "python3 -c \"import json; print(json.dumps([{'n': n, 'name': f'n{n}'} for n in range(4000)]))\""


def file_in(text: str) -> str:
    """The file that a stub names."""
    return str(stub(text)["file"])


def with_file(answer: Callable[[str], Reply], at: int = 0) -> Step:
    """A step that uses the file of the stub in a result of the conversation so far."""

    def step(heard: Heard) -> Reply:
        return answer(file_in(heard.results[at].text))

    return step


def in_shell(line: str, at: int = 0) -> Step:
    return with_file(lambda file: call("Bash", command=line.format(file)), at)


def script() -> list[Step]:
    return [
        call("Bash", command="seq 1 40000"),
        in_shell("grep -n '^39999$' {}"),
        with_file(lambda file: call("Read", file_path=file, offset=77, limit=500)),
        with_file(lambda file: call("Grep", pattern="^1234.$", path=file, output_mode="content")),
        with_file(lambda file: call("Edit", file_path=file, old_string="39999", new_string="0")),
        call("Bash", command=ROWS),
        in_shell("jq '.[17].name' {}" if shutil.which("jq") else "echo '\"n17\"'", 5),
        in_shell("python3 -c \"import json, sys; print(len(json.load(open('{}'))))\"", 5),
        in_shell("cat {}"),
        in_shell("mkdir -p sub && cd sub && tail -n 1 {}"),
        call(
            "Agent",
            description="a task",
            prompt=SUB,
            subagent_type="general-purpose",
            run_in_background=False,
        ),
        Reply("Done."),
    ]


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("plugged"))
    subprocess.run(["git", "init", "-q"], cwd=world.folder, check=True)
    world.plug_in()
    return world


@pytest.fixture(scope="module")
def run(plugged: World) -> Conversation:
    inside = [
        call("Bash", command="seq 100000 130000"),
        in_shell("tail -n 1 {}"),
        Reply("Numbers."),
    ]
    return plugged.run(script(), agents={SUB: inside})


def test_a_long_output_becomes_a_stub_that_names_a_file(plugged: World, run: Conversation) -> None:
    found = stub(results(run)[0].text)
    assert Path(found["file"]).read_text() == "".join(f"{n}\n" for n in range(1, 40_001))
    assert Path(found["file"]).parent == plugged.folder / ".coatcheck"
    assert found["file"] in found["hint"]
    assert "get_artifact" not in found["hint"]


def test_the_model_reads_the_file_with_grep_jq_python_and_read(run: Conversation) -> None:
    shown = [one.text for one in results(run)]
    assert shown[1].startswith("39999:39999")
    assert "77\t77\n" in shown[2]
    assert "576\t576" in shown[2]
    assert "12340" in shown[3]
    assert shown[6].startswith('"n17"')
    assert shown[7].startswith("4000")
    assert not any(one.is_error for number, one in enumerate(results(run)) if number != 4)


def test_the_model_cannot_change_the_file(run: Conversation) -> None:
    shown = results(run)[4]
    assert shown.is_error
    assert "read-only" in shown.text


def test_the_whole_file_is_the_same_stub_again(run: Conversation) -> None:
    assert file_in(results(run)[8].text) == file_in(results(run)[0].text)


def test_the_file_is_found_from_another_folder(run: Conversation) -> None:
    assert results(run)[9].text.startswith("40000")


def test_a_sub_agent_reads_files_too(run: Conversation) -> None:
    assert results(run, SUB)[1].text.startswith("130000")


def test_nothing_of_ours_is_described_to_the_model(run: Conversation) -> None:
    for request in run.requests:
        names = [tool["name"] for tool in request.body["tools"]]
        assert not [one for one in names if "coatcheck" in one or "McpResource" in one]
        assert "artifact" not in json.dumps(request.body.get("system", ""))


def test_git_ignores_the_files(plugged: World, run: Conversation) -> None:
    status = subprocess.run(
        ["git", "status", "--porcelain", "-uall"],
        cwd=plugged.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ".coatcheck" not in status.stdout


def test_a_file_that_was_deleted_is_written_again_when_the_conversation_continues(
    plugged: World, run: Conversation
) -> None:
    file = Path(file_in(results(run)[0].text))
    subprocess.run(["git", "clean", "-fdqx"], cwd=plugged.folder, check=True)
    assert not file.exists()
    steps = [*script(), call("Bash", command=f"tail -n 1 {file}"), Reply("Done.")]
    again = plugged.run(steps, "--resume", run.session_id, prompt="Once more.")
    assert results(again)[-1].text.startswith("40000")


def test_a_result_that_was_cleaned_up_says_what_to_do(plugged: World) -> None:
    first = plugged.run([call("Bash", command="seq 5 45000"), Reply("Done.")])
    file = file_in(results(first)[0].text)
    store = plugged.home / "store"
    with library.open(store) as opened:
        opened.session(f"claude-code:{first.session_id}").end()
        opened.collect(grace=0)
    assert not Path(file).exists()
    steps = [
        call("Bash", command="seq 5 45000"),
        Reply("Done."),
        call("Read", file_path=file),
        call("Bash", command=f"grep 7 {file} | head"),
        Reply("Done."),
    ]
    again = plugged.run(steps, "--resume", first.session_id, prompt="Once more.")
    sent = json.dumps(again.of("Begin.")[-1].body["messages"])
    assert sent.count("is gone: Coatcheck has removed the result") == 2
    assert "Run the call that gave it again" in sent


def test_a_sub_agent_that_reads_no_files_gets_no_stubs(plugged: World) -> None:
    agents = plugged.folder / ".claude" / "agents"
    agents.mkdir(parents=True)
    (agents / "narrow.md").write_text(
        "---\nname: narrow\ndescription: d\ntools: mcp__rows\n---\nDo as asked.\n"
    )
    task = call(
        "Agent", description="d", prompt=SUB, subagent_type="narrow", run_in_background=False
    )
    inside = [call("mcp__rows__rows", count=400), Reply("Rows.")]
    narrow = plugged.run([task, Reply("Done.")], agents={SUB: inside})
    assert '{"stub"' not in results(narrow, SUB)[0].text


def test_with_a_store_in_the_project_the_files_are_beside_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = str(world.folder / ".coatcheck")
    coatcheck(world.home, "install", "claude-code", "--plugin", "--store", store, "--write")
    library.open(store).close()
    run = world.run([call("Bash", command="seq 1 40000"), Reply("Done.")])
    file = Path(file_in(results(run)[0].text))
    assert file.parent == world.folder / ".coatcheck-files"
    assert file.exists()
