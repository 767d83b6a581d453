"""The MCP proxy compared with the server alone: time, memory, and the tokens that reach the client.

The servers are real ones. Those from npm are left out where they are not installed, and the row is
missing then.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench import MB, Bench, text
from benchmarks.report import Row
from benchmarks.timing import Side, interleaved
from coatcheck.tokens import estimate
from tests.mcp import node_servers
from tests.mcp.speaking import Speaker, environment, proxy

_COMMITS = 20
_ROOT = Path(__file__).resolve().parent.parent
_WHO = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def proxied(bench: Bench) -> Iterator[Row]:
    yield from _small_calls(bench)
    yield from _large_result(bench)
    yield from _history(bench)
    yield from _file(bench)


def _pair(bench: Bench, held: ExitStack, command: Sequence[str]) -> tuple[Speaker, Speaker]:
    """The bare server, and one behind a proxy."""
    env = environment(bench.new_folder("proxy") / "store")
    found = [held.enter_context(Speaker(one, env)) for one in (command, proxy(server=command))]
    for speaker in found:
        speaker.begin()
        speaker.ask("tools/list")
    return found[0], found[1]


def _small_calls(bench: Bench) -> Iterator[Row]:
    command = [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"]
    asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    with ExitStack() as held:
        bare, ours = _pair(bench, held, command)
        times = interleaved(
            Side(lambda: None, lambda _: bare.call("convert_time", **asked)),
            Side(lambda: None, lambda _: ours.call("convert_time", **asked)),
            bench.rounds(200),
        )
        yield Row("a small call", times[0].p50, times[1].p50, 0.003, "over", times=times)


def _large_result(bench: Bench) -> Iterator[Row]:
    """A 10 MB result, three times: peak resident memory, and memory afterwards."""
    if not Path("/proc/self/status").exists():
        return
    folder = _repository(bench.new_folder("large"), [{"large.txt": text(10 * MB)}])
    with ExitStack() as held:
        _, ours = _pair(bench, held, _git(folder))
        pid = ours.process.pid
        idle = _memory(pid, "VmRSS")
        for _ in range(3):
            ours.call("git_show", repo_path=str(folder), revision="HEAD")
        yield Row("a result of 10 MB, resident", idle, _memory(pid, "VmHWM"), 50 * MB, "memory")
        time.sleep(1)  # what is free is handed back a moment later
        yield Row("after it", idle, _memory(pid, "VmRSS"), 10 * MB, "memory")


def _history(bench: Bench) -> Iterator[Row]:
    """What `git log -p` shows: the log, and each commit's patch."""
    sources = sorted((_ROOT / "src" / "coatcheck").rglob("*.py"))[: 3 * _COMMITS]
    steps = [
        {one.name: one.read_text("utf-8") for one in sources[at::_COMMITS]}
        for at in range(_COMMITS)
    ]
    folder = _repository(bench.new_folder("history"), steps)
    calls = [("git_log", {"repo_path": str(folder), "max_count": _COMMITS})]
    calls += [
        ("git_show", {"repo_path": str(folder), "revision": f"HEAD~{back}"})
        for back in range(_COMMITS - 1)
    ]
    yield from _tokens(bench, "tokens of git log -p, mcp-server-git", _git(folder), calls)


def _file(bench: Bench) -> Iterator[Row]:
    folder = bench.new_folder("files")
    (folder / "large.txt").write_text(text(MB))
    try:
        command = [*node_servers.command("server-filesystem"), str(folder)]
    except node_servers.Missing:
        return
    calls = [("read_text_file", {"path": str(folder / "large.txt")})]
    yield from _tokens(bench, "tokens of a file of 1 MB, server-filesystem", command, calls)


def _tokens(
    bench: Bench, case: str, command: Sequence[str], calls: Sequence[tuple[str, dict[str, Any]]]
) -> Iterator[Row]:
    with ExitStack() as held:
        counts = []
        for speaker in _pair(bench, held, command):
            results = [speaker.call(tool, **arguments) for tool, arguments in calls]
            counts.append(sum(_seen(result) for result in results))
        yield Row(case, counts[0], counts[1], None, "count")


def _seen(result: dict[str, Any]) -> int:
    return sum(estimate(block["text"]) for block in result["content"] if block["type"] == "text")


def _git(folder: Path) -> list[str]:
    return [sys.executable, "-m", "mcp_server_git", "--repository", str(folder)]


def _repository(folder: Path, steps: Sequence[dict[str, str]]) -> Path:
    """A repository with a commit for each step."""
    for command in (["init", "-q", "-b", "main"], ["commit", "-q", "--allow-empty", "-m", "begin"]):
        subprocess.run(["git", *_WHO, *command], cwd=folder, check=True)
    for number, files in enumerate(steps):
        for name, content in files.items():
            (folder / name).write_text(content)
        subprocess.run(["git", "add", "."], cwd=folder, check=True)
        subprocess.run(
            ["git", *_WHO, "commit", "-q", "-m", f"step {number}"], cwd=folder, check=True
        )
    return folder


def _memory(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
