"""The disk operations of an append, and their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.storage.disk import Disk
from coatcheck.transcript import appender, swap
from coatcheck.transcript.appender import Appender
from coatcheck.transcript.swap import SwapFile


class RecordingDisk(Disk):
    """A disk that records its calls."""

    def __init__(self, *, durable: bool) -> None:
        super().__init__(durable=durable)
        self.calls: list[str] = []

    def write(self, file: int, data: bytes | memoryview) -> None:
        self.calls.append("write")
        super().write(file, data)

    def sync(self, file: int, *, always: bool = False) -> None:
        self.calls += ["sync"] if self.durable or always else []
        super().sync(file, always=always)

    def sync_data(self, file: int) -> None:
        self.calls += ["sync data"] if self.durable else []
        super().sync_data(file)

    def truncate(self, file: int, size: int) -> None:
        self.calls.append("truncate")
        super().truncate(file, size)


def test_with_power_durability_a_line_and_a_new_files_name_are_synced_before_the_append_returns(
    tmp_path: Path,
) -> None:
    disk = RecordingDisk(durable=True)
    appender = Appender(tmp_path / "t.jsonl", disk)
    assert appender.append(b"{}\n") == 0
    assert appender.append(b"{}\n{}\n") == 3
    assert disk.calls == ["sync", "write", "sync data", "write", "sync data"]
    appender.close()


def test_with_process_durability_nothing_is_synced(tmp_path: Path) -> None:
    disk = RecordingDisk(durable=False)
    appender = Appender(tmp_path / "t.jsonl", disk)
    appender.append(b"{}\n")
    assert disk.calls == ["write"]
    appender.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_torn_line_is_saved_before_it_is_cut_off(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a":1}\n{"b"')
    disk = RecordingDisk(durable=durable)
    appender = Appender(path, disk)
    torn = appender.recover()
    appender.close()
    assert torn is not None
    assert disk.calls.index("truncate") > disk.calls.index("sync") > disk.calls.index("write")
    assert path.read_bytes() == b'{"a":1}\n'


def test_a_second_torn_line_is_kept_beside_the_first(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for half in (b'{"b"', b'{"c'):
        path.write_bytes(b'{"a":1}\n' + half)
        appender = Appender(path, Disk())
        torn = appender.recover()
        appender.close()
    assert torn is not None
    assert torn.kept_in is not None
    assert torn.kept_in.read_bytes() == b'{"b"\n{"c\n'


def test_a_planted_link_where_a_torn_line_would_go_is_not_followed(tmp_path: Path) -> None:
    path, target = tmp_path / "t.jsonl", tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / ".t.jsonl.coatcheck-torn").symlink_to(target)
    path.write_bytes(b'{"a":1}\n{"b"')
    appender = Appender(path, Disk())
    with pytest.raises(StoreUnavailable):
        appender.recover()
    appender.close()
    assert target.read_bytes() == b"mine"
    assert path.read_bytes() == b'{"a":1}\n{"b"'


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        Appender(tmp_path / "none" / "t.jsonl", Disk()).append(b"{}\n")
    with pytest.raises(InvalidArgument):
        Appender(tmp_path, Disk()).append(b"{}\n")


def test_a_file_that_is_always_replaced_before_it_is_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"{}\n")
    monkeypatch.setattr(appender, "is_at", lambda *_: False)
    monkeypatch.setattr(swap, "is_at", lambda *_: False)
    with pytest.raises(StoreUnavailable, match=r"'t\.jsonl' keeps being replaced or removed"):
        Appender(path, Disk(durable=False)).append(b"{}\n")
    with pytest.raises(StoreUnavailable, match="keeps being replaced"), SwapFile(path).reading():
        pass
    assert path.read_bytes() == b"{}\n"
