"""An MCP server that is started as a process, with messages on its stdin and stdout. It ends when the proxy ends."""

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
from coatcheck.mcp import process_group
from coatcheck.mcp.wire import MAX_MESSAGE, LineBuffer, Message, Raw, Sink, UnparsedLine, log, parse, refuse

_CHUNK: Final = 1 << 18
_GRACE: Final = 2.0  # seconds for a server to end once its stdin is closed
_KILL: Final = process_group.GRACE + 1.0
_POLL: Final = 0.01
_LOGGED: Final = 5  # lines of other output that are logged
_PRIVATE: Final = ("COATCHECK_MCP_TOKEN",)


class ProcessServer:
    """A command that speaks MCP on stdio. It inherits our stderr."""

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
        self._env = {key: value for key, value in os.environ.items() if key not in _PRIVATE} | dict(env or {})
        self._cwd = cwd
        self._max_message = max_message
        self._other_lines = 0
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, sink: Sink) -> None:
        command = self._command[0]
        path = os.path.join(self._cwd or "", command) if os.path.dirname(command) else command
        if shutil.which(path, path=self._env.get("PATH")) is None:
            raise UpstreamFailed(f"command not found: {command!r}", hint="check its name and PATH")
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", process_group.__file__, str(read_end), *self._command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_CHUNK,
                pass_fds=(read_end,), env=self._env, cwd=self._cwd, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            os.close(write_end)
            raise UpstreamFailed(f"{self._name} could not be started: {error}", hint="check the command") from error
        finally:
            os.close(read_end)
        self._lifeline = write_end
        self._reading = asyncio.create_task(self._read(sink))

    async def send(self, message: Message) -> None:
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing():
            raise UpstreamFailed(f"{self._name} has ended")
        if stdin.transport.get_write_buffer_size() > self._max_message:
            raise UpstreamFailed(f"{self._name} does not read its input", hint="it hangs: restart it")
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
        if process.returncode is not None and process.returncode < 0:  # the process between was killed: end its group
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
        """Whether it ends in time. `process.wait()` would also wait for all processes that have its pipes open."""
        until = time.monotonic() + seconds
        while process.returncode is None:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def _read(self, sink: Sink) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        lines = LineBuffer(self._max_message)
        while chunk := await process.stdout.read(_CHUNK):
            for line in lines.feed(chunk):
                await self._deliver(sink, line)
                del line  # free it now: it may be large, and the next may come late
        for line in lines.end():
            await self._deliver(sink, line)
        await self._gone(process, _KILL)
        hint = "it ended by itself; restart the proxy to start it again" if process.returncode == 0 else None
        await sink.ended(UpstreamFailed(f"{self._name} {_ending(process.returncode)}", hint=hint))

    async def _deliver(self, sink: Sink, line: Raw | UnparsedLine) -> None:
        if isinstance(line, UnparsedLine):
            error = UpstreamFailed(
                f"{self._name} sent a message of {line.size:,} bytes; the limit is {self._max_message:,}",
                hint="request less, or raise --max-message",
            )
            await refuse(line, error, self, sink)
            return
        messages = parse(line)
        if not messages and line.strip():
            self._log_output(line)
            if (ends := UnparsedLine.of(line)).id is not None:
                await refuse(ends, UpstreamFailed(f"{self._name} sent invalid JSON", hint=""), self, sink)
        for message in messages:
            await sink.message(message)

    def _log_output(self, line: Raw) -> None:
        """Log a line on the server's stdout that is not a message."""
        self._other_lines += 1
        if self._other_lines <= _LOGGED:
            shown = ascii(bytes(line[:80]).decode("utf-8", "replace"))
            more = "; further lines are not logged" if self._other_lines == _LOGGED else ""
            log(f"{self._name} wrote to stdout, but not a message: {shown}{more}")


def _ending(status: int | None) -> str:
    if status is None:
        return "closed its stdout"
    if status < 0 or status > 128:
        return f"was ended by signal {-status if status < 0 else status - 128}"
    return f"ended with exit status {status}"
