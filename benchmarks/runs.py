"""The recorded runs of the corpus, each as the steps that a model saw and took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

Role = Literal["user", "model", "result"]
_ROLES: dict[str, Role] = {
    "user": "user", "human": "user", "HumanMessage": "user", "system": "user", "SystemMessage": "user",
    "developer": "user", "assistant": "model", "ai": "model", "AIMessage": "model", "gemini": "model",
    "tool": "result", "ToolMessage": "result",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """What somebody told the model, what the model wrote (its words and the arguments of its
    calls), or a result with its tool, if that is known."""

    role: Role
    text: str
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run. `source` is the name of the folder that it comes from."""

    source: str
    steps: list[Step]


def runs(corpus: Path, *, quick: bool = False) -> Iterator[Run]:
    """Every recorded run of data agents, then every coding session, in a fixed order; if `quick`,
    only some runs."""
    if quick:
        yield from islice(runs(corpus), 0, 280, 10)
        return
    for part in ("runs", "sessions"):
        for path in sorted((corpus / part).rglob("*.*")):
            for steps in steps_of(path):
                if any(step.role == "result" for step in steps):
                    yield Run(path.relative_to(corpus / part).parts[0], steps)


def steps_of(path: Path) -> Iterator[list[Step]]:
    """The runs in a file."""
    text = path.read_text()
    if text.startswith("event: "):
        yield list(_streamed(text))
    elif path.suffix == ".json":
        found = json.loads(text)
        if isinstance(found, list):
            for run in found:
                yield list(
                    _react(run["messages"]) if "question_dict" in run else _chat(run["messages"])
                )
        elif "values" in found:
            yield list(_chat(found["values"]["messages"]))
        elif "messages" in found:
            yield list(_parts(found["messages"]))
    elif path.suffix == ".jsonl":
        lines = list(_objects(text))
        stages = [
            line["messages"] for line in lines if line.get("type") == "event" and "messages" in line
        ]
        if stages:
            yield from (list(_chat(stage)) for stage in stages)
        else:
            yield [step for line in lines for step in _line(line)]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        with suppress(ValueError):  # some hosts mix other lines in
            yield json.loads(line)


def _words(content: object) -> str:
    """The text of a message's content: a string, or the texts of its blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, map(_words, content)))
    if isinstance(content, dict):
        return _words(
            next(
                (
                    content[key]
                    for key in ("text", "content", "output", "response")
                    if key in content
                ),
                "",
            )
        )
    return ""


def _written(words: str, calls: Iterable[object]) -> Iterator[Step]:
    text = "\n".join(
        filter(None, [words, *(json.dumps(call, ensure_ascii=False) for call in calls)])
    )
    if text:
        yield Step("model", text)


def _chat(messages: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """Messages with a role or a type: OpenAI's, LangChain's, Anthropic's."""
    tools: list[str] = []  # of the calls that have no result yet
    for message in messages:
        role = _ROLES.get(message.get("role") or message.get("type", ""))
        content = message.get("content")
        blocks = (
            [block for block in content if isinstance(block, dict)]
            if isinstance(content, list)
            else []
        )
        results = [block for block in blocks if block.get("type") == "tool_result"]
        if role == "model":
            asked = [block["input"] for block in blocks if block.get("type") == "tool_use"]
            called = [call.get("function", call) for call in message.get("tool_calls") or ()]
            tools = [call.get("name") or "" for call in called]
            yield from _written(_words(content), [*asked, *(_arguments(call) for call in called)])
        elif results:
            yield from (Step("result", _words(block.get("content"))) for block in results)
        elif role is not None:
            yield Step(role, _words(content), tools.pop(0) if role == "result" and tools else "")


def _arguments(call: dict[str, Any]) -> object:
    given = call.get("arguments", call.get("args"))
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _react(messages: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """A chat without tool calls: what follows the model's words is the result of the action in
    them."""
    before = "user"
    for message in messages:
        role = "result" if message["role"] == "user" and before == "assistant" else message["role"]
        yield Step("result" if role == "result" else _ROLES[role], message["content"])
        before = message["role"]


def _parts(messages: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """opencode: a message has parts, and a tool's part has both its input and its output."""
    for message in messages:
        for part in message["parts"]:
            if part["type"] == "tool":
                yield from _written("", [part["state"]["input"]])
                yield Step("result", _words(part["state"].get("output", "")), part.get("tool", ""))
            elif part["type"] == "text":
                yield Step(_ROLES[message["info"]["role"]], part["text"])


def _line(line: dict[str, Any]) -> Iterator[Step]:
    """One line of the files of Claude Code, Codex, Copilot and Gemini."""
    kind, payload, data = str(line.get("type", "")), line.get("payload"), line.get("data")
    if isinstance(payload, dict):
        yield from _item(payload) if kind == "response_item" else ()
    elif isinstance(data, dict):
        if kind == "user.message":
            yield Step("user", data["content"])
        elif kind == "assistant.message":
            yield from _written(
                data["content"], [call["arguments"] for call in data["toolRequests"]]
            )
        elif kind == "tool.execution_complete":
            yield Step("result", _words(data.get("result")), "bash")  # all of those in the corpus
    elif isinstance(line.get("message"), dict):
        yield from _chat([line["message"]])
    elif kind in ("user", "gemini"):
        calls = line.get("toolCalls", [])
        if kind == "gemini":
            yield from _written(_words(line["content"]), [call["args"] for call in calls])
            yield from (Step("result", _gemini(call.get("result")), call["name"]) for call in calls)
        elif not any("functionResponse" in block for block in line["content"]):
            yield Step("user", _words(line["content"]))


def _gemini(result: object) -> str:
    answers = [one["functionResponse"] for one in result or () if "functionResponse" in one]  # type: ignore[attr-defined]
    return "\n".join(_words(one["response"]) for one in answers)


def _item(item: dict[str, Any]) -> Iterator[Step]:
    if item["type"] == "message":
        yield Step(_ROLES[item["role"]], _words(item["content"]))
    elif item["type"] == "function_call":
        yield from _written("", [_arguments(item)])
    elif item["type"] == "function_call_output":
        yield Step("result", _words(item["output"]))


def _streamed(text: str) -> Iterator[Step]:
    """Events of a stream: pieces of messages with the same id belong together."""
    pieces: dict[str, tuple[Role, list[str]]] = {}
    for event in text.split("\n\n"):
        name, _, data = event.strip().partition("\n")
        if not data.startswith("data: "):
            continue
        body = json.loads(data.removeprefix("data: "))
        role: Role = "result" if name == "event: tool_call_result" else _ROLES[body["role"]]
        _, written = pieces.setdefault(f"{body['id']} {role}", (role, []))
        written.append(body.get("content") or "")
        written += [chunk.get("args") or "" for chunk in body.get("tool_call_chunks", ())]
    for role, written in pieces.values():
        if joined := "".join(written):
            yield Step(role, joined)
