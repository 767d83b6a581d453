"""A result on its way into the store: what is asked of it more than once is found out once."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Final, NoReturn

from coatcheck.errors import InvalidArgument
from coatcheck.previews import EDGE, Sample
from coatcheck.storage.frames import frames_of, line_counts
from coatcheck.tokens import roughly
from coatcheck.values import Encoded, encode, encode_text

_FRAMED: Final = 128 * 1024  # bytes from which on a store wants frames


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
        """The value as it is stored: exactly, as the nearest that JSON has, or as its text. A large one has its frames,
        which tell how many lines there are."""
        found = self._encoded()
        return found._replace(frames=frames_of(found.data)) if len(found.data) > _FRAMED else found

    @cached_property
    def sample(self) -> Sample:
        """The two ends of what is stored."""
        data, frames = self.encoded.data, self.encoded.frames
        feeds = data.count(b"\n") if frames is None else sum(line_counts(frames))
        lines = feeds + (not data.endswith(b"\n") if data else 0)
        return Sample(data[:EDGE], data[max(EDGE, len(data) - EDGE) :], len(data), lines)

    def _encoded(self) -> Encoded:
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


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
