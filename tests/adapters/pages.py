"""The page and the example of a framework run in its environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.environments import ROOT


def run_page(name: str, folder: Path) -> None:
    """Run the blocks marked `py` of a page from top to bottom, in an empty folder."""
    found = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs" / name).read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    (folder / "page.py").write_text("\n".join(found))
    _run(["page.py"], folder)


def run_example(name: str) -> str:
    """Run an example and return what it prints."""
    return _run(["-m", f"examples.{name}"], ROOT)


def figures_of(printed: str) -> list[int]:
    """The characters of the last request, without Coatcheck and with it."""
    return [
        int(one.replace(",", ""))
        for one in re.findall(r"last request: ([\d,]+) characters", printed)
    ]


def _run(arguments: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout
