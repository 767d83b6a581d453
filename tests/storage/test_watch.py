"""A call that waits on a socket ends at its deadline, and the watcher thread runs only while it is
needed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from coatcheck.storage import retry
from coatcheck.storage.retry import Watch


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    monkeypatch.setattr(retry, "_LOOK", 0.01)
    monkeypatch.setattr(retry, "_IDLE", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)  # the test fails with this timeout if nothing ends the call
        yield ours, theirs


def watchers() -> list[threading.Thread]:
    return [
        one for one in threading.enumerate() if one.name == "coatcheck-watch" and one.is_alive()
    ]


def test_the_socket_of_a_call_is_shut_down_at_its_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    with Watch().over(ours, time.monotonic() + 0.05):
        assert ours.recv(1) == b""


def test_a_call_that_ends_in_time_keeps_its_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    watching = Watch()
    for _ in range(50):
        with watching.over(ours, time.monotonic() + 20):
            theirs.send(b"x")
            assert ours.recv(1) == b"x"
    with watching.over(ours, time.monotonic() + 0.02):
        pass
    other, _other = socket.socketpair()
    with other, _other, watching.over(other, time.monotonic() + 0.05):
        assert other.recv(1) == b""  # by now the earlier deadline would have shut it down
    theirs.send(b"y")
    assert ours.recv(1) == b"y"


def test_the_watcher_ends_when_idle_and_starts_again(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    before, watching = set(watchers()), Watch()
    with watching.over(ours, time.monotonic() + 20):
        (watcher,) = set(watchers()) - before
    watcher.join(20)
    assert not watcher.is_alive()
    with watching.over(ours, time.monotonic() + 0.05):
        assert ours.recv(1) == b""


def test_a_child_process_has_its_own_watcher(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    watching = Watch()
    with watching.over(theirs, time.monotonic() + 20):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with watching.over(ours, time.monotonic() + 0.05):
                    code = 0 if ours.recv(1) == b"" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
