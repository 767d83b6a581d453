"""`ToolCall`: what a model asked for, as a provider sent it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: the provider's id for it, the tool's name, and the arguments as a dict or as JSON text."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)

    @classmethod
    def from_openai(cls, item: object) -> ToolCall:
        """From an entry of `message.tool_calls`, or a `function_call` item of the Responses API; dict or object."""
        function = _field(item, "function")
        if function is None:
            return cls(_text(item, "call_id"), _text(item, "name"), _field(item, "arguments") or "")
        return cls(_text(item, "id"), _text(function, "name"), _field(function, "arguments") or "")

    @classmethod
    def from_anthropic(cls, block: object) -> ToolCall:
        """From a `tool_use` block; dict or object."""
        return cls(_text(block, "id"), _text(block, "name"), _field(block, "input") or {})

    def parsed(self) -> dict[str, Any]:
        """The arguments as a dict. Raises `InvalidArgument` where they are not the JSON of an object."""
        given: object = self.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    f"the arguments are not JSON: {clip(str(error), 200)}", hint="send one JSON object"
                ) from error
        if given is None:
            return {}
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise InvalidArgument(
                f"the arguments are a {type(given).__name__}, not an object",
                hint='send one JSON object, e.g. {"q": "…"}',
            )
        return dict(given)


def _field(item: object, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def _text(item: object, key: str) -> str:
    found = _field(item, key)
    if not isinstance(found, str):
        raise InvalidArgument(f"a tool call without {key!r}: {clip(repr(item), 200)}")
    return found
