"""`coatcheck install` as a user runs it: shown, written and undone, for every client and all kinds
of files."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coatcheck.cli import main
from coatcheck.errors import InvalidArgument
from coatcheck.install.clients import CLIENTS, after_launcher, find_config, launcher
from coatcheck.install.config_text import JsonConfig, config_text
from coatcheck.install.plan import plan_entry
from tests.mcp.speaking import Speaker, environment, stub_in, text_of

SECRET = "hunter2-is-no-password"
USUAL = {
    "claude-code": ".claude.json",
    "claude-desktop": ".config/Claude/claude_desktop_config.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".config/Code/User/mcp.json",
    "codex": ".codex/config.toml",
    "gemini": ".gemini/settings.json",
    "windsurf": ".codeium/windsurf/mcp_config.json",
    "zed": ".config/zed/settings.json",
    "opencode": ".config/opencode/opencode.json",
    "cline": ".config/Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
}
IN_PROJECT = {
    "claude-code": ".mcp.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".vscode/mcp.json",
    "codex": ".codex/config.toml",
    "gemini": ".gemini/settings.json",
    "zed": ".zed/settings.json",
    "opencode": "opencode.json",
}
JSON = f"""{{
    // what is mine
    "theme": "dark",
    "%s": {{
        "git": {{"command": "uvx", "args": ["mcp-server-git"], "env": {{"TOKEN": "{SECRET}"}}}}, /* good */
        "files": {{
            "command": "npx",
            "args": [
                "-y", // no questions
                "@modelcontextprotocol/server-filesystem"
            ],
        }},
        "bare": {{"command": "time-server"}}, // none
    }},
}}
"""
TOML = f"""# what is mine
model = "o9"

[mcp_servers.git] # good
command = "uvx"
args = ["mcp-server-git"]
env = {{ TOKEN = "{SECRET}" }}

[mcp_servers."files"]
command = 'npx'
args = [
    "-y", # no questions
    "@modelcontextprotocol/server-filesystem",
]
  [mcp_servers.files.env]
  TOKEN = "{SECRET}"

[mcp_servers.bare]
command = "time-server" # none

[profiles.x]
"""


@dataclass
class Person:
    """A user with a home and a project folder."""

    home: Path
    project: Path

    def run(self, *words: str, code: int = 0) -> Result:
        unset = dict.fromkeys(
            ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "GEMINI_CLI_HOME")
        )
        done = CliRunner().invoke(main, ["install", *words], env={**unset, "HOME": str(self.home)})
        assert done.exit_code == code, done.output
        assert SECRET not in done.output
        return done

    def usual(self, client: str) -> Path:
        return self.home / USUAL[client]

    def write_config(self, client: str, text: str | None = None) -> Path:
        """Write a configuration with three servers, in the client's own format, or the given
        text."""
        file = self.usual(client)
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            text = TOML if client == "codex" else JSON % CLIENTS[client].section[0]
            if CLIENTS[client].is_list:
                text = re.sub(r'"command": ("[^"]*"),\s*"args": \[', r'"command": [\1, ', text)
                text = text.replace('"command": "time-server"', '"command": ["time-server"]')
                text = text.replace('"env"', '"environment"')
        file.write_bytes(text.encode())
        return file


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    (tmp_path / "home").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return Person(tmp_path / "home", tmp_path / "project")


def servers(client: str, file: Path) -> dict[str, Any]:
    kind = CLIENTS[client]
    return dict(config_text(file.read_text(), kind.format, kind.section).servers)


def words_of(entry: dict[str, Any]) -> list[str]:
    """The command of an entry with its arguments, in one list or in two keys."""
    command = entry["command"]
    return command if isinstance(command, list) else [command, *entry.get("args", [])]


def test_a_file_in_another_place_that_the_client_reads_is_used(person: Person) -> None:
    entries = {
        "opencode": (".config/opencode/opencode.jsonc", "mcp"),
        "cline": (".cline/data/settings/cline_mcp_settings.json", "mcpServers"),
    }
    for client, (place, section) in entries.items():
        file = person.home / place
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({section: {}}))
        person.run(client, "--write")
        assert list(servers(client, file)) == ["coatcheck"]
        assert not person.usual(client).exists()
    (person.project / ".opencode").mkdir()
    (person.project / ".opencode/opencode.json").write_text("{}")
    person.run("opencode", "--scope", "project", "--write")
    assert list(servers("opencode", person.project / ".opencode/opencode.json")) == ["coatcheck"]


def files_below(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*")}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_entry_is_shown_first_and_nothing_is_written(client: str, person: Person) -> None:
    file = person.write_config(client)
    before = file.read_bytes()
    done = person.run(client)
    assert str(file) in done.stdout
    assert any(line.startswith("+") and "coatcheck" in line for line in done.stdout.splitlines())
    assert "nothing was written" in done.stderr
    assert file.read_bytes() == before
    assert files_below(file.parent) == {file.name}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_entry_is_written_among_the_others_and_undone_byte_for_byte(
    client: str, person: Person
) -> None:
    file = person.write_config(client)
    before, had = file.read_bytes(), servers(client, file)
    person.run(client, "--write")
    now = servers(client, file)
    assert {name: now[name] for name in had} == had
    assert list(now) == [*had, "coatcheck"]
    assert after_launcher(now["coatcheck"]) == ["mcp", "--session", f"{client}-{{folder}}"]
    assert Path(words_of(now["coatcheck"])[0]).is_absolute()
    assert "what is mine" in file.read_text()
    backup = file.with_name(file.name + ".coatcheck-backup")
    assert backup.read_bytes() == before
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert "nothing to change" in person.run(client, "--write").stderr
    person.run(client, "--undo", "--write")
    assert file.read_bytes() == before
    assert files_below(file.parent) == {file.name}


@pytest.mark.parametrize("client", CLIENTS)
def test_undo_removes_a_file_that_did_not_exist_before(client: str, person: Person) -> None:
    person.run(client, "--write")
    file = person.usual(client)
    assert list(servers(client, file)) == ["coatcheck"]
    if client == "codex":
        tomllib.loads(file.read_text())
    else:
        json.loads(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    person.run(client, "--undo", "--write")
    assert not files_below(person.home)


@pytest.mark.parametrize("client", IN_PROJECT)
def test_a_project_has_its_own_file(client: str, person: Person) -> None:
    person.run(client, "--scope", "project", "--write")
    file = person.project / IN_PROJECT[client]
    assert list(servers(client, file)) == ["coatcheck"]
    assert not files_below(person.home)
    person.run(client, "--scope", "project", "--undo", "--write")
    assert not files_below(person.project)


@pytest.mark.parametrize("client", CLIENTS)
def test_wrapping_keeps_comments_and_environments_and_is_undone_byte_for_byte(
    client: str, person: Person
) -> None:
    file = person.write_config(client)
    before, had = file.read_bytes(), servers(client, file)
    done = person.run(client, "--wrap", "--session", "work", "--write")
    now = servers(client, file)
    assert list(now) == [*had, "coatcheck"]
    assert after_launcher(now["coatcheck"]) == ["mcp", "--session", "work"]
    for name, entry in had.items():
        behind = after_launcher(now[name])
        assert behind == ["proxy", "--no-tools", "--session", "work", "--", *words_of(entry)]
        assert now[name].get("env") == entry.get("env")
    for comment in ("what is mine", "no questions", "good", "none"):
        assert comment in file.read_text()
    once = file.read_bytes()
    again = person.run(client, "--wrap", "--write")
    assert again.stderr.count("left unchanged") == 3
    assert "nothing to change" in again.stderr
    assert file.read_bytes() == once
    assert "[masked]" in done.stdout
    person.run(client, "--undo", "--write")
    assert file.read_bytes() == before


@pytest.mark.parametrize("client", CLIENTS)
def test_undo_after_an_edit_removes_only_our_changes(client: str, person: Person) -> None:
    file = person.write_config(client)
    had = servers(client, file)
    person.run(client, "--wrap", "--write")
    person.run(client, "--write")
    text = file.read_text()
    text = (
        text.replace("dark", "light")
        .replace("o9", "o10")
        .replace("mcp-server-git", "mcp-server-git@2")
    )
    file.write_text(text)
    done = person.run(client, "--undo", "--write")
    assert "edited since" in done.stderr
    had["git"] |= (
        {"command": ["uvx", "mcp-server-git@2"]}
        if client == "opencode"
        else {"args": ["mcp-server-git@2"]}
    )
    assert servers(client, file) == had
    assert "light" in file.read_text() or "o10" in file.read_text()
    for comment in ("what is mine", "good", "none"):
        assert comment in file.read_text()
    assert files_below(file.parent) == {file.name}


def test_an_undo_is_shown_first(person: Person) -> None:
    file = person.write_config("cursor")
    before = file.read_bytes()
    person.run("cursor", "--wrap", "--write")
    written = file.read_bytes()
    done = person.run("cursor", "--undo")
    assert "nothing was written" in done.stderr
    assert any(line.startswith("-") and "coatcheck" in line for line in done.stdout.splitlines())
    assert file.read_bytes() == written
    person.run("cursor", "--undo", "--write")
    assert file.read_bytes() == before


def test_servers_in_other_scopes_are_named(person: Person) -> None:
    person.write_config("cursor")
    (person.project / ".cursor").mkdir()
    (person.project / ".cursor" / "mcp.json").write_text(
        '{"mcpServers": {"here": {"command": "x"}}}'
    )
    done = person.run("cursor", "--wrap")
    assert "here in " in done.stderr
    assert "--scope project" in done.stderr


def test_undo_keeps_edits_made_between_two_writes(person: Person) -> None:
    file = person.write_config("cursor")
    person.run("cursor", "--write")
    file.write_text(file.read_text().replace("dark", "light"))
    person.run("cursor", "--wrap", "--write")
    assert b"dark" in file.with_name("mcp.json.coatcheck-backup").read_bytes()
    person.run("cursor", "--undo", "--write")
    assert file.read_text() == (JSON % "mcpServers").replace("dark", "light")


def test_only_named_servers_are_wrapped_and_an_unknown_name_is_an_error(person: Person) -> None:
    file = person.write_config("cursor")
    person.run("cursor", "--wrap", "git", "--write")
    now = servers("cursor", file)
    assert after_launcher(now["git"]) is not None
    assert after_launcher(now["files"]) is None
    assert "its servers: git, files, bare" in person.run("cursor", "--wrap", "other", code=3).stderr


def test_urls_are_wrapped_with_hidden_headers_or_left_alone_with_a_reason(person: Person) -> None:
    text = json.dumps(
        {
            "mcpServers": {
                "web": {
                    "url": "https://a.example/mcp",
                    "headers": {"Authorization": f"Bearer {SECRET}", "X-A": "1"},
                },
                "old": {"url": "https://a.example/sse"},
                "open": {"url": "https://a.example/mcp"},
                "near": {"url": "http://127.0.0.1:3000/mcp"},
                "signing": {
                    "url": "https://a.example/mcp",
                    "headers": {"a": "b"},
                    "auth": {"CLIENT_ID": "x"},
                },
                "shell": {"command": "npx -y something"},
                "odd": {"command": ["npx"]},
                "nothing": {},
            }
        },
        indent=2,
    )
    file = person.write_config("cursor", text)
    done = person.run("cursor", "--wrap", "--write")
    now = servers("cursor", file)
    shared = ["--session", "cursor-{folder}"]
    assert after_launcher(now["web"]) == [
        "proxy",
        "--no-tools",
        "--url",
        "https://a.example/mcp",
        *shared,
    ]
    assert now["web"]["env"] == {
        "COATCHECK_PROXY_HEADERS": f"Authorization: Bearer {SECRET}\nX-A: 1"
    }
    assert after_launcher(now["near"]) == [
        "proxy",
        "--no-tools",
        "--url",
        "http://127.0.0.1:3000/mcp",
        *shared,
    ]
    for name in ("old", "open", "signing", "shell", "odd", "nothing"):
        assert f"{name!r} is left unchanged: " in done.stderr
        assert now[name] == json.loads(text)["mcpServers"][name]
    person.run("cursor", "--wrap", "open", "--write")
    assert after_launcher(servers("cursor", file)["open"]) is not None
    file.write_text(file.read_text() + "\n")
    person.run("cursor", "--undo", "--write")
    assert json.loads(file.read_text()) == json.loads(text)


def test_the_key_of_a_gemini_url_decides_its_transport(person: Person) -> None:
    entries = {"new": {"httpUrl": "http://localhost/mcp"}, "old": {"url": "http://localhost/mcp"}}
    file = person.write_config("gemini", json.dumps({"mcpServers": entries}))
    person.run("gemini", "--wrap", "--write")
    now = servers("gemini", file)
    shared = ["--session", "gemini-{folder}"]
    assert after_launcher(now["new"]) == [
        "proxy",
        "--no-tools",
        "--url",
        "http://localhost/mcp",
        *shared,
    ]
    assert now["old"] == entries["old"]


def test_claude_code_has_a_scope_for_one_user_in_one_project(person: Person) -> None:
    here = str(person.project)
    whole = {
        "projects": {here: {"mcpServers": {"a": {"command": "b"}}}, "/other": {}},
        "mcpServers": {},
    }
    file = person.write_config("claude-code", json.dumps(whole, indent=2))
    person.run("claude-code", "--scope", "local", "--wrap", "--write")
    entry = json.loads(file.read_text())["projects"][here]["mcpServers"]["a"]
    assert after_launcher(entry) == [
        "proxy",
        "--no-tools",
        "--session",
        "claude-code-{folder}",
        "--",
        "b",
    ]
    person.run("claude-code", "--scope", "local", "--undo", "--write")
    assert json.loads(file.read_text()) == whole
    assert "no scope 'local'" in person.run("cursor", "--scope", "local", code=2).stderr
    assert (
        "no configuration for a project"
        in person.run("claude-desktop", "--scope", "project", code=2).stderr
    )


def test_scopes_in_one_file_are_undone_separately_after_the_client_wrote_to_it(
    person: Person,
) -> None:
    here = str(person.project)
    whole = {
        "count": 1,
        "mcpServers": {"git": {"command": "user-git"}},
        "projects": {here: {"mcpServers": {"git": {"command": "local-git"}}}},
    }
    file = person.write_config("claude-code", json.dumps(whole, indent=2))
    person.run("claude-code", "--wrap", "--write")
    person.run("claude-code", "--scope", "local", "--wrap", "--write")
    file.write_text(file.read_text().replace('"count": 1', '"count": 2'))
    person.run("claude-code", "--undo", "--write")
    now = json.loads(file.read_text())
    assert now["mcpServers"] == whole["mcpServers"]
    assert (after_launcher(now["projects"][here]["mcpServers"]["git"]) or [])[-2:] == [
        "--",
        "local-git",
    ]
    person.run("claude-code", "--undo", code=3)
    person.run("claude-code", "--scope", "local", "--undo", "--write")
    assert json.loads(file.read_text()) == {**whole, "count": 2}
    assert files_below(file.parent) == {file.name}


def test_scopes_in_one_file_are_undone_separately_if_nobody_else_wrote_to_it(
    person: Person,
) -> None:
    here = str(person.project)
    whole = {
        "mcpServers": {"a": {"command": "b"}},
        "projects": {here: {"mcpServers": {"c": {"command": "d"}}}},
    }
    text = json.dumps(whole, indent=2)
    file = person.write_config("claude-code", text)
    person.run("claude-code", "--wrap", "--write")
    person.run("claude-code", "--scope", "local", "--wrap", "--write")
    person.run("claude-code", "--scope", "local", "--undo", "--write")
    now = json.loads(file.read_text())
    assert after_launcher(now["mcpServers"]["a"]) is not None
    assert now["projects"] == whole["projects"]
    person.run("claude-code", "--undo", "--write")
    assert file.read_text() == text


def test_undo_keeps_changes_to_a_wrapped_url_entry(person: Person) -> None:
    entry = {
        "url": "http://127.0.0.1/mcp",
        "headers": {"A": "b"},
        "env": {"OLD": "1"},
        "note": "mine",
        "gone": True,
    }
    file = person.write_config("cursor", json.dumps({"mcpServers": {"web": entry}}, indent=2))
    person.run("cursor", "--wrap", "--write")
    now = json.loads(file.read_text())
    now["mcpServers"]["web"] |= {"note": "changed", "disabled": True}
    now["mcpServers"]["web"]["env"]["NEW"] = "2"
    del now["mcpServers"]["web"]["gone"]
    file.write_text(json.dumps(now, indent=2))
    person.run("cursor", "--undo", "--write")
    del entry["gone"]
    after = {**entry, "env": {"OLD": "1", "NEW": "2"}, "note": "changed", "disabled": True}
    assert json.loads(file.read_text())["mcpServers"]["web"] == after


@pytest.mark.parametrize(
    ("client", "key", "text"),
    [
        ("gemini", "includeTools", '{"mcpServers": {"a": {"command": "b", "includeTools": %s}}}'),
        ("codex", "enabled_tools", '[mcp_servers.a]\ncommand = "b"\nenabled_tools = %s\n'),
    ],
)
def test_a_server_with_a_list_of_enabled_tools_is_wrapped_and_keeps_the_list(
    person: Person, client: str, key: str, text: str
) -> None:
    file = person.write_config(client, text % '["read"]')
    person.run(client, "--wrap", "--write")
    now = servers(client, file)
    assert after_launcher(now["a"]) is not None
    assert now["a"][key] == ["read"]
    assert key not in now["coatcheck"]


@pytest.mark.parametrize("moment", range(6))
def test_an_edit_during_our_write_is_not_lost(
    person: Person, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Another program writes to the file before we start, or during one of our calls of fsync."""
    file = person.write_config("cursor", "{}")
    found = find_config(
        "cursor", "user", home=person.home, project=person.project, platform="linux", environ={}
    )
    plan = plan_entry(found, "coatcheck", {"command": "coatcheck", "args": ["mcp"]})
    synced, sync = 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal synced
        synced += 1
        if synced == moment:
            file.write_bytes(b"theirs")
        sync(handle)

    if moment == 0:
        file.write_bytes(b"theirs")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InvalidArgument, match="another program"):
        plan.write()
    assert file.read_bytes() == b"theirs"
    assert files_below(file.parent) == {file.name}


ODD_FILES: dict[str, bytes] = {
    "empty": b"",
    "blanks": b" \n\t\n",
    "comments alone": b"// nothing yet\n",
    "an empty object": b"{}",
    "one line": b'{"mcpServers": {"a": {"command": "b"}}, "x": [1, 2]}',
    "one line without servers": b'{"x": 1}',
    "an empty section": b'{\n  "mcpServers": {\n  }\n}\n',
    "a section of comments": b'{\n  "mcpServers": {\n    // none\n  }\n}\n',
    "a mark and CRLF": '\ufeff{\r\n\t"mcpServers": {\r\n\t\t"a": {"command": "b"}\r\n\t}\r\n}\r\n'.encode(),
    "trailing commas": b'{\n "mcpServers": {\n  "a": {"command": "b",},\n },\n}',
    "a comment behind the last": b'{\n "mcpServers": {\n  "a": {"command": "b"} // last, with "quotes" }\n }\n}',
    "a comment before the comma": b'{\n "mcpServers": {\n  "a": {"command": "b"} /* , */ ,\n }\n}',
    "odd strings": '{"a\\"b": "// no } comment", "mcpServers": {"ключ": {"command": "/* no */"}}}'.encode(),
}


@pytest.mark.parametrize("data", ODD_FILES.values(), ids=list(ODD_FILES))
def test_unusual_files_keep_their_content_and_are_restored_byte_for_byte(
    data: bytes, person: Person
) -> None:
    file = person.write_config("cursor", data.decode())
    person.run("cursor", "--write")
    person.run("cursor", "--wrap", "--write")
    text = file.read_bytes().decode().removeprefix("\ufeff")
    assert "coatcheck" in servers_of(text)
    assert text.count("\n") == text.count("\r\n") or "\r" not in text
    assert file.read_bytes().startswith(b"\xef\xbb\xbf") == data.startswith(b"\xef\xbb\xbf")
    person.run("cursor", "--undo", "--write")
    assert file.read_bytes() == data


def servers_of(text: str) -> dict[str, Any]:
    return dict(JsonConfig(text, ("mcpServers",)).servers)


WRONG: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("cursor", b'{"mcpServers": {,}}', "invalid JSON in line 1"),
    "cut off": ("cursor", b'{\n"mcpServers": {"a": ', "invalid JSON in line 2"),
    "no object": ("cursor", b"[1]", "not a JSON object"),
    "a section of another type": ("cursor", b'{"mcpServers": []}', "not an object"),
    "servers twice": ("cursor", b'{"mcpServers": {}, "mcpServers": {}}', "twice"),
    "a name twice": ("cursor", b'{"mcpServers": {"a": {}, "a": {}}}', "twice"),
    "UTF-16": ("cursor", "{}".encode("utf-16"), "not UTF-8"),
    "a comment that never ends": ("vscode", b"{ /* ", "invalid JSON"),
    "too deep": ("cursor", b"[" * 100_000, "nested too deeply"),
    "no TOML": ("codex", b"[mcp_servers", "invalid TOML"),
    "an inline table": (
        "codex",
        b'mcp_servers = { a = { command = "b" } }\n',
        "mcp_servers by hand: coatcheck = {",
    ),
    "another's entry of our name": (
        "cursor",
        b'{"mcpServers": {"coatcheck": {"command": "rm"}}}',
        "--name",
    ),
}


@pytest.mark.parametrize(("client", "data", "message"), WRONG.values(), ids=list(WRONG))
def test_a_file_that_cannot_be_edited_is_refused_and_left_unchanged(
    client: str, data: bytes, message: str, person: Person
) -> None:
    file = person.usual(client)
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    done = person.run(client, "--write", code=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert file.read_bytes() == data
    assert files_below(file.parent) == {file.name}


def test_a_symlink_is_followed_and_its_target_keeps_its_mode(person: Person) -> None:
    real = person.home / "dotfiles" / "cursor.json"
    real.parent.mkdir()
    real.write_text("{}")
    real.chmod(0o640)
    link = person.usual("cursor")
    link.parent.mkdir()
    link.symlink_to(real)
    person.run("cursor", "--write")
    assert link.is_symlink()
    assert "coatcheck" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert files_below(real.parent) == {
        "cursor.json"
    }  # no backup with secrets beside a file that may be in a repository
    person.run("cursor", "--undo", "--write")
    assert real.read_text() == "{}"
    assert link.is_symlink()


def test_files_that_cannot_be_written_or_read_are_left_alone(person: Person) -> None:
    file = person.write_config("cursor")
    file.chmod(0o444)
    assert "read-only" in person.run("cursor", "--write", code=2).stderr
    file.unlink()
    file.mkdir()
    assert "cannot read" in person.run("cursor", "--write", code=2).stderr
    file.rmdir()
    file.symlink_to(person.home / "nowhere")
    assert "broken link" in person.run("cursor", "--write", code=2).stderr
    file.unlink()
    assert not files_below(file.parent)


def test_an_existing_backup_is_never_overwritten(person: Person) -> None:
    file = person.write_config("cursor")
    kept = file.with_name("mcp.json.coatcheck-backup")
    kept.write_text("the only one")
    assert "move it away" in person.run("cursor", "--write", code=2).stderr
    assert kept.read_text() == "the only one"
    assert file.read_text() == JSON % "mcpServers"


def test_undo_without_recorded_changes_is_an_error(person: Person) -> None:
    file = person.write_config("cursor")
    assert "no changes by Coatcheck are recorded" in person.run("cursor", "--undo", code=3).stderr
    file.with_name("mcp.json.coatcheck-undo").write_text("{]")
    assert "damaged" in person.run("cursor", "--undo", code=2).stderr


def test_incompatible_options_are_refused(person: Person) -> None:
    for words in (
        ["cursor", "git"],
        ["cursor", "--undo", "--wrap"],
        ["cursor", "--name", "a b"],
        ["notepad"],
        [],
    ):
        person.run(*words, code=2)


def test_environment_variables_and_the_platform_decide_the_config_file(tmp_path: Path) -> None:
    def file(client: str, platform: str = "linux", **environ: str) -> str:
        return str(
            find_config(
                client,
                "user",
                home=Path("/h"),
                project=tmp_path,
                platform=platform,
                environ=environ,
            ).file
        )

    assert file("codex", CODEX_HOME="/c") == "/c/config.toml"
    assert file("claude-code", CLAUDE_CONFIG_DIR="/c") == "/c/.claude.json"
    assert file("gemini", GEMINI_CLI_HOME="/g") == "/g/.gemini/settings.json"
    assert file("vscode", XDG_CONFIG_HOME="/x") == "/x/Code/User/mcp.json"
    mac = "/h/Library/Application Support"
    assert file("claude-desktop", "darwin") == f"{mac}/Claude/claude_desktop_config.json"
    assert file("vscode", "darwin") == f"{mac}/Code/User/mcp.json"
    assert file("vscode", "win32", APPDATA="/a") == "/a/Code/User/mcp.json"


def test_the_written_command_is_the_running_one_or_uvx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "coatcheck"
    script.parent.mkdir()
    script.touch()
    assert launcher(str(script), "/py", "/venv", "1.2", {}) == [str(script)]
    assert launcher("/x/coatcheck/__main__.py", "/py", "/venv", "1.2", {}) == [
        "/py",
        "-m",
        "coatcheck",
    ]
    cached = "/home/me/.cache/uv/archive-v0/abc"
    for name in ("uvx", "uv"):
        (script.parent / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    arguments = ["--from", "coatcheck[mcp]==1.2", "coatcheck"]
    assert launcher(f"{cached}/bin/coatcheck", "/py", cached, "1.2", {}) == [
        str(script.parent / "uvx"),
        *arguments,
    ]
    (script.parent / "uvx").unlink()
    (script.parent / "uv").unlink()
    assert launcher("", "/py", cached, "1.2", {"UV": "/opt/uv"}) == [
        "/opt/uv",
        "tool",
        "run",
        *arguments,
    ]
    for words in (
        [str(script.parent / "uvx"), *arguments, "mcp"],
        ["/opt/uv", "tool", "run", *arguments, "proxy", "--", "x"],
    ):
        assert (
            after_launcher({"command": words[0], "args": words[1:]})
            == words[words.index("coatcheck") + 1 :]
        )


def test_written_entries_start_servers_that_answer(
    person: Person, tool_names: Callable[[dict[str, Any]], list[str]]
) -> None:
    odd = [sys.executable, str(Path(__file__).with_name("odd_server.py"))]
    text = json.dumps({"mcpServers": {"odd": {"command": odd[0], "args": odd[1:]}}})
    file = person.write_config("cursor", text)
    person.run("cursor", "--write", "--store", "a store")
    person.run("cursor", "--wrap", "--write", "--store", "a store")
    now = servers("cursor", file)
    ours, behind = tool_names(now["coatcheck"]), tool_names(now["odd"])
    assert ours == ["get_artifact", "list_artifacts", "store_artifact"]
    assert len(behind) > 3
    assert not set(ours) & set(behind)


def test_a_wrapped_url_is_reached_with_its_headers(
    person: Person, tool_names: Callable[[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    token = "a-token-of-some-length"
    command = [sys.executable, "-m", "coatcheck", "mcp", "--http", "--port", "0"]
    env = environment(tmp_path / "served", COATCHECK_MCP_TOKEN=token)
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            entry = {"url": url, "headers": {"Authorization": f"Bearer {token}"}}
            file = person.write_config("cursor", json.dumps({"mcpServers": {"web": entry}}))
            assert token not in person.run("cursor", "--wrap", "--write").output
            wrapped = servers("cursor", file)["web"]
            assert not [word for word in wrapped["args"] if token in word]
            assert tool_names(wrapped) == ["get_artifact", "list_artifacts", "store_artifact"]
        finally:
            process.terminate()


def test_the_servers_of_one_client_share_their_pointers_and_one_set_of_tools(
    person: Person,
) -> None:
    odd = [sys.executable, str(Path(__file__).with_name("odd_server.py"))]
    entry = {"command": odd[0], "args": odd[1:]}
    file = person.write_config("cursor", json.dumps({"mcpServers": {"one": entry, "two": entry}}))
    person.run("cursor", "--wrap", "--write")
    now = servers("cursor", file)
    env = environment(person.home / "store")
    with ExitStack() as stack:
        one, two, ours = (
            stack.enter_context(
                Speaker([now[name]["command"], *now[name]["args"]], env, cwd=person.project)
            )
            for name in ("one", "two", "coatcheck")
        )
        for speaker in (one, two, ours):
            speaker.begin()
        stub = stub_in(text_of(one.call("table", size=2_000)))
        assert stub["hint"].startswith("get_artifact(")
        pointer = stub["artifact"]
        assert "row number 1999" in text_of(
            ours.call("get_artifact", pointer=pointer, query="$.rows[1999].name")
        )
        seen = json.loads(text_of(two.call("echo", rows=f"{pointer}#/rows/7/name")))
        assert seen["arguments"] == {"rows": "row number 7"}
        there = stack.enter_context(
            Speaker([now["two"]["command"], *now["two"]["args"]], env, cwd=person.home)
        )
        there.begin()
        assert there.call("echo", rows=pointer)["isError"]  # another folder has another session


def test_a_server_that_is_wrapped_later_joins_the_existing_session(person: Person) -> None:
    file = person.write_config("cursor")
    person.run("cursor", "--wrap", "git", "--session", "work", "--write")
    person.run("cursor", "--wrap", "--write")
    now = servers("cursor", file)
    assert [one for one in now if "work" in now[one]["args"]] == [
        "git",
        "files",
        "bare",
        "coatcheck",
    ]
    assert "keep their session" in person.run("cursor", "--session", "other", "--write").stderr
    person.run("cursor", "--undo", "--write")
    assert file.read_text() == JSON % "mcpServers"


def test_wrapping_leaves_another_server_of_our_name_alone(person: Person) -> None:
    text = json.dumps(
        {
            "mcpServers": {
                "coatcheck": {"command": "somebody-elses"},
                "git": {"command": "git-server"},
            }
        }
    )
    file = person.write_config("cursor", text)
    assert "--name" in person.run("cursor", "--wrap", "git", "--write", code=2).stderr
    assert file.read_text() == text
    person.run("cursor", "--wrap", "--name", "reader", "--write")
    assert list(servers("cursor", file)) == ["coatcheck", "git", "reader"]


def test_a_server_with_its_own_working_folder_is_reported(person: Person) -> None:
    person.write_config(
        "cursor", json.dumps({"mcpServers": {"git": {"command": "git-server", "cwd": "/"}}})
    )
    assert "'git' has its own working folder" in person.run("cursor", "--wrap").stderr


@pytest.fixture
def tool_names(tmp_path: Path) -> Callable[[dict[str, Any]], list[str]]:
    """Start the server of an entry and return the names of its tools."""

    def tools(entry: dict[str, Any]) -> list[str]:
        found: list[str] = []
        env = environment(tmp_path / "unused", **entry.get("env", {}))
        with Speaker([entry["command"], *entry["args"]], env, cwd=tmp_path) as speaker:
            speaker.begin()
            cursor: dict[str, str] = {}
            while True:
                page = speaker.ask("tools/list", cursor)["result"]
                found += [tool["name"] for tool in page["tools"]]
                if "nextCursor" not in page:
                    return found
                cursor = {"cursor": page["nextCursor"]}

    return tools


@pytest.mark.parametrize("words", [["cursor"], ["cursor", "--wrap"]])
def test_without_the_extra_nothing_is_written(person: Person, words: list[str]) -> None:
    file = person.write_config("cursor")
    before = file.read_bytes()
    code = "import sys; sys.modules['mcp'] = None; from coatcheck.cli import main; main()"
    env = environment(person.home / "store", HOME=str(person.home))
    command = [sys.executable, "-c", code, "install", *words, "--write"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "pip install 'coatcheck[mcp]'" in done.stderr
    assert file.read_bytes() == before


def test_the_arguments_of_a_shell_line_are_not_guessed(person: Person) -> None:
    line = shlex.join(["npx", "-y", "a b"])
    file = person.write_config("cursor", json.dumps({"mcpServers": {"a": {"command": line}}}))
    assert "shell command line" in person.run("cursor", "--wrap", "--write").stderr
    assert servers("cursor", file) == {"a": {"command": line}}


@pytest.mark.parametrize("client", ["claude-code", "codex", "gemini", "opencode"])
def test_with_files_servers_are_wrapped_and_no_entry_of_ours_is_added(
    client: str, person: Person
) -> None:
    file = person.write_config(client)
    before, had = file.read_bytes(), servers(client, file)
    person.run(client, "--wrap", "--files", "--session", "work", "--write")
    now = servers(client, file)
    assert list(now) == list(had)
    for name, entry in had.items():
        expected = ["proxy", "--files", ".coatcheck", "--session", "work", "--", *words_of(entry)]
        assert after_launcher(now[name]) == expected
    person.run(client, "--undo", "--write")
    assert file.read_bytes() == before


@pytest.mark.parametrize("words", [["codex", "--files"], ["cursor", "--wrap", "--files"]])
def test_files_are_for_agents_that_read_them(words: list[str], person: Person) -> None:
    person.write_config(words[0])
    assert "--files needs --wrap" in person.run(*words, code=2).stderr
