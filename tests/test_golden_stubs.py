"""What a model gets in place of one value of each kind, byte for byte.

`golden_stubs.json` has one short stub for each kind of content in `test_hints`, and one for each shape
in which a value may come. A change of a stub is seen there before a model sees it. To write the file
again: `python -m tests.test_golden_stubs`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy
from coatcheck.externalize import Outcome
from tests.test_hints import EXAMPLES

GOLDEN = Path(__file__).with_name("golden_stubs.json")
LOG = "".join(f"2026-01-01 12:00:00 INFO request {n} took 3 ms\n" for n in range(300))
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes([0, 0, 2, 128, 0, 0, 1, 224]) + bytes(200_000)
SECRET = "ghp_" + "Ab3dE5" * 6
ALWAYS: dict[str, Any] = {"t": "always"}


def _image(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


SHAPES: dict[str, Any] = {
    "rows": [{"id": n, "name": f"user {n}", "tags": ["a", "b"]} for n in range(900)],
    "bytes": bytes(range(256)) * 300,
    "text in UTF-16": LOG.encode("utf-16"),
    "an image": PNG,
    "blocks": [{"type": "text", "text": "small"}, {"type": "text", "text": LOG}, _image(PNG)],
    "an MCP result": {"content": [{"type": "text", "text": LOG}], "isError": False},
    "a secret": f"token {SECRET}\n{LOG}",
    "text of another script": "これはとても長いテキストです。" * 900,
    "cut by Codex": f"{LOG[:5_000]}…48213 chars truncated…{LOG[-5_000:]}",
}
POLICIES: dict[str, Policy] = {
    "no reader": Policy(read_tool=None, tools=ALWAYS),
    "resolves": Policy(read_tool=None, resolves=True, tools=ALWAYS),
    "no preview": Policy(preview_chars=0, tools=ALWAYS),
    "200 characters": Policy(preview_chars=200, tools=ALWAYS),
    "masked": Policy(redact="store", tools=ALWAYS),
}


def _stub(value: Any, policy: Policy) -> str:
    outcome: Outcome = (
        coatcheck.open("memory:").session("s").externalize(value, tool="t", policy=policy)
    )
    return outcome.text


def _cases() -> dict[str, Callable[[], str]]:
    always = Policy(tools=ALWAYS)
    cases: dict[str, Callable[[], str]] = {
        kind: partial(_stub, example.content, always) for kind, example in EXAMPLES.items()
    }
    cases |= {name: partial(_stub, value, always) for name, value in SHAPES.items()}
    cases |= {name: partial(_stub, SHAPES["rows"], policy) for name, policy in POLICIES.items()}
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_a_model_gets_the_same_bytes_as_before(case: str) -> None:
    assert CASES[case]() == json.loads(GOLDEN.read_text("utf-8"))[case]


def test_the_golden_file_has_no_other_stubs() -> None:
    assert list(json.loads(GOLDEN.read_text("utf-8"))) == list(CASES)


if __name__ == "__main__":
    found = {case: make() for case, make in CASES.items()}
    GOLDEN.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", "utf-8")
