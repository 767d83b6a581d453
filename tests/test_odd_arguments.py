"""Unusual arguments: each gets a clear error or a correct result, on every backend."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from coatcheck import Store, errors
from tests.backends import Backend, Clock


def test_the_ttl_of_a_ref_starts_with_its_own_put(folder: Backend, clock: Clock) -> None:
    folder.open(clock=clock, ttl=100).session("s").put("first")
    folder.close()
    clock.advance(90)
    session = folder.open(clock=clock).session("s")
    assert session.put("second").expires == clock.now + 100


def test_a_name_that_is_not_valid_unicode_finds_nothing(store: Store) -> None:
    session = store.session("s")
    assert session.get("lone \ud800") is None
    assert session.ref("lone \ud800") is None
    assert session.list(name="lone \ud800") == []
    assert not session.forget("lone \ud800")


def test_a_file_name_that_is_not_text_is_kept_with_replacement_characters(
    backend: Backend, tmp_path: Path
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    path.write_bytes(b"coffee")
    assert backend.open().session("s").put(path).name == "caf\ufffd"
    if backend.lasts:
        backend.close()
        assert backend.open().session("s").get("caf\ufffd") == b"coffee"


@pytest.mark.parametrize("quota", [-1, 1 << 63])
def test_an_invalid_quota_is_refused(store: Store, quota: int) -> None:
    with pytest.raises(errors.InvalidArgument):
        store.session("s", quota_bytes=quota)


def test_bytes_that_an_export_declares_as_text_are_reported_as_damaged(backend: Backend) -> None:
    archive = io.BytesIO()
    source = backend.open()
    source.session("s").put(b"\xff\xfe", name="n")
    source.export(archive)
    source.session("s").end()
    claimed = io.BytesIO(archive.getvalue().replace(b'"codec": "bytes"', b'"codec": "text"'))
    source.import_(claimed)
    with pytest.raises(errors.Damaged):
        source.session("s").get("n")


@pytest.mark.parametrize(
    ("fragment", "part"), [("/a", b"null"), ("/b/1", b'"\xc3\xa9"'), ("/b", b'[1,"\xc3\xa9"]')]
)
def test_a_part_can_be_opened_as_a_stream_of_its_json(
    store: Store, fragment: str, part: bytes
) -> None:
    session = store.session("s")
    pointer = session.put({"a": None, "b": [1, "é"]}).pointer
    with session.open(f"{pointer}#{fragment}") as stream:
        assert stream.read() == part
    with pytest.raises(errors.InvalidPointer):
        session.open(f"{pointer}#/c")
