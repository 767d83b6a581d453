"""The command line as people and scripts use it: real processes for pipes, terminals and
signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import errors
from coatcheck.cli import main
from coatcheck.cli.terminal import one_line, visible
from tests import warm

HOSTILE = (
    "\x1b[31mred\x1b[0m",  # colours
    "\x1b]0;title\x07",  # the window's title
    "\x1b]8;;http://example.invalid\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[H",  # clear the screen
    "\x9b31m",  # a C1 control sequence, in one character
    "\x90payload\x9c",
    "\x08\x08\x08overwritten\r",
    "\x7f\x00\x05\x0e",
    "\u202egnp.exe\u202c",  # right-to-left override
    "\u2066isolate\u2069\u200f\u061c",
    "zero\u200bwidth\ufeff",
    "tag\U000e0041\U000e007f",
    "line\u2028separator\u2029",
)
STEERING = {char for text in HOSTILE for char in text if not char.isprintable()}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new store for each test, set in the environment of every command."""
    folder = tmp_path / "store"
    monkeypatch.setenv("COATCHECK_STORE", str(folder))
    monkeypatch.delenv("COATCHECK_SESSION", raising=False)
    return folder


def call(*args: str, stdin: bytes = b"") -> Result:
    """Run a command in this process, for tests without pipes and terminals."""
    return CliRunner().invoke(main, args, input=stdin)


def answer(*args: str, stdin: bytes = b"") -> str:
    result = call(*args, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def command(*args: str) -> list[str]:
    return warm.command("coatcheck", *args)


def run(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*args), input=stdin, capture_output=True, check=False)


def on_terminal(*args: str, stream: str = "stdout") -> tuple[int, bytes, bytes]:
    """Run with a real terminal as stdout or stderr: exit code, what reached the terminal, and the
    other stream."""
    master, slave = pty.openpty()
    with tempfile.TemporaryFile() as other:
        streams: dict[str, Any] = {"stdout": other, "stderr": other} | {stream: slave}
        environment = os.environ | {"TERM": "xterm-256color"}
        process = subprocess.Popen(
            command(*args), stdin=subprocess.DEVNULL, env=environment, **streams
        )
        os.close(slave)
        seen = b"".join(_chunks(master))
        os.close(master)
        code = process.wait()
        other.seek(0)
        return code, seen.replace(b"\r\n", b"\n"), other.read()


def _chunks(handle: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(handle, 65_536)
        except OSError:  # on Linux: the other side was closed
            return
        if not piece:
            return
        yield piece


def raw_files(store: Path) -> list[Path]:
    return sorted(store.glob("blobs/*/*.raw"))


# Put and get


def test_put_prints_the_pointer_alone_and_get_writes_the_exact_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000
    (tmp_path / "content.bin").write_bytes(content)
    put = run("put", str(tmp_path / "content.bin"))
    assert put.returncode == 0
    assert put.stderr == b""
    pointer = put.stdout.decode().rstrip("\n")
    assert coatcheck.is_pointer(pointer)
    got = run("get", pointer)
    assert (got.returncode, got.stdout, got.stderr) == (0, content, b"")


def test_put_reads_stdin_if_the_file_is_a_dash() -> None:
    pointer = run("put", "-", "--name", "piped", stdin=b"from a pipe\n").stdout.decode().strip()
    assert run("get", pointer).stdout == b"from a pipe\n"
    assert run("get", "piped").stdout == b"from a pipe\n"


def test_put_as_json_prints_the_record_of_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "build.log").write_text("2026-03-01 12:00:00 INFO all is well\n")
    options = (
        "--kind",
        "result",
        "--tool",
        "make",
        "--media-type",
        "text/x-log",
        "--summary",
        "a build",
        "--ttl",
        "60",
    )
    record = json.loads(
        answer("put", str(tmp_path / "build.log"), *options, "--session", "s", "--json")
    )
    assert record["pointer"] == "art:" + record["artifact_id"][:12]
    assert record["content_hash"] == "sha256:" + record["artifact_id"]
    keys = ("name", "session_id", "type", "tool", "mime", "summary", "size_bytes", "pinned")
    assert [record[key] for key in keys] == [
        "build.log",
        "s",
        "result",
        "make",
        "text/x-log",
        "a build",
        37,
        False,
    ]
    assert record["created_at"] < record["expires_at"]


def test_a_pinned_artifact_does_not_expire() -> None:
    assert json.loads(answer("put", "-", "--pin", "--json", stdin=b"keep"))["expires_at"] is None


def test_get_writes_to_the_given_file(tmp_path: Path) -> None:
    pointer = answer("put", "-", stdin=b"\x00\x1b[31m\xff").strip()
    assert answer("get", pointer, "-o", str(tmp_path / "out")) == ""
    assert (tmp_path / "out").read_bytes() == b"\x00\x1b[31m\xff"


@pytest.mark.parametrize(
    ("fragment", "part"),
    [
        ("/a", '[1,null,"é"]'),
        ("/a/1", "null"),
        ("/a/2", '"é"'),
        ("/b~1c", "true"),
        ("", '{"a":[1,null,"é"],"b/c":true}'),
    ],
)
def test_a_fragment_writes_that_part_of_the_json(fragment: str, part: str) -> None:
    pointer = answer("put", "-", stdin='{"a":[1,null,"é"],"b/c":true}'.encode()).strip()
    assert answer("get", f"{pointer}#{fragment}").rstrip("\n") == part


def test_a_fragment_that_leads_nowhere_or_into_text_is_an_error() -> None:
    document, text = (
        answer("put", "-", stdin=b'{"a":1}').strip(),
        answer("put", "-", stdin=b"no json").strip(),
    )
    expected = errors.CODES["invalid_pointer"].exit
    assert call("get", f"{document}#/b").exit_code == expected
    assert call("get", f"{text}#/b").exit_code == expected


# Listing


def test_ls_in_a_pipe_gives_one_line_of_tab_separated_columns_for_each_artifact() -> None:
    first = answer("put", "-", "--name", "one\ttab\nand\x1b[31mmore", stdin=b"a\tb\nc").strip()
    second = answer("put", "-", "--kind", "plan", stdin=b"second").strip()
    rows = [line.split("\t") for line in answer("ls").splitlines()]
    assert [(*row[:4], *row[5:]) for row in rows] == [
        (second, "plan", "6", "0%", "-", "second"),
        (first, "result", "5", "0%", "one\\ttab\\nand\\x1b[31mmore", "a\\tb c"),
    ]


def test_ls_as_json_gives_one_line_of_ascii_json_for_each_artifact() -> None:
    for text in (b"one", b"two"):
        answer("put", "-", "--name", "bidi \u202e", stdin=text)
    lines = answer("ls", "--json").splitlines()
    assert all(line.isascii() for line in lines)
    assert [json.loads(line)["summary"] for line in lines] == ["two", "one"]
    assert {json.loads(line)["name"] for line in lines} == {"bidi \u202e"}


def test_ls_can_be_narrowed_by_name_kind_and_number() -> None:
    for number, kind in enumerate(("log", "plan", "log")):
        answer("put", "-", "--kind", kind, "--name", f"name {number % 2}", stdin=b"%d" % number)

    def sizes(*options: str) -> list[str]:
        return [
            json.loads(line)["summary"] for line in answer("ls", "--json", *options).splitlines()
        ]

    assert sizes() == ["2", "1", "0"]
    assert sizes("--kind", "log") == ["2", "0"]
    assert sizes("--name", "name 0") == ["2", "0"]
    assert sizes("--limit", "1") == ["2"]


def test_ls_of_sessions_prints_the_size_of_each() -> None:
    answer("put", "-", "--session", "one", stdin=b"12345")
    answer("put", "-", "--session", "two\n", stdin=b"123")
    listed = [json.loads(line) for line in answer("ls", "--sessions", "--json").splitlines()]
    assert {record["session_id"]: record["used_bytes"] for record in listed} == {
        "one": 5,
        "two\n": 3,
    }
    assert sorted(line.split("\t")[-1] for line in answer("ls", "--sessions").splitlines()) == [
        "one",
        "two\\n",
    ]
    assert len(answer("ls", "--sessions", "--limit", "1").splitlines()) == 1


def test_an_empty_session_lists_nothing() -> None:
    assert answer("ls") == ""
    assert answer("ls", "--json") == ""
    assert on_terminal("ls")[:2] == (0, b"")


def test_show_prints_the_metadata_of_an_artifact() -> None:
    pointer = answer("put", "-", "--name", "n", "--tool", "t\x1b[2J", stdin=b"hello").strip()
    listed = dict(line.split("\t") for line in answer("show", "n").splitlines())
    assert (listed["pointer"], listed["name"], listed["tool"], listed["size_bytes"]) == (
        pointer,
        "n",
        "t\\x1b[2J",
        "5",
    )
    assert json.loads(answer("show", pointer, "--json"))["tool"] == "t\x1b[2J"


def test_a_session_does_not_see_the_artifacts_of_another() -> None:
    pointer = answer("put", "-", "--session", "one", stdin=b"private").strip()
    theirs = call("get", pointer, "--session", "two")
    missing = call("get", "art:" + "0" * 12, "--session", "two")
    assert theirs.exit_code == missing.exit_code == errors.CODES["not_found"].exit
    assert not theirs.stdout
    assert "private" not in theirs.stderr


def test_the_environment_sets_store_and_session_and_options_override_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COATCHECK_SESSION", "from the environment")
    other = str(tmp_path / "other")
    assert (
        json.loads(answer("put", "-", "--json", stdin=b"1"))["session_id"] == "from the environment"
    )
    assert (
        json.loads(answer("put", "-", "--json", "--session", "x", stdin=b"1"))["session_id"] == "x"
    )
    answer("put", "--store", other, "-", stdin=b"elsewhere")
    assert json.loads(answer("stats", "--store", other, "--json"))["refs"] == 1
    assert json.loads(answer("stats", "--json"))["refs"] == 2


# Forgetting and upkeep


def test_forget_drops_the_given_artifacts_and_reports_missing_ones() -> None:
    one, two = (answer("put", "-", stdin=text).strip() for text in (b"one", b"two"))
    result = call("forget", one, "nothing", two, "--json")
    assert result.exit_code == errors.CODES["not_found"].exit
    assert json.loads(result.stdout) == {"forgotten": 2}
    assert result.stderr.count("\n") == 1
    assert answer("ls") == ""


def test_forgetting_all_ends_the_session() -> None:
    for text in (b"one", b"two"):
        answer("put", "-", stdin=text)
    answer("put", "-", "--session", "other", stdin=b"two")
    assert json.loads(answer("forget", "--all", "--json")) == {"forgotten": 1}
    assert answer("ls") == ""
    assert answer("ls", "--session", "other") != ""


def test_forget_requires_either_targets_or_all() -> None:
    assert call("forget").exit_code == 2
    assert call("forget", "x", "--all").exit_code == 2


def test_collect_with_dry_run_prints_what_would_be_freed() -> None:
    answer("put", "-", "--ttl", "0", stdin=b"expired")
    answer("put", "-", stdin=b"lives")
    waiting = json.loads(answer("collect", "--json"))
    would = json.loads(answer("collect", "--grace", "0", "--dry-run", "--json"))
    assert json.loads(answer("stats", "--json"))["artifacts"] == 2
    did = json.loads(answer("collect", "--grace", "0", "--json"))
    assert (waiting["artifacts"], would["artifacts"], did["artifacts"]) == (0, 1, 1)
    assert (would["bytes"], did["bytes"]) == (7, 7)
    assert json.loads(answer("stats", "--json"))["artifacts"] == 1


def test_commands_describe_an_expired_artifact_and_exit_with_its_code() -> None:
    pointer = answer("put", "-", "--name", "old", "--ttl", "0", stdin=b"expired").strip()
    for args in (("get", pointer), ("show", "old"), ("forget", pointer)):
        result = call(*args)
        assert result.exit_code == errors.CODES["expired"].exit
        assert "7 bytes" in result.stderr


def test_stats_count_content_once() -> None:
    for session in ("one", "two"):
        answer("put", "-", "--session", session, stdin=b"same")
    listed = dict(line.split("\t") for line in answer("stats").splitlines())
    found = json.loads(answer("stats", "--json"))
    assert listed == {key: "-" if value is None else str(value) for key, value in found.items()}
    assert [
        listed[key] for key in ("sessions", "refs", "artifacts", "stored_bytes", "referenced_bytes")
    ] == list("22148")


def test_commands_that_need_a_store_do_not_create_one(tmp_path: Path) -> None:
    for args in (("ls",), ("get", "x"), ("verify",), ("collect",), ("stats",), ("export", "-")):
        assert (
            call(*args, "--store", str(tmp_path / "typo")).exit_code
            == errors.CODES["store_unavailable"].exit
        )
    assert not (tmp_path / "typo").exists()


def test_verify_exits_with_damaged_until_everything_is_repaired(store: Path) -> None:
    content = os.urandom(300_000)
    pointer = answer("put", "-", stdin=content).strip()
    answer("put", "-", "--name", "sound", stdin=content[::-1])
    assert call("verify").exit_code == 0
    damaged = next(path for path in raw_files(store) if path.name.startswith(pointer[4:]))
    data = bytearray(damaged.read_bytes())
    data[150_000] ^= 1
    damaged.write_bytes(data)

    expected = errors.CODES["damaged"].exit
    assert call("get", pointer).exit_code == expected
    found = call("verify", "--json")
    assert found.exit_code == expected
    assert [problem["kind"] for problem in json.loads(found.stdout)["problems"]] == ["damaged"]
    assert call("verify", "--repair").exit_code == 0
    assert call("verify").exit_code == 0
    assert CliRunner().invoke(main, ["get", "sound"]).stdout_bytes == content[::-1]


def test_an_export_comes_back_through_a_pipe_with_ids_names_and_sessions(tmp_path: Path) -> None:
    pointer = answer("put", "-", "--name", "n", "--session", "s", stdin=b"x" * 300_000).strip()
    answer("put", "-", stdin=b"small")
    exported = run("export")
    assert exported.returncode == 0
    other = str(tmp_path / "other")
    assert run("import", "--store", other, stdin=exported.stdout).returncode == 0
    assert answer("ls", "--session", "s", "--store", other) == answer("ls", "--session", "s")
    assert answer("get", pointer, "--session", "s", "--store", other) == "x" * 300_000
    assert json.loads(answer("import", "-", "--store", other, "--json", stdin=exported.stdout)) == {
        "imported": 0
    }


def test_an_export_to_a_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    answer("put", "-", stdin=b"secret")
    file = tmp_path / "backup.jsonl"
    assert json.loads(answer("export", str(file), "--json")) == {"exported": 1}
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(
        answer("import", str(file), "--store", str(tmp_path / "other"), "--json")
    ) == {"imported": 1}


def test_a_file_that_is_not_an_export_is_a_clear_error(tmp_path: Path) -> None:
    result = call("import", "-", stdin=b"no export\n")
    assert result.exit_code == errors.CODES["invalid_argument"].exit
    assert result.stderr.count("\n") == 1


# Errors, pipes and signals


@pytest.mark.parametrize("target", ["art:0123456789ab", "no such name", "0" * 64, "\x1b[31m\u202e"])
@pytest.mark.parametrize("name", ["get", "show", "forget"])
def test_an_unknown_artifact_is_one_line_on_stderr_and_exit_code_3(name: str, target: str) -> None:
    result = run(name, target)
    assert result.returncode == 3
    assert result.stdout == b""
    line = result.stderr.decode()
    assert line.startswith("coatcheck: ")
    assert line.count("\n") == 1
    assert not STEERING & set(line)


def test_failures_of_files_and_stores_are_one_line_and_no_traceback(
    tmp_path: Path, store: Path
) -> None:
    store.write_text("a file where a folder should be")
    newer = ("put", str(tmp_path / "missing"), "--store", str(tmp_path / "good"))
    answer("put", "-", "--name", "n", "--store", str(tmp_path / "good"), stdin=b"x")
    for args, code in (
        (("ls",), errors.CODES["store_unavailable"].exit),
        (newer, errors.CODES["invalid_argument"].exit),
        (
            ("put", str(tmp_path), "--store", str(tmp_path / "good")),
            errors.CODES["invalid_argument"].exit,
        ),
        (("get", "n", "-o", str(tmp_path / "no" / "folder"), "--store", str(tmp_path / "good")), 1),
        (("export", str(tmp_path / "no" / "folder"), "--store", str(tmp_path / "good")), 1),
        (("import", str(tmp_path / "missing"), "--store", str(tmp_path / "good")), 1),
        (("ls", "--store", "ftp://example.invalid"), errors.CODES["invalid_argument"].exit),
        (("ls", "--no-such-option"), 2),
        (("no-such-command",), 2),
        (
            ("put", "-", "--ttl", "nan", "--store", str(tmp_path / "good")),
            errors.CODES["invalid_argument"].exit,
        ),
    ):
        result = run(*args)
        assert (result.returncode, result.stdout) == (code, b""), args
        assert result.stderr.startswith(b"coatcheck: "), args
        assert result.stderr.count(b"\n") == 1, args


def test_a_file_name_that_is_not_valid_text_is_stored_with_replacement_characters(
    tmp_path: Path,
) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(path, "wb") as file:
        file.write(b"coffee")
    assert json.loads(answer("put", os.fsdecode(path), "--json"))["name"] == "caf\ufffd.txt"
    assert answer("get", "caf\ufffd.txt") == "coffee"


def test_a_closed_pipe_causes_no_error_output(store: Path) -> None:
    answer("put", "-", "--name", "big", stdin=b"0123456789abcde\n" * 500_000)
    process = subprocess.Popen(
        command("get", "big"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    assert process.stdout.read(16) == b"0123456789abcde\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_an_interrupt_ends_quietly_and_stores_nothing() -> None:
    process = subprocess.Popen(
        command("put", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # workers of xdist ignore it, and so would this
    )
    assert process.stdin
    process.stdin.write(b"x" * 4_000_000)  # more than fits into a pipe: by now it is reading
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()  # ends its input, as Ctrl-C ends the writer of a pipe too
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert answer("ls") == ""
    assert call("verify").exit_code == 0


def test_without_a_command_it_prints_its_help() -> None:
    for text in (run().stderr, run("--help").stdout):
        assert b"Artifacts:" in text
        assert text.count(b"  $ coatcheck ") == text.count(b":\n") - 1  # an example in each group
    assert run("--version").stdout.decode().strip().endswith(coatcheck.__version__)


@pytest.mark.parametrize(
    "args", [("ls",), ("stats",), ("get", "n"), ("verify",), ("collect",), ("show", "n")]
)
def test_in_a_pipe_no_drawing_library_is_imported(args: tuple[str, ...]) -> None:
    answer("put", "-", "--name", "n", stdin=b"x")
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "coatcheck", *args],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| click" in result.stderr.replace("|   ", "| ").replace("  ", " ")
    assert "rich" not in result.stderr


def modules_of(*args: str) -> set[str]:
    """The modules that a command imports."""
    code = (
        "import atexit, sys; from coatcheck.cli import main; "
        "atexit.register(lambda: print(*sys.modules)); main()"
    )
    call = [sys.executable, "-c", code, *args]
    done = subprocess.run(
        call, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_a_command_imports_only_what_it_uses() -> None:
    version = {name for name in modules_of("--version") if name.startswith("coatcheck")}
    used = {"cli", "cli.terminal", "deferred", "display", "errors"}
    assert version == {"coatcheck", *(f"coatcheck.{name}" for name in used)}
    unused = {
        "reading",
        "externalize",
        "previews",
        "context",
        "transcript",
        "executor",
        "mcp",
        "install",
        "aio",
    }
    unused |= {"transfer", "collect", "tokens", "_toolkit", "cli.store_commands"}
    answer("put", "-", "--name", "n", stdin=b"x")
    listed = modules_of("ls")
    assert "coatcheck.store" in listed
    assert not {f"coatcheck.{name}" for name in unused} & listed
    assert not {"asyncio", "rich", "pydantic", "subprocess", "urllib.request"} & listed


@pytest.mark.parametrize(
    ("args", "own"),
    [
        (("ls",), "artifact_commands"),
        (("get", "n"), "artifact_commands"),
        (("stats",), "store_commands"),
        (("config",), "store_commands"),
        (("hot", "--help"), "hot_commands"),
        (("metrics", "--help"), "metrics_commands"),
        (("proxy", "--help"), "mcp_commands"),
        (("transcript", "undo", "--help"), "transcript_commands"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_command_imports_no_other_command_and_no_heavy_package(
    args: tuple[str, ...], own: str
) -> None:
    answer("put", "-", "--name", "n", stdin=b"x\n")
    loaded = modules_of(*args)
    commands = {name for name in loaded if name.startswith("coatcheck.cli.") and "_command" in name}
    assert commands == {f"coatcheck.cli.{own}"}
    heavy = (
        "pydantic",
        "duckdb",
        "rich",
        "mcp",
        "coatcheck.context.",
        "coatcheck.transcript",
        "coatcheck.mcp",
    )
    assert not {name for name in loaded if name.startswith(heavy)}


QUICK = [("ls",), ("get", "n"), ("put", "-"), ("read", "n", "--lines", "1:2")]


@pytest.mark.parametrize("args", QUICK, ids=" ".join)
def test_a_quick_command_imports_no_unneeded_module(args: tuple[str, ...]) -> None:
    answer("put", "-", "--name", "n", stdin=b"x\n")
    ours = {
        "previews.kinds",
        "reading.heavy",
        "reading.grep",
        "reading.documents",
        "reading.sandbox",
        "tokens",
        "models",
    }
    ours |= {"externalize", "_toolkit", "transfer", "collect", "messages"}
    theirs = {
        "logging",
        "random",
        "secrets",
        "tempfile",
        "difflib",
        "zipfile",
        "subprocess",
        "asyncio",
        "pydantic",
    }
    assert not {f"coatcheck.{name}" for name in ours} & modules_of(*args)
    assert not theirs & modules_of(*args)


def test_the_list_of_commands_imports_none_of_them_and_has_the_first_sentence_of_each() -> None:
    assert not {
        name
        for name in modules_of("--help")
        if name.startswith("coatcheck.cli.") and "_command" in name
    }
    context = click.Context(main, info_name="coatcheck")
    listed = dict(
        re.findall(
            r"^  ([a-z]+) +(\S.*)$", main.get_help(context).partition("Artifacts:")[2], re.MULTILINE
        )
    )
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    assert listed == {
        name: one.get_short_help_str(100) for name, one in commands.items() if one is not None
    }


# Terminals


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_content_never_reaches_a_terminal(hostile: str) -> None:
    answer(
        "put",
        "-",
        "--name",
        "n",
        stdin=f"before {hostile} after\n\tindented".encode("utf-8", "surrogatepass"),
    )
    code, seen, _ = on_terminal("get", "n")
    assert code == 0
    text = seen.decode()
    assert not STEERING & set(text)
    assert text.startswith("before \\" if hostile[0] in STEERING else f"before {hostile[0]}")
    assert text.endswith(" after\n\tindented\n")


def test_hostile_names_and_summaries_never_reach_a_terminal() -> None:
    everything = "".join(HOSTILE).replace("\0", "")  # arguments of a process cannot contain it
    answer(
        "put",
        "-",
        "--name",
        everything,
        "--tool",
        everything,
        "--summary",
        everything,
        "--session",
        everything,
        stdin=b"x",
    )
    for args in (
        ("ls", "--session", everything),
        ("ls", "--sessions"),
        ("show", everything, "--session", everything),
        ("ls", "--json", "--session", everything),
    ):
        code, seen, _ = on_terminal(*args)
        assert code == 0
        assert not STEERING & set(seen.decode()), args
    code, seen, _ = on_terminal("get", everything, stream="stderr")
    assert code == errors.CODES["not_found"].exit
    assert not STEERING & set(seen.decode())


def test_markup_in_a_name_is_only_text() -> None:
    answer("put", "-", "--name", "[b]b[/b]:x:", stdin=b"x")
    assert " [b]b[/b]:x: " in on_terminal("ls")[1].decode()


def test_bytes_that_are_not_text_are_made_visible_on_a_terminal() -> None:
    answer("put", "-", "--name", "n", stdin=b"\xff\xfeok\xc3\xa9\xc3")
    assert on_terminal("get", "n")[1].decode() == "\\xff\\xfeoké\\xc3\n"


def test_raw_writes_the_exact_bytes_to_a_terminal() -> None:
    answer("put", "-", "--name", "n", stdin=b"\x1b[31m\xff\x9b")
    assert on_terminal("get", "n", "--raw")[1] == b"\x1b[31m\xff\x9b"


def test_a_character_that_is_split_between_reads_stays_whole_on_a_terminal() -> None:
    text = "x" * 65_535 + "é" + "y" * 70_000
    answer("put", "-", "--name", "n", stdin=text.encode())
    assert on_terminal("get", "n")[1].decode() == text + "\n"


def test_the_table_never_cuts_a_pointer() -> None:
    pointer = answer("put", "-", "--name", "long name " * 30, stdin=b"long summary " * 100).strip()
    head, row = on_terminal("ls")[1].decode().splitlines()
    assert head.split() == ["pointer", "kind", "size", "age", "name"]
    assert row.startswith(pointer + " ")
    assert "…" in row


def test_an_export_is_not_written_to_a_terminal() -> None:
    code, seen, _ = on_terminal("export")
    assert (code, seen) == (2, b"")


@pytest.mark.parametrize(
    "args", [("verify",), ("collect",), ("export",), ("import", "--merge", "FILE")]
)
def test_progress_is_drawn_on_stderr_if_it_is_a_terminal(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    answer("put", "-", stdin=b"x" * 200_000)
    file = tmp_path / "backup.jsonl"
    answer("export", str(file))
    args = tuple(str(file) if arg == "FILE" else arg for arg in args)
    code, seen, out = on_terminal(*args, stream="stderr")
    assert code == 0
    assert args[0][:6].encode() in seen
    assert b"\x1b" not in out
    assert run(*args).stderr in (b"", b"exported 1 refs\n")


@given(st.text())
def test_escaped_text_contains_no_control_characters(text: str) -> None:
    kept = set("\n\t")
    assert all(
        char in kept or char.isprintable() or char.isspace()
        for char in visible(text)
        if char not in text
    )
    assert not {char for char in visible(text) if ord(char) < 32 or 127 <= ord(char) < 160} - kept
    assert not STEERING & set(visible(text)) - kept
    assert len(one_line(text).splitlines()) <= 1


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_harmless_text_is_left_as_it_is(text: str) -> None:
    assert visible(text) == one_line(text) == text


def test_an_import_maps_sessions_or_merges_on_request(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive.jsonl")
    answer("put", "-", "--session", "s", "--name", "n", stdin=b"theirs")
    answer("export", archive)
    answer("put", "-", "--session", "s", "--name", "n", stdin=b"mine")
    refused = call("import", archive)
    assert refused.exit_code == 2
    assert "--session" in refused.stderr
    answer("import", archive, "--session", "s=copy")
    assert answer("get", "n", "--session", "copy") == "theirs"
    assert answer("get", "n", "--session", "s") == "mine"
    answer("import", archive, "--merge")
    assert call("import", archive, "--session", "s").exit_code == 2


@pytest.mark.parametrize("command", ["get", "read", "show"])
def test_a_pointer_from_a_chat_opens_in_any_session(command: str) -> None:
    pointer = answer("put", "-", "--session", "mcp-1234", stdin=b'{"a": "content"}').strip()
    assert "content" in answer(command, pointer, "--any-session")
    assert (
        call(command, "art:" + "0" * 12, "--any-session").exit_code
        == errors.CODES["not_found"].exit
    )
    if command != "show":
        assert "content" in answer(command, f"{pointer}#/a", "--any-session")


@pytest.mark.parametrize(
    "args", [("ls",), ("search", "x"), ("get", "x"), ("forget", "x"), ("show", "x")]
)
def test_a_session_that_does_not_exist_is_an_error_that_names_near_ones(
    args: tuple[str, ...],
) -> None:
    answer("put", "-", "--session", "fix-login-bug", stdin=b"x")
    done = call(*args, "--session", "fix-login")
    assert done.exit_code == errors.CODES["not_found"].exit
    assert "fix-login-bug" in done.stderr
    assert json.loads(answer("stats", "--json"))["sessions"] == 1


@pytest.mark.parametrize("width", [120, 80, 60])
def test_a_table_keeps_the_columns_that_identify_a_row(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    answer("put", "-", "--name", "reports/2026/november.csv", stdin=b"long summary " * 100)
    answer("put", "-", "--tool", "run_tests", stdin=b"12 passed")
    unnamed, named = on_terminal("ls")[1].decode().splitlines()[1:]
    assert "reports/2026/nov" in named
    assert "run_tests" in unnamed
    assert all(len(line) <= width for line in (named, unnamed))
    answer("put", "-", "--session", "claude-code-project-1234567890ab", stdin=b"x")
    sessions = on_terminal("ls", "--sessions")[1].decode()
    assert "claude-code-project-1234567890ab" in sessions


def test_results_without_a_name_are_listed_with_the_tool_and_its_arguments() -> None:
    def fetch(url: str, page: int) -> str:
        return "word " * 50_000

    with coatcheck.open() as store:
        executor = coatcheck.ToolExecutor(store.session("default"), [fetch])
        executor.run(coatcheck.ToolCall("c1", "fetch", {"url": "https://example.org/a", "page": 2}))
    assert "fetch(url=https://" in on_terminal("ls")[1].decode()
    (record,) = map(json.loads, answer("ls", "--json").splitlines())
    assert record["metadata"] == {
        "arguments": "url=https://example.org/a, page=2",
        "surface": "library",
    }


def test_stats_and_config_name_the_store(store: Path) -> None:
    answer("put", "-", stdin=b"x")
    found = json.loads(answer("stats", "--json"))
    assert found["store"] == str(store)
    assert found["collected_at"] is None
    answer("collect")
    assert json.loads(answer("stats", "--json"))["collected_at"].startswith("20")
    assert (
        str(store)
        in on_terminal("config", "store")[2].decode() + on_terminal("config", "store")[1].decode()
    )


def test_stats_and_doctor_say_what_a_collection_would_free(store: Path) -> None:
    answer("put", "-", stdin=b"kept")
    found = json.loads(answer("stats", "--json"))
    assert (found["collectable_artifacts"], found["collectable_bytes"]) == (0, 0)
    assert "nothing that a collection would free" in call("doctor").stdout
    with coatcheck.open(store, clock=lambda: time.time() - 31 * 86_400) as earlier:
        earlier.session("old").put("x" * 1_000)
    found = json.loads(answer("stats", "--json"))
    assert (found["collectable_artifacts"], found["collectable_bytes"]) == (1, 1_000)
    assert "a collection would free 1 artifacts, 1,000 bytes" in call("doctor").stdout


def test_doctor_finds_problems_and_suggests_fixes(store: Path, tmp_path: Path) -> None:
    assert "does not exist yet" in call("doctor").stdout
    answer("put", "-", stdin=b"x")
    done = call("doctor")
    assert done.exit_code == 0, done.stdout
    assert f"ok      store: {store}" in done.stdout
    (store / "catalog.sqlite").write_bytes(b"not a database" * 1_000)
    done = call("doctor")
    assert done.exit_code == 1
    assert "PROBLEM store: the catalog is damaged" in done.stdout
    assert "-> restore it from an export" in done.stdout
    found = json.loads(call("doctor", "--json").stdout)
    assert [one["about"] for one in found if one["state"] == "problem"] == ["store"]
    (tmp_path / "file").write_text("not a store")
    assert "PROBLEM store" in call("doctor", "--store", str(tmp_path / "file")).stdout


def test_doctor_says_how_child_processes_are_confined(store: Path) -> None:
    found = json.loads(call("doctor", "--json").stdout)
    rows = [one for one in found if one["about"] in ("child processes", "programs")]
    assert len(rows) == 2
    for row in rows:
        assert row["message"].startswith(
            ("confined to their own files", "their time is limited, but")
        )


def test_doctor_reports_a_client_whose_command_does_not_exist(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    answer("put", "-", stdin=b"x")
    (tmp_path / ".cursor").mkdir()
    entry = {"command": "/nowhere/coatcheck", "args": ["mcp"]}
    (tmp_path / ".cursor" / "mcp.json").write_text(json.dumps({"mcpServers": {"coatcheck": entry}}))
    done = call("doctor")
    assert done.exit_code == 1
    assert "/nowhere/coatcheck does not exist" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str) -> None:
    assert "_COATCHECK_COMPLETE" in answer("completion", shell)


def test_bash_completes_commands_sessions_names_and_pointers(tmp_path: Path) -> None:
    pointer = answer("put", "-", "--name", "build.log", stdin=b"x").strip()
    answer("put", "-", "--session", "fix-login-bug", stdin=b"y")
    program = tmp_path / "coatcheck"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m coatcheck "$@"\n')
    program.chmod(0o755)

    def completed(line: str) -> list[str]:
        words = line.split(" ")
        script = (
            'eval "$(coatcheck completion bash)"; '
            f"COMP_WORDS=({' '.join(w or chr(39) * 2 for w in words)}); "
            f"COMP_CWORD={len(words) - 1}; _coatcheck_completion coatcheck; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    answer("put", "-", "--session", "two words", stdin=b"z")
    assert completed("coatcheck ls --session tw") == ["two\\ words"]
    assert completed("coatcheck tra") == ["transcript"]
    assert completed("coatcheck read bu") == ["build.log"]
    assert completed("coatcheck get art:") == [pointer]
    assert completed("coatcheck ls --session fix") == ["fix-login-bug"]


@pytest.mark.parametrize("command", ["get", "read", "show", "forget"])
def test_a_pointer_of_another_session_is_recognised_in_the_error(command: str) -> None:
    pointer = answer("put", "-", "--session", "its own", stdin=b"content").strip()
    for target in (pointer, pointer.removeprefix("art:")):
        done = call(command, target, "--session", "another")
        assert done.exit_code == errors.CODES["not_found"].exit
        assert "--session 'its own'" in done.stderr
    assert "its own" not in call(command, "art:" + "0" * 12, "--session", "default").stderr
    assert call(command, pointer, "--session", "its own").exit_code == 0


def test_a_session_may_be_named_after_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        pointers[name] = answer("put", "-", "--session", "x-{folder}", stdin=name.encode()).strip()
    assert answer("get", pointers["two"], "--session", "x-{folder}") == "two"
    assert (
        call("get", pointers["one"], "--session", "x-{folder}").exit_code
        == errors.CODES["not_found"].exit
    )
    assert "x-one-" in answer("ls", "--sessions")
