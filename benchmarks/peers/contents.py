"""Tool results of a kind and a size, never the same twice: each holds its number. The same in every
process."""

from __future__ import annotations

import functools
import json
import random
from typing import Final

KINDS: Final = ("log", "JSON", "CJK")
_NUMBER: Final = "00000000000000000000"
_LEVELS: Final = ("INFO", "DEBUG", "WARN", "ERROR")
_MARKS: Final = "，。、；：\n"


def content(kind: str, size: int, number: int) -> str:
    """A result of about `size` bytes of UTF-8, with its number near the beginning and in the
    middle."""
    return _base(kind, size).replace(_NUMBER, f"{number:020}", 2)


@functools.cache
def _base(kind: str, size: int) -> str:
    chance = random.Random(f"{kind} {size}")
    half = size // 2
    return {"log": _log, "JSON": _json, "CJK": _cjk}[kind](chance, half)


def _log(chance: random.Random, half: int) -> str:
    lines, length = [f"2026-03-01T00:00:00.000Z INFO run {_NUMBER} begins\n"], 0
    for limit in (half, 2 * half):
        while length < limit:
            at = chance.getrandbits(50)
            line = (
                f"2026-03-{at % 28 + 1:02}T{at % 24:02}:{at % 60:02}:{at % 59:02}.{at % 997:03}Z {_LEVELS[at % 4]} "
                f"worker-{at % 31} handled request {at:013x} of user {at % 99_991} in {at % 1_009} ms\n"
            )
            lines.append(line)
            length += len(line)
        lines.append(f"2026-03-29T00:00:00.000Z INFO run {_NUMBER} continues\n")
    return "".join(lines)


def _json(chance: random.Random, half: int) -> str:
    rows: list[dict[str, object]] = []
    length = 0
    for limit in (half, 2 * half):
        rows.append({"id": 0, "run": _NUMBER})
        while length < limit:
            at = chance.getrandbits(50)
            rows.append(
                {"id": len(rows), "name": f"user {at:x}", "state": ("open", "closed")[at % 2], "score": at % 997 / 7,
                 "tags": ["a", "b"], "owner": {"login": f"u{at % 999}", "admin": False}}
            )  # fmt: skip
            length += 130
    return json.dumps({"items": rows, "next": None})


def _cjk(chance: random.Random, half: int) -> str:
    words = ["".join(chr(0x4E00 + chance.randrange(3_000)) for _ in range(2)) for _ in range(2_000)]
    return "".join(
        f"第{_NUMBER}号\n"
        + "".join(chance.choice(words) + chance.choice(_MARKS) for _ in range(half // 9))
        for _ in range(2)
    )
