"""A result on its way into the store: what is asked of it more than once is found out once.

A large one is hashed in a thread of its own while its frames and its preview are made.
"""

from __future__ import annotations

import json
import threading
from functools import cached_property
from typing import Any, Final, NoReturn

from coatcheck.errors import InvalidArgument
from coatcheck.ids import digest_of
from coatcheck.previews import EDGE, Sample
from coatcheck.storage.frames import frames_of, line_counts
from coatcheck.tokens import roughly
from coatcheck.values import Encoded, encode, encode_text

_FRAMED: Final = 128 * 1024  # bytes from which on a store wants frames
_HASHED_APART: Final = 512 * 1024


class Parcel:
    """A value, and the text that a model would be sent for it."""

    def __init__(self, value: object, text: str) -> None:
        self.value = value
        self.text = text

    @cached_property
    def written(self) -> bytes:
        """The bytes of the text."""
        return encode_text(self.text)

    @cached_property
    def tokens(self) -> float:
        """About how many tokens the two ends of the text have."""
        data = self.written
        return roughly(data if len(data) <= 2 * EDGE else data[:EDGE] + data[-EDGE:])

    def roughly(self) -> float:
        return self.tokens

    @cached_property
    def encoded(self) -> Encoded:
        """The value as it is stored: exactly, as the nearest that JSON has, or as its text."""
        value = self.value
        if isinstance(value, str):
            return Encoded("text", self.written, value)
        if isinstance(value, bytes | bytearray | memoryview):
            return Encoded("bytes", bytes(value))
        try:
            if json.loads(self.text, parse_constant=_refuse) == value:
                return Encoded("json", self.written)
        except (ValueError, TypeError, RecursionError):
            pass
        for candidate in (lambda: value, lambda: json.loads(self.text, parse_constant=str)):
            try:
                return Encoded(*encode(candidate()))
            except (InvalidArgument, ValueError, RecursionError):
                continue
        return Encoded("text", self.written, self.text)

    @property
    def is_its_text(self) -> bool:
        """Whether the bytes that are stored are those of the text."""
        return self.encoded.data is self.written or self.encoded.data == self.written


class Packing:
    """The bytes of a parcel: their ends at once, their digest when it is asked for."""

    def __init__(self, encoded: Encoded) -> None:
        self._encoded = encoded
        self._digest: str | None = None
        data = encoded.data
        self._thread = _started(self._hash) if len(data) >= _HASHED_APART else None
        frames = frames_of(data) if len(data) > _FRAMED else None
        self._frames = frames
        self.sample = ends_of(data, None if frames is None else sum(line_counts(frames)))

    def packed(self) -> Encoded:
        """The value with all that is known of its bytes."""
        if self._thread is not None:
            self._thread.join()
        return self._encoded._replace(digest=self._digest, frames=self._frames)

    def _hash(self) -> None:
        self._digest = digest_of(self._encoded.data)


def ends_of(data: bytes, feeds: int | None = None) -> Sample:
    """The two ends of some bytes, which have so many line feeds."""
    feeds = data.count(b"\n") if feeds is None else feeds
    lines = feeds + (not data.endswith(b"\n") if data else 0)
    return Sample(data[:EDGE], data[max(EDGE, len(data) - EDGE) :], len(data), lines)


def _started(target: Any) -> threading.Thread | None:
    thread = threading.Thread(target=target)
    try:
        thread.start()
    except RuntimeError:  # no more threads to be had: the put hashes
        return None
    return thread


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
