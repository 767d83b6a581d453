"""A tool's result as text for a model, and as the value that the store keeps.

The store keeps values exactly, or refuses them. A result must not be lost for that: what JSON does not have (tuples,
sets, datetimes, odd keys) is kept as the JSON nearest to it, else as its text.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from coatcheck import media
from coatcheck.errors import InvalidArgument
from coatcheck.previews import EDGE, Sample
from coatcheck.values import encode, encode_text


def as_text(value: object) -> str:
    """What a model would be sent: text as it is, bytes as the text they are or as base64, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return base64.b64encode(data).decode()
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        return _nearest(value)


def kept(value: object, text: str) -> tuple[object, Sample]:
    """The value that is stored for one whose text is this, and the ends of its bytes there."""
    if isinstance(value, str):
        return value, _ends(value)
    for candidate in (lambda: value, lambda: json.loads(text, parse_constant=str)):
        try:
            found = candidate()
            return found, Sample.of(encode(found)[1])
        except (InvalidArgument, ValueError, RecursionError):
            continue
    return text, _ends(text)


def _ends(text: str) -> Sample:
    """The sample of a text's bytes. Where a character is a byte, the rest need not be encoded for it."""
    if not text.isascii():
        return Sample.of(encode_text(text))
    tail = text[max(EDGE, len(text) - EDGE) :]
    lines = text.count("\n") + (not text.endswith("\n") if text else 0)
    return Sample(text[:EDGE].encode(), tail.encode(), len(text), lines)


def described(value: object, sample: Sample, claimed: str | None) -> tuple[str, str]:
    """The media type and kind of what is stored. A magic number counts more than what somebody claims."""
    if isinstance(value, str):
        media_type = (
            claimed if claimed and media.is_text(claimed) else media.sniff_text(value[: media.HEAD], value[-64:])
        )
        return media_type, media.sniff_kind(media_type, value[: media.HEAD])
    if not isinstance(value, bytes | bytearray | memoryview):
        return media.JSON, "data"
    head = sample.head[: media.HEAD]
    media_type = media.sniff_bytes(head, (sample.head + sample.tail)[-64:])
    if claimed and (media_type == media.BINARY or media.is_text(media_type)):
        media_type = claimed
    start = head.decode("utf-8", "ignore") if media.is_text(media_type) else ""
    return media_type, media.sniff_kind(media_type, start)


def _jsonable(value: object) -> Any:
    """What JSON has no form for. Sets are sorted: the same set is the same text in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=as_text)
    import pydantic_core  # here, so that text needs none of it

    return pydantic_core.to_jsonable_python(
        value, fallback=_said, bytes_mode="base64", inf_nan_mode="constants", serialize_unknown=False
    )


def _nearest(value: object) -> str:
    """The JSON of a value with keys that JSON does not have, or its text."""
    import pydantic_core

    try:
        return pydantic_core.to_json(value, fallback=_said, bytes_mode="base64", inf_nan_mode="strings").decode()
    except (ValueError, TypeError, RecursionError):  # a cycle, a lone surrogate
        return _said(value)


def _said(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever a tool's own class does wrong
        return f"<{type(value).__name__}>"


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_jsonable)
