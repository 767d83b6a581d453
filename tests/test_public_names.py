"""The names and codes that users rely on. A change here is a change for them: say so in the
changelog."""

from __future__ import annotations

import subprocess
import sys

import pytest

import coatcheck
from coatcheck import errors

PUBLIC = {
    "CoatcheckError", "Limit", "Policy", "Ref", "Session", "Store", "ToolCall", "ToolExecutor", "approx_byte_size",
    "default", "errors", "is_pointer", "open", "toolkit",
}  # fmt: skip

# Modules that only the command line, an extra or a caller's own models need. Importing coatcheck
# must not load them.
HEAVY = {
    "asyncio", "click", "duckdb", "hypothesis", "jsonpath_rfc9535", "mcp", "obstore", "psycopg", "pydantic",
    "pydantic_core", "pytest", "rich", "splintr", "starlette", "uvicorn",
}  # fmt: skip


def error_classes(
    root: type[errors.CoatcheckError] = errors.CoatcheckError,
) -> list[type[errors.CoatcheckError]]:
    return [root, *(found for child in root.__subclasses__() for found in error_classes(child))]


def test_the_public_names_are_the_expected_ones() -> None:
    assert set(coatcheck.__all__) == PUBLIC
    assert all(hasattr(coatcheck, name) for name in coatcheck.__all__)
    assert sorted(coatcheck.__all__) == coatcheck.__all__


def test_toolkit_is_the_function_whatever_was_imported_before() -> None:
    source = "import coatcheck._toolkit; from coatcheck import toolkit; print(toolkit.__name__)"
    assert (
        subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=True
        ).stdout
        == "toolkit\n"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        coatcheck.nothing  # noqa: B018


@pytest.mark.parametrize("cls", error_classes())
def test_every_error_has_its_own_code_in_the_table(cls: type[errors.CoatcheckError]) -> None:
    assert "code" in vars(cls)
    assert [other for other in error_classes() if other.code == cls.code] == [cls]
    status, exit_code, rpc = errors.CODES[cls.code]
    assert 400 <= status < 600
    assert 0 < exit_code < 126
    assert -32768 <= rpc < -31999


def test_the_table_has_no_other_codes() -> None:
    assert set(errors.CODES) == {cls.code for cls in error_classes()}


def test_the_docstring_shows_the_actual_tree_of_errors() -> None:
    drawing = errors.__doc__ or ""
    drawn = [line.split("──")[-1].split()[0] for line in drawing.splitlines() if "──" in line]
    assert sorted(drawn) == sorted(cls.__name__ for cls in error_classes()[1:])


def test_importing_coatcheck_loads_no_extras_and_no_unused_modules() -> None:
    source = "import sys, coatcheck; coatcheck.open; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "coatcheck.store" in loaded
    assert not HEAVY & set(loaded)
    assert not {
        name
        for name in loaded
        if name.startswith(("coatcheck.cli", "coatcheck.aio", "coatcheck.testing"))
    }
    assert not {
        "coatcheck.storage.sqlite",
        "coatcheck.storage.sqlite_rows",
        "coatcheck.storage.folder",
        "coatcheck.storage.memory",
    } & set(loaded)


def test_using_a_memory_store_loads_no_extras_either() -> None:
    source = (
        "import sys, coatcheck; s = coatcheck.open('memory:').session('s'); assert s.get(s.put([1]).pointer) == [1];"
        "print('\\n'.join(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not HEAVY & set(loaded)
