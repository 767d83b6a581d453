"""Everything that can go wrong, as one tree.

    CoatcheckError
    ├── InvalidArgument            what was passed cannot be right
    │   ├── InvalidPointer         not a pointer, or a fragment that leads nowhere
    │   └── UnsupportedValue       a value of a type that cannot be stored exactly
    ├── NotFound                   no such artifact in this session
    │   └── Expired                it was here; its time to live is over
    ├── AmbiguousPointer           the prefix fits several artifacts of the session
    ├── LimitExceeded
    │   ├── TooLarge               over the size cap of one artifact
    │   ├── QuotaExceeded          over the quota of the session or the store
    │   └── BudgetExceeded         over what a prompt may hold, or nobody could count it
    ├── Fenced                     another has claimed the session since
    ├── MissingExtra               an optional dependency is not installed
    ├── UpstreamFailed             a server that we speak for does not answer
    └── StoreError                 the store itself
        ├── Damaged                stored bytes do not match their digest
        ├── StoreFull              no space left where the store lives
        ├── StoreUnavailable       cannot be opened, read or written just now
        ├── UnsupportedFormat      made by a newer version of Coatcheck
        └── StoreClosed            used after close()

Each class has a stable `code`; `CODES` maps it to an HTTP status, an exit code and an MCP (JSON-RPC) error. Wording may
change between releases, classes and codes do not.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple


class CoatcheckError(Exception):
    """The root. `message` says what happened, `hint` what to do about it, each in one line."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidArgument(CoatcheckError, ValueError):
    code = "invalid_argument"


class InvalidPointer(InvalidArgument):
    code = "invalid_pointer"
    default_hint = "a pointer is 'art:' and at least 12 hex characters"


class UnsupportedValue(InvalidArgument, TypeError):
    code = "unsupported_value"
    default_hint = "store str, bytes, JSON values, dataclasses, pydantic models, a Path or a binary stream"


class NotFound(CoatcheckError, LookupError):
    code = "not_found"
    default_hint = "list the session's artifacts to see what is there"


class Expired(NotFound):
    code = "expired"
    default_hint = "run the tool again, or pin what must stay"


class AmbiguousPointer(CoatcheckError, LookupError):
    """`candidates` holds a longer pointer for each artifact that the prefix fits."""

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
    default_hint = "forget what is not needed, end old sessions, or raise the quota"


class BudgetExceeded(LimitExceeded):
    """`violations` says of each limit what was over it, or could not be counted."""

    code = "budget_exceeded"
    default_hint = "send less, or raise the budget"

    def __init__(self, message: str, violations: Sequence[Any], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.violations = tuple(violations)


class Fenced(CoatcheckError):
    code = "fenced"
    default_hint = "nothing was written; claim the session again, or leave it to who holds it now"


class MissingExtra(CoatcheckError, ImportError):
    """Raised with the extra's name: `MissingExtra("s3")`."""

    code = "missing_extra"

    def __init__(self, extra: str) -> None:
        super().__init__(f"this needs the extra '{extra}'", hint=f"pip install 'coatcheck[{extra}]'")


class UpstreamFailed(CoatcheckError):
    code = "upstream_failed"
    default_hint = "try once more; what the server wrote on stderr says why"


class StoreError(CoatcheckError):
    code = "store_error"


class Damaged(StoreError):
    code = "damaged"
    default_hint = "put the same content again to heal it, or run 'coatcheck verify'"


class StoreFull(StoreError):
    code = "store_full"
    default_hint = "free space, or run 'coatcheck collect'; nothing that was stored is lost"


class StoreUnavailable(StoreError):
    """`may_retry` says whether the same call may succeed later, with nothing changed here."""

    code = "store_unavailable"

    def __init__(self, message: str, *, hint: str | None = None, may_retry: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.may_retry = may_retry


class UnsupportedFormat(StoreError):
    code = "unsupported_format"
    default_hint = "upgrade coatcheck to open this store"


class StoreClosed(StoreError):
    code = "store_closed"
    default_hint = "open the store again"


class Mapping(NamedTuple):
    """How a surface tells the error: HTTP status, process exit code, JSON-RPC error code."""

    http: int
    exit: int
    mcp: int


CODES: dict[str, Mapping] = {
    "error": Mapping(500, 1, -32603),
    "invalid_argument": Mapping(400, 2, -32602),
    "invalid_pointer": Mapping(400, 2, -32602),
    "unsupported_value": Mapping(415, 2, -32602),
    "not_found": Mapping(404, 3, -32002),
    "expired": Mapping(410, 3, -32002),
    "ambiguous_pointer": Mapping(409, 4, -32602),
    "limit_exceeded": Mapping(413, 5, -32602),
    "too_large": Mapping(413, 5, -32602),
    "quota_exceeded": Mapping(507, 5, -32603),
    "budget_exceeded": Mapping(413, 5, -32602),
    "fenced": Mapping(409, 9, -32603),
    "missing_extra": Mapping(501, 6, -32603),
    "upstream_failed": Mapping(502, 10, -32000),
    "store_error": Mapping(500, 7, -32603),
    "damaged": Mapping(500, 8, -32603),
    "store_full": Mapping(507, 7, -32603),
    "store_unavailable": Mapping(503, 7, -32603),
    "unsupported_format": Mapping(500, 7, -32603),
    "store_closed": Mapping(500, 7, -32603),
}

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an operating system's error into ours, once, at the storage boundary."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing) from error


def storage_error(error: OSError, doing: str) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(f"no space left while {doing}: {reason}")
    return StoreUnavailable(
        f"the store failed while {doing}: {reason}", hint="check the folder's owner, permissions and disk"
    )
