"""The wheel as a user gets it: built from the source, installed without extras into an empty
environment, and used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.repeated import shown_by_first

ROOT = Path(__file__).resolve().parent.parent
TRY_IT = """
import pathlib, sys, coatcheck
assert pathlib.Path(coatcheck.__file__).is_relative_to(sys.prefix), coatcheck.__file__
with coatcheck.open("store") as store:
    session = store.session("s")
    ref = session.put({"rows": [1, 2]}, name="rows")
    assert session.get(ref.pointer + "#/rows/1") == 2
    assert session.get(session.put("x" * 1_000_000).pointer) == "x" * 1_000_000
    store.collect(cold_after=0)
    assert session.get("rows") == {"rows": [1, 2]} and not store.verify().problems
"""


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder, with nothing of this project in its environment, and return its
    output."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "COATCHECK"))
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(
        folder,
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "coatcheck/py.typed",
        "coatcheck/aio.py",
        "coatcheck/cli/__init__.py",
        "coatcheck/__main__.py",
    } <= set(names)
    assert {"coatcheck/console/templates/base.html", "coatcheck/console/static/htmx.min.js"} <= set(
        names
    )
    assert "coatcheck/console/static/htmx.LICENSE.txt" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"coatcheck"}
    assert not [name for name in names if "__pycache__" in name]


def link_dependencies(target: Path, *names: str, seen: set[str] | None = None) -> None:
    """Link distributions of this environment into another, with everything that they need without
    extras."""
    seen = set() if seen is None else seen
    for name in names:
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            place = target / top
            if not place.exists():
                place.symlink_to(Path(str(found.locate_file(top))))
        needed = [Requirement(one) for one in found.requires or ()]
        link_dependencies(target, *(one.name for one in needed if applies(one)), seen=seen)


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


@pytest.mark.slow
@pytest.mark.parametrize("packages", shown_by_first(["of this environment", "of the index"]))
def test_the_wheel_works_without_extras_in_an_empty_environment(
    wheel: Path, tmp_path: Path, packages: str
) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    if packages == "of the index":
        # Constraints with hashes would ask for the hash of the wheel too, which is not known before
        # it is built.
        constraints = tmp_path / "constraints.txt"
        text = (ROOT / "constraints" / "main.txt").read_text()
        constraints.write_text(re.sub(r" \\\n(?: +--hash=\S+(?: \\)?\n)+", "\n", text))
        run(tmp_path, *pip, "install", "-q", "--no-compile", "-c", str(constraints), str(wheel))
    else:
        run(tmp_path, *pip, "install", "-q", "--no-compile", "--no-deps", "--no-index", str(wheel))
        (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        (metadata,) = site.glob("coatcheck-*.dist-info")
        needed = [Requirement(one) for one in Distribution.at(metadata).requires or ()]
        link_dependencies(site, *(one.name for one in needed if applies(one)))
    run(tmp_path, *pip, "check")
    run(tmp_path, python, "-W", "error", "-c", TRY_IT)
    coatcheck = str(tmp_path / "venv" / "bin" / "coatcheck")
    (tmp_path / "file").write_bytes(b"hello")
    pointer = run(tmp_path, coatcheck, "put", "file", "--store", "store").strip()
    assert run(tmp_path, coatcheck, "get", pointer, "--store", "store") == "hello"
    assert "all is well" in run(tmp_path, coatcheck, "verify", "--store", "store")
