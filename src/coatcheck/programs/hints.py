"""One hint for each error that programs often run into: what the interpreter lacks, and what to
write instead."""

from __future__ import annotations

import re
from typing import Final

from coatcheck.programs.prelude import MODULES, SHIMS

_THERE: Final = ", ".join(sorted({*MODULES, *SHIMS, "dataclasses"}))
_NO_FILES: Final = 'a program has no files and no input: use text, lines, data or artifact("art:…")'

_HINTS: Final = (
    (r"NotImplementedError: .*yield", "build a list and return it"),
    (r"NotImplementedError: .*'del'", "use d.pop(key), or leave it out"),
    (r"NotImplementedError: .*inheritance", "write a class without a base, or a function"),
    (r"NotImplementedError: .*method decorators", "write plain methods, or functions"),
    (r"NotImplementedError: .*Wildcard imports", "import single names"),
    (r"NotImplementedError: .*async context", "await the call without async with"),
    (r"NotImplementedError: .*cannot suspend", "call it in a loop or a comprehension"),
    (r"NotImplementedError: .*gather", "write await asyncio.gather(*calls), without options"),
    (r"NotImplementedError", "write it with loops, functions and plain classes"),
    (r"ModuleNotFoundError|ImportError", f"there are {_THERE}"),
    (r"TypeError: callable replacement", "loop over re.finditer and join the pieces"),
    (r"module 're' has no attribute 'subn'", "use re.sub, and len(re.findall(…)) to count"),
    (r"JSONEncoder.*'default'", "convert the values first, e.g. str(x)"),
    (r"is not JSON serializable", "convert the values first, e.g. list(x) or str(x)"),
    (r"AttributeError: type object '(?:str|int|dict|list)'", "use a lambda: lambda x: x.upper()"),
    (r"AttributeError: type object 'datetime.datetime'", "use fromisoformat or strptime"),
    (r"AttributeError: module 'datetime'", "write datetime.datetime for the class"),
    (r"NameError: name '(?:open|input)'|PermissionError: Permission denied", _NO_FILES),
    (r"NameError: name '(?:globals|dir|vars|callable|help)'", "a program has no introspection"),
    (r"coroutine", "in a program with await, each call of a tool needs await"),
    (r"RuntimeError: suspension limit", "make fewer calls: read once, and loop over the value"),
    (r"RecursionError", "use a loop"),
    (r"re\.PatternError: .*backtracking", "use a simpler pattern, or search line by line"),
    (r"nested", "write shorter expressions"),
)


def hint_for(kind: str, message: str) -> str:
    """Return the hint for an error, or "" if there is none."""
    text = f"{kind}: {message[:2_000]}"
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return hint
    return ""
