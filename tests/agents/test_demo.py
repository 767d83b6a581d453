"""The demo: the same on every run, with a correct answer, and it leaves nothing behind."""

from __future__ import annotations

import io
import re
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from examples import demo, shop


@pytest.fixture(scope="module")
def turns() -> list[demo.Turn]:
    return demo.run()


def shown_at(turns: list[demo.Turn], width: int, *, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=terminal, highlight=False
    )
    demo.show(turns, console)
    return console.export_text()


def test_every_run_is_the_same_and_leaves_nothing_behind(
    turns: list[demo.Turn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo.run() == turns
    assert not list(tmp_path.iterdir())


def test_the_answer_is_what_the_tools_find_by_themselves(turns: list[demo.Turn]) -> None:
    whole = (
        shop.fetch_log("checkout", shop.DAY),
        shop.export_orders(shop.DAY),
        shop.fetch_charges(shop.DAY),
    )
    found = shop.reconcile(*whole)
    assert (found["charged_twice"], found["refunded"]) == (len(shop.TIMEOUTS), len(shop.REFUNDED))
    assert f"We owe {found['owed_cents'] / 100:,.2f} EUR" in turns[-1].text
    assert all(customer in turns[-1].text for customer in found["customers"])
    by_country = re.findall(r"([\d,.]+\d) to [A-Z]{2}", turns[-1].text)
    assert (
        sum(round(float(euros.replace(",", "")) * 100) for euros in by_country)
        == (found["owed_cents"])
    )


def test_large_results_stay_out_of_prompts_and_prompts_stay_small(turns: list[demo.Turn]) -> None:
    got = {
        name: whole
        for turn in turns
        for name, text, whole in turn.got
        if text.startswith('{"stub":')
    }
    assert set(got) == {"fetch_log", "export_orders", "fetch_charges"}
    assert all(whole > 40_000 for whole in got.values())
    assert max(turn.tokens_with for turn in turns) < 3_000
    for before, after in pairwise(turns):
        assert before.tokens_with < after.tokens_with
        assert before.tokens_without < after.tokens_without
    assert turns[1].tokens_without > 50 * turns[1].tokens_with


def test_requests_that_a_provider_would_refuse_are_in_no_total(turns: list[demo.Turn]) -> None:
    both = [turn for turn in turns if turn.tokens_without <= demo.WINDOW]
    assert 0 < len(both) < len(turns)
    shown = shown_at(turns, 110)
    small, large = sum(turn.tokens_with for turn in both), sum(turn.tokens_without for turn in both)
    assert re.search(
        rf"^total of {len(both)} turns +{small:,} +{large:,} +[\d.]+×$", shown, re.MULTILINE
    )
    assert len(re.findall(r"^turn \d +[\d,]+ +refused *$", shown, re.MULTILINE)) == len(
        turns
    ) - len(both)
    assert f"{sum(turn.tokens_without for turn in turns):,}" not in shown


def test_the_output_says_first_that_the_model_is_a_script(turns: list[demo.Turn]) -> None:
    assert shown_at(turns, 110).startswith("The model in this demo is a script")


def test_no_tool_returned_an_error(turns: list[demo.Turn]) -> None:
    assert not [text for turn in turns for _, text, _ in turn.got if text.startswith("[error")]


def test_costs_are_computed_as_providers_compute_them() -> None:
    assert demo.cost([1_000_000, 1_000_000], cached=False) == pytest.approx(2 * demo.DOLLARS)
    assert demo.cost([1_000_000, 1_000_000], cached=True) == pytest.approx(1.35 * demo.DOLLARS)
    assert demo.cost([1_000, 2_000], cached=True) == pytest.approx(0.0035 * demo.DOLLARS)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_output_fits_terminals_of_any_width(turns: list[demo.Turn], terminal: bool) -> None:
    for width in (60, 200):
        shown = shown_at(turns, width, terminal=terminal)
        assert "total" in shown
        assert all(len(line) <= width for line in shown.splitlines())


def test_a_short_coding_session_is_left_alone_and_says_why() -> None:
    kept = demo.fix_a_bug()
    assert all(one.is_same for one in kept)
    assert "a stub pays" in kept[0].why
    screen = Console(file=io.StringIO(), width=80)
    demo.show_kept(kept, screen)
    assert "4 of 4 results are sent as they are" in " ".join(str(screen.file.getvalue()).split())  # type: ignore[attr-defined]
