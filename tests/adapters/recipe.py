"""Runs a recipe of docs/recipes.md: its code exactly as on the page, with a scripted model behind
OpenAI's API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coatcheck
from coatcheck import tokens
from examples.standins import Call, Reply, StandIn, Usage

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
LOG = "\n".join(
    f"2026-11-17 12:00 worker {n % 7} answered request {n * 7919} in {n % 97} ms"
    for n in range(3_500)
)
LOG = (
    LOG.replace("worker 3 answered request 7918 ", "worker 3 FAILED: code 4711 ", 1)
    + "\nERROR code 4711"
)
ROWS = [
    {"id": n, "name": f"customer {n}", "city": f"city {n % 97}", "total": n * 7 % 1_000}
    for n in range(3_000)
]
SMALL = 9_000  # characters of the last request, including the framework's own text

received: list[Any] = []


def fetch_log() -> str:
    """Fetch the log of the last run."""
    return LOG


def fetch_rows() -> list[dict[str, Any]]:
    """Fetch the rows of the table."""
    return ROWS


def count_lines(text: str) -> str:
    """Count the lines of a text.

    Args:
        text: the text
    """
    received.append(text)
    return f"{text.count(chr(10)) + 1} lines"


def count_rows(rows: list[dict[str, Any]]) -> str:
    """Count the rows of a table.

    Args:
        rows: the rows
    """
    received.append(rows)
    return f"{len(rows)} rows"


TOOLS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (fetch_log, fetch_rows, count_lines, count_rows)
}


def code_of(title: str) -> str:
    """Return the code under a heading of the page."""
    section = re.search(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"the page has no heading {title!r}"
    blocks = re.findall(r"^```py\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert blocks, f"there is no code under {title!r}"
    return "\n".join(blocks)


class Lenient(StandIn):
    """A stand-in that counts requests, and searches them as text: some frameworks send results in
    messages of the user, or with fields that the strict one refuses."""

    def _heard(
        self, wire: Any, path: str, headers: Any, raw: bytes
    ) -> tuple[dict[str, Any], Reply, int, Usage]:
        body, turn = json.loads(raw), len(self.requests)
        step: Any = self._script[turn]
        return body, step(raw.decode()) if callable(step) else step, turn, Usage(len(raw), 0, 0, 0)


def pointer(text: str, number: int) -> str:
    """The pointer of a stub in a request, counted from 0."""
    found = [*dict.fromkeys(re.findall(r"art:[0-9a-f]{12,64}", text))]
    assert len(found) > number, f"there is no stub in {text[-500:]}"
    return str(found[number])


def calls(name: str, **arguments: Any) -> Reply:
    return Reply(calls=(Call(name, arguments),))


STEPS: list[Any] = [
    calls("fetch_log"),
    lambda text: calls("get_artifact", pointer=pointer(text, 0), grep="ERROR"),
    lambda text: calls("count_lines", text=pointer(text, 0)),
    calls("fetch_rows"),
    lambda text: calls("count_rows", rows=pointer(text, 1)),
    calls("count_lines", text="art:000000000000"),
]


def run(title: str, *, last: Any = None, steps: Any = None) -> list[dict[str, Any]]:
    """Run a recipe and return its requests."""
    received.clear()
    script = [*(STEPS if steps is None else steps), last or Reply("There are 3,501 lines.")]
    with coatcheck.open("memory:") as store, Lenient(script) as api:
        os.environ.update(
            OPENAI_BASE_URL=api.openai_url, OPENAI_API_BASE=api.openai_url, OPENAI_API_KEY="none"
        )
        names = {"store": store, "__name__": "recipe", **TOOLS}
        exec(compile(code_of(title), f"<{title}>", "exec"), names)  # noqa: S102 - our own page
        refused = [one.status for one in api.requests if one.status != 200]
        assert refused == [], api.requests[-1]
        return [one.body for one in api.requests]


def check(requests: list[dict[str, Any]], *, most: int = SMALL) -> None:
    """Check that requests are small, tools get whole values, and an unknown pointer is answered."""
    assert received == [LOG, ROWS]
    sent = json.dumps(requests[-1])
    assert "code 4711" in sent
    assert "3501 lines" in sent
    assert "3000 rows" in sent
    assert "no artifact found for" in sent
    assert len(sent) < most, (
        f"the last request has {len(sent)} characters, {tokens.count(sent)} tokens"
    )
    assert LOG[1_000:1_500] not in sent.replace("\\n", "\n")
