"""Where the figures of a call go besides the catalog: a file of JSON lines, a logger."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from coatcheck.context.metrics.figures import PromptMetrics


def append(path: str, call: PromptMetrics) -> None:
    """One line more, in one write, so that lines of several processes do not mix. The file is its owner's alone."""
    target = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(target, call.to_json().encode() + b"\n")
    finally:
        os.close(target)


def log(name: str, call: PromptMetrics) -> None:
    logging.getLogger(name).info("%s", call.to_json())
