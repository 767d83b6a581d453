"""The interpreter Monty: the only module that imports `pydantic_monty`.

A `Worker` is one process that runs one program and then ends. The loop is synchronous: it goes from
one suspension of the program to the next, and answers each. Nothing of the program runs in this
process, and only what the caller's `Host` asks for is converted to objects here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from pydantic_monty import (
    FunctionSnapshot,
    FutureSnapshot,
    Monty,
    MontyComplete,
    MontyCrashedError,
    MontyError,
    MontyRuntimeError,
    MontySyntaxError,
    NameLookupSnapshot,
    __version__,
)

VERSION: Final = __version__
_GRACE: Final = 1.0  # seconds after its own time limit until a worker is killed
_CHECKOUT: Final = 20.0

Reason = Literal["error", "time", "deadline", "memory", "output", "crash"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a host function by the program."""

    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Raised:
    """The answer to a call that fails: the name of a built-in exception, and its message."""

    type: str
    message: str


class Host(Protocol):
    """What a program can reach. `names` are the functions, `later` those that give an awaitable."""

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def later(self) -> frozenset[str]: ...
    def call(self, call: Call, /) -> object:
        """Answer one call, perhaps with `Raised`."""

    def call_all(self, calls: Sequence[Call], /) -> Sequence[object]:
        """Answer the calls of `later` functions that the program waits for."""


@dataclass(frozen=True, slots=True)
class Step:
    """Source to run, and values that are bound before it."""

    source: str
    inputs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a program ended early. `line` is in the last step."""

    reason: Reason
    type: str
    message: str
    line: int | None = None


class Worker:
    """A process for one program. `binary` is what to start instead of the interpreter's own."""

    def __init__(self, binary: str | None) -> None:
        self._pool = Monty(
            binary_path=binary,
            min_processes=1,
            max_processes=1,
            checkout_timeout=_CHECKOUT,
            feed_duration_limit_grace=_GRACE,
        )
        self._pool.__enter__()
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._killed: Reason | None = None
        self.has_begun = False
        """Whether the last step of the program was started."""

    def run(
        self,
        steps: Sequence[Step],
        host: Host,
        *,
        write: Callable[[str], bool],
        now: datetime,
        seconds: float,
        memory: int,
        suspensions: int,
        deadline: float | None,
    ) -> Failure | None:
        """Run the steps one after the other. `write` takes what is printed, and returns False to
        stop the program. `seconds` are of the program's own work, `deadline` is a `time.monotonic`
        at which it is killed."""
        session = self._pool.checkout(
            limits={
                "max_feed_duration_secs": seconds,
                "max_memory": memory,
                "max_suspensions": suspensions,
            },
            os_policy={"datetime": now, "sleep": "zero", "random_start": {"seed": 0}},
        )

        def printed(_: object, text: str) -> None:
            if not write(text):
                self.kill("output")

        timer = None
        try:
            with session:
                self._pid = session.worker_pid
                if deadline is not None:
                    timer = threading.Timer(deadline - time.monotonic(), self.kill, ("deadline",))
                    timer.daemon = True
                    timer.start()
                for number, step in enumerate(steps, start=1):
                    self.has_begun = number == len(steps)
                    self._drive(
                        session.feed_start(
                            step.source, inputs=dict(step.inputs), print_callback=printed
                        ),
                        host,
                    )
                return None
        except (MontyError, RuntimeError, TimeoutError) as error:
            return self._failure(error, len(steps) - 1)
        finally:
            with self._lock:
                self._pid = None
            if timer is not None:
                timer.cancel()

    def kill(self, reason: Reason) -> None:
        """Kill the process while it runs a program."""
        with self._lock:
            if self._pid is None or self._killed is not None:
                return
            self._killed = reason
            try:
                os.kill(self._pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End the process. Must not be called in a fork of the process that started it."""
        self._pool.__exit__(None, None, None)

    def _drive(self, snapshot: Any, host: Host) -> None:
        """Answer what the program asks for until it is complete. Its value is never looked at: it
        may be a graph that is small here and endless as text."""
        waiting: dict[int, Call] = {}
        while not isinstance(snapshot, MontyComplete):
            if isinstance(snapshot, FunctionSnapshot):
                snapshot = self._called(snapshot, host, waiting)
            elif isinstance(snapshot, NameLookupSnapshot):
                name = snapshot.variable_name
                if name in host.names:
                    snapshot = snapshot.resume(value=_placeholder(name))
                else:
                    snapshot = snapshot.resume()
            else:
                assert isinstance(snapshot, FutureSnapshot)
                calls = [waiting.pop(number) for number in sorted(snapshot.pending_call_ids)]
                answers = host.call_all(calls)
                settled = zip(calls, answers, strict=True)
                snapshot = snapshot.resume(
                    {call.number: _result(answer) for call, answer in settled}
                )

    def _called(self, snapshot: FunctionSnapshot, host: Host, waiting: dict[int, Call]) -> Any:
        name = str(snapshot.function_name)
        if snapshot.is_os_function:
            return snapshot.resume_not_handled()
        if name not in host.names or snapshot.object_id is not None:
            return snapshot.resume(
                {"exc_type": "NameError", "message": f"name '{name}' is not defined"}
            )
        call = Call(snapshot.call_id, name, snapshot.args, snapshot.kwargs)
        if name in host.later:
            waiting[call.number] = call
            return snapshot.resume({"future": ...})
        return snapshot.resume(_result(host.call(call)))

    def _failure(self, error: Exception, last: int) -> Failure:
        if self._killed is not None:
            return Failure(self._killed, "", "")
        if isinstance(error, MontyCrashedError):
            reason: Reason = "time" if error.timed_out else "crash"
            return Failure(reason, "", str(error))
        if not isinstance(error, MontyRuntimeError | MontySyntaxError):
            return Failure("error", type(error).__name__, str(error))
        kind, _, message = error.display("type-msg").partition(": ")
        reason = "error"
        if kind == "TimeoutError" and "time limit exceeded" in message:
            reason = "time"
        elif kind == "MemoryError":
            reason = "memory"
        return Failure(reason, kind, message, _line(error, last))


def _placeholder(name: str) -> Callable[[], None]:
    """A function value of that name for the program: a call of it comes back as a call by name."""

    def named() -> None: ...

    named.__name__ = name
    return named


def _result(answer: object) -> Any:
    if isinstance(answer, Raised):
        return {"exc_type": answer.type, "message": answer.message}
    return {"return_value": answer}


def _line(error: MontyRuntimeError | MontySyntaxError, last: int) -> int | None:
    """The line of the last step in which the error happened, or from which it was reached."""
    name = f"<python-input-{last}>"
    lines = [frame.line for frame in error.traceback() if frame.filename == name]
    return lines[-1] if lines else None
