"""Pointers in arguments that a JSON Schema describes."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Session
from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.executor import resolve_arguments
from tests.backends import Backend

ROWS = {"rows": [{"id": 1}, {"id": 2}]}


def resolved(session: Session, value: str, schema: Any) -> Any:
    return resolve_arguments(
        session, {"x": value}, {"type": "object", "properties": {"x": schema}}
    )["x"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"}, {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["a", "b"]}, {"allOf": [{"type": "string"}]},
    ],
)  # fmt: skip
def test_a_value_arrives_as_text_where_only_strings_are_allowed(
    session: Session, schema: Any
) -> None:
    assert resolved(session, session.put(ROWS).pointer, schema) == '{"rows":[{"id":1},{"id":2}]}'


@pytest.mark.parametrize(
    "schema", [{}, True, {"type": ["string", "object"]}, {"$ref": "#/nowhere"}, {"type": 7}]
)
def test_a_value_arrives_unchanged_where_anything_is_allowed(session: Session, schema: Any) -> None:
    assert resolved(session, session.put(ROWS).pointer, schema) == ROWS
    assert resolved(session, session.put("[1]").pointer, schema) == "[1]"


@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {"type": ["array", "null"]}, {"anyOf": [{"type": "object"}]}]
)
def test_json_text_arrives_as_its_value_where_strings_are_not_allowed(
    session: Session, schema: Any
) -> None:
    assert (
        resolved(session, session.put('{"rows": [{"id": 1}, {"id": 2}]}').pointer, schema) == ROWS
    )
    with pytest.raises(InvalidArgument, match="not JSON"):
        resolved(session, session.put("just words").pointer, schema)


def test_bytes_arrive_as_base64_only_if_the_schema_asks_for_it(session: Session) -> None:
    pointer = session.put(b"\xff\x00").pointer
    found = resolved(session, pointer, {"type": "string", "contentEncoding": "base64"})
    assert base64.b64decode(found) == b"\xff\x00"
    for schema in ({"type": "string"}, {}):
        with pytest.raises(InvalidArgument, match="not text"):
            resolved(session, pointer, schema)


def test_schemas_are_followed_into_lists_objects_and_references(session: Session) -> None:
    pointer = session.put(ROWS).pointer
    schema = {
        "$defs": {"texts": {"type": "array", "items": {"type": "string"}}},
        "properties": {
            "a": {"$ref": "#/$defs/texts"},
            "b": {"additionalProperties": {"type": "string"}},
        },
    }
    text = '{"id":1}'
    found = resolve_arguments(
        session, {"a": [f"{pointer}#/rows/0"], "b": {"c": f"{pointer}#/rows/0"}}, schema
    )
    assert found == {"a": [text], "b": {"c": text}}


def test_a_schema_that_refers_to_itself_terminates(session: Session) -> None:
    schema = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    assert resolve_arguments(session, {"x": session.put(ROWS).pointer}, schema) == {"x": ROWS}


def test_a_foreign_pointer_is_kept_only_if_that_is_allowed(session: Session) -> None:
    unknown = {"x": "art:" + "0" * 12}
    assert resolve_arguments(session, unknown, foreign=True) == unknown
    with pytest.raises(InvalidArgument, match="art:000000000000"):
        resolve_arguments(session, unknown)


def test_values_that_are_too_large_together_are_refused_before_they_are_read(
    session: Session,
) -> None:
    pointer = session.put("x" * 600).pointer
    assert resolve_arguments(session, {"a": pointer}, max_bytes=1_000)["a"] == "x" * 600
    with pytest.raises(TooLarge):
        resolve_arguments(session, {"a": pointer, "b": [pointer]}, max_bytes=1_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def test_arguments_without_pointers_are_unchanged(backend: Backend) -> None:
    @backend.examples()
    @given(JSON)
    def check(value: Any) -> None:
        assert resolve_arguments(backend.new_session(), {"x": value}) == {"x": value}

    check()
