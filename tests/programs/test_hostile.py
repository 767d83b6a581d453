"""Hostile programs: each has a budget of CPU time, memory and output, in its worker and in the
process that runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.programs.measuring import cost, own_process

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="usage of processes as Linux reports it"),
]

MIB = 1 << 20
CPU = 12.0  # seconds of all workers of one program, with those that are started ahead
HOST = 10.0  # seconds of CPU of the process that runs it
WALL = 60.0
PEAK = 700 * MIB  # of any worker; a program may use 256 MiB, and its interpreter some more
GROWTH = (
    300 * MIB
)  # of the process that runs it: what a program prints may be 16 MiB, in a few copies
CAP = 8_000
TABLE = "id,name\n" + "1,one\n" * 1_000

HOSTILE = {
    # time
    "an endless loop": "while True: pass",
    "an endless loop in a try": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "an endless loop in finally": "try:\n    1 / 0\nfinally:\n    while True: pass",
    "an endless comprehension": "[0 for _ in itertools.count() if False]",
    "a large power": "10 ** 10 ** 8",
    "a power of powers": "x = 3\nfor _ in range(40): x = x ** x",
    "a shift": "1 << 10 ** 12",
    "a factorial": "math.factorial(10 ** 7)",
    "digits of a large number": "len(str(7 ** 3_000_000))",
    "a number of many digits": "int('9' * 5_000_000)",
    "fibonacci": "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nf(60)",
    "ackermann": "def a(m, n): return n + 1 if m == 0 else a(m - 1, 1) if n == 0 else a(m - 1, a(m, n - 1))\na(4, 4)",
    "a sum of a range": "sum(range(10 ** 12))",
    "a sort with a slow key": "sorted(range(10 ** 6), key=lambda n: sum(range(n)))",
    "permutations": "len(list(itertools.permutations(range(12))))",
    "products": "for _ in itertools.product(range(100), repeat=6): pass",
    "a pattern that backtracks": "re.match('(a+)+$', 'a' * 40 + 'b')",
    "a pattern with look-behind": "re.findall('(?<=(a|aa)+)b', 'a' * 50_000 + 'c')",
    "a pattern with many groups": "re.compile('(' * 5_000 + 'a' + ')' * 5_000)",
    "a pattern with large repetitions": "re.compile('((a{1000}){1000}){1000}')",
    "a regular search of everything": "for n in range(10 ** 6): re.search('x*y', text)",
    "sleep": "time.sleep(10 ** 9)",
    "asynchronous sleep": "await asyncio.sleep(10 ** 9)",
    "a wait for nothing": "async def f():\n    await asyncio.gather(*[asyncio.sleep(1) for _ in range(10_000)])\nawait f()",
    "replacements": "x = 'a' * 10 ** 6\nwhile True: x = x.replace('a', 'b').replace('b', 'a')",
    "hashes": "while True: hashlib.sha256(b'x' * 10 ** 7)",
    "a cyclic list": "x = []\nx.append(x)\nprint(x == [x])\nx",
    "a cyclic dict": "x = {}\nx['x'] = x\nx",
    "iteration over what grows": "x = [1]\nfor n in x: x.append(n)",
    # memory
    "a large text": "'x' * 10 ** 11",
    "a text that doubles": "x = 'x'\nwhile True: x += x",
    "a list that doubles": "x = [0]\nwhile True: x = x + x",
    "a large list": "[0] * 10 ** 11",
    "lists of lists": "x = []\nwhile True: x = [x, list(range(1000))]",
    "a large dict": "{n: str(n) for n in range(10 ** 9)}",
    "a large set": "set(range(10 ** 10))",
    "large bytes": "bytes(10 ** 12)",
    "padding": "'x'.ljust(10 ** 12)",
    "a format with a large width": "f'{1:>{10 ** 12}}'",
    "a format with percent": "'%999999999999d' % 1",
    "a join": "','.join(['x' * 1000] * 10 ** 9)",
    "JSON that explodes": "x = [0]\nfor _ in range(30): x = [x, x]\njson.dumps(x)",
    "a repr that explodes": "x = [0]\nfor _ in range(40): x = [x, x]\nrepr(x)",
    "a value that explodes": "x = [0]\nfor _ in range(40): x = [x, x]\nx",
    "a value that explodes, returned": "x = [0]\nfor _ in range(40): x = [x, x]\nreturn x",
    "a deep copy that explodes": "x = [0]\nfor _ in range(25): x = [x, list(x)]\ncopy.deepcopy(x)",
    "a deep value": "x = 0\nfor _ in range(10 ** 6): x = [x]\nx",
    "deep JSON": "json.loads('[' * 10 ** 6)",
    "a deque": "d = deque()\nwhile True: d.append('x' * 1000)",
    "memory that errors take": "x = []\nwhile True:\n    try:\n        x.append('x' * 10 ** 7)\n    except MemoryError:\n        pass",
    "splitting": "len(('a,' * 10 ** 8).split(','))",
    "a cache": "@functools.lru_cache(maxsize=None)\ndef f(n): return [n] * 1000\nfor n in itertools.count(): f(n)",
    # output
    "endless output": "while True: print('x' * 1000)",
    "endless output to stderr": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "many small prints": "while True: print()",
    "one large print": "print('é' * 10 ** 8)",
    "control characters": "print('\\x1b[2J\\x07\\x00' * 10 ** 6)",
    "an error of any length": "raise ValueError('x' * 10 ** 8)",
    "an error of an error": "def f(n):\n    try:\n        raise ValueError('x' * 10 ** 5)\n    finally:\n        f(n + 1)\nf(0)",
    "a name of any length": "'x'.__getattr__\n" + "x" * 60_000,
    # source
    "brackets": "(" * 60_000,
    "signs": "-" * 60_000 + "1",
    "nots": "not " * 15_000 + "1",
    "powers": "1" + "**1" * 20_000,
    "blocks": "".join(" " * n + "if 1:\n" for n in range(300)) + " " * 300 + "1",
    "lambdas": "lambda: " * 8_000 + "1",
    "attributes": "x" + ".x" * 30_000,
    "elifs": "if 0: 1\n" + "elif 0: 1\n" * 6_000,
    "quotes": "'" * 60_001,
    "an f-string in an f-string": "f'{" * 10_000 + "1" + "}'" * 10_000,
    "names": "; ".join(f"x{n} = {n}" for n in range(4_000)),
    "names that are not ASCII": "ﬁ = 1\nfi",
    "null bytes": "x = 1\0\nx",
    "imports": "import " + ", ".join(["statistics"] * 5_000),
    # calls out
    "endless calls": "while True:\n    try:\n        artifact('art:0123456789ab')\n    except LookupError:\n        pass",
    "calls with large arguments": "while True:\n    try:\n        grep('x' * 10 ** 7, 'x' * 10 ** 7)\n    except (LookupError, ValueError, RuntimeError):\n        pass",
    "calls with graphs": "x = [0]\nfor _ in range(40): x = [x, x]\n__artifact(x)",
    "calls with odd arguments": "__query(1, 2, 3, x=4)",
    "itself as a table": "query(p, 'SELECT * FROM range(100000000000)')",
    "its own functions": "def __show(x): return 1\nprint = None\nx = 1",
}  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A program may work for a second instead of five, so that all of these take a minute."""
    with own_process(seconds=1.0) as process:
        yield process


def test_there_are_60_of_them() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_stays_within_its_budget(
    process: ProcessPoolExecutor, source: str
) -> None:
    taken = process.submit(cost, source, TABLE).result()
    assert len(taken.answer) <= CAP
    assert taken.wall < WALL
    assert taken.host_cpu < HOST
    assert taken.workers_cpu < CPU
    assert taken.worker_peak < PEAK
    assert taken.host_growth < GROWTH


def test_the_engine_works_after_all_of_them(process: ProcessPoolExecutor) -> None:
    answer = process.submit(cost, "len(lines)", "a\nb\n").result().answer
    assert "2" in answer.splitlines()
