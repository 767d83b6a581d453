"""Descriptions of binary content, made without unpacking it."""

import gzip
import io
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.reading import pdf
from coatcheck.reading.descriptions import describe
from coatcheck.reading.pdf import pdf_text
from tests.reading.framed import make_content

pytestmark = pytest.mark.usefixtures("each_source")


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    pdf.pool.close()


HELVETICA = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"


def make_pdf(*pages: bytes, coding: str = "", font: bytes = HELVETICA) -> Content:
    """Return a PDF whose pages have these content streams."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
        font,
    ]
    for number, stream in enumerate(pages):
        around = f"/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<</Font<</F1 3 0 R>>>>/Contents {5 + 2 * number} 0 R"
        objects.append(f"<</Type/Page{around}>>".encode())
        objects.append(
            f"<</Length {len(stream)}{coding}>>stream\n".encode() + stream + b"\nendstream"
        )
    out, places = b"%PDF-1.4\n", []
    for number, made in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + made + b"\nendobj\n"
    table = b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    size = len(objects) + 1
    end = f"trailer<</Size {size}/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF".encode()
    return make_content(
        out + f"xref\n0 {size}\n0000000000 65535 f \n".encode() + table + end, "application/pdf"
    )


def text_page(text: str) -> bytes:
    return f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode()


@pytest.mark.parametrize(
    ("media_type", "head"),
    [
        ("image/png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 480)),
        ("image/gif", b"GIF89a" + struct.pack("<HH", 640, 480)),
        (
            "image/jpeg",
            b"\xff\xd8\xff\xe0\0\x04ab\xff\xc0\0\x11\x08" + struct.pack(">HH", 480, 640) + b"\x03",
        ),
        ("image/webp", b"RIFF\0\0\0\0WEBPVP8X\n\0\0\0\0\0\0\0" + b"\x7f\x02\0" + b"\xdf\x01\0"),
        ("image/bmp", b"BM" + b"\0" * 16 + struct.pack("<ii", 640, -480)),
    ],
)
def test_the_description_of_an_image_has_its_dimensions(media_type: str, head: bytes) -> None:
    answer = describe(make_content(head, media_type))
    assert answer.text == f"{media_type}, {len(head)} bytes\n640 x 480 pixels"


@pytest.mark.parametrize(
    "media_type",
    ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "application/zip", "application/gzip",
     "application/zstd", "application/vnd.sqlite3", "audio/wav", "application/pdf", "video/mp4"],
)  # fmt: skip
@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"\xff\xd8\xff\xff", b"\xff\xd8\xff\xc0", b"RIFF", b"PK\x05\x06" + b"\xff" * 18],
)
def test_damaged_content_is_described_too(media_type: str, data: bytes) -> None:
    assert describe(make_content(data, media_type)).text.startswith(
        f"{media_type}, {len(data)} byte"
    )


def test_gzip_is_described_and_never_unpacked() -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    text = describe(make_content(bomb, "application/gzip")).text
    assert "10,000,000 bytes" in text
    assert "not unpacked" in text


def test_an_archive_shows_its_names_and_claimed_sizes() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(50):
            archive.writestr(f"../{number}.txt", "x" * 10)
    text = describe(make_content(out.getvalue(), "application/zip")).text
    assert "50 entries that claim 500 bytes" in text
    assert "'../0.txt' 10" in text
    assert "… 10 more" in text


def test_a_description_is_never_longer_than_its_page() -> None:
    answer = describe(
        make_content(bytes(range(256)) * 10, "application/octet-stream"), max_chars=100
    )
    assert len(answer.text) == 100
    assert answer.note == "the description is cut"


def test_other_content_is_described_by_its_first_bytes() -> None:
    assert (
        "0000  00 01 41 42" in describe(make_content(b"\0\1ABC", "application/octet-stream")).text
    )


def test_the_description_of_a_pdf_has_its_number_of_pages() -> None:
    assert "3 pages" in describe(make_pdf(*map(text_page, ("one", "two", "three")))).text


def test_the_text_of_a_pdf_is_read_by_page() -> None:
    answer = pdf_text(make_pdf(*map(text_page, ("one", "two", "three"))), 2, 9)
    assert answer.text == "--- page 2 ---\ntwo\n\n--- page 3 ---\nthree"
    assert answer.shown == "pages 2-3 of 3"


def test_a_page_without_text_is_reported() -> None:
    answer = pdf_text(make_pdf(text_page("one"), b"", b"", text_page("four"), b""), 1, 5)
    assert answer.note == "pages 2-3, 5 have no text; they may be scanned"
    assert "--- page 2: no text, it may be scanned ---" in answer.text


def test_text_over_the_limit_is_cut_and_says_where() -> None:
    answer = pdf_text(make_pdf(*map(text_page, ("one", "two" * 100, "three"))), 1, 3, limit=50)
    assert "cut on page 2" in answer.note


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 2), (4, 4)])
def test_pages_that_do_not_exist_are_an_error(first: int, last: int) -> None:
    with pytest.raises(InvalidArgument):
        pdf_text(make_pdf(*map(text_page, ("one", "two", "three"))), first, last)


def test_an_invalid_pdf_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        pdf_text(make_content(b"%PDF-1.4 and then nothing", "application/pdf"), 1, 1)


PDFS = Path(__file__).parent / "pdfs"


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("chromium", "Zürich – 42 €", "Größe"),
        ("pdftex", "The first offer — Straße", ""),
        ("groff", "Groff — page", ""),
    ],
)
def test_the_text_of_a_pdf_from_a_real_program_is_read(name: str, text: str, title: str) -> None:
    content = make_content((PDFS / f"{name}.pdf").read_bytes(), "application/pdf")
    assert text in pdf_text(content, 1, 1).text
    assert title in describe(content).text


@pytest.mark.parametrize(
    ("encoding", "codec"),
    [("Identity-H", "utf-16-be"), ("GBK-EUC-H", "gbk"), ("GBpc-EUC-V", "gb2312"), ("GBK2K-H", "gb18030"),
     ("ETen-B5-H", "cp950"), ("90ms-RKSJ-H", "cp932"), ("UniJIS-UTF16-H", "utf-16-be")],
)  # fmt: skip
def test_a_pdf_may_name_any_encoding_of_the_library(encoding: str, codec: str) -> None:
    text = "中文"
    font = f"<</Type/Font/Subtype/Type0/BaseFont/X/Encoding/{encoding}/DescendantFonts[]>>".encode()
    page = f"BT /F1 12 Tf 10 100 Td <{text.encode(codec).hex()}> Tj ET".encode()
    assert text in pdf_text(make_pdf(page, font=font), 1, 1).text


def test_every_codec_is_looked_up_before_files_are_out_of_reach() -> None:
    code = (
        "import codecs, encodings, pkgutil, sys\n"
        "names = [module.name for module in pkgutil.iter_modules(encodings.__path__)]\n"
        "from coatcheck.reading import pdf, sandbox\n"
        "pdf._warm()\n"
        "sandbox.confine(sys.argv[1])\n"
        "for name in set(names) - {'aliases', 'mbcs', 'oem'}:\n"
        "    if not name.startswith('_'):\n"
        "        codecs.lookup(name)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("layers", [1, 2])
def test_a_bomb_in_a_pdf_is_an_error_within_its_limits(layers: int) -> None:
    packer = zlib.compressobj(9)
    stream = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(128)) + packer.flush()
    coding = "/Filter/FlateDecode"
    if layers == 2:
        stream, coding = zlib.compress(stream, 9), "/Filter[/FlateDecode/FlateDecode]"
    with pytest.raises(LimitExceeded):
        pdf_text(make_pdf(stream, coding=coding), 1, 1)
    assert "one" in pdf_text(make_pdf(text_page("one")), 1, 1).text


def test_a_pdf_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(LimitExceeded):
        pdf_text(make_pdf(b"BT " + b"(a) Tj " * 3_000_000 + b"ET"), 1, 1, seconds=0.2)
    assert "one" in pdf_text(make_pdf(text_page("one")), 1, 1).text
