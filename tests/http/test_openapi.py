"""The OpenAPI document: it matches a running server, and the page about HTTP describes all of
it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import jsonschema_rs  # reads patterns as ECMA-262 does, like schemathesis
import pytest

from coatcheck.errors import CODES
from coatcheck.http.openapi import document
from coatcheck.http.operations import OPERATIONS
from tests.http.servers import ADMIN, served

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "http.md").read_text()


def test_the_document_is_json_and_all_its_references_resolve(client: httpx2.Client) -> None:
    found = client.get("/api/v1/openapi.json").json()
    assert found == json.loads(json.dumps(document()))
    assert found["openapi"] == "3.1.0"
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(found)):
        at = found
        for step in reference.split("/"):
            at = at[step]


def test_every_operation_has_a_unique_name_and_a_scope() -> None:
    described = [one for path in document()["paths"].values() for one in path.values()]
    ids = [one["operationId"] for one in described]
    assert len(ids) == len(set(ids)) == sum(len(operation.methods) for operation in OPERATIONS)
    assert all(
        one.get("security") or one["operationId"] in ("healthz", "openapi") for one in described
    )


def test_the_document_and_the_server_agree_on_which_search_is_blank(client: httpx2.Client) -> None:
    """The pattern of JSON Schema, the validation and the search itself each have their own idea of
    white space."""
    parameters = document()["paths"]["/api/v1/sessions/{session_id}/search"]["get"]["parameters"]
    schema = next(one["schema"] for one in parameters if one["name"] == "q")
    blank = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    other = [
        *map(chr, range(0x20)),
        *map(chr, range(0x7F, 0xA0)),
        "\u180e",
        "\u200b",
        "\u2060",
        "\ufeff",
    ]
    for character in {*blank, *other}:
        is_allowed = jsonschema_rs.is_valid(schema, character)
        found = client.get("/api/v1/sessions/s/search", params={"q": character})
        assert found.status_code == (200 if is_allowed else 400), repr(character)
        assert is_allowed == (character not in blank), repr(character)


@pytest.mark.slow
def test_requests_generated_from_the_document_get_the_answers_that_it_describes(
    tmp_path: Path, long_faults: bool
) -> None:
    """Schemathesis sends valid and invalid requests, and sequences of them, and checks each
    answer."""
    amount = ["--max-time", "240"] if long_faults else ["--max-time", "15", "--seed", "1"]
    with served(tmp_path / "store", COATCHECK_STORE_DURABILITY="process") as web:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("st")), "--config-file", str(HERE / "schemathesis.toml"), "run",
             f"{web.url}/api/v1/openapi.json", "--header", f"Authorization: Bearer {ADMIN}", "--no-color",
             "--suppress-health-check", "all", "--warnings", "off", *amount],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert web.process is not None
        assert web.process.poll() is None
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr


# The page


def test_every_operation_and_its_arguments_are_on_the_page() -> None:
    for path, methods in document()["paths"].items():
        for method, one in methods.items():
            assert f"`{method.upper()}" in PAGE or method in ("put", "head"), method
            for parameter in one["parameters"]:
                if parameter["in"] == "query":
                    assert f"`{parameter['name']}`" in PAGE, parameter
        shown = path.replace("{session_id}", "{session}").removeprefix("/api/v1")
        assert shown in PAGE, shown


def test_every_error_code_is_on_the_page() -> None:
    own = {"unauthorized", "forbidden", "method_not_allowed", "timeout", "precondition_failed",
           "unsupported_media_type", "range_not_satisfiable", "invalid_request", "too_many_requests",
           "busy"}  # fmt: skip
    for code in {*CODES, *own} - {"fenced", "budget_exceeded", "upstream_failed", "limit_exceeded"}:
        assert f"`{code}`" in PAGE, code
