"""The protocol of a full-text index, and what goes in and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol


class Passage(NamedTuple):
    """A part of an artifact: its first and last line, its place in the bytes, and its text."""

    first: int
    last: int
    start: int
    end: int
    text: str


class Match(NamedTuple):
    """Where a search struck: lower scores are better. Lines are 0 where it was a name, tool or summary."""

    digest: str
    first: int
    last: int
    start: int
    end: int
    score: float


class Held(NamedTuple):
    """What a session says of an artifact that it holds, and when its own time to live is over."""

    said: list[str]
    expires: float | None


class Mark(NamedTuple):
    """How far a session was followed: when it was made, and the newest of its refs that is indexed."""

    created: float
    seq: int
    digest: str


class PassageIndex(Protocol):
    """Full-text search: passages of text artifacts, and what sessions say of them. It is derived from the store, and
    only proposes: whoever asks checks each match against the store. Every method is safe to call from many threads."""

    def followed(self, session_id: str) -> Mark | None:
        """How far a session was followed; None where it never was."""
        ...

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those artifacts whose content is not indexed yet."""
        ...

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        """Index the contents of artifacts, each of which may be no passages at all."""
        ...

    def hold(self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, anew: bool) -> None:
        """Note what a session holds, by digest, and how far it was followed. With `anew` that is all that it holds,
        else it is added to what is known."""
        ...

    def count(self, sessions: Iterable[str], at: float) -> int:
        """How many artifacts these sessions hold together that do not expire before this moment."""
        ...

    def leave(self, session_id: str, digest: str | None = None) -> None:
        """A session holds an artifact no more, or has ended."""
        ...

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        """The best passages for these words in what the sessions hold, and in what they say of it."""
        ...

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop artifacts that the store does not know any more, and every trace of their words. How many there were."""
        ...

    def close(self) -> None: ...
