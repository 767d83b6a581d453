"""Contents made of plain bytes: what the functions of the layer are given, without a store."""

from collections.abc import Callable

import pytest

from coatcheck.ids import digest_of
from coatcheck.refs import Ref
from coatcheck.streams import Content

ContentOf = Callable[..., Content]


def make_content(data: bytes, media_type: str = "application/octet-stream") -> Content:
    ref = Ref(digest_of(data), "test", len(data), media_type, "data")
    return Content(ref, b"", lambda offset, length: data[offset : offset + length])


@pytest.fixture
def content_of() -> ContentOf:
    """`content_of(data, media_type=…)`: a content of these bytes."""
    return make_content
