"""Which conversation a request continues, and the session that belongs to it alone.

A client that names its session (by a header, the path, or its own session id) decides itself what
belongs together. For all others, nothing in a request says so: two people may begin with the same
message, and get the same answer. Such a conversation is known by the digest of its whole prefix,
with the client's credentials and the system text. It has a session of its own, and an index says at
which prefix each session is.

A session is continued by one request only: the first that claims the point at which it is. A second
one with the same prefix (another conversation that was equal so far, or a request that is sent
again) gets a new session, with what was stored up to that point and nothing that came later.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from coatcheck.errors import CoatcheckError, NotFound
from coatcheck.gateway.ledger import LIFE, WRITER, Ledger
from coatcheck.gateway.raw_json import digest, value_of
from coatcheck.ids import pointer_of
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.refs import Ref
    from coatcheck.session import Session
    from coatcheck.store import Store

_RESPONSES: Final = "coatcheck:responses"  # the session that knows the sessions of responses
_INDEX: Final = "coatcheck:conversations-"
_COUNTED_LIFE: Final = (
    3_600.0  # seconds that the session of a request lives that only counts tokens
)
_LONGEST_NAME: Final = 180
_POINTER_DIGITS: Final = 32
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class Origin:
    """The session that a request names or is known by, and its parent.

    `owner` is the digest of the client's credentials if nothing names the session: then
    conversations are known by their prefix. It is '' if the client or the settings name the
    session: then the name separates conversations, and credentials may change during one."""

    name: str
    parent: str | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a conversation is kept: its session, the ledger of that session, and the records that
    were asked for."""

    session: Session
    ledger: Ledger
    records: Mapping[str, dict[str, Raw]] = field(default_factory=dict)


class Sessions:
    """Opens the sessions of one tenant's store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def _ttl(self) -> float | None:
        return None if self.store.ttl is None else max(LIFE, self.store.ttl)

    def open(self, name: str, parent: str | None = None) -> Session:
        """Open a session. It lives 30 days after its last use, or longer if it already did."""
        return self.store.lasting_session(name, parent=parent, ttl=self._ttl)

    def opened(self, origin: Origin) -> Session:
        """Return the session of an origin. One that cannot be created, on a full disk, can still be
        read."""
        try:
            return self.open(origin.name, origin.parent)
        except CoatcheckError as error:
            _LOG.warning("a session cannot be opened: %s", _why(error))
            return self.unopened(origin.name)

    def unopened(self, name: str, *, ttl: float | None = None) -> Session:
        """Return a session without asking the store. It is created with its first artifact or
        record."""
        return self.store.unchecked_session(name, ttl=self._ttl if ttl is None else ttl)

    def index(self, origin: Origin) -> Session:
        """Return the session with the index of all conversations of this origin. No model ever
        reads in it."""
        return self.unopened(_INDEX + digest("index", origin.name, origin.owner))

    def origin_of(self, response_id: str, default: Origin) -> Origin:
        """Return the origin of an earlier response to the same client, which named no session."""
        key = digest("session", default.owner, response_id)
        try:
            found = self._responses().find([key]).get(key)
        except CoatcheckError:
            return default
        return default if found is None else replace(default, name=str(value_of(found["session"])))

    def remember(self, response_id: str, origin: Origin) -> None:
        """Note the origin of a response."""
        key = digest("session", origin.owner, response_id)
        self._responses().write(key, {"session": origin.name})

    def _responses(self) -> Ledger:
        return Ledger(self.store.session(_RESPONSES, ttl=LIFE))


class Conversations:
    """The conversations of one origin whose session nobody names, for one request. A request that
    only counts tokens (`is_count`) continues no session, and leaves nothing behind.

    The answer to the request is a point, which has several names: the client may send back one
    value of it or another, or name it by its id. `_point` is the same under all of them."""

    def __init__(
        self, sessions: Sessions, origin: Origin, index: Ledger, *, is_count: bool
    ) -> None:
        self._sessions = sessions
        self._origin = origin
        self._index = index
        self._is_count = is_count
        self._point = secrets.token_hex(8)

    def home(self, answers: Sequence[Sequence[str]], wanted: Collection[str]) -> Home:
        """Return where the conversation of a request is kept, with those of the `wanted` records
        that it has. `answers` are the keys of each answer in the request, oldest first. Raises
        `StoreError`."""
        known = self._index.find({key for keys in answers for key in keys})
        last: Mapping[str, Raw] | None = None
        is_newest = False
        for number, keys in enumerate(answers):
            found = next((known[key] for key in keys if key in known), None)
            if found is not None:
                last, is_newest = found, number == len(answers) - 1
        if last is None:
            return self._new()
        before = self._sessions.unopened(value_of(last["session"]))
        ledger = Ledger(before)
        records = ledger.find(wanted)
        if (
            is_newest
            and not self._is_count
            and self._is_first_after(before, value_of(last["point"]))
        ):
            return Home(before, ledger, records)
        return self._forked(before, value_of(last["pointers"]), records)

    def note(self, keys: Collection[str], session: Session, **more: object) -> None:
        """Note under these keys that the session is at this point, with all that it has stored so
        far. Raises `StoreError`."""
        pointers = pointers_of(session.list())
        body = {"session": session.session_id, "point": self._point, "pointers": pointers, **more}
        self._index.write_all(dict.fromkeys(keys, body))

    def note_pin(self, key: str, session: Session) -> None:
        """Note in which session a result was judged. If that fails, the result is found in that
        session alone."""
        if self._is_count:
            return
        try:
            self._index.write_all({digest("pin", key): {"session": session.session_id}})
        except CoatcheckError as error:
            _LOG.warning("a decision about a result cannot be noted: %s", _why(error))

    def pins(self, keys: Collection[str], home: Home) -> dict[str, dict[str, Raw]]:
        """Return the decisions about these results that were made in another session of this
        origin, and copy them here with what they refer to. A key contains the digest of the whole
        result, so the client has sent it."""
        noted = self._index.find({digest("pin", key) for key in keys})
        found: dict[str, dict[str, Raw]] = {}
        for key in keys:
            where = noted.get(digest("pin", key))
            if where is None:
                continue
            session = self._sessions.unopened(value_of(where["session"]))
            pin = Ledger(session).find([key]).get(key)
            if pin is not None:
                found[key] = pin
                self._copy(session, home, value_of(pin["pointers"]), {key: pin})
        return found

    def _new(self) -> Home:
        name = f"{self._origin.name[:_LONGEST_NAME]}-{secrets.token_hex(8)}"
        session = self._sessions.unopened(name, ttl=_COUNTED_LIFE if self._is_count else None)
        return Home(session, Ledger(session))

    def _is_first_after(self, session: Session, point: str) -> bool:
        """Claim the session at this point, and return whether this is the first claim. False if the
        store fails."""
        try:
            return self._index.claim(digest("claim", session.session_id, point))
        except CoatcheckError as error:
            _LOG.warning(
                "a conversation continues in a new session, the old one cannot be claimed: %s",
                _why(error),
            )
            return False

    def _forked(
        self, before: Session, pointers: Sequence[str], records: dict[str, dict[str, Raw]]
    ) -> Home:
        """Return a new home with these artifacts and records of another session, and with what the
        records refer to: a result that the client has sent may have been judged after this
        point."""
        new = self._new()
        home = Home(new.session, new.ledger, records)
        needed = dict.fromkeys(pointers)
        for record in records.values():
            needed |= dict.fromkeys(value_of(record["pointers"]) if "pointers" in record else ())
        self._copy(before, home, tuple(needed), records)
        return home

    def _copy(
        self,
        before: Session,
        home: Home,
        pointers: Sequence[str],
        records: Mapping[str, dict[str, Raw]],
    ) -> None:
        """Copy artifacts and records of another session. If the store fails, the records are used
        for this request, and the artifacts cannot be read."""
        if self._is_count:
            return
        try:
            if pointers:
                self._sessions.open(home.session.session_id)
            for pointer in pointers:
                _grant(before, pointer, home.session)
            home.ledger.write_all(records)
        except CoatcheckError as error:
            _LOG.warning("what a conversation has stored so far cannot be copied: %s", _why(error))


def pointers_of(refs: Sequence[Ref]) -> list[str]:
    """Return pointers that stay unique, without those of the gateway's own records."""
    return [pointer_of(ref.artifact_id, _POINTER_DIGITS) for ref in refs if ref.tool != WRITER]


def _grant(before: Session, pointer: str, to: Session) -> None:
    try:
        before.grant(pointer, to=to.session_id)
    except NotFound as error:  # it has expired, or a person has removed it
        _LOG.debug("an artifact is not copied: %s", _why(error))


def _why(error: CoatcheckError) -> str:
    return mask(error.message)
