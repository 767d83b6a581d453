"""What a program finds when it starts, and how its source is prepared: imports that need not be
written, four modules that the interpreter lacks, and the value at the end.

The source is never parsed into a tree in this process: a deep one could end it. Tokens are enough.
"""

from __future__ import annotations

import io
import keyword
import re
import textwrap
import tokenize
from dataclasses import dataclass
from typing import Final

SHIMS: Final = ("heapq", "io", "operator", "statistics")
"""Modules that the prelude defines, since the interpreter lacks them."""

MODULES: Final = (
    "asyncio", "base64", "bisect", "collections", "copy", "csv", "datetime", "decimal", "functools",
    "hashlib", "itertools", "json", "math", "random", "re", "time", "tomllib", "typing",
    "unicodedata",
)  # fmt: skip
"""Modules that are imported already."""

_IMPORTS: Final = f"""\
import {", ".join(MODULES)}
from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import date, timedelta, timezone
from decimal import Decimal
from functools import partial, reduce
from itertools import chain, groupby, islice
"""

_SHIMS: Final = """
class __Module:
    def __init__(self, members):
        for name in members:
            setattr(self, name, members[name])


def __statistics():
    def mean(data):
        values = list(data)
        if not values:
            raise ValueError("mean requires at least one data point")
        total = sum(values)
        if isinstance(total, float):
            return math.fsum(values) / len(values)
        if isinstance(total, int) and total % len(values) == 0:
            return total // len(values)
        return total / len(values)

    def fmean(data, weights=None):
        values = [float(value) for value in data]
        if not values:
            raise ValueError("fmean requires at least one data point")
        if weights is None:
            return math.fsum(values) / len(values)
        weights = list(weights)
        return math.fsum([a * b for a, b in zip(values, weights, strict=True)]) / math.fsum(weights)

    def ordered(data):
        values = sorted(data)
        if not values:
            raise ValueError("no median for empty data")
        return values

    def median(data):
        values = ordered(data)
        middle = len(values) // 2
        if len(values) % 2:
            return values[middle]
        return (values[middle - 1] + values[middle]) / 2

    def median_low(data):
        values = ordered(data)
        return values[(len(values) - 1) // 2]

    def median_high(data):
        values = ordered(data)
        return values[len(values) // 2]

    def multimode(data):
        counts = Counter(data).most_common()
        return [value for value, count in counts if count == counts[0][1]]

    def mode(data):
        found = multimode(data)
        if not found:
            raise ValueError("no mode for empty data")
        return found[0]

    def squares(values, center):
        if center is None:
            center = math.fsum(values) / len(values)
        return math.fsum([(value - center) ** 2 for value in values])

    def variance(data, xbar=None):
        values = list(data)
        if len(values) < 2:
            raise ValueError("variance requires at least two data points")
        return squares(values, xbar) / (len(values) - 1)

    def pvariance(data, mu=None):
        values = list(data)
        if not values:
            raise ValueError("pvariance requires at least one data point")
        return squares(values, mu) / len(values)

    def stdev(data, xbar=None):
        return math.sqrt(variance(data, xbar))

    def pstdev(data, mu=None):
        return math.sqrt(pvariance(data, mu))

    def geometric_mean(data):
        values = list(data)
        return math.exp(math.fsum([math.log(value) for value in values]) / len(values))

    def harmonic_mean(data):
        values = list(data)
        return len(values) / math.fsum([1 / value for value in values])

    def quantiles(data, n=4, method="exclusive"):
        values = sorted(data)
        size = len(values)
        if size < 2:
            raise ValueError("must have at least two data points")
        found = []
        if method == "inclusive":
            for i in range(1, n):
                j, delta = divmod(i * (size - 1), n)
                found.append((values[j] * (n - delta) + values[j + 1] * delta) / n)
            return found
        for i in range(1, n):
            j = i * (size + 1) // n
            j = 1 if j < 1 else size - 1 if j > size - 1 else j
            delta = i * (size + 1) - j * n
            found.append((values[j - 1] * (n - delta) + values[j] * delta) / n)
        return found

    return __Module({
        "mean": mean, "fmean": fmean, "median": median, "median_low": median_low,
        "median_high": median_high, "mode": mode, "multimode": multimode, "stdev": stdev,
        "pstdev": pstdev, "variance": variance, "pvariance": pvariance, "quantiles": quantiles,
        "geometric_mean": geometric_mean, "harmonic_mean": harmonic_mean,
        "StatisticsError": ValueError,
    })


def __heapq():
    def nlargest(n, iterable, key=None):
        return sorted(iterable, key=key, reverse=True)[:max(n, 0)]

    def nsmallest(n, iterable, key=None):
        return sorted(iterable, key=key)[:max(n, 0)]

    def down(heap, at):
        item = heap[at]
        while 2 * at + 1 < len(heap):
            child = 2 * at + 1
            if child + 1 < len(heap) and heap[child + 1] < heap[child]:
                child += 1
            if not heap[child] < item:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = item

    def heappush(heap, item):
        heap.append(item)
        at = len(heap) - 1
        while at and item < heap[(at - 1) // 2]:
            heap[at] = heap[(at - 1) // 2]
            at = (at - 1) // 2
        heap[at] = item

    def heappop(heap):
        last = heap.pop()
        if not heap:
            return last
        first, heap[0] = heap[0], last
        down(heap, 0)
        return first

    def heapify(heap):
        for at in range(len(heap) // 2 - 1, -1, -1):
            down(heap, at)

    def heapreplace(heap, item):
        first, heap[0] = heap[0], item
        down(heap, 0)
        return first

    def heappushpop(heap, item):
        if heap and heap[0] < item:
            return heapreplace(heap, item)
        return item

    def merge(*iterables, key=None, reverse=False):
        return sorted([item for each in iterables for item in each], key=key, reverse=reverse)

    return __Module({
        "nlargest": nlargest, "nsmallest": nsmallest, "heappush": heappush, "heappop": heappop,
        "heapify": heapify, "heapreplace": heapreplace, "heappushpop": heappushpop, "merge": merge,
    })


def __operator():
    def itemgetter(*keys):
        if len(keys) == 1:
            return lambda value: value[keys[0]]
        return lambda value: tuple([value[key] for key in keys])

    def attribute(value, path):
        for name in path.split("."):
            value = getattr(value, name)
        return value

    def attrgetter(*names):
        if len(names) == 1:
            return lambda value: attribute(value, names[0])
        return lambda value: tuple([attribute(value, name) for name in names])

    return __Module({
        "itemgetter": itemgetter, "attrgetter": attrgetter,
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "truediv": lambda a, b: a / b, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b,
        "pow": lambda a, b: a ** b, "neg": lambda a: -a, "and_": lambda a, b: a & b,
        "or_": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not_": lambda a: not a,
        "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
        "contains": lambda a, b: b in a, "getitem": lambda a, b: a[b], "concat": lambda a, b: a + b,
    })


class __StringIO:
    def __init__(self, initial=""):
        self._pieces = [initial]
        self._at = 0

    def write(self, text):
        self._pieces.append(text)
        return len(text)

    def getvalue(self):
        return "".join(self._pieces)

    def read(self, size=-1):
        text = self.getvalue()
        end = len(text) if size is None or size < 0 else self._at + size
        found = text[self._at:end]
        self._at += len(found)
        return found

    def readline(self):
        text = self.getvalue()
        end = text.find("\\n", self._at) + 1 or len(text)
        found = text[self._at:end]
        self._at = end
        return found

    def readlines(self):
        return self.read().splitlines(True)

    def seek(self, position):
        self._at = position
        return position

    def close(self):
        pass

    def __iter__(self):
        return iter(self.readlines())


statistics = __shim_statistics = __statistics()
heapq = __shim_heapq = __heapq()
operator = __shim_operator = __operator()
io = __shim_io = __Module({"StringIO": __StringIO})
"""

_VALUES: Final = """
def __items(body):
    lines = body.replace("\\r\\n", "\\n").split("\\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def __value(form, body):
    if form == "json":
        return json.loads(body)
    if form == "jsonl":
        return [json.loads(line) for line in body.split("\\n") if line.strip()]
    if form in (",", ";", "\\t", "|"):
        return list(csv.DictReader(body.splitlines(True), delimiter=form))
    return body


def __show(value):
    if value is None:
        return
    if isinstance(value, str):
        print(value)
        return
    text = repr(value)
    if text.startswith("<coroutine object"):
        raise TypeError("the program ends with a call that was not awaited: write await before it")
    kind = type(value)
    if len(text) > 200 and kind in (list, tuple, set, dict):
        if kind is dict:
            items = [repr(key) + ": " + repr(value[key]) for key in value]
        else:
            items = [repr(item) for item in value]
        text = text[0] + ",\\n ".join(items) + text[-1]
    print(text)
"""

PRELUDE: Final = _IMPORTS + _SHIMS + _VALUES
"""Run before each program; takes about a millisecond."""

_OPENING: Final = frozenset("([{")
_CLOSING: Final = frozenset(")]}")
_AUGMENTED: Final = frozenset(
    ("+=", "-=", "*=", "/=", "//=", "%=", "@=", "&=", "|=", "^=", ">>=", "<<=", "**=")
)
_EXPRESSION_KEYWORDS: Final = frozenset(("None", "True", "False", "not", "lambda", "await"))
_STATEMENT_KEYWORDS: Final = frozenset(keyword.kwlist) - _EXPRESSION_KEYWORDS
_SILENT: Final = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.TYPE_COMMENT)
)

_FENCE: Final = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?\s*```\s*", re.DOTALL)
_NAME: Final = re.compile(r"\b[^\W\d]\w*")

Tokens = list[tokenize.TokenInfo]


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replace what is between two places of the source, each a line from 1 and a column from 0."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def prepared(source: str) -> str:
    """Return the source with imports of `SHIMS` replaced, and with the value of its last expression
    or the target of its last assignment shown. Lines keep their numbers. Source that has no tokens
    is returned as it is: the interpreter says what is wrong with it."""
    tokens = _tokens(source)
    if not tokens:
        return source
    statements = _statements(tokens)
    edits: list[_Edit] = []
    for statement in statements:
        edit = _import(statement.tokens)
        if edit is not None:
            edits.append(edit)
    end = ""
    if statements:
        shown, end = _shown(statements[-1])
        edits += shown
    return _edited(source, edits) + end


def awaits(source: str) -> bool:
    """Whether the source has an `await`."""
    return any(token.string == "await" for token in _tokens(source))


def _tokens(source: str) -> Tokens:
    """The tokens of the source; none if it is not Python."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError, ValueError, RecursionError):
        return []


def program_in(text: str) -> str:
    """Return the program that a model wrote: without a fence around it, and without indentation of
    all lines."""
    fenced = _FENCE.fullmatch(text)
    return textwrap.dedent(fenced[1] if fenced else text)


def names_in(source: str) -> set[str]:
    """All names in the source, also those in f-strings."""
    return set(_NAME.findall(source))


@dataclass(frozen=True, slots=True)
class _Statement:
    """The tokens of a simple statement or of the head of a compound one. `is_outer` is False in a
    block."""

    tokens: Tokens
    is_outer: bool


def _statements(tokens: Tokens) -> list[_Statement]:
    found: list[_Statement] = []
    current: Tokens = []
    depth = level = 0
    is_in_block = False  # after the colon of a compound statement on the same line

    def close() -> None:
        nonlocal current
        if current:
            found.append(_Statement(current, level == 0 and not is_in_block))
            current = []

    for token in tokens:
        if token.type == tokenize.INDENT:
            level += 1
        elif token.type == tokenize.DEDENT:
            level -= 1
        elif token.type == tokenize.NEWLINE:
            close()
            is_in_block = False
        elif token.type in _SILENT:
            continue
        elif token.string == ";" and depth == 0:
            close()
        else:
            if token.type == tokenize.OP:
                depth += (token.string in _OPENING) - (token.string in _CLOSING)
            current.append(token)
            if token.string == ":" and depth == 0 and current[0].string in _STATEMENT_KEYWORDS:
                close()
                is_in_block = True
    close()
    return found


def _import(tokens: Tokens) -> _Edit | None:
    """Replace an import of modules of which some are `SHIMS`."""
    words = [token.string for token in tokens]
    if words[0] == "import":
        parts = _split(words[1:])
        if not any(part[0] in SHIMS for part in parts):
            return None
        made = [_bound(part) for part in parts]
    elif words[0] == "from" and words[1:2] and words[1] in SHIMS and words[2:3] == ["import"]:
        parts = _split([word for word in words[3:] if word not in ("(", ")")])
        if not parts or ["*"] in parts:
            return None
        made = [f"{part[-1]} = __shim_{words[1]}.{part[0]}" for part in parts]
    else:
        return None
    start, end = tokens[0].start, tokens[-1].end
    continued = " \\\n" * (end[0] - start[0]) + " "
    return _Edit(start, end, "; ".join(made).replace(" ", continued, 1))


def _split(words: list[str]) -> list[list[str]]:
    """The words between commas."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def _bound(part: list[str]) -> str:
    if part[0] in SHIMS:
        return f"{part[-1]} = __shim_{part[0]}"
    return "import " + " ".join(part)


def _shown(statement: _Statement) -> tuple[list[_Edit], str]:
    """The edits, or what to append, so that the value of the last statement is shown."""
    tokens = statement.tokens
    if not statement.is_outer or tokens[0].string == "@":
        return [], ""
    end = tokens[-1].end
    if tokens[0].string == "return" and len(tokens) > 1:
        return [_Edit(tokens[0].start, tokens[1].start, "__show(("), _Edit(end, end, "))")], ""
    if tokens[0].string in _STATEMENT_KEYWORDS:
        return [], ""
    depth = 0
    for place, token in enumerate(tokens):
        if token.type == tokenize.OP:
            depth += (token.string in _OPENING) - (token.string in _CLOSING)
        if depth:
            continue
        if token.string == "lambda":
            break
        if token.type == tokenize.OP and (token.string in ("=", ":") or token.string in _AUGMENTED):
            return [], _target(tokens[:place])
    start = tokens[0].start
    return [_Edit(start, start, "__show(("), _Edit(end, end, "))")], ""


def _target(tokens: Tokens) -> str:
    """Show what was assigned to a name, or to names separated by commas."""
    is_plain = all(
        token.string == "," if place % 2 else token.type == tokenize.NAME
        for place, token in enumerate(tokens)
    )
    if not tokens or not is_plain:
        return ""
    return f"\n__show(({''.join(token.string for token in tokens)}))\n"


def _edited(source: str, edits: list[_Edit]) -> str:
    lines = io.StringIO(source).readlines()
    for edit in reversed(edits):
        (first, left), (last, right) = edit.start, edit.end
        text = lines[first - 1][:left] + edit.text + lines[last - 1][right:]
        lines[first - 1 : last] = [text] + [""] * (last - first)
    return "".join(lines)
