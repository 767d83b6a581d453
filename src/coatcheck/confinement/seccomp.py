"""A seccomp filter for a child process that parses hostile content: no sockets, no new processes,
no other processes.

The filter applies to all threads of the process, also to those that it starts later, and cannot be
removed. Landlock limits files; this limits what Landlock does not cover, such as UDP and fork.
Linux on x86-64 and arm64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from dataclasses import dataclass
from typing import Final

_NO_NEW_PRIVILEGES: Final = 38
_SET_FILTER: Final = 1
_ALL_THREADS: Final = 1
_ALLOW: Final = 0x7FFF_0000
_FAIL: Final = 0x0005_0000  # plus the error number that the call returns

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions
_SIZE: Final = 8  # bytes of an instruction
_NUMBER, _MARK, _FIRST_ARGUMENT = 0, 4, 16  # places in the data that the kernel gives to the filter
_THREAD: Final = 0x10000  # the flag of `clone` that makes a thread
_NO_PROCESS: Final = 0x7FFF_FFFF  # larger than any process id
_X32: Final = 0x4000_0000  # where the numbers of a second interface begin, on x86-64

_DENIED: Final = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "semop": (65, 193),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "mq_open": (240, 180),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104),
}  # fmt: skip
"""Calls that fail, with their numbers on x86-64 and arm64: sockets; processes and programs; other
processes; memory and queues that processes share; and parts of the kernel that a parser does not
need."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """One kind of machine: its mark in the filter's data, and the numbers of the calls that are not
    simply denied."""

    mark: int
    column: int  # of `_DENIED`
    seccomp: int
    clone: int
    clone3: int
    kill: int
    tgkill: int
    prlimit: int


_MACHINES: Final = {
    "x86_64": _Machine(
        mark=0xC000_003E,
        column=0,
        seccomp=317,
        clone=56,
        clone3=435,
        kill=62,
        tgkill=234,
        prlimit=302,
    ),
    "aarch64": _Machine(
        mark=0xC000_00B7,
        column=1,
        seccomp=277,
        clone=220,
        clone3=435,
        kill=129,
        tgkill=131,
        prlimit=261,
    ),
}


def forbid_sockets_and_processes() -> bool:
    """Set the filter for this process, and return whether that worked."""
    machine = _machine()
    if machine is None:
        return False
    program = _program(machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // _SIZE, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.syscall(machine.seccomp, _SET_FILTER, _ALL_THREADS, described) == 0)


def filter_for_worker() -> tuple[int, bytes] | None:
    """Return the number of the system call `seccomp` and a filter for a process that is yet to
    start; None where there is none.

    That process can still become another program (Landlock limits which), and signals no process,
    not even itself."""
    machine = _machine()
    if machine is None:
        return None
    return machine.seccomp, _program(machine, _NO_PROCESS, may_execute=True)


def _machine() -> _Machine | None:
    if sys.platform != "linux" or sys.byteorder != "little" or struct.calcsize("P") != 8:
        return None
    return _MACHINES.get(os.uname().machine)


def _program(machine: _Machine, pid: int, *, may_execute: bool = False) -> bytes:
    """Return the filter: instructions that the kernel runs for each call, until one returns."""
    refuse = _instruction(_RETURN, _FAIL | errno.EPERM)
    missing = _instruction(_RETURN, _FAIL | errno.ENOSYS)
    allow = _instruction(_RETURN, _ALLOW)
    steps = [
        _instruction(_LOAD, _MARK),
        _instruction(_IF_EQUAL, machine.mark, then=1),
        refuse,
        _instruction(_LOAD, _NUMBER),
        _instruction(_IF_AT_LEAST, _X32, otherwise=1),
        refuse,
        # Where `clone3` is missing, the C library starts threads with `clone`, whose flags can be
        # checked.
        _instruction(_IF_EQUAL, machine.clone3, otherwise=1),
        missing,
    ]
    for name, numbers in _DENIED.items():
        number = numbers[machine.column]
        if number is not None and not (may_execute and name == "execve"):
            steps += [_instruction(_IF_EQUAL, number, otherwise=1), refuse]
    for number, condition, value in (
        (machine.clone, _IF_ANY_BIT, _THREAD),
        (machine.kill, _IF_EQUAL, pid),
        (machine.tgkill, _IF_EQUAL, pid),
        (machine.prlimit, _IF_EQUAL, 0),  # the limits of this process itself
    ):
        steps += [
            _instruction(_IF_EQUAL, number, otherwise=4),
            _instruction(_LOAD, _FIRST_ARGUMENT),
            _instruction(condition, value, otherwise=1),
            allow,
            refuse,
        ]
    return b"".join([*steps, allow])


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction. A condition skips as many instructions as `then` or `otherwise`
    says."""
    return struct.pack("HBBI", code, then, otherwise, value)
