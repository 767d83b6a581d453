"""Checks of arguments, and the durable replacement of a file."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest

from coatcheck.atomic import Draft, replace_file
from coatcheck.checks import LARGEST, is_seconds, is_whole, one_of, seconds, whole
from coatcheck.errors import InvalidArgument


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, LARGEST + 1])
def test_an_invalid_integer_is_rejected_and_shown_in_the_error(value: object) -> None:
    assert not is_whole(value)
    with pytest.raises(InvalidArgument, match="limit must be an integer of at least 0, got "):
        whole(value, "limit")


@pytest.mark.parametrize("value", [-1, True, math.nan, "1", None])
def test_an_invalid_number_of_seconds_is_rejected(value: object) -> None:
    assert not is_seconds(value)
    with pytest.raises(InvalidArgument, match="ttl must be a non-negative number of seconds, got "):
        seconds(value, "ttl")


def test_optional_arguments_may_be_none_and_their_errors_mention_none() -> None:
    whole(None, "limit", optional=True)
    seconds(None, "ttl", optional=True)
    one_of(None, "kind", ("a", "b"), optional=True)
    with pytest.raises(InvalidArgument, match="kind must be one of 'a', 'b' or None, got 'c'"):
        one_of("c", "kind", ("a", "b"), optional=True)


def test_valid_arguments_pass() -> None:
    whole(1, "limit", least=1)
    whole(LARGEST, "limit")
    seconds(0.5, "ttl")
    seconds(math.inf, "ttl")
    one_of("a", "kind", ("a", "b"))


def test_a_new_file_gets_its_mode_and_an_existing_one_keeps_its_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"one", mode=0o640)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"one", 0o640)
    file.chmod(0o600)
    replace_file(file, b"two", mode=0o644)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"two", 0o600)
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_a_link_replaces_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_draft_that_is_not_used_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with Draft(tmp_path) as draft:
        draft.file.write(b"half")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"old")]


def test_a_file_is_replaced_after_the_check_unless_the_check_raises(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    seen: list[bytes] = []
    replace_file(file, b"new", check=lambda: seen.append(file.read_bytes()))
    assert (seen, file.read_bytes()) == ([b"old"], b"new")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(file, b"newer", check=interrupt)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"new")]
