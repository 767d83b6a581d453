"""The OpenAI Agents SDK passes the adapter suite: sync, async and streaming."""

from __future__ import annotations

from tests.adapters.openai_agents.drivers import AgentsDriver, AsyncDriver, StreamingDriver
from tests.adapters.suite import AdapterSuite, Driver


class TestSync(AdapterSuite):
    def driver(self) -> Driver:
        return AgentsDriver()


class TestAsync(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
