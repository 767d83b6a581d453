"""Printing: plain text for pipes, something readable for a person, and nothing that steers a terminal.

Names, summaries, tools and content are untrusted. Characters that a terminal would obey or hide (controls,
escapes, bidirectional marks, invisible formats) are printed as a programmer would write them: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, Final

import click

from coatcheck.cli.files import STDIO, writing

_PIECE: Final = 64 * 1024
_MOST_STYLED: Final = 200_000
_LAST: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 1
_OBEYED_OR_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class _Visible(dict[int, str]):
    """A table for `str.translate` that fills itself: what is harmless stands for itself."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        hostile = unicodedata.category(char) in _OBEYED_OR_HIDDEN
        self[code] = char.encode("unicode_escape").decode("ascii") if hostile else char
        return self[code]


_LINE: Final = _Visible()
_TEXT: Final = _Visible({ord("\n"): "\n", ord("\t"): "\t"})


def visible(text: str) -> str:
    """Text that is safe on a terminal, over as many lines as it had."""
    return text.translate(_TEXT)


def one_line(text: str) -> str:
    """Text that is safe on a terminal and in a column: line ends and tabs are made visible too."""
    return text.translate(_LINE)


def is_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty()


def complain(message: str) -> None:
    click.echo(f"coatcheck: {one_line(message)}", err=True)


def print_json(record: Any) -> None:
    """One line of JSON in ASCII, so that nothing in it reaches a terminal as it is."""
    click.echo(json.dumps(record))


def print_details(record: Mapping[str, object]) -> None:
    """What is known of one thing: names and values, aligned for a person, else with a tab between."""
    width = max(map(len, record)) + 2
    for key, value in record.items():
        click.echo((key.ljust(width) if is_terminal() else f"{key}\t") + cell(key, value))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, yielding: Collection[str]) -> None:
    """Rows of cells: lines with tabs in a pipe; a table on a terminal, where the `yielding` columns are cut to fit."""
    if not is_terminal():
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="none")
    for column in columns:
        table.add_column(column, no_wrap=column not in yielding, min_width=8 if column in yielding else None)
    for row in rows:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in row))
    if table.row_count:
        Console(highlight=False, markup=False, emoji=False).print(table)


def print_content(source: IO[bytes]) -> None:
    """Bytes for a person: as text, with what is invisible made visible, and a line end after the last line."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    last = "\n"
    while True:
        piece = source.read(_PIECE)
        text = visible(decoder.decode(piece, final=not piece))
        last = text[-1:] or last
        click.echo(text, nl=False)
        if not piece:
            break
    if last != "\n":
        click.echo()


def print_text(text: str, pieces: Iterable[tuple[str, str]] | None = None, *, raw: bool = False) -> None:
    """Text as it is for a pipe, or where somebody wants it `raw`. A terminal gets it made visible, with a line end
    after the last line, and with the styles of its pieces where they are given and colours are wanted."""
    if raw or not is_terminal():
        with writing(STDIO) as out:
            out.write(text.encode("utf-8", "backslashreplace"))
        return
    if pieces is None or len(text) > _MOST_STYLED:
        click.echo(visible(text), nl=False)
    else:
        print_pieces(pieces)
    if text and not text.endswith("\n"):
        click.echo()


def print_pieces(pieces: Iterable[tuple[str, str]]) -> None:
    """Untrusted text in pieces with a style each, for a terminal: made visible first, then styled."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console()
    plain = console.no_color
    segments = (Segment(visible(text), None if plain else console.get_style(style)) for text, style in pieces)
    console.print(Segments(segments), crop=False, end="")


def note(message: str) -> None:
    """One line for a person beside the result: faint, where stderr is a terminal that has colours."""
    text = one_line(message)
    click.echo(click.style(text, dim=True) if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text, err=True)


def cell(key: str, value: object) -> str:
    """One value of a record as text: sizes and times in full for a pipe, in short for a person."""
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(one_line(str(item)) for item in value)
    if is_terminal():
        if key.endswith("bytes") and isinstance(value, int):
            from rich.filesize import decimal

            return decimal(value)
        if key.endswith("_at"):
            return re.sub(r":\d\d(\.\d+)?Z$", "Z", str(value))
    return one_line(str(value))


def iso_time(seconds: float | None) -> str | None:
    """A time as ISO 8601 writes it. One that lies beyond every calendar is the last that there is."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(min(seconds, _LAST), UTC).isoformat().replace("+00:00", "Z")


@contextmanager
def progress(doing: str, *, quiet: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on stderr, where that is a terminal and nobody wants it quiet; else None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
