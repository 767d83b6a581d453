"""Search: the passages of a session's artifacts that fit some words best.

Names, tools and summaries count as well as content. What is not indexed yet is indexed on the way, so a put never waits
for it. Only what the session may see is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from coatcheck import media
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import Ref
from coatcheck.storage import Match, Passage, PassageIndex
from coatcheck.streams import Content

PASSAGE_CHARS = 2000
SHOWN_CHARS = 400
INDEXED_BYTES = 4 * 1024 * 1024
_WORDS = re.compile(r"\w{3,}")


@dataclass(frozen=True, slots=True)
class Hit:
    """One artifact that fits, best passage first. `lines` are that passage's first and last line, None where a name,
    tool or summary fitted. `read_on` is how to go on from there."""

    ref: Ref
    passage: str
    lines: tuple[int, int] | None
    score: float
    read_on: str


def search(
    passages: PassageIndex,
    refs: Iterable[Ref],
    sessions: tuple[str, ...],
    words: str,
    *,
    limit: int,
    content: Callable[[Ref], Content],
) -> list[Hit]:
    """The best hits among these refs, each artifact once."""
    by_id: dict[str, Ref] = {}
    labels: dict[str, dict[str, list[str]]] = {}
    for ref in refs:
        by_id.setdefault(ref.artifact_id, ref)
        said = labels.setdefault(ref.session_id, {}).setdefault(ref.artifact_id, [])
        said += [text for text in (ref.name, ref.tool, ref.summary) if text and text not in said]
    for digest in passages.missing(by_id):
        passages.add(digest, cut(content(by_id[digest])))
    for session_id, said_of in labels.items():
        passages.describe(session_id, {digest: " \n".join(said) for digest, said in said_of.items()})
    best: dict[str, Match] = {}
    for match in passages.match(words, by_id, sessions, limit * 8 + 32):
        known = best.get(match.digest)
        if known is None or (known.first == 0 and match.first > 0):
            best[match.digest] = match if known is None else match._replace(score=known.score)
    ranked = sorted(best.values(), key=lambda match: (match.score, match.digest))
    return [_hit(by_id[match.digest], match, words, content) for match in ranked[:limit]]


def cut(content: Content) -> Iterator[Passage]:
    """The passages of a text artifact: whole lines, about two thousand characters each. Of a very large one, those of
    its first four megabytes."""
    if not media.is_text(content.ref.media_type):
        return
    data = content.read(0, INDEXED_BYTES)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    if encoding == "utf-16":
        text = data.decode(encoding, "replace")
        yield Passage(1, text.count("\n") + 1, 0, len(data), text)
        return
    line, start = 1, 0
    while start < len(data):
        end = min(start + PASSAGE_CHARS, len(data))
        if end < len(data):
            whole = data.rfind(b"\n", start, end) + 1
            end = whole or end
        piece = data[start:end]
        lines = piece.count(b"\n")
        last = line + lines - (1 if piece.endswith(b"\n") else 0)
        yield Passage(line, max(line, last), start, end, piece.decode("utf-8", "ignore"))
        line, start = line + lines, end


def _hit(ref: Ref, match: Match, words: str, content: Callable[[Ref], Content]) -> Hit:
    if match.first == 0:
        shown = " · ".join(text for text in (ref.name, ref.tool, ref.summary) if text)
        return Hit(ref, shown[:SHOWN_CHARS], None, match.score, f'read("{ref.pointer}")')
    before, text, after = _around(content(ref), match)
    within = text.split("\n")
    first, shown = _densest(within, words)
    lines = (match.first + first, min(match.last, match.first + first + shown.count("\n")))
    begin = len(before) + sum(len(line) + 1 for line in within[:first])
    passage = mask(before + text + after, begin, begin + len(shown))
    return Hit(ref, passage[:SHOWN_CHARS], lines, match.score, f'read("{ref.pointer}", lines="{lines[0]}:")')


def _around(content: Content, match: Match) -> tuple[str, str, str]:
    """A passage, and what stands before and behind it: a secret may begin or end there."""
    start = max(0, match.start - CONTEXT)
    data = content.read(start, match.end + CONTEXT - start)
    at, end = match.start - start, match.end - start
    text = data[at:end].decode("utf-8", "ignore") if match.start else media.decode_head(data[:end])
    return data[:at].decode("utf-8", "ignore"), text, data[end:].decode("utf-8", "ignore")


def _densest(lines: list[str], words: str) -> tuple[int, str]:
    """The run of lines, of bounded length, that begins with some of the words and has most; the index of its first
    line."""
    wanted = {word.lower()[:6] for word in _WORDS.findall(words)}
    weights = [len({word.lower()[:6] for word in _WORDS.findall(line)} & wanted) for line in lines]
    best, at = -1, 0
    for i in [i for i, weight in enumerate(weights) if weight] or range(1):
        size = score = 0
        for j in range(i, min(i + 12, len(lines))):
            size += len(lines[j]) + 1
            if size > SHOWN_CHARS and j > i:
                break
            score += weights[j]
        if score > best:
            best, at = score, i
    shown: list[str] = []
    size = 0
    for text in lines[at : at + 12]:
        if shown and size + len(text) > SHOWN_CHARS:
            break
        shown.append(text[: SHOWN_CHARS - size])
        size += len(text) + 1
    return at, "\n".join(shown).rstrip("\n")
