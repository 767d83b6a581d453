"""The process between a proxy and the command that it runs. It ends the command when the proxy
ends.

Run as a script, `process_group.py FD COMMAND ARGS…`. It uses only the standard library, to start
quickly. The command and its children share a process group, unless they leave it as daemons do. FD
is a pipe that only the proxy has open. When it closes, for whatever reason the proxy ended, the
group gets SIGTERM, and SIGKILL after a grace period. Children that are left over when the command
ends by itself are ended the same way.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.02
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    lifeline, command = int(arguments[0]), arguments[1:]
    os.set_inheritable(lifeline, False)
    if os.getpgrp() != os.getpid():
        os.setsid()
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    received: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    die_with_parent = _die_with_parent()
    child = os.fork()
    if child == 0:
        _become(command, die_with_parent)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # only the command has the pipes: it and the proxy must see them close
    os.dup2(null, 1)
    while True:
        status = _ended(child)
        if status is not None:
            return _end_group(child, status)
        ready, _, _ = select.select([lifeline, woken], [], [])
        if woken in ready:
            _drain(woken)
        if lifeline in ready or received:
            return _end_group(child, None)


def _become(command: list[str], die_with_parent: object) -> None:
    """Replace this process with the command. Never returns."""
    parent = os.getppid()
    try:
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if callable(die_with_parent):
            die_with_parent(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"coatcheck: {command[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


def _die_with_parent() -> object:
    """Return `prctl`, with which Linux ends the command if this process is killed; None
    elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        return ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None


def _end_group(child: int, status: int | None) -> int:
    """End all other processes of the group. Return the exit status of the command."""
    if status is not None and not _others():
        return status
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        status = _ended(child) if status is None else status
        if status is not None and not _others():
            return status
        time.sleep(_POLL)
    while others := _others():
        for one in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        status = _ended(child) if status is None else status
        time.sleep(_POLL)
    return 128 + signal.SIGKILL if status is None else status


def _others() -> list[int]:
    """The other processes of the group that are still running."""
    ours, group = os.getpid(), os.getpgrp()
    return [
        pid
        for pid, its_group, state in _processes()
        if its_group == group and pid != ours and state[:1] != "Z"
    ]


def _processes() -> list[tuple[int, int, str]]:
    """All processes: id, group and state."""
    found = []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        names = []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as source:
                state, _, group = source.read().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it has just ended
        found.append((int(name), int(group), state.decode()))
    return found or _processes_from_ps()


def _processes_from_ps() -> list[tuple[int, int, str]]:
    import subprocess

    try:
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) >= 3]


def _ended(child: int) -> int | None:
    try:
        found, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return 128 + signal.SIGKILL
    if not found:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _drain(woken: int) -> None:
    try:
        while os.read(woken, 4096):
            pass
    except BlockingIOError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
