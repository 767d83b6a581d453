"""Coatcheck keeps large tool results out of an agent's context; every byte can be read back
exactly."""

from typing import TYPE_CHECKING, Any

from coatcheck import errors
from coatcheck.errors import CoatcheckError

if TYPE_CHECKING:
    from coatcheck._open import default, open
    from coatcheck._toolkit import toolkit
    from coatcheck.executor import ToolCall, ToolExecutor
    from coatcheck.externalize import Limit, Policy
    from coatcheck.ids import is_pointer
    from coatcheck.refs import Ref
    from coatcheck.session import Session
    from coatcheck.store import Store
    from coatcheck.values import approx_byte_size

__version__ = "0.1.0"
__all__ = [
    "CoatcheckError", "Limit", "Policy", "Ref", "Session", "Store", "ToolCall", "ToolExecutor",
    "approx_byte_size", "default", "errors", "is_pointer", "open", "toolkit",
]  # fmt: skip

_LATER = {
    "Limit": "externalize", "Policy": "externalize", "Ref": "refs", "Session": "session",
    "Store": "store", "ToolCall": "executor", "ToolExecutor": "executor",
    "approx_byte_size": "values", "default": "_open", "is_pointer": "ids", "open": "_open",
    "toolkit": "_toolkit",
}  # fmt: skip
_PACKAGES = frozenset({"context", "transcript"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


def __getattr__(name: str) -> Any:
    """Import everything but the errors when it is first used, so that a command imports only what
    it needs."""
    if name not in _LATER and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return found
