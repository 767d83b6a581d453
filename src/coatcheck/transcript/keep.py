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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from coatcheck.errors import InvalidArgument, StoreError
from coatcheck.externalize import configured
from coatcheck.externalize.pipeline import Prepared, described, masked_labels, redacted
from coatcheck.externalize.policy import CLEARLY, Limit, Policy
from coatcheck.externalize.stub import facts, is_ours, is_stub, stub_of
from coatcheck.ids import digest_of, is_encodable
from coatcheck.intake import About
from coatcheck.media import JSON
from coatcheck.media import is_text as is_text_type
from coatcheck.messages import Format, Message
from coatcheck.redaction import mask, mask_bytes
from coatcheck.refs import Ref, summarize
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.tokens import estimate
from coatcheck.transcript.artifact_refs import PREFIX
from coatcheck.transcript.scan import binary, parse, utf8
from coatcheck.transcript.splice import Fetch, LinePayload
from coatcheck.values import Encoded, as_text, encode, encode_text

_SERIES: Final = "transcript"
_MAX_MANIFESTS: Final = 4
_MAX_LABEL: Final = 1_000
_MIN_CHARS: Final = 2  # characters of JSON per token
_PIECE: Final = 24  # characters of each sampled piece of a text
# Upper bounds: tokens per byte of any text, and additional tokens for each rare letter or control character.
_TOKENS_PER_BYTE: Final = 1.6
_TOKENS_PER_RARE: Final = 2.0
_RARE: Final = b"jkqwxz" + bytes(code for code in range(32) if code not in b"\t\n\r") + b"\x7f"
_ENDS: Final = 16
_RECENT: Final = 64  # short lines that were not parsed are remembered: the call of a result may be among them
_CACHED_CHARS: Final = 16_384  # longest text whose estimate is cached: hosts often write a text twice
_CACHED: Final = 256  # stubs and estimates: the same result is often on several lines, and in several files
_MAX_CALLS: Final = 10_000  # calls whose tool is remembered until their result comes


# A stub is a function of the content, its pointer and the policy. The policy, the stub, and the tokens it saves:
_made: dict[tuple[str, str, str, str], tuple[Policy, str, int]] = {}


def new_session_id() -> str:
    """Return a new id for the session that owns a transcript's payloads."""
    return PREFIX + secrets.token_hex(16)


class Keeper:
    """Stores a transcript's payloads by a policy, by default that of the store's settings.

    Without a `session_id`, the session of the transcript's first refs is used, or else a new one. Payloads that a model
    is shown are also granted to the agent's `session`, if given. `stored` are the artifacts, `tokens_saved` counts the
    tokens that a model is no longer sent, and `masked` counts payloads that were stored with secrets masked."""

    def __init__(
        self,
        store: Store,
        session_id: str | None = None,
        *,
        session: Session | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or configured(store.settings)
        self.store = store
        self.masked = 0
        self.stored: set[str] = set()
        self.tokens_saved = 0
        self._session_id = session_id
        self._agent = session
        self._own: Session | None = None
        self._known = set() if session_id is None else {session_id}
        self._least = self.policy.safe_chars + 1 if self.policy.enabled else 1 << 62
        bounds = (self.policy.max_chars, self.policy.max_bytes, (self.policy.tokens or 0) * _MIN_CHARS)
        self._bulk = min((bound for bound in bounds if bound), default=1)
        by_tokens = self.policy.enabled and self.policy.count is None and self.policy.safe_chars > 0
        only = by_tokens and self.policy.max_chars is None and self.policy.max_bytes is None and not self.policy.tools
        self._short_tokens = self.policy.tokens or 0 if only else 0
        self._short = int(self._short_tokens / _TOKENS_PER_BYTE)
        self._passed: deque[bytes] = deque(maxlen=_RECENT)
        self._tools: dict[str, str] = {}
        self._line: Any = None

    @property
    def session_id(self) -> str:
        """The session that owns the payloads of the transcript."""
        if self._session_id is None:
            self._session_id = new_session_id()
            self._known.add(self._session_id)
        return self._session_id

    @property
    def least(self) -> int:
        """Minimum number of characters of a payload."""
        return self._least

    def passes(self, text: bytes) -> bool:
        """Whether a text is certainly within the policy, decided without parsing it."""
        if len(text) >= self._least and (len(text) > self._short or _most_tokens(text) > self._short_tokens):
            return False
        self._passed.append(text)
        return True

    @property
    def bulk(self) -> int:
        """Minimum size of a container's small parts, in characters, for it to be a payload."""
        return self._bulk

    def learn(self, fmt: Format, line: Any) -> None:
        """Take note of the calls in a parsed line, before its payloads are decided."""
        message = fmt.message(line)
        if message is not None:
            self._learn(fmt, message)

    def leaves(self, fmt: Format, payload: LinePayload) -> bool:
        """Whether a payload is over the policy."""
        policy, text = self.policy, payload.text
        if not policy.enabled or is_stub(text, policy):
            return False
        limit: Limit = policy
        if policy.tools:
            tool = self._about(fmt, payload)[0]
            rule = policy.tools.get(tool) if tool else None
            if rule in ("always", "never"):
                return rule == "always"
            limit = rule if isinstance(rule, Limit) else policy
        if not _exceeds(limit, policy, text):
            return False
        try:
            return not is_ours(self.store.secret, text)
        except StoreError:
            return True  # storing fails too, and reports it

    def redacted(self, payload: LinePayload) -> LinePayload:
        """Return the payload as it may be stored: the same object, or a copy with secrets masked."""
        if self.policy.redact != "store":
            return payload
        value: Any = payload.value
        if payload.is_json and (found := parse(payload.text)) is not None:
            value = found[0]
        masked = _masked_base64(value) if isinstance(value, str) else None
        masked = redacted(value) if masked is None else masked
        if masked is value or masked == value:
            return payload
        self.masked += 1
        if isinstance(masked, bytes):
            prefix = payload.text.partition(",")[0] + "," if payload.text.startswith("data:") else ""
            return payload._replace(value=masked, text=prefix + base64.b64encode(masked).decode())
        if payload.is_json:
            token = utf8(masked) if isinstance(masked, str) else as_text(masked)
            return payload._replace(value=token, text=token)
        return payload._replace(value=masked, text=masked)

    def put(self, fmt: Format, payload: LinePayload) -> tuple[Ref, str]:
        """Store a payload. Return its ref, and the stub that replaces it."""
        is_shown = fmt.is_shown(payload.path)
        parcel = Prepared(_value(payload), payload.text)
        encoded = parcel.encoded
        media_type, kind = described(encoded, JSON if payload.is_json else None)
        tool, call_id = self._about(fmt, payload)
        about = masked_labels(About(tool=tool, call_id=call_id, media_type=media_type, kind=kind), self.policy)
        ref = self._put(encoded, is_shown, about)
        self.stored.add(ref.artifact_id)
        if not is_shown:
            return ref, _note(ref)
        key = (ref.artifact_id, ref.pointer, media_type, ref.codec)
        made = _made.get(key)
        if made is None or (made[0] is not self.policy and made[0] != self.policy):
            made = _made[key] = self.policy, *self._stub(ref, parcel)
            if len(_made) > _CACHED:
                _made.pop(next(iter(_made), key), None)
        _, stub, saved = made
        self.tokens_saved += saved
        return ref, stub

    def _stub(self, ref: Ref, parcel: Prepared) -> tuple[str, int]:
        """Return the stub of a stored payload, and how many tokens it saves."""
        shown = facts(parcel.sample, ref.media_type, ref.kind, self.policy.preview_chars)
        stub = stub_of(ref.pointer, shown, self.policy)
        if ref.codec == "bytes":  # the provider decides what an image costs, not its base64
            return stub, 0
        return stub, max(0, (shown.tokens or round(_sampled_tokens(parcel.text))) - round(_sampled_tokens(stub)))

    def put_raw(self, token: str) -> Ref:
        """Store a JSON token byte for byte, if no style reproduces it."""
        about = About(media_type="text/plain", kind="data", summary="a JSON string just as it was written")
        return self._put(Encoded(*encode(token), token), False, about)

    def create_session(self) -> None:
        """Create the session in the store, even if nothing is put into it."""
        self._own_session()

    def _own_session(self) -> Session:
        """Return the transcript's session, which is created on the first call."""
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

    def _put(self, value: Encoded, is_shown: bool, about: About) -> Ref:
        if not is_shown or self._agent is None:
            return self._own_session().put_encoded(value, about)
        lent = replace(about, granted_by=self._agent.session_id)
        return self._own_session().put_encoded(value, lent, (self._agent,))

    def _learn(self, fmt: Format, message: Message) -> None:
        for call in fmt.calls(message):
            if call.id and call.name:
                self._tools[call.id] = call.name
        while len(self._tools) > _MAX_CALLS:
            del self._tools[next(iter(self._tools))]

    def _learn_all(self, fmt: Format, line: Any) -> None:
        """Learn the calls of every message of a line once: a document has several."""
        if line is not self._line:
            self._line = line
            for _, message in fmt.messages(line):
                self._learn(fmt, message)

    def _about(self, fmt: Format, payload: LinePayload) -> tuple[str | None, str | None]:
        """Return the tool name and call id of a payload, if the line has them."""
        line, path = payload.line, payload.path
        if isinstance(line, dict):
            self._learn_all(fmt, line)
        around = fmt.message_around(line, path)
        if around is None:
            return None, None
        base, message = around
        inside = path[len(base) :]
        for result in fmt.results(message):
            if inside[: len(result.path)] == result.path:
                if not result.name:
                    self._learn_all(fmt, line)
                return _label(result.name or self._tool(fmt, result.call_id)), _label(result.call_id)
        for call in fmt.calls(message):
            if inside[: len(call.path)] == call.path:
                return _label(call.name), _label(call.id)
        return None, None

    def _tool(self, fmt: Format, call_id: str) -> str | None:
        """Return the tool of a call, which may be on a short line that was not parsed."""
        if call_id and call_id not in self._tools:
            wanted = call_id.encode("utf-8", "surrogatepass")
            for text in [one for one in self._passed if wanted in one]:
                found = parse(text.decode("utf-8", "replace"))
                if found is not None:
                    self.learn(fmt, found[0])
        return self._tools.get(call_id)


class DryRunKeeper(Keeper):
    """A keeper that stores nothing: it only finds out what would be stored."""

    def create_session(self) -> None:
        pass

    def _put(self, value: Encoded, is_shown: bool, about: About) -> Ref:
        data, media_type, kind = value.data, about.media_type or "", about.kind or ""
        start = data[:1_024].decode("utf-8", "ignore") if is_text_type(media_type) else ""
        summary = summarize(mask(start)) if start else f"{media_type}, {len(data)} bytes"
        return Ref(digest_of(data), self.session_id, len(data), media_type, kind, value.codec, summary=summary)


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


def _masked_base64(text: str) -> str | None:
    """Mask secrets inside base64 that is wrapped into lines. None if the text is something else, or has none."""
    lines = text.split() if " " not in text[:64] else []
    found = binary("".join(lines)) if len(lines) > 1 else None
    masked = None if found is None else mask_bytes(found[1])
    if found is None or masked is None or masked == found[1]:
        return None
    body, width, start = found[0] + base64.b64encode(masked).decode(), len(lines[0]), text.index(lines[0])
    gap = text[start + width : text.index(lines[1], start + width)]
    return gap.join(body[at : at + width] for at in range(0, len(body), width))


def _exceeds(limit: Limit, policy: Policy, text: str) -> bool:
    """Whether a text exceeds a limit. Most texts are far from it, so a bound or a few samples decide; near the limit,
    more samples are taken. Counting the whole text would cost more than everything else."""
    most = limit.tokens
    if most is None or policy.count is not None or limit.max_chars is not None or limit.max_bytes is not None:
        return limit.exceeded(text, policy.count)
    if len(text) * _TOKENS_PER_BYTE <= most and _most_tokens(encode_text(text)) <= most:
        return False
    about = _sampled_tokens(text)
    return (_sampled_tokens(text, 64) if most / CLEARLY <= about <= most * CLEARLY else about) > most


def _most_tokens(data: bytes) -> float:
    """Upper bound for the tokens of a text, from its UTF-8 bytes or those of the JSON around it."""
    return len(data) * _TOKENS_PER_BYTE + (len(data) - len(data.translate(None, _RARE))) * _TOKENS_PER_RARE + _ENDS


def _sampled_tokens(text: str, pieces: int = 16) -> float:
    """Approximate number of tokens of a text, estimated from a few pieces if it is long."""
    return _cached_sample(text, pieces) if len(text) <= _CACHED_CHARS else _sample(text, pieces)


def _sample(text: str, pieces: int) -> float:
    if len(text) <= 2 * pieces * _PIECE:
        return estimate(text)
    starts = (number * (len(text) - _PIECE) // (pieces - 1) for number in range(pieces))
    return estimate("".join([text[at : at + _PIECE] for at in starts])) * len(text) / (pieces * _PIECE)


_cached_sample = lru_cache(_CACHED)(_sample)


def _note(ref: Ref) -> str:
    """The stub for a place that no model is shown."""
    note = {"stub": "stored whole", "artifact": ref.pointer, "media_type": ref.media_type, "size_bytes": ref.size_bytes}
    return "{" + ",".join(f"{utf8(key)}:{utf8(v) if isinstance(v, str) else v}" for key, v in note.items()) + "}"


def _label(text: str | None) -> str | None:
    """A tool name or call id as the store accepts it."""
    return text[:_MAX_LABEL] if text and is_encodable(text[:_MAX_LABEL]) else None


@dataclass(frozen=True, slots=True)
class Segment:
    """What one run made slim: size and checksum (XXH3, 128 bits) of the slim bytes, which identify them, and size and
    SHA-256 of the whole bytes, which prove them (None if unknown). `found_size` and `found_sha256` describe the bytes
    before the run, if they differ from the whole bytes."""

    size: int
    checksum: str
    whole_size: int
    whole_sha256: str | None
    found_size: int | None = None
    found_sha256: str | None = None

    @property
    def in_backup(self) -> tuple[int, str | None]:
        """Size and digest of this segment in a backup, which has the bytes as they were found."""
        return (self.whole_size, self.whole_sha256) if self.found_size is None else (self.found_size, self.found_sha256)


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
        return sum(one.in_backup[0] for one in self.segments[self.backed_up :])


def record_manifest(store: Store, session_id: str, manifest: Manifest) -> None:
    """Record a manifest, as durably as the store was opened for."""
    segments = [
        [one.size, one.checksum, one.whole_size, one.whole_sha256]
        + ([] if one.found_size is None else [one.found_size, one.found_sha256])
        for one in manifest.segments
    ]
    record = {
        "v": 1,
        "path": manifest.path,
        "format": manifest.format,
        "segments": segments,
        "backup": manifest.backed_up,
        **({"masked": True} if manifest.masked else {}),
    }
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()
    store.session(session_id, ttl=None).record(_SERIES, body, keep=_MAX_MANIFESTS)


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
        segments = tuple(
            Segment(int(size), str(checksum), int(whole_size), _digest(whole), *_found(*found))
            for size, checksum, whole_size, whole, *found in record["segments"]
        )
        is_masked = record.get("masked") is True
        return Manifest(str(record["path"]), str(record["format"]), segments, int(record["backup"]), is_masked)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _found(size: Any = None, digest: Any = None) -> tuple[int | None, str | None]:
    return (None, None) if size is None else (int(size), _digest(digest))


def _digest(value: Any) -> str | None:
    return None if value is None else str(value)
