"""Tests that every `Catalog` must pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coatcheck.errors import StoreClosed
from coatcheck.ids import digest_of
from coatcheck.storage import Catalog, SessionInfo
from coatcheck.testing.catalog_case import entry, session_of
from coatcheck.testing.put_suite import PutSuite
from coatcheck.testing.record_suite import RecordSuite
from coatcheck.testing.session_suite import SessionSuite
from coatcheck.testing.upkeep_suite import UpkeepSuite


class CatalogSuite(SessionSuite, PutSuite, RecordSuite, UpkeepSuite, suite=True):
    """Subclass it and define `make_catalog`."""

    def test_totals_count_each_blob_once_and_each_ref(self, catalog: Catalog) -> None:
        catalog.put(entry("xyz", session="one"))
        catalog.put(entry("xyz", session="two"))
        catalog.put(entry("1", session="brief", ttl=1.0, created=0.0))
        catalog.expire(5.0, forget_before=-1.0)
        totals = catalog.totals()
        assert (totals.sessions, totals.refs, totals.artifacts, totals.tombstones) == (3, 2, 1, 1)
        assert (totals.stored_bytes, totals.referenced_bytes) == (3, 6)

    def test_compacting_keeps_all_there_is(self, catalog: Catalog) -> None:
        for i in range(20):
            catalog.put(entry(str(i), name="n"))
        catalog.remove("s", digest_of(b"3"))
        before = catalog.find("s"), catalog.totals()
        catalog.compact()
        assert (catalog.find("s"), catalog.totals()) == before

    def test_every_change_is_seen_by_others_at_once(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        digest = digest_of(b"x")
        catalog.put(entry("x", name="n"))
        assert len(others.find("s", name="n")) == 1
        others.pin("s", digest, True)
        assert catalog.find("s")[0].ref.pinned
        catalog.open_session(SessionInfo("s", ttl=77.0))
        assert session_of(others, "s").ttl == 77.0
        others.remove("s", digest)
        assert catalog.find("s") == []
        catalog.put(entry("x"))
        assert others.blob(digest) is not None

    def test_many_threads_lose_and_double_nothing(self, catalog: Catalog, others: Catalog) -> None:
        def put(number: int) -> bool:
            return (catalog, others)[number % 2].put(
                entry(str(number // 2), name=f"name {number // 2}")
            )

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(put, range(80)))
        found = catalog.find("s")
        assert sorted(one.ref.artifact_id for one in found) == sorted(
            digest_of(str(i).encode()) for i in range(40)
        )
        assert len({one.seq for one in found}) == 40

    def test_a_closed_catalog_says_so(self, tmp_path: Path) -> None:
        catalog = self.make_catalog(tmp_path)
        catalog.put(entry("x"))
        catalog.close()
        catalog.close()
        for use in (
            lambda: catalog.find("s"), lambda: catalog.session("s"),
            lambda: catalog.put(entry("y")), lambda: catalog.totals(), lambda: catalog.remove("s"),
            lambda: catalog.blob("0" * 64), lambda: catalog.claim(SessionInfo("s"), "a", at=1.0),
            lambda: catalog.records("s", "x"),
        ):  # fmt: skip
            with pytest.raises(StoreClosed):
                use()
