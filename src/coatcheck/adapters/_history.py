"""Finds the artifacts of a conversation again in hosts that pass its history to each run, but no
id.

A run without an id has a private session. For each call whose output names artifacts, the store
notes that the session had this call, after these messages, and that the model got this output. A
later run whose history has the same call, after the same messages from the beginning on and with
the same output, is granted these artifacts, and no others. So two conversations never share a
session, and a pointer alone opens nothing: neither in a message, nor in the output of another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

from coatcheck import Session
from coatcheck.adapters import Adapter
from coatcheck.ids import SCHEME

__all__ = ["HistoryItem", "PastCall", "note", "past_calls", "recall", "turn_of"]

_SESSIONS: Final = "coatcheck:history:"
_MOST_NOTES: Final = 16  # sessions that had the same call; if there are more, it proves nothing
_POINTER: Final = re.compile(r"art:[0-9a-f]{12,64}")


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """A message, a call of a tool, or the output of a call.

    `name` is the role of a message, or the tool of a call. `text` is the message, the arguments as
    the model sent them, or the output."""

    kind: Literal["message", "call", "output"]
    name: str = ""
    call_id: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call after the messages with the digest `turn`. A call that was not run yet has no
    output."""

    turn: str
    call_id: str
    name: str
    arguments: str
    output: str | None = None

    @property
    def pointers(self) -> set[str]:
        """The pointers that the call can prove: those in its output, or in its arguments if it has
        none."""
        text = self.arguments if self.output is None else self.output
        return set(_POINTER.findall(text)) if SCHEME in text else set()

    @property
    def series(self) -> str:
        """The name of the series with the sessions that had this call."""
        fields = [self.call_id, self.name, self.arguments, self.output]
        return blake2b(json.dumps(fields).encode(), digest_size=32).hexdigest()


def turn_of(key: bytes, items: Iterable[HistoryItem]) -> str:
    """Return the digest of a history up to its last message that is not the model's, else ""."""
    turn = ""
    for turn, _ in _turns(key, items):  # noqa: B007 - the last one counts
        pass
    return turn


def past_calls(key: bytes, items: Iterable[HistoryItem]) -> Iterator[PastCall]:
    """Yield the calls of a history that have an output."""
    asked: dict[str, PastCall] = {}
    for turn, item in _turns(key, items):
        if item.kind == "call":
            asked[item.call_id] = PastCall(turn, item.call_id, item.name, arguments=item.text)
        elif item.kind == "output" and item.call_id in asked:
            call = asked[item.call_id]
            yield PastCall(call.turn, call.call_id, call.name, call.arguments, output=item.text)


def _turns(key: bytes, items: Iterable[HistoryItem]) -> Iterator[tuple[str, HistoryItem]]:
    """Yield each item with the digest of the history up to the last message that is not the
    model's."""
    turn, digest = "", blake2b(key=key, digest_size=32)
    for item in items:
        line = json.dumps([item.kind, item.name, item.call_id, item.text])
        digest.update(f"{line}\n".encode())
        if item.kind == "message" and item.name != "assistant":
            turn = digest.hexdigest()
        yield turn, item


def note(adapter: Adapter, session_id: str, call: PastCall) -> None:
    """Note that the session with this id had this call. Raises `StoreError`."""
    if call.turn:
        turn = adapter.store.session(_SESSIONS + call.turn, ttl=adapter.ttl)
        turn.record(call.series, session_id.encode())


def recall(adapter: Adapter, session: Session, call: PastCall) -> None:
    """Grant a session the artifacts that this call proves. Raises `StoreError`."""
    missing = [pointer for pointer in call.pointers if session.ref(pointer) is None]
    if not missing or not call.turn:
        return
    turn = adapter.store.session(_SESSIONS + call.turn)
    notes = turn.records(call.series, limit=_MOST_NOTES + 1)
    ids = sorted({record.body.decode() for record in notes})
    if not ids or len(notes) > _MOST_NOTES:
        return
    earlier = [adapter.store.session(one) for one in ids]
    for pointer in missing:
        # A session without the artifact had an equal call by chance, or forged it. Then the call
        # proves nothing.
        if all(one.ref(pointer) is not None for one in earlier):
            earlier[0].content(pointer)  # a use: the session of the earlier run lives on
            earlier[0].grant(pointer, to=session.session_id)
