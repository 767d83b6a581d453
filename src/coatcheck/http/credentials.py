"""Bearer tokens: which store, sessions and operations each of them gives access to.

A tokens file is TOML with one table for each token. It has the SHA-256 of the token, never the
token itself:

    [ci]
    sha256 = "9f86d081884c7d65…"
    scope = "write"        # read, write or admin, each with the ones before it;
                           # or metrics, only for /metrics
    tenant = "acme"        # without it, the store itself
    sessions = "ci-"       # only sessions whose ids begin with this

The file is read again when it changes, so a token is revoked by removing its table.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from coatcheck.checks import check_name, one_of
from coatcheck.errors import InvalidArgument
from coatcheck.http.serving import new_token
from coatcheck.ids import clip
from coatcheck.storage import TRANSCRIPT

TokenScope = Literal["read", "write", "admin", "metrics"]
SCOPES: Final = ("read", "write", "admin")
METRICS: Final = "metrics"
_INTERNAL: Final = ("coatcheck:", TRANSCRIPT)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LARGEST_FILE: Final = 1 << 20
_CHECKED_EVERY: Final = 1.0  # seconds
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class Access:
    """What the holder of a token may do: a scope, in the store of one tenant, in sessions whose ids
    begin with `sessions`."""

    name: str
    scope: TokenScope
    tenant: str | None = None
    sessions: str = ""

    def allows(self, needed: TokenScope) -> bool:
        """Whether an operation of this scope is allowed. Metrics cover all tenants, so they need a
        scope of their own, or an administrator of the whole store."""
        if needed == METRICS:
            return self.scope == METRICS or (
                self.scope == "admin" and self.tenant is None and not self.sessions
            )
        return self.scope in SCOPES and SCOPES.index(self.scope) >= SCOPES.index(needed)

    def covers(self, session_id: str) -> bool:
        """Whether the holder may use a session. The store's own sessions are for administrators."""
        return session_id.startswith(self.sessions) and (
            self.scope == "admin" or not session_id.startswith(_INTERNAL)
        )

    @property
    def limits(self) -> str:
        """The sessions that the holder may use, in words."""
        return (
            f"that begin with {clip(self.sessions)}"
            if self.sessions
            else "of agents, not those of the store itself"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The table of a token in a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scope: TokenScope
    tenant: Annotated[str, Field(min_length=1)] | None = None
    sessions: str = ""


_ENTRIES: Final = TypeAdapter(dict[Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")], _Entry])


class Keyring:
    """The known tokens: those of a file, and those that were given at the start. Only digests are
    kept."""

    def __init__(self, file: Path | None = None, given: dict[str, Access] | None = None) -> None:
        self._file = file
        self._given = {digest_of_token(token): access for token, access in (given or {}).items()}
        self._state: object = None
        self._checked = 0.0
        self._known = self._given
        if file is not None:
            self._state = _state_of(file)
            self._known = self._given | read_tokens(file)

    @property
    def tenants(self) -> set[str]:
        return {access.tenant for access in self._known.values() if access.tenant is not None}

    def find(self, token: str | None) -> Access | None:
        """Return what a token gives access to, or None if it is unknown. Takes the same time for
        all unknown tokens."""
        self._refresh()
        digest = digest_of_token(token or "")
        found = None
        for known, access in self._known.items():
            if hmac.compare_digest(known, digest):
                found = access
        return found

    def _refresh(self) -> None:
        """Read the file again if it has changed. Without the file, its tokens are revoked; a
        mistake in it changes nothing, and is logged."""
        if self._file is None or time.monotonic() < self._checked + _CHECKED_EVERY:
            return
        self._checked = time.monotonic()
        state = _state_of(self._file)
        if state == self._state:
            return
        self._state = state
        try:
            self._known = self._given | (read_tokens(self._file) if state is not None else {})
        except InvalidArgument as error:
            _LOG.error("the tokens stay as they were: %s", error)


def digest_of_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_tokens(file: Path) -> dict[str, Access]:
    """Return what a tokens file gives access to, by digest. Raises `InvalidArgument`."""
    try:
        with file.open("rb") as source:
            mode = os.fstat(source.fileno()).st_mode
            data = source.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {file}: {error.strerror}", hint="name a file of tokens"
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgument(
            f"{file} is writable by others, who could add tokens", hint=f"chmod 600 {file}"
        )
    if len(data) > _LARGEST_FILE:
        raise InvalidArgument(
            f"{file} has more than {_LARGEST_FILE:,} bytes", hint="name a file of tokens"
        )
    return _parsed(data, str(file))


def _parsed(data: bytes, where: str) -> dict[str, Access]:
    try:
        entries = _ENTRIES.validate_python(tomllib.loads(data.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(one) for one in first["loc"])
        raise InvalidArgument(
            f"{where}: {clip(place)}: {first['msg']}", hint="see docs/http.md"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{where} is not valid TOML: {clip(str(error), 200)}", hint="fix that line"
        ) from error
    found: dict[str, Access] = {}
    for name, entry in entries.items():
        if entry.sha256 in found:
            raise InvalidArgument(
                f"{where}: the tokens {found[entry.sha256].name} and {name} are the same"
            )
        found[entry.sha256] = Access(name, entry.scope, entry.tenant, entry.sessions)
    return found


def add_token(file: Path, access: Access) -> str:
    """Make a new token, append its digest to a file, which is created if it is missing, and return
    the token."""
    one_of(access.scope, "scope", (*SCOPES, METRICS))
    if not _NAME.fullmatch(access.name):
        raise InvalidArgument(
            f"invalid token name {clip(access.name)}",
            hint="use letters, digits, - and _, at most 64",
        )
    if access.tenant is not None:
        check_name(access.tenant, "tenant")
    token = new_token()
    digest = digest_of_token(token)
    if file.exists() and any(known.name == access.name for known in read_tokens(file).values()):
        raise InvalidArgument(
            f"{file} already has a token {access.name}", hint="choose another name, or remove it"
        )
    fields = {
        "sha256": digest,
        "scope": access.scope,
        "tenant": access.tenant,
        "sessions": access.sessions or None,
    }
    lines = [f"{key} = {_quoted(value)}" for key, value in fields.items() if value is not None]
    block = "\n".join((f"[{access.name}]", *lines, ""))
    assert _parsed(block.encode(), "the new token") == {digest: access}
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "ab") as target:
        target.write((b"\n" if target.tell() else b"") + block.encode())
        target.flush()
        os.fsync(target.fileno())
    return token


def _quoted(text: str) -> str:
    """A TOML string. It is a JSON string, except for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _state_of(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
