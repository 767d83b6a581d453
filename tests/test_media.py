"""The type of content, detected from its first bytes and its name."""

import codecs
import io
import json
import pprint
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Store
from coatcheck.media import (
    CHECKED,
    HEAD,
    JSON,
    JSONL,
    KINDS,
    REPR,
    TEXT,
    decoded,
    encoding_of,
    is_text,
    parses,
    sniff_bytes,
    sniff_kind,
    sniff_text,
)


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
        (b"\xc3\x28 is not UTF-8", "application/octet-stream"),
        (b"plain words", "text/plain"),
        ("mots et smörgåsbord".encode(), "text/plain"),
        (codecs.BOM_UTF16_LE + "text".encode("utf-16-le"), "text/plain"),
        (codecs.BOM_UTF32_LE + "text".encode("utf-32-le"), "text/plain"),
        (codecs.BOM_UTF32_BE + "text".encode("utf-32-be"), "text/plain"),
        (b'{"a": 1}', "application/json"),
        (b"", "text/plain"),
    ],
)
def test_the_type_of_bytes_is_detected_from_their_beginning(head: bytes, media_type: str) -> None:
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
        ("id;name;city\n1;Ada;Bonn\n2;Ben;Ulm\n", "text/csv"),
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
def test_the_type_of_text_is_detected_from_its_beginning_and_end(
    text: str, media_type: str
) -> None:
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
def test_the_type_of_text_is_detected_from_its_name(name: str, media_type: str) -> None:
    assert sniff_text("a,b\n1,2\n", "1,2\n", name) == media_type
    assert sniff_bytes(b"a,b\n1,2\n", b"1,2\n", name) == media_type


def test_magic_numbers_take_precedence_over_the_name() -> None:
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


@pytest.mark.parametrize(
    "media_type", ["text/plain", "TEXT/CSV; charset=utf-8", "application/json", "image/svg+xml"]
)
def test_text_types_are_recognized(media_type: str) -> None:
    assert is_text(media_type)


@pytest.mark.parametrize(
    "media_type", ["image/png", "application/octet-stream", "application/pdf", ""]
)
def test_other_types_are_not_text(media_type: str) -> None:
    assert not is_text(media_type)


@given(st.binary(max_size=HEAD), st.binary(max_size=64), st.none() | st.text())
def test_any_content_gets_a_type_and_a_kind(head: bytes, tail: bytes, name: str | None) -> None:
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
def test_real_content_is_detected_without_a_name(
    corpus: Path, pattern: str, media_type: str
) -> None:
    for file in sorted(corpus.glob(pattern)):
        data = file.read_bytes()
        assert sniff_bytes(data[:HEAD], data[-64:]) == media_type
        text = data.decode()
        assert sniff_text(text[:HEAD], text[-64:]) == media_type


BROKEN = {
    "cut off": '{"a": [1, 2, {"b": 3}',
    "cut off at a bracket": '{"a": [1, 2, {"b": 3}',
    "a trailing comma": '{"a": 1,}',
    "a trailing comma in a list": "[1, 2, 3,]",
    "single quotes": "{'a': null}",
    "not a number": '[{"a": NaN}]',
    "infinity": "[1, -Infinity]",
    "a comment": '{"a": 1 /* one */}',
    "a name without quotes": '{a: "b"}',
    "a line break in a string": '{"a": "x\ny"}',
    "a zero byte at the end": '{"a": 1}\0}',
    "words after it": '{"a": 1} and more {}',
    "two documents on a line": '{"a": 1} {"a": 2}',
    "a number with a leading zero": "[01, 2]",
    "lines of which one is text": '{"a": 1}\n{"a": 2}\nstarted\n{"a": 3}\n',
}


@pytest.mark.parametrize("fault", BROKEN)
def test_json_that_does_not_parse_is_text(fault: str) -> None:
    text = BROKEN[fault]
    assert not parses(text)
    assert sniff_text(text[:HEAD], text[-64:], None, text) == TEXT
    assert sniff_text(text[:HEAD], text[-64:], "answer.json", text) == TEXT
    assert sniff_bytes(text.encode()[:HEAD], text.encode()[-64:], None, text.encode()) in (
        TEXT,
        "application/octet-stream",
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '["\\ud800"]',
        '["\ud800"]',
        "[" * 300 + "]" * 300,
        "[1e999]",
        f"[{'9' * 5000}]",
        '\ufeff["ü"]\n',
        "null",
    ],
)
def test_unusual_but_valid_json_parses(text: str) -> None:
    assert parses(text)
    assert parses(text.encode("utf-8", "surrogatepass"))


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_the_output_of_json_dumps_parses(value: Any) -> None:
    assert parses(json.dumps(value))
    assert parses(json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass"))


LONG = json.dumps({"rows": [{"id": n, "text": "a}, {b", "more": {"x": [n]}} for n in range(4_000)]})


@pytest.mark.parametrize("at", [30, 80_000, 120_001, len(LONG) - 3])
@pytest.mark.parametrize("fault", ['"', "{", "}", "[", ",", "x"])
def test_one_wrong_character_in_a_long_document_is_detected(at: int, fault: str) -> None:
    assert parses(LONG)
    assert parses(json.dumps(json.loads(LONG), indent=1))
    broken = LONG[:at] + fault + LONG[at:]
    try:
        json.loads(broken)
    except ValueError:
        assert not parses(broken)
    else:
        assert parses(broken)


def test_a_string_that_looks_like_rows_is_not_mistaken_for_rows() -> None:
    assert not parses('["x},' + '{"a": 1},' * 30_000 + '{y"]')
    assert parses(json.dumps(["}, {" * 50_000]))


ROWS: list[tuple[Any, ...]] = [
    (
        "a",
        1,
        None,
        True,
        1.5,
        float("nan"),
        b"x",
        datetime(2026, 1, 2, tzinfo=UTC),
        Decimal("1.10"),
        UUID(int=7),
    ),
    ("it's", 'say "x"', [], (), {"k": (1,)}),
]


@pytest.mark.parametrize(
    "value",
    [[("a", 1)], {"a": None}, [{"a": [True, {}]}], (1, "b"), {"x"}, ROWS, [ROWS[0]] * 2_000],
)
def test_the_output_of_repr_and_pprint_is_recognized(value: object) -> None:
    for text in (repr(value), pprint.pformat(value)):
        assert sniff_text(text[:HEAD], text[-64:], None, text) == REPR
        assert sniff_bytes(text.encode()[:HEAD], text.encode()[-64:], None, text.encode()) == REPR
        assert sniff_kind(REPR, text[:HEAD]) == "data"
    assert sniff_text(text[:HEAD], text[-64:]) == REPR


@pytest.mark.parametrize(
    "text",
    ["(see below)", "[INFO] 'x' [done]", "(venv) $ ls (x)", "['a', 'b',]", "[a, b, 'c']", "{'a': undefined}",
     "[link](http://x) and 'more' (so)", "{% if 'x' %}{% endif %}", "('a' 'b') = ('c')", "[main] f('x')"],
)  # fmt: skip
def test_text_in_brackets_is_not_a_repr(text: str) -> None:
    assert sniff_text(text, text[-64:], None, text) == TEXT


@pytest.mark.parametrize(
    ("text", "name", "media_type"),
    [
        ("[1, 2]\n[3, 4]\n", None, JSONL),
        ('{"a": 1}\n{"a": 2}\n{"a": 3', None, JSONL),
        ('{"a": 1}\n', "one.jsonl", JSONL),
        ('1\n"two"\n', "values.jsonl", JSONL),
        ("1\n2\n", None, TEXT),
        ('{"a": 1}\n{"a": 2}\n', "all.json", JSONL),
        ('{\n "a": 1\n}\n', "one.jsonl", JSON),
        ("not at all\n", "one.jsonl", TEXT),
        ('{"a": "' + "x" * 100_000 + '"}\n{"a": 2}\n', None, JSONL),
        ('{"a": 1}\n' * 20_000 + "and text\n", None, TEXT),
    ],
)
def test_text_is_jsonl_only_if_its_lines_parse(
    text: str, name: str | None, media_type: str
) -> None:
    assert sniff_text(text[:HEAD], text[-64:], name, text) == media_type


CONTENTS = {
    "broken JSON": '{"rows": [' + '{"a": 1},' * 400 + "]}",
    "JSON": json.dumps({"rows": [{"a": "ü"}] * 400}),
    "JSONL": '{"a": 1}\n' * 400,
    "rows": repr([("a", None)] * 400),
    "large broken JSON": "[" + "1, " * 500_000 + "]",
    "large JSON": "[" + "1, " * 500_000 + "1]",
}


@pytest.mark.parametrize("what", CONTENTS)
def test_the_media_type_does_not_depend_on_how_a_value_is_stored(tmp_path: Path, what: str) -> None:
    text, file = CONTENTS[what], tmp_path / "content"
    file.write_text(text)
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        ways = [session.put(one) for one in (text, text.encode(), file, io.BytesIO(text.encode()))]
        for value in (text, text.encode()):
            ref = session.externalize(value, policy=Policy(max_chars=1_000)).ref
            assert ref is not None
            ways.append(ref)
    assert len({(ref.media_type, ref.kind) for ref in ways}) == 1


def test_content_too_long_to_parse_is_judged_by_its_ends() -> None:
    text = "[" + "1, " * (CHECKED // 3 + 1) + "]"
    assert sniff_text(text[:HEAD], text[-64:], None, text) == JSON


@given(st.text(), st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]))
def test_text_is_decoded_by_its_byte_order_mark(text: str, encoding: str) -> None:
    assume(
        not (encoding == "utf-16-le" and text.startswith("\0"))
    )  # that would be the byte order mark of UTF-32
    assert decoded(f"\ufeff{text}".encode(encoding)) == text
    assert encoding_of(f"\ufeff{text}".encode(encoding)).is_wide == (encoding != "utf-8")
