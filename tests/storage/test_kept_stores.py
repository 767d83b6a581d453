"""A store of every released format stays readable: tests/stores contains an original of each."""

import tarfile
from pathlib import Path

import pytest

import coatcheck
from coatcheck.storage.sqlite_schema import STEPS
from tests.stores.make import COLD, LOG, ROWS, SMALL, STATES

KEPT = sorted((Path(__file__).parent.parent / "stores").glob("format-*.tar.gz"))


@pytest.mark.parametrize("archive", KEPT, ids=[path.name for path in KEPT])
def test_a_store_of_a_released_format_can_be_read_in_full_and_written_to(
    archive: Path, tmp_path: Path
) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / "store"
    folder.chmod(0o700)
    (folder / "lock").touch(0o600)
    with coatcheck.open(folder) as store:
        assert store.verify().problems == []
        session = store.session("kept")
        assert session.get("log") == LOG
        assert session.get("cold") == COLD
        assert session.get("rows") == ROWS
        assert session.get("bytes") == SMALL.encode()
        assert [session.get(ref) for ref in session.list(name="versions")] == ["second", "first"]
        ref = session.ref("log")
        assert ref is not None
        assert ref.parents == (session.list(name="rows")[0].artifact_id,)
        assert session.list(name="rows")[0].pinned
        assert session.list(name="versions")[1].call_id == "c1"
        child = store.session("child")
        assert child.parent == "kept"
        assert child.get("log") == LOG
        assert store.session("granted").list()[0].granted_by == "kept"
        with session.open("cold") as stream:
            stream.seek(300_000)
            assert stream.read(10) == COLD.encode()[300_000:300_010]
        claim = session.claimant()
        assert claim is not None
        assert claim.holder == "dispatcher"
        assert [(one.body, one.token) for one in session.records("hot")] == [
            (one, claim.token) for one in STATES
        ]
        assert [(one.body, one.token) for one in session.records("other")] == [
            (b"not under the claim", None)
        ]
        session.put("new in an old store", name="new")
        number = session.record("hot", b"new", token=session.claim("another"))
    with coatcheck.open(folder) as store:
        assert store.session("kept").get("new") == "new in an old store"
        assert store.session("kept").records("hot", newest=True, limit=1)[0].seq == number


def test_there_is_a_kept_store_for_every_format() -> None:
    assert [path.name for path in KEPT] == [
        f"format-{number}.tar.gz" for number in range(1, len(STEPS) + 1)
    ]
