"""`python -m tests.adapters langchain` runs the tests of an adapter in an environment with its
framework; without a name, those of all adapters. Environments are in `.venv-adapters`, created on
first use from `constraints/<name>.in` and our own dependencies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests import environments
from tests.adapters.conftest import FRAMEWORKS

HERE = Path(__file__).parent
PLACE = Path(os.environ.get("COATCHECK_ADAPTERS", environments.ROOT / ".venv-adapters"))


def command(name: str, *options: str) -> list[str]:
    """Return the command that runs the tests of an adapter. Raises `Missing` if its environment
    cannot be created."""
    python = environments.python(_lock(name), PLACE / name)
    pytest = [str(python), "-m", "pytest", "-c", str(HERE / "pytest.ini")]
    return [
        *pytest,
        f"--rootdir={environments.ROOT}",
        f"--confcutdir={HERE}",
        *options,
        str(HERE / name),
    ]


def _lock(name: str) -> Path:
    """Return the lock file of a framework's environment, made first unless it exists and its inputs
    are the same. Packages that our own environment has too get the same versions where possible:
    uv prefers the versions of an existing output file."""
    wanted = [environments.ROOT / "pyproject.toml", HERE / "constraints" / f"{name}.in"]
    overrides = HERE / "constraints" / "overrides.txt"
    preferred = environments.ROOT / "constraints" / "main.txt"
    inputs = b"".join(path.read_bytes() for path in (*wanted, overrides, preferred))
    digest = hashlib.sha256(inputs).hexdigest()[:16]
    lock = PLACE / f"{name}-{digest}.txt"
    if lock.exists():
        return lock
    PLACE.mkdir(parents=True, exist_ok=True)
    draft = PLACE / f"{name}-{digest}.{os.getpid()}.tmp"
    shutil.copyfile(preferred, draft)
    environments.compile_lock(wanted, overrides, draft)
    return draft.replace(lock)


def main(arguments: list[str]) -> int:
    names = [one for one in arguments if one in FRAMEWORKS] or FRAMEWORKS
    options = [one for one in arguments if one not in FRAMEWORKS]
    failed = 0
    for name in names:
        begin = time.monotonic()
        try:
            run = command(name, *options)
        except environments.Missing as missing:
            sys.stderr.write(f"{name}: {missing}\n")
            failed += 1
            continue
        sys.stderr.write(f"== {name}: environment ready after {time.monotonic() - begin:.1f} s\n")
        failed += subprocess.run(run, cwd=environments.ROOT).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
