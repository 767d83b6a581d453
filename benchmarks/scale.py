"""A catalog of a million artifacts, all in one session, against one of a thousand."""

from __future__ import annotations

import functools
import hashlib
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coatcheck
from benchmarks.bench import KB, Bench, text
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved

_SMALL = 1_000
_LARGE = 1_000_000
_QUICK = 50_000
_LIMIT = 1.5


def scale(bench: Bench) -> Iterator[Row]:
    """Each operation in both catalogs in turns; the floor is the small one."""
    large = _QUICK if bench.quick else _LARGE
    sessions = []
    for count in (_SMALL, large):
        folder = bench.new_folder("store")
        _fill(folder, count)
        sessions.append(coatcheck.open(folder, durability="process").session("bench"))
    few, many = sessions
    cases: tuple[tuple[str, int, float | None, Callable[[coatcheck.Session, int], Side[Any]]], ...] = (
        ("get", 2000, _LIMIT, _get),
        ("get by name", 2000, _LIMIT, _get_by_name),
        ("list of 50", 300, _LIMIT, _list),
        ("put 1 KB, then get it", 100, None, _put_and_get),
        ("put 1 KB", 1000, _LIMIT, _put),  # last: the others measure catalogs at rest
    )
    for verb, rounds, limit, side in cases:
        times = interleaved(side(few, _SMALL), side(many, large), bench.rounds(rounds))
        yield timed_row(f"{verb}, among {large:,}", times, limit)
    for session in sessions:
        session.store.close()


def _get(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(_picked(count, lambda number: "art:" + digest_of(number).hex()[:12]), session.get)


def _get_by_name(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(_picked(count, name_of), session.get)


def _list(session: coatcheck.Session, count: int) -> Side[int]:
    return Side(lambda: 50, lambda limit: session.list(limit=limit))


def _put(session: coatcheck.Session, count: int) -> Side[str]:
    return Side(functools.partial(text, KB), session.put)


def _put_and_get(session: coatcheck.Session, count: int) -> Side[str]:
    """What a put alone leaves for later: the database takes the row over before a read."""
    return Side(functools.partial(text, KB), lambda one: session.get(session.put(one)))


def _picked(count: int, key: Callable[[int], str]) -> Callable[[], str]:
    return lambda: key(random.randrange(count))


def small_content(number: int) -> bytes:
    return f"line {number} of a small result\n".encode() * 4


def digest_of(number: int) -> bytes:
    return hashlib.sha256(small_content(number)).digest()


def name_of(number: int) -> str:
    return f"results/{number}.txt"


def _fill(folder: Path, count: int) -> None:
    """Rows as puts would leave them, straight into a closed store's catalog: a million puts would take too long."""
    with coatcheck.open(folder, durability="process", ttl=None) as store:
        store.session("bench").put("the first, so that the session is there")
    now = time.time()
    db = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode = OFF")  # the store turns WAL on again
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA cache_size = -500000")  # indexes of digests are written all over
    db.execute("BEGIN")
    session_key = db.execute("SELECT session_key FROM session WHERE session_id = 'bench'").fetchone()[0]
    numbers = range(count)
    first = 1_000
    db.executemany(
        "INSERT INTO blob VALUES (?, ?, ?, 'inline', '', x'', 1, ?)",
        ((first + n, digest_of(n), len(small_content(n)), now) for n in numbers),
    )
    db.executemany("INSERT INTO content VALUES (?, ?)", ((first + n, small_content(n)) for n in numbers))
    db.executemany(
        "INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, producer, parents,"
        " summary, created, pinned)"
        " VALUES (?, ?, ?, ?, ?, 'text', 'text/plain', 'result', 'system', '', 'a small result', ?, 0)",
        ((session_key, first + n, digest_of(n), len(small_content(n)), name_of(n), now) for n in numbers),
    )
    db.execute(
        "UPDATE session SET next_seq = ?, used_bytes = (SELECT sum(size) FROM ref) WHERE session_key = ?",
        (first + count, session_key),
    )
    db.execute("COMMIT")
    db.close()
