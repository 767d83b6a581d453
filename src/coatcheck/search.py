"""Search: the passages of a session's artifacts that fit some words best.

Names, tools and summaries count as well as content. What is not indexed yet is indexed on the way, so a put never waits
for it, and a search looks only at what is new and at what it finds. A hit is an artifact that the session sees now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from coatcheck import media
from coatcheck.errors import Damaged, NotFound
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import Ref
from coatcheck.storage import Entry, Held, Mark, Match, Passage, PassageIndex
from coatcheck.streams import Content

PASSAGE_CHARS = 2000
SHOWN_CHARS = 400
INDEXED_BYTES = 4 * 1024 * 1024
_WORDS = re.compile(r"\w{3,}")
_GLANCE, _PAGE = 16, 256
_BATCH_BYTES = 8 * 1024 * 1024

Entries = list[Entry]
Find = Callable[[str, int | None, int], Entries]
"""So many refs of a session, newest first, that are older than a seq."""


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
    sessions: tuple[str, ...],
    words: str,
    *,
    limit: int,
    find: Find,
    ref: Callable[[str], Ref | None],
    content: Callable[[Ref], Content],
) -> list[Hit]:
    """The best hits in what these sessions hold, each artifact once. `ref` is the live ref of a digest, None where the
    asker has none: the index only proposes."""
    for session_id in sessions:
        follow(passages, session_id, find, content)
    asked = limit * 8 + 32
    while True:
        matches = passages.match(words, sessions, asked)
        best: dict[str, Match] = {}
        for match in matches:
            known = best.get(match.digest)
            if known is None or (known.first == 0 and match.first > 0):
                best[match.digest] = match if known is None else match._replace(score=known.score)
        ranked = sorted(best.values(), key=lambda match: (match.score, match.digest))
        hits: list[Hit] = []
        for match in ranked:
            live = ref(match.digest)
            hit = None if live is None else _hit(live, match, words, content)
            if hit is not None:
                hits.append(hit)
            if len(hits) == limit:
                return hits
        if len(matches) < asked or len(ranked) == len(hits):
            return hits
        asked *= 4  # what is gone stood in the way


def follow(passages: PassageIndex, session_id: str, find: Find, content: Callable[[Ref], Content]) -> None:
    """Index what a session got since it was last followed, and all of it where that cannot be told."""
    known = passages.followed(session_id)
    fresh, met = _since(session_id, known, find)
    if not met and known is not None:
        known = None
        fresh, _ = _since(session_id, None, find)
    if not fresh and (known is not None or passages.followed(session_id) is None):
        return
    holds: dict[str, Held] = {}
    refs: dict[str, Ref] = {}
    for entry in fresh:
        if not entry.gone:
            ref = entry.ref
            refs.setdefault(ref.artifact_id, ref)
            ends = None if ref.pinned else ref.expires
            held = holds.get(ref.artifact_id, Held([], ends))
            held.said.extend(each for each in (ref.name, ref.tool, ref.summary) if each)
            last = None if ends is None or held.expires is None else max(ends, held.expires)
            holds[ref.artifact_id] = held._replace(expires=last)
    unread = _index(passages, refs, content)
    mark = known
    for entry in reversed(fresh):
        if entry.gone == "damaged" or entry.ref.artifact_id in unread:
            break  # it may be healed: the next search looks again from here on
        if not entry.gone:
            mark = Mark(entry.session.created, entry.seq, entry.ref.artifact_id)
    passages.hold(session_id, holds, mark, anew=known is None)


def _since(session_id: str, mark: Mark | None, find: Find) -> tuple[list[Entry], bool]:
    """What a session got since, newest first, and whether the mark was met on the way."""
    found: list[Entry] = []
    before, size = None, _GLANCE
    while True:
        page = find(session_id, before, size)
        for entry in page:
            if mark is not None and entry.seq <= mark.seq:
                same = Mark(entry.session.created, entry.seq, entry.ref.artifact_id) == mark
                return found, same and not entry.gone  # a session that expired and came back lost what it had
            found.append(entry)
        if len(page) < size:
            return found, mark is None
        before, size = page[-1].seq, _PAGE


def _index(passages: PassageIndex, refs: Mapping[str, Ref], content: Callable[[Ref], Content]) -> set[str]:
    """Index what is not yet, in batches; answers what could not be read."""
    unread: set[str] = set()
    batch: dict[str, list[Passage]] = {}
    size = 0
    for digest in passages.missing(refs):
        try:
            batch[digest] = list(cut(content(refs[digest])))
        except (NotFound, Damaged):
            unread.add(digest)
            continue
        size += sum(one.end - one.start for one in batch[digest])
        if size > _BATCH_BYTES or len(batch) >= _PAGE:
            passages.add(batch)
            batch, size = {}, 0
    if batch:
        passages.add(batch)
    return unread


def cut(content: Content) -> Iterator[Passage]:
    """The passages of a text artifact: whole lines, about two thousand characters each. Of a very large one, those of
    its first four megabytes."""
    if not media.is_text(content.ref.media_type):
        return
    data = content.read(0, INDEXED_BYTES)
    if media.encoding_of(data).is_wide:
        text = media.decoded(data)
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


def _hit(ref: Ref, match: Match, words: str, content: Callable[[Ref], Content]) -> Hit | None:
    """The hit of a match; None where its bytes cannot be had any more."""
    if match.first == 0:
        shown = " · ".join(text for text in (ref.name, ref.tool, ref.summary) if text)
        return Hit(ref, shown[:SHOWN_CHARS], None, match.score, f'read("{ref.pointer}")')
    try:
        before, text, after = _around(content(ref), match)
    except (NotFound, Damaged):
        return None
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
