"""Where a prompt stopped to begin like the one before.

Providers cache prompts by prefix, in the order tools, system text, messages. `Prefix` is what is
known about one request; the next request of the conversation is compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from msgspec import Raw

from coatcheck.gateway.raw_json import Unreadable, fields_of, raw_of, text_field, value_of
from coatcheck.gateway.request import MessageFacts, Request
from coatcheck.ids import clip
from coatcheck.messages.cache import without_marks

_DIGITS: Final = 32  # of the digest of a part
_PER_TOKEN: Final = 4


class Part(NamedTuple):
    """A tool or system text. Messages have `MessageFacts`, with the same members."""

    digest: str
    label: str
    size: int


Parts = Sequence[Part | MessageFacts]


@dataclass(frozen=True, slots=True)
class Break:
    """The first part that differs from the prompt before, and why that breaks the prefix. `tokens`
    are sent again because of it."""

    part: int | None
    what: str
    why: str
    tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"part": self.part, "what": self.what, "why": self.why}


@dataclass(frozen=True, slots=True)
class Change:
    """How many parts of a prompt are the same as before, and where the prefix broke, if it did."""

    same: int = 0
    broke: Break | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request of a conversation: the number of its parts, the digest over them, and the parts
    themselves if this process has seen them."""

    count: int
    digest: str
    parts: Parts = ()

    @classmethod
    def of(cls, request: Request) -> Self:
        parts = _parts(request)
        return cls(len(parts), _digest(parts), parts)

    def is_continued_by(self, other: Prefix) -> bool:
        """Whether a later request begins with all of this one."""
        if other.count < self.count:
            return False
        if self.parts:
            pairs = zip(self.parts, other.parts, strict=False)
            return all(old is new or old.digest == new.digest for old, new in pairs)
        return _digest(other.parts[: self.count]) == self.digest

    def change_to(self, other: Prefix) -> Change:
        """Compare a later request with this one."""
        if self.is_continued_by(other):
            return Change(self.count)
        if not self.parts:
            return Change(0, Break(None, "unknown", "it changed while no gateway was running"))
        same = 0
        for old, new in zip(self.parts, other.parts, strict=False):
            if old.digest != new.digest:
                break
            same += 1
        old = self.parts[same]
        why = "the conversation is shorter than before"
        if same < other.count:
            why = _why(old, other.parts[same])
        tokens = sum(one.size for one in other.parts[same:]) // _PER_TOKEN
        return Change(same, Break(same, old.label, why, tokens))


def _why(old: Part | MessageFacts, new: Part | MessageFacts) -> str:
    if old.label != new.label:
        return f"{clip(old.label, 80)} was replaced by {clip(new.label, 80)}"
    return f"{clip(new.label, 80)} changed from {old.size:,} to {new.size:,} bytes"


def _digest(parts: Parts) -> str:
    joined = "".join([one.digest[:_DIGITS] for one in parts])
    return hashlib.sha256(joined.encode()).hexdigest()[:40]


def _parts(request: Request) -> list[Part | MessageFacts]:
    """Return the parts of a prompt in the order of a provider's cache."""
    found: list[Part | MessageFacts] = [_part(raw, _tool_label(raw)) for raw in request.tools]
    system = [name for name in ("system", "instructions") if name in request.top]
    found += [_part(request.top[name], "system text") for name in system]
    return found + request.facts


def _part(raw: Raw, label: str) -> Part:
    data = bytes(raw)
    if b'"cache_control"' in data:
        data = bytes(raw_of(without_marks(value_of(raw))))
    return Part(hashlib.blake2b(data, digest_size=16).hexdigest(), label, len(data))


def _tool_label(raw: Raw) -> str:
    try:
        fields = fields_of(raw)
        name = text_field(fields, "name") or text_field(fields_of(fields["function"]), "name")
    except (Unreadable, KeyError):
        return "tool"
    return f"tool {name[:80]}"
