"""The LangChain adapter passes the adapter suite in sync, async and streaming runs."""

from __future__ import annotations

from tests.adapters.langchain.driver import (
    AsyncLangChainDriver,
    LangChainDriver,
    StreamingLangChainDriver,
)
from tests.adapters.suite import AdapterSuite, Driver


class TestLangChain(AdapterSuite):
    def driver(self) -> Driver:
        return LangChainDriver()


class TestAsyncLangChain(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncLangChainDriver()


class TestStreamingLangChain(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingLangChainDriver()
