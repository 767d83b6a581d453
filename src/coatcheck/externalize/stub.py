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
from coatcheck.externalize.policy import Policy, sampled
from coatcheck.previews import Preview, Sample, preview
from coatcheck.previews.sample import decode
from coatcheck.previews.text import line
from coatcheck.redaction import MARK, mask
from coatcheck.refs import Ref, summarize
from coatcheck.tokens import estimate

LEAD: Final = "the result is stored whole, not shown here; preview is only a glance at it"
SHORTENED: Final = "the result was shortened for you; the whole is stored"
_AGAIN: Final = "repeating the call gives this stub again"
_SUMMARY: Final = 80
_REPEATED: Final = 40
_EDGE: Final = 8 * 1_024
_JSON_EDGE: Final = 32 * 1_024
_SUMMARY_TOKENS: Final = 16
_BEGINNING: Final = '{"stub":"'
_TABLES: Final = frozenset({"text/csv", "text/tab-separated-values", media.JSONL, "application/vnd.apache.parquet"})
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


def facts(sample: Sample, media_type: str, kind: str, limit: int, *, summary: str = "") -> Facts:
    """What there is to say of content, from its two ends."""
    lines = tokens = None
    if media.is_text(media_type):
        text = decode(sample)
        lines = text.lines
        tokens = round(sampled(text.head + text.tail) * sample.size / max(1, len(sample.head) + len(sample.tail)))
    said = line(mask(summary), _SUMMARY) if summary else ""
    while estimate(json.dumps(said, ensure_ascii=False)) > _SUMMARY_TOKENS:
        said = said[: len(said) * 3 // 4].rstrip() + "…"
    glance = preview(_ends(sample, media_type), media_type=media_type, limit=limit)
    return Facts(kind, media_type, sample.size, lines, tokens, glance, said)


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
    return json.dumps(
        {key: value for key, value in said.items() if value is not None}, ensure_ascii=False, separators=(",", ":")
    )


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
    edge = _JSON_EDGE if media_type == media.JSON else _EDGE
    if sample.size <= 2 * edge:
        return sample
    end = sample.head + sample.tail if len(sample.tail) < edge else sample.tail
    return Sample(sample.head[:edge], end[-edge:], sample.size, sample.lines)
