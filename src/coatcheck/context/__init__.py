"""What goes into a prompt, how much of it, and proof that it did not grow. Each name is imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.context._bootstrap import BootstrapFile, Bootstrapped, bootstrap
    from coatcheck.context._recall import Recalled, recall
    from coatcheck.context.budget import Budget, Violation
    from coatcheck.context.changes import Change, changes_between
    from coatcheck.context.claims import Claim, Snapshot, claim, current, history
    from coatcheck.context.fitting import Rendered
    from coatcheck.context.hot_state import HotState, IndexEntry, artifact_index
    from coatcheck.context.metrics import Meter, PromptMetrics
    from coatcheck.context.prompt import Prompt, PromptBuilder
    from coatcheck.context.references import Enforced

__all__ = [
    "BootstrapFile", "Bootstrapped", "Budget", "Change", "Claim", "Enforced", "HotState", "IndexEntry", "Meter",
    "Prompt", "PromptBuilder", "PromptMetrics", "Recalled", "Rendered", "Snapshot", "Violation", "artifact_index",
    "bootstrap", "changes_between", "claim", "current", "history", "recall",
]  # fmt: skip

_LATER = {
    "BootstrapFile": "coatcheck.context._bootstrap",
    "Bootstrapped": "coatcheck.context._bootstrap",
    "Budget": "coatcheck.context.budget",
    "Change": "coatcheck.context.changes",
    "Claim": "coatcheck.context.claims",
    "Enforced": "coatcheck.context.references",
    "HotState": "coatcheck.context.hot_state",
    "IndexEntry": "coatcheck.context.hot_state",
    "Meter": "coatcheck.context.metrics",
    "Prompt": "coatcheck.context.prompt",
    "PromptBuilder": "coatcheck.context.prompt",
    "PromptMetrics": "coatcheck.context.metrics",
    "Recalled": "coatcheck.context._recall",
    "Rendered": "coatcheck.context.fitting",
    "Snapshot": "coatcheck.context.claims",
    "Violation": "coatcheck.context.budget",
    "artifact_index": "coatcheck.context.hot_state",
    "bootstrap": "coatcheck.context._bootstrap",
    "changes_between": "coatcheck.context.changes",
    "claim": "coatcheck.context.claims",
    "current": "coatcheck.context.claims",
    "history": "coatcheck.context.claims",
    "recall": "coatcheck.context._recall",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found
