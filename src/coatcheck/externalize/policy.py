"""When a value leaves the context and what its stub looks like: `Policy`, and `Limit` for a single
tool.

Both are validated when they are created, so that a mistake shows at start-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

from coatcheck.checks import one_of, seconds, valid, whole
from coatcheck.config import Settings
from coatcheck.externalize.decision import LEAST_TOKENS
from coatcheck.externalize.file_hints import COMMANDS, commands_here
from coatcheck.ids import clip
from coatcheck.models import Prices
from coatcheck.refs import Ref
from coatcheck.tokens import (
    CLEARLY,
    TokenCounter,
    Weighed,
    counted,
    estimate,
    probably_exceeds,
    roughly,
)

MAX_TOKENS: Final = 3_000
PREVIEW_CHARS: Final = 1_200
READ_TOOL: Final = "get_artifact"
READ_ARGUMENTS: Final = ("pointer", "lines", "grep", "query")
COSTLIEST: Final = 5
"""Maximum number of tokens that the estimate counts for one character."""

_UTF8: Final = 4  # maximum bytes per character
_END: Final = 64 * 1_024
_LONGEST_PATH: Final = 150  # characters of the path of a folder, which is a part of every stub

Shrink = Callable[[Any], Any]
"""Turns a tool's result into what the model is shown. A result that it returns unchanged is handled
as usual."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How large a value may be to stay in the context.

    If several limits are set, exceeding one is enough. If none is, a `Policy` decides by expected
    cost; elsewhere the limit is 3,000 tokens. `max_bytes` counts what `approx_byte_size` returns,
    which is what the store keeps. An image counts as the tokens that providers bill for its pixels;
    limits in characters and bytes do not apply to it."""

    max_tokens: int | None = None
    max_chars: int | None = None
    max_bytes: int | None = None
    is_named: bool = field(init=False, repr=False, compare=False, default=False)
    """Whether any limit is set."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_chars", "max_bytes"):
            whole(getattr(self, name), name, least=1, optional=True)
        limits = (self.max_tokens, self.max_chars, self.max_bytes)
        object.__setattr__(self, "is_named", any(most is not None for most in limits))

    @property
    def tokens(self) -> int | None:
        """The effective limit in tokens; None if only other limits are set."""
        return self.max_tokens if self.is_named else MAX_TOKENS

    def exceeded(
        self,
        text: str,
        count: TokenCounter | None = None,
        *,
        size: int | None = None,
        weighed: Weighed | None = None,
    ) -> bool:
        """Whether a text is over the limit. It is if the counter fails or does not return a number.

        `size` is the byte size of the value, if it differs from the size of the text. `weighed` is
        the text with an estimate of the tokens at its ends, if the caller has one."""
        if self.is_too_long(text, size):
            return True
        most = self.tokens
        if most is None or (count is None and len(text) * COSTLIEST <= most):
            return False
        if count is not None:
            tokens = counted(count, text)
            return tokens is None or tokens > most
        if weighed is not None:
            seen = weighed.tokens
        else:
            ends = text if len(text) <= 2 * _END else text[:_END] + text[-_END:]
            seen = roughly(ends.encode("utf-8", "surrogatepass"))
        return (
            seen > most * CLEARLY or estimate(text) > most
        )  # the ends are enough if a text is clearly too long

    def probably_exceeded(self, text: str, count: TokenCounter | None = None) -> bool:
        """Like `exceeded`, but tokens are estimated from samples if they alone decide: for the many
        texts of a file."""
        most = self.tokens
        if (
            most is None
            or count is not None
            or self.max_chars is not None
            or self.max_bytes is not None
        ):
            return self.exceeded(text, count)
        return probably_exceeds(text, most)

    def is_too_long(self, text: str, size: int | None = None) -> bool:
        """Whether a text is over the limit in characters or bytes. `size` replaces the byte size of
        the text."""
        if self.max_chars is not None and len(text) > self.max_chars:
            return True
        most = self.max_bytes
        if most is None or (size is None and len(text) * _UTF8 <= most):
            return False
        if size is None:
            size = len(text) if len(text) > most else len(text.encode("utf-8", "surrogatepass"))
        return size > most

    def _safe(self, tokens_per_char: int, bytes_per_char: int, unnamed: int) -> int:
        """Return how many characters certainly do not exceed this limit. `unnamed` is the limit in
        tokens if none is set."""
        if not self.is_named:
            return unnamed // tokens_per_char
        bounds: list[int] = []
        if self.max_tokens is not None:
            bounds.append(self.max_tokens // tokens_per_char)
        if self.max_chars is not None:
            bounds.append(self.max_chars)
        if self.max_bytes is not None:
            bounds.append(self.max_bytes // bytes_per_char)
        return min(bounds)

    def times(self, factor: int) -> Limit:
        """Return this limit multiplied by a factor."""
        limits = {
            "max_tokens": self.tokens,
            "max_chars": self.max_chars,
            "max_bytes": self.max_bytes,
        }
        return Limit(**{name: most and most * factor for name, most in limits.items()})


@dataclass(frozen=True, kw_only=True)
class Policy(Limit):
    """When a tool's result leaves the context, and what its stub looks like.

    Without a limit, a result leaves if that is expected to cost less (see `externalize.decision`),
    with the prices of `model`, or `prices` instead. `expected_calls` are the model calls still to
    come, if the host knows.

    `tools` has the exceptions by tool name: a `Limit`, "always", "never", or a function that
    shrinks the result for the model while the store keeps all of it. `redact="store"` masks secrets
    before anything is stored; stubs never show them. `count` is a token counter to use instead of
    the estimate. `read_tool` is the name of the agent's tool for reading artifacts, or None;
    `read_arguments` are the arguments it accepts. `resolves` is True if pointers in the arguments
    of the agent's tools are resolved. A `ToolExecutor` sets these three for its own tools. `render`
    writes the stub instead of Coatcheck, from the ref and the first `preview_chars` characters,
    with secrets masked. `files` is a folder in which each stored result is a file too, for agents
    that read files: the stub names it, with a command line for one of `commands`, by default those
    of grep, sed, jq and python3 that this machine has. `ttl` limits the life of a stored result, in
    seconds. `reference` is called with the ref of each payload that leaves a line of a transcript,
    and "tool-result", "tool-call" or "message". What it returns for the first payload of a tool
    result of pi or OpenClaw is written into the line, as `details.artifactRef`."""

    enabled: bool = True
    preview_chars: int = PREVIEW_CHARS
    tools: Mapping[str, Limit | Literal["always", "never"] | Shrink] = field(
        default_factory=dict, hash=False
    )
    redact: Literal["store"] | None = None
    count: TokenCounter | None = None
    read_tool: str | None = READ_TOOL
    read_arguments: tuple[str, ...] = READ_ARGUMENTS
    resolves: bool = False
    render: Callable[[Ref, str], str] | None = None
    files: str | os.PathLike[str] | None = None
    commands: tuple[str, ...] | None = None
    ttl: float | None = None
    reference: Callable[[Ref, str], Mapping[str, Any]] | None = None
    model: str | None = None
    prices: Prices | None = None
    expected_calls: int | None = None
    safe_chars: int = field(init=False, repr=False, compare=False, default=0)
    """A text of at most this many characters stays inline, whatever it contains and whichever tool
    it came from."""
    safe_ascii: int = field(init=False, repr=False, compare=False, default=0)
    """The same for a text of ASCII characters alone. No estimate counts more tokens than bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.preview_chars, "preview_chars")
        one_of(self.redact, "redact", ("store",), optional=True)
        seconds(self.ttl, "ttl", optional=True)
        whole(self.expected_calls, "expected_calls", optional=True)
        valid(
            self.model is None or isinstance(self.model, str),
            self.model,
            "model",
            "the name of a model or None",
        )
        valid(
            self.prices is None or isinstance(self.prices, Prices),
            self.prices,
            "prices",
            "Prices or None",
        )
        given: dict[str, Any] = vars(self)
        tools, name, takes = given["tools"], given["read_tool"], given["read_arguments"]
        for flag in ("enabled", "resolves"):
            valid(isinstance(given[flag], bool), given[flag], flag, "True or False")
        valid(
            self.count is None or callable(self.count),
            self.count,
            "count",
            "a function from a text to a number",
        )
        for function in ("render", "reference"):
            is_function = given[function] is None or callable(given[function])
            valid(is_function, given[function], function, "a function of a ref and a text")
        is_name = isinstance(name, str) and 0 < len(name) <= 64 and name.isprintable()
        valid(name is None or is_name, name, "read_tool", "the name of a tool or None")
        are_names = isinstance(takes, tuple) and all(isinstance(one, str) for one in takes)
        valid(are_names, takes, "read_arguments", 'a tuple of names, e.g. ("pointer", "lines")')
        self._check_files()
        is_mapping = isinstance(tools, Mapping) and all(isinstance(one, str) for one in tools)
        valid(is_mapping, tools, "tools", 'a mapping of tool names, e.g. {"read_file": "never"}')
        for tool, rule in tools.items():
            is_rule = rule in ("always", "never") or callable(rule) or isinstance(rule, Limit)
            is_rule = is_rule and not isinstance(rule, Policy)
            valid(
                is_rule,
                rule,
                f"the rule for {clip(tool)}",
                'a Limit, "always", "never" or a function',
            )
        object.__setattr__(self, "tools", MappingProxyType(dict(tools)))
        object.__setattr__(self, "safe_chars", self._safe_chars(COSTLIEST, _UTF8, LEAST_TOKENS))
        object.__setattr__(self, "safe_ascii", self._safe_chars(1, 1, LEAST_TOKENS))

    def _check_files(self) -> None:
        files: object = self.files
        if isinstance(files, os.PathLike):
            files = os.fspath(files)
            object.__setattr__(self, "files", files)
        is_path = isinstance(files, str) and 0 < len(files) <= _LONGEST_PATH and files.isprintable()
        valid(files is None or is_path, files, "files", 'the path of a folder, e.g. ".coatcheck"')
        commands: object = self.commands
        are_known = isinstance(commands, tuple) and set(commands) <= set(COMMANDS)
        valid(commands is None or are_known, commands, "commands", f"some of {COMMANDS}")
        if files is not None and commands is None:
            object.__setattr__(self, "commands", commands_here())

    def decides_by_cost(self, tool: str | None) -> bool:
        """Whether neither a limit nor a rule for the tool decides about its results."""
        return self.enabled and not self.is_named and (tool or "") not in self.tools

    def limited(self, **changes: Any) -> Policy:
        """Return this policy with other limits instead of its own, and with any other changes.
        Rules for tools stay."""
        return replace(self, **{"max_tokens": None, "max_chars": None, "max_bytes": None} | changes)

    def safe_in_files(self) -> int:
        """Like `safe_chars`, for the texts of a transcript, where cost does not decide."""
        return self._safe_chars(COSTLIEST, _UTF8, MAX_TOKENS)

    def _safe_chars(self, tokens_per_char: int, bytes_per_char: int, unnamed: int) -> int:
        if not self.enabled:
            return 0
        limits: list[Limit] = [self]
        for rule in self.tools.values():
            if isinstance(rule, Limit):
                limits.append(rule)
            elif rule != "never":  # it may replace any text
                return 0
        if self.count is not None and any(one.tokens is not None for one in limits):
            return 0
        return min(one._safe(tokens_per_char, bytes_per_char, unnamed) for one in limits)


@lru_cache(maxsize=64)
def configured(settings: Settings, redact: Literal["store"] | None = None) -> Policy:
    """Return the policy from the settings, which applies where code passes none. `redact` masks
    secrets even if the settings do not.

    Cached, because a result of 100 bytes would take 16 µs instead of 2: callers that externalize
    every result of a tool would notice."""
    section = settings.section("policy")
    rules = {
        tool: rule if isinstance(rule, str) else Limit(**rule)
        for tool, rule in section["tools"].items()
    }
    return Policy(**section | {"tools": rules, "redact": redact or section["redact"]})
