"""examples/compose.yaml: start its object store with exactly the command, rights and bucket from the
file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import coatcheck
from coatcheck.storage.fleet import parse
from tests.backends import LARGE, Fleet
from tests.conftest import ROOT
from tests.servers import Server, find_weed, free_port, wait_until_healthy

COMPOSE = (ROOT / "examples" / "compose.yaml").read_text()


def found(pattern: str) -> str:
    match = re.search(pattern, COMPOSE, re.MULTILINE)
    assert match, pattern
    return match[1]


def test_the_object_store_of_the_compose_file_works_as_documented(
    fleet: Fleet, tmp_path: Path
) -> None:
    weed = find_weed()
    assert weed is not None
    (tmp_path / "s3.json").write_text(found(r"content: \|\n((?: {6}.+\n)+)"))
    (tmp_path / "data").mkdir()
    command = found(r"command: (server .+?)$").replace("=/data", f"={tmp_path}/data")
    command = command.replace("/etc/s3.json", f"{tmp_path}/s3.json")
    ports = {name: (free_port(), free_port()) for name in ("master", "volume", "filer", "s3")}
    flags = [f"-{name}.port{kind}={port}" for name, both in ports.items()
             for kind, port in zip(("", ".grpc"), both, strict=True)]  # fmt: skip
    server = Server(
        f"http://127.0.0.1:{ports['s3'][0]}",
        tmp_path,
        [str(weed), *command.split(), "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags,
         "-s3.port.iceberg=0", "-s3.port.lance=0"],
    )  # fmt: skip
    server.start()
    try:
        wait_until_healthy(server)
        create, master = (
            found(r"echo '(.+?)'"),
            f"127.0.0.1:{ports['master'][0]}.{ports['master'][1]}",
        )
        subprocess.run(
            [str(weed), "shell", f"-master={master}"],
            input=create + "\n",
            text=True,
            check=True,
            timeout=60,
        )
        url = found(r'--store "(s3://.+?)"').replace("http://127.0.0.1:8333", server.url)
        schema = parse(fleet.new_url()).schema
        url = url.partition("&catalog=")[0] + f"&schema={schema}&catalog={fleet.database.url}"
        with coatcheck.open(url) as store:
            ref = store.session("s").put("x" * LARGE)
            assert store.session("s").get(ref.pointer) == "x" * LARGE
            assert store.collect().orphans == 0
            store.session("s").forget(ref.pointer)
            assert store.verify().problems == []
    finally:
        server.kill()
