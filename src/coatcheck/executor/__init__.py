"""Run the tools that a model calls: pointers in, values to the tool, bounded outcomes out."""

from coatcheck.executor.calls import ToolCall
from coatcheck.executor.outcomes import ArtifactReference, Result, Running, TimedOut, ToolError, ToolOutcome
from coatcheck.executor.pointers import PASS_POINTER, Pointer
from coatcheck.executor.run import Handle, ToolExecutor
from coatcheck.executor.schemas import resolve_arguments

__all__ = [
    "PASS_POINTER",
    "ArtifactReference",
    "Handle",
    "Pointer",
    "Result",
    "Running",
    "TimedOut",
    "ToolCall",
    "ToolError",
    "ToolExecutor",
    "ToolOutcome",
    "resolve_arguments",
]
