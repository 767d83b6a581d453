"""The settings: one table with each key, what it takes, its default, its environment variable and what it means.

The names under a section are the parameters of what the section sets up, so that `Policy(**settings.section("policy"))`
is all there is to it. A default here is the default there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

NONE: Final = "none"
"""What a file or a variable says where a setting can be without a value: TOML has no null."""

_SWITCH: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_LARGEST: Final = 1 << 63
_LONGEST: Final = 4_096
_LIMITS: Final = ("max_tokens", "max_chars", "max_bytes")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` is what it takes: a `place` is a path or url, relative ones to the file that names it;
    `rules` are what `Policy` takes for single tools."""

    key: str
    kind: Literal["switch", "whole", "number", "text", "place", "rules"]
    default: Any
    about: str
    least: int = 1
    optional: bool = False
    choices: tuple[str, ...] = ()
    named: str = ""

    @property
    def variable(self) -> str | None:
        """The environment variable; None for what one line of text cannot say."""
        return None if self.kind == "rules" else self.named or "COATCHECK_" + self.key.upper().replace(".", "_")

    @property
    def takes(self) -> str:
        """What is right for it, in words."""
        told = {
            "switch": "true or false",
            "whole": f"a whole number from {self.least} on",
            "number": f"a number from {self.least} on",
            "text": "one of " + ", ".join(map(repr, self.choices)) if self.choices else "a text",
            "place": "a path or url",
            "rules": f'for each tool "always", "never" or a table of {", ".join(_LIMITS)}',
        }[self.kind]
        return f"{told}, or {NONE!r}" if self.optional else told

    def parsed(self, text: str) -> Any:
        """The value that a variable's text says. Raises ValueError where it says none."""
        value: object = text.strip()
        if self.kind == "switch":
            value = _SWITCH.get(text.strip().lower())
        elif self.kind in ("whole", "number") and value != NONE:
            value = int(text) if self.kind == "whole" else float(text)
        return self.written(value)

    def written(self, value: object) -> Any:
        """The value that a file says, where "none" is none. Raises ValueError where it cannot be right."""
        return None if self.optional and value == NONE else self.checked(value)

    def checked(self, value: object) -> Any:
        """The value, if it is right. Raises ValueError where it is not."""
        if not (self.optional and value is None) and not self._fits(value):
            raise ValueError
        return value

    def _fits(self, value: object) -> bool:
        match self.kind:
            case "switch":
                return isinstance(value, bool)
            case "whole":
                return isinstance(value, int) and not isinstance(value, bool) and self.least <= value < _LARGEST
            case "number":
                return (
                    isinstance(value, int | float)
                    and not isinstance(value, bool)
                    and math.isfinite(value)
                    and value >= self.least
                )
            case "place":
                return isinstance(value, str) and 0 < len(value) <= _LONGEST and "\0" not in value
            case "text":
                is_line = isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()
                return is_line and (not self.choices or value in self.choices)
            case "rules":
                return isinstance(value, Mapping) and all(map(_is_rule, value.values()))


def _is_rule(rule: object) -> bool:
    if not isinstance(rule, Mapping):
        return rule in ("always", "never")
    counted = (isinstance(most, int) and not isinstance(most, bool) and most > 0 for most in rule.values())
    return bool(rule) and set(rule) <= set(_LIMITS) and all(counted)


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("store.url", "place", None, "the store; the user's data folder where none is named",
            optional=True, named="COATCHECK_STORE"),
    Setting("store.durability", "text", "power", "what an acknowledged put survives: a power cut, or the process",
            choices=("power", "process")),
    Setting("store.tenant", "text", None, "the tenant whose store is opened", optional=True, named="COATCHECK_TENANT"),
    Setting("store.grace", "number", 7_200.0, "seconds that expired artifacts are kept before collect removes them",
            least=0),
    Setting("store.max_artifact_bytes", "whole", None, "the most that one artifact has", optional=True),
    Setting("store.quota_bytes", "whole", None, "the most that the whole store has", optional=True),
    Setting("session.id", "text", "default", "the session that commands look in", named="COATCHECK_SESSION"),
    Setting("session.ttl", "number", 3_600.0, "seconds that a new session lives after its last use",
            least=0, optional=True),
    Setting("policy.enabled", "switch", True, "whether large tool results leave the context"),
    Setting("policy.max_tokens", "whole", None,
            "a tool result with more is stored; 3000 where no limit is named", optional=True),
    Setting("policy.max_chars", "whole", None, "the same, in characters", optional=True),
    Setting("policy.max_bytes", "whole", None, "the same, in bytes", optional=True),
    Setting("policy.preview_chars", "whole", 200, "the most that a stub shows of the content", least=0),
    Setting("policy.redact", "text", None, "mask secrets before anything is stored", choices=("store",), optional=True),
    Setting("policy.read_tool", "text", "get_artifact", "what the agent's tool for reading artifacts is called",
            optional=True),
    Setting("policy.tools", "rules", {}, "what is different for single tools"),
    Setting("page.max_chars", "whole", 8_000, "the most that one page of an artifact has", least=1_500),
    Setting("tools.max_store_bytes", "whole", 524_288, "the most that a model stores at once"),
    Setting("budget.max_hot_state_tokens", "whole", 1_000, "the most tokens of a hot state"),
    Setting("budget.max_artifact_index_entries", "whole", 20, "the most artifacts that a hot state lists", least=0),
    Setting("budget.max_prompt_tokens", "whole", 8_000, "the most tokens of a prompt"),
    Setting("budget.max_rag_chunks", "whole", 10, "the most retrieved chunks in a prompt", least=0),
    Setting("budget.max_inline_artifact_chars", "whole", 2_000, "the most characters of one artifact in a prompt"),
    Setting("bootstrap.enabled", "switch", True, "whether large bootstrap files become references",
            named="COATCHECK_BOOTSTRAP_REFS"),
    Setting("bootstrap.threshold_chars", "whole", 8_000, "a bootstrap file with more becomes a reference"),
    Setting("bootstrap.shown_chars", "whole", 4_000, "what the prompt keeps of its head and tail together", least=0),
    Setting("memory.artifacts.enabled", "switch", True, "whether prompts recall artifacts"),
    Setting("memory.artifacts.max_items", "whole", 8, "the most artifacts that are recalled"),
    Setting("memory.artifacts.max_chars", "whole", 2_000, "the most characters of all that is recalled", least=300),
    Setting("memory.artifacts.narrative_max_chars", "whole", 240, "the most characters of one summary", least=0),
    Setting("metrics.enabled", "switch", True, "whether figures of model calls are kept"),
    Setting("metrics.file", "place", None, "a file that gets a line of JSON for each model call", optional=True),
    Setting("metrics.logger", "text", None, "a logger that gets the same line", optional=True),
    Setting("metrics.opentelemetry", "switch", True, "whether OpenTelemetry gets them, where the host has it"),
    Setting("metrics.keep", "whole", 10_000, "the most model calls that are kept for a session"),
    Setting("metrics.release", "text", None, "the release that figures are kept under; coatcheck's own without one",
            optional=True),
    Setting("metrics.baseline", "place", None, "a file with the figures of the release before", optional=True),
    Setting("metrics.warn_hot_state_tokens", "whole", 800, "warn of a hot state with more tokens"),
    Setting("metrics.warn_index_entries", "whole", 15, "warn of an index with more artifacts"),
    Setting("metrics.warn_prompt_tokens", "whole", 6_000, "warn of a prompt with more tokens"),
    Setting("metrics.warn_rise_percent", "whole", 50, "warn of a figure that is so much above its baseline"),
    Setting("metrics.price_cached", "number", 0.1, "what a token costs that a provider had cached; 1 is one not cached",
            least=0),
    Setting("metrics.price_cache_write", "number", 1.25, "what a token costs that a provider writes to its cache",
            least=0),
)  # fmt: skip

BY_KEY: Final[Mapping[str, Setting]] = {setting.key: setting for setting in SETTINGS}
SECTIONS: Final = tuple(dict.fromkeys(setting.key.rpartition(".")[0] for setting in SETTINGS))
