"""Export and import: a store as JSON lines, and back, exactly."""

import base64
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import Fenced, InvalidArgument, QuotaExceeded, TooLarge
from tests.backends import LARGE, Backend, Clock, Fleet

pytestmark = pytest.mark.on_fleet


def fill(store: Store, clock: Clock) -> None:
    """Put some of everything that an export can contain."""
    main = store.session("main", ttl=100.0, quota_bytes=10_000_000)
    child = store.session("child ☃", parent="main", ttl=None)
    store.session("empty", ttl=5.0)
    source = main.put({"rows": [1, 2]}, name="n", tool="t", call_id="c1", producer="planner")
    for value in ("two", b"three", {"rows": [1, 2]}):
        clock.advance(1)
        main.put(value, name="n", parents=[source])
    clock.advance(1)
    main.put("x" * LARGE, name="large", kind="log", summary="many x")
    main.put(b"x" * LARGE, name="as bytes")
    main.put("", ttl=50)
    child.put(bytes(range(256)) * 3000)
    child.put("lone \ud800 surrogate", name="../../etc/passwd")
    main.grant(source, to="child ☃")
    child.grant(child.put("passed on"), to="stranger")
    main.pin("large")


def exported(store: Store) -> bytes:
    target = io.BytesIO()
    store.export(target)
    return target.getvalue()


def imported(backend: Backend, data: bytes, **options: Any) -> Store:
    store = backend.open(**options)
    store.import_(io.BytesIO(data))
    return store


@pytest.fixture
def archive(clock: Clock) -> bytes:
    with coatcheck.open("memory:", clock=clock) as store:
        fill(store, clock)
        return exported(store)


def test_an_import_recreates_the_same_store_on_any_backend(
    store: Store, fleet: Fleet, tmp_path: Path, clock: Clock
) -> None:
    fill(store, clock)
    data = exported(store)
    for url in ("memory:", tmp_path / "copy", fleet.new_url()):
        with coatcheck.open(url, clock=clock) as copy:
            copy.import_(io.BytesIO(data))
            assert exported(copy) == data
            assert copy.stats() == store.stats()
            assert copy.verify().problems == []


def test_exports_and_imports_report_their_counts(
    backend: Backend, store: Store, clock: Clock
) -> None:
    fill(store, clock)
    steps: list[tuple[int, int | None]] = []
    target = io.BytesIO()
    count = store.export(target, progress=lambda done, total: steps.append((done, total)))
    assert count == store.stats().refs
    assert steps[-1] == (count, count)
    assert backend.open_new(clock=clock).import_(io.BytesIO(target.getvalue())) == count


def test_imported_artifacts_are_as_they_were_put(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    store = imported(backend, archive, clock=clock)
    main, child = store.session("main"), store.session("child ☃")
    assert (child.parent, child.ttl, main.ttl) == ("main", None, 100)
    assert main.get("n") == {"rows": [1, 2]}
    assert [main.get(ref) for ref in main.list(name="n")] == [
        {"rows": [1, 2]},
        b"three",
        "two",
        {"rows": [1, 2]},
    ]
    assert main.get("large") == "x" * LARGE
    assert main.get("as bytes") == b"x" * LARGE
    assert child.get("../../etc/passwd") == "lone \ud800 surrogate"
    (oldest, *_) = reversed(main.list(name="n"))
    assert (oldest.tool, oldest.call_id, oldest.producer) == ("t", "c1", "planner")
    assert store.session("stranger").list()[0].granted_by == "child ☃"
    assert {info.session_id: info.quota for info in store.sessions()}["main"] == 10_000_000


def test_expiry_and_pins_are_imported(backend: Backend, archive: bytes, clock: Clock) -> None:
    store = imported(backend, archive, clock=clock)
    main = store.session("main")
    large = main.ref("large")
    assert large is not None
    assert large.pinned
    named = main.ref("n")
    assert named is not None
    assert named.expires == clock.now + 100
    clock.advance(50)
    assert not [ref for ref in main.list() if ref.size_bytes == 0], (
        "an artifact outlived its own ttl"
    )
    clock.advance(51)
    assert [ref.name for ref in main.list()] == ["as bytes"], (
        "a pin is on the artifact, under both of its names"
    )
    assert len(store.session("child ☃", ttl=None).list()) >= 3


def test_artifacts_that_expired_before_the_import_stay_expired(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    clock.advance(1000)
    assert imported(backend, archive, clock=clock).session("main").get("n") is None


def test_importing_twice_changes_nothing(backend: Backend, archive: bytes, clock: Clock) -> None:
    store = imported(backend, archive, clock=clock)
    before = store.stats(), exported(store)
    assert store.import_(io.BytesIO(archive)) == 0
    assert (store.stats(), exported(store)) == before
    store.collect()
    assert store.verify().problems == []


def test_an_import_with_merge_adds_to_existing_artifacts(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    store = backend.open(clock=clock)
    mine = store.session("main").put("mine", name="mine")
    store.session("other").put("x" * LARGE)
    store.import_(io.BytesIO(archive), merge=True)
    assert store.session("main").get(mine) == "mine"
    assert store.session("main").get("n") == {"rows": [1, 2]}
    assert store.session("other").list()
    assert store.verify().problems == []


def test_an_import_that_was_cut_off_anywhere_can_be_repeated(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    lines = archive.splitlines(keepends=True)
    for cut in range(1, len(lines), 9 if backend.is_fleet else 3):
        with backend.open_new(clock=clock) as store:
            with pytest.raises(InvalidArgument, match=f"line {cut + 1}"):
                store.import_(
                    io.BytesIO(b"".join(lines[:cut]) + lines[cut][: len(lines[cut]) // 2])
                )
            store.import_(io.BytesIO(archive))
            assert exported(store) == archive


def test_an_export_that_was_cut_off_between_two_lines_is_reported(
    store: Store, archive: bytes
) -> None:
    with pytest.raises(InvalidArgument, match="cut off"):
        store.import_(io.BytesIO(b"".join(archive.splitlines(keepends=True)[:-1])))


def test_sessions_that_are_their_own_ancestors_are_refused(store: Store, archive: bytes) -> None:
    lines = archive.splitlines(keepends=True)
    sessions = [json.loads(line)["session"] for line in lines if b'"session":' in line]
    ring = [{**sessions[0], "session_id": a, "parent": b} for a, b in (("a", "b"), ("b", "a"))]
    data = b"".join(
        [lines[0], *(json.dumps({"session": one}).encode() + b"\n" for one in ring), lines[-1]]
    )
    with pytest.raises(InvalidArgument, match="line 3"):
        store.import_(io.BytesIO(data))
    assert store.session("a").list() == []


def test_a_source_that_fails_leaves_a_sound_store(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            if self.tell() > len(archive) // 2:
                raise ConnectionResetError("the source failed")
            return super().readline(size)

    store = backend.open(clock=clock)
    with pytest.raises(ConnectionResetError):
        store.import_(Broken(archive))
    assert store.verify().problems == []
    store.import_(io.BytesIO(archive))
    assert exported(store) == archive


Harm = Callable[[list[Any]], int]
"""Damages the lines of an export; returns the number of the line that is wrong."""


def change(sort: str, edit: Callable[[Any], Any]) -> Harm:
    def apply(lines: list[Any]) -> int:
        number, line = next((n, line) for n, line in enumerate(lines, 1) if sort in line)
        line[sort] = edit(line[sort])
        return number

    return apply


def setting(sort: str, /, **fields: Any) -> Harm:
    return change(sort, lambda old: old | fields)


def dropping(sort: str, field: str) -> Harm:
    return change(sort, lambda old: {name: value for name, value in old.items() if name != field})


def inserting(line: Callable[[list[Any]], Any]) -> Harm:
    def apply(lines: list[Any]) -> int:
        lines.insert(1, line(lines))
        return 2

    return apply


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, Harm] = {
    "an unknown line": inserting(lambda lines: {"surprise": 1}),
    "no object": inserting(lambda lines: []),
    "a ref before a session": inserting(lambda lines: next(one for one in lines if "ref" in one)),
    "session: no object": change("session", lambda old: "main"),
    "session: no id": dropping("session", "session_id"),
    "session: id of another type": setting("session", session_id=5),
    "session: empty id": setting("session", session_id=""),
    "session: lone surrogate": setting("session", session_id="\ud800"),
    "session: parent of another type": setting("session", parent=["x"]),
    "session: ttl is text": setting("session", ttl="long"),
    "session: ttl is nan": setting("session", ttl=NAN),
    "session: ttl is negative": setting("session", ttl=-5),
    "session: quota is text": setting("session", quota="much"),
    "session: quota is huge": setting("session", quota=2**70),
    "session: created is nothing": setting("session", created=None),
    "session: created is nan": setting("session", created=NAN),
    "session: used is infinite": setting("session", used=INF),
    "blob: no object": change("blob", lambda old: 5),
    "blob: no digest": dropping("blob", "digest"),
    "blob: another digest": setting("blob", digest="0" * 64),
    "blob: a path as digest": setting("blob", digest="../../../etc/passwd"),
    "blob: size is text": setting("blob", size="much"),
    "blob: size is negative": setting("blob", size=-1),
    "blob: too large a size": setting("blob", size=10**12),
    "blob: too small a size": setting("blob", size=1),
    "data: not base64": change("data", lambda old: "%%%"),
    "data: of another type": change("data", lambda old: 5),
    "data: nothing": change("data", lambda old: ""),
    "data: other bytes": change(
        "data", lambda old: base64.b64encode(bytes(len(base64.b64decode(old)))).decode()
    ),
    "ref: no object": change("ref", lambda old: "x"),
    "ref: another artifact": setting("ref", artifact_id="0" * 64),
    "ref: a short id": setting("ref", artifact_id="0" * 12),
    "ref: an id of another type": setting("ref", artifact_id=7),
    "ref: no codec": dropping("ref", "codec"),
    "ref: unknown codec": setting("ref", codec="pickle"),
    "ref: unknown kind": setting("ref", kind="../x"),
    "ref: kind is nothing": setting("ref", kind=None),
    "ref: unknown producer": setting("ref", producer="me"),
    "ref: producer is nothing": setting("ref", producer=None),
    "ref: media type is nothing": setting("ref", media_type=None),
    "ref: name of another type": setting("ref", name=7),
    "ref: empty name": setting("ref", name=""),
    "ref: tool of another type": setting("ref", tool={}),
    "ref: call id of another type": setting("ref", call_id=[]),
    "ref: summary is nothing": setting("ref", summary=None),
    "ref: summary of another type": setting("ref", summary=[]),
    "ref: summary is too long": setting("ref", summary="x" * 501),
    "ref: summary with a lone surrogate": setting("ref", summary="\ud800"),
    "ref: parents of another type": setting("ref", parents=7),
    "ref: parents hold numbers": setting("ref", parents=[7]),
    "ref: granted by a number": setting("ref", granted_by=7),
    "ref: created is text": setting("ref", created="today"),
    "ref: created is nan": setting("ref", created=NAN),
    "ref: created is infinite": setting("ref", created=INF),
    "ref: created is beyond every calendar": setting("ref", created=1e300),
    "ref: expires is nan": setting("ref", expires=NAN),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_line_is_named_in_the_error_and_harms_nothing(
    backend: Backend, archive: bytes, wrong: str
) -> None:
    lines = [json.loads(line) for line in archive.splitlines()]
    number = WRONG[wrong](lines)
    store = backend.open()
    session = store.session("mine")
    mine = session.put("mine")
    with pytest.raises(InvalidArgument) as refused:
        store.import_(io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines)))
    named = int(refused.value.message.split("line ")[1].split()[0])
    assert number <= named <= number + 4, refused.value.message
    assert session.get(mine) == "mine"
    assert session.get(session.put("after")) == "after"
    assert [
        ref.to_record()
        for info in store.sessions()
        for ref in store.session(info.session_id).list()
    ]
    assert store.verify().problems == []


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{}\n", b"[]\n", b"not json\n", b"\xff\xfe\n", b'{"session":{}}\n']
)
def test_input_that_is_not_an_export_is_rejected(store: Store, data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        store.import_(io.BytesIO(data))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_export_of_another_format_is_refused(store: Store, version: Any) -> None:
    with pytest.raises(InvalidArgument):
        store.import_(io.BytesIO(json.dumps({"coatcheck": version}).encode()))


def test_a_line_without_an_end_is_refused(store: Store) -> None:
    with pytest.raises(InvalidArgument):
        store.import_(io.BytesIO(b'{"coatcheck":1}\n{"session":"' + b"x" * 5_000_000))


def test_deep_nesting_is_refused(store: Store) -> None:
    with pytest.raises(InvalidArgument):
        store.import_(io.BytesIO(b'{"coatcheck":1}\n{"session":' + b"[" * 1_000_000))


def test_importing_heals_damaged_artifacts(folder: Backend, archive: bytes, clock: Clock) -> None:
    store = imported(folder, archive, clock=clock)
    main = store.session("main")
    ref = main.ref("large")
    assert ref is not None
    Path(ref.content_uri.removeprefix("file://")).write_bytes(b"rot")
    store.verify(repair=True)
    assert main.get("large") is None
    store.import_(io.BytesIO(archive))
    assert main.get("large") == "x" * LARGE
    store.collect()
    assert store.verify().problems == []


def test_lines_of_an_export_have_a_bounded_length(store: Store) -> None:
    store.session("s").put(b"\xff" * 3_000_000)
    assert max(map(len, exported(store).splitlines())) < 300_000


def test_tombstones_are_not_exported(store: Store, clock: Clock) -> None:
    store.session("s", ttl=10).put("gone", name="secret name")
    clock.advance(10)
    store.collect(grace=0)
    assert b"secret name" not in exported(store)


def forged(archive: bytes, *lines: dict[str, Any]) -> io.BytesIO:
    """An archive with the header and the end of a real one, and these lines between them."""
    first, *_, last = archive.splitlines(keepends=True)
    return io.BytesIO(
        b"".join([first, *(json.dumps(line).encode() + b"\n" for line in lines), last])
    )


def session_line(archive: bytes, **fields: Any) -> dict[str, Any]:
    line = next(json.loads(line) for line in archive.splitlines() if b'"session":' in line)
    return {"session": line["session"] | {"parent": None} | fields}


def ref_line(archive: bytes, **fields: Any) -> dict[str, Any]:
    line = next(json.loads(line) for line in archive.splitlines() if b'"ref":' in line)
    return {"ref": line["ref"] | {"parents": [], "granted_by": None} | fields}


def blob_lines(data: bytes) -> list[dict[str, Any]]:
    digest = hashlib.sha256(data).hexdigest()
    return [
        {"blob": {"digest": digest, "size": len(data)}},
        {"data": base64.b64encode(data).decode()},
    ]


@pytest.mark.parametrize("size", [LARGE, 10])
def test_an_archive_without_the_bytes_cannot_read_the_content_of_another_session(
    backend: Backend, archive: bytes, size: int
) -> None:
    store = backend.open()
    secret = store.session("victim").put("s" * size)
    errors = []
    for digest in (secret.artifact_id, "0" * 64):
        session = session_line(archive, session_id="thief")
        with pytest.raises(InvalidArgument) as refused:
            store.import_(forged(archive, session, ref_line(archive, artifact_id=digest)))
        errors.append(refused.value.message.replace(digest, "…"))
        assert store.session("thief").list() == []
        store.session("thief").end()
    assert errors[0] == errors[1], "the error reveals that another session has this content"


def test_an_archive_does_not_write_to_an_existing_session(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    store = backend.open(clock=clock)
    main = store.session("main")
    main.put("mine", name="n")
    with pytest.raises(InvalidArgument):
        store.import_(io.BytesIO(archive))
    assert main.get("n") == "mine"
    assert len(main.list()) == 1
    store.import_(io.BytesIO(archive), sessions={"main": "main again"})
    assert main.get("n") == "mine"
    assert store.session("main again").get("n") == {"rows": [1, 2]}
    assert store.session("child ☃").parent == "main again"


def test_a_session_of_an_archive_cannot_read_a_parent_outside_the_archive(
    backend: Backend, archive: bytes
) -> None:
    store = backend.open()
    store.session("victim").put("secret", name="plan")
    lines = (session_line(archive, session_id="thief", parent="victim", ttl=None),)
    store.import_(forged(archive, *lines))
    assert store.session("thief").get("plan") is None
    store.session("later").put("secret", name="plan")
    store.import_(
        forged(archive, session_line(archive, session_id="thief 2", parent="later", ttl=None))
    )
    assert store.session("thief 2").parent is None
    named = {"victim": "victim"}
    store.import_(
        forged(archive, session_line(archive, session_id="heir", parent="victim", ttl=None)),
        sessions=named,
    )
    assert store.session("heir").get("plan") == "secret"


def test_an_archive_cannot_write_the_hot_state_of_a_claimed_session(
    backend: Backend, archive: bytes
) -> None:
    store = backend.open()
    token = store.session("main").claim("dispatcher")
    store.session("main").record("hot", b"{}", token=token)
    record = {"record": {"series": "hot", "at": 2e9, "body": base64.b64encode(b"forged").decode()}}
    with pytest.raises(Fenced):
        store.import_(forged(archive, session_line(archive), record), merge=True)
    assert [one.body for one in store.session("main").records("hot")] == [b"{}"]
    store.session("main").record("hot", b"{}", token=token)


@pytest.mark.parametrize("size", [LARGE, 500])
def test_an_import_respects_the_quota_and_the_size_limit(
    backend: Backend, archive: bytes, size: int
) -> None:
    lines = [session_line(archive), *blob_lines(b"x" * size)]
    ref = ref_line(archive, artifact_id=hashlib.sha256(b"x" * size).hexdigest(), name=None)
    with backend.open_new(quota_bytes=size - 1) as store:
        with pytest.raises(QuotaExceeded):
            store.import_(forged(archive, *lines, ref))
        assert store.stats().stored_bytes == 0
    with backend.open_new(max_artifact_bytes=size - 1) as store:
        with pytest.raises(TooLarge):
            store.import_(forged(archive, *lines, ref))
        assert store.stats().stored_bytes == 0
    with backend.open_new() as store:
        with pytest.raises(QuotaExceeded):
            store.import_(forged(archive, session_line(archive, quota=size - 1), *lines[1:], ref))
        store.session("small", quota_bytes=size - 1)
        with pytest.raises(QuotaExceeded):
            store.import_(forged(archive, *lines, ref), sessions={"main": "small"})


def test_future_times_of_an_imported_session_are_set_to_now(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    store = backend.open(clock=clock)
    store.import_(forged(archive, session_line(archive, created=4e9, used=4e9)))
    (info,) = store.sessions()
    assert (info.created, info.used) == (clock.now, clock.now)


def test_a_second_archive_does_not_write_to_an_imported_session(
    backend: Backend, archive: bytes, clock: Clock
) -> None:
    store = backend.open(clock=clock)
    alice = session_line(archive, session_id="alice", created=555.0, ttl=None)
    ref = ref_line(
        archive, artifact_id=hashlib.sha256(b"one").hexdigest(), name="doc", codec="bytes"
    )
    store.import_(forged(archive, alice, *blob_lines(b"one"), ref))
    session = store.session("alice", ttl=None)
    private = session.put("private", name="priv")
    evil = ref_line(
        archive, artifact_id=hashlib.sha256(b"evil").hexdigest(), name="priv", created=2e9
    )
    record = {"record": {"series": "notes", "at": 2e9, "body": base64.b64encode(b"evil").decode()}}
    for lines in (
        [*blob_lines(b"evil"), evil],
        [record],
        [*blob_lines(b"one"), ref, *blob_lines(b"evil"), evil],
    ):
        with pytest.raises(InvalidArgument, match="exists already"):
            store.import_(forged(archive, alice, *lines))
    assert session.get("priv") == "private"
    assert session.records("notes") == []

    store.import_(
        forged(
            archive, alice, session_line(archive, session_id="mallory", parent="alice", ttl=None)
        )
    )
    assert store.session("mallory").get(private) is None
    boss = session_line(archive, session_id="boss", created=5.0, ttl=None)
    child = session_line(archive, session_id="alice", created=555.0, ttl=None, parent="boss")
    store.import_(forged(archive, boss, child))
    assert store.session("alice").parent is None
    lent = ref_line(
        archive, artifact_id=hashlib.sha256(b"evil").hexdigest(), granted_by="alice", codec="bytes"
    )
    transcript = session_line(archive, session_id="transcript:evil", ttl=None)
    store.import_(forged(archive, alice, transcript, *blob_lines(b"evil"), lent))
    assert session.get("art:" + lent["ref"]["artifact_id"]) is None

    assert store.import_(forged(archive, alice, *blob_lines(b"one"), ref)) == 0
    assert store.import_(forged(archive, alice, *blob_lines(b"evil"), evil), merge=True) == 1


def test_another_archive_does_not_continue_an_interrupted_import(
    backend: Backend, archive: bytes
) -> None:
    store = backend.open()
    alice = session_line(archive, session_id="alice", ttl=None)
    with pytest.raises(InvalidArgument, match="bytes of a blob are missing"):
        store.import_(forged(archive, alice, {"blob": {"digest": "0" * 64, "size": 3}}))
    store.session("alice").put("private", name="priv")
    evil = ref_line(
        archive, artifact_id=hashlib.sha256(b"evil").hexdigest(), name="priv", created=2e9
    )
    with pytest.raises(InvalidArgument, match="exists already"):
        store.import_(forged(archive, alice, *blob_lines(b"evil"), evil))
    assert store.session("alice").get("priv") == "private"


@pytest.mark.parametrize(
    "size", ["Infinity", "-Infinity", "NaN", "-1", "1e400", "1e300", "null", '"x"', "[]"]
)
def test_a_blob_with_an_invalid_size_is_rejected(store: Store, archive: bytes, size: str) -> None:
    lines = forged(archive, session_line(archive), {"blob": {"digest": "x", "size": 0}}).getvalue()
    with pytest.raises(InvalidArgument, match="line 3"):
        store.import_(io.BytesIO(lines.replace(b'"size": 0', f'"size": {size}'.encode())))


@pytest.mark.parametrize(
    "number", ["Infinity", "-Infinity", "NaN", "-1", "1e400", "1" * 400, "1" * 5000, "[]", '"x"']
)
def test_numbers_out_of_range_are_rejected_with_their_line(
    store: Store, archive: bytes, number: str
) -> None:
    record = {"record": {"series": "s", "at": 1.5, "body": ""}}
    for field, value in (("created", 1.5), ("used", 1.5), ("quota", 15), ("at", 1.5)):
        lines = forged(
            archive,
            session_line(archive, session_id=field, **({field: value} if field != "at" else {})),
            record,
        )
        text = lines.getvalue().decode().replace(f'"{field}": {value}', f'"{field}": {number}')
        with pytest.raises(InvalidArgument, match=r"line [23]"):
            store.import_(io.BytesIO(text.encode()))
