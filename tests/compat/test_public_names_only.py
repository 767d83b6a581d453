"""A drop-in uses only public names: if it needs a private one, the API below it is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import coatcheck.compat

MODULES = sorted(Path(coatcheck.compat.__path__[0]).glob("*.py"))
SHARED = {
    path.stem for path in MODULES if path.stem.startswith("_")
}  # what the drop-ins have in common


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_drop_in_imports_and_reads_no_private_name(module: Path) -> None:
    tree = ast.parse(module.read_text())
    imported = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        for part in name.removeprefix("coatcheck.compat.").split(".")
        if part != "__future__"
    }
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    private = {name for name in imported | read if name.startswith("_") and not name.endswith("__")}
    assert private <= SHARED
