"""A binding suite of tests: a subclass cannot override, delete or skip any of them."""

from __future__ import annotations

from typing import Any, ClassVar

_EXCUSES = frozenset({"skip", "skipif", "xfail"})


class _Sealing(type):
    """Rejects `@pytest.mark.skip` on a class and later assignments, which happen after
    `__init_subclass__`."""

    def __setattr__(cls, name: str, value: object) -> None:
        _refuse_excuses(cls, name, value)
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if name.startswith("test_"):
            raise TypeError(f"{cls.__name__} cannot delete {name}: it is part of the suite")
        super().__delattr__(name)


class Suite(metaclass=_Sealing):
    """The base class of the suites. A class with `suite=True` adds tests; no subclass may change
    inherited ones."""

    _kept: ClassVar[dict[str, object]] = {}

    def __init_subclass__(cls, *, suite: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        kept = {
            name: test
            for base in reversed(cls.__mro__[1:])
            for name, test in vars(base).get("_kept", {}).items()
        }
        for name, test in kept.items():
            if getattr(cls, name, None) is not test:
                raise TypeError(
                    f"{cls.__name__} cannot override {name}: a backend must pass the suite "
                    "unchanged"
                )
        for name, value in vars(cls).items():
            if name not in kept and not suite:
                _refuse_excuses(cls, name, value)
        if suite:
            cls._kept = {name: test for name, test in vars(cls).items() if name.startswith("test_")}


def _refuse_excuses(cls: type, name: str, value: object) -> None:
    if name.startswith("test_"):
        raise TypeError(f"{cls.__name__} cannot set {name}: put your own tests in another class")
    if name == "__test__" and not value:
        raise TypeError(f"{cls.__name__} cannot disable the suite")
    if name == "pytestmark":
        for mark in value if isinstance(value, list | tuple) else [value]:
            excuse = getattr(mark, "name", "")
            if excuse in _EXCUSES:
                raise TypeError(
                    f"{cls.__name__} cannot {excuse} the suite: a backend must pass all of it"
                )
