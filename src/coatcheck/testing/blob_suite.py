"""Tests that every `BlobStore` must pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from coatcheck.errors import Damaged, NotFound
from coatcheck.ids import digest_of
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore
from coatcheck.storage.frames import FRAME
from coatcheck.testing.suite import Suite

SIZES = (0, 1, 4096, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME + 17)


class BlobStoreSuite(Suite, suite=True):
    """Subclass it and define `make_blobs`. If possible, also define the methods that bypass the
    store."""

    shared: ClassVar[bool] = True
    """Whether `make_blobs` with the same folder opens the same blobs again, like another
    process."""

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        raise NotImplementedError("define make_blobs to create your blob store")

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        """Change the stored byte at this offset without the store noticing. Return False if that is
        impossible."""
        return False

    def abandon_stage(self, blobs: BlobStore, size: int) -> bool:
        """Leave what a process leaves behind if it dies with `size` bytes staged. Return False if
        that is nothing."""
        return False

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[BlobStore]:
        made = self.make_blobs(tmp_path)
        yield made
        made.close()

    @pytest.fixture
    def others(self, tmp_path: Path, blobs: BlobStore) -> Iterator[BlobStore]:
        """The same blobs, opened like another process."""
        if not self.shared:
            yield blobs
            return
        made = self.make_blobs(tmp_path)
        yield made
        made.close()

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_published_reads_back_whole(self, blobs: BlobStore, size: int) -> None:
        data = noise(size)
        blob = publish(blobs, data)
        assert (blob.digest, blob.size) == (digest_of(data), size)
        assert blobs.read(blob, 0, size) == data

    @pytest.mark.parametrize("size", SIZES)
    def test_every_range_is_the_slice_of_the_whole(self, blobs: BlobStore, size: int) -> None:
        data = noise(size)
        check_ranges(blobs, publish(blobs, data), data)

    def test_a_copy_that_is_kept_open_reads_like_any_other(self, blobs: BlobStore) -> None:
        data = noise(600_000)
        with blobs.opened(publish(blobs, data)) as read:
            assert (read(0, 600_000), read(262_140, 10), read(600_000, 1)) == (
                data,
                data[262_140:262_150],
                b"",
            )

    def test_a_stage_knows_digest_and_size_whatever_the_pieces_are(self, blobs: BlobStore) -> None:
        data = noise(FRAME + 5)
        for step in (1000, FRAME, FRAME + 3):
            pieces = [data[at : at + step] for at in range(0, len(data), step)]
            with blobs.stage(iter([b"", *pieces, b""])) as staged:
                assert (staged.digest, staged.size) == (digest_of(data), len(data))
                assert blobs.read(staged.publish(), 0, len(data)) == data

    def test_a_digest_that_the_caller_computed_is_taken(self, blobs: BlobStore) -> None:
        data = noise(5000)
        with blobs.stage([data], digest_of(data)) as staged:
            blob = staged.publish()
        assert blob.digest == digest_of(data)
        assert blobs.read(blob, 0, 5000) == data

    def test_nobody_finds_what_is_staged_and_not_published(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        with blobs.stage([noise(FRAME)]):
            assert list(blobs.places()) == list(others.places()) == []

    def test_what_is_not_published_is_gone_when_the_stage_ends(self, blobs: BlobStore) -> None:
        with blobs.stage([noise(FRAME)]):
            pass
        assert list(blobs.places()) == []
        assert blobs.leftovers(remove=False) == 0

    def test_a_source_that_fails_leaves_nothing(self, blobs: BlobStore) -> None:
        def broken() -> Iterator[bytes]:
            yield noise(FRAME)
            raise InterruptedError("the source failed")

        with pytest.raises(InterruptedError), blobs.stage(broken()):
            pytest.fail("a stage began although its source failed")
        assert list(blobs.places()) == []
        assert blobs.leftovers(remove=False) == 0

    def test_a_caller_that_fails_before_publishing_leaves_nothing(self, blobs: BlobStore) -> None:
        with pytest.raises(InterruptedError), blobs.stage([noise(10)]):
            raise InterruptedError("the caller failed")
        assert list(blobs.places()) == []
        assert blobs.leftovers(remove=False) == 0

    def test_another_process_reads_what_was_published(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        data = noise(FRAME + 1)
        blob = publish(blobs, data)
        assert others.read(blob, 0, len(data)) == data

    def test_each_copy_has_a_place_of_its_own_and_lives_apart(self, blobs: BlobStore) -> None:
        data = noise(5000)
        one, two = publish(blobs, data), publish(blobs, data)
        assert one.digest == two.digest
        assert one.place != two.place
        blobs.remove(one)
        assert blobs.read(two, 0, 5000) == data
        assert [copy.place for copy in blobs.places()] == [two.place]

    @pytest.mark.parametrize("size", SIZES)
    def test_a_copy_holds_its_own_bytes_and_no_others(self, blobs: BlobStore, size: int) -> None:
        data = noise(size)
        blob = publish(blobs, data)
        assert blobs.holds(blob, data)
        assert not blobs.holds(blob, data + b"x")
        if size:
            assert not blobs.holds(blob, data[:-1])
            assert not blobs.holds(blob, data[:-1] + bytes([data[-1] ^ 1]))

    def test_a_damaged_copy_does_not_hold_its_bytes(self, blobs: BlobStore) -> None:
        data = noise(FRAME + 9)
        blob = publish(blobs, data)
        damaged = self.flip_byte(blobs, blob, FRAME)
        try:
            assert blobs.holds(blob, data) is not damaged
        except Damaged:
            assert damaged

    def test_a_copy_that_was_removed_is_not_found(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        blob = publish(blobs, noise(5000))
        blobs.remove(blob)
        for store in (blobs, others):
            with pytest.raises(NotFound):
                store.read(blob, 0, 1)
            with pytest.raises(NotFound):
                store.holds(blob, bytes(5000))

    def test_removing_what_is_gone_is_no_error(self, blobs: BlobStore) -> None:
        blob = publish(blobs, noise(5000))
        blobs.remove(blob)
        blobs.remove(blob)
        assert list(blobs.places()) == []

    def test_places_lists_every_copy_with_digest_coding_and_place_alone(
        self, blobs: BlobStore
    ) -> None:
        copies = [publish(blobs, noise(100 + i // 2)) for i in range(8)]
        expected = {Blob(copy.digest, 0, copy.coding, copy.place) for copy in copies}
        listed = list(blobs.places())
        assert len(listed) == 8
        assert set(listed) == expected

    def test_a_compressed_copy_gives_the_same_answer_to_every_read(self, blobs: BlobStore) -> None:
        data = b"a line that comes again and again\n" * 30_000
        blob = publish(blobs, data)
        stage = blobs.compress(blob)
        if stage is None:  # this backend gains nothing from compression
            return
        with stage as staged:
            smaller = staged.publish()
        assert (smaller.digest, smaller.size, smaller.frames) == (
            blob.digest,
            blob.size,
            blob.frames,
        )
        assert smaller.place != blob.place
        check_ranges(blobs, smaller, data)
        assert blobs.read(blob, 0, 100) == data[:100], "the original copy stays until it is removed"
        blobs.remove(blob)
        check_ranges(blobs, smaller, data)

    def test_a_compressed_copy_that_is_not_published_is_gone(self, blobs: BlobStore) -> None:
        blob = publish(blobs, b"again and again\n" * 30_000)
        stage = blobs.compress(blob)
        if stage is not None:
            with stage:
                pass
        assert [copy.place for copy in blobs.places()] == [blob.place]
        assert blobs.leftovers(remove=False) == 0

    def test_what_has_nothing_to_gain_is_not_compressed(self, blobs: BlobStore) -> None:
        assert blobs.compress(publish(blobs, noise(FRAME))) is None

    def test_sweeping_removes_a_copy(self, blobs: BlobStore) -> None:
        blob = publish(blobs, noise(5000))
        assert blobs.sweep(listed(blobs, blob))
        with pytest.raises(NotFound):
            blobs.read(blob, 0, 1)

    def test_a_dry_sweep_says_so_and_removes_nothing(self, blobs: BlobStore) -> None:
        data = noise(5000)
        blob = publish(blobs, data)
        assert blobs.sweep(listed(blobs, blob), remove=False)
        assert blobs.read(blob, 0, 5000) == data

    def test_sweeping_what_is_gone_answers_no(self, blobs: BlobStore) -> None:
        blob = publish(blobs, noise(5000))
        blobs.remove(blob)
        assert not blobs.sweep(blob)

    def test_a_copy_whose_row_is_not_written_yet_is_not_swept(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        data = noise(5000)
        with blobs.stage([data]) as staged:
            blob = staged.publish()
            for store in (blobs, others):
                assert not store.sweep(listed(store, blob), remove=False)
                assert not store.sweep(listed(store, blob))
            assert blobs.read(blob, 0, 5000) == data
        assert others.sweep(listed(others, blob)), "the protection ends with the stage"

    def test_a_copy_in_quarantine_can_be_taken_back_or_discarded(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        data = noise(5000)
        blob = publish(blobs, data)
        if not blobs.quarantine(listed(blobs, blob), 1_000.9):
            assert list(blobs.quarantined()) == []
            assert not blobs.take_back(blob)
            assert blobs.read(blob, 0, 5000) == data
            return
        assert list(others.places()) == []
        (held,) = others.quarantined()
        assert (held.blob.digest, held.blob.place, int(held.since)) == (
            blob.digest,
            blob.place,
            1_000,
        )
        assert held.size >= 5000
        assert not blobs.quarantine(blob, 2_000), "it is there already"
        assert others.take_back(held.blob)
        assert blobs.read(blob, 0, 5000) == data
        assert not blobs.take_back(blob)
        assert blobs.quarantine(blob, 3_000)
        blobs.discard(blob)
        blobs.discard(blob)
        assert list(others.quarantined()) == []
        assert not blobs.take_back(blob)

    def test_a_copy_whose_row_is_not_written_yet_is_not_put_in_quarantine(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        with blobs.stage([noise(5000)]) as staged:
            blob = staged.publish()
            assert not others.quarantine(listed(others, blob), 1_000)

    def test_what_was_fetched_ahead_reads_the_same_and_a_missing_copy_is_no_error_yet(
        self, blobs: BlobStore
    ) -> None:
        first, second, gone = (noise(size) for size in (5000, FRAME + 9, 10))
        kept = [publish(blobs, data) for data in (first, second, gone)]
        blobs.remove(kept[2])
        blobs.prefetch([(blob, 0, blob.size) for blob in kept])
        assert [blobs.read(blob, 0, blob.size) for blob in kept[:2]] == [first, second]

    def test_a_sound_store_has_no_leftovers(self, blobs: BlobStore) -> None:
        publish(blobs, noise(5000))
        assert blobs.leftovers(remove=True) == 0

    def test_a_sound_store_has_nothing_foreign(self, blobs: BlobStore) -> None:
        publish(blobs, noise(5000))
        with blobs.stage([noise(10)]):
            assert list(blobs.foreign()) == []

    def test_a_stage_in_progress_is_no_leftover(self, blobs: BlobStore, others: BlobStore) -> None:
        data = noise(5000)
        with blobs.stage([data]) as staged:
            assert others.leftovers(remove=False) == 0
            others.leftovers(remove=True)
            blob = staged.publish()
        assert blobs.read(blob, 0, 5000) == data

    def test_what_a_crashed_stage_left_is_counted_and_removed(self, blobs: BlobStore) -> None:
        expected = 777 if self.abandon_stage(blobs, 777) else 0
        assert blobs.leftovers(remove=True, is_named=lambda place: True) == 0, "a row names it"
        assert blobs.leftovers(remove=False) == expected
        assert blobs.leftovers(remove=True) == expected
        assert blobs.leftovers(remove=False) == 0

    @pytest.mark.parametrize("size", [1, 5000, FRAME, 2 * FRAME + 9])
    def test_a_flipped_byte_is_noticed_by_every_read_that_touches_its_frame(
        self, blobs: BlobStore, size: int
    ) -> None:
        data = noise(size)
        blob, twin = publish(blobs, data), publish(blobs, data)
        if not self.flip_byte(blobs, blob, size - 1):
            assert blobs.read(blob, 0, size) == data
            return
        last = (size - 1) // FRAME * FRAME
        for offset, length in ((0, size), (size - 1, 1), (last, 1)):
            with pytest.raises(Damaged):
                blobs.read(blob, offset, length)
        if last:
            assert blobs.read(blob, 0, last) == data[:last]
        assert blobs.read(twin, 0, size) == data

    def test_a_damaged_copy_is_not_compressed_into_a_sound_one(self, blobs: BlobStore) -> None:
        data = b"again and again\n" * 30_000
        blob = publish(blobs, data)
        if blobs.compress(blob) is not None and self.flip_byte(blobs, blob, len(data) - 1):
            stage = blobs.compress(blob)
            assert stage is not None
            with pytest.raises(Damaged), stage:
                pytest.fail("damaged bytes were staged")
        assert [copy.place for copy in blobs.places()] == [blob.place]

    def test_many_threads_publish_the_same_and_different_bytes(self, blobs: BlobStore) -> None:
        contents = [noise(2000 + i % 4) for i in range(32)]
        with ThreadPoolExecutor(8) as pool:
            copies = list(pool.map(lambda data: publish(blobs, data), contents))
        assert len({copy.place for copy in copies}) == 32
        assert [blobs.read(copy, 0, copy.size) for copy in copies] == contents

    def test_removing_one_copy_never_disturbs_publishing_another(
        self, blobs: BlobStore, others: BlobStore
    ) -> None:
        data = noise(3000)

        def publish_and_remove(store: BlobStore) -> bool:
            for _ in range(20):
                blob = publish(store, data)
                if store.read(blob, 0, 3000) != data:
                    return False
                store.remove(blob)
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(publish_and_remove, (blobs, others, blobs, others)))
        assert list(blobs.places()) == []

    def test_the_uri_tells_where_the_copy_is(self, blobs: BlobStore) -> None:
        blob = publish(blobs, noise(5000))
        assert ":" in blobs.uri(blob)
        assert blob.digest in blobs.uri(blob)


def publish(blobs: BlobStore, data: bytes) -> Blob:
    with blobs.stage([data]) as staged:
        return staged.publish()


def listed(blobs: BlobStore, blob: Blob) -> Blob:
    """Return the copy as `places` lists it, which is all that a sweep sees."""
    return next(copy for copy in blobs.places() if copy.place == blob.place)


def check_ranges(blobs: BlobStore, blob: Blob, data: bytes) -> None:
    size = len(data)
    edges = {
        0,
        1,
        size - 1,
        size,
        size + 1,
        *(at + d for at in range(FRAME, size + 1, FRAME) for d in (-1, 0, 1)),
    }
    for offset in sorted(edge for edge in edges if edge >= 0):
        for length in (0, 1, 7, FRAME, size + 10):
            assert blobs.read(blob, offset, length) == data[offset : offset + length], (
                offset,
                length,
            )


def noise(size: int) -> bytes:
    """Return incompressible bytes, always the same for the same size."""
    return random.Random(size).randbytes(size)
