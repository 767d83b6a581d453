"""Workbooks: cells as text, sheets as tables, and files that are not what they seem."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.previews import Sample, preview
from coatcheck.reading import sheets, sql

SALES = (Path(__file__).parent / "office" / "sales.xlsx").read_bytes()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        session.put(SALES, name="sales")
        yield session
    sheets.pool.close()
    sql.pool.close()


def table(*rows: list[sheets.Cell]) -> tuple[int, list[str], list[list[sheets.Cell | None]]]:
    return sheets._table(sheets._Sheet("s", 0, 0, list(rows)))


def rezipped(**replaced: bytes) -> bytes:
    """The workbook with other bytes in some of its files."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(SALES)) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, replaced.get(Path(name).stem, old.read(name)))
    return file.getvalue()


def test_a_workbook_of_unknown_type_is_recognized_by_its_bytes(session: Session) -> None:
    ref = session.put(SALES, media_type="application/octet-stream")
    assert session.read(ref, query="SELECT count(*) AS n FROM artifact").text == "n\n5"


@pytest.mark.parametrize("query", [None, "text"])
def test_a_workbook_is_read_as_cells_with_addresses(session: Session, query: str | None) -> None:
    page = session.read("sales", query=query)
    assert page.text.split("\n")[:4] == [
        '--- sheet "Q3 figures": B2:G10 ---',
        'B2: "Sales by region, third quarter"',
        "B4: Region,City,Units,Price,Sold on,Order no",
        "B5: North,Oslo,12,9.5,2025-07-01,00041",
    ]
    assert (
        '4 sheets: "Q3 figures" B2:G10, "Staff" A1:D3, "Empty" empty, "numbers" A1:C2' in page.shown
    )


def test_a_match_names_its_sheet_and_address(session: Session) -> None:
    assert session.read("sales", grep="Gödel").text == "12:Staff!A3: Kurt G.,False,Gödel,2.5"


def test_the_first_sheet_is_the_table_below_its_title(session: Session) -> None:
    page = session.read("sales", query="SELECT * FROM artifact WHERE Region = 'South'")
    assert page.text == (
        "Region,City,Units,Price,Sold on,Order no\n"
        "South,Rome,30,8.0,2025-08-02,00043\n"
        'South,"Naples, old town",4,11.0,2025-09-30,00044'
    )
    assert '1 row above the header of "Q3 figures" left out' in page.shown


def test_a_date_is_a_date_and_a_number_stored_as_text_stays_text(session: Session) -> None:
    types = session.read("sales", query="DESCRIBE artifact").text
    assert "Sold on,DATE" in types
    assert "Order no,VARCHAR" in types


def test_every_sheet_is_a_table_under_its_name(session: Session) -> None:
    both = 'SELECT (SELECT sum("Units") FROM "Q3 figures" WHERE City IS NOT NULL) AS units, name_1 FROM staff'
    assert session.read("sales", query=both).text == "units,name_1\n53,Lovelace\n53,Gödel"


def test_a_sheet_without_names_has_letters_for_columns(session: Session) -> None:
    assert session.read("sales", query="SELECT C FROM numbers").text == "C\n3\n6"


def test_a_missing_sheet_is_reported_with_the_existing_ones(session: Session) -> None:
    with pytest.raises(InvalidArgument, match=r'no table .Nope. .*"Q3 figures", Staff'):
        session.read("sales", query="SELECT * FROM Nope")


def test_the_preview_names_the_sheets_and_their_ranges_and_asks_for_rows() -> None:
    shown = preview(Sample.of(SALES), media_type="application/zip", limit=200)
    assert shown.ask == 'query="SELECT * FROM artifact LIMIT 20"'
    assert shown.text == (
        'Excel workbook, 4 sheets, 7206 bytes: "Q3 figures" B2:G10, "Staff" A1:D3, "Empty", "numbers" A1:C2'
    )


def test_a_preview_of_a_damaged_workbook_counts_its_sheets() -> None:
    shown = preview(
        Sample.of(rezipped(workbook=b"\xff<sheet name=")), media_type="application/zip", limit=200
    ).text
    assert shown.startswith("Excel workbook, 4 sheets")


def test_a_header_may_have_years_empty_and_repeated_names() -> None:
    assert table(["Report", "", "", ""], ["", 2023, 2024, "2024"], ["a", 1, 2, 3]) == (
        1,
        ["A", "2023", "2024", "2024_1"],
        [["a", 1, 2, 3]],
    )


def test_empty_rows_and_columns_are_left_out() -> None:
    assert table(["k", "", "v"], ["", "", ""], ["a", "", 1]) == (0, ["k", "v"], [["a", 1]])


def test_a_single_row_is_data_and_an_empty_sheet_has_no_columns() -> None:
    assert table(["a", "b"]) == (0, ["A", "B"], [["a", "b"]])
    assert table() == (0, [], [])


@pytest.mark.parametrize(
    "broken",
    [SALES[:3_000], rezipped(sheet1=b"<worksheet><sheetData><row"), rezipped(workbook=b"")],
)
def test_a_damaged_workbook_is_an_error(session: Session, broken: bytes) -> None:
    ref = session.put(
        broken, media_type="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
    )
    with pytest.raises(CoatcheckError):
        session.read(ref, query="SELECT * FROM artifact")


def test_a_cell_far_away_does_not_exhaust_memory(session: Session) -> None:
    far = b'<worksheet><sheetData><row r="1"><c r="A1"><v>1</v></c></row><row r="1048576"><c r="XFD1048576"><v>2</v></c>'
    ref = session.put(rezipped(sheet1=far + b"</row></sheetData></worksheet>"))
    with pytest.raises(CoatcheckError, match=r"memory|limit|read"):
        session.read(ref, query="text")
    assert session.read("sales", query="text").text


def test_column_letters_match_those_of_a_spreadsheet() -> None:
    assert [sheets._letters(column) for column in (0, 25, 26, 701, 702, 16_383)] == [
        "A",
        "Z",
        "AA",
        "ZZ",
        "AAA",
        "XFD",
    ]


# Merged ranges


def filled(
    rows: list[list[sheets.Cell]], *ranges: tuple[int, int, int, int]
) -> list[list[sheets.Cell]]:
    copied = [list(row) for row in rows]
    sheets._fill_merged(copied, [sheets._Range(*one) for one in ranges])
    return copied


def test_each_cell_of_a_range_over_several_rows_has_its_value() -> None:
    rows: list[list[sheets.Cell]] = [["a", "", "x"], ["", "", "y"], ["", "", "z"]]
    assert filled(rows, (0, 0, 1, 1)) == [["a", "a", "x"], ["a", "a", "y"], ["", "", "z"]]
    assert filled(rows, (0, 0, 9, 1)) == [["a", "a", "x"], ["a", "a", "y"], ["a", "a", "z"]]


@pytest.mark.parametrize(
    "one", [(0, 0, 0, 2), (-1, 0, 1, 0), (0, -2, 1, 0), (5, 0, 9, 0), (0, 7, 2, 9)],
    ids=["one row", "begins above", "begins on the left", "below", "on the right"],
)  # fmt: skip
def test_other_ranges_change_nothing(one: tuple[int, int, int, int]) -> None:
    rows: list[list[sheets.Cell]] = [["a", "", "x"], ["", "", "y"], ["", "", "z"]]
    assert filled(rows, one) == rows


def test_ranges_that_overlap_are_filled_only_up_to_the_size_of_the_sheet() -> None:
    class CountedRow(list[sheets.Cell]):
        writes = 0

        def __setitem__(self, *given: object) -> None:
            CountedRow.writes += 1
            super().__setitem__(*given)  # type: ignore[call-overload]

    rows: list[list[sheets.Cell]] = [CountedRow("ab") for _ in range(100)]
    sheets._fill_merged(rows, [sheets._Range(0, 0, 99, 1)] * 5_000)
    assert CountedRow.writes == 100
