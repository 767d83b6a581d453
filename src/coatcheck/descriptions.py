"""What a model is told of a tool, in the form that its provider wants: the same bytes every time, since providers cache
them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Description:
    """A tool's name, what it does, and the JSON schema of its arguments. `read_only` is None where nobody said."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    read_only: bool | None

    def as_openai(self) -> dict[str, Any]:
        """For chat completions."""
        return {"type": "function", "function": self._described("parameters")}

    def as_openai_responses(self) -> dict[str, Any]:
        """For the Responses API. Not strict: that would want every argument in every call."""
        return {"type": "function", **self._described("parameters"), "strict": False}

    def as_anthropic(self) -> dict[str, Any]:
        return self._described("input_schema")

    def as_mcp(self) -> dict[str, Any]:
        said = {} if self.read_only is None else {"annotations": {"readOnlyHint": self.read_only}}
        return {**self._described("inputSchema"), **said}

    def _described(self, schema: str) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, schema: copy.deepcopy(dict(self.parameters))}
