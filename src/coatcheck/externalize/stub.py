"""The texts that a model gets from us, and how to recognise them.

A stub replaces a large value. It is one line of JSON, a pure function of content, policy and
pointer. Untrusted text appears only inside JSON strings, with known secrets masked. Without its
preview, a stub has at most 150 tokens. If the store failed, a bounded head and tail replaces the
value. If a host or a server cut the value before it came here, each of these texts says first what
is missing and who cut it. A placeholder replaces an old payload in a prompt.

What our own tools return has a mark at the end of its first line: the length of the text that
follows, and a keyed tag over all of it. It identifies such an answer, whatever name the host gave
the tool. Only the tools of this store can write one, so a marked text is already bounded. Hosts may
put words around it, wrap it in a block, or encode it as JSON. A genuine mark can be copied, so it
covers one answer only: a text with two marks, or with much else around it, is treated like any
other text.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from coatcheck import media
from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize.file_hints import file_hint
from coatcheck.externalize.policy import MAX_TOKENS, Limit, Policy
from coatcheck.ids import is_pointer
from coatcheck.previews import Facts
from coatcheck.previews.excerpts import line
from coatcheck.redaction import MARK, mask
from coatcheck.refs import Ref, summarize
from coatcheck.store import Store
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.truncation import INCOMPLETE, Truncation, find_truncation

LEAD: Final = "the result is stored whole, not shown here; preview is only a glance at it"
SHORTENED: Final = "the result was shortened for you; the whole is stored"
_PARTS: Final = {
    LEAD: "the part that arrived is stored, not shown here; counts and preview are of that part",
    SHORTENED: "the part that arrived is stored, and was shortened for you",
}
"""What follows in place of a lead if the value was cut before it came here."""

_REPEATING: Final = "repeating the call gives this stub again"
_SUMMARY: Final = 80
_SUMMARY_TOKENS: Final = 16
STUB: Final = '{"stub":"'
"""The start of every stub."""

PLACEHOLDER: Final = '{"pruned":"'
"""The start of every placeholder."""

STORED: Final = "stored whole"
_NOT_STORED: Final = "not stored: call the tool again where it is needed"
_AROUND_PREVIEW: Final = 1_400  # characters of a stub besides its preview, at most
_LONGEST_PREVIEW: Final = 2_000  # characters, in a stub whose policy is unknown
_STUB_AT_LINE_START: Final = re.compile(r'^\{"stub":"', re.MULTILINE)
_STUB_IN_JSON: Final = (b'{\\"stub\\":\\"', b"{\\u0022stub")  # inside a string of a line
_DECODER: Final = json.JSONDecoder()

_TABLES: Final = frozenset(
    {
        "text/csv",
        "text/tab-separated-values",
        media.JSONL,
        media.REPR,
        "application/vnd.apache.parquet",
    }
)
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_RARE: Final = re.compile(
    "[^\u0000-\u06ff\u0900-\u0eff\u1e00-\u1eff\u2000-\u206f\u3000-\u9fff\uac00-\ud7a3\uff00-\uffef]"
)
_SMALLEST_CUT: Final = 80  # characters; less room than this leaves only the note
_REASONS: Final = {
    "store_full": "the store is full",
    "quota_exceeded": "the quota is used up",
    "too_large": "it is larger than the store takes",
    "store_closed": "the store is closed",
}

SLACK: Final = 1_000
"""Maximum number of characters that a host may put around a marked text."""

LENGTH: Final = 20
"""Maximum length of a mark."""

_TAG: Final = 6
_PERSON: Final = b"coatcheck.mark"
_MARK: Final = re.compile(r"^(.+ ~(\d{1,9}))\.([\w-]{8})(?:\n|\Z)", re.MULTILINE | re.ASCII)
NEAR: Final = 16_384
"""Characters in which a mark is looked for, after " ~": the first line as JSON, and what may
precede it."""

_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')  # a string in JSON text
_CHARACTER: Final = re.compile(
    r"\\u[Dd][89ABab]..\\u[Dd][C-Fc-f]..|\\u....|\\.|."
)  # one character of it, as written
_LARGEST: Final = 4 << 20
_ALSO_ESCAPED: Final = {
    "<": 5,
    ">": 5,
    "&": 5,
    "/": 1,
}  # extra characters that Go's and PHP's encoders write


def _max_tokens(text: str) -> int:
    """Return an upper bound for the tokens of a short text. In rare scripts every byte may be a
    token."""
    rare = "".join(_RARE.findall(text))
    return estimate(text) + len(rare.encode("utf-8", "surrogatepass"))


def stub_of(
    pointer: str, about: Facts, policy: Policy, *, lead: str = LEAD, file: str | None = None
) -> str:
    """Return the stub of the artifact that `pointer` leads to. `file` is its file, if the agent can
    read it."""
    if about.cut is not None:
        lead = f"{about.cut}; {_PARTS[lead]}"
    fields: dict[str, object] = {
        "stub": lead,
        "file": file,
        "artifact": pointer,
        "kind": about.kind,
        "media_type": about.media_type,
        "size_bytes": about.size_bytes,
        "lines": about.lines,
        "tokens": about.tokens,
        "summary": about.summary or None,
        "preview": about.preview.text,
        "shown": about.preview.shown,
        "hint": _hint(pointer, about, policy) if file is None else _hint_for(file, about, policy),
    }
    return _ENCODER.encode({key: value for key, value in fields.items() if value is not None})


def _hint(pointer: str, about: Facts, policy: Policy) -> str:
    """Say how to read on, naming only tools that this agent has."""
    tool, takes = policy.read_tool, policy.read_arguments
    if tool is None or "pointer" not in takes:
        return _hint_without_tool(pointer, policy)
    ways = _possible_ways(about, takes)
    if not ways:
        reads = "reads" if about.tokens is not None else "describes"
        return f'{tool}(pointer="{pointer}") {reads} it; {_REPEATING}'
    first = "" if ways[0].endswith('="…"') else ways[0]  # a first call must work as it is
    target = pointer
    if about.preview.part and first in ("", about.preview.ask):
        target += f"#{about.preview.part}"
    call = f'{tool}(pointer="{target}", {first})' if first else f'{tool}(pointer="{target}")'
    others = [way for way in ways if _argument_of(way) != _argument_of(first)]
    hint = f"{call} or {others[0]}" if others else call
    return f"{hint} reads it; {_REPEATING}"


def _hint_for(file: str, about: Facts, policy: Policy) -> str:
    """Say how to look into a file."""
    is_masked = policy.redact == "store"
    hint = file_hint(file, about, policy.commands or (), is_masked=is_masked)
    return f"{hint}; {_REPEATING}"


def _hint_without_tool(pointer: str, policy: Policy) -> str:
    if not policy.resolves:
        return f"ask for less where the preview is not enough; {_REPEATING}"
    return f'pass "{pointer}" as an argument to a tool, and it gets the stored value; {_REPEATING}'


def _possible_ways(about: Facts, takes: Collection[str]) -> list[str]:
    """Return the ways to read an artifact that a tool with these arguments has."""
    ways = [way for way in _ways(about) if _argument_of(way) in takes]
    has_program = bool(ways) and _argument_of(ways[0]) == "code"
    if has_program and about.preview.part:  # the other call is for a part of the content
        return [way for way in ways if way != about.preview.ask]
    return ways


def _ways(about: Facts) -> list[str]:
    """Return arguments with which to read an artifact, the best one first."""
    ask, media_type = about.preview.ask, about.media_type
    if media.is_json(media_type):
        usual = ['query="shape"', 'grep="…"']
    elif media_type in _TABLES:
        usual = ['grep="…"', 'lines="1:50"']
    elif about.tokens is None:  # a document; other binary content has no text
        usual = ['grep="…"'] if ask else []
    elif about.lines in (1, 2) or media_type == "text/html":  # whose first lines say little
        usual = ['grep="…"', 'lines="1:80"']
    else:
        usual = ['lines="1:80"', 'grep="…"']
    program = f'code="{about.preview.program}"' if about.preview.program else ""
    return [way for way in (program, ask, *usual) if way]


def _argument_of(way: str) -> str:
    return way.partition("=")[0]


def is_lead(value: object) -> bool:
    """Whether a value is what a stub says first."""
    if not isinstance(value, str):
        return False
    return value in _PARTS or (
        value.startswith(INCOMPLETE) and value.endswith(tuple(_PARTS.values()))
    )


def hidden_stub(ref: Ref) -> str:
    """Return the stub for a place that no model is shown."""
    return _ENCODER.encode(
        {
            "stub": "stored",
            "artifact": ref.pointer,
            "media_type": ref.media_type,
            "size_bytes": ref.size_bytes,
        }
    )


def placeholder(
    what: str,
    pointer: str | None,
    size: int,
    lines: int | None,
    read_tool: str | None,
    *,
    cut: Truncation | None = None,
) -> str:
    """Return the line of JSON that replaces an old payload in a prompt. Without a pointer, it says
    that the payload is not stored. `cut` is what was cut out of the payload before it came here."""
    kept = STORED if cut is None else "the part that arrived is stored"
    parts = [what] if cut is None else [what, str(cut)]
    shown: dict[str, object] = {"pruned": ", ".join([*parts, kept if pointer else _NOT_STORED])}
    if pointer:
        shown["artifact"] = pointer
    shown["size_bytes"] = size
    if lines is not None and lines > 1:
        shown["lines"] = lines
    if pointer and read_tool:
        shown["hint"] = f"{read_tool} reads it"
    return _ENCODER.encode(shown)


def is_stub(text: str, policy: Policy | None = None) -> bool:
    """Whether a text looks like a stub and is as short as one, so that storing it would be
    useless. Without a policy, its preview may have up to 2,000 characters."""
    preview = _LONGEST_PREVIEW if policy is None else policy.preview_chars
    return text.startswith(STUB) and len(text) <= _AROUND_PREVIEW + 2 * preview


def is_replacement(text: str) -> bool:
    """Whether a text begins like a stub or a placeholder."""
    return text.startswith((STUB, PLACEHOLDER))


def is_stub_object(value: object) -> bool:
    """Whether a parsed value is a stub: it says so first, and has a pointer."""
    if not isinstance(value, Mapping):
        return False
    return is_lead(value.get("stub")) and is_pointer(value.get("artifact"))


def stubs_in(text: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the stubs in a text, each at the beginning of a line, with their JSON."""
    if STUB not in text:
        return
    for match in _STUB_AT_LINE_START.finditer(text):
        try:
            found, end = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if is_stub_object(found):
            yield found, text[match.start() : end]


def may_contain_stub(line: bytes) -> bool:
    """Whether a line of a transcript may contain a stub in one of its strings."""
    return any(written in line for written in _STUB_IN_JSON)


def may_begin_with_stub(text: str) -> bool:
    """Whether a text may begin with a stub, or with a block around one."""
    return '"stub":' in text[:200]


def pointer_in_stub(text: str) -> str | None:
    """Return the pointer of a stub, or None if the text is something else."""
    if not is_stub(text):
        return None
    try:
        pointer = json.loads(text).get("artifact")
    except (ValueError, AttributeError):
        return None
    return pointer if isinstance(pointer, str) and is_pointer(pointer) else None


def own_summary(ref: Ref, head: bytes) -> str:
    """Return the beginning of a ref's summary if a person or model wrote it, "" if it only repeats
    how the content begins."""
    start = ref.summary.partition(MARK)[0][:40]
    repeats = summarize(head[:1_024].decode("utf-8", "ignore")).startswith(start)
    if repeats or ref.summary == f"{ref.media_type}, {ref.size_bytes} bytes":
        return ""
    text = line(mask(ref.summary), _SUMMARY)
    while text and _max_tokens(json.dumps(text, ensure_ascii=False)) > _SUMMARY_TOKENS:
        text = text.removesuffix("…")
        text = text[: len(text) * 3 // 4].rstrip() + "…" if len(text) > 1 else ""
    return text


def reason(error: Exception) -> str:
    """Say why the store failed in words for a model, without paths or hosts."""
    code = error.code if isinstance(error, CoatcheckError) else "store_error"
    return _REASONS.get(code, f"the store failed ({code})")


def head_and_tail(
    text: str, why: str, limit: Limit, count: TokenCounter | None, *, sharing: int = 1
) -> str:
    """Return as much of both ends of a text as the limit allows, or only a note if that is too
    little.

    `sharing` is the number of texts that share the limit."""
    size = _size(text, find_truncation(text))
    lead = (
        f"[{size}, and storing it failed: {why}. Only its beginning and end follow; "
        "the rest is not kept.]\n"
    )
    gap = "\n[… {:,} characters left out, not kept …]\n"
    room = (limit.max_chars or limit.max_bytes or 4 * (limit.max_tokens or MAX_TOKENS)) // sharing
    while room >= _SMALLEST_CUT:
        kept = max(0, room - len(lead) - len(gap.format(len(text))))
        last = kept * 2 // 5
        cut = text[: kept - last] + gap.format(len(text) - kept) + (text[-last:] if last else "")
        shown = lead + (text if kept >= len(text) else cut)
        if not limit.exceeded(shown, count):
            return shown
        room = room * 3 // 4
    return nothing_shown(f"{size};", why)


def _size(text: str, cut: Truncation | None) -> str:
    if cut is None:
        return f"This result has {len(text):,} characters"
    return f"This result is {cut}; the part that arrived has {len(text):,} characters"


def nothing_shown(what: str, why: str) -> str:
    """Return the note for a value that is neither stored nor shown."""
    return f"[{what} storing it failed: {why}. It is not kept, and not shown.]"


def mark(key: bytes, first: str, rest: str = "") -> str:
    """Return a marked text: the first line with the mark at its end, then the rest."""
    head = f"{' '.join(first.splitlines())} ~{len(rest)}"
    signed = f"{head}.{_tag(key, head, rest)}"
    return f"{signed}\n{rest}" if rest else signed


def own_tag(store: Store, text: str) -> str | None:
    """Return the tag of a text that is a marked answer of this store's tools, else None."""
    try:
        return tag_of(store.secret, text)
    except StoreError:
        return None  # storing fails too, and reports it


def is_ours(key: bytes, text: str) -> bool:
    """Whether a text is one answer marked with this key, apart from what a host put around it."""
    return tag_of(key, text) is not None


def tag_of(key: bytes, text: str) -> str | None:
    """Return the tag of the one marked answer in a text, or None if there is none or too much
    around it."""
    if " ~" not in text[:NEAR] or len(text) > _LARGEST:
        return None
    found = _marked(key, text)
    if found is not None and len(text) - len(found.text) <= SLACK:
        return found.tag
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    marked: list[tuple[str, _Marked]] = []
    for string in _STRING.findall(text):
        inside = _marked(key, json.loads(string)) if " ~" in string else None
        if inside is not None:
            marked.append((string, inside))
    if len(marked) != 1:
        return None
    ((string, found),) = marked
    characters = _CHARACTER.findall(string, 1)[found.start : found.start + len(found.text)]
    written = sum(map(len, characters))
    return found.tag if len(text) - min(written, _longest_json(found.text)) <= SLACK else None


class _Marked(NamedTuple):
    """The part of a text that a genuine mark covers, its tag, and where it begins."""

    text: str
    tag: str
    start: int


def _marked(key: bytes, text: str) -> _Marked | None:
    match = _MARK.search(text, 0, NEAR) if " ~" in text else None
    if match is None:
        return None
    end = match.end() + int(match[2])
    is_genuine = hmac.compare_digest(match[3], _tag(key, match[1], text[match.end() : end]))
    return _Marked(text[match.start() : end], match[3], match.start()) if is_genuine else None


def _longest_json(text: str) -> int:
    """Return the maximum length of a text in JSON, counting only what some common encoder
    escapes."""
    return len(json.dumps(text)) + sum(
        text.count(one) * more for one, more in _ALSO_ESCAPED.items()
    )


def _tag(key: bytes, first: str, rest: str) -> str:
    """Return the keyed tag. Trailing whitespace is ignored, because hosts strip it."""
    signed = f"{first}\n{rest}".rstrip().encode("utf-8", "surrogatepass")
    return urlsafe_b64encode(
        blake2b(signed, key=key, digest_size=_TAG, person=_PERSON).digest()
    ).decode()
