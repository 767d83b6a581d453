"""A tool's result as text for a model. What JSON does not have (tuples, sets, datetimes, odd keys) becomes the JSON
nearest to it, else its text: a result must not be lost for that.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from coatcheck import media
from coatcheck.previews import Sample
from coatcheck.values import Encoded


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


def described(value: Encoded, sample: Sample, claimed: str | None) -> tuple[str, str]:
    """The media type and kind of what is stored. A magic number counts more than what somebody claims."""
    if (text := value.text) is not None:
        media_type = claimed if claimed and media.is_text(claimed) else media.sniff_text(text[: media.HEAD], text[-64:])
        return media_type, media.sniff_kind(media_type, text[: media.HEAD])
    if value.codec == "json":
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
