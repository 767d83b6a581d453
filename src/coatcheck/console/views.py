"""What each page of the console shows, as values for its template. Runs in threads; changes
nothing.

Everything is read through a `Visit`: the store of the visitor's tenant, and what their token
allows. A session that the token does not cover is answered like one that does not exist. Content is
masked unless the visitor asked for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from cachetools import LRUCache

from coatcheck import media
from coatcheck.console.dialogue import (
    SIDES,
    ModelTurn,
    TurnPart,
    named,
    parts_of,
    turn_of,
    turns_of,
)
from coatcheck.context.metrics import SERIES as METRICS
from coatcheck.display import plot, thinned
from coatcheck.errors import CoatcheckError, NotFound
from coatcheck.externalize.savings import SavingsRow
from coatcheck.externalize.savings import savings as store_savings
from coatcheck.gateway.watching import EVENTS, SERIES
from coatcheck.http.credentials import Access
from coatcheck.http.definitions import parse_place, place_after
from coatcheck.http.operations import covered_sessions
from coatcheck.ids import clip
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.storage import TRANSCRIPT, SessionFilter, SessionInfo
from coatcheck.store import Store

PAGE: Final = 50
OWN: Final = ("coatcheck:", TRANSCRIPT, "coatcheck proxy reports")
"""Prefixes of the ids of sessions that the store uses itself."""
PICTURES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif",
    b"GIF89a": "image/gif", b"RIFF": "image/webp",
}  # fmt: skip
"""Types of pictures that a browser may show, by their first bytes."""
MAX_PICTURE: Final = 20 << 20
_CHILDREN: Final = 20  # children of a session that are listed
_ORIGINAL: Final = 700
_HEAD: Final = 600  # characters of a search result
_BODY: Final = 200_000  # characters of a requested body
_SEARCH: Final = 0.08  # seconds of work for a page of results
_SUMS: Final = 20_000  # sessions whose sums are remembered
_POINTS: Final = 240
_PLOTTED: Final = 2_000
_DERIVED: Final = 1_000
_LIVE: Final = 25


@dataclass(slots=True)
class Visit:
    """One request of a visitor: their store, what their token allows, and whether secrets are
    shown."""

    store: Store
    access: Access
    csrf: str = ""
    is_unmasked: bool = False

    @property
    def may_write(self) -> bool:
        return self.access.allows("write")

    @property
    def owns_store(self) -> bool:
        """Whether the visitor may see everything, including files on this machine that transcripts
        name."""
        return (
            self.access.allows("admin") and self.access.tenant is None and not self.access.sessions
        )

    def text(self, value: str, limit: int = _BODY) -> str:
        """Return a text without its secrets, at most this long."""
        if self.is_unmasked:
            return value[:limit]
        return mask(
            value[: limit + CONTEXT], 0, limit
        )  # masked before it is cut, so that no part of a secret is left

    def info(self, session_id: str) -> SessionInfo:
        """Return a session. Raises `NotFound` if it does not exist or the token does not cover
        it."""
        found = self.store.session_info(session_id) if self.access.covers(session_id) else None
        if found is None:
            raise NotFound(
                f"no session {clip(session_id)}",
                hint="it may have expired; see the list of sessions",
            )
        return found

    def session(self, session_id: str) -> Session:
        return self.store.session(self.info(session_id).session_id).viewed()


class _Call(msgspec.Struct):
    """The figures of a model call that lists and plots show."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    est_tokens: int | None = None
    tokens_saved: int = 0
    tokens_read_back: int = 0
    tokens_rewritten: int = 0
    results_left: int = 0
    cost: int | None = None
    cost_without: int | None = None
    model: str | None = None

    @property
    def sent(self) -> int:
        return self.input_tokens or self.est_tokens or 0

    @property
    def missed(self) -> int:
        return max(0, self.sent - (self.cached_tokens or 0) - (self.cache_write_tokens or 0))


_CALL: Final = msgspec.json.Decoder(_Call)


@dataclass(slots=True)
class SessionSums:
    """The sums over the recorded calls of a session. Costs are multiples of the price of an input
    token."""

    calls: int = 0
    tokens: int = 0
    output: int = 0
    cached: int = 0
    saved: int = 0
    stubs: int = 0
    cost: int = 0
    cost_without: int = 0
    errors: int = 0
    breaks: int = 0
    model: str = ""
    last: int = 0
    last_event: int = 0

    @property
    def saved_part(self) -> float | None:
        """The fraction of the cost that was saved, None if it is not known."""
        return 1 - self.cost / self.cost_without if self.cost_without else None

    @property
    def cached_part(self) -> float | None:
        return self.cached / self.tokens if self.tokens else None


_sums: LRUCache[tuple[int, str, float], SessionSums] = LRUCache(_SUMS)
_sums_lock = threading.Lock()


def sums_of(store: Store, info: SessionInfo) -> SessionSums:
    """Return the sums of a session. Only the calls since the last time are read."""
    session, key = store.session(info.session_id), (id(store), info.session_id, info.created)
    with _sums_lock:
        known = replace(_sums.get(key) or SessionSums())  # a copy: pages are made in threads
    for record in session.records(METRICS, after=known.last):
        known.last = record.seq
        try:
            call = _CALL.decode(record.body)
        except msgspec.MsgspecError:
            continue
        known.calls += 1
        known.tokens += call.sent
        known.output += call.output_tokens or 0
        known.cached += call.cached_tokens or 0
        known.saved += call.tokens_saved - call.tokens_read_back
        known.stubs += call.results_left
        known.cost += call.cost or 0
        known.cost_without += call.cost_without or 0
        known.model = call.model or known.model
    for record in session.records(EVENTS, after=known.last_event):
        known.last_event = record.seq
        event = _event(record.body)
        known.errors += "error" in event
        known.breaks += "broke" in event
    with _sums_lock:
        _sums[key] = known
    return known


def _event(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) else {}


# Sessions


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session in a list, with its figures and its children."""

    info: SessionInfo
    sums: SessionSums
    children: list[SessionRow] = field(default_factory=list)


def sessions(
    visit: Visit, *, contains: str = "", after: str = "", own: bool = False
) -> dict[str, Any]:
    """A page of sessions, newest first, with sub-agents under their parents. A filter lists every
    match by itself."""
    since = time.time()
    wanted = SessionFilter(contains=contains, without=() if own else OWN, roots=not contains)
    shown, following = covered_sessions(
        visit.store,
        visit.access,
        prefix=visit.access.sessions,
        after=after or None,
        limit=PAGE,
        wanted=wanted,
    )
    rows = _rows(visit, shown, with_children=not contains)
    return {
        "rows": rows, "contains": contains, "own": own, "after": after, "since": since,
        "next": following or "", "is_empty": not rows and not contains and not after,
        "url": visit.store.url if visit.owns_store else "",
    }  # fmt: skip


def _rows(visit: Visit, infos: Sequence[SessionInfo], *, with_children: bool) -> list[SessionRow]:
    """Rows of sessions, with their descendants two levels deep."""
    below: dict[str, list[SessionInfo]] = {}
    parents = tuple(info.session_id for info in infos)
    for _ in range(2) if with_children and parents else ():
        wanted = SessionFilter(parents=parents)
        children = visit.store.session_page(
            prefix=visit.access.sessions, limit=PAGE * _CHILDREN, wanted=wanted
        )
        for child in filter(lambda one: visit.access.covers(one.session_id), children):
            below.setdefault(child.parent or "", []).append(child)
        parents = tuple(child.session_id for child in children)
        if not parents:
            break

    def row(info: SessionInfo, depth: int) -> SessionRow:
        children = below.get(info.session_id, []) if depth < 2 else []
        return SessionRow(
            info, sums_of(visit.store, info), [row(one, depth + 1) for one in children[:_CHILDREN]]
        )

    return [row(info, 0) for info in infos]


def search(visit: Visit, *, q: str, after: str = "") -> dict[str, Any]:
    """Search the content of sessions, newest first, for as long as a page may take. The next page
    continues there."""
    place = parse_place(after) if after else None
    words = q.strip()
    hits: list[dict[str, Any]] = []
    looked, last, until = 0, None, time.thread_time() + _SEARCH
    next_place = ""
    for info in _newest_sessions(visit, place) if words else ():
        last, looked = info, looked + 1
        if visit.access.covers(info.session_id):
            hits += _hits(visit, info.session_id, q)
        if time.thread_time() > until or len(hits) >= PAGE:
            next_place = place_after(info)
            break
    named = sessions(visit, contains=words)["rows"][:10] if words and not after else []
    return {
        "q": q,
        "hits": hits,
        "looked": looked,
        "last": last,
        "next": next_place,
        "sessions": named,
    }


def _newest_sessions(visit: Visit, place: tuple[float, str] | None) -> Iterator[SessionInfo]:
    """Yield sessions before a place, newest first, without the program's own."""
    while True:
        page = visit.store.session_page(
            prefix=visit.access.sessions,
            before=place,
            limit=PAGE,
            wanted=SessionFilter(without=OWN),
        )
        yield from page
        if len(page) < PAGE:
            return
        place = (page[-1].created, page[-1].session_id)


def _hits(visit: Visit, session_id: str, words: str) -> list[dict[str, Any]]:
    session = visit.store.session(session_id).viewed()
    try:
        found = session.search(words, limit=3)
    except CoatcheckError:  # one session that cannot be searched must not hide the others
        return []
    return [
        {
            "session": session_id,
            "ref": hit.ref,
            "text": visit.text(hit.passage, _HEAD),
            "lines": hit.lines,
        }
        for hit in found
        if hit.ref.session_id == session_id  # what it has from its parents is found there
    ]


def find_pointer(visit: Visit, pointer: str) -> str | None:
    """Return the id of a session that has the artifact of a pointer and that the visitor may
    see."""
    held = visit.store.holders(pointer, limit=1_000)
    return next((one for one in held if visit.access.covers(one)), None)


# A session


def head(visit: Visit, session_id: str) -> dict[str, Any]:
    """What every page about a session shows: its figures, parent, children and transcripts."""
    info = visit.info(session_id)
    rows = _rows(visit, [info], with_children=True)
    session = visit.store.session(session_id).viewed()
    lenders = dict.fromkeys(ref.session_id for ref in islice(session.lent(), 200))
    parent = info.parent if info.parent is not None and visit.access.covers(info.parent) else None
    return {
        "info": info, "sums": rows[0].sums, "children": rows[0].children, "parent": parent,
        "transcripts": [
            one for one in lenders if one.startswith(TRANSCRIPT) and visit.access.covers(one)
        ],
    }  # fmt: skip


def conversation(visit: Visit, session_id: str, *, after: int = 0) -> dict[str, Any]:
    """A page of the calls of a session, in their order."""
    session = visit.session(session_id)
    about = head(visit, session_id)
    if session_id.startswith(TRANSCRIPT):
        return about | _transcript(visit, session, after)
    turns = turns_of(session, after=after, limit=PAGE + 1)
    shown = turns[:PAGE]
    last = session.records(SERIES, newest=True, limit=1)
    return about | {
        "turns": shown, "after": after, "next": shown[-1].number if len(turns) > PAGE else 0,
        "originals": _originals(visit, session, (part for turn in shown for part in turn.held)),
        "total": last[0].seq if last else 0,
        "artifacts": [] if shown else session.artifacts(limit=5),
    }  # fmt: skip


def _originals(
    visit: Visit, session: Session, parts: Iterable[TurnPart]
) -> dict[str, tuple[str, int]]:
    """The beginnings and sizes of the originals of stubs, by their pointers."""
    found: dict[str, tuple[str, int]] = {}
    stubs = dict.fromkeys(part.pointers[0] for part in parts if part.is_stub)
    for pointer in islice(stubs, PAGE):
        with suppress(CoatcheckError), session.content(pointer) as content:
            if media.is_text(content.ref.media_type):
                text = content.read(0, _ORIGINAL + CONTEXT).decode("utf-8", "replace")
                found[pointer] = visit.text(text, _ORIGINAL), content.ref.size_bytes
    return found


def call(visit: Visit, session_id: str, number: int) -> dict[str, Any]:
    """One call, whole, even if its record is an artifact."""
    session = visit.session(session_id)
    found = session.records(SERIES, after=max(0, number - 1), limit=1)
    turn = turn_of(found[0]) if found and found[0].seq == number else None
    if turn is not None and turn.artifact:
        with session.open(turn.artifact) as source:
            turn = turn_of(found[0], source.read())
    if turn is None:
        raise NotFound(
            f"no call {number} in this session", hint="older calls may have been removed"
        )
    names: dict[str, str] = {}
    for earlier in turns_of(session, after=max(0, number - 3), limit=2):
        if earlier.number < number:
            earlier.name_tools(names)
    turn.name_tools(names)
    return {
        "info": visit.info(session_id),
        "turn": turn,
        "originals": _originals(visit, session, turn.held),
    }


def body(
    visit: Visit, session_id: str, group: str, number: int, side: str, part: int
) -> dict[str, Any]:
    """One part of a call, or of a transcript's message, whole."""
    if group == "calls":
        turn: ModelTurn = call(visit, session_id, number)["turn"]
        parts: list[TurnPart] = getattr(turn, side) if side in SIDES else []
    else:
        messages = _transcript(visit, visit.session(session_id), number, limit=1)["messages"]
        parts = messages[0] if messages else []
    if part >= len(parts):
        raise NotFound(f"no part {part} here", hint="open the conversation again")
    return {
        "info": visit.info(session_id), "part": parts[part], "shown": visit.text(parts[part].text),
        "side": side, "number": number, "group": group, "place": part,
    }  # fmt: skip


def _transcript(visit: Visit, session: Session, after: int, *, limit: int = PAGE) -> dict[str, Any]:
    """A page of the messages of a transcript. Its file is on this machine, so only the store's
    owner may read it, and only if this store recorded where it is: an imported record could name
    any file."""
    from coatcheck.transcript import Transcript
    from coatcheck.transcript.keep import manifests

    manifest = next(manifests(visit.store, session.session_id), None)
    about: dict[str, Any] = {
        "manifest": manifest,
        "messages": [],
        "turns": [],
        "after": after,
        "next": 0,
        "total": 0,
    }
    if (
        manifest is None
        or not visit.owns_store
        or not manifest.is_own
        or not Path(manifest.path).is_file()
    ):
        return about
    try:
        with Transcript(
            manifest.path, session, format=manifest.format or None, read_only=True
        ) as transcript:
            found = list(transcript.messages(after, after + limit + 1))
    except (CoatcheckError, OSError, ValueError):
        return about
    names: dict[str, str] = {}
    messages = [named(parts_of(one), names) for one in found[:limit]]
    originals = _originals(visit, session, (part for parts in messages for part in parts))
    going_on = after + limit if len(found) > limit else 0
    return about | {"messages": messages, "originals": originals, "next": going_on}


def context(visit: Visit, session_id: str) -> dict[str, Any]:
    """The input of each call, split by what the provider's cache had, and where the prefix
    broke."""
    session = visit.session(session_id)
    records = session.records(METRICS, newest=True, limit=_PLOTTED)[::-1]
    calls: list[tuple[int, float, _Call]] = []
    for record in records:
        with suppress(msgspec.MsgspecError):
            calls.append((record.seq, record.at, _CALL.decode(record.body)))
    series = {
        "cache read": [call.cached_tokens or 0 for _, _, call in calls],
        "cache written": [call.cache_write_tokens or 0 for _, _, call in calls],
        "missed": [call.missed for _, _, call in calls],
    }
    drawn, step = _drawn(series)
    turns = [seq for seq, _, _ in calls][::step]
    marked: dict[int | str, str] = {}
    for number, (seq, _, one) in enumerate(calls):
        if one.tokens_rewritten:
            marked[turns[number // step]] = f"the prefix broke at call {seq}"
    title = "Input tokens of each call: read from the cache, written to it, and missed"
    events = [_event(record.body) for record in session.records(EVENTS, newest=True, limit=500)]
    broken = [one for one in events if isinstance(one.get("broke"), dict)]
    return head(visit, session_id) | {
        "plot": plot(title, turns, drawn, stacked=True, marked=marked,
                     unit="call") if calls else "",
        "labels": list(series), "step": step,
        "calls": calls[-PAGE:][::-1], "breaks": broken[:PAGE],
        "failed": [one for one in events if isinstance(one.get("error"), dict)][:PAGE],
    }  # fmt: skip


def _drawn(series: Mapping[str, Sequence[float]]) -> tuple[dict[str, list[float | None]], int]:
    """Return the values of a plot, and the number of values that each is the maximum of."""
    drawn, step = {}, 1
    for label, values in series.items():
        drawn[label], step = thinned(values, _POINTS)
    return drawn, step


# Artifacts


def artifacts(
    visit: Visit, session_id: str, *, after: str = "", kind: str = "", name: str = ""
) -> dict[str, Any]:
    """A page of the artifacts that a session sees."""
    session = visit.session(session_id)
    if kind or name:
        found = session.list(name=name or None, kind=kind or None, limit=PAGE)
        going_on = ""
    else:
        found = session.artifacts(after=after or None, limit=PAGE + 1)
        going_on = found[PAGE - 1].artifact_id if len(found) > PAGE else ""
    shown = found[:PAGE]
    seen = session.shown_of(shown)
    return head(visit, session_id) | {
        "refs": shown, "next": going_on, "after": after, "kind": kind, "name": name, "seen": seen,
    }  # fmt: skip


def artifact(
    visit: Visit, session_id: str, target: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """An artifact: its preview, one page of it as `read` returns it, and what is known about it."""
    session, ref = _found(visit, session_id, target)
    preview = _tried(lambda: session.preview(ref, limit=2_000))
    page = _tried(lambda: session.read(ref, **asked))
    return {
        "info": visit.info(session_id), "ref": ref, "asked": asked,
        "coverage": session.coverage(ref), "preview": preview, "page": page,
        "is_picture": picture_type(session, ref) is not None,
        "preview_text": visit.text(preview.text) if not isinstance(preview, CoatcheckError) else "",
        "page_text": visit.text(page.text) if not isinstance(page, CoatcheckError) else "",
    }  # fmt: skip


def _found(visit: Visit, session_id: str, target: str) -> tuple[Session, Ref]:
    """Return a session and the ref of an artifact in it. Raises the precise error if it is not
    there."""
    session = visit.session(session_id)
    ref = session.ref(target)
    if ref is None:
        session.open(target).close()
        raise NotFound(f"no artifact found for {clip(target)}")
    return session, ref


def _tried(work: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error: the rest of the page is still worth looking at."""
    try:
        return work()
    except CoatcheckError as error:
        return error


def lineage(visit: Visit, session_id: str, target: str) -> dict[str, Any]:
    """What an artifact was derived from, what was derived from it, and which sessions have it."""
    session, ref = _found(visit, session_id, target)
    parents = [(one, _known(session, one)) for one in ref.parents]
    names = {ref.artifact_id, ref.pointer}
    derived = [one for one in session.list(limit=_DERIVED) if names & set(one.parents)]
    holders = [
        one for one in visit.store.holders(ref.pointer, limit=PAGE) if visit.access.covers(one)
    ]
    return {
        "info": visit.info(session_id),
        "ref": ref,
        "parents": parents,
        "derived": derived,
        "holders": holders,
    }


def _known(session: Session, parent: str) -> Ref | None:
    with suppress(CoatcheckError):
        return session.ref(parent)
    return None


def picture_type(session: Session, ref: Ref) -> str | None:
    """Return the type of an artifact that is a picture, by its bytes; None if it is not one that a
    browser may show."""
    if not ref.media_type.startswith("image/") or ref.size_bytes > MAX_PICTURE:
        return None
    try:
        with session.content(ref) as content:
            start = content.read(0, 16)
    except CoatcheckError:
        return None
    found = next((kind for magic, kind in PICTURES.items() if start.startswith(magic)), None)
    return None if found == "image/webp" and start[8:12] != b"WEBP" else found


# Savings


def savings(visit: Visit, *, days: int) -> dict[str, Any]:
    """What stubs kept out of prompts in these days, minus what was read back. The counts cover the
    whole store, so a token for some sessions does not show them."""
    if visit.access.sessions:
        return {"days": days, "saved": None}
    days = min(max(1, days), 366)
    first = datetime.now(UTC).date() - timedelta(days=days - 1)
    dates = [first + timedelta(days=number) for number in range(days)]
    saved = store_savings(visit.store, since=first)
    by_day = {row.day: row for row in saved.by("day")}
    every = [by_day.get(date, SavingsRow()) for date in dates]
    series = {
        "net": [row.tokens_net for row in every],
        "read back": [row.tokens_read_back for row in every],
    }
    names = [f"{date:%m-%d}" for date in dates]
    drawn, step = _drawn(series)
    title = "Tokens kept out of prompts on each day: net, and read back"
    return {
        "days": days, "saved": saved, "total": saved.total, "labels": list(series),
        "plot": plot(title, names[::step], drawn, stacked=True, unit="day") if saved.rows else "",
        "tables": [
            ("By surface", ("surface",), saved.by("surface")),
            ("By server and tool", ("surface", "server", "tool"),
             saved.by("surface", "server", "tool")[:200]),
            ("By day", ("day",), saved.by("day")[::-1]),
        ],
    }  # fmt: skip


# What happens now


def live(visit: Visit) -> dict[str, Any]:
    """The newest calls of the sessions that were used last."""
    since = time.time()
    recent = recent_sessions(visit, since - 86_400.0)[:_LIVE]
    found = []
    for info in recent:
        records = visit.store.session(info.session_id).records(SERIES, newest=True, limit=3)
        found += [
            (info.session_id, turn) for record in records if (turn := turn_of(record)) is not None
        ]
    found.sort(key=lambda one: -one[1].at)
    return {
        "calls": found[:_LIVE],
        "rows": _rows(visit, recent[:10], with_children=False),
        "since": since,
    }


def recent_sessions(visit: Visit, since: float) -> list[SessionInfo]:
    """The sessions that were used after a time, the last used first."""
    wanted = SessionFilter(without=OWN, used_after=since)
    page = visit.store.session_page(prefix=visit.access.sessions, limit=PAGE * 4, wanted=wanted)
    return sorted(
        (one for one in page if visit.access.covers(one.session_id)), key=lambda one: -one.used
    )
