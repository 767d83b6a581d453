"""The policy in `coatcheck.toml` applies to every way into a store: its masking, its limit for a
tool, its switch.

Each way takes the result of a tool and returns what the model sees of it. The secrets are assembled
here, so that no scanner reports this file as a leak."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck import Session, ToolCall, ToolExecutor, toolkit, transcript
from coatcheck.cli import main
from coatcheck.context import PromptBuilder, bootstrap
from tests.mcp.speaking import ODD, Speaker, environment, proxy

TOKEN = "gh" + "p_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAb12C"
PASSWORD = "Zx9-horse-Qq"
MIDDLE = "row 100 of the dump"
DUMP = f"token {TOKEN}\nDB_PASSWORD={PASSWORD}\n" + "".join(
    f"row {n} of the dump, and some words\n" for n in range(300)
)

MASKING = '[policy]\nredact = "store"\ntools = { env = { max_chars = 1000 } }\n'
LIMIT = "[policy]\nmax_tokens = 100000\ntools = { env = { max_chars = 1000 } }\n"
DISABLED = "[policy]\nenabled = false\n"

# Ways inside a process, which get a session


def externalize(session: Session, folder: Path, tool: str) -> str:
    return session.externalize(DUMP, tool=tool).text


def offload(session: Session, folder: Path, tool: str) -> str:
    return str(session.offload(lambda: DUMP, tool=tool)())


def executor(session: Session, folder: Path, tool: str) -> str:
    return (
        ToolExecutor(session, {tool: lambda: DUMP}).run(ToolCall("c1", tool, {})).to_model_content()
    )


def store_artifact(session: Session, folder: Path, tool: str) -> str:
    answer = toolkit(session)[2].run(name=tool, value=DUMP)
    assert answer.startswith("[stored")
    return answer


def bootstrap_file(session: Session, folder: Path, tool: str) -> str:
    (folder / "AGENTS.md").write_text(DUMP)
    return bootstrap(session, ["AGENTS.md"], root=folder).text


def prompt(session: Session, folder: Path, tool: str) -> str:
    return str(PromptBuilder(session, provider="openai").build(conversation(tool)[:3]).messages)


def prune(session: Session, folder: Path, tool: str) -> str:
    return str(
        transcript.prune(
            conversation(tool), max_tokens=1_000, keep_turns=1, session=session
        ).messages
    )


def transcript_file(session: Session, folder: Path, tool: str) -> str:
    path = write_transcript(folder, tool)
    assert transcript.externalize(path, session).is_sound
    return path.read_text()


def running_transcript(session: Session, folder: Path, tool: str) -> str:
    path = folder / f"{tool}.jsonl"
    with transcript.Transcript(path, session) as log:
        log.extend(conversation(tool))
    return path.read_text()


# Ways through a command


def command_line(place: Path, folder: Path, tool: str) -> str:
    path = write_transcript(folder, tool)
    command = ["transcript", "externalize", str(path), "--write", "--store", str(place)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    return path.read_text()


def mcp_proxy(place: Path, folder: Path, tool: str) -> str:
    with Speaker(proxy(server=ODD), environment(place), cwd=folder) as speaker:
        speaker.begin()
        return str(speaker.call(tool, text=DUMP))


class Way(NamedTuple):
    """A way in. `decides` says whether the policy decides what is stored; otherwise the caller has
    asked for it."""

    send: Callable[[Any, Path, str], str]
    in_process: bool = True
    decides: bool = True

    def shown(self, folder: Path, tool: str) -> str:
        """Send the result of a tool through this way, and return what the model sees."""
        if not self.in_process:
            return self.send(folder / "store", folder, tool)
        with coatcheck.open(folder / "store") as store:
            session = store.session("s")
            shown = self.send(session, folder, tool)
            session.search("row dump")  # writes the search index
            return shown


WAYS = [
    Way(externalize),
    Way(offload),
    Way(executor),
    Way(prompt),
    Way(transcript_file),
    Way(running_transcript),
    Way(command_line, in_process=False),
    Way(mcp_proxy, in_process=False),
    Way(prune, decides=False),
    Way(bootstrap_file, decides=False),
    Way(store_artifact, decides=False),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.send.__name__)


def conversation(tool: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": DUMP},
        *(
            {"role": role, "content": f"words {n}"}
            for n in range(8)
            for role in ("assistant", "user")
        ),
    ]


def write_transcript(folder: Path, tool: str) -> Path:
    path = folder / f"{tool}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in conversation(tool)))
    return path


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the settings of a folder and work in it."""

    def write(settings: str) -> Path:
        (tmp_path / "coatcheck.toml").write_text(settings)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return write


@every_way
def test_no_secret_is_in_any_file_of_the_store(way: Way, configure: Callable[[str], Path]) -> None:
    folder = configure(MASKING)
    way.shown(folder, "env")
    stored = {file: file.read_bytes() for file in (folder / "store").rglob("*") if file.is_file()}
    assert any(stored.values())
    assert [
        file.name
        for file, data in stored.items()
        if TOKEN.encode() in data or PASSWORD.encode() in data
    ] == []


@every_way
def test_the_limit_of_a_tool_applies_to_that_tool_alone(
    way: Way, configure: Callable[[str], Path]
) -> None:
    folder = configure(LIMIT)
    assert MIDDLE not in way.shown(folder, "env")
    assert (MIDDLE in way.shown(folder, "other")) == way.decides


@every_way
def test_a_disabled_policy_stores_only_what_was_asked_for(
    way: Way, configure: Callable[[str], Path]
) -> None:
    assert (MIDDLE in way.shown(configure(DISABLED), "env")) == way.decides
