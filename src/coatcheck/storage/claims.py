"""Claims and records of a session, which a catalog keeps in addition to refs. A claim has a fencing token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coatcheck.errors import Fenced
from coatcheck.ids import clip

if TYPE_CHECKING:
    from coatcheck.storage import SessionInfo


@dataclass(frozen=True, slots=True)
class Claimant:
    """The newest claim of a session, and when its holder last claimed or wrote. Only exactly this token is accepted."""

    token: int
    holder: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a series that belongs to a session. `token` is that of the claim it was written under, if any."""

    seq: int
    at: float
    token: int | None
    body: bytes


class Records(Protocol):
    """The part of `Catalog` for claims and records. It makes the same guarantees."""

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
        """Return a new fencing token for this session, larger than all earlier ones, even if the session was ended and
        opened again. Only this token is accepted from now on; an empty `holder` releases the claim. Creates the session
        if it is new, and marks it as used, like `put`. Raises `Fenced` and changes nothing if another holder used its
        claim less than `idle` seconds ago, or if `instead_of` is given and is not the newest token (0: unclaimed)."""
        ...

    def claimant(self, session_id: str) -> Claimant | None:
        """Return the newest claim, or None if the session is unclaimed."""
        ...

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

        Creates the session if it is new, and marks it as used, like `put`; if it expired longer ago than the grace
        period, its older records are deleted first. Raises `Fenced` and changes nothing if `token` is not that of the
        session's newest claim; otherwise the claim counts as used. With `keep`, only that number of newest records is
        kept."""
        ...

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
        """Return records numbered between `after` and `before`, oldest first, or newest first with `newest`; at most
        `limit`. Records are kept until the session ends, or `expire` finds it expired. Raises `Damaged` if a body does
        not match its checksum."""
        ...

    def series(self, session_id: str) -> list[str]:
        """Return the names of this session's series that have records, sorted."""
        ...


def check_idle(newest: Claimant, holder: str, at: float, idle: float) -> None:
    """Raise `Fenced` if another holder used its claim less than `idle` seconds ago."""
    if idle and newest.holder not in ("", holder) and at < newest.at + idle:
        raise Fenced(
            f"{clip(newest.holder)} has claimed the session and used the claim {max(0.0, at - newest.at):.0f} s ago",
            hint="wait until it is done or idle, or claim without `idle` to take over at once",
        )


def fenced(token: int, newest: Claimant) -> Fenced:
    """Return the error for a token that is not the newest."""
    now = f"{clip(newest.holder)} has it with token {newest.token}" if newest.holder else "the session is unclaimed"
    return Fenced(f"token {token} is not that of the session's newest claim: {now}")
