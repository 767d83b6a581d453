"""A description of the machine without anything that identifies it."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from pathlib import Path


def facts(folder: Path) -> dict[str, str]:
    """Cores, versions and the type of the file system that `folder` is on."""
    return {
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "file system": file_system(folder),
    }


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
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
