"""What makes a conformance suite binding: a subclass cannot override, delete or skip its tests."""

from __future__ import annotations

from typing import Any, ClassVar

_EXCUSES = frozenset({"skip", "skipif", "xfail"})


class _Sealing(type):
    """`@pytest.mark.skip` on a class, or an assignment to it, comes after `__init_subclass__`: it is refused here."""

    def __setattr__(cls, name: str, value: object) -> None:
        _refuse_excuses(cls, name, value)
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if name.startswith("test_"):
            raise TypeError(f"{cls.__name__} cannot do without {name}: it is part of the suite")
        super().__delattr__(name)


class Suite(metaclass=_Sealing):
    """The root of the suites. A class that says `suite=True` adds tests; none may change what it inherits."""

    _kept: ClassVar[dict[str, object]] = {}

    def __init_subclass__(cls, *, suite: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        kept = {name: test for base in reversed(cls.__mro__[1:]) for name, test in vars(base).get("_kept", {}).items()}
        for name, test in kept.items():
            if getattr(cls, name, None) is not test:
                raise TypeError(f"{cls.__name__} cannot override {name}: a backend passes the suite as it is")
        for name, value in vars(cls).items():
            if name not in kept and not suite:
                _refuse_excuses(cls, name, value)
        if suite:
            cls._kept = {name: test for name, test in vars(cls).items() if name.startswith("test_")}


def _refuse_excuses(cls: type, name: str, value: object) -> None:
    if name.startswith("test_"):
        raise TypeError(f"{cls.__name__} cannot set {name}: put tests of your own beside the suite, not into it")
    if name == "__test__" and not value:
        raise TypeError(f"{cls.__name__} cannot leave the suite out")
    if name == "pytestmark":
        for mark in value if isinstance(value, list | tuple) else [value]:
            excuse = getattr(mark, "name", "")
            if excuse in _EXCUSES:
                raise TypeError(f"{cls.__name__} cannot {excuse} the suite: a backend passes it whole")
