"""The OpenAI Agents SDK passes the adapter suite: sync, async and streaming."""

from __future__ import annotations

from coatcheck.testing import AdapterSuite
from coatcheck.testing.adapter_suite import Driver
from tests.adapters.openai_agents.drivers import AgentsDriver, AsyncDriver, StreamingDriver


class TestSync(AdapterSuite):
    def driver(self) -> Driver:
        return AgentsDriver()


class TestAsync(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
