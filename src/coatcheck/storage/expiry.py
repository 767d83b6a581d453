"""When sessions and artifacts expire: the one definition, in Python and as SQL for both databases.

A session expires `ttl` seconds after its last use. A ref expires with its session, or at its own
time if that is earlier. A pinned ref never expires. Without a time to live, there is no end: None
in Python, NULL in SQL, where every comparison with it is false.

A put in a fleet decides inside the database (`put_1` in `postgres_schema`), whose functions never
change once they are released: there, another rule is a new step.
"""

from __future__ import annotations

from typing import Final


def session_end(ttl: float | None, used: float) -> float | None:
    """Return when a session expires that was last used at `used`."""
    return None if ttl is None else used + ttl


def ref_end(end_of_session: float | None, expires: float | None, *, pinned: bool) -> float | None:
    """Return when a ref expires, given its own expiry and the end of its session."""
    if pinned:
        return None
    if end_of_session is None or expires is None:
        return end_of_session if expires is None else expires
    return min(end_of_session, expires)


def is_over(end: float | None, at: float) -> bool:
    """Return whether something with this end has expired at this time."""
    return end is not None and end <= at


SESSION_END: Final = "session.used + session.ttl"
REF_MAY_EXPIRE: Final = "ref.gone IS NULL AND NOT ref.pinned"


def session_is_over(at: str) -> str:
    """Return the SQL condition that a row of `session` has expired at this parameter."""
    return f"{SESSION_END} <= {at}"


def ref_is_over(at: str) -> str:
    """Return the SQL condition that a row of `ref` has expired by its own time at this
    parameter."""
    return f"{REF_MAY_EXPIRE} AND ref.expires <= {at}"
