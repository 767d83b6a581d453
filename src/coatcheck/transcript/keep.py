"""`Keeper`: where a transcript's payloads go. They are held by a session of the transcript's own, and what a model is
shown by the agent's session too, so that its model can read the pointers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Final

from coatcheck.errors import InvalidArgument, StoreError
from coatcheck.externalize.marks import is_ours
from coatcheck.externalize.plain import described, kept
from coatcheck.externalize.policy import CLEARLY, Policy
from coatcheck.externalize.stub import facts, is_stub, stub_of
from coatcheck.refs import Ref
from coatcheck.scope import is_text
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.tokens import estimate
from coatcheck.transcript.formats import Format, Message
from coatcheck.transcript.refs import PREFIX
from coatcheck.transcript.scan import parse
from coatcheck.transcript.splice import Fetch, Payload
from coatcheck.transcript.strings import utf8
from coatcheck.values import encode

DEFAULT: Final = Policy()
_LABEL: Final = 1_000
_CHARS: Final = 2  # of JSON in a token, at the least
_PIECES, _PIECE = 16, 64  # what is looked at of a text before all of it is
# No text of ASCII costs more tokens a character than the first; letters like these and controls, the second besides.
_DEAREST: Final = 1.53
_RAREST: Final = 2.0
_RARE: Final = b"jkqwxz" + bytes(code for code in range(32) if code not in b"\t\n\r") + b"\x7f"
_ENDS: Final = 16
_NAMES: Final = 10_000  # calls whose tool is remembered until their result comes


def new_session_id() -> str:
    """The id of a session through which one transcript holds its payloads."""
    return PREFIX + secrets.token_hex(16)


class Keeper:
    """Takes a transcript's payloads in, by a policy. What the agent's `session` puts is its own; with None, only the
    transcript holds them."""

    def __init__(
        self, store: Store, session_id: str, *, session: Session | None = None, policy: Policy | None = None
    ) -> None:
        self._policy = policy or DEFAULT
        if self._policy.redact is not None:
            raise InvalidArgument(
                "a transcript keeps every byte, and this policy masks some", hint="use a policy without redact"
            )
        self._store = store
        self._agent = session
        self._own = store.session(session_id, ttl=None)
        self._known = {session_id}
        self._least = self._policy.safe_chars + 1 if self._policy.enabled else 1 << 62
        bounds = (self._policy.max_chars, self._policy.max_bytes, (self._policy.tokens or 0) * _CHARS)
        self._bulk = min((bound for bound in bounds if bound), default=1)
        self._tools: dict[str, str] = {}
        self._last: Message | None = None

    @property
    def session_id(self) -> str:
        return self._own.session_id

    @property
    def least(self) -> int:
        return self._least

    @property
    def bulk(self) -> int:
        return self._bulk

    def learn(self, known: Format, line: Any) -> None:
        message = known.message(line)
        if message is not None:
            self._learn(known, message)

    def _learn(self, known: Format, message: Message) -> None:
        for call in known.calls(message):
            if call.id and call.name:
                self._tools[call.id] = call.name
        while len(self._tools) > _NAMES:
            del self._tools[next(iter(self._tools))]

    def leaves(self, payload: Payload) -> bool:
        policy, text = self._policy, payload.text
        if not policy.enabled or not self._exceeds(text) or is_stub(text, policy):
            return False
        try:
            return not is_ours(self._store.secret, text)
        except StoreError:
            return True  # then storing fails too, and says so

    def put(self, known: Format, payload: Payload) -> tuple[Ref, str]:
        tool, call_id = self._about(known, payload)
        value, sample = kept(_value(payload), payload.text)
        media_type, kind = described(value, sample, "application/json" if payload.is_json else None)
        ref = self._own.put(value, tool=tool, call_id=call_id, media_type=media_type, kind=kind)
        if not known.is_shown(payload.path):
            return ref, _note(ref)
        if self._agent is not None:
            self._agent.put(value, tool=tool, call_id=call_id, media_type=media_type, kind=kind)
        return ref, stub_of(ref.pointer, facts(sample, media_type, kind, self._policy.preview_chars), self._policy)

    def put_raw(self, token: str) -> Ref:
        return self._own.put(token, media_type="text/plain", kind="data", summary="a JSON string as it was written")

    def is_ours(self, sessions: Iterable[str]) -> bool:
        wanted = set(sessions)
        if not wanted <= self._known:
            self._known |= {one.session_id for one in self._store.sessions() if one.session_id.startswith(PREFIX)}
        return wanted <= self._known

    def _exceeds(self, text: str) -> bool:
        """Whether a text is over the policy. Most are far from it, and a bound or a few pieces tell: counting costs
        more than parsing does."""
        policy = self._policy
        most = policy.tokens
        if most is None or policy.count is not None or policy.max_chars is not None or policy.max_bytes is not None:
            return policy.exceeded(text, policy.count)
        if len(text) * _DEAREST <= most and text.isascii():
            data = text.encode()
            rare = len(data) - len(data.translate(None, _RARE))
            if len(data) * _DEAREST + rare * _RAREST + _ENDS <= most:
                return False
        about = _glimpsed(text)
        return about > most if not most / CLEARLY <= about <= most * CLEARLY else policy.exceeded(text)

    def _about(self, known: Format, payload: Payload) -> tuple[str | None, str | None]:
        """The tool and the call that a payload belongs to, where the line tells."""
        messages = list(known.messages(payload.line))
        if messages and messages[0][1] is not self._last:  # a document: its calls are not known yet
            self._last = messages[0][1]
            for _, message in messages:
                self._learn(known, message)
        for base, message in messages:
            if payload.path[: len(base)] != base:
                continue
            inside = payload.path[len(base) :]
            for result in known.results(message):
                if inside[: len(result.path)] == result.path:
                    return _label(result.name or self._tools.get(result.call_id)), _label(result.call_id)
            for call in known.calls(message):
                if inside[: len(call.path)] == call.path:
                    return _label(call.name), _label(call.id)
        return None, None


def fetch_from(store: Store) -> Fetch:
    """The bytes of artifacts in a store, by the session that holds them."""
    sessions: dict[str, Session] = {}

    def fetch(session_id: str, artifact_id: str) -> bytes:
        session = sessions.get(session_id)
        if session is None:
            session = sessions[session_id] = store.session(session_id)
        with session.open(artifact_id) as stream:
            return stream.read()

    return fetch


def _value(payload: Payload) -> object:
    """What is stored: a container as the value that it is, where the store would write it just so, else its text."""
    if payload.is_json:
        found = parse(payload.text)
        try:
            if found is not None and encode(found[0])[1] == payload.text.encode():
                return found[0]
        except InvalidArgument:
            pass
    return payload.value


def _glimpsed(text: str) -> float:
    """About how many tokens a text has, from a few pieces of it where it is longer than those."""
    if len(text) <= 2 * _PIECES * _PIECE:
        return estimate(text)
    starts = (number * (len(text) - _PIECE) // (_PIECES - 1) for number in range(_PIECES))
    return estimate("".join([text[at : at + _PIECE] for at in starts])) * len(text) / (_PIECES * _PIECE)


def _note(ref: Ref) -> str:
    """The stub where no model looks: what was there, in one line."""
    said = {"stub": "stored whole", "artifact": ref.pointer, "media_type": ref.media_type, "size_bytes": ref.size_bytes}
    return "{" + ",".join(f"{utf8(key)}:{utf8(v) if isinstance(v, str) else v}" for key, v in said.items()) + "}"


def _label(text: str | None) -> str | None:
    """A tool's name or a call's id as the store takes it."""
    return text[:_LABEL] if text and is_text(text[:_LABEL]) else None
