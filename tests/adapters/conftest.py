"""Tests in a subfolder need a framework, and run in its environment: see `__main__.py`."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.adapters.suite")

FRAMEWORKS = sorted(path.stem for path in (Path(__file__).parent / "constraints").glob("*.in"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_theirs = (
        collection_path.name in FRAMEWORKS and collection_path.parent == Path(__file__).parent
    )
    return True if is_theirs and config.inipath != Path(__file__).parent / "pytest.ini" else None
