"""The stub: one line of JSON that a model gets in place of a large value.

A pure function of content, policy and pointer. Untrusted text stands only inside JSON strings, with known secrets
masked; everything else is our own words and numbers. Beside the preview it has 150 tokens at most.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from coatcheck import media
from coatcheck.externalize.policy import Policy
from coatcheck.previews import Preview, Sample, preview
from coatcheck.previews.sample import decode
from coatcheck.previews.text import line
from coatcheck.redaction import MARK, mask
from coatcheck.refs import Ref, summarize
from coatcheck.tokens import estimate, roughly

LEAD: Final = "the result is stored whole, not shown here; preview is only a glance at it"
SHORTENED: Final = "the result was shortened for you; the whole is stored"
_AGAIN: Final = "repeating the call gives this stub again"
_SUMMARY: Final = 80
_REPEATED: Final = 40
_WHOLE, _HEAD, _TAIL = 16 * 1_024, 8 * 1_024, 2 * 1_024  # bytes that a preview is made from
_JSON_WHOLE, _JSON_HEAD = 32 * 1_024, 16 * 1_024
_SUMMARY_TOKENS: Final = 16
_BEGINNING: Final = '{"stub":"'
_TABLES: Final = frozenset({"text/csv", "text/tab-separated-values", media.JSONL, "application/vnd.apache.parquet"})
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_RARE: Final = re.compile(
    "[^\u0000-\u06ff\u0900-\u0eff\u1e00-\u1eff\u2000-\u206f\u3000-\u9fff\uac00-\ud7a3\uff00-\uffef]"
)
_MEDIA_TYPE: Final = re.compile(r"[a-z]{1,20}/[a-z0-9][a-z0-9.+-]{0,49}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stub says of content, besides its pointer. `lines` and `tokens` are None for what is no text."""

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
    """What there is to say of content, from its two ends. `tokens` is `tokens_in` those, where the caller knows."""
    lines = about = None
    if media.is_text(media_type):
        lines = sample.lines
        held = tokens_in(sample) if tokens is None else tokens
        about = round(held * sample.size / max(1, len(sample.head) + len(sample.tail)))
    said = line(mask(summary), _SUMMARY) if summary else ""
    while said and _at_most(json.dumps(said, ensure_ascii=False)) > _SUMMARY_TOKENS:
        said = said.removesuffix("…")
        said = said[: len(said) * 3 // 4].rstrip() + "…" if len(said) > 1 else ""
    ends = _ends(sample, media_type)
    if lines is not None and media.encoding_of(sample.head).is_wide:
        lines = decode(sample).lines
    return Facts(kind, media_type, sample.size, lines, about, preview(ends, media_type=media_type, limit=limit), said)


def _at_most(text: str) -> int:
    """How many tokens a short text has, whatever its script: where an estimate would only guess, a byte may be one."""
    rare = "".join(_RARE.findall(text))
    return estimate(text) + len(rare.encode("utf-8", "surrogatepass"))


def tokens_in(sample: Sample) -> float:
    """About how many tokens the ends that a sample holds have."""
    if media.encoding_of(sample.head).is_wide:
        text = decode(sample)
        return roughly((text.head + text.tail).encode("utf-8", "replace"))
    return roughly(sample.head + sample.tail)


def stub_of(pointer: str, about: Facts, policy: Policy, *, lead: str = LEAD) -> str:
    said: dict[str, object] = {
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
        "hint": _hint(pointer, about.media_type, policy.read_tool),
    }
    return _ENCODER.encode({key: value for key, value in said.items() if value is not None})


def is_stub(text: str, policy: Policy) -> bool:
    """Whether a text looks like a stub and is as short as one: storing that again would help nobody."""
    return text.startswith(_BEGINNING) and len(text) <= 1_000 + 2 * policy.preview_chars


def media_type_of(claimed: object) -> str | None:
    """A media type that somebody claims, where it is one: lower-case, without parameters."""
    if not isinstance(claimed, str):
        return None
    essence = claimed.partition(";")[0].strip().lower()
    return essence if _MEDIA_TYPE.fullmatch(essence) else None


def _hint(pointer: str, media_type: str, tool: str | None) -> str:
    if tool is None:
        return f"ask for less where the preview is not enough; {_AGAIN}"
    if media_type == media.JSON or media_type.endswith("+json"):
        first, other = 'query="shape"', 'query="$.…" or grep="…"'
    elif media_type in _TABLES:
        first, other = 'query="SELECT … FROM artifact"', 'lines="1:50"'
    elif media.is_text(media_type):
        first, other = 'lines="1:80"', 'grep="…"'
    else:
        return f'{tool}(pointer="{pointer}") describes it; {_AGAIN}'
    return f'{tool}(pointer="{pointer}", {first}) or {other} reads it; {_AGAIN}'


def words_of(ref: Ref, head: bytes) -> str:
    """A ref's summary where it is somebody's words, and does not just repeat how the content begins."""
    begins = ref.summary.partition(MARK)[0][:_REPEATED]
    repeats = summarize(head[:1_024].decode("utf-8", "ignore")).startswith(begins)
    return "" if repeats or ref.summary == f"{ref.media_type}, {ref.size_bytes} bytes" else ref.summary


def _ends(sample: Sample, media_type: str) -> Sample:
    """As much of a sample as a stub looks at: a result must not wait long for its preview. JSON is worth more."""
    whole, head = (_JSON_WHOLE, _JSON_HEAD) if media_type == media.JSON else (_WHOLE, _HEAD)
    if sample.size <= whole:
        return sample
    end = sample.head + sample.tail if len(sample.tail) < _TAIL else sample.tail
    return Sample(sample.head[:head], end[-_TAIL:], sample.size, sample.lines)
