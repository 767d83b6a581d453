"""Images on their way to a model. They stay images: a model cannot see a stub.

An image that the provider accepts stays as it is. One over the provider's limit
(`models.IMAGE_LIMITS`) would be refused, so it is scaled if the extra `images` is installed, and
passed on if it is not.
"""

from __future__ import annotations

from typing import Any

from coatcheck.externalize.blocks import ContentPart, payload, with_image


def fitted(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block with its image scaled to what the provider accepts; the same object if it is
    within the limit, if it cannot be scaled, and if it has no image."""
    found = payload(block)
    if found is None or not found.is_over_limit:
        return block
    data = found.value
    if not isinstance(data, bytes):
        return block
    from coatcheck.reading.pictures import scaled  # here, so that importing coatcheck stays quick

    picture = scaled(data, found.limit)
    if picture is None:
        return block
    return with_image(block, ContentPart(media_type=picture.media_type, data=picture.data))
