"""What the functions of the layer are given: contents made of plain bytes, and the same as a fleet's store has them."""

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
    """`content_of(data, media_type=…)`: a content of these bytes."""
    return make_content


@pytest.fixture(scope="module", params=["bytes", "fleet"])
def each_source(request: pytest.FixtureRequest) -> Iterator[None]:
    """The contents of a module are plain bytes first, then artifacts in a fleet's store, which are read by range."""
    if request.param == "bytes":
        yield
        return
    fleet: Fleet = request.getfixturevalue("fleet")
    with coatcheck.open(fleet.new_url()) as store:
        framed.kept_in = store.session("s")
        yield
        framed.kept_in = None
