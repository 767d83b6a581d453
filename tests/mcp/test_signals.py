"""Signals end a server or a proxy with its store closed, so that nothing is lost that was
counted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck.context import savings
from tests.mcp.speaking import ODD, Speaker, environment, is_running, proxy, text_of

LOG = "".join(f"line {number}: nothing to see here\n" for number in range(3_000))
ENDINGS: dict[str, tuple[signal.Signals, ...]] = {
    "the end of stdin": (),
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGHUP": (signal.SIGHUP,),
    "Claude Code": (signal.SIGINT, signal.SIGTERM),  # 0.1 s later; then SIGKILL, 0.4 s after that
}
endings = pytest.mark.parametrize("ending", ENDINGS)


def end(speaker: Speaker, ending: str) -> int:
    """End a process as a client does, and return its exit status."""
    for number in ENDINGS[ending]:
        speaker.process.send_signal(number)
    if ENDINGS[ending]:
        speaker.process.wait(60)  # with its stdin open
    return speaker.leave()


def reported(place: Path) -> Any:
    """What `coatcheck proxy --report` prints about a store."""
    command = proxy("--report", "--json")
    return json.loads(
        subprocess.run(command, env=environment(place), capture_output=True, check=True).stdout
    )


@endings
def test_the_savings_of_the_plugin_are_in_the_report_after(tmp_path: Path, ending: str) -> None:
    event = {
        "hook_event_name": "PostToolUse",
        "session_id": "s1",
        "tool_name": "Bash",
        "tool_use_id": "t1",
        "tool_response": json.dumps(
            {"stdout": LOG, "stderr": "", "interrupted": False, "isImage": False}
        ),
        "agent_type": "",
        "cwd": str(tmp_path),
    }
    command = [sys.executable, "-m", "coatcheck", "mcp", "--claude-code"]
    with Speaker(command, environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "stub" in json.dumps(speaker.call("hook", **event))
        status = end(speaker, ending)
    assert -status in (ENDINGS[ending] or (0,))
    (row,) = reported(tmp_path / "store")["rows"]
    assert (row["surface"], row["tool"], row["results"]) == ("claude-code", "Bash", 1)


@endings
def test_the_savings_of_a_proxy_are_in_the_report_after(tmp_path: Path, ending: str) -> None:
    with Speaker(proxy(server=ODD, is_warm=False), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "stub" in json.dumps(speaker.call("text", size=100_000))
        end(speaker, ending)
    (row,) = reported(tmp_path / "store")["rows"]
    assert (row["surface"], row["tool"], row["results"]) == ("proxy", "text", 1)


def test_a_proxy_has_written_its_counts_before_it_waits_for_its_server(tmp_path: Path) -> None:
    """A client that ends a proxy by signals kills it half a second later, while a slow server has
    not ended."""
    deaf = tmp_path / "deaf.py"  # ends neither with its stdin nor by a signal
    deaf.write_text(
        "import runpy, signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        f"sys.argv = sys.argv[:1] + {ODD[2:]!r}\n"
        f"runpy.run_path({ODD[1]!r}, run_name='__main__')\n"
        "time.sleep(600)\n"
    )
    command = proxy(server=[sys.executable, str(deaf)], is_warm=False)
    with Speaker(command, environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert "stub" in json.dumps(speaker.call("text", size=100_000))
        server = int(text_of(speaker.call("spawn")).split()[0])
        speaker.process.send_signal(signal.SIGINT)
        with coatcheck.open(tmp_path / "store") as store:
            while not savings(store).total.results:
                assert is_running(server)
                time.sleep(0.05)  # a reader that never pauses may keep the proxy from writing
        speaker.process.kill()
        speaker.process.wait(60)
