"""Guess the media type and the kind of content from its first and last bytes and its name.

Pure and quick: it looks only at the head and the tail, so a gigabyte costs as much as a kilobyte. Callers may override
the guess, and nothing relies on it for safety.
"""

from __future__ import annotations

import codecs
import re
from typing import Final, Literal, NamedTuple

KINDS: Final = ("repo", "doc", "code", "log", "data", "plan", "result")
HEAD: Final = 512

TEXT: Final = "text/plain"
JSON: Final = "application/json"
JSONL: Final = "application/x-ndjson"
BINARY: Final = "application/octet-stream"

_MAGIC: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF87a": "image/gif", b"GIF89a": "image/gif",
    b"%PDF-": "application/pdf", b"PAR1": "application/vnd.apache.parquet", b"PK\x03\x04": "application/zip",
    b"\x1f\x8b": "application/gzip", b"\x28\xb5\x2f\xfd": "application/zstd",
    b"SQLite format 3\x00": "application/vnd.sqlite3", b"\x7fELF": "application/x-elf", b"OggS": "audio/ogg",
    b"ID3": "audio/mpeg",
}  # fmt: skip
_MAGICS: Final = tuple(_MAGIC)
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BY_SUFFIX: Final = {
    "csv": "text/csv", "tsv": "text/tab-separated-values", "json": JSON, "jsonl": JSONL, "ndjson": JSONL,
    "md": "text/markdown", "rst": "text/x-rst", "html": "text/html", "htm": "text/html", "xml": "application/xml",
    "svg": "image/svg+xml", "yaml": "application/yaml", "yml": "application/yaml", "toml": "application/toml",
    "py": "text/x-python", "js": "text/javascript", "ts": "text/x-typescript", "tsx": "text/x-typescript",
    "c": "text/x-c", "h": "text/x-c", "cc": "text/x-c++", "cpp": "text/x-c++", "hpp": "text/x-c++", "go": "text/x-go",
    "rs": "text/x-rust", "java": "text/x-java", "kt": "text/x-kotlin", "rb": "text/x-ruby", "php": "text/x-php",
    "sh": "text/x-shellscript", "sql": "application/sql", "css": "text/css", "diff": "text/x-diff",
    "patch": "text/x-diff", "log": TEXT, "txt": TEXT,
}  # fmt: skip
_CODE: Final = frozenset(
    {"text/javascript", "application/sql", "text/css", "text/x-diff"}
    | {media for media in _BY_SUFFIX.values() if media.startswith("text/x-") and media != "text/x-rst"}
)
_DOCS: Final = frozenset({"text/markdown", "text/x-rst", "text/html", "application/pdf"})

_STAMP: Final = re.compile(
    r"\S{0,3}\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\[?\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
)
_LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL", "CRITICAL")
_LEVEL: Final = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|FATAL|CRITICAL)\b[\]:\s]")
_JSON_START: Final = re.compile(r'[\s\ufeff]*(?:\{\s*(?:"|\}|$)|\[\s*(?:["\[{\]\d-]|true|false|null|$))')
_HTML_START: Final = re.compile(r"\s*(?:<!doctype html|<html|<!--[^>]*-->\s*<(?:!doctype|html))", re.IGNORECASE)
_DIFF_START: Final = re.compile(r"(?:diff --git |--- \S.*\n\+\+\+ )")
_SEPARATORS: Final = ((",", "text/csv"), ("\t", "text/tab-separated-values"))
_COLUMN: Final = re.compile(r'"?[^\W\d][\w .%#/-]{0,39}"?')
_QUOTED: Final = re.compile(r'"[^"]*"')


def essence(media_type: str) -> str:
    """Return a media type without its parameters, e.g. `text/csv` for `Text/CSV; charset=utf-8`."""
    return media_type.partition(";")[0].strip().lower()


def is_text(media_type: str) -> bool:
    """Whether content of this type is text."""
    bare = essence(media_type)
    return (
        bare.startswith("text/")
        or bare.endswith(("+json", "+xml"))
        or bare in (JSON, JSONL, "application/xml", "application/yaml", "application/toml", "application/sql")
    )


def is_json(media_type: str) -> bool:
    bare = essence(media_type)
    return bare == JSON or bare.endswith("+json")


def is_jsonl(media_type: str) -> bool:
    return essence(media_type) in (JSONL, "application/jsonl", "application/x-jsonlines", "application/ndjson")


def sniff_text(head: str, tail: str, name: str | None = None) -> str:
    """The media type of text, from its first and last characters and its name."""
    named = _named(name)
    if named is not None:
        return named
    if _JSON_START.match(head):
        closing = "}" if head.lstrip("\ufeff \t\r\n")[:1] == "{" else "]"
        first_line, _, rest = head.partition("\n")
        if closing == "}" and rest.startswith("{") and first_line.rstrip().endswith("}"):
            return JSONL
        if tail.rstrip().endswith(closing):
            return JSON
    if head[:1] in "<\n\r\t " and _HTML_START.match(head):
        return "text/html"
    if head[:1] in "d-" and _DIFF_START.match(head):
        return "text/x-diff"
    return _table(head) or TEXT


def sniff_bytes(head: bytes, tail: bytes, name: str | None = None) -> str:
    """The media type of bytes. Magic numbers take precedence over the name, and the name over the look of the text."""
    if head.startswith(_MAGICS):
        return next(media for magic, media in _MAGIC.items() if head.startswith(magic))
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        return "video/mp4"
    if encoding_of(head).is_wide:
        return _named(name) or TEXT
    if b"\x00" in head:
        return BINARY
    try:
        text = head.decode("ascii") if head.isascii() else codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return BINARY
    return sniff_text(text, tail.decode("utf-8", "ignore"), name)


class Encoding(NamedTuple):
    """A text encoding: its name, the bytes of a code unit, and the bytes of its byte-order mark (0 if there is
    none)."""

    name: str
    unit: int
    mark: int

    @property
    def is_wide(self) -> bool:
        """Whether every character takes more than one byte."""
        return self.unit > 1


def encoding_of(head: bytes) -> Encoding:
    """The encoding that a byte-order mark names, else UTF-8. All code that reads text uses this."""
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), _UTF8)


def decoded(data: bytes, errors: Literal["replace", "ignore"] = "replace") -> str:
    """Decode text by its byte-order mark, and drop the mark. Invalid bytes become U+FFFD, or are left out."""
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
        named_log = name is not None and name.lower().endswith(".log")
        return "log" if named_log or _is_log(head) else "result"
    return "data"


def _is_log(head: str) -> bool:
    """Whether one of the first two lines begins with a time, or there is a log level. Plain searches come first."""
    if _STAMP.match(head) or ((end := head.find("\n")) >= 0 and _STAMP.match(head, end + 1)):
        return True
    return any(level in head for level in _LEVELS) and _LEVEL.search(head) is not None


def _table(head: str) -> str | None:
    """The media type of a table: a first line of column names, then lines with the same number of separators. Commas in
    prose are followed by a space."""
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


def _named(name: str | None) -> str | None:
    if not name or "." not in name:
        return None
    return _BY_SUFFIX.get(name.rpartition(".")[2].lower())


_UTF8: Final = Encoding("UTF-8", 1, 0)
_MARKS: Final = {
    codecs.BOM_UTF32_LE: Encoding("UTF-32LE", 4, 4),  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: Encoding("UTF-32BE", 4, 4),
    codecs.BOM_UTF8: Encoding("UTF-8", 1, 3),
    codecs.BOM_UTF16_LE: Encoding("UTF-16LE", 2, 2),
    codecs.BOM_UTF16_BE: Encoding("UTF-16BE", 2, 2),
}
