"""Queries that almost fit: the intended path is computed from the content."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.reading.jsonpath import find
from coatcheck.reading.near_paths import nearest
from tests.reading.framed import make_content

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["a", "b c"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "A", "b-c", "'"]), inner, max_size=3)
    ),
    max_leaves=10,
)
DOCUMENT = {
    "total": 3,
    "Items": [
        {"id": 1, "title": "Alpha", "a-b": {"x.y/z": 5}},
        {"id": 2, "title": "Beta"},
        {"id": 3, "title": "Gamma"},
    ],
    "meta": {"page": {"next": "p2"}},
    "labels": {"app.kubernetes.io/name": "web"},
}


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("$.items[0]", "$.Items[0]"),
        ("$.Items.title", "$.Items[*].title"),
        (".Items[0].title", "$.Items[0].title"),
        ("Items[0].title", "$.Items[0].title"),
        ("/Items/0/id", "$.Items[0].id"),
        ("#/Items/1", "$.Items[1]"),
        ("$.Items.0.title", "$.Items[0].title"),
        ("$.Items[?@.name=='Alpha']", "$.Items[?@.title == 'Alpha']"),
        ("$.Items[?@.name=='alpha'].id", "$.Items[?search(@.title, '(?i)alpha')].id"),
        ("$.Items[?@.id=='2'].title", "$.Items[?@.id == 2].title"),
        ("$.Items[0].a-b", "$.Items[0]['a-b']"),
        ("$.labels.app.kubernetes.io/name", "$.labels['app.kubernetes.io/name']"),
        ("$.next", "$..['next']"),
        ("$..Title", "$..title"),
        ("$[0].id", "$.Items[0].id"),
        ("$.results[*].title", "$.Items[*].title"),
        ("$.Items[*].titel", "$.Items[*].title"),
        (".Items[] | .title", "$.Items[*].title"),
        ('.Items[] | select(.title == "Beta") | .id', "$.Items[?@.title == 'Beta'].id"),
    ],
)
def test_the_intended_path_of_a_query_is_computed_from_the_content(query: str, path: str) -> None:
    content = make_content(json.dumps(DOCUMENT).encode(), "application/json")
    assert nearest(content, query) == (path, "")
    assert find(content, path).text


def test_a_query_that_fits_nowhere_is_answered_with_the_available_keys() -> None:
    content = make_content(json.dumps(DOCUMENT).encode(), "application/json")
    assert nearest(content, "$.foo.bar") == ("", "$ has total, Items, meta, labels")
    assert nearest(content, "$.Items[?@.x == 'y']") == (
        "",
        "$.Items[*] has id, title, a-b",
    )
    assert nearest(content, "two words") == ("", "")
    assert nearest(content, "word") == ("", "")


@given(st.text(max_size=40), VALUES)
def test_any_query_gets_a_path_with_results_or_none(query: str, value: Any) -> None:
    content = make_content(json.dumps(value).encode(), "application/json")
    path, _ = nearest(content, query)
    assert not path or find(content, path).text
