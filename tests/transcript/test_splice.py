"""A text and its slim form: every byte comes back, whatever wrote the text and whatever it
contains."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Store
from coatcheck.errors import NotFound
from coatcheck.messages import FORMATS
from coatcheck.messages.paths import REFS_KEY, at
from coatcheck.transcript import scan
from coatcheck.transcript.keep import Keeper, fetch_from, new_session_id
from coatcheck.transcript.scan import STYLES, Opened, binary, find, parse, styled, tokens_of
from coatcheck.transcript.splice import ArtifactRef, refs_of, slim, whole
from tests.backends import Backend
from tests.transcript.samples import CODE, IMAGE, LARGE, ROWS, SAMPLES, as_lines

SMALL = Policy(max_chars=600)
CHAT = FORMATS["openai-chat"]
TEXT = st.text(max_size=30) | st.builds(
    lambda piece, count: piece * count, st.text(min_size=1, max_size=30), st.integers(40, 200)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["tool", "assistant", "user"]), "content": VALUES},
    optional={
        "tool_calls": st.lists(st.fixed_dictionaries({"id": TEXT, "function": VALUES}), max_size=3),
        "details": VALUES,
        REFS_KEY: VALUES,
        "structuredContent": VALUES,
        "type": st.text(max_size=5),
    },
)
WRITERS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :\r\n")]),
        "indent": st.sampled_from([None, None, 2]),
    }
)


@pytest.fixture
def another(backend: Backend) -> Store:
    return backend.open_new()


@pytest.fixture
def keeper(store: Store) -> Keeper:
    return Keeper(store, new_session_id(), session=store.session("agent"), policy=SMALL)


def round_trip(text: bytes, keeper: Keeper, known: Any = CHAT) -> bytes:
    """Return the slim form of a text, after checking that the text comes back and slimming again
    changes nothing."""
    slimmed = slim(text, known, keeper)
    assert whole(slimmed.text, fetch_from(keeper.store)) == text
    assert slim(slimmed.text, known, keeper).text == slimmed.text
    assert refs_of(slimmed.text) == slimmed.refs or text.count(REFS_KEY.encode())
    return slimmed.text


@pytest.mark.parametrize("name", SAMPLES)
def test_every_line_of_every_format_comes_back(name: str, keeper: Keeper) -> None:
    for line in as_lines(SAMPLES[name]).splitlines(keepends=True):
        text = round_trip(line, keeper, FORMATS[name])
        assert json.loads(text).keys() >= json.loads(line).keys()
        payloads = sum(
            len(str(at(json.loads(line), path)))
            for path in FORMATS[name].places(json.loads(line), 5_000)
        )
        assert len(text) < len(line) - payloads * 0.8 + 1


@pytest.mark.parametrize(
    "options", [{}, {"ensure_ascii": True}, {"separators": (", ", ": ")}, {"indent": 2}]
)
def test_a_whole_document_comes_back(options: dict[str, Any], keeper: Keeper) -> None:
    for name, lines in SAMPLES.items():
        for document in (
            lines,
            {"model": "m", "messages": lines},
            [{"run": 1, "traj": lines}, {"run": 2, "traj": lines}],
        ):
            text = json.dumps(document, **{"ensure_ascii": False, **options}).encode()
            assert len(round_trip(text, keeper, FORMATS[name])) < len(text) / 2


def test_any_message_by_any_writer_comes_back(backend: Backend, store: Store) -> None:
    @backend.examples()
    @given(message=MESSAGES, options=WRITERS)
    def check(message: dict[str, Any], options: dict[str, Any]) -> None:
        keeper = Keeper(store, new_session_id(), policy=SMALL)
        text = json.dumps(message, **options).encode("utf-8", "surrogatepass")
        for known in (CHAT, FORMATS["mcp"]):
            round_trip(text, keeper, known)
            round_trip(b"[" + text + b",[ " + text + b"\n]]", keeper, known)

    check()


def test_any_bytes_come_back(backend: Backend, store: Store) -> None:
    @backend.examples()
    @given(
        text=st.binary(max_size=300)
        | st.builds(lambda a, b: a + b"artifactRefs" + b, st.binary(), st.binary())
    )
    @example(text=b"\xef\xbb\xbf" + as_lines(SAMPLES["openai-chat"][3:4]))
    @example(text=as_lines(SAMPLES["openai-chat"][3:4]).replace(b"\n", b"\r\n"))
    @example(text=as_lines(SAMPLES["openai-chat"][3:4])[:-1])
    @example(text=as_lines(SAMPLES["openai-chat"][3:4])[:-100])
    @example(text=as_lines(SAMPLES["openai-chat"][3:4]).replace(b"INFO", b"IN\xff\xfeFO"))
    @example(text=b"[" * 100_000)
    @example(text=b'{"role":"tool","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    @example(text=b'{"role":"tool","content":"' + b"a b " * 500 + b'","n":' + b"9" * 5_000 + b"}")
    @example(
        text=b'{"role":"tool","n":NaN,"content":"' + b"a b " * 500 + b'","m":-Infinity,"n":1E400}'
    )
    @example(
        text=b'{"content":"'
        + b"a b " * 500
        + b'","role":"tool","content":"'
        + b"c d " * 500
        + b'"}'
    )
    @example(text=b'{"role":"tool","content":"' + b"a b " * 500 + b'","content":"short"}')
    @example(
        text=b'{"role":"tool","a":{"x":"'
        + b"a b " * 500
        + b'"},"a":{"x":"'
        + b"a b " * 500
        + b'"}}'
    )
    @example(
        text=b'{"role":"tool","content":"' + b"\\ud83d\\ude00 \\ud800 \\u0041\\/ " * 100 + b'"}'
    )
    @example(text=b'{"role":"tool","content":"' + b"\\udc00\xe2\x82\xac " * 200 + b'"}')
    @example(text=b'{"role":"tool","content":"' + b"tab\there " * 200 + b'"}')
    @example(text=b'"' + b"a b " * 500 + b'"')
    @example(text=b'["' + b"a b " * 500 + b'"]')
    @example(text=b"")
    @example(text=b"\n")
    def check(text: bytes) -> None:
        round_trip(text, Keeper(store, new_session_id(), policy=SMALL))

    check()


def test_text_that_looks_like_our_refs_and_stubs_comes_back(
    backend: Backend, store: Store, another: Store
) -> None:
    """A slim line of another store, and variations of it."""

    @backend.examples()
    @given(message=MESSAGES)
    def check(message: dict[str, Any]) -> None:
        foreign = Keeper(another, new_session_id(), policy=SMALL)
        line = slim(
            json.dumps({**message, "content": LARGE, "role": "tool"}).encode(), CHAT, foreign
        ).text
        keeper = Keeper(store, new_session_id(), policy=SMALL)
        for text in (
            line,
            line.replace(b'"role"', b'"artifactRefs":[],"role"'),
            b"[" + line + b"]",
        ):
            once = round_trip(text, keeper)
            assert once != text
            again = Keeper(store, new_session_id(), policy=SMALL)
            assert slim(once, CHAT, again).text == once

    check()


@pytest.mark.parametrize("more", [{}, {"content": LARGE}])
def test_a_key_like_ours_comes_back_whatever_its_value(
    more: dict[str, Any], keeper: Keeper, another: Store
) -> None:
    session: dict[str, Any] = {"session": Keeper(another).session_id}
    odd: list[Any] = [
        [],
        [session],
        [session, session],
        {"session": 1},
        [{**session, "id": "0" * 64}],
        None,
        "x",
        [[]],
    ]
    for refs in odd:
        round_trip(json.dumps({"role": "tool", **more, REFS_KEY: refs, "z": 1}).encode(), keeper)
        round_trip(json.dumps({"role": "tool", REFS_KEY: refs, **more}).encode(), keeper)


@pytest.mark.parametrize("style", STYLES)
@given(text=st.text() | st.text('</>&\u2028\u2029\x08\x0c\x7fé/\\"\ud800\n', min_size=1))
def test_every_style_is_json_for_the_same_text_and_is_recognized(style: str, text: str) -> None:
    token = STYLES[style](text)
    assert json.loads(token) == text
    found = styled(text, token)
    assert found is not None
    assert STYLES[found](text) == token


@pytest.mark.parametrize("style", STYLES)
def test_a_place_in_any_known_style_needs_no_second_artifact(style: str, keeper: Keeper) -> None:
    text = "<b>naïve & “quoted”</b>\n\x08\x0c\x7f\u2028 https://example.invalid/\\ " * 30
    line = f'{{"role":"tool","content":{STYLES[style](text)}}}'.encode()
    (ref,) = slim(line, CHAT, keeper).refs
    assert ref.raw is None
    assert keeper.store.session(keeper.session_id).get(ref.id) == text
    round_trip(line, keeper)


def test_a_place_in_an_unknown_style_comes_back_too(keeper: Keeper) -> None:
    line = b'{"role":"tool","content":"' + b"\\u0061 b \xc3\xa9\\u00e9 " * 100 + b'"}'
    (ref,) = slim(line, CHAT, keeper).refs
    assert ref.raw is not None
    assert keeper.store.session(keeper.session_id).get(ref.id) == "a b éé " * 100
    round_trip(line, keeper)


def test_a_place_contains_the_stub_and_the_line_its_ref(keeper: Keeper) -> None:
    line = as_lines(
        [
            {
                "role": "tool",
                "tool_call_id": "c",
                "name": "logs",
                "content": LARGE,
                "extra": [1, 2.50],
            }
        ]
    )
    text = slim(line, CHAT, keeper).text
    shown = json.loads(text)
    (ref,) = shown[REFS_KEY]
    outcome = keeper.store.session("agent").externalize(LARGE, policy=SMALL)
    assert shown["content"] == outcome.text
    assert ref["path"] == ["content"]
    assert ref["size"] == len(LARGE.encode())
    assert ref["session"] == keeper.session_id
    assert ref["media_type"] == "text/plain"
    assert ref["summary"].startswith("2026-01-02")
    assert text.startswith(b'{"role":"tool","tool_call_id":"c","name":"logs","content":"{')
    assert b'"extra":[1,2.5],"artifactRefs":[' in text
    assert outcome.ref is not None
    stored = keeper.store.session(keeper.session_id).ref(ref["id"])
    assert stored is not None
    assert (stored.tool, stored.call_id, stored.expires_at) == ("logs", "c", None)
    assert keeper.store.session("agent").get(outcome.ref) == LARGE


def test_text_is_stored_as_text_base64_as_bytes_and_containers_as_values(keeper: Keeper) -> None:
    session = keeper.store.session(keeper.session_id)
    for name, lines in SAMPLES.items():
        for line in as_lines(lines).splitlines():
            for ref in slim(line, FORMATS[name], keeper).refs:
                value = session.get(ref.id)
                if ref.encoding == "base64":
                    assert value == base64.b64decode(IMAGE)
                elif ref.encoding == "json":
                    assert json.dumps(ROWS)[2:-2] in json.dumps(value)
                else:
                    assert isinstance(value, str)


def test_the_same_content_is_one_artifact_in_every_format(keeper: Keeper) -> None:
    lines = [("anthropic", 2), ("openai-chat", 3), ("pi", 3), ("langchain", 2), ("mcp", 1)]
    ids = [
        {ref.id for ref in slim(as_lines([SAMPLES[name][at]]), FORMATS[name], keeper).refs}
        for name, at in lines
    ]
    assert set.intersection(*ids) == {keeper.store.session("agent").put(LARGE).artifact_id}


def test_payloads_that_the_policy_leaves_alone_stay(store: Store) -> None:
    for policy in (Policy(max_chars=100_000), Policy(enabled=False)):
        keeper = Keeper(store, policy=policy)
        for name, lines in SAMPLES.items():
            for line in as_lines(lines).splitlines(keepends=True):
                assert slim(line, FORMATS[name], keeper).text == line


def test_rules_for_tools_apply(store: Store) -> None:
    line = as_lines(SAMPLES["pi"][3:4])
    never = slim(line, FORMATS["pi"], Keeper(store, policy=Policy(tools={"edit": "never"})))
    assert never.refs == ()
    limit = coatcheck.Limit(max_chars=30_000)
    assert (
        len(slim(line, FORMATS["pi"], Keeper(store, policy=Policy(tools={"edit": limit}))).refs)
        == 1
    )


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_policy_that_masks_stores_the_payload_masked_in_its_own_style(
    store: Store, ascii_only: bool
) -> None:
    keeper = Keeper(store, policy=Policy(redact="store"))
    secret = "sk" + "-ant-api03-" + "aB3x" * 20
    content = f"schön/{secret}\n" * 2_000
    line = json.dumps(
        {"role": "tool", "tool_call_id": "c", "content": content}, ensure_ascii=ascii_only
    ).encode()
    slimmed = slim(line, CHAT, keeper)
    assert keeper.masked == 1
    back = whole(slimmed.text, fetch_from(store))
    assert back == line.replace(secret.encode(), b"[masked: api key]")


def test_a_container_and_a_file_are_stored_masked(store: Store) -> None:
    keeper = Keeper(store, policy=Policy(redact="store", max_chars=500))
    secret = "sk" + "-ant-api03-" + "aB3x" * 20
    file = base64.b64encode(f"key {secret}\n".encode() * 100).decode()
    rows = [{"id": number, "password": "Zx9horseQq", "text": secret} for number in range(100)]
    line = json.dumps(
        {"role": "tool", "content": [{"type": "text", "text": "x"}], "details": rows, "file": file}
    )
    slimmed = slim(line.encode(), CHAT, keeper)
    assert keeper.masked == len(slimmed.refs) == 2
    back = json.loads(whole(slimmed.text, fetch_from(store)))
    assert back["details"] == [
        {"id": number, "password": "[masked: password]", "text": "[masked: api key]"}
        for number in range(100)
    ]
    assert base64.b64decode(back["file"]) == b"key [masked: api key]\n" * 100


def test_pages_of_our_own_tools_stay(keeper: Keeper) -> None:
    session = keeper.store.session("agent")
    (reading, *_) = coatcheck.toolkit(session)
    page = reading.run(pointer=session.put(LARGE).pointer)
    line = json.dumps({"role": "tool", "content": page}).encode()
    assert len(page) > 600
    assert slim(line, CHAT, keeper).text == line


def test_a_missing_artifact_has_a_placeholder_and_the_rest_is_exact(keeper: Keeper) -> None:
    line = as_lines(SAMPLES["claude-code"][5:6])
    slimmed = slim(line, FORMATS["claude-code"], keeper)
    fetch = fetch_from(keeper.store)
    gone = slimmed.refs[0].id

    def without(session_id: str, artifact_id: str) -> bytes:
        if artifact_id == gone:
            raise NotFound("it is gone")
        return fetch(session_id, artifact_id)

    with pytest.raises(NotFound):
        whole(slimmed.text, without)
    missing: list[ArtifactRef] = []
    text = whole(slimmed.text, without, missing=lambda ref, error: missing.append(ref))
    assert {ref.id for ref in missing} == {gone}
    assert f"[art:{gone[:12]} is missing here".encode() in text
    assert json.loads(text).keys() == json.loads(line).keys()
    assert CODE.replace("\n", "\\n").encode() in text


def test_a_slim_line_that_a_host_rewrote_comes_back_as_the_same_values(keeper: Keeper) -> None:
    line = as_lines(SAMPLES["claude-code"][5:6])
    text = json.loads(slim(line, FORMATS["claude-code"], keeper).text)
    for rewritten in (
        json.dumps(text),
        json.dumps({**text, "added": 1}),
        json.dumps(dict(reversed(text.items())), indent=1),
    ):
        back = json.loads(whole(rewritten.encode(), fetch_from(keeper.store)))
        back.pop("added", None)
        assert back == json.loads(line)


def test_a_ref_to_a_place_that_is_gone_is_reported(keeper: Keeper) -> None:
    text = json.loads(slim(as_lines(SAMPLES["openai-chat"][3:4]), CHAT, keeper).text)
    del text["content"]
    with pytest.raises(coatcheck.errors.Damaged):
        whole(json.dumps(text).encode(), fetch_from(keeper.store))


@given(st.text())
def test_only_base64_in_its_usual_form_is_treated_as_bytes(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass") * 20
    written = base64.b64encode(data).decode()
    found = binary(written)
    assert found == (("", data) if len(written) >= 256 else None)
    for odd in (
        written + "=",
        written + "\n",
        " " + written,
        written[:-1],
        base64.urlsafe_b64encode(b"\xff" * 300).decode(),
    ):
        assert binary(odd) is None or base64.b64encode(binary(odd)[1]).decode() == odd  # type: ignore[index]


def test_a_list_of_messages_comes_back_and_each_message_has_its_own_refs(
    backend: Backend, store: Store
) -> None:
    @backend.examples()
    @given(
        messages=st.lists(MESSAGES, min_size=1, max_size=6),
        options=WRITERS,
        lead=st.sampled_from(["", "\ufeff", " \n"]),
    )
    def check(messages: list[Any], options: dict[str, Any], lead: str) -> None:
        text = (lead + json.dumps(messages, **options) + "\n").encode("utf-8", "surrogatepass")
        slimmed = round_trip(text, Keeper(store, new_session_id(), policy=SMALL))
        if slimmed != text:
            shown = json.loads(slimmed.decode("utf-8-sig"))
            holders = {ref.path[0] for ref in refs_of(slimmed)}
            assert all(REFS_KEY in shown[int(index)] for index in holders)
            keys = [list(one)[: len(message)] for message, one in zip(messages, shown, strict=True)]
            assert keys == list(map(list, messages))

    check()


@given(st.lists(VALUES, max_size=6) | st.lists(st.dictionaries(TEXT, VALUES), max_size=6), WRITERS)
def test_a_list_is_opened_with_the_spans_of_its_objects(
    values: list[Any], writer: dict[str, Any]
) -> None:
    text = json.dumps(values, **writer)
    data = text.encode("utf-8", "replace")
    opened, parsed = Opened.of(data), parse(data.decode())
    assert opened is not None
    assert parsed is not None
    assert repr(opened.value) == repr(parsed[0])
    assert opened.source[opened.start : opened.end] == data.decode()
    if values and all(isinstance(one, dict) for one in values):
        assert opened.elements is not None
    else:
        assert opened.elements is None
    for span, one in zip(opened.elements or (), opened.value, strict=False):
        assert repr(json.loads(opened.source[slice(*span)])) == repr(one)
    assert all(one[1] < two[0] for one, two in pairwise(opened.elements or ()))


@pytest.mark.parametrize(
    "text", ["[", "[{}", "[{},]", "[{} {}]", "[{}] x", "[{}]]", "{}x", "3", '"a"', ""]
)
def test_text_that_is_neither_an_object_nor_a_list_of_objects_is_not_opened(text: str) -> None:
    assert Opened.of(text.encode()) is None


@given(st.text("ab", max_size=80), st.text("ab", min_size=1, max_size=70), st.integers(0, 20))
@example("a" * 300 + "b", "a" * 70 + "b", 0)
def test_a_token_is_found_where_it_is(text: str, token: str, start: int) -> None:
    assert find(text, token, start) == text.find(token, start)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_text_is_encoded_the_same_by_either_encoder(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_PYDANTIC_PAYS", 0 if loaded else 1 << 40)

    @given(st.text())
    @example("".join(map(chr, range(0x300))) + "\u2028\u2029\ufeff\uffff\U0010ffff")
    @example("half a pair \ud800")
    def same(text: str) -> None:
        assert next(tokens_of(text)) == ("utf8", encode_basestring(text))

    same()
