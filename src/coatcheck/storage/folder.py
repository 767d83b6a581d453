"""A store in a folder: `catalog.sqlite` and `journal` for small content, `blobs/` for large blobs, all under one
lock."""

from __future__ import annotations

import os
from pathlib import Path

from coatcheck.storage.database import NAME
from coatcheck.storage.disk import Disk, open_root
from coatcheck.storage.files import FileBlobs
from coatcheck.storage.sqlite import SqliteCatalog


def open_folder_store(root: Path, disk: Disk) -> tuple[FileBlobs, SqliteCatalog]:
    folder = open_root(root, "lock", NAME)
    try:
        catalog = SqliteCatalog(root, folder, disk)
    except BaseException:
        os.close(folder)
        raise
    try:
        blobs = FileBlobs(root, folder, disk, is_read_only=catalog.is_read_only)
        catalog.sync_copy = blobs.sync
        return blobs, catalog
    except BaseException:
        catalog.close()
        raise
