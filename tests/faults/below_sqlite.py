"""Everything that SQLite writes, seen from below: a VFS around SQLite's own.

The standard library's `sqlite3` uses a shared SQLite library, whose VFS can be wrapped through
ctypes: no compiler, no other process, and the product's code and connections are unchanged. A
listener is called before each write, truncation, sync and removal of a file; it may do other things
first, and it may refuse. Reads, locks and shared memory pass through.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from typing import Any, Protocol

OK, FAILED, FULL = 0, 10, 13
_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_SLEEP = CFUNCTYPE(c_int, c_void_p, c_int)
_CLOSE = CFUNCTYPE(c_int, c_void_p)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
# Flags of an open: the database, its rollback journal or its WAL.
_LASTING = 0x100 | 0x800 | 0x80000


class Listener(Protocol):
    """Sees what SQLite does to files. `do` does it; without calling it, nothing happens."""

    def opened(self, path: str) -> None: ...

    def write(self, path: str, offset: int, data: bytes, do: Callable[[int], int]) -> int:
        """Write. `do` takes the number of bytes to write. Returns an SQLite result code."""

    def truncate(self, path: str, size: int, do: Callable[[], int]) -> int: ...

    def sync(self, path: str, do: Callable[[], int]) -> int: ...

    def remove(self, path: str, do: Callable[[], int], *, sync: bool) -> int:
        """Remove a file. With `sync`, the folder is synced too."""

    def sleep(self) -> bool:
        """Called where SQLite would sleep until another connection is ready. Return False to let it
        sleep."""


class _Methods(Structure):
    _fields_ = [
        ("version", c_int), ("close", _CLOSE), ("read", c_void_p), ("write", _WRITE), ("truncate", _TRUNCATE),
        ("sync", _SYNC), *((f"rest{number}", c_void_p) for number in range(13)),
    ]  # fmt: skip


class _File(Structure):
    _fields_ = [("methods", POINTER(_Methods))]


class _Vfs(Structure):
    _fields_ = [
        ("version", c_int), ("size_of_file", c_int), ("longest_path", c_int), ("next", c_void_p), ("name", c_char_p),
        ("data", c_void_p), ("open", _OPEN), ("delete", _DELETE), ("access", c_void_p), ("full_path", c_void_p),
        ("dlopen", c_void_p), ("dlerror", c_void_p), ("dlsym", c_void_p), ("dlclose", c_void_p),
        ("randomness", c_void_p), ("sleep", _SLEEP), *((f"rest{number}", c_void_p) for number in range(6)),
    ]  # fmt: skip


class WrappedVfs:
    """SQLite's default VFS, with a listener. One for the whole process, since SQLite keeps pointers
    to it."""

    def __init__(self) -> None:
        # AttributeError where its SQLite cannot be reached.
        library: Any = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = c_void_p
        library.sqlite3_vfs_find.argtypes = [c_char_p]
        library.sqlite3_vfs_register.argtypes = [c_void_p, c_int]
        self._library = library
        self._listener: Listener | None = None
        self._plain_address = library.sqlite3_vfs_find(None)
        self._plain = _Vfs.from_address(self._plain_address)
        self._paths: dict[int, str] = {}
        self._tables: dict[int, _Methods] = {}  # by the address of the table that each replaces
        self._own = _Vfs.from_buffer_copy(self._plain)
        self._own.next = None
        self._own.name = b"coatcheck-wrapped"
        self._own.open = _OPEN(self._open)
        self._own.delete = _DELETE(self._delete)
        self._own.sleep = _SLEEP(self._sleep)
        library.sqlite3_vfs_register(ctypes.addressof(self._own), 0)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Let connections that are opened inside the context report to the listener."""
        assert self._listener is None
        self._listener = listener
        self._library.sqlite3_vfs_register(ctypes.addressof(self._own), 1)
        try:
            yield
        finally:
            self._library.sqlite3_vfs_register(self._plain_address, 1)
            self._listener = None

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: int | None) -> int:
        code = int(self._plain.open(self._plain_address, name, file, flags, out))
        if code == OK and name and self._listener is not None:
            path = os.fsdecode(ctypes.string_at(name))
            if flags & _LASTING:
                own = _File.from_address(file)
                address = ctypes.addressof(own.methods.contents)
                table = self._tables.get(address) or self._wrapped(own.methods.contents, address)
                self._paths[file] = path
                own.methods = ctypes.pointer(table)
                self._listener.opened(path)
        return code

    def _wrapped(self, plain: _Methods, address: int) -> _Methods:
        """Return a table of methods that reports to the listener and calls the plain ones."""
        table = _Methods.from_buffer_copy(plain)

        def close(file: int) -> int:
            self._paths.pop(file, None)
            return int(plain.close(file))

        def write(file: int, data: int, size: int, offset: int) -> int:
            listener = self._listener
            if listener is None:
                return int(plain.write(file, data, size, offset))
            piece = ctypes.string_at(data, size)
            return _answer(
                lambda: listener.write(
                    self._paths[file],
                    offset,
                    piece,
                    lambda size: int(plain.write(file, data, size, offset)),
                )
            )

        def truncate(file: int, size: int) -> int:
            listener = self._listener
            if listener is None:
                return int(plain.truncate(file, size))
            return _answer(
                lambda: listener.truncate(
                    self._paths[file], size, lambda: int(plain.truncate(file, size))
                )
            )

        def sync(file: int, flags: int) -> int:
            listener = self._listener
            if listener is None:
                return int(plain.sync(file, flags))
            return _answer(
                lambda: listener.sync(self._paths[file], lambda: int(plain.sync(file, flags)))
            )

        table.close, table.write = _CLOSE(close), _WRITE(write)
        table.truncate, table.sync = _TRUNCATE(truncate), _SYNC(sync)
        self._tables[address] = table
        return table

    def _delete(self, vfs: int, name: bytes, sync: int) -> int:
        def do() -> int:
            return int(self._plain.delete(self._plain_address, name, sync))

        listener = self._listener
        return (
            do()
            if listener is None
            else _answer(lambda: listener.remove(os.fsdecode(name), do, sync=bool(sync)))
        )

    def _sleep(self, vfs: int, microseconds: int) -> int:
        if self._listener is not None and self._listener.sleep():
            return microseconds
        return int(self._plain.sleep(self._plain_address, microseconds))


def _answer(call: Callable[[], int]) -> int:
    """Return the result of a call. An exception cannot pass through SQLite: it becomes a failed
    call."""
    try:
        return call()
    except OSError as error:
        return FULL if error.errno == errno.ENOSPC else FAILED
    except BaseException:  # noqa: BLE001 - the caller's next step raises again
        return FAILED


_wrapped: WrappedVfs | None = None


def wrapped_vfs() -> WrappedVfs:
    """Return the VFS of this process. Raises `AttributeError` if the SQLite of `sqlite3` cannot be
    reached."""
    global _wrapped
    if _wrapped is None:
        _wrapped = WrappedVfs()
    return _wrapped
