"""Edits of configuration texts: nothing else changes, and they can be undone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArgument
from coatcheck.install.config_text import JsonConfig, JsonText, TomlConfig

SECTION = ("mcpServers",)
TABLES = ("mcp_servers",)
ENTRY = {"command": "/bin/coatcheck", "args": ["mcp"]}

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda one: one != "new"
)
leaves = st.none() | st.booleans() | st.integers(-99, 99) | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {"command": words.filter(bool)},
    optional={
        "args": st.lists(words, max_size=3),
        "env": st.dictionaries(words, words, max_size=2),
    },
)
configurations = st.builds(
    lambda rest, servers: {**rest, "mcpServers": servers},
    st.dictionaries(names, values, max_size=3),
    st.dictionaries(names, entries, max_size=3),
)
gaps = st.sampled_from(
    ["", " ", "\n", "\n  ", "\t", ' // a "note" }\n', "/* { */", "\r\n", " /* ,\n */ "]
)


@st.composite
def jsonc_texts(draw: st.DrawFn, value: Any) -> str:
    """A value as a person might write it: whitespace and comments everywhere, trailing commas."""

    def written(value: Any) -> str:
        if isinstance(value, dict):
            parts = [
                f"{gap()}{written(key)}{gap()}:{gap()}{written(item)}{gap()}"
                for key, item in value.items()
            ]
            return "{" + ",".join(parts) + last(parts) + "}"
        if isinstance(value, list):
            parts = [f"{gap()}{written(item)}{gap()}" for item in value]
            return "[" + ",".join(parts) + last(parts) + "]"
        return json.dumps(value, ensure_ascii=draw(st.booleans()))

    def gap() -> str:
        return draw(gaps)

    def last(parts: list[str]) -> str:
        return draw(st.sampled_from(["", ","])) + gap() if parts else gap()

    return gap() + written(value) + gap()


def toml_string(draw: st.DrawFn, text: str) -> str:
    if "'" not in text and text.isprintable() and draw(st.booleans()):
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@st.composite
def toml_texts(draw: st.DrawFn) -> str:
    """Tables of servers with comments, arrays over several lines and tables below them."""
    eol = draw(st.sampled_from(["\n", "\r\n"]))
    lines = ["# mine", f"model = {toml_string(draw, draw(toml_words))}", ""]
    for name in draw(
        st.lists(st.sampled_from(["a", "b-c", "d.e", 'f"g', "ü"]), unique=True, max_size=3)
    ):
        lines.append(f"[ mcp_servers.{json.dumps(name, ensure_ascii=False)} ] # {name}")
        lines.append(f"  command = {toml_string(draw, draw(toml_words))} # it")
        arguments = [toml_string(draw, one) for one in draw(st.lists(toml_words, max_size=3))]
        if draw(st.booleans()):
            between = draw(st.sampled_from([", ", f", # [{eol}    ", f",{eol}    "]))
            lines.append(
                f"args = [{draw(st.sampled_from(['', eol + '    ']))}{between.join(arguments)}]"
            )
        if draw(st.booleans()):
            lines += [
                "",
                f"[mcp_servers.{json.dumps(name, ensure_ascii=False)}.env]",
                'A = "x=[1]" # "',
            ]
        lines += draw(st.sampled_from([[], [""], ["# after"]]))
    lines += draw(st.sampled_from([[], ["[[others]]", "mcp_servers.a.command = 1", "[others.x]"]]))
    return eol.join(lines) + draw(st.sampled_from(["", eol]))


toml_words = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\x7f\"'#[]"), max_size=8
)


def behind_proxy(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        "command": "/bin/coatcheck",
        "args": ["proxy", "--", entry["command"], *entry.get("args", [])],
    }


def comments(text: str) -> int:
    return text.count("/* {") + text.count("note")


@given(st.data(), configurations)
def test_jsonc_and_json_parse_to_the_same_value(data: st.DataObject, value: dict[str, Any]) -> None:
    text = data.draw(jsonc_texts(value))
    root = JsonText(text).root
    assert root is not None
    assert root.value == value
    plain = JsonText(json.dumps(value)).root
    assert plain is not None
    assert plain.value == value


@given(st.data(), configurations)
def test_a_server_added_to_json_can_be_removed_again(
    data: st.DataObject, value: dict[str, Any]
) -> None:
    text = data.draw(jsonc_texts(value))
    before = JsonConfig(text, SECTION)
    added = before.with_server("new", ENTRY)
    assert added.servers["new"] == ENTRY
    after = added.with_server("new", None)
    assert after.value == value
    assert comments(added.text) == comments(after.text) == comments(text)
    if before.servers:
        assert "".join(after.text.split()) == "".join(text.split())


@given(configurations, st.sampled_from([None, 1, 2, "\t"]), st.sampled_from(["\n", "\r\n"]))
def test_json_written_by_programs_is_restored_byte_for_byte(
    value: dict[str, Any], indent: Any, eol: str
) -> None:
    assume(value["mcpServers"])
    text = json.dumps(value, indent=indent).replace("\n", eol)
    assert JsonConfig(text, SECTION).with_server("new", ENTRY).with_server("new", None).text == text


@given(st.data(), configurations)
def test_wrapping_a_json_server_keeps_everything_else_and_can_be_undone(
    data: st.DataObject, value: dict[str, Any]
) -> None:
    assume(value["mcpServers"])
    text = data.draw(jsonc_texts(value))
    name = data.draw(st.sampled_from(sorted(value["mcpServers"])))
    entry = value["mcpServers"][name]
    before = JsonConfig(text, SECTION)
    wrapped = before.with_server(name, behind_proxy(entry))
    assert wrapped.servers[name]["args"] == [
        "proxy",
        "--",
        entry["command"],
        *entry.get("args", []),
    ]
    assert comments(wrapped.text) == comments(text)
    assert wrapped.with_server(name, entry).value == value


@given(toml_texts())
def test_toml_keeps_everything_else_when_a_table_is_added_and_removed(text: str) -> None:
    before = TomlConfig(text, TABLES)
    added = before.with_server("new", ENTRY)
    assert added.text.startswith(text)
    after = added.with_server("new", None)
    assert after.value == before.value
    assert after.text == text or after.text.removesuffix("\n").removesuffix("\r") == text
    for name in before.servers:
        assert "# mine" in before.with_server(name, None).text


@given(toml_texts())
def test_wrapping_a_toml_server_keeps_everything_else_and_can_be_undone(text: str) -> None:
    before = TomlConfig(text, TABLES)
    for name, entry in before.servers.items():
        wrapped = before.with_server(name, behind_proxy(entry))
        assert wrapped.servers[name]["args"] == [
            "proxy",
            "--",
            entry["command"],
            *entry.get("args", []),
        ]
        assert wrapped.text.count("#") >= text.count("#") - entry["command"].count("#")
        assert wrapped.with_server(name, entry).value == before.value


def test_toml_servers_separated_by_an_array_of_tables_keep_every_line() -> None:
    text = (
        '[mcp_servers.a]\ncommand = "x" # mine\n[[hooks]]\nz = 1\n[mcp_servers.b]\ncommand = "y"\n'
    )
    wrapped = TomlConfig(text, TABLES).with_server("b", behind_proxy({"command": "y"}))
    assert sorted(wrapped.with_server("b", {"command": "y"}).text.splitlines()) == sorted(
        text.splitlines()
    )


@given(st.text("{}[]\"',:/*#= \n\\atn1-.", max_size=30))
def test_junk_either_parses_or_raises_invalid_argument(text: str) -> None:
    for kind, section in ((JsonConfig, SECTION), (TomlConfig, TABLES)):
        try:
            found = kind(text, section)
        except InvalidArgument:
            continue
        assert isinstance(found.value, dict)


@given(st.text(st.sampled_from("abc-XYZ=:, \\\"'\n"), min_size=12, max_size=20))
def test_no_value_of_an_environment_or_header_is_shown(secret: str) -> None:
    assume(len(set(secret)) > 4)
    entry = {
        "command": "x",
        "env": {"A": secret},
        "headers": {"Authorization": secret, "deep": [secret]},
    }
    whole = {"mcpServers": {"a": entry}, "projects": {"/p": {"mcpServers": {"b": entry}}}}
    text = json.dumps(whole, indent=2)
    assert json.dumps(secret) not in JsonConfig(text, SECTION).masked()
    quoted = json.dumps(secret)
    text = f"[mcp_servers.a]\ncommand = 'x'\nenv = {{ A = {quoted} }}\n[mcp_servers.a.http_headers]\nB = {quoted}\n"
    assert quoted not in TomlConfig(text, TABLES).masked()


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "Zx81kQ0pLm22"],
        ["--password", "Zx81kQ0pLm22"],
        ["--token=Zx81kQ0pLm22"],
        ["-H", "Authorization: Bearer Zx81kQ0pLm22"],
        ["postgres://me:Zx81kQ0pLm22@host/db"],
        ["https://host/mcp?api_key=Zx81kQ0pLm22"],
        ["https://host/mcp?k=Zx81kQ0pLm22&x=1"],
        ["-e", "HARMLESS=Zx81kQ0pLm22"],
        ["--env", "HARMLESS=Zx81kQ0pLm22"],
    ],
    ids=lambda words: words[0].split("=")[0],
)
def test_secrets_among_arguments_are_not_shown(words: list[str], indent: int | None) -> None:
    arguments = json.dumps(["-y", *words, "plain"], indent=indent)
    shown = JsonConfig(
        f'{{"mcpServers": {{"a": {{"command": "x", "args": {arguments}}}}}}}', SECTION
    ).masked()
    shown += TomlConfig(f"[mcp_servers.a]\ncommand = 'x'\nargs = {arguments}\n", TABLES).masked()
    assert "Zx81kQ0pLm22" not in shown
    assert shown.count('"plain"') == 2


def test_no_part_of_an_environment_is_shown_however_it_is_written() -> None:
    secret = "4711081500"
    text = f"""{{"mcpServers": {{"a": {{"env": {{ // {secret}
        "A": {secret}, /* {secret}
        {secret} */ "B": "// {secret}", "C": [[{secret}]]
    }} }}, "b": {{"env": ["A={secret}"]}} }}, "x": "// stays"}} // stays"""
    shown = JsonConfig(text, SECTION).masked()
    assert secret not in shown
    assert shown.count("// stays") == 2
    assert JsonConfig(shown, SECTION).value["mcpServers"]["a"]["env"].keys() == {"A", "B", "C"}
    text = f"""# stays
[mcp_servers.a.env] # {secret}
# {secret}
A = "# {secret}" # {secret}
B = {secret}
[mcp_servers.a]
args = ["# stays"] # stays
"""
    shown = TomlConfig(text, TABLES).masked()
    assert secret not in shown
    assert shown.count("# stays") == 3
