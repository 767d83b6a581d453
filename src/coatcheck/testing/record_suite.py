"""Tests of claims and records that every `Catalog` must pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from coatcheck.errors import Fenced
from coatcheck.ids import digest_of
from coatcheck.storage import Catalog, Claimant, Limits, Record, SessionInfo
from coatcheck.testing.catalog_case import CatalogCase, entry, session_of


class RecordSuite(CatalogCase, suite=True):
    """Claims and records."""

    def test_each_claim_has_a_larger_token_and_the_newest_is_returned(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        assert catalog.claimant("s") is None
        tokens = [
            (catalog, others)[i % 2].claim(SessionInfo("s"), f"holder {i}", at=float(i))
            for i in range(6)
        ]
        assert tokens == sorted(set(tokens))
        assert (
            catalog.claimant("s") == others.claimant("s") == Claimant(tokens[-1], "holder 5", 5.0)
        )
        assert catalog.claimant("other") is None

    def test_a_claim_with_an_empty_holder_gives_it_up(self, catalog: Catalog) -> None:
        token = catalog.claim(SessionInfo("s"), "a", at=1.0)
        assert catalog.claim(SessionInfo("s"), "", at=2.0, instead_of=token) > token
        assert catalog.claimant("s") is None
        with pytest.raises(Fenced):
            catalog.record(SessionInfo("s"), "hot", b"late", at=3.0, token=token)

    def test_tokens_grow_even_if_a_session_ends_and_starts_again(self, catalog: Catalog) -> None:
        old = catalog.claim(SessionInfo("s"), "a", at=1.0)
        catalog.remove("s", end=True)
        assert catalog.claimant("s") is None
        with pytest.raises(Fenced):
            catalog.record(SessionInfo("s"), "hot", b"late", at=2.0, token=old)
        assert catalog.session("s") is None
        assert catalog.claim(SessionInfo("s"), "b", at=3.0) > old
        with pytest.raises(Fenced):
            catalog.record(SessionInfo("s"), "hot", b"late", at=4.0, token=old)

    def test_a_claim_instead_of_one_that_is_not_the_newest_changes_nothing(
        self, catalog: Catalog
    ) -> None:
        for wrong in (1, 99):
            with pytest.raises(Fenced):
                catalog.claim(SessionInfo("s"), "a", at=1.0, instead_of=wrong)
        assert catalog.session("s") is None
        first = catalog.claim(SessionInfo("s"), "a", at=1.0, instead_of=0)
        with pytest.raises(Fenced):
            catalog.claim(SessionInfo("s"), "b", at=2.0, instead_of=0)
        assert catalog.claimant("s") == Claimant(first, "a", 1.0)
        assert catalog.claim(SessionInfo("s"), "b", at=2.0, instead_of=first) > first

    def test_a_claim_that_waits_for_an_idle_holder_changes_nothing_before(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        first = catalog.claim(SessionInfo("s"), "a", at=100.0, idle=inf)
        catalog.record(SessionInfo("s"), "hot", b"x", at=105.0, token=first)
        with pytest.raises(Fenced):
            others.claim(SessionInfo("s"), "b", at=114.9, idle=10.0)
        assert others.claimant("s") == Claimant(first, "a", 105.0)
        again = others.claim(SessionInfo("s"), "a", at=106.0, idle=inf)
        last = others.claim(SessionInfo("s"), "b", at=116.0, idle=10.0)
        assert first < again < last
        catalog.claim(SessionInfo("s"), "", at=117.0, instead_of=last)
        assert catalog.claim(SessionInfo("s"), "c", at=117.0, idle=inf) > last

    def test_of_many_that_wait_for_an_idle_holder_one_gets_the_claim(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        def claimed(number: int) -> bool:
            try:
                return bool(
                    (catalog, others)[number % 2].claim(
                        SessionInfo("s"), str(number), at=1.0, idle=inf
                    )
                )
            except Fenced:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(claimed, range(16))) == 1

    def test_records_are_numbered_and_returned_as_written(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        token = catalog.claim(SessionInfo("s"), "a", at=1.0)
        assert catalog.record(SessionInfo("s"), "x", b"one", at=2.5) == 1
        assert others.record(SessionInfo("s"), "x", b"two\x00\xff", at=3.0, token=token) == 2
        assert catalog.record(SessionInfo("s"), "☃", b"", at=4.0) == 1
        assert catalog.record(SessionInfo("other"), "x", b"theirs", at=4.0) == 1
        both = [Record(1, 2.5, None, b"one"), Record(2, 3.0, token, b"two\x00\xff")]
        for reader in (catalog, others):
            assert reader.records("s", "x") == both
            assert reader.records("s", "x", newest=True) == both[::-1]
            assert reader.records("s", "☃") == [Record(1, 4.0, None, b"")]
            assert reader.records("s", "nothing") == reader.records("nobody", "x") == []
            assert reader.series("s") == ["x", "☃"]
            assert reader.series("nobody") == []

    def test_records_are_found_by_number_from_either_end(self, catalog: Catalog) -> None:
        for i in range(1, 11):
            catalog.record(SessionInfo("s"), "x", str(i).encode(), at=1.0)

        def numbers(**asked: Any) -> list[int]:
            return [one.seq for one in catalog.records("s", "x", **asked)]

        assert numbers(after=7) == [8, 9, 10]
        assert numbers(before=3) == [1, 2]
        assert numbers(after=3, before=6, newest=True) == [5, 4]
        assert numbers(limit=2) == [1, 2]
        assert numbers(limit=2, newest=True) == [10, 9]
        assert numbers(after=10) == numbers(limit=0) == numbers(after=6, before=7) == []

    def test_the_first_records_of_many_series_are_read_at_once(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        wanted = [f"x{i}" for i in range(300)]
        for i in range(0, 300, 100):
            catalog.record(SessionInfo("s"), f"x{i}", str(i).encode(), at=1.0)
            catalog.record(SessionInfo("s"), f"x{i}", b"later", at=2.0)
        catalog.record(SessionInfo("other"), "x1", b"theirs", at=1.0)
        catalog.record(SessionInfo("s"), "not asked for", b"", at=1.0)
        for reader in (catalog, others):
            assert reader.first_records("s", wanted) == {
                f"x{i}": Record(1, 1.0, None, str(i).encode()) for i in range(0, 300, 100)
            }
            assert reader.first_records("s", []) == reader.first_records("nobody", wanted) == {}
        for _ in range(3):
            catalog.record(SessionInfo("s"), "x0", b"newest", at=3.0, keep=1)
        assert catalog.first_records("s", ["x0"]) == {"x0": Record(5, 3.0, None, b"newest")}

    def test_several_records_are_written_together_or_not_at_all(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        catalog.record(SessionInfo("s"), "x", b"first", at=1.0)
        given = [("x", b"second", None), ("y", b"one", 1), ("x", b"third", 2), ("y", b"two", 1)]
        assert others.record_all(SessionInfo("s"), given, at=2.0) == [2, 1, 3, 2]
        for reader in (catalog, others):
            assert [(one.seq, one.body) for one in reader.records("s", "x")] == [
                (2, b"second"),
                (3, b"third"),
            ]
            assert [(one.seq, one.body) for one in reader.records("s", "y")] == [(2, b"two")]
        token = catalog.claim(SessionInfo("s"), "a", at=3.0)
        with pytest.raises(Fenced):
            catalog.record_all(SessionInfo("s"), given, at=4.0, token=token + 1)
        assert len(others.records("s", "x")) == 2

    def test_only_so_many_records_are_kept_as_asked_and_numbers_go_on(
        self, catalog: Catalog
    ) -> None:
        for i in range(1, 6):
            assert catalog.record(SessionInfo("s"), "x", b"x", at=1.0, keep=2) == i
        catalog.record(SessionInfo("s"), "y", b"y", at=1.0)
        assert [one.seq for one in catalog.records("s", "x")] == [4, 5]
        assert catalog.record(SessionInfo("s"), "x", b"x", at=1.0, keep=1) == 6
        assert [one.seq for one in catalog.records("s", "x")] == [6]
        assert len(catalog.records("s", "y")) == 1

    def test_a_writer_that_lost_its_claim_writes_nothing(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        old = catalog.claim(SessionInfo("s"), "a", at=1.0)
        catalog.record(SessionInfo("s"), "hot", b"first", at=2.0, token=old)
        new = others.claim(SessionInfo("s"), "b", at=3.0)
        for token in (old, new + 1, 0):
            with pytest.raises(Fenced):
                catalog.record(SessionInfo("s"), "hot", b"late", at=9.0, token=token, keep=1)
        assert [one.body for one in others.records("s", "hot")] == [b"first"]
        assert session_of(catalog, "s").used == 3.0
        assert catalog.claimant("s") == Claimant(new, "b", 3.0)
        others.record(SessionInfo("s"), "hot", b"second", at=4.0, token=new)
        others.record(SessionInfo("s"), "hot", b"not the claim's", at=5.0, keep=3)
        assert catalog.claimant("s") == Claimant(new, "b", 4.0)
        assert [one.token for one in catalog.records("s", "hot")] == [old, new, None]

    def test_a_claim_or_record_makes_and_uses_its_session(self, catalog: Catalog) -> None:
        info = SessionInfo("s", "parent", 60.0, 99)
        catalog.claim(info, "a", at=5.0)
        assert catalog.session("s") == replace(info, created=5.0, used=5.0)
        catalog.record(info, "x", b"x", at=7.0)
        assert catalog.session("s") == replace(info, created=5.0, used=7.0)
        catalog.record(SessionInfo("t", ttl=3.0), "x", b"x", at=7.0)
        assert catalog.session("t") == SessionInfo("t", ttl=3.0, created=7.0, used=7.0)

    def test_records_and_claims_go_with_their_session(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        catalog.put(entry("x"))
        token = catalog.claim(SessionInfo("s"), "a", at=1.0)
        catalog.record(SessionInfo("s"), "hot", b"state", at=2.0, token=token)
        catalog.record(SessionInfo("other"), "hot", b"theirs", at=2.0)
        catalog.remove("s", digest_of(b"x"))
        catalog.remove("s")
        assert len(others.records("s", "hot")) == 1
        catalog.remove("s", end=True)
        assert others.records("s", "hot") == []
        assert others.series("s") == []
        catalog.open_session(SessionInfo("s"))
        assert others.records("s", "hot") == []
        assert others.claimant("s") is None
        assert len(others.records("other", "hot")) == 1

    def test_records_stay_until_their_session_has_expired(self, catalog: Catalog) -> None:
        brief, endless = SessionInfo("brief", ttl=10.0), SessionInfo("endless")
        for info in (brief, endless):
            catalog.record(info, "x", b"x", at=100.0)
        catalog.expire(109.0, forget_before=0.0)
        assert len(catalog.records("brief", "x")) == 1
        catalog.expire(111.0, forget_before=111.0, dry_run=True)
        assert len(catalog.records("brief", "x")) == 1
        catalog.expire(111.0, forget_before=0.0)
        assert catalog.records("brief", "x") == []
        assert catalog.session("brief") is not None
        catalog.expire(112.0, forget_before=111.0)
        assert catalog.session("brief") is None
        assert len(catalog.records("endless", "x")) == 1

    @pytest.mark.parametrize("how", ["put", "record", "claim"])
    def test_a_session_that_is_used_beyond_expiry_and_grace_has_lost_its_records(
        self, catalog: Catalog, how: str
    ) -> None:
        info = SessionInfo("s", ttl=10.0)

        def use(at: float) -> None:
            if how == "put":
                catalog.put(entry("new", ttl=10.0, created=at), limits=Limits(grace=5.0))
            elif how == "record":
                catalog.record(info, "y", b"new", at=at, grace=5.0)
            else:
                catalog.claim(info, "a", at=at, grace=5.0)

        catalog.record(info, "x", b"old", at=100.0)
        token = catalog.claim(info, "a", at=100.0)
        use(114.0)
        assert len(catalog.records("s", "x")) == 1
        use(129.0)
        assert catalog.records("s", "x") == []
        if how != "claim":
            assert catalog.claimant("s") == Claimant(token, "a", 100.0)
            assert catalog.record(info, "x", b"new", at=130.0, token=token) == 1

    def test_many_writers_lose_no_record_and_share_no_token(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        def write(number: int) -> tuple[int, int]:
            with_ = (catalog, others)[number % 2]
            token = with_.claim(SessionInfo("claimed"), f"holder {number}", at=1.0)
            return token, with_.record(SessionInfo("s"), "x", str(number).encode(), at=1.0)

        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(write, range(40)))
        assert len({token for token, _ in done}) == 40
        assert sorted(seq for _, seq in done) == list(range(1, 41))
        assert sorted(int(one.body) for one in catalog.records("s", "x")) == list(range(40))

    def test_claims_and_records_leave_a_catalog_sound(self, catalog: Catalog) -> None:
        for i in range(100):
            catalog.record(SessionInfo(str(i % 3)), "x", bytes(i * 50), at=1.0, keep=30)
        catalog.claim(SessionInfo("1"), "a", at=1.0)
        catalog.remove("2", end=True)
        for repair in (False, True, False):
            assert catalog.check(repair=repair) == []
        before = catalog.records("1", "x")
        catalog.compact()
        assert catalog.records("1", "x") == before
