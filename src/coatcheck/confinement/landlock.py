"""Landlock: a process restricts itself to a few files, for the rest of its life. Linux 5.13 or
newer.

It imports little: workers of programs load this file alone, each time that one starts.
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than this file to run
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

EXECUTE: Final = 1 << 0
READ: Final = 1 << 2
LIST: Final = 1 << 3
REMOVE: Final = 1 << 5

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # equal on every architecture
_NO_NEW_PRIVILEGES: Final = 38


def restrict(rights: Mapping[str, int]) -> bool:
    """Restrict this process to these rights on files, and to no TCP; return whether that worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    ruleset = _refused_by(version)
    size = ctypes.c_size_t(len(ruleset))
    rules = libc.syscall(_CREATE_RULESET, ruleset, size, ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for path, allowed in rights.items():
            try:
                at = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            rule = struct.pack("=Qi", allowed, at)
            failed = libc.syscall(_ADD_RULE, rules, ctypes.c_int(1), rule, ctypes.c_uint32(0))
            os.close(at)
            if failed:
                return False
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(rules)


def _refused_by(version: int) -> bytes:
    """Everything that a version of Landlock can refuse, as its system call takes it."""
    file_rights = 16
    if version < 5:
        file_rights = {1: 13, 2: 14}.get(version, 15)
    ruleset = struct.pack("=Q", (1 << file_rights) - 1)
    if version >= 4:
        ruleset += struct.pack("=Q", 0b11)  # TCP: bind, connect
    if version >= 6:
        ruleset += struct.pack("=Q", 0b11)  # abstract sockets and signals of others
    return ruleset
