"""Interrupts (control-C, an alarm handler that raises) with real signals, at random moments of
every public call.

At any instant, no lock and no transaction is left behind. Other threads, other processes and the
same store keep working, and a fork does not hang. The exception is kept for the checks, as in an
interactive session.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, transcript
from coatcheck.executor import Handle
from coatcheck.intake import About
from coatcheck.values import Encoded, encode
from tests.conftest import LONG_FAULTS
from tests.counting import Counts
from tests.faults.world import ROOT, assert_clean, chosen_seed, problems
from tests.transcript.samples import SAMPLES, as_lines

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
    ),
]

TIMES = 150 if LONG_FAULTS else 3  # interrupts of each call


class Alarm:
    """Interrupts calls with a real signal, after a random part of the time that they take."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._is_armed = False
        self.only_in = ""
        """If it is set, only code in this folder is interrupted."""

    def __enter__(self) -> Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if (
            self._is_armed
            and self.only_in
            and (frame is None or not frame.f_code.co_filename.startswith(self.only_in))
        ):
            signal.setitimer(signal.ITIMER_REAL, 5e-5)
        elif self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt

    def interrupt(self, call: Callable[[], object], seconds: float) -> KeyboardInterrupt | None:
        """Make a call that takes this long, and return its interrupt, or None if the call was
        faster."""
        try:
            try:
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, self._choose.uniform(1e-6, 1.1 * seconds))
                call()
            finally:
                self._is_armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            return error
        return None


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    with Alarm(chosen_seed()) as alarm:
        yield alarm


def duration(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call returns in another thread. If the thread waits for a lock, this fails
    after a timeout."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=20)


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Another process with the store open; each call makes it put something and waits for its
    answer."""
    code = (
        "import sys, coatcheck\n"
        "store = coatcheck.open(sys.argv[1], durability='process')\n"
        "session = store.session('another', ttl=None)\n"
        "for line in sys.stdin:\n"
        "    session.put(line)\n"
        "    session.forget(session.put('not ' + line))\n"
        "    print('done', flush=True)\n"
    )
    coatcheck.open(tmp_path / "store", durability="process").close()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        numbers = iter(range(1_000_000))

        def put() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            # A process that waits for a lock would wait forever.
            timer = threading.Timer(20, os.kill, (process.pid, signal.SIGKILL))
            timer.start()
            process.stdin.write(f"from another process {next(numbers)}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            timer.cancel()
            assert answer == "done\n", "another process could not write"

        yield put
        process.stdin.close()
        process.wait(20)


def _fork() -> None:
    """Fork as another thread would, with a timeout. The child does nothing and exits."""
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


TEXT = "a line of text\n" * 40
CHATS = as_lines(SAMPLES["openai-chat"])
MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "art:" + "0" * 12},
]


@dataclass
class World:
    """The objects of the calls below: a store with some artifacts, another store, an executor and a
    transcript."""

    store: Store
    folder: Path
    other: Store
    number: int = 0

    def __post_init__(self) -> None:
        self.session = self.store.session("s", ttl=None)
        self.ref = self.session.put(TEXT, name="text")
        self.json = self.session.put({"rows": [{"a": number} for number in range(50)]}, name="rows")
        self.executor = ToolExecutor(
            self.session, [_echo, _wait_a_moment], policy=Policy(max_chars=1_000)
        )
        self.archive = io.BytesIO()
        self.store.export(self.archive)
        self.transcript = self.folder / "session.jsonl"

    @property
    def new(self) -> str:
        return f"something new {self.number}"

    def call(self, text: str = "") -> ToolCall:
        return ToolCall(
            id=f"c{self.number}", name="_echo", arguments={"text": text or self.new * 200}
        )

    def started(self) -> Handle:
        return self.executor.start(self.call())

    def slim(self) -> Path:
        self.whole()
        transcript.externalize(self.transcript, self.session)
        return self.transcript

    def clear(self) -> None:
        """Remove what earlier interrupts left, so that a call does not take longer each time."""
        for store in (self.store, self.other):
            for session_id in [one.session_id for one in store.sessions() if one.session_id != "s"]:
                store.session(session_id).end()
        for ref in self.session.list():
            if ref.artifact_id not in (self.ref.artifact_id, self.json.artifact_id):
                self.session.forget(ref)
        self.store.collect(grace=0)

    def rehydrated(self) -> Path:
        transcript.rehydrate(self.slim(), self.store)
        return self.transcript

    def whole(self) -> Path:
        for one in (self.transcript, self.folder / ".session.jsonl.coatcheck-backup"):
            one.unlink(missing_ok=True)
        self.transcript.write_bytes(CHATS)
        return self.transcript


def _echo(text: str) -> str:
    return text


def _wait_a_moment() -> str:
    return "waited"


PUBLIC: dict[str, dict[str, Any]] = {
    "Store": {
        "batching": lambda w, _: _put_in_a_batch(w),
        "collect": (lambda w: w.session.forget(w.session.put(w.new)), lambda w, _: w.store.collect(grace=0)),
        "collect_if_due": lambda w, _: w.store.collect_if_due(every=0),
        "collected_at": lambda w, _: w.store.collected_at(),
        "copy_to": (lambda w: w.session.put(w.new), lambda w, _: w.store.copy_to(w.other)),
        "export": lambda w, _: w.store.export(io.BytesIO()),
        "find": lambda w, _: w.store.find(w.ref.pointer),
        "has_session": lambda w, _: w.store.has_session("s"),
        "holders": lambda w, _: w.store.holders(w.ref.pointer),
        # the other process may already have a session in the archive
        "import_": lambda w, _: w.other.import_(
            io.BytesIO(w.archive.getvalue()), sessions={"s": f"i {w.number}"}, merge=True),
        "lasting_session": lambda w, _: w.store.lasting_session(w.new, ttl=5),
        "note_collected": lambda w, _: w.store.note_collected(),
        "secret": lambda w, _: w.store.secret,
        "session": lambda w, _: w.store.session(w.new, create=True),
        "session_info": lambda w, _: w.store.session_info("s"),
        "session_page": lambda w, _: w.store.session_page(),
        "sessions": lambda w, _: list(w.store.sessions()),
        "stats": lambda w, _: w.store.stats(),
        "tenant": lambda w, _: w.store.tenant(f"tenant {w.number % 3}").session("t").put(w.new),
        "unchecked_session": lambda w, _: w.store.unchecked_session("s", ttl=None),
        "verify": lambda w, _: w.store.verify(repair=True),
    },
    "Session": {
        "annotate": lambda w, _: w.session.annotate(w.ref, w.new),
        "artifacts": lambda w, _: w.session.artifacts(),
        "claim": lambda w, _: w.store.session(w.new, create=True).claim("me"),
        "claimant": lambda w, _: w.session.claimant(),
        "content": lambda w, _: w.session.content(w.ref).read(0, 10),
        "count": lambda w, _: w.session.count(),
        "coverage": lambda w, _: w.session.coverage(w.ref),
        "end": (lambda w: w.store.session("ends").put(w.new), lambda w, _: w.store.session("ends").end()),
        "externalize": lambda w, _: w.session.externalize(w.new * 1_000, policy=Policy(max_chars=1_000)),
        "first_records": lambda w, _: w.session.first_records(["r"]),
        "forget": (lambda w: w.session.put(w.new), lambda w, ref: w.session.forget(ref)),
        "get": lambda w, _: w.session.get("text"),
        "grant": lambda w, _: w.session.grant(w.ref, to="granted"),
        "lend": lambda w, _: w.session.lend(w.ref, w.store.session("borrower")),
        "lent": lambda w, _: list(w.store.session("borrower").lent()),
        "list": lambda w, _: w.session.list(),
        "materialize": lambda w, _: w.session.materialize(w.ref, w.folder / "out"),
        "names": lambda w, _: w.session.names(),
        "note_shown": lambda w, _: w.session.note_shown(w.ref, ((0, 10),)),
        "offload": lambda w, _: w.session.offload(_echo)(w.new * 1_000),
        "open": lambda w, _: _closed(w.session.open(w.ref)),
        "part": lambda w, _: w.session.part(w.session.content(w.json), "/rows/0"),
        "pin": lambda w, _: w.session.pin(w.ref),
        "preview": lambda w, _: w.session.preview(w.ref),
        "put": lambda w, _: w.session.put(w.new, name="new"),
        "put_about": lambda w, _: w.session.put_about(w.new, About()),
        "put_encoded": lambda w, _: w.session.put_encoded(Encoded(*encode(w.new)), About()),
        "read": lambda w, _: w.session.read(w.ref, grep="line", context=1),
        "record": lambda w, _: w.session.record("r", w.new.encode(), keep=3),
        "record_all": lambda w, _: w.session.record_all([("r", w.new.encode(), 3)]),
        "records": lambda w, _: w.session.records("r"),
        "ref": lambda w, _: w.session.ref(w.ref.pointer),
        "search": (lambda w: w.session.put(w.new), lambda w, _: w.session.search("something new")),
        "shown_of": lambda w, _: w.session.shown_of([w.ref]),
        "survey": lambda w, _: w.session.survey("line", 3),
        "unpin": lambda w, _: w.session.unpin(w.ref),
        "viewed": lambda w, _: w.session.viewed().get("text"),
        "version": lambda w, _: w.session.version(w.ref),
        "write_file": lambda w, _: w.session.write_file(w.ref, w.folder / "files"),
    },
    "ToolExecutor": {
        "arun": lambda w, _: asyncio.run(w.executor.arun(w.call())),
        "arun_all": lambda w, _: asyncio.run(w.executor.arun_all([w.call(), w.call("b")])),
        "await_": (World.started, lambda w, handle: w.executor.await_(handle, timeout=20)),
        "cancel": (World.started, lambda w, handle: w.executor.cancel(handle)),
        "poll": (World.started, lambda w, handle: w.executor.poll(handle)),
        "run": lambda w, _: w.executor.run(w.call(), timeout=20),
        "run_all": lambda w, _: w.executor.run_all([w.call(), w.call("b")], timeout=20),
        "start": lambda w, _: w.executor.wait(w.started(), timeout=20),
        "wait": (World.started, lambda w, handle: w.executor.wait(handle, timeout=20)),
    },
    "transcript": {
        "Transcript": (World.whole, lambda w, path: transcript.Transcript(path, w.session).append(MESSAGES[0])),
        "check_summary": lambda w, _: transcript.check_summary(w.ref.pointer, w.session),
        "detect": (World.whole, lambda w, path: transcript.detect(MESSAGES)),
        "externalize": (World.whole, lambda w, path: transcript.externalize(path, w.session)),
        "forget": (World.rehydrated, lambda w, path: transcript.forget(path, w.store)),
        "prune": lambda w, _: transcript.prune(MESSAGES, max_tokens=1_000, session=w.session),
        "rehydrate": (World.slim, lambda w, path: transcript.rehydrate(path, w.store)),
        "safeguard": lambda w, _: transcript.safeguard(MESSAGES, w.session),
        "undo": (World.slim, lambda w, path: transcript.undo(path, w.store)),
        "unpaired": lambda w, _: transcript.unpaired(MESSAGES, transcript.FORMATS["openai-chat"]),
        "verify": (World.slim, lambda w, path: transcript.verify(path, w.store, remove_backup=True)),
    },
}  # fmt: skip
NOT_CALLS = {
    "clock",
    "writers",
    "close",
    "closed",
    "parent",
    "session_id",
    "store",
    "ttl",
    "names",
    "tools",
}


def _put_in_a_batch(world: World) -> None:
    with world.store.batching:
        world.session.put(world.new)


def _closed(stream: Any) -> None:
    with stream:
        stream.read()


def test_every_public_call_is_interrupted() -> None:
    for one in (Store, Session, ToolExecutor):
        public = {name for name, _ in inspect.getmembers(one) if not name.startswith("_")}
        assert public - PUBLIC[one.__name__].keys() <= NOT_CALLS
    functions = {
        name for name in transcript.__all__ if inspect.isfunction(getattr(transcript, name))
    }
    assert functions | {"Transcript"} == PUBLIC["transcript"].keys()


def _prepared(
    of: str, name: str, world: World
) -> tuple[Callable[[], object], Callable[[object], object]]:
    call = PUBLIC[of][name]
    prepare, act = call if isinstance(call, tuple) else (lambda world: None, call)
    return lambda: prepare(world), lambda prepared: act(world, prepared)


@contextlib.contextmanager
def _watched(seconds: float = 60.0) -> Iterator[Callable[[], None]]:
    """Yield a function. If this thread does not call it for this long, it waits for a lock, and is
    interrupted."""
    over, calls, thread = threading.Event(), [time.monotonic()], threading.get_ident()

    def watch() -> None:
        while not over.wait(1):
            if time.monotonic() - calls[-1] > seconds:
                signal.pthread_kill(thread, signal.SIGINT)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda: calls.__setitem__(0, time.monotonic())
    finally:
        over.set()


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("of", PUBLIC)
def test_an_interrupt_of_any_public_call_leaves_no_lock_and_no_half_done_change_behind(
    of: str,
    durability: Any,
    tmp_path: Path,
    another: Callable[[], None],
    alarm: Alarm,
    counts: Counts,
) -> None:
    numbers = itertools.count()
    with (
        coatcheck.open(tmp_path / "store", durability=durability) as store,
        coatcheck.open("memory:") as other,
        _watched() as is_alive,
    ):
        world = World(store, tmp_path, other)
        for name in PUBLIC[of]:
            prepare, act = _prepared(of, name, world)
            world.number = next(numbers)
            act(prepare())  # once before it is timed: then modules are imported
            world.number = next(numbers)
            prepared = prepare()
            seconds = duration(lambda: act(prepared))  # noqa: B023
            for _ in range(TIMES):
                is_alive()
                world.number = next(numbers)
                if world.number % 50 == 0:
                    world.clear()
                prepared = prepare()
                kept = alarm.interrupt(lambda: act(prepared), seconds)  # noqa: B023
                try:
                    in_thread(store.session("t").put, f"from a thread {world.number}")
                    another()
                    after = f"after {world.number}"
                    assert world.session.get(world.session.put(after)) == after
                    assert world.executor.run(world.call("short")).text == "short"
                    if world.number % 7 == 0:
                        in_thread(_fork)
                    if of == "transcript":
                        transcript.undo(world.transcript, store)
                        assert world.transcript.read_bytes()[: len(CHATS)] == CHATS
                except BaseException as error:
                    error.add_note(f"after an interrupt of {name}")
                    raise
                if kept is not None:
                    counts("interrupts")
                del kept
        assert store.session("s").get(world.ref) == TEXT
        store.verify(repair=True)
        assert problems(store) == []


@pytest.mark.parametrize("durability", ["power", "process"])
def test_an_interrupt_of_opening_and_closing_a_store_leaves_no_lock_behind(
    durability: Any, tmp_path: Path, another: Callable[[], None], alarm: Alarm, counts: Counts
) -> None:
    folder = tmp_path / "store"

    def open_and_close() -> None:
        coatcheck.open(folder, durability=durability).close()

    with coatcheck.open(folder, durability=durability) as store:
        ref = store.session("s", ttl=None).put("kept")
    seconds = duration(open_and_close)
    for number in range(TIMES * 10):
        kept = alarm.interrupt(open_and_close, seconds)
        another()
        with coatcheck.open(folder, durability=durability) as store:
            assert store.session("s").get(ref) == "kept"
            store.session("s").put(f"after {number}")
        if kept is not None:
            counts("interrupts")
        del kept
    with coatcheck.open(folder) as store:
        assert_clean(store)


def test_an_alarm_that_raises_while_a_call_waits_for_the_lock_leaves_it_free(
    tmp_path: Path, another: Callable[[], None]
) -> None:
    def ring(*_: object) -> None:
        raise TimeoutError("the alarm")

    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        session = store.session("s", ttl=None)
        lock = os.open(folder / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises((TimeoutError, coatcheck.errors.StoreError)):
                session.put("waits")
        finally:
            signal.signal(signal.SIGALRM, before)
            os.close(lock)
        another()
        assert session.get(session.put("after")) == "after"


def test_a_call_from_a_signal_handler_inside_another_call_is_an_error_and_not_a_deadlock(
    tmp_path: Path,
) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("s", ttl=None)
        catalog: Any = store._catalog
        with pytest.raises(coatcheck.errors.StoreUnavailable) as error:
            catalog._exclusive("putting", lambda: session.put("inside"))
        assert error.value.code == "store_unavailable"
        assert session.get(session.put("after")) == "after"


def test_an_interrupt_around_a_fork_leaves_no_lock_behind(
    tmp_path: Path, another: Callable[[], None], alarm: Alarm, counts: Counts
) -> None:
    # An interrupt of Python's own hooks leaves a lock of logging.
    alarm.only_in = str(Path(coatcheck.__file__).parent)
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        session = store.session("s", ttl=None)

        def fork() -> None:
            child = os.fork()
            if not child:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)  # a child that waits for a lock would wait forever
                with contextlib.suppress(BaseException):
                    session.put("from a child")
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0, "the child could not write"

        session.get(session.put("read once"))
        seconds = duration(fork)
        for number in range(TIMES * 10):
            kept = alarm.interrupt(fork, seconds)
            session.put(f"from this thread {number}")
            in_thread(session.put, f"from a thread {number}")
            in_thread(_fork)
            another()
            if kept is not None:
                counts("interrupts")
            del kept


def test_two_threads_can_fork_at_the_same_time(tmp_path: Path) -> None:
    with (
        coatcheck.open(tmp_path / "store", durability="process") as store,
        ThreadPoolExecutor(3) as pool,
    ):
        session = store.session("s", ttl=None)
        for number in range(20):
            forks = [pool.submit(_fork) for _ in range(2)]
            pool.submit(session.put, f"meanwhile {number}").result(timeout=20)
            for fork in forks:
                fork.result(timeout=20)
