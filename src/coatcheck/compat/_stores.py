"""Where a drop-in keeps its artifacts: an open store, an address such as `s3://…`, or a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard
from urllib.parse import unquote, urlsplit

from coatcheck import Store
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

Place = Store | str | os.PathLike[str]
"""An open store, the address of one, or a folder. `~` is expanded."""


def is_store(place: object) -> TypeGuard[Store | str]:
    """Whether a place is an open store, or the address of one. Otherwise it is a folder."""
    return isinstance(place, Store) or (
        isinstance(place, str) and place.startswith(("s3:", "memory:"))
    )


def folder_of(place: object, what: str) -> Path:
    """Return the absolute path of a folder. Raises `InvalidArgument` for anything else; `what` is
    its name there."""
    if not isinstance(place, str | os.PathLike) or not os.fspath(place):
        given = repr(place) if isinstance(place, str) else f"a {type(place).__name__}"
        raise InvalidArgument(
            f"{what} must be a folder, an s3:// address or an open Store, got {given}",
            hint="pass a path, or what coatcheck.open returned",
        )
    if isinstance(place, str) and "://" in place:
        if not place.startswith("file:///"):
            raise InvalidArgument(
                f"no backend for {clip(place)}",
                hint="use a folder, or s3://bucket/prefix?catalog=…",
            )
        return Path(unquote(urlsplit(place).path))
    return Path(place).expanduser().absolute()
