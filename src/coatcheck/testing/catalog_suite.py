"""Tests that every `Catalog` must pass.

A catalog never reads blobs, so most tests use copies that do not exist: only the rows matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coatcheck.errors import Fenced, QuotaExceeded, StoreClosed
from coatcheck.ids import digest_of
from coatcheck.refs import Blob, Ref
from coatcheck.storage import (
    Catalog,
    Claimant,
    Entry,
    Freed,
    Limits,
    Note,
    Record,
    Row,
    SessionFilter,
    SessionInfo,
)
from coatcheck.testing.blob_suite import Suite


def entry(
    content: str = "",
    *,
    digest: str | None = None,
    session: str = "s",
    place: str = "place",
    ttl: float | None = None,
    parent: str | None = None,
    quota: int | None = None,
    created: float = 1.0,
    **about: Any,
) -> Entry:
    """Return a row for bytes in a blob store."""
    data = content.encode()
    digest = digest or digest_of(data)
    ref = Ref(
        digest,
        session,
        len(data),
        **{"media_type": "text/plain", "kind": "result"} | about,
        created=created,
    )
    return Entry(
        ref, Blob(digest, len(data), "raw", place, b""), SessionInfo(session, parent, ttl, quota)
    )


def inline(data: bytes, **about: Any) -> Entry:
    """Return a row with inline content for the catalog."""
    put = entry(data.decode(), **about)
    return replace(put, blob=Blob(digest_of(data), len(data)), content=data)


def session_of(catalog: Catalog, session_id: str) -> SessionInfo:
    (found,) = catalog.sessions(session_id)
    return found


class RecordSuite(Suite, suite=True):
    """The part of the catalog's suite about claims and records."""

    shared: ClassVar[bool] = True
    """Whether `make_catalog` with the same folder opens the same catalog again, like another
    process."""

    def make_catalog(self, tmp_path: Path) -> Catalog:
        raise NotImplementedError("define make_catalog to create your catalog")

    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Iterator[Catalog]:
        made = self.make_catalog(tmp_path)
        yield made
        made.close()

    @pytest.fixture
    def others(self, tmp_path: Path, catalog: Catalog) -> Iterator[Catalog]:
        """The same catalog, opened like another process."""
        if not self.shared:
            yield catalog
            return
        made = self.make_catalog(tmp_path)
        yield made
        made.close()

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


class CatalogSuite(RecordSuite, suite=True):
    """Subclass it and define `make_catalog`."""

    # Rows

    def test_rows_are_returned_as_saved_until_they_are_dropped(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        put = replace(entry("x", name="n"), seq=7)
        rows: list[Row] = [
            put.session,
            put.blob,
            put,
            *(Note(owner, key, b"v") for owner in ("", "s") for key in "ab"),
        ]

        def found(reader: Catalog) -> list[Row]:
            notes = [*reader.notes("", "a", "c"), *reader.notes("s", "a", "c")]
            return [
                *reader.sessions("s"),
                *(blob for blob, _ in reader.blobs()),
                *reader.refs("s"),
                *notes,
            ]

        catalog.change("saving", lambda: catalog.save(*rows))
        assert found(catalog) == found(others) == rows
        assert (
            catalog.refs("s", put.ref.artifact_id)
            == catalog.refs(digest=put.ref.artifact_id)
            == [put]
        )
        assert (
            catalog.refs("t") == catalog.refs("s", "0" * 64) == catalog.refs(digest="0" * 64) == []
        )
        changed = replace(put, ref=replace(put.ref, pinned=True, granted_by="g"), gone="expired")
        blob, session = replace(put.blob, place="new"), replace(put.session, ttl=5.0)
        catalog.change("saving", lambda: catalog.save(changed, blob, Note("s", "a", b"w"), session))
        assert others.refs("s") == [replace(changed, blob=blob, session=session)]
        assert [one.value for one in others.notes("s", "a", "b")] == [b"w"]
        catalog.change(
            "dropping",
            lambda: catalog.drop(put, put.blob, put.session, Note("", "a"), Note("", "missing")),
        )
        assert found(others) == [Note("", "b", b"v")]

    def test_notes_are_found_by_their_keys_in_either_order(self, catalog: Catalog) -> None:
        notes = [Note("", key, key.encode()) for key in ("a", "a/1", "a/2", "a0", "b")]
        catalog.change("saving", lambda: catalog.save(*notes[::-1]))
        assert catalog.notes("", "a/", "a0") == notes[1:3]
        assert catalog.notes("", "a", "c", newest=True) == notes[::-1]
        assert catalog.notes("", "a", "c", limit=2) == notes[:2]
        assert catalog.notes("", "a", "c", limit=1, newest=True) == notes[-1:]
        assert catalog.notes("nobody", "a", "c") == []

    def test_a_change_that_fails_changes_nothing_and_one_that_works_is_whole(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        def fail() -> None:
            catalog.save(SessionInfo("s"), Note("", "a", b"v"))
            assert catalog.session("s") == SessionInfo("s")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            catalog.change("failing", fail)
        assert catalog.session("s") is others.session("s") is None
        assert catalog.notes("", "a", "b") == []

        def count() -> int:
            number = 1 + sum(int(one.value) for one in catalog.notes("", "n", "o"))
            catalog.save(Note("", "n", str(number).encode()))
            return number

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(lambda _: catalog.change("counting", count), range(40))) == list(
                range(1, 41)
            )

    # Sessions

    def test_a_session_that_nobody_opened_is_none(self, catalog: Catalog) -> None:
        assert catalog.session("nobody") is None
        assert catalog.find("nobody") == []
        assert list(catalog.sessions()) == []

    def test_an_opened_session_is_returned_as_it_was_opened(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        info = SessionInfo("s", "parent", 60.5, 1000, created=5.0, used=7.0)
        catalog.open_session(info)
        assert catalog.session("s") == others.session("s") == info

    def test_opening_again_changes_parent_ttl_and_quota_alone(self, catalog: Catalog) -> None:
        catalog.put(entry("x", created=5.0))
        catalog.open_session(SessionInfo("s", "p", None, 99, created=1.0, used=1.0))
        assert catalog.session("s") == SessionInfo(
            "s", "p", None, 99, created=5.0, used=5.0, used_bytes=1
        )

    def test_of_several_processes_one_notes_a_collection_in_a_period(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        assert catalog.collected() is None
        assert catalog.note_collection(100.5, every=10.0)
        assert not others.note_collection(110.25, every=10.0)
        assert others.collected() == catalog.collected() == 100.5
        assert others.note_collection(110.5, every=10.0)
        assert catalog.note_collection(111.0)
        assert others.collected() == 111.0

    def test_every_session_is_listed_once(self, catalog: Catalog) -> None:
        names = {f"session {i}" for i in range(70)}
        for name in names:
            catalog.open_session(SessionInfo(name))
        assert sorted(info.session_id for info in catalog.sessions()) == sorted(names)

    def test_sessions_are_listed_in_pages_the_newest_first(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        for number, name in enumerate(["b", "a", "c", "\U0001f600", "\uffff", "a\0b", "%", "_"]):
            catalog.open_session(SessionInfo(name, created=float(number // 3)))
        every = sorted(
            catalog.sessions(), key=lambda info: (info.created, info.session_id), reverse=True
        )
        for reader in (catalog, others):
            found: list[SessionInfo] = []
            while page := reader.session_page(
                "", (found[-1].created, found[-1].session_id) if found else None, 3
            ):
                assert len(page) <= 3
                found += page
            assert found == every
            assert reader.session_page("", None, 100) == every

    def test_a_page_of_sessions_has_only_those_whose_ids_begin_with_the_prefix(
        self, catalog: Catalog
    ) -> None:
        names = ["ci-1", "ci-2", "CI-3", "c", "xci-4", "ci\0-5", "ci%", "ci_", "é-6"]
        for name in names:
            catalog.open_session(SessionInfo(name))
        for prefix in ("ci-", "ci", "ci\0", "ci%", "c", "é", "none", ""):
            found = {info.session_id for info in catalog.session_page(prefix, None, 100)}
            assert found == {name for name in names if name.startswith(prefix)}
        assert [info.session_id for info in catalog.session_page("ci-", None, 1)] == ["ci-2"]

    def test_a_page_of_sessions_has_only_those_that_pass_the_filter(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        rows = [
            ("a", None, 1.0),
            ("a-b", "a", 2.0),
            ("ab%", "gone", 3.0),
            ("é\0", "a-b", 4.0),
            ("x:1", None, 5.0),
        ]
        rows += [("x:2", "x:1", 6.0), ("a'c", "é\0", 7.0)]
        for name, parent, at in rows:
            catalog.open_session(SessionInfo(name, parent, created=at, used=at))
        filters = [
            SessionFilter(), SessionFilter(contains="b"), SessionFilter(contains="%"),
            SessionFilter(contains="\0"), SessionFilter(without=("x:", "ab")),
            SessionFilter(roots=True), SessionFilter(parents=("a", "é\0")),
            SessionFilter(parents=()), SessionFilter(used_after=4.0),
            SessionFilter(roots=True, contains="a", used_after=1.0),
        ]  # fmt: skip
        every = list(catalog.sessions())
        for reader in (catalog, others):
            for prefix in ("", "a", "x:", "é"):
                listed = {info.session_id for info in every if info.session_id.startswith(prefix)}
                for wanted in filters:
                    found = {
                        info.session_id for info in reader.session_page(prefix, None, 100, wanted)
                    }
                    passing = {info.session_id for info in every if wanted.passes(info, listed)}
                    assert found == passing & listed

    # Putting and finding

    def test_what_was_put_is_found_with_all_of_its_attributes(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        put = entry("x", name="n", tool="t", call_id="c", producer="planner",
                    parents=("a" * 64, "b" * 12), summary="line ☃", created=5.25, expires=99.5,
                    pinned=True, granted_by="g", codec="json", media_type="text/x", kind="log",
                    metadata_json='{"a":1}')  # fmt: skip
        assert catalog.put(put)
        for reader in (catalog, others):
            (found,) = reader.find("s")
            assert found.ref == put.ref
            assert found.ref.expires == 99.5
            assert found.blob == put.blob
            assert found.gone is None

    def test_a_put_opens_its_session_and_counts_it_as_used(self, catalog: Catalog) -> None:
        catalog.put(entry("x", created=5.0, ttl=60.0, parent="p", quota=100))
        catalog.put(entry("y", created=9.0, ttl=60.0, parent="p", quota=100))
        assert catalog.session("s") == SessionInfo(
            "s", "p", 60.0, 100, created=5.0, used=9.0, used_bytes=2
        )

    def test_each_artifact_counts_once_in_its_session(self, catalog: Catalog) -> None:
        catalog.put(entry("xyz", name="one"))
        catalog.put(entry("xyz", name="two"))
        assert session_of(catalog, "s").used_bytes == 3

    def test_a_session_finds_only_its_own(self, catalog: Catalog) -> None:
        catalog.put(entry("x", session="one", name="n"))
        assert catalog.find("two") == []
        assert catalog.find("two", prefix=digest_of(b"x")) == []
        assert catalog.find("two", name="n") == []

    def test_all_refs_are_found_newest_first_and_page_by_page(self, catalog: Catalog) -> None:
        for i in range(10):
            catalog.put(entry(str(i), created=float(i)))
        everything = catalog.find("s")
        assert [one.ref.created for one in everything] == [float(i) for i in reversed(range(10))]
        assert [one.seq for one in everything] == sorted(
            {one.seq for one in everything}, reverse=True
        )
        pages = [catalog.find("s", limit=4)]
        while pages[-1]:
            pages.append(catalog.find("s", before=pages[-1][-1].seq, limit=4))
        assert [one.seq for page in pages for one in page] == [one.seq for one in everything]

    def test_a_prefix_finds_the_newest_ref_of_each_artifact(self, catalog: Catalog) -> None:
        first, second, apart = ("abc" * 20 + "0000", "abc" * 20 + "0001", "abc" * 20 + "1000")
        for digest in (first, second, apart):
            for name in ("old", "new"):
                catalog.put(entry(digest=digest, name=name))
        for prefix in ("abcabcabcabc", "abc" * 20 + "000", first):
            found = catalog.find("s", prefix=prefix)
            assert {one.ref.artifact_id for one in found} == {
                d for d in (first, second, apart) if d.startswith(prefix)
            }
            assert {one.ref.name for one in found} == {"new"}
        assert catalog.find("s", prefix="abd" + "0" * 9) == []

    def test_many_prefixes_are_found_like_one_at_a_time(self, catalog: Catalog) -> None:
        for content, session in (("a", "s"), ("b", "s"), ("a", "t"), ("c", "t"), ("d", "stranger")):
            catalog.put(entry(content, session=session, name="old"))
            catalog.put(entry(content, session=session, name="new", expires=5.0))
        prefixes = [digest_of(text.encode())[:12] for text in "acde"]
        found = [
            one
            for each in ("s", "t")
            for prefix in prefixes
            for one in catalog.find(each, prefix=prefix)
        ]
        many = catalog.find_many(["s", "t", "nobody"], prefixes)
        assert sorted(many, key=lambda one: (one.ref.session_id, one.ref.artifact_id)) == sorted(
            found, key=lambda one: (one.ref.session_id, one.ref.artifact_id)
        )
        assert catalog.find_many(["s"], []) == catalog.find_many([], prefixes) == []

    def test_of_an_artifact_the_ref_that_lives_longest_is_found(self, catalog: Catalog) -> None:
        catalog.put(entry("x", name="for good"))
        catalog.put(entry("x", name="for a while", expires=50.0))
        catalog.put(entry("x", name="briefly", expires=10.0))
        (found,) = catalog.find("s", prefix=digest_of(b"x"))
        assert found.ref.name == "for good"

    def test_an_uneven_prefix_is_exact(self, catalog: Catalog) -> None:
        catalog.put(entry(digest="abcdef0123457" + "0" * 51))
        assert len(catalog.find("s", prefix="abcdef0123457")) == 1
        assert catalog.find("s", prefix="abcdef0123456") == []
        assert catalog.find("s", prefix="abcdef0123458") == []

    def test_ids_that_begin_alike_are_near_each_other(self, catalog: Catalog) -> None:
        first, second, apart = ("abc" * 4 + "0" * 52, "abc" * 4 + "1" * 52, "abc" * 3 + "f" * 55)
        for digest, session in (
            (first, "s"),
            (second, "parent"),
            (apart, "s"),
            (second, "stranger"),
        ):
            catalog.put(entry(digest=digest, session=session))
        assert catalog.near(["s"], [second]) == {first}
        assert catalog.near(["s", "parent", "nobody"], [first, apart]) == {first, second, apart}
        assert (
            catalog.near(["s", "parent"], ["0" * 64])
            == catalog.near([], [first])
            == catalog.near(["s"], [])
            == set()
        )

    @pytest.mark.parametrize("way", ["look", "put_inline"])
    def test_a_put_learns_which_ids_begin_alike(self, catalog: Catalog, way: str) -> None:
        first, second = ("abc" * 4 + "0" * 52, "abc" * 4 + "1" * 52)
        catalog.put(entry(digest=first))
        catalog.put(entry(digest=second, session="parent"))
        for lineage, ids in (
            (["s"], {first}),
            (["s", "parent"], {first, second}),
            (["new"], set()),
        ):
            digest = "abc" * 4 + f"{len(ids) + 2}" * 52
            if way == "look":
                known = catalog.look(digest, lineage, blob=True)
                assert set(known.ids) == ids
                assert [one.ref.artifact_id for one in known.entries] == [first][: len(ids)]
                assert known.blob is None
            else:
                put = entry(digest=digest, session=lineage[0])
                made, near = catalog.put_inline(digest, lineage, lambda: put, lambda one: False)  # noqa: B023
                assert (made, set(near) - {digest}) == (put, ids)
                catalog.remove(lineage[0], digest)

    def test_a_put_finds_the_blob_that_is_stored(self, catalog: Catalog) -> None:
        catalog.put(entry("x", session="other"))
        assert catalog.look(digest_of(b"x"), ["s"], blob=True).blob == entry("x").blob
        assert catalog.look(digest_of(b"x"), ["s"], blob=False).entries == []

    def test_what_a_session_has_is_not_put_again(self, catalog: Catalog, others: Catalog) -> None:
        catalog.put(entry("x", name="n"))
        catalog.find("s")
        digest, asked = digest_of(b"x"), []

        def is_repeat(known: Entry) -> bool:
            asked.append(known.ref.name)
            return known.ref.name == "n"

        def put(new: Entry, **options: Any) -> Entry:
            return catalog.put_inline(
                digest, [new.session.session_id], lambda: new, is_repeat, **options
            )[0]

        assert put(entry("x", name="n", created=5.0)).ref.created == 1.0
        assert asked == ["n"]
        assert put(entry("x", session="other")).session.session_id == "other"
        assert [one.ref.name for one in others.find("other", prefix=digest)] == [None]
        with pytest.raises(QuotaExceeded):
            catalog.put_inline(
                digest_of(b"abcdef"),
                ["small"],
                lambda: entry("abcdef", session="small", quota=5),
                is_repeat,
            )
        catalog.put(entry("x", session="brief", ttl=10.0, created=0.0))
        put(
            entry("x", session="brief", ttl=10.0, created=50.0, name="late"),
            limits=Limits(grace=5.0),
        )
        assert [(one.ref.name, one.gone) for one in catalog.find("brief")] == [("late", None)]

    def test_a_name_finds_every_ref_that_was_put_under_it(self, catalog: Catalog) -> None:
        for content in ("a", "b", "a", "c"):
            catalog.put(entry(content, name="n"))
        catalog.put(entry("d", name="N"))
        found = catalog.find("s", name="n")
        assert [one.ref.artifact_id for one in found] == [digest_of(c.encode()) for c in "caba"]
        assert catalog.find("s", name="n", limit=1) == found[:1]
        assert catalog.find("s", name="") == []

    def test_names_are_data_whatever_they_hold(self, catalog: Catalog) -> None:
        names = [
            "../../x",
            "a\0b",
            "'; DROP TABLE ref; --",
            "%",
            "\u202egnp",
            "n" * 10_000,
            "É",
            "E\u0301",
        ]
        for i, name in enumerate(names):
            catalog.put(entry(str(i), name=name, session=name, tool=name, call_id=name))
        for i, name in enumerate(names):
            (found,) = catalog.find(name, name=name)
            assert found.ref.artifact_id == digest_of(str(i).encode())
            assert (found.ref.name, found.ref.tool, found.ref.call_id) == (name, name, name)

    def test_inline_content_comes_when_it_is_asked_for(self, catalog: Catalog) -> None:
        data = b"x" * max(0, min(100, catalog.inline_limit))
        if catalog.inline_limit < 0:  # this catalog stores no content itself
            return
        catalog.put(inline(data, name="n"))
        ways: list[dict[str, Any]] = [{"prefix": digest_of(data)}, {"name": "n"}, {}]
        for how in ways:
            assert catalog.find("s", content=True, **how)[0].content == data
            assert catalog.find("s", **how)[0].content is None
        assert [(blob.digest, content) for blob, content in catalog.blobs()] == [
            (digest_of(data), data)
        ]
        assert catalog.uri_prefix

    def test_inline_content_replaces_what_is_stored(self, catalog: Catalog) -> None:
        if catalog.inline_limit < 4:
            return
        catalog.put(replace(inline(b"good"), content=b"rot!"))
        catalog.put(inline(b"good", session="other"))
        assert catalog.find("s", content=True)[0].content == b"good"

    def test_a_ref_that_says_nothing_new_is_not_doubled(self, catalog: Catalog) -> None:
        for created in (1.0, 2.0, 3.0):
            assert catalog.put(entry("x", name="n", created=created))
            assert catalog.put(entry("y", created=created))
        assert len(catalog.find("s", name="n")) == 1
        assert len(catalog.find("s")) == 2
        assert session_of(catalog, "s").used == 3.0

    @pytest.mark.parametrize(
        "new",
        [
            {"name": "other"},
            {"codec": "json"},
            {"tool": "t"},
            {"summary": "s"},
            {"kind": "log"},
            {"expires": 50.0},
        ],
        ids=lambda new: next(iter(new)),
    )
    def test_a_ref_that_says_something_new_is_added(
        self, catalog: Catalog, new: dict[str, Any]
    ) -> None:
        catalog.put(entry("x", name="n"))
        catalog.put(entry("x", **{"name": "n"} | new))
        assert len(catalog.find("s")) == 2

    def test_a_name_that_was_taken_meanwhile_is_taken_back(self, catalog: Catalog) -> None:
        for content in ("x", "y", "x"):
            catalog.put(entry(content, name="n"))
        assert catalog.find("s", name="n", limit=1)[0].ref.artifact_id == digest_of(b"x")

    def test_a_put_of_the_same_content_after_its_session_expired_leaves_the_catalog_sound(
        self, catalog: Catalog
    ) -> None:
        for at in (100.0, 1_000.0):
            catalog.put(entry("x", ttl=10.0, created=at), limits=Limits(grace=1.0))
        assert catalog.check(repair=False) == []
        assert [one.gone for one in catalog.find("s", prefix=digest_of(b"x"))] == [None]
        assert catalog.blob(digest_of(b"x")) is not None

    def test_a_put_that_is_looked_up_is_seen_and_can_be_confirmed(self, catalog: Catalog) -> None:
        catalog.put(entry("x"))
        assert len(catalog.look(digest_of(b"x"), ["s"], blob=False).entries) == 1
        catalog.confirm()
        assert len(catalog.look(digest_of(b"x"), ["s"], blob=False).entries) == 1

    # Blobs

    def test_a_blob_is_known_while_a_ref_holds_it(self, catalog: Catalog, others: Catalog) -> None:
        put = entry("x")
        assert catalog.blob(put.blob.digest) is None
        catalog.put(put)
        assert catalog.blob(put.blob.digest) == others.blob(put.blob.digest) == put.blob
        catalog.remove("s", put.blob.digest)
        assert others.blob(put.blob.digest) is None

    def test_all_refs_to_the_same_content_name_one_copy(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="first"))
        catalog.put(entry("x", place="second", session="other"))
        assert len({one.blob.place for s in ("s", "other") for one in catalog.find(s)}) == 1

    def test_making_everything_durable_changes_nothing(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        catalog.put(entry("x"))
        catalog.make_durable()
        assert [one.blob for one in others.find("s")] == [entry("x").blob]

    def test_a_healing_copy_replaces_the_one_that_is_known(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="first"))
        catalog.put(entry("x", place="second", session="other"), heal=True)
        assert {one.blob.place for s in ("s", "other") for one in catalog.find(s)} == {"second"}

    def test_reuse_takes_the_catalogs_own_copy(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="first"))
        assert catalog.put(entry("x", place="first", session="other"), reuse=True)
        assert len(catalog.find("other")) == 1

    def test_reuse_of_a_copy_that_is_gone_changes_nothing(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="second"))
        before = catalog.totals()
        assert not catalog.put(entry("x", place="first", session="other"), reuse=True)
        assert not catalog.put(entry("y", place="first", session="other"), reuse=True)
        assert catalog.totals() == before
        assert catalog.session("other") is None

    def test_every_blob_is_listed_once(self, catalog: Catalog) -> None:
        for i in range(70):
            catalog.put(entry(str(i), session=str(i % 3)))
            catalog.put(entry(str(i), session="all"))
        assert sorted(blob.digest for blob, _ in catalog.blobs()) == sorted(
            digest_of(str(i).encode()) for i in range(70)
        )

    def test_a_place_is_named_while_a_blob_has_it(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="here"))
        assert catalog.is_named("here")
        assert not catalog.is_named("there")
        catalog.remove("s", digest_of(b"x"))
        assert not catalog.is_named("here")

    def test_places_are_returned_for_known_blobs(self, catalog: Catalog) -> None:
        catalog.put(entry("x", place="here"))
        catalog.put(entry("y", place="there", session="other"))
        known = {digest_of(b"x"): "here", digest_of(b"y"): "there"}
        assert catalog.places([*known, "0" * 64]) == known
        assert catalog.places([]) == {}

    def test_what_went_cold_is_offered_once_for_each_time(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        def cold(before: float) -> list[str]:
            return [blob.digest for blob in catalog.cold(before)]

        for i in range(70):
            catalog.put(entry(str(i), place=str(i), created=float(i % 7)))
        catalog.put(entry("new", place="new", created=50.0))
        small = b"x" * max(0, catalog.inline_limit)
        if small:
            catalog.put(inline(small, created=0.0))
        digests = sorted(digest_of(str(i).encode()) for i in range(70))
        next(catalog.cold(10.0))  # an interrupted walk does not count
        assert sorted(cold(10.0)) == digests
        assert cold(10.0) == [blob.digest for blob in others.cold(10.0)] == []
        catalog.touch({}, {digests[0]: 20.0})
        assert cold(30.0) == [digests[0]]
        assert cold(60.0) == [digest_of(b"new")]

    def test_relocating_points_at_the_new_copy(self, catalog: Catalog) -> None:
        old = entry("x", place="first").blob
        catalog.put(entry("x", place="first"))
        new = replace(old, coding="zstd", place="second")
        assert catalog.relocate(old, new)
        assert catalog.blob(old.digest) == new
        assert catalog.find("s")[0].blob == new

    def test_relocating_loses_to_a_copy_that_came_meanwhile(self, catalog: Catalog) -> None:
        old = entry("x", place="first").blob
        catalog.put(entry("x", place="first"))
        catalog.put(entry("x", place="healed", session="other"), heal=True)
        assert not catalog.relocate(old, replace(old, place="second"))
        assert not catalog.relocate(
            replace(old, digest="0" * 64), replace(old, digest="0" * 64, place="second")
        )
        held = catalog.blob(old.digest)
        assert held is not None
        assert held.place == "healed"

    def test_use_is_counted_where_it_is_later(self, catalog: Catalog) -> None:
        catalog.put(entry("x", created=10.0))
        digest = digest_of(b"x")
        for at, expected in ((5.0, 10.0), (20.0, 20.0), (15.0, 20.0)):
            catalog.touch({"s": at, "nobody": at}, {digest: at, "0" * 64: at})
            session, blob = catalog.session("s"), catalog.blob(digest)
            assert session is not None
            assert session.used == expected
            assert blob is not None
            assert blob.used == expected
        assert catalog.session("nobody") is None

    def test_what_was_shown_adds_up_and_goes_with_the_session(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        catalog.put(entry("x"))
        digest = digest_of(b"x")
        catalog.touch({}, {}, {("s", digest): ((10, 20), (40, 50)), ("nobody", digest): ((0, 1),)})
        catalog.touch({}, {}, {("s", digest): ((15, 30),)})
        assert (
            catalog.shown("s", [digest])
            == others.shown("s", [digest])
            == {digest: ((10, 30), (40, 50))}
        )
        assert (
            catalog.shown("nobody", [digest])
            == catalog.shown("s", ["0" * 64])
            == catalog.shown("s", [])
            == {}
        )
        catalog.remove("s", digest)
        assert catalog.shown("s", [digest]) == {}

    def test_the_secret_stays_the_same(self, catalog: Catalog, others: Catalog) -> None:
        assert len(catalog.secret()) >= 16
        assert catalog.secret() == others.secret()

    # Quotas

    def test_a_put_over_the_sessions_quota_is_refused_and_changes_nothing(
        self, catalog: Catalog
    ) -> None:
        catalog.put(entry("12345678", quota=10))
        before = catalog.totals()
        with pytest.raises(QuotaExceeded):
            catalog.put(entry("abc", quota=10))
        assert catalog.totals() == before
        assert catalog.put(entry("ab", quota=10))

    def test_what_a_session_holds_already_needs_no_quota(self, catalog: Catalog) -> None:
        catalog.put(entry("1234567890", quota=10))
        assert catalog.put(entry("1234567890", quota=10, name="again"))

    def test_a_put_over_the_stores_quota_is_refused_and_changes_nothing(
        self, catalog: Catalog
    ) -> None:
        limits = Limits(store_quota=10)
        catalog.put(entry("12345678", session="one"), limits=limits)
        before = catalog.totals()
        with pytest.raises(QuotaExceeded):
            catalog.put(entry("abc", session="two"), limits=limits)
        assert catalog.totals() == before
        assert catalog.put(entry("12345678", session="two"), limits=limits), (
            "stored once, counted once"
        )

    def test_forgetting_gives_quota_back(self, catalog: Catalog) -> None:
        catalog.put(entry("1234567890", quota=10), limits=Limits(10))
        catalog.remove("s", digest_of(b"1234567890"))
        assert catalog.put(entry("abc", quota=10), limits=Limits(10))

    # Pins, removal, expiry

    def test_pinning_counts_the_refs_of_the_artifact(self, catalog: Catalog) -> None:
        catalog.put(entry("x", name="one"))
        catalog.put(entry("x", name="two"))
        catalog.put(entry("x", session="other"))
        assert catalog.pin("s", digest_of(b"x"), True) == 2
        assert {one.ref.pinned for one in catalog.find("s")} == {True}
        assert not catalog.find("other")[0].ref.pinned
        assert catalog.pin("s", digest_of(b"x"), False) == 2
        assert {one.ref.pinned for one in catalog.find("s")} == {False}
        assert (
            catalog.pin("s", digest_of(b"y"), True)
            == catalog.pin("nobody", digest_of(b"x"), True)
            == 0
        )

    def test_a_pin_covers_later_refs_to_the_artifact(self, catalog: Catalog) -> None:
        catalog.put(entry("x", name="one"))
        catalog.pin("s", digest_of(b"x"), True)
        catalog.put(entry("x", name="two"))
        catalog.put(entry("x", name="one"))
        assert {one.ref.pinned for one in catalog.find("s")} == {True}
        assert len(catalog.find("s")) == 3

    def test_removing_an_artifact_removes_all_refs_of_the_session_to_it(
        self, catalog: Catalog
    ) -> None:
        for name in ("one", "two"):
            catalog.put(entry("xyz", name=name))
        catalog.put(entry("other"))
        blob = entry("xyz").blob
        freed = catalog.remove("s", blob.digest)
        assert freed == Freed(2, 1, 3, (blob,))
        assert [one.ref.artifact_id for one in catalog.find("s")] == [digest_of(b"other")]
        assert session_of(catalog, "s").used_bytes == 5

    def test_what_another_session_holds_is_not_freed(self, catalog: Catalog) -> None:
        for session in ("one", "two"):
            catalog.put(entry("x", session=session))
        assert catalog.remove("one", digest_of(b"x")) == Freed(refs=1)
        assert catalog.blob(digest_of(b"x")) is not None
        assert catalog.remove("two", digest_of(b"x")).artifacts == 1

    def test_ending_a_session_removes_it_with_its_tombstones(self, catalog: Catalog) -> None:
        catalog.put(entry("x", ttl=1.0, created=0.0))
        catalog.expire(10.0, forget_before=0.0)
        catalog.put(entry("y", ttl=1.0, created=10.0))
        assert catalog.remove("s", end=True).refs == 1
        assert catalog.session("s") is None
        assert catalog.find("s") == []
        assert catalog.totals().tombstones == 0

    def test_removing_what_is_not_there_frees_nothing(self, catalog: Catalog) -> None:
        catalog.put(entry("x"))
        assert catalog.remove("s", digest_of(b"y")) == Freed()
        assert catalog.remove("nobody", digest_of(b"x")) == Freed()
        assert catalog.remove("nobody", end=True) == Freed()

    def test_a_session_that_expired_leaves_tombstones(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        put = entry("xyz", name="n", ttl=10.0, created=0.0)
        catalog.put(put)
        assert catalog.expire(9.0, forget_before=-100.0) == Freed()
        assert catalog.expire(10.0, forget_before=-100.0) == Freed(1, 1, 3, (put.blob,))
        assert others.blob(put.blob.digest) is None
        ways: list[dict[str, Any]] = [{"prefix": put.blob.digest}, {"name": "n"}, {}]
        for how in ways:
            (found,) = others.find("s", **how)
            assert found.gone == "expired"
            assert found.ref == put.ref

    def test_what_a_transcript_holds_for_a_session_is_lent_to_it(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        for content, session, by in (
            ("a", "transcript:1", "s"),
            ("b", "transcript:1", "s"),
            ("a", "transcript:2", "s"),
            ("c", "transcript:1", "other"),
            ("d", "not a transcript", "s"),
            ("e", "transcript:1", None),
        ):
            catalog.put(entry(content, session=session, granted_by=by, ttl=None))
        catalog.put(entry("f", session="s", ttl=1.0, created=0.0))
        catalog.expire(100.0, forget_before=50.0)
        a, b, c = (digest_of(text.encode()) for text in "abc")
        for one in (catalog, others):
            lent = [(each.session.session_id, each.ref.artifact_id) for each in one.lent("s")]
            assert sorted(lent) == sorted(
                [("transcript:1", a), ("transcript:1", b), ("transcript:2", a)]
            )
            assert [each.ref.artifact_id for each in one.lent("s", prefix=a[:12])] == [a]
            assert one.lent("s", prefix=c) == []
        if catalog.inline_limit >= 9:
            catalog.put(inline(b"held here", session="transcript:1", granted_by="s"))
            assert [
                one.content
                for one in catalog.lent("s", prefix=digest_of(b"held here"), content=True)
            ] == [b"held here"]

    def test_what_a_session_forgets_is_no_longer_lent_to_it(self, catalog: Catalog) -> None:
        for content in ("a", "b"):
            catalog.put(entry(content, session="transcript:1", granted_by="s", ttl=None))
        assert catalog.remove("s", digest_of(b"a")) == Freed()
        assert [one.ref.artifact_id for one in catalog.lent("s")] == [digest_of(b"b")]
        assert catalog.remove("s", end=True) == Freed()
        assert catalog.lent("s") == []
        assert len(catalog.find("transcript:1")) == 2

    def test_what_a_transcript_held_is_not_lent_after_it_ended(self, catalog: Catalog) -> None:
        catalog.put(entry("a", session="transcript:1", granted_by="s", ttl=None))
        catalog.remove("transcript:1", end=True)
        assert catalog.lent("s") == []

    def test_an_artifact_expires_by_its_own_time_too(self, catalog: Catalog) -> None:
        catalog.put(entry("x", expires=5.0, ttl=100.0, created=0.0))
        catalog.put(entry("y", expires=5.0, ttl=None, session="endless", created=0.0))
        catalog.put(entry("z", ttl=None, session="endless", created=0.0))
        assert catalog.expire(5.0, forget_before=-100.0).refs == 2
        assert [one.gone for one in catalog.find("endless")] == [None, "expired"]

    def test_what_is_pinned_does_not_expire(self, catalog: Catalog) -> None:
        catalog.put(entry("x", ttl=1.0, expires=1.0, created=0.0))
        catalog.pin("s", digest_of(b"x"), True)
        assert catalog.expire(100.0, forget_before=50.0) == Freed()
        assert catalog.find("s")[0].gone is None

    def test_a_dry_expiry_tells_the_same_and_changes_nothing(self, catalog: Catalog) -> None:
        catalog.put(entry("shared", session="dead", ttl=1.0, created=0.0))
        catalog.put(entry("shared", session="living", ttl=None))
        catalog.put(entry("single", session="dead", ttl=1.0, created=0.0))
        before = catalog.totals()
        would_free = catalog.expire(50.0, forget_before=-1.0, dry_run=True)
        assert catalog.totals() == before
        assert would_free == catalog.expire(50.0, forget_before=-1.0)
        assert (would_free.refs, would_free.artifacts, would_free.bytes) == (2, 1, 6)

    def test_old_tombstones_and_empty_sessions_are_forgotten(self, catalog: Catalog) -> None:
        catalog.put(entry("x", session="old", ttl=10.0, created=0.0))
        catalog.put(entry("y", session="recent", ttl=10.0, created=20.0))
        catalog.expire(50.0, forget_before=25.0)
        assert catalog.session("old") is None
        assert [one.gone for one in catalog.find("recent")] == ["expired"]

    def test_a_ref_that_lives_is_found_before_a_tombstone(self, catalog: Catalog) -> None:
        catalog.put(entry("x", name="endless"))
        catalog.put(entry("x", name="brief", expires=5.0))
        catalog.expire(5.0, forget_before=-1.0)
        (found,) = catalog.find("s", prefix=digest_of(b"x"))
        assert (found.gone, found.ref.name) == (None, "endless")

    def test_a_put_into_a_session_long_expired_buries_what_it_held(self, catalog: Catalog) -> None:
        catalog.put(entry("old", ttl=10.0, created=0.0))
        catalog.put(entry("kept", ttl=10.0, created=0.0))
        catalog.pin("s", digest_of(b"kept"), True)
        catalog.put(entry("new", ttl=10.0, created=15.0), limits=Limits(grace=5.0))
        gone = {one.ref.artifact_id: one.gone for one in catalog.find("s")}
        assert gone == {
            digest_of(b"old"): "expired",
            digest_of(b"kept"): None,
            digest_of(b"new"): None,
        }

    def test_a_put_within_the_grace_period_revives_what_the_session_held(
        self, catalog: Catalog
    ) -> None:
        catalog.put(entry("old", ttl=10.0, created=0.0))
        catalog.put(entry("new", ttl=10.0, created=14.0), limits=Limits(grace=5.0))
        assert {one.gone for one in catalog.find("s")} == {None}

    def test_putting_what_expired_brings_it_back(self, catalog: Catalog) -> None:
        catalog.put(entry("x", ttl=10.0, created=0.0))
        catalog.expire(50.0, forget_before=-1.0)
        catalog.put(entry("x", ttl=10.0, created=50.0))
        (found,) = catalog.find("s")
        assert found.gone is None

    def test_a_version_is_the_how_many_th_put_under_a_name(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        for i in (0, 1, 2, 0):
            catalog.put(entry(str(i), name="n", call_id="c"))
            catalog.put(entry(str(i), name="m"))
        catalog.put(entry("9", name="n", session="other"))
        catalog.lose(entry("1").blob)

        def versions(reader: Catalog, name: str) -> list[int]:
            return [reader.version("s", name, digest_of(str(i).encode())) for i in (0, 1, 2, 9)]

        for reader in (catalog, others):
            assert versions(reader, "n") == versions(reader, "m") == [4, 2, 3, 0]
            assert versions(reader, "nothing") == [0, 0, 0, 0]
        assert catalog.version("nobody", "n", digest_of(b"0")) == 0

    # Damage

    def test_puts_of_a_batch_are_seen_at_once_and_stay(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        with catalog.batch():
            catalog.put(entry("x"))
            with catalog.batch():
                catalog.put(entry("y"))
            assert len(others.find("s")) == 2

        def fail_inside() -> None:
            with catalog.batch():
                catalog.put(entry("z"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_inside()
        catalog.put(entry("w"))
        assert len(others.find("s")) == 4

    def test_a_lost_blob_leaves_tombstones_that_a_put_brings_back(self, catalog: Catalog) -> None:
        for session in ("one", "two"):
            catalog.put(entry("xyz", session=session, name="n"))
        blob = entry("xyz").blob
        assert catalog.lose(blob) == 2
        assert catalog.blob(blob.digest) is None
        assert [catalog.find(s)[0].gone for s in ("one", "two")] == ["damaged", "damaged"]
        catalog.put(entry("xyz", session="three", place="new"))
        for session in ("one", "two", "three"):
            (found,) = catalog.find(session)
            assert (found.gone, found.blob.place) == (None, "new")
        assert session_of(catalog, "one").used_bytes == 3
        assert catalog.check(repair=False) == []

    def test_a_put_that_brings_back_refs_of_its_own_session_counts_their_bytes_once(
        self, catalog: Catalog
    ) -> None:
        catalog.put(entry("xyz", name="one"))
        catalog.lose(entry("xyz").blob)
        catalog.put(entry("xyz", name="two"))
        assert [(one.ref.name, one.gone) for one in catalog.find("s")] == [
            ("two", None),
            ("one", None),
        ]
        assert session_of(catalog, "s").used_bytes == 3
        assert catalog.check(repair=False) == []

    def test_a_lost_blob_is_set_aside_as_long_as_its_refs_wait(
        self, catalog: Catalog, others: Catalog
    ) -> None:
        for session in ("one", "two"):
            catalog.put(entry("xyz", session=session))
        catalog.put(entry("sound"))
        blob = entry("xyz").blob
        catalog.lose(blob, until=100.0)
        for reader in (catalog, others):
            for one in (*reader.aside(), *reader.aside([blob.digest, digest_of(b"sound")])):
                assert (one.blob, one.until, one.refs) == (blob, 100.0, 2)
            assert len(reader.aside()) == len(reader.aside([blob.digest])) == 1
            assert reader.aside([digest_of(b"sound")]) == reader.aside([]) == []
        catalog.expire(99.0, forget_before=0.0)
        assert len(catalog.aside()) == 1
        catalog.put(entry("xyz", place="new"))
        assert [one.refs for one in catalog.aside()] in ([0], [])
        catalog.expire(99.0, forget_before=0.0)
        assert catalog.aside() == []

    def test_what_is_set_aside_is_kept_until_its_time_is_over(self, catalog: Catalog) -> None:
        for text in ("1", "2"):
            catalog.put(entry(text))
            catalog.lose(entry(text).blob, until=100.0 * int(text))
        catalog.expire(150.0, forget_before=0.0)
        assert [one.blob.digest for one in catalog.aside()] == [digest_of(b"2")]
        assert [one.gone for one in catalog.find("s")] == ["damaged", "damaged"]
        catalog.remove("s", end=True)
        catalog.expire(150.0, forget_before=0.0)
        assert catalog.aside() == [], "no ref is left"

    def test_sizes_that_agree_are_not_in_doubt_and_stay(self, catalog: Catalog) -> None:
        catalog.put(entry("xyz"))
        assert not catalog.doubtful_sizes()
        catalog.set_size(digest_of(b"xyz"), 3)
        assert catalog.check(repair=False) == []
        assert [one.ref.size_bytes for one in catalog.find("s")] == [3]

    def test_restoring_a_blob_brings_its_refs_back(self, catalog: Catalog) -> None:
        for session in ("one", "two"):
            catalog.put(entry("xyz", session=session, name="n"))
        blob = entry("xyz").blob
        assert catalog.restore(blob) == 0, "the blob is in use"
        catalog.lose(blob, until=100.0)
        assert catalog.restore(blob) == 2
        assert catalog.aside() == []
        for session in ("one", "two"):
            (found,) = catalog.find(session)
            assert (found.gone, found.blob.place) == (None, "place")
            assert session_of(catalog, session).used_bytes == 3
        assert catalog.totals().stored_bytes == 3
        assert catalog.check(repair=False) == []

    def test_restoring_a_blob_that_was_replaced_or_that_nobody_wants_changes_nothing(
        self, catalog: Catalog
    ) -> None:
        blob = entry("x", place="first").blob
        assert catalog.restore(blob) == 0
        assert catalog.blob(blob.digest) is None
        catalog.put(entry("x", place="first"))
        catalog.lose(blob, until=100.0)
        catalog.put(entry("x", place="healed"))
        assert catalog.restore(blob) == 0
        assert [known.place for known, _ in catalog.blobs(blob.digest)] == ["healed"]
        assert list(catalog.blobs(digest_of(b"another"))) == []

    def test_losing_content_that_is_sound_changes_nothing(self, catalog: Catalog) -> None:
        if catalog.inline_limit < 5:  # this catalog stores no content itself
            return
        put = inline(b"sound")
        catalog.put(put)
        assert catalog.lose(put.blob, until=100.0) == 0
        assert catalog.aside() == []
        (found,) = catalog.find("s", content=True)
        assert (found.gone, found.content) == (None, b"sound")
        assert list(catalog.blobs(put.blob.digest)) == [(put.blob, b"sound")]

    def test_losing_a_copy_that_was_replaced_changes_nothing(self, catalog: Catalog) -> None:
        blob = entry("x", place="first").blob
        catalog.put(entry("x", place="first"))
        catalog.put(entry("x", place="healed", session="other"), heal=True)
        assert catalog.lose(blob) == 0
        assert catalog.find("s")[0].gone is None

    def test_a_sound_catalog_has_no_problems(self, catalog: Catalog) -> None:
        for i in range(6):
            catalog.put(
                entry(str(i), session=str(i % 2), name=f"name {i % 3}", ttl=10.0, created=float(i))
            )
            catalog.put(
                entry("shared", session=str(i % 2), name=str(i), ttl=10.0, created=float(i))
            )
        catalog.pin("0", digest_of(b"shared"), True)
        catalog.remove("1", digest_of(b"shared"))
        catalog.lose(entry("2").blob)
        catalog.expire(14.0, forget_before=0.0)
        catalog.put(entry("2", session="new"))
        for repair in (False, True, False):
            assert catalog.check(repair=repair) == []

    # The whole catalog

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
