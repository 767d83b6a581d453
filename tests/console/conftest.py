"""One filled store and one server for all tests of the console: no test changes what the others
look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import coatcheck
from coatcheck import Store
from tests.console.visitors import Visitor, fill, site


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with coatcheck.open(
        tmp_path_factory.mktemp("console") / "store", durability="process"
    ) as opened:
        fill(opened)
        yield opened


@pytest.fixture(scope="package")
def url(store: Store) -> Iterator[str]:
    with site(store) as found:
        yield found


@pytest.fixture(scope="package")
def visitor(url: str) -> Visitor:
    return Visitor(url)
