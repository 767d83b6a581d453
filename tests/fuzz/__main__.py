"""Fuzz the targets with atheris, one after the other: `make fuzz`, an hour in total.

`make fuzz ARGS="log wire --seconds 60"` selects targets and the total time. Inputs that reach new
code are collected in `.fuzz/<target>`, and the next run begins with them. Bytes that break a
property are written to `tests/fuzz/corpus/<target>`, so that `make test` tries them from then on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
NAMES = tuple(sorted(path.name for path in CORPUS.iterdir()))
_HOUR = 3_600
_LARGEST = 4_096  # bytes of an input
_SLOWEST = 20  # seconds for one input, after which it counts as broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="target", help=f"one of {', '.join(NAMES)}; default: all"
    )
    parser.add_argument("--seconds", type=int, default=_HOUR, help="seconds in total")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    targets = given.targets or list(NAMES)
    if unknown := [one for one in targets if one not in NAMES]:
        parser.error(f"unknown target {unknown[0]!r}; choose from {', '.join(NAMES)}")
    if given.child:
        _fuzz(targets[0], given.seconds)
    seconds = max(1, given.seconds // len(targets))
    broken = []
    for target in targets:
        _print(f"--- {target}, {seconds} s")
        command = [sys.executable, "-m", "tests.fuzz", "--child", target, "--seconds", str(seconds)]
        if subprocess.run(command, cwd=ROOT).returncode:
            broken.append(target)
    _print(f"broken: {', '.join(broken)}" if broken else f"{len(targets)} targets, nothing broken")
    return bool(broken)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _fuzz(target: str, seconds: int) -> None:
    """Fuzz one target. Ends the process."""
    import logging

    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["coatcheck"]):
        from tests.fuzz.targets import TARGETS
    found = ROOT / ".fuzz" / target
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}", f"-max_len={_LARGEST}", f"-timeout={_SLOWEST}", "-rss_limit_mb=2048",
        f"-artifact_prefix={CORPUS / target}/broken-", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / target)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
