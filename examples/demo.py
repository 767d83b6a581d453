"""What the store does with one large log: run `make demo`. It works in a temporary folder and leaves nothing behind."""

import hashlib
import random
import tempfile

import coatcheck

LINES = 120_000


def large_log() -> str:
    """The same log on every run: two hours of a service that mostly works."""
    dice = random.Random(7)
    paths = ("/login", "/search", "/cart", "/checkout", "/health")
    lines = []
    for number in range(LINES):
        clock = f"2026-03-01T{8 + number // 60_000:02}:{number // 1_000 % 60:02}:{number % 1_000 * 60 // 1_000:02}Z"
        path, took = dice.choice(paths), dice.randint(2, 240)
        if number == 71_300:
            lines.append(f"{clock} ERROR POST /checkout 500 {took} ms: card was charged twice, order 48213")
        else:
            lines.append(f"{clock} INFO GET {path} 200 {took} ms")
    return "\n".join(lines) + "\n"


def main() -> None:
    log = large_log()
    exact = log.encode()
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(f"{folder}/store") as store:
        session = store.session("demo")

        print(f"A tool answers with a log of {LINES:,} lines, {len(exact):,} bytes. The store takes it:\n")
        ref = session.put(log, name="service log", tool="fetch_log")
        print(f"  pointer   {ref.pointer}")
        print(f"  kind      {ref.kind}, {ref.media_type}")
        print(f"  size      {ref.size_bytes:,} bytes")
        print(f"  summary   {ref.summary[:76]}…")

        before = store.stats()
        again = store.session("another").put(log, tool="fetch_log")
        after = store.stats()
        print("\nAnother session puts the same log:\n")
        print(f"  same id       {again.artifact_id == ref.artifact_id}")
        print(f"  refs          {before.refs} before, {after.refs} after")
        print(f"  stored bytes  {before.stored_bytes:,} before, {after.stored_bytes:,} after")

        print("\nAll of it comes back, exactly:\n")
        print(f"  went in   sha256 {hashlib.sha256(exact).hexdigest()}")
        print(f"  came out  sha256 {hashlib.sha256(session.get(ref.pointer).encode()).hexdigest()}")

        start = exact.index(b"ERROR") - 21
        with session.open("service log") as stream:
            stream.seek(start)
            line = stream.readline()
        print(f"\nOr one line from the middle, by name, without reading the rest. At byte {start:,}:\n")
        print(f"  {line.decode().rstrip()}")


if __name__ == "__main__":
    main()
