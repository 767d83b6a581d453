"""`Keeper`: where a transcript's payloads go. They are held by a session of the transcript's own, and what a model is
shown by the agent's session too, so that its model can read the pointers.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from coatcheck.errors import InvalidArgument, StoreError
from coatcheck.externalize import configured
from coatcheck.externalize.marks import is_ours
from coatcheck.externalize.parcel import Parcel
from coatcheck.externalize.plain import described
from coatcheck.externalize.policy import CLEARLY, Limit, Policy
from coatcheck.externalize.stub import facts, is_stub, stub_of
from coatcheck.ids import digest_of
from coatcheck.intake import About
from coatcheck.media import JSON
from coatcheck.media import is_text as is_text_type
from coatcheck.previews import Sample
from coatcheck.redaction import mask
from coatcheck.refs import Ref, summarize
from coatcheck.scope import Scope, is_text
from coatcheck.session import Session
from coatcheck.storage import SessionInfo
from coatcheck.store import Store
from coatcheck.tokens import estimate
from coatcheck.transcript.formats import Format, Message
from coatcheck.transcript.refs import PREFIX
from coatcheck.transcript.scan import parse
from coatcheck.transcript.splice import Fetch, Payload
from coatcheck.transcript.strings import utf8
from coatcheck.values import Encoded, encode, encode_text

_LABEL: Final = 1_000
_CHARS: Final = 2  # of JSON in a token, at the least
_PIECE: Final = 24  # characters in a row of a text, where only some of it is looked at
# No text costs more tokens a byte than the first; letters like these and controls, the second besides.
_DEAREST: Final = 1.6
_RAREST: Final = 2.0
_RARE: Final = b"jkqwxz" + bytes(code for code in range(32) if code not in b"\t\n\r") + b"\x7f"
_ENDS: Final = 16
_NO_SAMPLE: Final = Sample(b"", b"", 0)
_RECENT: Final = 64  # short lines that passed unread: the call of a result is among them
_SEEN: Final = 16_384  # characters of a text that is remembered for a while: a host often writes it twice
_STUBS: Final = 256  # that were made last: the same result often stands on several lines, and in several files
_NAMES: Final = 10_000  # calls whose tool is remembered until their result comes


# A stub is a function of the content, its pointer and the policy; the tokens that it saves come with it.
_made: dict[tuple[str, str, str, str], tuple[Policy, str, int]] = {}


def new_session_id() -> str:
    """The id of a session through which one transcript holds its payloads."""
    return PREFIX + secrets.token_hex(16)


class Keeper:
    """Takes a transcript's payloads in, by a policy: the one of the store's settings where none is given.

    Without a `session_id`, it is that of the first refs of ours which the transcript turns out to have, else a new
    one. What a model is shown goes to the agent's `session` as well, where there is one. `stored` and `tokens_saved`
    count what went, and what a model need not be sent for it."""

    def __init__(
        self,
        store: Store,
        session_id: str | None = None,
        *,
        session: Session | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or configured(store.settings)
        if self.policy.redact is not None:
            raise InvalidArgument(
                "a transcript keeps every byte, and this policy masks some", hint="use a policy without redact"
            )
        self.store = store
        self.stored: set[str] = set()
        self.tokens_saved = 0
        self._session_id = session_id
        self._agent = session
        self._own: Session | None = None
        self._known = set() if session_id is None else {session_id}
        self._least = self.policy.safe_chars + 1 if self.policy.enabled else 1 << 62
        bounds = (self.policy.max_chars, self.policy.max_bytes, (self.policy.tokens or 0) * _CHARS)
        self._bulk = min((bound for bound in bounds if bound), default=1)
        by_tokens = self.policy.enabled and self.policy.count is None and self.policy.safe_chars > 0
        only = by_tokens and self.policy.max_chars is None and self.policy.max_bytes is None and not self.policy.tools
        self._short_tokens = self.policy.tokens or 0 if only else 0
        self._short = int(self._short_tokens / _DEAREST)
        self._passed: deque[bytes] = deque(maxlen=_RECENT)
        self._tools: dict[str, str] = {}
        self._line: Any = None

    @property
    def session_id(self) -> str:
        if self._session_id is None:
            self._session_id = new_session_id()
            self._known.add(self._session_id)
        return self._session_id

    @property
    def least(self) -> int:
        return self._least

    def passes(self, text: bytes) -> bool:
        if len(text) >= self._least and (len(text) > self._short or _most_tokens(text) > self._short_tokens):
            return False
        self._passed.append(text)
        return True

    @property
    def bulk(self) -> int:
        return self._bulk

    def learn(self, known: Format, line: Any) -> None:
        message = known.message(line)
        if message is not None:
            self._learn(known, message)

    def leaves(self, known: Format, payload: Payload) -> bool:
        policy, text = self.policy, payload.text
        if not policy.enabled or is_stub(text, policy):
            return False
        limit: Limit = policy
        if policy.tools:
            tool = self._about(known, payload)[0]
            rule = policy.tools.get(tool) if tool else None
            if rule in ("always", "never"):
                return rule == "always"
            limit = rule if isinstance(rule, Limit) else policy
        if not _exceeds(limit, policy, text):
            return False
        try:
            return not is_ours(self.store.secret, text)
        except StoreError:
            return True  # then storing fails too, and says so

    def put(self, known: Format, payload: Payload) -> tuple[Ref, str]:
        is_shown = known.is_shown(payload.path)
        parcel = Parcel(_value(payload), payload.text)
        encoded = parcel.encoded
        sample = parcel.sample if encoded.codec == "bytes" else _NO_SAMPLE
        media_type, kind = described(encoded, sample, JSON if payload.is_json else None)
        tool, call_id = self._about(known, payload)
        about = About(tool=tool, call_id=call_id, media_type=media_type, kind=kind)
        ref = self._put(encoded, is_shown, about)
        self.stored.add(ref.artifact_id)
        if not is_shown:
            return ref, _note(ref)
        key = (ref.artifact_id, ref.pointer, media_type, ref.codec)
        made = _made.get(key)
        if made is None or (made[0] is not self.policy and made[0] != self.policy):
            made = _made[key] = self.policy, *self._stub(ref, parcel)
            if len(_made) > _STUBS:
                _made.pop(next(iter(_made), key), None)
        _, stub, saved = made
        self.tokens_saved += saved
        return ref, stub

    def _stub(self, ref: Ref, parcel: Parcel) -> tuple[str, int]:
        """The stub of what was put, and how many tokens it saves."""
        told = facts(parcel.sample, ref.media_type, ref.kind, self.policy.preview_chars)
        stub = stub_of(ref.pointer, told, self.policy)
        if ref.codec == "bytes":  # what an image costs, providers tell: not what its base64 would
            return stub, 0
        return stub, max(0, (told.tokens or round(_glimpsed(parcel.text))) - round(_glimpsed(stub)))

    def put_raw(self, token: str) -> Ref:
        about = About(media_type="text/plain", kind="data", summary="a JSON string just as it was written")
        return self._put(Encoded(*encode(token), token), False, about)

    def hold(self) -> None:
        if self._own is None:
            self._own = self.store.session(self.session_id, ttl=None)

    def _held(self) -> Session:
        """The session. A put makes it where it is new: that is one change of the catalog less."""
        if self._own is None:
            self._own = Session(self.store, Scope(SessionInfo(self.session_id, created=time.time())))
        return self._own

    def is_ours(self, sessions: Iterable[str]) -> bool:
        wanted = set(sessions)
        if not wanted <= self._known:
            self._known |= {one.session_id for one in self.store.sessions() if one.session_id.startswith(PREFIX)}
        if self._session_id is None and wanted and wanted <= self._known:
            self._session_id = min(wanted)
        return wanted <= self._known

    def _put(self, value: Encoded, is_shown: bool, about: About) -> Ref:
        also = (self._agent.scope,) if is_shown and self._agent is not None else ()
        return self.store.put_encoded(self._held().scope, value, about, also)

    def _learn(self, known: Format, message: Message) -> None:
        for call in known.calls(message):
            if call.id and call.name:
                self._tools[call.id] = call.name
        while len(self._tools) > _NAMES:
            del self._tools[next(iter(self._tools))]

    def _learn_all(self, known: Format, line: Any) -> None:
        """See every message of a line, once: those of a document were not known yet."""
        if line is not self._line:
            self._line = line
            for _, message in known.messages(line):
                self._learn(known, message)

    def _about(self, known: Format, payload: Payload) -> tuple[str | None, str | None]:
        """The tool and the call that a payload belongs to, where the line tells."""
        line, path = payload.line, payload.path
        if isinstance(line, dict):
            self._learn_all(known, line)
        around = known.message_around(line, path)
        if around is None:
            return None, None
        base, message = around
        inside = path[len(base) :]
        for result in known.results(message):
            if inside[: len(result.path)] == result.path:
                if not result.name:
                    self._learn_all(known, line)
                return _label(result.name or self._tool(known, result.call_id)), _label(result.call_id)
        for call in known.calls(message):
            if inside[: len(call.path)] == call.path:
                return _label(call.name), _label(call.id)
        return None, None

    def _tool(self, known: Format, call_id: str) -> str | None:
        """The tool of a call. It may stand on a short line that passed unread."""
        if call_id and call_id not in self._tools:
            wanted = call_id.encode("utf-8", "surrogatepass")
            for text in [one for one in self._passed if wanted in one]:
                found = parse(text.decode("utf-8", "replace"))
                if found is not None:
                    self.learn(known, found[0])
        return self._tools.get(call_id)


class Weigher(Keeper):
    """A keeper that stores nothing: it tells what would go."""

    def hold(self) -> None:
        pass

    def _put(self, value: Encoded, is_shown: bool, about: About) -> Ref:
        data, media_type, kind = value.data, about.media_type or "", about.kind or ""
        start = data[:1_024].decode("utf-8", "ignore") if is_text_type(media_type) else ""
        summary = summarize(mask(start)) if start else f"{media_type}, {len(data)} bytes"
        return Ref(digest_of(data), self.session_id, len(data), media_type, kind, value.codec, summary=summary)


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


def _exceeds(limit: Limit, policy: Policy, text: str) -> bool:
    """Whether a text is over a limit. Most are far from it, and a bound or a few pieces tell; near it, more pieces do.
    To count all of it would cost more than all the rest."""
    most = limit.tokens
    if most is None or policy.count is not None or limit.max_chars is not None or limit.max_bytes is not None:
        return limit.exceeded(text, policy.count)
    if len(text) * _DEAREST <= most and _most_tokens(encode_text(text)) <= most:
        return False
    about = _glimpsed(text)
    return (_glimpsed(text, 64) if most / CLEARLY <= about <= most * CLEARLY else about) > most


def _most_tokens(data: bytes) -> float:
    """A bound for the tokens of a text, from its bytes as UTF-8, or from those of JSON that it stands in."""
    return len(data) * _DEAREST + (len(data) - len(data.translate(None, _RARE))) * _RAREST + _ENDS


def _glimpsed(text: str, pieces: int = 16) -> float:
    """About how many tokens a text has, from a few pieces of it where it is longer than those."""
    return _seen(text, pieces) if len(text) <= _SEEN else _glimpse(text, pieces)


def _glimpse(text: str, pieces: int) -> float:
    if len(text) <= 2 * pieces * _PIECE:
        return estimate(text)
    starts = (number * (len(text) - _PIECE) // (pieces - 1) for number in range(pieces))
    return estimate("".join([text[at : at + _PIECE] for at in starts])) * len(text) / (pieces * _PIECE)


_seen = lru_cache(_STUBS)(_glimpse)


def _note(ref: Ref) -> str:
    """The stub where no model looks: what was there, in one line."""
    said = {"stub": "stored whole", "artifact": ref.pointer, "media_type": ref.media_type, "size_bytes": ref.size_bytes}
    return "{" + ",".join(f"{utf8(key)}:{utf8(v) if isinstance(v, str) else v}" for key, v in said.items()) + "}"


def _label(text: str | None) -> str | None:
    """A tool's name or a call's id as the store takes it."""
    return text[:_LABEL] if text and is_text(text[:_LABEL]) else None
