"""Fixtures for the gateway: a store in a folder. Backends behave the same behind a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        yield store


@pytest.fixture(params=[True, False], ids=["streamed", "whole"])
def is_streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
