"""Input and output: files, pipes and terminals.

A pipe gets plain text, a person a readable form. Names, summaries, tools and content are untrusted:
characters that a terminal would obey or hide are printed as escapes (see `display`).

The highlighting functions split a text into pieces with a style each; joined, the pieces are the
text. They never backtrack, and pieces are escaped after the split. Code is not highlighted: lexers
can be made to run for minutes.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final

import click

from coatcheck.deferred import lazy_pattern
from coatcheck.display import age as age
from coatcheck.display import one_line as one_line
from coatcheck.display import visible as visible

if TYPE_CHECKING:
    from coatcheck.reading.patterns import Pattern

Piece = tuple[str, str]
"""Text and its style."""
Progress = Callable[[int, int | None], None]

STDIO: Final = "-"
PLAIN: Final = ""
FAINT: Final = "dim"
FOUND: Final = "bold red"
BOLD: Final = "bold"
ADDED: Final = "green"
REMOVED: Final = "red"
_BUFFER: Final = 64 * 1024
_MAX_STYLED: Final = 200_000
_STEM: Final = 6
_GAP: Final = 2  # spaces between columns
_LEAST: Final = 8  # characters of a column that was cut
_IDENTIFYING: Final = 40  # characters of a name that other columns make room for
_DIFF: Final = (("+++", BOLD), ("---", BOLD), ("@@", "cyan"), ("+", ADDED), ("-", REMOVED))
_LINE_NUMBER: Final = lazy_pattern(r"\d++([:-])")
_STRING: Final = r'"(?:[^"\\\n]|\\.)*+"?+'
_TOKEN: Final = lazy_pattern(
    rf"(?P<key>{_STRING}(?=[ \t]{{0,7}}:))|(?P<string>{_STRING})|(?P<number>-?+\b\d[\d.eE+-]*+)"
    r"|\b(?P<word>true|false|null)\b"
)
_TOKEN_STYLES: Final = {"key": "blue", "string": "green", "number": "cyan", "word": "magenta"}


def is_terminal() -> bool:
    return sys.stdout.isatty()


@contextmanager
def writing(file: str, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file, or stdout for `-`, for writing. With `private`, only the owner can read a new
    file."""
    if file == STDIO:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with open(file, "wb", opener=partial(os.open, mode=0o600) if private else None) as target:
        yield target


def print_error(message: str) -> None:
    click.echo(f"coatcheck: {one_line(message)}", err=True)


def print_note(message: str) -> None:
    """Print a line on stderr that accompanies the result; faint if stderr is a terminal with
    colours."""
    text = one_line(message)
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        text = click.style(text, dim=True)
    click.echo(text, err=True)


def print_json(record: Any) -> None:
    """Print one line of JSON, in ASCII so that it is safe on a terminal."""
    click.echo(json.dumps(record))


def print_details(record: Mapping[str, object]) -> None:
    """Print names and values, one per line: aligned on a terminal, tab-separated in a pipe."""
    width = max(map(len, record)) + 2
    for key, value in record.items():
        click.echo((key.ljust(width) if is_terminal() else f"{key}\t") + cell(key, value))


def print_records(
    records: Iterable[Mapping[str, Any]],
    columns: Collection[str],
    *,
    as_json: bool,
    shrink: Collection[str] = (),
) -> None:
    """Print one line of JSON per record, or a table. `columns` are the keys of its cells; a mapping
    has their headings."""
    if as_json:
        for record in records:
            print_json(record)
        return
    rows = ([_table_cell(key, record.get(key)) for key in columns] for record in records)
    headings: Iterable[str]
    if isinstance(columns, Mapping):
        headings = columns.values()
    else:
        headings = [key.replace("_", " ") for key in columns]
    print_table(headings, rows, shrink=shrink)


def print_table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], *, shrink: Collection[str] = ()
) -> None:
    """Print tab-separated lines in a pipe, a table on a terminal.

    If the table is too wide, the `shrink` columns are cut in their order: the one that identifies a
    row comes last. A column that would keep fewer than eight characters is left out."""
    if not is_terminal():
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings, lines = list(columns), list(rows)
    if not lines:
        return
    console = Console(highlight=False, markup=False, emoji=False)
    widths = [max(map(cell_len, column)) for column in zip(headings, *lines, strict=True)]
    widths = _fitting(
        widths, [headings.index(name) for name in shrink if name in headings], console.width
    )
    table = Table(box=None, pad_edge=False, header_style="none")
    shown = [at for at, width in enumerate(widths) if width]
    for at in shown:
        table.add_column(headings[at], no_wrap=True, width=widths[at])
    for line in lines:
        table.add_row(*(Text(line[at], no_wrap=True, overflow="ellipsis") for at in shown))
    console.print(table)


def _fitting(widths: list[int], order: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns that fit into a line, 0 for one that is left out: the columns of
    `order` are cut or left out one after the other, but the last is only cut."""

    def over() -> int:
        return sum(width + _GAP for width in widths if width) - _GAP - room

    wanted, widths = widths, [*widths]
    if not order or over() <= 0:
        return widths
    last = order[-1]
    # a very long name must not push everything else out
    widths[last] = min(widths[last], _IDENTIFYING)
    for at in order:
        if over() <= 0:
            break
        widths[at] -= over()
        if at == last:
            widths[at] = max(widths[at], 1)
        elif widths[at] < _LEAST:
            widths[at] = 0
    widths[last] = min(wanted[last], widths[last] - over())
    return widths


def print_content(source: IO[bytes]) -> None:
    """Print bytes on a terminal as escaped text, with a final line end."""
    last = "\n"
    for text in codecs.iterdecode(
        iter(partial(source.read, _BUFFER), b""), "utf-8", "backslashreplace"
    ):
        last = text[-1:]
        click.echo(visible(text), nl=False)
    if last != "\n":
        click.echo()


def print_text(text: str, pieces: Iterable[Piece] | None = None, *, raw: bool = False) -> None:
    """Print exact text in a pipe or if `raw`. On a terminal, escape it, style its pieces and end
    the last line."""
    if raw or not is_terminal():
        with writing(STDIO) as out:
            out.write(text.encode("utf-8", "backslashreplace"))
        return
    if pieces is None or len(text) > _MAX_STYLED:
        click.echo(visible(text), nl=False)
    else:
        print_pieces(pieces)
    if text and not text.endswith("\n"):
        click.echo()


def print_pieces(pieces: Iterable[Piece]) -> None:
    """Print untrusted text on a terminal: escape each piece, then style it."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console()
    plain = console.no_color
    segments = (
        Segment(visible(text), None if plain else console.get_style(style))
        for text, style in pieces
    )
    console.print(Segments(segments), crop=False, end="")


def cell(key: str, value: object) -> str:
    """One value of a record as text: sizes and times exact in a pipe, rounded on a terminal."""
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(one_line(str(item)) for item in value)
    if is_terminal():
        if key.endswith("bytes") and isinstance(value, int):
            from rich.filesize import decimal

            return decimal(value)
        if type(value) is int:
            return f"{value:,}"
        if key.endswith("_at"):
            return re.sub(r":\d\d(\.\d+)?Z$", "Z", str(value))
    return one_line(str(value))


def _table_cell(key: str, value: object) -> str:
    """One value of a table: on a terminal, times are ages."""
    if key.endswith("_at") and value is not None and is_terminal():
        return age(str(value))
    return cell(key, value)


@contextmanager
def progress(doing: str, *, quiet: bool) -> Iterator[Progress | None]:
    """Draw a progress bar if stderr is a terminal, unless `quiet`; otherwise yield None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def grep_lines(text: str, pattern: Pattern | None) -> Iterator[Piece]:
    """Highlight a grep page, with `12:` before a matching line and `11-` before its context."""
    for line in _lines(text):
        number = _LINE_NUMBER.match(line)
        if number is None:
            yield line, FAINT
            continue
        yield number[0], FAINT
        if pattern is not None and number[1] == ":":
            yield from _matches(line[number.end() :], pattern)
        else:
            yield line[number.end() :], PLAIN


def words_in(text: str, words: str) -> Iterator[Piece]:
    """Highlight the words of a search in a passage, whatever their endings."""
    wanted = {word[:_STEM] for word in re.findall(r"\w++", words.lower()) if len(word) > 1}
    found = (word for word in re.finditer(r"\w++", text) if word[0].lower()[:_STEM] in wanted)
    return _styled(text, ((word, FOUND) for word in found))


def json_tokens(text: str) -> Iterator[Piece]:
    """Highlight JSON or JSONL, or a part of it that may begin or end inside a token."""
    return _styled(
        text, ((token, _TOKEN_STYLES[token.lastgroup or ""]) for token in _TOKEN.finditer(text))
    )


def _styled(text: str, matches: Iterable[tuple[re.Match[str], str]]) -> Iterator[Piece]:
    """Split a text into matches with their styles, and what is between them."""
    at = 0
    for match, style in matches:
        yield text[at : match.start()], PLAIN
        yield match[0], style
        at = match.end()
    yield text[at:], PLAIN


def diff_lines(text: str) -> Iterator[Piece]:
    """Highlight a unified diff."""
    for line in _lines(text):
        yield line, next((style for mark, style in _DIFF if line.startswith(mark)), PLAIN)


def _matches(body: str, pattern: Pattern) -> Iterator[Piece]:
    data = body.encode("utf-8", "backslashreplace")
    at = done = 0
    while at <= len(data) and (found := pattern.search(data, at, len(data))) is not None:
        start, end = found
        if start == end:  # an empty match: continue after the next character
            at = end + 1
            while at < len(data) and data[at] & 0xC0 == 0x80:
                at += 1
            continue
        yield data[done:start].decode("utf-8", "backslashreplace"), PLAIN
        yield data[start:end].decode("utf-8", "backslashreplace"), FOUND
        at = done = end
    yield data[done:].decode("utf-8", "backslashreplace"), PLAIN


def _lines(text: str) -> list[str]:
    """Lines with their line feed. `str.splitlines` would also split at other characters."""
    return re.findall(r"[^\n]*\n|[^\n]+\Z", text)
