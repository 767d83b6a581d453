"""The mark on what our own tools answer, by which it is known again, whatever a host called the tool.

It ends the first line: the length of what follows, and a keyed tag over all of it. What is marked was made by a
tool of this store, so it is bounded already; nobody else can write one. Hosts may put words around it, make it a block,
or encode it as JSON.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

SLACK: Final = 1_000
"""How many characters a host may put around a marked text."""

LENGTH: Final = 20
"""No mark is longer than this."""

_TAG: Final = 6
_PERSON: Final = b"coatcheck.mark"
_MARK: Final = re.compile(r"^(.+) ~(\d{1,9})\.([\w-]{8})(?:\n|\Z)", re.MULTILINE | re.ASCII)
_NEAR: Final = 16_384  # a first line, as JSON, and what may stand before it
_DEEPEST: Final = 8
_LARGEST: Final = 4 << 20


def mark(key: bytes, first: str, rest: str = "") -> str:
    """A text of ours: its first line with the mark at the end, then the rest."""
    head = " ".join(first.splitlines())
    signed = f"{head} ~{len(rest)}.{_tag(key, head, rest)}"
    return f"{signed}\n{rest}" if rest else signed


def is_ours(key: bytes, text: str) -> bool:
    """Whether a text is one that `mark` made with this key, give or take what a host put around it."""
    if text.find("~", 0, _NEAR) < 0 or " ~" not in text[:_NEAR] or len(text) > _LARGEST:  # a rare letter first
        return False
    if len(text) - _marked(key, text) <= SLACK:
        return True
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return False
    try:
        strings = list(_strings(json.loads(text), 0))
    except (ValueError, RecursionError):
        return False
    found = [_marked(key, one) for one in strings]
    return any(found) and sum(map(len, strings)) - sum(found) <= SLACK


def _marked(key: bytes, text: str) -> int:
    """How many characters of a text a genuine mark covers."""
    match = _MARK.search(text, 0, _NEAR) if " ~" in text else None
    if match is None:
        return 0
    rest = text[match.end() : match.end() + int(match[2])]
    genuine = hmac.compare_digest(match[3], _tag(key, match[1], rest))
    return match.end() - match.start() + len(rest) if genuine else 0


def _strings(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth < _DEEPEST:
        if isinstance(value, dict):
            yield from value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one, depth + 1)
    else:
        yield json.dumps(value)


def _tag(key: bytes, first: str, rest: str) -> str:
    """Blanks at the end do not count: hosts strip them."""
    signed = f"{first}\n{rest}".rstrip().encode("utf-8", "surrogatepass")
    return urlsafe_b64encode(blake2b(signed, key=key, digest_size=_TAG, person=_PERSON).digest()).decode()
