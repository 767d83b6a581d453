"""From a tool's result to what a model gets: split it into parts, decide about each, store what
leaves, and join the parts again.

In a list of blocks or an MCP result each block is judged on its own. Any other value is judged as
a whole. If the store fails, the model gets a bounded head and tail that says so. What our own tools
returned is never stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import IO, Any, Final

from coatcheck import media
from coatcheck.content import is_stream
from coatcheck.core_session import CoreSession
from coatcheck.errors import UnsupportedValue
from coatcheck.externalize.choices import Choice, Split, as_one_block, decide, split
from coatcheck.externalize.decision import Situation, note_result
from coatcheck.externalize.images import fitted
from coatcheck.externalize.judge import Judge, may_be_numbered
from coatcheck.externalize.outcome import SMALL, Outcome
from coatcheck.externalize.policy import Limit, Policy, configured
from coatcheck.externalize.savings import LIBRARY, ResultSource, counts_of
from coatcheck.externalize.storing import Prepared, label
from coatcheck.externalize.stub import own_summary
from coatcheck.externalize.stubbing import Result, failed, put_and_stub, stub_outcome
from coatcheck.parts import Part, as_block, block_of, is_block, read, rebuilt, write
from coatcheck.parts.mcp import as_object, as_result, is_text_block, only_string, repeated
from coatcheck.previews import facts
from coatcheck.reading import sample_of
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.truncation import Truncation
from coatcheck.values import as_text, decode_text

_IN_MEMORY: Final = 1 << 20  # an artifact up to this size is read and judged like its value
_SMALL_BLOCK: Final = 500  # characters of a block that is shown unchanged in a text
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
    text = _plain_text(value, tool, policy)
    if text is not None and len(text) <= policy.safe_ascii:  # most results are small
        if len(text) <= policy.safe_chars:
            return Outcome(text, value, basis=SMALL)
        if situation is None and text.isascii() and _is_flat(value):
            note_result(session, tool, (), 0, len(text))
            return Outcome(text, value, basis=SMALL)

    tool, call_id = label(tool), label(call_id)
    judge = Judge(session, policy, tool, call_id, situation)
    result = Result(
        session, policy, tool, call_id, source or LIBRARY, judge, arguments=arguments, cut=cut
    )
    outcome = replace(_outcome(value, result, text), basis=judge.basis)
    if outcome.refs or situation is None:
        tokens, chars = outcome.stored_tokens, len(outcome.text)
        note_result(session, tool, outcome.refs, tokens, chars)
    if outcome.refs or outcome.failure is not None:
        counts_of(session.store).kept_out(
            session,
            result.source,
            tool,
            outcome.refs,
            outcome.stored_tokens,
            stubs=outcome.stubs,
            failed=outcome.failure is not None,
        )
    return outcome


def _plain_text(value: object, tool: str | None, policy: Policy) -> str | None:
    """Return the text of a value that is a text or plain data, if no rule decides about its
    tool."""
    if not policy.safe_chars or (policy.tools and tool in policy.tools):
        return None
    if type(value) is str:
        return value
    if type(value) is dict and "type" not in value and "content" not in value:
        return as_text(value)
    return None


def _is_flat(value: object) -> bool:
    """Whether a small value has nothing to look into: a text without numbered lines, or an object
    of plain values."""
    if isinstance(value, str):
        return not may_be_numbered(value)
    return isinstance(value, dict) and _SCALARS.issuperset(map(type, value.values()))


def _outcome(value: object, result: Result, text: str | None = None) -> Outcome:
    """Return the outcome of a value, given its text if that is known."""
    judge = result.judge
    if isinstance(value, Ref):
        return _of_ref(value, result)
    if is_stream(value):
        return _of_stream(value, result)
    if judge.never:
        return Outcome(as_text(value), value)
    if judge.shrink is not None:
        shrunk = _of_shrunk(value, judge.shrink, result)
        if shrunk is not None:
            return shrunk
    if isinstance(value, str):
        return _of_whole(value, result, value)
    fields = as_result(value)
    if fields is not None:
        outcome = _of_mcp(value, fields, result)
        if outcome is not None:
            return outcome
    found = split(value)
    if found is not None:
        result = _with_notice(result, found)
        choices = decide(found, judge)
        if choices is not None:
            return join(found, store(choices, result))
    return _of_whole(value, result, text)


# A value with parts


def store(choices: Sequence[Choice], result: Result) -> list[Outcome]:
    """Store the parts that leave, and return an outcome for each choice, with what takes the place
    of the part as its content."""
    sharing = max(1, sum(one.stubs for one in choices))
    return [_of_choice(one, result, sharing) for one in choices]


def join(found: Split, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a value with those of its items; the same value if nothing changed."""
    text = "\n".join(one.text for one in outcomes)
    contents = [one.content for one in outcomes]
    is_same = len(contents) == len(found.items) and all(map(is_, contents, found.items))
    content = found.value if is_same else found.rebuild(contents)
    return Outcome.of_parts(text, content, outcomes)


def _with_notice(result: Result, found: Split) -> Result:
    return result if found.cut is None else replace(result, cut=found.cut)


def _of_choice(choice: Choice, result: Result, sharing: int) -> Outcome:
    if choice.split is not None:
        result = _with_notice(result, choice.split)
        return join(choice.split, [_of_choice(one, result, sharing) for one in choice.inside])
    if choice.leaves:
        return _of_leaving(choice, result, sharing)
    if choice.value is not None:
        return Outcome(choice.value.text, choice.part.original)
    return _of_staying(choice.part, result.judge)


def _of_leaving(choice: Choice, result: Result, sharing: int) -> Outcome:
    """Store a part, and write its stub where the part was."""
    part, value = choice.part, choice.value
    if value is None:
        prepared = Prepared(part.value, part.written)
        done = put_and_stub(result, prepared, claimed=part.media_type or None, sharing=sharing)
        if done.refs and part.billed is not None:  # what the provider charges, not its base64
            done = replace(done, stored_tokens=part.billed)
        return replace(done, content=write(part.with_text(done.text)))
    done = put_and_stub(result, value, sharing=sharing)
    if choice.place == "string":
        return done
    return replace(done, content=rebuilt(part.original, {**part.block, "text": done.text}))


def _of_staying(part: Part, judge: Judge) -> Outcome:
    """Return a block that stays: the same object, unless a shorter form or a scaled image takes its
    place."""
    if not part.has_payload:
        shown = part.original if part.kind == "foreign" else part.block
        return Outcome(_block_text(shown), part.original)
    is_result = "tool_use_id" in part.block
    shorter = None if is_result else judge.shorter(part.written)
    if shorter is not None:
        return Outcome(shorter, write(part.with_text(shorter)))
    if not part.is_encoded:
        return Outcome(part.text, part.original)
    scaled = fitted(part)
    if scaled is part:
        return Outcome(_block_text(part.block), part.original)
    return Outcome(_block_text(block_of(scaled)), write(scaled), has_scaled_image=True)


def _block_text(block: object) -> str:
    """Return the text that represents a block without text."""
    text = as_text(block)
    if len(text) <= _SMALL_BLOCK:
        return text
    name = type(block).__name__
    if isinstance(block, dict):
        name = str(block.get("type") or next(iter(block)))
    return f"[{name[:40]} block of {len(text):,} characters]"


# An MCP result


def _of_mcp(value: object, fields: dict[str, Any], result: Result) -> Outcome | None:
    """Return the outcome of an MCP result. Its error flag and other fields stay. None if it is
    something else."""
    items, structured = fields["content"], fields.get("structuredContent")
    if structured is not None:
        once = _of_repeated(value, fields, result)
        if once is not None:
            return once
    judge = result.judge
    judge.own_answer = None
    content = Outcome("", items)
    if items:
        found = split(items)
        assert found is not None
        result = _with_notice(result, found)
        choices = decide(found, judge)
        if choices is None:
            if not all(is_block(read(one)) for one in items):
                return None
            choices = as_one_block(items, judge)
        content = join(found, store(choices, result))
    if structured is None:
        changed = {**fields, "content": content.content}
        is_same = content.content is items
        return replace(content, content=value if is_same else rebuilt(value, changed))
    judge.may_repeat_own_answer = True  # MCP requires the text here too
    return _with_structured(value, fields, content, result)


def _with_structured(
    value: object, fields: dict[str, Any], content: Outcome, result: Result
) -> Outcome:
    """Return the outcome of an MCP result from that of its content, and its structured content."""
    structured = fields["structuredContent"]
    only_text = only_string(structured)
    inside = structured if only_text is None else only_text
    done = _of_whole(inside, result)
    if done.content is inside:
        text = content.text or as_text(structured)
        if content.content is fields["content"]:
            return replace(content, text=text, content=value)
        changed = {**fields, "content": content.content}
        return replace(content, text=text, content=rebuilt(value, changed))
    changed = {**fields, "content": content.content, "structuredContent": as_object(done.text)}
    parts = [content, done]
    text = "\n".join(one.text for one in parts)
    outcome = Outcome.of_parts(text, rebuilt(value, changed), parts)
    if not (content.refs and done.refs):
        return outcome
    # A host shows a model the text or the structured content, so only one of them is saved.
    counted = min(parts, key=lambda one: one.stored_tokens)
    return replace(outcome, stored_tokens=counted.stored_tokens, stubs=counted.stubs)


def _of_repeated(value: object, fields: dict[str, Any], result: Result) -> Outcome | None:
    """Return the outcome of a result whose structured content repeats its text: one artifact, and
    its stub in both places. None if they differ or stay inline."""
    blocks = [as_block(one) for one in fields["content"]]
    shared = repeated(blocks, fields["structuredContent"])
    if shared is None:
        return None
    done = _of_whole(shared, result)
    if done.content is shared:
        return None
    text_blocks = [one for one in blocks if is_text_block(one)]
    others = [one for one in blocks if not is_text_block(one)]
    parts = [done]
    content: list[Any] = [{**(text_blocks[0] or {}), "text": done.text}]
    if others:
        found = split(others)
        assert found is not None
        choices = decide(found, result.judge) or as_one_block(others, result.judge)
        rest = join(found, store(choices, _with_notice(result, found)))
        parts.append(rest)
        content += rest.content
    changed = {**fields, "content": content, "structuredContent": as_object(done.text)}
    text = "\n".join(one.text for one in parts if one.text)
    return Outcome.of_parts(text, rebuilt(value, changed), parts)


# A value without parts


def _of_whole(value: object, result: Result, text: str | None = None) -> Outcome:
    """Return the outcome of a value that is judged as a whole, given its text if that is known."""
    judge = result.judge
    text = as_text(value) if text is None else text
    prepared = Prepared(value, text)
    shorter = judge.shorter(text) if value is text else None
    if shorter is not None:
        if judge.is_large(shorter) and not judge.stays_anyway(text):
            return put_and_stub(result, prepared)
        return Outcome(shorter, shorter)
    is_binary = isinstance(value, bytes | bytearray | memoryview)
    size = memoryview(value).nbytes if is_binary else None  # type: ignore[arg-type]
    if judge.is_large(text, size, prepared) and not judge.stays_anyway(text):
        return put_and_stub(result, prepared)
    return Outcome(text, value)


def _of_shrunk(value: object, shrink: Callable[[Any], Any], result: Result) -> Outcome | None:
    """Apply the tool's own function. None if it fails or leaves the value unchanged."""
    try:
        smaller = shrink(value)
        if smaller is value or bool(smaller == value):
            return None
    except Exception:  # noqa: BLE001 - a host's function: if it fails, the limits decide
        return None
    whole = as_text(smaller)
    shown = whole
    most = result.policy.preview_chars
    if result.judge.limit.exceeded(whole, result.policy.count):
        shown = f"{whole[:most]} …[{len(whole):,} characters, cut]"
    done = put_and_stub(result, Prepared(value, as_text(value)), shown=shown)
    short = mask(whole)
    usual = len(done.text) - len(shown) + most
    if done.failure is None and len(short) < usual:  # it needs no stub around it
        return replace(done, text=short, content=short, is_stub=False, stubs=(short,))
    return done


def _of_stream(stream: IO[bytes], result: Result) -> Outcome:
    if result.judge.never or result.policy.redact == "store":
        data = stream.read()  # masking needs all of it: a secret may span two chunks
        is_text = getattr(stream, "is_text", False) is True
        return _outcome(decode_text(data) if is_text else data, result)
    try:
        ref = result.session.put_about(stream, result.about)
    except UnsupportedValue:
        raise
    except Exception as error:  # noqa: BLE001 - third-party backends raise anything; the agent continues
        return failed(result, error, None)
    return _of_ref(ref, result)


def _of_ref(ref: Ref, result: Result) -> Outcome:
    """Return the outcome of a stored artifact: the same as for its value. Raises what opening it
    raises."""
    judge = result.judge
    prepared = Prepared(None, "")
    media_type = media.media_type_of(ref.media_type) or media.BINARY
    with result.session.content(ref) as content:
        may_stay = not judge.always and media.is_text(media_type)
        may_stay = may_stay and _may_fit(content.size, judge.limit)
        if judge.never or content.size <= _IN_MEMORY or may_stay:
            text = as_text(b"".join(content.chunks()))
            if judge.never or not judge.leaves(text, content.size):
                return Outcome(text, text)
            prepared = Prepared(None, text)
        sample = sample_of(content)
        summary = own_summary(ref, sample.head)
        most = result.policy.preview_chars
        about = facts(sample, media_type, ref.kind, most, summary=summary, cut=result.cut)
    return stub_outcome(result, ref, about, prepared)


def _may_fit(size: int, limit: Limit) -> bool:
    """Whether a text of this many bytes may be within the limit."""
    if limit.max_chars is not None and size > limit.max_chars * 4:
        return False
    if limit.max_bytes is not None and size > limit.max_bytes:
        return False
    return limit.tokens is None or size <= limit.tokens * 64
