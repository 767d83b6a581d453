"""Servers that crash, hang or write garbage, and clients that disconnect: requests fail, processes
end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mcp.speaking import ODD, Speaker, environment, gone, is_running, proxy, text_of

Speak = Callable[..., Speaker]
FAILED = "upstream_failed"


def test_when_a_server_dies_every_request_is_answered_and_the_proxy_ends(speak: Speak) -> None:
    speaker = speak()
    waiting = [speaker.start("tools/call", {"name": "hang", "arguments": {}}) for _ in range(3)]
    error = speaker.call("die", status=7)
    assert (error["code"], error["data"]["code"]) == (-32000, FAILED)
    assert "exit status 7" in error["message"]
    assert [speaker.answer(one)["error"]["data"]["code"] for one in waiting] == [FAILED] * 3
    assert speaker.leave() == 10
    assert speaker.complained("odd: dying")


def test_a_server_that_is_killed_is_reported_as_killed(speak: Speak) -> None:
    speaker = speak()
    pid = int(text_of(speaker.call("spawn")).split()[0])
    waiting = speaker.start("tools/call", {"name": "hang", "arguments": {}})
    os.kill(pid, signal.SIGKILL)
    assert "signal 9" in speaker.answer(waiting)["error"]["message"]


def test_a_missing_command_is_an_error_at_once(speak: Speak) -> None:
    speaker = speak(server=["no-such-command-anywhere"], begin=False)
    assert speaker.leave() == 10
    assert speaker.complained("no-such-command-anywhere")


def test_a_command_that_exits_at_once_fails_the_handshake(speak: Speak) -> None:
    speaker = speak(
        server=[sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(5)"], begin=False
    )
    assert (
        "exit status 5"
        in speaker.ask("initialize", {"protocolVersion": "2025-06-18"})["error"]["message"]
    )


def test_junk_on_stdout_is_reported_on_stderr_and_harms_nothing(odd: Speaker) -> None:
    assert text_of(odd.call("junk")) == "after the junk"
    assert text_of(odd.call("deep")) == "after the brackets"
    assert odd.complained("this is not JSON")


@pytest.mark.parametrize("id_first", [True, False])
def test_a_result_of_500_megabytes_is_an_error_and_never_in_memory(
    odd: Speaker, id_first: bool
) -> None:
    odd.call("huge", size=65 << 20)
    before = _peak(odd.process.pid)
    error = odd.call("huge", size=500 << 20, id_first=id_first)
    assert error["data"]["code"] == FAILED
    assert "524,288" in error["message"]
    assert _peak(odd.process.pid) - before < 64 << 10
    assert text_of(odd.call("echo"))


def test_a_call_that_hangs_times_out_and_is_reported(speak: Speak) -> None:
    speaker = speak("--timeout", "1")
    error = speaker.call("hang")
    assert error["data"]["code"] == FAILED
    assert "odd: cancelled" in speaker.complained("cancelled")
    assert text_of(speaker.call("echo"))


def test_progress_gives_a_server_more_time(speak: Speak) -> None:
    speaker = speak("--timeout", "1.5")
    params = {
        "name": "wait",
        "arguments": {"times": 3, "pause": 0.8},
        "_meta": {"progressToken": "t"},
    }
    assert text_of(speaker.ask("tools/call", params)["result"]) == "done"
    assert [one["params"]["x-unknown"] for one in speaker.heard if one.get("method")] == [
        "kept"
    ] * 3


def test_a_late_answer_to_a_cancelled_request_harms_nothing(odd: Speaker) -> None:
    waiting = odd.start("tools/call", {"name": "late", "arguments": {}})
    odd.tell("notifications/cancelled", {"requestId": waiting, "reason": "no more"})
    assert odd.ask("odd/release")["result"] == {}
    assert text_of(odd.call("echo"))
    assert odd.complained("no more")


def test_cancelling_a_call_of_our_own_tool_does_not_disturb_the_server(odd: Speaker) -> None:
    waiting = odd.start("tools/call", {"name": "list_artifacts", "arguments": {}})
    odd.tell("notifications/cancelled", {"requestId": waiting})
    assert text_of(odd.call("echo"))


def test_a_client_that_leaves_ends_a_server_that_hangs(speak: Speak) -> None:
    speaker = speak(server=[*ODD, "--stubborn"])
    pids = [int(one) for one in text_of(speaker.call("spawn")).split()]
    speaker.start("tools/call", {"name": "hang", "arguments": {}})
    assert speaker.leave() == 0
    assert gone(*pids)


def test_a_client_that_stops_reading_ends_the_proxy(place: Path) -> None:
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        proxy(server=ODD), env=environment(place), stdin=subprocess.PIPE, stdout=theirs
    )
    os.close(theirs)
    with process, open(ours, "rb") as answers:
        assert process.stdin is not None
        params = {"name": "spawn", "arguments": {}}
        for body in (
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {"protocolVersion": "2025-06-18"},
            },
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params},
        ):
            process.stdin.write(json.dumps(body).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(answers.readline())
        answers.close()
        process.stdin.write(b'{"jsonrpc":"2.0","id":3,"method":"tools/list"}\n')
        process.stdin.flush()
        assert process.wait(30) == 0
    assert gone(*map(int, text_of(answer["result"]).split()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stubborn", [[], ["--stubborn"]], ids=["", "stubborn"])
def test_children_end_with_the_proxy_however_it_ends(
    speak: Speak, number: signal.Signals, stubborn: list[str]
) -> None:
    speaker = speak(server=[*ODD, *stubborn], is_warm=False)
    pids = [int(one) for one in text_of(speaker.call("spawn")).split()]
    assert all(map(is_running, pids))
    speaker.process.send_signal(number)
    assert speaker.process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    assert gone(*pids)


@pytest.mark.parametrize("end", ["proxy", "server", "client"])
def test_children_of_a_server_end_with_it_even_if_they_ignore_signals(
    speak: Speak, end: str
) -> None:
    speaker = speak(is_warm=False)
    pids = [int(one) for one in text_of(speaker.call("spawn", deaf=True)).split()]
    assert all(map(is_running, pids))
    if end == "proxy":
        speaker.process.kill()
    elif end == "server":
        assert "exit status 7" in speaker.call("die", status=7)["message"]
        assert speaker.leave() == 10
    else:
        assert speaker.leave() == 0
    assert gone(*pids)


def test_a_command_is_looked_up_in_its_working_folder(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    script = folder / "serve"
    script.write_text(f"#!/bin/sh\nexec {ODD[0]} {ODD[1]}\n")
    script.chmod(0o755)
    config = tmp_path / "servers.json"
    config.write_text(
        json.dumps({"mcpServers": {"it": {"command": "./serve", "cwd": str(folder)}}})
    )
    with Speaker(proxy("--config", str(config)), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        assert text_of(speaker.call("echo"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the guard in /proc")
def test_children_end_even_if_their_guard_is_killed(speak: Speak) -> None:
    speaker = speak(is_warm=False)
    pids = [int(one) for one in text_of(speaker.call("spawn")).split()]
    guard = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert guard != speaker.process.pid
    os.kill(guard, signal.SIGKILL)
    assert gone(guard, *pids)


def test_a_thousand_concurrent_calls_each_get_their_own_answer(odd: Speaker) -> None:
    waiting = {
        odd.start("tools/call", {"name": "echo", "arguments": {"number": n}}): n
        for n in range(1_000)
    }
    for request_id, number in waiting.items():
        assert json.loads(text_of(odd.answer(request_id)["result"]))["arguments"] == {
            "number": number
        }
    assert not [one for one in odd.heard if one.get("id") in waiting]


def test_concurrent_large_and_small_results_are_not_swapped(odd: Speaker) -> None:
    sizes = {
        odd.start("tools/call", {"name": "text", "arguments": {"size": n}}): n
        for n in range(100, 60_000, 997)
    }
    for request_id, size in sizes.items():
        text = text_of(odd.answer(request_id)["result"])
        assert (json.loads(text)["size_bytes"] if text.startswith('{"stub"') else len(text)) == size


def test_requests_sent_before_the_client_closes_stdin_are_answered(place: Path) -> None:
    requests = [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {"protocolVersion": "2025-06-18"},
        },
        {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tools/call",
            "params": {"name": "text", "arguments": {"size": 90_000}},
        },
    ]
    output = subprocess.run(
        proxy(server=ODD),
        input="".join(json.dumps(one) + "\n" for one in requests),
        env=environment(place),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert [json.loads(line)["id"] for line in output.splitlines()] == [1, 2]


def _peak(pid: int) -> int:
    """The peak memory of a process, in KiB."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("no /proc here to look at a process's memory")
    found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1])
