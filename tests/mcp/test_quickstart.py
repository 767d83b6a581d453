"""The commands on the quickstart page run, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart-mcp.md").read_text()


def block(language: str, index: int = 0) -> str:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found[index]


def test_the_commands_of_the_page_wrap_a_server_as_shown_and_unwrap_it(tmp_path: Path) -> None:
    file = tmp_path / ".cursor" / "mcp.json"
    file.parent.mkdir()
    file.write_text(block("json"))
    scripts = sysconfig.get_path("scripts")
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
    }

    def run_script(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", script], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.replace(f"{tmp_path}/", "~/").replace(
            f"{scripts}/", "/home/me/venv/bin/"
        )

    assert run_script(block("sh")) == block("diff") * 2
    assert '"cursor-{folder}", "--", "uvx", "mcp-server-git"' in file.read_text()
    run_script(block("sh", 1))
    assert file.read_text() == block("json")


@pytest.mark.slow
def test_the_page_shows_what_the_model_sees_before_and_after() -> None:
    example = [sys.executable, "-W", "error", str(ROOT / "examples" / "slimmed_server.py")]
    done = subprocess.run(example, capture_output=True, text=True, check=True, timeout=120)
    assert without_marks(done.stdout) == without_marks(block("text"))


def without_marks(text: str) -> str:
    """Remove the mark at the end of a tool result, which differs between stores."""
    return re.sub(r"(?<= ~)\d+\.[\w-]+$", "…", text, flags=re.MULTILINE)
