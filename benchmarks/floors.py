"""The floors: the least that a program must do for the same guarantee, in plain code."""

from __future__ import annotations

import hashlib
import itertools
import os
import sqlite3
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Writer:
    """sha256, write and rename; if durable, with a sync of the file and of the folder."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._durable = durable
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def put(self, data: bytes) -> None:
        name = hashlib.sha256(data).hexdigest()
        file = os.open("new", _NEW, 0o600, dir_fd=self._folder)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
            if self._durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.rename("new", name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        if self._durable:
            os.fsync(self._folder)

    def close(self) -> None:
        os.close(self._folder)


class Files:
    """Files that are read whole and hashed."""

    def __init__(self, folder: Path, contents: list[bytes]) -> None:
        self._folder = folder
        self.paths: list[str] = []
        for data in contents:
            self.add(data)

    def add(self, data: bytes) -> str:
        """Write one more file, and return its path."""
        path = self._folder / str(len(self.paths))
        path.write_bytes(data)
        self.paths.append(str(path))
        return self.paths[-1]

    def get(self, path: str) -> str:
        with open(path, "rb", buffering=0) as file:
            return hashlib.sha256(file.read()).hexdigest()


class Index:
    """Digests in an indexed table of SQLite: hash some bytes, and look them up."""

    def __init__(self, path: Path, contents: list[bytes], others: int = 10_000) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("CREATE TABLE blob (digest BLOB NOT NULL UNIQUE, place TEXT NOT NULL)")
        made = ((os.urandom(32), "") for _ in range(others))
        known = ((hashlib.sha256(data).digest(), "") for data in contents)
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO blob VALUES (?, ?)", itertools.chain(made, known))
        self._db.execute("COMMIT")

    def find(self, data: bytes) -> object:
        digest = hashlib.sha256(data).digest()
        return self._db.execute("SELECT place FROM blob WHERE digest = ?", (digest,)).fetchone()

    def close(self) -> None:
        self._db.close()
