"""Tests of the documentation: code blocks run, and every command, option and exit code is documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest

from coatcheck import errors
from coatcheck.cli import BROKEN_PIPE, INTERRUPTED, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """The sections of a page by their second-level headings."""
    parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    if page.name in ("content.md", "reading.md"):
        pytest.importorskip("duckdb", reason="its SQL needs the extra 'sql'")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    subprocess.run([sys.executable, "-W", "error", str(script)], cwd=tmp_path, check=True)


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "python"), ids=lambda block: block.split("\n")[0])
def test_each_block_of_python_in_the_readme_runs_alone_in_a_fresh_folder(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    subprocess.run([sys.executable, "-W", "error", str(script)], cwd=tmp_path, check=True)


def test_the_shell_commands_of_the_readme_run(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "README.md", "sh")
    assert len(script.strip().splitlines()) == 14
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": scripts},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 3  # the position of each page
    assert "\n100000\n" in "\n" + done.stdout
    assert "all is well" in done.stdout


def test_the_readme_begins_with_the_two_commands_for_a_fresh_machine() -> None:
    start = (ROOT / "README.md").read_text()[:200]
    assert start.index("make demo") < start.index("make test")


HERE = click.Context(main)


def below(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    """A command and, if it is a group, the commands in it, by name."""
    if not isinstance(command, click.Group):
        return [(name, command)]
    return [(name, command), *((f"{name} {inner}", one) for inner, one in command.commands.items())]


COMMANDS = {name: found for name in main.list_commands(HERE) if (found := main.get_command(HERE, name))}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_each_of_its_options_is_documented(name: str) -> None:
    text = sections(ROOT / "docs" / "cli.md")
    shared = (ROOT / "docs" / "cli.md").read_text().split("\n## ")[0]
    assert name in text
    for called, command in below(name, COMMANDS[name]):
        assert f"coatcheck {called}" in text[name]
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else []:
                where = shared if option in ("--store", "--session", "--json") else text[name]
                assert re.search(rf"`{re.escape(option)}\b", where), option


def test_the_page_of_the_command_line_names_no_command_or_option_that_is_not_there() -> None:
    text = sections(ROOT / "docs" / "cli.md")
    assert set(text) - {"Exit codes"} == set(COMMANDS)
    commands = [command for name in COMMANDS for _, command in below(name, COMMANDS[name])]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"`(--?[a-z][a-z-]*)", (ROOT / "docs" / "cli.md").read_text())) <= known | {
        "-h", "--help", "--version",
    }  # fmt: skip


def test_every_exit_code_is_documented() -> None:
    table = sections(ROOT / "docs" / "cli.md")["Exit codes"]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert documented == {0, BROKEN_PIPE, INTERRUPTED} | {mapping.exit for mapping in errors.CODES.values()}


def test_every_command_says_what_it_does_and_each_option_has_help() -> None:
    for name in COMMANDS:
        for _, command in below(name, COMMANDS[name]):
            assert command.help
            assert all(one.help for one in command.params if isinstance(one, click.Option)), command.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_demo_runs_as_make_runs_it() -> None:
    assert "$(BIN)/python -m examples.demo" in (ROOT / "Makefile").read_text()
    demo = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert demo.stderr == ""
    assert "\x1b" not in demo.stdout
    assert re.findall(r"^turn (\d)$", demo.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"^total +[\d,]+ +[\d,]+ +[\d.]+×$", demo.stdout, re.MULTILINE)
