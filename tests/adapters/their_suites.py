"""A framework's own tests, with our adapter in every agent: every test that passes without it must
pass with it.

    COATCHECK_THEIR_TESTS=/path/to/openai-agents-0.24.0/tests python tests/adapters/their_suites.py
    openai_agents

The folder has the tests from the framework's source archive or repository, preferably of the
installed release. The current environment needs the framework and the dependencies of its tests.
Further options are passed to pytest. Our tools are not listed to the model, since many of these
tests compare the list of tools.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = "COATCHECK_THEIR_TESTS"
ADAPTER = "COATCHECK_ADAPTER_IN_EVERY_AGENT"
OUTCOMES = "COATCHECK_OUTCOMES"


# The plugin for pytest


def pytest_configure(config: pytest.Config) -> None:
    import coatcheck

    if name := os.environ.get(ADAPTER):
        globals()[f"_{name}"](coatcheck.open("memory:"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        with open(os.environ[OUTCOMES], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def _openai_agents(store: Any) -> None:
    """Run a slimmed copy in place of every agent. Tests that compare the agents of a result with
    their own are lost."""
    from agents.run import AgentRunner

    from coatcheck.adapters.openai_agents import slim

    for name in ("run", "run_streamed", "run_sync"):
        _instead(AgentRunner, name, lambda agent: slim(agent, store, only=()))


def _instead(owner: Any, name: str, replaced: Any) -> None:
    run = getattr(owner, name)

    def changed(self: Any, agent: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, replaced(agent), *args, **kwargs)

    async def changed_async(self: Any, agent: Any, *args: Any, **kwargs: Any) -> Any:
        return await changed(self, agent, *args, **kwargs)

    setattr(
        owner,
        name,
        functools.wraps(run)(changed_async if inspect.iscoroutinefunction(run) else changed),
    )


def _pydantic_ai(store: Any) -> None:
    from pydantic_ai import Agent

    from coatcheck.adapters.pydantic_ai import Coatcheck

    made = Agent.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, capabilities: Any = None, **kwargs: Any) -> None:
        made(self, *args, capabilities=[*(capabilities or ()), Coatcheck(store, only=())], **kwargs)

    Agent.__init__ = init


def _google_adk(store: Any) -> None:
    """Put our plugin into every runner, and replace the artifact service in memory by ours."""
    from google.adk import artifacts, runners
    from google.adk.artifacts import in_memory_artifact_service

    import coatcheck
    from coatcheck.adapters.google_adk import Coatcheck, CoatcheckArtifacts

    class InMemory(CoatcheckArtifacts):
        """Our service with its own store, and with the URIs that the tests expect."""

        def __init__(self) -> None:
            super().__init__(coatcheck.open("memory:"))

        async def list_artifact_versions(self, **names: Any) -> Any:
            found = await super().list_artifact_versions(**names)
            uris = [one.canonical_uri.replace("artifact://", "memory://", 1) for one in found]
            return [
                one.model_copy(update={"canonical_uri": uri})
                for one, uri in zip(found, uris, strict=True)
            ]

    for module in (in_memory_artifact_service, artifacts):
        module.InMemoryArtifactService = InMemory
    made = runners.Runner.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.plugin_manager.get_plugin("coatcheck") is None:
            self.plugin_manager.register_plugin(Coatcheck(store, only=()))

    runners.Runner.__init__ = init


def _strands_storage(store: Any) -> None:
    """Replace the storage in memory by ours. Tests of its extras (`clear`, search strategies) are
    lost."""
    from strands import storage

    import coatcheck
    from coatcheck.adapters.strands import CoatcheckStorage

    class InMemory(CoatcheckStorage):
        def __init__(self) -> None:
            super().__init__(coatcheck.open("memory:"))

    storage.InMemoryStorage = InMemory


def _strands(store: Any) -> None:
    """Put our plugin into every agent."""
    from strands import Agent

    from coatcheck.adapters.strands import Coatcheck

    made = Agent.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, plugins: Any = None, **kwargs: Any) -> None:
        made(self, *args, plugins=[*(plugins or ()), Coatcheck(store, only=())], **kwargs)

    Agent.__init__ = init


def _fastmcp(store: Any) -> None:
    """Put our middleware outermost in every server. Output schemas stay and nothing becomes a stub,
    because many of these tests compare them and clients check them. Tests that need their own
    middleware to be first are lost."""
    from fastmcp import FastMCP

    from coatcheck import Policy
    from coatcheck.adapters.fastmcp import Coatcheck

    class Ours(Coatcheck):
        async def on_list_tools(self, context: Any, call_next: Any) -> Any:
            return await call_next(context)

    made = FastMCP.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.add_middleware(
            Ours(store, session="theirs", only=(), policy=Policy(max_chars=5_000_000))
        )

    FastMCP.__init__ = init


# The script


def outcomes(folder: Path, adapter: str, options: list[str]) -> dict[str, str]:
    """Run their tests, and return the outcome of each. With an empty `adapter`, they run
    unchanged."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "outcomes"
        shutil.copy(
            __file__, Path(scratch) / "coatcheck_in_every_agent.py"
        )  # their `tests` is a package too
        paths = os.pathsep.join([str(ROOT / "src"), scratch])
        env = {**os.environ, ADAPTER: adapter, OUTCOMES: str(file), "PYTHONPATH": paths}
        plugin = ["-p", "coatcheck_in_every_agent", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *plugin, *options]
        done = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True)
        if not file.exists():
            sys.stderr.write(done.stdout[-1_000:] + done.stderr[-1_000:])
            return {}
        return dict(json.loads(line) for line in file.read_text().splitlines())


def main(adapter: str, *options: str) -> int:
    folder = Path(os.environ.get(TESTS, ""))
    if not folder.is_dir() or not os.environ.get(TESTS):
        sys.stderr.write(f"set {TESTS} to the folder with the framework's tests\n")
        return 2
    chosen = list(options) or [str(folder)]
    without, run = (outcomes(folder, one, chosen) for one in ("", adapter))
    passed = {node for node, outcome in without.items() if outcome == "passed"}
    lost = sorted(node for node in passed if run.get(node) != "passed")
    sys.stdout.write(
        f"{len(without)} tests; {len(passed)} pass without Coatcheck, of these {len(passed) - len(lost)} with\n"
    )
    sys.stdout.writelines(f"  {node}\n" for node in lost)
    return 1 if lost or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
