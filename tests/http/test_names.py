"""Names, sessions and pointers in paths and headers: any text is safe, and is taken literally."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck import Session, Store
from coatcheck.errors import InvalidArgument
from coatcheck.http.application import decoded
from tests.backends import files_with
from tests.http.servers import Web, part, path_of
from tests.mcp.node_servers import Missing, node

HOSTILE = [
    "../../etc/passwd", "..", ".", "a/../b", "a//b", "/absolute", "\\\\host\\share", "C:\\x", "CON", "%2e%2e%2f",
    "%252e", "%", "%zz", "a%00b", "nul\0byte", "new\r\nline: injected", "x\r\nSet-Cookie: a=b", "tab\t", "\x1b[31m",
    "\u202eevil", "\ufeff", "naïve ☃ 😀", "a b+c&d=e?f#g;h", "art:", "art:xyz", "0123456789ab", "'quoted' \"double\"",
    "<b>", "${x}", "session/artifacts/n", "~", "-rf", " ", "é" * 500, "\U0010ffff", "ſ", "a\u0301",
]  # fmt: skip
_numbers = itertools.count()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_stored_found_and_forgotten_under_exactly_that_name(
    client: httpx2.Client, session: Session, shared_store: Store, name: str
) -> None:
    content = f"content {next(_numbers)}".encode()
    made = client.post(path_of(session.session_id), content=content, params={"name": name})
    assert made.status_code == 201, made.text
    assert made.json()["name"] == name
    assert session.get(name) == content
    if name not in (".", ".."):  # clients resolve these themselves, see below
        path = path_of(session.session_id, name)
        found = client.get(path)
        assert found.content == content
        assert "set-cookie" not in found.headers
        assert "\n" not in found.headers["content-disposition"]
        assert client.get(path_of(session.session_id, name, "/ref")).json()["name"] == name
        assert client.delete(path).status_code == 204
        assert session.list(name=name) == []


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in (".", "..")])
def test_a_hostile_session_id_is_taken_literally(
    client: httpx2.Client, shared_store: Store, name: str
) -> None:
    content = f"content {next(_numbers)}".encode()
    made = client.post(path_of(name), content=content, params={"name": "n"})
    assert made.status_code == 201, made.text
    assert shared_store.session(name).get("n") == content
    assert client.get(made.headers["location"]).content == content
    assert client.get(f"/api/v1/sessions/{part(name)}").json()["session_id"] == name
    assert client.delete(f"/api/v1/sessions/{part(name)}").status_code == 200


def test_no_name_becomes_a_path_of_the_store(client: httpx2.Client, shared_store: Store) -> None:
    root = Path(shared_store.url)
    client.post(
        path_of("../../escaped-17"), content=b"x" * 300_000, params={"name": "../../escaped-17"}
    )
    assert not list(root.parent.parent.rglob("*escaped-17*"))
    assert files_with(root, b"escaped-17")  # it is stored as data


@given(name=st.text(min_size=1, max_size=60), session_id=st.text(min_size=1, max_size=20))
@settings(max_examples=40)
def test_any_text_can_be_a_name_and_a_session(
    client: httpx2.Client, name: str, session_id: str
) -> None:
    for text in (name, session_id):
        if text in (".", "..") or text.startswith(("art:", "coatcheck:", "transcript:")):
            return
    content = f"content {next(_numbers)}".encode()
    assert (
        client.post(path_of(session_id), content=content, params={"name": name}).status_code == 201
    )
    assert client.get(path_of(session_id, name)).content == content
    headers = {"x-coatcheck-name": part(name)}
    assert client.post(path_of(session_id), content=content, headers=headers).json()["name"] == name


@given(st.text())
def test_every_text_survives_its_encoding(text: str) -> None:
    assert decoded(part(text)) == text


@pytest.mark.parametrize("raw", ["%", "%4", "%zz", "%ff", "%c3%28", "%ed%a0%80"])
def test_a_header_with_invalid_percent_encoding_is_refused(client: httpx2.Client, raw: str) -> None:
    with pytest.raises(InvalidArgument):
        decoded(raw)
    found = client.post(path_of("s"), content=b"x", headers={"x-coatcheck-name": raw})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_argument")


def test_a_path_with_invalid_percent_encoding_is_refused(web: Web, client: httpx2.Client) -> None:
    for raw in ("%ff", "a%zz", "%c3%28"):
        done = subprocess.run(
            ["curl", "-s", "-H", f"Authorization: Bearer {web.token}", f"{web.url}/api/v1/sessions/{raw}/artifacts"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["error"]["code"] == "invalid_argument"


# Dots: clients resolve `.` and `..` before they send a path, whether they are encoded or not


DELETES = """
for (const name of ["..", ".", "%2e%2e", "%2E%2e", "%2e"]) {
  const headers = {authorization: process.argv[2]};
  const found = await fetch(`${process.argv[1]}/${name}`, {method: "DELETE", headers});
  console.log(found.status);
}
"""


def test_forgetting_a_name_of_dots_never_ends_a_session(
    web: Web, client: httpx2.Client, session: Session
) -> None:
    session.put("kept", name="n")
    base, token = f"{web.url}{path_of(session.session_id)}", f"Bearer {web.token}"
    for options in ([], ["--path-as-is"]):
        for name in ("..", ".", "%2e%2e", "%2e", "../", "./"):
            subprocess.run(
                ["curl", "-s", *options, "-X", "DELETE", "-H", f"Authorization: {token}", f"{base}/{name}"],
                capture_output=True, check=True,
            )  # fmt: skip
    try:
        program = node()
    except Missing:
        program = None
    if program is not None:
        done = subprocess.run(
            [program, "--input-type=module", "-e", DELETES, base, token],
            capture_output=True,
            text=True,
            check=True,
        )
        assert set(done.stdout.split()) == {"404"}
    assert client.delete(f"/api/v1/sessions/{part(session.session_id)}/").status_code == 404
    assert session.get("n") == "kept"


def test_a_name_of_dots_is_reached_by_its_pointer(client: httpx2.Client, session: Session) -> None:
    ref = session.put("of dots", name="..")
    assert client.get(path_of(session.session_id, ref.pointer)).text == "of dots"
    assert (
        client.get(path_of(session.session_id), params={"name": ".."}).json()["artifacts"][0][
            "name"
        ]
        == ".."
    )
