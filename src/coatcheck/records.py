"""Claims and records of a session, checked before they reach the catalog.

A series is for what an agent's host writes again and again beside its artifacts: states, figures. Some series only take
what is written under the session's claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coatcheck.errors import Fenced, InvalidArgument, TooLarge
from coatcheck.scope import Scope, check_name, is_seconds
from coatcheck.storage import Catalog, Claimant, Record
from coatcheck.uses import Uses

RECORD_LIMIT: Final = 1 << 20
FENCED: Final = frozenset({"hot"})
"""The series that only take records under a claim."""

_LAST: Final = (1 << 63) - 1


class Records:
    """The claims and records of all sessions of one store."""

    def __init__(self, catalog: Catalog, uses: Uses, *, grace: float, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._uses = uses
        self._grace = grace
        self._clock = clock

    def claim(self, scope: Scope, holder: str, idle: float, instead_of: int | None) -> int:
        if holder != "":
            check_name(holder, "holder")
        _check_number(instead_of, "token", least=0)
        if not is_seconds(idle):
            raise InvalidArgument(f"{idle!r} is no number of seconds to be idle for")
        now = self._clock()
        token = self._catalog.claim(scope.info, holder, at=now, idle=idle, instead_of=instead_of, grace=self._grace)
        self._uses.note(scope.lineage, now, scope.info.ttl)
        return token

    def claimant(self, scope: Scope) -> Claimant | None:
        return self._catalog.claimant(scope.session_id)

    def add(self, scope: Scope, series: str, body: bytes, token: int | None, keep: int | None) -> int:
        check_name(series, "series")
        if not isinstance(body, bytes):
            raise InvalidArgument(f"a record is bytes, not a {type(body).__name__}")
        if len(body) > RECORD_LIMIT:
            raise TooLarge(
                f"a record of {len(body)} bytes is over the limit of {RECORD_LIMIT}", hint="put it as an artifact"
            )
        _check_number(token, "token", least=1)
        _check_number(keep, "number of records to keep", least=1)
        if token is None and series in FENCED:
            raise Fenced(f"the series {series!r} takes records under a claim alone", hint="claim the session first")
        now = self._clock()
        number = self._catalog.record(scope.info, series, body, at=now, token=token, keep=keep, grace=self._grace)
        self._uses.note(scope.lineage, now, scope.info.ttl)
        return number

    def find(
        self, scope: Scope, series: str, *, after: int, before: int | None, limit: int | None, newest: bool
    ) -> list[Record]:
        check_name(series, "series")
        for value, what in ((after, "number"), (before, "number"), (limit, "limit")):
            _check_number(value, what, least=0)
        return self._catalog.records(scope.session_id, series, after=after, before=before, limit=limit, newest=newest)


def _check_number(value: object, what: str, *, least: int) -> None:
    """None, or an integer that a catalog can hold."""
    counted = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LAST
    if value is not None and not counted:
        raise InvalidArgument(f"a {what} of {value!r} makes no sense", hint=f"give an integer, {least} or more")
