"""Several servers behind one proxy: their configuration, their names, and what happens when one
ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.cli import main
from coatcheck.errors import InvalidArgument
from coatcheck.mcp import merged_server
from coatcheck.mcp.upstreams import configured_servers, expanded, remote_headers
from tests import warm
from tests.mcp.odd_server import TOOLS
from tests.mcp.speaking import ODD, VERSION, Speaker, environment, proxy, stub_in, text_of

Speak = Callable[..., Speaker]


def time_server() -> dict[str, Any]:
    """The entry of a real server."""
    start, *more = warm.command("mcp_server_time", "--local-timezone", "UTC")
    return {"command": start, "args": more}


def written(path: Path, **entries: Any) -> Path:
    path.write_text(json.dumps({"mcpServers": entries}))
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """Two odd servers with the same names, and the time server with other names."""
    place = tmp_path_factory.mktemp("several")
    entry = {"command": ODD[0], "args": ODD[1:]}
    config = written(
        place / "servers.json",
        one=entry,
        two=entry,
        time=time_server(),
        off={**entry, "disabled": True},
    )
    with Speaker(
        proxy("--config", str(config), "--inline", "two_typed"), environment(place / "store")
    ) as speaker:
        speaker.begin()
        yield speaker


def tools(speaker: Speaker) -> list[str]:
    return [tool["name"] for tool in speaker.ask("tools/list")["result"]["tools"]]


def test_tools_are_prefixed_only_where_they_clash(both: Speaker) -> None:
    names = tools(both)
    odd = [tool["name"] for tool in TOOLS]
    assert names == [
        *(f"one_{name}" for name in odd),
        *(f"two_{name}" for name in odd),
        "get_current_time",
        "convert_time",
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]


def test_a_call_reaches_its_server_under_the_servers_own_name(both: Speaker) -> None:
    seen = json.loads(text_of(both.call("two_echo", value=1.5)))
    assert seen == {"name": "echo", "arguments": {"value": 1.5}}
    assert "Europe/Berlin" in text_of(both.call("get_current_time", timezone="Europe/Berlin"))


def test_one_servers_pointer_is_anothers_argument(both: Speaker) -> None:
    pointer = stub_in(text_of(both.call("one_table", size=2_000)))["artifact"]
    tools(both)
    seen = json.loads(text_of(both.call("two_typed", rows=f"{pointer}#/rows")))
    assert len(seen["arguments"]["rows"]) == 2_000


def test_an_unknown_tool_is_an_error(both: Speaker) -> None:
    assert both.call("echo")["code"] == -32602


def test_an_unknown_method_goes_to_the_server_that_knows_it(both: Speaker) -> None:
    assert both.ask("odd/verbatim")["result"]["number"] == 1.5
    assert both.ask("nobody/knows")["error"]["code"] == -32601


def test_resources_are_read_from_a_server_that_has_some(both: Speaker) -> None:
    contents = both.ask("resources/read", {"uri": "odd://read/40"})["result"]["contents"]
    assert contents[0]["uri"] == "odd://read/40"


def test_a_newer_handshake_is_declined_so_that_clients_fall_back(both: Speaker) -> None:
    assert both.ask("server/discover")["error"]["code"] == -32601


def test_capabilities_and_instructions_of_all_servers_are_reported(
    speak: Speak, tmp_path: Path
) -> None:
    config = written(
        tmp_path / "servers.json", odd={"command": ODD[0], "args": ODD[1:]}, time=time_server()
    )
    with Speaker(proxy("--config", str(config)), environment(tmp_path / "store")) as speaker:
        result = speaker.begin()["result"]
    assert result["serverInfo"]["name"] == "coatcheck"
    assert "# odd\nbe careful" in result["instructions"]
    assert result["capabilities"]["experimental"] == {"odd": {"kept": 1}}
    assert {"tools", "resources"} <= set(result["capabilities"])


def test_the_other_servers_keep_running_when_one_ends(tmp_path: Path) -> None:
    entry = {"command": ODD[0], "args": ODD[1:]}
    config = written(
        tmp_path / "servers.json", one=entry, two=entry, gone={"command": "no-such-command"}
    )
    with Speaker(proxy("--config", str(config)), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "exit status 3" in speaker.call("one_die")["message"]
        assert speaker.call("one_echo")["data"]["code"] == "upstream_failed"
        assert text_of(speaker.call("two_echo"))
        assert "no-such-command" in speaker.complained("no-such-command")
        assert "echo" in tools(speaker)


def test_servers_that_end_because_the_client_leaves_are_not_logged(tmp_path: Path) -> None:
    entry = {"command": ODD[0], "args": ODD[1:]}
    config = written(tmp_path / "servers.json", one=entry, two=entry, time=time_server())
    with Speaker(proxy("--config", str(config)), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "two_echo" in tools(speaker)
        assert speaker.leave() == 0
    assert speaker.complaints == []


def test_a_request_sent_right_before_the_client_leaves_is_answered(tmp_path: Path) -> None:
    entry = {"command": ODD[0], "args": ODD[1:]}
    config = written(tmp_path / "servers.json", one=entry, two=entry)
    client = {
        "protocolVersion": VERSION,
        "capabilities": {},
        "clientInfo": {"name": "tests", "version": "1"},
    }
    asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}) + "\n"
    env = environment(tmp_path / "store")
    command = proxy("--config", str(config))
    done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["result"]["serverInfo"]["name"] == "coatcheck"
    assert "ended" not in done.stderr


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"command": "x", "url": "http://127.0.0.1"},
        {"command": "x", "args": "not a list"},
        {"command": "x", "env": {"A": 1}},
        {"url": "http://127.0.0.1", "type": "sse"},
        {"command": "${COATCHECK_NOT_SET_ANYWHERE}"},
        "nothing",
    ],
)
def test_an_invalid_entry_is_an_error_that_names_it(entry: Any) -> None:
    with pytest.raises(InvalidArgument, match="wrong"):
        configured_servers({"mcpServers": {"wrong": entry}})


def test_a_file_may_have_a_byte_order_mark_comments_and_trailing_commas(tmp_path: Path) -> None:
    text = f"""\ufeff{{ // VS Code's
        "servers": {{
            "odd": {{"type": "stdio", "command": {json.dumps(ODD[0])}, "args": ["{ODD[1]}",], /* here */ }},
        }},
    }}"""
    config = tmp_path / "servers.json"
    config.write_text(text, "utf-8")
    with Speaker(proxy("--config", str(config)), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert text_of(speaker.call("echo"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"mcpServers": {}}', '{"mcpServers": 1}', "[" * 100_000, "\udcff", None],
)
def test_a_file_without_servers_is_an_error(tmp_path: Path, text: str | None) -> None:
    config = tmp_path / "servers.json"
    if text is not None:
        config.write_text(text, "utf-8", "surrogateescape")
    done = CliRunner().invoke(
        main, ["proxy", "--config", str(config)], env={"COATCHECK_STORE": str(tmp_path / "s")}
    )
    assert done.exit_code == 2
    assert done.stderr.startswith("coatcheck: ")


def test_environment_variables_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATCHECK_TEST_TOKEN", "secret")
    assert remote_headers(["Authorization: Bearer ${COATCHECK_TEST_TOKEN}"]) == {
        "Authorization": "Bearer secret"
    }
    assert expanded("${COATCHECK_TEST_MISSING:-else} $HOME") == "else $HOME"
    assert expanded("${env:COATCHECK_TEST_TOKEN}") == "secret"
    for unknown in ("${env:COATCHECK_TEST_MISSING}", "${input:token}", "${workspaceFolder}"):
        with pytest.raises(InvalidArgument):
            expanded(unknown)
    with pytest.raises(InvalidArgument):
        remote_headers(["no colon"])


NAMES = st.text("ab", min_size=1, max_size=3)


@given(
    st.dictionaries(
        st.sampled_from(["x", "y", "x y", "z"]), st.lists(NAMES, unique=True, max_size=4)
    )
)
def test_every_tool_has_a_unique_name_that_is_prefixed_only_on_a_clash(
    listed: dict[str, list[str]],
) -> None:
    owned = [(server, name) for server, names in listed.items() for name in names]
    shown = merged_server.unique_names(owned)
    assert len(set(shown)) == len(owned)
    for one, (_, name) in zip(shown, owned, strict=True):
        assert (one == name) == (sum(name in names for names in listed.values()) == 1)


def test_a_rule_for_a_plain_name_applies_to_its_prefixed_names(tmp_path: Path) -> None:
    entry = {"command": ODD[0], "args": ODD[1:]}
    config = written(tmp_path / "servers.json", one=entry, two=entry)
    large = "row of the table\n" * 5_000
    (tmp_path / "coatcheck.toml").write_text(
        '[policy.tools]\necho = "never"\ntwo_echo = "always"\n'
    )
    with Speaker(
        proxy("--config", str(config)), environment(tmp_path / "store"), cwd=tmp_path
    ) as speaker:
        speaker.begin()
        speaker.ask("tools/list")
        assert "row of the table" in text_of(speaker.call("one_echo", text=large))
        assert "stub" in stub_in(text_of(speaker.call("two_echo", text="small")))
    (tmp_path / "coatcheck.toml").unlink()
    command = proxy("--config", str(config), "--inline", "echo")
    with Speaker(command, environment(tmp_path / "store"), cwd=tmp_path) as speaker:
        speaker.begin()
        speaker.ask("tools/list")
        for name in ("one_echo", "two_echo"):
            assert len(text_of(speaker.call(name, text=large))) > len(large)
