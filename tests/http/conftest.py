"""Fixtures for the HTTP tests: a server in a thread for each module, and a session for each
test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import coatcheck
from coatcheck import Session, Store
from tests.http.servers import Web, running

_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    place: Path = tmp_path_factory.mktemp("http") / "store"
    with coatcheck.open(place, durability="process") as opened:
        yield opened


@pytest.fixture(scope="module")
def web(shared_store: Store) -> Iterator[Web]:
    with running(shared_store) as found:
        yield found


@pytest.fixture(scope="module")
def client(web: Web) -> Iterator[httpx2.Client]:
    with web.client() as opened:
        yield opened


@pytest.fixture
def session(shared_store: Store) -> Session:
    return shared_store.session(f"session {next(_numbers)}")
