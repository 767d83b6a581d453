"""A closed store, even if another thread closes it during a call: the error is always
StoreClosed."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session
from coatcheck.errors import StoreClosed

pytestmark = pytest.mark.faults

LARGE = random.Random(33).randbytes(200_000)
CALLS: dict[str, Callable[[Session, int], object]] = {
    "put": lambda session, number: session.put(f"new {number}"),
    "put large": lambda session, number: session.put(LARGE + b"%d" % number),
    "put a stream": lambda session, number: session.put(io.BytesIO(LARGE * 8 + b"%d" % number)),
    "get": lambda session, number: session.get("small"),
    "get large": lambda session, number: session.get("large"),
    "list": lambda session, number: session.list(),
    "search": lambda session, number: session.search("small"),
    "verify": lambda session, number: session.store.verify(),
    "collect": lambda session, number: session.store.collect(),
}


def _call_until_error(
    name: str, session: Session, number: int, errors: list[Exception], ready: threading.Barrier
) -> None:
    try:
        CALLS[name](session, number)
        ready.wait()
        while True:
            number += 2
            CALLS[name](session, number)
    except Exception as error:  # noqa: BLE001 - the test checks it
        errors.append(error)


@pytest.mark.parametrize("name", CALLS)
def test_closing_while_other_threads_are_in_a_call_raises_store_closed_there(
    name: str, in_memory: Path, long_faults: bool
) -> None:
    for round_ in range(12 if long_faults else 5):
        store = coatcheck.open(in_memory / str(round_), durability="process")
        session = store.session("s", ttl=None)
        session.put("something small", name="small")
        session.put(LARGE, name="large")
        errors: list[Exception] = []
        ready = threading.Barrier(3)
        threads = [
            threading.Thread(target=_call_until_error, args=(name, session, number, errors, ready))
            for number in (0, 1)
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert [type(error) for error in errors] == [StoreClosed] * 2, errors


def test_a_stream_of_a_closed_store_raises_store_closed(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        stream = store.session("s").open(store.session("s").put(LARGE))
    with pytest.raises(StoreClosed):
        stream.read()


@pytest.mark.parametrize("url", ["memory:", "folder"])
def test_a_closed_store_opens_no_tenant(url: str, tmp_path: Path) -> None:
    with coatcheck.open(url if url == "memory:" else tmp_path / "store") as store:
        store.tenant("known")
    for name in ("known", "new"):
        with pytest.raises(StoreClosed):
            store.tenant(name)
