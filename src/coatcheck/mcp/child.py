"""A server that we start: messages over its stdin and stdout, a line each. It ends when we do, however that is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp import guard
from coatcheck.mcp.stdio import say
from coatcheck.mcp.upstreams import Sink, refuse
from coatcheck.mcp.wire import MAX_MESSAGE, Lines, Message, Raw, Unread, parse, unread

_CHUNK: Final = 1 << 18
_GRACE: Final = 2.0  # seconds for a server to end once its stdin is closed
_KILL: Final = guard.GRACE + 1.0
_LOOK: Final = 0.01
_TOLD: Final = 5  # lines of junk that are told of
_NOT_THEIRS: Final = ("COATCHECK_MCP_TOKEN",)


class Child:
    """A command that speaks MCP on stdio. Its stderr is ours."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        self._command = list(command)
        self._name = name or "the server"
        self._env = {key: value for key, value in os.environ.items() if key not in _NOT_THEIRS} | dict(env or {})
        self._cwd = cwd
        self._max_message = max_message
        self._junk = 0
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, sink: Sink) -> None:
        command = self._command[0]
        place = os.path.join(self._cwd or "", command) if os.path.dirname(command) else command
        if shutil.which(place, path=self._env.get("PATH")) is None:
            raise UpstreamFailed(f"there is no command {command!r}", hint="check its name and PATH")
        theirs, ours = os.pipe()
        os.set_inheritable(theirs, True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", guard.__file__, str(theirs), *self._command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_CHUNK,
                pass_fds=(theirs,), env=self._env, cwd=self._cwd, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            os.close(ours)
            raise UpstreamFailed(f"{self._name} could not be started: {error}", hint="check the command") from error
        finally:
            os.close(theirs)
        self._lifeline = ours
        self._reading = asyncio.create_task(self._read(sink))

    async def send(self, message: Message) -> None:
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing():
            raise UpstreamFailed(f"{self._name} has ended")
        if stdin.transport.get_write_buffer_size() > self._max_message:
            raise UpstreamFailed(f"{self._name} does not read what it is sent", hint="it hangs: start it again")
        stdin.writelines((message.raw, b"\n"))

    async def finish(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        process = self._process
        if process is None:
            return
        await self.finish()
        if not await self._gone(process, _GRACE):
            self._cut_lifeline()
            if not await self._gone(process, _KILL):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await self._gone(process, _KILL)
        self._cut_lifeline()
        if process.returncode is not None and process.returncode < 0:  # somebody killed the guard: its group is ours
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _gone(self, process: asyncio.subprocess.Process, seconds: float) -> bool:
        """Whether it ended in time. `process.wait()` would wait for everybody who holds its pipes, too."""
        until = time.monotonic() + seconds
        while process.returncode is None:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(_LOOK)
        return True

    async def _read(self, sink: Sink) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        lines = Lines(self._max_message)
        while chunk := await process.stdout.read(_CHUNK):
            for line in lines.feed(chunk):
                await self._deliver(sink, line)
                del line  # it may be large, and the next may be long in coming
        for line in lines.end():
            await self._deliver(sink, line)
        await self._gone(process, _KILL)
        await sink.ended(UpstreamFailed(f"{self._name} {_said(process.returncode)}"))

    async def _deliver(self, sink: Sink, line: Raw | Unread) -> None:
        if isinstance(line, Unread):
            error = UpstreamFailed(
                f"{self._name} sent a message of {line.size:,} bytes; at most {self._max_message:,} are taken",
                hint="ask for less",
            )
            await refuse(line, error, self, sink)
            return
        messages = parse(line)
        if not messages and line.strip():
            self._note(line)
            if (ends := unread(line)).id is not None:
                await refuse(ends, UpstreamFailed(f"{self._name} sent what is no JSON", hint=""), self, sink)
        for message in messages:
            await sink.message(message)

    def _note(self, line: Raw) -> None:
        """Say on stderr that something on the server's stdout was no message: it belongs there."""
        self._junk += 1
        if self._junk <= _TOLD:
            shown = ascii(bytes(line[:80]).decode("utf-8", "replace"))
            more = "; no more of these will be told" if self._junk == _TOLD else ""
            say(f"{self._name} wrote what is no message on its stdout: {shown}{more}")


def _said(status: int | None) -> str:
    if status is None:
        return "has closed its stdout"
    if status < 0 or status > 128:
        return f"was ended by signal {-status if status < 0 else status - 128}"
    return f"has ended with exit status {status}"
