"""Work that is put off until it is needed, so that a command starts quickly: regular expressions
and the logger."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, AnyStr, cast

if TYPE_CHECKING:
    from logging import Logger


class _Pattern:
    """A pattern that is compiled when an attribute is first read. The attribute is then kept on
    this object."""

    def __init__(self, source: str | bytes, flags: int) -> None:
        self._source: Any = source
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(re.compile(self._source, self._flags), name)
        setattr(self, name, found)
        return found


def lazy_pattern(source: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a regular expression that is compiled when it is first used. For calls of its methods
    only."""
    return cast("re.Pattern[AnyStr]", _Pattern(source, flags))


def logger() -> Logger:
    """Return our logger. Importing `logging` takes some milliseconds, and few processes log."""
    import logging

    return logging.getLogger("coatcheck")
