"""Claims and records of sessions, in terms of the rows of a catalog."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import xxhash

from coatcheck.errors import Damaged, Fenced
from coatcheck.ids import clip, digest_of
from coatcheck.storage.entries import RECORDS, Claimant, Note, Record, SessionInfo
from coatcheck.storage.rows import Rows

_HEAD: Final = struct.Struct("<8sdQI")
"""The head of a record, after its checksum: the attempt that wrote it, when, the token of the claim
(0 if none), and the length of the series. The series and the body follow."""
_BODY: Final = 8 + _HEAD.size
_CLAIM: Final = struct.Struct("<Qd8s")
"""The token of a claim, its last use, and the attempt that made it; the holder follows."""


class Records(Rows):
    """Claims and records of sessions. A claim has a fencing token."""

    def claim(
        self,
        session: SessionInfo,
        holder: str,
        *,
        at: float,
        idle: float = 0.0,
        instead_of: int | None = None,
        grace: float = 0.0,
    ) -> int:
        """Return a new fencing token for this session, larger than all earlier ones, even if the
        session was ended and opened again. Only this token is accepted from now on; an empty
        `holder` releases the claim. Creates the session if it is new, and marks it as used, like
        `put`. Raises `Fenced` and changes nothing if another holder used its claim less than `idle`
        seconds ago, or if `instead_of` is given and is not the newest token (0: unclaimed)."""
        session_id, attempt = session.session_id, os.urandom(8)

        def work() -> int:
            self._use(session, at, grace)
            newest, last_attempt = self._newest_claim(session_id)
            if last_attempt == attempt:
                return newest.token
            _check_token(instead_of, newest)
            if idle and newest.holder not in ("", holder) and at < newest.at + idle:
                unused = max(0.0, at - newest.at)
                raise Fenced(
                    f"{clip(newest.holder)} has claimed the session and used the claim "
                    f"{unused:.0f} s ago",
                    hint="wait until it is done or idle, or claim without `idle` to take over at "
                    "once",
                )
            token = self._next_token()
            self._save_claim(session_id, Claimant(token, holder, at), attempt)
            return token

        return self.change("claiming a session", work, session_id=session_id, effect="add")

    def claimant(self, session_id: str) -> Claimant | None:
        """Return the newest claim, or None if the session is unclaimed."""
        newest, _ = self._newest_claim(session_id)
        return newest if newest.holder else None

    def record(
        self,
        session: SessionInfo,
        series: str,
        body: bytes,
        *,
        at: float,
        token: int | None = None,
        keep: int | None = None,
        grace: float = 0.0,
    ) -> int:
        """Append to a series of the session. Returns the record's number, counted from 1.

        Creates the session if it is new, and marks it as used, like `put`; if it expired longer ago
        than the grace period, its older records are deleted first. Raises `Fenced` and changes
        nothing if `token` does not belong to the session's newest claim; otherwise the claim counts
        as used. With `keep`, only that number of newest records is kept."""
        return self.record_all(session, [(series, body, keep)], at=at, token=token, grace=grace)[0]

    def record_all(
        self,
        session: SessionInfo,
        given: Sequence[tuple[str, bytes, int | None]],
        *,
        at: float,
        token: int | None = None,
        grace: float = 0.0,
    ) -> list[int]:
        """Append several records, all or none: `record` for each series, body and `keep`. Returns
        their numbers."""
        session_id, attempt = session.session_id, os.urandom(8)
        keys = [_series_key(series) for series, _, _ in given]

        def work() -> list[int]:
            self._use(session, at, grace)
            newest = self._newest_records(session_id, keys)
            last = {key: 0 if note is None else _seq(note) for key, note in newest.items()}
            # An earlier attempt succeeded, and only its answer was lost.
            if _is_written(newest.values(), attempt):
                return _numbered(
                    keys, {key: number - keys.count(key) for key, number in last.items()}
                )
            if token is not None:
                self._use_claim(session_id, token, at)
            numbers = _numbered(keys, last)
            for (series, body, keep), key, number in zip(given, keys, numbers, strict=True):
                name = series.encode()
                value = _HEAD.pack(attempt, at, token or 0, len(name)) + name + body
                self.save(
                    Note(session_id, f"{key}{number:016x}", xxhash.xxh3_64_digest(value) + value)
                )
                self._drop_older_records(session_id, key, number, keep)
            return numbers

        return self.change("writing a record", work, session_id=session_id, effect="add")

    def _newest_records(self, session_id: str, keys: Iterable[str]) -> dict[str, Note | None]:
        """Return the newest record of each series, by the beginning of its keys."""
        newest: dict[str, Note | None] = {}
        for key in set(keys):
            found = self.notes(session_id, key, key + "g", limit=1, newest=True)
            newest[key] = found[0] if found else None
        return newest

    def _drop_older_records(self, session_id: str, key: str, newest: int, keep: int | None) -> None:
        """Drop all records of a series but the newest, as many as `keep` says; none if it is
        None."""
        if keep is not None:
            self._drop_notes(session_id, key, f"{key}{newest - keep + 1:016x}")

    def _use_claim(self, session_id: str, token: int, at: float) -> None:
        """Note that the claim of a session was used. Raises `Fenced` if the token is not that of
        the newest claim."""
        claim, attempt = self._newest_claim(session_id)
        _check_token(token, claim)
        self._save_claim(session_id, claim._replace(at=max(claim.at, at)), attempt)

    def records(
        self,
        session_id: str,
        series: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[Record]:
        """Return records numbered between `after` and `before`, oldest first, or newest first with
        `newest`; at most `limit`. Records are kept until the session ends, or `expire` finds it
        expired. Raises `Damaged` if a body does not match its checksum."""
        key = _series_key(series)
        stop = key + "g" if before is None else f"{key}{before:016x}"
        found = self.notes(session_id, f"{key}{after + 1:016x}", stop, limit=limit, newest=newest)
        return [_record(one) for one in found]

    def first_records(self, session_id: str, series: Collection[str]) -> dict[str, Record]:
        """Return the oldest record of each of these series that has one. Raises `Damaged` like
        `records`."""
        names = {_series_key(one): one for one in series}
        return {
            names[note.key[:-16]]: _record(note)
            for note in self._first_notes(session_id, list(names))
        }

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        """Return the first note after each of these beginnings of keys, for an owner that is a
        session."""
        return [
            note for start in prefixes for note in self.notes(owner, start, start + "g", limit=1)
        ]

    def series(self, session_id: str) -> list[str]:
        """Return the names of this session's series that have records, sorted."""
        names, start = [], RECORDS[0]
        while found := self.notes(session_id, start, RECORDS[1], limit=1):
            value, body = found[0].value, _record(found[0]).body
            names.append(value[_BODY : len(value) - len(body)].decode())
            start = found[0].key.rpartition("/")[0] + "0"
        return sorted(names)

    def _next_token(self) -> int:
        """Return a number that is larger than all before, in the whole store."""
        token = 1 + int(self._note("", "fence") or 0)
        self.save(Note("", "fence", str(token).encode()))
        return token

    def _check_records(self, *, repair: bool) -> list[str]:
        """Return what is wrong with records and claims, and with `repair`, correct it."""
        damaged = [
            one._replace(value=b"")
            for one in self._every_note(*RECORDS)
            if not _is_sound(one.value)
        ]
        if damaged and repair:
            self.drop(*damaged)
        return (
            [f"{len(damaged)} damaged records" + (": removed" if repair else "")] if damaged else []
        )

    def _check_tokens(self, *, repair: bool) -> list[str]:
        last = max(
            (_claim(one.value)[0].token for one in self._every_note("claim", "claim ")), default=0
        )
        if last <= int(self._note("", "fence") or 0):
            return []
        if repair:
            self.save(Note("", "fence", str(last).encode()))
        return ["claims beyond the store's token counter" + (": set right" if repair else "")]

    def _every_note(self, start: str, stop: str) -> Iterator[Note]:
        """Yield the notes of all sessions between two keys."""
        for info in self.sessions():
            at = start
            while page := self.notes(info.session_id, at, stop, limit=64):
                yield from page
                at = page[-1].key + " "

    def _newest_claim(self, session_id: str) -> tuple[Claimant, bytes]:
        """Return the newest claim, and the attempt that made it."""
        found = self.notes(session_id, "claim", "claim ")
        return _claim(found[0].value) if found else (Claimant(0, ""), b"")

    def _save_claim(self, session_id: str, claim: Claimant, attempt: bytes) -> None:
        head = _CLAIM.pack(claim.token, claim.at, attempt)
        self.save(Note(session_id, "claim", head + claim.holder.encode()))


def _check_token(token: int | None, newest: Claimant) -> None:
    """Raise `Fenced` if a token is given that is not the newest."""
    if token is not None and token != newest.token:
        now = (
            f"{clip(newest.holder)} has it with token {newest.token}"
            if newest.holder
            else "the session is unclaimed"
        )
        raise Fenced(f"token {token} is not that of the session's newest claim: {now}")


def _series_key(series: str) -> str:
    """Return the beginning of the keys of a series. The number of a record follows, as 16 hex
    digits."""
    return f"{RECORDS[0]}{digest_of(series.encode())[:32]}/"


def _claim(value: bytes) -> tuple[Claimant, bytes]:
    token, at, attempt = _CLAIM.unpack_from(value)
    return Claimant(token, value[_CLAIM.size :].decode(), at), attempt


def _is_written(newest: Iterable[Note | None], attempt: bytes) -> bool:
    """Return whether this attempt wrote one of these records."""
    return any(note is not None and note.value[8:16] == attempt for note in newest)


def _numbered(keys: Iterable[str], last: Mapping[str, int]) -> list[int]:
    """Return the numbers of new records of these series, given the last number of each."""
    counts = dict(last)
    numbers = []
    for key in keys:
        counts[key] += 1
        numbers.append(counts[key])
    return numbers


def _seq(note: Note) -> int:
    return int(note.key[-16:], 16)


def _is_sound(value: bytes) -> bool:
    return value[:8] == xxhash.xxh3_64_digest(value[8:])


def _record(note: Note) -> Record:
    value = note.value
    if xxhash.xxh3_64_digest(value[8:]) != value[:8]:
        raise Damaged(
            f"record {_seq(note)} of a series is damaged",
            hint="'coatcheck verify --repair' removes it",
        )
    _, at, token, length = _HEAD.unpack_from(value, 8)
    return Record(int(note.key[-16:], 16), at, token or None, value[_BODY + length :])
