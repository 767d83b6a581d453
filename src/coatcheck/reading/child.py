"""Child processes that look at hostile content: started with a clean environment, kept warm, killed when time is up.

A `Pool` hands each call a child of its own: up to `MOST` concurrent calls do not wait for one another. The child
runs `coatcheck.reading.confined.serve` and answers JSON messages; contents reach it as files that we name, in a folder
that is ours alone. A child that dies or overstays costs its caller a clear error, and nobody else anything.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Final

from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, MissingExtra, storage_errors
from coatcheck.redaction import mask
from coatcheck.streams import Content

MOST: Final = 4
KEPT: Final = 2  # idle children of one pool
GRACE: Final = 1.0  # a child that keeps its own time answers before it is killed
_HEADER: Final = struct.Struct(">Q")
_OVERHEAD: Final = 1 << 20
_BOOT: Final = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import importlib;"
    "importlib.import_module(sys.argv[2]).main(sys.argv[3])"
)
_ERRORS: Final[Mapping[str, type[CoatcheckError]]] = {"invalid": InvalidArgument, "limit": LimitExceeded}

Message = dict[str, Any]


class _Ended(Exception):
    """The child closed its end: on its own because it was idle (status 0), or for a reason that the status tells."""

    def __init__(self, status: int) -> None:
        self.status = status


class _Child:
    def __init__(self, module: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="coatcheck-")  # 0700, a name that nobody can guess
        self.holds = ""
        paths = [os.path.abspath(path) for path in sys.path if path]
        try:
            self._process = subprocess.Popen(  # -I: no PYTHON* variables, no user site, no current folder on the path
                [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(paths), module, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self.folder,
                env={"LC_ALL": "C.UTF-8"} | {key: os.environ[key] for key in ("SYSTEMROOT",) if key in os.environ},
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._stdin: IO[bytes] = _there(self._process.stdin)
        self._stdout: IO[bytes] = _there(self._process.stdout)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, message: Message, seconds: float, most: int) -> Message:
        """The child's answer, of at most so many bytes; kills it when time is up."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            body = json.dumps(message).encode()
            self._stdin.write(_HEADER.pack(len(body)) + body)
            self._stdin.flush()
            (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
            if length > most:
                self._process.kill()
                raise _Ended(self._process.wait())
            return dict(json.loads(self._exactly(length)))
        except (OSError, ValueError) as error:
            with suppress(OSError):
                self._process.kill()
            raise _Ended(self._process.wait()) from error
        finally:
            timer.cancel()

    def spool(self, name: str, content: Content) -> None:
        """Write a content where the child can read it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with (
            storage_errors("handing the artifact to a child process"),
            open(os.open(os.path.join(self.folder, name), flags, 0o600), "wb", buffering=0) as out,
        ):
            for chunk in content.chunks():
                out.write(chunk)

    def clear(self) -> None:
        for name in os.listdir(self.folder):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, name))

    def end(self) -> None:
        with suppress(OSError):
            self._process.kill()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _exactly(self, length: int) -> bytes:
        data = self._stdout.read(length)
        if len(data) < length:
            raise _Ended(self._process.wait())
        return data


class Pool:
    """Children of one kind. `holds` names what a child has loaded already: the next call on the same finds it there."""

    def __init__(self, module: str, extra: str, package: str) -> None:
        self._module, self._extra, self._package = module, extra, package
        self._free = threading.Condition()
        self._idle: list[_Child] = []
        self._running = 0
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(
        self, message: Message, contents: Mapping[str, Content], *, holds: str, seconds: float, most_chars: int
    ) -> Message:
        """One answer to one message. A child that holds `holds` gets no contents; any other gets them as files."""
        self._check()
        while True:
            child = self._take(holds)
            kept = False
            try:
                if child.ended:
                    continue
                answer = self._converse(child, message, contents, holds, seconds, most_chars * 6 + _OVERHEAD)
                kept = answer.get("error") != "limit"  # one that ran into a limit may not give back what it took
            except _Ended as ended:
                if ended.status == 0:  # it left because it was idle, just now
                    continue
                raise _told(ended.status, seconds) from None
            finally:
                self._give(child, kept)
            if "error" in answer:
                kind = _ERRORS.get(str(answer["error"]), LimitExceeded)
                raise kind(mask(str(answer.get("message", ""))), hint=str(answer.get("hint", "")))
            return answer

    def close(self) -> None:
        """End the idle children. Those at work end with their calls."""
        with self._free:
            idle, self._idle = self._idle, []
        if os.getpid() == self._owner:
            for child in idle:
                child.end()

    def pids(self) -> list[int]:
        """Process ids of the idle children, for tests and for the curious."""
        with self._free:
            return [child.pid for child in self._idle]

    def _converse(
        self, child: _Child, message: Message, contents: Mapping[str, Content], holds: str, seconds: float, most: int
    ) -> Message:
        allowed = seconds + GRACE
        if holds and child.holds == holds:
            answer = child.ask(message | {"holds": holds, "files": []}, allowed, most)
            if not answer.get("need"):
                return answer
        child.holds = ""
        try:
            for name, content in contents.items():
                child.spool(name, content)
            answer = child.ask(message | {"holds": holds, "files": list(contents)}, allowed, most)
        finally:
            child.clear()
        child.holds = str(answer.get("holds", ""))
        return answer

    def _take(self, holds: str) -> _Child:
        with self._free:
            if os.getpid() != self._owner:  # we were forked: the children are our parent's
                _abandoned.extend(self._idle)
                self._idle, self._running, self._owner = [], 0, os.getpid()
            while not self._idle and self._running >= MOST:
                self._free.wait()
            self._running += 1
            if self._idle:
                warm = [child for child in self._idle if holds and child.holds == holds]
                child = warm[-1] if warm else self._idle[0]
                self._idle.remove(child)
                return child
        try:
            return _Child(self._module)
        except OSError as error:
            self._leave()
            raise LimitExceeded(f"cannot start a child process: {error.strerror}", hint="try again later") from error
        except BaseException:
            self._leave()
            raise

    def _give(self, child: _Child, kept: bool) -> None:
        with self._free:
            kept = kept and len(self._idle) < KEPT
            if kept:
                self._idle.append(child)
        self._leave()
        if not kept:
            child.end()

    def _leave(self) -> None:
        with self._free:
            self._running -= 1
            self._free.notify()

    def _check(self) -> None:
        from importlib.util import find_spec

        if find_spec(self._package) is None:
            raise MissingExtra(self._extra)


_abandoned: list[_Child] = []  # kept, so that their pipes are not closed under the process that owns them


def _told(status: int, seconds: float) -> CoatcheckError:
    if status in (-signal.SIGKILL, -getattr(signal, "SIGXCPU", 24), 1):
        return LimitExceeded(
            f"this took more than {seconds:g} s or too much memory, and was stopped", hint="ask for less"
        )
    return LimitExceeded(
        "the child process that looked at the artifact crashed", hint="ask in another way, or for less"
    )


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
