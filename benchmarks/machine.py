"""A description of the machine without anything that identifies it."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_MODULES = {"google-re2": "re2"}
_LIBRARIES = (
    "pydantic",
    "xxhash",
    "google-re2",
    "duckdb",
    "obstore",
    "psycopg",
    "httpx2",
    "starlette",
)


def facts(folder: Path) -> dict[str, str]:
    """Processor, versions and the type of the file system that `folder` is on."""
    kernel = re.match(r"[\d.]*", platform.release())  # the rest may name a host
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {kernel[0] if kernel else ''} {platform.machine()}",
        "file system": file_system(folder),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{
            name: version(name)
            for name in _LIBRARIES
            if find_spec(_MODULES.get(name, name)) is not None
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def file_system(folder: Path) -> str:
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for mount in mounts:
        fields, _, rest = mount.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"


def peak() -> int:
    """Peak resident memory of this process so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )
