"""The start of a worker process: give up rights, then become the interpreter's binary.

This file is run, not imported: `python -I -S -B worker.py FOLDER SECCOMP FILTER BINARY PATHS…`.
FOLDER has `landlock.py`; SECCOMP is the number of that system call, 0 if there is none, and FILTER
its program in hex. PATHS are what the binary reads, besides the libraries of the system; the first
one loads it. With `--report` before FOLDER it prints what worked and ends.

It imports as little as it can: each worker starts with it, and that takes longer than most
programs (11 ms of CPU time; 31 ms with the modules that import `typing`, `re` and `dataclasses`).
"""

import ctypes
import os
import resource
import struct
import sys

MEMORY = 1 << 30  # bytes of address space; the interpreter's own limit for a program is lower
CPU = 8  # seconds; likewise
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
DIE_WITH_PARENT, KILL = 1, 9
NO_NEW_PRIVILEGES = 38
SET_FILTER, ALL_THREADS, INSTRUCTION = 1, 1, 8


def limit() -> None:
    """Limit what this process, and the program that it becomes, can use."""
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, CPU),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # a lower limit applies, or the system has none
            pass


def confine(number: int, code: bytes, binary: str, others: list[str]) -> tuple[bool, bool]:
    """Leave this process the binary and the system's libraries, and no sockets and no other
    processes. Return whether each of the two worked."""
    import landlock  # type: ignore[import-not-found]  # from FOLDER

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(DIE_WITH_PARENT, KILL, 0, 0, 0)
    rights = dict.fromkeys(LIBRARIES, landlock.READ)
    rights.update(dict.fromkeys([binary, *others], landlock.READ | landlock.EXECUTE))
    has_files = landlock.restrict(rights)
    if not number or libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return has_files, False
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HxxxxxxP", len(code) // INSTRUCTION, ctypes.addressof(buffer))
    return has_files, libc.syscall(number, SET_FILTER, ALL_THREADS, filters) == 0


def main(arguments: list[str]) -> None:
    is_report = arguments[0] == "--report"
    folder, number, code, binary, *others = arguments[1:] if is_report else arguments
    command = [binary]
    if "--" in others:
        place = others.index("--")
        others, command = others[:place], [binary, *others[place + 1 :]]
    sys.path.insert(0, folder)
    os.chdir("/")
    limit()
    worked = (False, False)
    if sys.platform == "linux":
        worked = confine(int(number), bytes.fromhex(code), binary, others)
    if is_report:
        os.write(1, " ".join(str(int(one)) for one in worked).encode())
    else:
        os.execve(binary, command, {})


if __name__ == "__main__":
    main(sys.argv[1:])
