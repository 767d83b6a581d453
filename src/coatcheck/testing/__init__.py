"""Conformance suites for backends: subclass one, define how to create yours, and pytest checks
every guarantee of the protocol.

    class TestMyBlobs(BlobStoreSuite):
        def make_blobs(self, tmp_path):
            return MyBlobs(tmp_path)

A suite must pass as a whole: a subclass that overrides, deletes or skips one of its tests raises
TypeError. Only this part of the package needs pytest.
"""

import pytest

for _suite in ("blob", "catalog", "put", "record", "session", "upkeep"):
    pytest.register_assert_rewrite(f"coatcheck.testing.{_suite}_suite")

from coatcheck.testing.blob_suite import BlobStoreSuite  # noqa: E402 - its asserts are rewritten
from coatcheck.testing.catalog_suite import CatalogSuite  # noqa: E402 - likewise

__all__ = ["BlobStoreSuite", "CatalogSuite"]
