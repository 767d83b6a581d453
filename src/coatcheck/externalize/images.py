"""Images on their way to a model. They stay images: a model cannot see a stub.

An image that the provider accepts stays as it is. One over the provider's limit
(`models.IMAGE_LIMITS`) would be refused, so it is scaled if the extra `images` is installed, and
passed on if it is not.
"""

from __future__ import annotations

from coatcheck.parts import Part


def fitted(part: Part) -> Part:
    """Return a part with its image scaled to what the provider accepts; the same object if it is
    within the limit, if it cannot be scaled, and if it has no image."""
    if not part.is_over_limit:
        return part
    data = part.value
    if not isinstance(data, bytes):
        return part
    from coatcheck.reading.pictures import scaled  # here, so that importing coatcheck stays quick

    picture = scaled(data, part.limit)
    if picture is None:
        return part
    return part.with_image(picture.media_type, picture.data)
