"""The plugin in the real program: the requests to the model, with it and without it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

import coatcheck as library
from examples.standins import Heard, Reply, Step
from tests.adapters.claude_code.claude import (
    PROGRAM,
    READER,
    Conversation,
    World,
    call,
    coatcheck,
    environment,
    results,
    stub,
)
from tests.adapters.claude_code.rows_server import page, rows

SUB: Final = "Find out what the command prints."
NUMBERS: Final = "".join(f"{n}\n" for n in range(1, 40_001))
LINES: Final = "".join(
    f"value_{n} = {n * n}  # line {n} of the settings\n" for n in range(1, 1_201)
)
ERRORS: Final = "seq 1 5000; exit 3"
SOME_ROWS, MANY_ROWS = 400, 4_000


def pointer_in(text: str) -> str:
    found = re.search(r"art:[0-9a-f]{12,64}", text)
    return found[0] if found else "art:000000000000"


def with_pointer(of: str, answer: Callable[[str], Reply]) -> Step:
    """A step that uses the pointer in the newest result of a tool; without Coatcheck, it does
    nothing."""

    def step(heard: Heard) -> Reply:
        pointer = pointer_in(heard.last(of))
        return call("Bash", command="true") if pointer.endswith("0" * 12) else answer(pointer)

    return step


def script(folder: Path) -> list[Step]:
    settings, copy = str(folder / "settings.py"), str(folder / "copy.txt")
    return [
        call("Bash", command="seq 1 40000"),
        with_pointer("Bash", lambda one: call(READER, pointer=one, grep="^39999$")),
        with_pointer("Bash", lambda one: call("Write", file_path=copy, content=one)),
        call("Write", file_path=str(folder / "never.txt"), content="art:0123456789ab"),
        call("Read", file_path=settings),
        call(
            "Edit", file_path=settings, old_string="value_700 = 490000", new_string="value_700 = 7"
        ),
        call("Grep", pattern="value_", path=settings, output_mode="content", head_limit=0),
        call("Bash", command=ERRORS),
        call("mcp__rows__rows", count=SOME_ROWS),
        with_pointer("mcp__rows__rows", lambda one: call("mcp__rows__count", text=one)),
        call("mcp__rows__rows", count=MANY_ROWS),
        call(
            "Agent",
            description="a task",
            prompt=SUB,
            subagent_type="general-purpose",
            run_in_background=False,
        ),
        with_pointer("Agent", lambda one: call(READER, pointer=one, lines="1:2")),
        call("Bash", command="echo small"),
        call("Bash", command="seq 1 5000"),
        Reply("Done."),
    ]


def sub_script() -> list[Step]:
    return [
        call("Bash", command="seq 100000 130000"),
        with_pointer("Bash", lambda one: call(READER, pointer=one, grep="^129999$")),
        lambda heard: Reply(f"It prints numbers, as in {pointer_in(heard.results[0].text)} ."),
    ]


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("plugged"))
    (world.folder / "settings.py").write_text(LINES)
    world.plug_in("--tools")
    return world


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    world = World(tmp_path_factory.mktemp("plain"))
    (world.folder / "settings.py").write_text(LINES)
    return world.run(script(world.folder), agents={SUB: sub_script()})


@pytest.fixture(scope="module")
def run(plugged: World) -> Conversation:
    return plugged.run(script(plugged.folder), agents={SUB: sub_script()})


@pytest.fixture(scope="module")
def session(plugged: World, run: Conversation) -> Iterator[library.Session]:
    with library.open(plugged.home / "store") as store:
        yield store.session(f"claude-code:{run.session_id}")


def test_a_long_output_of_bash_becomes_a_stub_and_is_stored_completely(
    run: Conversation, session: library.Session
) -> None:
    shown = results(run)[0]
    assert stub(shown.text)["size_bytes"] == len(NUMBERS)
    assert session.get(stub(shown.text)["artifact"]) == NUMBERS
    assert READER in stub(shown.text)["hint"]


def test_an_output_that_claude_code_would_show_whole_becomes_a_stub_too(
    run: Conversation, without: Conversation
) -> None:
    assert "\n2500\n" in results(without)[14].text
    assert stub(results(run)[14].text)["lines"] == 5_000


def test_the_model_reads_it_back_without_asking_for_permission(run: Conversation) -> None:
    shown = results(run)[1]
    assert not shown.is_error
    assert "39999" in shown.text


def test_write_gets_the_text_behind_a_pointer(plugged: World, run: Conversation) -> None:
    assert (plugged.folder / "copy.txt").read_text() == NUMBERS


def test_an_unknown_pointer_is_answered_with_an_error(plugged: World, run: Conversation) -> None:
    shown = results(run)[3]
    assert shown.is_error
    assert "no artifact found for 'art:0123456789ab'" in shown.text
    assert not (plugged.folder / "never.txt").exists()


def test_a_large_file_becomes_a_stub_of_its_text_without_line_numbers(
    run: Conversation, session: library.Session
) -> None:
    text = results(run)[4].text
    assert text.startswith('1\t{"stub"')
    assert session.get(stub(text.removeprefix("1\t"))["artifact"]) == LINES


def test_a_file_that_was_read_as_a_stub_can_be_edited(plugged: World, run: Conversation) -> None:
    assert not results(run)[5].is_error
    assert "value_700 = 7 " in (plugged.folder / "settings.py").read_text()


def test_the_lines_that_grep_finds_become_a_stub(
    run: Conversation, session: library.Session
) -> None:
    found = session.get(stub(results(run)[6].text)["artifact"])
    assert isinstance(found, str)
    assert found.count("value_") == 1_200


def test_an_error_cut_by_claude_code_is_not_called_whole(
    run: Conversation, without: Conversation
) -> None:
    shown = results(run)[7]
    assert shown.is_error
    assert results(without)[7].text[:9_000] == shown.text[:9_000]
    cut = re.search(r"\.\.\. \[(\d+) characters truncated\] \.\.\.", shown.text)
    assert cut
    sent = json.dumps(run.of("Begin.")[-1].body["messages"])
    assert (
        f"The error above is incomplete: Claude Code left out at least {int(cut[1]):,} characters"
        in sent
    )
    assert "characters of it are art:" not in sent


def test_rows_of_an_mcp_server_become_a_stub_and_reach_another_tool_as_text(
    run: Conversation,
) -> None:
    shown = results(run)
    assert stub(shown[8].text)["media_type"] == "application/json"
    assert f"{len(rows(SOME_ROWS))} characters" in shown[9].text


def test_a_result_that_claude_code_saved_to_a_file_is_stored_from_there(
    run: Conversation, without: Conversation, session: library.Session
) -> None:
    assert "exceeds maximum allowed tokens" in results(without)[10].text
    assert session.get(stub(results(run)[10].text)["artifact"]) == rows(MANY_ROWS)


def test_a_sub_agent_shares_the_session(run: Conversation) -> None:
    inside = results(run, SUB)
    assert stub(inside[0].text)["lines"] == 30_001
    assert "129999" in inside[1].text
    assert "100000\n100001" in results(run)[12].text


def test_a_small_result_is_the_same_as_without_the_plugin(
    run: Conversation, without: Conversation
) -> None:
    first = [results(one)[13].text.split("<system-reminder>")[0] for one in (run, without)]
    assert first[0] == first[1] == "small\n\n"


def test_our_tools_are_in_every_request_and_the_hook_is_in_none(run: Conversation) -> None:
    for request in run.requests:
        names = [tool["name"] for tool in request.body["tools"]]
        assert [one for one in names if "coatcheck" in one] == [
            READER.replace("get_artifact", one)
            for one in ("get_artifact", "list_artifacts", "store_artifact")
        ]
    assert "artifacts__hook" not in json.dumps([one.body for one in run.requests])


def test_each_request_begins_with_the_one_before(run: Conversation) -> None:
    def plain(request: Any) -> list[str]:
        text = json.dumps(request.body["messages"]).replace(
            ', "cache_control": {"type": "ephemeral"}', ""
        )
        return [json.dumps(one) for one in json.loads(text)]

    sent = [plain(one) for one in run.of("Begin.")]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(sent))


def test_the_conversation_is_a_fraction_of_the_size(
    run: Conversation, without: Conversation
) -> None:
    sizes = [sum(len(one.text) for one in results(each)) for each in (run, without)]
    assert sizes[0] * 5 < sizes[1]


def test_the_transcript_has_stubs_and_no_payload(plugged: World, run: Conversation) -> None:
    (file,) = (plugged.home / ".claude" / "projects").rglob(f"{run.session_id}.jsonl")
    text = file.read_text()
    assert stub(results(run)[0].text)["artifact"] in text
    assert LINES[20_000:21_000].replace("\n", "\\n") not in text


def test_a_continued_conversation_opens_its_pointers(plugged: World, run: Conversation) -> None:
    pointer = stub(results(run)[0].text)["artifact"]
    steps = [*script(plugged.folder), call(READER, pointer=pointer, lines="77:77"), Reply("Done.")]
    again = plugged.run(steps, "--resume", run.session_id, prompt="Once more.")
    assert again.session_id == run.session_id
    assert "line 77 of 40,000" in results(again)[-1].text


def test_another_conversation_cannot_open_them(plugged: World, run: Conversation) -> None:
    pointer = stub(results(run)[0].text)["artifact"]
    other = plugged.run([call(READER, pointer=pointer, lines="77:77"), Reply("Done.")])
    assert "no artifact found" in results(other)[0].text


def test_a_server_that_cannot_be_started_changes_nothing(plugged: World, run: Conversation) -> None:
    config = plugged.home / ".claude" / "skills" / "coatcheck" / ".mcp.json"
    before = config.read_text()
    try:
        config.write_text(re.sub(r'"command": "[^"]*"', '"command": "/no/such/program"', before))
        broken = plugged.run([call("Bash", command="seq 1 5000"), Reply("Done.")])
    finally:
        config.write_text(before)
    assert results(broken)[0].text.startswith("1\n2\n3\n")
    assert "\n4999\n5000" in results(broken)[0].text


def test_a_text_that_a_server_sends_twice_is_stored_once_as_a_text(plugged: World) -> None:
    """Claude Code shows a model the structured content, as one line of JSON."""
    steps = [
        call("mcp__rows__page", count=SOME_ROWS),
        call("mcp__rows__page", count=MANY_ROWS),
        Reply("Done."),
    ]
    done = plugged.run(steps)
    with library.open(plugged.home / "store") as store:
        session = store.session(f"claude-code:{done.session_id}")
        stored = [session.get(stub(one.text)["artifact"]) for one in results(done)]
        assert stored == [page(SOME_ROWS), page(MANY_ROWS)]
        assert len(session.list()) == 2


def test_the_savings_are_in_the_report_after_claude_code_has_ended_the_server(
    plugged: World,
) -> None:
    """It ends the server with SIGINT, SIGTERM and SIGKILL, within half a second."""
    store = str(plugged.home / "store")

    def results_of_page() -> int:
        found = json.loads(coatcheck(plugged.home, "proxy", "--report", "--json", "--store", store))
        return sum(row["results"] for row in found["rows"] if row["tool"] == "page")

    before = results_of_page()
    plugged.run([call("mcp__rows__page", count=SOME_ROWS + 1), Reply("Done.")])
    assert results_of_page() == before + 1


def test_a_sub_agent_without_our_tools_gets_no_stubs(plugged: World) -> None:
    agents = plugged.folder / ".claude" / "agents"
    agents.mkdir(parents=True)
    (agents / "narrow.md").write_text(
        "---\nname: narrow\ndescription: d\ntools: Bash, Read\n---\nDo as asked.\n"
    )
    steps = [
        call(
            "Agent",
            description="a task",
            prompt=SUB,
            subagent_type="narrow",
            run_in_background=False,
        ),
        Reply("Done."),
    ]
    narrow = plugged.run(
        steps, agents={SUB: [call("Bash", command="seq 1 5000"), Reply("It prints numbers.")]}
    )
    assert "\n4999\n5000" in results(narrow, SUB)[0].text


def test_claude_code_lists_the_plugin_until_it_is_undone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.plug_in()

    def listed() -> str:
        command = [str(PROGRAM), "plugin", "list", "--json"]
        env = environment(world.home, "")
        return subprocess.run(
            command, env=env, cwd=world.folder, capture_output=True, text=True, timeout=120
        ).stdout

    (plugin,) = json.loads(listed())
    assert (plugin["id"], plugin["enabled"]) == ("coatcheck@skills-dir", True)
    coatcheck(world.home, "install", "claude-code", "--plugin", "--undo", "--write")
    assert json.loads(listed()) == []
