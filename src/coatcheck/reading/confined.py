"""Inside a child process that looks at hostile content: lay down every right that the work does not need, then serve.

What the operating system offers is used: limits on memory, time, files and writing everywhere but on Windows; on Linux
also Landlock, after which the process can open nothing but its own folder and connect to nobody. Each is on top of
what the library that does the work promises by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

if sys.platform != "win32":
    import resource

FORGET: Final = 60.0  # seconds without a message until what was loaded is let go
LEAVE: Final = 300.0  # and until the process ends
_MAX_REQUEST: Final = 1 << 24
_HEADER: Final = struct.Struct(">Q")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_READ, _LIST, _REMOVE = 1 << 2, 1 << 3, 1 << 5

Message = dict[str, Any]


class Refused(Exception):
    """What the parent raises: `invalid` for a wrong question, `limit` for one that takes too much."""

    def __init__(self, error: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.answer = {"error": error, "message": message, "hint": hint}


def serve(
    folder: str, answer: Callable[[Message], Message], forget: Callable[[], None], also: Sequence[str] = ()
) -> None:
    """Answer messages until the parent closes its end, or nothing has come for a while. `also` are paths besides the
    folder that the work cannot do without: they can be read."""
    confine(folder, also)
    asked, said = sys.stdin.buffer, sys.stdout.buffer
    while True:
        if not _wait(asked, FORGET):
            forget()
            if not _wait(asked, LEAVE):
                break
        header = asked.read(_HEADER.size)
        if len(header) < _HEADER.size or (length := _HEADER.unpack(header)[0]) > _MAX_REQUEST:
            break
        try:
            reply = answer(json.loads(asked.read(length)))
        except Refused as refused:
            reply = refused.answer
        except MemoryError:
            forget()
            reply = {"error": "limit", "message": "this takes more memory than is allowed", "hint": "ask for less"}
        body = json.dumps(reply).encode()
        said.write(_HEADER.pack(len(body)) + body)
        said.flush()
    for name in os.listdir(folder):  # where the parent died: its copy of the content goes with us
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))


def confine(folder: str, also: Sequence[str] = ()) -> None:
    if sys.platform != "win32":
        for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 128), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        _landlock({folder: _READ | _LIST | _REMOVE} | dict.fromkeys(("/dev/urandom", *also), _READ))


def allow(memory: int, seconds: float, threads: int) -> None:
    """What the next answer may take. RLIMIT_NPROC is left alone: it counts the threads of all the user's processes."""
    if sys.platform == "win32":
        return
    used = time.process_time()
    with suppress(ValueError, OSError):  # a hard limit below: the stricter one holds
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds * threads) + 2, resource.RLIM_INFINITY))


def _wait(pipe: Any, seconds: float) -> bool:
    if sys.platform == "win32":  # select knows no pipes there
        return True
    return bool(select.select([pipe], [], [], seconds)[0])


def _landlock(rights: Mapping[str, int]) -> bool:
    """Whether this process can now do no more than this with files, and nothing with sockets."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    ruleset = struct.pack("=Q", files)
    if version >= 4:
        ruleset += struct.pack("=Q", 0b11)  # TCP: bind, connect
    if version >= 6:
        ruleset += struct.pack("=Q", 0b11)  # abstract sockets and signals of others
    rules = libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for path, allowed in rights.items():
            try:
                at = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            rule = struct.pack("=Qi", allowed, at)
            failed = libc.syscall(_ADD_RULE, rules, ctypes.c_int(1), rule, ctypes.c_uint32(0))
            os.close(at)
            if failed:
                return False
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(rules)
