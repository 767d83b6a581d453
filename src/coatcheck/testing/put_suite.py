"""Tests of putting and finding that every `Catalog` must pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coatcheck.errors import QuotaExceeded
from coatcheck.ids import digest_of
from coatcheck.storage import Catalog, Entry, Limits, SessionInfo
from coatcheck.testing.catalog_case import CatalogCase, entry, inline, session_of


class PutSuite(CatalogCase, suite=True):
    """Puts, look-ups, copies and quotas."""

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
