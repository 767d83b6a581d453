"""Work that is put off until it is needed, so that a command starts quickly: the methods of dataclasses, regular
expressions, and the logger.

The standard library generates and compiles six methods for each frozen dataclass, about a millisecond. `dataclass` has
the same signature and result, but generates only `__init__`, with the first instance, and shares the other methods.
`lazy_pattern` compiles with the first use of an attribute such as `search`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, AnyStr, cast

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from logging import Logger
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, **options):
        """Make a dataclass. Methods are only put off if it is frozen, has slots, and does not extend a dataclass."""
        if not (frozen and slots) or options.keys() - {"kw_only"}:
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **options)
        return _deferred(cls, **options) if cls is not None else lambda given: _deferred(given, **options)


class _Pattern:
    """Stands for a compiled pattern. Each attribute is looked up once, and is then one of this object."""

    def __init__(self, source: str | bytes, flags: int) -> None:
        self._source: Any = source
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(re.compile(self._source, self._flags), name)
        setattr(self, name, found)
        return found


def lazy_pattern(source: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a regular expression that is compiled when it is first used. For calls of its methods only."""
    return cast("re.Pattern[AnyStr]", _Pattern(source, flags))


def logger() -> Logger:
    """Return our logger. Importing `logging` takes some milliseconds, and few processes log."""
    import logging

    return logging.getLogger("coatcheck")


def _deferred(given: type, **options: bool) -> type:
    if any(dataclasses.is_dataclass(base) for base in given.__mro__[1:]):
        return dataclasses.dataclass(frozen=True, slots=True, **options)(given)
    own = dict(vars(given))
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, **options)(given)
    fields = dataclasses.fields(made)
    names = frozenset(one.name for one in fields)
    compared = _getter([one.name for one in fields if one.compare])
    hashed = _getter([one.name for one in fields if (one.compare if one.hash is None else one.hash)])
    shown = [one.name for one in fields if one.repr]

    def first_init(self: Any, /, *args: Any, **kwargs: Any) -> None:
        made.__init__ = _init(made, fields)
        made.__init__(self, *args, **kwargs)

    def text(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def equals(self: Any, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def assign(self: Any, name: str, value: Any) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def restore(self: Any, state: list[Any]) -> None:
        for one, value in zip(fields, state, strict=True):
            object.__setattr__(self, one.name, value)

    methods: dict[str, Callable[..., Any]] = {
        "__init__": first_init, "__repr__": text, "__eq__": equals, "__hash__": lambda self: hash(hashed(self)),
        "__setattr__": assign, "__delattr__": delete, "__setstate__": restore,
        "__getstate__": lambda self: [getattr(self, one.name) for one in fields],
    }  # fmt: skip
    for name, method in methods.items():
        if name not in own:
            method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
            setattr(made, name, method)
    made.__dataclass_params__.frozen = True
    return cast("type", made)


def _init(made: type, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    """Generate the method that sets the fields."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    plain: list[str] = []
    named: list[str] = []
    steps: list[str] = []
    for number, one in enumerate(fields):
        value, has_default = one.name, one.default is not dataclasses.MISSING
        if has_default:
            known[f"_{number}"] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            known[f"_{number}"] = one.default_factory
            value = f"_{number}() if {one.name} is _missing else {one.name}" if one.init else f"_{number}()"
        default = "" if f"_{number}" not in known else f"=_{number}" if has_default else "=_missing"
        if one.init:
            (named if one.kw_only else plain).append(one.name + default)
        elif not default:
            continue
        elif has_default:
            value = f"_{number}"
        steps.append(f" _set(self, {one.name!r}, {value})")
    if hasattr(made, "__post_init__"):
        steps.append(" self.__post_init__()")
    given = ", ".join(["self", *plain, *(["*", *named] if named else [])])
    exec(f"def __init__({given}):\n" + ("\n".join(steps) or " pass"), known)  # noqa: S102 - as the standard library does
    found: Callable[..., None] = known["__init__"]
    found.__qualname__ = f"{made.__qualname__}.__init__"
    return found


def _getter(names: list[str]) -> Callable[[Any], Any]:
    """Return a function for the values of these attributes, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda one: tuple(getattr(one, name) for name in names)
