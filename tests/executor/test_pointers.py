"""Pointers in arguments: what reaches the tool, in which form, and errors for pointers that cannot
be resolved."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import io
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, Literal, NewType, TypedDict

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Ref, Session, Store
from coatcheck.executor import PASS_POINTER, Pointer, Result, ToolCall, ToolError, ToolExecutor
from tests.backends import LARGE, TWIN_PREFIX, TWINS, Backend, Clock

ROWS: list[dict[str, Any]] = [{"name": "ünï", "price": 1}, {"name": "b", "price": 2}]


class Priced(pydantic.BaseModel):
    name: str
    price: int


@dataclasses.dataclass
class Plain:
    name: str
    price: int


class Colour(enum.Enum):
    RED = "red"


def given_to(session: Session, hint: Any, value: Any) -> Any:
    """Return the argument that a tool with one parameter of this annotation receives."""
    seen: list[Any] = []

    def tool(x: Any) -> None:
        seen.append(x)

    tool.__annotations__ = {"x": hint}
    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", {"x": value}))
    assert isinstance(outcome, Result), outcome
    return seen[0]


def refused(session: Session, hint: Any, value: Any) -> ToolError:
    def tool(x: Any) -> None:
        raise AssertionError("never called")

    tool.__annotations__ = {"x": hint}
    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", {"x": value}))
    assert isinstance(outcome, ToolError), outcome
    assert outcome.code != "exception"
    assert len(outcome.text) < 2_000
    return outcome


@pytest.mark.parametrize(
    "value", ["text", b"\x00\xff", ROWS, {"a": None}, None, 5, "x" * LARGE], ids=repr
)
@pytest.mark.parametrize("hint", [Any, object])
def test_a_pointer_arrives_as_the_exact_value(session: Session, hint: Any, value: Any) -> None:
    assert given_to(session, hint, session.put(value).pointer) == value


def test_pointers_nested_in_lists_and_objects_arrive_as_values(session: Session) -> None:
    one, two = session.put(ROWS).pointer, session.put("text").pointer
    sent = {"a": [one, {"b": two}], "c": "plain", "d": [1, None, True]}
    assert given_to(session, Any, sent) == {
        "a": [ROWS, {"b": "text"}],
        "c": "plain",
        "d": [1, None, True],
    }
    assert sent == {"a": [one, {"b": two}], "c": "plain", "d": [1, None, True]}


@pytest.mark.parametrize(
    ("hint", "part", "received"),
    [
        (Any, ROWS, ROWS),
        (list, ROWS, ROWS),
        (dict, ROWS[0], ROWS[0]),
        (list[dict[str, Any]], ROWS, ROWS),
        (Sequence[Priced], ROWS, [Priced(**row) for row in ROWS]),
        (Priced, ROWS[0], Priced(**ROWS[0])),
        (Plain, ROWS[0], Plain(**ROWS[0])),
        (str, "ünï", "ünï"),
        (str, ROWS[1], '{"name":"b","price":2}'),
        (int, 2, 2),
        (float, 1.5, 1.5),
        (bool, True, True),
        (int | None, None, None),
        (int | str, 2, 2),
        (Literal["a", "b"], "a", "a"),
        (Colour, "red", Colour.RED),
        (datetime.date, "2026-01-02", datetime.date(2026, 1, 2)),
        (decimal.Decimal, "1.25", decimal.Decimal("1.25")),
        (tuple[str, ...], ["x", "y"], ("x", "y")),
        (frozenset[str], ["x"], frozenset("x")),
        (NewType("Rows", list[Priced]), ROWS, [Priced(**row) for row in ROWS]),
        (Annotated[int, "a number"], 2, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_fragment", [False, True])
def test_every_type_of_parameter_takes_a_pointer_and_a_fragment(
    session: Session, hint: Any, part: Any, received: Any, is_fragment: bool
) -> None:
    pointer = session.put({"rows": [part]}).pointer + "#/rows/0"
    if not is_fragment:
        pointer = session.put(part).pointer
    assert given_to(session, hint, pointer) == received
    assert given_to(session, list[hint], [pointer, pointer]) == [received, received]
    assert given_to(session, dict[str, hint], {"key": pointer}) == {"key": received}


def test_the_array_for_variadic_parameters_may_be_a_pointer_and_pointers_in_it_are_data(
    session: Session,
) -> None:
    def tool(*rest: list[int] | str) -> list[Any]:
        return list(rest)

    executor = ToolExecutor(session, [tool])
    one = session.put([1, 2]).pointer
    whole = session.put([[3], one]).pointer
    assert executor.run(ToolCall("c", "tool", {"rest": [one, "x"]})).text == '[[1,2],"x"]'
    assert executor.run(ToolCall("c", "tool", {"rest": whole})).text == f'[[3],"{one}"]'
    wrong = executor.run(ToolCall("c", "tool", {"rest": session.put({"a": 1}).pointer}))
    assert isinstance(wrong, ToolError)
    assert "'rest' takes an array; tool takes rest" in wrong.text


def test_resolved_values_are_checked_against_the_annotation(session: Session) -> None:
    class Row(pydantic.BaseModel):
        name: str
        price: float

    pointer = session.put(ROWS).pointer
    assert given_to(session, list[Row], pointer)[0] == Row(name="ünï", price=1)
    outcome = refused(session, int, pointer)
    assert outcome.code == "invalid_arguments"
    assert pointer in outcome.text
    assert "ünï" not in outcome.text


@pytest.mark.parametrize(
    "text",
    ["see art:000000000000 for more", "art:00", " art:000000000000", "art:000000000000\n", ""],
)
def test_a_string_that_merely_contains_a_pointer_is_text(session: Session, text: str) -> None:
    assert given_to(session, str, text) == text
    assert given_to(session, Any, [text]) == [text]


def test_a_key_is_never_resolved(session: Session) -> None:
    pointer = session.put("text").pointer
    assert given_to(session, Any, {pointer: 1}) == {pointer: 1}


def test_a_text_or_bytes_parameter_gets_any_value_in_that_form(session: Session) -> None:
    rows, text, data = (
        session.put(ROWS).pointer,
        session.put("é").pointer,
        session.put(b"plain").pointer,
    )
    compact = '[{"name":"ünï","price":1},{"name":"b","price":2}]'
    assert given_to(session, str, rows) == compact
    assert given_to(session, str | None, rows + "#/1/price") == "2"
    assert given_to(session, str, text) == "é"
    assert given_to(session, str, data) == "plain"
    assert given_to(session, bytes, rows) == compact.encode()
    assert given_to(session, bytes, text) == "é".encode()
    refused(session, str, session.put(b"\xff\xfe\x00").pointer)


# Files and streams


@pytest.mark.parametrize(
    "hint", [Path, Path | None, str | Path, Annotated[Path, "a file"], NewType("File", Path)]
)
@pytest.mark.parametrize("colour", ["plain", "async", "on the caller's loop", "yields"])
def test_a_parameter_that_takes_a_path_gets_a_file_for_as_long_as_it_runs(
    session: Session, hint: Any, colour: str
) -> None:
    content = "line\n" * LARGE
    pointer = session.put(content).pointer
    seen: list[Path] = []

    def tool(x: Any) -> str:
        assert x.read_text() == content
        assert stat.S_IMODE(x.stat().st_mode) == 0o400
        seen.append(x)
        return str(x.suffix)

    async def tool_async(x: Any) -> str:
        await asyncio.sleep(0)
        return tool(x)

    def tool_yields(x: Any) -> Iterator[str]:
        yield tool(x)

    function: Any = {"plain": tool, "yields": tool_yields}.get(colour, tool_async)
    function.__annotations__ = {"x": hint}
    executor, call = (
        ToolExecutor(session, {"tool": function}),
        ToolCall("c", "tool", {"x": pointer}),
    )
    outcome = asyncio.run(executor.arun(call)) if "loop" in colour else executor.run(call)
    assert outcome.text == ".txt"
    assert not seen[0].exists()
    assert not seen[0].parent.exists()


def test_fragments_and_several_files_for_one_call_are_separate_files(session: Session) -> None:
    pointer = session.put({"rows": ROWS}).pointer
    seen: list[str] = []

    def tool(files: list[Path], more: dict[str, Path]) -> None:
        assert len({*files, *more.values()}) == 3
        seen.extend(path.read_text() for path in [*files, *more.values()])

    sent = {
        "files": [pointer + "#/rows/0/price", pointer + "#/rows/1/price"],
        "more": {"x": pointer + "#/rows/0/name"},
    }
    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", sent))
    assert isinstance(outcome, Result), outcome
    assert seen == ["1", "2", '"ünï"']


def test_a_plain_path_stays_a_path(session: Session) -> None:
    assert given_to(session, Path, "some/file.txt") == Path("some/file.txt")


@pytest.mark.parametrize(
    "hint",
    [BinaryIO, IO[bytes], BinaryIO | None, io.BufferedReader, io.BufferedIOBase, io.RawIOBase],
)
def test_a_parameter_that_takes_a_stream_gets_one_that_is_closed_afterwards(
    session: Session, hint: Any
) -> None:
    streams: list[Any] = []

    def tool(x: Any) -> int:
        streams.append(x)
        assert x.read(4) == b"xxxx"
        return int(x.seek(0, io.SEEK_END))

    tool.__annotations__ = {"x": hint}
    outcome = ToolExecutor(session, [tool]).run(
        ToolCall("c", "tool", {"x": session.put("x" * LARGE).pointer})
    )
    assert outcome.text == str(LARGE)
    assert streams[0].closed


def test_streams_inside_a_list_are_streams_too(session: Session) -> None:
    pointers = [session.put(f"text {number}").pointer for number in range(3)]

    def tool(parts: list[BinaryIO]) -> str:
        return b", ".join(part.read() for part in parts).decode()

    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", {"parts": pointers}))
    assert outcome.text == "text 0, text 1, text 2"


def test_only_a_pointer_becomes_a_stream(session: Session) -> None:
    assert "'hello'" in refused(session, BinaryIO, "hello").text


# The pointer itself


@pytest.mark.parametrize("hint", [Pointer, Pointer | None, Annotated[str, "a note", PASS_POINTER]])
def test_a_parameter_can_ask_for_the_pointer_itself(session: Session, hint: Any) -> None:
    pointer = session.put(ROWS).pointer
    assert given_to(session, hint, pointer + "#/0") == pointer + "#/0"
    assert given_to(session, hint, "art:000000000000") == "art:000000000000"
    assert given_to(session, list[hint], [pointer]) == [pointer]
    assert given_to(session, hint, "text") == "text"


def test_a_parameter_can_ask_for_the_ref(session: Session) -> None:
    ref = session.put(ROWS, name="rows")
    assert given_to(session, Ref, ref.pointer) == ref
    assert given_to(session, list[Ref], [ref.pointer, "rows"]) == [ref, ref]
    assert refused(session, Ref, ref.pointer + "#/0").code == "unresolved_pointer"
    assert refused(session, Ref, "nothing").code == "unresolved_pointer"
    forged = dataclasses.asdict(ref)
    assert refused(session, Ref, forged).code == "unresolved_pointer"


@dataclasses.dataclass
class Sources:
    text: str
    file: Path
    pointer: Pointer


class Model(pydantic.BaseModel):
    text: str
    file: Path
    pointer: Pointer


class Typed(TypedDict):
    text: str
    file: Path
    pointer: Pointer


@pytest.mark.parametrize("kind", [Sources, Model, Typed])
def test_the_fields_of_models_are_annotations_like_any_other(session: Session, kind: Any) -> None:
    pointer = session.put("text").pointer
    seen: list[Any] = []

    def tool(x: Any, pair: tuple[Pointer, str]) -> None:
        seen.append(x if isinstance(x, dict) else vars(x))
        seen.append(pair)

    tool.__annotations__["x"] = kind
    sent = {"x": dict.fromkeys(("text", "file", "pointer"), pointer), "pair": [pointer, pointer]}
    outcome = ToolExecutor(session, [tool]).run(ToolCall("c", "tool", sent))
    assert isinstance(outcome, Result), outcome
    assert seen[0]["text"] == "text"
    assert isinstance(seen[0]["file"], Path)
    assert seen[0]["pointer"] == pointer
    assert seen[1] == (pointer, "text")


def test_an_object_with_a_name_and_a_run_method_gets_its_arguments_verbatim(
    session: Session,
) -> None:
    class Reader:
        name = "get_artifact"

        def run(self, **arguments: Any) -> str:
            return repr(arguments)

    pointer = session.put("text").pointer
    outcome = ToolExecutor(session, [Reader()]).run(
        ToolCall("c", "get_artifact", {"pointer": pointer, "odd": 1})
    )
    assert outcome.text == repr({"pointer": pointer, "odd": 1})


# Pointers that lead nowhere


@pytest.mark.parametrize("hint", [Any, str, bytes, Path, BinaryIO, Ref, list[Any]])
def test_a_pointer_that_cannot_be_resolved_is_an_error_that_names_it(
    store: Store, session: Session, hint: Any
) -> None:
    others = store.session("other").put("not yours").pointer
    for pointer in ("art:000000000000", others):
        sent = [pointer] if hint == list[Any] else pointer
        outcome = refused(session, hint, sent)
        assert outcome.code == "unresolved_pointer"
        assert pointer in outcome.text
        assert "'x'" in outcome.text
    answers = {refused(session, hint, [p] if hint == list[Any] else p).text.replace(p, "")
               for p in ("art:000000000000", others)}  # fmt: skip
    assert len(answers) == 1


def test_an_expired_pointer_says_what_was_there(store: Store, clock: Clock) -> None:
    session = store.session("short", ttl=60)
    pointer = session.put("text", name="pytest output").pointer
    clock.advance(61)
    outcome = refused(session, Any, pointer)
    assert outcome.code == "unresolved_pointer"
    assert pointer in outcome.text
    assert "pytest output" in outcome.text
    assert "expired" in outcome.text


def test_a_pointer_that_fits_two_artifacts_names_both(session: Session) -> None:
    refs = [session.put(text) for text in TWINS]
    outcome = refused(session, Any, f"art:{TWIN_PREFIX}")
    assert all(f"art:{ref.artifact_id[:13]}" in outcome.text for ref in refs)


def test_a_fragment_that_leads_nowhere_says_how_far_it_got(session: Session) -> None:
    pointer = session.put({"rows": ROWS}).pointer
    outcome = refused(session, Any, pointer + "#/rows/7")
    assert outcome.code == "unresolved_pointer"
    assert pointer in outcome.text
    assert "array of 2 items" in outcome.text
    assert refused(session, Any, session.put("text").pointer + "#/a").code == "unresolved_pointer"


def test_a_pointer_of_any_length_has_a_bounded_answer(session: Session) -> None:
    refused(session, Any, session.put(ROWS).pointer + "#/" + "x" * 1_000_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_resolving_pointers_at_any_place_restores_the_value(backend: Backend) -> None:
    @backend.examples()
    @given(value=JSON)
    def check(value: Any) -> None:
        session = backend.new_session()

        def pointed(at: Any, depth: int) -> Any:
            if depth % 2 and not isinstance(at, str):
                return session.put(at).pointer
            if isinstance(at, list):
                return [pointed(item, depth + 1) for item in at]
            if isinstance(at, dict):
                return {key: pointed(item, depth + 1) for key, item in at.items()}
            return at

        assert given_to(session, Any, pointed(value, 0)) == value

    check()
