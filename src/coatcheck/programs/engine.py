"""Run a model's program in a worker process of its own, within limits that are always set.

Workers are confined (`confined`, `worker`) and used once: memory that one program took is not the
next one's, and nothing is left of it. Up to three are started ahead, since that takes longer than
most programs: 15 ms against 3. An idle one takes 7 MB. All of them belong to one process id. A fork
of a process that has run programs runs none: the interpreter's client does not work there.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from coatcheck.errors import InvalidArgument, LimitExceeded, MissingExtra, ProgramFailed
from coatcheck.ids import clip, is_encodable
from coatcheck.programs import confined
from coatcheck.programs.hints import hint_for
from coatcheck.programs.prelude import PRELUDE, prepared
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.programs.monty import Failure, Host, Worker

EXTRA: Final = "programs"
MAX_SOURCE: Final = 64 << 10  # characters
MAX_OUTPUT: Final = 16 << 20  # bytes of what a program prints
MAX_BUSY: Final = 4
MAX_SPARES: Final = 3
QUEUE: Final = 60.0  # seconds to wait for one of them
START: Final = 20.0  # seconds for a worker to start
_LONGEST: Final = 600  # characters of an error


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program. `seconds` are of its own work, without the time of calls that it
    waits for; `suspensions` are all calls out of it, names that it looks up included."""

    seconds: float = 5.0
    memory: int = 256 << 20
    suspensions: int = 200
    calls: int = 50


DEFAULT: Final = Limits()


@dataclass(frozen=True, slots=True)
class Program:
    """The source of a program, the names that are bound before it starts, and the time that its
    clock shows. `before` is source of ours that runs after the prelude."""

    source: str
    now: datetime
    inputs: Mapping[str, object] = field(default_factory=dict)
    before: str = ""


def is_available() -> bool:
    """Whether programs can run here: the extra is installed."""
    return find_spec("pydantic_monty") is not None


def run(
    program: Program, host: Host, limits: Limits | None = None, *, deadline: float | None = None
) -> str:
    """Run a program and return what it printed, with its last value.

    `deadline` is a `time.monotonic` at which it is stopped, whatever it does. Raises
    `ProgramFailed`, and `LimitExceeded` if no worker can run it."""
    check_source(program.source)
    if not is_available():
        raise MissingExtra(EXTRA)
    from coatcheck.programs.monty import Step  # takes 20 ms

    limits = limits or DEFAULT
    output = _Output()
    steps = [Step(PRELUDE, {}), Step(prepared(program.source), {})]
    if program.inputs or program.before:
        steps.insert(1, Step(program.before, program.inputs))
    failure: Failure | None = None
    for _ in range(MAX_SPARES + 1):
        with _workers().borrowed() as worker:
            failure = worker.run(
                steps,
                host,
                write=output.write,
                now=program.now,
                seconds=limits.seconds,
                memory=limits.memory,
                suspensions=limits.suspensions,
                deadline=deadline,
            )
        if failure is None or failure.reason != "crash" or worker.has_begun:
            break  # else the worker was killed while it was idle
    if failure is not None:
        raise _error(failure, program.source, output.text, limits)
    return output.text


def check_source(source: object) -> None:
    if not isinstance(source, str):
        raise InvalidArgument(
            f"code must be text, got {type(source).__name__}", hint='write code="print(len(text))"'
        )
    if not source.strip():
        raise InvalidArgument("code is empty", hint='write code="print(len(text))"')
    if len(source) > MAX_SOURCE:
        raise InvalidArgument(
            f"the program has {len(source):,} characters, the limit is {MAX_SOURCE:,}",
            hint="write a shorter one",
        )
    if not is_encodable(source):
        raise InvalidArgument(
            "the program has half of a surrogate pair", hint="write characters, or \\u escapes"
        )


class _Output:
    """What a program prints, up to a limit."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def write(self, text: str) -> bool:
        """Add a text, and return whether there is room for more."""
        room = MAX_OUTPUT - self._size
        if room > 0:
            piece = text if len(text) <= room else text[:room]
            self._pieces.append(piece)
            self._size += len(piece) if piece.isascii() else len(piece.encode(errors="replace"))
        return self._size < MAX_OUTPUT

    @property
    def text(self) -> str:
        return "".join(self._pieces)


def _error(failure: Failure, source: str, printed: str, limits: Limits) -> ProgramFailed:
    lines = source.count("\n") + 1
    line = failure.line if failure.line is not None and failure.line <= lines else None
    where = f" in line {line}" if line else ""
    if failure.reason == "time":
        text = f"the program took more than {limits.seconds:g} s and was stopped{where}"
        hint = "do less work, e.g. in a query or on fewer lines"
    elif failure.reason == "deadline":
        text, hint = "the program was stopped at the deadline of its turn", "do less in one program"
    elif failure.reason == "output":
        text = f"the program printed more than {MAX_OUTPUT >> 20} MiB and was stopped"
        hint = "print less: a count, a few lines, a summary"
    elif failure.reason == "crash":
        text = "the program ended its sandbox"
        hint = "it may have used too much memory: use lines_of, grep or query"
    elif failure.reason == "memory":
        text = f"the program took more than {limits.memory >> 20} MiB of memory{where}"
        hint = "use lines_of(p, …), grep(p, …) or query(p, …) instead of the whole content"
    else:
        message = mask(failure.message)
        message = message if len(message) <= _LONGEST else message[:_LONGEST] + "…"
        text = f"{failure.type}{where}: {message}" if message else f"{failure.type}{where}"
        hint = hint_for(failure.type, failure.message)
    return ProgramFailed(
        text,
        hint=hint,
        printed=printed,
        kind=failure.type,
        detail=failure.message,
        line=line,
    )


class _Workers:
    """The workers of one process. They are all started by one thread, which lives as long as the
    process: the system ends a worker when the thread that started it ends."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coatcheck-programs")
        self._free = threading.BoundedSemaphore(MAX_BUSY)
        self._lock = threading.Lock()
        self._spares: deque[Future[Worker]] = deque()
        self._taken = 0
        self._folder: str | None = None
        self._binary: str | None = None

    def borrowed(self) -> _Borrowed:
        return _Borrowed(self)

    def take(self) -> Worker:
        """Return a worker, and start others: more after the first programs, since some agents run
        many in a row."""
        if not self._free.acquire(timeout=QUEUE):
            raise LimitExceeded("too many programs are running", hint="try again later")
        try:
            with self._lock:
                self._taken += 1
                wanted = self._spares.popleft() if self._spares else None
                if wanted is None or (wanted.done() and wanted.exception() is not None):
                    wanted = self._thread.submit(self._start)
                while len(self._spares) < min(self._taken, MAX_SPARES):
                    self._spares.append(self._thread.submit(self._start))
            return wanted.result(START)
        except BaseException as error:
            self._free.release()
            if isinstance(error, OSError | RuntimeError | TimeoutError):
                raise LimitExceeded(
                    f"no worker can be started for a program: {clip(str(error), 200)}",
                    hint="try again later",
                ) from error
            raise

    def give_back(self, worker: Worker) -> None:
        """End a worker, without waiting for it."""
        self._free.release()
        try:
            self._thread.submit(worker.close)
        except RuntimeError:  # at the end of the process
            worker.close()

    def close(self) -> None:
        """End the workers that were started ahead."""
        with self._lock:
            spares, self._spares = self._spares, deque()
        for spare in spares:
            if spare.cancel():
                continue
            try:
                spare.result(START).close()
            except (OSError, RuntimeError, TimeoutError):
                pass
        self._thread.shutdown(wait=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> Worker:
        global _has_started
        from coatcheck.programs.monty import Worker

        _has_started = True
        return Worker(self._confining())

    def _confining(self) -> str | None:
        """A script that confines itself and becomes the interpreter; None for the interpreter
        itself, where there is nothing that confines."""
        if os.name != "posix":
            return None
        if self._binary is None:
            from pydantic_monty._binary import find_monty_binary

            self._folder = tempfile.mkdtemp(prefix="coatcheck-")
            script = os.path.join(self._folder, "monty")
            command = shlex.join(confined.command(find_monty_binary()))
            with open(os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w") as file:
                file.write(f'#!/bin/sh\nexec {command} "$@"\n')
            self._binary = script
        return self._binary


class _Borrowed:
    """A worker for the time of a `with` block."""

    def __init__(self, workers: _Workers) -> None:
        self._workers = workers

    def __enter__(self) -> Worker:
        self._worker = self._workers.take()
        return self._worker

    def __exit__(self, *_: object) -> None:
        self._workers.give_back(self._worker)


_ours: _Workers | None = None
_of_parent: list[_Workers] = []  # kept, so that a fork does not end the workers of its parent
_making = threading.Lock()
_has_started = False  # whether this process, or one that it is a fork of, has started a worker
_is_fork_of_user = False  # whether a parent of this process has started workers before the fork


def _workers() -> _Workers:
    global _ours
    if _is_fork_of_user:  # the interpreter's client would wait forever, and break the parent's
        raise LimitExceeded(
            "programs cannot run in a fork of a process that has run programs",
            hint="fork before the first program, or start the process with spawn",
        )
    with _making:
        if _ours is None:
            _ours = _Workers()
        return _ours


def close() -> None:
    """End the workers that were started ahead."""
    global _ours
    with _making:
        workers, _ours = _ours, None
    if workers is not None:
        workers.close()


def _forget() -> None:
    """After a fork: the workers belong to our parent."""
    global _ours, _making, _is_fork_of_user
    _making = threading.Lock()
    _is_fork_of_user = _has_started
    if _ours is not None:
        _of_parent.append(_ours)
        _ours = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
