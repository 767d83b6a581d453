"""What of Python a program can use, as a table: it says what changed when the interpreter is upgraded.

A row of `MISSING` that fails is good news: the interpreter has learned it. Move the row to `THERE`,
and take its hint out of `hints.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coatcheck import programs
from coatcheck.programs.prelude import MODULES, SHIMS
from tests.programs.running import failure, printed

THERE = {
    "f-strings": ("x = 5\nf'{x=} {x!r:>3} {x:,}'", "x=5   5 5"),
    "format": ("'{:>6,}|{}'.format(1234, 'a')", " 1,234|a"),
    "percent": ("'%5.2f' % 3.14159", " 3.14"),
    "match": ("match {'a': 1}:\n    case {'a': x}: print(x)", "1"),
    "walrus": ("[y for x in [1, 2] if (y := x * 2) > 2]", "[4]"),
    "comprehensions": ("{a: {b for b in 'ab'} == {'a', 'b'} for a in 'xy'}", "{'x': True, 'y': True}"),
    "a generator expression": ("sum(x for x in range(4))", "6"),
    "lambda": ("sorted([3, 1], key=lambda x: -x)", "[3, 1]"),
    "closures": ("def f(n):\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return g\nf(1)()", "2"),
    "decorators": ("def d(f):\n    return lambda: f() + 1\n@d\ndef g():\n    return 1\ng()", "2"),
    "a class": ("class A:\n    def __init__(self, x):\n        self.x = x\nA(3).x", "3"),
    "a data class": ("@dataclass\nclass P:\n    x: int\n    y: int = 2\nP(1).y", "2"),
    "with": ("class C:\n    def __enter__(self): return 1\n    def __exit__(self, *e): print('out')\nwith C() as c: print(c)", "1\nout"),
    "try": ("try:\n    1 / 0\nexcept (KeyError, ZeroDivisionError) as e:\n    print(type(e).__name__)\nelse:\n    print('no')\nfinally:\n    print('end')", "ZeroDivisionError\nend"),
    "star arguments": ("def f(a, *b, c=1, **d): return a, b, c, d\nf(1, 2, c=3, e=4)", "(1, (2,), 3, {'e': 4})"),
    "eval": ("eval('1 + 1')", "2"),
    "top-level await": ("async def f(): return 1\nawait f()", "1"),
    "gather": ("async def f(n): return n\nawait asyncio.gather(f(1), f(2))", "[1, 2]"),
    "asyncio.run": ("async def f(): return 1\nasyncio.run(f())", "1"),
    "Counter": ("Counter('aab').most_common(1)", "[('a', 2)]"),
    "defaultdict": ("d = defaultdict(list)\nd['a'].append(1)\nd['a']", "[1]"),
    "deque": ("d = deque([1, 2], maxlen=2)\nd.append(3)\nlist(d)", "[2, 3]"),
    "namedtuple": ("P = namedtuple('P', 'x y')\nP(1, 2).y", "2"),
    "itertools": ("list(itertools.batched('abc', 2)), list(itertools.pairwise([1, 2, 3]))", "([('a', 'b'), ('c',)], [(1, 2), (2, 3)])"),
    "groupby": ("[(k, len(list(g))) for k, g in groupby('aab')]", "[('a', 2), ('b', 1)]"),
    "functools": ("reduce(lambda a, b: a * b, [1, 2, 3]), partial(int, base=2)('11')", "(6, 3)"),
    "lru_cache": ("@functools.lru_cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nf(50)", "12586269025"),
    "look-around in re": ("re.findall(r'(?<=a+)b|(?P<x>c)(?!d)', 'aab cd c')", "['', 'c']"),
    "csv.DictReader": ("list(csv.DictReader(['a,b', '1,2']))", "[{'a': '1', 'b': '2'}]"),
    "dates": ("datetime.datetime.fromisoformat('2026-11-18T10:00:00+01:00').isoformat()", "2026-11-18T10:00:00+01:00"),
    "strptime": ("datetime.datetime.strptime('18 Nov 2026', '%d %b %Y').strftime('%A')", "Wednesday"),
    "Decimal": ("Decimal('0.1') + Decimal('0.2')", "Decimal('0.3')"),
    "hashlib": ("hashlib.sha256(b'').hexdigest()[:8]", "e3b0c442"),
    "base64": ("base64.b64encode(b'a').decode()", "YQ=="),
    "tomllib": ("tomllib.loads('a = 1')", "{'a': 1}"),
    "bisect": ("bisect.bisect([1, 2, 3], 2)", "2"),
    "copy": ("copy.deepcopy([[1]])", "[[1]]"),
    "json": ("json.loads(json.dumps({'a': (1, None)}, indent=1))", "{'a': [1, None]}"),
    "from __future__": ("from __future__ import annotations\n1", "1"),
}  # fmt: skip

MISSING = {
    "yield": ("def f():\n    yield 1", "NotImplementedError", "build a list and return it"),
    "del": ("x = 1\ndel x", "NotImplementedError", "use d.pop(key), or leave it out"),
    "inheritance": ("class A(Exception): pass", "NotImplementedError", "write a class without a base, or a function"),
    "a property": ("class A:\n    @property\n    def x(self): return 1", "NotImplementedError", "write plain methods, or functions"),
    "async with": ("async def f():\n    async with x: pass", "NotImplementedError", "await the call without async with"),
    "except*": ("try:\n    pass\nexcept* ValueError:\n    pass", "NotImplementedError", "write it with loops, functions and plain classes"),
    "import *": ("from math import *", "NotImplementedError", "import single names"),
    "a callback that waits": ("list(map(f, [1]))", "NotImplementedError", "call it in a loop or a comprehension"),
    "numpy": ("import numpy", "ModuleNotFoundError", "there are asyncio"),
    "urllib": ("from urllib.parse import urlparse", "ModuleNotFoundError", "there are asyncio"),
    "OrderedDict": ("from collections import OrderedDict", "ImportError", "there are asyncio"),
    "re.sub with a function": ("re.sub('a', lambda m: 'b', 'a')", "TypeError", "loop over re.finditer"),
    "re.subn": ("re.subn('a', 'b', 'a')", "AttributeError", "use re.sub, and len"),
    "json.dumps(default=)": ("json.dumps({}, default=str)", "TypeError", "convert the values first"),
    "json.dumps of a set": ("json.dumps({1})", "TypeError", "convert the values first"),
    "str.upper as a value": ("list(map(str.upper, ['a']))", "AttributeError", "use a lambda"),
    "fromtimestamp": ("datetime.datetime.fromtimestamp(0)", "AttributeError", "use fromisoformat or strptime"),
    "gather with options": ("await asyncio.gather(return_exceptions=True)", "NotImplementedError", "without options"),
    "globals": ("globals()", "NameError", "a program has no introspection"),
    "callable": ("callable(1)", "NameError", "a program has no introspection"),
    "open": ("open('x')", "PermissionError", "a program has no files"),
    "input": ("input()", "NameError", "a program has no files"),
    "deep recursion": ("def f(): return f()\nf()", "RecursionError", "use a loop"),
    "str.translate": ("'a'.translate({97: 98})", "AttributeError", ""),
    "int.from_bytes": ("int.from_bytes(b'a', 'big')", "AttributeError", "use a lambda"),
    "a forgotten name": ("nothing", "NameError", ""),
    "deep source": ("(" * 5_000 + ")" * 5_000, "SyntaxError", "write shorter expressions"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


@pytest.mark.parametrize(("source", "expected"), THERE.values(), ids=THERE)
def test_a_program_can_use(source: str, expected: str) -> None:
    assert printed(source) == expected


@pytest.mark.parametrize(("source", "kind", "hint"), MISSING.values(), ids=MISSING)
def test_a_program_cannot_use_and_says_what_instead(source: str, kind: str, hint: str) -> None:
    from tests.programs.running import Functions

    error = failure(source, Functions({"f": lambda n: n}))
    assert error.kind == kind
    assert hint in error.hint
    assert bool(hint) == bool(error.hint)


@pytest.mark.parametrize("module", [*MODULES, *SHIMS])
def test_a_module_is_there_with_and_without_an_import(module: str) -> None:
    assert printed(f"bool({module})\nimport {module}\nbool({module})") == "True"
