"""Real clients, unchanged, through a gateway in `loop` mode: a loop, a mixed turn, and what
follows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, Store
from tests.conftest import CI
from tests.gateway.node_clients import client
from tests.gateway.provider import Provider, Say, Seen, Think, Turn, Use, turn
from tests.gateway.talking import assert_only_grows, serving
from tests.mcp.node_servers import Missing

SECRETS = ("ANTHROPIC", "CLAUDE", "OPENAI", "CODEX", "AI_GATEWAY")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "home"
    place.mkdir()
    return place


def command(name: str) -> list[str]:
    try:
        return client(name)
    except Missing as error:
        if CI:
            raise
        pytest.skip(str(error))


def run(arguments: list[str], home: Path, **variables: str) -> str:
    """Run a client with its own home, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    env = kept | {"HOME": str(home), "NO_PROXY": "127.0.0.1"} | variables
    done = subprocess.run(
        arguments,
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-2_000:] + done.stdout[-2_000:]
    return done.stdout


def stubs(seen: Seen) -> Iterator[str]:
    """The pointers of the stubs in a request."""
    for part in json.dumps(seen.body).split('{\\"stub\\"')[1:]:
        yield part.split('\\"artifact\\":\\"')[1][:16]


@pytest.mark.parametrize(
    "name", ["anthropic", "chat", "responses", "ai-anthropic", "ai-chat", "ai-responses"]
)
def test_the_sdks_from_npm_see_one_answer_and_continue(store: Store, home: Path, name: str) -> None:
    thinks = [] if name.endswith("chat") else [Think("a")]
    script: list[Any] = [
        turn(*thinks, Use("search", {"q": "x"})),
        lambda seen: turn(
            *thinks, Say("Looking."), Use("get", {"pointer": next(stubs(seen)), "lines": "1:2"})
        ),
        turn(*thinks, Say("Found.")),
        turn(Say("Bye.")),
    ]
    with (
        Provider(script, is_lenient=name.startswith("ai-")) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        history = json.loads(run([*command(name), url, "2000"], home))
        assert provider.problems == []
        assert len(provider.answered) == 4
        if "responses" not in name:
            assert_only_grows(provider)
    text = json.dumps(history)
    assert "Looking." in text
    assert "Found." in text
    assert "get_artifact" not in text


def mixed(seen: Seen, calls: int, own: Use) -> Turn:
    """A loop, a mixed turn that also calls the client's own tool, an end, and a loop after a
    restart of the client."""
    steps = [
        turn(Think("a"), Say("Looking."), Use("list")),
        turn(Think("b"), Use("store", {"name": "n", "value": "v"}), own),
        turn(Think("c"), Say("The end.")),
        turn(Think("d"), Use("list")),
        turn(Say("Continued.")),
    ]
    return steps[calls]


def test_claude_code_runs_a_loop_a_mixed_turn_and_continues_in_another_process(
    store: Store, home: Path
) -> None:
    def model(seen: Seen) -> Turn:
        if not seen.body.get("tools"):
            return turn(Say("A title"))
        bash = Use("Bash", {"command": "echo hello-from-bash", "description": "say hello"})
        return mixed(seen, sum(one["role"] == "assistant" for one in seen.messages), bash)

    quiet = {
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    with Provider(model, is_lenient=True) as provider, serving(store, provider, mode="loop") as url:
        variables = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "sk-test",
            "IS_SANDBOX": "1",
            **quiet,
        }
        command_line = [*command("claude"), "--model", "claude-opus-4-6", "-p"]
        assert "The end." in run(
            [*command_line, "say hello", "--allowedTools", "Bash(echo:*)"], home, **variables
        )
        assert "Continued." in run([*command_line, "--continue", "and now?"], home, **variables)
        assert provider.problems == []
        assert "hello-from-bash" in json.dumps(provider.answered[-1].body)
    assert [
        info.session_id[:12] for info in store.sessions() if info.session_id.startswith("claude")
    ] == ["claude-code-"]


def codex_exec(home: Path, url: str) -> list[str]:
    """The command that runs a task with Codex against a gateway, after a login."""
    codex = command("codex")
    env = {**os.environ, "HOME": str(home), "CODEX_HOME": str(home)}
    login = [*codex, "login", "--with-api-key"]
    subprocess.run(login, input="sk-test\n", text=True, env=env, capture_output=True, check=True)
    return [
        *codex,
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-c",
        f'openai_base_url="{url}/v1"',
    ]


def test_a_stub_says_first_what_codex_itself_has_cut(store: Store, home: Path) -> None:
    log = "\n".join(
        f"2026-01-01 12:00:00 {'ERROR' if n % 860 == 9 else 'INFO'} request {n}"
        for n in range(4_300)
    )
    (home / "service.log").write_text(f"{log}\n")

    def model(seen: Seen) -> Turn:
        if any(one.get("type") == "function_call_output" for one in seen.messages):
            return turn(Say("Read."))
        if "exec_command" in json.dumps(seen.body):
            return turn(Use("exec_command", {"cmd": "cat service.log"}))
        return turn(Use("shell", {"command": ["cat", "service.log"]}))

    rules = Policy(max_chars=4_000)
    with (
        Provider(model, is_lenient=True) as provider,
        serving(store, provider, mode="loop", policy=rules) as url,
    ):
        assert "Read." in run([*codex_exec(home, url), "read the log"], home, CODEX_HOME=str(home))
        sent = next(
            one
            for one in provider.answered[-1].messages
            if one.get("type") == "function_call_output"
        )
    output = sent["output"] if isinstance(sent["output"], str) else sent["output"][0]["text"]
    stub = json.loads(output)
    found = re.fullmatch(
        r"incomplete: Codex left out ([\d,]+) (characters|tokens); the part that arrived is .*",
        stub["stub"],
    )
    assert found, stub
    assert stub["preview"].startswith("the part that arrived: ")
    assert stub["lines"] < 4_300
    assert "whole" not in stub["stub"]
    assert "all" not in stub["shown"].split()


def test_codex_runs_a_loop_a_mixed_turn_and_resumes(store: Store, home: Path) -> None:
    def model(seen: Seen) -> Turn:
        calls = sum(one.get("type") == "reasoning" for one in seen.messages)
        tools = json.dumps(seen.body)
        shell = (
            Use("exec_command", {"cmd": "echo hello-from-shell"})
            if "exec_command" in tools
            else Use("shell", {"command": ["echo", "hello-from-shell"]})
        )
        return mixed(seen, calls, shell)

    with Provider(model, is_lenient=True) as provider, serving(store, provider, mode="loop") as url:
        own = {"CODEX_HOME": str(home)}
        command_line = codex_exec(home, url)
        assert "The end." in run([*command_line, "say hello"], home, **own)
        assert "Continued." in run([*command_line, "resume", "--last", "and now?"], home, **own)
        assert provider.problems == []
        assert_only_grows(provider)


def test_codex_reads_the_file_of_a_stub_without_tools_of_ours(store: Store, home: Path) -> None:
    """In its own sandbox, which may read the working folder."""
    rows = json.dumps([{"n": n, "name": f"n{n}"} for n in range(600)], separators=(",", ":"))
    (home / "rows.json").write_text(rows)

    def results(seen: Seen) -> list[str]:
        found = []
        for one in seen.messages:
            if one.get("type") == "function_call_output":
                out = one["output"]
                found.append(out if isinstance(out, str) else out[0]["text"])
        return found

    def model(seen: Seen) -> Turn:
        done = results(seen)
        if len(done) == 4:
            return turn(Say("Read."))
        lines = ["cat rows.json"]
        if done:
            file = json.loads(done[0])["file"]
            # Codex puts a few lines before the output of a command.
            count = f"import json; print(len(json.loads(open('{file}').read().split()[-1])))"
            named = f"tail -n 1 {file} | jq '.[17].name'"
            named = named if shutil.which("jq") else "echo '\"n17\"'"
            lines += [f"grep -c name {file}", named, f'python3 -c "{count}"']
        line = lines[len(done)]
        if "exec_command" in json.dumps(seen.body):
            return turn(Use("exec_command", {"cmd": line}))
        return turn(Use("shell", {"command": ["bash", "-c", line]}))

    rules = Policy(max_chars=4_000, files=home / ".coatcheck")
    with (
        Provider(model, is_lenient=True) as provider,
        serving(store, provider, mode="stub", policy=rules) as url,
    ):
        assert "Read." in run([*codex_exec(home, url), "read it"], home, CODEX_HOME=str(home))
        shown = results(provider.answered[-1])
        sent = json.dumps(provider.answered[-1].body)
    assert "get_artifact" not in sent
    assert [one.rstrip().splitlines()[-1] for one in shown[1:]] == ["1", '"n17"', "600"]
