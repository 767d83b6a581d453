"""Plain functions as tools: the adapter suite against a loop that knows only functions, and the
signatures."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import pydantic
import pytest

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall
from coatcheck.adapters import current_session, widened, widened_schema
from coatcheck.adapters.functions import slim
from coatcheck.errors import StoreClosed
from coatcheck.parts import Part
from coatcheck.values import as_text
from examples import functions_agent
from tests.adapters.suite import (
    Ability,
    AdapterSuite,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    SeenResult,
)

Function = Callable[..., Any]


class FunctionsDriver(Driver):
    """An agent loop as people write it: it describes functions by their signatures, and calls
    them."""

    lacks: ClassVar[Mapping[Ability, str]] = {
        "approval": "the loop belongs to the caller",
        "cancellation": "the loop belongs to the caller",
        "file": "the loop sends only text and pictures",
        "final_answer": "the loop belongs to the caller",
        "hand_off": "the loop belongs to the caller",
        "offloader": "the loop has no offloader",
        "retry": "the loop has no exception for it",
    }

    def run(self, scenario: Scenario) -> Run:
        tools = [*scenario.tools, *scenario.shared]
        if scenario.store is None or isinstance(scenario.store, Session):
            return self._run(scenario.model, tools, scenario, scenario.store, scenario.prompt)
        try:
            session = scenario.store.session(scenario.conversation)
        except StoreClosed:
            session = scenario.store.unchecked_session("closed", ttl=None)
        return self._run(scenario.model, tools, scenario, session, scenario.prompt)

    def content(self, parts: Sequence[Part]) -> Any:
        return [one.as_anthropic() for one in parts]

    def delete(self, store: Store, conversation: str) -> None:
        store.session(conversation).end()

    def call(self, function: Function, arguments: Mapping[str, Any]) -> Any:
        return function(**arguments)

    def _run(
        self,
        model: ScriptedModel,
        given: Sequence[Function],
        scenario: Scenario,
        session: Session | None,
        prompt: str,
    ) -> Run:
        agents = [
            self._delegate(one, scenario, session)
            for one in scenario.agents
            if model is scenario.model
        ]
        tools = [*given, *agents]
        if session is not None:
            tools = slim(tools, session, policy=scenario.policy)
        known = {tool.__name__: tool for tool in tools}
        described = [_described(tool) for tool in tools]
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        results: list[SeenResult] = []
        while True:
            turn = model.respond(messages, described, results)
            if not turn.calls:
                return Run(model, turn.text, None, json.dumps(messages).encode())
            messages.append({"role": "assistant", "calls": [_as_json(call) for call in turn.calls]})
            for call in turn.calls:
                content, is_error = self._answer(known[call.name], call)
                messages.append({"role": "tool", "id": call.id, "content": content})
                results.append(_seen(call, content, is_error))

    def _answer(self, function: Function, call: ToolCall) -> tuple[Any, bool]:
        try:
            value = self.call(function, _converted(function, call.parsed()))
        except Exception as error:  # noqa: BLE001 - loops send whatever a tool raises
            return f"{type(error).__name__}: {error}", True
        is_content = isinstance(value, list) and bool(value) and "type" in value[0]
        return (value if is_content else as_text(value)), False

    def _delegate(self, agent: Any, scenario: Scenario, session: Session | None) -> Function:
        def delegate(task: str) -> str:
            """Give a task to another agent."""
            assert current_session() is session
            return self._run(agent.model, agent.tools, scenario, session, task).final

        delegate.__name__ = agent.name
        return delegate


class AsyncFunctionsDriver(FunctionsDriver):
    """The same with coroutine functions."""

    def _run(
        self,
        model: ScriptedModel,
        given: Sequence[Function],
        scenario: Scenario,
        session: Session | None,
        prompt: str,
    ) -> Run:
        return super()._run(model, [_as_async(one) for one in given], scenario, session, prompt)

    lacks: ClassVar[Mapping[Ability, str]] = {
        **FunctionsDriver.lacks,
        "sub_agent": "a nested agent would need the loop that runs already",
        "parallel": "the loop runs one call after the other",
    }

    def call(self, function: Function, arguments: Mapping[str, Any]) -> Any:
        answer = function(**arguments)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def _as_async(function: Function) -> Function:
    async def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = inspect.get_annotations(function, eval_str=True)
    called.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return called


def _described(function: Function) -> dict[str, Any]:
    properties, required = {}, []
    for one in inspect.signature(function, eval_str=True).parameters.values():
        notes = [
            note for note in getattr(one.annotation, "__metadata__", ()) if isinstance(note, str)
        ]
        schema = pydantic.TypeAdapter(one.annotation).json_schema()
        if one.default is None:  # models leave out what is optional
            schema = next(choice for choice in schema["anyOf"] if choice["type"] != "null")
        properties[one.name] = schema | ({"description": notes[0]} if notes else {})
        required += [one.name] if one.default is inspect.Parameter.empty else []
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters |= {"required": required} if required else {}
    text = (function.__doc__ or "").partition("\n\nArgs:")[0]
    return {"name": function.__name__, "description": text, "parameters": parameters}


def _converted(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    hints = {
        one.name: one.annotation
        for one in inspect.signature(function, eval_str=True).parameters.values()
    }
    return {
        name: pydantic.TypeAdapter(hints[name]).validate_python(value)
        for name, value in given.items()
    }


def _as_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": dict(call.parsed())}


def _seen(call: ToolCall, content: Any, is_error: bool) -> SeenResult:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [one["text"] for one in blocks if one["type"] == "text"]
    media = tuple(
        base64.b64decode(one["source"]["data"]) for one in blocks if one["type"] == "image"
    )
    return SeenResult(
        id=call.id, name=call.name, text="\n".join(texts), is_error=is_error, media=media
    )


class TestFunctions(AdapterSuite):
    def driver(self) -> Driver:
        return FunctionsDriver()


class TestAsyncFunctions(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncFunctionsDriver()


class Row(TypedDict):
    id: int


@dataclass
class Point:
    x: int


class Injected:
    """A value that a framework passes to a tool itself."""


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (list[Row], list[Row] | str),
        (dict[str, int] | None, dict[str, int] | None | str),
        (Point, Point | str),
        (Row, Row | str),
        (Annotated[list[int], "the numbers"], Annotated[list[int] | str, "the numbers"]),
        (bytes, bytes | str),
        (str, str),
        (int, int),
        (int | None, int | None),
        (list[int] | str, list[int] | str),
        (Any, Any),
        (Injected, Injected),
        (Annotated[list[int], Injected()], None),
        (ToolCall, ToolCall | str),
    ],
)
def test_an_annotation_of_a_type_that_may_be_large_also_accepts_a_pointer(
    annotation: Any, expected: Any
) -> None:
    assert widened(annotation) == (annotation if expected is None else expected)


def test_a_schema_of_a_type_that_may_be_large_also_accepts_a_pointer() -> None:
    schema = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": {}}, "n": {"type": "integer"}},
    }
    wide = widened_schema(schema)
    assert wide["properties"]["rows"]["type"] == ["array", "string"]
    assert wide["properties"]["n"] == {"type": "integer"}
    assert widened_schema({"type": "object"}) == {"type": "object"}


@pytest.fixture
def session() -> Session:
    return coatcheck.open("memory:").session("functions")


def test_a_wrapped_function_keeps_its_name_docstring_and_defaults(session: Session) -> None:
    def count(rows: list[int], label: str = "x", *, deep: bool = False) -> dict[str, int]:
        """Count the rows."""
        return {label: len(rows)}

    (wrapped,) = slim([count], session, with_ours=False)
    assert (wrapped.__name__, wrapped.__doc__) == ("count", "Count the rows.")
    signature = inspect.signature(wrapped)
    assert typing.get_type_hints(wrapped)["rows"] == list[int] | str
    assert not hasattr(
        signature.parameters["rows"].annotation, "__metadata__"
    )  # it would be taken for a description
    assert signature.parameters["label"].default == "x"
    assert signature.return_annotation == dict[str, int] | str
    assert wrapped([1, 2], "y") == {"y": 2}
    assert wrapped(session.put([1, 2, 3]).pointer) == {"x": 3}


def test_values_behind_pointers_are_converted_to_the_types_of_the_function(
    session: Session,
) -> None:
    def moved(points: list[Point], by: int) -> list[int]:
        """Move points."""
        return [point.x + by for point in points]

    (wrapped,) = slim([moved], session, with_ours=False)
    assert wrapped(session.put([{"x": 1}, {"x": 2}]).pointer, by=10) == [11, 12]
    assert "was not called" in wrapped(session.put([{"x": "a"}]).pointer, by=10)


def test_calls_that_do_not_fit_the_signature_still_raise_type_error(session: Session) -> None:
    def echo(text: str) -> str:
        return text

    (wrapped,) = slim([echo], session, with_ours=False)
    with pytest.raises(TypeError):
        wrapped()


def test_a_generator_function_is_not_wrapped(session: Session) -> None:
    def lines() -> Any:
        yield "x"

    assert slim([lines], session, with_ours=False) == [lines]


def test_our_tools_come_last_as_working_functions(session: Session) -> None:
    def fetch() -> str:
        return "line\n" * 50_000

    wrapped, reader, lister, writer = slim([fetch], session, policy=Policy(max_tokens=500))
    pointer = json.loads(wrapped())["artifact"]
    assert "line 3 of 50,000" in reader(pointer, lines="3")
    assert pointer in lister()
    assert "stored" in writer(name="note", value="text")
    assert session.get("note") == "text"


def test_a_store_gives_the_functions_their_own_session() -> None:
    with coatcheck.open("memory:") as store:
        first, second = (slim([], store) for _ in range(2))
        first[2](name="note", value="private")
        assert "private" in first[0]("note")
        assert "private" not in second[0]("note")


def test_the_example_prints_the_figures_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    functions_agent.main()
    without, with_ours = re.findall(r"about ([\d,]+) tokens", capsys.readouterr().out)
    page = (Path(__file__).parent.parent.parent / "docs" / "adapters.md").read_text()
    assert f"about {without} tokens without Coatcheck and {with_ours} with it" in " ".join(
        page.split()
    )
