"""The fleet's backend keeps the promises of both protocols, on a real SeaweedFS and a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog
from coatcheck.storage.fleet import open_fleet, parse
from coatcheck.storage.postgres_catalog import PostgresCatalog
from coatcheck.storage.s3 import S3Blobs
from coatcheck.testing import BlobStoreSuite, CatalogSuite
from tests.backends import Fleet


class TestS3Blobs(BlobStoreSuite):
    @pytest.fixture(autouse=True)
    def _place(self, fleet: Fleet) -> Iterator[None]:
        self.url = fleet.new_url()
        self.catalogs: list[Catalog] = []
        yield
        for catalog in self.catalogs:
            catalog.close()

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        blobs, catalog, _ = open_fleet(parse(self.url), patience=10)
        self.catalogs.append(catalog)
        return blobs

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        assert isinstance(blobs, S3Blobs)
        path = blobs._path(blob)
        data = bytearray(bytes(obstore.get(blobs._bucket, path).bytes()))
        data[offset] ^= 1
        obstore.put(blobs._bucket, path, bytes(data))
        blobs._cache.clear()
        return True


class TestPostgresCatalog(CatalogSuite):
    @pytest.fixture(autouse=True)
    def _place(self, fleet: Fleet) -> None:
        self.url = fleet.new_url()

    def make_catalog(self, tmp_path: Path) -> Catalog:
        blobs, catalog, _ = open_fleet(parse(self.url), patience=10)
        blobs.close()
        assert isinstance(catalog, PostgresCatalog)
        return catalog
