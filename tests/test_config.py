"""Settings: which source wins, what is refused and how, and that each setting takes effect."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Limit, Policy, toolkit
from coatcheck.cli import main
from coatcheck.config import DEFAULTS, SETTINGS, Setting, load, unknown
from coatcheck.context import Budget
from coatcheck.context._bootstrap import bootstrap
from coatcheck.context.appended import recall
from coatcheck.errors import InvalidArgument
from coatcheck.externalize import configured
from coatcheck.trust import trust

ROOT = Path(__file__).resolve().parent.parent


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "coatcheck.toml"
    path.write_text(text)
    return path


def valid_values(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that a setting accepts."""
    if setting.choices:
        return st.sampled_from(setting.choices)
    return {
        "switch": st.booleans(),
        "whole": st.integers(setting.least, 10**9),
        "number": st.floats(setting.least, 1e9).map(lambda number: round(number, 3)),
        "text": st.text("abc-xyz", min_size=1, max_size=8),
        "place": st.text("/abc", min_size=1, max_size=8).map(lambda text: "/" + text),
    }[setting.kind]


PLAIN = [setting for setting in SETTINGS if setting.kind != "rules"]


@given(st.data())
def test_code_overrides_the_environment_which_overrides_the_file_which_overrides_the_default(
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(PLAIN), unique=True, max_size=6))
    values: dict[str, dict[str, Any]] = {"code": {}, "file": {}, "environment": {}}
    for setting in chosen:
        for source in data.draw(st.sets(st.sampled_from(sorted(values)))):
            values[source][setting.key] = data.draw(valid_values(setting))
    environ = {
        str(setting.variable): str(values["environment"][setting.key])
        for setting in chosen
        if setting.key in values["environment"]
    }
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values["file"].items())
        found = load(values["code"], file=written(Path(folder), text), environ=environ)
    for setting in SETTINGS:
        source = next(
            (one for one in ("code", "environment", "file") if setting.key in values[one]),
            "default",
        )
        assert found.origin(setting.key).source == source
        assert found[setting.key] == (
            setting.default if source == "default" else values[source][setting.key]
        )


def test_every_value_has_an_origin(tmp_path: Path) -> None:
    path = written(tmp_path, "[policy]\nmax_chars = 10\n")
    found = load({"page": {"max_chars": 2_000}}, file=path, environ={"COATCHECK_SESSION": "s"})
    assert [str(found.origin(key)) for key in ("page.max_chars", "policy.max_chars", "session.id", "session.ttl")] == [
        "code", f"file {path}", "environment COATCHECK_SESSION", "default",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "nearest"),
    [
        ("[policy]\nmax_chars = 3\nmax_token = 1\n", ":3:", "policy.max_tokens"),
        ("policy.previewchars = 1\n", ":1:", "policy.preview_chars"),
        ("[memory.artifact]\nmax_items = 1\n", ":1:", "memory.artifacts"),
        ("# words\n\nmax_prompt_tokens = 9\n", ":3:", "budget.max_prompt_tokens"),
        ("[policy]\n[page]\nmax_chars = 'many'\n", ":3:", "an integer of at least 1500"),
        ("[session]\nttl = -1\n", ":2:", "'none'"),
        ("[session]\nttl = nan\n", ":2:", "a number of at least 0"),
        ("[policy]\nenabled = 1\n", ":2:", "true or false"),
        ("[page]\nmax_chars = true\n", ":2:", "an integer"),
        ("[policy.tools]\nsearch = { max_lines = 3 }\n", ":1:", "max_bytes"),
        ("[policy.tools]\nsearch = {}\n", ":1:", "max_bytes"),
        ("budget = 3\n", ":1:", "a section"),
        ("[store]\nurl = ''\n", ":2:", "a path or url"),
    ],
)
def test_a_mistake_in_a_file_is_rejected_with_its_line_and_a_suggestion(
    tmp_path: Path, text: str, line: str, nearest: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        load(file=path, environ={})
    assert caught.value.message.startswith(f"{path}{line}")
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"a = [", b"\xff\xfe", b"x = " + b"[" * 100_000, b"# " + b"x" * (1 << 20)]
)
def test_an_invalid_settings_file_is_rejected_with_an_error_of_one_line(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "coatcheck.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        load(file=path, environ={})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_of_toml_raises_anything_but_our_own_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coatcheck.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(InvalidArgument):
            load(file=path, environ={})


@given(st.sampled_from(PLAIN), st.text(min_size=1, max_size=20))
def test_no_text_of_a_variable_raises_anything_but_our_own_error(
    setting: Setting, text: str
) -> None:
    with contextlib.suppress(InvalidArgument):
        value = load(environ={str(setting.variable): text, "COATCHECK_CONFIG": os.devnull})[
            setting.key
        ]
        assert setting.checked(value) == value


def test_a_variable_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="COATCHECK_BUDGET_MAX_PROMPT_TOKENS"):
        load(environ={"COATCHECK_BUDGET_MAX_PROMPT_TOKENS": "lots"})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("No", False), ("FALSE", False), ("0", False)]
)
def test_switches_use_the_usual_words(text: str, value: bool) -> None:
    assert load(environ={"COATCHECK_BOOTSTRAP_REFS": text})["bootstrap.enabled"] is value


def test_an_empty_variable_is_ignored_and_none_means_none(tmp_path: Path) -> None:
    found = load(environ={"COATCHECK_STORE": "", "COATCHECK_SESSION_TTL": "none"})
    assert found.origin("store.url").source == "default"
    assert found["session.ttl"] is None
    assert load(file=written(tmp_path, 'session.ttl = "none"'), environ={})["session.ttl"] is None


def test_a_folder_named_none_can_be_opened_from_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    coatcheck.open("none").close()
    assert (tmp_path / "none" / "catalog.sqlite").exists()


def test_the_nearest_file_above_the_working_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    written(tmp_path, "page.max_chars = 2000")
    path = written(
        tmp_path / "a",
        "page.max_chars = 3000\n[store]\nurl = 'kept'\n[metrics]\nfile = '~/m.jsonl'\n",
    )
    monkeypatch.chdir(tmp_path / "a" / "b")
    environ = {"XDG_DATA_HOME": str(tmp_path / "data")}
    trust(path, path.read_bytes(), environ)
    found = load(environ=environ)
    assert (found.file, found["page.max_chars"]) == (path, 3_000)
    assert found["store.url"] == str(tmp_path / "a" / "kept")  # relative to the file
    assert found["metrics.file"] == "~/m.jsonl"


def test_a_file_that_others_can_write_is_ignored_unless_it_is_named_explicitly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, "page.max_chars = 2000")
    path.chmod(0o666)
    monkeypatch.chdir(tmp_path)
    assert load(environ={})["page.max_chars"] == 8_000
    assert str(path) in caplog.text
    assert load(environ={"COATCHECK_CONFIG": str(path)})["page.max_chars"] == 2_000


def test_a_named_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        load(environ={"COATCHECK_CONFIG": str(tmp_path / "nothing.toml")})


def test_a_store_takes_its_settings_from_the_file_and_code_overrides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COATCHECK_STORE", raising=False)
    monkeypatch.setenv("COATCHECK_CONFIG", str(tmp_path / "coatcheck.toml"))
    written(
        tmp_path,
        "[store]\nurl = 'st'\nquota_bytes = 9\n[session]\nttl = 5\n[policy]\nmax_chars = 40\n[policy.tools]\n"
        "never_this = 'never'\nsearch = { max_chars = 5 }\n[page]\nmax_chars = 1500\n",
    )
    with coatcheck.open(quota_bytes=None) as store:
        assert (store.url, store.ttl) == (str(tmp_path / "st"), 5)
        session = store.session("s")
        assert session.ttl == 5
        assert session.externalize("a word " * 10).is_stub
        assert not session.externalize("a word " * 10, policy=Policy(max_chars=100)).is_stub
        assert not session.externalize("a word " * 10, tool="never_this").is_stub
        assert session.externalize("a word", tool="search").is_stub
        ref = session.put("0123456789" * 400)
        assert len(session.read(ref).text) == 1_500
        assert len(session.read(ref, max_chars=200).text) == 200
        assert len(toolkit(session)[0].run(pointer=ref.pointer)) <= 1_500
        assert str(store.settings.origin("store.quota_bytes")) == "code"


def test_a_section_has_the_parameters_of_what_it_configures(tmp_path: Path) -> None:
    assert configured(DEFAULTS) == Policy()
    found = load(
        {"policy": {"max_tokens": 7, "tools": {"t": "always", "u": {"max_bytes": 3}}}}, environ={}
    )
    assert configured(found) == Policy(max_tokens=7, tools={"t": "always", "u": Limit(max_bytes=3)})
    assert found.section("budget", max_rag_chunks=1)["max_rag_chunks"] == 1
    taken = set(inspect.signature(Policy).parameters) - {
        "commands",
        "count",
        "prices",
        "read_arguments",
        "reference",
        "render",
        "resolves",
        "ttl",
    }  # only the host can set these
    assert set(found.section("policy")) == taken


def test_sections_have_the_names_and_defaults_of_the_parameters_that_they_set() -> None:
    assert Budget(**DEFAULTS.section("budget")) == Budget()
    for section, part in (("bootstrap", bootstrap), ("memory.artifacts", recall)):
        assert set(DEFAULTS.section(section)) - {"enabled"} <= set(
            inspect.signature(part).parameters
        )


def test_mistakes_in_code_are_rejected_too() -> None:
    with pytest.raises(InvalidArgument, match=r"policy\.max_tokens"):
        load({"policy": {"max_token": 3}}, environ={})
    with pytest.raises(InvalidArgument):
        DEFAULTS["policy"]
    with pytest.raises(InvalidArgument):
        DEFAULTS.section("polity")
    with pytest.raises(InvalidArgument):
        DEFAULTS.origin("nothing")


def test_passwords_are_masked_wherever_settings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://agent:hunter22secret@db.example/coats"
    found = load(environ={"COATCHECK_STORE": url})
    assert found["store.url"] == url
    assert "hunter22secret" not in found.shown("store.url") + repr(found)
    monkeypatch.setenv("COATCHECK_STORE", url)
    for arguments in (["config"], ["config", "--json"], ["ls"]):
        done = CliRunner().invoke(main, arguments)
        assert "hunter22secret" not in done.output
        assert done.output


def test_the_command_shows_each_value_and_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "[memory.artifacts]\nmax_items = 3\n")
    monkeypatch.setenv("COATCHECK_SESSION", "mine")
    monkeypatch.setenv("COATCHECK_PAGE_MAX_CHAR", "9")
    done = CliRunner().invoke(main, ["config"])
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [setting.key for setting in SETTINGS]
    shown = {row[0]: row[1:3] for row in rows}
    assert shown["memory.artifacts.max_items"] == ["3", f"file {path}"]
    assert shown["session.id"] == ["mine", "environment COATCHECK_SESSION"]
    assert shown["policy.max_chars"] == ["none", "default"]
    assert "COATCHECK_PAGE_MAX_CHARS" in done.stderr
    done = CliRunner().invoke(main, ["config", "memory", "session.id", "--json"])
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 5
    assert records[0] == {
        "key": "session.id", "value": "mine", "source": "environment", "where": "COATCHECK_SESSION",
        "default": "default", "variable": "COATCHECK_SESSION", "about": "the session that commands use",
    }  # fmt: skip
    done = CliRunner().invoke(main, ["config", "polity"])
    assert done.exit_code == 2


def test_a_command_uses_the_store_and_session_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COATCHECK_STORE", str(tmp_path / "st"))
    written(tmp_path, "store.url = 'unused'\nsession.id = 'from the file'\n")
    done = CliRunner().invoke(main, ["put", "-", "--json"], input="words")
    assert json.loads(done.stdout)["session_id"] == "from the file"
    assert (tmp_path / "st").exists()
    assert not (tmp_path / "unused").exists()


def test_misspelled_variables_are_reported() -> None:
    odd = {
        "COATCHECK_STOR": "x",
        "COATCHECK_SOMETHING_ELSE": "y",
        "COATCHECK_STORE": "z",
        "PATH": "",
    }
    assert unknown(odd) == {"COATCHECK_STOR": "COATCHECK_STORE"}


def test_every_setting_is_documented_with_its_default_and_variable() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for line in page.splitlines()
        if len(cells := [cell.strip().strip("`") for cell in line.strip("|").split("|")]) == 4
        and "." in cells[0]
    }
    assert list(rows) == [setting.key for setting in SETTINGS]
    for setting in SETTINGS:
        default, variable, about = rows[setting.key]
        assert default == ("{}" if setting.default == {} else DEFAULTS.shown(setting.key))
        assert variable == (setting.variable or "-")
        assert re.sub(r"[^\w]", "", about) == re.sub(r"[^\w]", "", setting.about)


def test_recall_settings_are_accepted_in_camel_case(tmp_path: Path) -> None:
    (tmp_path / "coatcheck.toml").write_text(
        "[memory.artifacts]\nmaxItems = 3\nmaxChars = 900\nnarrativeMaxChars = 100\n"
    )
    settings = load(file=tmp_path / "coatcheck.toml")
    assert settings.section("memory.artifacts") == {
        "enabled": False, "max_items": 3, "max_chars": 900, "narrative_max_chars": 100,
    }  # fmt: skip
    (tmp_path / "coatcheck.toml").write_text("[memory.artifacts]\nmaxItem = 3\n")
    with pytest.raises(InvalidArgument, match="max_item"):
        load(file=tmp_path / "coatcheck.toml")
