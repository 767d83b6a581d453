"""Child processes for hostile content: the pool in the parent, and the confinement inside the child.

A `Pool` gives each call a child of its own, started with a clean environment and kept warm. The child runs `serve` and
answers JSON messages. It gets contents as files in a private folder, or piece by piece as it asks for them. A child
that dies or takes too long is a clear error for its caller and affects nobody else. Every wait for a child has a limit.

The child gives up every right that its work does not need: memory, time, files and writing are limited except on
Windows; on Linux, Landlock leaves it nothing but its own folder and no network. This comes on top of what the library
that does the work guarantees.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import IO, Any, Final

from coatcheck.content import Content
from coatcheck.errors import (
    CoatcheckError,
    InvalidArgument,
    InvalidPointer,
    LimitExceeded,
    MissingExtra,
    TooLarge,
    storage_errors,
)
from coatcheck.redaction import mask

if sys.platform != "win32":
    import resource

MAX_BUSY: Final = 4
MAX_IDLE: Final = 2  # idle children of one pool
GRACE: Final = 1.0  # a child that watches its own time answers before it is killed
QUEUE: Final = 60.0  # seconds to wait for a free child
REAP: Final = 5.0  # seconds to wait for a killed child
_MAX_READ: Final = 16 << 20  # maximum bytes of one read by a child
_SLICE: Final = 1 << 16
_HEADER: Final = struct.Struct(">Q")
_OVERHEAD: Final = 1 << 20
_LONGEST_MESSAGE: Final = 600  # characters of an error
FORGET: Final = 60.0  # seconds without a message until loaded data is dropped
LEAVE: Final = 300.0  # further seconds until the process ends
_MAX_REQUEST: Final = 1 << 24
_WATCH: Final = 1.0

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # equal on every architecture
_NO_NEW_PRIVILEGES = 38
_READ, _LIST, _REMOVE = 1 << 2, 1 << 3, 1 << 5
_BOOT: Final = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import importlib;"
    "importlib.import_module(sys.argv[2]).main(sys.argv[3])"
)
_ERRORS: Final[Mapping[str, type[CoatcheckError]]] = {
    "invalid": InvalidArgument,
    "limit": LimitExceeded,
    **{kind.code: kind for kind in (InvalidArgument, InvalidPointer, LimitExceeded, TooLarge)},
}

Message = dict[str, Any]


class _Ended(Exception):
    """The child closed its end: because it was idle (status 0), or for another reason given by the status."""

    def __init__(self, status: int) -> None:
        self.status = status


class _Child:
    def __init__(self, module: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="coatcheck-")  # mode 0700, unguessable name
        self.loaded = ""
        paths = [os.path.abspath(path) for path in sys.path if path]
        try:
            self._process = subprocess.Popen(  # -I: no PYTHON* variables, no user site, no current folder on the path
                [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(paths), module, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self.folder,
                env={"LC_ALL": "C.UTF-8"} | {key: os.environ[key] for key in ("SYSTEMROOT",) if key in os.environ},
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._stdin: IO[bytes] = _open_pipe(self._process.stdin)
        self._stdout: IO[bytes] = _open_pipe(self._process.stdout)
        if sys.platform != "win32":
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe.fileno(), False)
        with _lock:
            _alive.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, message: Message, seconds: float, max_bytes: int, served: Sequence[Content] = ()) -> Message:
        """Return the child's answer, at most `max_bytes` long; kill the child when time is up. It may read the `served`
        contents while it works."""
        deadline = monotonic() + seconds
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            self._send(json.dumps(message).encode(), deadline)
            while True:
                reply = dict(json.loads(self._receive(max_bytes, deadline)))
                if "read" not in reply:
                    break
                self._send(_piece(served, reply["read"]), deadline)
            if reply.pop("raw", False):
                reply["raw"] = self._receive(max_bytes, deadline)
            return reply
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, CoatcheckError):  # a content could not be read
                raise
            raise self._ended() from error
        finally:
            timer.cancel()

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()

    def spool(self, name: str, content: Content) -> None:
        """Write a content to a file for the child."""
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
        self.kill()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):  # the kernel may delay it: do not wait
            self._process.wait(REAP)
        shutil.rmtree(self.folder, ignore_errors=True)
        with _lock:
            _alive.discard(self)

    def _ended(self) -> _Ended:
        """Return how the child ended. A child that closed its pipe but still runs is killed."""
        try:
            return _Ended(self._process.wait(GRACE))
        except subprocess.TimeoutExpired:
            self.kill()
        try:
            return _Ended(self._process.wait(REAP))
        except subprocess.TimeoutExpired:
            return _Ended(-signal.SIGTERM)

    def _send(self, body: bytes, deadline: float) -> None:
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            self._wait_for(self._stdin, select.POLLOUT if sys.platform != "win32" else 0, deadline)
            view = view[self._stdin.write(view[:_SLICE]) or 0 :]

    def _receive(self, max_bytes: int, deadline: float) -> bytes:
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        if length > max_bytes:
            self.kill()
            raise self._ended()
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._wait_for(self._stdout, select.POLLIN if sys.platform != "win32" else 0, deadline)
            piece = self._stdout.read(min(length - len(data), 1 << 20))
            if piece is not None:
                data += piece
            if piece == b"":
                raise self._ended()
        return bytes(data)

    def _wait_for(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Wait until the pipe is ready. At the deadline a timer kills the child, which ends the wait; if that
        fails, give up a little later."""
        if sys.platform == "win32":
            return  # no poll for pipes there: only the timer ends a call
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, deadline + REAP - monotonic()) * 1000):
            self.kill()
            raise _Ended(-signal.SIGKILL)


_lock = threading.Lock()
_alive: set[_Child] = set()


def kill_all() -> None:
    """Kill every child of this process, busy or idle, before the process ends. Callers get an error."""
    with _lock:
        alive = list(_alive)
    for child in alive:
        child.kill()


class Pool:
    """Children of one kind, at most `MAX_BUSY` busy at a time. A child keeps what it has loaded for the next call."""

    def __init__(self, module: str, extra: str = "", package: str = "") -> None:
        self._module, self._extra, self._package = module, extra, package
        self._free = threading.Condition()
        self._idle: list[_Child] = []
        self._running = 0
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(
        self,
        message: Message,
        contents: Mapping[str, Content],
        *,
        loaded: str,
        seconds: float,
        max_chars: int,
        served: Sequence[Content] = (),
        limit: str = "",
        hint: str = "ask for less",
    ) -> Message:
        """Return the answer to one message. A child that has `loaded` already gets no contents; any other gets them as
        files. The child may read the `served` contents piece by piece. `limit` and `hint` are for the error of a call
        that exceeds a limit."""
        self._check()
        while True:
            child, is_new = self._acquire(loaded)
            kept = False
            try:
                if child.ended and not is_new:
                    continue
                answer = self._converse(child, message, contents, loaded, seconds, max_chars * 6 + _OVERHEAD, served)
                # A child that ran into a limit may not have freed its memory.
                kept = answer.get("error") != "limit" and not answer.pop("leaves", False)
            except _Ended as ended:
                if ended.status == 0 and not is_new:  # it just left because it was idle
                    continue
                raise _failure(ended.status, limit or f"{seconds:g} s or too much memory", hint) from None
            finally:
                self._return(child, kept)
            if "error" in answer:
                kind = _ERRORS.get(str(answer["error"]), LimitExceeded)
                text = mask(str(answer.get("message", "")))  # before it is cut
                text = text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"
                raise kind(text, hint=mask(str(answer.get("hint", ""))))
            return answer

    def close(self) -> None:
        """End the idle children. Busy ones end with their calls."""
        with self._free:
            idle, self._idle = self._idle, []
        if os.getpid() == self._owner:
            for child in idle:
                child.end()

    def pids(self) -> list[int]:
        """Process ids of the idle children."""
        with self._free:
            return [child.pid for child in self._idle]

    def _converse(
        self,
        child: _Child,
        message: Message,
        contents: Mapping[str, Content],
        loaded: str,
        seconds: float,
        max_bytes: int,
        served: Sequence[Content],
    ) -> Message:
        allowed = seconds + GRACE
        if loaded and child.loaded == loaded:
            answer = child.ask(message | {"loaded": loaded, "files": []}, allowed, max_bytes, served)
            if not answer.get("need"):
                return answer
        child.loaded = ""
        try:
            for name, content in contents.items():
                child.spool(name, content)
            answer = child.ask(message | {"loaded": loaded, "files": list(contents)}, allowed, max_bytes, served)
        finally:
            if contents:
                child.clear()
        child.loaded = str(answer.get("loaded", ""))
        return answer

    def _acquire(self, loaded: str) -> tuple[_Child, bool]:
        """Take a child, and return whether it is new."""
        deadline = monotonic() + QUEUE
        with self._free:
            if os.getpid() != self._owner:  # after a fork the children belong to our parent
                _abandoned.extend(self._idle)
                self._idle, self._running, self._owner = [], 0, os.getpid()
            while not self._idle and self._running >= MAX_BUSY:
                if not self._free.wait(deadline - monotonic()) and monotonic() >= deadline:
                    raise LimitExceeded("too many calls of this kind are running", hint="try again later")
            self._running += 1
            if self._idle:
                warm = [child for child in self._idle if loaded and child.loaded == loaded]
                child = warm[-1] if warm else self._idle[0]
                self._idle.remove(child)
                return child, False
        try:
            return _Child(self._module), True
        except OSError as error:
            self._leave()
            raise LimitExceeded(f"cannot start a child process: {error.strerror}", hint="try again later") from error
        except BaseException:
            self._leave()
            raise

    def _return(self, child: _Child, kept: bool) -> None:
        with self._free:
            kept = kept and len(self._idle) < MAX_IDLE
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

        if self._package and find_spec(self._package) is None:
            raise MissingExtra(self._extra)


_abandoned: list[_Child] = []  # kept, so that the pipes of the parent's children are not closed


def _piece(served: Sequence[Content], requested: Sequence[int]) -> bytes:
    """Read what a child asks for. The child may be hostile, so its numbers are checked."""
    number, offset, length = map(int, requested)
    if not (0 <= number < len(served) and offset >= 0 and 0 <= length <= _MAX_READ):
        raise ValueError("a read that is out of range")
    return served[number].read(offset, length)


def _failure(status: int, limit: str, hint: str) -> CoatcheckError:
    if status in (-signal.SIGKILL, -getattr(signal, "SIGXCPU", 24), 1):
        return LimitExceeded(f"this took more than {limit} and was stopped", hint=hint)
    return LimitExceeded("the child process that read the artifact crashed", hint="ask in another way, or for less")


def _open_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class Refused(Exception):
    """An error for the parent to raise: `invalid` for a wrong request, `limit` for one that takes too much."""

    def __init__(self, error: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.answer = {"error": error, "message": message, "hint": hint}


def serve(
    folder: str, answer: Callable[[Message], Message], forget: Callable[[], None], also: Sequence[str] = ()
) -> None:
    """Answer messages until the parent closes its end, or no message came for a while. The paths in `also` can be read
    besides the folder."""
    parent = os.getppid()
    confine(folder, also)
    threading.Thread(
        target=_watch, args=(parent,), daemon=True
    ).start()  # after `confine`, since a thread inherits its limits
    requests = sys.stdin.buffer
    while True:
        if not _readable(requests, FORGET):
            forget()
            if not _readable(requests, LEAVE):
                break
        header = requests.read(_HEADER.size)
        if len(header) < _HEADER.size or (length := _HEADER.unpack(header)[0]) > _MAX_REQUEST:
            break
        try:
            reply = answer(json.loads(requests.read(length)))
        except Refused as refused:
            reply = refused.answer
        except MemoryError:
            forget()
            reply = {"error": "limit", "message": "this takes more memory than allowed", "hint": "ask for less"}
        raw = reply.get("raw")
        _send(json.dumps(reply | {"raw": True} if raw is not None else reply).encode())
        if raw is not None:
            _send(raw)
    for name in os.listdir(folder):  # if the parent died, its copies of contents must go
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))


def read_piece(number: int, offset: int, length: int) -> bytes:
    """Read bytes of a content that the parent serves. Threads wait for one another."""
    with _asking:
        _send(json.dumps({"read": [number, offset, length]}).encode())
        header = sys.stdin.buffer.read(_HEADER.size)
        if len(header) < _HEADER.size:
            os._exit(0)  # the parent is gone
        return sys.stdin.buffer.read(_HEADER.unpack(header)[0])


_asking = threading.Lock()


def _send(body: bytes) -> None:
    out = sys.stdout.buffer
    out.write(_HEADER.pack(len(body)))
    out.write(body)
    out.flush()


def _watch(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of work."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os._exit(0)


def confine(folder: str, also: Sequence[str] = ()) -> None:
    if sys.platform != "win32":
        for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 128), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        _landlock({folder: _READ | _LIST | _REMOVE} | dict.fromkeys(("/dev/urandom", *also), _READ))


def allow(memory: int, seconds: float, threads: int) -> None:
    """Limit the next answer. RLIMIT_NPROC is not used: it counts the threads of all the user's processes."""
    if sys.platform == "win32":
        return
    used = time.process_time()
    with suppress(ValueError, OSError):  # a lower hard limit applies already
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds * threads) + 2, resource.RLIM_INFINITY))


def _readable(pipe: Any, seconds: float) -> bool:
    if sys.platform == "win32":  # no select for pipes there
        return True
    return bool(select.select([pipe], [], [], seconds)[0])


def _landlock(rights: Mapping[str, int]) -> bool:
    """Restrict this process to these rights on files and to no sockets; return whether that worked."""
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
