"""A process that appends to a transcript until it is killed. Run as a module, only by tests.

Each message contains its writer, its number and a digest of its payload. Its number is written to a
log after the append has returned.
"""

from __future__ import annotations

import os
import random
import sys
from hashlib import sha256
from typing import Any

import coatcheck
from coatcheck.transcript import Transcript


def message(rng: random.Random, name: str, number: int) -> dict[str, Any]:
    """Return a message: mostly small, sometimes over the policy, sometimes in an extra field."""
    size = rng.choices((0, 300, 30_000, 400_000), (50, 30, 18, 2))[0]
    payload = "".join(f"{rng.getrandbits(64):016x}\n" for _ in range(size // 17))
    digest = sha256(payload.encode()).hexdigest()
    hidden = {"details": {"log": payload}} if number % 3 == 0 else {}
    content = payload if not hidden else "done"
    return {
        "role": "tool",
        "tool_call_id": f"{name} {number} {digest}",
        "content": content,
        **hidden,
    }


def main() -> None:
    folder, path, log, name, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    log_file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    store = coatcheck.open(folder, durability="process" if int(seed) % 2 else "power")
    transcript = Transcript(path, store.session(f"agent {name}"))
    os.write(log_file, b"start\n")
    number = 0
    while True:
        count = rng.choice((1, 1, 1, 5))
        transcript.extend([message(rng, name, number + at) for at in range(count)])
        number += count
        os.write(log_file, b"%d\n" % number)


if __name__ == "__main__":
    main()
