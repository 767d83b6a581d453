"""How far a call walks through the code: switches between our modules, and how often it asks the
catalog.

A count does not depend on the machine, so these rows can be compared between commits.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import coatcheck
from benchmarks.bench import KB, Bench, text
from benchmarks.report import Row
from coatcheck import toolkit, transcript
from coatcheck.context import PromptBuilder

_PACKAGE = str(Path(coatcheck.__file__).parent)


def walks(bench: Bench) -> Iterator[Row]:
    """Module switches of five common calls, each made a second time so that imports and caches do
    not count."""
    store = bench.new_store("process")
    session = store.session("walks")
    yield _row("put of 20 KB", 20, lambda: session.put(text(20 * KB)))
    yield _row(
        "externalize a log of 80 KB", 40, lambda: session.externalize(_log(), tool="run_tests")
    )
    log = session.put(_log(), name="log")
    yield _row("a page of grep", 40, lambda: session.read(log, grep="ERROR"))
    for number in range(30):
        session.put(f"the result of build {number}", name=f"build-{number}", tool="make")
    given: dict[str, Any] = {
        "provider": "anthropic",
        "system": "You are a careful agent.",
        "recall": True,
    }
    builder = PromptBuilder(session, tools=toolkit(session), **given)
    messages = _messages()
    yield _row("build a prompt of 12 messages", 250, lambda: builder.build(messages))
    fresh = PromptBuilder(session, tools=toolkit(session), **given)
    yield Row(
        "queries of that build to the catalog, among 30 artifacts",
        None,
        _statements(lambda: fresh.build(messages)),
        8,
        "count",
    )
    files = iter([_transcript(bench), _transcript(bench)])
    yield _row(
        "externalize a transcript of 12 lines",
        400,
        lambda: transcript.externalize(next(files), session),
    )
    store.close()


def _row(case: str, limit: int, call: Callable[[], object]) -> Row:
    call()
    return Row(f"{case}: module switches", None, _switches(call), limit, "count")


def _switches(call: Callable[[], object]) -> int:
    """Count the calls into another module of ours than the call before."""
    last, count = "", 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal last, count
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_PACKAGE) and name != last:
            last, count = name, count + 1

    _profiled(call, profile)
    return count


def _statements(call: Callable[[], object]) -> int:
    """Count the queries that a call makes to the catalog; those to the search index are not
    counted."""
    count = 0

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if (
            event == "c_call"
            and function.__name__ == "execute"
            and not frame.f_code.co_filename.endswith("passages.py")
        ):
            count += isinstance(
                getattr(function, "__self__", None), sqlite3.Connection | sqlite3.Cursor
            )

    _profiled(call, profile)
    return count


def _profiled(call: Callable[[], object], profile: Callable[[FrameType, str, Any], None]) -> None:
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)


def _log() -> str:
    return "\n".join(
        f"2026-03-01T12:00:{n % 60:02} {'ERROR timeout' if n % 97 == 0 else 'INFO served'} request {n} {text(32)}"
        for n in range(1_000)
    )


def _messages() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Why does the build fail?"}]
    for n in range(5):
        call = {"type": "tool_use", "id": f"c{n}", "name": "make", "input": {"target": f"t{n}"}}
        found.append(
            {"role": "assistant", "content": [{"type": "text", "text": "I look at it."}, call]}
        )
        found.append(
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": f"c{n}", "content": f"build {n} failed"}
                ],
            }
        )
    return [*found, {"role": "assistant", "content": "Build 3 failed first."}]


def _transcript(bench: Bench) -> Path:
    path = bench.new_folder("transcript") / "session.jsonl"
    lines: list[dict[str, Any]] = []
    for n in range(6):
        call = {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "run_tests", "arguments": "{}"},
        }
        lines.append({"role": "assistant", "content": None, "tool_calls": [call]})
        lines.append(
            {"role": "tool", "tool_call_id": f"c{n}", "content": _log() if n % 2 else "passed"}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
