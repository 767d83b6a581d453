"""What the tests of a catalog have in common: rows to put, and the catalog as two processes see it.

A catalog never reads blobs, so most tests use copies that do not exist: only the rows matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coatcheck.ids import digest_of
from coatcheck.refs import Blob, Ref
from coatcheck.storage import Catalog, Entry, SessionInfo
from coatcheck.testing.suite import Suite


class CatalogCase(Suite, suite=True):
    """Catalogs for tests. A backend defines `make_catalog`."""

    shared: ClassVar[bool] = True
    """Whether `make_catalog` with the same folder opens the same catalog again, like another
    process."""

    def make_catalog(self, tmp_path: Path) -> Catalog:
        raise NotImplementedError("define make_catalog to create your catalog")

    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Iterator[Catalog]:
        made = self.make_catalog(tmp_path)
        yield made
        made.close()

    @pytest.fixture
    def others(self, tmp_path: Path, catalog: Catalog) -> Iterator[Catalog]:
        """The same catalog, opened like another process."""
        if not self.shared:
            yield catalog
            return
        made = self.make_catalog(tmp_path)
        yield made
        made.close()


def entry(
    content: str = "",
    *,
    digest: str | None = None,
    session: str = "s",
    place: str = "place",
    ttl: float | None = None,
    parent: str | None = None,
    quota: int | None = None,
    created: float = 1.0,
    **about: Any,
) -> Entry:
    """Return a row for bytes in a blob store."""
    data = content.encode()
    digest = digest or digest_of(data)
    ref = Ref(
        digest,
        session,
        len(data),
        **{"media_type": "text/plain", "kind": "result"} | about,
        created=created,
    )
    return Entry(
        ref, Blob(digest, len(data), "raw", place, b""), SessionInfo(session, parent, ttl, quota)
    )


def inline(data: bytes, **about: Any) -> Entry:
    """Return a row with inline content for the catalog."""
    put = entry(data.decode(), **about)
    return replace(put, blob=Blob(digest_of(data), len(data)), content=data)


def session_of(catalog: Catalog, session_id: str) -> SessionInfo:
    (found,) = catalog.sessions(session_id)
    return found
