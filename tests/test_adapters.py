"""Adapters for the frameworks that most people use pass their suite. `make adapters` runs it for
all frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environments
from tests.adapters.__main__ import command

ALWAYS = ("langchain", "openai_agents", "pydantic_ai")
# Starts another process with the framework, but a synchronous run covers the same. `make adapters`
# runs it.
REPEATED = "test_two_processes_on_one_store_send_the_same_bytes and (TestAsync or TestStreaming)"


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # it may install the framework first, and runs some hundred tests
@pytest.mark.parametrize("name", ALWAYS)
def test_the_tests_of_an_adapter_pass_in_the_environment_of_its_framework(name: str) -> None:
    try:
        run = command(name, "-q", "-k", f"not ({REPEATED})")
    except environments.Missing as missing:
        reason = f"{name} cannot be installed: {missing}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(run, cwd=environments.ROOT, env=env, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-8_000:]}\n{done.stderr[-2_000:]}"


def test_an_environment_that_cannot_be_created_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(setting, "1")
    lock = tmp_path / "constraints.txt"
    lock.write_text(f"no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(environments.Missing, match="no-such-package"):
        environments.python(lock, tmp_path / "here" / "venv")
    with pytest.raises(environments.Missing, match="nowhere"):
        environments.python(tmp_path / "nowhere.txt", tmp_path / "here" / "venv")
