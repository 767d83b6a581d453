"""Tests of removal, expiry and damage that every `Catalog` must pass."""

from __future__ import annotations

from typing import Any

import pytest

from coatcheck.ids import digest_of
from coatcheck.storage import Catalog, Freed, Limits
from coatcheck.testing.catalog_case import CatalogCase, entry, inline, session_of


class UpkeepSuite(CatalogCase, suite=True):
    """Pins, removal, expiry and damage."""

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
