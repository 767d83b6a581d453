"""Measures what a prompt contains: stubs, pages that were read back, our tools, and what was rewritten.

Everything is measured from the prompt itself; nothing is counted while tools run. A stub counts in every prompt that
contains it, since the result it replaces would be sent each time too. Measurements of a message are cached, so that a
turn costs only its new messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coatcheck._toolkit import known_as
from coatcheck.errors import CoatcheckError
from coatcheck.externalize.stub import LEAD, SHORTENED, is_ours
from coatcheck.ids import is_pointer
from coatcheck.messages.cache import Sent
from coatcheck.messages.cost import BoundedCache, Cost, Tally
from coatcheck.messages.formats import calls_named, spoken
from coatcheck.tokens import TokenCounter, estimate

if TYPE_CHECKING:
    from coatcheck.refs import Ref
    from coatcheck.session import Session

__all__ = ["MeasuredPart", "MeasuredPrompt", "Scale"]

_CACHED: Final = 65_536
_DEEPEST: Final = 12
_STUB: Final = re.compile(r'^\{"stub":"', re.MULTILINE)
_LEADS: Final = (LEAD, SHORTENED)
_FILE: Final = re.compile(
    r"^ArtifactRef: (art:[0-9a-f]{12,64}) \(type=\w+, sha256=[0-9a-f]{64}, bytes=\d+\)$", re.MULTILINE
)
_LEFT_OUT: Final = re.compile(r"^\[([\d,]{1,20}) characters are left out here.*", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """The contents of one message, the system text or the list of tools. `tokens` is None if it cannot be counted."""

    digest: bytes
    tokens: int | None
    saved: int = 0
    stubs: int = 0
    read_back: int = 0
    ref_files: int = 0
    schemas: int = 0
    user_chars: int = 0
    sys_chars: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """A whole prompt: its parts in the order in which a provider reads them. The last may be a tail, which changes with
    every call."""

    parts: tuple[MeasuredPart, ...]
    has_tail: bool = False

    @property
    def sent(self) -> Sent:
        """The parts with which the next prompt is compared."""
        parts = self.parts[:-1] if self.has_tail else self.parts
        return Sent(tuple(Cost(part.digest, part.tokens or 0) for part in parts), 0)

    @property
    def tokens(self) -> int | None:
        total = 0
        for part in self.parts:
            if part.tokens is None:
                return None
            total += part.tokens
        return total

    def total(self, name: str) -> int:
        return sum(getattr(part, name) for part in self.parts)

    def cost(self, stable: int, cached: float, written: float, *, without: bool = False) -> int | None:
        """Return the price of the prompt in uncached tokens, if the first `stable` parts are read from a cache, the
        others are written to it, and the tail is neither; or the price `without` stubs, pages and our tools."""
        total = 0.0
        for at, part in enumerate(self.parts):
            if part.tokens is None:
                return None
            tokens = part.tokens + (part.saved - part.stubs - part.read_back - part.schemas if without else 0)
            price = cached if at < stable else written
            total += max(0, tokens) * (1 if self.has_tail and at == len(self.parts) - 1 else price)
        return round(total)


class Scale:
    """Measures the prompts of one session, with a cache."""

    def __init__(self, session: Session, count: TokenCounter = estimate) -> None:
        self._session = session
        self._tally = Tally(count, document_tokens=0)
        self._cached: BoundedCache[tuple[bytes, frozenset[str]], MeasuredPart] = BoundedCache(_CACHED)

    def measure(
        self, *, messages: Iterable[Any], system: object = None, tools: Sequence[Any] = (), tail: str = ""
    ) -> MeasuredPrompt:
        """Measure a prompt. `tools` are in a provider's format, or the toolkit's."""
        described = [_described(tool) for tool in tools]
        ours = [(tool, known[1]) for tool in described if (known := known_as(tool)) is not None]
        names = frozenset(name for _, name in ours)
        parts = []
        if described:
            schemas = sum(self._tokens(_dumped(tool)) for tool, _ in ours)
            parts.append(MeasuredPart(*self._weighed({"tools": described})[1:], schemas=schemas))
        if system:
            parts.append(self._part({"role": "system", "content": _joined(system)}, names))
        parts += [self._part(message, names) for message in messages]
        if tail:
            parts.append(self._part({"role": "user", "content": tail}, names))
        return MeasuredPrompt(tuple(parts), bool(tail))

    def _part(self, message: Any, names: frozenset[str]) -> MeasuredPart:
        message, digest, tokens = self._weighed(message)
        known = self._cached.get((digest, names))
        if known is None:
            known = self._cached.keep((digest, names), self._measured(message, digest, tokens, names))
        return known

    def _measured(self, message: Any, digest: bytes, tokens: int | None, names: frozenset[str]) -> MeasuredPart:
        saved = stubs = read_back = files = 0
        for text in _texts(message, 0):
            if self._was_read(text):
                read_back += self._tokens(text)
                continue
            for stub, written in _stubs(text):
                stubs += self._tokens(written)
                saved += self._whole(stub)
            found, left_out = self._files(text)
            files += found
            saved += left_out
        for stub in _stub_objects(message, 0):
            stubs += self._tokens(_dumped(stub))
            saved += self._whole(stub)
        read_back += sum(self._tokens(_dumped(call)) for call in calls_named(message, names))
        author, texts = spoken(message)
        chars = sum(map(len, texts))
        user_chars, sys_chars = (chars, 0) if author == "user" else (0, chars)
        return MeasuredPart(digest, tokens, saved, stubs, read_back, files, user_chars=user_chars, sys_chars=sys_chars)

    def _whole(self, stub: Mapping[str, Any]) -> int:
        """Return the tokens of the result that a stub replaces, if that is possible: anyone may have written it."""
        tokens = stub.get("tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            return 0
        ref = self._ref(str(stub["artifact"]))
        return min(tokens, ref.size_bytes) if ref is not None else 0

    def _files(self, text: str) -> tuple[int, int]:
        """Count the bootstrap files that are references in a text, and estimate the tokens they leave out."""
        if "ArtifactRef: " not in text:
            return 0, 0
        refs = [ref for match in _FILE.finditer(text) if (ref := self._ref(match[1])) is not None]
        omitted = sum(int(match[1].replace(",", "") or 0) for match in _LEFT_OUT.finditer(text))
        chars = min(omitted, sum(ref.size_bytes for ref in refs))
        shown = _LEFT_OUT.sub("", _FILE.sub("", text))
        return len(refs), round(chars * self._tokens(shown) / max(1, len(shown)))

    def _ref(self, pointer: str) -> Ref | None:
        try:
            return self._session.ref(pointer)
        except CoatcheckError:
            return None

    def _was_read(self, text: str) -> bool:
        try:
            return is_ours(self._session.store.secret, text)
        except CoatcheckError:
            return False

    def _weighed(self, value: Any) -> tuple[Any, bytes, int | None]:
        """Return a message as JSON, its digest and its tokens. Providers' libraries return objects, which hosts send
        back."""
        try:
            return value, *self._tally.digest_and_tokens(value)
        except TypeError:
            value = json.loads(_dumped(value))
            return value, *self._tally.digest_and_tokens(value)

    def _tokens(self, text: str) -> int:
        """Count a text, or estimate it if the counter fails, which is reported for the prompt as a whole."""
        found = self._tally.tokens(text)
        return estimate(text) if found is None else found


def _stubs(text: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the stubs in a text, each at the beginning of a line, with their JSON."""
    if '{"stub":"' not in text:
        return
    for match in _STUB.finditer(text):
        try:
            found, end = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if _is_stub(found):
            yield found, text[match.start() : end]


def _is_stub(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("stub") in _LEADS and is_pointer(value.get("artifact"))


def _stub_objects(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if _is_stub(value):
        yield value
    elif isinstance(value, Mapping | list) and depth < _DEEPEST:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _stub_objects(one, depth + 1)


def _texts(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < _DEEPEST and not _is_stub(value):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one, depth + 1)


def _joined(system: object) -> str:
    """Return a system text that may be given as Anthropic's blocks."""
    return system if isinstance(system, str) else "\n".join(_texts(system, 0))


def _described(tool: Any) -> Any:
    """Describe a tool in a provider's format."""
    describe = getattr(tool, "as_openai", None)
    return describe() if callable(describe) else tool


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_object)


def _object(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else str(value)
