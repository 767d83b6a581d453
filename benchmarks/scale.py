"""A catalog of a million artifacts, all in one session, against one of a thousand; 100,000 sessions
against 100."""

from __future__ import annotations

import functools
import hashlib
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import coatcheck
from benchmarks.bench import KB, Bench, text
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved
from coatcheck.storage.entries import SessionInfo

_SMALL, _LARGE, _QUICK = 1_000, 1_000_000, 50_000
FEW, MANY, QUICK_MANY = 100, 100_000, 10_000  # sessions
_LIMIT = 1.5
_LONGEST = 0.3  # seconds of a change
_CHANGES = 60  # that are timed


def scale(bench: Bench) -> Iterator[Row]:
    """Each operation in both catalogs in turns; the floor is the small one."""
    large = _QUICK if bench.quick else _LARGE
    sessions = []
    for count in (_SMALL, large):
        folder = bench.new_folder("store")
        _fill(folder, count)
        sessions.append(coatcheck.open(folder, durability="process").session("bench"))
    few, many = sessions
    cases: tuple[
        tuple[str, int, float | None, Callable[[coatcheck.Session, int], Side[Any]]], ...
    ] = (
        ("get, the first time", 2000, _LIMIT, _get),
        ("get, read before", 2000, _LIMIT, _get_again),
        ("get by name", 2000, _LIMIT, _get_by_name),
        ("list of 50", 300, _LIMIT, _list),
        ("put 1 KB, then get it", 100, None, _put_and_get),
        ("put 1 KB", 1000, _LIMIT, _put),  # last: the others measure catalogs at rest
    )
    for verb, rounds, limit, side in cases:
        times = interleaved(side(few, _SMALL), side(many, large), bench.rounds(rounds))
        yield timed_row(f"{verb}, among {large:,}", times, limit)
    yield from removed(many.store, large)
    for session in sessions:
        session.store.close()
    yield from _among_sessions(bench)


def removed(store: coatcheck.Store, count: int, where: str = "") -> Iterator[Row]:
    """How long others wait at most while a large session expires and ends."""
    catalog, now = store._catalog, time.time() + 1
    catalog.open_session(SessionInfo("bench", ttl=0.0))
    catalog.make_durable()  # nothing that earlier puts have left to do
    for verb, work in (
        ("expires", lambda: catalog.expire(now, forget_before=0.0)),
        ("ends", store.session("bench").end),
    ):
        longest = _longest_change(catalog, work)
        yield Row(
            f"{where}longest change while a session of {count:,} {verb}", None, longest, _LONGEST
        )


def _longest_change(catalog: Any, work: Callable[[], object]) -> float:
    """The longest of the first changes of the catalog that this work makes."""
    owner, name = (
        (catalog, "_exclusive") if hasattr(catalog, "_exclusive") else (catalog._connections, "run")
    )
    run, times = getattr(owner, name), list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        if len(times) == _CHANGES:
            raise _EnoughError
        start = time.perf_counter()
        try:
            return run(*args, **options)
        finally:
            times.append(time.perf_counter() - start)

    with patch.object(owner, name, timed), suppress(_EnoughError):
        work()
    return max(times)


class _EnoughError(Exception):
    pass


def _among_sessions(bench: Bench) -> Iterator[Row]:
    many = QUICK_MANY if bench.quick else MANY
    stores = []
    for count in (FEW, many):
        folder = bench.new_folder("store")
        _fill(folder, count, apart=True)
        stores.append(coatcheck.open(folder, durability="process"))
    yield from session_rows(bench, stores, many)
    for store in stores:
        store.close()


def session_rows(
    bench: Bench, stores: Sequence[coatcheck.Store], many: int, where: str = ""
) -> Iterator[Row]:
    """Operations in a store of few sessions, which is the floor, and in one of many."""
    cases: tuple[tuple[str, int, Callable[[coatcheck.Store, int], Side[Any]]], ...] = (
        ("get", 500, lambda store, count: Side(
            lambda: random.randrange(count), lambda one: store.session(session_of(one)).get(name_of(one)))),
        ("list of 50 sessions", 100, lambda store, count: Side(
            lambda: 50, lambda limit: store.session_page(limit=limit))),
        ("put 1 KB into a new session", 300, lambda store, count: Side(
            functools.partial(text, KB), lambda one: store.session(one[:16]).put(one))),
        ("collect", 20, lambda store, count: Side(lambda: 0, lambda grace: store.collect(grace=grace))),
    )  # fmt: skip
    for verb, rounds, side in cases:
        times = interleaved(side(stores[0], FEW), side(stores[1], many), bench.rounds(rounds))
        yield timed_row(f"{where}{verb}, among {many:,} sessions", times, _LIMIT)


def _get(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(lambda: _pointer(random.randrange(count)), session.get)


def _get_again(session: coatcheck.Session, count: int) -> Side[str]:
    known = [_pointer(random.randrange(count)) for _ in range(100)]
    for pointer in known:
        session.get(pointer)
    return Side(lambda: random.choice(known), session.get)


def _pointer(number: int) -> str:
    return "art:" + digest_of(number).hex()[:12]


def _get_by_name(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(lambda: name_of(random.randrange(count)), session.get)


def _list(session: coatcheck.Session, count: int) -> Side[int]:
    return Side(lambda: 50, lambda limit: session.list(limit=limit))


def _put(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(functools.partial(text, KB), session.put)


def _put_and_get(session: coatcheck.Session, count: int) -> Side[str]:
    """What a put alone leaves for later: the database takes the row over before a read."""
    return Side(functools.partial(text, KB), lambda one: session.get(session.put(one)))


def small_content(number: int) -> bytes:
    return f"line {number} of a small result\n".encode() * 4


def digest_of(number: int) -> bytes:
    return hashlib.sha256(small_content(number)).digest()


def name_of(number: int) -> str:
    return f"results/{number}.txt"


def session_of(number: int) -> str:
    return f"agent-{number}"


def _fill(folder: Path, count: int, *, apart: bool = False) -> None:
    """Rows as puts would leave them, straight into a closed store's catalog: a million puts would
    take too long. All in one session, or each in a session `apart`. Keys of blobs are in the order
    of their digests, and indexes are made at the end, because that is faster."""
    with coatcheck.open(folder, durability="process", ttl=None) as store:
        store.session("bench").put("the first, so that the session is there")
    now = time.time()
    db = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode = OFF")  # the store turns WAL on again
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA cache_size = -500000")
    db.execute("BEGIN")
    indexes = db.execute(
        "SELECT name, sql FROM sqlite_master WHERE tbl_name = 'ref' AND type = 'index' AND sql <> ''"
    )
    made = indexes.fetchall()
    for name, _ in made:
        db.execute(f"DROP INDEX {name}")
    first = 1_000
    contents = [small_content(number) for number in range(count)]
    digests = [hashlib.sha256(content).digest() for content in contents]
    order = sorted(range(count), key=digests.__getitem__)
    db.executemany(
        "INSERT INTO blob VALUES (?, ?, ?, 'inline', '', x'', 1, ?)",
        ((key, digests[n], len(contents[n]), now) for key, n in enumerate(order, first)),
    )
    db.executemany(
        "INSERT INTO content VALUES (?, ?)",
        ((key, contents[n]) for key, n in enumerate(order, first)),
    )
    if apart:
        db.executemany(
            "INSERT INTO session (session_key, session_id, ttl, created, used, used_bytes, next_seq)"
            " VALUES (?, ?, 604800.0, ?, ?, ?, 1000)",
            ((first + n, session_of(n), now - n, now, len(contents[n])) for n in range(count)),
        )
    session_key = db.execute(
        "SELECT session_key FROM session WHERE session_id = 'bench'"
    ).fetchone()[0]
    db.executemany(
        "INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, producer, parents,"
        " summary, created, pinned)"
        " VALUES (?, ?, ?, ?, ?, 'text', 'text/plain', 'result', 'system', '', 'a small result', ?, 0)",
        ((first + n if apart else session_key, 1 if apart else first + n, digests[n], len(contents[n]), name_of(n), now)
         for n in range(count)),
    )  # fmt: skip
    for _, sql in made:
        db.execute(sql)
    db.execute(
        "UPDATE session SET next_seq = ?2, used_bytes = (SELECT sum(size) FROM ref WHERE session_key = ?1)"
        " WHERE session_key = ?1",
        (session_key, first + count),
    )
    db.execute("COMMIT")
    db.close()
