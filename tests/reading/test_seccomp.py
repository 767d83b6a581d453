"""The confinement of a child process by seccomp: what it refuses, tried from inside, and the filter
itself."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.confinement import seccomp
from coatcheck.reading import heavy

BEFORE = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading
from coatcheck.reading.sandbox import confine
peer = ("127.0.0.1", int(sys.argv[2]))
tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
early, released = [], threading.Event()
def wait_and_try():
    released.wait()
    try:
        early.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    except OSError as error:
        early.append(error)
thread = threading.Thread(target=wait_and_try)
thread.start()
found = confine(sys.argv[1])
if not found.calls:
    released.set()
    print("no seccomp")
    sys.exit()
"""
AFTER = """
try:
    attempt()
except OSError as error:
    print("refused", error.errno)
else:
    print("allowed")
finally:
    released.set()
    thread.join()
"""
REFUSED = {
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', peer)",
    "UDP with an open socket": "udp.sendto(b'x', peer)",
    "TCP": "socket.socket().connect(peer)",
    "TCP with an open socket": "tcp.connect(peer)",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "io_uring": "checked(libc.syscall(425, 1, None))",
    "fork": "os.fork()",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "a subprocess": "subprocess.run([sys.executable, '-c', ''])",
    "posix_spawn": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "a signal to the parent": "os.kill(os.getppid(), 0)",
    "tracing the parent": "checked(libc.ptrace(16, os.getppid(), 0, 0))",
    "limits of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)",
    "shared memory": "checked(libc.shmget(0, 4096, 0o600))",
    "a namespace": "checked(libc.unshare(0x10000000))",
    "a thread that runs already": "released.set() or thread.join() or (_ for _ in ()).throw(early[0])",
}
ALLOWED = {
    "threads": "[one.start() for one in [threading.Thread(target=released.wait) for _ in range(8)]]",
    "a signal to itself": "os.kill(os.getpid(), 0)",
    "its own limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "a pipe": "os.pipe()",
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")


def tried(attempt: str, folder: Path, port: int = 9) -> str:
    """Try something in a confined process, and return what happened."""
    script = f"{BEFORE}\ndef attempt():\n    return {attempt}\n{AFTER}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout == "no seccomp\n":
        pytest.skip("this kernel has no seccomp filters for this machine")
    return done.stdout.strip()


@pytest.mark.parametrize("attempt", REFUSED.values(), ids=REFUSED)
def test_a_confined_process_is_refused(attempt: str, tmp_path: Path) -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as listening:  # so that only the filter can refuse a connection
        assert tried(attempt, tmp_path, listening.getsockname()[1]) == f"refused {errno.EPERM}"


@pytest.mark.parametrize("attempt", ALLOWED.values(), ids=ALLOWED)
def test_a_confined_process_may_use(attempt: str, tmp_path: Path) -> None:
    assert tried(attempt, tmp_path) == "allowed"


def test_a_child_that_reads_content_says_how_it_is_confined(tmp_path: Path) -> None:
    expected = tried("os.fork()", tmp_path).startswith("refused")
    try:
        assert heavy.confinement().calls == expected
    finally:
        heavy.pool.close()


# The filter, for machines that the tests do not run on


def result_of(
    machine: seccomp._Machine, number: int, *, first: int = 0, mark: int | None = None
) -> int | str:
    """Run the filter for a call as the kernel does. Return "allowed", or the error number of the
    call."""
    program = seccomp._program(machine, pid=1_234)
    data = struct.pack("<IIQQ", number, machine.mark if mark is None else mark, 0, first)
    at, loaded = 0, 0
    while True:
        code, then, otherwise, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == seccomp._RETURN:
            return "allowed" if value == seccomp._ALLOW else value - seccomp._FAIL
        if code == seccomp._LOAD:
            (loaded,) = struct.unpack_from("<I", data, value)
            continue
        is_true = {
            seccomp._IF_EQUAL: loaded == value,
            seccomp._IF_AT_LEAST: loaded >= value,
            seccomp._IF_ANY_BIT: bool(loaded & value),
        }[code]
        at += then if is_true else otherwise


@pytest.mark.parametrize("machine", seccomp._MACHINES.values(), ids=seccomp._MACHINES)
def test_the_filter_refuses_what_it_lists_and_only_that(machine: seccomp._Machine) -> None:
    denied = {numbers[machine.column] for numbers in seccomp._DENIED.values()} - {None}
    special = {machine.clone, machine.clone3, machine.kill, machine.tgkill, machine.prlimit}
    for number in range(500):
        if number in denied:
            assert result_of(machine, number) == errno.EPERM, number
        elif number not in special:
            assert result_of(machine, number) == "allowed", number
    assert len(denied) > 40


@pytest.mark.parametrize("machine", seccomp._MACHINES.values(), ids=seccomp._MACHINES)
def test_the_filter_looks_at_the_first_argument_of_some_calls(machine: seccomp._Machine) -> None:
    thread = 0x3D0F00  # the flags of the C library
    assert result_of(machine, machine.clone, first=thread) == "allowed"
    assert result_of(machine, machine.clone, first=17) == errno.EPERM
    assert result_of(machine, machine.clone3) == errno.ENOSYS
    for number in (machine.kill, machine.tgkill):
        assert result_of(machine, number, first=1_234) == "allowed"
        assert result_of(machine, number, first=1) == errno.EPERM
    assert result_of(machine, machine.prlimit, first=0) == "allowed"
    assert result_of(machine, machine.prlimit, first=1_234) == errno.EPERM


@pytest.mark.parametrize("machine", seccomp._MACHINES.values(), ids=seccomp._MACHINES)
def test_the_filter_refuses_every_call_of_another_interface(machine: seccomp._Machine) -> None:
    assert result_of(machine, 0, mark=0x4000_0003) == errno.EPERM  # 32-bit x86
    assert result_of(machine, 0x4000_0000) == errno.EPERM  # x32
