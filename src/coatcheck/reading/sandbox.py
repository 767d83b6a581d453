"""Child processes for hostile content: the pool in the parent, and the confinement inside the
child.

A `Pool` gives each call a child of its own, started with a clean environment and kept warm. The
child runs `serve` and answers JSON messages. It gets contents as files in a private folder, or
piece by piece as it asks for them. A child that dies or takes too long is a clear error for its
caller and affects nobody else. Every wait for a child has a limit.

The child gives up every right that its work does not need. Memory, time, open files and writing are
limited everywhere. On Linux, Landlock leaves it no files but those of its own folder, and a seccomp
filter no sockets and no other processes, each where the kernel has it (`Confinement`). This comes
on top of what the library that does the work guarantees.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from time import monotonic
from typing import IO, Any, Final

from coatcheck.confinement import landlock
from coatcheck.confinement.seccomp import forbid_sockets_and_processes
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
from coatcheck.refs import Ref

MAX_BUSY: Final = 4
MAX_IDLE: Final = 2  # idle children of one pool
GRACE: Final = 1.0  # a child that watches its own time answers before it is killed
QUEUE: Final = 60.0  # seconds to wait for a free child
START: Final = 20.0  # seconds for a new child to start
REAP: Final = 5.0  # seconds to wait for a killed child
_MAX_READ: Final = 16 << 20  # maximum bytes of one read by a child
_MAX_FRAMES: Final = 8 << 20
# All that a child may know about an artifact.
_REF_FIELDS: Final = ("artifact_id", "size_bytes", "media_type", "kind", "pointer_length")
_SLICE: Final = 1 << 16
_HEADER: Final = struct.Struct(">Q")
_OVERHEAD: Final = 1 << 20
_LONGEST_MESSAGE: Final = 600  # characters of an error
_LONGEST_RAW: Final = 4_000  # before secrets are masked in it
FORGET: Final = 60.0  # seconds without a message until loaded data is dropped
LEAVE: Final = 300.0  # further seconds until the process ends
_MAX_REQUEST: Final = 1 << 24
_WATCH: Final = 1.0

_BOOT: Final = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import importlib;"
    "importlib.import_module(sys.argv[2]).main(sys.argv[3])"
)
_LESS: Final = "ask for less"
_ERRORS: Final = {
    kind.code: kind for kind in (InvalidArgument, InvalidPointer, LimitExceeded, TooLarge)
}

Message = dict[str, Any]


class _Ended(Exception):
    """The child closed its end. `was_idle` is True if it had not begun to work on the message, and
    had time left."""

    def __init__(self, status: int, was_idle: bool = False) -> None:
        self.status, self.was_idle = status, was_idle


class _Child:
    """A child process as its parent sees it. `is_usable` is True if it can take another call."""

    def __init__(self, module: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="coatcheck-")  # mode 0700, unguessable name
        self.loaded = ""
        self.is_new, self.is_usable = True, False
        self._is_idle, self._deadline = True, 0.0
        paths = [os.path.abspath(path) for path in sys.path if path]
        try:
            # -I: no PYTHON* variables, no user site, no current folder on the path
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(paths), module, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self.folder,
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        with _lock:
            _alive.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def call(
        self,
        message: Message,
        seconds: float,
        max_bytes: int,
        contents: Sequence[Content],
        files: Mapping[str, Content],
    ) -> Message:
        """Return the child's answer to a message. A child that has not `loaded` what the message
        names gets the files first."""
        loaded = message["loaded"]
        if loaded and self.loaded == loaded:
            answer = self._ask(message | {"files": []}, seconds, max_bytes, contents)
            if not answer.get("need"):
                return answer
        self.loaded = ""
        try:
            for name, content in files.items():
                self._spool(name, content)
            answer = self._ask(message | {"files": list(files)}, seconds, max_bytes, contents)
        finally:
            for name in files:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.folder, name))
        self.loaded = str(answer.get("loaded", ""))
        return answer

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()

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

    def _ask(
        self, message: Message, seconds: float, max_bytes: int, contents: Sequence[Content]
    ) -> Message:
        """Send a message and return the answer, at most `max_bytes` long; kill the child when time
        is up. It may read the contents while it works. Its time runs from when it begins; a new
        child gets extra time to start."""
        self._is_idle, self._deadline = True, monotonic() + seconds + START * self.is_new
        try:
            self._send(json.dumps(message).encode())
            while True:
                reply = dict(json.loads(self._receive(max_bytes)))
                if "begins" in reply:
                    self._is_idle, self._deadline = False, monotonic() + seconds
                elif "read" in reply:
                    self._send(_piece(contents, reply["read"]))
                else:
                    break
            if reply.pop("raw", False):
                reply["raw"] = self._receive(max_bytes)
            return reply
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, CoatcheckError):  # a content could not be read
                raise
            raise self._ended() from error

    def _spool(self, name: str, content: Content) -> None:
        """Write a content to a file for the child."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with (
            storage_errors("handing the artifact to a child process"),
            open(os.open(os.path.join(self.folder, name), flags, 0o600), "wb", buffering=0) as out,
        ):
            for chunk in content.chunks():
                out.write(chunk)

    def _ended(self) -> _Ended:
        """Return how the child ended. A child that closed its pipe but still runs is killed."""
        was_idle = self._is_idle and monotonic() < self._deadline
        try:
            return _Ended(self._process.wait(GRACE), was_idle)
        except subprocess.TimeoutExpired:
            self.kill()
        try:
            return _Ended(self._process.wait(REAP))
        except subprocess.TimeoutExpired:
            return _Ended(-signal.SIGTERM)

    def _send(self, body: bytes) -> None:
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            self._wait_for(self._stdin, select.POLLOUT)
            view = view[self._stdin.write(view[:_SLICE]) or 0 :]

    def _receive(self, max_bytes: int) -> bytes:
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > max_bytes:
            self.kill()
            raise self._ended()
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._wait_for(self._stdout, select.POLLIN)
            piece = self._stdout.read(min(length - len(data), 1 << 20))
            if piece is not None:
                data += piece
            if piece == b"":
                raise self._ended()
        return bytes(data)

    def _wait_for(self, pipe: IO[bytes], event: int) -> None:
        """Wait until the pipe is ready. At the deadline, kill the child."""
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, self._deadline - monotonic()) * 1000):
            self.kill()
            raise _Ended(-signal.SIGKILL)


_lock = threading.Lock()
_alive: set[_Child] = set()
_abandoned: list[_Child] = []  # kept, so that the pipes of the parent's children are not closed


def kill_all() -> None:
    """Kill every child of this process, busy or idle, before the process ends. Calls at work get an
    error."""
    with _lock:
        for child in _alive:
            child.kill()


class Pool:
    """Children of one kind, at most `MAX_BUSY` busy at a time. A child keeps what it has loaded for
    the next call.

    `module` is what a child runs: its `main(folder)` calls `serve`. `margin` is address space for
    the interpreter and libraries, added to the memory of a call. `extra` is the extra that installs
    `package`."""

    def __init__(self, module: str, *, margin: int = 0, extra: str = "", package: str = "") -> None:
        self._module, self._margin, self._extra, self._package = module, margin, extra, package
        self._free = threading.Condition()
        self._idle: list[_Child] = []
        self._running = 0
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def is_installed(self) -> bool:
        """Whether the package that the child needs is there."""
        return not self._package or find_spec(self._package) is not None

    def ask(
        self,
        arguments: Message,
        *,
        seconds: float,
        max_chars: int,
        memory: int = 1 << 30,
        cpu_seconds: float | None = None,
        contents: Sequence[Content] = (),
        files: Mapping[str, Content] | None = None,
        loaded: str = "",
        limit: str = "",
        hint: str = _LESS,
    ) -> Message:
        """Return the answer to one call. The child may read the contents piece by piece. It gets
        the `files` unless it has `loaded` them before. `limit` and `hint` are for the error of a
        call that exceeds a limit."""
        if not self.is_installed:
            raise MissingExtra(self._extra)
        message = {
            "arguments": arguments,
            "memory": memory + self._margin,
            "seconds": seconds if cpu_seconds is None else cpu_seconds,
            "contents": list(map(_metadata, contents)),
            "loaded": loaded,
        }
        limit = limit or f"{seconds:g} s or too much memory"
        while True:
            with self._borrowed(loaded) as child:
                if child.has_ended and not child.is_new:
                    continue
                try:
                    answer = child.call(
                        message, seconds + GRACE, max_chars * 6 + _OVERHEAD, contents, files or {}
                    )
                except _Ended as ended:
                    if ended.was_idle and not child.is_new:
                        continue  # it left, or was killed, before the message reached it
                    raise _failure(ended.status, limit, hint) from None
                # A child that ran into a limit may not have freed its memory.
                leaves = answer.pop("leaves", False)
                child.is_usable = not leaves and answer.get("error") != LimitExceeded.code
                child.is_new = False
            if "error" in answer:
                raise _error_in(answer)
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

    @contextmanager
    def _borrowed(self, loaded: str) -> Iterator[_Child]:
        """Take an idle child or start one. Afterwards it is kept if it is usable, else ended."""
        child = self._take(loaded)
        try:
            if child is None:
                child = _Child(self._module)
            child.is_usable = False
            yield child
        except OSError as error:
            if child is not None:
                raise
            raise LimitExceeded(
                f"cannot start a child process: {error.strerror}", hint="try again later"
            ) from error
        finally:
            with self._free:
                self._running -= 1
                self._free.notify()
                if child is not None and child.is_usable and len(self._idle) < MAX_IDLE:
                    self._idle.append(child)
                    child = None
            if child is not None:
                child.end()

    def _take(self, loaded: str) -> _Child | None:
        """Wait until a child may run. Return an idle one, preferably one that has `loaded` this, or
        None."""
        deadline = monotonic() + QUEUE
        with self._free:
            if os.getpid() != self._owner:  # after a fork the children belong to our parent
                _abandoned.extend(self._idle)
                self._idle, self._running, self._owner = [], 0, os.getpid()
            while not self._idle and self._running >= MAX_BUSY:
                if not self._free.wait(deadline - monotonic()) and monotonic() >= deadline:
                    raise LimitExceeded(
                        "too many calls of this kind are running", hint="try again later"
                    )
            self._running += 1
            if not self._idle:
                return None
            warm = [child for child in self._idle if loaded and child.loaded == loaded]
            child = warm[-1] if warm else self._idle[0]
            self._idle.remove(child)
            return child


def _metadata(content: Content) -> Message:
    ref = {name: getattr(content.ref, name) for name in _REF_FIELDS} | {"session_id": ""}
    frames = content.frames if len(content.frames) <= _MAX_FRAMES else b""
    return {"ref": ref, "frames": base64.b64encode(frames).decode()}


def _piece(contents: Sequence[Content], requested: Sequence[int]) -> bytes:
    """Read what a child asks for. The child may be hostile, so its numbers are checked."""
    number, offset, length = map(int, requested)
    if not (0 <= number < len(contents) and offset >= 0 and 0 <= length <= _MAX_READ):
        raise ValueError("a read that is out of range")
    return contents[number].read(offset, length)


def _error_in(answer: Message) -> CoatcheckError:
    """The error that a child reports."""
    text = mask(str(answer.get("message", "")))  # before it is cut
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "…"
    kind = _ERRORS.get(str(answer["error"]), LimitExceeded)
    return kind(text, hint=mask(str(answer.get("hint", ""))))


def _failure(status: int, limit: str, hint: str) -> CoatcheckError:
    if status in (-signal.SIGKILL, -signal.SIGXCPU, 1):
        return LimitExceeded(f"this took more than {limit} and was stopped", hint=hint)
    return LimitExceeded(
        "the child process that read the artifact crashed",
        hint="read it another way, or ask for less",
    )


def serve(
    folder: str,
    answer: Callable[[Message, list[Content]], Message],
    *,
    forget: Callable[[], None] = lambda: None,
    also: Sequence[str] = (),
) -> None:
    """Answer messages until the parent closes its end, or no message came for a while. `answer` may
    raise one of our errors, which the parent then raises. The paths in `also` can be read besides
    the folder."""
    global confinement
    parent = os.getppid()
    confinement = confine(folder, also)
    # a thread inherits the limits set before
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    while (request := _next_request(forget)) is not None:
        try:
            message = json.loads(request)
            _send(b'{"begins": true}')
            _allow(message["memory"], message["seconds"])
            contents = [_content(number, one) for number, one in enumerate(message["contents"])]
            reply = answer(message, contents)
        except CoatcheckError as error:
            reply = {
                "error": error.code,
                "message": error.message[:_LONGEST_RAW],
                "hint": error.hint,
            }
        except MemoryError:
            forget()
            reply = {
                "error": LimitExceeded.code,
                "message": "this takes more memory than allowed",
                "hint": _LESS,
            }
        raw = reply.get("raw")
        _send(json.dumps(reply | {"raw": True} if raw is not None else reply).encode())
        if raw is not None:
            _send(raw)
    for name in os.listdir(folder):  # if the parent died, its copies of contents must go
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))


def _next_request(forget: Callable[[], None]) -> bytes | None:
    """Wait for the next message. None if the parent has closed its end, or sends none."""
    requests = sys.stdin.buffer
    if not select.select([requests], [], [], FORGET)[0]:
        forget()
        if not select.select([requests], [], [], LEAVE)[0]:
            return None
    header = requests.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    return requests.read(length) if length <= _MAX_REQUEST else None


def _content(number: int, described: Message) -> Content:
    """A content of the parent."""
    frames = base64.b64decode(described["frames"])
    return Content(Ref(**described["ref"]), frames, partial(_read_piece, number))


def _read_piece(number: int, offset: int, length: int) -> bytes:
    """Read from a content of the parent."""
    with _asking:  # threads wait for one another
        _send(json.dumps({"read": [number, offset, length]}).encode())
        header = sys.stdin.buffer.read(_HEADER.size)
        if len(header) < _HEADER.size:
            os._exit(0)  # the parent is gone
        return sys.stdin.buffer.read(_HEADER.unpack(header)[0])


_asking = threading.Lock()


def _send(body: bytes) -> None:
    sys.stdout.buffer.write(_HEADER.pack(len(body)) + body)
    sys.stdout.buffer.flush()


def _watch(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of work."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class Confinement:
    """What confines a process besides its limits: whether it can open only its own files, and
    whether it can use neither sockets nor other processes."""

    files: bool
    calls: bool


confinement: Confinement | None = None
"""How this process is confined. None in a process that does not run `serve`."""


def confine(folder: str, also: Sequence[str] = ()) -> Confinement:
    """Limit this process for the rest of its life, and return what the system was able to do."""
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if sys.platform != "linux":
        return Confinement(files=False, calls=False)
    rights = {folder: landlock.READ | landlock.LIST | landlock.REMOVE}
    rights |= dict.fromkeys(("/dev/urandom", *also), landlock.READ)
    return Confinement(files=landlock.restrict(rights), calls=forbid_sockets_and_processes())


def _allow(memory: int, seconds: float) -> None:
    """Limit the next answer. RLIMIT_NPROC is not used: it counts the threads of all the user's
    processes."""
    cpu = int(time.process_time() + seconds) + 1
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu)):
        with suppress(ValueError, OSError):  # a lower hard limit applies already
            resource.setrlimit(limit, (value, resource.RLIM_INFINITY))
