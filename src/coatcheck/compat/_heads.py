"""The beginning of an artifact, for previews and summaries."""

from __future__ import annotations

import base64

from coatcheck import Ref, Session, media
from coatcheck.redaction import CONTEXT, mask


def head_of(session: Session, ref: Ref, chars: int) -> str:
    """Return the first characters of an artifact as text, with secrets masked. Bytes that are not
    text are base64."""
    with session.open(ref) as stream:
        head = stream.read(4 * (chars + CONTEXT))
    if ref.codec == "bytes" and not media.is_text(ref.media_type):
        return base64.b64encode(head[: 3 * chars]).decode()[:chars]
    text = head.decode("utf-8", "ignore")
    return mask(text[: chars + CONTEXT])[:chars]
