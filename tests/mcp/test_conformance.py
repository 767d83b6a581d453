"""The MCP project's own conformance suite, run against `coatcheck mcp --http` as a user starts it.

Every check that fails must be listed below, with the reason why it does not apply, and every check
in the list must fail: once it passes, remove it from the list. Most are about tools, prompts and
resources with fixed names that only the suite's reference server has.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mcp.node_servers import LOCKED
from tests.mcp.speaking import environment

PROMPTS = "the server has no prompts, and says so in its capabilities"
UNCHANGING = (
    "an artifact never changes: the server has no subscriptions, and says so in its capabilities"
)
REFERENCE_TOOL = "it calls a tool that only the suite's reference server has"
REFERENCE_RESOURCE = "it reads a URI that only the suite's reference server has"
INPUT = (
    "it calls a tool of the reference server that asks the client for input; ours never ask for any"
)
HEADERS = "it needs a tool with x-mcp-header annotations; none of ours uses them"
RESUMING = "recommended only: it is for slow responses, and ours can simply be requested again"

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "2025-11-25": {
        "elicitation-sep1034-general": REFERENCE_TOOL,
        "elicitation-sep1330-general": REFERENCE_TOOL,
        "json-schema-2020-12-tool-found": REFERENCE_TOOL,
        "prompts-get-embedded-resource": PROMPTS,
        "prompts-get-simple": PROMPTS,
        "prompts-get-with-args": PROMPTS,
        "prompts-get-with-image": PROMPTS,
        "prompts-list": PROMPTS,
        "resources-read-binary": REFERENCE_RESOURCE,
        "resources-read-text": REFERENCE_RESOURCE,
        "resources-subscribe": UNCHANGING,
        "resources-templates-read": REFERENCE_RESOURCE,
        "resources-unsubscribe": UNCHANGING,
        "server-sse-priming-event": RESUMING,
        "server-sse-retry-field": RESUMING,
        "tools-call-audio": REFERENCE_TOOL,
        "tools-call-elicitation": REFERENCE_TOOL,
        "tools-call-embedded-resource": REFERENCE_TOOL,
        "tools-call-error": REFERENCE_TOOL,
        "tools-call-image": REFERENCE_TOOL,
        "tools-call-mixed-content": REFERENCE_TOOL,
        "tools-call-sampling": REFERENCE_TOOL,
        "tools-call-simple-text": REFERENCE_TOOL,
        "tools-call-with-logging": REFERENCE_TOOL,
        "tools-call-with-progress": REFERENCE_TOOL,
    },
    "2026-07-28": {
        "json-schema-2020-12-tool-found": REFERENCE_TOOL,
        "prompts-get-embedded-resource": PROMPTS,
        "prompts-get-simple": PROMPTS,
        "prompts-get-with-args": PROMPTS,
        "prompts-get-with-image": PROMPTS,
        "prompts-list": PROMPTS,
        "resources-read-binary": REFERENCE_RESOURCE,
        "resources-read-text": REFERENCE_RESOURCE,
        "resources-templates-read": REFERENCE_RESOURCE,
        "sep-2243-server-decode-base64": HEADERS,
        "sep-2243-server-no-xmcp-tool": HEADERS,
        "sep-2243-server-reject-invalid-param-chars": HEADERS,
        "sep-2243-server-reject-param-mismatch": HEADERS,
        "sep-2243-server-validate-param-match": HEADERS,
        "sep-2322-elicitation-incomplete": INPUT,
        "sep-2322-ignore-unexpected-params": INPUT,
        "sep-2322-list-roots-incomplete": INPUT,
        "sep-2322-missing-response-rerequests": INPUT,
        "sep-2322-multi-round-r1": INPUT,
        "sep-2322-multiple-inputs-incomplete": INPUT,
        "sep-2322-non-tool-incomplete": PROMPTS,
        "sep-2322-reject-tampered-state": INPUT,
        "sep-2322-request-state-incomplete": INPUT,
        "sep-2322-respect-client-capabilities": INPUT,
        "sep-2322-result-type-included": INPUT,
        "sep-2322-sampling-incomplete": INPUT,
        "sep-2549-prompts-list-caching-hints": PROMPTS,
        "sep-2575-http-server-no-independent-requests-on-stream": REFERENCE_TOOL,
        "sep-2575-missing-capability-http-400": REFERENCE_TOOL,
        "sep-2575-server-no-log-without-loglevel": REFERENCE_TOOL,
        "sep-2575-server-rejects-undeclared-capability": REFERENCE_TOOL,
        "sep-2575-server-sends-prompts-list-changed-on-subscription": PROMPTS,
        "sep-2575-server-sends-tools-list-changed-on-subscription": "the three tools never change",
        "tools-call-audio": REFERENCE_TOOL,
        "tools-call-embedded-resource": REFERENCE_TOOL,
        "tools-call-error": REFERENCE_TOOL,
        "tools-call-image": REFERENCE_TOOL,
        "tools-call-mixed-content": REFERENCE_TOOL,
        "tools-call-simple-text": REFERENCE_TOOL,
        "tools-call-with-progress": REFERENCE_TOOL,
    },
}
MIN_PASSED = {
    "2025-11-25": 44,
    "2026-07-28": 94,
}  # a suite that runs no checks would not fail either


class Running(NamedTuple):
    address: str
    token: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`coatcheck mcp --http`, with something in its session."""
    token = secrets.token_urlsafe(24)
    env = environment(tmp_path_factory.mktemp("served") / "store", COATCHECK_MCP_TOKEN=token)
    ours = [sys.executable, "-m", "coatcheck"]
    put_notes = [*ours, "put", "-", "--name", "notes", "--session", "suite"]
    subprocess.run(put_notes, env=env, input=b"one line\n", capture_output=True, check=True)
    command = [*ours, "mcp", "--http", "--port", "0", "--session", "suite"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield Running(process.stderr.readline().split()[-1], token)
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("version", NOT_APPLICABLE)
def test_the_server_passes_every_check_of_the_conformance_suite_that_applies_to_it(
    version: str, server: Running, npm_server: Callable[[str], list[str]], tmp_path: Path
) -> None:
    node, suite = npm_server("conformance")
    arguments = [
        "server",
        "--url",
        server.address,
        "--suite",
        "all",
        "--spec-version",
        version,
        "-o",
        str(tmp_path),
    ]
    env = {
        **os.environ,
        "NODE_OPTIONS": f"--import={(LOCKED / 'with_token.mjs').as_uri()}",
        "CONFORMANCE_SUITE": suite,
        "COATCHECK_MCP_TOKEN": server.token,
    }
    done = subprocess.run(
        [node, suite, *arguments], env=env, capture_output=True, text=True, check=False, timeout=240
    )
    checks = [
        check for file in tmp_path.glob("*/checks.json") for check in json.loads(file.read_text())
    ]
    failed = {check["id"]: check for check in checks if check["status"] not in ("SUCCESS", "INFO")}
    unexpected = {
        name: check.get("errorMessage")
        for name, check in failed.items()
        if name not in NOT_APPLICABLE[version]
    }
    assert not unexpected, done.stdout
    assert set(failed) == set(NOT_APPLICABLE[version]), "these pass now: remove them from the list"
    passed = sum(check["status"] == "SUCCESS" for check in checks)
    assert passed >= MIN_PASSED[version]
