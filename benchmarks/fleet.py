"""A fleet store on SeaweedFS and PostgreSQL on this machine, compared with the two servers
alone."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import coatcheck
from benchmarks.bench import KB, MB, Bench, data, text
from benchmarks.report import Row, timed_row
from benchmarks.scale import FEW, MANY, QUICK_MANY, name_of, removed, session_rows, small_content
from benchmarks.timing import Side, interleaved, no_collection
from tests.backends import Fleet
from tests.servers import KEY, SECRET, find_postgres, find_weed, postgres, seaweedfs

_PROCESSES, _SESSIONS = 8, 8  # sessions per process
_SMALL, _LARGE, _QUICK = 1_000, 1_000_000, 20_000


def fleet(bench: Bench) -> Iterator[Row]:
    if not (find_postgres() and find_weed()):
        print("fleet: skipped: there is no PostgreSQL or no SeaweedFS")
        return
    with postgres() as database, seaweedfs() as s3:
        servers = Fleet(s3, database)
        yield from _one_caller(bench, servers)
        yield from _inline(bench, servers)
        yield from _crowd(bench, servers)
        yield from _scale(bench, servers)
        yield from _sessions(bench, servers)
        yield from _words(bench, servers)


class Bare:
    """The two servers alone: an object, and a row that names it."""

    def __init__(self, s3: str, database: str) -> None:
        import psycopg
        from obstore.store import S3Store

        self._bucket = S3Store(
            "coatcheck", endpoint=s3, region="us-east-1", access_key_id=KEY, secret_access_key=SECRET,
            client_options={"allow_http": True},
        )  # fmt: skip
        self._db = psycopg.connect(database, autocommit=True)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS bare (digest bytea PRIMARY KEY, size int, at float8, name text)"
        )

    def put(self, content: bytes) -> str:
        import obstore

        name = os.urandom(16).hex()
        obstore.put(self._bucket, f"bare/{name}", content)
        self._db.execute(
            "INSERT INTO bare VALUES (%s, %s, %s, %s)",
            (bytes.fromhex(name), len(content), time.time(), name),
        )
        return name

    def get(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._bucket, f"bare/{name}").bytes())

    def close(self) -> None:
        self._db.close()


def _one_caller(bench: Bench, servers: Fleet) -> Iterator[Row]:
    bare = Bare(servers.s3.url, servers.database.url)
    with coatcheck.open(servers.new_url()) as store:
        session = store.session("bench")
        for size, rounds, limit in ((20 * KB, 200, 1.3), (MB, 40, None)):
            times = interleaved(
                Side(functools.partial(data, size), bare.put),
                Side(functools.partial(data, size), session.put),
                bench.rounds(rounds),
            )
            yield timed_row(f"fleet: put {size // KB} KB", times, limit)
        rounds = bench.rounds(60)
        names = [bare.put(data(MB)) for _ in range(rounds * 2)]
        pointers = [session.put(data(MB)).pointer for _ in range(rounds * 2)]
        times = interleaved(Side(names.pop, bare.get), Side(pointers.pop, session.get), rounds)
        yield timed_row("fleet: get 1 MB, the first time", times, 1.2)
        name, pointer = bare.put(data(MB)), session.put(data(MB)).pointer
        session.get(pointer)
        times = interleaved(
            Side(lambda: name, bare.get), Side(lambda: pointer, session.get), rounds
        )
        yield timed_row("fleet: get 1 MB, read before", times, None)
    bare.close()


def _inline(bench: Bench, servers: Fleet) -> Iterator[Row]:
    """Content as an object and in the catalog, by size: up to which size the catalog is faster."""
    with coatcheck.open(servers.new_url()) as apart, coatcheck.open(servers.new_url()) as inside:
        apart._catalog.inline_limit, inside._catalog.inline_limit = -1, MB
        sessions = apart.session("bench"), inside.session("bench")
        for size in (4 * KB, 64 * KB, 256 * KB):
            sides = [Side(functools.partial(data, size), session.put) for session in sessions]
            times = interleaved(sides[0], sides[1], bench.rounds(60))
            yield timed_row(
                f"fleet: put {size // KB} KB, in the catalog instead of an object", times, None
            )
            pointers = [
                [session.put(data(size)).pointer for _ in range(bench.rounds(60) * 2)]
                for session in sessions
            ]
            gets = [
                Side(mine.pop, session.get)
                for mine, session in zip(pointers, sessions, strict=True)
            ]
            times = interleaved(gets[0], gets[1], bench.rounds(60))
            yield timed_row(f"fleet: get {size // KB} KB, likewise", times, None)


def _crowd(bench: Bench, servers: Fleet) -> Iterator[Row]:
    """64 sessions over 8 processes, with and without Coatcheck, taking turns."""
    url, each = servers.new_url(), bench.rounds(30)
    coatcheck.open(url).close()
    ours: list[float] = []
    floor: list[float] = []
    for turn in range(2 if bench.quick else 3):
        for what, rates in (("bare", floor), ("ours", ours)):
            rate = _rate(what, url, servers, each)
            if turn:  # the first is a warm-up
                rates.append(rate)
    yield Row(f"fleet: {_PROCESSES * _SESSIONS} sessions over {_PROCESSES} processes put 20 KB",
              max(floor), max(ours), 0.8, "rate", at_least=True)  # fmt: skip


def _rate(what: str, url: str, servers: Fleet, each: int) -> float:
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet", what, url, servers.s3.url, servers.database.url, str(each)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(_PROCESSES)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    done = [int(worker.communicate()[0]) for worker in workers]
    return sum(done) / (time.perf_counter() - start)


def _work(what: str, url: str, s3: str, database: str, each: str) -> None:
    """One process with eight threads, each with its own session or connection."""
    store = coatcheck.open(url) if what == "ours" else None
    puts: list[Callable[[bytes], Any]] = [
        store.session(f"{os.getpid()} {number}").put if store else Bare(s3, database).put
        for number in range(_SESSIONS)
    ]
    texts = [[data(20 * KB) for _ in range(int(each))] for _ in puts]
    for put, warm in zip(puts, texts, strict=True):
        put(warm.pop())
    print("ready", flush=True)
    sys.stdin.readline()
    with no_collection():
        threads = [
            threading.Thread(target=lambda p=put, t=mine: [p(one) for one in t])
            for put, mine in zip(puts, texts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(sum(map(len, texts)), flush=True)


def _scale(bench: Bench, servers: Fleet) -> Iterator[Row]:
    import psycopg

    large = _QUICK if bench.quick else _LARGE
    stores = []
    for count in (_SMALL, large):
        stores.append(coatcheck.open(servers.new_url(), ttl=None))
        _fill(servers.database.url, stores[-1], count)
    few, many = (store.session("bench") for store in stores)

    def name(count: int) -> Callable[[], str]:
        return lambda: name_of(random.randrange(count))

    cases: tuple[tuple[str, int, Callable[[coatcheck.Session, int], Side[Any]]], ...] = (
        ("get by name", 300, lambda session, count: Side(name(count), session.get)),
        (
            "list of 50",
            100,
            lambda session, count: Side(lambda: 50, lambda limit: session.list(limit=limit)),
        ),
        ("put 1 KB", 200, lambda session, count: Side(functools.partial(text, KB), session.put)),
    )
    for verb, rounds, side in cases:
        times = interleaved(side(few, _SMALL), side(many, large), bench.rounds(rounds))
        yield timed_row(f"fleet: {verb}, among {large:,}", times, 1.5)
    yield from _with_quota(bench, stores, large)
    yield from _collected(bench, stores, large)
    with psycopg.connect(servers.database.url) as db:
        row = db.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname IN ('blob', 'ref')",
            (fleet_place(stores[1]),),
        ).fetchone()
    assert row is not None
    yield Row(
        f"fleet: bytes of the database for each of {large:,}",
        None,
        float(row[0]) / large,
        None,
        "count",
    )
    yield from removed(stores[1], large, "fleet: ")
    for store in stores:
        store.close()


def _sessions(bench: Bench, servers: Fleet) -> Iterator[Row]:
    many = QUICK_MANY if bench.quick else MANY
    stores = [coatcheck.open(servers.new_url()) for _ in range(2)]
    for store, count in zip(stores, (FEW, many), strict=True):
        _fill(servers.database.url, store, count, apart=True)
    yield from session_rows(bench, stores, many, "fleet: ")
    for store in stores:
        store.close()


def _with_quota(bench: Bench, stores: list[coatcheck.Store], large: int) -> Iterator[Row]:
    bounded = [
        coatcheck.open(str(store.settings["store.url"]), ttl=None, quota_bytes=1 << 40)
        for store in stores
    ]
    sides = [Side(functools.partial(text, KB), store.session("bench").put) for store in bounded]
    yield timed_row(f"fleet: put 1 KB with a quota for the store, among {large:,}",
                    interleaved(sides[0], sides[1], bench.rounds(200)), None)  # fmt: skip
    for store in bounded:
        store.close()


def _collected(bench: Bench, stores: list[coatcheck.Store], large: int) -> Iterator[Row]:
    """The time of a collection that finds a hundred expired sessions with one artifact each."""

    def expired(store: coatcheck.Store) -> Callable[[], coatcheck.Store]:
        def make() -> coatcheck.Store:
            for _ in range(100):
                store.session(os.urandom(8).hex(), ttl=0).put(text(KB))
            return store

        return make

    sides = [Side(expired(store), lambda one: one.collect(grace=0)) for store in stores]
    times = interleaved(sides[0], sides[1], bench.rounds(4))
    yield timed_row(f"fleet: collect 100 expired sessions, among {large:,}", times, None)


def _words(bench: Bench, servers: Fleet) -> Iterator[Row]:
    """A search in a session of 100 artifacts, alone and among others that have the same words."""
    import psycopg

    others = 1_000 if bench.quick else 100_000
    urls = servers.new_url(), servers.new_url()
    stores = [coatcheck.open(url, ttl=None) for url in urls]
    for store in stores:
        for number in range(100):
            store.session("bench").put(
                f"{small_content(number).decode()} connection refused, error {number}"
            )
        store.session("bench").search("refused")
    schema = urls[1].partition("schema=")[2].partition("&")[0]
    with psycopg.connect(
        servers.database.url, options=f"-c search_path={schema}", autocommit=True
    ) as db:
        db.execute(
            "INSERT INTO passage (tenant, digest, session_id, first, last, start, stop, words) SELECT '',"
            " sha256(n::text::bytea), '', 1, 1, 0, 10,"
            " to_tsvector('english', 'connection refused, error ' || mod(n, 5000))"
            " FROM generate_series(1, %s) AS n",
            (others,),
        )
        db.execute(
            "INSERT INTO held SELECT '', convert_to('other ' || n / 100, 'UTF8'), sha256(n::text::bytea), '', NULL"
            " FROM generate_series(1, %s) AS n",
            (others,),
        )
        db.execute("VACUUM ANALYZE passage, held")
    sides = [
        Side(lambda: f"refused {random.randrange(100)}", store.session("bench").search)
        for store in stores
    ]
    yield timed_row(f"fleet: search among 100, with {others:,} of others", interleaved(
        sides[0], sides[1], bench.rounds(100)), None)  # fmt: skip
    for store in stores:
        store.close()


def fleet_place(store: coatcheck.Store) -> str:
    """The schema of a fleet's store."""
    return str(store.settings["store.url"]).partition("schema=")[2].partition("&")[0]


def _fill(database: str, store: coatcheck.Store, count: int, *, apart: bool = False) -> None:
    """Rows as puts would leave them, made by the database: a million puts would take too long. All
    in one session, or each in a session `apart`. The indexes of refs are made at the end, because
    that is faster."""
    import psycopg

    store.session("bench").put("the first, so that the session is there")
    options = f"-c search_path={fleet_place(store)} -c max_parallel_maintenance_workers=0 -c maintenance_work_mem=256MB"
    with psycopg.connect(database, options=options) as db:
        made = db.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() AND tablename = 'ref'"
            " AND indexname <> 'ref_pkey'"
        ).fetchall()
        for name, _ in made:
            db.execute(f"DROP INDEX {name}")
        db.execute(
            "CREATE TEMP TABLE small AS SELECT n, convert_to(repeat('line ' || n || E' of a small result\\n', 4),"
            " 'UTF8') AS data FROM generate_series(0, %s - 1) AS n",
            (count,),
        )
        assert db.execute("SELECT data FROM small WHERE n = 7").fetchone() == (small_content(7),)
        db.execute(
            "INSERT INTO blob (tenant, digest, size, coding, place, frames, refs, used, data) SELECT '', sha256(data),"
            " length(data), 'inline', '', '', 1, %s, data FROM small ORDER BY sha256(data)",
            (time.time(),),
        )
        if apart:
            db.execute(
                "INSERT INTO session (tenant, session_id, ttl, created, used, used_bytes, next_seq, look_at) SELECT '',"
                " convert_to('agent-' || n, 'UTF8'), 604800, %(now)s - n, %(now)s, length(data), 2, %(now)s + 604800"
                " FROM small ORDER BY n",
                {"now": time.time()},
            )
        db.execute(
            "INSERT INTO ref (session_key, seq, tenant, digest, size, name, codec, media_type, kind, producer, parents,"
            " summary, created, pinned) SELECT session_key, CASE WHEN %(apart)s THEN 1 ELSE 1000 + n END, '',"
            " sha256(data), length(data), convert_to('results/' || n || '.txt', 'UTF8'), 'text', 'text/plain',"
            " 'result', 'system', '', 'a small result', %(now)s, FALSE FROM small JOIN session ON session_id ="
            " CASE WHEN %(apart)s THEN convert_to('agent-' || n, 'UTF8') ELSE 'bench' END ORDER BY session_key, n",
            {"now": time.time(), "apart": apart},
        )
        for _, definition in made:
            db.execute(definition)
        if not apart:
            db.execute(
                "UPDATE session SET next_seq = %s, used_bytes = (SELECT sum(size) FROM ref)",
                (1_000 + count,),
            )
    with psycopg.connect(database, options=options, autocommit=True) as db:
        db.execute("VACUUM ANALYZE blob, ref, session")
        db.execute("CHECKPOINT")


if __name__ == "__main__":
    _work(*sys.argv[1:])
