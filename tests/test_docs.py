"""Tests of the documentation: code runs, links lead somewhere, every command, option and exit code
is documented."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from coatcheck import errors
from coatcheck.cli import BROKEN_PIPE, INTERRUPTED, main
from coatcheck.context.metrics import PromptMetrics
from examples import pictures

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """The sections of a page by their second-level headings."""
    parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    if page.name in ("content.md", "reading.md"):
        pytest.importorskip("duckdb", reason="its SQL needs the extra 'sql'")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    subprocess.run([sys.executable, "-W", "error", str(script)], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "block", blocks(ROOT / "README.md", "python"), ids=lambda block: block.split("\n")[0]
)
def test_each_block_of_python_in_the_readme_runs_alone_in_a_fresh_folder(
    block: str, tmp_path: Path
) -> None:
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


def test_the_first_screen_of_the_readme_has_the_two_commands_for_a_fresh_machine() -> None:
    start = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert start.index("\nmake demo") < start.index("\nmake test")


HERE = click.Context(main)


def below(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    """A command and, if it is a group, the commands in it, by name."""
    if not isinstance(command, click.Group):
        return [(name, command)]
    return [(name, command), *((f"{name} {inner}", one) for inner, one in command.commands.items())]


COMMANDS = {
    name: found for name in main.list_commands(HERE) if (found := main.get_command(HERE, name))
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_each_of_its_options_is_documented(name: str) -> None:
    text = sections(ROOT / "docs" / "cli.md")
    shared = (ROOT / "docs" / "cli.md").read_text().split("\n## ")[0]
    assert name in text
    for called, command in below(name, COMMANDS[name]):
        assert f"coatcheck {called}" in text[name]
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else []:
                where = (
                    shared
                    if option in ("--store", "--session", "--any-session", "--json")
                    else text[name]
                )
                assert re.search(rf"`{re.escape(option)}\b", where), option


def test_the_page_of_the_command_line_names_no_command_or_option_that_does_not_exist() -> None:
    text = sections(ROOT / "docs" / "cli.md")
    assert set(text) - {"Exit codes"} == set(COMMANDS)
    commands = [command for name in COMMANDS for _, command in below(name, COMMANDS[name])]
    known = {
        option for command in commands for parameter in command.params for option in parameter.opts
    }
    assert set(re.findall(r"`(--?[a-z][a-z-]*)", (ROOT / "docs" / "cli.md").read_text())) <= known | {
        "-h", "--help", "--version",
    }  # fmt: skip


def test_every_figure_of_a_model_call_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [one.name for one in fields(PromptMetrics) if f"`{one.name}`" not in page] == []


def test_every_exit_code_is_documented() -> None:
    table = sections(ROOT / "docs" / "cli.md")["Exit codes"]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert documented == {0, BROKEN_PIPE, INTERRUPTED} | {
        mapping.exit for mapping in errors.CODES.values()
    }


def test_every_command_says_what_it_does_and_each_option_has_help() -> None:
    for name in COMMANDS:
        for _, command in below(name, COMMANDS[name]):
            assert command.help
            assert all(one.help for one in command.params if isinstance(one, click.Option)), (
                command.name
            )


def without_code(page: Path) -> str:
    fenced = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda found: re.sub(r"[^\w -]", "", found[0]), fenced)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as repositories and the site make them."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found[re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")] += 1
    return {
        f"{name}-{again}" if again else name
        for name, times in found.items()
        for again in range(times)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)(?:#([^)]*))?\)", without_code(page)):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_index_and_in_the_navigation_of_the_site() -> None:
    pages = {page.name for page in ROOT.glob("docs/*.md")}
    linked = re.findall(r"\]\(([^)#/]+\.md)", without_code(ROOT / "docs" / "index.md"))
    assert pages - {"index.md"} <= set(linked)
    navigation = re.findall(
        r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1], re.MULTILINE
    )
    assert pages | {
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
    } == set(navigation)
    assert len(navigation) == len(set(navigation))


def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?([^\" >]+)",
            page.read_text(),
        )
        assert loaded
        assert not [one for one in loaded if re.match(r"\w+:|//", one)], page.name
    assert (tmp_path / "examples" / "openai_agent.py").exists()


def test_the_table_of_layers_has_every_module_and_the_names_in_it_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "coatcheck"
    table = page.split("\n| layer |")[1].split("\n\n")[0]
    places = [row.split("|")[2] for row in table.splitlines()[2:]]
    named = {path for place in places for path in re.findall(r"`([\w/.]+)`", place)}
    assert [path for path in named if not (package / path).exists()] == []
    there = {path.name for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    known = {path.split("/")[0] for path in named} | {"__init__.py", "__main__.py", "__pycache__"}
    assert sorted(there - known) == []
    for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", page):
        if not name.endswith((".py", ".toml")):
            assert pkgutil.resolve_name(f"coatcheck.{name}") is not None


def rows(picture: Path) -> list[str]:
    """The lines of text in a picture of a terminal, without what depends on the width of a
    column."""
    lines: dict[float, str] = defaultdict(str)
    for part in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        lines[float(part.attrib["y"])] += part.text or ""
    shown = (" ".join(lines[y].split()) for y in sorted(lines))
    return [re.sub(r"\S*…$", "…", re.sub(r"\b\d+ s\b", "1 s", line)) for line in shown if line]


def test_the_picture_of_a_terminal_shows_what_the_commands_print_today(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "examples.pictures", str(tmp_path / "drawn.svg")],
        cwd=ROOT,
        check=True,
    )
    drawn = rows(tmp_path / "drawn.svg")
    assert [line for line in drawn if line.startswith("$ ")] == [
        f"$ {command}" for command in pictures.COMMANDS
    ]
    assert drawn == rows(pictures.PICTURE), "draw it again: python -m examples.pictures"
    text = pictures.PICTURE.read_text()
    assert "@font-face" not in text
    assert "url(http" not in text


def test_the_demo_runs_as_make_runs_it() -> None:
    assert "$(BIN)/python -m examples.demo" in (ROOT / "Makefile").read_text()
    demo = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert demo.stderr == ""
    assert "\x1b" not in demo.stdout
    assert re.findall(r"^turn (\d)$", demo.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"^total of 2 turns +[\d,]+ +[\d,]+ +[\d.]+×$", demo.stdout, re.MULTILINE)
