"""Claims and records of a session: what a catalog keeps besides refs, under a fencing token where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coatcheck.errors import Fenced
from coatcheck.ids import clip

if TYPE_CHECKING:
    from coatcheck.storage import SessionInfo


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claimed a session last, and when it last claimed or wrote. Only this very token passes for the claim's."""

    token: int
    holder: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a series that belongs to a session. `token` is the claim under which it was written, if any."""

    seq: int
    at: float
    token: int | None
    body: bytes


class Records(Protocol):
    """The part of a `Catalog` that is about claims and records. The same promises hold for it."""

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
        """A new fencing token for this session, larger than every one before, even where the session ended and began
        anew. From now on it alone passes; an empty `holder` gives the claim up. Adds the session where it is new, and
        counts it as used, as `put` does. Raises `Fenced` and changes nothing where another holder's claim was used less
        than `idle` seconds before, and with `instead_of` unless that is the newest token (0: nobody has claimed it)."""
        ...

    def claimant(self, session_id: str) -> Claimant | None:
        """The newest claim; None where nobody holds one."""
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
        """Append to a series of the session; its number there: one more than that of the newest, 1 for the first.

        Adds the session where it is new, and counts it as used, as `put` does; where it is past its expiry by more than
        the grace period, its older records go first. With a `token` that is not that of the session's newest claim it
        raises `Fenced`, and nothing is changed; else the claim counts as used. With `keep`, only so many of the newest
        stay."""
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
        """Records with numbers between these two, oldest first, or with `newest` from the newest on; at most `limit`.
        They stay until the session ends, or `expire` finds it expired. Raises `Damaged` where a body is not what was
        written."""
        ...

    def series(self, session_id: str) -> list[str]:
        """The series of this session that have records, in order."""
        ...


def check_idle(newest: Claimant, holder: str, at: float, idle: float) -> None:
    """Raises `Fenced` where another holder has used its claim less than so many seconds before."""
    if idle and newest.holder not in ("", holder) and at < newest.at + idle:
        raise Fenced(
            f"{clip(newest.holder)} holds the claim and used it {max(0.0, at - newest.at):.0f} s ago",
            hint="wait until it is done or idle; without `idle`, a claim takes over at once",
        )


def fenced(token: int, newest: Claimant) -> Fenced:
    """The error for a token that is not the newest."""
    now = f"{clip(newest.holder)} holds it with token {newest.token}" if newest.holder else "nobody holds it now"
    return Fenced(f"token {token} is not that of the session's claim: {now}")
