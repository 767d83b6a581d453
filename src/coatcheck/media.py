"""The media type and the kind of content, from its first and last bytes, its name, and whether it
parses.

Pure and quick: it looks at the head and the tail, so a gigabyte costs as much as a kilobyte. Only
content that looks like JSON is parsed, up to `CHECKED` characters, since `application/json` means
that it can be read as JSON. Callers may override the result, and nothing relies on it for safety.
"""

from __future__ import annotations

import codecs
import re
from typing import Final, Literal, NamedTuple, get_args

from coatcheck.deferred import lazy_pattern

ArtifactKind = Literal["repo", "doc", "code", "log", "data", "plan", "result"]
KINDS: Final[tuple[str, ...]] = get_args(ArtifactKind)
HEAD: Final = 512

TEXT: Final = "text/plain"
JSON: Final = "application/json"
JSONL: Final = "application/x-ndjson"
BINARY: Final = "application/octet-stream"
REPR: Final = "text/x-python-repr"
"""Python's `repr` of rows, dicts or lists, as tools print them."""
CHECKED: Final = 8 << 20
"""Maximum length of content that is parsed before it is called JSON. Longer content is judged by
its ends."""

LOOK: Final = 4_096
"""Maximum number of bytes that `look` needs."""
_CONTROL: Final = bytes([*range(7), *range(0x0E, 0x1B), *range(0x1C, 0x20)])
PLAIN: Final = bytes(set(range(0x80)) - set(_CONTROL))
"""ASCII without control characters. Content that begins with nothing else is `PLAIN_TEXT`."""

_MAGIC: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif",
    b"GIF89a": "image/gif", b"%PDF-": "application/pdf", b"PAR1": "application/vnd.apache.parquet",
    b"PK\x03\x04": "application/zip", b"\x1f\x8b": "application/gzip",
    b"\x28\xb5\x2f\xfd": "application/zstd", b"SQLite format 3\x00": "application/vnd.sqlite3",
    b"\x7fELF": "application/x-elf", b"OggS": "audio/ogg", b"ID3": "audio/mpeg",
}  # fmt: skip
_MAGICS: Final = tuple(_MAGIC)
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BY_SUFFIX: Final = {
    "csv": "text/csv", "tsv": "text/tab-separated-values", "json": JSON, "jsonl": JSONL,
    "ndjson": JSONL, "md": "text/markdown", "rst": "text/x-rst", "html": "text/html",
    "htm": "text/html", "xml": "application/xml", "svg": "image/svg+xml",
    "yaml": "application/yaml", "yml": "application/yaml", "toml": "application/toml",
    "py": "text/x-python", "js": "text/javascript", "ts": "text/x-typescript",
    "tsx": "text/x-typescript", "c": "text/x-c", "h": "text/x-c", "cc": "text/x-c++",
    "cpp": "text/x-c++", "hpp": "text/x-c++", "go": "text/x-go", "rs": "text/x-rust",
    "java": "text/x-java", "kt": "text/x-kotlin", "rb": "text/x-ruby", "php": "text/x-php",
    "sh": "text/x-shellscript", "sql": "application/sql", "css": "text/css", "diff": "text/x-diff",
    "patch": "text/x-diff", "log": TEXT, "txt": TEXT,
}  # fmt: skip
_ENDINGS: Final = {
    **{media: ending for ending, media in reversed(_BY_SUFFIX.items())},
    "image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp",
    "application/pdf": "pdf", "application/zip": "zip", "application/gzip": "gz",
    "application/zstd": "zst", "application/vnd.apache.parquet": "parquet",
    "application/vnd.sqlite3": "sqlite", TEXT: "txt",
}  # fmt: skip
_CODE: Final = frozenset(
    {"text/javascript", "application/sql", "text/css", "text/x-diff"}
    | {
        media
        for media in _BY_SUFFIX.values()
        if media.startswith("text/x-") and media != "text/x-rst"
    }
)
_DOCS: Final = frozenset({"text/markdown", "text/x-rst", "text/html", "application/pdf"})

_STAMP: Final = lazy_pattern(
    r"\S{0,3}\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\[?\d\d:\d\d:\d\d"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
)
_LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL", "CRITICAL")
_LEVEL: Final = lazy_pattern(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|FATAL|CRITICAL)\b[\]:\s]")
_JSON_START: Final = lazy_pattern(
    r'[\s\ufeff]*+(?:\{\s*+(?:"|\}|$)|(?:\[\s*+)++(?:\{\s*+(?:"|\}|$)|["\]\d-]|true|false|null|$))'
)
_OBJECT_START: Final = lazy_pattern(r'[\s\ufeff]*+\[?\s*+\{\s*+"')
_LINES: Final = 32 << 10  # characters at each end of JSONL in which every line must parse
_PIECE: Final = 32 << 10  # characters of JSON that are parsed at once
_BETWEEN_ROWS: Final = lazy_pattern(r"\}(\s*+,\s*+)\{")
_REPR_HEAD: Final = 64 << 10  # characters that must be Python; of shorter content, all
# What `repr` and `pprint` write. Possessive, so that the time is proportional to the length.
_NAME: Final = r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)"
_STRING: Final = r"""b?(?:'(?:[^'\\\n]|\\[^\n])*+'|"(?:[^"\\\n]|\\[^\n])*+")"""
_ATOM: Final = (
    rf"(?:{_STRING}(?:\s++{_STRING})*+|[-+]?\d[\d_]*+(?:\.\d*+)?+(?:[eE][-+]?\d++)?+j?"
    r"|[-+]?(?:nan|inf)\b"
    rf"|(?:None|True|False)\b|\.\.\.|{_NAME}++|<[^<>\n]{{1,200}}>)"
)
_OPENING: Final = rf"(?:[\[({{]\s*+|{_NAME}*+\(\s*+|[^\W\d]\w*+=)*+"
_UNIT: Final = rf"{_OPENING}(?:{_ATOM}|(?<=[\[({{])(?=[\])}}]))(?:\s*+,?\)|\s*+[\]}}])*+\s*+"
_REPR: Final = lazy_pattern(rf"\s*+(?:{_UNIT}[,:]\s*+)*+(?:{_UNIT})?+")
_CUT_UNIT: Final = lazy_pattern(
    rf"{_OPENING}(?:b?'[^'\n]*+|b?\"[^\"\n]*+|[\w.+-]*+|<[^<>\n]{{0,200}}+)[\s\])}}]*+"
)
_IS_PYTHON: Final = lazy_pattern(rf"(?:^|[\s\[({{,:=])(?:b?'|None\b|True\b|False\b|\(|{_NAME}*+\()")
_HTML_START: Final = lazy_pattern(
    r"\s*(?:<!doctype html|<html|<!--[^>]*-->\s*<(?:!doctype|html))", re.IGNORECASE
)
_DIFF_START: Final = lazy_pattern(r"(?:diff --git |--- \S.*\n\+\+\+ )")
_SEPARATORS: Final = ((",", "text/csv"), ("\t", "text/tab-separated-values"), (";", "text/csv"))
_COLUMN: Final = lazy_pattern(r'"?[^\W\d][\w .%#/-]{0,39}"?')
_QUOTED: Final = lazy_pattern(r'"[^"]*"')


def essence(media_type: str) -> str:
    """Return a media type without its parameters, e.g. `text/csv` for `Text/CSV; charset=utf-8`."""
    return media_type.partition(";")[0].strip().lower()


def ending(media_type: str) -> str:
    """Return the ending of a file of this type, without the dot; "txt" for any other text, "bin"
    for anything else."""
    bare = essence(media_type)
    if bare in _ENDINGS:
        return _ENDINGS[bare]
    if is_json(bare):
        return "json"
    return "txt" if is_text(bare) else "bin"


def is_text(media_type: str) -> bool:
    """Whether content of this type is text."""
    bare = essence(media_type)
    return (
        bare.startswith("text/")
        or bare.endswith(("+json", "+xml"))
        or bare
        in (
            JSON,
            JSONL,
            "application/xml",
            "application/yaml",
            "application/toml",
            "application/sql",
        )
    )


def is_json(media_type: str) -> bool:
    bare = essence(media_type)
    return bare == JSON or bare.endswith("+json")


def is_jsonl(media_type: str) -> bool:
    return essence(media_type) in (
        JSONL,
        "application/jsonl",
        "application/x-jsonlines",
        "application/ndjson",
    )


def sniff_text(
    head: str, tail: str, name: str | None = None, whole: str | bytes | None = None
) -> str:
    """The media type of text, from its first and last characters, its name, and all of it if that
    is given: then only text that parses is called JSON."""
    named = _named(name)
    if named not in (None, JSON, JSONL):
        return named or TEXT
    guess = named or _json_by_ends(head, tail)
    if guess is not None:
        if whole is None or len(whole) > CHECKED:
            return guess
        if (found := _json_by_parsing(guess, whole, is_named=named is not None)) is not None:
            return found
    if head.lstrip()[:1] in ("[", "(", "{") and _is_repr(head, tail, whole):
        return REPR
    if head[:1] in "<\n\r\t " and _HTML_START.match(head):
        return "text/html"
    if head[:1] in "d-" and _DIFF_START.match(head):
        return "text/x-diff"
    return _table(head) or TEXT


def sniff_bytes(
    head: bytes, tail: bytes, name: str | None = None, whole: bytes | None = None
) -> str:
    """The media type of bytes, from all of them if they are given. Magic numbers take precedence
    over the name, and the name over the look of the text."""
    if head.startswith(_MAGICS):
        return next(media for magic, media in _MAGIC.items() if head.startswith(magic))
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        return "video/mp4"
    if encoding_of(head).is_wide:
        named = _named(name) or TEXT
        return (
            named
            if whole is None or named not in (JSON, JSONL)
            else sniff_text("", "", name, decoded(whole))
        )
    if b"\x00" in head:
        return BINARY
    try:
        text = (
            head.decode("ascii")
            if head.isascii()
            else codecs.getincrementaldecoder("utf-8")().decode(head)
        )
    except UnicodeDecodeError:
        return BINARY
    return sniff_text(text, tail.decode("utf-8", "ignore"), name, whole)


def may_be_json(head: bytes, name: str | None = None) -> bool:
    """Whether content that begins like this may be JSON, so that all of it is worth parsing."""
    return _named(name) in (JSON, JSONL) or _JSON_START.match(decode_head(head[:HEAD])) is not None


def parses(text: str | bytes) -> bool:
    """Whether a text is one JSON document as RFC 8259 defines it: no NaN, no trailing comma. A
    byte-order mark may precede it."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    if "\0" in text:  # SQLite would end the text here
        return False
    text = text.removeprefix("\ufeff")
    short = _without_rows(text)
    return _sqlite("json_valid", short) == 1 or (
        short is not text and _sqlite("json_valid", text) == 1
    )


class Encoding(NamedTuple):
    """A text encoding: its name, the bytes of a code unit, and the bytes of its byte-order mark (0
    if there is none)."""

    name: str
    unit: int
    mark: int

    @property
    def is_wide(self) -> bool:
        """Whether every character takes more than one byte."""
        return self.unit > 1


class Look(NamedTuple):
    """How content begins: its encoding, whether it is not text (one in ten of its first characters
    is a control character, or one in three invalid), and whether it has any such character."""

    encoding: Encoding
    is_binary: bool
    has_odd: bool


def look(head: bytes) -> Look:
    """Look at the first bytes of content as text."""
    encoding, start = encoding_of(head), head[:LOOK]
    text = codecs.getincrementaldecoder(encoding.name)("replace").decode(start[encoding.mark :])
    data = text.encode("utf-8", "surrogatepass")
    controls, invalid = len(data) - len(data.translate(None, _CONTROL)), text.count("\ufffd")
    if not controls and not invalid:
        return Look(encoding, False, False)
    looked = max(1, len(decode_head(start)))
    return Look(encoding, controls * 10 > looked or invalid * 3 > looked, True)


def encoding_of(head: bytes) -> Encoding:
    """The encoding that a byte-order mark names, else UTF-8. All code that reads text uses this."""
    if not head.startswith(_ANY_MARK):
        return _UTF8
    return next(encoding for mark, encoding in _MARKS.items() if head.startswith(mark))


def decoded(data: bytes, errors: Literal["replace", "ignore"] = "replace") -> str:
    """Decode text by its byte-order mark, and drop the mark. Invalid bytes become U+FFFD, or are
    left out."""
    encoding = encoding_of(data)
    return data[encoding.mark :].decode(encoding.name, errors)


def decode_head(head: bytes) -> str:
    """Decode the head of a text, without characters that are cut."""
    return decoded(head, "ignore")


def sniff_kind(media_type: str, head: str, *, name: str | None = None) -> str:
    """The kind of content: `code`, `doc`, `log`, `data` or `result`."""
    if media_type in _CODE:
        return "code"
    if media_type in _DOCS:
        return "doc"
    if media_type == TEXT:
        if (
            (name is not None and name.lower().endswith(".log"))
            or starts_with_time(head)
            or _has_time_below(head)
        ):
            return "log"
        if _OBJECT_START.match(head):
            return "data"  # JSON that is cut or broken
        has_level = any(level in head for level in _LEVELS) and _LEVEL.search(head) is not None
        return "log" if has_level else "result"
    return "data"


def starts_with_time(head: str) -> bool:
    """Whether a text begins with a date and time, or a time, as a log does."""
    return _STAMP.match(head) is not None


def _has_time_below(head: str) -> bool:
    """Whether the second line of a text begins with a time."""
    end = head.find("\n")
    return end >= 0 and _STAMP.match(head, end + 1) is not None


def _json_by_ends(head: str, tail: str) -> str | None:
    """JSON or JSONL, if a text begins and ends like that."""
    if not _JSON_START.match(head):
        return None
    closing = "}" if head.lstrip("\ufeff \t\r\n")[:1] == "{" else "]"
    first_line, _, rest = head.partition("\n")
    if closing == "}" and rest.startswith("{") and first_line.rstrip().endswith("}"):
        return JSONL
    return JSON if tail.rstrip().endswith(closing) else None


def _json_by_parsing(guess: str, whole: str | bytes, *, is_named: bool) -> str | None:
    """The type of JSON that a content parses as, the guessed one first. None if it is neither."""
    for media_type in (guess, JSONL if guess == JSON else JSON):
        if parses(whole) if media_type == JSON else _has_json_lines(whole, is_named=is_named):
            return media_type
    return None


def _has_json_lines(whole: str | bytes, *, is_named: bool) -> bool:
    """Whether every line at both ends is JSON. A last line without an end may be cut. Without a
    name that says JSONL, there must be two lines, each an object or an array."""
    text = whole if isinstance(whole, str) else whole.decode("utf-8", "replace")
    if len(text) > 2 * _LINES and (first := text.find("\n", _LINES)) >= 0:
        last = text.find("\n", max(first, len(text) - _LINES))
        text = text[:first] + text[last:]
    lines = text.removeprefix("\ufeff").split("\n")
    cut = lines.pop()  # empty, if the last line has its end
    lines = [line for line in lines if line and not line.isspace()]
    if cut and (not lines or parses(cut)):
        lines.append(cut)
    if not lines or not (
        is_named or (len(lines) > 1 and all(line.lstrip()[:1] in ("{", "[") for line in lines))
    ):
        return False
    # One call for all lines: as an array, they must parse, and give as many items as there are
    # lines.
    together = f"[{','.join(lines)}]"
    return parses(together) and _sqlite("json_array_length", together) == len(lines)


def _sqlite(function: Literal["json_valid", "json_array_length"], text: str) -> int:
    """Apply an SQLite function to a JSON text. It builds no objects, so it takes a tenth of the
    time of `json`."""
    import sqlite3  # here, so that importing coatcheck stays quick

    database = sqlite3.connect(":memory:")
    try:
        (found,) = database.execute(f"SELECT {function}(?)", (text,)).fetchone()
    except UnicodeEncodeError:  # lone surrogates
        data = text.encode("utf-8", "surrogatepass")
        (found,) = database.execute(f"SELECT {function}(CAST(? AS TEXT))", (data,)).fetchone()
    finally:
        database.close()
    return int(found)


def _without_rows(text: str) -> str:
    """Replace rows in the middle of a long JSON text by two values, if they parse: in pieces, which
    need little memory.

    A piece is a sequence of whole rows if it parses between brackets. If it is inside a string or
    an object instead, the replacement makes the text invalid. A text without such rows is returned
    as it is."""
    first = _BETWEEN_ROWS.search(text, 0, _PIECE)
    if first is None or len(text) < 4 * _PIECE:
        return text
    at = first.end(1)
    while last := _BETWEEN_ROWS.search(text, at + _PIECE, at + 3 * _PIECE):
        if _sqlite("json_valid", f"[{text[at : last.start(1)]}]") != 1:
            return text
        at = last.end(1)
    return f'{text[: first.start(1)]},"a",0,{text[at:]}'


def _is_repr(head: str, tail: str, whole: str | bytes | None) -> bool:
    """Whether a text is what Python's `repr` writes of a list, a tuple, a set or a dict, and not
    JSON too."""
    if tail.rstrip()[-1:] not in ("]", ")", "}") or not _IS_PYTHON.search(head):
        return False
    if whole is not None:
        text = (
            whole if isinstance(whole, str) else whole[: 4 * _REPR_HEAD].decode("utf-8", "ignore")
        )
        head, is_cut = text[:_REPR_HEAD], len(text) > _REPR_HEAD
    else:
        is_cut = True
    end = _REPR.match(head)
    rest = head[end.end() :] if end else head
    return not rest or (is_cut and _CUT_UNIT.fullmatch(rest) is not None)


def _table(head: str) -> str | None:
    """The media type of a table: a first line of column names, then lines with the same number of
    separators. Commas in prose are followed by a space."""
    end = head.find("\n")
    first = head[: max(0, end)]
    for separator, media_type in _SEPARATORS:
        many = first.count(separator)
        if not many or f"{separator} " in first:
            continue
        columns = first.lstrip("\ufeff").rstrip("\r").split(separator)
        if len(set(columns)) <= many or not all(map(_COLUMN.fullmatch, columns)):
            continue
        rows = head[end + 1 :].split("\n")[:-1]
        fit = sum(_QUOTED.sub("", row).count(separator) == many for row in rows)
        if fit == len(rows) >= (3 if many == 1 else 2 if many < 6 else 1):
            return media_type
    return None


def media_type_of(claimed: object) -> str | None:
    """Return a declared media type in lower case and without parameters, or None if it is not
    one."""
    essence = claimed.partition(";")[0].strip().lower() if isinstance(claimed, str) else ""
    return essence if _MEDIA_TYPE.fullmatch(essence) else None


def _named(name: str | None) -> str | None:
    if not name or "." not in name:
        return None
    return _BY_SUFFIX.get(name.rpartition(".")[2].lower())


_MEDIA_TYPE: Final = lazy_pattern(r"[a-z]{1,20}/[a-z0-9][a-z0-9.+-]{0,49}")
_UTF8: Final = Encoding("UTF-8", 1, 0)
PLAIN_TEXT: Final = Look(_UTF8, False, False)
_MARKS: Final = {
    codecs.BOM_UTF32_LE: Encoding("UTF-32LE", 4, 4),  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: Encoding("UTF-32BE", 4, 4),
    codecs.BOM_UTF8: Encoding("UTF-8", 1, 3),
    codecs.BOM_UTF16_LE: Encoding("UTF-16LE", 2, 2),
    codecs.BOM_UTF16_BE: Encoding("UTF-16BE", 2, 2),
}
_ANY_MARK: Final = tuple(_MARKS)
