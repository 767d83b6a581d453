"""The benchmarks run and compare. No test asserts a time."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import coatcheck
from benchmarks import contents, effect, eyes, offload, programs, prompts, quality, replay
from benchmarks.bench import Bench
from benchmarks.built import built
from benchmarks.counted import COUNTED
from benchmarks.looked_up import LOOKED_UP
from benchmarks.peers import PEERS, compare, environment
from benchmarks.peers.tools import as_script
from benchmarks.provider_rules import BoundThinking
from benchmarks.report import Row
from benchmarks.results import Results, Table, changes, save
from benchmarks.runs import Step
from benchmarks.timing import Times
from benchmarks.tool_tasks import TASKS, Task
from coatcheck import tokens
from coatcheck.audit import Offloading, WithCoatcheck, billed
from coatcheck.messages.recordings import (
    RecordedCall,
    RecordedConversation,
    RecordedInput,
    Recording,
    ToolUse,
)

ROOT = Path(__file__).resolve().parent.parent


def run_benchmarks(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_quick_case_prints_ratios_writes_its_figures_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    done = run_benchmarks(tmp_path, "get", "--quick", "--json", "figures.json")
    assert done.returncode == 0, done.stderr
    assert re.search(r"get 20 KB +\|.*\| +\d+\.\d\d× \| +≤ 2\.00× \|", done.stdout)
    assert re.search(r"\d of \d rows are within their limit", done.stdout)
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["tables"]["get"]["rows"]
    assert all(row["value"] == pytest.approx(row["ours"] / row["floor"], rel=1e-3) for row in rows)
    assert {"cpu", "cores", "file system", "python", "sqlite"} <= figures["machine"].keys()
    assert list((tmp_path / "build").iterdir()) == []
    assert os.uname().nodename not in done.stdout
    assert str(tmp_path) not in done.stdout


def test_a_row_is_judged_by_ratio_by_difference_or_by_count() -> None:
    assert Row("slow", 1.0, 3.0, 2.0).ok is False
    assert Row("parallel", 100.0, 250.0, 2.0, "rate", at_least=True).ok is True
    assert Row("memory", 20.0, 70.0, 64.0, "memory").value == 50.0
    assert Row("errors", None, 1, 0, "count").ok is False
    assert Row("extra", 0.001, 0.004, 0.005, "over").value == 0.003
    assert Row("hits", None, 0.9, 0.85, "share", at_least=True).ok is True
    assert Row("informs", 1.0, 9.0, None).ok is None


def results(*rows: Row, cpu: str = "one") -> Results:
    return Results(
        {"cpu": cpu, "cores": "2", "file system": "ext4"}, {"put": Table(rows, 1.0, 1.0)}
    )


def test_a_run_names_rows_that_are_worse_or_better_than_in_the_last_full_run() -> None:
    before = results(
        Row("slower", 1.0, 1.0, None), Row("same", 1.0, 1.0, None), Row("gone", 1.0, 1.0, None),
        Row("faster", 1.0, 2.0, None), Row("parallel", 10.0, 30.0, 2.0, "rate", at_least=True),
        Row("almost nothing", None, 0, 0, "count"),
    )  # fmt: skip
    now = results(
        Row("slower", 1.0, 1.3, None), Row("same", 1.0, 1.1, None), Row("new", 1.0, 9.0, None),
        Row("faster", 1.0, 1.0, None), Row("parallel", 10.0, 20.0, 2.0, "rate", at_least=True),
        Row("almost nothing", None, 0, 0, "count"),
    )  # fmt: skip
    worse, better = changes(before, now)
    assert [line.split(":")[1].strip() for line in worse] == ["slower", "parallel"]
    assert [line.split(":")[1].strip() for line in better] == ["faster"]
    assert "1.00× before, 1.30× now" in worse[0]


def test_results_are_kept_as_json_and_shown_as_a_table_and_a_plot_beside_earlier_ones(
    tmp_path: Path,
) -> None:
    page, file = tmp_path / "README.md", tmp_path / "results.json"
    page.write_text((ROOT / "benchmarks" / "README.md").read_text())
    parts = len(page.read_text().split("<!-- "))
    first = results(
        Row("put 1 KB", 0.001, 0.003, 2.0, times=(Times(1.0, 2.0, 1.5), Times(3.0, 4.0, 3.5)))
    )
    save(first, tmp_path)
    more = Results(
        first.machine, {"pages": Table((Row("a page", None, 30, 40, "count"),), 2.0, 1.0)}
    )
    save(more, tmp_path)
    kept = Results.of(file.read_text())
    assert kept.tables == first.tables | more.tables
    assert "| put 1 KB | 1.00 ms | 3.00 ms | 3.00× | ≤ 2.00× | NO |" in page.read_text()
    assert "1 of 2 rows within their limit" in page.read_text()
    assert len(page.read_text().split("<!-- ")) == parts
    drawn = {path.stem: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert "1 = the floor" in drawn["put"]
    assert "1 = the limit" in drawn["pages"]
    assert '<svg xmlns="http://www.w3.org/2000/svg"' in drawn["put"]


@pytest.mark.parametrize(
    "case", [quality.search, quality.estimates, prompts.recall_of_chunks, replay.replay]
)
def test_a_case_that_needs_the_corpus_reports_that_it_is_skipped_without_it(
    case: Callable[[Bench], Iterator[Row]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for module in (quality, prompts, replay):
        monkeypatch.setattr(module, "corpus", lambda: None)
    assert list(case(Bench(tmp_path))) == []
    assert "skipped: there is no corpus" in capsys.readouterr().out


def test_peers_that_cannot_be_installed_have_rows_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise environment.Missing("no index here")

    monkeypatch.setattr(environment, "python", missing)
    monkeypatch.setattr(compare, "_SIZES", ((20_000, 3),))
    rows = list(compare.peers(Bench(tmp_path, quick=True)))
    assert [row.case.split()[-1] for row in rows[: len(PEERS)]] == list(PEERS)
    assert all(row.ok is None and row.ours > 0 for row in rows)
    assert all(
        row.note == "not installed: no index here" for row in rows if " against " in row.case
    )
    assert re.search(r"coatcheck .* yes", capsys.readouterr().out)


def test_the_lock_file_of_the_peers_has_hashes_and_no_url() -> None:
    lock = environment.LOCK.read_text()
    wanted = (ROOT / "benchmarks" / "peers" / "wanted.txt").read_text()
    assert "://" not in lock
    assert lock.count("--hash=sha256:") > lock.count("==") > 0
    for peer in PEERS.values():
        assert re.search(rf"^{re.escape(peer.package)}==", lock, re.MULTILINE)
        assert re.search(rf"^{re.escape(peer.package)}(\[\w+\])?==", wanted, re.MULTILINE)


def test_no_artifact_is_lost_or_duplicated_by_concurrent_threads(tmp_path: Path) -> None:
    power, process, lost, doubled = offload.crowd(Bench(tmp_path, quick=True))
    assert power.ours > 0
    assert process.ours > 0
    assert (lost.ours, doubled.ours) == (0, 0)


def test_one_grep_finds_the_parts_of_large_results_that_recorded_runs_used(
    corpus: Path, tmp_path: Path
) -> None:
    rows = [
        row
        for row in eyes.eyes(Bench(tmp_path, quick=True))
        if row.case.endswith("found by one grep for it")
    ]
    assert [row.case for row in rows if row.ok is False] == []
    assert len(rows) == 3


ROWS = "\n".join(
    f"host-{number:04}.example.org is up since {number * 37} seconds" for number in range(2_000)
)


def recorded_run(answer: str) -> Recording:
    """A run in which a large result arrives, and five short calls follow."""
    asked = [
        Step("user", "Is anything down?"),
        Step("model", "I look."),
        Step("result", ROWS, "query"),
    ]
    more = [Step("model", answer), Step("user", "And now?")] * 5
    return effect.recording_of([*asked, *more, Step("model", "Still.")])


def test_a_stub_costs_its_reads_and_pays_off_if_nothing_is_read() -> None:
    ways, idle, reading = (
        effect.ways(),
        recorded_run("All is well."),
        recorded_run("host-1234.example.org is up."),
    )
    with coatcheck.open("memory:") as store:
        inline, stubs, removed = (
            billed(idle, ways[name](store.session(name)))
            for name in ("inline", "over 3,000 tokens", "nothing")
        )
        read = billed(reading, ways["over 3,000 tokens"](store.session("read")))
    assert removed.cost < stubs.cost < 0.2 * inline.cost
    assert (stubs.stubs, stubs.reads, read.reads, read.calls) == (1, 0, 1, inline.calls + 1)
    assert stubs.largest < tokens.exact(ROWS) < inline.largest


def test_truncated_content_is_lost_and_a_peer_that_reads_all_of_it_is_charged_for_all_of_it() -> (
    None
):
    ways, reading = effect.ways(), recorded_run("host-1234.example.org is up.")
    with coatcheck.open("memory:") as store:
        cut, whole, lines = (
            billed(
                reading,
                ways[next(name for name in ways if name.startswith(start))](store.session(start)),
            )
            for start in ("truncated", "any limit", "strands")
        )
    assert (cut.lost, cut.reads, whole.reads, lines.reads) == (1, 0, 1, 1)
    assert lines.cost < 0.3 * whole.cost


def test_a_session_through_the_builder_is_read_back_with_real_calls() -> None:
    use = [ToolUse("t1", "query", {"sql": "SELECT *"})]
    calls = [
        RecordedCall([RecordedInput("Is anything down?")], "I look.", use),
        RecordedCall([RecordedInput(ROWS, True, "query", "t1")], "host-1234.example.org is up."),
        *(RecordedCall([RecordedInput("And now?")], "Fine.") for _ in range(5)),
    ]
    recording = Recording("made", [RecordedConversation(calls, 5_000)])
    (inline, *_), (ours, rewritten, wrong) = built(recording, inline=True), built(recording)
    assert wrong == 0
    assert (ours.stubs, ours.reads, ours.extra_calls, ours.calls) == (1, 1, 1, inline.calls + 1)
    assert rewritten == 0
    assert ours.cost < 0.5 * inline.cost
    with coatcheck.open("memory:") as store:
        engine = billed(recording, WithCoatcheck(store.session("engine")))
    assert ours.cost / inline.cost == pytest.approx(
        engine.cost / billed(recording, Offloading()).cost, abs=0.05
    )


def test_thinking_is_bound_to_everything_before_it() -> None:
    rules = BoundThinking()
    request = {
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "a"}, {"name": "b"}],
    }
    first = [{"role": "user", "content": "Hi"}]
    answer = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes"}],
    }
    first_answer = rules.answered({**request, "messages": first}, answer)
    second = [
        *first,
        first_answer,
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    again = rules.answered({**request, "messages": second}, answer)
    third = [*second, again, {"role": "user", "content": "Really?"}]
    assert rules.refused({**request, "messages": third}) == []
    same = [
        {"role": "user", "content": [{"type": "text", "text": "Hi ", "cache_control": {}}]},
        *third[1:],
    ]
    assert rules.refused({**request, "tools": request["tools"][::-1], "messages": same}) == []
    without_first = [*first, {**first_answer, "content": first_answer["content"][1:]}, *third[2:]]
    assert rules.refused({**request, "messages": without_first}) == []
    for changed in (
        {**request, "messages": [{"role": "user", "content": "Ho"}, *third[1:]]},
        {**request, "messages": third, "system": "Be long."},
        {**request, "messages": third, "tools": [{"name": "a"}]},
    ):
        assert len(rules.refused(changed)) == 2
    third_answer = rules.answered({**request, "messages": third}, answer)
    gap = [*third[:3], {**again, "content": again["content"][1:]}, third[4], third_answer]
    assert rules.refused({**request, "messages": gap}) == [
        "messages.5.content.0: the block is bound to a different conversation, a thinking block before it is missing"
    ]


WITHOUT_PROGRAMS = [
    question
    for question in LOOKED_UP
    if question.content not in contents.MADE
    or question.content in ("LICENSE as a PDF", "argparse.py", "dpkg.log")
]


def content_of(question: contents.Question) -> str:
    try:
        return contents.text_of(question.content)
    except contents.NotHere as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("question", WITHOUT_PROGRAMS, ids=lambda question: question.ask)
def test_the_answer_to_a_question_is_known_from_its_content(question: contents.Question) -> None:
    text = content_of(question)
    known = re.compile(question.known(text))
    assert known.search(text) or known.search(str(text.count(question.counted or "\0")))


@pytest.mark.parametrize("question", COUNTED, ids=lambda question: question.ask)
def test_the_programs_of_a_question_print_its_answer(
    question: contents.Question, tmp_path: Path
) -> None:
    text = content_of(question)
    try:
        known = re.compile(question.known(text))
    except contents.NotHere as reason:
        pytest.skip(str(reason))
    (tmp_path / "result.txt").write_text(text)
    for intent in question.intents:
        if intent.code:
            script = as_script(intent.code, "result.txt", text[:2_000])
            done = subprocess.run(
                [sys.executable, "-c", script],
                cwd=tmp_path,
                capture_output=True,
                check=True,
                text=True,
            )
            assert known.search(done.stdout)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_of_tools_is_solved_with_results_inline_and_with_stubs(task: Task) -> None:
    with coatcheck.open("memory:") as store:
        inline = programs.inline(task, store.session("inline"))
        stubs = programs.stubs(task, store.session("stubs"))
    assert 0 < stubs.tokens < inline.tokens
