"""The memory backend conforms to both protocols."""

from pathlib import Path

from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog
from coatcheck.storage.memory import MemoryBlobs, MemoryCatalog
from coatcheck.testing import BlobStoreSuite, CatalogSuite


class TestMemoryBlobs(BlobStoreSuite):
    shared = False

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        return MemoryBlobs()

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        assert isinstance(blobs, MemoryBlobs)
        held, data = blobs._copies[blob.place]
        blobs._copies[blob.place] = (
            held,
            data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :],
        )
        return True


class TestMemoryCatalog(CatalogSuite):
    shared = False

    def make_catalog(self, tmp_path: Path) -> Catalog:
        return MemoryCatalog()
