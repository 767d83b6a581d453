"""The console on a large store: the CPU time of each page with 100,000 sessions and an artifact of
1 GB."""

from __future__ import annotations

import json
import sqlite3
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

import coatcheck
from benchmarks.bench import MB, Bench, write_data
from benchmarks.report import Row
from coatcheck.console.site import console_routes, link
from coatcheck.context.metrics import PromptMetrics
from coatcheck.http.application import METHODS, store_app
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.serving import LocalServer

_SESSIONS, _QUICK_SESSIONS = 100_000, 5_000
_SIZE, _QUICK_SIZE = 1024 * MB, 32 * MB
_LIMIT = 0.2
_TOKEN = "a-token-for-the-benchmark"
_CALLS = 200
_RESULT = "2026-11-17 10:00:00 INFO worker 7 finished job 7919\n" * 400


def pages(bench: Bench) -> Iterator[Row]:
    """The median CPU time of each page, over HTTP on loopback, after a first look that starts
    everything. It is that of the whole process, server and client, so that other work on the
    machine does not count."""
    count, size = (_QUICK_SESSIONS, _QUICK_SIZE) if bench.quick else (_SESSIONS, _SIZE)
    folder = bench.new_folder("store")
    _fill(folder, count)
    with coatcheck.open(folder, durability="process") as store:
        _record(store, count)
        source = bench.new_folder("files") / "large.txt"
        write_data(source, size)
        big = store.session("large").put(source, name="large.txt", media_type="text/plain")
        source.unlink()
        middle = link("artifact", "large", big.pointer, lines="200000:200100")
        shown = f"{size // MB:,} MB"
        asked = {
            "sessions, newest": link("sessions"),
            "sessions, filtered": link("sessions", contains="77"),
            "search in all sessions": link("search", q="finished job 7919"),
            "live": link("live"),
            "savings": link("savings"),
            "conversation": link("session", _name(count - 1)),
            "context, 200 calls": link("context", _name(count - 1)),
            "artifacts": link("artifacts", "large"),
            f"artifact of {shown}": link("artifact", "large", big.pointer),
            f"lines in the middle of {shown}": middle,
        }
        with _served(store) as url, httpx2.Client(base_url=url, timeout=600) as client:
            client.post("/console/login", data={"token": _TOKEN})
            deep = link("sessions") + "?after=" + _cursor(store, count // 2)
            for case, path in {**asked, "sessions, 50,000th": deep}.items():
                yield Row(
                    f"{case}, {count:,} sessions",
                    None,
                    _median(client, path, bench.rounds(10)),
                    _LIMIT,
                )
            for case, path in {
                f"grep without a match in {shown}": link(
                    "artifact", "large", big.pointer, grep="no such words"
                ),
                "lineage": link("lineage", "large", big.pointer),
            }.items():
                yield Row(f"{case}, {count:,} sessions", None, _median(client, path, 3), None)


def _median(client: httpx2.Client, path: str, rounds: int) -> float:
    def once() -> float:
        began = time.process_time()
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return time.process_time() - began

    once()
    return statistics.median(once() for _ in range(rounds))


@contextmanager
def _served(store: coatcheck.Store) -> Iterator[str]:
    keyring = Keyring(given={_TOKEN: Access("bench", "admin")})
    with LocalServer(methods=METHODS) as local:
        app = store_app(store, keyring, routes=console_routes(store, keyring))
        server = local.prepared(app, grace=1)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield local.url
        finally:
            server.should_exit = True
            thread.join()


def _name(number: int) -> str:
    return f"agent-{number:06}"


def _cursor(store: coatcheck.Store, number: int) -> str:
    from coatcheck.http.definitions import place_after

    info = store.session_info(_name(number))
    assert info is not None
    return place_after(info)


def _fill(folder: Path, count: int) -> None:
    """Sessions as their first put would leave them, straight into the catalog; one in ten is a
    child of another."""
    coatcheck.open(folder, durability="process").close()
    now = time.time()
    db = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO session (session_id, parent, created, used) VALUES (?, ?, ?, ?)",
        (
            (_name(n), _name(n - 1) if n % 10 == 9 else None, now - (count - n), now - (count - n))
            for n in range(count)
        ),
    )
    db.execute("COMMIT")
    db.close()


def _record(store: coatcheck.Store, count: int) -> None:
    """Calls of the 50 newest sessions, and some with messages."""
    with store.batching:
        for number in range(count - 50, count):
            session = store.session(_name(number))
            session.put(_RESULT + str(number), tool="search")
            for call in range(_CALLS):
                figures = PromptMetrics(
                    session=session.session_id, est_tokens=900 * call, input_tokens=1_000 * call, output_tokens=90,
                    cached_tokens=900 * call, cache_write_tokens=100, cost=500, cost_without=900, tokens_saved=400,
                )  # fmt: skip
                session.record("metrics", figures.to_json().encode())
        session = store.session(_name(count - 1))
        for call in range(60):
            new = [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": f"c{call}", "content": _RESULT}
                    ],
                }
            ]
            answer = {
                "role": "assistant",
                "content": [{"type": "text", "text": "Here is what I found. " * 20}],
            }
            body = {
                "v": 1,
                "status": 200,
                "model": "m",
                "new": new,
                "answer": answer,
                "usage": [{"input_tokens": 9}],
            }
            session.record("gateway:calls", json.dumps(body).encode())
