"""The hooks of Claude Code: outputs in the shapes of its tools, pointers in arguments, and the
session of each call."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters import Adapter
from coatcheck.adapters.claude_code import HOST, PLUGIN_SERVER, Hooks, parsed_event

LONG = "".join(f"line {n}: nothing to see here\n" for n in range(3_000))
READER = f"mcp__{PLUGIN_SERVER}__get_artifact"
BASH = {
    "stdout": LONG,
    "stderr": "",
    "interrupted": False,
    "isImage": False,
    "noOutputExpected": False,
}
READ = {
    "type": "text",
    "file": {"filePath": "/a", "content": LONG, "numLines": 3_001, "startLine": 1, "totalLines": 9},
}
KNOWN: dict[str, Any] = {
    "Bash": BASH,
    "PowerShell": BASH,
    "Read": READ,
    "Grep": {"mode": "content", "numFiles": 0, "filenames": [], "content": LONG, "numLines": 3_000},
    "WebFetch": {
        "bytes": 9,
        "code": 200,
        "codeText": "OK",
        "result": LONG,
        "durationMs": 1,
        "url": "u",
    },
    "Agent": {"status": "completed", "content": [{"type": "text", "text": LONG}], "totalTokens": 7},
    "mcp__server__tool": [{"type": "text", "text": LONG}],
}


@pytest.fixture
def store() -> Iterator[Store]:
    with coatcheck.open("memory:") as opened:
        yield opened


@pytest.fixture
def hooks(store: Store) -> Hooks:
    return Hooks(Adapter(store, host=HOST), server=PLUGIN_SERVER)


def event(
    name: str, tool: str, session_id: str = "one", call_id: str = "toolu_1", **fields: Any
) -> dict[str, Any]:
    common = {
        "hook_event_name": name,
        "tool_name": tool,
        "session_id": session_id,
        "tool_use_id": call_id,
    }
    return {**common, **fields}


def after(hooks: Hooks, tool: str, response: Any, **fields: Any) -> Any:
    """The new output of a tool, or None if it is unchanged."""
    output = hooks.answer(event("PostToolUse", tool, tool_response=response, **fields))
    return output["hookSpecificOutput"]["updatedToolOutput"] if output else None


def before(hooks: Hooks, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = hooks.answer(event("PreToolUse", tool, tool_input=arguments)).get(
        "hookSpecificOutput", {}
    )
    return found


def stub_in(value: Any) -> dict[str, Any]:
    """The stub that is somewhere in an output."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            return {}
        return found if isinstance(found, dict) and "stub" in found else {}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((found for one in inner if (found := stub_in(one))), {})


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return [shape(one) for one in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("tool", KNOWN)
def test_a_long_output_becomes_a_stub_in_the_shape_of_its_tool(tool: str, store: Store) -> None:
    hooks = Hooks(Adapter(store, host=HOST, policy=Policy(max_tokens=3_000)), server=PLUGIN_SERVER)
    changed = after(hooks, tool, KNOWN[tool])
    assert shape(changed) == shape(KNOWN[tool])
    stub = stub_in(changed)
    assert READER in stub["hint"]
    assert hooks.session_of("toolu_1").get(stub["artifact"]) == LONG


def test_a_list_of_file_names_becomes_a_stub_as_lines(hooks: Hooks) -> None:
    names = LONG.splitlines()
    changed = after(
        hooks, "Grep", {"mode": "files_with_matches", "numFiles": 3_000, "filenames": names}
    )
    assert (changed["mode"], changed["filenames"], changed["numFiles"]) == ("content", [], 3_000)
    assert hooks.session_of("toolu_1").get(stub_in(changed)["artifact"]) == "\n".join(names)


@pytest.mark.parametrize(
    ("tool", "response"),
    [
        ("Bash", {**BASH, "stdout": "small"}),
        ("Bash", {**BASH, "isImage": True}),
        ("Bash", {**BASH, "structuredContent": [{"type": "text", "text": "x"}]}),
        ("Bash", {"output": LONG}),
        ("Bash", LONG),
        ("Read", {"type": "notebook", "file": {"filePath": "/a", "cells": [LONG]}}),
        (
            "Read",
            {"type": "image", "file": {"base64": LONG, "type": "image/png", "originalSize": 1}},
        ),
        ("Read", {"type": "text", "file": LONG}),
        ("Edit", {"filePath": "/a", "originalFile": LONG}),
        ("SomethingNew", {"stdout": LONG}),
        ("Grep", None),
        ("mcp__server__tool", {"content": LONG}),
        (READER, [{"type": "text", "text": LONG}]),
    ],
)
def test_small_outputs_unknown_shapes_and_our_own_tools_stay_unchanged(
    tool: str, response: Any, hooks: Hooks
) -> None:
    assert after(hooks, tool, response) is None


@pytest.fixture(scope="module")
def shared() -> Iterator[Hooks]:
    with coatcheck.open("memory:") as opened:
        yield Hooks(Adapter(opened, host=HOST), server=PLUGIN_SERVER)


_FIELDS = st.sampled_from(["stdout", "stderr", "file", "type", "content", "filenames", "result"])
_RESPONSES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda more: st.lists(more) | st.dictionaries(_FIELDS, more),
    max_leaves=8,
)


@given(_RESPONSES, st.sampled_from(["Bash", "Read", "Grep", "Agent", "WebFetch", "mcp__a__b"]))
def test_no_small_response_of_any_shape_is_changed(shared: Hooks, response: Any, tool: str) -> None:
    assert shared.answer(event("PostToolUse", tool, tool_response=response)) == {}


def test_the_report_of_a_sub_agent_stays_unless_the_policy_has_a_limit(hooks: Hooks) -> None:
    assert after(hooks, "Agent", KNOWN["Agent"]) is None


def saved(folder: Path, session_id: str = "one") -> Path:
    place = folder / session_id / "tool-results"
    place.mkdir(parents=True)
    (place / "b1.txt").write_text(LONG)
    return place / "b1.txt"


def test_the_output_of_a_shell_is_read_from_the_file_it_was_saved_to(
    hooks: Hooks, tmp_path: Path
) -> None:
    about = {"persistedOutputPath": str(saved(tmp_path)), "persistedOutputSize": len(LONG)}
    changed = after(hooks, "Bash", {**BASH, "stdout": LONG[:2_000], **about})
    assert not about.keys() & changed.keys()
    assert hooks.session_of("toolu_1").get(stub_in(changed)["artifact"]) == LONG


def test_the_result_of_an_mcp_tool_is_read_from_the_file_it_was_saved_to(
    hooks: Hooks, tmp_path: Path
) -> None:
    text = (
        "Error: result (91,000 characters across 3,000 lines) exceeds maximum allowed tokens. Output has been saved "
        f"to {saved(tmp_path)}.\nFormat: Plain text\nUse offset and limit."
    )
    stub = stub_in(after(hooks, "mcp__server__tool", text))
    assert hooks.session_of("toolu_1").get(stub["artifact"]) == LONG


STRUCTURED = json.dumps({"content": LONG}, separators=(",", ":"))


def test_the_structured_content_of_an_mcp_tool_becomes_a_stub_of_the_text_in_it(
    hooks: Hooks,
) -> None:
    """Claude Code passes it on as a text, in place of the blocks."""
    given = parsed_event(
        event("PostToolUse", "mcp__files__read_text_file", tool_response=STRUCTURED)
    )
    changed = hooks.answer(given)["hookSpecificOutput"]["updatedToolOutput"]
    assert hooks.session_of("toolu_1").get(stub_in(changed)["artifact"]) == LONG
    small = parsed_event(
        event("PostToolUse", "mcp__files__read_text_file", tool_response='{"content":"small"}')
    )
    assert hooks.answer(small) == {}


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        (STRUCTURED, LONG),
        (
            json.dumps({"lines": LONG.splitlines(), "more": 1}),
            {"lines": LONG.splitlines(), "more": 1},
        ),
    ],
    ids=["a text", "more"],
)
def test_structured_content_is_read_from_the_file_it_was_saved_to(
    hooks: Hooks, tmp_path: Path, written: str, stored: object
) -> None:
    path = saved(tmp_path)
    path.write_text(written)
    text = (
        f"Error: result (309,794 characters) exceeds maximum allowed tokens. Output has been saved to {path}.\n"
        "Format: JSON with schema: {content: string}\nUse jq to make structured queries."
    )
    stub = stub_in(after(hooks, "mcp__files__read_text_file", text))
    assert hooks.session_of("toolu_1").get(stub["artifact"]) == stored


def test_a_file_of_another_session_or_place_is_not_read(hooks: Hooks, tmp_path: Path) -> None:
    elsewhere = tmp_path / "secret.txt"
    elsewhere.write_text(LONG)
    for path in (
        saved(tmp_path, "another"),
        elsewhere,
        tmp_path / "one" / "tool-results" / "missing.txt",
    ):
        assert (
            after(hooks, "Bash", {**BASH, "stdout": "x", "persistedOutputPath": str(path)}) is None
        )


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "device"])
def test_a_link_out_of_the_folder_is_not_followed_and_a_pipe_does_not_block(
    hooks: Hooks, tmp_path: Path, what: str
) -> None:
    """A server may name any file in the text of its result, and a project may contain any link."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "key.txt").write_text(LONG)
    place = tmp_path / "one" / "tool-results"
    place.parent.mkdir()
    if what == "folder":
        place.symlink_to(private)
    else:
        place.mkdir()
    path = place / "key.txt"
    if what == "link":
        path.symlink_to(private / "key.txt")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    text = (
        f"Error: result (91,000 characters) exceeds maximum allowed tokens. Output has been saved to {path}.\n"
        "Format: Plain text\nUse offset and limit."
    )
    assert after(hooks, "mcp__server__tool", text) is None
    assert after(hooks, "Bash", {**BASH, "stdout": "x", "persistedOutputPath": str(path)}) is None


def test_a_pipe_in_place_of_an_agents_file_does_not_block(hooks: Hooks, tmp_path: Path) -> None:
    (tmp_path / ".claude" / "agents").mkdir(parents=True)
    os.mkfifo(tmp_path / ".claude" / "agents" / "reviewer.md")
    assert after(hooks, "Bash", BASH, agent_type="reviewer", cwd=str(tmp_path)) is not None


def test_an_output_is_never_changed_if_it_cannot_be_stored() -> None:
    with coatcheck.open("memory:", quota_bytes=100) as store:
        hooks = Hooks(Adapter(store, host=HOST), server=PLUGIN_SERVER)
        for tool in ("Bash", "Read", "Grep"):
            assert after(hooks, tool, KNOWN[tool]) is None


def test_arguments_of_write_and_edit_get_the_text_behind_a_pointer(hooks: Hooks) -> None:
    pointer = hooks.session_of(None)  # nothing is known yet
    assert pointer.list() == []
    stub = stub_in(after(hooks, "Bash", BASH))
    given_arguments = {"file_path": "/a", "content": stub["artifact"]}
    assert before(hooks, "Write", given_arguments) == {
        "hookEventName": "PreToolUse",
        "updatedInput": {"file_path": "/a", "content": LONG},
    }
    assert before(hooks, "Edit", {"old_string": "x", "new_string": stub["artifact"]})[
        "updatedInput"
    ] == {
        "old_string": "x",
        "new_string": LONG,
    }


def test_arguments_of_an_mcp_tool_are_resolved_at_any_depth(hooks: Hooks) -> None:
    pointer = stub_in(after(hooks, "Bash", BASH))["artifact"]
    arguments = {"rows": [{"text": pointer}], "note": f"see {pointer}"}
    assert before(hooks, "mcp__server__tool", arguments)["updatedInput"] == {
        **arguments,
        "rows": [{"text": LONG}],
    }


@pytest.mark.parametrize(
    ("tool", "name"),
    [("Bash", "command"), ("Read", "file_path"), ("Agent", "prompt"), ("Write", "file_path")],
)
def test_a_command_a_path_and_a_prompt_are_never_replaced(
    tool: str, name: str, hooks: Hooks
) -> None:
    pointer = stub_in(after(hooks, "Bash", BASH))["artifact"]
    assert before(hooks, tool, {name: pointer}) == {}


def test_an_unknown_pointer_denies_the_call_with_a_reason(hooks: Hooks) -> None:
    found = before(hooks, "Write", {"file_path": "/a", "content": "art:0123456789ab"})
    assert found["permissionDecision"] == "deny"
    assert "art:0123456789ab" in found["permissionDecisionReason"]


def test_our_own_tools_are_allowed_and_no_other_tool_gets_a_permission(hooks: Hooks) -> None:
    assert before(hooks, READER, {"pointer": "art:0123456789ab"})["permissionDecision"] == "allow"
    pointer = stub_in(after(hooks, "Bash", BASH))["artifact"]
    assert "permissionDecision" not in before(
        hooks, "Write", {"file_path": "/a", "content": pointer}
    )
    assert before(hooks, "mcp__plugin_coatcheck_artifactsX__get_artifact", {}) == {}


@pytest.mark.parametrize(
    "tool", ["run_shell", "", "_x", "get_artifact_", "hook", "get_artifact__get_artifact"]
)
def test_a_tool_of_another_server_with_our_prefix_is_like_any_other(
    hooks: Hooks, tool: str
) -> None:
    name = f"mcp__{PLUGIN_SERVER}__{tool}"
    assert before(hooks, name, {"command": "rm -rf /"}) == {}
    pointer = stub_in(after(hooks, name, [{"type": "text", "text": LONG}]))["artifact"]
    assert before(hooks, name, {"text": pointer}) == {
        "hookEventName": "PreToolUse", "updatedInput": {"text": LONG},
    }  # fmt: skip


@pytest.mark.parametrize("tool", ["get_artifact", "list_artifacts", "store_artifact"])
def test_each_of_our_three_tools_is_allowed(hooks: Hooks, tool: str) -> None:
    assert before(hooks, f"mcp__{PLUGIN_SERVER}__{tool}", {})["permissionDecision"] == "allow"


@pytest.mark.parametrize(
    ("tool", "response", "missing"),
    [
        (
            "Read",
            {
                **KNOWN["Read"],
                "file": {**KNOWN["Read"]["file"], "numLines": 3_000, "totalLines": 9_001},
            },
            "6,001 lines of the file",
        ),
        (
            "Grep",
            {**KNOWN["Grep"], "numLines": 250, "totalLines": 9_000, "appliedLimit": 250},
            "8,750 lines",
        ),
        (
            "Grep",
            {
                "mode": "files_with_matches",
                "numFiles": 3_000,
                "totalFiles": 3_500,
                "filenames": LONG.splitlines(),
            },
            "500 files",
        ),
    ],
)
def test_a_part_of_a_file_or_of_the_hits_is_not_called_whole(
    hooks: Hooks, tool: str, response: dict[str, Any], missing: str
) -> None:
    stub = stub_in(after(hooks, tool, response))
    assert stub["stub"].startswith(
        f"incomplete: Claude Code left out {missing}; the part that arrived is stored"
    )
    assert stub["preview"].startswith("the part that arrived: ")


def error_of(output: str) -> str:
    """The error of a failed command as Claude Code 2.1.326 gives it to the hook and to the model:
    the first 30,000 characters of the output, and of these both ends."""
    text = f"Exit code 3\n{output[:30_000]}"
    if len(text) <= 11_024:
        return text
    return (
        f"{text[:5_000]}\n\n... [{len(text) - 10_000} characters truncated] ...\n\n{text[-5_000:]}"
    )


@pytest.mark.parametrize(("lines", "missing"), [(5_300, 15_405), (60_000, 20_012)])
def test_an_error_that_came_cut_is_not_called_whole_and_not_stored(
    hooks: Hooks, lines: int, missing: int
) -> None:
    error = error_of("".join(f"{number}\n" for number in range(1, lines + 1)))
    output = hooks.answer(event("PostToolUseFailure", "Bash", error=error))["hookSpecificOutput"]
    note = output["additionalContext"]
    assert note.startswith(
        f"The error above is incomplete: Claude Code left out at least {missing:,} characters, "
    )
    assert "art:" not in note
    assert "All" not in note
    assert list(hooks.session_of("toolu_1").list()) == []


def test_an_error_that_the_model_sees_whole_gets_no_words(hooks: Hooks) -> None:
    error = error_of("".join(f"{number}\n" for number in range(1, 2_281)))
    assert len(error) > 10_000
    assert hooks.answer(event("PostToolUseFailure", "Bash", error=error)) == {}


def test_the_cut_error_of_another_tool_gets_no_words(hooks: Hooks) -> None:
    error = error_of(LONG)
    assert "characters truncated" in error
    assert hooks.answer(event("PostToolUseFailure", "mcp__rows__fail", error=error)) == {}


def test_the_beginning_of_an_output_whose_file_cannot_be_read_is_not_stored(
    hooks: Hooks, tmp_path: Path
) -> None:
    path = tmp_path / "one" / "tool-results" / "b.txt"
    response = {**BASH, "persistedOutputPath": str(path), "persistedOutputSize": 348_894}
    assert after(hooks, "Bash", response) is None
    assert list(hooks.session_of("toolu_1").list()) == []


def test_an_error_that_an_older_claude_code_truncates_later_gets_a_pointer_to_the_full_text(
    hooks: Hooks,
) -> None:
    output = hooks.answer(event("PostToolUseFailure", "Bash", error=LONG))["hookSpecificOutput"]
    pointer = next(iter(hooks.session_of("toolu_1").list())).pointer
    assert pointer in output["additionalContext"]
    assert hooks.session_of("toolu_1").get(pointer) == LONG
    assert hooks.answer(event("PostToolUseFailure", "Bash", error=LONG[:9_999])) == {}


def test_calls_of_two_concurrent_conversations_have_their_own_sessions(hooks: Hooks) -> None:
    hooks.answer(event("PreToolUse", READER, "one", "toolu_a", tool_input={}))
    hooks.answer(event("PreToolUse", READER, "two", "toolu_b", tool_input={}))
    found = [hooks.session_of(one).session_id for one in ("toolu_a", "toolu_b", None)]
    assert found == ["claude-code:one", "claude-code:two", "claude-code:two"]


def test_a_sub_agent_that_cannot_use_our_tools_gets_no_stub(hooks: Hooks, tmp_path: Path) -> None:
    agents = tmp_path / ".claude" / "agents"
    agents.mkdir(parents=True)
    (agents / "narrow.md").write_text(
        "---\nname: narrow\ntools: Bash, Read\n---\nThe tools: all of them."
    )
    (agents / "listed.md").write_text(f"---\nname: listed\ntools:\n  - Bash\n  - {READER}\n---\nX")
    (agents / "open.md").write_text("---\nname: open\n---\ntools: Bash")
    got = {
        name: after(hooks, "Bash", BASH, agent_type=name, cwd=str(tmp_path)) is not None
        for name in ("narrow", "listed", "open", "general-purpose", "../../narrow", "")
    }
    assert got == {
        "narrow": False,
        "listed": True,
        "open": True,
        "general-purpose": True,
        "../../narrow": True,
        "": True,
    }


def test_the_policy_decides_by_the_name_of_a_tool_with_or_without_its_server(store: Store) -> None:
    policy = Policy(tools={"Bash": "never", "rows": "never", "mcp__files__list": "never"})
    hooks = Hooks(Adapter(store, host=HOST, policy=policy), server=PLUGIN_SERVER)
    blocks = [{"type": "text", "text": LONG}]
    names = ("Bash", "Read", "mcp__db__rows", "mcp__files__list", "mcp__other__list")
    left = [after(hooks, name, KNOWN.get(name, blocks)) is not None for name in names]
    assert left == [False, True, False, False, True]


def test_a_disabled_policy_changes_nothing(store: Store) -> None:
    hooks = Hooks(Adapter(store, host=HOST, policy=Policy(enabled=False)), server=PLUGIN_SERVER)
    assert after(hooks, "Bash", BASH) is None
    assert before(hooks, READER, {}) == {}
    assert hooks.kit.tools == ()


def test_a_store_that_is_closed_leaves_the_call_alone(store: Store) -> None:
    hooks = Hooks(Adapter(store, host=HOST), server=PLUGIN_SERVER)
    store.close()
    assert after(hooks, "Bash", BASH) is None


def test_the_server_gets_objects_as_json_and_texts_as_they_are() -> None:
    found = parsed_event({"tool_input": '{"a": 1}', "tool_response": "Error: [1]", "error": "{}"})
    assert found == {"tool_input": {"a": 1}, "tool_response": "Error: [1]", "error": "{}"}
    assert parsed_event({"tool_response": "[]", "tool_input": None}) == {
        "tool_response": [],
        "tool_input": None,
    }
    of_mcp = {"tool_name": "mcp__server__tool", "tool_response": '{"content":"x"}'}
    assert parsed_event(of_mcp) == of_mcp


# Files in place of tools


@pytest.fixture
def filing(store: Store, tmp_path: Path) -> Hooks:
    policy = Policy(files=tmp_path / ".coatcheck")
    return Hooks(Adapter(store, host=HOST, policy=policy, only=()), server=PLUGIN_SERVER)


@pytest.mark.parametrize("tool", sorted(KNOWN.keys() - {"Agent"}))
def test_without_our_tools_the_stub_names_a_file_and_no_tool(tool: str, filing: Hooks) -> None:
    stub = stub_in(after(filing, tool, KNOWN[tool]))
    assert Path(stub["file"]).read_text() == LONG
    assert "get_artifact" not in stub["hint"]


def test_an_output_stays_if_its_file_cannot_be_written(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    policy = Policy(files=tmp_path / "other")
    hooks = Hooks(Adapter(store, host=HOST, policy=policy, only=()), server=PLUGIN_SERVER)
    assert after(hooks, "Bash", BASH) is None
    assert after(hooks, "mcp__server__tool", KNOWN["mcp__server__tool"]) is None


def test_lines_that_were_asked_for_stay_and_the_whole_file_is_a_stub(filing: Hooks) -> None:
    file = stub_in(after(filing, "Bash", BASH))["file"]
    assert after(filing, "Read", READ, tool_input={"file_path": file, "limit": 2_000}) is None
    assert stub_in(after(filing, "Read", READ, tool_input={"file_path": file}))["file"] == file


@pytest.mark.parametrize("tool", ["Edit", "Write"])
def test_the_file_of_a_result_is_not_changed(tool: str, filing: Hooks) -> None:
    file = stub_in(after(filing, "Bash", BASH))["file"]
    assert before(filing, tool, {"file_path": file, "content": "x"})["permissionDecision"] == "deny"
    assert before(filing, tool, {"file_path": file.replace("/.coatcheck/", "/src/")}) == {}


@pytest.mark.parametrize("line", ["grep x {}", "jq . '{}' | head", "cat {} > copy; ls"])
def test_a_missing_file_is_written_again_before_a_command_that_names_it(
    line: str, filing: Hooks
) -> None:
    file = Path(stub_in(after(filing, "Bash", BASH))["file"])
    file.unlink()
    assert before(filing, "Bash", {"command": line.format(file)}) == {}
    assert file.read_text() == LONG


def test_the_file_of_another_conversation_is_not_written_again(filing: Hooks) -> None:
    file = Path(stub_in(after(filing, "Bash", BASH, session_id="other"))["file"])
    file.unlink()
    before(filing, "Read", {"file_path": str(file)})
    assert not file.exists()


@pytest.mark.parametrize("name", ["PostToolUse", "PostToolUseFailure"])
def test_a_call_that_names_a_file_that_is_gone_gets_a_note(
    name: str, filing: Hooks, store: Store
) -> None:
    file = stub_in(after(filing, "Bash", BASH))["file"]
    store.session(f"{HOST}:one").end()
    given = {"command": f"grep x {file}"}
    failed = event(name, "Bash", tool_input=given, tool_response={"stdout": ""}, error="no file")
    done = filing.answer(failed)
    note = done["hookSpecificOutput"]["additionalContext"]
    assert note.startswith(f"{file} is gone: ")
    assert "Run the call that gave it again" in note
