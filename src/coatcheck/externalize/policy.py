"""When a value leaves the context, and how its stub looks: `Policy`, and `Limit` for a tool that needs another one.

Both are checked when they are made, so that a mistake shows at start-up and not in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.tokens import TokenCounter, counted, estimate

MAX_TOKENS: Final = 3_000
PREVIEW_CHARS: Final = 200
READ_TOOL: Final = "get_artifact"
COSTLIEST: Final = 5
"""No character is estimated at more tokens than this."""

_NAMED: Final = ("max_tokens", "max_chars", "max_bytes")
_UTF8: Final = 4  # bytes of a character at most
CLEARLY: Final = 1.5
"""An estimate from pieces counts where it is off the limit by so much."""

Shrink = Callable[[Any], Any]
"""Makes of a tool's result what the model is shown of it. What it answers unchanged is judged like any other result."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How large a value may be to stay in the context. Where several are named, the first one exceeded counts; where
    none is, 3,000 tokens do. An image has the tokens that providers bill for its pixels, unless its file is large."""

    max_tokens: int | None = None
    max_chars: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in _NAMED:
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidArgument(f"{name} is {_told(value)}", hint="a whole number from 1 on, or None")

    @property
    def tokens(self) -> int | None:
        """The limit in tokens that holds: none where another one is named instead."""
        if self.max_tokens is None and self.max_chars is None and self.max_bytes is None:
            return MAX_TOKENS
        return self.max_tokens

    def exceeded(
        self, text: str, count: TokenCounter | None = None, *, roughly: Callable[[], float] | None = None
    ) -> bool:
        """Whether a text is over the limit. A counter that fails, or answers what is no count, has found it too large.
        `roughly` answers about how many tokens some of it has."""
        if self.is_too_long(text):
            return True
        most = self.tokens
        if most is None or (count is None and len(text) * COSTLIEST <= most):
            return False
        if count is not None:
            tokens = counted(count, text)
            return tokens is None or tokens > most
        return (roughly is not None and roughly() > most * CLEARLY) or estimate(text) > most

    def is_too_long(self, text: str) -> bool:
        """Whether a text is over the limit in characters or bytes."""
        if self.max_chars is not None and len(text) > self.max_chars:
            return True
        return self.max_bytes is not None and _more_bytes(text, self.max_bytes)

    def times(self, factor: int) -> Limit:
        """A limit so many times as high."""
        return Limit(
            max_tokens=self.tokens and self.tokens * factor,
            max_chars=self.max_chars and self.max_chars * factor,
            max_bytes=self.max_bytes and self.max_bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Policy(Limit):
    """When a tool's result leaves the context, and how its stub looks.

    `tools` says what is different for a tool: a `Limit`, "always", "never", or a function that shrinks the result for
    the model while the whole is kept. `redact="store"` masks secrets before anything is stored; stubs show none in any
    case. `count` is the tokenizer to go by, in place of the estimate. `read_tool` is what the agent's tool for reading
    artifacts is called, None where it has none."""

    enabled: bool = True
    preview_chars: int = PREVIEW_CHARS
    tools: Mapping[str, Limit | Literal["always", "never"] | Shrink] = field(default_factory=dict, hash=False)
    redact: Literal["store"] | None = None
    count: TokenCounter | None = None
    read_tool: str | None = READ_TOOL
    safe_chars: int = field(init=False, repr=False, compare=False, default=0)
    """A text of so many characters stays inline, whatever they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.enabled, bool):
            raise InvalidArgument(f"enabled is {_told(self.enabled)}", hint="True or False")
        chars: object = self.preview_chars
        if not isinstance(chars, int) or isinstance(chars, bool) or chars < 0:
            raise InvalidArgument(f"preview_chars is {_told(chars)}", hint="a whole number, 0 for none")
        if self.redact not in (None, "store"):
            raise InvalidArgument(f"redact is {_told(self.redact)}", hint='"store", or None')
        if self.count is not None and not callable(self.count):
            raise InvalidArgument(f"count is {_told(self.count)}", hint="a function of a text that answers a number")
        name: object = self.read_tool
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isprintable()):
            raise InvalidArgument(f"read_tool is {_told(name)}", hint="the name of a tool, or None")
        object.__setattr__(self, "tools", MappingProxyType(_checked(self.tools)))
        object.__setattr__(self, "safe_chars", self._safe())

    def _safe(self) -> int:
        tokens = self.tokens
        bounds = [
            None if tokens is None else (tokens // COSTLIEST if self.count is None else 0),
            self.max_chars,
            None if self.max_bytes is None else self.max_bytes // _UTF8,
        ]
        return min(bound for bound in bounds if bound is not None) if self.enabled else 0


def _more_bytes(text: str, most: int) -> bool:
    if len(text) > most or len(text) * _UTF8 <= most:
        return len(text) > most
    return len(text.encode("utf-8", "surrogatepass")) > most


def _checked(tools: object) -> dict[str, Any]:
    if not isinstance(tools, Mapping):
        raise InvalidArgument(f"tools is a {type(tools).__name__}", hint='a mapping, e.g. {"read_file": "never"}')
    for name, rule in tools.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"{_told(name)} in tools is no name of a tool")
        if isinstance(rule, Policy):
            raise InvalidArgument(f"the rule for {clip(name)} is a Policy", hint="a tool has a Limit of its own")
        if rule not in ("always", "never") and not isinstance(rule, Limit) and not callable(rule):
            raise InvalidArgument(
                f"the rule for {clip(name)} is {_told(rule)}", hint='a Limit, "always", "never" or a function'
            )
    return dict(tools)


def _told(value: object) -> str:
    return clip(repr(value), 60) if not isinstance(value, int | str) else clip(str(value), 60)
