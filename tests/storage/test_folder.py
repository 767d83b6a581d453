"""The folder backend conforms to both protocols, with either durability."""

from pathlib import Path

from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog
from coatcheck.storage.disk import Disk
from coatcheck.storage.folder import open_folder_store
from coatcheck.testing import BlobStoreSuite, CatalogSuite


class _FolderBlobs(BlobStoreSuite):
    durable: bool

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        self.root = tmp_path / "store"
        blobs, catalog = open_folder_store(self.root, Disk(durable=self.durable))
        catalog.close()
        return blobs

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        with open(blobs.uri(blob).removeprefix("file://"), "r+b") as file:
            file.seek(offset)
            old = file.read(1)
            file.seek(offset)
            file.write(bytes([old[0] ^ 1]))
        return True

    def abandon_stage(self, blobs: BlobStore, size: int) -> bool:
        (self.root / "tmp" / "0123456789abcdef.raw").write_bytes(bytes(size))
        return True


class _FolderCatalog(CatalogSuite):
    durable: bool

    def make_catalog(self, tmp_path: Path) -> Catalog:
        blobs, catalog = open_folder_store(tmp_path / "store", Disk(durable=self.durable))
        blobs.close()
        return catalog


class TestPowerBlobs(_FolderBlobs):
    durable = True


class TestProcessBlobs(_FolderBlobs):
    durable = False


class TestPowerCatalog(_FolderCatalog):
    durable = True


class TestProcessCatalog(_FolderCatalog):
    durable = False
