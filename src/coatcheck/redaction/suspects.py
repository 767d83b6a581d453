"""Whether a text may hold a secret at all. Most hold none, and telling so takes a tenth of the time of looking."""

from __future__ import annotations

import re
from typing import Final

from coatcheck.hints import Hint

from .names import KEYS
from .tokens import SHAPES

_KELVIN: Final = "\u212a"  # the one sign beyond ASCII whose lower case is in it
_BEHIND: Final = r"[\\\"'`\]]*"
_SUFFIX: Final = r"(?:[ _.-]?(?:value|text|string|plain|base64|b64|prod|dev|test|live|old|new|[0-9\x80-\xff]{1,8}))?"
_NAMES: Final = (
    rf"token|(?:{'|'.join(KEYS)})[_. -]*key|passwor[dt]|passwd|pwd|passphrase|secret|auth(?:orization)?"
    r"|psessid|jsessionid|cookie"
)
_NAMED: Final = (
    rf"(?:{_NAMES}){_SUFFIX}{_BEHIND}[ \t]*[=:>,]|--[^ ]*(?:{_NAMES}){_SUFFIX}[ \t]|bearer{_SUFFIX}{_BEHIND}[ \t=:>,]"
    rf"|sig(?:nature)?{_SUFFIX}{_BEHIND}[ \t]*="
)
_PEEK: Final = {"_": r"[\w+/=-]{10}", "-": r"[\w.-]{10}", ".": r"(?:[\w-]{16}|com/)"}
_OTHERS: Final = r"eyJ|-----(?:BEGIN|END)|-Lines:|-u |--user|:AA|://[^\s/@]+@|Q~"


def is_suspect(text: str) -> bool:
    """False only where no module here would find anything."""
    return _SUSPECT(text) or _KELVIN in text


def _tokens() -> str:
    shapes = []
    for shape in SHAPES:
        rest = shape.rest.removeprefix("\\")
        begins = rest.partition("(")[0] if not shape.lead else re.escape(rest[0]) + _PEEK[rest[0]]
        shapes.append(f"(?:^|[^{shape.before}]){shape.lead}{begins}")
    return "|".join(dict.fromkeys(shapes))


_SUSPECT: Final = Hint(f"(?i:{_NAMED})|{_OTHERS}|{_tokens()}")
