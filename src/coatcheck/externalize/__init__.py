"""A value and a policy make what a model gets: the value itself where it is small, else a stub.

The store keeps the whole, exactly. Where it fails, the model gets a bounded head and tail that says so. What our own
tools answered is never externalized again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import IO, Any, Final

from coatcheck import media
from coatcheck.config import Settings
from coatcheck.errors import StoreError, UnsupportedValue
from coatcheck.externalize import blocks
from coatcheck.externalize.failures import FAILURES, head_and_tail, nothing_shown, reason
from coatcheck.externalize.marks import is_ours
from coatcheck.externalize.plain import as_text, described, kept
from coatcheck.externalize.policy import Limit, Policy, sampled
from coatcheck.externalize.stub import LEAD, SHORTENED, Facts, facts, is_stub, media_type_of, stub_of, words_of
from coatcheck.intake import About
from coatcheck.previews import Preview
from coatcheck.reading.reader import sample_of
from coatcheck.redaction import mask, mask_value
from coatcheck.refs import Ref
from coatcheck.scope import Scope
from coatcheck.store import Store
from coatcheck.streams import is_stream
from coatcheck.tokens import estimate

__all__ = ["FAILURES", "Limit", "Outcome", "Policy", "configured", "externalize"]

_TOGETHER: Final = 4  # blocks that stay inline have so many times the limit of one between them
_SMALL: Final = 500  # characters of a block that is shown as it is in a text
_HELD: Final = 1 << 20  # an artifact up to this size is judged like the value it was


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a value.

    `text` is what the model gets, as a string; `content` the same in the shape it came in: the value itself where it is
    small, else the stub, or the list of blocks with stubs in it. `ref` is what was stored, None where it stayed inline;
    `refs` has one for each block. `failure` says why nothing could be stored. `tokens_saved` is an estimate."""

    text: str
    content: Any
    ref: Ref | None = None
    refs: tuple[Ref, ...] = ()
    is_stub: bool = False
    failure: str | None = None
    tokens_saved: int = 0


def externalize(
    store: Store, scope: Scope, value: object, *, tool: str | None, call_id: str | None, policy: Policy | None
) -> Outcome:
    """The outcome for a tool's result. Raises nothing where the store fails."""
    policy = policy or configured(store.settings)
    if type(value) is str and len(value) <= policy.safe_chars and not policy.tools:
        return Outcome(value, value)
    return _Result(store, scope, policy, _label(tool), _label(call_id)).outcome(value)


@lru_cache(maxsize=64)
def configured(settings: Settings) -> Policy:
    """The policy that settings ask for, where code gives none."""
    said = settings.section("policy")
    rules = {tool: rule if isinstance(rule, str) else Limit(**rule) for tool, rule in said["tools"].items()}
    return Policy(**said | {"tools": rules})


def _label(text: str | None) -> str | None:
    """A tool's name or a call's id as it can be kept: hosts send all sorts, and it must not cost the result."""
    if not text:
        return None
    return (text if text.isascii() else text.encode("utf-8", "replace").decode())[:1_000]


class _Result:
    """One result on its way to the model: where it is stored, and by what it is judged."""

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

    def outcome(self, value: object) -> Outcome:
        if isinstance(value, Ref):
            return self._stored(value)
        if is_stream(value):
            return self._stream(value)
        if self._never:
            return Outcome(as_text(value), value)
        if self._shrink is not None and (shrunk := self._shrunk(value, self._shrink)) is not None:
            return shrunk
        if isinstance(value, list) and self._is_mixed(value):
            return self._mixed(value)
        return self._judged(value, as_text(value))

    def _judged(self, value: object, text: str) -> Outcome:
        return self._put(value, text) if self._leaves(text) else Outcome(text, value)

    def _leaves(self, text: str) -> bool:
        """Whether a text goes out. What our own tools answered never does, nor does a stub."""
        if not self._always and not self._limit.exceeded(text, self._policy.count):
            return False
        if is_stub(text, self._policy):
            return False
        try:
            return not is_ours(self._store.secret, text)
        except StoreError:
            return True  # then storing fails too, and says so

    def _put(self, value: object, text: str, *, claimed: str | None = None, shown: str | None = None) -> Outcome:
        """Store a value whose text is this, and make its stub. `shown` stands where its preview would."""
        policy = self._policy
        try:
            if policy.redact == "store":
                value = _redacted(value)
                text = as_text(value)
            value, sample = kept(value, text)
            media_type, kind = described(value, sample, claimed)
            about = facts(sample, media_type, kind, policy.preview_chars)
            ref = self._store.put(self._scope, value, self._about(media_type, kind))
        except Exception as error:  # noqa: BLE001 - a third party's backend raises what it likes; the agent goes on
            return self._failed(value, text, error)
        if shown is not None:
            about = replace(about, preview=Preview(mask(shown), "what the policy keeps of it"))
        return self._stub(ref, about, text, LEAD if shown is None else SHORTENED)

    def _stub(self, ref: Ref, about: Facts, text: str, lead: str = LEAD) -> Outcome:
        said = stub_of(ref.pointer, about, self._policy, lead=lead)
        tokens = round(sampled(text)) if about.tokens is None else about.tokens
        return Outcome(said, said, ref, (ref,), True, None, max(0, tokens - estimate(said)))

    def _about(self, media_type: str | None = None, kind: str | None = None) -> About:
        return About(tool=self._tool, call_id=self._call_id, media_type=media_type, kind=kind)

    def _failed(self, value: object, text: str, error: Exception) -> Outcome:
        FAILURES.note(self._store, error)
        if isinstance(value, bytes | bytearray | memoryview) and text[:1_000] != _beginning(value):
            said = nothing_shown(f"{memoryview(value).nbytes:,} bytes", reason(error))
        else:
            said = head_and_tail(text, reason(error), self._limit, self._policy.count)
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
        return self._put(value, as_text(value), shown=shown)

    # What is in the store already, or on its way there

    def _stream(self, stream: IO[bytes]) -> Outcome:
        if self._policy.redact == "store":
            return self.outcome(stream.read())  # masking needs all of it: a secret may lie across two pieces
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
            if self._never or not self._leaves(text):
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

    # Mixed content

    def _is_mixed(self, value: list[Any]) -> bool:
        """Whether this is a list of blocks, and not just data with types. What we do not know of it stays as it is, so
        that must be little; and so must all that stays inline together."""
        if not value or not all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in value):
            return False
        odd = [one for one in value if not blocks.is_block(one)]
        if len(odd) == len(value) or (odd and self._limit.exceeded(as_text(odd), self._policy.count)):
            return False
        inline = "\n".join(text for text in blocks.texts(value) if not self._leaves(text))
        return self._always or not _widened(self._limit).exceeded(inline, self._policy.count)

    def _mixed(self, value: list[Any]) -> Outcome:
        done = [self._block(one) for one in value]
        refs = tuple(ref for one in done for ref in one.refs)
        changed = any(new.content is not old for new, old in zip(done, value, strict=True))
        return Outcome(
            "\n".join(one.text for one in done),
            [one.content for one in done] if changed else value,
            refs[0] if refs else None,
            refs,
            any(one.is_stub for one in done),
            next((one.failure for one in done if one.failure), None),
            sum(one.tokens_saved for one in done),
        )

    def _block(self, block: dict[str, Any]) -> Outcome:
        inner = blocks.nested(block)
        if inner is not None:
            done = self._judged(inner, inner) if isinstance(inner, str) else self._mixed(inner)
            return replace(done, content=block if done.content is inner else {**block, "content": done.content})
        carried = blocks.payload(block)
        if carried is None or not self._leaves(carried.written):
            return Outcome(carried.written if carried and not carried.is_base64 else _glimpse(block), block)
        done = self._put(carried.value, carried.written, claimed=carried.media_type)
        return replace(done, content=carried.replace(done.text))


def _glimpse(block: dict[str, Any]) -> str:
    """What stands in a text for a block that is none."""
    text = as_text(block)
    return text if len(text) <= _SMALL else f"[{str(block.get('type'))[:40]} block of {len(text):,} characters]"


def _redacted(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return mask(bytes(value).decode()).encode()
        except UnicodeDecodeError:
            return value
    return mask(value) if isinstance(value, str) else mask_value(value)


def _beginning(value: bytes | bytearray | memoryview) -> str:
    return bytes(memoryview(value)[:4_000]).decode("utf-8", "ignore")[:1_000]


def _widened(limit: Limit) -> Limit:
    return Limit(
        max_tokens=limit.tokens and limit.tokens * _TOGETHER,
        max_chars=limit.max_chars and limit.max_chars * _TOGETHER,
        max_bytes=limit.max_bytes and limit.max_bytes * _TOGETHER,
    )
