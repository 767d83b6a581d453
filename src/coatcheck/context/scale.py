"""What a prompt consists of: the tokens of each part, and how many of them stubs saved or cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coatcheck._toolkit import known_as
from coatcheck.checks import is_whole
from coatcheck.context.appended import STARTS
from coatcheck.errors import CoatcheckError
from coatcheck.externalize.stub import is_ours, is_stub_object, stubs_in
from coatcheck.messages.content import calls_named, spoken
from coatcheck.messages.cost import Tally
from coatcheck.tokens import TokenCounter, estimate

if TYPE_CHECKING:
    from coatcheck.refs import Ref
    from coatcheck.session import Session

_DEEPEST: Final = 12
_FILE: Final = re.compile(
    r"^ArtifactRef: (art:[0-9a-f]{12,64}) \(type=\w+, sha256=[0-9a-f]{64}, bytes=\d+\)$",
    re.MULTILINE,
)
_REGISTERED_FILE: Final = re.compile(
    r"^ArtifactRef: [0-9a-f]{64} \(type=[\w/.+-]+, sha256=[0-9a-f]{64}, bytes=\d+, "
    r"createdAt=[\w:.-]+\)$",
    re.MULTILINE,
)  # as `coatcheck.compat.artifact_refs` writes it: its registry is not a session
_LEFT_OUT: Final = re.compile(r"^\[([\d,]{1,20}) characters are left out here.*", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Part:
    """The contents of one message, the system text or the list of tools. `tokens` is None if it
    cannot be counted. `figures` has what the part adds to the figures of `PromptMetrics`."""

    digest: bytes
    tokens: int | None
    figures: Counter[str]

    @property
    def tokens_without(self) -> int:
        """The size of this part with every stored result in it, and without stubs, pages and our
        tools."""
        ours = sum(
            self.figures[name] for name in ("tokens_stubs", "tokens_read_back", "tokens_schemas")
        )
        return max(0, (self.tokens or 0) + self.figures["tokens_saved"] - ours)


class Scale:
    """Measures the prompts of one session. Tokens are counted once for each text.

    Everything is measured from the prompt itself. A stub counts in every prompt that contains it,
    since the result it replaces would be sent each time too."""

    def __init__(self, session: Session, count: TokenCounter) -> None:
        self._session = session
        self._tally = Tally(count, document_tokens=0)

    def measure(self, messages: Iterable[Any], system: object, tools: Sequence[Any]) -> list[Part]:
        """Return the parts of a prompt in the order in which a provider reads them. `tools` are in
        a provider's format, or the toolkit's."""
        described = [_described(tool) for tool in tools]
        ours: dict[str, list[Any]] = {}  # descriptions of our tools, by name
        for tool in described:
            known = known_as(tool)
            if known is not None:
                ours.setdefault(known[1], []).append(tool)
        parts = []
        if described:
            _, digest, tokens = self._weighed({"tools": described})
            schemas = sum(self._tokens(_dumped(tool)) for some in ours.values() for tool in some)
            parts.append(Part(digest, tokens, Counter(tokens_schemas=schemas)))
        if system:  # a text, or Anthropic's blocks
            text = "\n".join(one for one in _contents(system) if isinstance(one, str))
            parts.append(self._part({"role": "system", "content": text}, ours))
        return parts + [self._part(message, ours) for message in messages]

    def _part(self, message: Any, ours: Collection[str]) -> Part:
        message, digest, tokens = self._weighed(message)
        figures: Counter[str] = Counter()
        is_system = isinstance(message, Mapping) and message.get("role") in ("system", "developer")
        for one in _contents(message):
            if not isinstance(one, str):
                figures.update(self._stub_figures(one, _dumped(one)))
            elif self._was_read(one):
                figures["tokens_read_back"] += self._tokens(one)
            else:
                figures.update(self._text_figures(one))
                if is_system:
                    figures["ref_files"] += len(_REGISTERED_FILE.findall(one))
        for call in calls_named(message, ours):
            figures["tokens_read_back"] += self._tokens(_dumped(call))
        author, texts = spoken(message)
        figures["user_chars" if author == "user" else "sys_chars"] += sum(map(len, texts))
        return Part(digest, tokens, figures)

    def _text_figures(self, text: str) -> Counter[str]:
        figures: Counter[str] = Counter()
        for stub, written in stubs_in(text):
            figures.update(self._stub_figures(stub, written))
        files, left_out = self._files(text)
        figures.update(ref_files=files, tokens_saved=left_out)
        return figures

    def _stub_figures(self, stub: Mapping[str, Any], written: str) -> Counter[str]:
        return Counter(tokens_stubs=self._tokens(written), tokens_saved=self._whole(stub))

    def _whole(self, stub: Mapping[str, Any]) -> int:
        """Return the tokens of the result that a stub replaces, if they are plausible: anyone may
        have written it."""
        tokens, ref = stub.get("tokens"), self._ref(str(stub["artifact"]))
        return min(tokens, ref.size_bytes) if is_whole(tokens) and ref is not None else 0

    def _files(self, text: str) -> tuple[int, int]:
        """Count the bootstrap files that are references in a text, and estimate the tokens they
        leave out."""
        if "ArtifactRef: " not in text:
            return 0, 0
        named = [self._ref(match[1]) for match in _FILE.finditer(text)]
        refs = [ref for ref in named if ref is not None]
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
        """Whether our tools wrote a text. A `PromptBuilder` marks what it appends too."""
        try:
            return is_ours(self._session.store.secret, text) and not text.startswith(STARTS)
        except CoatcheckError:
            return False

    def _weighed(self, value: Any) -> tuple[Any, bytes, int | None]:
        """Return a message as JSON, its digest and its tokens. Providers' libraries return objects,
        which hosts send back."""
        try:
            return value, *self._tally.digest_and_tokens(value)
        except TypeError:
            value = json.loads(_dumped(value))
            return value, *self._tally.digest_and_tokens(value)

    def _tokens(self, text: str) -> int:
        """Count a text, or estimate it if the counter fails, which is reported for the prompt as a
        whole."""
        found = self._tally.tokens(text)
        return estimate(text) if found is None else found


def _described(tool: Any) -> Any:
    return tool.as_openai() if callable(getattr(tool, "as_openai", None)) else tool


def _contents(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the texts in a message, and the stubs in it that are objects."""
    if isinstance(value, str) or is_stub_object(value):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < _DEEPEST:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _contents(one, depth + 1)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_object)


def _object(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else str(value)


def cost_of(
    parts: Sequence[Part], stable: int, prices: tuple[float, float], name: str
) -> int | None:
    """Return the price of a prompt in uncached tokens, if the first `stable` parts are read from a
    cache and the others are written to it. `name` is "tokens", or "tokens_without"."""
    if any(part.tokens is None for part in parts):
        return None
    total: float = sum(getattr(part, name) * prices[at >= stable] for at, part in enumerate(parts))
    return round(total)
