"""Known shapes of secrets, masked in what is shown: summaries, previews, hits, errors. What is stored stays exact.

`mask` puts a marker such as `[masked: aws key]` in the place of each, which does not tell how long it was. Its time is
proportional to the text, whatever the text is: every repetition is bounded, possessive, or begins only where the one
before it ended. Hashes, UUIDs, pointers and images are left alone.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Final

from .keys import addresses, private_keys
from .names import NAME, label_of, named
from .span import MARK, Span
from .suspects import is_suspect
from .tokens import HINT, tokens

__all__ = ["CONTEXT", "MARK", "Span", "is_suspect", "mask", "mask_url", "mask_value", "spans"]

CONTEXT: Final = 4_096
"""Characters on either side of a passage that show a secret which the passage would cut."""

_PASSWORD: Final = re.compile(r"(://[^/?#@:\s]*+:)[^/?#@\s]++(?=@)")
_OPTION: Final = re.compile(r"([?&][\w.-]*(?:secret|password|token)[\w.-]*=)(?!\[masked: )[^&\s]++", re.IGNORECASE)
_ROUNDS: Final = 8
_LONG: Final = 1_000  # characters from which on it is worth asking first
_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def mask(text: str, start: int = 0, end: int | None = None) -> str:
    """The text with every secret of a known shape replaced by a marker.

    With `start` and `end` it is that part of the text, in which a secret is known by what stands around it too."""
    found = spans(text)
    if not found:
        return text if not start and end is None else text[start:end]
    masked = _replace(text, found, start, len(text) if end is None else end)
    for _ in range(_ROUNDS):  # a marker is a new neighbour: what stands beside it may look like a secret now
        found = spans(masked)
        if not found:
            break
        masked = _replace(masked, found, 0, len(masked))
    return masked


def mask_url(url: str) -> str:
    """A url as people are shown it: passwords and secret options are masked for where they stand, however they look."""
    return mask(_OPTION.sub(rf"\1{MARK} key]", _PASSWORD.sub(rf"\1{MARK} password]", url)))


def mask_value(value: Any) -> Any:
    """A JSON value with every secret masked: in strings, in keys, and whole where the key names a secret.

    A copy where it holds containers. Anything that JSON does not have stays what it is."""
    top = [value]
    todo: list[tuple[Any, Any, str]] = [(top, 0, "")]
    copies: dict[tuple[int, str], Any] = {}  # what is held twice, or holds itself, is copied once
    while todo:
        holder, at, name = todo.pop()
        item = holder[at]
        if isinstance(item, str):
            holder[at] = _mask_under(name, item)
        elif isinstance(item, (dict, list, tuple)):
            known = copies.get((id(item), name))
            if known is not None:
                holder[at] = known
                continue
            holder[at] = copies[id(item), name] = copy = (
                _with_masked_keys(item) if isinstance(item, dict) else list(item)
            )
            if isinstance(copy, dict):
                todo.extend((copy, shown, str(key)) for shown, key in zip(copy, item, strict=True))
            else:
                todo.extend((copy, index, name) for index in range(len(copy)))
    return top[0]


def _with_masked_keys(value: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of an object in which no key is a secret. None is lost: where two look the same then, one has a number."""
    copy: dict[Any, Any] = {}
    for key, each in value.items():
        shown = mask(key) if isinstance(key, str) else key
        copy[f"{shown} ({len(copy)})" if shown in copy else shown] = each
    return copy


def spans(text: str) -> list[Span]:
    """The secrets of a text in order, none overlapping another."""
    if len(text) > _LONG and not is_suspect(text):
        return []
    low = text.lower()
    if len(low) != len(text):  # a few letters become two
        low = text.translate(_LOWER)
    found = list(named(text, low)) if NAME.search(low) else []
    if HINT.search(text):
        found += chain(tokens(text), private_keys(text), addresses(text))
    if not found:
        return found
    found.sort(key=lambda span: (span.start, -span.end))
    merged: list[Span] = []
    for span in found:
        if merged and span.start < merged[-1].end:
            if span.end > merged[-1].end:
                merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _replace(text: str, found: list[Span], start: int, end: int) -> str:
    parts: list[str] = []
    for span in found:
        if span.end <= start or span.start >= end:
            continue
        parts += (text[start : max(start, span.start)], f"{MARK} {span.label}]")
        start = span.end
    parts.append(text[start:end])
    return "".join(parts)


def _mask_under(name: str, text: str) -> str:
    label = label_of(name, text) if name else None
    if label is not None:
        return f"{MARK} {label}]"
    lead = "cookie: " if name.lower() in ("cookie", "set-cookie") else ""
    return mask(lead + text, len(lead))
