"""The server of `tests.warm`: one for each process that runs tests, started when it is first
needed."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tests import warm

ROOT = Path(__file__).resolve().parent.parent
# Not `coatcheck.mcp`, whose processes choose the prefix of their ids when they import it.
_IMPORTED = (
    "asyncio", "coatcheck.aio", "coatcheck.audit", "coatcheck.cli", "coatcheck.context", "coatcheck.executor",
    "coatcheck.externalize", "coatcheck.http.application", "coatcheck.install", "coatcheck.lanes",
    "coatcheck.storage.folder", "coatcheck.transcript", "httpx2", "mcp", "mcp.server.stdio", "mcp.shared.inbound",
    "obstore", "psycopg_pool", "rich.console", "rich.table", "uvicorn",
)  # fmt: skip
_running: list[tuple[subprocess.Popen[bytes], str]] = []


def address() -> str:
    """The address of the server. Start it if it is not running."""
    if not _running:
        folder = tempfile.mkdtemp(prefix="coatcheck-warm-")
        command = [sys.executable, "-m", "tests.warm_server", f"{folder}/s"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _running.append((process, folder))
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    return f"{_running[0][1]}/s"


def close() -> None:
    """End the server, if it was started."""
    while _running:
        process, folder = _running.pop()
        with process:
            pass  # closes its stdin, and waits
        shutil.rmtree(folder)


def _opened_again(old: TextIO) -> TextIO:
    """A standard stream as Python opens it when it starts."""
    descriptor, mode = old.fileno(), "rb" if old is sys.stdin else "wb"
    is_by_line = os.isatty(descriptor) or old is sys.stderr
    raw = os.fdopen(descriptor, mode, closefd=False)
    return io.TextIOWrapper(
        raw, encoding=old.encoding, errors=old.errors, line_buffering=is_by_line
    )


def _run(module: str) -> int:
    """Run a module as `python -m` does. Return the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException:  # noqa: BLE001 - as Python does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave(status: int) -> None:
    """End as Python does, but without freeing every object first, which takes longer than most
    commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    words = warm.serve(sys.argv[1])
    if words is None:
        return
    random.seed()
    sys.path[0] = ""
    sys.argv = words
    sys.stdin, sys.stdout, sys.stderr = map(_opened_again, (sys.stdin, sys.stdout, sys.stderr))
    _leave(_run(words[0]))


if __name__ == "__main__":
    main()
