"""What goes into a prompt: hot state, budgets, recall, bootstrap files, metrics. Names are imported
on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.context._bootstrap import BootstrapFile, Bootstrapped, Kept, bootstrap
    from coatcheck.context.appended import Recalled, recall
    from coatcheck.context.budget import Budget, Enforced, Rendered, Violation
    from coatcheck.context.claims import Claim, Snapshot, claim, current, history
    from coatcheck.context.conversation import Clearing
    from coatcheck.context.hot_state import (
        Change,
        HotState,
        IndexEntry,
        artifact_index,
        changes_between,
    )
    from coatcheck.context.metrics import Meter, PromptMetrics
    from coatcheck.context.prompt import Prompt, PromptBuilder
    from coatcheck.externalize.savings import Savings, SavingsRow, savings

__all__ = [
    "BootstrapFile", "Bootstrapped", "Budget", "Change", "Claim", "Clearing", "Enforced",
    "HotState", "IndexEntry", "Kept", "Meter", "Prompt", "PromptBuilder", "PromptMetrics",
    "Recalled", "Rendered", "Savings", "SavingsRow", "Snapshot", "Violation", "artifact_index",
    "bootstrap", "changes_between", "claim", "current", "history", "recall", "savings",
]  # fmt: skip

_NAMES = {
    "_bootstrap": ("BootstrapFile", "Bootstrapped", "Kept", "bootstrap"),
    "appended": ("Recalled", "recall"),
    "budget": ("Budget", "Enforced", "Rendered", "Violation"),
    "conversation": ("Clearing",),
    "claims": ("Claim", "Snapshot", "claim", "current", "history"),
    "hot_state": ("Change", "HotState", "IndexEntry", "artifact_index", "changes_between"),
    "metrics": ("Meter", "PromptMetrics"),
    "prompt": ("Prompt", "PromptBuilder"),
}  # fmt: skip
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_MODULE_OF |= dict.fromkeys(("Savings", "SavingsRow", "savings"), "coatcheck.externalize.savings")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_MODULE_OF[name]), name)
    return found
