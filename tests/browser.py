"""A real Chromium for tests: the machine's, or Debian's, which `python -m tests.browser` installs
for root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def found() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("google-chrome")
        or shutil.which("chromium-browser")
    )


@cache
def installed() -> str | None:
    """The browser's path. It is installed once, if this machine allows that."""
    if (browser := found()) is not None or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return browser
    with (Path(tempfile.gettempdir()) / "coatcheck-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (browser := found()) is None:
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"]
            for command in (["apt-get", "update", "-qq"], install):
                subprocess.run(command, env=quiet, stdout=sys.stderr, check=False, timeout=600)
            browser = found()
    return browser


def chromium() -> str:
    """The browser's path. Without a browser, the test is skipped, but fails in CI."""
    browser = installed()
    if browser is None and os.environ.get("CI"):
        pytest.fail("there is no Chromium on this machine, and it could not be installed")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    return browser


if __name__ == "__main__":
    sys.exit(installed() is None)
