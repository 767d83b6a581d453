"""The loops of the examples, each on its provider's own SDK, against a stand-in for the
provider."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import OpenAI

from coatcheck import Session, Store
from examples import anthropic_agent, openai_agent
from examples.standins import Received, StandIn

Api = Literal["chat", "responses", "messages"]


@dataclass(frozen=True)
class Agent:
    """One of the loops, to be run as a user would from Python."""

    api: Api

    def ask(
        self,
        standin: StandIn,
        session: Session,
        question: str = "?",
        tools: Sequence[Any] = (),
        **options: Any,
    ) -> str:
        if self.api == "messages":
            with Anthropic(api_key="none", base_url=standin.anthropic_url) as anthropic:
                return anthropic_agent.agent(anthropic, session, question, tools, **options)
        with OpenAI(api_key="none", base_url=standin.openai_url) as openai:
            loop = openai_agent.agent if self.api == "chat" else openai_agent.agent_on_responses
            return loop(openai, session, question, tools, **options)

    def sent(self, request: Received) -> tuple[str, str]:
        """The bytes of a request's messages, and of everything before them in a provider's
        cache."""
        key = "input" if self.api == "responses" else "messages"
        raw = request.raw.decode()
        start = raw.index(f'"{key}":') + len(f'"{key}":')
        end = json.JSONDecoder().raw_decode(raw, start)[1]
        return raw[start:end], json.dumps(
            [request.body.get(one) for one in ("tools", "system", "instructions")]
        )


@pytest.fixture(params=["chat", "responses", "messages"])
def agent(request: pytest.FixtureRequest) -> Agent:
    return Agent(request.param)


@pytest.fixture
def session(folder: Any) -> Session:
    store: Store = folder.open()
    return store.session("agent")
