"""What goes into a prompt, how much of it, and proof that it did not grow. Each name is imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.context.budget import Budget, Violation
    from coatcheck.context.changes import Change, changes_between
    from coatcheck.context.claims import Claim, Snapshot, claim, current, history
    from coatcheck.context.fitting import Rendered
    from coatcheck.context.hot_state import HotState, IndexEntry, artifact_index
    from coatcheck.context.metrics import Meter, PromptMetrics

__all__ = [
    "Budget", "Change", "Claim", "HotState", "IndexEntry", "Meter", "PromptMetrics", "Rendered", "Snapshot",
    "Violation", "artifact_index", "changes_between", "claim", "current", "history",
]  # fmt: skip

_LATER = {
    "Budget": "coatcheck.context.budget",
    "Change": "coatcheck.context.changes",
    "Claim": "coatcheck.context.claims",
    "HotState": "coatcheck.context.hot_state",
    "IndexEntry": "coatcheck.context.hot_state",
    "Meter": "coatcheck.context.metrics",
    "PromptMetrics": "coatcheck.context.metrics",
    "Rendered": "coatcheck.context.fitting",
    "Snapshot": "coatcheck.context.claims",
    "Violation": "coatcheck.context.budget",
    "artifact_index": "coatcheck.context.hot_state",
    "changes_between": "coatcheck.context.changes",
    "claim": "coatcheck.context.claims",
    "current": "coatcheck.context.claims",
    "history": "coatcheck.context.claims",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found
