"""How a program is prepared: the value at its end, imports of modules that the prelude defines, and
the modules themselves against CPython's."""

from __future__ import annotations

import heapq
import io
import operator
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import programs
from coatcheck.programs.prelude import prepared
from tests.programs.running import failure, printed


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 + 1", "2"),
        ("x = 3", "3"),
        ("x: int = 3", "3"),
        ("a, b = 1, 2  # both", "(1, 2)"),
        ("x = y = 3", "3"),
        ("n = 1\nn += 4", "5"),
        ("'text'", "text"),
        ("None", ""),
        ("print('x')", "x"),
        ("(1,\n 2)  # over two lines\n\n# the end", "(1, 2)"),
        ("*[1, 2], 3", "(1, 2, 3)"),
        ("return 5", "5"),
        ("x = 1; x + 1", "2"),
        ("d = {}\nd['a'] = 1", ""),
        ("for n in range(2): n", ""),
        ("if True:\n    1", ""),
        ("def f():\n    return 7\nf()", "7"),
        ("await asyncio.gather()", "[]"),
        ("x = 1\nassert x", ""),
    ],
)
def test_the_last_value_is_shown(source: str, expected: str) -> None:
    assert printed(source) == expected


def test_a_long_list_is_shown_with_an_item_on_each_line() -> None:
    lines = printed("[{'number': n} for n in range(50)]").splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("[{'number': 0},", " {'number': 49}]", 50)


def test_a_call_that_was_not_awaited_is_an_error() -> None:
    error = failure("async def main():\n    return 1\nmain()")
    assert error.message.endswith("was not awaited: write await before it")


@pytest.mark.parametrize(
    "source",
    [
        "import statistics\nstatistics.mean([1, 2])",
        "import statistics as s\ns.mean([1, 2])",
        "import json, statistics as s, re\ns.mean([1, 2])",
        "from statistics import mean\nmean([1, 2])",
        "from statistics import mean as m, median\nm([1, 2])",
        "from statistics import (\n    mean,\n    median as middle,\n)\nmiddle([1, 2])",
        "def f():\n    import statistics\n    return statistics.mean([1, 2])\nf()",
        "if True: import statistics\nstatistics.mean([1, 2])",
        "try:\n    import numpy as np\nexcept ImportError:\n    import statistics as np\nnp.mean([1, 2])",
        "statistics.mean([1, 2])",
    ],
)
def test_modules_of_the_prelude_are_imported_in_every_way(source: str) -> None:
    assert printed(source) == "1.5"


@pytest.mark.parametrize(
    "before", ["import heapq\n", "from heapq import (\n  nlargest,\n  merge\n)\n"]
)
def test_lines_keep_their_numbers(before: str) -> None:
    assert failure(f"{before}x = 1\n1 / 0\n").line == before.count("\n") + 2


@given(st.text("ab\"'\\\n\t ()[]{}:;,=#@.x1 \x0c\r\u2028é\0", max_size=60))
def test_preparing_never_fails_and_keeps_the_lines(source: str) -> None:
    made = prepared(source)
    assert made.count("\n") - source.count("\n") in (0, 2)


NUMBERS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize(
    "call",
    ["mean(N)", "mean([1, 2, 3])", "fmean(N)", "fmean([1, 2], [3, 1])", "median(N)", "median([1, 2])",
     "median_low([1, 2])", "median_high([1, 2])", "mode(N)", "multimode('aabbc')", "stdev(N)", "pstdev(N)",
     "variance([1.5, 2.5, 4])", "pvariance([1.5, 2.5, 4])", "quantiles(N)", "quantiles(N, n=10)",
     "quantiles(N, method='inclusive')", "harmonic_mean([1, 2, 4])", "geometric_mean([1, 2, 4])"],
)  # fmt: skip
def test_statistics_are_those_of_python(call: str) -> None:
    expected = eval(call, {"N": NUMBERS, **vars(statistics)})  # noqa: S307
    found = eval(printed(f"N = {NUMBERS}\nimport statistics\nrepr(statistics.{call})"))  # noqa: S307
    assert found == pytest.approx(expected)


def test_a_heap_is_that_of_python() -> None:
    source = f"""
import heapq
heap = []
for n in {NUMBERS}:
    heapq.heappush(heap, n)
first = heapq.heappushpop(heap, 0), heapq.heapreplace(heap, 7), heapq.nlargest(2, heap)
other = list({NUMBERS})
heapq.heapify(other)
print(first, [heapq.heappop(heap) for _ in range(len(heap))], other == sorted(other) or other[0])
print(heapq.nsmallest(2, [(2, 'b'), (1, 'a'), (3, 'c')], key=lambda x: x[1]), list(heapq.merge([1, 4], [2, 3])))
"""
    heap: list[int] = []
    for n in NUMBERS:
        heapq.heappush(heap, n)
    first = heapq.heappushpop(heap, 0), heapq.heapreplace(heap, 7), heapq.nlargest(2, heap)
    ordered = [heapq.heappop(heap) for _ in range(len(heap))]
    assert printed(source) == f"{first} {ordered} 1\n[(1, 'a'), (2, 'b')] [1, 2, 3, 4]"


def test_operators_are_those_of_python() -> None:
    rows = [("b", 2), ("a", 3), ("c", 1)]
    source = (
        f"import operator\nprint(sorted({rows}, key=operator.itemgetter(1)), operator.add(1, 2))"
    )
    assert printed(source) == f"{sorted(rows, key=operator.itemgetter(1))} {operator.add(1, 2)}"


def test_a_text_file_in_memory_is_that_of_python() -> None:
    source = "f = io.StringIO('a\\nb\\n')\nf.readline(), f.read(), f.getvalue(), list(io.StringIO('x\\ny'))"
    f = io.StringIO("a\nb\n")
    expected = (f.readline(), f.read(), f.getvalue(), list(io.StringIO("x\ny")))
    assert printed(f"import io\n{source}") == repr(expected)


def test_a_csv_is_written_to_a_text_file_in_memory() -> None:
    source = (
        "out = io.StringIO()\ncsv.writer(out).writerows([['a', 1], ['b,c', 2]])\nout.getvalue()"
    )
    assert printed(f"import csv, io\n{source}") == 'a,1\r\n"b,c",2\r\n'
