"""Programs: a small Python program of a model over artifacts, in a sandbox.

`read` runs one over an artifact and returns a page of what it prints. The engine (`engine`) starts
a confined process for each program; `monty` is the interpreter in it, `prelude` what a program
finds there. Needs the extra `programs`.
"""

from __future__ import annotations

from coatcheck.programs.confined import confinement
from coatcheck.programs.engine import Limits, close, is_available
from coatcheck.programs.prelude import program_in
from coatcheck.programs.reading import read, run_alone

__all__ = [
    "Limits",
    "close",
    "confinement",
    "is_available",
    "program_in",
    "read",
    "run_alone",
]
