"""The mark on what our own tools return. It identifies such an answer, whatever name the host gave the tool.

The mark ends the first line: the length of the text that follows, and a keyed tag over all of it. Only the tools of
this store can write one, so a marked text is already bounded. Hosts may put words around it, wrap it in a block, or
encode it as JSON.

A genuine mark can be copied, so it covers one answer only. A text with two marks, or with much else around it, is
treated like any other text, and in one result only the first marked part counts.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

SLACK: Final = 1_000
"""Maximum number of characters that a host may put around a marked text."""

LENGTH: Final = 20
"""Maximum length of a mark."""

_TAG: Final = 6
_PERSON: Final = b"coatcheck.mark"
_MARK: Final = re.compile(r"^(.+) ~(\d{1,9})\.([\w-]{8})(?:\n|\Z)", re.MULTILINE | re.ASCII)
_NEAR: Final = 16_384  # the first line as JSON, and what may precede it
_DEEPEST: Final = 8
_LARGEST: Final = 4 << 20
_ALSO_ESCAPED: Final = {"<": 5, ">": 5, "&": 5, "/": 1}  # extra characters that Go's and PHP's encoders write


def mark(key: bytes, first: str, rest: str = "") -> str:
    """Return a marked text: the first line with the mark at its end, then the rest."""
    head = " ".join(first.splitlines())
    signed = f"{head} ~{len(rest)}.{_tag(key, head, rest)}"
    return f"{signed}\n{rest}" if rest else signed


def is_ours(key: bytes, text: str) -> bool:
    """Whether a text is one answer marked with this key, apart from what a host put around it."""
    return tag_of(key, text) is not None


def may_be_marked(text: str) -> bool:
    """Whether a text is worth a look by `tag_of`. Most are not, and then no key is needed."""
    return text.find("~", 0, _NEAR) >= 0 and " ~" in text[:_NEAR] and len(text) <= _LARGEST


def tag_of(key: bytes, text: str) -> str | None:
    """Return the tag of the one marked answer in a text, or None if there is none or too much around it."""
    if not may_be_marked(text):
        return None
    found = _marked(key, text)
    if found is not None and len(text) - len(found.text) <= SLACK:
        return found.tag
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        strings = list(_strings(json.loads(text), 0))
    except (ValueError, RecursionError):
        return None
    inside = [one for string in strings if (one := _marked(key, string)) is not None]
    if len(inside) != 1 or len(text) - _longest_json(inside[0].text) > SLACK:
        return None
    return inside[0].tag


class _Marked(NamedTuple):
    """The part of a text that a genuine mark covers, and the tag."""

    text: str
    tag: str


def _marked(key: bytes, text: str) -> _Marked | None:
    match = _MARK.search(text, 0, _NEAR) if " ~" in text else None
    if match is None:
        return None
    end = match.end() + int(match[2])
    genuine = hmac.compare_digest(match[3], _tag(key, match[1], text[match.end() : end]))
    return _Marked(text[match.start() : end], match[3]) if genuine else None


def _longest_json(text: str) -> int:
    """Return the maximum length of a text in JSON, counting what any common encoder escapes."""
    return len(json.dumps(text)) + sum(text.count(one) * more for one, more in _ALSO_ESCAPED.items())


def _strings(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth < _DEEPEST:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one, depth + 1)


def _tag(key: bytes, first: str, rest: str) -> str:
    """Return the keyed tag. Trailing whitespace is ignored, because hosts strip it."""
    signed = f"{first}\n{rest}".rstrip().encode("utf-8", "surrogatepass")
    return urlsafe_b64encode(blake2b(signed, key=key, digest_size=_TAG, person=_PERSON).digest()).decode()
