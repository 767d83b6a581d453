"""Full-text search in the artifacts of a session.

It searches names, tools and summaries as well as content. A search first indexes the artifacts that
are new since the last one, so a put never waits for the index. A hit is always an artifact that the
session can see now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coatcheck import media
from coatcheck.content import BlobReader, Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import Damaged, NotFound
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import Blob, Ref
from coatcheck.storage import BlobStore, Catalog, Entry, Held, Mark, Match, Passage, PassageIndex

PASSAGE_CHARS = 2000
SHOWN_CHARS = 400
INDEXED_BYTES = 4 * 1024 * 1024
_WORDS = lazy_pattern(r"\w{3,}")
_GLANCE, _PAGE = 16, 1_000
_RUN = 12  # lines of a passage that is shown
_BATCH_BYTES = 8 * 1024 * 1024

Live = Callable[[Sequence[str]], Mapping[str, Entry]]
"""Return the entries of those artifacts that the caller may see, with small content: the index only
proposes."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One artifact that matches, with its best passage. `lines` are the first and last line of the
    passage, None if a name, tool or summary matched."""

    ref: Ref
    passage: str
    lines: tuple[int, int] | None
    score: float

    @property
    def read_on(self) -> str:
        """The call that reads on from there."""
        return f'read("{self.ref.pointer}"' + (
            f', lines="{self.lines[0]}:")' if self.lines else ")"
        )


def search(
    passages: PassageIndex,
    sessions: tuple[str, ...],
    words: str,
    *,
    limit: int,
    live: Live,
    content: Callable[[Entry], Content],
) -> list[Hit]:
    """Return the best hits in these sessions, each artifact once. Call `follow` for each session
    first."""
    asked = limit * 8 + 32
    while True:
        matches = passages.match(words, sessions, asked)
        ranked = _ranked(matches)
        hits: list[Hit] = []
        at = 0
        while at < len(ranked) and len(hits) < limit:
            proposed = ranked[at : at + limit - len(hits)]
            at += len(proposed)
            hits += _hits(proposed, live([match.digest for match in proposed]), words, content)
        if len(hits) == limit or len(matches) < asked or len(ranked) == len(hits):
            return hits
        asked *= 4  # artifacts that are gone took up the places


def _ranked(matches: Sequence[Match]) -> list[Match]:
    """The best match of each artifact, best first. A passage is shown rather than a name, with the
    better score of both."""
    best: dict[str, Match] = {}
    for match in matches:
        known = best.get(match.digest)
        if known is None:
            best[match.digest] = match
        elif known.first == 0 and match.first > 0:
            best[match.digest] = match._replace(score=known.score)
    return sorted(best.values(), key=lambda match: (match.score, match.digest))


def follow(
    passages: PassageIndex,
    catalog: Catalog,
    session_id: str,
    live: Live,
    content: Callable[[Entry], Content],
) -> None:
    """Index what is new in a session since the last call, or all of it if that is unknown."""
    known = passages.followed(session_id)
    fresh, met = _since(catalog, session_id, known)
    if not met and known is not None:
        known = None
        fresh, _ = _since(catalog, session_id, None)
    if not fresh and (known is not None or passages.followed(session_id) is None):
        return
    oldest_first = fresh[::-1]  # an index may rely on the order in which it got them
    sizes = {entry.ref.artifact_id: entry.ref.size_bytes for entry in fresh if not entry.gone}
    unread = _index(passages, sizes, live, content)
    mark = known
    for entry in oldest_first:
        if entry.gone == "damaged" or entry.ref.artifact_id in unread:
            break  # it may be repaired: the next search looks again from here on
        if not entry.gone:
            mark = Mark(entry.session.created, entry.seq, entry.ref.artifact_id)
    passages.hold(session_id, _held(oldest_first), mark, complete=known is None)


def _held(entries: Iterable[Entry]) -> dict[str, Held]:
    """The labels and the last expiry of each artifact that is there."""
    found: dict[str, Held] = {}
    for entry in entries:
        if entry.gone:
            continue
        ref = entry.ref
        ends = None if ref.pinned else ref.expires
        held = found.get(ref.artifact_id, Held([], ends))
        held.labels.extend(label for label in (ref.name, ref.tool, ref.summary) if label)
        if ends is None or held.expires is None:
            last = None
        else:
            last = max(ends, held.expires)
        found[ref.artifact_id] = held._replace(expires=last)
    return found


def _since(catalog: Catalog, session_id: str, mark: Mark | None) -> tuple[list[Entry], bool]:
    """Return the refs of a session since a mark, newest first, and whether the mark was found."""
    found: list[Entry] = []
    before, size = None, _GLANCE if mark else _PAGE
    while True:
        page = catalog.find(session_id, before=before, limit=size)
        for entry in page:
            if mark is not None and entry.seq <= mark.seq:
                # A session that expired and came back has lost its refs.
                same = Mark(entry.session.created, entry.seq, entry.ref.artifact_id) == mark
                return found, same and not entry.gone
            found.append(entry)
        if len(page) < size:
            return found, mark is None
        before, size = page[-1].seq, _PAGE


def _index(
    passages: PassageIndex,
    sizes: Mapping[str, int],
    live: Live,
    content: Callable[[Entry], Content],
) -> set[str]:
    """Index artifacts that are not indexed yet, given with their sizes. Those of a few megabytes
    are read together. Return those that could not be read."""
    unread: set[str] = set()
    for wanted in _batches(reversed(passages.missing(sizes)), sizes):
        contents = _opened(wanted, live(wanted), content)
        texts = [one for one in contents.values() if media.is_text(one.ref.media_type)]
        _prefetch((one, 0, INDEXED_BYTES) for one in texts)
        batch: dict[str, list[Passage]] = {}
        for digest, one in contents.items():
            with contextlib.suppress(NotFound, Damaged):
                batch[digest] = list(cut(one))
        unread.update(wanted)
        unread.difference_update(batch)
        if batch:
            passages.add(batch)
    return unread


def _opened(
    digests: Iterable[str], entries: Mapping[str, Entry], content: Callable[[Entry], Content]
) -> dict[str, Content]:
    """The contents of those artifacts that are there."""
    found: dict[str, Content] = {}
    for digest in digests:
        with contextlib.suppress(KeyError, NotFound, Damaged):
            found[digest] = content(entries[digest])
    return found


def _batches(digests: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for digest in digests:
        size = min(sizes[digest], INDEXED_BYTES)
        if batch and (len(batch) == _PAGE or total + size > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += size
    if batch:
        yield batch


def _prefetch(wanted: Iterable[tuple[Content, int, int]]) -> None:
    """Load ranges of contents that are blobs of their own, in one step per store."""
    ranges: dict[BlobStore, list[tuple[Blob, int, int]]] = {}
    for content, start, length in wanted:
        if isinstance(content.read, BlobReader):
            blobs, blob = content.read.source
            ranges.setdefault(blobs, []).append((blob, start, min(length, blob.size - start)))
    for blobs, some in ranges.items():
        blobs.prefetch(some)


def cut(content: Content) -> Iterator[Passage]:
    """Cut a text artifact into passages of whole lines, about two thousand characters each. Only
    the first four megabytes are cut."""
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


@dataclass(frozen=True, slots=True)
class _Found:
    """A match, the artifact, and the range of it to read; no content if a label matched."""

    ref: Ref
    match: Match
    content: Content | None
    start: int
    length: int


def _hits(
    matches: Iterable[Match],
    entries: Mapping[str, Entry],
    words: str,
    content: Callable[[Entry], Content],
) -> list[Hit]:
    """The hits for matches, without those whose bytes cannot be read any more."""
    found: list[_Found] = []
    for match in matches:
        if (entry := entries.get(match.digest)) is not None:
            start = max(0, match.start - CONTEXT)
            with contextlib.suppress(NotFound, Damaged):
                inside = content(entry) if match.first else None
                found.append(_Found(entry.ref, match, inside, start, match.end + CONTEXT - start))
    _prefetch((one.content, one.start, one.length) for one in found if one.content is not None)
    hits = []
    for one in found:
        with contextlib.suppress(NotFound, Damaged):
            hits.append(_hit(one, words))
    return hits


def _hit(found: _Found, words: str) -> Hit:
    """Read the passage of a match, and show the densest part of it."""
    ref, match = found.ref, found.match
    if found.content is None:
        labels = " · ".join(text for text in (ref.name, ref.tool, ref.summary) if text)
        return Hit(ref, labels[:SHOWN_CHARS], None, match.score)
    data = found.content.read(found.start, found.length)
    at = min(match.start, CONTEXT)
    end = at + match.end - match.start
    before, after = data[:at].decode("utf-8", "ignore"), data[end:].decode("utf-8", "ignore")
    if match.start:
        text = data[at:end].decode("utf-8", "ignore")
    else:
        text = media.decode_head(data[: match.end])
    within = text.split("\n")
    first, shown = _densest(within, words)
    begin = len(before) + sum(len(line) + 1 for line in within[:first])
    # Masked with the text around it: a secret may begin or end outside.
    passage = mask(before + text + after, begin, begin + len(shown))
    lines = (match.first + first, min(match.last, match.first + first + shown.count("\n")))
    return Hit(ref, passage[:SHOWN_CHARS], lines, match.score)


def _densest(lines: list[str], words: str) -> tuple[int, str]:
    """Find the run of lines, of bounded length, that has most of the words. Return the index of its
    first line, and its text."""
    wanted = _stems(words)
    weights = [len(_stems(line) & wanted) for line in lines]
    starts = [index for index, weight in enumerate(weights) if weight] or [0]
    best, at = -1, 0
    for start in starts:
        run = lines[start : start + _RUN]
        score = sum(weights[start : start + _fitting(run)])
        if score > best:
            best, at = score, start
    shown: list[str] = []
    size = 0
    for text in lines[at : at + _RUN][: _fitting(lines[at : at + _RUN])]:
        shown.append(text[: SHOWN_CHARS - size])
        size += len(text) + 1
    return at, "\n".join(shown).rstrip("\n")


def _stems(text: str) -> set[str]:
    return {word.lower()[:6] for word in _WORDS.findall(text)}


def _fitting(lines: list[str]) -> int:
    """How many lines fit in a passage that is shown, at least one."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line) + 1
        if size > SHOWN_CHARS and number:
            return number
    return len(lines)
