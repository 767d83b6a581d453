"""What programs cost, measured in a process of its own.

The system never lowers the peak memory that `getrusage` reports, and a child begins with the peak
of the process that started it. In the process of the tests it is that of any earlier test.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import coatcheck
from coatcheck import programs, toolkit
from coatcheck.programs import engine
from coatcheck.programs.engine import Limits


@dataclass(frozen=True)
class Cost:
    """What one program took, in seconds and bytes."""

    answer: str
    wall: float
    host_cpu: float
    workers_cpu: float
    host_growth: int
    worker_peak: int
    """The largest worker so far, of this program or an earlier one."""


def peak(pid: int | None = None) -> int:
    """The most memory that a process has had resident, in bytes: on Linux since its `exec` or the
    last `reset_peak`. Without a process id, this process; others only on Linux."""
    if sys.platform != "linux":
        assert pid is None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak() -> None:
    """Make what this process has resident now its peak, where the system can."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def own_process(seconds: float) -> Iterator[ProcessPoolExecutor]:
    """A new process to call `cost` in. A program in it may work for this many seconds."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=_limit, initargs=(seconds,)
    ) as process:
        yield process


def cost(source: str, text: str) -> Cost:
    """Run a program over a table in CSV as a model would, and return what it took."""
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        ref = session.put(text, media_type="text/csv")
        reset_peak()
        size = peak()
        begin = time.monotonic()
        host, workers = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN)
        answer = toolkit(session)[0].run(pointer=ref.pointer, code=source)
        wall = time.monotonic() - begin
        programs.close()  # what a worker took is known when it has ended
        return Cost(
            answer=answer,
            wall=wall,
            host_cpu=_cpu(resource.RUSAGE_SELF) - host,
            workers_cpu=_cpu(resource.RUSAGE_CHILDREN) - workers,
            host_growth=peak() - size,
            worker_peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        )


def _limit(seconds: float) -> None:
    engine.DEFAULT = Limits(seconds=seconds)  # type: ignore[misc]


def _cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
