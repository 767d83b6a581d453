"""The adapter suite against a loop around `ToolExecutor`, as in the examples: it needs no
framework."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import coatcheck
from coatcheck import Policy, Session, ToolCall, ToolExecutor, toolkit
from coatcheck.errors import StoreClosed
from coatcheck.parts import Part
from tests.adapters.suite import (
    Ability,
    AdapterSuite,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    SeenResult,
)

DAY = 86_400.0


class ExecutorDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "approval": "the loop belongs to the caller",
        "cancellation": "the executor answers with an outcome, whatever the tool does",
        "final_answer": "the loop belongs to the caller",
        "hand_off": "the loop belongs to the caller",
        "offloader": "the executor is the offloader",
        "retry": "the executor has no exception for it",
    }

    def run(self, scenario: Scenario) -> Run:
        with ExitStack() as opened:
            store = scenario.store or opened.enter_context(coatcheck.open("memory:"))
            session = (
                store if isinstance(store, Session) else _session_of(store, scenario.conversation)
            )
            agents = [
                _as_tool(one.name, one.model, one.tools, session, scenario.policy)
                for one in scenario.agents
            ]
            is_on = scenario.store is not None
            policy = scenario.policy if is_on else Policy(enabled=False)
            tools = [*scenario.tools, *scenario.shared, *agents]
            return _loop(session, scenario.model, tools, policy, scenario.prompt, is_on)

    def content(self, parts: Sequence[Part]) -> Any:
        return (
            parts[0].data
            if parts[0].media_type == "application/pdf"
            else [one.as_anthropic() for one in parts]
        )

    def delete(self, store: coatcheck.Store, conversation: str) -> None:
        store.session(conversation).end()


def _session_of(store: coatcheck.Store, conversation: str | None) -> Session:
    try:
        return store.session(conversation or secrets.token_hex(8), ttl=30 * DAY)
    except StoreClosed:
        return store.unchecked_session("closed", ttl=30 * DAY)


def _as_tool(
    name: str,
    model: ScriptedModel,
    tools: Sequence[Callable[..., Any]],
    session: Session,
    policy: Policy | None,
) -> Callable[..., Any]:
    def delegate(task: str) -> str:
        """Give a task to another agent."""
        return _loop(session, model, tools, policy, task, True).final

    delegate.__name__ = name
    return delegate


def _loop(
    session: Session,
    model: ScriptedModel,
    tools: Sequence[Callable[..., Any]],
    policy: Policy | None,
    prompt: str,
    is_on: bool,
) -> Run:
    is_on = is_on and (policy is None or policy.enabled)
    is_taken = any(tool.__name__ == "get_artifact" for tool in tools)
    ours = toolkit(session, prefix="coatcheck_" if is_taken else "") if is_on else []
    policy = replace(policy or Policy(), read_tool=ours[0].name) if ours else policy
    executor = ToolExecutor(session, [*tools, *ours], policy=policy)
    described = [one.as_openai()["function"] for one in executor.tools]
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    results: list[SeenResult] = []
    while True:
        turn = model.respond(messages, described, results)
        if not turn.calls:
            return Run(model, turn.text, None, json.dumps(messages).encode())
        messages.append({"role": "assistant", "calls": [_as_json(call) for call in turn.calls]})
        for outcome in executor.run_all(turn.calls):
            content = getattr(outcome, "content", None)
            blocks = (
                content if isinstance(content, list) and content and "type" in content[0] else None
            )
            texts = [one["text"] for one in blocks or [] if one["type"] == "text"]
            pictures = [
                base64.b64decode(one["source"]["data"])
                for one in blocks or []
                if one["type"] == "image"
            ]
            messages.append(
                {"role": "tool", "id": outcome.call_id, "content": blocks or outcome.text}
            )
            text = "\n".join(texts) if blocks else outcome.text
            results.append(
                SeenResult(
                    id=outcome.call_id,
                    name=outcome.name,
                    text=text,
                    is_error=outcome.is_error,
                    media=tuple(pictures),
                )
            )


def _as_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": dict(call.parsed())}


class TestExecutor(AdapterSuite):
    def driver(self) -> Driver:
        return ExecutorDriver()
