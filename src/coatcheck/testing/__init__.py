"""Conformance suites for backends: subclass one, say how to make your backend, and pytest proves every promise of the
protocol.

    class TestMyBlobs(BlobStoreSuite):
        def make_blobs(self, tmp_path):
            return MyBlobs(tmp_path)

A suite cannot be cut down: a subclass that overrides, deletes or skips one of its tests is a TypeError. This is the
only part of the package that needs pytest.
"""

import pytest

pytest.register_assert_rewrite(
    "coatcheck.testing.blob_suite", "coatcheck.testing.catalog_suite", "coatcheck.testing.record_suite"
)

from coatcheck.testing.blob_suite import BlobStoreSuite  # noqa: E402 - asserts are rewritten on import, from here on
from coatcheck.testing.catalog_suite import CatalogSuite  # noqa: E402 - likewise

__all__ = ["BlobStoreSuite", "CatalogSuite"]
