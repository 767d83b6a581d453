"""Width and height of PNG, GIF, JPEG and WebP images, from their first bytes."""

from __future__ import annotations

import struct
from contextlib import suppress

from coatcheck import media


def pixels(head: bytes) -> tuple[int, int] | None:
    """Width and height of an image, read from its first bytes, or None if they do not contain
    them."""
    media_type = media.sniff_bytes(head[: media.HEAD], b"")
    with suppress(struct.error, IndexError):
        if media_type == "image/png":
            return _pair(">II", head, 16)
        if media_type == "image/gif":
            return _pair("<HH", head, 6)
        if media_type == "image/jpeg":
            return _jpeg_pixels(head)
        if media_type == "image/webp":
            return _webp_pixels(head)
    return None


def _pair(layout: str, head: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, head, at)
    return first, second


def _jpeg_pixels(head: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(head) and head[at] == 0xFF:
        kind = head[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = _pair(">HH", head, at + 5)
            return width, height
        if kind == 0xFF:
            at += 1
        else:
            has_length = kind != 0x01 and not 0xD0 <= kind <= 0xD8
            length = max(2, _pair(">HH", head, at + 2)[0]) if has_length else 0
            at += 2 + length
    return None


def _webp_pixels(head: bytes) -> tuple[int, int] | None:
    form = head[12:16]
    if form == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if form == b"VP8L":
        bits = struct.unpack_from("<I", head, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8 ":
        width, height = _pair("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None
