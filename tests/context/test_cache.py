"""A host's cache breakpoints are not content: they are removed, put back at their current place,
and counted."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.messages.cache import marks_in, with_marks_of, without_marks

MARK = {"type": "ephemeral"}
maybe_marked = st.sampled_from(
    [{}, {"cache_control": MARK}, {"cache_control": {**MARK, "ttl": "1h"}}]
)
plain = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=3)),
    st.just(
        {
            "type": "tool_use",
            "id": "a",
            "name": "f",
            "input": {"cache_control": "data", "content": []},
        }
    ),
)
blocks = st.recursive(
    st.builds(lambda block, mark: {**block, **mark}, plain, maybe_marked),
    lambda inner: st.builds(
        lambda content, mark: {"type": "tool_result", "content": content, **mark},
        st.lists(inner),
        maybe_marked,
    ),
    max_leaves=6,
)
messages = st.builds(lambda content: {"role": "user", "content": content}, st.lists(blocks))


@given(messages)
def test_marks_that_are_taken_off_can_be_put_back(message: Any) -> None:
    assert with_marks_of(without_marks(message), message) == message


@given(messages, messages)
def test_only_the_marks_of_the_other_are_set_and_nothing_else_changes(
    message: Any, other: Any
) -> None:
    assert without_marks(with_marks_of(message, other)) == without_marks(message)
    assert {path for path, _ in marks_in(with_marks_of(message, other))} <= {
        path for path, _ in marks_in(other)
    }


@given(messages)
def test_an_unmarked_message_is_returned_as_it_is_and_the_input_is_not_changed(
    message: Any,
) -> None:
    before = json.dumps(message)
    without = without_marks(message)
    assert list(marks_in(without)) == []
    assert without_marks(without) is without
    assert json.dumps(message) == before


def test_arguments_of_a_tool_are_data() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"cache_control": {"max_age": 3}}}
    assert without_marks({"role": "assistant", "content": [call]})["content"][0] is call
    assert list(marks_in([call])) == []
