"""Who may write a session's hot state, and the states that were written.

Only the dispatcher that claimed a session last may write its hot state. A claim is a fencing token.
The catalog compares it in the transaction that writes, so a dispatcher that was paused or
partitioned finds out at its next write, and nothing it wrote is visible. Reading needs no claim.
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
from coatcheck.refs import LAST_TIME, iso_time

if TYPE_CHECKING:
    from coatcheck.session import Session
    from coatcheck.storage import Record

SERIES: Final = "hot"
_PAGE: Final = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a session's hot state until another dispatcher claims it. As a context
    manager, it is released at the end."""

    session: Session
    holder: str
    token: int

    def write(self, state: HotState, *, keep: int | None = None) -> int:
        """Write the session's hot state and return its number in the history. With `keep`, only
        that many of the newest states remain in the history.

        Raises `Fenced`, and writes nothing, if the session was claimed again."""
        if not isinstance(state, HotState):
            raise InvalidArgument(
                f"state must be a HotState, got {type(state).__name__}", hint="use HotState.parse"
            )
        checked = HotState.parse(state.content())
        if checked.session_id != self.session.session_id:
            raise InvalidArgument(
                f"the hot state belongs to the session {clip(checked.session_id)}",
                hint=f"the claim is for {clip(self.session.session_id)}",
            )
        body = compact({"by": self.holder, "state": checked.content()}).encode()
        return self.session.record(SERIES, body, token=self.token, keep=keep)

    @property
    def is_held(self) -> bool:
        """Whether this is still the newest claim. Only a write can tell for certain."""
        newest = self.session.claimant()
        return newest is not None and newest.token == self.token

    def release(self) -> None:
        """Give up the claim, so that others need not wait. Does nothing if it is lost already."""
        with contextlib.suppress(Fenced):
            self.session.claim("", instead_of=self.token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A hot state as it was written: its number in the history, the time, the holder, and the token
    of the claim."""

    number: int
    at: float
    holder: str
    token: int | None
    state: HotState

    @classmethod
    def of(cls, record: Record) -> Self:
        """Read a record of the series `hot`. Raises `Damaged`: an imported record may contain
        anything."""
        try:
            body = json.loads(record.body)
            holder, state = body["by"], HotState.parse(body["state"])
            if not isinstance(holder, str):
                raise TypeError("by")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Damaged(
                f"hot state {record.seq} is not valid",
                hint="write the state again, or use an older one",
            ) from error
        return cls(record.seq, record.at, holder, record.token, state)

    @property
    def written_at(self) -> datetime:
        return datetime.fromtimestamp(min(self.at, LAST_TIME), UTC)

    def to_record(self) -> dict[str, Any]:
        """Return the snapshot as JSON, with known secrets masked."""
        return {
            "number": self.number,
            "written_at": iso_time(self.at),
            "holder": mask(self.holder),
            "token": self.token,
            "state": self.state.shown(),
        }


def claim(session: Session, holder: str, *, idle: float = 0) -> Claim:
    """Claim a session for a dispatcher. The previous holder can no longer write.

    With `idle`, raises `Fenced` if another holder has claimed or written within that many seconds:
    for a standby that takes over only from a dead dispatcher. The same holder may claim again at
    any time."""
    if not holder:
        raise InvalidArgument(
            "a claim needs a holder", hint="any name that is unique to this dispatcher"
        )
    return Claim(session, holder, session.claim(holder, idle=idle))


def current(session: Session) -> Snapshot | None:
    """Return the session's newest hot state, or None if there is none."""
    newest = session.records(SERIES, newest=True, limit=1)
    return Snapshot.of(newest[0]) if newest else None


def history(
    session: Session, *, before: int | None = None, limit: int | None = None
) -> Iterator[Snapshot]:
    """Yield the session's hot states, newest first, loaded page by page. With `before`, those with
    a smaller number."""
    while limit is None or limit > 0:
        size = _PAGE if limit is None else min(_PAGE, limit)
        page = session.records(SERIES, newest=True, before=before, limit=size)
        for record in page:
            yield Snapshot.of(record)
        if len(page) < size:
            return
        before = page[-1].seq
        limit = None if limit is None else limit - size
