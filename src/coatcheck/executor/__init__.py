"""Run the tools that a model calls: pointers become values, and results become bounded outcomes."""

from coatcheck._toolkit import Description
from coatcheck.executor.arguments import PASS_POINTER, Pointer, resolve_arguments
from coatcheck.executor.binding import stays_inline, widened, widened_schema
from coatcheck.executor.outcomes import (
    ArtifactReference,
    Handle,
    Result,
    Running,
    TimedOut,
    ToolCall,
    ToolError,
    ToolOutcome,
)
from coatcheck.executor.programs import ProgramCall, ProgramOutcome, Programs
from coatcheck.executor.run import ToolExecutor
from coatcheck.executor.turns import Turn

__all__ = [
    "PASS_POINTER", "ArtifactReference", "Description", "Handle", "Pointer", "ProgramCall",
    "ProgramOutcome", "Programs", "Result", "Running", "TimedOut", "ToolCall", "ToolError",
    "ToolExecutor", "ToolOutcome", "Turn", "resolve_arguments", "stays_inline", "widened",
    "widened_schema",
]  # fmt: skip
