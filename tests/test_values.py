"""Values come back with the same content and type; a value that cannot is refused with the name of
its type."""

import collections
import dataclasses
import datetime
import decimal
import json
import math
import pprint
import uuid
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import approx_byte_size
from coatcheck.errors import Damaged, UnsupportedValue
from coatcheck.values import Array, decode, encode, largest_array, read_repr

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates included
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ANY_TEXT, inner, max_size=5),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Return whether values and types are equal at every level: 1, 1.0 and True differ, as do 0.0
    and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


@dataclasses.dataclass
class Point:
    x: int
    label: str
    path: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class Job(pydantic.BaseModel):
    name: str
    due: datetime.date
    tags: set[str] = set()
    start: Point | None = None


@given(ANY_TEXT)
def test_text_comes_back_exactly(text: str) -> None:
    codec, data = encode(text)
    assert codec == "text"
    assert same(decode(codec, data), text)


@given(st.binary())
def test_bytes_come_back_exactly(data: bytes) -> None:
    assert encode(data) == ("bytes", data)
    assert same(decode("bytes", data), data)


@given(st.binary())
def test_a_bytearray_or_memoryview_is_encoded_like_its_bytes(data: bytes) -> None:
    assert encode(bytearray(data)) == encode(memoryview(data)) == ("bytes", data)


@given(JSON_VALUES.filter(lambda value: not isinstance(value, str)))
def test_any_json_value_comes_back_exactly(value: Any) -> None:
    codec, data = encode(value)
    assert codec == "json"
    assert same(decode(codec, data), value)


def test_json_is_stored_compactly_with_its_keys_in_order() -> None:
    assert encode({"b": 1, "a": ["ü", None]}) == ("json", '{"b":1,"a":["ü",null]}'.encode())


def test_a_dataclass_is_stored_as_its_json() -> None:
    assert decode(*encode(Point(1, "a", [(2, 3)]))) == {"x": 1, "label": "a", "path": [[2, 3]]}


def test_a_model_is_stored_as_its_json() -> None:
    job = Job(name="build", due=datetime.date(2026, 1, 31), tags={"x"}, start=Point(0, "home"))
    stored = decode(*encode(job))
    assert stored == json.loads(job.model_dump_json())
    assert Job.model_validate(stored) == job


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ((1, 2), "tuple"),
        ({1, 2}, "set"),
        (frozenset(), "frozenset"),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "datetime"),
        (decimal.Decimal("1.1"), "Decimal"),
        (1j, "complex"),
        (object(), "object"),
        (Point, "type"),
        (print, "builtin_function_or_method"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ({1: "a"}, "int"),
        ({None: "a"}, "NoneType"),
        ({True: "a"}, "bool"),
        ({(1, 2): "a"}, "tuple"),
        ({b"k": "a"}, "bytes"),
        ({"a": [1, {"b": (1,)}]}, "tuple"),
        ({"a": [1, {"b": math.nan}]}, "nan"),
        ([[[{1, 2}]]], "set"),
        ([b"bytes"], "bytes"),
    ],
)
def test_a_value_that_would_come_back_changed_is_refused_with_the_name_of_its_type(
    value: object, named: str
) -> None:
    with pytest.raises(UnsupportedValue) as refused:
        encode(value)
    assert named in refused.value.message


def test_the_error_says_where_the_value_is() -> None:
    with pytest.raises(UnsupportedValue) as refused:
        encode({"rows": [{"when": datetime.date(2026, 1, 1)}]})
    assert "/rows/0/when" in refused.value.message


def test_a_dataclass_with_an_unsupported_field_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Holder:
        thing: object

    with pytest.raises(UnsupportedValue) as refused:
        encode(Holder(object()))
    assert "Holder" in refused.value.message


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValue):
        encode(loop)


def test_extremely_deep_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedValue):
        encode(deep)


def test_an_integer_too_long_to_print_is_refused() -> None:
    with pytest.raises(UnsupportedValue):
        encode([10**5000])


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"\xff"])
def test_json_that_does_not_parse_is_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode("json", data)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("üñ☃😀", 2 + 2 + 3 + 4),
        ("\ud800", 3),
        (b"\x00\xff", 2),
        (bytearray(5), 5),
        (memoryview(bytes(8)).cast("I"), 8),
        (None, 4),
        ([1, 2], len("[1,2]")),
        ({"ü": 1}, len('{"ü":1}'.encode())),
        (Point(1, "a"), len('{"x":1,"label":"a","path":[]}')),
    ],
)
def test_the_approximate_size_is_that_of_the_text_or_of_the_json(value: object, size: int) -> None:
    assert approx_byte_size(value) == size


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, math.nan, {(1,): 2}, datetime.date(2026, 1, 1)]
)
def test_the_approximate_size_accepts_any_value(value: object) -> None:
    assert approx_byte_size(value) > 0


@given(ANY_TEXT | JSON_VALUES | st.binary() | st.builds(Point, st.integers(), ANY_TEXT))
def test_the_approximate_size_is_the_stored_size(value: object) -> None:
    assert approx_byte_size(value) == len(encode(value)[1])


def test_the_approximate_size_of_a_dataclass_with_bytes_is_the_stored_size() -> None:
    @dataclasses.dataclass
    class Chunk:
        data: bytes

    assert approx_byte_size(Chunk(b"plain text")) == len(encode(Chunk(b"plain text"))[1])


REPRS = [
    ([("a", 1), ("b", None)], [["a", 1], ["b", None]]),
    ({"a": [True, {}], "b": ()}, {"a": [True, {}], "b": []}),
    ({1: "a"}, {"1": "a"}),
    (
        [decimal.Decimal("1.5"), decimal.Decimal(7), math.nan, -math.inf, -1.5e-7],
        [1.5, 7, None, None, -1.5e-7],
    ),
    (
        [uuid.UUID(int=1), b"x", {"s"}, set()],
        ["00000000-0000-0000-0000-000000000001", "x", ["s"], []],
    ),
    ([collections.Counter("aab"), range(3)], [{"a": 2, "b": 1}, "range(0, 3)"]),
    (
        ["it's", "a \"b\" 'c'", "\n\t\\ \x07 \u2028 \U0001f600 ü"],
        ["it's", "a \"b\" 'c'", "\n\t\\ \x07 \u2028 \U0001f600 ü"],
    ),
]


@pytest.mark.parametrize(("value", "expected"), REPRS, ids=str)
def test_a_repr_is_read_as_the_nearest_json_value(value: object, expected: object) -> None:
    for text in (repr(value), pprint.pformat(value, width=10)):
        found, end = read_repr(text)
        assert (same(found, expected), end) == (True, len(text))


@pytest.mark.parametrize(
    "time",
    [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=datetime.UTC),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.date(2026, 1, 2),
        datetime.timedelta(days=-1, seconds=5),
    ],
)
def test_times_in_a_repr_are_read_as_times(time: object) -> None:
    assert read_repr(repr([(time,)]))[0] == [[time]]


@pytest.mark.parametrize(
    "text",
    ["", "x", "[1 2]", "[1,,2]", "[1, 2", "['a': 1]", "{'a': 1, 'b'}", "{'a':}", "{:1}", "[(]", "[a b]", "'text'",
     "[" * 1_000 + "]" * 1_000, "[datetime.datetime(1,"],
)  # fmt: skip
def test_text_that_repr_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"repr|dict|key"):
        read_repr(text)


def test_a_repr_of_more_tokens_than_allowed_is_refused() -> None:
    assert read_repr("[1, 2]", most=6)[0] == [1, 2]
    with pytest.raises(ValueError, match="repr"):
        read_repr("[1, 2]", most=5)


@given(
    st.lists(
        st.tuples(
            ANY_TEXT, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.none()
        )
    )
)
def test_rows_are_read_from_their_repr_exactly(rows: list[tuple[Any, ...]]) -> None:
    assert same(read_repr(repr(rows))[0], [list(row) for row in rows])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"a": 1}, {"b": 2}], Array("", 2, ("a", "b"))),
        (
            {"took": 3, "hits": {"total": 2, "a/b": [{"id": 1}, {"id": 2}]}},
            Array("/hits/a~1b", 2, ("id",)),
        ),
        ({"ids": [1, 2, 3], "rows": [{"x": [1, 2, 3, 4]}]}, Array("/rows", 1, ("x",))),
        ({"data": [{"result": [{"v": 1}] * 5}]}, Array("/data/0/result", 5, ("v",))),
        ({"ids": [1, 2, 3]}, Array("/ids", 3, ())),
        ({"a": []}, None),
        ("text", None),
    ],
)
def test_the_largest_array_is_the_one_with_the_most_objects(
    value: object, expected: Array | None
) -> None:
    assert largest_array(value) == expected


def test_an_object_with_bytes_that_are_not_utf8_or_a_cycle_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Row:
        cell: Any

    loop: list[Any] = []
    loop.append(loop)
    for cell in (b"\xff", loop):
        with pytest.raises(UnsupportedValue, match="cannot store a Row"):
            encode(Row(cell))
    assert decode("json", encode(Row(b"text"))[1]) == {"cell": "text"}
