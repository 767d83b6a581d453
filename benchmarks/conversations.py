"""The conversations of the corpus, each as the messages that a provider would be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatcheck.messages import FORMATS, Message, detect

_EMPTY = "(no words)"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a file. `turns` are the numbers of the model's answers: each was one call
    of a model, with the messages before it."""

    file: str
    provider: str
    messages: list[Message]

    @property
    def turns(self) -> list[int]:
        return [at for at, one in enumerate(self.messages) if at and one["role"] == "assistant"]


def conversations(corpus: Path) -> Iterator[Conversation]:
    """Every conversation, without the compactions of its host."""
    for path in sorted((corpus / "transcripts").rglob("*.json*")):
        if path.suffix == ".json":
            for run in json.loads(path.read_text()):
                yield Conversation(path.name, "openai", [_chat(one) for one in run["traj"]])
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        known = detect(lines)
        assert known is not None
        messages = known.for_model(lines, compacted=False)
        if known is FORMATS["pi"]:
            messages = [_block_message(one) for one in messages]
        yield Conversation(path.name, "anthropic", _joined(messages))


def _chat(message: Message) -> Message:
    """A message as the API accepts it, without the empty fields that hosts add."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _block_message(message: Message) -> Message:
    """A message of the pi agent in Anthropic's shape."""
    if message["role"] == "toolResult":
        result = {
            "type": "tool_result",
            "tool_use_id": message["toolCallId"],
            "content": message["content"],
        }
        if message.get("isError"):
            result["is_error"] = True
        return {"role": "user", "content": [result]}
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    return {"role": message["role"], "content": [_block(one) for one in content]}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") == "toolCall":
        return {
            "type": "tool_use",
            "id": block["id"],
            "name": block["name"],
            "input": block["arguments"],
        }
    if block.get("type") == "thinking":
        return {
            "type": "thinking",
            "thinking": block["thinking"],
            "signature": block.get("thinkingSignature", ""),
        }
    if block.get("type") == "image":
        source = {"type": "base64", "media_type": block["mimeType"], "data": block["data"]}
        return {"type": "image", "source": source}
    return {"type": "text", "text": block.get("text", "")}


def _joined(messages: list[Message]) -> list[Message]:
    """Consecutive messages of one role become one. Empty texts, which it refuses, get a
    placeholder."""
    found: list[Message] = []
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        blocks = [one for one in blocks if one.get("type") != "text" or one.get("text", "").strip()]
        if found and found[-1]["role"] == message["role"]:
            found[-1] = {**found[-1], "content": [*found[-1]["content"], *blocks]}
        else:
            found.append({"role": message["role"], "content": blocks})
    return [
        one if one["content"] else {**one, "content": [{"type": "text", "text": _EMPTY}]}
        for one in found
    ]
