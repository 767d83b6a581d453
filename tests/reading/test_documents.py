"""Readable text of PDFs, web pages and office files, and content that is not text."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.reading import documents, heavy, office, pdf
from tests.reading.framed import make_content

PDFS, OFFICE = Path(__file__).parent / "pdfs", Path(__file__).parent / "office"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    pdf.pool.close()
    heavy.pool.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def page_text(source: str) -> str:
    return documents.extract(make_content(source.encode(), "text/html"), "page").text


def relations(**targets: str) -> str:
    listed = "".join(
        f'<Relationship Id="r{number}" Type="{RELATIONS}/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets.items())
    )
    return f"<Relationships>{listed}</Relationships>"


def word(body: str, prolog: str = "") -> bytes:
    files = {
        "_rels/.rels": relations(officeDocument="word/document.xml"),
        "word/document.xml": f'{prolog}<w:document xmlns:w="w" xmlns:r="{RELATIONS}">{body}</w:document>',
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def slides(*texts: str) -> bytes:
    space = f'xmlns:a="a" xmlns:p="p" xmlns:r="{RELATIONS}"'
    ids = "".join(f'<p:sldId id="{256 + at}" r:id="s{at}"/>' for at in range(len(texts)))
    targets = "".join(
        f'<Relationship Id="s{at}" Type="{RELATIONS}/slide" Target="slides/slide{at}.xml"/>'
        for at in range(len(texts))
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_rels/.rels", relations(officeDocument="ppt/presentation.xml"))
        archive.writestr("ppt/presentation.xml", f"<p:presentation {space}>{ids}</p:presentation>")
        archive.writestr(
            "ppt/_rels/presentation.xml.rels", f"<Relationships>{targets}</Relationships>"
        )
        for at, text in enumerate(texts):
            body = f"<p:sp><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:sp>"
            archive.writestr(f"ppt/slides/slide{at}.xml", f"<p:sld {space}>{body}</p:sld>")
    return out.getvalue()


# PDF


def test_grep_searches_the_text_of_a_pdf_and_names_the_page(session: Session) -> None:
    ref = session.put((PDFS / "columns.pdf").read_bytes())
    page = session.read(ref, grep="internationalization|efficient|workflow")
    assert (
        page.text
        == "p1:2:An efficient office offers\np1:4:of internationalization\np2:9:Last page: the workflow."
    )
    assert page.shown == "matches 1-3 of 3 in 9 lines, of the text of pages 1-2 of 2"


def test_the_lines_between_pages_match_nothing(session: Session) -> None:
    ref = session.put((PDFS / "columns.pdf").read_bytes())
    assert session.read(ref, grep="---|page 2").matches == 0


def test_a_pdf_is_sliced_by_the_lines_of_its_text(session: Session) -> None:
    ref = session.put((PDFS / "columns.pdf").read_bytes())
    page = session.read(ref, lines="1:2")
    assert page.text == "--- page 1 ---\nAn efficient office offers\n"
    assert page.spans == ()


def test_the_query_text_reads_all_pages_and_page_2_reads_one(session: Session) -> None:
    ref = session.put((PDFS / "columns.pdf").read_bytes())
    assert session.read(ref, query="text").text.count("--- page ") == 2
    assert session.read(ref, query="page 2").text == "--- page 2 ---\nLast page: the workflow."


def test_a_pdf_of_libreoffice_is_read(session: Session) -> None:
    ref = session.put((PDFS / "libreoffice.pdf").read_bytes())
    assert session.read(ref, query="text").text == "--- page 1 ---\nZürich office, first floor."


def test_a_pdf_declared_as_text_is_a_pdf(session: Session) -> None:
    ref = session.put((PDFS / "libreoffice.pdf").read_bytes(), media_type="text/plain")
    assert session.read(ref, grep="first floor").matches == 1


def test_the_next_page_of_a_grep_continues_in_the_text(session: Session) -> None:
    ref = session.put((PDFS / "columns.pdf").read_bytes())
    page = session.read(ref, grep="o", max_chars=200)
    texts = [page.text]
    while page.cursor is not None:
        page = session.read(ref, cursor=page.cursor, max_chars=200)
        texts.append(page.text)
    assert "\n".join(texts) == session.read(ref, grep="o").text


def test_pages_that_take_too_long_are_read_by_the_next_call() -> None:
    content = make_content(
        (PDFS / "columns.pdf").read_bytes() + b"\n% another one", "application/pdf"
    )
    assert pdf.pdf_text(content, 1, 2, limit=1_000).shown == "pages 1-2 of 2"  # a warm child
    parts = [pdf.pdf_text(content, 1, 2, seconds=0.000_1).shown for _ in range(2)]
    assert parts == ["page 1 of 2", "pages 1-2 of 2"]


# Web pages


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<head><title>T &amp; U</title><body><h2>H</h2><p>a <b>b</b>\n c", "Title: T & U\n\n## H\na b c"),
        ("<p>a<p hidden>b<p>c<div style='display: none'>d</div>", "a\nc"),
        ("<script>if (a < b) '</p>'</script><style>p{}</style>x<!-- y -->", "x"),
        ("<a href='/card'><h3>Card</h3>more</a> <a href='/card'>again</a>", "### [Card](/card)\nmore again"),
        ("<a href='#top'>top</a><a href='javascript:x()'>run</a>", "toprun"),
        ("<ul><li>a<ol><li>b<li>c</ol><li>d</ul>", "- a\n  1. b\n  2. c\n- d"),
        ("<table><tr><th>a<th>b<tr><td>1<td><div>2</div></table>z", "a | b\n1 | 2\n\nz"),
        ("<nav><ul><li><a href=/1>One</a><li>Two</ul></nav>text", "[One](/1) · Two\n\ntext"),
        ("<pre>  a\n    b</pre>", "  a\n    b"),
        ("1 < 2 &lt;b&gt; a<br>b", "1 < 2 <b> a\nb"),
        ("<img alt=Cat><input name=q><input type=submit value=Go>", "[image: Cat] [field: q] [button: Go]"),
        ("text <a href='unclosed", "text"),
    ],
)  # fmt: skip
def test_a_web_page_is_readable_text(source: str, text: str) -> None:
    assert page_text(source) == text


@pytest.mark.parametrize(
    "piece",
    [
        "<",
        "<!--",
        "<a ",
        '<a x="',
        "<!",
        "</",
        "<div>",
        "<p hidden>",
        "<a href=/x>y",
        "<ul><li>",
        "&",
        "<td>x",
    ],
)
def test_a_hostile_page_takes_linear_time(piece: str) -> None:
    # The standard library's parser takes a minute for some of these. The child has ten seconds.
    source = piece * (200_000 // len(piece))
    assert heavy.document(make_content(source.encode(), "text/html"), "page").note == ""


def test_a_phrase_split_by_tags_is_found_in_the_text(session: Session) -> None:
    source = "<html><p>The <b>quick</b> brown <i>fox</i></p><p>The lazy dog</p></html>"
    ref = session.put(source, media_type="text/html")
    page = session.read(ref, grep="quick brown fox")
    assert page.text == "1:The quick brown fox"
    assert page.shown == "no match in the source, match 1 of 1 in 2 lines, of its text"
    assert session.read(ref, grep="<b>quick").text.startswith("1:<html>")
    assert session.read(ref, grep="slow").shown == "no match in 1 line"


def test_the_long_text_of_a_page_becomes_a_separate_artifact(session: Session) -> None:
    ref = session.put("<html>" + "<p>paragraph</p>" * 2_000, media_type="text/html")
    page = session.read(ref, query="text")
    assert page.derived is not None
    assert session.get(page.derived) == "\n".join(["paragraph"] * 2_000)


# Office files


@pytest.mark.parametrize("name", ["report.docx", "report.odt"])
def test_headings_links_tables_and_lists_of_an_office_file_are_text(
    session: Session, name: str
) -> None:
    ref = session.put((OFFICE / name).read_bytes())
    assert session.read(ref, query="text").text == (
        "# Quarterly report\n"
        "Zürich office: the first offer costs 42 €. See [the plan](https://example.org/plan).\n\n"
        "## Figures\n\nRegion | Sales\nNorth | 1,200\nSouth | 980\n\n"
        "## Next steps\n- Hire two people\n  - in Basel\n- Move the office\n- First\n- Second"
    )
    assert session.read(ref, grep="980").text == "4=## Figures\n8:South | 980"
    assert 'query="text" gives its text' in session.read(ref).text


def test_removed_text_is_left_out_and_the_same_text_is_shown_once() -> None:
    body = (
        "<w:p><w:del><w:r><w:t>old</w:t></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins></w:p>"
        '<mc:A xmlns:mc="m"><mc:Choice><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Choice>'
        "<mc:Fallback><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Fallback></mc:A>"
    )
    assert documents.extract(make_content(word(body), DOCX), "office").text == "new\nbox"


def test_slides_are_read_one_at_a_time_and_named_by_a_grep(session: Session) -> None:
    ref = session.put(slides("alpha", "beta", "--- slide 9 ---"))
    assert session.read(ref, query="slide 2").text == "--- slide 2 ---\nbeta"
    assert session.read(ref, grep="beta").text == "p2:5:beta"
    assert session.read(ref, query="page 3").text == "--- slide 3 ---\n --- slide 9 ---"


@pytest.mark.parametrize(
    "prolog", ['<!DOCTYPE x [<!ENTITY e "y">]>', '<!DOCTYPE x SYSTEM "file:///etc/passwd">']
)
def test_a_document_with_entities_is_refused(prolog: str) -> None:
    with pytest.raises(InvalidArgument, match="document type"):
        documents.extract(make_content(word("<w:p/>", prolog), DOCX), "office")


def test_a_document_that_unpacks_to_too_much_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "MAX_UNPACKED", 1 << 20)
    with pytest.raises(LimitExceeded, match="unpacks to more"):
        documents.extract(make_content(word("<w:p/>" * 300_000), DOCX), "office")


def test_a_damaged_document_is_an_error(session: Session) -> None:
    data = (OFFICE / "report.docx").read_bytes()
    ref = session.put(data[:2_000] + bytes(200) + data[2_200:])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        session.read(ref, query="text")


# Not text


@pytest.mark.parametrize("asked", [{"lines": "1:5"}, {"grep": "IHDR"}, {"chars": "0:100"}, {}])
@pytest.mark.parametrize("media_type", ["image/png", "text/plain", "application/octet-stream"])
def test_binary_content_is_described_whatever_the_request(
    session: Session, media_type: str, asked: dict[str, str]
) -> None:
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x02\x80\0\0\x01\xe0" + bytes(range(256)) * 20
    page = session.read(session.put(png, media_type=media_type), **asked)  # type: ignore[arg-type]
    assert "640 x 480 pixels" in page.text
    assert "\ufffd" not in page.text
    assert ("no lines to read or search" in page.shown) is bool(asked)


def test_unknown_bytes_declared_as_text_are_described(session: Session) -> None:
    page = session.read(session.put(bytes(range(256)) * 20, media_type="text/plain"), lines="1:5")
    assert page.text.startswith("application/octet-stream, 5,120 bytes")


@pytest.mark.parametrize(
    "text", [b"ok\xff ok \0 ok\n" * 50, b"ID3 tags are old\n", "é\n".encode("utf-16")]
)
def test_text_with_a_few_odd_bytes_is_still_text(session: Session, text: bytes) -> None:
    assert session.read(session.put(text, media_type="text/plain"), lines="1").shown.startswith(
        "line 1 of "
    )


def test_the_query_text_on_unsuitable_content_is_an_error_that_says_what_to_do(
    session: Session,
) -> None:
    with pytest.raises(InvalidArgument, match="text already"):
        session.read(session.put("a\nb\n"), query="text")
    with pytest.raises(InvalidArgument, match="no text to read"):
        session.read(session.put(bytes(range(256))), query="text")


@pytest.mark.parametrize(
    ("file", "header", "ask"),
    [
        (PDFS / "chromium.pdf", "PDF 1.4 “Größe”, 1 page", 'query="text"'),
        (
            PDFS / "columns.pdf",
            "PDF 1.5, 2 pages",
            'query="text"',
        ),  # its pages are in a packed stream
        (PDFS / "libreoffice.pdf", "PDF 1.6, 1 page", 'query="text"'),
        (OFFICE / "report.docx", "Word document", 'query="text"'),
        (OFFICE / "report.odt", "OpenDocument text", 'query="text"'),
    ],
)
def test_the_preview_of_a_document_shows_its_pages_and_how_to_read_it(
    session: Session, file: Path, header: str, ask: str
) -> None:
    preview = session.preview(session.put(file.read_bytes()))
    assert preview.text.startswith(header)
    assert preview.ask == ask


def test_a_presentation_of_a_thousand_slides_is_read(session: Session) -> None:
    """Its directory is longer than the last bytes by which a file is recognized."""
    ref = session.put(
        slides(*(f"Slide number {number}, with its own words." for number in range(1, 1_001)))
    )
    assert session.preview(ref, limit=500).text.startswith("PowerPoint presentation, 1003 entries")
    assert (
        session.read(ref, query="slide 1000").text
        == "--- slide 1000 ---\nSlide number 1000, with its own words."
    )
    page = session.read(ref, query="text")
    assert page.text.startswith("--- slide 1 ---\nSlide number 1, with its own words.")
    assert session.read(ref, grep="number 777,").matches == 1
