"""What a session stores, sees and returns: values, names, pointers, provenance, limits, child
sessions and grants."""

import dataclasses
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given

import coatcheck
from coatcheck import Store, errors
from coatcheck.errors import (
    AmbiguousPointer,
    CoatcheckError,
    InvalidArgument,
    InvalidPointer,
    NotFound,
    QuotaExceeded,
    StoreClosed,
    TooLarge,
    UnsupportedValue,
)
from tests.backends import LARGE, START, TWIN_PREFIX, TWINS, Backend, Clock, run_python
from tests.test_values import ANY_TEXT, JSON_VALUES, same


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Model(pydantic.BaseModel):
    name: str
    tags: list[str] = []


VALUES: list[Any] = [
    "ünï☃😀 \ud800\r\n" * 50_000,
    "",
    "text",
    "ünï☃😀 \ud800",
    "line\r\nline\n",
    b"",
    b"\x00\xff bytes",
    None,
    True,
    0,
    -1.5,
    10**30,
    [],
    {},
    [1, [2, {"three": None}]],
    {"b": 1, "a": {"ü": [1.0, True]}},
    "x" * LARGE,
    "ü" * LARGE,
    bytes(range(256)) * 2000,
    list(range(100_000)),
    {"rows": [{"n": i, "text": f"row {i}"} for i in range(20_000)]},
]


def shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:12].encode('ascii', 'backslashreplace').decode()}"


# Values


@pytest.mark.on_fleet
@pytest.mark.parametrize("value", VALUES, ids=shown)
def test_a_value_comes_back_exactly(store: Store, value: Any) -> None:
    session = store.session("s")
    ref = session.put(value)
    for target in (ref, ref.pointer, ref.artifact_id):
        assert same(session.get(target), value)


@pytest.mark.on_fleet
@pytest.mark.parametrize("value", VALUES, ids=shown)
def test_a_value_comes_back_exactly_after_reopening(lasting: Backend, value: Any) -> None:
    with lasting.open() as store:
        ref = store.session("s").put(value, name="n")
    again = lasting.open().session("s")
    for target in (ref, ref.pointer, ref.artifact_id, "n"):
        assert same(again.get(target), value)


def test_any_value_at_all_comes_back_exactly(backend: Backend) -> None:
    @backend.examples()
    @given(value=JSON_VALUES | ANY_TEXT)
    def check(value: Any) -> None:
        session = backend.new_session()
        assert same(session.get(session.put(value)), value)

    check()


def test_models_and_dataclasses_come_back_as_their_json(store: Store) -> None:
    session = store.session("s")
    assert session.get(session.put(Point(1, 2))) == {"x": 1, "y": 2}
    assert session.get(session.put(Model(name="m", tags=["t"]))) == {"name": "m", "tags": ["t"]}


def test_an_unsupported_value_is_refused_and_nothing_is_stored(store: Store) -> None:
    session = store.session("s")
    for value in ({1, 2}, object(), [float("nan")], {1: 2}, (1,), io.StringIO("text")):
        with pytest.raises(UnsupportedValue):
            session.put(value)
    assert session.list() == []
    assert store.stats().artifacts == 0


def test_the_id_is_the_digest_of_the_bytes(store: Store) -> None:
    session = store.session("s")
    assert session.put("text").artifact_id == hashlib.sha256(b"text").hexdigest()
    assert session.put({"a": 1}).artifact_id == hashlib.sha256(b'{"a":1}').hexdigest()


@pytest.mark.parametrize("filler", ["", "x" * LARGE], ids=["small", "large"])
def test_the_same_bytes_as_text_json_and_bytes_are_one_blob_and_keep_their_types(
    store: Store, filler: str
) -> None:
    session = store.session("s")
    value = {"a": [1, 2], "filler": filler}
    text = json.dumps(value, separators=(",", ":"))
    refs = {
        "as json": session.put(value, name="as json"),
        "as text": session.put(text, name="as text"),
        "as bytes": session.put(text.encode(), name="as bytes"),
    }
    assert len({ref.artifact_id for ref in refs.values()}) == 1
    assert store.stats().artifacts == 1
    assert store.stats().stored_bytes == len(text)
    for name, expected in (("as json", value), ("as text", text), ("as bytes", text.encode())):
        assert same(session.get(name), expected)
        assert same(session.get(refs[name]), expected)


def test_putting_the_same_value_again_adds_nothing(store: Store) -> None:
    session = store.session("s")
    for value in ("small", "x" * LARGE):
        first = session.put(value, name="n")
        before = store.stats()
        assert session.put(value, name="n") == first
        assert store.stats() == before


def test_bytes_like_objects_come_back_as_bytes(store: Store) -> None:
    session = store.session("s")
    assert session.get(session.put(bytearray(b"abc"))) == b"abc"
    assert session.get(session.put(memoryview(b"abcdef")[::2])) == b"ace"


# Paths and streams


@pytest.mark.parametrize("size", [0, 10, LARGE, 3_000_000])
def test_a_path_is_stored_under_its_own_name(store: Store, tmp_path: Path, size: int) -> None:
    file = tmp_path / "notes.md"
    file.write_bytes(b"#" * size)
    session = store.session("s")
    ref = session.put(file)
    assert (ref.name, ref.media_type, ref.size_bytes) == ("notes.md", "text/markdown", size)
    assert session.get("notes.md") == file.read_bytes()
    assert session.put(file, name="other").name == "other"


def test_a_path_that_cannot_be_read_is_a_clear_error(store: Store, tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidArgument):
            store.session("s").put(path)


@pytest.mark.parametrize("size", [0, 10, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_a_binary_stream_is_stored_whole(store: Store, size: int) -> None:
    data = bytes(i % 251 for i in range(1000)) * (size // 1000) + bytes(size % 1000)
    session = store.session("s")
    ref = session.put(io.BytesIO(data), name="stream")
    assert ref.artifact_id == hashlib.sha256(data).hexdigest()
    assert session.get(ref) == data


def test_a_stream_with_short_reads_is_stored_whole(store: Store) -> None:
    class Trickle(io.RawIOBase):
        left = 1_500_000

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), 7_777, self.left)
            buffer[:size] = b"t" * size
            self.left -= size
            return size

    session = store.session("s")
    assert session.get(session.put(Trickle())) == b"t" * 1_500_000


def test_a_stream_without_data_yet_is_not_mistaken_for_a_finished_one(store: Store) -> None:
    class NotReady(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> None:
            return None

    with pytest.raises(InvalidArgument):
        store.session("s").put(NotReady())


def test_a_stream_of_text_is_a_clear_error(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("text")
    with file.open(encoding="utf-8") as stream, pytest.raises(UnsupportedValue) as refused:
        store.session("s").put(stream)
    assert "binary" in refused.value.hint


def test_a_stream_that_fails_leaves_nothing(store: Store) -> None:
    class Broken(io.RawIOBase):
        left = 3

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            if not self.left:
                raise ConnectionResetError("the source failed")
            return bytes(size)

    with pytest.raises(ConnectionResetError):
        store.session("s").put(Broken())
    assert store.stats().artifacts == 0
    assert store.verify().problems == []


def test_the_same_stream_again_is_stored_once(store: Store) -> None:
    session, data = store.session("s"), b"again" * LARGE
    first = session.put(io.BytesIO(data))
    assert session.put(io.BytesIO(data)) == first
    assert session.put(data) == first
    assert (store.stats().artifacts, store.stats().refs) == (1, 1)


@pytest.mark.parametrize("size", [0, 100, LARGE, 1_000_001])
def test_an_open_artifact_is_a_seekable_binary_stream(store: Store, size: int) -> None:
    data = hashlib.shake_128(b"seed").digest(size)
    session = store.session("s")
    ref = session.put(data)
    with session.open(ref) as stream:
        assert stream.read() == data
        for offset in (0, 1, size // 2, max(0, size - 3), size, size + 10):
            assert stream.seek(offset) == offset
            assert stream.read(1000) == data[offset : offset + 1000]
        stream.seek(-min(5, size), io.SEEK_END)
        assert stream.read() == (data[-5:] if size else b"")
    with session.open(ref) as stream:
        assert b"".join(iter(lambda: stream.read(70_000), b"")) == data


def test_opening_a_missing_artifact_is_an_error(store: Store) -> None:
    session = store.session("s")
    for target in ("a name", "art:" + "0" * 12, "0" * 64):
        with pytest.raises(NotFound):
            session.open(target)


def test_a_pointer_with_a_fragment_opens_the_json_of_that_part(store: Store) -> None:
    session = store.session("s")
    ref = session.put({"a": {"ü": [1, None]}})
    with session.open(ref.pointer + "#/a") as stream:
        assert stream.read() == '{"ü":[1,null]}'.encode()
    with pytest.raises(InvalidPointer):
        session.open(ref.pointer + "#/b")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_artifact(lasting: Backend) -> None:
    grown = run_python(
        """
import io, resource, sys
import coatcheck

class Generated(io.RawIOBase):
    left = 100_000_000
    def readable(self):
        return True
    def readinto(self, buffer):
        size = min(len(buffer), self.left)
        buffer[:size] = bytes([self.left % 251]) * size
        self.left -= size
        return size

with coatcheck.open(sys.argv[1], durability="process") as store:
    session = store.session("s")
    session.get(session.put("x" * 2_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ref = session.put(Generated())
    size = 0
    with session.open(ref) as stream:
        while piece := stream.read(1 << 20):
            size += len(piece)
    assert size == ref.size_bytes == 100_000_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""",
        lasting.url,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert int(grown) // (1 if sys.platform != "darwin" else 1024) < 64 * 1024


# Names


def test_the_newest_put_under_a_name_wins_and_the_others_stay_in_its_history(
    store: Store, clock: Clock
) -> None:
    session = store.session("s")
    for value in ("one", "two", "one", "three"):
        session.put(value, name="n")
        clock.advance(1)
    assert session.get("n") == "three"
    assert [session.get(ref) for ref in session.list(name="n")] == ["three", "one", "two", "one"]
    assert [ref.created for ref in session.list(name="n")] == [START + i for i in (3, 2, 1, 0)]


def test_the_history_of_a_name_includes_the_puts_of_the_parent(store: Store) -> None:
    parent, child = store.session("parent"), store.session("child", parent="parent")
    parent.put("same", name="n")
    parent.put("other", name="n")
    child.put("same", name="n")
    assert [child.get(ref) for ref in child.list(name="n")] == ["same", "other", "same"]
    assert len(child.list()) == 2


def test_forgetting_the_newest_artifact_gives_the_name_back_to_the_previous_one(
    store: Store,
) -> None:
    session = store.session("s")
    session.put("one", name="n")
    two = session.put("two", name="n")
    session.forget(two)
    assert session.get("n") == "one"


def test_one_artifact_may_have_many_names(store: Store) -> None:
    session = store.session("s")
    refs = [session.put("same", name=name) for name in ("a", "b", "c")]
    assert [session.get(name) for name in "abc"] == ["same"] * 3
    assert len({ref.artifact_id for ref in refs}) == 1


def test_a_put_without_a_name_does_not_hide_the_name_that_an_artifact_has(store: Store) -> None:
    session = store.session("s")
    session.put("x", name="a")
    session.put("x", name="b", tool="one")
    session.put("y")
    session.put("x", tool="two")
    assert [(ref.name, ref.tool) for ref in session.list()] == [("b", "two"), (None, None)]
    assert [ref.name for ref in session.list(limit=1)] == ["b"]
    session.forget("b")
    assert [ref.name for ref in session.list()] == ["a", None]
    assert [ref.name for ref in store.session("child", parent="s").list()] == ["a", None]


def test_a_list_contains_each_artifact_once_under_its_newest_name(store: Store) -> None:
    session = store.session("s")
    for name in ("a", None, "b"):
        session.put("same", name=name)
    session.put("other", name="o")
    assert [ref.name for ref in session.list()] == ["o", "b"]
    assert [ref.name for ref in session.list(limit=2)] == ["o", "b"]
    assert [ref.name for ref in session.list(name="a")] == ["a"]


def test_forgetting_a_name_leaves_the_artifact_under_its_other_names(store: Store) -> None:
    session, text = store.session("s"), "The turbine overheated.\n" * 10_000
    refs = [session.put(text, name=name) for name in ("a", "b")]
    assert session.forget("a")
    assert session.get("a") is None
    assert session.get("b") == session.get(refs[0].pointer) == text
    assert session.search("turbine")
    assert not session.forget("a")
    assert session.forget("b")
    assert session.get(refs[0].pointer) is None
    assert session.search("turbine") == []
    assert store.stats().stored_bytes == 0


def test_forgetting_a_pointer_drops_the_artifact_under_all_of_its_names(store: Store) -> None:
    session = store.session("s")
    ref = session.put("same", name="a")
    session.put("same", name="b")
    assert session.forget(ref.pointer)
    assert session.get("a") is None
    assert session.get("b") is None


def test_forgetting_one_name_keeps_the_coverage_and_the_quota_correct(store: Store) -> None:
    session = store.session("s", quota_bytes=10_000)
    ref = session.put("x" * 6_000, name="a")
    session.put("x" * 6_000, name="b")
    session.read(ref, chars="0:100")
    session.forget("a")
    assert session.coverage(ref).ranges == ((0, 100),)
    session.put("y" * 4_000)
    with pytest.raises(QuotaExceeded):
        session.put("z" * 1_000)
    session.forget("b")
    session.put("z" * 1_000)


def test_a_name_that_is_a_pointer_is_refused_at_put(store: Store) -> None:
    session = store.session("s")
    for name in ("art:0123456789ab", "art:0123456789ab#/rows/0", "art:" + "0" * 64):
        with pytest.raises(InvalidArgument):
            session.put("value", name=name)
    session.put("value", name="art:notes")
    assert session.get("art:notes") == "value"


def test_a_file_whose_name_is_a_pointer_is_put_without_a_name(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "art:0123456789ab"
    file.write_text("value")
    ref = store.session("s").put(file)
    assert ref.name is None


def test_a_name_is_visible_only_to_its_session(store: Store) -> None:
    store.session("one").put("x", name="n")
    assert store.session("two").get("n") is None


def test_a_name_that_looks_like_an_id_takes_precedence_over_the_id(store: Store) -> None:
    session = store.session("s")
    ref = session.put("by id")
    session.put("by name", name=ref.artifact_id)
    assert session.get(ref.artifact_id) == "by name"
    assert session.get(ref.pointer) == "by id"


def test_a_name_never_takes_the_place_of_a_pointer(store: Store) -> None:
    session = store.session("s")
    ref = session.put("by pointer")
    with pytest.raises(InvalidArgument):
        session.put("by name", name=ref.pointer)
    assert session.get(ref.pointer) == "by pointer"


def test_a_name_that_only_begins_like_a_pointer_is_a_name(store: Store) -> None:
    session = store.session("s")
    session.put("the exhibition", name="art: a history")
    assert session.get("art: a history") == "the exhibition"


@pytest.mark.on_fleet
@pytest.mark.parametrize("name", ["", "x" * 65_537, "lone \ud800", 7, b"name"])
def test_an_invalid_name_is_refused(store: Store, name: Any) -> None:
    with pytest.raises(InvalidArgument):
        store.session("s").put("x", name=name)
    with pytest.raises(InvalidArgument):
        store.session("s").put("x", tool=name)
    with pytest.raises(InvalidArgument):
        store.session(name)


# Pointers


def test_a_pointer_may_be_any_prefix_of_12_characters_or_more(store: Store) -> None:
    session = store.session("s")
    ref = session.put("x")
    assert ref.pointer == "art:" + ref.artifact_id[:12]
    for length in (12, 13, 40, 64):
        assert session.get("art:" + ref.artifact_id[:length]) == "x"
        assert session.get(ref.artifact_id[:length]) == "x"
        found = session.ref(ref.artifact_id[:length])
        assert found is not None
        assert found.pointer == ref.pointer


@pytest.mark.on_fleet
@pytest.mark.parametrize(
    "pointer", ["art:", "art:12", "art:XYZ", "art:3f9b2a1c8e4d#rows", "art:" + "0" * 65]
)
def test_a_malformed_pointer_is_an_error(store: Store, pointer: str) -> None:
    with pytest.raises(InvalidPointer):
        store.session("s").get(pointer)


def test_looking_up_a_value_of_another_type_is_an_error(store: Store) -> None:
    for target in (None, 12, b"name"):
        with pytest.raises(InvalidArgument):
            store.session("s").get(target)  # type: ignore[arg-type]


def test_a_prefix_that_matches_two_artifacts_is_an_error_that_lists_them(store: Store) -> None:
    session = store.session("s")
    refs = [session.put(text) for text in TWINS]
    for call in (session.get, session.ref, session.open, session.pin, session.forget):
        with pytest.raises(AmbiguousPointer) as ambiguous:
            call("art:" + TWIN_PREFIX)
        candidates = ambiguous.value.candidates
        assert len(set(candidates)) == 2
        assert {session.get(candidate) for candidate in candidates} == set(TWINS)
    assert [session.get(ref) for ref in refs] == list(TWINS)


def test_pointers_are_longer_if_12_characters_are_not_unique(store: Store) -> None:
    session = store.session("s")
    session.put(TWINS[0])
    pointers = [session.put(TWINS[1]).pointer]
    pointers += [ref.pointer for ref in session.list()]
    for text in TWINS:
        named = session.put(text, name=text)
        found = session.ref(named)
        assert found is not None
        pointers += [named.pointer, found.pointer, session.pin(named).pointer]
    for pointer in pointers:
        assert len(pointer) > len("art:") + 12
        assert session.get(pointer) in TWINS


def test_a_granted_pointer_is_made_unique_in_the_receiving_session(store: Store) -> None:
    giver, receiver = store.session("giver"), store.session("receiver")
    receiver.put(TWINS[0])
    granted = giver.grant(giver.put(TWINS[1]), to="receiver")
    assert receiver.get(granted.pointer) == TWINS[1]


def test_a_pointer_that_matches_artifacts_of_a_session_and_its_parent_is_ambiguous(
    store: Store,
) -> None:
    parent, child = store.session("parent"), store.session("child", parent="parent")
    theirs = parent.put(TWINS[0])
    assert child.get(theirs.pointer) == TWINS[0]
    own = child.put(TWINS[1])
    assert child.get(own.pointer) == TWINS[1]
    with pytest.raises(AmbiguousPointer):
        child.get("art:" + TWIN_PREFIX)


def test_a_fragment_names_a_part_of_a_json_value(store: Store) -> None:
    session = store.session("s")
    ref = session.put({"rows": [{"a/b": 1}, "x"]})
    for fragment, part in (
        ("", session.get(ref)),
        ("/rows/0", {"a/b": 1}),
        ("/rows/0/a~1b", 1),
        ("/rows/1", "x"),
    ):
        assert session.get(f"{ref.pointer}#{fragment}") == part


def test_getting_a_fragment_that_leads_nowhere_returns_none(store: Store) -> None:
    session = store.session("s")
    ref = session.put({"rows": []})
    assert session.get(ref.pointer + "#/rows/0") is None
    assert session.get(ref.pointer + "#/nope") is None


def test_a_fragment_of_json_that_was_put_as_text_works_too(store: Store) -> None:
    session = store.session("s")
    assert session.get(session.put('{"a": [1]}').pointer + "#/a/0") == 1


def test_a_fragment_of_content_that_is_not_json_is_an_error(store: Store) -> None:
    session = store.session("s")
    for value in ("words", b"\xff\x00"):
        with pytest.raises(InvalidPointer):
            session.get(session.put(value).pointer + "#/a")


# The fields of a ref


def test_a_ref_records_its_provenance(store: Store) -> None:
    session = store.session("s")
    parent = session.put("the source")
    ref = session.put(
        "2026-01-01 10:00:00 INFO x",
        name="n",
        tool="t",
        call_id="c1",
        producer="planner",
        parents=[parent, parent.pointer],
    )
    assert (ref.session_id, ref.name, ref.tool, ref.call_id, ref.producer) == (
        "s",
        "n",
        "t",
        "c1",
        "planner",
    )
    assert ref.parents[0] == parent.artifact_id
    assert all(parent.artifact_id.startswith(one) for one in ref.parents)
    assert (ref.size_bytes, ref.media_type, ref.kind, ref.created) == (
        26,
        "text/plain",
        "log",
        START,
    )
    assert session.ref(ref) == ref
    assert session.ref("n") == ref


def test_the_default_producer_depends_on_the_tool(store: Store) -> None:
    session = store.session("s")
    assert session.put("a", tool="t").producer == "executor"
    assert session.put("b").producer == "system"


@pytest.mark.on_fleet
@pytest.mark.parametrize("wrong", [{"kind": "stuff"}, {"producer": "me"}, {"summary": "x" * 501}, {"ttl": -1},
                                   {"ttl": float("nan")}, {"parents": ["not a pointer"]}])  # fmt: skip
def test_invalid_provenance_is_refused(store: Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        store.session("s").put("x", **wrong)
    assert store.stats().refs == 0


def test_given_values_override_detected_ones(store: Store) -> None:
    ref = store.session("s").put("{}", kind="plan", media_type="text/x-mine", summary="mine")
    assert (ref.kind, ref.media_type, ref.summary) == ("plan", "text/x-mine", "mine")


@pytest.mark.on_fleet
@pytest.mark.parametrize(
    ("value", "summary"),
    [
        (["ü" * 500], '["' + "ü" * 198),
        ("short", "short"),
        ("", ""),
        ("one\ntwo\r\nthree\rfour", "one two three four"),
        ("x" * 500, "x" * 200),
        ("☃" * 500, "☃" * 200),
        ("a\n" * 300, "a " * 100),
        (b"bytes of text", "bytes of text"),
        (("😀" * 500).encode(), "😀" * 200),
        ({"a": 1}, '{"a":1}'),
        (b"\x00\x01", "application/octet-stream, 2 bytes"),
    ],
)
def test_the_summary_is_the_first_200_characters_on_one_line(
    store: Store, value: Any, summary: str
) -> None:
    assert store.session("s").put(value).summary == summary


def test_a_summary_may_have_500_characters(store: Store) -> None:
    assert store.session("s").put("x", summary="s" * 500).summary == "s" * 500


def test_a_summary_is_always_text_that_can_be_encoded(store: Store) -> None:
    session = store.session("s")
    session.put("lone \ud800 surrogate").summary.encode()
    session.put("x", summary="lone \ud800").summary.encode()
    assert len(session.list()) == 2


def test_the_record_of_a_ref_is_json(store: Store) -> None:
    ref = store.session("s").put({"a": 1}, tool="t")
    record = ref.to_record()
    assert json.loads(json.dumps(record)) == record
    assert record == {
        "artifact_id": ref.artifact_id,
        "type": "data",
        "content_uri": ref.content_uri,
        "content_hash": "sha256:" + ref.artifact_id,
        "size_bytes": 7,
        "created_at": "2025-06-15T15:06:40Z",
        "producer": "executor",
        "summary": '{"a":1}',
        "mime": "application/json",
    }


def test_the_content_uri_of_a_large_artifact_is_its_file(folder: Backend) -> None:
    session = folder.open().session("s")
    ref = session.put(b"\x01" * LARGE)
    assert ref.content_uri.startswith("file:///")
    assert Path(ref.content_uri.removeprefix("file://")).read_bytes() == b"\x01" * LARGE


def test_the_content_uri_of_a_small_artifact_names_the_database(folder: Backend) -> None:
    ref = folder.open().session("s").put("small")
    assert ref.content_uri == (folder.path / "catalog.sqlite").as_uri() + f"#blob={ref.artifact_id}"


def test_the_content_uri_of_an_artifact_in_memory_has_the_memory_scheme() -> None:
    with coatcheck.open("memory:") as store:
        ref = store.session("s").put("x")
        assert ref.content_uri == f"memory:{ref.artifact_id}"


def test_the_list_is_newest_first_and_can_be_limited(store: Store, clock: Clock) -> None:
    session = store.session("s")
    for i in range(300):
        session.put(f"value {i}", kind="log" if i % 2 else "doc")
    assert [session.get(ref) for ref in session.list(limit=3)] == [
        "value 299",
        "value 298",
        "value 297",
    ]
    assert len(session.list()) == 300
    assert [session.get(ref) for ref in session.list(kind="log", limit=2)] == [
        "value 299",
        "value 297",
    ]
    assert session.list(limit=0) == []
    assert session.list(kind="plan") == []


# Limits


def test_an_artifact_over_the_size_limit_is_refused_and_nothing_is_stored(backend: Backend) -> None:
    store = backend.open(max_artifact_bytes=2_000_000)
    session = store.session("s")
    session.put(b"x" * 2_000_000)
    for value in (b"x" * 2_000_001, io.BytesIO(b"x" * 2_000_001), io.BytesIO(b"x" * 9_000_000)):
        with pytest.raises(TooLarge):
            session.put(value)
    assert store.stats().artifacts == 1
    assert store.verify().problems == []


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_session_cannot_exceed_its_quota(store: Store, size: int) -> None:
    session = store.session("s", quota_bytes=3 * size)
    refs = [session.put(bytes([i]) * size) for i in range(3)]
    with pytest.raises(QuotaExceeded):
        session.put(b"x" * size)
    session.put(b"\x00" * size, name="what it holds already costs nothing")
    store.session("other").put(b"x" * size)
    with pytest.raises(QuotaExceeded):
        store.session("other").grant(store.session("other").put(b"x" * size), to="s")
    session.forget(refs[0])
    session.put(b"x" * size)
    assert store.verify().problems == []


def test_the_quota_of_a_session_is_remembered(store: Store) -> None:
    store.session("s", quota_bytes=10)
    with pytest.raises(QuotaExceeded):
        store.session("s").put("more than ten bytes")
    store.session("s", quota_bytes=None).put("more than ten bytes")


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_store_cannot_exceed_its_quota(backend: Backend, size: int) -> None:
    store = backend.open(quota_bytes=3 * size)
    for i in range(3):
        store.session(str(i)).put(bytes([i]) * size)
    with pytest.raises(QuotaExceeded):
        store.session("s").put(b"x" * size)
    store.session("s").put(b"\x00" * size)
    assert store.verify().problems == []


def test_a_full_store_makes_room_by_collecting_expired_artifacts(
    backend: Backend, clock: Clock
) -> None:
    store = backend.open(quota_bytes=3 * LARGE, clock=clock, ttl=10, grace=5)
    kept = store.session("kept", ttl=None).put(b"k" * LARGE)
    for i in range(2):
        store.session("old").put(bytes([i]) * LARGE)
    clock.advance(12)
    with pytest.raises(QuotaExceeded):
        store.session("new").put(b"x" * LARGE)
    clock.advance(5)
    store.session("new").put(b"x" * LARGE)
    assert store.session("kept").get(kept) == b"k" * LARGE
    assert store.stats().stored_bytes == 2 * LARGE


class Endless(io.RawIOBase):
    """A stream without an end. It counts the bytes that were read."""

    count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self.count += size
        return b"x" * size


def test_a_stream_over_a_quota_is_refused_before_its_end(backend: Backend) -> None:
    for options, quota in (({"quota_bytes": 3 << 20}, None), ({}, 3 << 20)):
        store, stream = backend.open_new(**options), Endless()
        session = store.session("s", quota_bytes=quota)
        with pytest.raises(QuotaExceeded):
            session.put(stream)
        assert stream.count < 8 << 20
        assert session.list() == []


@pytest.mark.on_fleet
@pytest.mark.parametrize("wrong", [{"ttl": -1}, {"ttl": float("nan")}, {"ttl": "soon"}, {"quota_bytes": "much"},
                                   {"quota_bytes": -1}, {"quota_bytes": 2**70}])  # fmt: skip
def test_invalid_limits_of_a_session_are_refused(store: Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        store.session("s", **wrong)
    store.session("s").put("the store continues")


@pytest.mark.on_fleet
@pytest.mark.parametrize("ttl", [0, 0.5, 1e12, float("inf")])
def test_a_ttl_can_have_any_length(store: Store, ttl: float) -> None:
    session = store.session("s", ttl=ttl)
    ref = session.put("x", ttl=ttl)
    assert ref.expires_at is not None
    assert (session.get(ref) is None) == (ttl == 0)


# Child sessions and grants


def test_a_child_reads_what_its_ancestors_can(store: Store) -> None:
    grandparent = store.session("grandparent")
    store.session("parent", parent="grandparent")
    child = store.session("child", parent="parent")
    ref = grandparent.put("inherited", name="n")
    assert child.get(ref) == child.get("n") == child.get(ref.pointer) == "inherited"
    assert child.list() == [ref]
    assert child.parent == "parent"


def test_a_parent_does_not_read_what_its_child_put(store: Store) -> None:
    child = store.session("child", parent="parent")
    ref = child.put("mine", name="n")
    assert store.session("parent").get(ref) is None
    assert store.session("parent").get("n") is None


def test_a_name_in_a_child_takes_precedence_over_the_same_name_in_its_parent(store: Store) -> None:
    parent, child = store.session("parent"), store.session("child", parent="parent")
    parent.put("theirs", name="n")
    assert child.get("n") == "theirs"
    child.put("mine", name="n")
    assert (child.get("n"), parent.get("n")) == ("mine", "theirs")


def test_a_session_remembers_its_parent(backend: Backend) -> None:
    store = backend.open()
    store.session("child", parent="parent")
    assert store.session("child").parent == "parent"


def test_a_session_cannot_be_its_own_ancestor(store: Store) -> None:
    store.session("b", parent="a")
    store.session("c", parent="b")
    for parent in ("a", "b", "c"):
        with pytest.raises(InvalidArgument):
            store.session("a", parent=parent)
    assert store.session("a").parent is None


def test_a_child_cannot_pin_or_forget_an_artifact_of_its_parent(store: Store) -> None:
    parent, child = store.session("parent"), store.session("child", parent="parent")
    ref = parent.put("theirs")
    with pytest.raises(InvalidArgument):
        child.pin(ref)
    assert not child.forget(ref)
    assert parent.get(ref) == "theirs"


@pytest.mark.parametrize("value", ["small", "x" * LARGE], ids=["small", "large"])
def test_a_grant_lets_another_session_see_the_artifact(store: Store, value: str) -> None:
    giver, receiver = store.session("giver"), store.session("receiver")
    ref = giver.put(value, name="n")
    assert receiver.get(ref) is None
    granted = giver.grant(ref, to="receiver")
    assert (granted.session_id, granted.granted_by, granted.artifact_id) == (
        "receiver",
        "giver",
        ref.artifact_id,
    )
    assert receiver.get(ref.pointer) == receiver.get("n") == value
    assert store.stats().artifacts == 1


def test_a_grant_outlives_the_giver(store: Store) -> None:
    giver = store.session("giver")
    ref = giver.put("given")
    giver.grant(ref, to="receiver")
    assert giver.end() == 0
    assert store.session("receiver").get(ref) == "given"
    assert store.session("receiver").end() == 1


def test_a_session_can_grant_only_what_it_sees(store: Store) -> None:
    ref = store.session("owner").put("secret")
    with pytest.raises(NotFound):
        store.session("thief").grant(ref.pointer, to="thief")
    assert store.session("thief").get(ref) is None


@pytest.mark.parametrize("value", ["secret", "x" * LARGE], ids=["small", "large"])
def test_an_id_of_another_session_is_treated_like_one_that_does_not_exist(
    store: Store, value: str
) -> None:
    ref = store.session("owner").put(value, name="n")
    stranger = store.session("stranger")
    stranger.put("something else")
    missing = "f" * 64
    for length in (12, 64):
        theirs, nothing = (
            ("art:" + one[:length], one[:length]) for one in (ref.artifact_id, missing)
        )
        for known, unknown in zip(theirs, nothing, strict=True):
            assert stranger.get(known) is stranger.get(unknown) is None
            assert stranger.ref(known) is stranger.ref(unknown) is None
            assert stranger.forget(known) is stranger.forget(unknown) is False
            for call in (stranger.open, stranger.pin, lambda one: stranger.grant(one, to="x")):
                assert _failure(call, known) == _failure(call, unknown)
    assert stranger.get(ref) is None
    assert stranger.list(name="n") == []


def _failure(call: Any, target: str) -> str:
    with pytest.raises(CoatcheckError) as failed:
        call(target)
    digits = target.removeprefix("art:")
    assert digits in str(failed.value)
    return f"{type(failed.value).__name__} {failed.value.code}: {failed.value}".replace(digits, "…")


# Forgetting and ending


@pytest.mark.parametrize("value", ["small", "x" * LARGE], ids=["small", "large"])
def test_a_forgotten_artifact_is_gone_under_every_name(store: Store, value: str) -> None:
    session = store.session("s")
    ref = session.put(value, name="one")
    session.put(value, name="two")
    assert session.forget(ref)
    for target in (ref, ref.pointer, "one", "two"):
        assert session.get(target) is None
        with pytest.raises(NotFound) as missing:
            session.open(target)
        assert missing.value.code == "not_found"
    assert not session.forget(ref)
    assert store.stats().stored_bytes == 0
    assert session.list() == []


def test_forgetting_an_artifact_leaves_it_in_other_sessions(store: Store) -> None:
    one, two = store.session("one"), store.session("two")
    ref = one.put("x" * LARGE)
    two.put("x" * LARGE)
    assert one.forget(ref)
    assert two.get(ref) == "x" * LARGE


def test_ending_a_session_returns_how_many_artifacts_were_removed(store: Store) -> None:
    session, other = store.session("s"), store.session("other")
    for i in range(3):
        session.put(f"own {i}")
    session.put("x" * LARGE)
    shared = session.put("shared", name="n")
    session.put("shared", name="again")
    other.put("shared")
    assert session.end() == 4
    assert session.list() == []
    assert session.end() == 0
    assert other.get(shared) == "shared"
    assert [info.session_id for info in store.sessions()] == ["other"]


def test_a_session_that_ended_can_be_used_again(store: Store) -> None:
    session = store.session("s")
    session.put("x", name="n")
    session.end()
    assert session.get("n") is None
    session.put("y", name="n")
    assert session.get("n") == store.session("s").get("n") == "y"


def test_ending_a_session_removes_files_that_a_crashed_process_left_staged(folder: Backend) -> None:
    store = folder.open()
    left = folder.path / "tmp" / "0123456789abcdef.raw"
    left.write_bytes(b"left behind")
    store.session("s").end()
    assert not left.exists()


# The store


def test_using_a_closed_store_is_an_error(backend: Backend) -> None:
    store = backend.open()
    session = store.session("s")
    ref = session.put("x")
    store.close()
    store.close()
    for use in (
        lambda: session.get(ref), lambda: session.put("y"), lambda: session.put("x" * LARGE), lambda: session.open(ref),
        lambda: session.put(io.BytesIO(bytes(2_000_000))), session.list, session.end, store.stats, store.collect,
        store.verify, lambda: store.session("other"),
    ):  # fmt: skip
        with pytest.raises(StoreClosed):
            use()


def test_opening_and_closing_leaves_no_descriptor_open(lasting: Backend) -> None:
    script = """
import os, sys, coatcheck
def used():
    return len(os.listdir("/proc/self/fd"))
for round in range(12):
    with coatcheck.open(sys.argv[1], durability="process") as store:
        session = store.session("s")
        session.get(session.put("x"))
        session.get(session.put("x" * 300_000))
        store.collect(cold_after=0)
        store.verify()
    if not round:
        first = used()
print(used() - first)
"""
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc to count descriptors in")
    grown = int(run_python(script, lasting.url, env={"PYTHONPATH": ":".join(sys.path)}))
    assert grown <= (0 if lasting.is_folder else 2), "obstore closes its connections later"


def test_unknown_urls_and_durabilities_are_refused(tmp_path: Path) -> None:
    for url in ("ftp://host/x", "s4:bucket", "", "a\0b"):
        with pytest.raises(CoatcheckError):
            coatcheck.open(url)
    with pytest.raises(InvalidArgument):
        coatcheck.open(tmp_path / "store", durability="hope")  # type: ignore[arg-type]


def test_a_file_url_and_a_path_open_the_same_store(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "a store") as store:
        store.session("s").put("x", name="n")
    with coatcheck.open((tmp_path / "a store").as_uri()) as store:
        assert store.session("s").get("n") == "x"


def test_without_a_url_the_environment_determines_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COATCHECK_STORE", str(tmp_path / "named"))
    with coatcheck.open() as store:
        assert store.url == str(tmp_path / "named")
    monkeypatch.delenv("COATCHECK_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with coatcheck.open() as store:
        assert Path(store.url).is_relative_to(tmp_path)


def test_the_default_store_is_opened_once_however_many_threads_ask(tmp_path: Path) -> None:
    script = """
import threading, coatcheck
barrier, found = threading.Barrier(64), []
def ask():
    barrier.wait()
    found.append(coatcheck.default())
threads = [threading.Thread(target=ask) for _ in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), len(set(map(id, found))))
"""
    env = {"PYTHONPATH": ":".join(sys.path), "COATCHECK_STORE": str(tmp_path / "store")}
    assert run_python(script, env=env).split() == ["64", "1"]


def test_the_default_store_opens_again_after_it_was_closed(tmp_path: Path) -> None:
    script = """
import threading, coatcheck
first = coatcheck.default()
first.session("s").put("value", name="n")
first.close()
found = []
threads = [threading.Thread(target=lambda: found.append(coatcheck.default())) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(set(map(id, found))), found[0] is first, first.closed, found[0].session("s").get("n"))
"""
    env = {"PYTHONPATH": ":".join(sys.path), "COATCHECK_STORE": str(tmp_path / "store")}
    assert run_python(script, env=env).split() == ["1", "False", "True", "value"]


def test_pages_of_artifacts_contain_each_artifact_once_in_any_order_of_names_and_sessions(
    store: Store,
) -> None:
    parent = store.session("parent", ttl=None)
    child = store.session("child", parent="parent", ttl=None)
    for number in range(7):
        parent.put(f"parent {number}", name=f"p{number}")
    for number in range(300):
        child.put(f"child {number % 9}", name=f"c{number}", ttl=1_000 if number % 2 else None)
    parent.put("child 3")
    pages: list[list[str]] = []
    after = None
    while refs := child.artifacts(after=after, limit=4):
        pages.append([ref.artifact_id for ref in refs])
        after = pages[-1][-1]
        child.put(f"put while it is listed {after}")
    found = [artifact_id for page in pages for artifact_id in page]
    assert [len(page) for page in pages] == [4, 4, 4, 4]
    assert len(set(found)) == 16
    values = [child.get(f"art:{artifact_id}") for artifact_id in found]
    assert all(value.startswith("child") for value in values[:9])
    assert values[9:] == [f"parent {number}" for number in reversed(range(7))]


def test_a_page_of_artifacts_after_an_unknown_one_is_an_error(store: Store) -> None:
    store.session("other").put("theirs")
    [theirs] = store.session("other").artifacts()
    for unknown in (theirs.artifact_id, "0" * 64):
        with pytest.raises(NotFound):
            store.session("mine").artifacts(after=unknown)


def test_a_summary_can_be_added_to_an_artifact_later(store: Store) -> None:
    session = store.session("s")
    ref = session.put("row,value\n" * 500, name="table", tool="query")
    written = session.annotate(ref, "Sales of March, one row a day")
    assert written.summary == "Sales of March, one row a day"
    assert session.ref("table") == written == session.list()[0]
    assert (written.created, session.get(written)) == (ref.created, "row,value\n" * 500)
    assert [hit.ref.artifact_id for hit in session.search("March sales")] == [ref.artifact_id]
    assert session.annotate("table", "").summary == ""
    with pytest.raises(errors.InvalidArgument, match="at most 500 characters"):
        session.annotate(ref, "x" * 501)
    with pytest.raises(errors.NotFound):
        session.annotate("nothing", "a summary")
