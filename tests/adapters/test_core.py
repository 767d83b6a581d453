"""The core that adapters share: sessions of conversations, our tools beside the host's, arguments,
results, parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters import (
    TTL,
    Adapter,
    ContentPart,
    Refusal,
    current_session,
    in_thread,
    missing,
    shortened,
    within,
)
from coatcheck.errors import InvalidArgument, MissingExtra
from tests.adapters.suite import LOG, ROWS

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000c8000000960802000000") + bytes(3_000)


@pytest.fixture
def store() -> Iterator[Store]:
    with coatcheck.open("memory:") as store:
        yield store


@pytest.fixture
def adapter(store: Store) -> Adapter:
    return Adapter(store, host="test")


def test_a_conversation_has_one_session_that_lives_as_long_as_persisted_threads(
    adapter: Adapter,
) -> None:
    session = adapter.session("thread-1")
    assert adapter.session("thread-1").session_id == session.session_id
    assert session.ttl == TTL
    assert adapter.session("thread-2").get(session.put("x").pointer) is None


def test_two_hosts_do_not_share_a_conversation_with_the_same_id(store: Store) -> None:
    first, second = Adapter(store, host="one").session("1"), Adapter(store, host="two").session("1")
    assert second.get(first.put("x").pointer) is None


def test_runs_without_an_id_share_nothing(adapter: Adapter) -> None:
    assert adapter.session(None).session_id != adapter.session(None).session_id


@pytest.mark.parametrize("host_id", ["x" * 5_000, "", "../../etc", "a\nb", "\ud800", "\u202e" * 3])
def test_any_id_of_a_host_can_name_a_session(adapter: Adapter, host_id: str) -> None:
    session = adapter.session(host_id)
    assert adapter.session(host_id).get(session.put("x").pointer) == "x"
    assert session.session_id.isprintable()
    assert len(session.session_id) < 300


def test_a_given_session_serves_every_conversation(store: Store) -> None:
    session = store.session("mine", ttl=60)
    adapter = Adapter(session, host="test")
    assert adapter.session("a") is adapter.session(None) is session
    adapter.forget("a")
    assert session.get(session.put("x").pointer) == "x"


def test_nested_agents_find_the_session_around_them_in_threads_too(
    adapter: Adapter, store: Store
) -> None:
    outer = adapter.session("outer")
    with within(outer):
        assert current_session() is outer
        assert adapter.session("inner") is outer
        assert asyncio.run(in_thread(adapter.session, None)) is outer
        with coatcheck.open("memory:") as other:
            assert Adapter(other, host="test").session("inner") is not outer
    assert current_session() is None
    assert adapter.session("inner").session_id != outer.session_id


def test_a_deleted_conversation_is_forgotten(adapter: Adapter) -> None:
    pointer = adapter.session("thread").put("x").pointer
    adapter.forget("thread")
    assert adapter.session("thread").get(pointer) is None


def test_a_folder_can_be_given_and_anything_else_is_refused(tmp_path: Path) -> None:
    adapter = Adapter(tmp_path / "store", host="test")
    assert adapter.session("a").put("x").pointer
    adapter.store.close()
    with pytest.raises(InvalidArgument):
        Adapter(17, host="test")  # type: ignore[arg-type]


def test_results_are_cut_to_head_and_tail_if_the_store_is_unavailable(
    adapter: Adapter, store: Store
) -> None:
    kit = adapter.kit()
    store.close()
    outcome = kit.result(adapter.session("thread"), LOG, tool="fetch_log")
    assert outcome.failure
    assert LOG.splitlines()[0] in outcome.text
    assert len(outcome.text) < 20_000


def test_our_tools_answer_without_a_mark_if_the_store_fails_before_its_key_was_read(
    tmp_path: Path,
) -> None:
    store = coatcheck.open(tmp_path / "store")
    adapter = Adapter(store, host="test")
    session = adapter.session("thread")
    store.close()
    for name, arguments in (
        ("get_artifact", {"pointer": "art:000000000000"}),
        ("list_artifacts", {}),
    ):
        (answer,) = adapter.kit().answer(session, name, arguments)
        assert answer.text.startswith(f"[error: {name} failed: store_")
        assert "~" not in answer.text


def test_a_shared_session_is_the_given_one_or_one_of_this_store(
    adapter: Adapter, store: Store
) -> None:
    assert adapter.shared_session() is None
    session = store.session("around")
    assert Adapter(session, host="test").shared_session() is session
    with within(session):
        assert adapter.shared_session() is session
    with coatcheck.open("memory:") as other, within(other.session("around")):
        assert adapter.shared_session() is None


def test_names_that_clash_get_a_prefix_and_stubs_name_it(adapter: Adapter) -> None:
    assert [tool.name for tool in adapter.kit(["search"]).tools] == [
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]
    kit = adapter.kit(["list_artifacts", "coatcheck_get_artifact"])
    assert next(tool.name for tool in kit.tools) == "coatcheck_2_get_artifact"
    assert "coatcheck_2_get_artifact" in kit.result(adapter.session("a"), LOG, tool="t").text
    assert kit is adapter.kit(["store_artifact", "coatcheck_store_artifact"])


def test_a_disabled_policy_adds_no_tools_and_changes_nothing(store: Store) -> None:
    adapter = Adapter(store, host="test", policy=Policy(enabled=False))
    kit, session = adapter.kit(), adapter.session("a")
    given = {"text": session.put("x").pointer}
    assert kit.tools == ()
    assert kit.arguments(session, "t", given) is given
    assert kit.result(session, LOG, tool="t").content is LOG


def test_stubs_name_no_tool_if_ours_are_not_offered(store: Store) -> None:
    adapter = Adapter(store, host="test", only=())
    assert adapter.kit().tools == ()
    assert "get_artifact" not in adapter.kit().result(adapter.session("a"), LOG, tool="t").text


def test_our_tools_answer_for_the_session_of_the_call(adapter: Adapter) -> None:
    kit, first, second = adapter.kit(), adapter.session("a"), adapter.session("b")
    ref = first.put("the text", name="note")
    assert "the text" in kit.answer(first, "get_artifact", {"pointer": ref.pointer})[0].text
    assert "the text" not in kit.answer(second, "get_artifact", {"pointer": ref.pointer})[0].text
    picture = first.put(PNG)
    assert kit.answer(first, "get_artifact", {"pointer": picture.pointer})[0].text
    for name, arguments in (
        ("get_artifact", [1]),
        ("delete_all", {}),
        ("get_artifact", None),
        ("x" * 500, {}),
    ):
        (answer,) = kit.answer(first, name, arguments)  # type: ignore[arg-type]
        assert "error" in answer.text
        assert len(answer.text) < 1_000


def test_arguments_are_the_same_object_unless_they_have_pointers(adapter: Adapter) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    plain: dict[str, Any] = {"text": "see art:000000000000", "n": [1, {"a": None}]}
    assert kit.arguments(session, "t", plain) is plain
    pointer = session.put(ROWS).pointer
    assert kit.arguments(session, "t", {"rows": pointer}) == {"rows": ROWS}
    ours = {"pointer": pointer}
    assert kit.arguments(session, "get_artifact", ours) is ours


def test_an_unknown_pointer_is_refused_with_a_message(adapter: Adapter, store: Store) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    refused = kit.arguments(session, "send", {"text": "art:000000000000"})
    assert isinstance(refused, Refusal)
    assert "send" in refused.text
    assert "art:000000000000" in refused.text
    store.close()
    assert isinstance(kit.arguments(session, "send", {"text": "art:000000000000"}), Refusal)


def test_unchanged_parts_are_the_same_objects(adapter: Adapter) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    parts = [
        ContentPart("short"),
        ContentPart(media_type="image/png", data=PNG),
        ContentPart(kept=object()),
    ]
    assert kit.parts(session, parts, tool="t") == parts
    assert all(
        new is old for new, old in zip(kit.parts(session, parts, tool="t"), parts, strict=True)
    )
    assert kit.parts(session, [], tool="t") == []


def test_a_long_text_and_a_large_file_become_stubs_beside_a_picture(adapter: Adapter) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    pdf = b"%PDF-1.7\n" + bytes(range(256)) * 20_000
    parts = [
        ContentPart(media_type="image/png", data=PNG),
        ContentPart(LOG),
        ContentPart(kept="as it is"),
        ContentPart(media_type="application/pdf", data=pdf),
    ]
    picture, text, kept, file = kit.parts(session, parts, tool="t")
    assert (picture, kept) == (parts[0], parts[2])
    assert text.text.startswith('{"stub"')
    assert file.text.startswith('{"stub"')
    assert {session.get(ref) for ref in session.list()} == {LOG, pdf}


def test_very_many_parts_become_one_stub_and_kept_parts_remain(adapter: Adapter) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    parts = [*(ContentPart(f"part {n} " * 2_000) for n in range(60)), ContentPart(kept=1)]
    first, last = kit.parts(session, parts, tool="t")
    assert first.text.startswith('{"stub"')
    assert last.kept == 1


def test_errors_are_bounded_and_short_ones_stay(adapter: Adapter) -> None:
    kit, session = adapter.kit(), adapter.session("a")
    assert kit.failure(session, ValueError("no such row"), tool="t") == "no such row"
    long = kit.failure(session, ValueError(LOG), tool="t")
    assert len(long) < 3_000
    error = ValueError(LOG)
    assert shortened(error, long) is error
    assert str(error) == long


def test_a_value_that_cannot_be_serialized_is_passed_on(adapter: Adapter) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

        __str__ = __repr__

    odd = Odd()
    assert adapter.kit().result(adapter.session("a"), odd, tool="t").content is odd


def test_the_error_for_a_missing_framework_names_the_tested_versions() -> None:
    error = missing("langchain", "langchain>=1.4,<2")
    assert isinstance(error, MissingExtra | ImportError)
    assert "langchain>=1.4,<2" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("value", ["", "a short text", 17, -(2**63), 1.5, None, True])
def test_a_certainly_small_value_is_unchanged(adapter: Adapter, value: object) -> None:
    kit = adapter.kit()
    assert kit.is_small(value)
    assert kit.result(adapter.session("s"), value, tool="t").content is value


@pytest.mark.parametrize("value", [LOG, ROWS, 10**100, b"", {}, []])
def test_a_possibly_large_value_is_not_certainly_small(adapter: Adapter, value: object) -> None:
    assert not adapter.kit().is_small(value)


def test_nothing_is_certainly_small_if_a_tool_is_always_externalized(store: Store) -> None:
    kit = Adapter(store, host="test", policy=Policy(tools={"t": "always"})).kit()
    assert not any(map(kit.is_small, ("text", 17, None)))
