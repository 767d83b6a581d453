"""`coatcheck install claude-code --plugin` as a user runs it: shown, written and undone."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coatcheck.adapters.claude_code import HOOK, PLUGIN_SERVER
from coatcheck.cli import main
from coatcheck.install.clients import after_launcher
from tests import warm
from tests.mcp.speaking import Speaker, environment, text_of

ROOT = Path(__file__).resolve().parents[2]
FILES = {".claude-plugin/plugin.json", ".coatcheck-undo", ".mcp.json", "hooks/hooks.json"}
LONG = "".join(f"line {n}: nothing to see here\n" for n in range(3_000))


class Owner:
    """A user with a home and a project."""

    def __init__(self, home: Path, project: Path) -> None:
        self.home, self.project = home, project
        self.folder = home / ".claude" / "skills" / "coatcheck"

    def run(self, *words: str, ok: bool = True, **env: str) -> Result:
        given = {"HOME": str(self.home), "CLAUDE_CONFIG_DIR": "", **env}
        done = CliRunner().invoke(main, ["install", "claude-code", "--plugin", *words], env=given)
        assert (done.exit_code == 0) is ok, done.output
        return done

    def files(self) -> set[str]:
        return {
            str(one.relative_to(self.folder)) for one in self.folder.rglob("*") if one.is_file()
        }

    def server(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / ".mcp.json").read_text())["mcpServers"][
            "artifacts"
        ]
        return found


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return Owner(tmp_path / "home", tmp_path / "project")


def test_the_files_are_shown_first_and_nothing_is_written(owner: Owner) -> None:
    done = owner.run()
    for name in FILES - {".coatcheck-undo"}:
        assert f"+++ {owner.folder / name}" in done.stdout
    assert "nothing was written" in done.stderr
    assert not list(owner.home.iterdir())


def test_the_plugin_is_written_and_undone_without_a_trace(owner: Owner) -> None:
    owner.run("--write")
    assert owner.files() == FILES
    entry = owner.server()
    assert after_launcher(entry) == ["mcp", "--claude-code", "--ttl", "2592000", "--files"]
    assert Path(entry["command"]).is_absolute()
    assert entry["alwaysLoad"] is True
    assert "nothing to change" in owner.run("--write").stderr
    owner.run("--undo", "--write")
    assert not owner.folder.parent.exists()


def test_the_manifest_has_the_version_of_the_package_and_hooks_name_our_server(
    owner: Owner,
) -> None:
    owner.run("--write")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    manifest = json.loads((owner.folder / ".claude-plugin" / "plugin.json").read_text())
    assert (manifest["name"], manifest["version"]) == (project["name"], project["version"])
    assert f"plugin_{manifest['name']}_artifacts" == PLUGIN_SERVER
    for entries in json.loads((owner.folder / "hooks" / "hooks.json").read_text())[
        "hooks"
    ].values():
        (hook,) = entries[0]["hooks"]
        assert (hook["type"], hook["server"], hook["tool"]) == (
            "mcp_tool",
            "plugin:coatcheck:artifacts",
            HOOK,
        )


def test_a_session_and_a_store_are_passed_on(owner: Owner, tmp_path: Path) -> None:
    owner.run("--write", "--session", "work", "--store", str(tmp_path / "store"))
    assert owner.server()["args"][-4:] == ["--session", "work", "--store", str(tmp_path / "store")]


def test_tools_are_offered_instead_of_files_by_option(owner: Owner) -> None:
    owner.run("--write", "--tools")
    assert after_launcher(owner.server()) == ["mcp", "--claude-code", "--ttl", "2592000"]


def test_an_older_plugin_of_ours_is_replaced(owner: Owner) -> None:
    owner.run("--write", "--session", "old")
    owner.run("--write")
    assert "--session" not in owner.server()["args"]
    owner.run("--undo", "--write")
    assert not owner.folder.exists()


def test_a_plugin_by_somebody_else_is_left_alone(owner: Owner) -> None:
    other = owner.folder / ".claude-plugin" / "plugin.json"
    other.parent.mkdir(parents=True)
    other.write_text('{"name": "coatcheck"}')
    assert "already has another plugin" in owner.run("--write", ok=False).stderr
    assert "no plugin by Coatcheck" in owner.run("--undo", "--write", ok=False).stderr
    assert other.read_text() == '{"name": "coatcheck"}'


def test_an_edited_file_stays_when_the_plugin_is_undone(owner: Owner) -> None:
    owner.run("--write")
    hooks = owner.folder / "hooks" / "hooks.json"
    hooks.write_text("{}")
    assert "was edited since" in owner.run("--undo", "--write").stderr
    assert owner.files() == {"hooks/hooks.json"}


def test_the_folder_follows_the_scope_the_configuration_and_the_option(
    owner: Owner, tmp_path: Path
) -> None:
    owner.run("--write", "--scope", "project")
    assert (owner.project / ".claude" / "skills" / "coatcheck" / ".mcp.json").is_file()
    owner.run("--write", CLAUDE_CONFIG_DIR=str(tmp_path / "configuration"))
    assert (tmp_path / "configuration" / "skills" / "coatcheck" / ".mcp.json").is_file()
    owner.run("--write", "--file", str(tmp_path / "here"))
    assert (tmp_path / "here" / ".mcp.json").is_file()
    assert not owner.folder.exists()


@pytest.mark.parametrize("words", [["--wrap"], ["--name", "other"], ["--scope", "local"]])
def test_options_that_do_not_apply_are_refused(words: list[str], owner: Owner) -> None:
    owner.run(*words, "--write", ok=False)
    assert not owner.folder.exists()
    assert CliRunner().invoke(main, ["install", "cursor", "--plugin"]).exit_code == 2


def test_a_server_that_has_our_tools_already_is_mentioned(owner: Owner) -> None:
    wrapped = {
        "command": "coatcheck",
        "args": ["proxy", "--no-tools", "--session", "s", "--", "git-server"],
    }
    entry = {"command": "coatcheck", "args": ["mcp", "--session", "s"]}
    servers = {"mine": entry, "git": wrapped, "other": {"command": "x"}}
    (owner.home / ".claude.json").write_text(json.dumps({"mcpServers": servers}))
    notes = " ".join(owner.run().stderr.split())
    assert [f"'{name}'" in notes for name in servers] == [True, True, False]


def test_doctor_finds_the_plugin(owner: Owner) -> None:
    env = {"HOME": str(owner.home), "CLAUDE_CONFIG_DIR": ""}

    def found() -> list[str]:
        lines = CliRunner().invoke(main, ["doctor"], env=env).stdout.splitlines()
        return [line for line in lines if "Claude Code" in line]

    assert found() == []
    owner.run("--write")
    assert ["artifacts of the plugin" in line for line in found()] == [True]


def serve(*options: str) -> list[str]:
    return warm.command("coatcheck", "mcp", *options)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    env = environment(tmp_path / "store", CLAUDE_CODE_SESSION_ID="first")
    with Speaker(serve("--claude-code"), env) as speaker:
        speaker.begin()
        yield speaker


def hook(server: Speaker, name: str, **fields: str) -> dict[str, Any]:
    given = {
        "hook_event_name": name,
        "session_id": "one",
        "tool_name": "Bash",
        "tool_use_id": "t1",
        **fields,
    }
    found: dict[str, Any] = json.loads(text_of(server.call(HOOK, **given)))
    return found


def called(server: Speaker, tool: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool as Claude Code does for a model."""
    params = {"name": tool, "arguments": arguments, "_meta": {"claudecode/toolUseId": call_id}}
    return server.ask("tools/call", params)


def test_the_server_answers_hooks_with_a_tool_that_it_does_not_list(server: Speaker) -> None:
    assert HOOK not in [one["name"] for one in server.ask("tools/list")["result"]["tools"]]
    response = {"stdout": LONG, "stderr": "", "interrupted": False}
    done = hook(server, "PostToolUse", tool_response=json.dumps(response))["hookSpecificOutput"]
    stub = json.loads(done["updatedToolOutput"]["stdout"])
    assert stub["size_bytes"] == len(LONG)
    read = called(server, "get_artifact", "t1", pointer=stub["artifact"], lines="1:1")["result"]
    assert "line 0: nothing" in text_of(read)
    assert [one["type"] for one in read["content"]] == ["text"]


def test_with_files_nothing_is_offered_to_models(tmp_path: Path) -> None:
    env = environment(tmp_path / "store")
    with Speaker(serve("--claude-code", "--files"), env, cwd=tmp_path) as speaker:
        about = speaker.begin()["result"]
        assert "instructions" not in about
        assert about["capabilities"].keys() <= {"tools", "logging"}
        assert speaker.ask("tools/list")["result"]["tools"] == []
        response = {"stdout": LONG, "stderr": "", "interrupted": False}
        done = hook(speaker, "PostToolUse", tool_response=json.dumps(response))
        stub = json.loads(done["hookSpecificOutput"]["updatedToolOutput"]["stdout"])
    assert Path(stub["file"]).read_text() == LONG
    assert Path(stub["file"]).parent == tmp_path / ".coatcheck"


def test_a_model_cannot_call_the_hook(server: Speaker) -> None:
    assert (
        "unknown tool"
        in called(server, HOOK, "t1", hook_event_name="PreToolUse")["error"]["message"]
    )


def test_each_call_uses_the_session_named_by_its_hook(server: Speaker) -> None:
    hook(server, "PreToolUse", session_id="one", tool_use_id="t1", tool_input="{}")
    hook(server, "PreToolUse", session_id="two", tool_use_id="t2", tool_input="{}")
    stored = called(server, "store_artifact", "t1", name="kept", value="words of one")
    pointer = stored["result"]["structuredContent"]["pointer"]
    assert "words of one" in text_of(
        called(server, "get_artifact", "t1", pointer=pointer)["result"]
    )
    assert "no artifact found" in text_of(
        called(server, "get_artifact", "t2", pointer=pointer)["result"]
    )


def test_without_the_option_there_is_no_hook(tmp_path: Path) -> None:
    with Speaker(serve(), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "unknown tool" in speaker.call(HOOK)["message"]


def test_the_settings_of_the_folder_apply(tmp_path: Path) -> None:
    (tmp_path / "coatcheck.toml").write_text('[policy.tools]\nBash = "never"\n')
    response = json.dumps({"stdout": LONG, "stderr": "", "interrupted": False})
    with Speaker(serve("--claude-code"), environment(tmp_path / "store"), cwd=tmp_path) as speaker:
        speaker.begin()
        assert hook(speaker, "PostToolUse", tool_response=response) == {}
        assert hook(speaker, "PostToolUse", tool_response=response, tool_name="PowerShell") != {}
