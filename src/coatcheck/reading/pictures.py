"""Pictures for models that see: an image from the store in the formats and dimensions that providers accept.

With the extra `images`, a larger image is scaled, a rotated one is turned upright, and other formats are converted, in
a child process: an image is hostile content too. Without it, an image within the limits is given as it is.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.media import essence
from coatcheck.previews.binaries import found_type, pixels
from coatcheck.reading.sandbox import Message, Pool, serve

EDGE: Final = 1_568  # pixels; providers scale down what is larger
MAX_DATA: Final = 5 << 20  # characters of base64
SMALL: Final = 256 << 10  # bytes that also pass through hosts that limit the size of a result
MAX_BYTES: Final = 64 << 20
MAX_PIXELS: Final = 100_000_000
FORMATS: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
SECONDS: Final = 10.0
_HEAD: Final = 64 << 10
_OPENED: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
_QUALITIES: Final = (85, 70, 50, 30)
_ORIENTATION: Final = 0x0112

pool: Final = Pool("coatcheck.reading.pictures", margin=1 << 30, extra="images", package="PIL")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that a provider accepts."""

    media_type: str
    data: bytes


def picture_of(content: Content) -> Picture | None:
    """Return an artifact as a picture, or None if it is not an image that can be shown."""
    head = content.read(0, _HEAD)
    media_type = essence(found_type(head, content.ref.media_type))
    if not media_type.startswith("image/") or media_type.endswith("+xml") or content.size > MAX_BYTES:
        return None
    if pool.is_installed:
        try:
            found = pool.ask({}, seconds=SECONDS, max_chars=MAX_DATA, contents=[content])
        except CoatcheckError:  # damaged, or too large: a provider would refuse it
            return None
        return Picture(found["media_type"], base64.b64decode(found["data"])) if found["media_type"] else None
    size = pixels(head)
    is_small = size is not None and max(size) <= EDGE and content.size * 4 <= MAX_DATA * 3
    return Picture(media_type, content.read(0, content.size)) if is_small and media_type in FORMATS else None


def main(folder: str) -> None:
    """Run the child process."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    Image.init()
    for kind in _OPENED:  # everything is imported before files are out of reach
        file = io.BytesIO()
        Image.new("RGB", (EDGE + 1, 2)).save(file, kind)
        _scaled(file.getvalue())
    serve(folder, _answer)


def _answer(message: Message, contents: list[Content]) -> Message:
    from PIL import Image

    try:
        media_type, data = _scaled(b"".join(contents[0].chunks()))
    except Image.DecompressionBombError as error:
        raise LimitExceeded("the image has too many pixels") from error
    except MemoryError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise InvalidArgument(f"the image cannot be read: {type(error).__name__}") from error
    return {"media_type": media_type, "data": base64.b64encode(data).decode()}


def _scaled(data: bytes) -> tuple[str, bytes]:
    """Return an image within the limits, as it is if it fits; an empty media type if it cannot be made small enough."""
    from PIL import Image, ImageOps

    image: Any
    with Image.open(io.BytesIO(data), formats=_OPENED) as image:
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        media_type = Image.MIME.get(image.format, "")
        is_upright = image.getexif().get(_ORIENTATION, 1) == 1
        if media_type in FORMATS and is_upright and max(image.size) <= EDGE and len(data) <= SMALL:
            return media_type, data
        image.draft("RGB", (EDGE, EDGE))  # decode only as much of a large JPEG as is needed
        image = ImageOps.exif_transpose(image)
        has_alpha = "A" in image.getbands() or "transparency" in image.info
        image = image.convert("RGBA" if has_alpha else "RGB")
        image.thumbnail((EDGE, EDGE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "PNG")
    if out.tell() <= SMALL or (has_alpha and out.tell() * 4 <= MAX_DATA * 3):
        return "image/png", out.getvalue()
    for quality in _QUALITIES:
        out = io.BytesIO()
        image.convert("RGB").save(out, "JPEG", quality=quality)
        if out.tell() <= SMALL:
            break
    return ("image/jpeg", out.getvalue()) if out.tell() * 4 <= MAX_DATA * 3 else ("", b"")
