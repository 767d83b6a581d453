"""Contents for the functions of this layer: made of plain bytes, or stored in a fleet's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import coatcheck
from coatcheck.content import Content
from tests.backends import Fleet
from tests.reading import framed
from tests.reading.framed import make_content

ContentOf = Callable[..., Content]


@pytest.fixture
def content_of() -> ContentOf:
    """`content_of(data, media_type=…)` returns a content with these bytes."""
    return make_content


@pytest.fixture(scope="module", params=["bytes", "fleet"])
def each_source(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module with contents of plain bytes, then with artifacts in a fleet's store, which are
    read by range."""
    if request.param == "bytes":
        yield
        return
    fleet: Fleet = request.getfixturevalue("fleet")
    with coatcheck.open(fleet.new_url()) as store:
        framed.kept_in = store.session("s")
        yield
        framed.kept_in = None
