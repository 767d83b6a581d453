"""Bootstrap files: small ones whole, large ones as references, and the same bytes for the same
files."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Session, config
from coatcheck.context import Kept, bootstrap
from coatcheck.errors import InvalidArgument
from tests.backends import Backend

LINE = re.compile(
    r"^ArtifactRef: (art:[0-9a-f]{12,64}) \(type=(\w+), sha256=([0-9a-f]{64}), bytes=(\d+)\)$", re.M
)
LEFT_OUT = re.compile(
    r"\[([\d,]+) characters are left out here, lines (\d+)-(\d+); get_artifact\(pointer=\"(art:\w+)\""
)


@pytest.fixture
def session(backend: Backend) -> Session:
    return backend.open().session("s")


def rules(count: int, what: str = "rule") -> str:
    return "".join(f"{what} {n}: always check number {n} twice\n" for n in range(count))


def test_a_small_file_is_shown_whole(session: Session, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("be careful\n")
    done = bootstrap(session, ["AGENTS.md"], root=tmp_path)
    assert done.text == "--- AGENTS.md ---\nbe careful"
    assert (done.files[0].status, done.refs, session.list()) == ("whole", (), [])


def test_a_large_file_becomes_a_reference_with_head_and_tail(
    session: Session, tmp_path: Path
) -> None:
    text = rules(600)
    (tmp_path / "AGENTS.md").write_text(text)
    done = bootstrap(session, ["AGENTS.md"], root=tmp_path)
    found = LINE.search(done.text)
    assert found
    assert found.groups() == (
        done.refs[0].pointer, "doc", hashlib.sha256(text.encode()).hexdigest(), str(len(text)),
    )  # fmt: skip
    assert session.get(found[1]) == session.get("AGENTS.md") == text
    assert 3_500 < len(done.text) < 4_500
    assert "\nrule 0:" in done.text
    assert done.text.endswith("rule 599: always check number 599 twice")


def test_the_line_between_head_and_tail_says_exactly_what_is_left_out_and_how_to_read_it(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text(rules(600))
    text = bootstrap(session, ["AGENTS.md"], root=tmp_path).text
    note = LEFT_OUT.search(text)
    assert note
    first, last = int(note[2]), int(note[3])
    shown = {int(found) for found in re.findall(r"^rule (\d+):", text, re.M)}
    assert {n + 1 for n in range(600)} - {n + 1 for n in shown} == set(range(first, last + 1))
    page = session.read(note[4], lines=f"{first}:{last}", max_chars=100_000)
    assert len(page.text.rstrip("\n")) + 1 == int(note[1].replace(",", ""))


def test_the_threshold_counts_characters_and_is_inclusive(session: Session, tmp_path: Path) -> None:
    (tmp_path / "at").write_text("é" * 8_000)
    (tmp_path / "over").write_text("é" * 8_001)
    done = bootstrap(session, ["at", "over"], root=tmp_path)
    assert [file.status for file in done.files] == ["whole", "reference"]


def test_unchanged_files_give_the_same_bytes_in_another_store_too(
    session: Session, backend: Backend, tmp_path: Path
) -> None:
    for number, name in enumerate(("AGENTS.md", "SOUL.md", "short")):
        (tmp_path / name).write_text(rules(700, name) if number < 2 else "short")
    names = ["AGENTS.md", "SOUL.md", "short"]
    first = bootstrap(session, names, root=tmp_path).text
    os.utime(tmp_path / "AGENTS.md", (1, 1))
    assert bootstrap(session, names, root=tmp_path).text == first
    assert bootstrap(session.store.session("other"), names, root=tmp_path).text == first
    assert bootstrap(backend.open_new().session("s"), names, root=tmp_path).text == first


def test_a_changed_file_becomes_a_new_artifact_and_the_old_one_stays(
    session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "AGENTS.md"
    path.write_text(rules(600))
    old = bootstrap(session, ["AGENTS.md"], root=tmp_path).refs[0]
    path.write_text(rules(601))
    new = bootstrap(session, ["AGENTS.md"], root=tmp_path).refs[0]
    assert old.artifact_id != new.artifact_id
    assert session.get(old.pointer) == rules(600)
    assert session.get("AGENTS.md") == rules(601)


def test_the_same_content_is_shown_once(session: Session, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text(rules(600))
    (tmp_path / "CLAUDE.md").symlink_to("AGENTS.md")
    done = bootstrap(session, ["AGENTS.md", "CLAUDE.md", "AGENTS.md"], root=tmp_path)
    assert [file.status for file in done.files] == ["reference", "repeated", "repeated"]
    assert done.text.count("[the same as AGENTS.md]") == 2
    assert len(done.refs) == 1


def test_unreadable_files_are_skipped_and_reported(session: Session, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 65 * 1024 * 1024)
    names = [
        "missing",
        "folder",
        "pipe",
        "loop",
        "huge",
        "nul\0",
        "x" * 5_000,
        "folder/none",
        "pipe/none",
    ]
    done = bootstrap(session, names, root=tmp_path)
    assert done.text == ""
    assert {file.status for file in done.files} == {"missing", "refused"}
    assert all(file.reason for file in done.files)
    assert str(tmp_path) not in str(done)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_read_permission_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("secret")
    (tmp_path / "AGENTS.md").chmod(0)
    assert bootstrap(session, ["AGENTS.md"], root=tmp_path).files[0].status == "refused"


def test_a_link_may_point_inside_the_folder_but_not_outside(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("swordfish")
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "rules.md").write_text("within")
    (root / "AGENTS.md").symlink_to("docs/rules.md")
    (root / "EVIL.md").symlink_to("../secret")
    (root / "linked").symlink_to(tmp_path)
    done = bootstrap(
        session, ["AGENTS.md", "EVIL.md", "linked/secret", root / "EVIL.md"], root=root
    )
    assert [file.status for file in done.files] == ["whole", "refused", "refused", "refused"]
    assert "swordfish" not in done.text


def test_a_file_that_is_not_utf8_is_stored_exactly_and_not_shown(
    session: Session, tmp_path: Path
) -> None:
    data = b"\xff\xfe\x00binary" * 10
    (tmp_path / "odd").write_bytes(data)
    done = bootstrap(session, ["odd"], root=tmp_path)
    assert "not UTF-8 text" in done.text
    assert done.files[0].reason == "not UTF-8 text"
    with session.open(done.refs[0]) as stream:
        assert stream.read() == data


def test_a_byte_order_mark_and_windows_line_endings_are_stored_unchanged(
    session: Session, tmp_path: Path
) -> None:
    data = b"\xef\xbb\xbf" + rules(600).replace("\n", "\r\n").encode()
    (tmp_path / "AGENTS.md").write_bytes(data)
    done = bootstrap(session, ["AGENTS.md"], root=tmp_path)
    assert "\ufeff" not in done.text
    assert done.refs[0].artifact_id == hashlib.sha256(data).hexdigest()


def test_a_file_that_cannot_be_stored_is_still_shown_within_the_limit(
    backend: Backend, tmp_path: Path
) -> None:
    full = backend.open().session("full", quota_bytes=10)
    (tmp_path / "AGENTS.md").write_text(rules(600))
    done = bootstrap(full, ["AGENTS.md"], root=tmp_path)
    assert "could not be stored" in done.text
    assert done.refs == ()
    assert len(done.text) < 4_500


def test_secrets_are_masked_before_a_file_is_stored_if_the_settings_say_so(tmp_path: Path) -> None:
    secret = "sk-ant-api03-" + "aB3x" * 20
    (tmp_path / "AGENTS.md").write_text(f"a rule\n{secret}\n" * 1_000)
    with coatcheck.open("memory:", settings=config.load({"policy.redact": "store"})) as store:
        session = store.session("s")
        (ref,) = bootstrap(session, ["AGENTS.md"], root=tmp_path).refs
        assert "a rule" in str(session.get(ref))
        assert secret not in str(session.get(ref))


def test_the_environment_sets_the_defaults_and_arguments_override_them(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "AGENTS.md").write_text(rules(100))
    monkeypatch.setenv("COATCHECK_BOOTSTRAP_THRESHOLD_CHARS", "1000")
    session = backend.open().session("s")
    assert bootstrap(session, ["AGENTS.md"], root=tmp_path).files[0].status == "reference"
    assert (
        bootstrap(session, ["AGENTS.md"], root=tmp_path, threshold_chars=8_000).files[0].status
        == "whole"
    )
    monkeypatch.setenv("COATCHECK_BOOTSTRAP_REFS", "0")
    session = backend.open().session("s")
    assert bootstrap(session, ["AGENTS.md"], root=tmp_path).files[0].status == "whole"
    assert (
        bootstrap(session, ["AGENTS.md"], root=tmp_path, enabled=True).files[0].status
        == "reference"
    )


@pytest.mark.parametrize(
    "options", [{"threshold_chars": 0}, {"shown_chars": -1}, {"enabled": "yes"}]
)
def test_invalid_sizes_are_refused(session: Session, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        bootstrap(session, [], **options)  # type: ignore[arg-type]


def test_head_note_and_tail_account_for_every_character(backend: Backend, tmp_path: Path) -> None:
    @backend.examples()
    @given(st.text(min_size=1, max_size=400), st.integers(1, 60), st.integers(0, 80))
    def check(text: str, threshold: int, shown: int) -> None:
        text = text.encode("utf-8", "replace").decode().removeprefix("\ufeff").rstrip("\n")
        (tmp_path / "f").write_bytes(text.encode())
        session = backend.new_session()
        done = bootstrap(
            session, ["f"], root=tmp_path, threshold_chars=threshold, shown_chars=shown
        )
        body = done.text.removeprefix("--- f ---\n")
        if len(text) <= threshold:
            assert body == text
            return
        found = LEFT_OUT.search(body)
        assert found
        head = body[: found.start()].split("\n", 1)[1] if "\n" in body[: found.start()] else ""
        tail = body[found.end() :].partition(" reads them]")[2].removeprefix("\n")
        assert text.startswith(head.rstrip("\n"))
        assert text.endswith(tail)
        assert len(head.rstrip("\n")) + len(tail) <= min(shown, threshold)
        assert session.get("f") == text

    check()


def test_a_caller_can_keep_files_elsewhere_and_writes_their_lines(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text(rules(600))
    kept: dict[str, str | bytes] = {}

    def keep(name: str, content: str | bytes) -> Kept:
        kept[name] = content
        return Kept("See file 1.")

    done = bootstrap(session, ["AGENTS.md"], root=tmp_path, keep=keep)
    assert done.text.startswith("--- AGENTS.md ---\nSee file 1.\nrule 0:")
    assert "characters are left out here, lines " in done.text
    assert "get_artifact" not in done.text
    assert (kept, session.list(), done.refs) == ({"AGENTS.md": rules(600)}, [], ())
