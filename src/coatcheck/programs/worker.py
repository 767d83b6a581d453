"""The start of a worker process: give up rights, then become the interpreter's binary.

This file is run, not imported: `python -I -S -B worker.py ROOT BINARY ARGUMENTS…`, where ROOT is
the folder with the package. With `--report` as the only argument after ROOT it prints what the
system was able to do. It needs the standard library alone.

A worker ends with its parent, writes no file, and its memory, CPU time and open files are limited.
On Linux it can open and execute nothing but the binary and the system's libraries (Landlock), and
has no sockets and no other processes (seccomp).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from contextlib import suppress

MEMORY = 1 << 30
"""Address space in bytes. The interpreter's own limit on what a program uses is lower."""
CPU = 8
"""Seconds. The interpreter's own limit is lower."""

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_LOADER = re.compile(rb"/[\w./+-]*/ld[\w.+-]*\.so[\w.]*(?=\0)")
_DIE_WITH_PARENT = 1  # prctl


def limit() -> None:
    """Limit what this process, and the program that it becomes, can use."""
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, CPU),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a lower limit applies, or the system has none
            resource.setrlimit(kind, (value, value))


def confine(binary: str) -> dict[str, bool]:
    """Confine this process, so that it can still become `binary`; return what worked."""
    if sys.platform != "linux":
        return {"files": False, "calls": False}
    from coatcheck.confinement import landlock, seccomp

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    rights = dict.fromkeys(_LIBRARIES, landlock.READ)
    rights |= dict.fromkeys((binary, *_loader(binary)), landlock.READ | landlock.EXECUTE)
    return {
        "files": landlock.restrict(rights),
        "calls": seccomp.forbid_sockets_and_processes(may_execute=True),
    }


def _loader(binary: str) -> list[str]:
    """The program that loads the binary, which its first bytes name."""
    with open(binary, "rb") as file:
        found = _LOADER.search(file.read(4_096))
    return [os.path.realpath(os.fsdecode(found[0]))] if found else []


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    limit()
    if sys.argv[2] == "--report":
        sys.stdout.write(json.dumps(confine(sys.executable)))
    else:
        confine(sys.argv[2])
        os.execv(sys.argv[2], sys.argv[2:])
