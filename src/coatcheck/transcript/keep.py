"""Store a transcript's payloads, and record what the file was: `Keeper` and `Manifest`.

Each transcript has its own session, which owns its payloads. The agent's session gets access to those that a model is
shown, so that the model can read the pointers. Manifests are records of the transcript's session, and go with it.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from operator import methodcaller
from typing import Any, Final

from coatcheck.checks import is_whole
from coatcheck.errors import InvalidArgument
from coatcheck.externalize.pipeline import Prepared, described, leaves, masked, masked_labels, put_prepared, stub_for
from coatcheck.externalize.policy import Policy, configured
from coatcheck.ids import digest_of, is_encodable
from coatcheck.intake import About
from coatcheck.media import JSON
from coatcheck.media import is_text as is_text_type
from coatcheck.messages import Format, Message
from coatcheck.redaction import mask
from coatcheck.refs import Ref, summarize
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.tokens import at_most, sampled
from coatcheck.transcript.scan import binary, parse, utf8
from coatcheck.transcript.splice import PREFIX, Fetch, LinePayload
from coatcheck.values import as_text, encode

_SERIES: Final = "transcript"
_MAX_MANIFESTS: Final = 4
_MAX_LABEL: Final = 1_000
_MIN_CHARS: Final = 2  # characters of JSON per token
_RECENT: Final = 64  # short lines that were not parsed are remembered: the call of a result may be among them
_CACHED: Final = 256  # stubs: the same result is often on several lines, and in several files
_MAX_CALLS: Final = 10_000  # calls whose tool is remembered until their result comes


# A stub is a function of the content, its pointer and the policy. The policy, the stub, and the tokens it saves:
_made: dict[tuple[str, str, str, str], tuple[Policy, str, int]] = {}


def new_session_id() -> str:
    """Return a new id for the session that owns a transcript's payloads."""
    return PREFIX + secrets.token_hex(16)


class Keeper:
    """Stores a transcript's payloads by a policy, by default that of the store's settings.

    Without a `session_id`, the session of the transcript's first refs is used, or else a new one. Payloads that a model
    is shown are also granted to the agent's `session`, if given. With `dry_run` nothing is stored. `stored` are the
    artifacts, `tokens_saved` counts the tokens that a model is no longer sent, and `masked` counts payloads that were
    stored with secrets masked. A payload has at least `least` characters, and the small parts of a container that is
    one have at least `bulk`."""

    def __init__(
        self,
        store: Store,
        session_id: str | None = None,
        *,
        session: Session | None = None,
        policy: Policy | None = None,
        dry_run: bool = False,
    ) -> None:
        self.policy = policy = policy or configured(store.settings)
        self.store = store
        self.masked = 0
        self.stored: set[str] = set()
        self.tokens_saved = 0
        self._session_id = session_id
        self._agent = session
        self.dry_run = dry_run
        self._own: Session | None = None
        self._known = set() if session_id is None else {session_id}
        tokens = policy.tokens
        bounds = (policy.max_chars, policy.max_bytes, tokens and tokens * _MIN_CHARS)
        self.bulk = min((bound for bound in bounds if bound), default=1)
        self.least = policy.safe_chars + 1 if policy.enabled else 1 << 62
        only_tokens = policy.count is None and policy.max_chars is None and policy.max_bytes is None
        self._short = tokens or 0 if only_tokens and policy.safe_chars and not policy.tools else 0
        self._passed: deque[bytes] = deque(maxlen=_RECENT)
        self._tools: dict[str, str] = {}
        self._document: Any = None  # the current line, if it is not a message itself and its calls are not noted yet

    @property
    def session_id(self) -> str:
        """The session that owns the payloads of the transcript."""
        if self._session_id is None:
            self._session_id = new_session_id()
            self._known.add(self._session_id)
        return self._session_id

    def passes(self, text: bytes) -> bool:
        """Whether a text is certainly within the policy, decided without parsing it."""
        if len(text) >= self.least and not at_most(text, self._short):
            return False
        self._passed.append(text)
        return True

    def learn(self, fmt: Format, line: Any) -> None:
        """Take note of the calls in a parsed line, before its payloads are decided."""
        message = fmt.message(line)
        self._document = line if message is None else None
        if message is not None:
            self._learn(fmt, message)

    def leaves(self, fmt: Format, payload: LinePayload) -> bool:
        """Whether a payload is over the policy."""
        policy, text = self.policy, payload.text
        tool = self._about(fmt, payload)[0] if policy.tools else None
        return leaves(self.store, policy, tool, text, exceeds=methodcaller("probably_exceeded", text, policy.count))

    def redacted(self, payload: LinePayload) -> LinePayload:
        """Return the payload as it may be stored: the same object, or a copy with secrets masked."""
        if self.policy.redact != "store":
            return payload
        value: Any = payload.value
        if payload.is_json and (found := parse(payload.text)) is not None:
            value = found[0]
        stored = _masked_base64(value, self.policy) if isinstance(value, str) else None
        stored = masked(value, self.policy) if stored is None else stored
        if stored is value or stored == value:
            return payload
        self.masked += 1
        if isinstance(stored, bytes):
            return payload._replace(value=stored, text=payload.prefix + base64.b64encode(stored).decode())
        if payload.is_json:
            stored = utf8(stored) if isinstance(stored, str) else as_text(stored)
        return payload._replace(value=stored, text=stored)

    def put(self, fmt: Format, payload: LinePayload) -> tuple[Ref, str]:
        """Store a payload, which is masked already. Return its ref, and the stub that replaces it."""
        is_shown = fmt.is_shown(payload.path)
        prepared = Prepared(_value(payload), payload.text)
        tool, call_id = self._about(fmt, payload)
        lender = self._agent.session_id if is_shown and self._agent else None
        about = masked_labels(About(tool=tool, call_id=call_id, granted_by=lender), self.policy)
        ref = self._put(prepared, about, JSON if payload.is_json else None, is_shown)
        self.stored.add(ref.artifact_id)
        if not is_shown:
            return ref, _note(ref)
        key = (ref.artifact_id, ref.pointer, ref.media_type, ref.codec)
        made = _made.get(key)
        if made is None or made[0] != self.policy:
            stub, tokens = stub_for(ref, prepared, self.policy)
            # The provider decides what an image costs, not its base64.
            whole = 0 if ref.codec == "bytes" else tokens or round(sampled(prepared.text))
            made = _made[key] = self.policy, stub, max(0, whole and whole - round(sampled(stub)))
            if len(_made) > _CACHED:
                _made.pop(next(iter(_made), key), None)
        self.tokens_saved += made[2]
        return ref, made[1]

    def put_raw(self, token: str) -> Ref:
        """Store a JSON token byte for byte, if no style reproduces it."""
        about = About(summary="a JSON string just as it was written")
        return self._put(Prepared(token, token), about, "text/plain", False)

    def own_session(self) -> Session:
        """Return the transcript's session, which is created in the store on the first call."""
        if self._own is None:
            self._own = self.store.session(self.session_id, ttl=None)
        return self._own

    def is_ours(self, sessions: Iterable[str]) -> bool:
        """Whether this store knows all of these transcript sessions."""
        wanted = set(sessions)
        if not wanted <= self._known:
            self._known |= {one.session_id for one in self.store.sessions() if one.session_id.startswith(PREFIX)}
        if self._session_id is None and wanted and wanted <= self._known:
            self._session_id = min(wanted)
        return wanted <= self._known

    def _put(self, prepared: Prepared, about: About, claimed: str | None, is_shown: bool) -> Ref:
        if not self.dry_run:
            also = (self._agent,) if is_shown and self._agent else ()
            return put_prepared(self.own_session(), prepared, about, claimed=claimed, also=also)
        data, (media_type, kind) = prepared.encoded.data, described(prepared.encoded, claimed)
        start = data[:1_024].decode("utf-8", "ignore") if is_text_type(media_type) else ""
        summary = summarize(mask(start)) if start else f"{media_type}, {len(data)} bytes"
        codec = prepared.encoded.codec
        return Ref(digest_of(data), self.session_id, len(data), media_type, kind, codec, summary=summary)

    def _learn(self, fmt: Format, message: Message) -> None:
        for call in fmt.calls(message):
            if call.id and call.name:
                self._tools[call.id] = call.name
        while len(self._tools) > _MAX_CALLS:
            del self._tools[next(iter(self._tools))]

    def _about(self, fmt: Format, payload: LinePayload) -> tuple[str | None, str | None]:
        """Return the tool name and call id of a payload, if the line has them."""
        around = fmt.message_around(payload.line, payload.path)
        if around is None:
            return None, None
        base, message = around
        inside = payload.path[len(base) :]
        for result in fmt.results(message):
            if inside[: len(result.path)] == result.path:
                return _label(result.name or self._tool(fmt, result.call_id)), _label(result.call_id)
        for call in fmt.calls(message):
            if inside[: len(call.path)] == call.path:
                return _label(call.name), _label(call.id)
        return None, None

    def _tool(self, fmt: Format, call_id: str) -> str | None:
        """Return the tool of a call, which may be in the same document, or on a short line that was not parsed."""
        if self._document is not None:
            for _, message in fmt.messages(self._document):
                self._learn(fmt, message)
            self._document = None
        if call_id and call_id not in self._tools:
            wanted = call_id.encode("utf-8", "surrogatepass")
            for text in [one for one in self._passed if wanted in one]:
                found = parse(text.decode("utf-8", "replace"))
                if found is not None and (one := fmt.message(found[0])) is not None:
                    self._learn(fmt, one)
        return self._tools.get(call_id)


def fetch_from(store: Store) -> Fetch:
    """Return a function that reads artifacts of a store, given a session id and an artifact id."""
    sessions: dict[str, Session] = {}

    def fetch(session_id: str, artifact_id: str) -> bytes:
        session = sessions.get(session_id)
        if session is None:
            session = sessions[session_id] = store.session(session_id)
        with session.open(artifact_id) as stream:
            return stream.read()

    return fetch


def _value(payload: LinePayload) -> object:
    """What to store: a container as a value if the store would write the same JSON, else as text."""
    if payload.is_json:
        found = parse(payload.text)
        try:
            if found is not None and encode(found[0])[1] == payload.text.encode():
                return found[0]
        except InvalidArgument:
            pass
    return payload.value


def _masked_base64(text: str, policy: Policy) -> str | None:
    """Mask secrets inside base64 that is wrapped into lines. None if the text is something else, or has none."""
    lines = text.split() if " " not in text[:64] else []
    found = binary("".join(lines)) if len(lines) > 1 else None
    if found is None or (data := masked(found[1], policy)) == found[1]:
        return None
    body, width, start = found[0] + base64.b64encode(data).decode(), len(lines[0]), text.index(lines[0])
    gap = text[start + width : text.index(lines[1], start + width)]
    return gap.join(body[at : at + width] for at in range(0, len(body), width))


def _note(ref: Ref) -> str:
    """The stub for a place that no model is shown."""
    note = {"stub": "stored whole", "artifact": ref.pointer, "media_type": ref.media_type, "size_bytes": ref.size_bytes}
    return json.dumps(note, ensure_ascii=False, separators=(",", ":"))


def _label(text: str | None) -> str | None:
    """A tool name or call id as the store accepts it."""
    label = text[:_MAX_LABEL] if text else None
    return label if label and (label.isascii() or is_encodable(label)) else None


@dataclass(frozen=True, slots=True)
class Segment:
    """What one run made slim: size and checksum (XXH3, 128 bits) of the slim bytes, which identify them; size and
    SHA-256 of the whole bytes, which prove them (None if unknown); and the same of the bytes before the run. Those are
    in the backup, and differ from the whole bytes if some lines were slim before or secrets were masked."""

    size: int
    checksum: str
    whole_size: int
    whole_sha256: str | None
    found_size: int
    found_sha256: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the store remembers of an externalized transcript. Bytes after the last segment were appended since.

    `backed_up` is the number of the first segment that the backup contains. With `masked`, the whole bytes have markers
    in place of secrets: only the backup has the secrets."""

    path: str
    format: str
    segments: tuple[Segment, ...] = ()
    backed_up: int = 0
    masked: bool = False

    @property
    def size(self) -> int:
        return sum(one.size for one in self.segments)

    @property
    def backup_size(self) -> int:
        return sum(one.found_size for one in self.segments[self.backed_up :])


def record_manifest(session: Session, manifest: Manifest) -> None:
    """Record a manifest of a transcript's session, as durably as the store was opened for."""
    record = {
        "v": 1,
        "path": manifest.path,
        "format": manifest.format,
        "segments": [astuple(one) for one in manifest.segments],
        "backup": manifest.backed_up,
        "masked": manifest.masked,
    }
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()
    session.record(_SERIES, body, keep=_MAX_MANIFESTS)


def manifests(store: Store, session_id: str) -> Iterator[Manifest]:
    """Yield the manifests of a transcript's session, the newest first. Invalid records are skipped."""
    for record in store.session(session_id).records(_SERIES, newest=True):
        found = _parsed_manifest(record.body)
        if found is not None:
            yield found


def sessions_for(store: Store, path: str) -> list[str]:
    """Return the transcript sessions whose newest manifest names this path."""
    ids = [one.session_id for one in store.sessions() if one.session_id.startswith(PREFIX)]
    return [one for one in ids if (newest := next(manifests(store, one), None)) is not None and newest.path == path]


def _parsed_manifest(body: bytes) -> Manifest | None:
    try:
        record: Any = json.loads(body)
        segments = tuple(Segment(*one) if len(one) == 6 else Segment(*one, *one[2:]) for one in record["segments"])
        sizes = (size for one in segments for size in (one.size, one.whole_size, one.found_size))
        is_masked = record.get("masked") is True
        found = Manifest(str(record["path"]), str(record["format"]), segments, int(record["backup"]), is_masked)
        return found if all(map(is_whole, sizes)) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
