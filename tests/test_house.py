"""The size of the source tree: few modules, few lines, one meaning for each name, no tiny modules with one user."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "coatcheck"

MAX_MODULES = 180
MAX_LINES = 61_535
DROP_INS = "coatcheck.compat."
MAX_DROP_IN_LINES = 150
SMALL = 80
"""A module with fewer lines and a single importer belongs in its importer."""

SMALL_MODULES: dict[str, str] = {}
"""Exceptions with their reason: a separate process, or an optional dependency."""

# Names with several meanings that are not renamed yet. Both sets should become empty.
SHARED_MODULE_NAMES: set[str] = set()
SHARED_CLASS_NAMES: set[str] = {"Coatcheck"}  # each adapter has one: a user imports it from the adapter's module


@cache
def modules() -> dict[str, ast.Module]:
    """The modules of the package by dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return found


def path_of(module: str) -> Path:
    path = SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def lines_of(module: str) -> int:
    return len(path_of(module).read_text().splitlines())


@cache
def importers() -> dict[str, set[str]]:
    """The modules that import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [one if one in modules() else node.module for one in inner]
            for target in targets:
                if target in modules() and target != name:
                    found[target].add(name)
    return found


def test_the_number_of_modules_and_lines_is_limited() -> None:
    assert len(modules()) <= MAX_MODULES
    assert sum(map(lines_of, modules())) <= MAX_LINES


def test_a_drop_in_is_short() -> None:
    found = {name: lines_of(name) for name in modules() if name.startswith(DROP_INS)}
    assert {name: lines for name, lines in found.items() if lines > MAX_DROP_IN_LINES} == {}


def small_modules() -> set[str]:
    """Modules with few lines and a single importer."""
    return {
        name
        for name in modules()
        if len(importers().get(name, ())) == 1 and lines_of(name) < SMALL and path_of(name).name != "__init__.py"
    }


def test_a_small_module_has_more_than_one_importer() -> None:
    assert small_modules() - set(SMALL_MODULES) == set()


def shared_module_names() -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        names[module.rpartition(".")[2]].append(module)
    return {name: where for name, where in names.items() if len(where) > 1}


def shared_class_names() -> dict[str, list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules().items():
        if module.startswith(DROP_INS):  # they have the names of the designs that they replace
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(module)
    return {name: where for name, where in names.items() if len(where) > 1}


def test_no_two_modules_have_the_same_name() -> None:
    assert {name: where for name, where in shared_module_names().items() if name not in SHARED_MODULE_NAMES} == {}


def test_no_two_public_classes_have_the_same_name() -> None:
    assert {name: where for name, where in shared_class_names().items() if name not in SHARED_CLASS_NAMES} == {}


def test_every_exception_is_still_needed() -> None:
    """Exceptions that are no longer needed must be removed, so that they cannot hide a new case."""
    assert set(SMALL_MODULES) <= small_modules()
    assert set(shared_module_names()) >= SHARED_MODULE_NAMES
    assert set(shared_class_names()) >= SHARED_CLASS_NAMES
