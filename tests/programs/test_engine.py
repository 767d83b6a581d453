"""The engine around the interpreter: processes, limits, confinement, and what a program can make the
host do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coatcheck import programs
from coatcheck.errors import LimitExceeded, ProgramFailed
from coatcheck.programs import confined, engine, worker
from coatcheck.programs.engine import MAX_BUSY, MAX_OUTPUT, Limits
from coatcheck.programs.monty import Raised
from tests.programs.measuring import peak, reset_peak
from tests.programs.running import NOW, Functions, failure, printed

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux shows them")
SHORT = Limits(seconds=0.5)
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


def children(pid: int) -> set[int]:
    """The processes that a process has started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = status.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid and after_name[0] != "Z":
            found.add(int(status.parent.name))
    return found


def peaks_of_workers() -> list[int]:
    """The most memory that each worker of this process has had resident, without those that have
    not become the interpreter yet, and without the children of other tests."""
    found = []
    for one in children(os.getpid()):
        try:
            if Path(f"/proc/{one}/exe").readlink().name == "monty":
                found.append(peak(one))
        except (OSError, IndexError):  # it has just ended
            pass
    return found


def wait_until(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# Processes


def test_each_program_has_a_fresh_process() -> None:
    assert printed("x = 1") == "1"
    assert failure("x").kind == "NameError"


@on_linux
def test_a_fork_gets_an_error_and_leaves_the_workers_of_its_parent() -> None:
    assert printed("1 + 1") == "2"
    pid = os.fork()
    if pid == 0:
        is_right = False
        try:
            printed("2 + 2")
        except LimitExceeded as error:
            is_right = "in a fork of a process that has run programs" in error.message
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert [printed("3 + 3"), printed("4 + 4")] == ["6", "8"]


FORKED = """
import os, sys
from coatcheck import programs
from tests.programs.running import printed
pid = os.fork()
print(printed("2 + 2"), flush=True)
if pid:
    sys.exit(os.waitpid(pid, 0)[1])
"""


@on_linux
def test_processes_that_fork_before_their_first_program_each_run_programs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("4\n4\n", "")


HOST = """
import sys
from tests.programs.running import printed
print("ready", flush=True)
printed(sys.argv[1])
"""


@on_linux
@pytest.mark.parametrize("source", ["while True: pass", "10 ** 10 ** 8"])
def test_a_busy_worker_ends_with_its_parent(source: str) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST, source], stdout=subprocess.PIPE)
    assert host.stdout is not None
    host.stdout.readline()
    assert wait_until(
        lambda: any(
            Path(f"/proc/{one}/exe").resolve().name == "monty" for one in children(host.pid)
        )
    )
    started = children(host.pid)
    host.kill()
    host.wait()
    host.stdout.close()
    assert wait_until(lambda: not any(map(is_alive, started)), seconds=2)


@on_linux
def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    source = "from tests.programs.running import printed; print(printed('1'))"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_memory_of_a_program_is_not_the_next_ones() -> None:
    assert printed("x = 'a,' * 2_000_000\nlen(x.split(',')[:3])") == "3"
    assert printed("1") == "1"
    assert wait_until(lambda: 0 < max(peaks_of_workers(), default=0) < 60 * MIB)


def test_a_worker_that_is_killed_is_an_error_of_its_program_alone() -> None:
    def kill() -> object:
        for one in children(os.getpid()):
            if Path(f"/proc/{one}/exe").resolve().name == "monty":
                os.kill(one, signal.SIGKILL)
        return 1

    assert failure("kill()\nwhile True: pass", Functions({"kill": kill})).message == (
        "the program ended its sandbox"
    )
    assert printed("1 + 1") == "2"


def test_programs_run_at_the_same_time_and_others_wait() -> None:
    with ThreadPoolExecutor(3 * MAX_BUSY) as pool:
        found = list(pool.map(lambda n: printed(f"sum(range({n}))"), range(3 * MAX_BUSY)))
    assert found == [str(sum(range(n))) for n in range(3 * MAX_BUSY)]


def test_too_many_programs_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "QUEUE", 0.1)
    entered, released = threading.Barrier(MAX_BUSY + 1), threading.Event()

    def wait() -> object:
        entered.wait(30)
        return released.wait(30)

    with ThreadPoolExecutor(MAX_BUSY) as pool:
        running = [
            pool.submit(printed, "wait()", Functions({"wait": wait})) for _ in range(MAX_BUSY)
        ]
        entered.wait(30)
        with pytest.raises(LimitExceeded, match="too many programs are running"):
            printed("1")
        released.set()
        assert [one.result() for one in running] == ["True"] * MAX_BUSY


# Limits


def test_a_program_that_takes_too_long_is_stopped() -> None:
    error = failure("print('begun')\nwhile True: pass", limits=SHORT)
    assert error.message == "the program took more than 0.5 s and was stopped"
    assert error.printed == "begun\n"


def test_a_call_into_the_interpreter_that_does_not_end_is_killed() -> None:
    error = failure("10 ** 10 ** 8", limits=SHORT)
    assert error.message == "the program took more than 0.5 s and was stopped"


def test_the_time_of_calls_does_not_count() -> None:
    host = Functions({"wait": lambda: time.sleep(1)})
    assert printed("wait()\n'done'", host, limits=SHORT) == "done"


def test_a_program_ends_at_its_deadline_even_in_a_call() -> None:
    begin = time.monotonic()
    error = failure("while True: pass", deadline=begin + 0.3)
    assert error.message == "the program was stopped at the deadline of its turn"
    assert time.monotonic() - begin < 4


def test_a_program_cannot_sleep() -> None:
    assert printed("import time\ntime.sleep(3600)\n'done'") == "done"


@pytest.mark.parametrize(
    "source",
    [
        "x = [0]\nwhile True: x = x + x",
        "'x' * 10 ** 10",
        "try:\n    'x' * 10 ** 10\nexcept MemoryError:\n    1",
    ],
)
def test_a_program_that_takes_too_much_memory_is_stopped(source: str) -> None:
    error = failure(source)
    assert error.message.startswith("the program took more than 256 MiB of memory")
    assert error.hint.startswith("use lines_of(p, …)")


def test_a_program_that_prints_without_end_is_stopped_at_the_cap() -> None:
    begin = time.monotonic()
    error = failure("while True: print('x' * 1000)", limits=Limits(seconds=60))
    assert error.message == "the program printed more than 16 MiB and was stopped"
    assert MAX_OUTPUT - 1_000 <= len(error.printed) <= MAX_OUTPUT
    assert time.monotonic() - begin < 20


def test_calls_out_of_a_program_are_limited() -> None:
    host = Functions({"f": lambda: None})
    error = failure("for _ in range(1000): f()", host)
    assert (error.kind, error.detail) == ("RuntimeError", "suspension limit 200 exceeded")
    assert error.hint == "make fewer calls: read once, and loop over the value"


# Values


def test_a_graph_that_is_small_inside_never_grows_in_this_process() -> None:
    reset_peak()
    before = peak()
    graph = "graph = [1]\nfor _ in range(26): graph = [graph, graph]\n"
    received: list[object] = []
    for source in (
        graph + "graph",
        graph + "return graph",
        graph + "f(graph)\n'called'",
        graph + "g(graph)",
    ):
        try:
            printed(source, Functions({"f": lambda value: received.append(1)}), limits=SHORT)
        except ProgramFailed:
            pass
    assert received == [1]
    assert peak() - before < 200 * MIB


def test_a_value_that_is_deep_is_shown_whole_or_not_at_all() -> None:
    nested = "x = 1\nfor _ in range({}): x = [x]\nx"
    assert printed(nested.format(150)) == "[" * 150 + "1" + "]" * 150
    try:
        shown = printed(nested.format(100_000))
    except ProgramFailed:
        return
    assert "deeply nested" not in shown


def test_names_of_errors_are_kept() -> None:
    host = Functions({"f": lambda: Raised("PermissionError", "call it directly")})
    source = "try:\n    f()\nexcept PermissionError as error:\n    print(error)"
    assert printed(source, host) == "call it directly"
    assert failure("f()", host).message == "PermissionError in line 1: call it directly"


def test_calls_that_are_awaited_come_in_batches() -> None:
    host = Functions({"f": lambda n: n * 2, "g": lambda: 1}, later=["f"])
    source = "g()\n[await f(1), *await asyncio.gather(f(2), f(3), f(4))]"
    assert printed(source, host) == "[2, 4, 6, 8]"
    assert host.batches == [1, 3]


def test_the_clock_and_the_random_numbers_are_fixed() -> None:
    source = "print(datetime.datetime.now(), time.time(), random.random(), hash('a'), id([]))"
    assert printed(source) == printed(source)
    assert printed("datetime.datetime.now(timezone.utc)").startswith(
        f"datetime.datetime({NOW.year}, {NOW.month}, {NOW.day}"
    )


# Confinement

ATTEMPTS = {
    "a file of the user": "open('/etc/passwd')",
    "a listing": "os.listdir('/')",
    "a new file": "open('/tmp/coatcheck-written', 'w')",
    "TCP": "socket.socket().connect(('127.0.0.1', 9))",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "fork": "os.fork()",
    "another program": "os.execv('/bin/sh', ['sh'])",
    "a signal to the parent": "os.kill(os.getppid(), 0)",
}
CONFINED = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from coatcheck.programs import worker
worker.limit()
print(worker.confine(int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4], sys.argv[5:]), flush=True)
try:
    {}
except OSError as error:
    print("refused", error.errno)
else:
    print("allowed")
"""


@on_linux
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_worker_is_refused(attempt: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONFINED.format(attempt), *confined._arguments("/bin/true")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    worked, outcome = done.stdout.splitlines()
    if worked != "(True, True)":
        pytest.skip("this kernel cannot confine a process")
    assert outcome in (f"refused {errno.EACCES}", f"refused {errno.EPERM}")


@on_linux
def test_the_process_of_a_program_is_confined_and_limited() -> None:
    found: dict[str, str] = {}

    def look() -> object:
        for one in children(os.getpid()):
            if Path(f"/proc/{one}/exe").resolve().name == "monty":
                found["status"] = Path(f"/proc/{one}/status").read_text()
                found["limits"] = Path(f"/proc/{one}/limits").read_text()
                found["environ"] = Path(f"/proc/{one}/environ").read_text()
        return 1

    printed("look()", Functions({"look": look}))
    if programs.confinement().calls:
        assert "Seccomp:\t2" in found["status"]
    assert "NoNewPrivs:\t1" in found["status"]
    assert f"Max address space         {worker.MEMORY} " in found["limits"]
    assert f"Max cpu time              {worker.CPU} " in found["limits"]
    assert "Max file size             0 " in found["limits"]
    assert found["environ"] == ""


def test_a_program_has_no_files_and_no_processes() -> None:
    for source in ("open('/etc/passwd')", "import os\nos.listdir('/')"):
        assert failure(source).kind == "PermissionError"
    for source in ("import subprocess", "import socket", "import ctypes"):
        assert failure(source).kind == "ModuleNotFoundError"
