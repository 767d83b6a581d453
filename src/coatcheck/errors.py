"""The errors of Coatcheck, as one tree.

    CoatcheckError
    ├── InvalidArgument            an argument is invalid
    │   ├── InvalidPointer         not a pointer, or its fragment does not exist
    │   ├── ProgramFailed          a program ended with an error
    │   └── UnsupportedValue       the value's type cannot be stored exactly
    ├── NotFound                   no such artifact in this session
    │   └── Expired                the artifact's time to live is over
    ├── AmbiguousPointer           the prefix matches several artifacts of the session
    ├── LimitExceeded
    │   ├── TooLarge               over the size cap of one artifact
    │   ├── QuotaExceeded          over the quota of the session or the store
    │   └── BudgetExceeded         over the budget of a prompt, or the size is unknown
    ├── Fenced                     the session was claimed by another holder
    ├── MissingExtra               an optional dependency is not installed
    ├── UpstreamFailed             a wrapped MCP server does not answer
    └── StoreError                 the store itself
        ├── Damaged                stored bytes do not match their digest
        ├── StoreFull              no space left on the store's device
        ├── StoreUnavailable       cannot be opened, read or written at the moment
        ├── UnsupportedFormat      made by a newer or a development version of Coatcheck
        └── StoreClosed            used after close()

Each class has a stable `code`; `CODES` maps it to an HTTP status, an exit code and an MCP
(JSON-RPC) error. Messages may change between releases; classes and codes do not.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple


class CoatcheckError(Exception):
    """The root of the tree. `message` says what happened, `hint` what to do about it, each in one
    line."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidArgument(CoatcheckError, ValueError):
    """`instead` has the arguments of a read that would be answered, if there are any."""

    code = "invalid_argument"
    instead: Mapping[str, Any] = MappingProxyType({})


class InvalidPointer(InvalidArgument):
    code = "invalid_pointer"
    default_hint = "a pointer is 'art:' and at least 12 hex characters"


class ProgramFailed(InvalidArgument):
    """A program ended with an error. `printed` is what it printed until then, `kind` and `detail`
    are the name and the message of the exception, if it raised one, and `line` is its line."""

    code = "program_failed"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        printed: str = "",
        kind: str = "",
        detail: str = "",
        line: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.printed, self.kind, self.detail, self.line = printed, kind, detail, line


class UnsupportedValue(InvalidArgument, TypeError):
    code = "unsupported_value"
    default_hint = (
        "store str, bytes, JSON values, dataclasses, pydantic models, a Path or a binary stream"
    )


class NotFound(CoatcheckError, LookupError):
    code = "not_found"
    default_hint = "list the session's artifacts to see what exists"


class Expired(NotFound):
    code = "expired"
    default_hint = "run the tool again, or pin artifacts that must stay"


class AmbiguousPointer(CoatcheckError, LookupError):
    """`candidates` has a longer, unique pointer for each artifact that matches the prefix."""

    code = "ambiguous_pointer"

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message, hint="use one of: " + ", ".join(candidates[:8]))
        self.candidates = tuple(candidates)


class LimitExceeded(CoatcheckError):
    code = "limit_exceeded"


class TooLarge(LimitExceeded):
    code = "too_large"


class QuotaExceeded(LimitExceeded):
    code = "quota_exceeded"
    default_hint = "forget artifacts that are not needed, end old sessions, or raise the quota"


class BudgetExceeded(LimitExceeded):
    """`violations` lists each limit that was exceeded or could not be checked."""

    code = "budget_exceeded"
    default_hint = "send less, or raise the budget"

    def __init__(self, message: str, violations: Sequence[Any], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.violations = tuple(violations)


class Fenced(CoatcheckError):
    code = "fenced"
    default_hint = "nothing was written; claim the session again, or leave it to its current holder"


class MissingExtra(CoatcheckError, ImportError):
    """Takes the name of the extra: `MissingExtra("s3")`."""

    code = "missing_extra"

    def __init__(self, extra: str) -> None:
        super().__init__(
            f"this needs the extra '{extra}'", hint=f"pip install 'coatcheck[{extra}]'"
        )


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the `ImportError` of an import inside into a `MissingExtra`."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(extra) from error


class UpstreamFailed(CoatcheckError):
    code = "upstream_failed"
    default_hint = "try again; the server's stderr says why it failed"


class StoreError(CoatcheckError):
    code = "store_error"


class Damaged(StoreError):
    code = "damaged"
    default_hint = "put the same content again to repair it, or run 'coatcheck verify'"


class StoreFull(StoreError):
    code = "store_full"
    default_hint = "free space, or run 'coatcheck collect'; stored artifacts are not affected"


class StoreUnavailable(StoreError):
    """`may_retry` says whether the same call may succeed later."""

    code = "store_unavailable"

    def __init__(self, message: str, *, hint: str | None = None, may_retry: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.may_retry = may_retry


class UnsupportedFormat(StoreError):
    code = "unsupported_format"
    default_hint = "upgrade coatcheck to open this store"


def development_format() -> UnsupportedFormat:
    return UnsupportedFormat(
        "this store was made by a development version of coatcheck, "
        "in a format that was never released",
        hint="create a new store; nothing was changed",
    )


class StoreClosed(StoreError):
    code = "store_closed"
    default_hint = "open the store again"


class SurfaceCodes(NamedTuple):
    """How surfaces report an error: HTTP status, process exit code, JSON-RPC error code."""

    http: int
    exit: int
    mcp: int


CODES: dict[str, SurfaceCodes] = {
    "error": SurfaceCodes(500, 1, -32603),
    "invalid_argument": SurfaceCodes(400, 2, -32602),
    "invalid_pointer": SurfaceCodes(400, 2, -32602),
    "program_failed": SurfaceCodes(400, 2, -32602),
    "unsupported_value": SurfaceCodes(415, 2, -32602),
    "not_found": SurfaceCodes(404, 3, -32002),
    "expired": SurfaceCodes(410, 3, -32002),
    "ambiguous_pointer": SurfaceCodes(409, 4, -32602),
    "limit_exceeded": SurfaceCodes(413, 5, -32602),
    "too_large": SurfaceCodes(413, 5, -32602),
    "quota_exceeded": SurfaceCodes(507, 5, -32603),
    "budget_exceeded": SurfaceCodes(413, 5, -32602),
    "fenced": SurfaceCodes(409, 9, -32603),
    "missing_extra": SurfaceCodes(501, 6, -32603),
    "upstream_failed": SurfaceCodes(502, 10, -32000),
    "store_error": SurfaceCodes(500, 7, -32603),
    "damaged": SurfaceCodes(500, 8, -32603),
    "store_full": SurfaceCodes(507, 7, -32603),
    "store_unavailable": SurfaceCodes(503, 7, -32603),
    "unsupported_format": SurfaceCodes(500, 7, -32603),
    "store_closed": SurfaceCodes(500, 7, -32603),
}

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError`, once, at the storage boundary."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing) from error


def storage_error(error: OSError, doing: str) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(f"no space left while {doing}: {reason}")
    if error.errno == errno.EROFS:
        return read_only(doing)
    return StoreUnavailable(
        f"the store failed while {doing}: {reason}",
        hint="check the folder's owner, permissions and disk",
    )


def read_only(doing: str) -> StoreUnavailable:
    """The error for a change to a store on a read-only file system."""
    return StoreUnavailable(
        f"the store is on a read-only file system: {doing} is not possible",
        hint="it can be read; to change it, mount it writable and open it again",
    )
