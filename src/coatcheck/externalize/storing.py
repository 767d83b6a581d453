"""Values on their way into a store: masked, encoded, described, and replaced by a stub.

Code that places text itself (transcripts, prompts, tools) uses these steps: `masked` masks, `put`
masks and stores, `put_prepared` stores what is masked already, and `stub_for` writes what replaces
it, each as the policy says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NoReturn

from coatcheck import media
from coatcheck.core_session import CoreSession
from coatcheck.externalize.policy import Policy, configured
from coatcheck.externalize.stub import stub_of
from coatcheck.ids import digest_of
from coatcheck.intake import About
from coatcheck.previews import Facts, Sample, facts
from coatcheck.redaction import mask, mask_bytes, mask_value
from coatcheck.refs import Ref, summarize
from coatcheck.storage.frames import framed, line_counts
from coatcheck.tokens import Weighed, sampled
from coatcheck.truncation import Truncation
from coatcheck.values import Encoded, as_text

_FRAMED: Final = 128 * 1024  # bytes from which a store wants frames
_LABEL: Final = 1_000  # characters of a tool's name or a call's id


class Prepared(Weighed):
    """A value and the text that a model would get for it. What follows from them is computed
    once."""

    def __init__(self, value: object, text: str) -> None:
        self.value = value
        self.text = text

    @cached_property
    def encoded(self) -> Encoded:
        """The value as stored: bytes unchanged, anything else as its text. Large content has its
        frames, which count its lines too."""
        found = self._encoded()
        return found._replace(framed=framed(found.data)) if len(found.data) > _FRAMED else found

    def _encoded(self) -> Encoded:
        value = self.value
        if isinstance(value, str):
            return Encoded("text", self.text_bytes, value)
        if isinstance(value, bytes | bytearray | memoryview):
            return Encoded("bytes", bytes(value))
        try:
            json.loads(self.text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return Encoded("text", self.text_bytes, self.text)
        return Encoded("json", self.text_bytes)

    @cached_property
    def sample(self) -> Sample:
        """Head and tail of what is stored."""
        known = self.encoded.framed
        feeds = None if known is None else sum(line_counts(known.frames))
        return Sample.of(self.encoded.data, feeds)

    def facts(self, media_type: str, kind: str, limit: int, cut: Truncation | None = None) -> Facts:
        """Describe what is stored. `cut` is what was cut out of it, if it does not say so
        itself."""
        is_text = self.encoded.data is self.text_bytes
        tokens = self.tokens if is_text else None
        return facts(self.sample, media_type, kind, limit, tokens=tokens, cut=cut)


def masked(value: Any, policy: Policy) -> Any:
    """Return the value as the policy lets it into a store: with secrets masked if it says so."""
    return _without_secrets(value) if policy.redact == "store" else value


def prepared(value: object, policy: Policy) -> Prepared:
    """Return a value as the policy lets it into a store, ready for `put_prepared`."""
    value = masked(value, policy)
    return Prepared(value, as_text(value))


def masked_labels(about: About, policy: Policy) -> About:
    """Mask secrets in what a model or a tool chose, as the policy says: name, tool and call id."""
    if policy.redact != "store":
        return about
    name, tool, call_id = (one and mask(one) for one in (about.name, about.tool, about.call_id))
    return about._replace(name=name, tool=tool, call_id=call_id)


def label(text: str | None) -> str | None:
    """Return a tool's name or a call's id in a form that can be stored. An odd label must not lose
    the result."""
    if not text:
        return None
    return (text if text.isascii() else text.encode("utf-8", "replace").decode())[:_LABEL]


def put(session: CoreSession, value: object, about: About, policy: Policy | None = None) -> Ref:
    """Store a value, masked as the policy says. Without a policy, the one from the settings
    applies."""
    policy = policy or configured(session.store.settings)
    stored = masked(value, policy)
    if about.media_type == media.JSON and isinstance(stored, str) and not isinstance(value, str):
        about = about._replace(media_type=None)  # masking has broken its structure
    return session.put_about(stored, masked_labels(about, policy))


def put_prepared(
    session: CoreSession,
    prepared: Prepared,
    about: About,
    policy: Policy,
    *,
    claimed: str | None = None,
    also: Sequence[CoreSession] = (),
) -> Ref:
    """Store a value that was masked before, with the media type and kind of its content. `claimed`
    is the media type that its source gave. It is put into the sessions of `also` too."""
    media_type, kind = described(prepared.encoded, claimed)
    tool, call_id = label(about.tool), label(about.call_id)
    about = about._replace(media_type=media_type, kind=kind, tool=tool, call_id=call_id)
    return session.put_encoded(prepared.encoded, masked_labels(about, policy), also)


def unstored(session_id: str, prepared: Prepared, *, claimed: str | None = None) -> Ref:
    """Return the ref that `put_prepared` would return, without storing anything."""
    data, codec = prepared.encoded.data, prepared.encoded.codec
    media_type, kind = described(prepared.encoded, claimed)
    start = data[:1_024].decode("utf-8", "ignore") if media.is_text(media_type) else ""
    summary = summarize(mask(start)) if start else f"{media_type}, {len(data)} bytes"
    return Ref(digest_of(data), session_id, len(data), media_type, kind, codec, summary=summary)


def stub_for(ref: Ref, prepared: Prepared, policy: Policy) -> tuple[str, int]:
    """Return the stub of a stored value, and an estimate of the tokens that it saves."""
    return _LATEST_STUBS.get(ref, prepared, policy)


class _LatestStubs:
    """The stubs that were written last. A stub depends only on the content, its pointer and the
    policy.

    The same result is often on several lines of a transcript: 25 MB of recorded ones take 0.27 s
    with this cache, and 0.38 s without."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[tuple[str, str, str, str], tuple[Policy, str, int]] = {}

    def get(self, ref: Ref, prepared: Prepared, policy: Policy) -> tuple[str, int]:
        key = (ref.artifact_id, ref.pointer, ref.media_type, ref.codec)
        found = self._known.get(key)
        if found is None or found[0] != policy:
            found = self._known[key] = (policy, *_stub_and_saving(ref, prepared, policy))
            if len(self._known) > self._size:
                self._known.pop(next(iter(self._known)), None)
        return found[1:]


_LATEST_STUBS: Final = _LatestStubs(256)


def _stub_and_saving(ref: Ref, prepared: Prepared, policy: Policy) -> tuple[str, int]:
    about = prepared.facts(ref.media_type, ref.kind, policy.preview_chars)
    stub = stub_of(ref.pointer, about, policy)
    if ref.codec == "bytes":  # the provider decides what an image costs, not its base64
        return stub, 0
    tokens = about.tokens or round(sampled(prepared.text))
    return stub, max(0, tokens - round(sampled(stub)))


def described(value: Encoded, claimed: str | None = None) -> tuple[str, str]:
    """Return media type and kind of an encoded value. A magic number overrides the claimed type."""
    text = value.text
    if text is not None:
        return _described_text(text, claimed)
    if value.codec == "json":
        return media.JSON, "data"
    head = value.data[: media.HEAD]
    media_type = media.sniff_bytes(head, value.data[-64:], None, value.data)
    is_open = media_type == media.BINARY or media.is_text(media_type)
    if claimed and is_open and _may_be(claimed, value.data):
        media_type = claimed
    start = head.decode("utf-8", "ignore") if media.is_text(media_type) else ""
    return media_type, media.sniff_kind(media_type, start)


def _described_text(text: str, claimed: str | None) -> tuple[str, str]:
    start = text[: media.HEAD]
    if claimed and media.is_text(claimed) and _may_be(claimed, text):
        media_type = claimed
    else:
        media_type = media.sniff_text(start, text[-64:], None, text)
    return media_type, media.sniff_kind(media_type, start)


def _may_be(claimed: str, content: str | bytes) -> bool:
    """Whether content may be what its source claims: JSON must parse, unless it is too long to
    tell."""
    return not media.is_json(claimed) or len(content) > media.CHECKED or media.parses(content)


def _without_secrets(value: object) -> Any:
    """Return a value with all recognised secrets masked, as `redact="store"` stores it. Values that
    are stored as JSON come back as parsed JSON."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return mask_bytes(bytes(value))
    written = as_text(value)
    try:
        given = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return mask(written)
    inside = mask_value(given)
    text = written if inside == given else as_text(inside)
    whole = mask(text)  # some secrets are recognised only by the text around them
    if whole == text:
        return value if inside == given else inside
    try:
        return json.loads(whole)
    except ValueError:
        return whole


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
