"""Stored images, shown to models that accept images."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from mcp import Client
from PIL import Image

import coatcheck
from coatcheck import Session, aio, toolkit
from coatcheck.mcp.server import Sessions, make_server
from coatcheck.parts import Part
from coatcheck.reading import pdf, pictures
from coatcheck.reading.sandbox import Pool

pytestmark = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
# Size of an image of 160 × 90 pixels when turned upright, by its EXIF orientation.
UPRIGHT_SIZES = {6: (90, 160), 1: (160, 90)}


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    pictures.pool.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def encoded(kind: str, size: tuple[int, int], mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 90).convert(mode).save(out, kind, **options)
    return out.getvalue()


def shown(session: Session, data: bytes, **about: Any) -> list[Part]:
    return toolkit(session)[0].parts(pointer=session.put(data, **about).pointer)


def size_of(part: Part) -> tuple[int, int]:
    size: tuple[int, int] = Image.open(io.BytesIO(part.data)).size
    return size


def test_a_small_image_is_shown_as_it_is(session: Session) -> None:
    data = encoded("PNG", (160, 90))
    text, picture = shown(session, data)
    assert text.text.endswith("\n160 x 90 pixels")
    assert (picture.media_type, picture.data, picture.tokens) == ("image/png", data, 20)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("PNG", "I;16"),
        ("JPEG", "CMYK"),
        ("GIF", "P"),
        ("WEBP", "RGBA"),
    ],
)
def test_a_large_image_is_scaled_to_what_providers_accept(
    session: Session, kind: str, mode: str
) -> None:
    _, picture = shown(session, encoded(kind, (2_000, 50), mode))
    assert size_of(picture) == (1_568, 39)
    assert picture.media_type in pictures.FORMATS
    assert len(picture.data) <= pictures.SMALL or mode == "RGBA"


@pytest.mark.parametrize("orientation", UPRIGHT_SIZES)
def test_a_rotated_photo_is_turned_upright(session: Session, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    _, picture = shown(session, encoded("JPEG", (160, 90), exif=exif))
    assert size_of(picture) == UPRIGHT_SIZES[orientation]


def test_a_format_that_no_provider_accepts_is_converted(session: Session) -> None:
    _, picture = shown(session, encoded("BMP", (160, 90)), media_type="image/bmp")
    assert (picture.media_type, size_of(picture)) == ("image/png", (160, 90))


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0" + bytes(100),
            "image/png",
        ),  # 65,536 × 65,536
        (encoded("PNG", (160, 90))[:2_000], "image/png"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        (b"no image", "text/plain"),
        (bytes(range(256)), "application/octet-stream"),
    ],
)
def test_content_that_cannot_be_shown_as_an_image_is_answered_with_text_only(
    session: Session, data: bytes, media_type: str
) -> None:
    assert len(shown(session, data, media_type=media_type)) == 1


def test_without_the_extra_only_small_images_are_shown(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "pool", Pool("x", package="no_such_package"))
    small = encoded("PNG", (160, 90))
    assert [part.data for part in shown(session, small)[1:]] == [small]
    assert len(shown(session, encoded("PNG", (2_000, 50)))) == 1


def test_a_request_for_a_part_shows_no_image(session: Session) -> None:
    pointer = session.put(encoded("PNG", (160, 90))).pointer
    get, listing, _ = toolkit(session)
    assert len(get.parts(pointer=pointer, grep="IHDR")) == 1
    assert len(get.parts(pointer=pointer, grep=None, lines="")) == 2
    assert len(get.parts(pointer="nothing")) == 1
    assert len(listing.parts()) == 1


def test_a_part_has_the_form_of_each_provider() -> None:
    text, image = Part("words"), Part(media_type="image/png", data=b"png")
    data = base64.b64encode(b"png").decode()
    assert (
        text.as_openai()
        == text.as_anthropic()
        == text.as_mcp()
        == {"type": "text", "text": "words"}
    )
    assert text.as_openai_responses() == {"type": "input_text", "text": "words"}
    url = f"data:image/png;base64,{data}"
    assert image.as_openai() == {"type": "image_url", "image_url": {"url": url}}
    assert image.as_openai_responses() == {"type": "input_image", "image_url": url}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    assert image.as_anthropic() == {"type": "image", "source": source}
    assert image.as_mcp() == {"type": "image", "data": data, "mimeType": "image/png"}


def test_the_mcp_server_answers_with_the_image() -> None:
    async def call() -> list[Any]:
        with coatcheck.open("memory:") as store:
            store.session("s").put(encoded("PNG", (2_000, 50)), name="shot")
            async with Client(make_server(Sessions(store, "s", named=True, ttl=60))) as client:
                return list((await client.call_tool("get_artifact", {"pointer": "shot"})).content)

    text, image, link = asyncio.run(call())
    assert "2,000 x 50 pixels" in text.text
    assert image.mime_type in pictures.FORMATS
    assert Image.open(io.BytesIO(base64.b64decode(image.data))).size == (1_568, 39)
    assert link.mime_type == "image/png"


def test_an_async_tool_has_parts_too(session: Session) -> None:
    pointer = session.put(encoded("PNG", (160, 90))).pointer
    parts = asyncio.run(aio.toolkit(session)[0].parts(pointer=pointer))
    assert [part.media_type for part in parts] == ["", "image/png"]


def test_a_model_is_never_asked_to_install_anything(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "pool", Pool("x", extra="pdf", package="no_such_package"))
    pointer = session.put(b"%PDF-1.4\n").pointer
    get = toolkit(session)[0]
    answers = [
        get.run(pointer=pointer),
        get.run(pointer=pointer, query="text"),
        get.run(pointer=pointer, grep="x"),
    ]
    assert all("install" not in answer and "extra" not in answer for answer in answers)
