"""Recorded exchanges with the providers pass byte for byte, in `observe` and, without calls of our
tools, in `loop`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Store
from tests.gateway.provider import Provider, Turn, turn
from tests.gateway.talking import KEYS, post, serving

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(os.environ.get("COATCHECK_CORPUS", ROOT.parent / "shared" / "data")) / "wire"
PATHS = {"anthropic": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
TOOL = {"name": "search", "description": "Search.", "input_schema": {"type": "object"}}

pytestmark = pytest.mark.skipif(
    not CORPUS.is_dir(), reason=f"{CORPUS} does not exist: set COATCHECK_CORPUS"
)


def streams() -> Iterator[tuple[str, str, bytes]]:
    """Recorded streams: their names, APIs and bytes."""
    for path in sorted((CORPUS / "vercel-ai").rglob("*.chunks.txt")):
        if "openai-completion-" in path.name or "realtime" in path.name:  # other APIs
            continue
        lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
        first = json.loads(lines[0]) if lines else {}
        api = (
            "anthropic"
            if "anthropic" in path.name
            else "chat"
            if "choices" in first
            else "responses"
        )
        events = []
        for line in lines:
            name = json.loads(line).get("type", "") if api != "chat" else ""
            events.append((f"event: {name}\n" if name else "") + f"data: {line}\n\n")
        end = "data: [DONE]\n\n" if api == "chat" else ""
        yield path.name, api, ("".join(events) + end).encode()


def exchanges() -> Iterator[tuple[str, bytes, bytes, str]]:
    """Recorded exchanges: path, request, answer, and the content type of the answer."""
    yaml = pytest.importorskip("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted((CORPUS / "pydantic-ai").rglob("*.yaml"))[::4]:
        for one in yaml.load(path.read_text(), Loader=loader)["interactions"]:
            if "request" not in one:
                continue
            where = "/" + one["request"]["uri"].split("/", 3)[-1].partition("?")[0]
            if where not in PATHS.values():
                continue
            request, answer = one["request"], one["response"]
            body = (
                json.dumps(request["parsed_body"])
                if "parsed_body" in request
                else request.get("body") or ""
            )
            content = answer.get("body", {}).get("string") if "parsed_body" not in answer else None
            data = json.dumps(answer["parsed_body"]) if content is None else content
            kind = (answer["headers"].get("content-type") or ["application/json"])[0]
            yield where, body.encode(), data if isinstance(data, bytes) else data.encode(), kind


def request_for(api: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "stream": True}
    if api == "anthropic":
        return {
            **body,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "go"}],
            "tools": [TOOL],
        }
    function = {"name": "search", "parameters": {"type": "object"}}
    if api == "chat":
        tools = [{"type": "function", "function": function}]
        return {
            **body,
            "messages": [{"role": "user", "content": "go"}],
            "tools": tools,
            "stream_options": {"include_usage": True},
        }
    return {**body, "input": "go", "tools": [{"type": "function", **function}]}


@pytest.mark.parametrize("mode", ["observe", "loop"])
def test_recorded_streams_pass_byte_for_byte(store: Store, mode: str) -> None:
    ends = (b"event: message_stop", b"event: response.completed")
    found = [
        one for one in streams() if all(one[2].count(end) < 2 for end in ends)
    ]  # some files have two answers
    assert len(found) > 20
    script = iter(found)

    def answer(_: Any) -> Turn:
        return turn(raw=next(script)[2], content_type="text/event-stream")

    with (
        Provider(answer, is_lenient=True) as provider,
        serving(store, provider, is_one=True, mode=mode) as url,
    ):
        for name, api, data in found:
            response = post(url, PATHS[api], request_for(api))
            assert response.content == data, name


def test_recorded_exchanges_pass_byte_for_byte(store: Store) -> None:
    found = list(exchanges())
    assert len(found) > 40
    script = iter(found)

    def answer(_: Any) -> Turn:
        _, _, data, kind = next(script)
        return turn(raw=data, content_type=kind)

    with (
        Provider(answer, is_lenient=True) as provider,
        serving(store, provider, is_one=True) as url,
    ):
        for path, body, data, _ in found:
            response = post(url, path, body, **KEYS)
            assert provider.seen[-1].raw == body
            assert response.content == data
    sessions = [store.session(info.session_id) for info in store.sessions()]
    assert sum(len(session.records("gateway:calls")) for session in sessions) > 40
