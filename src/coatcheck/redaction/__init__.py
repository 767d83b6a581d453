"""Mask secrets of known shapes in what is shown: summaries, previews, hits, errors. Stored bytes
stay exact.

`mask` replaces each secret with a marker such as `[masked: aws key]`, which does not reveal its
length. The time is proportional to the text, whatever the text is: every repetition in a pattern is
bounded, possessive, or begins only where the one before it ended. Hashes, UUIDs, pointers and
images are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from coatcheck.deferred import lazy_pattern
from coatcheck.media import encoding_of
from coatcheck.redaction.engine import QuickPattern, find_secrets, is_suspect
from coatcheck.redaction.names import label_of
from coatcheck.redaction.secret import MARK, Secret

__all__ = [
    "CONTEXT",
    "MARK",
    "QuickPattern",
    "Secret",
    "find_secrets",
    "is_suspect",
    "mask",
    "mask_bytes",
    "mask_url",
    "mask_value",
]

CONTEXT: Final = 4_096
"""Characters before and after a passage that are searched too, for a secret that the passage would
cut."""

# Six or more characters up to U+00FF in a row, in each encoding.
_WIDE_RUNS: Final = (
    (lazy_pattern(rb"(?:[^\x00]\x00\x00\x00){6,}"), "utf-32-le"),
    (lazy_pattern(rb"(?:\x00\x00\x00[^\x00]){6,}"), "utf-32-be"),
    (lazy_pattern(rb"(?:[^\x00]\x00){6,}"), "utf-16-le"),
    (lazy_pattern(rb"(?:\x00[^\x00]){6,}"), "utf-16-be"),
)
_PASSWORD: Final = lazy_pattern(r"(://[^/?#@:\s]*+:)[^/?#@\s]++(?=@)")
_OPTION: Final = lazy_pattern(
    r"([?&][\w.-]*(?:secret|password|token)[\w.-]*=)(?!\[masked: )[^&\s]++", re.IGNORECASE
)
_KEYS_OF_A_NAME: Final = ("name", "Name", "key", "Key")
_ROUNDS: Final = 8


def mask(text: str, start: int = 0, end: int | None = None) -> str:
    """Replace every secret of a known shape by a marker.

    With `start` and `end`, return that part of the text; the text around it still helps to find
    secrets."""
    found = find_secrets(text)
    if not found:
        return text if not start and end is None else text[start:end]
    masked = _replace(text, found, start, len(text) if end is None else end)
    for _ in range(_ROUNDS):  # the text beside a new marker may look like a secret now
        found = find_secrets(masked)
        if not found:
            break
        masked = _replace(masked, found, 0, len(masked))
    return masked


def mask_url(url: str) -> str:
    """Mask a url for display: passwords and secret options are masked by their place, whatever they
    look like."""
    if "://" not in url and "=" not in url:
        return url  # a folder: no place for a secret, and masking compiles many patterns
    return mask(_OPTION.sub(rf"\1{MARK} key]", _PASSWORD.sub(rf"\1{MARK} password]", url)))


def mask_bytes(data: bytes) -> bytes:
    """Mask every secret in bytes: in UTF-8, UTF-16, UTF-32, Latin-1, or a mix of them. All other
    bytes stay the same.

    Bytes that are not UTF-8 are decoded to lone surrogates, and written as themselves again. UTF-16
    and UTF-32 are found by their byte-order mark or by their zero bytes, in the middle of other
    bytes too."""
    if (marked := encoding_of(data)).is_wide:
        data = _mask_wide(data, marked.name)
    if b"\x00" in data:
        for run, encoding in _WIDE_RUNS:
            data = run.sub(lambda match, encoding=encoding: _mask_wide(match[0], encoding), data)  # type: ignore[misc]
    text = data.decode("utf-8", "surrogateescape")
    masked = mask(text)
    return data if masked == text else masked.encode("utf-8", "surrogateescape")


def _mask_wide(data: bytes, encoding: str) -> bytes:
    """Mask bytes in a wide encoding. Bytes that do not survive a round trip through it are left
    alone."""
    whole = len(data) - len(data) % (4 if "32" in encoding else 2)
    try:
        text = data[:whole].decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        return data
    masked = mask(text)
    if masked == text or text.encode(encoding, "surrogatepass") != data[:whole]:
        return data
    return masked.encode(encoding, "surrogatepass") + data[whole:]


def mask_value(value: Any) -> Any:
    """Mask every secret in a JSON value: in strings, in keys, and whole values whose key names a
    secret.

    Containers are copied. Values that JSON does not have stay as they are."""
    top = [value]
    todo: list[tuple[Any, Any, str]] = [(top, 0, "")]  # container, key, and name of its value
    # A container that occurs twice, or contains itself, is copied once.
    copies: dict[tuple[int, str], Any] = {}
    while todo:
        holder, at, name = todo.pop()
        item = holder[at]
        if not isinstance(item, dict | list | tuple):
            holder[at] = _masked_leaf(item, name)
            continue
        if (id(item), name) not in copies:
            copy: Any = _with_masked_keys(item) if isinstance(item, dict) else list(item)
            copies[id(item), name] = copy
            todo.extend((copy, key, inner) for key, inner in _names_inside(item, copy, name))
        holder[at] = copies[id(item), name]
    return top[0]


def _masked_leaf(item: Any, name: str) -> Any:
    """A value that is not a container, masked if it is a secret or contains one."""
    if isinstance(item, bool) or not isinstance(item, str | int):
        return item
    label = label_of(name, str(item)) if name else None
    if label is not None:
        return f"{MARK} {label}]"
    if isinstance(item, int):
        return item
    lead = "cookie: " if name.lower() in ("cookie", "set-cookie") else ""
    return mask(lead + item, len(lead))


def _names_inside(item: Any, copy: Any, name: str) -> Iterable[tuple[Any, str]]:
    """The keys of a copied container, each with the name of the value there."""
    if not isinstance(item, dict):
        return [(index, name) for index in range(len(item))]
    # An object such as `{"name": "API_TOKEN", "value": "…"}` names its value.
    called = next((item[key] for key in _KEYS_OF_A_NAME if isinstance(item.get(key), str)), "")
    names = [called if called and str(key).lower() == "value" else str(key) for key in item]
    return zip(copy, names, strict=True)


def _with_masked_keys(value: dict[Any, Any]) -> dict[Any, Any]:
    """Copy an object with secrets in its keys masked. Keys that become equal get a number, so that
    none is lost."""
    copy: dict[Any, Any] = {}
    for key, each in value.items():
        shown = mask(key) if isinstance(key, str) else key
        copy[f"{shown} ({len(copy)})" if shown in copy else shown] = each
    return copy


def _replace(text: str, found: list[Secret], start: int, end: int) -> str:
    parts: list[str] = []
    for span in found:
        if span.end <= start or span.start >= end:
            continue
        parts += (text[start : max(start, span.start)], f"{MARK} {span.label}]")
        start = span.end
    parts.append(text[start:end])
    return "".join(parts)
