"""Short descriptions of content, for stubs and people. Names are imported on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coatcheck.previews.excerpts import Preview
    from coatcheck.previews.kinds import EDGE, LEAST, SCANNED, Facts, Sample, facts, preview

__all__ = ["EDGE", "LEAST", "SCANNED", "Facts", "Preview", "Sample", "facts", "preview"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"{__name__}.kinds"), name)
    return found
