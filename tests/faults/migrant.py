"""A process that externalizes, restores and appends to a transcript until it is killed. Run as a
module, by tests.

`loop` runs until it is killed; `step N` exits right before the N-th call that changes a file, or
prints the number of such calls if there are fewer. The verb `hold` opens the file like a host, and
`late` writes a line to what was opened.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any, BinaryIO

import coatcheck
from coatcheck import transcript
from coatcheck.transcript import migrate, swap

STEPS = (
    "open", "link", "rename", "unlink", "mkdir", "rmdir", "write", "fsync", "ftruncate", "fchmod", "fchown", "utime",
)  # fmt: skip


class Dying:
    """The module `os` as `swap` sees it. It ends the process before the N-th step."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in STEPS:
            return found

        def step(*args: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps == self._last:
                os._exit(9)
            return found(*args, **options)

        return step


def line(number: int, rng: random.Random) -> bytes:
    text = " ".join(f"{rng.randrange(1 << 30):x}" for _ in range(rng.choice((2, 2_000))))
    part = f'{{"type":"text","text":"{number} {text}"}}'
    return f'{{"type":"message","message":{{"role":"toolResult","toolCallId":"c{number}","content":[{part}]}}}}\n'.encode()


def grow(path: Path, log: Path, rng: random.Random) -> None:
    """Append a line like a host, and log it afterwards."""
    number = len(log.read_bytes().splitlines()) if log.exists() else 0
    data = line(number, rng)
    with log.open("ab") as log_file:
        with path.open("ab") as out:
            out.write(data)
        log_file.write(data)


def main() -> None:
    mode, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    path, log, rng = folder / "session.jsonl", folder / "log", random.Random(seed)
    store = coatcheck.open(folder / "store", durability="process" if seed % 2 else "power")
    session = store.session("agent")
    if mode == "step":
        dying = Dying(int(sys.argv[4]))
        vars(swap)["os"] = dying
        vars(migrate)["_WAIT"] = 0.0  # the number of steps must not depend on time
        held: list[BinaryIO] = []
        for verb in sys.argv[5:]:
            if verb == "externalize":
                transcript.externalize(path, session)
            elif verb == "undo":
                transcript.undo(path, store)
            elif verb == "hold":
                held.append(path.open("ab", buffering=0))
            elif verb == "late":
                with held[-1] as file:
                    file.write(data := line(10_000, rng))
                log.write_bytes(data)
            else:
                grow(path, log, rng)
        os.write(1, b"%d" % dying.steps)
        os._exit(0)
    os.write(1, b"\n")
    while True:
        for _ in range(rng.randrange(4)):
            grow(path, log, rng)
        assert transcript.externalize(path, session).is_sound
        if rng.random() < 0.5:
            assert transcript.undo(path, store).is_sound
        elif rng.random() < 0.5:
            assert transcript.verify(path, store, remove_backup=True).is_sound


if __name__ == "__main__":
    main()
