"""The descriptions of an executor's tools for a model: schemas that match what the executor
accepts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from coatcheck import Ref, Session, ToolCall, ToolExecutor, toolkit
from coatcheck.executor import Pointer
from examples.standins.checks import schema_fault
from tests.backends import Backend


class Item(BaseModel):
    title: str
    amount: int = 1


class Node(BaseModel):
    name: str
    children: list[Node] = []


@dataclasses.dataclass
class Point:
    x: float
    y: float


class Options(TypedDict, total=False):
    deep: bool


class Colour(Enum):
    RED = "red"


def schema(session: Session, tool: Any) -> dict[str, Any]:
    found: dict[str, Any] = ToolExecutor(session, [tool]).tools[0].as_anthropic()["input_schema"]
    return found


def properties(session: Session, tool: Any) -> dict[str, Any]:
    found: dict[str, Any] = schema(session, tool)["properties"]
    return found


def test_a_function_is_described_by_its_docstring_annotations_and_defaults(
    session: Session,
) -> None:
    def search(
        words: str, limit: int = 8, order: Literal["new", "old"] = "new", inside: str | None = None
    ) -> str:
        """Search the web."""
        return words

    (tool,) = ToolExecutor(session, [search]).tools
    function = tool.as_openai()["function"]
    assert (function["name"], function["description"]) == (
        "search",
        "Search the web. Arguments may be pointers (art:...).",
    )
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "words": {"type": "string"},
            "limit": {"type": "integer", "default": 8},
            "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
            "inside": {"type": "string"},
        },
        "required": ["words"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "doc", ["A sentence of a docstring.\n" * 100, "word " * 1_000, "x" * 1_000]
)
def test_a_long_docstring_is_cut_to_what_providers_accept_and_pointers_are_still_mentioned(
    session: Session, doc: str
) -> None:
    def tool(text: str) -> None: ...

    tool.__doc__ = doc
    (described,) = ToolExecutor(session, [tool]).tools
    assert len(described.description) <= 1_024
    assert described.description.startswith(doc[:500].rstrip())
    assert described.description.endswith("… Arguments may be pointers (art:...).")


def test_arguments_that_may_be_large_may_be_sent_as_pointers(session: Session) -> None:
    def tool(
        rows: list[dict[str, int]], item: Item, either: dict[str, int] | None = None, many: int = 3
    ) -> None: ...

    found = properties(session, tool)
    assert found["rows"]["type"] == ["array", "string"]
    assert found["item"]["anyOf"] == [{"$ref": "#/$defs/Item"}, {"type": "string"}]
    assert found["either"]["type"] == ["object", "string"]
    assert found["many"]["type"] == "integer"
    assert schema(session, tool)["$defs"]["Item"]["properties"]["title"] == {"type": "string"}


def test_files_streams_refs_and_pointers_are_strings_that_say_what_to_send(
    session: Session,
) -> None:
    def tool(file: Path, stream: BinaryIO, ref: Ref, pointer: Pointer) -> None: ...

    for found in properties(session, tool).values():
        assert found["type"] == "string"
        assert "art:" in found["description"]


def test_text_in_an_annotation_describes_the_parameter(session: Session) -> None:
    def tool(
        day: Annotated[str, "as 2026-03-01"],
        count: Annotated[int, Field(description="how many", ge=1)],
    ) -> None: ...

    found = properties(session, tool)
    assert found["day"] == {"type": "string", "description": "as 2026-03-01"}
    assert found["count"] == {"type": "integer", "description": "how many", "minimum": 1}


def test_variadic_parameters_and_unknown_annotations_accept_anything(session: Session) -> None:
    def tool(odd: threading_lock, *more: int, **rest: str) -> None: ...  # type: ignore[name-defined] # noqa: F821

    found = schema(session, tool)
    assert found["properties"] == {"odd": {}, "more": {"type": "array", "items": {}}}
    assert found["additionalProperties"] is True
    assert found["required"] == ["odd"]


def test_objects_describe_themselves_and_keep_their_place(session: Session) -> None:
    class Odd:
        name = "odd"

        def run(self, **arguments: Any) -> str:
            return "ran"

    def first() -> None:
        """First."""

    tools = toolkit(session)
    executor = ToolExecutor(session, [first, *tools, Odd()])
    assert [tool.name for tool in executor.tools] == list(executor.names)
    assert [tool.as_mcp() for tool in executor.tools[1:4]] == [tool.as_mcp() for tool in tools]
    assert "annotations" not in executor.tools[0].as_mcp()
    assert executor.tools[0].description == "First."
    assert executor.tools[-1].parameters["additionalProperties"] is True


HINTS = (
    Any, str, int, float, bool, None, bytes, str | None, list, list[int], dict, dict[str, Any], tuple[int, str],
    set[str], Literal["a", 1, None], Item, list[Item], dict[str, Item], Item | None, Item | str, Path, list[Path],
    BinaryIO, list[BinaryIO], Ref, Pointer, list[Pointer], Point, Options, Colour, datetime, UUID, Decimal, re.Pattern,
    type, object, Annotated[int, Field(gt=3)], Node, Callable[[int], str], Session,
)  # fmt: skip


def test_providers_accept_the_schema_whatever_the_annotations(backend: Backend) -> None:
    @backend.examples()
    @given(
        st.dictionaries(
            st.sampled_from("abcdef"), st.tuples(st.sampled_from(HINTS), st.booleans()), max_size=4
        )
    )
    def check(parameters: dict[str, Any]) -> None:
        check_schema(backend.new_session(), parameters)

    check()


def check_schema(session: Session, parameters: dict[str, Any]) -> None:
    def tool(**given: Any) -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    signature = [
        inspect.Parameter(
            name, kind, annotation=hint, default=None if optional else inspect.Parameter.empty
        )
        for name, (hint, optional) in parameters.items()
    ]
    tool.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    tool.__annotations__ = {name: hint for name, (hint, _) in parameters.items()}
    (described,) = ToolExecutor(session, [tool]).tools
    assert schema_fault(described.parameters) is None
    assert list(described.parameters["properties"]) == list(parameters)
    assert described.parameters.get("required", []) == [
        name for name, (_, optional) in parameters.items() if not optional
    ]
    json.dumps(described.as_openai(), allow_nan=False)


@pytest.mark.parametrize("form", ["as_openai", "as_openai_responses", "as_anthropic", "as_mcp"])
def test_the_bytes_are_the_same_every_time(session: Session, form: str) -> None:
    def tool(b: Item, a: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Something."""

    def described() -> str:
        return json.dumps(
            [getattr(one, form)() for one in ToolExecutor(session, [tool, *toolkit(session)]).tools]
        )

    assert described() == described()


def test_the_executor_accepts_whatever_the_schema_of_an_array_allows(session: Session) -> None:
    def total(rows: list[dict[str, int]], *, more: list[int] | None = None) -> int:
        return sum(row["n"] for row in rows) + sum(more or [])

    pointer = session.put([{"n": 1}, {"n": 2}]).pointer
    executor = ToolExecutor(session, [total])
    assert executor.run(ToolCall("c", "total", {"rows": pointer, "more": [3]})).text == "6"
