"""What a proxy has spared its client: results slimmed, tokens saved, tokens read back.

Counted while it runs, told in a line when it ends, and kept in the store for three months, so that there is something
to show where a client hides what servers write on stderr.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from coatcheck import Store

REPORTS: Final = "coatcheck proxy reports"
"""The session that holds a record of each run."""

_KEPT: Final = 90 * 86_400.0
_TOOLS: Final = 200  # names of tools that are counted one by one


@dataclass(slots=True)
class Row:
    """One tool's share."""

    slimmed: int = 0
    tokens_saved: int = 0
    failed: int = 0


@dataclass
class Counts:
    """What happened so far. Safe to use from many threads."""

    slimmed_results: int = 0
    tokens_saved: int = 0
    tokens_read_back: int = 0
    failures: int = 0
    tools: dict[str, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def slimmed(self, tool: str, saved: int, *, failed: bool) -> None:
        with self._lock:
            row = self.tools.setdefault(tool if tool in self.tools or len(self.tools) < _TOOLS else "others", Row())
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
        said = (
            f"{self.slimmed_results:,} results slimmed, about {self.tokens_saved:,} tokens saved, "
            f"{self.tokens_read_back:,} read back"
        )
        return f"{said}; {self.failures:,} could not be stored" if self.failures else said

    def to_record(self) -> dict[str, Any]:
        with self._lock:
            return {
                "slimmed_results": self.slimmed_results,
                "tokens_saved": self.tokens_saved,
                "tokens_read_back": self.tokens_read_back,
                "failures": self.failures,
                "tools": {name: asdict(row) for name, row in self.tools.items()},
            }


def keep(store: Store, counts: Counts, *, server: str, session_id: str) -> None:
    """Put down what one run came to. A run in which nothing happened leaves nothing."""
    if counts.slimmed_results or counts.tokens_read_back or counts.failures:
        record = {"server": server, "session": session_id, **counts.to_record()}
        store.session(REPORTS, ttl=_KEPT).put(record, name=session_id, kind="data", ttl=_KEPT, tool="coatcheck proxy")


def kept(store: Store) -> list[dict[str, Any]]:
    """The records of earlier runs, the newest first."""
    session = store.session(REPORTS)
    found = []
    for ref in session.list():
        record = session.get(ref)
        if isinstance(record, dict):
            found.append({"ended_at": ref.created_at.isoformat().replace("+00:00", "Z"), **record})
    return found
