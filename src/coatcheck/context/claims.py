"""Who may write a session's hot state: the dispatcher that claimed it last, and nobody else.

A claim is a fencing token. The catalog compares it in the transaction that writes, so a dispatcher that was paused,
partitioned or forgotten finds out at its next write, and what it wrote is seen by nobody. Reading needs no claim.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

from coatcheck.context.hot_state import HotState, compact
from coatcheck.errors import Damaged, Fenced, InvalidArgument
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import LAST_TIME

if TYPE_CHECKING:
    from coatcheck.session import Session
    from coatcheck.storage import Record

__all__ = ["SERIES", "Claim", "Snapshot", "claim", "current", "history"]

SERIES: Final = "hot"
_PAGE: Final = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a session's hot state, until somebody else claims it. A context manager that gives it up."""

    session: Session
    holder: str
    token: int

    def write(self, state: HotState, *, keep: int | None = None) -> int:
        """Make this the session's hot state; its number in the history. With `keep`, only so many of the newest states
        stay in that.

        Raises `Fenced` where the claim is no longer the newest: nothing was written then."""
        if not isinstance(state, HotState):
            raise InvalidArgument(f"a {type(state).__name__} is no hot state", hint="HotState.parse checks one")
        checked = HotState.parse(state.content())
        if checked.session_id != self.session.session_id:
            raise InvalidArgument(
                f"this is the hot state of the session {clip(checked.session_id)}",
                hint=f"the claim is for {clip(self.session.session_id)}",
            )
        body = compact({"by": self.holder, "state": checked.content()}).encode()
        return self.session.record(SERIES, body, token=self.token, keep=keep)

    @property
    def is_held(self) -> bool:
        """Whether nobody else has claimed the session so far. Only a write tells for sure."""
        newest = self.session.claimant()
        return newest is not None and newest.token == self.token

    def release(self) -> None:
        """Give the claim up, so that another need not wait. One that is lost already stays so."""
        with contextlib.suppress(Fenced):
            self.session.claim("", instead_of=self.token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A hot state as it was written: its number in the history, when, by whom, and under which claim's token."""

    number: int
    at: float
    holder: str
    token: int | None
    state: HotState

    @classmethod
    def of(cls, record: Record) -> Self:
        """What a record of the series `hot` says. It may come from an import, and so be anything: raises `Damaged`."""
        try:
            said = json.loads(record.body)
            holder, state = said["by"], HotState.parse(said["state"])
            if not isinstance(holder, str):
                raise TypeError("by")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Damaged(
                f"hot state {record.seq} makes no sense", hint="write the state anew, or look at the ones before it"
            ) from error
        return cls(record.seq, record.at, holder, record.token, state)

    @property
    def written_at(self) -> datetime:
        return datetime.fromtimestamp(min(self.at, LAST_TIME), UTC)

    def to_record(self) -> dict[str, Any]:
        """As JSON, with known secrets masked."""
        return {
            "number": self.number,
            "written_at": self.written_at.isoformat().replace("+00:00", "Z"),
            "holder": mask(self.holder),
            "token": self.token,
            "state": self.state.shown(),
        }


def claim(session: Session, holder: str, *, idle: float = 0) -> Claim:
    """Claim a session for a dispatcher; whoever claimed it before is fenced off from now on.

    With `idle`, only where no other holder has claimed or written for so many seconds, else `Fenced`: for a second
    dispatcher that is to step in, not to push in. The same holder may claim again at any time."""
    if not holder:
        raise InvalidArgument("a claim needs a holder", hint="any name that tells this dispatcher from others")
    return Claim(session, holder, session.claim(holder, idle=idle))


def current(session: Session) -> Snapshot | None:
    """The session's hot state as it was written last, or None where there is none."""
    newest = session.records(SERIES, newest=True, limit=1)
    return Snapshot.of(newest[0]) if newest else None


def history(session: Session, *, before: int | None = None, limit: int | None = None) -> Iterator[Snapshot]:
    """The session's hot states, the newest first, read as they are asked for; with `before`, those with a smaller
    number."""
    while limit is None or limit > 0:
        size = _PAGE if limit is None else min(_PAGE, limit)
        page = session.records(SERIES, newest=True, before=before, limit=size)
        for record in page:
            yield Snapshot.of(record)
        if len(page) < size:
            return
        before = page[-1].seq
        limit = None if limit is None else limit - size
