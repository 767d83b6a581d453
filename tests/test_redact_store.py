"""With `redact="store"`, no file of the store contains a secret, however a value came in and
whatever its encoding.

The canaries are assembled here, so that no scanner reports this file as a leak."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, toolkit, transcript
from coatcheck.cli import main
from coatcheck.context import PromptBuilder, bootstrap
from coatcheck.redaction import MARK, mask_bytes
from tests.mcp.speaking import ODD, Speaker, environment, proxy

TOKEN = "gh" + "p_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAb12C"
PASSWORD = "Zx9-horse-Qq"
SECRETS = (TOKEN, PASSWORD)
LINE = f"row with {TOKEN} and DB_PASSWORD={PASSWORD}\n"
DUMP = "".join(f"{number} {LINE}" for number in range(600))
STORE = Policy(redact="store")


@dataclass(frozen=True)
class Way:
    """The arguments of a way in. `policy` is None if the settings define the policy."""

    session: Session
    policy: Policy | None
    folder: Path
    place: Path

    @property
    def given(self) -> dict[str, Any]:
        return {} if self.policy is None else {"policy": self.policy}

    @property
    def redact(self) -> dict[str, Any]:
        return {} if self.policy is None else {"redact": self.policy.redact}


def chat(content: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "env", "arguments": "{}"}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
        *(
            {"role": role, "content": f"words {n}"}
            for n in range(8)
            for role in ("assistant", "user")
        ),
    ]


def externalize(way: Way) -> None:
    rows = [{"name": "API_TOKEN", "value": PASSWORD}, {"dbPassword": PASSWORD}] * 600
    blocks = [{"type": "text", "text": DUMP}, {"type": "text", "text": "small"}]
    for value in (
        DUMP,
        DUMP.encode(),
        rows,
        blocks,
        {"rows": DUMP},
        io.BytesIO(DUMP.encode()),
        _Row(DUMP, {DUMP}),
    ):
        assert way.session.externalize(value, tool="env", **way.given).is_stub


def offload(way: Way) -> None:
    assert TOKEN not in way.session.offload(lambda: DUMP, tool="env", **way.given)()


def executor(way: Way) -> None:
    def fails() -> str:
        raise RuntimeError("x" * 470 + " " + LINE + DUMP)

    def yields() -> Iterator[str]:
        yield from (DUMP[at : at + 7] for at in range(0, len(DUMP), 7))

    def yields_bytes() -> Iterator[bytes]:
        data = DUMP.encode() * 40
        yield b"\xff"
        yield from (data[at : at + 4_099] for at in range(0, len(data), 4_099))

    def breaks_off() -> Iterator[str]:
        yield LINE
        raise RuntimeError(LINE)

    tools = {
        "value": lambda: DUMP,
        "fails": fails,
        "yields": yields,
        "bytes": yields_bytes,
        "broken": breaks_off,
    }
    run = ToolExecutor(way.session, tools, **way.given)
    for name in tools:
        assert run.run(ToolCall(name, name, {})).ref is not None, name


def executor_with_a_prefixed_toolkit(way: Way) -> None:
    def env() -> str:
        return DUMP

    run = ToolExecutor(way.session, [env, *toolkit(way.session, prefix="my_")], **way.given)
    assert run.run(ToolCall("1", "env", {})).ref is not None
    assert not run.run(ToolCall("2", "my_store_artifact", {"name": "n", "value": LINE})).is_error


def tool_for_storing(way: Way) -> None:
    store = toolkit(way.session, **way.redact)[2]
    assert store.run(name="text", value=LINE).startswith("[stored")
    assert store.run(name="json", value={"token": PASSWORD, "text": LINE}).startswith("[stored")
    assert store.run(
        name="parsed", value=json.dumps({"a": LINE}), content_type="application/json"
    ).startswith("[st")


def appending(way: Way) -> None:
    with transcript.Transcript(way.folder / "t.jsonl", way.session, **way.given) as log:
        log.extend(chat(DUMP))
        log.append(
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": DUMP, "x": [DUMP]}],
            }
        )
        assert not log.problems
        whole = list(log.messages(mode="whole"))
    assert TOKEN not in str(whole)
    assert MARK in whole[2]["content"]
    assert whole[2]["content"].count("\n") == 600


def wrapped_base64(way: Way) -> None:
    encoded = base64.b64encode(DUMP.encode()).decode()
    lines = "\r\n".join(encoded[at : at + 76] for at in range(0, len(encoded), 76))
    for number, data in enumerate(
        (encoded, lines, lines + "\r\n", f"data:text/plain;base64,{encoded[:76]}\n{encoded[76:]}")
    ):
        source = {"type": "base64", "media_type": "text/plain", "data": data}
        result = {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [{"type": "document", "source": source}],
        }
        path = way.folder / f"{number}.jsonl"
        path.write_text(json.dumps({"role": "user", "content": [result]}) + "\n")
        assert transcript.externalize(path, way.session, **way.given).artifacts == 1, number
        with transcript.Transcript(path, way.session, read_only=True) as log:
            (message,) = log.messages(mode="whole")
        restored = message["content"][0]["content"][0]["source"]["data"]
        decoded = base64.b64decode(restored.partition(",")[2] or restored).decode()
        assert decoded.count(MARK) == 1_200
    for info in way.session.store.sessions():
        other = way.session.store.session(info.session_id)
        for ref in other.list():
            with other.open(ref) as stream:
                stored = stream.read()
            assert TOKEN.encode() not in stored + base64.b64decode(
                stored[stored.find(b",") + 1 :] + b"=="
            )


def migrating(way: Way) -> None:
    path = way.folder / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in chat(DUMP)))
    transcript.externalize(path, way.session, **way.given)


def pruning(way: Way) -> None:
    for keep in (1, 8):
        done = transcript.prune(
            chat(DUMP), max_tokens=1_000, keep_turns=keep, session=way.session, **way.redact
        )
        assert done.replaced


def prompting(way: Way) -> None:
    file = way.folder / "AGENTS.md"
    file.write_text(DUMP)
    (way.folder / "latin.txt").write_bytes(DUMP.encode() + b"\xe9")
    builder = PromptBuilder(
        way.session,
        provider="openai",
        files=["AGENTS.md", "latin.txt"],
        root=way.folder,
        **way.given,
    )
    prompt = builder.build(chat(DUMP)[:3], chunks=[DUMP, *(f"{n} {LINE}" for n in range(40))])
    assert len(prompt.refs) > 20
    small = coatcheck.context.Budget(max_prompt_tokens=3_000)
    quiet: dict[str, Any] = (
        {} if way.policy is None else {"policy": Policy(enabled=False, redact="store")}
    )
    builder = PromptBuilder(way.session, provider="openai", budget=small, rewrite=True, **quiet)
    assert builder.build(chat(DUMP[:12_000])).messages


def labels(way: Way) -> None:
    get, _, keep = toolkit(way.session, **way.redact)
    kept = keep.run(name=f"tok {TOKEN}", value="hi")
    assert kept.startswith("[stored")
    assert TOKEN not in kept
    assert MARK in kept
    assert get.run(pointer=f"tok {TOKEN}").endswith("hi")
    names: dict[str, Any] = {"tool": f"env {TOKEN}", "call_id": f"c DB_PASSWORD={PASSWORD}"}
    assert way.session.externalize(DUMP, **names, **way.given).is_stub
    call = {
        "id": names["call_id"],
        "type": "function",
        "function": {"name": names["tool"], "arguments": "{}"},
    }
    messages = chat(DUMP)
    messages[1]["tool_calls"] = [call]
    messages[2]["tool_call_id"] = names["call_id"]
    with transcript.Transcript(way.folder / "t.jsonl", way.session, **way.given) as log:
        log.extend(messages)
    messages[2]["content"] += "more"
    assert transcript.prune(
        messages, max_tokens=1_000, keep_turns=1, session=way.session, **way.redact
    ).replaced


def counted_tools(way: Way) -> None:
    for number in range(40):  # enough stubs for the counts of reads per tool to be written
        result = f"{number}\n{DUMP}"
        assert way.session.externalize(result, tool=f"env {TOKEN}", **way.given).is_stub


def enforcing(way: Way) -> None:
    budget = coatcheck.context.Budget()
    done = budget.enforce(session=way.session, artifacts=[DUMP], chunks=[LINE] * 20, **way.given)
    assert len(done.refs) == 11


def files(way: Way) -> None:
    (way.folder / "AGENTS.md").write_text(DUMP)
    (way.folder / "wide.txt").write_bytes(DUMP.encode("utf-16"))
    assert (
        len(bootstrap(way.session, ["AGENTS.md", "wide.txt"], root=way.folder, **way.redact).refs)
        == 2
    )


WAYS: tuple[Callable[[Way], None], ...] = (
    externalize, offload, executor, executor_with_a_prefixed_toolkit, tool_for_storing, appending, migrating, pruning,
    wrapped_base64, prompting, labels,
    counted_tools, enforcing, files,
)  # fmt: skip


@dataclass(frozen=True)
class _Row:
    password_hint: str
    several: set[str]


def leaks(place: Path) -> list[str]:
    """The files of a store that contain a secret in UTF-8, UTF-16 or UTF-32. These differ only in
    zero bytes."""
    found = []
    for file in sorted(one for one in place.rglob("*") if one.is_file()):
        data = file.read_bytes().replace(b"\0", b"")
        found += [f"{file.name}: {secret}" for secret in SECRETS if secret.encode() in data]
    return found


# The settings are read in one place, and `test_policy_everywhere.py` sets them in a file for each
# way in.
GIVEN = [
    pytest.param(way, given, id=f"{way.__name__}-{given}")
    for number, way in enumerate(WAYS)
    for given in ("in code", ("in the file", "in the environment")[number % 2])
]


@pytest.mark.parametrize(("way", "given"), GIVEN)
def test_no_file_of_the_store_contains_a_secret(
    way: Callable[[Way], None], given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = tmp_path / "work", tmp_path / "store"
    folder.mkdir()
    if given == "in the file":
        (tmp_path / "coatcheck.toml").write_text('[policy]\nredact = "store"\n')
        monkeypatch.chdir(tmp_path)
    elif given == "in the environment":
        monkeypatch.setenv("COATCHECK_POLICY_REDACT", "store")
    with coatcheck.open(place) as store:
        session = store.session("s")
        way(Way(session, STORE if given == "in code" else None, folder, place))
        session.search("row password")  # builds the search index
        assert session.list()
        assert leaks(place) == []
    assert leaks(place) == []


def test_the_command_line_migrates_a_transcript_without_its_secrets(tmp_path: Path) -> None:
    path, place = tmp_path / "t.jsonl", tmp_path / "store"
    path.write_text("".join(json.dumps(one) + "\n" for one in chat(DUMP)))
    done = CliRunner(env={"COATCHECK_POLICY_REDACT": "store"}).invoke(
        main, ["transcript", "externalize", str(path), "--write", "--store", str(place)]
    )
    assert done.exit_code == 0, done.output
    assert place.exists()
    assert leaks(place) == []


@pytest.mark.parametrize("given", ["file", "environment"])
def test_the_proxy_stores_no_secret(given: str, tmp_path: Path) -> None:
    place, more = tmp_path / "store", {"COATCHECK_POLICY_REDACT": "store"}
    if given == "file":
        (tmp_path / "coatcheck.toml").write_text('[policy]\nredact = "store"\n')
        more = {}
    with Speaker(proxy(server=ODD), environment(place, **more), cwd=tmp_path) as speaker:
        speaker.begin()
        assert "stub" in str(speaker.call("echo", text=DUMP))
        assert "stored" in str(speaker.call("store_artifact", name="n", value=LINE))
        assert "password" in str(speaker.call("list_artifacts", query="password"))
    assert place.exists()
    assert leaks(place) == []


ENCODINGS = (
    "utf-8",
    "utf-8-sig",
    "latin-1",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-le",
    "utf-32-be",
)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("before", ["", "grün und schön\n"])
def test_a_secret_is_masked_in_every_encoding_and_everything_else_is_unchanged(
    encoding: str, before: str
) -> None:
    after = "\nañd more\n" if encoding != "utf-8" else "\nand 漢字 more\n"
    data = (before + LINE + after).encode(encoding)
    masked = mask_bytes(data)
    text = masked.decode(encoding)
    assert text.startswith(before)
    assert text.endswith(after)
    assert TOKEN not in text
    assert PASSWORD not in text
    assert text.count(MARK) == 2
    assert mask_bytes((before + after).encode(encoding)) == (before + after).encode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_secret_is_masked_in_the_middle_of_other_bytes(encoding: str) -> None:
    noise = bytes(range(256)) * 3
    masked = mask_bytes(noise + LINE.encode(encoding) + noise)
    assert masked.startswith(noise)
    assert masked.endswith(noise)
    for secret in SECRETS:
        for other in ENCODINGS:
            assert secret.encode(other) not in masked


def test_bytes_without_a_secret_are_unchanged() -> None:
    for data in (bytes(range(256)) * 50, "wörter ".encode("utf-16") * 50, b"\xff\xfe\x00", b""):
        assert mask_bytes(data) == data


@pytest.mark.parametrize("encoding", [*ENCODINGS, "mixed"])
def test_values_and_streams_that_are_not_utf_8_are_stored_masked(
    encoding: str, tmp_path: Path
) -> None:
    text = "é" + DUMP if encoding != "utf-8" else DUMP
    data = (
        b"\xff\x00\xfe" + DUMP.encode() + DUMP.encode("utf-16-be")
        if encoding == "mixed"
        else text.encode(encoding)
    )

    def yields() -> Iterator[bytes]:
        yield from (data[at : at + 1_001] for at in range(0, len(data), 1_001))

    place = tmp_path / "store"
    with coatcheck.open(place) as store:
        session = store.session("s")
        for value in (data, bytearray(data), io.BytesIO(data)):
            assert session.externalize(value, policy=STORE).ref is not None
        assert (
            ToolExecutor(session, {"t": yields}, policy=STORE).run(ToolCall("1", "t", {})).ref
            is not None
        )
        session.search("row")
    assert leaks(place) == []


# What happens to a transcript whose payloads are stored masked


@pytest.fixture
def migrated(tmp_path: Path) -> Iterator[tuple[Path, bytes, Store]]:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in chat(DUMP)))
    with coatcheck.open(tmp_path / "store") as store:
        original = path.read_bytes()
        (report,) = transcript.externalize(path, store.session("s"), policy=STORE).files
        assert (report.status, report.note) == (
            "externalized",
            "1 payload was stored with secrets masked",
        )
        yield path, original, store


def test_a_masked_transcript_is_complete_except_for_its_secrets(
    migrated: tuple[Path, bytes, Store],
) -> None:
    path, original, store = migrated
    out = io.BytesIO()
    (report,) = transcript.rehydrate(path, store, to=out).files
    assert "secrets are masked" in report.note
    lines, before = out.getvalue().splitlines(), original.splitlines()
    assert [one for one in range(len(before)) if lines[one] != before[one]] == [2]
    assert json.loads(lines[2])["content"].count(MARK) == 1_200
    assert TOKEN.encode() not in out.getvalue()


def test_a_masked_transcript_is_verified_and_the_report_says_that_it_is_masked(
    migrated: tuple[Path, bytes, Store],
) -> None:
    path, original, store = migrated
    (report,) = transcript.verify(path, store).files
    assert report.is_sound
    assert "secrets are masked" in report.note
    assert report.backup is not None
    assert Path(report.backup).read_bytes() == original
    (report,) = transcript.verify(path, store, remove_backup=True).files
    assert report.is_sound
    assert report.backup is None
    (report,) = transcript.undo(path, store).files
    assert (report.status, report.is_sound) == ("restored", True)
    assert "secrets are masked" in report.note
    assert TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize("back", [transcript.undo, transcript.rehydrate])
def test_the_backup_restores_a_masked_transcript_exactly(
    migrated: tuple[Path, bytes, Store], back: Callable[..., transcript.Report]
) -> None:
    path, original, store = migrated
    with path.open("ab") as file:
        file.write(b'{"role":"user","content":"one more"}\n')
    (report,) = back(path, store).files
    assert report.is_sound
    assert path.read_bytes() == original + b'{"role":"user","content":"one more"}\n'
    assert report.backup is None
    assert transcript.externalize(path, store.session("s"), policy=STORE).is_sound
