"""Marks for the tests of LangChain's own suites."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = getattr(getattr(item, "cls", None), "OUTDATED", {}).get(
            getattr(item, "originalname", "")
        )
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
