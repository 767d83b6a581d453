"""Servers for the HTTP tests: in a thread of this process, or as `coatcheck serve` in a process of
its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from coatcheck import Store
from coatcheck.http.application import EXPOSED, METHODS, store_app
from coatcheck.http.credentials import Access, Keyring, TokenScope
from coatcheck.http.serving import LocalServer
from tests import warm

ADMIN = "an-admin-token-for-tests"
WAIT = 60.0


@dataclass
class Web:
    """A running server and one token for it."""

    url: str
    token: str
    process: subprocess.Popen[str] | None = None

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").partition("/")[0]

    @property
    def port(self) -> int:
        return int(self.host.rpartition(":")[2])

    def client(self, token: str | None = "", **headers: str) -> httpx2.Client:
        """A client with this token: by default the server's own, with None no token at all."""
        given = {} if token is None else {"authorization": f"Bearer {token or self.token}"}
        return httpx2.Client(base_url=self.url, headers={**given, **headers}, timeout=WAIT)


def part(text: str) -> str:
    """A name as one part of a path."""
    return quote(text, safe="")


def path_of(session: str, target: str | None = None, more: str = "") -> str:
    """The path of a session's artifacts, or of one of them."""
    place = f"/api/v1/sessions/{part(session)}/artifacts"
    return place if target is None else f"{place}/{part(target)}{more}"


def tokens(**scopes: TokenScope) -> dict[str, Access]:
    return {f"a-{name}-token-for-tests": Access(name, scope) for name, scope in scopes.items()}


@contextlib.contextmanager
def running(store: Store, keyring: Keyring | None = None, **options: Any) -> Iterator[Web]:
    """Serve a store from a thread of this process."""
    keyring = keyring or Keyring(given={ADMIN: Access("admin", "admin")})
    with LocalServer(methods=METHODS, exposed=EXPOSED) as local:
        server = local.prepared(store_app(store, keyring, **options), grace=5)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield Web(local.url, ADMIN)
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def environment(store: Path | str, **more: str) -> dict[str, str]:
    """The environment of a server: its own store, and nothing from the user who runs the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COATCHECK_")}
    return {**kept, "COATCHECK_STORE": str(store), **more}


def serve(*options: str, is_warm: bool = True) -> list[str]:
    """The command for a server. Its process id is that of the server only if it is not warm."""
    words = ["coatcheck", "serve", *options]
    return warm.command(*words) if is_warm else [sys.executable, "-m", *words]


@contextlib.contextmanager
def served(
    store: Path | str, *options: str, token: str | None = ADMIN, is_warm: bool = True, **env: str
) -> Iterator[Web]:
    """Run `coatcheck serve` on any free port. With `token=None`, it generates one and prints it."""
    given = {} if token is None else {"COATCHECK_HTTP_TOKEN": token}
    command = serve("--port", "0", *options, is_warm=is_warm)
    process = subprocess.Popen(
        command, env=environment(store, **{**given, **env}), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "store at" in line, line + process.stderr.read()
        url = line.split()[-1].removesuffix("/api/v1")
        if token is None:
            token = process.stderr.readline().split()[-1]
        yield Web(url, token, process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(WAIT)
        process.stderr.close()
