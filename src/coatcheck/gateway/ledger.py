"""The ledger: records of a session that say what was sent for the messages that a client keeps.

Four kinds of records, each in a series of its own, whose first record counts and never changes:

- an adoption, under the digest of a conversation's first message: our tools as they are described
  to the model, their names, and the policy. Without it a conversation is never changed.
- a pin, under a call's id and the digest of its result: what was sent in place of the result, or
  that it stayed.
- an entry, under the digest of everything before an answer and a value of the answer that every
  client sends back
  unchanged: the messages that were sent for it.
- a point, under the same key as an entry, if nobody names the conversation's session: which session
  is there.

A record has at most 1 MiB; a larger one is an artifact of the session. All live as long as the
session, 30 days after its last use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.config import SESSION_TTL
from coatcheck.errors import Damaged, StoreError
from coatcheck.gateway.raw_json import digest, fields_of, items_of, raw_of, value_of
from coatcheck.refs import RECORD_LIMIT

if TYPE_CHECKING:
    from coatcheck.session import Session

VERSION: Final = 1
LIFE: Final = SESSION_TTL
"""Seconds that a ledger lives after its last use."""
WRITER: Final = "coatcheck gateway"
"""The tool of artifacts that are records of the gateway."""
_SERIES: Final = "ledger:"
_INLINE: Final = RECORD_LIMIT - 4_096


@dataclass(frozen=True, slots=True)
class Adoption:
    """What is pinned for a conversation: the mode, our tools as they are sent, and their names by
    purpose."""

    mode: str
    tools: list[Raw]
    names: Mapping[str, str]
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What was sent for an answer that a client keeps: messages, and what the client was shown
    after the key."""

    messages: list[Raw]
    after: list[str] = field(default_factory=list)


class Ledger:
    """Reads and writes the ledger of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find(self, keys: Collection[str]) -> dict[str, dict[str, Raw]]:
        """Return the members of each record that exists, with one query. Raises `StoreError`."""
        found = self._session.first_records([_SERIES + key for key in keys]) if keys else {}
        return {
            series.removeprefix(_SERIES): self._read(record.body)
            for series, record in found.items()
        }

    def write(self, key: str, body: Mapping[str, Any]) -> dict[str, Raw]:
        """Write a record, and return the one that counts, which another replica may have written
        first. Returns when it is durable. Raises `StoreError`."""
        data = self._encoded(key, body)
        if self._session.record(_SERIES + key, data) == 1:
            return self._read(data)
        return self.find([key]).get(key) or self._read(data)

    def write_all(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Write several records in one transaction. Those that exist already stay. Raises
        `StoreError`."""
        self._session.record_all(
            [(_SERIES + key, self._encoded(key, body), None) for key, body in records.items()]
        )

    def claim(self, key: str) -> bool:
        """Return whether this is the first claim of a key, here or by any other gateway. Raises
        `StoreError`."""
        return self._session.record_all([(_SERIES + key, b"{}", 1)]) == [1]

    def adopt(self, key: str, adoption: Adoption) -> Adoption:
        """Adopt a conversation, and return what is pinned for it."""
        body = {
            "mode": adoption.mode,
            "tools": adoption.tools,
            "names": adoption.names,
            "policy": adoption.policy,
        }
        return adoption_of(self.write(key, body))

    def _encoded(self, key: str, body: Mapping[str, Any]) -> bytes:
        """Return a record as it is written. A large one is stored as an artifact first."""
        data = bytes(raw_of({"v": VERSION, **body}))
        if len(data) <= _INLINE:
            return data
        ref = self._session.put(
            data, media_type="application/json", tool=WRITER, name=f"{_SERIES}{key}"
        )
        return bytes(raw_of({"v": VERSION, "artifact": ref.pointer}))

    def _read(self, body: bytes) -> dict[str, Raw]:
        try:
            fields = fields_of(body)
            if "artifact" in fields:
                whole = self._session.get(value_of(fields["artifact"]))
                fields = fields_of(whole if isinstance(whole, bytes) else raw_of(whole))
        except ValueError as error:
            raise Damaged("a record of the ledger is damaged") from error
        if value_of(fields.get("v", Raw(b"0"))) != VERSION:
            raise StoreError(
                "the ledger was written by another version of coatcheck", hint="upgrade the gateway"
            )
        return fields


def adoption_of(fields: Mapping[str, Raw]) -> Adoption:
    return Adoption(
        value_of(fields["mode"]),
        items_of(fields["tools"]),
        value_of(fields["names"]),
        value_of(fields["policy"]),
    )


def entry_key(prefix: str, value: str) -> str:
    """Return the key of the answer after this prefix that has this value."""
    return digest("entry", prefix, value)


def entry_of(fields: Mapping[str, Raw]) -> LedgerEntry:
    return LedgerEntry(items_of(fields["messages"]), value_of(fields["after"]))
