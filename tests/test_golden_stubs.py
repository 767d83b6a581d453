"""Golden tests for the bytes of stubs and fallbacks: a stub is a pure function of content, policy
and name.

`golden_stubs.json` contains what a model gets for each value, as text and in the shape of the
value. To accept an intended change, run this file as a module: `python -m tests.test_golden_stubs`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Limit, Policy, Session, errors
from coatcheck.executor import ToolCall, ToolExecutor
from coatcheck.externalize import Outcome
from coatcheck.values import as_text

GOLDEN = Path(__file__).with_name("golden_stubs.json")
LOG = "".join(
    f"2026-01-01 12:{i // 60 % 60:02}:{i % 60:02} INFO request {i} took {i * 7 % 900} ms\n"
    for i in range(900)
)
FAILING = (
    LOG
    + "2026-01-01 13:00:00 ERROR login failed: timeout\nTraceback (most recent call last):\nKeyError: 'x'\n"
    + LOG
)
ROWS = [{"id": i, "name": f"user {i}", "tags": ["a", "b"]} for i in range(900)]
CSV = "id,name,score\n" + "".join(f"{i},user {i},{i * 3 % 100}\n" for i in range(3_000))
MARKDOWN = "".join(
    f"# Part {i}\n\nWords about part {i}, and a [link](https://example.com/{i}).\n\n"
    for i in range(400)
)
HTML = "<!doctype html><html><body>" + "<p>one paragraph of it</p>" * 2_000 + "</body></html>"
CODE = "".join(
    f"def function_{i}(value: int) -> int:\n    return value + {i}\n\n\n" for i in range(500)
)
SECRET = "ghp_" + "Ab3dE5" * 6
WITH_SECRET = f"token {SECRET}\n" + LOG
OTHER_SCRIPT = "これはとても長いテキストです。" * 900
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    + (640).to_bytes(4, "big")
    + (480).to_bytes(4, "big")
    + bytes(280_000)
)
SMALL_PNG = PNG[:20_000]
PDF = b"%PDF-1.7\n" * 9_000
ZIP = b"PK\x03\x04" + bytes(60_000)


@dataclass
class Row:
    number: int
    words: str


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _mcp(text: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": False, **more}


ANTHROPIC = [
    {"type": "text", "text": "small"},
    {"type": "text", "text": LOG, "cache_control": {"type": "ephemeral"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _b64(PNG)}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": _b64(PDF)}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": MARKDOWN}, "title": "a title"},
    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": CSV}]},
    {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
]  # fmt: skip
OPENAI = [
    {"type": "text", "text": LOG},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + _b64(PNG)}},
    {"type": "input_image", "image_url": "data:image/png;base64," + _b64(SMALL_PNG)},
    {"type": "file", "file": {"file_data": "data:application/pdf;base64," + _b64(PDF)}},
    {"type": "input_audio", "input_audio": {"data": _b64(bytes(90_000)), "format": "wav"}},
]
RESOURCES = [
    {"type": "resource", "resource": {"uri": "file:///a.log", "mimeType": "text/x-log", "text": LOG}},
    {"type": "resource", "resource": {"uri": "file:///a.bin", "mimeType": "application/zip", "blob": _b64(ZIP)}},
    {"type": "resource_link", "uri": "file:///b.log", "name": "b"},
]  # fmt: skip
FOREIGN = [
    {"type": "image", "base64": _b64(SMALL_PNG), "mime_type": "image/png"},
    {"type": "text", "text": LOG},
]

VALUES: dict[str, Any] = {
    "small text": "ok",
    "small data": {"a": [1, None, "é"]},
    "log": LOG,
    "log with a failure": FAILING,
    "text of another script": OTHER_SCRIPT,
    "markdown": MARKDOWN,
    "html": HTML,
    "code": CODE,
    "csv": CSV,
    "json text": json.dumps(ROWS),
    "json lines": "".join(json.dumps(row) + "\n" for row in ROWS),
    "list of rows": ROWS,
    "dict": {"rows": ROWS, "next": None, "total": 900},
    "dataclasses": [Row(i, "some words " * 3) for i in range(600)],
    "odd keys and numbers": {1: float("nan"), "set": {3, 1, 2}, "rows": ROWS},
    "one long line": "x" * 40_000,
    "secret": WITH_SECRET,
    "secret in data": {"token": SECRET, "password": "correct horse battery", "rows": ROWS},
    "bytes": bytes(range(256)) * 300,
    "bytes of text": LOG.encode(),
    "utf-16": LOG.encode("utf-16"),
    "png": PNG,
    "stream": io.BytesIO(LOG.encode()),
    "anthropic blocks": ANTHROPIC,
    "openai blocks": OPENAI,
    "mcp resources": RESOURCES,
    "picture of a framework": FOREIGN,
    "one block": ANTHROPIC[1],
    "nearly blocks": [{"type": "row", "value": i} for i in range(4_000)],
    "many blocks": [{"type": "text", "text": LOG + str(i)} for i in range(60)],
    "mcp result": _mcp(LOG, _meta={"a": 1}),
    "mcp error": _mcp(FAILING) | {"isError": True},
    "mcp structured": _mcp("see the data", structuredContent={"rows": ROWS}),
    "mcp repeated": _mcp(json.dumps({"rows": ROWS}), structuredContent={"rows": ROWS}),
    "mcp repeated text": _mcp(LOG, structuredContent={"result": LOG}),
    "cut by Codex": f"{LOG[:5_000]}…48213 chars truncated…{LOG[-5_000:]}",
    "cut by Claude Code": f"Exit code 1\n{LOG[:5_000]}\n\n... [48213 characters truncated] ...\n\n{LOG[-5_000:]}",
    "stub again": '{"stub":"the result is stored whole, not shown here","artifact":"art:1"}',
}  # fmt: skip
POLICIES: dict[str, Policy] = {
    "no reader": Policy(read_tool=None),
    "resolves": Policy(read_tool=None, resolves=True),
    "another reader": Policy(
        read_tool="fetch", read_arguments=("pointer", "lines"), preview_chars=600
    ),
    "no preview": Policy(preview_chars=0),
    "characters": Policy(max_chars=5_000),
    "bytes": Policy(max_bytes=5_000),
    "masked": Policy(redact="store"),
    "always": Policy(tools={"t": "always"}),
    "never": Policy(tools={"t": "never"}),
    "a limit of its own": Policy(tools={"t": Limit(max_chars=2_000)}),
    "shrunk": Policy(tools={"t": lambda value: {"rows": len(as_text(value))}}),
    "counted": Policy(count=len, max_tokens=1_000),
}
UNDER_POLICIES = (
    "small text",
    "log",
    "list of rows",
    "secret",
    "secret in data",
    "csv",
    "png",
    "anthropic blocks",
)
BROKEN = (
    "small text",
    "log",
    "list of rows",
    "png",
    "bytes of text",
    "stream",
    "anthropic blocks",
    "mcp repeated",
)


def _fresh(value: Any) -> Any:
    return io.BytesIO(value.getvalue()) if isinstance(value, io.BytesIO) else value


def _golden_record(outcome: Outcome) -> dict[str, Any]:
    content = as_text(outcome.content)
    if outcome.content == outcome.text:
        content = "="
    elif len(content) > 2_500:
        content = "sha256 " + hashlib.sha256(content.encode()).hexdigest()
    text = outcome.text
    if len(text) > 2_500:
        text = f"{text[:300]} … sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    return {
        "text": text,
        "content": content,
        "refs": len(outcome.refs),
        "tokens_saved": outcome.tokens_saved,
    }


def _put(session: Session, summary: str | None = None) -> Any:
    return session.put(LOG, name="a log", summary=summary)


def _broken(error: Exception) -> Session:
    session = coatcheck.open("memory:").session("s")

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    session.store._catalog.put = refuse  # type: ignore[assignment,method-assign]
    return session


def _cases() -> dict[str, Callable[[], dict[str, Any]]]:
    def externalized(name: str, policy: Policy | None = None) -> dict[str, Any]:
        session = coatcheck.open("memory:").session("s")
        return _golden_record(
            session.externalize(_fresh(VALUES[name]), tool="t", call_id="c1", policy=policy)
        )

    def failing(name: str, policy: Policy | None = None) -> dict[str, Any]:
        error = (
            errors.StoreFull("no space")
            if policy is None
            else ValueError("a backend of somebody else's")
        )
        return _golden_record(
            _broken(error).externalize(_fresh(VALUES[name]), tool="t", policy=policy)
        )

    def a_ref(summary: str | None) -> dict[str, Any]:
        session = coatcheck.open("memory:").session("s")
        return _golden_record(session.externalize(_put(session, summary), tool="t"))

    def executed(tool: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        executor = ToolExecutor(coatcheck.open("memory:").session("s"), [tool])
        outcome = executor.run(ToolCall("c1", tool.__name__, arguments))
        return {"text": outcome.to_model_content()}

    def answer(lines: int) -> str:
        return LOG[: lines * 50]

    def pieces() -> Any:
        yield LOG
        yield LOG

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(externalized, name) for name in VALUES
    }
    for label, policy in POLICIES.items():
        cases |= {
            f"{name}; {label}": partial(externalized, name, policy) for name in UNDER_POLICIES
        }
    cases |= {f"{name}; store full": partial(failing, name) for name in BROKEN}
    small = Policy(max_chars=700)
    cases |= {f"{name}; store broken": lambda n=name: failing(n, small) for name in BROKEN}  # type: ignore[misc]
    cases["log; store broken, no room"] = lambda: failing("log", Policy(max_chars=50))
    cases["ref"] = lambda: a_ref(None)
    cases["ref with a summary"] = lambda: a_ref("what the nightly run printed")
    cases["executor; small"] = lambda: executed(answer, {"lines": 2})
    cases["executor; large"] = lambda: executed(answer, {"lines": 900})
    cases["executor; yielded"] = lambda: executed(pieces, {})
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_a_model_gets_the_same_bytes_as_before(case: str) -> None:
    assert CASES[case]() == json.loads(GOLDEN.read_text("utf-8"))[case]


if __name__ == "__main__":
    found = {case: make() for case, make in CASES.items()}
    GOLDEN.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", "utf-8")
