"""Copying a store: every session sees the same in the target, on any backend. An interrupted copy
can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck import Store
from coatcheck.cli import main
from tests.backends import LARGE, Backend, Clock


@pytest.fixture(params=["memory", "folder", "fleet"])
def target(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    """An empty store of each backend in turn."""
    urls = {"memory": "memory:", "folder": str(tmp_path / "target")}
    url = urls.get(request.param) or request.getfixturevalue("fleet").new_url()
    with coatcheck.open(url, durability="process", clock=clock) as made:
        yield made


def filled(store: Store) -> dict[str, Any]:
    """Put some of everything, and return the value that each name must have."""
    parent = store.session("parent", ttl=None)
    child = store.session("child", parent="parent", quota_bytes=10_000_000)
    values: dict[str, Any] = {
        "text": "small",
        "rows": [{"a": 1}],
        "bytes": b"\x00\x01",
        "large": "line\n" * LARGE,
    }
    for name, value in values.items():
        parent.put(value, name=name, tool="t", kind="log")
    child.put("own", name="own")
    child.put("older", name="twice")
    child.put("newer", name="twice", ttl=500)
    child.pin("own")
    parent.grant("large", to="friend")
    return values


def seen(store: Store) -> dict[str, Any]:
    """Everything that a user can see, except the address."""
    return {
        info.session_id: (
            info.parent, info.ttl, info.quota, info.created, info.used_bytes,
            [(ref, ref.expires) for ref in store.session(info.session_id).list()],
            [ref.artifact_id for ref in store.session(info.session_id).list(name="twice")],
        )
        for info in sorted(store.sessions(), key=lambda info: info.session_id)
    }  # fmt: skip


def test_a_copy_shows_the_same_to_every_session(store: Store, target: Store) -> None:
    values = filled(store)
    report = store.copy_to(target)
    assert seen(target) == seen(store)
    assert (report.sessions, report.refs, report.known, report.artifacts, report.lost) == (
        3,
        8,
        0,
        7,
        (),
    )
    for name, value in values.items():
        assert target.session("child").get(name) == value
    assert target.session("friend").list()
    assert target.verify().problems == []


def test_a_second_copy_transfers_only_new_artifacts(store: Store, target: Store) -> None:
    filled(store)
    store.copy_to(target)
    store.session("parent").put("came later", name="late")
    report = store.copy_to(target)
    assert (report.refs, report.artifacts, report.known) == (1, 1, 8)
    assert target.session("parent").get("late") == "came later"


def test_an_interrupted_copy_can_be_continued(store: Store, target: Store) -> None:
    filled(store)

    def stop(done: int, total: int | None) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.copy_to(target, progress=stop)
    assert target.verify().problems == []
    report = store.copy_to(target)
    assert (report.known, report.refs) == (4, 4)
    assert seen(target) == seen(store)


def test_damaged_bytes_are_reported_and_never_copied(folder: Backend, target: Store) -> None:
    store = folder.open()
    bad = store.session("s").put(b"x" * LARGE)
    good = store.session("s").put(b"y" * LARGE)
    (file,) = (folder.path / "blobs" / bad.artifact_id[:2]).glob(f"{bad.artifact_id}-*")
    file.write_bytes(b"z" * LARGE)
    assert store.copy_to(target).lost == (bad.artifact_id,)
    assert [ref.artifact_id for ref in target.session("s").list()] == [good.artifact_id]
    assert target.verify().problems == []


def test_the_command_copies_and_moves(tmp_path: Path) -> None:
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    with coatcheck.open(here) as store:
        store.session("s").put("x" * LARGE, name="n")
        store.tenant("acme").session("s").put("theirs", name="n")
    done = CliRunner().invoke(main, ["copy", here, there, "--json"])
    assert json.loads(done.output)["refs"] == 1, done.output
    done = CliRunner().invoke(main, ["copy", here, there, "--tenant", "acme", "--move"])
    assert done.exit_code == 0, done.output
    with coatcheck.open(there) as store:
        assert store.session("s").get("n") == "x" * LARGE
        assert store.tenant("acme").session("s").get("n") == "theirs"
    with coatcheck.open(here) as store:
        assert store.session("s").get("n") is not None
        assert store.tenant("acme").stats().artifacts == 0


def test_a_missing_source_is_not_created(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["copy", str(tmp_path / "nothing"), str(tmp_path / "there")])
    assert done.exit_code != 0
    assert not (tmp_path / "nothing").exists()
