"""One result on its way to the model: where it is stored, by what it is judged, and what stands in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, Final

from coatcheck import media
from coatcheck.errors import StoreError, UnsupportedValue
from coatcheck.externalize.failures import FAILURES, head_and_tail, nothing_shown, reason
from coatcheck.externalize.marks import is_ours
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.parcel import Parcel
from coatcheck.externalize.plain import as_text, described
from coatcheck.externalize.policy import Limit, Policy
from coatcheck.externalize.stub import LEAD, SHORTENED, Facts, facts, is_stub, media_type_of, stub_of, words_of
from coatcheck.intake import About
from coatcheck.previews import Preview
from coatcheck.reading.reader import sample_of
from coatcheck.redaction import mask, mask_value
from coatcheck.refs import Ref
from coatcheck.scope import Scope
from coatcheck.store import Store
from coatcheck.streams import is_stream
from coatcheck.values import decode_text

_HELD: Final = 1 << 20  # an artifact up to this size is judged like the value it was


class Result:
    """What a tool answered, as one value."""

    def __init__(self, store: Store, scope: Scope, policy: Policy, tool: str | None, call_id: str | None) -> None:
        self._store = store
        self._scope = scope
        self._policy = policy
        self._tool = tool
        self._call_id = call_id
        rule = policy.tools.get(tool) if tool else None
        self._always = rule == "always"
        self._never = rule == "never" or not policy.enabled
        self._limit: Limit = rule if isinstance(rule, Limit) else policy
        self._shrink: Callable[[Any], Any] | None = rule if callable(rule) else None
        self._sharing = 1  # how many have to make do with the limit of one, where the store fails

    def outcome(self, value: object) -> Outcome:
        if isinstance(value, Ref):
            return self._stored(value)
        if is_stream(value):
            return self._stream(value)
        if self._never:
            return Outcome(as_text(value), value)
        if self._shrink is not None and (shrunk := self._shrunk(value, self._shrink)) is not None:
            return shrunk
        return self._value(value)

    def _value(self, value: object) -> Outcome:
        return self.judged(value, as_text(value))

    def judged(self, value: object, text: str) -> Outcome:
        """The outcome of a value whose text this is."""
        parcel = Parcel(value, text)
        return self._put(parcel) if self._leaves(text, parcel.roughly) else Outcome(text, value)

    def _leaves(self, text: str, roughly: Callable[[], float] | None = None) -> bool:
        """Whether a text goes out."""
        return self._is_large(text, roughly) and not self._stays_anyway(text)

    def _is_large(self, text: str, roughly: Callable[[], float] | None = None) -> bool:
        return self._always or self._limit.exceeded(text, self._policy.count, roughly=roughly)

    def _stays_anyway(self, text: str) -> bool:
        """What our own tools answered never goes out, nor does a stub."""
        if is_stub(text, self._policy):
            return True
        try:
            return is_ours(self._store.secret, text)
        except StoreError:
            return False  # then storing fails too, and says so

    def _put(self, parcel: Parcel, *, claimed: str | None = None, shown: str | None = None) -> Outcome:
        """Store a value and make its stub. `shown` stands where its preview would."""
        try:
            if self._policy.redact == "store":
                value = _redacted(parcel.value)
                parcel = Parcel(value, as_text(value))
            media_type, kind = described(parcel.encoded, parcel.sample, claimed)
            about = facts(
                parcel.sample, media_type, kind, self._policy.preview_chars,
                tokens=parcel.tokens if parcel.is_its_text else None,
            )  # fmt: skip
            ref = self._store.put_encoded(self._scope, parcel.encoded, self._about(media_type, kind))
        except Exception as error:  # noqa: BLE001 - a third party's backend raises what it likes; the agent goes on
            return self._failed(parcel.value, parcel.text, error)
        if shown is not None:
            about = replace(about, preview=Preview(mask(shown), "what the policy keeps of it"))
        return self._stub(ref, about, parcel.text, LEAD if shown is None else SHORTENED)

    def _stub(self, ref: Ref, about: Facts, text: str, lead: str = LEAD) -> Outcome:
        said = stub_of(ref.pointer, about, self._policy, lead=lead)
        left = round(Parcel(text, text).tokens) if about.tokens is None else about.tokens
        return Outcome(said, said, ref, (ref,), True, None, left, (said,))

    def _about(self, media_type: str | None = None, kind: str | None = None) -> About:
        return About(tool=self._tool, call_id=self._call_id, media_type=media_type, kind=kind)

    def _failed(self, value: object, text: str, error: Exception) -> Outcome:
        FAILURES.note(self._store, error)
        if isinstance(value, bytes | bytearray | memoryview) and text[:1_000] != _beginning(value):
            said = nothing_shown(f"{memoryview(value).nbytes:,} bytes", reason(error))
        else:
            said = head_and_tail(text, reason(error), self._limit, self._policy.count, sharing=self._sharing)
        return Outcome(said, said, failure=mask(str(error)) or type(error).__name__)

    def _shrunk(self, value: object, shrink: Callable[[Any], Any]) -> Outcome | None:
        """What the tool's own function makes of a value; None where it leaves it alone, or fails."""
        try:
            smaller = shrink(value)
            if smaller is value or bool(smaller == value):
                return None
        except Exception:  # noqa: BLE001 - a host's function: where it fails, the limits decide
            return None
        shown = as_text(smaller)
        if self._limit.exceeded(shown, self._policy.count):
            shown = f"{shown[: self._policy.preview_chars]} …[{len(shown):,} characters, cut]"
        return self._put(Parcel(value, as_text(value)), shown=shown)

    # What is in the store already, or on its way there

    def _stream(self, stream: IO[bytes]) -> Outcome:
        if self._never or self._policy.redact == "store":
            data = stream.read()  # masking needs all of it: a secret may lie across two pieces
            return self.outcome(decode_text(data) if getattr(stream, "is_text", False) is True else data)
        try:
            ref = self._store.put(self._scope, stream, self._about())
        except UnsupportedValue:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            FAILURES.note(self._store, error)
            said = nothing_shown("a stream", reason(error))
            return Outcome(said, said, failure=mask(str(error)) or type(error).__name__)
        return self._stored(ref)

    def _stored(self, ref: Ref) -> Outcome:
        """The outcome for an artifact: like that for its value. Raises what opening it raises."""
        content = self._store.content(self._scope, ref)
        text = None
        if self._never or content.size <= _HELD:
            text = as_text(b"".join(content.chunks()))
            if self._never or not self._leaves(text, Parcel(text, text).roughly):
                return Outcome(text, text)
        media_type = media_type_of(ref.media_type) or media.BINARY
        sample = sample_of(content)
        words = words_of(ref, sample.head)
        about = facts(sample, media_type, ref.kind, self._policy.preview_chars, summary=words)
        if text is None and not self._always and self._fits(about):
            text = as_text(b"".join(content.chunks()))
            if not self._leaves(text):
                return Outcome(text, text)
        return self._stub(ref, about, text or "")

    def _fits(self, about: Facts) -> bool:
        """Whether content of this size may be within the limit."""
        limit, size = self._limit, about.size_bytes
        if about.tokens is None:
            return False
        bounds = (limit.max_chars and limit.max_chars * 4, limit.max_bytes, limit.tokens and limit.tokens * 64)
        return all(bound is None or size <= bound for bound in bounds)


def _redacted(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return mask(bytes(value).decode()).encode()
        except UnicodeDecodeError:
            return value
    return mask(value) if isinstance(value, str) else mask_value(value)


def _beginning(value: bytes | bytearray | memoryview) -> str:
    return bytes(memoryview(value)[:4_000]).decode("utf-8", "ignore")[:1_000]
