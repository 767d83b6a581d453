"""`coatcheck gateway` and `coatcheck run` as commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coatcheck.cli import main
from coatcheck.errors import InvalidArgument
from coatcheck.gateway import launch
from tests import warm
from tests.gateway.provider import Provider, Say, turn
from tests.gateway.talking import post

AGENT = """
import os, sys, anthropic, openai
body = {"model": "claude-opus-5-5", "messages": [{"role": "user", "content": "hi"}]}
with anthropic.Anthropic(api_key="sk-test", max_retries=0) as one:
    print(one.messages.create(max_tokens=9, **body).content[0].text)
with openai.OpenAI(api_key="sk-test", max_retries=0) as two:
    print(two.chat.completions.create(**body).choices[0].message.content)
print(os.environ["ENABLE_TOOL_SEARCH"])
sys.exit(7)
"""


def coatcheck(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        warm.command("coatcheck", *words), capture_output=True, text=True, timeout=60, **more
    )


def test_run_points_the_command_at_a_gateway_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    with Provider(lambda _: turn(Say("Hello."))) as provider:
        options = [
            "--store",
            str(tmp_path / "store"),
            "--anthropic",
            provider.url,
            "--openai",
            f"{provider.url}/v1",
        ]
        done = coatcheck("run", *options, "--", sys.executable, "-c", AGENT)
        assert done.returncode == 7, done.stderr
        assert done.stdout.splitlines() == ["Hello.", "Hello.", "true"]
        assert "2 answers" in done.stderr
        assert len(provider.answered) == 2
        assert all("/t/" not in one.path for one in provider.seen)


def test_run_reports_a_missing_or_unknown_command(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store")]
    assert "a command is missing" in coatcheck("run", *store).stderr
    done = coatcheck("run", *store, "--", "no-such-program-anywhere")
    assert done.returncode == 2
    assert "cannot run" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gateway_serves_until_a_signal_ends_it_and_prints_figures(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Provider(lambda _: turn(Say("Hello."))) as provider:
        options = [
            "--store",
            str(tmp_path / "store"),
            "--port",
            "0",
            "--json",
            "--anthropic",
            provider.url,
        ]
        command = [sys.executable, "-m", "coatcheck", "gateway", *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            assert "/t/" in address
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            assert post(address, "/v1/messages", body).status_code == 200
            assert post(address.partition("/t/")[0], "/v1/messages", body).status_code == 401
            process.send_signal(number)
            _, figures = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + number
        printed = [json.loads(line) for line in figures.splitlines() if line.startswith("{")]
        assert [one["calls"] for one in printed] == [1], figures


@pytest.mark.parametrize(
    "token", ["short", "has spaces in it, and more", "slash/slash/slash/slash"]
)
def test_a_weak_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        launch.check_token(token)
    assert token not in str(raised.value)


def test_clients_are_configured_by_variables_or_options() -> None:
    found = launch.variables("http://127.0.0.1:1/t/x", {"ENABLE_TOOL_SEARCH": "false"})
    assert found["OPENAI_BASE_URL"] == "http://127.0.0.1:1/t/x/v1"
    assert "ENABLE_TOOL_SEARCH" not in found
    assert launch.pointed(["codex", "exec"], "http://a") == [
        "codex",
        "-c",
        'openai_base_url="http://a/v1"',
        "exec",
    ]
    assert launch.pointed(["python", "x.py"], "http://a") == ["python", "x.py"]
    assert launch.upstreams({"OPENAI_BASE_URL": "https://x/v1/"}) == {"openai": "https://x"}


@pytest.mark.parametrize("words", [["gateway"], ["run", "--mode", "loop", "--", "true"]])
def test_files_need_stub_mode(words: list[str]) -> None:
    done = CliRunner().invoke(main, [words[0], "--files", "here", *words[1:]])
    assert done.exit_code == 2
    assert "--files needs --mode stub" in done.output
