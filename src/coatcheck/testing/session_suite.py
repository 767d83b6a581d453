"""Tests of rows, changes and sessions that every `Catalog` must pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest

from coatcheck.storage import Catalog, Note, Row, SessionFilter, SessionInfo
from coatcheck.testing.catalog_case import CatalogCase, entry


class SessionSuite(CatalogCase, suite=True):
    """Rows, changes and sessions."""

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
        for prefix, wanted in product(("", "a", "x:", "é"), filters):
            expected = _passing(list(catalog.sessions()), prefix, wanted)
            for reader in (catalog, others):
                page = reader.session_page(prefix, None, 100, wanted)
                assert {info.session_id for info in page} == expected


def _passing(sessions: list[SessionInfo], prefix: str, wanted: SessionFilter) -> set[str]:
    listed = [info for info in sessions if info.session_id.startswith(prefix)]
    ids = {info.session_id for info in listed}
    return {info.session_id for info in listed if wanted.passes(info, ids)}
