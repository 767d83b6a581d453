"""Fixtures that every test may use. Those for one area stay beside its tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
LONG_FAULTS = os.environ.get("COATCHECK_FAULTS") == "long"

# No deadline: a slow disk is not a wrong answer.
settings.register_profile("short", deadline=None, print_blob=True)
settings.register_profile("long", parent=settings.get_profile("short"), max_examples=1_000)
settings.load_profile("long" if LONG_FAULTS else "short")


@pytest.fixture(scope="session")
def long_faults() -> bool:
    """Whether this run is `make faults`, where a fault test takes all the time it needs."""
    return LONG_FAULTS


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Real-world data: the folder `COATCHECK_CORPUS`, else `../shared/data`. Skips where neither exists."""
    named = os.environ.get("COATCHECK_CORPUS")
    for folder in (named, ROOT.parent / "shared" / "data"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("no corpus: COATCHECK_CORPUS names no folder, and there is no ../shared/data")
