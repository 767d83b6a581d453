"""A process that appends numbered lines to a file as hosts do, without a lock. Run as a module, by
tests.

It opens the file, writes one or more lines and closes it, at least as often as wanted and until its
input ends. Then it prints the number of lines. Short pauses before each line make it likely that
the file is replaced in between.
"""

from __future__ import annotations

import os
import random
import select
import sys
import time


def main() -> None:
    path, name, wanted, held = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    number = 0
    while number < wanted or not select.select([0], [], [], 0)[0]:
        with open(path, "ab", buffering=0) as file:
            for _ in range(1 + number % held):
                time.sleep(random.random() * 0.001)
                text = f'{{"type":"message","message":{{"role":"user","content":"{name} {number}"}}}}\n'
                file.write(text.encode())
                number += 1
    os.write(1, b"%d" % number)


if __name__ == "__main__":
    main()
