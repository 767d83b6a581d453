"""The pipeline from a value to what a model gets: it decides, masks, stores, and writes the stub.

`externalize` handles a result of any shape. In a list of blocks or an MCP result each block is
judged on its own; but if too much would stay inline, or there would be too many stubs, the whole
list becomes one artifact. If the store fails, the model gets a bounded head and tail that says so.
What our own tools returned is never stored again.

Code that places text itself (transcripts, prompts, tools) uses single steps: `leaving` decides,
`masked` masks, `put` masks and stores, `put_prepared` stores what is masked already, and
`stub_for`, `hidden_stub` and `placeholder` write what replaces it, each as the policy says.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, Any, Final, NoReturn
from weakref import WeakSet

from coatcheck import media
from coatcheck.content import is_stream
from coatcheck.core_session import CoreSession
from coatcheck.errors import InvalidArgument, UnsupportedValue
from coatcheck.externalize import wrapped
from coatcheck.externalize.decision import (
    Decision,
    Estimate,
    Situation,
    expected_costs,
    note_result,
)
from coatcheck.externalize.images import fitted
from coatcheck.externalize.policy import MAX_TOKENS, Limit, Policy, configured
from coatcheck.externalize.savings import LIBRARY, ResultSource, counts_of
from coatcheck.externalize.shorter import sparse
from coatcheck.externalize.stub import (
    LEAD,
    NEAR,
    SHORTENED,
    STUB,
    head_and_tail,
    is_stub,
    nothing_shown,
    own_summary,
    own_tag,
    reason,
    stub_of,
)
from coatcheck.ids import digest_of
from coatcheck.intake import About, metadata_text
from coatcheck.models import USUAL_PRICES, model
from coatcheck.parts import (
    Part,
    as_block,
    block_of,
    extra_fields,
    is_block,
    leaves,
    message_fields,
    read,
    rebuilt,
    text_of,
    write,
)
from coatcheck.parts.mcp import as_object, as_result, is_text_block, only_string, repeated
from coatcheck.parts.objects import as_json
from coatcheck.previews import Facts, Preview, Sample, facts
from coatcheck.reading import sample_of
from coatcheck.redaction import CONTEXT, mask, mask_bytes, mask_value
from coatcheck.refs import Ref, summarize
from coatcheck.storage.frames import framed, line_counts
from coatcheck.store import Store
from coatcheck.tokens import Weighed, estimate, sampled
from coatcheck.truncation import SOURCE, Truncation, find_notice
from coatcheck.values import Encoded, as_text, decode_text

_FRAMED: Final = 128 * 1024  # bytes from which a store wants frames
_IN_MEMORY: Final = 1 << 20  # an artifact up to this size is read and judged like its value
_TOGETHER: Final = 4  # the inline part of a list may have this many times the limit
_MAX_STUBS: Final = 50  # in one list
_MAX_PARTS: Final = 1_000  # a longer list is data
_SMALL_BLOCK: Final = 500  # characters of a block that is shown unchanged in a text
_CACHED: Final = (
    256  # stubs: the same result is often on several lines of a transcript, and in several files
)
_ARGUMENT, _ARGUMENTS = (
    80,
    200,
)  # characters of one argument, and of all, that are kept with a result
_MCP: Final = "mcp__"  # Claude Code and Codex name the tools of MCP servers mcp__<server>__<tool>
_NUMBER: Final = 12  # characters that a line number and the sign after it may take
_LOG: Final = logging.getLogger("coatcheck")


# A stub is a function of the content, its pointer and the policy. The policy, the stub, and the
# tokens it saves:
_stubs: dict[tuple[str, str, str, str], tuple[Policy, str, int]] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a value.

    `text` is what the model gets, as a string. `content` is the same in the shape of the value: the
    value itself if it is small, else the stub, or the list of blocks with stubs in it. `ref` is the
    stored artifact, None if the value stayed inline; `refs` has one for each stored block.
    `failure` says why nothing could be stored. `why` is the decision behind it: sizes, expected
    reads and costs. `has_scaled_image` is True if an image that the provider would refuse was
    scaled down."""

    text: str
    content: Any
    ref: Ref | None = None
    refs: tuple[Ref, ...] = ()
    is_stub: bool = False
    failure: str | None = None
    has_scaled_image: bool = False
    _stored_tokens: int = field(default=0, repr=False, compare=False)
    _stubs: tuple[str, ...] = field(default=(), repr=False, compare=False)
    _basis: _Basis | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> Decision | None:
        """Why the value left or stayed. None if it did not go through a policy, such as a part of a
        transcript."""
        if self._basis is None:
            return None
        left = bool(self.refs or self.failure)
        return self._basis.decision(self._stored_tokens if left else estimate(self.text), left)

    @property
    def tokens_saved(self) -> int:
        """Estimate of the tokens that the model does not get."""
        return max(0, self._stored_tokens - sum(map(estimate, self._stubs)))

    @classmethod
    def of_parts(cls, text: str, content: Any, parts: list[Outcome]) -> Outcome:
        """Combine the outcomes of the parts of a value."""
        refs = tuple(ref for one in parts for ref in one.refs)
        return cls(
            text,
            content,
            refs[0] if refs else None,
            refs,
            any(one.is_stub for one in parts),
            next((one.failure for one in parts if one.failure), None),
            any(one.has_scaled_image for one in parts),
            sum(one._stored_tokens for one in parts),
            tuple(stub for one in parts for stub in one._stubs),
        )


@dataclass(frozen=True, slots=True)
class _Basis:
    """What decided an outcome: a reason, the limit in tokens, and the expected costs if they
    decided."""

    reason: str
    limit: int | None = None
    expected: Estimate | None = None

    def decision(self, tokens: int, left: bool) -> Decision:
        if self.expected is None or self.limit is None:
            return Decision(leaves=left, reason=self.reason, tokens=tokens, limit_tokens=self.limit)
        return replace(self.expected.decided(tokens, self.limit), leaves=left)


class Failures:
    """Counts how often storing failed in this process. Logs the first failure of each store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: WeakSet[Store] = WeakSet()
        self.count = 0

    def note(self, store: Store, error: Exception) -> None:
        with self._lock:
            self.count += 1
            is_new = store not in self._logged
            self._logged.add(store)
        if is_new:
            _LOG.warning(
                "storing a result failed, results are cut until it works: %s",
                mask(f"{store!r}: {error}"),
            )


FAILURES: Final = Failures()
_SMALL: Final = _Basis("small")
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))


def externalize(
    session: CoreSession,
    value: object,
    *,
    tool: str | None,
    call_id: str | None,
    policy: Policy | None,
    situation: Situation | None = None,
    arguments: Mapping[str, Any] | None = None,
    source: ResultSource | None = None,
    cut: Truncation | None = None,
) -> Outcome:
    """Return what a model gets for a tool's result. A failing store raises nothing. `situation` is
    the conversation, if the caller knows it; else it is estimated from the results that this
    session got so far. `arguments` are those of the call; their beginning is kept with the
    artifact. `source` is where the result enters. `cut` is what the caller knows to be missing from
    the value."""
    policy = policy or configured(session.store.settings)
    text = None
    if policy.safe_chars and not (policy.tools and tool in policy.tools):  # most results are small
        if type(value) is str:
            text = value
        elif type(value) is dict and "type" not in value and "content" not in value:
            text = as_text(value)
        if text is not None and len(text) <= policy.safe_ascii:
            if len(text) <= policy.safe_chars:
                return Outcome(text, value, _basis=_SMALL)
            if situation is None and text.isascii() and _is_plain(value):
                note_result(session, tool, (), 0, len(text))
                return Outcome(text, value, _basis=_SMALL)
    result = _Result(
        session, policy, _label(tool), _label(call_id), situation, arguments, source or LIBRARY, cut
    )
    return result.noted(value, text)


def _is_plain(value: object) -> bool:
    """Whether a small value has nothing to look into: a text without numbered lines, or an object
    of plain values."""
    if isinstance(value, str):
        return "\t" not in value[:_NUMBER]
    return isinstance(value, dict) and _SCALARS.issuperset(map(type, value.values()))


def offloaded(
    externalize: Callable[..., Outcome],
    call: Callable[..., Any],
    tool: str | None,
    policy: Policy | None,
    resolve: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
) -> Callable[..., Any]:
    """Wrap a function so that it returns the externalized content of its result. An awaitable
    result is awaited first, and then stored in a thread. `resolve` is applied to its keyword
    arguments."""
    if not callable(call):
        raise InvalidArgument(f"cannot offload a {type(call).__name__}", hint="decorate a function")
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise InvalidArgument(
            "cannot offload a generator", hint="run it with a ToolExecutor, which streams it"
        )
    name = tool or getattr(call, "__name__", None)

    import asyncio  # here, so that importing coatcheck stays quick

    async def content_of(result: Awaitable[Any]) -> Any:
        value = await result
        return (await asyncio.to_thread(externalize, value, tool=name, policy=policy)).content

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await content_of(call(*args, **await asyncio.to_thread(resolve, kwargs)))

        return awaited

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        value = call(*args, **resolve(kwargs))
        if inspect.isawaitable(value):  # an object with an async __call__, or a future
            return content_of(value)
        return externalize(value, tool=name, policy=policy).content

    return called


def leaving(
    store: Store, policy: Policy, texts: Sequence[tuple[str | None, str]], *, sampling: bool = False
) -> list[bool]:
    """Decide for each text, given with its tool, whether it leaves the context. With `sampling`,
    tokens are estimated from samples if they alone decide: for the many texts of a file."""
    if not policy.enabled:
        return [False] * len(texts)
    large = []
    for tool, text in texts:
        rule = policy.tools.get(tool) if tool else None
        limit = rule if isinstance(rule, Limit) else policy
        exceeded = limit.probably_exceeded if sampling else limit.exceeded
        large.append(rule == "always" or (rule != "never" and exceeded(text, policy.count)))
    odd = [
        one and (is_stub(text, policy) or " ~" in text[:NEAR])
        for one, (_, text) in zip(large, texts, strict=True)
    ]
    return [
        one and not (look and (is_stub(text, policy) or own_tag(store, text) is not None))
        for one, look, (_, text) in zip(large, odd, texts, strict=True)
    ]


def masked(value: Any, policy: Policy) -> Any:
    """Return the value as the policy lets it into a store: with secrets masked if it says so."""
    return redacted(value) if policy.redact == "store" else value


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
    tool, call_id = _label(about.tool), _label(about.call_id)
    about = about._replace(media_type=media_type, kind=kind, tool=tool, call_id=call_id)
    return session.put_encoded(prepared.encoded, masked_labels(about, policy), also)


def unstored(session_id: str, prepared: Prepared, *, claimed: str | None = None) -> Ref:
    """Return the ref that `put_prepared` would return, without storing anything."""
    data, (media_type, kind) = prepared.encoded.data, described(prepared.encoded, claimed)
    start = data[:1_024].decode("utf-8", "ignore") if media.is_text(media_type) else ""
    summary = summarize(mask(start)) if start else f"{media_type}, {len(data)} bytes"
    return Ref(
        digest_of(data),
        session_id,
        len(data),
        media_type,
        kind,
        prepared.encoded.codec,
        summary=summary,
    )


def stub_for(ref: Ref, prepared: Prepared, policy: Policy) -> tuple[str, int]:
    """Return the stub of a stored value, and an estimate of the tokens that it saves."""
    key = (ref.artifact_id, ref.pointer, ref.media_type, ref.codec)
    made = _stubs.get(key)
    if made is None or made[0] != policy:
        about = prepared.facts(ref.media_type, ref.kind, policy.preview_chars)
        stub = stub_of(ref.pointer, about, policy)
        # The provider decides what an image costs, not its base64.
        whole = 0 if ref.codec == "bytes" else about.tokens or round(sampled(prepared.text))
        made = _stubs[key] = policy, stub, max(0, whole and whole - round(sampled(stub)))
        if len(_stubs) > _CACHED:
            _stubs.pop(next(iter(_stubs), key), None)
    return made[1:]


def redacted(value: object) -> Any:
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
    masked = mask_value(given)
    text = written if masked == given else as_text(masked)
    if (again := mask(text)) != text:  # some secrets are recognised only by the text around them
        try:
            return json.loads(again)
        except ValueError:
            return again
    return value if masked == given else masked


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
        return Sample.of(
            self.encoded.data, None if known is None else sum(line_counts(known.frames))
        )

    def facts(self, media_type: str, kind: str, limit: int, cut: Truncation | None = None) -> Facts:
        """Describe what is stored. `cut` is what was cut out of it, if it does not say so
        itself."""
        is_text = self.encoded.data is self.text_bytes
        return facts(
            self.sample, media_type, kind, limit, tokens=self.tokens if is_text else None, cut=cut
        )


def described(value: Encoded, claimed: str | None = None) -> tuple[str, str]:
    """Return media type and kind of an encoded value. A magic number overrides the claimed type."""
    if (text := value.text) is not None:
        start = text[: media.HEAD]
        media_type = media.sniff_text(start, text[-64:], None, text)
        if claimed and media.is_text(claimed) and _may_be(claimed, text):
            media_type = claimed
        return media_type, media.sniff_kind(media_type, start)
    if value.codec == "json":
        return media.JSON, "data"
    head = value.data[: media.HEAD]
    media_type = media.sniff_bytes(head, value.data[-64:], None, value.data)
    if (
        claimed
        and (media_type == media.BINARY or media.is_text(media_type))
        and _may_be(claimed, value.data)
    ):
        media_type = claimed
    start = head.decode("utf-8", "ignore") if media.is_text(media_type) else ""
    return media_type, media.sniff_kind(media_type, start)


def _may_be(claimed: str, content: str | bytes) -> bool:
    """Whether content may be what its source claims: JSON must parse, unless it is too long to
    tell."""
    return not media.is_json(claimed) or len(content) > media.CHECKED or media.parses(content)


@functools.lru_cache(maxsize=4_096)
def _limit_of(tokens: int) -> Limit:
    return Limit(max_tokens=tokens)


@functools.lru_cache(maxsize=256)
def _metadata_of(source: ResultSource) -> str | None:
    found = source.metadata()
    return metadata_text(found) if found else None


class _Result:
    """One result of a tool on its way through the pipeline."""

    def __init__(
        self,
        session: CoreSession,
        policy: Policy,
        tool: str | None,
        call_id: str | None,
        situation: Situation | None = None,
        arguments: Mapping[str, Any] | None = None,
        source: ResultSource = LIBRARY,
        cut: Truncation | None = None,
    ) -> None:
        self._session = session
        self._policy = policy
        self._arguments = arguments
        self._source = source
        self._labels = About(tool=tool, call_id=call_id, ttl=policy.ttl)
        rule = policy.tools.get(tool) if tool else None
        self._always = rule == "always"
        self._never = rule == "never" or not policy.enabled
        self._limit: Limit = rule if isinstance(rule, Limit) else policy
        self._is_known = situation is not None
        self._tool = tool
        self._expected: Estimate | None = None
        self._reason = "off" if not policy.enabled else "rule" if isinstance(rule, str) else "limit"
        if not (self._always or self._never or self._limit.is_named):
            self._decide_by_cost(situation)
        self._shrink: Callable[[Any], Any] | None = rule if callable(rule) else None
        self._plan: Iterator[bool] = iter(())  # for each payload of a list, whether it leaves
        self._sharing = 1  # how many fall-backs share one limit if the store fails
        self._tag: str | None = None  # the tag of the marked answer that stays in this result
        self._tag_may_repeat = False
        # what is missing, if the value does not say so itself; a block may say it of the others
        self._cut = cut

    def _decide_by_cost(self, situation: Situation | None) -> None:
        """Set the limit from which a stub is expected to pay off in this conversation."""
        policy = self._policy
        prices = policy.prices or (
            USUAL_PRICES if policy.model is None else model(policy.model).prices
        )
        self._expected, most = expected_costs(
            self._session,
            self._tool,
            situation,
            prices,
            policy.expected_calls,
            self._labels.call_id,
        )
        if self._expected is None:
            self._never, self._reason = True, "report"
        else:
            self._limit = _limit_of(most)

    def noted(self, value: object, text: str | None) -> Outcome:
        """Return the outcome of a value with the basis of its decision, and count it for later
        decisions."""
        is_text = type(value) is str and text is not None
        done = self.judged(value, text) if is_text else self.outcome(value, text)
        session, failed = self._session, done.failure is not None
        if done.refs or not self._is_known:
            note_result(session, self._tool, done.refs, done._stored_tokens, len(done.text))
        if done.refs or failed:
            counts_of(session.store).kept_out(
                session,
                self._source,
                self._tool,
                done.refs,
                done._stored_tokens,
                stubs=done._stubs,
                failed=failed,
            )
        # Set in place, since `replace` costs more than the decision: nobody else has the outcome
        # yet.
        object.__setattr__(
            done, "_basis", _Basis(self._reason, self._limit.max_tokens, self._expected)
        )
        return done

    def outcome(self, value: object, text: str | None = None) -> Outcome:
        """Return the outcome of a value, given its text if that is known."""
        if isinstance(value, Ref):
            return self._of_ref(value)
        if is_stream(value):
            return self._of_stream(value)
        if self._never:
            return Outcome(as_text(value), value)
        done = None if self._shrink is None else self._of_shrunk(value, self._shrink)
        if done is not None or isinstance(value, str):
            pass
        elif isinstance(value, list):
            done = self._of_list(value)
        elif (result := as_result(value)) is not None and (
            done := self._of_mcp(value, result)
        ) is not None:
            pass
        elif as_block(value) is not None and any(leaves([read(value)])):
            done = self._of_list([value])
            done = done and replace(done, content=done.content[0])
        elif read(value).kind == "foreign":
            done = Outcome(_block_text(value), value)
        else:
            done = self._of_container(value)
        return done or self.judged(value, text)

    @cached_property
    def _about(self) -> About:
        """What is stored with the value, made only if it leaves."""
        about = masked_labels(self._labels, self._policy)
        if not self._arguments:
            return about._replace(metadata_json=_metadata_of(self._source))
        shown = ", ".join(
            f"{name}={as_text(value)[:_ARGUMENT]}" for name, value in self._arguments.items()
        )
        found = {**self._source.metadata(), "arguments": mask(shown)[:_ARGUMENTS]}
        return about._replace(metadata_json=metadata_text(found))

    # Decide

    def judged(self, value: object, text: str | None = None) -> Outcome:
        """Return the outcome of a value as a whole."""
        text = as_text(value) if text is None else text
        if self._never:
            return Outcome(text, value)
        size = (
            memoryview(value).nbytes if isinstance(value, bytes | bytearray | memoryview) else None
        )
        prepared = Prepared(value, text)
        shorter = self._shorter(text) if value is text else None
        weighed = prepared if shorter is None else None
        if self._is_large(shorter or text, size, weighed) and not self._stays_anyway(text):
            return self._put(prepared)
        return Outcome(text, value) if shorter is None else Outcome(shorter, shorter)

    def _shorter(self, text: str) -> str | None:
        """Return a shorter form of a text that stays, if the policy leaves that to us."""
        may_be_numbered = self._expected is not None and (
            "→" in text[:_NUMBER] or "\t" in text[:_NUMBER]
        )
        return sparse(text) if may_be_numbered else None

    def _leaves(self, text: str, size: int | None = None) -> bool:
        """Whether a value leaves, given its text. `size` is its byte size, if that is not the size
        of the text."""
        return self._is_large(text, size) and not self._stays_anyway(text)

    def _is_large(self, text: str, size: int | None = None, weighed: Weighed | None = None) -> bool:
        return self._always or self._limit.exceeded(
            text, self._policy.count, size=size, weighed=weighed
        )

    def _stays_anyway(self, text: str) -> bool:
        """Whether a text is a stub, or the first marked answer of our tools in this result. Marks
        can be copied, so a second one is treated like any other text."""
        if text.startswith(STUB) and is_stub(text, self._policy):
            return True
        tag = own_tag(self._session.store, text) if " ~" in text[:NEAR] else None
        if tag is None or (
            self._tag is not None and not (self._tag_may_repeat and tag == self._tag)
        ):
            return False
        self._tag = tag
        return True

    # Store

    def _put(
        self, prepared: Prepared, *, claimed: str | None = None, shown: str | None = None
    ) -> Outcome:
        """Store a value and return its stub, with `shown` as its preview if given."""
        cut = self._cut
        try:
            inner = self._unwrapped(prepared.value)
            if inner is not None:
                prepared = Prepared(inner.text, inner.text)
                cut = Truncation(SOURCE, "its end") if inner.is_cut else cut
            if self._policy.redact == "store":
                value = redacted(prepared.value)
                prepared = Prepared(value, as_text(value))
            media_type, kind = described(prepared.encoded, claimed)
            entry = self._about._replace(media_type=media_type, kind=kind)
            about = prepared.facts(media_type, kind, self._policy.preview_chars, cut)
            ref = self._session.put_encoded(prepared.encoded, entry)
            if shown is not None:
                about = replace(about, preview=Preview(mask(shown), "what the policy keeps of it"))
            return self._stub(ref, about, prepared, LEAD if shown is None else SHORTENED)
        except Exception as error:  # noqa: BLE001 - third-party backends raise anything; the agent continues
            return self._failed(error, prepared)

    def _unwrapped(self, text: object) -> wrapped.Unwrapped | None:
        """Return the text inside content blocks or structured content that a host has written as
        text; None for any other value."""
        if not isinstance(text, str):
            return None
        if wrapped.begins_wrapped(text, 0, wrapped.WRAPPER):
            return wrapped.unwrapped(text)
        is_from_mcp = self._tool is not None and self._tool.startswith(_MCP)
        inner = wrapped.structured_text(text) if is_from_mcp else None
        return None if inner is None else wrapped.Unwrapped(inner)

    def _stub(self, ref: Ref, about: Facts, prepared: Prepared, lead: str = LEAD) -> Outcome:
        if self._policy.render is None:
            stub = stub_of(ref.pointer, about, self._policy, lead=lead)
        else:
            most = self._policy.preview_chars
            stub = self._policy.render(ref, mask(prepared.text[: most + CONTEXT])[:most])
        tokens = round(prepared.tokens) if about.tokens is None else about.tokens
        return Outcome(stub, stub, ref, (ref,), is_stub=True, _stored_tokens=tokens, _stubs=(stub,))

    def _failed(self, error: Exception, prepared: Prepared | None) -> Outcome:
        FAILURES.note(self._session.store, error)
        why, value = reason(error), prepared and prepared.value
        data = memoryview(value) if isinstance(value, bytes | bytearray | memoryview) else None
        if prepared is None:
            shown = nothing_shown("a stream:", why)
        elif (
            data and prepared.text[:1_000] != bytes(data[:4_000]).decode("utf-8", "ignore")[:1_000]
        ):
            shown = nothing_shown(f"{data.nbytes:,} bytes:", why)
        else:
            limit = (
                self._limit if self._expected is None else self._policy
            )  # a break-even says nothing about room
            shown = head_and_tail(
                prepared.text, why, limit, self._policy.count, sharing=self._sharing
            )
        return Outcome(shown, shown, failure=mask(str(error)) or type(error).__name__)

    def _of_shrunk(self, value: object, shrink: Callable[[Any], Any]) -> Outcome | None:
        """Apply the tool's own function. None if it fails or leaves the value unchanged."""
        try:
            smaller = shrink(value)
            if smaller is value or bool(smaller == value):
                return None
        except Exception:  # noqa: BLE001 - a host's function: if it fails, the limits decide
            return None
        shown = as_text(smaller)
        if self._limit.exceeded(shown, self._policy.count):
            shown = f"{shown[: self._policy.preview_chars]} …[{len(shown):,} characters, cut]"
        done = self._put(Prepared(value, as_text(value)), shown=shown)
        usual = len(done.text) - len(shown) + self._policy.preview_chars
        if (
            done.failure is None and len(short := mask(as_text(smaller))) < usual
        ):  # it needs no stub around it
            return replace(done, text=short, content=short, is_stub=False, _stubs=(short,))
        return done

    def _of_stream(self, stream: IO[bytes]) -> Outcome:
        if self._never or self._policy.redact == "store":
            data = stream.read()  # masking needs all of it: a secret may span two chunks
            return self.outcome(
                decode_text(data) if getattr(stream, "is_text", False) is True else data
            )
        try:
            ref = self._session.put_about(stream, self._about)
        except UnsupportedValue:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(error, None)
        return self._of_ref(ref)

    def _of_ref(self, ref: Ref) -> Outcome:
        """Return the outcome of a stored artifact: the same as for its value. Raises what opening
        it raises."""
        prepared = Prepared(None, "")
        media_type = media.media_type_of(ref.media_type) or media.BINARY
        with self._session.content(ref) as content:
            may_fit = not self._always and media.is_text(media_type) and self._may_fit(content.size)
            if self._never or content.size <= _IN_MEMORY or may_fit:
                text = as_text(b"".join(content.chunks()))
                if self._never or not self._leaves(text, content.size):
                    return Outcome(text, text)
                prepared = Prepared(None, text)
            sample = sample_of(content)
            summary = own_summary(ref, sample.head)
            most = self._policy.preview_chars
            about = facts(sample, media_type, ref.kind, most, summary=summary, cut=self._cut)
        return self._stub(ref, about, prepared)

    def _may_fit(self, size: int) -> bool:
        """Whether a text of this size may be within the limit."""
        limit = self._limit
        bounds = (
            limit.max_chars and limit.max_chars * 4,
            limit.max_bytes,
            limit.tokens and limit.tokens * 64,
        )
        return all(bound is None or size <= bound for bound in bounds)

    # MCP results and lists of blocks

    def _of_mcp(self, value: object, result: dict[str, Any]) -> Outcome | None:
        """Return the outcome of an MCP result. Its error flag and other fields stay."""
        inner, structured = result["content"], result.get("structuredContent")
        if structured is not None and (once := self._of_repeated(value, result)) is not None:
            return once
        self._tag = None
        listed = self._of_list(inner) if inner else Outcome("", inner)
        if listed is None:
            if not all(is_block(read(one)) for one in inner):
                return None
            listed = self._as_one_block(inner)
        parts, changed = [listed], {**result, "content": listed.content}
        if structured is not None:
            self._tag_may_repeat = True  # MCP requires the text here too
            text_inside = only_string(structured)
            value_inside = structured if text_inside is None else text_inside
            done = self.judged(value_inside)
            if done.content is not value_inside:
                changed["structuredContent"] = as_object(done.text)
                parts.append(done)
        text = "\n".join(one.text for one in parts) or (
            as_text(structured) if structured is not None else ""
        )
        is_same = listed.content is inner and len(parts) == 1
        outcome = Outcome.of_parts(text, value if is_same else rebuilt(value, changed), parts)
        if not all(one.refs for one in (listed, parts[-1])):
            return outcome
        # A host shows a model the text or the structured content, so only one of them is saved.
        counted = min(listed, parts[-1], key=lambda one: one._stored_tokens)
        return replace(outcome, _stored_tokens=counted._stored_tokens, _stubs=counted._stubs)

    def _of_repeated(self, value: object, result: dict[str, Any]) -> Outcome | None:
        """Return the outcome of a result whose structured content repeats its text: one artifact,
        and its stub in both places. None if they differ or stay inline."""
        known = [as_block(one) for one in result["content"]]
        shared = repeated(known, result["structuredContent"])
        done = self.judged(shared) if shared is not None else None
        if done is None or done.content is shared:
            return None
        others = [one for one in known if not is_text_block(one)]
        rest = (
            (self._of_list(others) or self._as_one_block(others)) if others else Outcome("", others)
        )
        first = next(one for one in known if is_text_block(one))
        content = [{**(first or {}), "text": done.text}, *rest.content]
        changed = {**result, "content": content, "structuredContent": as_object(done.text)}
        text = "\n".join(one.text for one in (done, rest) if one.text)
        return Outcome.of_parts(text, rebuilt(value, changed), [done, rest])

    def _as_one_block(self, value: list[Any]) -> Outcome:
        """Judge a list as a whole; if it leaves, a text block with the stub replaces it."""
        done = self.judged(value)
        return (
            done
            if done.content is value
            else replace(done, content=[{"type": "text", "text": done.text}])
        )

    def _of_list(self, value: list[Any]) -> Outcome | None:
        """Return the outcome of a list of blocks, or None if it is plain data or too large."""
        known = [block for block in map(as_block, value) if block is not None]
        if len(value) <= _MAX_PARTS:
            self._cut = _notice(known) or self._cut
            if 0 < _count_media(value, known) <= _MAX_STUBS:
                return self._beside_media(value)
        if not known or len(known) < len(value):
            return None
        parts = [read(one) for one in value]
        unknown = [part.block for part in parts if not is_block(part)]
        is_data = len(unknown) > _MAX_STUBS and self._limit.exceeded(
            as_text(unknown), self._policy.count
        )
        if len(unknown) == len(parts) or is_data:
            return self._beside_images(parts)
        extra = [extra_fields(part) for part in parts if is_block(part)]
        extra = [fields for fields in extra if fields]
        if extra and self._limit.times(_TOGETHER).exceeded(as_text(extra), self._policy.count):
            return self._beside_images(parts)
        plan = self._planned(parts)
        if plan is None:
            return self._beside_images(parts)
        self._plan, self._sharing = iter(plan), max(1, sum(plan))
        return self._of_parts(parts, value)

    def _beside_images(self, parts: list[Part]) -> Outcome | None:
        """Return the outcome of a list whose other blocks are too large together: one stub for
        them, and the images after it. None if there are no images, or nothing else."""
        images = [part.original for part in parts if part.billed is not None]
        others = [part.original for part in parts if part.billed is None]
        if not images or not others or self._always:
            return None
        shown = self._of_list(images)
        if shown is None:
            return None
        rest = self._as_one_block(others)
        text = "\n".join((rest.text, shown.text))
        return Outcome.of_parts(text, [*rest.content, *shown.content], [rest, shown])

    def _planned(self, parts: list[Part]) -> list[bool] | None:
        """Return for each payload in order whether it leaves, or None if the list would still be
        too large."""
        together = self._limit.times(_TOGETHER)
        # A model cannot see the stub of an image, so expected costs do not decide about it.
        most = self._limit.tokens if self._expected is None else MAX_TOKENS
        inline: list[str] = []
        plan: list[bool] = []
        billed = 0
        tag = self._tag
        for part in leaves(parts):
            tokens = None if self._always else part.billed
            if tokens is None:
                is_large = self._is_large(part.written)
                plan.append(is_large and not self._stays_anyway(part.written))
                if not is_large:
                    inline.append(part.written)
                continue
            is_large = most is not None and (tokens > most or billed + tokens > most * _TOGETHER)
            plan.append(is_large)
            if not is_large:
                billed += tokens
                inline.append("")
        if sum(plan) > _MAX_STUBS or (
            not self._always and together.exceeded("\n".join(inline), self._policy.count)
        ):
            self._tag = tag  # no part stays: the list is judged as a whole
            return None
        return plan

    def _of_parts(self, parts: Sequence[Part], value: list[Any]) -> Outcome:
        done = [self._of_part(part) for part in parts]
        return _joined(done, [one.content for one in done], value)

    def _of_part(self, part: Part) -> Outcome:
        """Return the outcome of a part as the plan says. Unchanged, it is the same object."""
        if part.kind == "nested":
            inner = part.block["content"]
            done = self._of_parts(part.content, inner)
            if done.content is inner:
                return replace(done, content=part.original)
            changed = {**part.block, "content": done.content}
            return replace(done, content=rebuilt(part.original, changed))
        if not part.has_payload:
            return Outcome(_block_text(part.block), part.original)
        if next(self._plan):
            done = self._put(Prepared(part.value, part.written), claimed=part.media_type or None)
            if done.refs and part.billed is not None:  # what the provider charges, not its base64
                done = replace(done, _stored_tokens=part.billed)
            return replace(done, content=write(part.with_text(done.text)))
        is_result = "tool_use_id" in part.block
        shorter = None if is_result else self._shorter(part.written)
        if shorter is not None:
            return Outcome(shorter, write(part.with_text(shorter)))
        if not part.is_encoded:
            return Outcome(part.text, part.original)
        shown = fitted(part)
        if shown is part:
            return Outcome(_block_text(part.block), part.original)
        return Outcome(_block_text(block_of(shown)), write(shown), has_scaled_image=True)

    def _of_container(self, value: object) -> Outcome | None:
        """Return the outcome of a message or result of another framework with media inside. None if
        it is something else, or if its other fields are too large."""
        part = read(value)
        if part.kind != "message" or self._limit.exceeded(
            as_text(message_fields(part)), self._policy.count
        ):
            return None
        inner = list(part.content)
        done = self._of_list(inner)
        if done is None:
            return None
        if done.content is inner:
            return replace(done, content=value)
        return replace(done, content=write(replace(part, content=tuple(done.content))))

    def _beside_media(self, value: list[Any]) -> Outcome | None:
        """Return the outcome of a list with media of another framework, or with plain text between
        blocks. Such media and unknown blocks pass unchanged. None if the rest is too large."""
        done: list[Outcome] = []
        inline: list[str] = []
        together = self._limit.times(_TOGETHER)
        as_strings = any(
            isinstance(one, str) or getattr(one, "kind", None) == "binary" for one in value
        )
        for one in value:
            if read(one).kind == "foreign":
                done.append(Outcome(_block_text(one), one))
                continue
            part = one if isinstance(one, str | dict) else as_json(one) or one
            text = text_of(part)
            if text is None and isinstance(part, dict):
                outcome = self._of_container(one)
                if (
                    outcome is None
                    and is_block(read(part))
                    and (listed := self._of_list([one])) is not None
                ):
                    outcome = replace(listed, content=listed.content[0])
                elif outcome is None and as_block(part) is not None:
                    outcome = Outcome(_block_text(part), one)
                if outcome is not None:
                    done.append(outcome)
                    continue
            written = as_text(part) if text is None else text
            inline.append(written)
            if not self._leaves(written) and not together.exceeded(
                "\n".join(inline), self._policy.count
            ):
                done.append(Outcome(written, one))
                continue
            inline.pop()
            outcome = self._put(Prepared(part if text is None else text, written))
            if isinstance(one, str) or (as_strings and text is None):
                done.append(outcome)
                continue
            kept: dict[str, Any] = (
                {"type": "text"} if isinstance(part, dict) and "type" in part else {}
            )
            if text is not None and isinstance(part, dict):
                kept = part
            done.append(replace(outcome, content=rebuilt(one, {**kept, "text": outcome.text})))
        if sum(bool(one.refs or one.failure) for one in done) > _MAX_STUBS:
            return None
        return _joined(done, [one.content for one in done], value)


def _notice(known: list[dict[str, Any]]) -> Truncation | None:
    """Return what a block of a list says was cut out of the others, as Claude Code does for the
    results of MCP."""
    for block in known:
        text = text_of(block)
        cut = None if text is None else find_notice(text)
        if cut is not None:
            return cut
    return None


def _joined(done: list[Outcome], content: list[Any], value: list[Any]) -> Outcome:
    """Return one outcome for the parts of a list, with the same list if nothing changed."""
    is_same = all(new is old for new, old in zip(content, value, strict=True))
    return Outcome.of_parts(
        "\n".join(one.text for one in done), value if is_same else content, done
    )


def _count_media(value: list[Any], known: list[dict[str, Any]]) -> int:
    """Count the media of frameworks in a list. In a list of blocks and plain texts, count those of
    providers too."""
    parts = [read(one) for one in value]
    foreign = sum(part.kind in ("foreign", "message") for part in parts)
    if foreign or len(known) == len(value):
        return foreign
    if not all(as_block(one) or text_of(one) is not None for one in value):
        return 0
    return sum(part.is_encoded or part.kind == "reference" for part in parts)


def _block_text(block: object) -> str:
    """Return the text that represents a block without text."""
    text = as_text(block)
    kind = (
        (block.get("type") or next(iter(block)))
        if isinstance(block, dict)
        else type(block).__name__
    )
    return (
        text
        if len(text) <= _SMALL_BLOCK
        else f"[{str(kind)[:40]} block of {len(text):,} characters]"
    )


def _label(text: str | None) -> str | None:
    """Return a tool's name or a call's id in a form that can be stored. An odd label must not lose
    the result."""
    if not text:
        return None
    return (text if text.isascii() else text.encode("utf-8", "replace").decode())[:1_000]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
