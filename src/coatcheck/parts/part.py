"""`Part`: one piece of a message or a tool's result, whatever shape it had."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from coatcheck.image_size import pixels
from coatcheck.models import ANY_PROVIDER, ImageLimit
from coatcheck.tokens import estimate

Kind = Literal[
    "text", "image", "audio", "file", "nested", "reference", "foreign", "message", "unknown"
]
"""What a part is. `nested` contains other parts, such as a tool result with blocks. A `reference`
has only a URL or a file id. `foreign` is a picture or a file in the shape of a framework, and
`message` a framework's message or result with such parts inside: only the framework knows what it
accepts in their place. `unknown` is anything else."""

_PIXELS_PER_TOKEN: Final = 750
_MAX_IMAGE_TOKENS: Final = 1_600  # providers scale larger images down
_HEADER: Final = 64 * 1_024  # characters of base64 that contain the dimensions of most images


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a message: a text, an image or another file, or something that passes unchanged.

    `Part("words")` is a text and `Part(media_type="image/png", data=…)` an image. `parts.read`
    makes a part from any provider's object, and `parts.write` an object from any part.
    """

    text: str = ""
    media_type: str = ""
    """The declared media type, in lower case and without parameters. "" if there is none."""
    data: bytes = b""
    kept: object = None
    """A framework's own object that is neither text nor data. It passes unchanged."""
    original: object = field(default=None, repr=False, compare=False)
    """The object that the part was read from."""
    encoded: str = ""
    """The data as base64, as it was written in the message. Not validated."""
    read_as: Kind | None = None
    """The kind that its dialect found. None for a part that was not read: `kind` follows from its
    data."""
    dialect: str = ""
    """The dialect that it was read in, a key of `parts.DIALECTS`."""
    block: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The JSON object that the part was read from. What writes it back keeps its other fields."""
    content: tuple[Any, ...] = ()
    """The parts of a `nested` part, or the objects in a `message`."""
    limit: ImageLimit = ANY_PROVIDER
    """The largest image that the provider accepts."""

    @property
    def kind(self) -> Kind:
        if self.read_as is not None:
            return self.read_as
        if self.kept is not None:
            return "foreign"
        if not self.media_type:
            return "text"
        family = self.media_type.partition("/")[0]
        if family == "image":
            return "image"
        return "audio" if family == "audio" else "file"

    @property
    def is_encoded(self) -> bool:
        """Whether the part has data as base64, not as text."""
        return bool(self.encoded)

    @property
    def has_payload(self) -> bool:
        """Whether the part has a text or data that a store can keep."""
        return self.kind in ("text", "image", "audio", "file")

    @property
    def written(self) -> str:
        """The text, or the base64, as it is in the message."""
        return self.encoded or self.text

    @property
    def value(self) -> str | bytes:
        """The text, or the decoded bytes. Invalid base64 is returned as written."""
        if not self.encoded:
            return self.data or self.text
        try:
            return base64.b64decode("".join(self.encoded.split()), validate=True)
        except ValueError:
            return self.encoded

    @property
    def base64(self) -> str:
        """The data as base64 text."""
        return self.encoded or base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The data as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"

    @property
    def billed(self) -> int | None:
        """The tokens that providers bill for an image, however large its file is. None for anything
        else, and if its dimensions are unknown."""
        size = self._pixels()
        if size is None or not all(size):
            return None
        return min(math.ceil(size[0] * size[1] / _PIXELS_PER_TOKEN), _MAX_IMAGE_TOKENS)

    @property
    def tokens(self) -> int:
        """The tokens of a text by our estimate, or those that providers bill for an image."""
        if not self.media_type:
            return estimate(self.text)
        return self.billed or _MAX_IMAGE_TOKENS

    @property
    def is_over_limit(self) -> bool:
        """Whether this is an image that the provider would refuse."""
        size = self._pixels()
        if size is None:
            return False
        has_long_edge = self.limit.max_edge is not None and max(size) > self.limit.max_edge
        return has_long_edge or len(self.base64) * 3 // 4 > self.limit.max_bytes

    def with_text(self, text: str) -> Part:
        """Return this part with a text in place of its payload."""
        return replace(self, text=text, data=b"", encoded="", media_type="", read_as="text")

    def with_image(self, media_type: str, data: bytes) -> Part:
        """Return this part with another image."""
        return replace(self, media_type=media_type, data=data, encoded="", read_as="image")

    # `Tool.parts` returns parts, so these are public.

    def as_openai(self) -> dict[str, Any]:
        """Return the part for OpenAI's chat completions, which accept images only in messages of
        the user."""
        return self._written("openai_chat")

    def as_openai_responses(self) -> dict[str, Any]:
        """Return the part for OpenAI's Responses API."""
        return self._written("openai_responses")

    def as_anthropic(self) -> dict[str, Any]:
        """Return the part for Anthropic's Messages API."""
        return self._written("anthropic")

    def as_mcp(self) -> dict[str, Any]:
        """Return the part as a content block of MCP."""
        return self._written("mcp")

    def _written(self, dialect: str) -> dict[str, Any]:
        from coatcheck.parts import write  # the dialects import this module

        written: dict[str, Any] = write(self, dialect)
        return written

    def _pixels(self) -> tuple[int, int] | None:
        """Width and height of an image; None if it has none, or is something else."""
        if self.kind != "image":
            return None
        if not self.encoded:
            return pixels(self.data)
        # A JPEG may have long metadata before its dimensions.
        for written in (self.encoded[:_HEADER], self.encoded):
            head = "".join(written.split())
            try:
                size = pixels(base64.b64decode(head[: len(head) // 4 * 4], validate=True))
            except ValueError:
                return None
            if size is not None:
                return size
        return None
