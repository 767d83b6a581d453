"""The refs of one session of the in-memory store, in order, with lookups by digest and by name.

The lookups are built on first use, updated when refs are added, and discarded when refs change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from coatcheck.ids import MIN_PREFIX
from coatcheck.storage import Claimant, Entry, Ranges, Record, SessionInfo

UNCLAIMED = Claimant(0, "")


@dataclass
class _Lookups:
    by_start: dict[str, list[Entry]] = field(default_factory=dict)
    by_name: dict[str, list[Entry]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    used_bytes: int = 0

    def add(self, entry: Entry) -> None:
        digest, name = entry.ref.artifact_id, entry.ref.name
        self.by_start.setdefault(digest[:MIN_PREFIX], []).append(entry)
        if name is not None:
            self.by_name.setdefault(name, []).append(entry)
        if not entry.gone and digest not in self.sizes:
            self.sizes[digest] = entry.ref.size_bytes
            self.used_bytes += entry.ref.size_bytes


@dataclass
class Holdings:
    """A session and its refs, oldest first."""

    info: SessionInfo
    entries: list[Entry] = field(default_factory=list)
    next_seq: int = 1
    shown: dict[str, Ranges] = field(default_factory=dict)
    claim: Claimant = UNCLAIMED
    records: dict[str, list[Record]] = field(default_factory=dict)  # oldest first
    _made: _Lookups | None = None

    def live(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.gone]

    def of(self, prefix: str) -> list[Entry]:
        """Return the refs whose artifact id starts with `prefix`."""
        if len(prefix) < MIN_PREFIX:
            return [entry for entry in self.entries if entry.ref.artifact_id.startswith(prefix)]
        near = self._lookups.by_start.get(prefix[:MIN_PREFIX], ())
        return [entry for entry in near if entry.ref.artifact_id.startswith(prefix)]

    def named(self, name: str) -> list[Entry]:
        return self._lookups.by_name.get(name, [])

    def newest(self, before: int | None) -> Iterator[Entry]:
        """Iterate over the refs with a seq lower than `before`, newest first."""
        end = len(self.entries) if before is None else bisect_left(self.entries, before, key=lambda entry: entry.seq)
        return (self.entries[at] for at in range(end - 1, -1, -1))

    def holds(self, digest: str) -> bool:
        return digest in self._lookups.sizes

    @property
    def used_bytes(self) -> int:
        """Total size of the live artifacts, each counted once."""
        return self._lookups.used_bytes

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self._made is not None:
            self._made.add(entry)

    def replace(self, entries: list[Entry]) -> None:
        self.entries, self._made = entries, None

    @property
    def _lookups(self) -> _Lookups:
        if self._made is None:
            self._made = _Lookups()
            for entry in self.entries:
                self._made.add(entry)
        return self._made
