"""`coatcheck metrics`: tables, JSON, the page with plots, baselines. Names of sessions are
hostile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import config, toolkit
from coatcheck.cli import main
from coatcheck.cli.figures import sparkline
from coatcheck.cli.metrics_page import MAX_ROWS, MAX_SESSIONS, page
from coatcheck.context.metrics import Baseline, Meter, Notice, PromptMetrics
from coatcheck.display import plot, thinned
from tests.browser import chromium
from tests.test_cli import on_terminal

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["metrics", *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COATCHECK_STORE", str(tmp_path / "store"))
    return tmp_path


def measured(
    folder: Path, name: str = "s", turns: int = 6, words: int = 10, **settings: Any
) -> list[PromptMetrics]:
    """The model calls of an agent that reads a large result in each turn."""
    loaded = config.load({"metrics": settings}) if settings else None
    with coatcheck.open(folder / "store", durability="process", settings=loaded) as store:
        session = store.session(name)
        meter = Meter(session, tools=toolkit(session))
        messages: list[Any] = [{"role": "user", "content": "word " * words}]
        found = []
        for turn in range(turns):
            outcome = session.externalize(f"result {turn} " * 5_000, tool="grep")
            messages.append({"role": "user", "content": outcome.text})
            found.append(meter.call(messages=messages))
    return [one for one in found if one is not None]


def test_each_call_is_a_line_in_a_pipe(folder: Path) -> None:
    made = measured(folder)
    rows = [line.split("\t") for line in run().stdout.splitlines()]
    assert [row[:2] for row in rows] == [["s", str(one.turn)] for one in made]
    assert [int(row[3]) for row in rows] == [one.est_tokens for one in made]
    assert [int(row[5]) for row in rows] == [one.tokens_saved for one in made]
    assert {len(row) for row in rows} == {19}


def test_json_has_every_figure(folder: Path) -> None:
    made = measured(folder, turns=2)
    records = [json.loads(line) for line in run("--json").stdout.splitlines()]
    assert [one["tokens_net"] for one in records] == [one.tokens_net for one in made]
    assert records[0]["type"] == "prompt_metrics"


def test_sessions_and_the_newest_calls_can_be_chosen(folder: Path) -> None:
    measured(folder, "a", turns=3)
    measured(folder, "b", turns=3)
    assert [line.split("\t")[:2] for line in run("b", "--last", "2").stdout.splitlines()] == [
        ["b", "2"],
        ["b", "3"],
    ]
    assert len(run().stdout.splitlines()) == 6
    assert run("nobody").stdout == ""


def test_a_terminal_gets_sparklines_a_table_and_warnings(folder: Path) -> None:
    measured(folder, HOSTILE, turns=12)
    code, output, notes = on_terminal("metrics")
    seen = output.decode()
    assert code == 0
    assert re.search(r"prompt +[▁-█]{12}  [\d,]+ → [\d,]+", seen)
    assert "12 calls" in seen
    assert b"rose from" in notes
    assert "\x1b[31m" not in seen
    assert "\u202e" not in seen


def test_a_metrics_file_outlives_the_sessions_and_its_invalid_lines_are_reported(
    folder: Path,
) -> None:
    file = folder / "m.jsonl"
    made = measured(folder, turns=3, file=str(file))
    shutil.rmtree(folder / "store")
    with file.open("ab") as target:
        target.write(b"\xff\xfe\nnot json\n\n{}\n")
    done = run("--file", str(file), "--json")
    assert [json.loads(line)["est_tokens"] for line in done.stdout.splitlines()] == [
        one.est_tokens for one in made
    ]
    assert "3 lines" in done.stderr
    (folder / "other").write_text("nothing\n")
    assert run("--file", str(folder / "other")).exit_code == 2
    assert run("--file", str(folder / "missing")).exit_code == 1


def test_a_rise_against_a_baseline_is_reported_and_has_an_exit_code(folder: Path) -> None:
    measured(folder, turns=12)
    assert run("--save-baseline", "old.json", "--label", "1.0").exit_code == 0
    assert Baseline.read("old.json").label == "1.0"
    assert run("--baseline", "old.json").exit_code == 0
    shutil.rmtree(folder / "store")
    measured(folder, turns=12, words=9_000)
    done = run("--baseline", "old.json")
    assert done.exit_code == 1
    assert "the prompt's tokens rose from" in done.stderr
    assert "'1.0'" in done.stderr
    (folder / "odd.json").write_text("{}")
    assert run("--baseline", "odd.json").exit_code == 2


# The page


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


KNOWN = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "div",
    "b",
    "section",
    "figure",
    "figcaption",
    "span",
    "svg",
    "line",
    "text",
    "polyline",
    "circle",
    "rect",
    "details",
    "summary",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "ul",
    "li",
}


def test_the_page_is_self_contained_and_nothing_in_it_runs_or_fetches(folder: Path) -> None:
    measured(folder, HOSTILE)
    assert run("--html", "page.html").stdout == ""
    text = (folder / "page.html").read_text()
    ElementTree.fromstring(text.partition("\n")[2])  # well-formed, so no name has closed an element
    seen = Page(text)
    assert {tag for tag, _ in seen.elements} <= KNOWN
    for _, attributes in seen.elements:
        assert not {"src", "href", "srcset", "action", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert (
        "meta",
        {
            "http-equiv": "Content-Security-Policy",
            "content": "default-src 'none'; style-src 'unsafe-inline'",
        },
    ) in seen.elements
    assert "<script>alert(1)</script>\"'&\\x1b[31m\\u202e" in seen.text
    assert "prefers-color-scheme:dark" in text


def test_the_page_has_plots_and_a_table_of_all_figures(folder: Path) -> None:
    made = measured(folder)
    run("--html", "page.html")
    seen = Page((folder / "page.html").read_text())
    titles = [
        attributes.get("aria-label") or "" for tag, attributes in seen.elements if tag == "svg"
    ]
    assert len(titles) == 4
    for words in ("with Coatcheck and without", "saved", "read back", "Budget use"):
        assert any(words in title for title in titles)
    for one in made:
        assert f"{one.tokens_saved:,}" in seen.text
        assert f"{one.tokens_without:,}" in seen.text


@given(st.text(max_size=60), st.text(max_size=60))
def test_names_and_warnings_are_escaped_on_the_page(name: str, words: str) -> None:
    notice = Notice("est_tokens", "over", 1, 2, words)
    text = page({name: [PromptMetrics(session=name, est_tokens=5, warnings=(notice,))]})
    root = ElementTree.fromstring(text.partition("\n")[2].encode("utf-8", "replace"))
    assert {element.tag for element in root.iter()} <= KNOWN


def test_the_page_mentions_sessions_and_turns_that_were_left_out() -> None:
    calls = [PromptMetrics(session="s", turn=turn, est_tokens=turn) for turn in range(1, 2_001)]
    text = Page(page({"s": calls})).text
    assert f"the newest {MAX_ROWS} of 2,000" in text
    assert "each point is the largest of 5 turns" in text
    text = Page(page({f"s{number:03}": calls[:1] for number in range(MAX_SESSIONS + 3)})).text
    assert "3 more sessions" in text


def test_a_page_without_calls_is_valid() -> None:
    assert "0 model calls" in Page(page({})).text
    ElementTree.fromstring(
        page({"s": [PromptMetrics(session="s", est_tokens=None)]}).partition("\n")[2]
    )


def test_a_browser_draws_the_page_and_blocks_nothing(folder: Path) -> None:
    browser = chromium()
    measured(folder, HOSTILE)
    run("--html", "page.html")
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder}/profile",
            "--screenshot=page.png",
            "--dump-dom",
            f"file://{folder}/page.html",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (
        "CONSOLE" not in done.stderr
    )  # violations of the policy and broken pages are logged there
    assert done.stdout.count("<svg") == 4
    assert "<script" not in done.stdout


# Plots

VALUES = st.lists(st.none() | st.integers(-(10**9), 10**9) | st.floats(0, 1e12), max_size=60)


@given(VALUES, st.integers(1, 40))
def test_a_sparkline_has_a_block_for_each_few_values(
    values: list[float | None], width: int
) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) <= width
    assert set(drawn) <= set(" ▁▂▃▄▅▆▇█")
    peaks, step = thinned(values, width)
    assert len(drawn) == len(peaks)
    assert len(peaks) * step >= len(values)
    known = [value for value in values if value is not None]
    assert max((one for one in peaks if one is not None), default=None) == max(known, default=None)


def test_a_sparkline_goes_from_zero_to_the_largest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([None, 0, 8]) == " ▁█"
    assert sparkline([]) == ""


@given(VALUES, st.none() | st.integers(0, 10**9))
def test_every_plot_is_well_formed_and_within_its_frame(
    values: list[float | None], limit: int | None
) -> None:
    turns = list(range(1, len(values) + 1))
    for stacked in (False, True):
        root = ElementTree.fromstring(
            plot("title", turns, {"one": values}, stacked=stacked, limit=limit)
        )
        for element in root.iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
                if name in element.attrib:
                    assert -1 <= float(element.attrib[name]) <= 561
            assert float(element.attrib.get("height", 0)) >= 0
