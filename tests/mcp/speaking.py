"""An MCP client that works line by line, for tests that check the wire, and commands for servers
and proxies."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import warm

ODD = [sys.executable, str(Path(__file__).with_name("odd_server.py"))]
WAIT = 60.0
VERSION = "2025-06-18"


def environment(store: Path | str, **more: str) -> dict[str, str]:
    """The environment of a proxy: its own store, and nothing from the user who runs the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COATCHECK_")}
    return {**kept, "COATCHECK_STORE": str(store), **more}


def proxy(*options: str, server: Sequence[str] = (), is_warm: bool = True) -> list[str]:
    """The command for a proxy. Its process id is that of the proxy only if it is not warm."""
    words = ["coatcheck", "proxy", *options, *(["--", *server] if server else [])]
    return warm.command(*words) if is_warm else [sys.executable, "-m", *words]


class Speaker:
    """A client that writes and reads lines. Messages that no call waits for are kept in `heard`."""

    def __init__(self, command: Sequence[str], env: dict[str, str], **options: Any) -> None:
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        self.heard: list[dict[str, Any]] = []
        self.lines: list[bytes] = []
        self.complaints: list[str] = []
        self._incoming: queue.Queue[bytes] = queue.Queue()
        self._number = 0
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._reading, self._listening)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def begin(self, version: str = VERSION, *, client: str = "tests") -> dict[str, Any]:
        response = self.ask(
            "initialize",
            {
                "protocolVersion": version,
                "capabilities": {},
                "clientInfo": {"name": client, "version": "1"},
            },
        )
        self.tell("notifications/initialized")
        return response

    def send(self, body: dict[str, Any]) -> None:
        self.write(json.dumps(body).encode())

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def tell(self, method: str, params: dict[str, Any] | None = None) -> None:
        self.send(
            {
                "jsonrpc": "2.0",
                "method": method,
                **({"params": params} if params is not None else {}),
            }
        )

    def start(self, method: str, params: dict[str, Any] | None = None) -> int:
        """Send a request without waiting. Returns its id."""
        self._number += 1
        self.send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params or {}})
        return self._number

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.answer(self.start(method, params))

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a tool, or the error."""
        response = self.ask("tools/call", {"name": tool, "arguments": arguments})
        found = response.get("result", response.get("error"))
        assert isinstance(found, dict)
        return found

    def answer(self, request_id: Any) -> dict[str, Any]:
        return self.until(lambda one: one.get("id") == request_id and "method" not in one)

    def until(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the next matching message."""
        while True:
            for index, one in enumerate(self.heard):
                if matches(one):
                    return self.heard.pop(index)
            line = self._incoming.get(timeout=WAIT)
            if not line:
                raise EOFError("the other side has closed its stdout")
            self.lines.append(line.rstrip(b"\n"))
            self.heard.append(json.loads(line.decode("utf-8", "replace")))

    def leave(self) -> int:
        """Close stdin and wait for the process. Returns the exit status."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            status = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            for thread in self._threads:
                thread.join(WAIT)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()
        return status

    def complained(self, word: str) -> str:
        """Wait for a line on stderr with this word."""
        while True:
            for line in list(self.complaints):
                if word in line:
                    return line
            if not self._threads[1].is_alive() and not any(
                word in line for line in self.complaints
            ):
                raise AssertionError(f"no line on stderr contains {word!r}: {self.complaints}")
            self._threads[1].join(0.02)

    def _reading(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._incoming.put(line)
        self._incoming.put(b"")

    def _listening(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.complaints.append(line.decode("utf-8", "replace").rstrip("\n"))


def text_of(result: dict[str, Any], index: int = 0) -> str:
    text = result["content"][index]["text"]
    assert isinstance(text, str)
    return text


def stub_in(text: str) -> dict[str, Any]:
    stub = json.loads(text)
    assert isinstance(stub, dict)
    assert next(iter(stub)) == "stub"
    return stub


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    state = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # it ended while we looked
        return False


def gone(*pids: int) -> bool:
    """Wait until none of these processes runs; False if one does not end in time."""
    until = time.monotonic() + WAIT
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def scripted_server(name: str, **answers: Any) -> list[str]:
    """The command for a scripted server: see `scripted_server.py`."""
    return [
        sys.executable,
        str(Path(__file__).with_name("scripted_server.py")),
        name,
        json.dumps(answers),
    ]


def heard(speaker: Speaker, name: str) -> list[dict[str, Any]]:
    """The messages that a scripted server has received so far."""
    found = json.loads(text_of(speaker.call(f"{name}_heard")))
    assert isinstance(found, list)
    return found
