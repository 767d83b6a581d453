"""The API for hosts that run their tools themselves: unbound tools, metadata, names, more kinds of
sessions."""

from __future__ import annotations

import asyncio
import json

import pytest

import coatcheck.aio
from coatcheck import Session, Store, ToolCall, ToolExecutor, toolkit
from coatcheck.errors import InvalidArgument
from coatcheck.executor import ToolError, resolve_arguments
from tests.backends import Backend


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("host")


def test_tools_without_a_session_have_the_same_schemas_and_run_once_they_are_bound(
    backend: Backend,
) -> None:
    session = backend.new_session()
    free, bound = toolkit(), toolkit(session)
    assert [one.as_anthropic() for one in free] == [one.as_anthropic() for one in bound]
    ref = session.put("hello")
    assert free[0].bind(session).run(pointer=ref.pointer) == bound[0].run(pointer=ref.pointer)
    with pytest.raises(InvalidArgument):
        free[0].run(pointer=ref.pointer)


def test_async_tools_without_a_session_run_once_they_are_bound(backend: Backend) -> None:
    session = backend.new_session()
    ref = session.put("hello")
    tool = coatcheck.aio.toolkit()[0]
    assert "hello" in asyncio.run(tool.bind(session).run(pointer=ref.pointer))
    with pytest.raises(InvalidArgument):
        asyncio.run(tool.run(pointer=ref.pointer))


def test_our_tools_ask_mcp_clients_to_load_them_at_once() -> None:
    assert all(tool.as_mcp()["_meta"] == {"anthropic/alwaysLoad": True} for tool in toolkit())


def test_metadata_is_kept_with_the_ref_and_survives_grants_exports_and_equal_puts(
    backend: Backend,
) -> None:
    session = backend.new_session()
    ref = session.put("text", name="a", metadata={"b": [1, None], "a": "é"})
    assert ref.metadata == {"a": "é", "b": [1, None]}
    again = session.ref("a")
    assert again is not None
    assert again.metadata == ref.metadata
    assert session.grant(ref, to="other").metadata == ref.metadata
    assert session.put("text", name="a", metadata={"c": 1}).metadata == {"c": 1}
    assert session.put("other text").metadata == {}
    (listed,) = [one for one in session.list() if one.name == "a"]
    assert listed.metadata == {"c": 1}


@pytest.mark.parametrize(
    "metadata", [[1], "text", {"x": float("nan")}, {"x": object()}, {1: 2}, {"x": "y" * 5_000}]
)
def test_metadata_that_is_not_a_small_json_object_is_refused(
    backend: Backend, metadata: object
) -> None:
    session = backend.new_session()
    with pytest.raises(InvalidArgument):
        session.put("text", metadata=metadata)  # type: ignore[arg-type]
    assert session.list() == []


def test_names_are_listed_by_prefix_newest_first(store: Store) -> None:
    parent = store.session("parent")
    session = store.session(f"{parent.session_id}-child", parent=parent.session_id)
    parent.put("0", name="user:avatar")
    for number, name in enumerate(["user:a", "report", "user:b", "user:a"]):
        session.put(f"value {number}", name=name)
    session.put("without a name")
    assert session.names(prefix="user:") == ["user:a", "user:b", "user:avatar"]
    assert session.names() == ["user:a", "user:b", "report", "user:avatar"]
    session.forget("user:b")
    assert "user:b" not in session.names()


def test_all_names_are_listed_even_if_they_do_not_fit_in_one_query(store: Store) -> None:
    session = store.session("many")
    with store.batching:
        for number in range(300):
            session.put(f"value {number}", name=f"n{number}")
    assert len(session.names(prefix="n")) == 300


def test_sessions_without_an_id_share_nothing(store: Store) -> None:
    first, second = store.session(), store.session()
    assert first.session_id != second.session_id
    assert second.get(first.put("private").pointer) is None


def test_ancestors_see_what_a_shared_child_puts_and_others_do_not(store: Store) -> None:
    parent = store.session("parent")
    middle = store.session(f"{parent.session_id}-m", parent=parent.session_id)
    child = store.session(f"{parent.session_id}-c", parent=middle.session_id, shared=True)
    large = child.put("x" * 200_000, name="report")
    outcome = child.externalize("line\n" * 20_000, policy=coatcheck.Policy(max_chars=100))
    for ancestor in (parent, middle):
        assert ancestor.get("report") == "x" * 200_000
        assert outcome.ref is not None
        assert ancestor.get(outcome.ref.pointer) == "line\n" * 20_000
    quiet = store.session(f"{parent.session_id}-q", parent=parent.session_id)
    assert parent.get(quiet.put("only here").pointer) is None
    child.end()
    assert parent.get(large.pointer) == "x" * 200_000


def test_a_shared_session_needs_a_parent(store: Store) -> None:
    with pytest.raises(InvalidArgument):
        store.session("alone", shared=True)


def test_a_page_of_lines_has_its_line_numbers(session: Session) -> None:
    ref = session.put("\n".join(f"line {number}" for number in range(1, 2_001)))
    page = session.read(ref, lines="10:20")
    assert (page.first, page.last, page.total) == (10, 20, 2_000)
    page = session.read(ref, lines="10:20,1990:")
    assert (page.first, page.last, page.total) == (10, 2_000, 2_000)
    page = session.read(ref, max_chars=500)
    assert page.cursor is not None
    following = session.read(ref, cursor=page.cursor, max_chars=500)
    assert page.last is not None
    assert following.first == page.last + 1
    assert session.read(session.put("x" * 9_000)).total == 1


@pytest.mark.parametrize("pattern", ["line 19", r"line 19\d*(?:a?){900}"])
def test_a_grep_returns_its_hits_as_line_numbers_and_text(session: Session, pattern: str) -> None:
    ref = session.put("\n".join(f"line {number}" for number in range(1, 200)) + "\n" + "z" * 80_000)
    page = session.read(ref, grep=pattern, context=1)
    assert page.hits[0] == (19, "line 19")
    assert len(page.hits) == page.matches == 11


def test_the_cause_of_a_tool_error_is_the_exception_that_the_tool_raised(session: Session) -> None:
    raised = LookupError("no such row")

    def fails() -> str:
        raise raised

    outcome = ToolExecutor(session, [fails]).run(ToolCall("1", "fails"))
    assert isinstance(outcome, ToolError)
    assert outcome.cause is raised
    unknown = ToolExecutor(session, [fails]).run(ToolCall("1", "other"))
    assert isinstance(unknown, ToolError)
    assert unknown.cause is None


def test_arguments_that_a_host_injects_are_not_checked(session: Session) -> None:
    class Context:
        user = "ada"

    def greet(context: Context, words: list[str]) -> str:
        return f"{context.user}: {words}"

    call = ToolCall("1", "greet", {"context": Context(), "words": ["hi"]})
    assert ToolExecutor(session, [greet]).run(call).text == "ada: ['hi']"


def test_arguments_without_pointers_are_returned_as_the_same_object(session: Session) -> None:
    given = {"a": [1, {"b": "art: is not a pointer"}]}
    assert resolve_arguments(session, given) is given
    pointer = session.put([1, 2]).pointer
    assert resolve_arguments(session, {"a": pointer}) == {"a": [1, 2]}
    assert asyncio.run(coatcheck.aio.resolve_arguments(session, {"a": pointer})) == {"a": [1, 2]}
    assert asyncio.run(coatcheck.aio.resolve_arguments(session, given)) is given


def test_metadata_is_in_an_export(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with coatcheck.open(folder / "a") as one, coatcheck.open(folder / "b") as other:
        one.session("s").put("text", name="n", metadata={"version": 3})
        archive = folder / "all.jsonl"
        with archive.open("wb") as stream:
            one.export(stream)
        assert any(
            "metadata_json" in json.loads(line).get("ref", {})
            for line in archive.read_text().splitlines()
        )
        with archive.open("rb") as stream:
            other.import_(stream)
        ref = other.session("s").ref("n")
        assert ref is not None
        assert ref.metadata == {"version": 3}
