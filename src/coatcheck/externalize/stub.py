"""What a model gets instead of a large value: a stub, or a bounded head and tail if the store failed.

A stub is one line of JSON, a pure function of content, policy and pointer. Untrusted text appears only inside JSON
strings, with known secrets masked. Without its preview, a stub has at most 150 tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from coatcheck import media
from coatcheck.errors import CoatcheckError
from coatcheck.externalize.policy import MAX_TOKENS, Limit, Policy
from coatcheck.previews import Preview, Sample, preview
from coatcheck.previews.excerpts import decode, line
from coatcheck.redaction import MARK, mask
from coatcheck.refs import Ref, summarize
from coatcheck.tokens import TokenCounter, estimate, roughly

LEAD: Final = "the result is stored whole, not shown here; preview is only a glance at it"
SHORTENED: Final = "the result was shortened for you; the whole is stored"
_REPEATING: Final = "repeating the call gives this stub again"
_SUMMARY: Final = 80
_WHOLE, _HEAD, _TAIL = 16 * 1_024, 8 * 1_024, 2 * 1_024  # bytes that a preview is made from
_JSON_WHOLE, _JSON_HEAD = 32 * 1_024, 16 * 1_024
_SUMMARY_TOKENS: Final = 16
_START: Final = '{"stub":"'
_TABLES: Final = frozenset({"text/csv", "text/tab-separated-values", media.JSONL, "application/vnd.apache.parquet"})
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_RARE: Final = re.compile(
    "[^\u0000-\u06ff\u0900-\u0eff\u1e00-\u1eff\u2000-\u206f\u3000-\u9fff\uac00-\ud7a3\uff00-\uffef]"
)
_MEDIA_TYPE: Final = re.compile(r"[a-z]{1,20}/[a-z0-9][a-z0-9.+-]{0,49}")
_SMALLEST_CUT: Final = 80  # characters; less room than this leaves only the note
_REASONS: Final = {
    "store_full": "the store is full",
    "quota_exceeded": "the quota is used up",
    "too_large": "it is larger than the store takes",
    "store_closed": "the store is closed",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """The fields of a stub besides its pointer. `lines` and `tokens` are None for binary content."""

    kind: str
    media_type: str
    size_bytes: int
    lines: int | None
    tokens: int | None
    preview: Preview
    summary: str = ""


def facts(
    sample: Sample, media_type: str, kind: str, limit: int, *, summary: str = "", tokens: float | None = None
) -> Facts:
    """Describe content from its head and tail. `tokens` is the number of tokens in those two, if known."""
    part = _sample_for_preview(sample, media_type)
    lines = total = None
    if media.is_text(media_type):
        is_wide = media.encoding_of(sample.head).is_wide
        decoded = decode(sample) if is_wide else None
        lines = sample.lines if decoded is None else decoded.lines
        if tokens is None:
            ends = sample.head + sample.tail
            tokens = roughly(ends if decoded is None else (decoded.head + decoded.tail).encode("utf-8", "replace"))
        total = round(tokens * sample.size / max(1, len(sample.head) + len(sample.tail)))
    shown = preview(part, media_type=media_type, limit=limit)
    return Facts(kind, media_type, sample.size, lines, total, shown, _short_summary(summary) if summary else "")


def _short_summary(summary: str) -> str:
    text = line(mask(summary), _SUMMARY)
    while text and _max_tokens(json.dumps(text, ensure_ascii=False)) > _SUMMARY_TOKENS:
        text = text.removesuffix("…")
        text = text[: len(text) * 3 // 4].rstrip() + "…" if len(text) > 1 else ""
    return text


def _max_tokens(text: str) -> int:
    """Return an upper bound for the tokens of a short text. In rare scripts every byte may be a token."""
    rare = "".join(_RARE.findall(text))
    return estimate(text) + len(rare.encode("utf-8", "surrogatepass"))


def stub_of(pointer: str, about: Facts, policy: Policy, *, lead: str = LEAD) -> str:
    """Return the stub of the artifact that `pointer` leads to."""
    fields: dict[str, object] = {
        "stub": lead,
        "artifact": pointer,
        "kind": about.kind,
        "media_type": about.media_type,
        "size_bytes": about.size_bytes,
        "lines": about.lines,
        "tokens": about.tokens,
        "summary": about.summary or None,
        "preview": about.preview.text,
        "shown": about.preview.shown,
        "hint": _hint(pointer, about, policy),
    }
    return _ENCODER.encode({key: value for key, value in fields.items() if value is not None})


def is_stub(text: str, policy: Policy) -> bool:
    """Whether a text looks like a stub and is as short as one, so that storing it would be useless."""
    return text.startswith(_START) and len(text) <= 1_000 + 2 * policy.preview_chars


def media_type_of(claimed: object) -> str | None:
    """Return a declared media type in lower case and without parameters, or None if it is not one."""
    essence = claimed.partition(";")[0].strip().lower() if isinstance(claimed, str) else ""
    return essence if _MEDIA_TYPE.fullmatch(essence) else None


def _hint(pointer: str, about: Facts, policy: Policy) -> str:
    """Say how to read on, naming only tools that this agent has."""
    tool, takes, media_type = policy.read_tool, policy.read_arguments, about.media_type
    if tool is None or "pointer" not in takes:
        if policy.resolves:
            return f'pass "{pointer}" as an argument to a tool, and it gets the stored value; {_REPEATING}'
        return f"ask for less where the preview is not enough; {_REPEATING}"
    if media_type == media.JSON or media_type.endswith("+json"):
        ways = ['query="shape"', 'query="$.…"', 'grep="…"']
    elif media_type in _TABLES:
        ways = ['query="SELECT … FROM artifact"', 'lines="1:50"']
    elif about.tokens is not None:  # text
        ways = ['lines="1:80"', 'grep="…"']
    else:
        return f'{tool}(pointer="{pointer}") describes it; {_REPEATING}'
    first, *others = [way for way in ways if way.partition("=")[0] in takes] or [""]
    called = f'{tool}(pointer="{pointer}"{", " if first else ""}{first})'
    return f"{' or '.join([called, *others])} reads it; {_REPEATING}"


def own_summary(ref: Ref, head: bytes) -> str:
    """Return a ref's summary if a person or model wrote it, "" if it only repeats how the content begins."""
    start = ref.summary.partition(MARK)[0][:40]
    repeats = summarize(head[:1_024].decode("utf-8", "ignore")).startswith(start)
    return "" if repeats or ref.summary == f"{ref.media_type}, {ref.size_bytes} bytes" else ref.summary


def _sample_for_preview(sample: Sample, media_type: str) -> Sample:
    """Return the part of a sample that a preview reads, which keeps it fast. JSON gets more."""
    whole, head = (_JSON_WHOLE, _JSON_HEAD) if media_type == media.JSON else (_WHOLE, _HEAD)
    if sample.size <= whole:
        return sample
    end = sample.head + sample.tail if len(sample.tail) < _TAIL else sample.tail
    return Sample(sample.head[:head], end[-_TAIL:], sample.size, sample.lines)


def reason(error: Exception) -> str:
    """Say why the store failed in words for a model, without paths or hosts."""
    code = error.code if isinstance(error, CoatcheckError) else "store_error"
    return _REASONS.get(code, f"the store failed ({code})")


def head_and_tail(text: str, why: str, limit: Limit, count: TokenCounter | None, *, sharing: int = 1) -> str:
    """Return as much of both ends of a text as the limit allows, or only a note if that is too little.

    `sharing` is the number of texts that share the limit."""
    room = (limit.max_chars or limit.max_bytes or 4 * (limit.max_tokens or MAX_TOKENS)) // sharing
    while room >= _SMALLEST_CUT:
        shown = _cut(text, why, room)
        if not limit.exceeded(shown, count):
            return shown
        room = room * 3 // 4
    return nothing_shown(f"This result has {len(text):,} characters;", why)


def nothing_shown(what: str, why: str) -> str:
    """Return the note for a value that is neither stored nor shown."""
    return f"[{what} storing it failed: {why}. It is not kept, and not shown.]"


def _cut(text: str, why: str, room: int) -> str:
    lead = (
        f"[This result has {len(text):,} characters, and storing it failed: {why}. "
        "Only its beginning and end follow; the rest is not kept.]\n"
    )
    gap = "\n[… {:,} characters left out, not kept …]\n"
    room = max(0, room - len(lead) - len(gap.format(len(text))))
    if room >= len(text):
        return lead + text
    last = room * 2 // 5
    return lead + text[: room - last] + gap.format(len(text) - room) + (text[-last:] if last else "")
