"""Counts of what a proxy saves: slimmed results, tokens saved, tokens read back.

They are printed when the proxy ends and kept in the store for three months, because clients may hide stderr.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from coatcheck import Store

REPORTS: Final = "coatcheck proxy reports"
"""The session with a record of each run."""

_KEPT: Final = 90 * 86_400.0
_TOOLS: Final = 200  # tools that are counted separately


@dataclass(slots=True)
class ToolCounts:
    """The counts of one tool."""

    slimmed: int = 0
    tokens_saved: int = 0
    failed: int = 0


@dataclass
class Counts:
    """The counts so far. Thread-safe."""

    slimmed_results: int = 0
    tokens_saved: int = 0
    tokens_read_back: int = 0
    failures: int = 0
    tools: dict[str, ToolCounts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def slimmed(self, tool: str, saved: int, *, failed: bool) -> None:
        with self._lock:
            name = tool if tool in self.tools or len(self.tools) < _TOOLS else "others"
            row = self.tools.setdefault(name, ToolCounts())
            if failed:
                self.failures += 1
                row.failed += 1
            else:
                self.slimmed_results += 1
                self.tokens_saved += saved
                row.slimmed += 1
                row.tokens_saved += saved

    def read_back(self, tokens: int) -> None:
        with self._lock:
            self.tokens_read_back += tokens

    def __str__(self) -> str:
        text = (
            f"{self.slimmed_results:,} results slimmed, about {self.tokens_saved:,} tokens saved, "
            f"{self.tokens_read_back:,} read back"
        )
        return f"{text}; {self.failures:,} could not be stored" if self.failures else text

    def to_record(self) -> dict[str, Any]:
        with self._lock:
            return {
                "slimmed_results": self.slimmed_results,
                "tokens_saved": self.tokens_saved,
                "tokens_read_back": self.tokens_read_back,
                "failures": self.failures,
                "tools": {name: asdict(row) for name, row in self.tools.items()},
            }


def save_counts(store: Store, counts: Counts, *, server: str, session_id: str) -> None:
    """Store the counts of a run, unless they are all zero."""
    if counts.slimmed_results or counts.tokens_read_back or counts.failures:
        run = secrets.token_hex(4)  # keeps two runs with the same counts apart
        record = {"server": server, "session": session_id, "run": run, **counts.to_record()}
        store.session(REPORTS, ttl=_KEPT).put(record, name=session_id, kind="data", ttl=_KEPT, tool="coatcheck proxy")


def saved_counts(store: Store) -> list[dict[str, Any]]:
    """Return the records of earlier runs, newest first."""
    session = store.session(REPORTS)
    found = []
    for ref in session.list():
        record = session.get(ref)
        if isinstance(record, dict):
            found.append({"ended_at": ref.created_at.isoformat().replace("+00:00", "Z"), **record})
    return found
