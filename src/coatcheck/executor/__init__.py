"""Run the tools that a model calls: pointers in, values to the tool, bounded outcomes out."""

from coatcheck.descriptions import Description
from coatcheck.executor.calls import ToolCall
from coatcheck.executor.outcomes import ArtifactReference, Result, Running, TimedOut, ToolError, ToolOutcome
from coatcheck.executor.pointers import PASS_POINTER, Pointer
from coatcheck.executor.run import Handle, ToolExecutor

__all__ = [
    "PASS_POINTER",
    "ArtifactReference",
    "Description",
    "Handle",
    "Pointer",
    "Result",
    "Running",
    "TimedOut",
    "ToolCall",
    "ToolError",
    "ToolExecutor",
    "ToolOutcome",
]
