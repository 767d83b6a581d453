"""Conformance suites for backends and adapters: subclass one, define how to create yours, and
pytest checks every guarantee of the protocol.

    class TestMyBlobs(BlobStoreSuite):
        def make_blobs(self, tmp_path):
            return MyBlobs(tmp_path)

A suite must pass as a whole: a subclass that overrides, deletes or skips one of its tests raises
TypeError. Only this part of the package needs pytest.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"coatcheck.testing.{suite}_suite" for suite in ("adapter", "blob", "catalog"))
)

from coatcheck.testing.adapter_suite import AdapterSuite  # noqa: E402 - the asserts of this import are rewritten
from coatcheck.testing.blob_suite import BlobStoreSuite  # noqa: E402 - likewise
from coatcheck.testing.catalog_suite import CatalogSuite  # noqa: E402 - likewise

__all__ = ["AdapterSuite", "BlobStoreSuite", "CatalogSuite"]
