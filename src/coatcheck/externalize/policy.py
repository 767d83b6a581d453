"""When a value leaves the context and what its stub looks like: `Policy`, and `Limit` for a single tool.

Both are validated when they are created, so that a mistake shows at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

from coatcheck.config import Settings
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.tokens import TokenCounter, counted, estimate

MAX_TOKENS: Final = 3_000
PREVIEW_CHARS: Final = 200
READ_TOOL: Final = "get_artifact"
READ_ARGUMENTS: Final = ("pointer", "lines", "grep", "query")
COSTLIEST: Final = 5
"""The most tokens that the estimate counts for one character."""

CLEARLY: Final = 1.5
"""How far an estimate from samples must be from the limit to count."""

_UTF8: Final = 4  # maximum bytes per character

Shrink = Callable[[Any], Any]
"""Turns a tool's result into what the model is shown. A result that it returns unchanged is handled as usual."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How large a value may be to stay in the context.

    If several limits are set, exceeding one is enough; if none is, the limit is 3,000 tokens. `max_bytes` counts what
    `approx_byte_size` returns, which is what the store keeps. An image counts as the tokens that providers bill for its
    pixels, unless its file is large."""

    max_tokens: int | None = None
    max_chars: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_chars", "max_bytes"):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, _is_whole(value, 1), "a whole number, at least 1, or None")

    @property
    def tokens(self) -> int | None:
        """The effective limit in tokens; None if only other limits are set."""
        if self.max_tokens is None and self.max_chars is None and self.max_bytes is None:
            return MAX_TOKENS
        return self.max_tokens

    def exceeded(
        self,
        text: str,
        count: TokenCounter | None = None,
        *,
        roughly: Callable[[], float] | None = None,
        size: int | None = None,
    ) -> bool:
        """Whether a text is over the limit. It is if the counter fails or does not return a number.

        `roughly` returns a quick lower estimate of the tokens. `size` is the byte size of the value, if it is not that
        of the text."""
        if self.is_too_long(text, size):
            return True
        most = self.tokens
        if most is None or (count is None and len(text) * COSTLIEST <= most):
            return False
        if count is not None:
            tokens = counted(count, text)
            return tokens is None or tokens > most
        return (roughly is not None and roughly() > most * CLEARLY) or estimate(text) > most

    def is_too_long(self, text: str, size: int | None = None) -> bool:
        """Whether a text is over the limit in characters or bytes. `size` replaces the byte size of the text."""
        if self.max_chars is not None and len(text) > self.max_chars:
            return True
        most = self.max_bytes
        if most is None or (size is None and len(text) * _UTF8 <= most):
            return False
        if size is None:
            size = len(text) if len(text) > most else len(text.encode("utf-8", "surrogatepass"))
        return size > most

    def times(self, factor: int) -> Limit:
        """Return this limit multiplied by a factor."""
        return Limit(
            max_tokens=self.tokens and self.tokens * factor,
            max_chars=self.max_chars and self.max_chars * factor,
            max_bytes=self.max_bytes and self.max_bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Policy(Limit):
    """When a tool's result leaves the context, and what its stub looks like.

    `tools` has the exceptions by tool name: a `Limit`, "always", "never", or a function that shrinks the result for the
    model while the store keeps all of it. `redact="store"` masks secrets before anything is stored; stubs never show
    them. `count` is a token counter to use instead of the estimate. `read_tool` is the name of the agent's tool for
    reading artifacts, or None; `read_arguments` are the arguments it accepts. `resolves` is True if pointers in the
    arguments of the agent's tools are resolved. A `ToolExecutor` sets these three for its own tools."""

    enabled: bool = True
    preview_chars: int = PREVIEW_CHARS
    tools: Mapping[str, Limit | Literal["always", "never"] | Shrink] = field(default_factory=dict, hash=False)
    redact: Literal["store"] | None = None
    count: TokenCounter | None = None
    read_tool: str | None = READ_TOOL
    read_arguments: tuple[str, ...] = READ_ARGUMENTS
    resolves: bool = False
    safe_chars: int = field(init=False, repr=False, compare=False, default=0)
    """A text of at most this many characters stays inline, whatever it contains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name: object = self.read_tool
        takes: object = self.read_arguments
        is_name = name is None or (isinstance(name, str) and 0 < len(name) <= 64 and name.isprintable())
        are_names = isinstance(takes, tuple) and all(isinstance(argument, str) for argument in takes)
        _check("enabled", self.enabled, isinstance(self.enabled, bool), "True or False")
        _check("preview_chars", self.preview_chars, _is_whole(self.preview_chars, 0), "a whole number, 0 for none")
        _check("redact", self.redact, self.redact in (None, "store"), '"store" or None')
        _check("count", self.count, self.count is None or callable(self.count), "a function from a text to a number")
        _check("read_tool", name, is_name, "the name of a tool, or None")
        _check("read_arguments", takes, are_names, 'a tuple of names, e.g. ("pointer", "lines")')
        _check("resolves", self.resolves, isinstance(self.resolves, bool), "True or False")
        object.__setattr__(self, "tools", MappingProxyType(_checked_tools(self.tools)))
        object.__setattr__(self, "safe_chars", self._safe_chars())

    def _safe_chars(self) -> int:
        tokens = self.tokens
        bounds = [
            None if tokens is None else (tokens // COSTLIEST if self.count is None else 0),
            self.max_chars,
            None if self.max_bytes is None else self.max_bytes // _UTF8,
        ]
        return min(bound for bound in bounds if bound is not None) if self.enabled else 0


@lru_cache(maxsize=64)
def configured(settings: Settings) -> Policy:
    """Return the policy from the settings, which applies where code passes none."""
    section = settings.section("policy")
    rules = {tool: rule if isinstance(rule, str) else Limit(**rule) for tool, rule in section["tools"].items()}
    return Policy(**section | {"tools": rules})


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        given = str(value) if isinstance(value, int | str) else repr(value)
        raise InvalidArgument(f"{name} is invalid: {clip(given, 60)}", hint=f"pass {expected}")


def _checked_tools(tools: object) -> dict[str, Any]:
    if not isinstance(tools, Mapping):
        raise InvalidArgument(
            f"tools must be a mapping, got a {type(tools).__name__}", hint='e.g. {"read_file": "never"}'
        )
    for name, rule in tools.items():
        _check("a tool name in tools", name, isinstance(name, str), "names as strings")
        if isinstance(rule, Policy):
            raise InvalidArgument(f"the rule for {clip(name)} is a Policy", hint="pass a Limit for a single tool")
        is_rule = rule in ("always", "never") or isinstance(rule, Limit) or callable(rule)
        _check(f"the rule for {clip(name)}", rule, is_rule, 'a Limit, "always", "never" or a function')
    return dict(tools)
