"""Tools that yield: streamed into the store, inline if small, partial if they fail."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Policy, Session, Store
from coatcheck.executor import (
    ArtifactReference,
    Result,
    TimedOut,
    ToolCall,
    ToolError,
    ToolExecutor,
    ToolOutcome,
)
from coatcheck.executor.attempts import BUFFER
from tests.backends import Backend, run_python
from tests.executor.conftest import LONG, after_it_began

CALL = ToolCall("c", "tool")


def yields(chunks: list[Any], colour: str, then: BaseException | None = None) -> Any:
    """A sync or async tool that yields `chunks`, then raises `then` if it is given."""

    def plain() -> Iterator[Any]:
        yield from chunks
        if then is not None:
            raise then

    async def coloured() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk
        if then is not None:
            raise then

    return plain if colour == "plain" else coloured


def run(session: Session, tool: Any, form: str = "run", **options: Any) -> ToolOutcome:
    executor = ToolExecutor(session, {"tool": tool}, **options)
    return executor.run(CALL) if form == "run" else asyncio.run(executor.arun(CALL))


COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
FORMS = pytest.mark.parametrize("form", ["run", "arun"])


@COLOURS
@FORMS
@pytest.mark.parametrize(
    ("chunks", "whole"),
    [
        ([], ""),
        (["a", "é", "\n"], "aé\n"),
        ([b"a", bytearray(b"b"), memoryview(b"c")], b"abc"),
        (["a", b"b"], b"ab"),
    ],
)
def test_a_small_output_comes_back_inline(
    session: Session, store: Store, colour: str, form: str, chunks: Any, whole: Any
) -> None:
    outcome = run(session, yields(chunks, colour), form)
    assert isinstance(outcome, Result)
    assert outcome.content == whole
    assert store.stats().artifacts == 0


@pytest.mark.parametrize("size", [3 * BUFFER, 20_000])
def test_a_large_output_reads_back_exactly(session: Session, size: int) -> None:
    count = size // 1_000
    for chunks, value in (
        (["\x00 é\ud800" * 1_000] * count, "\x00 é\ud800" * 1_000 * count),
        ([b"\x00\xff" * 1_000] * count, b"\x00\xff" * 1_000 * count),
        (["text " * 1_000] * count + [b"and bytes"], b"text " * 1_000 * count + b"and bytes"),
    ):
        outcome = run(session, yields(chunks, "plain"))
        assert outcome.ref is not None
        assert session.get(outcome.ref) == value


@pytest.mark.parametrize("size", [3 * BUFFER, 20_000])
def test_if_the_policy_is_off_a_large_output_is_sent_and_not_stored(
    session: Session, store: Store, size: int
) -> None:
    outcome = run(session, yields(["x" * size], "plain"), policy=Policy(enabled=False))
    assert (outcome.text, outcome.ref) == ("x" * size, None)
    assert store.stats().artifacts == 0


@pytest.mark.parametrize("size", [3 * BUFFER, 20_000])
def test_partial_output_is_kept_even_if_the_policy_is_off(session: Session, size: int) -> None:
    outcome = run(
        session, yields(["x" * size], "plain", OSError("gone")), policy=Policy(enabled=False)
    )
    assert isinstance(outcome, ToolError)
    assert outcome.ref is not None
    assert session.get(outcome.ref) == "x" * size


@COLOURS
def test_all_of_a_large_output_is_masked_if_the_policy_says_so(
    session: Session, colour: str
) -> None:
    lines = [f"{number} password={'hunter2' * 3}\n" for number in range(40_000)]
    outcome = run(session, yields(lines, colour), policy=Policy(redact="store"))
    assert outcome.ref is not None
    kept = session.get(outcome.ref)
    assert kept.count("\n") == 40_000
    assert "hunter2" not in kept


@COLOURS
@FORMS
@pytest.mark.parametrize("size", [5 * BUFFER + 7, 20_000, BUFFER - 1, BUFFER, BUFFER + 1])
def test_a_large_output_becomes_an_artifact_with_all_of_it(
    session: Session, colour: str, form: str, size: int
) -> None:
    text = "".join(f"line {number}\n" for number in range(size // 8))[:size].ljust(size, "x")
    chunks = [text[at : at + 10_007] for at in range(0, size, 10_007)]
    outcome = run(session, yields(chunks, colour), form)
    assert isinstance(outcome, ArtifactReference), outcome
    assert outcome.ref is not None
    assert session.open(outcome.ref).read() == text.encode()
    assert session.get(outcome.ref) == text
    assert (outcome.ref.tool, outcome.ref.call_id, outcome.ref.size_bytes) == ("tool", "c", size)
    assert outcome.ref.pointer in outcome.text
    assert len(outcome.text) < 2_000


def test_the_artifact_is_the_concatenation_of_all_chunks(backend: Backend) -> None:
    @backend.examples()
    @given(chunks=st.lists(st.text(max_size=20) | st.binary(max_size=20)), times=st.integers(1, 2))
    def check(chunks: list[str | bytes], times: int) -> None:
        chunks = [*chunks * times, "x" * 20_000]
        session = backend.new_session()
        outcome = run(session, yields(chunks, "plain"))
        assert isinstance(outcome, ArtifactReference)
        assert outcome.ref is not None
        whole = b"".join(
            one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in chunks
        )
        assert session.open(outcome.ref).read() == whole

    check()


def test_an_open_file_is_streamed_and_closed(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"line\n" * BUFFER)
    opened: list[Any] = []

    def tool() -> io.BufferedReader:
        opened.append(path.open("rb"))
        return opened[0]  # type: ignore[no-any-return]

    outcome = run(session, tool)
    assert isinstance(outcome, ArtifactReference)
    assert outcome.ref is not None
    assert outcome.ref.size_bytes == 5 * BUFFER
    assert opened[0].closed


def test_an_async_function_may_answer_with_an_iterator(session: Session) -> None:
    async def tool() -> Iterator[str]:
        return iter(["a", "b"])

    assert run(session, tool).text == "ab"
    assert run(session, tool, "arun").text == "ab"


@COLOURS
@FORMS
@pytest.mark.parametrize("size", [3 * BUFFER, 10, 20_000])
def test_output_before_a_failure_is_kept_and_marked_as_partial(
    session: Session, colour: str, form: str, size: int
) -> None:
    chunks = ["x" * 10] * (size // 10)
    outcome = run(session, yields(chunks, colour, ValueError("the disk fell off")), form)
    assert isinstance(outcome, ToolError)
    assert outcome.code == "exception"
    assert outcome.partial
    assert "the disk fell off" in outcome.text
    assert "partial" in outcome.text
    assert outcome.ref is not None
    assert outcome.ref.pointer in outcome.text
    assert session.open(outcome.ref).read() == b"x" * (size // 10 * 10)
    assert len(outcome.text) < 4_000
    if size == 10:
        assert outcome.text.endswith("x" * 10)


def test_a_failure_before_anything_was_yielded_is_a_plain_error(
    session: Session, store: Store
) -> None:
    outcome = run(session, yields([], "plain", ValueError("no")))
    assert isinstance(outcome, ToolError)
    assert not outcome.partial
    assert outcome.ref is None
    assert store.stats().artifacts == 0


@pytest.mark.parametrize("chunk", [1, None, {"a": 1}, ["a"]])
def test_yielding_anything_but_text_or_bytes_is_an_error(session: Session, chunk: Any) -> None:
    outcome = run(session, yields(["before", chunk], "plain"))
    assert isinstance(outcome, ToolError)
    assert type(chunk).__name__ in outcome.message
    assert outcome.partial
    assert outcome.ref is not None
    assert session.get(outcome.ref) == "before"


@COLOURS
@FORMS
@pytest.mark.parametrize("size", [3 * BUFFER, 10])
def test_output_before_a_timeout_is_kept_and_marked_as_partial(
    session: Session, colour: str, form: str, size: int
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def attempt(seconds: float) -> ToolOutcome | None:
        waiting = threading.Event()
        ended.clear()

        def plain() -> Iterator[str]:
            try:
                for at in range(0, size, 1000):
                    yield "x" * min(1000, size - at)
                waiting.set()
                go_on.wait(LONG)
                yield "late"
            finally:
                ended.set()

        async def coloured() -> AsyncIterator[str]:
            try:
                for at in range(0, size, 1000):
                    yield "x" * min(1000, size - at)
                waiting.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        outcome = run(session, plain if colour == "plain" else coloured, form, timeout=seconds)
        return outcome if waiting.is_set() else None

    outcome = after_it_began(attempt)
    assert isinstance(outcome, TimedOut)
    assert (outcome.scope, outcome.partial) == ("call", True)
    assert "partial" in outcome.text
    assert outcome.ref is not None
    assert outcome.ref.pointer in outcome.text
    go_on.set()
    assert ended.wait(LONG)
    assert session.open(outcome.ref).read() == b"x" * size


@COLOURS
def test_a_tool_that_never_stops_yielding_is_stopped_when_its_time_is_up(
    session: Session, colour: str
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def plain() -> Iterator[str]:
        try:
            while True:
                yield "more and more\n"
                begun.set()
        finally:
            ended.set()

    async def coloured() -> AsyncIterator[str]:
        for chunk in plain():
            yield chunk

    def attempt(seconds: float) -> ToolOutcome | None:
        outcome = run(session, plain if colour == "plain" else coloured, timeout=seconds)
        return outcome if begun.is_set() else None

    outcome = after_it_began(attempt)
    assert isinstance(outcome, TimedOut)
    assert outcome.partial
    assert ended.wait(LONG)


def test_partial_output_that_cannot_be_kept_says_so(backend: Backend) -> None:
    def tool() -> Iterator[str]:
        yield "the beginning"
        raise ValueError("the reason")

    outcome = run(backend.open(max_artifact_bytes=5).session("s"), tool)
    assert isinstance(outcome, ToolError), outcome
    assert outcome.partial
    assert outcome.text.endswith("partial output (could not be kept):\nthe beginning")


def test_a_full_store_stops_the_tool_and_says_so(backend: Backend) -> None:
    session = backend.open(max_artifact_bytes=3 * BUFFER).session("s")
    ended = threading.Event()

    def tool() -> Iterator[str]:
        try:
            while True:
                yield "more and more\n"
        finally:
            ended.set()

    outcome = run(session, tool)
    assert isinstance(outcome, Result), outcome
    assert outcome.failure
    assert "more and more" in outcome.text
    assert len(outcome.text) < 12_000
    assert ended.wait(LONG)
    assert session.list() == []


@pytest.mark.slow
@COLOURS
def test_memory_does_not_grow_with_the_output_of_a_tool(folder: Backend, colour: str) -> None:
    grown = run_python(
        "import resource, sys, coatcheck\n"
        "from coatcheck.executor import ToolCall, ToolExecutor\n"
        "LINE = b'A line of a log that nobody wants in a prompt, or anywhere else.\\n'\n"
        "def plain(count: int):\n"
        "    for number in range(count):\n"
        "        yield LINE * 1000\n"
        "async def coloured(count: int):\n"
        "    for chunk in plain(count):\n"
        "        yield chunk\n"
        "with coatcheck.open(sys.argv[1], durability='process') as store:\n"
        "    executor = ToolExecutor(store.session('s'), {'plain': plain, 'async': coloured})\n"
        "    executor.run(ToolCall('c', sys.argv[2], {'count': 50}))\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    outcome = executor.run(ToolCall('c', sys.argv[2], {'count': 1600}))\n"
        "    assert outcome.ref.size_bytes == 1600 * 1000 * len(LINE) > 100_000_000, outcome\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n",
        folder.url,
        colour,
    )
    assert int(grown) < 64 * 1024
