"""Counts of what a proxy saves: slimmed results, tokens saved, tokens read back.

They are printed when the proxy ends and kept in the store for three months, because clients may hide stderr.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import asdict, dataclass
from typing import Any, Final

from coatcheck import Store
from coatcheck.refs import iso_time

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


class Counts:
    """The counts so far. Thread-safe."""

    def __init__(self) -> None:
        self.tools: dict[str, ToolCounts] = {}
        self._read_back = 0
        self._lock = threading.Lock()

    def slimmed(self, tool: str, saved: int, *, failed: bool) -> None:
        with self._lock:
            name = tool if tool in self.tools or len(self.tools) < _TOOLS else "others"
            row = self.tools.setdefault(name, ToolCounts())
            row.failed += failed
            row.slimmed += not failed
            row.tokens_saved += 0 if failed else saved

    def read_back(self, tokens: int) -> None:
        with self._lock:
            self._read_back += tokens

    def __str__(self) -> str:
        record = self.to_record()
        text = (
            "{slimmed_results:,} results slimmed, about {tokens_saved:,} tokens saved, {tokens_read_back:,} read back"
        )
        return (text + ("; {failures:,} could not be stored" if record["failures"] else "")).format(**record)

    def to_record(self) -> dict[str, Any]:
        with self._lock:
            rows = self.tools.values()
            return {
                "slimmed_results": sum(row.slimmed for row in rows),
                "tokens_saved": sum(row.tokens_saved for row in rows),
                "tokens_read_back": self._read_back,
                "failures": sum(row.failed for row in rows),
                "tools": {name: asdict(row) for name, row in self.tools.items()},
            }


def save_counts(store: Store, counts: Counts, *, server: str, session_id: str) -> None:
    """Store the counts of a run, unless they are all zero."""
    record = counts.to_record()
    if any(record.values()):
        run = secrets.token_hex(4)  # keeps two runs with the same counts apart
        record = {"server": server, "session": session_id, "run": run, **record}
        store.session(REPORTS, ttl=_KEPT).put(record, name=session_id, kind="data", ttl=_KEPT, tool="coatcheck proxy")


def saved_counts(store: Store) -> list[dict[str, Any]]:
    """Return the records of earlier runs, newest first."""
    session = store.session(REPORTS)
    found = []
    for ref in session.list():
        record = session.get(ref)
        if isinstance(record, dict):
            found.append({"ended_at": iso_time(ref.created), **record})
    return found
