"""A backend must pass a conformance suite completely."""

from typing import Any

import pytest

from coatcheck.storage import BlobStore, Catalog
from coatcheck.testing import BlobStoreSuite, CatalogSuite
from tests.adapters.suite import AdapterSuite

SUITES = [AdapterSuite, BlobStoreSuite, CatalogSuite]
A_TEST: dict[type, str] = {
    AdapterSuite: "test_rows_are_stored_as_rows",
    BlobStoreSuite: "test_every_range_is_the_slice_of_the_whole",
    CatalogSuite: "test_a_sound_catalog_has_no_problems",
}


def subclass(suite: type, **body: Any) -> type:
    return type(suite)("TestMine", (suite,), body)


def passes(self: object) -> None:
    assert True


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("substitute", [passes, None], ids=["override", "removal"])
def test_a_subclass_cannot_override_or_remove_a_test(suite: type, substitute: object) -> None:
    with pytest.raises(TypeError, match="cannot override"):
        subclass(suite, **{A_TEST[suite]: substitute})


@pytest.mark.parametrize("suite", SUITES)
def test_a_mixin_cannot_override_a_test(suite: type) -> None:
    mixin = type("Mixin", (), {A_TEST[suite]: passes})
    with pytest.raises(TypeError, match="cannot override"):
        type(suite)("TestMine", (mixin, suite), {})


@pytest.mark.parametrize("suite", SUITES)
def test_a_grandchild_cannot_override_a_test(suite: type) -> None:
    with pytest.raises(TypeError, match="cannot override"):
        subclass(subclass(suite), **{A_TEST[suite]: passes})


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    "mark", [pytest.mark.skip, pytest.mark.skipif(True, reason="no"), pytest.mark.xfail]
)
def test_a_subclass_cannot_be_skipped(suite: type, mark: Any) -> None:
    for marks in (mark, [mark]):
        with pytest.raises(TypeError, match="cannot"):
            subclass(suite, pytestmark=marks)
    with pytest.raises(TypeError, match="cannot"):
        mark(subclass(suite))


@pytest.mark.parametrize("suite", SUITES)
def test_a_subclass_cannot_be_changed_afterwards(suite: type) -> None:
    mine = subclass(suite)
    with pytest.raises(TypeError, match="cannot"):
        setattr(mine, A_TEST[suite], passes)
    with pytest.raises(TypeError, match="cannot"):
        delattr(suite, A_TEST[suite])


@pytest.mark.parametrize("suite", SUITES)
def test_a_subclass_cannot_be_left_out(suite: type) -> None:
    with pytest.raises(TypeError, match="cannot"):
        subclass(suite, __test__=False)


@pytest.mark.parametrize("suite", SUITES)
def test_a_subclass_may_be_marked_as_slow(suite: type) -> None:
    pytest.mark.slow(subclass(suite, pytestmark=pytest.mark.faults))


@pytest.mark.parametrize(
    ("suite", "protocol"), [(BlobStoreSuite, BlobStore), (CatalogSuite, Catalog)]
)
def test_every_method_of_the_protocol_is_called_by_the_suite(suite: type, protocol: type) -> None:
    tests = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    called = {"close"}.union(*(_names(test.__code__) for test in tests))  # called by the fixtures
    methods = {
        name
        for name in dir(protocol)
        if not name.startswith("_") and callable(getattr(protocol, name))
    }
    assert methods <= called


def _names(code: Any) -> set[str]:
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    return set(code.co_names).union(*(_names(one) for one in inner))
