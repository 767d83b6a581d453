"""The weight of a message: thinking counts by its signature, as providers bill it; anything else as
its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coatcheck import tokens
from coatcheck.messages.cost import weigh

TEXT = {"type": "text", "text": "ok"}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks, TEXT]}


def signed(text: str, signature: str, key: str = "signature") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, key: signature}


@pytest.mark.parametrize("key", ["signature", "thinkingSignature"])
def test_thinking_counts_by_its_signature(key: str) -> None:
    bare = weigh(assistant({"type": "thinking"}))
    assert weigh(assistant(signed("let me see " * 90, "Ab9+" * 500, key))) == bare + 400
    assert weigh(assistant(signed("", "Ab9+" * 500, key))) == bare + 400
    redacted = {"type": "redacted_thinking", "data": "Ab9+" * 500}
    assert weigh(assistant(redacted)) == weigh(assistant({"type": "redacted_thinking"})) + 400


def test_thinking_too_long_for_its_signature_counts_as_text() -> None:
    text = "let me see " * 90
    for block in (signed(text, ""), signed(text, "sig"), {"type": "thinking", "thinking": text}):
        assert weigh(assistant(block)) > tokens.estimate(text)


def test_data_that_only_looks_like_thinking_counts_as_text() -> None:
    data = signed("let me see " * 90, "Ab9+" * 500)
    call = {"type": "tool_use", "id": "c", "name": "n", "input": {"content": [data]}}
    assert weigh({"role": "assistant", "content": [call]}) > 1_000
    assert weigh({"role": "user", "content": json.dumps([data])}) > 1_000


def calls(path: Path) -> Iterator[tuple[int, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield for each answer of the model: the tokens of its prompt, its blocks, and the blocks
    before the next one."""
    number, prompt = None, 0
    answer: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        message = record.get("message")
        if not isinstance(message, dict) or record.get("isSidechain"):
            continue
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] != "assistant":
            after = [*after, *blocks]
            continue
        if message["id"] != number:
            if number is not None:
                yield prompt, answer, after
            number, answer, after = message["id"], [], []
        used = message["usage"]
        answer = [*answer, *blocks]
        prompt = sum(
            used.get(name) or 0
            for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        )  # fmt: skip
    yield prompt, answer, after


def test_the_weight_of_thinking_matches_the_usage_of_real_sessions(corpus: Path) -> None:
    """A prompt is longer than the previous one by the answer and the messages since. Where most of
    that is thinking, subtracting the rest gives the number of tokens that the provider counted for
    the thinking."""
    billed = counted = found = 0
    for path in sorted((corpus / "transcripts" / "claude-code").glob("*.jsonl")):
        for (prompt, answer, after), (longer, _, _) in pairwise(calls(path)):
            thought = [one for one in answer if one["type"] == "thinking"]
            rest = [one for one in (*answer, *after) if one["type"] != "thinking"]
            signature = sum(len(one["signature"]) for one in thought)
            others = tokens.count(json.dumps(rest, ensure_ascii=False))
            if signature < others or not prompt < longer < prompt + 5_000:
                continue
            found += 1
            billed += longer - prompt - others
            counted += weigh({"role": "assistant", "content": thought}) - weigh(
                {"role": "assistant", "content": []}
            )
    assert found > 20
    assert 0.9 < counted / billed < 1.3
