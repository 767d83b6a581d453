"""The servers behind a proxy: those of a configuration (`mcpServers`), and one that is started as a
process.

Commands, URLs and headers come only from there and from the command line, never from a message.
`${NAME}`, `${env:NAME}` and `${NAME:-default}` are replaced by environment variables, so that files
need not contain secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck.errors import InvalidArgument, UpstreamFailed, needs_extra
from coatcheck.install.clients import HEADERS, HTTP
from coatcheck.mcp import process_group, wire
from coatcheck.mcp.wire import MAX_MESSAGE, Message, Raw, Sink, UnparsedLine, Upstream

_VARIABLE: Final = re.compile(
    r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{(?:input|command|config):[^}]*\}"
)
_NAME: Final = re.compile(r"[^\s\x00-\x1f]{1,64}")
_CHUNK: Final = 1 << 18
_GRACE: Final = 2.0  # seconds for a server to end once its stdin is closed
_KILL: Final = process_group.GRACE + 1.0
_POLL: Final = 0.01
_LOGGED: Final = 5  # lines of other output that are logged
_PRIVATE: Final = ("COATCHECK_MCP_TOKEN",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """The entry of a server in a configuration: it has either a command or a URL."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] | None = None
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] | None = None
    type: Any = "http"


def configured_servers(whole: object, *, max_message: int = MAX_MESSAGE) -> dict[str, Upstream]:
    """Return the servers of a configuration, by name. Raises `InvalidArgument`."""
    found = whole.get("mcpServers", whole.get("servers")) if isinstance(whole, dict) else None
    if not isinstance(found, dict) or not found:
        hint = 'expected {"mcpServers": {"name": {"command": "…"}}}'
        raise InvalidArgument("the configuration has no servers", hint=hint)
    return {
        name: _server(name, entry, max_message)
        for name, entry in found.items()
        if not (isinstance(entry, dict) and entry.get("disabled") is True)
    }


def _server(name: str, entry: object, max_message: int) -> Upstream:
    from pydantic import TypeAdapter, ValidationError

    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"invalid server name {name[:80]!r}", hint="use 1 to 64 characters without spaces"
        )
    try:
        given = {"url": entry.get("httpUrl"), **entry} if isinstance(entry, dict) else entry
        server = TypeAdapter(ServerEntry).validate_python(given)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(map(str, problem["loc"])) or "its entry"
        raise InvalidArgument(
            f"the server {name!r} is invalid: {where}: {problem['msg']}"
        ) from error
    if server.command and server.url is None:
        words = [expanded(word, name) for word in (server.command, *server.args)]
        cwd = None if server.cwd is None else expanded(server.cwd, name)
        return ProcessServer(
            words, name=name, env=_expanded(server.env, name), cwd=cwd, max_message=max_message
        )
    if server.url is None or server.command is not None:
        raise InvalidArgument(f"the server {name!r} must have either a command or a url")
    if server.type not in HTTP:
        text = f"the server {name!r} has the unsupported transport {server.type!r}"
        raise InvalidArgument(text, hint="use streamable HTTP or a command")
    return remote_server(expanded(server.url, name), _expanded(server.headers, name), max_message)


def remote_server(url: str, headers: Mapping[str, str], max_message: int) -> Upstream:
    """Return the server at a URL. Needs the extra `[mcp]`."""
    with needs_extra("mcp"):
        from coatcheck.mcp.remote import RemoteServer
    return RemoteServer(url, headers=headers, max_message=max_message)


def remote_headers(texts: Iterable[str]) -> dict[str, str]:
    """Parse headers, each `Name: value`, after those in the environment, one per line: a command
    line is visible to every user of the machine."""
    found: dict[str, str] = {}
    for text in (*filter(str.strip, os.environ.get(HEADERS, "").splitlines()), *texts):
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name.strip()):
            raise InvalidArgument(f"invalid header {text[:40]!r}", hint="expected 'Name: value'")
        found[name.strip()] = expanded(value.strip())
    return found


def expanded(text: str, server: str | None = None) -> str:
    """Replace environment variables in a text. One that is not set is an error, which names the
    server."""
    where = "" if server is None else f"the server {server!r} is invalid: "

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            hint = "use an environment variable: ${NAME}"
            raise InvalidArgument(
                f"{where}{match[0][:80]} is defined only in the client", hint=hint
            )
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise InvalidArgument(
                f"{where}the environment variable {match[1]} is not set",
                hint=f"export {match[1]}=…",
            )
        return found

    return _VARIABLE.sub(value, text)


def _expanded(texts: Mapping[str, str] | None, server: str) -> dict[str, str]:
    return {key: expanded(text, server) for key, text in (texts or {}).items()}


class ProcessServer:
    """A command that speaks MCP on stdio. It inherits our stderr, and ends when the proxy ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "the server",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        self._command = list(command)
        self._name = name
        self._env = {key: value for key, value in os.environ.items() if key not in _PRIVATE} | dict(
            env or {}
        )
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
            raise UpstreamFailed(
                f"{self._name} could not be started: {error}", hint="check the command"
            ) from error
        finally:
            os.close(read_end)
        self._lifeline = write_end
        self._reading = asyncio.create_task(self._read(self._process, sink))

    async def send(self, message: Message) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise UpstreamFailed(f"{self._name} has ended")
        stdin = process.stdin
        if stdin.is_closing():
            raise await self._ended(process)
        if stdin.transport.get_write_buffer_size() > self._max_message:
            raise UpstreamFailed(
                f"{self._name} does not read its input", hint="it may be hanging; restart it"
            )
        stdin.writelines((message.raw, b"\n"))

    async def finish(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        process = self._process
        if process is None:
            return
        await self.finish()
        if not await _gone(process, _GRACE):
            self._cut_lifeline()
            if not await _gone(process, _KILL):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await _gone(process, _KILL)
        self._cut_lifeline()
        if (
            process.returncode is not None and process.returncode < 0
        ):  # the process between was killed: end its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _read(self, process: asyncio.subprocess.Process, sink: Sink) -> None:
        stdout = process.stdout
        assert stdout is not None
        async for line in wire.read_lines(lambda: stdout.read(_CHUNK), self._max_message):
            await self._deliver(sink, line)
            del line  # free it now: it may be large, and the next may come late
        await sink.ended(await self._ended(process))

    async def _ended(self, process: asyncio.subprocess.Process) -> UpstreamFailed:
        await _gone(process, _KILL)
        hint = (
            "it exited by itself; restart the proxy to start it again"
            if process.returncode == 0
            else None
        )
        return UpstreamFailed(f"{self._name} {_ending(process.returncode)}", hint=hint)

    async def _deliver(self, sink: Sink, line: Raw | UnparsedLine) -> None:
        if isinstance(line, UnparsedLine):
            await wire.refuse(line, wire.too_large(self._name, line, self._max_message), self, sink)
            return
        messages = wire.parse(line)
        if not messages and line.strip():
            self._log_output(line)
            if (ends := UnparsedLine.of(line)).id is not None:
                await wire.refuse(
                    ends, UpstreamFailed(f"{self._name} sent invalid JSON", hint=""), self, sink
                )
        for message in messages:
            await sink.message(message)

    def _log_output(self, line: Raw) -> None:
        """Log a line on the server's stdout that is not a message."""
        self._other_lines += 1
        if self._other_lines <= _LOGGED:
            shown = ascii(bytes(line[:80]).decode("utf-8", "replace"))
            more = "; further lines are not logged" if self._other_lines == _LOGGED else ""
            wire.log(f"{self._name} wrote to stdout, but not a message: {shown}{more}")


async def _gone(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Whether it ends in time. `process.wait()` would also wait for all processes that have its
    pipes open."""
    until = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < until:
        await asyncio.sleep(_POLL)
    return process.returncode is not None


def _ending(status: int | None) -> str:
    if status is None:
        return "closed its stdout"
    if status < 0 or status > 128:
        return f"was killed by signal {-status if status < 0 else status - 128}"
    return f"ended with exit status {status}"
