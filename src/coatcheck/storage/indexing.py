"""The protocol of a full-text index, and its argument and result types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol


class Passage(NamedTuple):
    """A part of an artifact: its first and last line, its byte range, and its text."""

    first: int
    last: int
    start: int
    end: int
    text: str


class Match(NamedTuple):
    """A search result. Lower scores are better. Lines are 0 if a name, tool or summary matched."""

    digest: str
    first: int
    last: int
    start: int
    end: int
    score: float


class Held(NamedTuple):
    """The labels that a session gives to an artifact, and the expiry of the session's refs to it."""

    labels: list[str]
    expires: float | None


class Mark(NamedTuple):
    """How far a session is indexed: when it was created, and its newest indexed ref."""

    created: float
    seq: int
    digest: str


class PassageIndex(Protocol):
    """Full-text search in passages of text artifacts and in their labels. The index is derived from the store, and its
    matches are only candidates: callers check each one against the store. All methods are safe to call from many
    threads."""

    def followed(self, session_id: str) -> Mark | None:
        """Return how far a session is indexed, or None if it is not."""
        ...

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return those artifacts whose content is not indexed yet."""
        ...

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        """Index the contents of artifacts. An artifact may have no passages."""
        ...

    def hold(self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool) -> None:
        """Record a session's artifacts, by digest, and how far the session is indexed. With `complete`, they replace
        the known ones, otherwise they are added."""
        ...

    def count(self, sessions: Iterable[str], at: float) -> int:
        """Return the number of distinct artifacts in these sessions that do not expire before this time."""
        ...

    def leave(self, session_id: str, digest: str | None = None) -> None:
        """Remove an artifact from a session, or the whole session."""
        ...

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        """Return the best passages and labels for these words among the artifacts of these sessions."""
        ...

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Delete artifacts that the store no longer has, and all traces of their words. Returns their number."""
        ...

    def close(self) -> None: ...
