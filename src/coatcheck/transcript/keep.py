"""Store a transcript's payloads, and record what the file was: `Keeper` and `Manifest`.

Each transcript has its own session, which owns its payloads. The agent's session gets access to
those that a model is shown, so that the model can read the pointers. Manifests are records of the
transcript's session, and end with it.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import accumulate, compress
from typing import Any, Final

from coatcheck.checks import is_whole
from coatcheck.errors import InvalidArgument
from coatcheck.externalize.judge import leaving
from coatcheck.externalize.policy import Policy, configured
from coatcheck.externalize.storing import (
    Prepared,
    masked,
    put_prepared,
    stub_for,
    unstored,
)
from coatcheck.externalize.stub import hidden_stub
from coatcheck.intake import About
from coatcheck.media import JSON
from coatcheck.messages import Format
from coatcheck.messages.formats import PayloadPlace
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.tokens import at_most
from coatcheck.transcript.scan import binary, parse, parsed, utf8
from coatcheck.transcript.splice import PREFIX, Fetch, LinePayload
from coatcheck.values import as_text, encode

_SERIES: Final = "transcript"
_MAX_MANIFESTS: Final = 4
_MIN_CHARS: Final = 2  # characters of JSON per token
_RECENT: Final = (
    64  # short lines that were not parsed are remembered: the call of a result may be among them
)
_MAX_CALLS: Final = 10_000  # calls whose tool is remembered until their result comes


def new_session_id() -> str:
    """Return a new id for the session that owns a transcript's payloads."""
    return PREFIX + secrets.token_hex(16)


class Keeper:
    """Stores a transcript's payloads by a policy, by default the one in the store's settings.

    Without a `session_id`, the session of the transcript's first refs is used, or else a new one.
    Payloads that a model is shown are also granted to the agent's `session`, if given. With
    `dry_run` nothing is stored. `stored` are the artifacts, `tokens_saved` counts the tokens that a
    model is no longer sent, and `masked` counts payloads that were stored with secrets masked. A
    payload has at least `least` characters, and the small parts of one that is a container add up
    to at least `bulk`."""

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
        self.least = policy.safe_in_files() + 1 if policy.enabled else 1 << 62
        tokens = policy.tokens
        bounds = (policy.max_chars, policy.max_bytes, tokens and tokens * _MIN_CHARS)
        self.bulk = min((bound for bound in bounds if bound), default=1)
        only_tokens = policy.count is None and policy.max_chars is None and policy.max_bytes is None
        self._short = tokens or 0 if only_tokens and policy.safe_chars and not policy.tools else 0
        self._short_lines: list[bytes] = []
        self._before: list[
            int
        ] = []  # for each line of a batch, the number of short lines before it
        self._tools: dict[str, str] = {}  # by the id of a call

    @property
    def session_id(self) -> str:
        """The session that owns the payloads of the transcript."""
        if self._session_id is None:
            self._session_id = new_session_id()
            self._known.add(self._session_id)
        return self._session_id

    def passes(self, texts: Sequence[bytes]) -> list[bool]:
        """Decide for each line of a batch, without parsing it, whether it is certainly within the
        policy."""
        found = [len(text) < self.least or at_most(text, self._short) for text in texts]
        del self._short_lines[:-_RECENT]
        self._before = list(accumulate(found, initial=len(self._short_lines)))
        self._short_lines += compress(texts, found)
        return found

    def candidates(
        self, fmt: Format, numbers: Sequence[int], lines: Sequence[Any]
    ) -> dict[int, list[LinePayload]]:
        """Return the payloads of some lines of the batch by their numbers, given the parsed lines:
        strings over the policy, and containers, for which `leaving` decides by their text."""
        surveyed = fmt.survey(lines, self.least, self.bulk, self._tools)
        while len(self._tools) > _MAX_CALLS:
            del self._tools[next(iter(self._tools))]
        found: list[LinePayload] = []
        for number, places in zip(numbers, surveyed, strict=True):
            found += [_payload(place, number) for place in places]
        decided = iter(self.leaving(fmt, [one for one in found if not one.is_json]))
        kept: dict[int, list[LinePayload]] = {number: [] for number in numbers}
        for one in found:
            if one.is_json or next(decided):
                kept[one.number].append(one)
        return kept

    def leaving(self, fmt: Format, payloads: Sequence[LinePayload]) -> list[bool]:
        """Decide for each payload whether it is over the policy."""
        if not payloads:
            return []
        places = [one.place for one in payloads]
        if self.policy.tools:
            places = self._with_tools(fmt, payloads)
        texts = [(place.tool, one.text) for place, one in zip(places, payloads, strict=True)]
        return leaving(self.store, self.policy, texts, sampling=True)

    def redacted(self, payload: LinePayload) -> LinePayload:
        """Return the payload as it may be stored: the same object, or a copy with secrets
        masked."""
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
            return payload._replace(
                value=stored, text=payload.prefix + base64.b64encode(stored).decode()
            )
        if payload.is_json:
            stored = utf8(stored) if isinstance(stored, str) else as_text(stored)
        return payload._replace(value=stored, text=stored)

    def put(self, fmt: Format, payloads: Sequence[LinePayload]) -> list[tuple[Ref, str]]:
        """Store payloads, which are masked already. Return the ref of each, and the stub that
        replaces it."""
        places = self._with_tools(fmt, payloads)
        lender = self._agent.session_id if self._agent else None
        put: dict[tuple[str | bytes, bool, About], Ref] = {}  # hosts often write a payload again
        done: list[tuple[Ref, str]] = []
        for one, place in zip(payloads, places, strict=True):
            prepared = Prepared(_value(one), one.text)
            granted_by = lender if place.is_shown else None
            about = About(tool=place.tool, call_id=place.call_id, granted_by=granted_by)
            key = (one.value, one.is_json, about)
            if key not in put:
                claimed = JSON if one.is_json else None
                put[key] = self._put(prepared, about, claimed, is_shown=place.is_shown)
            ref = put[key]
            self.stored.add(ref.artifact_id)
            stub, saved = hidden_stub(ref), 0
            if place.is_shown:
                stub, saved = stub_for(ref, prepared, self.policy)
            self.tokens_saved += saved
            done.append((ref, stub))
        return done

    def put_raw(self, token: str) -> Ref:
        """Store a JSON token byte for byte, if no style reproduces it."""
        about = About(summary="a JSON string just as it was written")
        return self._put(Prepared(token, token), about, "text/plain", is_shown=False)

    def own_session(self) -> Session:
        """Return the transcript's session, which is created in the store on the first call."""
        if self._own is None:
            self._own = self.store.session(self.session_id, ttl=None)
        return self._own

    def is_ours(self, sessions: Iterable[str]) -> bool:
        """Whether this store knows all of these transcript sessions."""
        wanted = set(sessions)
        if not wanted <= self._known:
            self._known |= {
                one.session_id for one in self.store.sessions() if one.session_id.startswith(PREFIX)
            }
        if self._session_id is None and wanted and wanted <= self._known:
            self._session_id = min(wanted)
        return wanted <= self._known

    def _put(self, prepared: Prepared, about: About, claimed: str | None, *, is_shown: bool) -> Ref:
        if self.dry_run:
            return unstored(self.session_id, prepared, claimed=claimed)
        also = (self._agent,) if is_shown and self._agent else ()
        return put_prepared(
            self.own_session(), prepared, about, self.policy, claimed=claimed, also=also
        )

    def _with_tools(self, fmt: Format, payloads: Sequence[LinePayload]) -> list[PayloadPlace]:
        """Return the places of payloads with their tools. The call of a result may be on a short
        line before it, which was not parsed."""
        places = list(fmt.owned([one.place for one in payloads], self._tools))
        for index, (one, place) in enumerate(zip(payloads, places, strict=True)):
            if not place.call_id or place.tool:
                continue
            tool = self._tool_before(one.number, place.call_id, fmt) or self._tools.get(
                place.call_id
            )
            if tool:
                self._tools[place.call_id] = tool
                places[index] = place._replace(tool=tool)
        return places

    def _tool_before(self, number: int, call_id: str, fmt: Format) -> str | None:
        """Return the tool of a call on one of the short lines before a line of the batch."""
        end = self._before[number]
        wanted = call_id.encode("utf-8", "surrogatepass")
        for text in reversed(self._short_lines[max(0, end - _RECENT) : end]):
            message = fmt.message(parsed(text)) if wanted in text else None
            calls = () if message is None else fmt.calls(message)
            for call in reversed(calls):
                if call.id == call_id and call.name:
                    return call.name
        return None


def _payload(place: PayloadPlace, number: int) -> LinePayload:
    """Return the payload at a place of a line. That of a container is set when its text is
    known."""
    if not isinstance(place.value, str):
        return LinePayload("", "", place, number, is_json=True)
    decoded = binary(place.value)
    value = place.value if decoded is None else decoded[1]
    return LinePayload(value, place.value, place, number)


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
    """What to store: a container as a value if the store would write the same JSON, else as
    text."""
    if payload.is_json:
        found = parse(payload.text)
        try:
            if found is not None and encode(found[0])[1] == payload.text.encode():
                return found[0]
        except InvalidArgument:
            pass
    return payload.value


def _masked_base64(text: str, policy: Policy) -> str | None:
    """Mask secrets inside base64 that is wrapped into lines. None if the text is something else, or
    has none."""
    lines = text.split() if " " not in text[:64] else []
    found = binary("".join(lines)) if len(lines) > 1 else None
    if found is None or (data := masked(found[1], policy)) == found[1]:
        return None
    body = found[0] + base64.b64encode(data).decode()
    width, start = len(lines[0]), text.index(lines[0])
    gap = text[start + width : text.index(lines[1], start + width)]
    return gap.join(body[at : at + width] for at in range(0, len(body), width))


@dataclass(frozen=True, slots=True)
class Segment:
    """What one run made slim: size and checksum (XXH3, 128 bits) of the slim bytes, which identify
    them; size and SHA-256 of the whole bytes, which prove them (None if unknown); and the same of
    the bytes before the run. Those are in the backup, and differ from the whole bytes if some lines
    were slim before or secrets were masked."""

    size: int
    checksum: str
    whole_size: int
    whole_sha256: str | None
    found_size: int
    found_sha256: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the store remembers of an externalized transcript. Bytes after the last segment were
    appended since.

    `backed_up` is the number of the first segment that the backup contains. With `masked`, the
    whole bytes have markers in place of secrets: only the backup has the secrets. `is_own` says
    that this store has recorded it; another one came with an import, and may name any `path`."""

    path: str
    format: str
    segments: tuple[Segment, ...] = ()
    backed_up: int = 0
    masked: bool = False
    is_own: bool = field(default=False, compare=False)

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
        "proof": _proof(session.store, session.session_id, manifest.path),
    }
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()
    session.record(_SERIES, body, keep=_MAX_MANIFESTS)


def manifests(store: Store, session_id: str) -> Iterator[Manifest]:
    """Yield the manifests of a transcript's session, the newest first. Invalid records are
    skipped."""
    for record in store.session(session_id).records(_SERIES, newest=True):
        found = _parsed_manifest(record.body, lambda path: _proof(store, session_id, path))
        if found is not None:
            yield found


def _proof(store: Store, session_id: str, path: str) -> str:
    """Return a text that only this store can make, for a path that it records for a transcript's
    session."""
    recorded = f"transcript\0{session_id}\0{path}"
    return hmac.new(store.secret, recorded.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def sessions_for(store: Store, path: str) -> list[str]:
    """Return the transcript sessions whose newest manifest names this path."""
    ids = [one.session_id for one in store.sessions() if one.session_id.startswith(PREFIX)]
    found = []
    for one in ids:
        newest = next(manifests(store, one), None)
        if newest is not None and newest.path == path:
            found.append(one)
    return found


def _parsed_manifest(body: bytes, proof_of: Callable[[str], str]) -> Manifest | None:
    try:
        record: Any = json.loads(body)
        segments = tuple(Segment(*one) for one in record["segments"])
        sizes = (size for one in segments for size in (one.size, one.whole_size, one.found_size))
        is_masked = record.get("masked") is True
        path = str(record["path"])
        is_own = hmac.compare_digest(str(record.get("proof", "")).encode(), proof_of(path).encode())
        found = Manifest(
            path, str(record["format"]), segments, int(record["backup"]), is_masked, is_own
        )
        return found if all(map(is_whole, sizes)) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
