"""LangChain's own tests with our middleware outermost in every agent, compared with one that does
nothing.

    python -m tests.adapters.langchain.outermost LANGCHAIN_SOURCE

`LANGCHAIN_SOURCE` (an argument, or the variable `COATCHECK_LANGCHAIN_SOURCE`) is the folder of
LangChain's source archive, of the installed version. The gate: every test that passes with a
middleware that does nothing must pass with ours.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import langchain.agents
import langchain.agents.factory
from langchain.agents.middleware import AgentMiddleware

import coatcheck
from coatcheck.adapters.langchain import Coatcheck

HERE = Path(__file__).resolve().parent
PATHS = (HERE, HERE.parents[2] / "src")  # their package `tests` hides ours
FOLDER = "tests/unit_tests/agents/middleware"


class Nothing(AgentMiddleware[Any, Any, Any]):
    """Passes every call of a tool on."""

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(request)


def pytest_configure() -> None:
    """Put the middleware into every agent: this module is also a pytest plugin."""
    kind = os.environ.get("COATCHECK_OUTERMOST", "none")
    if kind == "none":
        return
    store = coatcheck.open("memory:")
    original = langchain.agents.factory.create_agent

    @functools.wraps(original)
    def create_agent(*args: Any, middleware: Any = (), **kwargs: Any) -> Any:
        outermost: Any = Nothing() if kind == "nothing" else Coatcheck(store)
        outermost.tools = []  # the tests compare lists of tools
        return original(*args, middleware=[outermost, *middleware], **kwargs)

    langchain.agents.factory.create_agent = langchain.agents.create_agent = create_agent


def passed(source: str, kind: str) -> set[str]:
    """Run the tests and return the names of those that pass."""
    env = {
        **os.environ,
        "COATCHECK_OUTERMOST": kind,
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
    }
    options = ["-p", "outermost", "-p", "no:cacheprovider", "-p", "no:benchmark", "-q", "-rp"]
    options += ["--rootdir", source, "--import-mode=importlib", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, FOLDER]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)
    if os.environ.get("COATCHECK_VERBOSE"):
        sys.stderr.write(done.stdout[-20_000:] + done.stderr[-2_000:])
    return set(re.findall(r"^PASSED (\S.*)$", done.stdout, re.MULTILINE))


def main(source: str) -> int:
    found = {kind: passed(source, kind) for kind in ("none", "nothing", "coatcheck")}
    for kind, tests in found.items():
        sys.stdout.write(f"{kind}: {len(tests)} tests pass\n")
    lost = sorted(found["nothing"] - found["coatcheck"])
    sys.stdout.writelines(f"lost: {name}\n" for name in lost)
    return 1 if lost or not found["nothing"] else 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [os.environ["COATCHECK_LANGCHAIN_SOURCE"]])))
