"""A gateway that accepts programs of the same user without a token: for Codex, whose arguments
other users can read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coatcheck import Store
from coatcheck.gateway import launch
from coatcheck.http.serving import is_same_user
from tests.conftest import CI
from tests.gateway.node_clients import client
from tests.gateway.provider import Provider, Say, Seen, Turn, turn
from tests.gateway.talking import post, serving
from tests.http.servers import environment
from tests.mcp.node_servers import Missing

TOKEN = "a-token-of-the-gateway-for-tests"
BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the owners of sockets")

ASK = """
import socket, sys
host, port, body = "127.0.0.1", int(sys.argv[1]), sys.argv[2].encode()
with socket.create_connection((host, port)) as one:
    lines = ["POST /v1/messages HTTP/1.1", f"Host: {host}:{port}", f"Content-Length: {len(body)}", "Connection: close"]
    one.sendall("\\r\\n".join([*lines, "", ""]).encode() + body)
    print(one.recv(65_536).split(b" ")[1].decode())
"""


def test_a_program_of_the_same_user_needs_no_token(store: Store) -> None:
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        serving(store, provider, token=TOKEN, trusts_user=True) as url,
    ):
        assert post(url, "/v1/messages", BODY).status_code == 200
        assert post(url, f"/t/{TOKEN}/v1/messages", BODY).status_code == 200
        assert post(url, "/t/a-token-that-is-wrong/v1/messages", BODY).status_code == 401


def test_without_the_setting_every_program_needs_the_token(store: Store) -> None:
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        serving(store, provider, token=TOKEN) as url,
    ):
        assert post(url, "/v1/messages", BODY).status_code == 401


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a program as another user")
def test_a_program_of_another_user_needs_the_token(store: Store) -> None:
    with (
        Provider(lambda _: turn(Say("Hello."))) as provider,
        serving(store, provider, token=TOKEN, trusts_user=True) as url,
    ):
        command = ["/usr/bin/env", "python3", "-c", ASK, url.rpartition(":")[2], json.dumps(BODY)]
        done = subprocess.run(
            command, user=65_534, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.strip() == "401", done.stderr
        assert provider.seen == []


@pytest.mark.parametrize(
    "family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv4 in a socket for IPv6"]
)
def test_the_owner_of_a_connection_is_found(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(family) as one:
        port = listening.getsockname()[1]
        one.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
        own = ("127.0.0.1", one.getsockname()[1])
        assert is_same_user(own, ("127.0.0.1", port))
        assert not is_same_user(own, ("127.0.0.1", port + 1))
        assert not is_same_user(("::1", own[1]), ("::1", port))


# Codex


def arguments_and_variables(pid: int) -> tuple[str, str]:
    try:
        place = Path(f"/proc/{pid}")
        return (place / "cmdline").read_text(), (place / "environ").read_text()
    except (OSError, UnicodeDecodeError):
        return "", ""


def test_codex_behind_run_has_no_token_in_its_arguments(tmp_path: Path) -> None:
    """Looks at every process of this machine while Codex waits for its answer."""
    try:
        codex = client("codex")
    except Missing as error:
        if CI:
            raise
        pytest.skip(str(error))
    home = tmp_path / "home"
    home.mkdir()
    program = tmp_path / "codex"  # as it is called on a path
    program.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in codex) + ' "$@"\n')
    program.chmod(0o755)
    env = environment(
        tmp_path / "store", HOME=str(home), CODEX_HOME=str(home), NO_PROXY="127.0.0.1"
    )
    subprocess.run(
        [*codex, "login", "--with-api-key"], input="sk-test\n", text=True, env=env, check=True
    )
    running: list[tuple[str, str]] = []
    lock = threading.Lock()

    def look(_: Seen) -> Turn:
        with lock:
            running[:] = [
                arguments_and_variables(int(one.name)) for one in Path("/proc").glob("[0-9]*")
            ]
        return turn(Say("Hello."))

    with Provider(look, is_lenient=True) as provider:
        command = [sys.executable, "-m", "coatcheck", "run", "--openai", provider.url, "--"]
        options = [
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "say hello",
        ]
        done = subprocess.run(
            [*command, str(program), *options], env=env, cwd=home, capture_output=True, text=True, timeout=120,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    assert "Hello." in done.stdout, done.stderr[-2_000:]
    ours = [
        (words, given)
        for words, given in running
        if "openai_base_url" in words and str(home) in given
    ]
    assert ours, "Codex was not seen"
    for words, given in ours:
        token = (
            next(one for one in given.split("\0") if one.startswith("OPENAI_BASE_URL="))
            .split("/t/")[1]
            .split("/")[0]
        )
        assert len(token) > 20
        assert not any(token in other for other, _ in running), words


def test_only_codex_is_pointed_at_a_gateway_by_an_argument() -> None:
    assert launch.is_codex(["/usr/local/bin/codex", "exec"])
    assert not launch.is_codex(["python", "codex"])
    with launch.local_server() as server:
        assert launch.knows_users(server)
