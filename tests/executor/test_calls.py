"""Tool calls: names, arguments, signatures and outcomes."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import enum
import functools
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pydantic
import pytest

import coatcheck
from coatcheck import Policy, Session, Store, toolkit
from coatcheck.errors import InvalidArgument
from coatcheck.executor import (
    ArtifactReference,
    Pointer,
    Result,
    ToolCall,
    ToolError,
    ToolExecutor,
    ToolOutcome,
    stays_inline,
)
from tests.backends import Backend, run_python

BIG = "A line of a log that nobody wants in a prompt.\n" * 2_000


def call(name: str, *, id: str = "c1", **arguments: Any) -> ToolCall:  # noqa: A002 - as in ToolCall
    return ToolCall(id, name, arguments)


def error(outcome: ToolOutcome) -> ToolError:
    assert isinstance(outcome, ToolError), outcome
    assert outcome.is_error
    assert len(outcome.to_model_content()) <= 12_600
    return outcome


def add(a: int, b: int = 2) -> int:
    return a + b


def read_some() -> str:
    return "some words " * 20


async def add_async(a: int, b: int = 2) -> int:
    await asyncio.sleep(0)
    return a + b


def test_a_small_answer_comes_back_as_it_is(session: Session) -> None:
    outcome = ToolExecutor(session, [add]).run(call("add", a=1))
    assert isinstance(outcome, Result)
    assert (outcome.call_id, outcome.name, outcome.content, outcome.ref) == ("c1", "add", 3, None)
    assert outcome.to_model_content() == "3"
    assert not outcome.is_error


def test_a_large_answer_becomes_an_artifact_that_records_its_tool_and_call(
    session: Session,
) -> None:
    def read_log() -> str:
        return BIG

    outcome = ToolExecutor(session, [read_log]).run(call("read_log"))
    assert isinstance(outcome, ArtifactReference)
    assert outcome.ref is not None
    assert session.get(outcome.ref.pointer) == BIG
    assert (outcome.ref.tool, outcome.ref.call_id) == ("read_log", "c1")
    assert outcome.ref.pointer in outcome.to_model_content()
    assert len(outcome.to_model_content()) < 2_000


def test_the_policy_decides_what_is_large(session: Session) -> None:
    def read() -> str:
        return "x" * 100

    small, large = Policy(max_chars=99), Policy(max_chars=100)
    assert isinstance(
        ToolExecutor(session, [read], policy=small).run(call("read")), ArtifactReference
    )
    assert isinstance(ToolExecutor(session, [read], policy=large).run(call("read")), Result)


def test_the_calls_of_a_turn_run_concurrently_and_are_answered_in_order(session: Session) -> None:
    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(60)
        return number

    outcomes = ToolExecutor(session, [meet]).run_all(
        [call("meet", id=f"c{n}", number=n) for n in range(3)]
    )
    assert [(one.call_id, one.text) for one in outcomes] == [("c0", "0"), ("c1", "1"), ("c2", "2")]


def test_a_turn_without_calls_has_no_outcomes(session: Session) -> None:
    executor = ToolExecutor(session, [add])
    assert executor.run_all([]) == []
    assert asyncio.run(executor.arun_all([])) == []


def test_more_calls_than_workers_are_all_answered(session: Session) -> None:
    executor = ToolExecutor(session, [add], max_workers=3)
    outcomes = executor.run_all([call("add", id=str(n), a=n) for n in range(50)])
    assert [one.text for one in outcomes] == [str(n + 2) for n in range(50)]


@pytest.mark.parametrize("run", ["run", "arun", "arun_all", "run in a loop", "run_all in a loop"])
@pytest.mark.parametrize("tool", [add, add_async])
def test_sync_and_async_functions_run_from_everywhere(
    session: Session, run: str, tool: Any
) -> None:
    executor = ToolExecutor(session, [tool])
    one = call(tool.__name__, a=1)

    async def scenario() -> ToolOutcome:
        if run == "arun":
            return await executor.arun(one)
        if run == "arun_all":
            return (await executor.arun_all([one]))[0]
        return executor.run(one) if run == "run in a loop" else executor.run_all([one])[0]

    outcome = executor.run(one) if run == "run" else asyncio.run(scenario())
    assert outcome.text == "3"


def test_an_async_tool_runs_on_the_loop_of_its_async_caller(session: Session) -> None:
    async def where() -> int:
        return id(asyncio.get_running_loop())

    async def scenario() -> None:
        outcome = await ToolExecutor(session, [where]).arun(call("where"))
        assert outcome.text == str(id(asyncio.get_running_loop()))

    asyncio.run(scenario())


def test_the_event_loop_continues_while_a_plain_function_runs(session: Session) -> None:
    go_on = threading.Event()

    def patient() -> str:
        return "done" if go_on.wait(60) else "stuck"

    async def scenario() -> None:
        running = asyncio.create_task(ToolExecutor(session, [patient]).arun(call("patient")))
        await asyncio.sleep(0)
        go_on.set()
        assert (await running).text == "done"

    asyncio.run(scenario())


def test_context_variables_reach_the_tool_and_its_changes_stay_there(session: Session) -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")

    def who() -> str:
        seen = tenant.get()
        tenant.set("changed")
        return seen

    async def who_async() -> str:
        return who()

    def who_yields() -> Iterator[str]:
        yield who()

    async def who_yields_async() -> AsyncIterator[str]:
        yield who()

    tools = [who, who_async, who_yields, who_yields_async]
    executor = ToolExecutor(session, tools)
    calls = [call(tool.__name__) for tool in tools]
    tenant.set("someone")
    assert [executor.run(one).text for one in calls] == ["someone"] * 4
    assert [one.text for one in executor.run_all(calls)] == ["someone"] * 4
    assert [one.text for one in asyncio.run(executor.arun_all(calls))] == ["someone"] * 4
    assert executor.wait(executor.start(calls[0])).text == "someone"
    assert tenant.get() == "someone"


def test_a_tool_may_run_tools_of_the_same_executor(session: Session) -> None:
    def outer(depth: int) -> str:
        if depth == 0:
            return "ground"
        calls = [call("outer", depth=depth - 1), call("outer_async", depth=depth - 1)]
        return " ".join(one.text for one in executor.run_all(calls))

    async def outer_async(depth: int) -> str:
        if depth == 0:
            return "ground"
        return " ".join(
            one.text for one in await executor.arun_all([call("outer", depth=depth - 1)] * 2)
        )

    executor = ToolExecutor(session, [outer, outer_async], max_workers=1)
    assert executor.run_all([call("outer", depth=2)])[0].text == "ground ground ground ground"
    assert (
        asyncio.run(executor.arun(call("outer_async", depth=2))).text
        == "ground ground ground ground"
    )


# Names


def test_an_unknown_tool_is_an_error_that_names_the_nearest(session: Session) -> None:
    outcome = error(ToolExecutor(session, [add, add_async]).run(call("ad")))
    assert outcome.code == "unknown_tool"
    assert "did you mean 'add'?" in outcome.text


def test_an_unknown_name_of_any_length_has_a_bounded_answer(session: Session) -> None:
    tools = {f"tool_{number:04}": add for number in range(2_000)}
    outcome = error(ToolExecutor(session, tools).run(call("tool_" + "9" * 1_000_000)))
    assert len(outcome.text) < 1_000


def test_the_toolkit_runs_beside_functions_and_its_answers_are_never_externalized_again(
    session: Session,
) -> None:
    tools = [*toolkit(session), add]
    executor = ToolExecutor(session, tools, policy=Policy(max_chars=100))
    pointer = session.put(BIG).pointer
    page = executor.run(call("get_artifact", pointer=pointer, lines="1:80"))
    assert isinstance(page, Result)
    assert page.text.count("A line of a log") == 80
    assert executor.run(call("add", a=1)).text == "3"


def test_a_tool_that_is_marked_keeps_its_results_inline_unless_the_policy_has_a_rule_for_it(
    session: Session,
) -> None:
    @stays_inline
    def read() -> str:
        return BIG

    assert ToolExecutor(session, [read]).run(call("read")).text == BIG
    assert ToolExecutor(session, {"renamed": read}).run(call("renamed")).text == BIG
    policy = Policy(max_chars=100, tools={"read": "always"})
    assert ToolExecutor(session, [read], policy=policy).run(call("read")).ref is not None


@pytest.mark.parametrize("options", [{"style": "camel"}, {"prefix": "memory_"}])
def test_stubs_use_the_agents_name_for_the_reading_tool(session: Session, options: Any) -> None:
    def search() -> str:
        return "found " * 20_000

    tools = toolkit(session, **options)
    for policy in (None, Policy(max_chars=1_000)):
        text = (
            ToolExecutor(session, [search, *tools], policy=policy).run(ToolCall("c", "search")).text
        )
        assert f"{tools[0].name}(pointer=" in text
    named = Policy(read_tool="read")
    assert (
        "read(pointer="
        in ToolExecutor(session, [search], policy=named).run(ToolCall("c", "search")).text
    )
    quiet = Policy(read_tool=None)
    assert (
        "pointer="
        not in ToolExecutor(session, [search, *tools], policy=quiet)
        .run(ToolCall("c", "search"))
        .text
    )


def hint_of(outcome: ToolOutcome) -> str:
    assert isinstance(outcome, ArtifactReference)
    hint = json.loads(outcome.text)["hint"]
    assert isinstance(hint, str)
    return hint


@pytest.mark.parametrize("policy", [None, Policy(max_chars=1_000), Policy(read_tool="read_file")])
def test_a_stub_names_no_tool_that_the_agent_lacks_or_that_takes_no_pointer(
    session: Session, policy: Policy | None
) -> None:
    def read_log(q: str = "") -> str:
        return BIG

    def read_file(path: Path) -> str:
        return str(path.stat().st_size)

    executor = ToolExecutor(session, [read_log, read_file], policy=policy)
    outcome = executor.run(call("read_log"))
    hint = hint_of(outcome)
    assert "get_artifact" not in hint
    assert "read_file" not in hint
    assert outcome.ref is not None
    assert f'"{outcome.ref.pointer}"' in hint
    assert executor.run(call("read_file", path=outcome.ref.pointer)).text == str(len(BIG))


def test_a_stub_promises_nothing_if_no_tool_takes_a_pointer(session: Session) -> None:
    executor = ToolExecutor(session, {"now": lambda: BIG})
    assert hint_of(executor.run(call("now"))).startswith("ask for less")


def test_a_stub_names_only_arguments_that_the_reading_tool_takes(session: Session) -> None:
    def read(pointer: Pointer, grep: str = "") -> str:
        return session.read(pointer, grep=grep or None).text

    def read_log() -> str:
        return BIG

    def rows() -> list[int]:
        return list(range(20_000))

    executor = ToolExecutor(session, [read, read_log, rows], policy=Policy(read_tool="read"))
    hint = hint_of(executor.run(call("read_log")))
    assert 'read(pointer="art:' in hint
    assert 'grep="…"' in hint
    assert "lines=" not in hint
    assert "query=" not in hint_of(executor.run(call("rows")))


def test_an_executor_with_a_renamed_reading_tool_uses_the_settings_of_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COATCHECK_POLICY_MAX_CHARS", "50")
    with coatcheck.open("memory:") as store:
        own = store.session("s")
        executor = ToolExecutor(own, [*toolkit(own, prefix="my_"), read_some])
        assert isinstance(executor.run(call("read_some")), ArtifactReference)


def test_the_answer_of_one_step_reaches_the_next_by_pointer(session: Session) -> None:
    def search(q: str) -> list[dict[str, Any]]:
        return [{"q": q, "number": number} for number in range(5_000)]

    def total(rows: list[dict[str, Any]]) -> int:
        return sum(row["number"] for row in rows)

    executor = ToolExecutor(session, [search, total])
    found = executor.run(call("search", q="x"))
    assert found.ref is not None
    assert executor.run(call("total", rows=found.ref.pointer)).text == str(sum(range(5_000)))


def test_tools_are_functions_methods_partials_objects_and_named_lambdas(session: Session) -> None:
    class Counter:
        def count(self, to: int) -> str:
            return "up to " + str(to)

        def __call__(self, to: int) -> str:
            return "called with " + str(to + 0)

    named = {"lambda": lambda to: f"lambda {to}", "object": Counter()}
    assert ToolExecutor(session, named).run(call("lambda", to="3")).text == "lambda 3"
    assert ToolExecutor(session, named).run(call("object", to="3")).text == "called with 3"
    assert ToolExecutor(session, [Counter().count]).run(call("count", to="3")).text == "up to 3"
    assert ToolExecutor(session, [functools.partial(add, b=5)]).run(call("add", a="3")).text == "8"
    assert ToolExecutor(session, {"max": max}).names == ("max",)


@pytest.mark.parametrize("tools", [[lambda: 1], [add, add], ["add"], {"": add}])
def test_tools_that_cannot_be_called_by_name_are_refused_at_once(
    session: Session, tools: Any
) -> None:
    with pytest.raises(InvalidArgument):
        ToolExecutor(session, tools)


@pytest.mark.parametrize(
    "options", [{"timeout": -1}, {"timeout": float("nan")}, {"timeout": "1"}, {"max_workers": 0}]
)
def test_invalid_settings_are_refused_at_once(session: Session, options: Any) -> None:
    with pytest.raises(InvalidArgument):
        ToolExecutor(session, [add], **options)


# Arguments


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, {"a": "1"}, {"a": 1, "b": 2}])
def test_arguments_are_a_dict_or_its_json(session: Session, arguments: Any) -> None:
    assert ToolExecutor(session, [add]).run(ToolCall("c", "add", arguments)).text == "3"


@pytest.mark.parametrize("arguments", ["", "  ", "{}", "null", {}, None])
def test_empty_arguments_have_many_forms(session: Session, arguments: Any) -> None:
    assert (
        ToolExecutor(session, {"now": lambda: "now"}).run(ToolCall("c", "now", arguments)).text
        == "now"
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"', "5", "[" * 100_000, [1], 7, {1: 2}])
def test_arguments_that_are_not_an_object_are_an_error(session: Session, arguments: Any) -> None:
    assert (
        error(ToolExecutor(session, [add]).run(ToolCall("c", "add", arguments))).code
        == "invalid_arguments"
    )


def test_the_error_names_missing_unknown_and_invalid_arguments(session: Session) -> None:
    def search(query: str, limit: int = 5) -> str:
        raise AssertionError("never called")

    outcome = error(ToolExecutor(session, [search]).run(call("search", qurey="x", limit="many")))
    assert outcome.code == "invalid_arguments"
    assert "'query' is missing" in outcome.text
    assert "no parameter 'qurey'; did you mean 'query'?" in outcome.text
    assert "'limit': Input should be a valid integer" in outcome.text
    assert "'many'" in outcome.text


def test_a_thousand_wrong_arguments_have_a_bounded_answer(session: Session) -> None:
    outcome = error(
        ToolExecutor(session, [add]).run(
            ToolCall("c", "add", {f"x{n}" * 500: n for n in range(1_000)})
        )
    )
    assert "more" in outcome.text
    assert len(outcome.text) < 4_000


class Colour(enum.Enum):
    RED = "red"


class Filter(pydantic.BaseModel):
    field: str
    values: list[int] = []


@dataclasses.dataclass
class Span:
    start: datetime.date
    days: int


class Opaque:
    pass


def test_arguments_arrive_as_the_types_that_the_signature_names(session: Session) -> None:
    seen: list[Any] = []

    def tool(
        colour: Colour,
        where: Filter,
        span: Span,
        tags: set[str],
        mode: Literal["a", "b"] = "a",
        most: int | None = None,
        odd: Opaque | None = None,
        unknown: "NoSuchType | None" = None,  # type: ignore[name-defined] # noqa: F821, UP037 - it cannot be resolved
    ) -> None:
        seen.extend([colour, where, span, tags, mode, most, odd, unknown])

    tool.__annotations__.pop("unknown")
    arguments = {
        "colour": "red", "where": {"field": "f", "values": ["1"]}, "span": {"start": "2025-01-31", "days": 3},
        "tags": ["x", "x"], "most": "7",
    }  # fmt: skip
    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", arguments))
    assert isinstance(outcome, Result), outcome
    assert seen == [
        Colour.RED, Filter(field="f", values=[1]), Span(datetime.date(2025, 1, 31), 3), {"x"}, "a", 7, None, None,
    ]  # fmt: skip
    wrong = error(
        ToolExecutor(session, [tool]).run(
            ToolCall("c", "tool", arguments | {"where": {"values": ["x"]}})
        )
    )
    assert "'/field'" in wrong.text
    assert "'/values/0'" in wrong.text


def test_annotations_that_cannot_be_resolved_check_nothing(session: Session) -> None:
    def tool(x: "NoSuchType") -> str:  # type: ignore[name-defined] # noqa: F821, UP037
        return repr(x)

    assert ToolExecutor(session, [tool]).run(call("tool", x=[1])).text == "[1]"


def test_variadic_parameters_are_filled_by_name(session: Session) -> None:
    def tool(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> list[Any]:
        return [a, b, list(rest), c, more]

    executor = ToolExecutor(session, [tool])
    assert executor.run(call("tool", a="1")).to_model_content() == "[1,2,[],3,{}]"
    assert (
        executor.run(call("tool", a=1, rest=["7", 8], z="9")).to_model_content()
        == '[1,2,[7,8],3,{"z":9}]'
    )
    assert executor.run(call("tool", a=1, more=4)).to_model_content() == '[1,2,[],3,{"more":4}]'
    assert error(executor.run(call("tool", a=1, z="x"))).code == "invalid_arguments"
    assert error(executor.run(call("tool", a=1, rest=7))).code == "invalid_arguments"
    assert error(executor.run(call("tool", z=1))).code == "invalid_arguments"


# Calls of providers


def test_a_call_is_read_from_openai_in_both_of_its_shapes() -> None:
    expected = ToolCall("call_1", "search", '{"q":"x"}')
    chat = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"q":"x"}'},
    }
    responses = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "search",
        "arguments": '{"q":"x"}',
        "id": "fc_1",
    }
    assert ToolCall.from_openai(chat) == expected
    assert ToolCall.from_openai(responses) == expected
    function = SimpleNamespace(**chat["function"])  # type: ignore[arg-type]
    assert ToolCall.from_openai(SimpleNamespace(id="call_1", function=function)) == expected
    assert ToolCall.from_openai(SimpleNamespace(**responses)) == expected


def test_a_call_is_read_from_anthropic() -> None:
    block = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"q": "x"}}
    assert ToolCall.from_anthropic(block) == ToolCall("toolu_1", "search", {"q": "x"})
    assert ToolCall.from_anthropic(SimpleNamespace(**block)) == ToolCall(
        "toolu_1", "search", {"q": "x"}
    )


@pytest.mark.parametrize("block", [{}, {"id": 1, "name": "x"}, None, "text"])
def test_an_invalid_call_is_refused(block: Any) -> None:
    with pytest.raises(InvalidArgument):
        ToolCall.from_anthropic(block)
    with pytest.raises(InvalidArgument):
        ToolCall.from_openai(block)


# Errors and odd values of tools


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    "raised",
    [ValueError("no such file"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
     Unprintable(), StopIteration(), ExceptionGroup("two", [ValueError("a"), TypeError("b")]), MemoryError(),
     TimeoutError("the tool's own")],
    ids=lambda raised: type(raised).__name__,
)  # fmt: skip
@pytest.mark.parametrize("colour", ["plain", "async"])
def test_any_exception_of_a_tool_becomes_an_outcome(
    session: Session, raised: BaseException, colour: str
) -> None:
    def plain() -> None:
        raise raised

    async def coloured() -> None:
        plain()

    executor = ToolExecutor(session, {"tool": plain if colour == "plain" else coloured})
    expected = (
        "RuntimeError"
        if colour == "async" and isinstance(raised, StopIteration)
        else type(raised).__name__
    )
    outcomes = [executor.run(call("tool"), timeout=60), executor.run_all([call("tool")])[0],
                asyncio.run(executor.arun(call("tool"))), executor.wait(executor.start(call("tool")))]  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        outcomes.append(threads.submit(executor.run, call("tool")).result(60))
    if colour == "async" or not isinstance(raised, KeyboardInterrupt):
        outcomes.append(executor.run(call("tool")))
    for outcome in outcomes:
        assert error(outcome).code == "exception"
        assert expected in outcome.text.splitlines()[0]


def test_an_error_says_where_in_the_tool_it_happened(session: Session) -> None:
    def tool() -> None:
        inner()

    def inner() -> None:
        raise ValueError("no such file")

    outcome = error(ToolExecutor(session, [tool]).run(call("tool")))
    assert outcome.message == "tool failed: ValueError: no such file"
    assert outcome.text.startswith(outcome.message)
    assert "in inner" in outcome.text
    assert "attempt.py" not in outcome.text
    assert outcome.ref is None


def test_a_large_error_goes_to_the_store(session: Session) -> None:
    def tool() -> None:
        raise ValueError(BIG)

    outcome = error(ToolExecutor(session, [tool]).run(call("tool")))
    assert outcome.ref is not None
    assert outcome.text.startswith("tool failed: ValueError: A line of a log")
    assert outcome.ref.pointer in outcome.text
    assert len(outcome.text) < 2_500
    assert BIG.strip() in session.get(outcome.ref)


def test_a_large_traceback_goes_to_the_store(session: Session) -> None:
    def even(n: int) -> None:
        odd(n - 1) if n else int("x")

    def odd(n: int) -> None:
        even(n - 1) if n else int("y")

    outcome = error(ToolExecutor(session, [even]).run(call("even", n=200)))
    assert outcome.ref is not None
    assert session.get(outcome.ref).count("in odd") == 100


def test_an_error_is_bounded_even_if_the_policy_is_off(session: Session, store: Store) -> None:
    def tool() -> None:
        raise ValueError(BIG)

    outcome = error(ToolExecutor(session, [tool], policy=Policy(enabled=False)).run(call("tool")))
    assert "characters left out" in outcome.text
    assert store.stats().artifacts == 0


def test_a_function_that_shortens_a_tools_answers_does_not_shorten_its_errors(
    session: Session,
) -> None:
    def tool() -> str:
        raise ValueError("the reason")

    outcome = error(
        ToolExecutor(session, [tool], policy=Policy(tools={"tool": lambda text: text[:3]})).run(
            call("tool")
        )
    )
    assert outcome.text.endswith("ValueError: the reason")
    assert outcome.ref is None


def test_a_failing_store_does_not_lose_the_answer(backend: Backend) -> None:
    session = backend.open(max_artifact_bytes=10_000).session("s")
    tools = {"large": lambda: BIG, "broken": lambda: int(BIG), "lines": lambda: iter([BIG] * 99)}
    executor = ToolExecutor(session, tools)
    for outcome in (executor.run(call("large")), executor.run(call("lines"))):
        assert isinstance(outcome, Result)
        assert outcome.failure
        assert outcome.ref is None
        assert "A line of a log" in outcome.text
        assert len(outcome.text) <= 12_600
    assert error(executor.run(call("broken"))).ref is None


def test_a_value_that_cannot_be_serialized_still_gives_an_outcome(session: Session) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    circle: list[Any] = []
    circle.append(circle)
    executor = ToolExecutor(
        session, {"broken": lambda: Broken(), "circle": lambda: circle, "tuple": lambda: {1: (2,)}}
    )
    for name in executor.names:
        assert isinstance(executor.run(call(name)), ToolOutcome)


@pytest.mark.parametrize("id", ["", "\ud800", "x" * 100_000, "../../etc"])
def test_any_call_id_passes_through_verbatim(session: Session, id: str) -> None:  # noqa: A002
    outcome = ToolExecutor(session, {"read": lambda: BIG}).run(ToolCall(id, "read"))
    assert isinstance(outcome, ArtifactReference)
    assert outcome.call_id == id


def test_control_c_in_the_main_thread_is_not_swallowed(backend: Backend) -> None:
    assert hasattr(signal, "raise_signal")
    printed = run_python(
        "import os, signal, sys, threading, coatcheck\n"
        "from coatcheck.executor import ToolCall, ToolExecutor\n"
        "def tool():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Event().wait(60)\n"
        "executor = ToolExecutor(coatcheck.open(sys.argv[1]).session('s'), [tool])\n"
        "call = ToolCall('c', 'tool')\n"
        "calls = lambda: executor.run(call), lambda: executor.run(call, timeout=99), lambda: executor.run_all([call])\n"
        "for run in calls:\n"
        "    try:\n"
        "        print(run())\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n",
        backend.url,
    )
    assert printed.split() == ["interrupted"] * 3


@pytest.mark.parametrize("milliseconds", [0, 3, 30])
def test_a_process_can_end_while_a_result_is_being_stored(
    backend: Backend, milliseconds: int
) -> None:
    run_python(
        "import sys, threading, time, coatcheck\n"
        "from coatcheck.executor import ToolCall, ToolExecutor\n"
        "is_returning = threading.Event()\n"
        "def tool():\n"
        "    text = 'a line of a log, token=abc\\n' * 200_000\n"
        "    is_returning.set()\n"
        "    return text\n"
        "executor = ToolExecutor(coatcheck.open(sys.argv[1]).session('s'), [tool])\n"
        "executor.start(ToolCall('c', 'tool'))\n"
        "is_returning.wait()\n"
        "time.sleep(int(sys.argv[2]) / 1_000)\n",
        backend.url,
        milliseconds,
    )


def test_sixty_four_threads_neither_lose_nor_duplicate_artifacts(
    session: Session, store: Store
) -> None:
    def make(number: int) -> str:
        return f"{number} " * 20_000

    async def make_async(number: int) -> str:
        return make(number)

    def make_lines(number: int) -> Iterator[str]:
        yield from (f"{number} " * 20 for _ in range(1_000))

    executor = ToolExecutor(session, [make, make_async, make_lines])
    names, outcomes, ready = executor.names, [], threading.Barrier(64)

    def work(thread: int) -> None:
        ready.wait(60)
        for number in range(3):
            name = names[(thread + number) % 3]
            outcomes.append(
                executor.run(call(name, id=f"{thread}-{number}", number=thread * 3 + number))
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(one, ArtifactReference) for one in outcomes)
    assert len({one.ref for one in outcomes}) == 192
    assert store.stats().artifacts == store.stats().refs == 192
    for one in outcomes:
        place, _, number = one.call_id.partition("-")
        assert one.ref is not None
        assert session.get(one.ref) == make(int(place) * 3 + int(number))


def test_a_parameter_may_have_any_annotation(session: Session) -> None:
    def tool(times: int, then: Callable[[int], str] | None = None) -> str:
        return f"{times} {then}"

    assert ToolExecutor(session, [tool]).run(ToolCall("c", "tool", {"times": 2})).text == "2 None"


def test_an_outcome_explains_why_its_value_was_stored_or_kept_inline(session: Session) -> None:
    def rows() -> str:
        return "a row of the table\n" * 5_000

    def count() -> int:
        return 7

    executor = ToolExecutor(session, [rows, count])
    left, stayed = (executor.run(ToolCall("c", name, {})).why for name in ("rows", "count"))
    assert left is not None
    assert (left.leaves, left.reason) == (True, "cost")
    assert stayed is not None
    assert stayed.leaves is False
    assert executor.run(ToolCall("c", "missing", {})).why is None
