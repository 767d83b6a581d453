"""Pictures for models that see: an image from the store, or one on its way to a model, in the
formats and dimensions that providers accept.

With the extra `images`, a larger image is scaled, a rotated one is turned upright, and other
formats are converted, in a child process: an image is hostile content too. Without it, an image
within the limits is given as it is.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.ids import digest_of
from coatcheck.image_size import pixels
from coatcheck.media import essence
from coatcheck.models import ImageLimit
from coatcheck.previews.binaries import found_type
from coatcheck.reading.sandbox import Message, Pool, serve
from coatcheck.refs import Ref

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
    if (
        not media_type.startswith("image/")
        or media_type.endswith("+xml")
        or content.size > MAX_BYTES
    ):
        return None
    if pool.is_installed:
        try:
            return _asked(content, max_edge=EDGE, wanted_bytes=SMALL, max_bytes=MAX_DATA * 3 // 4)
        except CoatcheckError:  # damaged, or too large: a provider would refuse it
            return None
    size = pixels(head)
    is_small = size is not None and max(size) <= EDGE and content.size * 4 <= MAX_DATA * 3
    return (
        Picture(media_type, content.read(0, content.size))
        if is_small and media_type in FORMATS
        else None
    )


def scaled(data: bytes, limit: ImageLimit) -> Picture | None:
    """Return an image within a provider's limit, with the same dimensions if that is possible. None
    without the extra `images`, and for an image that cannot be read."""
    if not pool.is_installed or len(data) > MAX_BYTES:
        return None
    content = Content.of(Ref(digest_of(data), "", len(data), "image/*", "data"), data)
    max_edge, max_bytes = limit.max_edge or MAX_PIXELS, limit.max_bytes
    try:
        return _asked(content, max_edge=max_edge, wanted_bytes=max_bytes, max_bytes=max_bytes)
    except CoatcheckError:  # damaged, or too many pixels
        return None


def _asked(content: Content, *, max_edge: int, wanted_bytes: int, max_bytes: int) -> Picture | None:
    """Ask the child process for an image within these limits."""
    arguments = {"max_edge": max_edge, "wanted_bytes": wanted_bytes, "max_bytes": max_bytes}
    found = pool.ask(arguments, seconds=SECONDS, max_chars=max_bytes * 2, contents=[content])
    if not found["media_type"]:
        return None
    return Picture(found["media_type"], base64.b64decode(found["data"]))


def main(folder: str) -> None:
    """Run the child process."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    Image.init()
    for kind in _OPENED:  # everything is imported before files are out of reach
        file = io.BytesIO()
        Image.new("RGB", (EDGE + 1, 2)).save(file, kind)
        _scaled(file.getvalue(), max_edge=EDGE, wanted_bytes=SMALL, max_bytes=SMALL)
    serve(folder, _answer)


def _answer(message: Message, contents: list[Content]) -> Message:
    from PIL import Image

    try:
        media_type, data = _scaled(b"".join(contents[0].chunks()), **message["arguments"])
    except Image.DecompressionBombError as error:
        raise LimitExceeded("the image has too many pixels") from error
    except MemoryError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise InvalidArgument(f"the image cannot be read: {type(error).__name__}") from error
    return {"media_type": media_type, "data": base64.b64encode(data).decode()}


def _scaled(data: bytes, *, max_edge: int, wanted_bytes: int, max_bytes: int) -> tuple[str, bytes]:
    """Return an image within the limits, as it is if it fits; an empty media type if it cannot be
    made small enough.

    An image with an edge over `max_edge` gets the dimensions to which providers scale it anyway.
    One with too many bytes alone keeps its dimensions if possible, since a model may answer with
    places in it."""
    from PIL import Image, ImageOps

    image: Any
    with Image.open(io.BytesIO(data), formats=_OPENED) as image:
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        media_type = Image.MIME.get(image.format, "")
        is_upright = image.getexif().get(_ORIENTATION, 1) == 1
        is_too_long = max(image.size) > max_edge
        if media_type in FORMATS and is_upright and not is_too_long and len(data) <= wanted_bytes:
            return media_type, data
        if is_too_long:
            image.draft("RGB", (EDGE, EDGE))  # decode only as much of a large JPEG as is needed
        image = ImageOps.exif_transpose(image)
        has_alpha = _is_transparent(image)
        image = image.convert("RGBA" if has_alpha else "RGB")
    found = None if is_too_long else _encoded(image, has_alpha, wanted_bytes, max_bytes)
    if found is None:
        image.thumbnail((EDGE, EDGE), Image.Resampling.LANCZOS)
        found = _encoded(image, has_alpha, wanted_bytes, max_bytes)
    return found or ("", b"")


def _encoded(
    image: Any,
    has_alpha: bool,
    wanted_bytes: int,
    max_bytes: int,
) -> tuple[str, bytes] | None:
    """Return an image as a PNG, or as a JPEG if that has too many bytes. A transparent one is a
    PNG, unless it has more than `max_bytes`. None if it has more than that in either format."""
    if max(image.size) <= EDGE or has_alpha:  # encoding a large PNG takes seconds
        out = io.BytesIO()
        image.save(out, "PNG")
        if out.tell() <= (max_bytes if has_alpha else wanted_bytes):
            return "image/png", out.getvalue()
    if has_alpha and max(image.size) > EDGE:
        return None
    data = b""
    for quality in _QUALITIES:
        out = io.BytesIO()
        image.convert("RGB").save(out, "JPEG", quality=quality)
        data = out.getvalue()
        if len(data) <= wanted_bytes:
            break
    return ("image/jpeg", data) if len(data) <= max_bytes else None


def _is_transparent(image: Any) -> bool:
    """Whether any pixel of an image is transparent. Many screenshots have an alpha channel that is
    opaque."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return False
    opaque = 255
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < opaque)
