"""What content is, told from its first bytes and its name."""

import codecs
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coatcheck import Store
from coatcheck.media import HEAD, KINDS, decoded, encoding_of, is_text, sniff_bytes, sniff_kind, sniff_text


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0....", "image/jpeg"),
        (b"GIF89a....", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav"),
        (b"\x00\x00\x00\x20ftypisom", "video/mp4"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"PAR1\x15\x04", "application/vnd.apache.parquet"),
        (b"PK\x03\x04....", "application/zip"),
        (b"\x1f\x8b\x08....", "application/gzip"),
        (b"\x28\xb5\x2f\xfd....", "application/zstd"),
        (b"SQLite format 3\x00", "application/vnd.sqlite3"),
        (b"\x7fELF\x02", "application/x-elf"),
        (b"some\x00thing", "application/octet-stream"),
        (b"\xc3\x28 is no UTF-8", "application/octet-stream"),
        (b"plain words", "text/plain"),
        ("mots et smörgåsbord".encode(), "text/plain"),
        (codecs.BOM_UTF16_LE + "text".encode("utf-16-le"), "text/plain"),
        (codecs.BOM_UTF32_LE + "text".encode("utf-32-le"), "text/plain"),
        (codecs.BOM_UTF32_BE + "text".encode("utf-32-be"), "text/plain"),
        (b'{"a": 1}', "application/json"),
        (b"", "text/plain"),
    ],
)
def test_bytes_are_detected_by_their_first_ones(head: bytes, media_type: str) -> None:
    assert sniff_bytes(head, head[-64:]) == media_type


def test_a_character_cut_by_the_end_of_the_head_is_still_text() -> None:
    data = ("x" * (HEAD - 1) + "ü").encode()
    assert sniff_bytes(data[:HEAD], data[-64:]) == "text/plain"


@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        ('{"a": [1, 2]}', "application/json"),
        ('[{"a": 1}]\n', "application/json"),
        ("[1, 2, 3]", "application/json"),
        ("[]", "application/json"),
        ("{}", "application/json"),
        ('\ufeff{"a": 1}', "application/json"),
        ('{"a": 1}\n{"a": 2}\n', "application/x-ndjson"),
        ("id,name,city\n1,Ada,Bonn\n2,Ben,Ulm\n", "text/csv"),
        ("\ufeffid,name,city\r\n1,Ada,Bonn\r\n2,Ben,Ulm\r\n", "text/csv"),
        ('id,"full name"\n1,"Ada, the first"\n2,Ben\n3,"Caro"\n', "text/csv"),
        ("id\tname\tcity\n1\tAda\tBonn\n2\tBen\tUlm\n", "text/tab-separated-values"),
        ("id,name,city\n1,Ada\n2,Ben,Ulm\n", "text/plain"),
        ("Dear Ada,\nI saw Ben,\nand Caro,\nand Dario,\n", "text/plain"),
        ("Ada, Ben, Caro\nDario, Edda, Finn\nGreta, Hugo, Ines\n", "text/plain"),
        ("f(a,b,c)\ng(a,b,c)\nh(a,b,c)\n", "text/plain"),
        ("1,2,3\n4,5,6\n7,8,9\n", "text/plain"),
        ("a,b\n1,2\n", "text/plain"),
        ("[error] it broke", "text/plain"),
        ("{braces} are not enough", "text/plain"),
        ("[1, 2, cut off", "text/plain"),
        ("<!DOCTYPE html><html></html>", "text/html"),
        ("\n<HTML lang=en>", "text/html"),
        ("<p>a fragment", "text/plain"),
        ("diff --git a/x b/x\n", "text/x-diff"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n", "text/x-diff"),
        ("--- just a rule ---", "text/plain"),
        ("", "text/plain"),
    ],
)
def test_text_is_detected_by_how_it_begins_and_ends(text: str, media_type: str) -> None:
    assert sniff_text(text[:HEAD], text[-64:]) == media_type


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("table.csv", "text/csv"),
        ("TABLE.CSV", "text/csv"),
        ("notes.md", "text/markdown"),
        ("a.b.py", "text/x-python"),
        ("events.jsonl", "application/x-ndjson"),
        ("no suffix", "text/plain"),
        ("strange.suffix", "text/plain"),
        (".", "text/plain"),
    ],
)
def test_a_name_tells_what_text_is(name: str, media_type: str) -> None:
    assert sniff_text("a,b\n1,2\n", "1,2\n", name) == media_type
    assert sniff_bytes(b"a,b\n1,2\n", b"1,2\n", name) == media_type


def test_magic_numbers_count_more_than_the_name() -> None:
    assert sniff_bytes(b"\x89PNG\r\n\x1a\n", b"", "table.csv") == "image/png"


@pytest.mark.parametrize(
    ("media_type", "head", "kind"),
    [
        ("text/x-python", "import os", "code"),
        ("text/x-diff", "", "code"),
        ("text/markdown", "# Title", "doc"),
        ("text/html", "", "doc"),
        ("application/pdf", "", "doc"),
        ("application/json", "{}", "data"),
        ("text/csv", "a,b", "data"),
        ("image/png", "", "data"),
        ("text/plain", "just words", "result"),
        ("text/plain", "2026-01-31T10:00:00 started", "log"),
        ("text/plain", "[12:30:01] started", "log"),
        ("text/plain", "Jan 31 10:00:00 host sshd[1]: hello", "log"),
        ("text/plain", "first line\nERROR: it broke", "log"),
    ],
)
def test_the_kind_follows_from_the_type_and_the_head(media_type: str, head: str, kind: str) -> None:
    assert sniff_kind(media_type, head) == kind


def test_a_name_that_ends_in_log_makes_text_a_log() -> None:
    assert sniff_kind("text/plain", "nothing to see", name="build.LOG") == "log"


@pytest.mark.parametrize("media_type", ["text/plain", "TEXT/CSV; charset=utf-8", "application/json", "image/svg+xml"])
def test_these_types_are_made_of_characters(media_type: str) -> None:
    assert is_text(media_type)


@pytest.mark.parametrize("media_type", ["image/png", "application/octet-stream", "application/pdf", ""])
def test_these_types_are_not(media_type: str) -> None:
    assert not is_text(media_type)


@given(st.binary(max_size=HEAD), st.binary(max_size=64), st.none() | st.text())
def test_anything_at_all_gets_a_type_and_a_kind(head: bytes, tail: bytes, name: str | None) -> None:
    media_type = sniff_bytes(head, tail, name)
    assert "/" in media_type
    assert sniff_kind(media_type, head.decode("utf-8", "replace"), name=name) in KINDS


@pytest.mark.parametrize(
    ("pattern", "media_type", "kind"),
    [
        ("content/csv/*.csv", "text/csv", "data"),
        ("content/html/*.html", "text/html", "doc"),
        ("content/json/*.json", "application/json", "data"),
        ("transcripts/claude-code/*.jsonl", "application/x-ndjson", "data"),
        ("transcripts/pi/*.jsonl", "application/x-ndjson", "data"),
        ("transcripts/openai-chat/*.json", "application/json", "data"),
        ("retrieval/*.json", "application/json", "data"),
    ],
)
def test_real_files_are_detected_by_name_and_come_back_exactly(
    store: Store, corpus: Path, pattern: str, media_type: str, kind: str
) -> None:
    files = sorted(corpus.glob(pattern))
    assert files
    session = store.session("s")
    for file in files:
        ref = session.put(file)
        assert (ref.media_type, ref.kind, ref.name) == (media_type, kind, file.name)
        assert session.get(ref) == file.read_bytes()


@pytest.mark.parametrize(
    ("pattern", "media_type"),
    [
        ("content/html/*.html", "text/html"),
        ("content/json/*.json", "application/json"),
        ("transcripts/openai-chat/*.json", "application/json"),
        ("transcripts/claude-code/*.jsonl", "application/x-ndjson"),
        ("transcripts/pi/*.jsonl", "application/x-ndjson"),
    ],
)
def test_real_content_is_detected_without_a_name(corpus: Path, pattern: str, media_type: str) -> None:
    for file in sorted(corpus.glob(pattern)):
        data = file.read_bytes()
        assert sniff_bytes(data[:HEAD], data[-64:]) == media_type
        text = data.decode()
        assert sniff_text(text[:HEAD], text[-64:]) == media_type


@given(st.text(), st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]))
def test_text_is_decoded_by_its_byte_order_mark(text: str, encoding: str) -> None:
    assume(not (encoding == "utf-16-le" and text.startswith("\0")))  # that is the mark of UTF-32
    assert decoded(f"\ufeff{text}".encode(encoding)) == text
    assert encoding_of(f"\ufeff{text}".encode(encoding)).is_wide == (encoding != "utf-8")
