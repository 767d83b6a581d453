"""The async wrapper: the same store, and an event loop that never waits for a disk."""

from __future__ import annotations

import asyncio
import inspect
import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import coatcheck
import coatcheck.aio
from coatcheck import aio, errors, ids, lanes
from coatcheck.errors import LimitExceeded
from coatcheck.reading import sandbox
from coatcheck.transcript import Transcript
from tests.backends import Backend


@asynccontextmanager
async def opened(backend: Backend) -> AsyncIterator[coatcheck.aio.AsyncStore]:
    async with await coatcheck.aio.open(backend.url) as store:
        yield store


def public_methods(owner: type) -> set[str]:
    """The methods that users call: no dunders, no properties, and none that only other packages
    call."""
    inner = {
        "content",
        "lasting_session",
        "lend",
        "lent",
        "note_shown",
        "part",
        "put_about",
        "put_encoded",
        "shown_of",
        "survey",
        "unchecked_session",
    }
    return {
        name
        for name, _ in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    } - inner


def test_every_public_method_has_an_awaitable_twin_with_the_same_parameters() -> None:
    for plain, wrapped in (
        (coatcheck.Session, coatcheck.aio.AsyncSession),
        (coatcheck.Store, coatcheck.aio.AsyncStore),
        (coatcheck.ToolExecutor, coatcheck.aio.AsyncToolExecutor),
        (Transcript, coatcheck.aio.AsyncTranscript),
    ):
        methods = public_methods(plain) - {"arun", "arun_all", "await_"}  # the wrapper calls these
        assert public_methods(wrapped) == methods
        for name in methods:
            twin = getattr(wrapped, name)
            is_iterator = name in (
                "lines",
                "messages",
            )  # these return something to await, as a decorator does
            assert inspect.iscoroutinefunction(twin) or is_iterator or name == "offload", name
            assert list(inspect.signature(twin).parameters) == list(
                inspect.signature(getattr(plain, name)).parameters
            )
    assert inspect.signature(coatcheck.aio.open) == inspect.signature(coatcheck.open)
    for both in ("toolkit", "ToolExecutor"):
        twin = getattr(coatcheck.aio, both if both == "toolkit" else f"Async{both}")
        assert list(inspect.signature(twin).parameters) == list(
            inspect.signature(getattr(coatcheck, both)).parameters
        )


def test_a_transcript_is_appended_and_read(backend: Backend, tmp_path: Path) -> None:
    large = "a line of a log\n" * 2_000

    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("agent")
            async with await coatcheck.aio.transcript(tmp_path / "session.jsonl", session) as log:
                await log.append({"role": "user", "content": "go"})
                await log.extend(
                    [{"role": "tool", "tool_call_id": str(n), "content": large} for n in range(40)]
                )
                found = [one async for one in log.messages(-30, mode="whole")]
                assert [one["content"] for one in found] == [large] * 30
                assert len([line async for line in log.lines()]) == 41
                async for line in log.lines():
                    assert line.offset == 0
                    break
                assert len(await log.messages_for_model()) == 41
                assert len(await log.unpaired()) == 40
                assert log.problems == []
                assert (
                    await log.read(session_pointer(found[0]["content"]), lines="1:1")
                ).text == "a line of a log\n"

    def session_pointer(content: str) -> str:
        return ids.pointer_of(ids.digest_of(content.encode()))

    asyncio.run(scenario())


def test_values_come_back_exactly(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s", ttl=60)
            ref = await session.put({"rows": [1, 2]}, name="rows", tool="t")
            assert await session.get("rows") == {"rows": [1, 2]}
            assert await session.get(ref.pointer + "#/rows/1") == 2
            assert await session.ref("rows") == ref
            assert await session.list() == [ref]
            assert await session.get("nothing") is None
            assert (session.session_id, session.ttl, session.parent) == ("s", 60, None)
            child = await store.session("child", parent="s")
            assert child.parent == "s"
            assert await child.get(ref) == {"rows": [1, 2]}

    asyncio.run(scenario())


def test_grants_pins_forgetting_and_ending_work(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            one, two = await store.session("one"), await store.session("two")
            ref = await one.put("text")
            await one.grant(ref, to="two")
            assert await two.get(ref) == "text"
            assert (await one.pin(ref)).pinned
            assert not (await one.unpin(ref)).pinned
            assert await one.forget(ref)
            assert not await one.forget(ref)
            assert await two.end() == 1
            assert [info.session_id for info in await store.sessions()] == ["one"]

    asyncio.run(scenario())


def test_upkeep_and_archives_work(backend: Backend) -> None:
    async def scenario() -> None:
        archive = io.BytesIO()
        async with opened(backend) as store:
            await (await store.session("s")).put("text")
            assert (await store.collect(dry_run=True)).artifacts == 0
            assert (await store.verify()).problems == []
            assert (await store.stats()).artifacts == 1
            assert await store.export(archive) == 1
        archive.seek(0)
        async with await coatcheck.aio.open(backend.new_url()) as other:
            assert await other.import_(archive) == 1
            assert [ref.summary for ref in await (await other.session("s")).list()] == ["text"]

    asyncio.run(scenario())


def test_a_stream_is_read_in_pieces_and_closed_at_the_end(backend: Backend) -> None:
    content = bytes(range(256)) * 4_000

    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            ref = await session.put(content)
            async with await session.open(ref) as stream:
                assert await stream.read(10) == content[:10]
                assert await stream.seek(500_000) == 500_000
                assert await stream.tell() == 500_000
                assert await stream.read(4) == content[500_000:500_004]
                assert await stream.seek(-3, io.SEEK_END) == len(content) - 3
                assert await stream.read() == content[-3:]
                assert await stream.read() == b""
            with pytest.raises(ValueError, match="closed"):
                await stream.read()

    asyncio.run(scenario())


def test_errors_are_the_same_as_those_of_the_store(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            with pytest.raises(errors.NotFound):
                await session.open("art:000000000000")
            with pytest.raises(errors.UnsupportedValue):
                await session.put(object())
        with pytest.raises(errors.StoreClosed):
            await session.put("late")

    asyncio.run(scenario())
    with pytest.raises(errors.InvalidArgument):
        asyncio.run(coatcheck.aio.open("ftp://example.invalid"))


class Patient(io.RawIOBase):
    """A stream that returns nothing until the event loop allows it: it would hang a loop that
    waited for it."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        self._content = io.BytesIO(b"at last")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self.started.set()
        self.go_on.wait()
        return self._content.read(size)


def test_the_event_loop_continues_while_a_put_waits(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            stream = Patient()
            waiting = asyncio.create_task(session.put(stream))
            await asyncio.to_thread(stream.started.wait)
            assert not waiting.done()
            quick = await session.put("meanwhile")
            assert await session.get(quick) == "meanwhile"
            stream.go_on.set()
            assert await session.get(await waiting) == b"at last"

    asyncio.run(scenario())


def test_a_cancelled_put_stops_waiting_and_leaves_the_store_sound(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            stream = Patient()
            waiting = asyncio.create_task(session.put(stream))
            await asyncio.to_thread(stream.started.wait)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            stream.go_on.set()
            assert (await store.verify()).problems == []

    asyncio.run(scenario())


def test_many_tasks_put_at_the_same_time(backend: Backend) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            refs = await asyncio.gather(*(session.put(f"value {number}") for number in range(100)))
            values = await asyncio.gather(*(session.get(ref) for ref in refs))
            assert values == [f"value {number}" for number in range(100)]

    asyncio.run(scenario())


def test_an_agents_tools_are_awaited(backend: Backend) -> None:
    loops: list[object] = []

    async def search(q: str) -> str:
        loops.append(asyncio.get_running_loop())
        return f"{q} " * 20_000

    def count(text: str) -> int:
        return len(text.split())

    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            tools = coatcheck.aio.toolkit(session, prefix="my_")
            executor = coatcheck.aio.AsyncToolExecutor(session, [search, count, *tools])
            assert executor.names == tuple(tool.name for tool in executor.tools)
            assert executor.tools[2].as_openai() == tools[0].as_openai()
            found = await executor.run(coatcheck.ToolCall("a", "search", {"q": "coat"}))
            assert found.ref is not None
            assert loops == [asyncio.get_running_loop()]
            assert "my_get_artifact(" in found.text
            calls = [
                coatcheck.ToolCall("b", "count", {"text": found.ref.pointer}),
                coatcheck.ToolCall("c", "my_get_artifact", {"pointer": found.ref.pointer}),
            ]
            counted, page = await executor.run_all(calls, deadline=60)
            assert counted.text == "20000"
            assert page.text == await tools[0].run(pointer=found.ref.pointer)
            handle = await executor.start(calls[0])
            assert (
                (await executor.wait(handle)).text
                == (await executor.poll(handle.id)).text
                == "20000"
            )
            await executor.cancel(handle)
            with pytest.raises(errors.NotFound):
                await executor.poll("nothing")

    asyncio.run(scenario())


def test_an_async_executor_accepts_a_plain_session_and_other_mixes_are_rejected(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        async with opened(backend) as store:
            session = await store.session("s")
            with pytest.raises(errors.InvalidArgument, match=r"coatcheck\.aio"):
                coatcheck.toolkit(session)  # type: ignore[arg-type]
            with pytest.raises(errors.InvalidArgument, match=r"coatcheck\.aio"):
                coatcheck.ToolExecutor(session, [])  # type: ignore[arg-type]
        executor = coatcheck.aio.AsyncToolExecutor(backend.open().session("s"), {"two": lambda: 2})
        assert (await executor.run(coatcheck.ToolCall("c", "two"))).text == "2"

    asyncio.run(scenario())


def test_a_cancelled_reader_gets_only_the_cancellation_while_its_thread_keeps_reading() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def lines() -> Iterator[int]:
        begun.set()
        goes_on.wait()
        yield 1

    async def main() -> None:
        reading = asyncio.ensure_future(anext(coatcheck.aio._each(lines())))
        await asyncio.to_thread(begun.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        goes_on.set()

    asyncio.run(main())


def test_a_short_call_does_not_wait_for_slow_greps(tmp_path: Path) -> None:
    async def main() -> None:
        async with await aio.open(tmp_path / "store") as store:
            session = await store.session("s")
            slow, quick = (
                await session.put("a" * 1_000_000),
                await session.put("quick", name="quick"),
            )
            rows = await session.put([1, 2])
            greps = [
                asyncio.create_task(session.read(slow, grep="(a?){1000}a{1000}b"))
                for _ in range(64)
            ]
            await asyncio.sleep(0)
            assert await session.get(quick) == "quick"
            assert (await session.read(quick, lines="1")).text == "quick"
            assert (await session.read(quick, grep="qu.ck")).matches == 1
            assert (await session.read(rows, query="$[1]")).text == "2"
            assert await session.get(rows.pointer + "#/0") == 1
            assert "-quick" in (await session.read(rows, diff=quick.pointer)).text
            assert "quick" in await coatcheck.aio.toolkit(session)[0].run(
                pointer="quick", grep="qu.ck"
            )
            assert not any(grep.done() for grep in greps[lanes.LONG :])
            for grep in greps[lanes.LONG :]:
                grep.cancel()
            while not all(grep.done() for grep in greps):
                sandbox.kill_all()
                await asyncio.sleep(0.05)
            answers = await asyncio.gather(*greps, return_exceptions=True)
            assert {type(answer) for answer in answers[: lanes.LONG]} == {LimitExceeded}

    asyncio.run(main())


def test_calls_that_may_take_long_are_detected_by_their_arguments(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("s")
        log = session.put("".join(f"line {number}\n" for number in range(10_000)))
        slice_, found = session.read(log, lines="10:9000"), session.read(log, grep="line")
        for given in (
            {},
            {"lines": "1:2"},
            {"chars": "0:9"},
            {"cursor": slice_.cursor},
            {"grep": None, "query": ""},
        ):
            assert not lanes.may_take_long(log.pointer, given)
        for given in (
            {"grep": "x"},
            {"query": "shape"},
            {"diff": log.pointer},
            {"cursor": found.cursor},
        ):
            assert lanes.may_take_long(log.pointer, given)
        assert lanes.may_take_long(log.pointer + "#/0", {})
