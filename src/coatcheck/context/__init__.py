"""What goes into a prompt, how much of it, and proof that it did not grow: each name is imported when it is asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.context.budget import Budget, Violation

__all__ = ["Budget", "Violation"]

_LATER = {
    "Budget": "coatcheck.context.budget",
    "Violation": "coatcheck.context.budget",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found
