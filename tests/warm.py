"""Commands that start quickly, for tests that do not test the start of Python.

`command("coatcheck", "ls")` is like `python -m coatcheck ls`, but the process is forked from a
server that has already imported what most commands need. It has its own environment, folder and
standard streams. The test starts this file, as a script: it hands all of that to the server,
forwards signals and ends as the forked process does. Its process id is not the command's. If it is
killed, so is the command.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import Any

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEAD = 4  # bytes of a length or of an exit status


def command(module: str, *arguments: str) -> list[str]:
    """The command for `python -m module arguments`, in a warm process."""
    from tests import warm_server

    return [sys.executable, "-I", "-S", __file__, warm_server.address(), module, *arguments]


def run(address: str, words: list[str]) -> int:
    """Let the server run a command. Return its exit status; if a signal ended it, end by the same
    signal."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        environment = [f"{name}={value}" for name, value in os.environ.items()]
        job = os.fsencode("\0".join([os.getcwd(), str(len(words)), *words, *environment]))
        socket.send_fds(server, [len(job).to_bytes(_HEAD, "big")], [0, 1, 2])
        server.sendall(job)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (
            0,
            1,
            2,
        ):  # only the command keeps them open: their reader must see them close
            os.dup2(null, stream)
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        answer = server.recv(_HEAD)
    status = int.from_bytes(answer, "big", signed=True) if answer else 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(address: str) -> list[str] | None:
    """Fork a process for each command, until stdin closes. Return None then; in a forked process,
    return its words."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[socket.socket, int] = {}
    os.write(1, b"ready\n")
    while True:
        waiting: list[Any] = [0, woken, listener, *clients]
        ready, _, _ = select.select(waiting, [], [])
        if 0 in ready:
            for pid in clients.values():
                os.kill(pid, signal.SIGKILL)
            return None
        for client in [one for one in clients if one in ready]:
            _obey(client, clients)
        if woken in ready:
            os.read(woken, 1 << 16)
            _reap(clients)
        if listener in ready:
            client, _ = listener.accept()
            words, streams = _received(client)
            clients[client] = pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for one in (listener, *clients):
                    one.close()
                for end in (woken, waker, *streams):
                    os.close(end)
                return words
            for stream in streams:
                os.close(stream)


def _received(client: socket.socket) -> tuple[list[str], list[int]]:
    """Receive a command with its streams, environment and folder, and adopt the last two."""
    head, streams, _, _ = socket.recv_fds(client, _HEAD, 3)
    job, size = b"", int.from_bytes(head, "big")
    while len(job) < size:
        job += client.recv(size - len(job))
    folder, count, *words = os.fsdecode(job).split("\0")
    environment = [one.partition("=") for one in words[int(count) :]]
    os.environ.clear()
    os.environ.update({name: value for name, _, value in environment})
    os.chdir(folder)
    return words[: int(count)], streams


def _obey(client: socket.socket, clients: dict[socket.socket, int]) -> None:
    """Forward the signals that a client sends. A client that is gone was killed."""
    for number in client.recv(64) or [signal.SIGKILL]:
        os.kill(clients[client], number)
        if number == signal.SIGKILL:
            client.close()
            del clients[client]


def _reap(clients: dict[socket.socket, int]) -> None:
    """Tell the clients of processes that ended how they ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for client in [one for one, its in clients.items() if its == pid]:
            code = os.waitstatus_to_exitcode(status)
            try:
                client.sendall(code.to_bytes(_HEAD, "big", signed=True))
            except BrokenPipeError:
                pass
            client.close()
            del clients[client]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
