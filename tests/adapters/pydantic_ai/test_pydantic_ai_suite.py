"""Pydantic AI passes the adapter suite: sync, async and streaming."""

from __future__ import annotations

from tests.adapters.pydantic_ai.drivers import AsyncDriver, PydanticDriver, StreamingDriver
from tests.adapters.suite import AdapterSuite, Driver


class TestSync(AdapterSuite):
    def driver(self) -> Driver:
        return PydanticDriver()


class TestAsync(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
