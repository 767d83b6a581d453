"""What each system shows a model of a large result, and its own tools to see more: `python -m
benchmarks.peers.tools NAME FOLDER` serves one of the peers to the questions, a line of JSON for
each request.

An `Intent` is what a careful reader would look for, in no system's words. A `Reader` hands in a
result as its system does by default, and turns an intent into a call of the system's nearest tool,
or says that it has none. Needs nothing of Coatcheck's: it runs where only the peers are installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TextIO

_INSIDE: Final = re.compile(r"(?i)^\(\?i\)|\\(?=\W)|[$^]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What to look for: one of `grep`, `sql`, `path`, `lines`, `text`, `code` and `command`.

    `grep` is a regular expression; with `near`, this many lines before and after its first match;
    with `count`, only the number of its matches is of interest. `path` is a JSONPath; `sql` is
    about the table `artifact`, or the array at `at`. `lines` is a range such as "-15:". `text` asks
    for the readable text of a document: "all", or its "last" page. `code` is a Python program that
    prints what is wanted of `text`, `lines` (a list) or `data` (of JSON, or of rows); `command` is
    a shell command over the file `F`."""

    grep: str = ""
    near: tuple[int, int] = (0, 0)
    count: bool = False
    sql: str = ""
    at: str = ""
    path: str = ""
    lines: str = ""
    text: str = ""
    code: str = ""
    command: str = ""

    @property
    def literal(self) -> str:
        """The longest piece of `grep` that is plain text, for tools that take no regular
        expression."""
        first = _INSIDE.sub("", self.grep.partition("|")[0])
        return max(re.split(r"\.\*|\\S\+", first), key=len)


class Call(NamedTuple):
    """A call of a tool, as a model would write it."""

    tool: str
    arguments: dict[str, Any]


class Reader(Protocol):
    """One system: what a model sees of a large result, and the tools to see more of it."""

    @property
    def schemas(self) -> str:
        """The descriptions of the tools for reading, as JSON."""

    def offload(self, content: str | bytes, ask: str) -> str:
        """Hand in a tool's result, and return what the model gets in its place. `ask` is the user's
        question."""

    def hint(self, shown: str) -> Call | None:
        """Return the call that the text for the model proposes, if it is complete."""

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        """Return the call for an intent, given what the model has seen so far; None if there is no
        such tool."""

    def more(self, call: Call, page: str) -> Call | None:
        """Return the call that continues after a page, if there is one."""

    def run(self, call: Call) -> str:
        """Make a call, and return what the model gets."""


def shown_line(intent: Intent, before: str, pages: Sequence[str]) -> int | None:
    """The number of the first line with what an intent is near to, if a page has shown it; `before`
    is a pattern for the number and what follows it."""
    if intent.near == (0, 0):
        return None
    found = (re.search(rf"(?m)^{before}.*{re.escape(intent.literal)}", page) for page in pages[1:])
    return next((int(match[1]) for match in found if match), None)


def as_script(code: str, path: str, start: str) -> str:
    """A program for Python's interpreter, given one that expects `text`, `lines` or `data`. `start`
    is the beginning of the content, which shows what it is."""
    modules = [name for name in ("csv", "json", "re") if re.search(rf"\b{name}\.", code)]
    made = []
    if re.search(r"\b(text|lines)\b", code):
        made.append(f"text = open({path!r}).read()")
    if re.search(r"\blines\b", code):
        made.append("lines = text.splitlines()")
    if re.search(r"\bdata\b", code) and start[:1] in "[{":
        modules.append("json")
        is_lines = start.startswith("{") and start.count('\n{"') > 0
        each = f"[json.loads(l) for l in open({path!r})]"
        made.append(f"data = {each}" if is_lines else f"data = json.load(open({path!r}))")
    elif re.search(r"\bdata\b", code):
        modules.append("csv")
        made.append(f"data = list(csv.DictReader(open({path!r})))")
    if modules:
        made.insert(0, "import " + ", ".join(sorted(set(modules))))
    if "Counter" in code:
        made.insert(0, "from collections import Counter")
    return "\n".join([*made, code])


class Shell:
    """A file, its first 2 KB, and a shell, as coding agents have them. Output is cut at 30,000
    characters.

    `command` → the command; `code` → the program, given to Python; grep and lines → `grep` and
    `tail`. There is no more: a command shows all that it found."""

    version = "bash"
    schemas = json.dumps([{
        "name": "bash", "description": "Run a command in a shell, in the project's folder. Returns its output, of "
        "which at most 30,000 characters are shown.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }])  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._folder, self._results, self._name, self._start = folder, 0, "", ""

    def offload(self, content: str, ask: str) -> str:
        self._results += 1
        self._name = f"result-{self._results}.txt"
        (self._folder / self._name).write_text(content)
        self._start = content[:2_000]
        size, lines = len(content.encode()), content.count("\n") + 1
        return f"Output of {size:,} bytes and {lines:,} lines is in {self._name}. It begins:\n{self._start}"

    def hint(self, shown: str) -> Call | None:
        return None

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        command = shell_command(intent, self._name, self._start)
        return Call("bash", {"command": command}) if command else None

    def more(self, call: Call, page: str) -> Call | None:
        return None

    def run(self, call: Call) -> str:
        done = subprocess.run(
            ["bash", "-c", call.arguments["command"]], cwd=self._folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=120,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        return done.stdout[:30_000]


def shell_command(intent: Intent, name: str, start: str) -> str:
    """The command over a file that an intent is, or '' if it is none."""
    if intent.command:
        return re.sub(r"(?<=\s)F(?=\s|$)", name, intent.command)
    if intent.code:
        return f"python3 - <<'E'\n{as_script(intent.code, name, start)}\nE"
    if intent.grep:
        before, after = intent.near
        flags = "-i " if intent.grep.startswith("(?i)") else ""
        flags += (
            f"-nP -B{before} -A{after}" if before or after else "-noP" if intent.count else "-nP"
        )
        pattern = intent.grep.removeprefix("(?i)").replace("'", r"'\''")
        return f"grep {flags} '{pattern}' {name}" + (" | wc -l" if intent.count else "")
    if intent.lines.startswith("-"):
        return f"tail -n {intent.lines.strip(':-')} {name}"
    return ""


class Strands:
    """strands-agents: `ContextOffloader` with its defaults, over 2,500 tokens;
    `retrieve_offloaded_content`.

    grep → `pattern`, with its five lines of context, or none for a count; near → `line_range` if a
    search has shown the line, else `context_lines`. The end of a result has no call, since the
    number of lines is not shown before a search; the whole (no pattern) is the last resort, as its
    text says."""

    def __init__(self, folder: Path) -> None:
        from strands import Agent
        from strands.models.model import Model
        from strands.vended_plugins.context_offloader import ContextOffloader, FileStorage

        silent = {name: lambda *args, **kwargs: None for name in Model.__abstractmethods__}
        self._offloader = ContextOffloader(storage=FileStorage(str(folder)))
        self._agent = Agent(model=type("Silent", (Model,), silent)(), plugins=[self._offloader])
        self._results = 0
        self.schemas = json.dumps(
            [self._agent.tool_registry.registry["retrieve_offloaded_content"].tool_spec]
        )

    def offload(self, content: str, ask: str) -> str:
        from strands.hooks.events import AfterToolCallEvent

        self._results += 1
        use = {"toolUseId": f"call-{self._results}", "name": "run", "input": {}}
        result = {
            "toolUseId": use["toolUseId"],
            "status": "success",
            "content": [{"text": content}],
        }
        event = AfterToolCallEvent(
            agent=self._agent, selected_tool=None, tool_use=use, invocation_state={}, result=result
        )
        asyncio.run(self._offloader._handle_tool_result(event))
        shown = str(event.result["content"][0]["text"])
        stored = (
            shown.rpartition("[Stored references:]\n")[2] if shown.startswith("[Offloaded:") else ""
        )
        self._reference = stored.split()[0] if stored else ""
        return shown

    def hint(self, shown: str) -> Call | None:
        return None

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if not self._reference or not intent.grep:
            return None
        before, after = intent.near
        at = shown_line(intent, r"> *(\d+)\|", pages)
        asked: dict[str, Any] = {"pattern": intent.grep}
        if at is not None:
            asked = {"line_range": {"start": max(1, at - before), "end": at + after}}
        elif before or after or intent.count:
            asked["context_lines"] = max(before, after)
        return Call("retrieve_offloaded_content", {"reference": self._reference, **asked})

    def more(self, call: Call, page: str) -> Call | None:
        return Call(call.tool, {"reference": self._reference}) if len(call.arguments) > 1 else None

    def run(self, call: Call) -> str:
        result = self._agent.tool.retrieve_offloaded_content(**call.arguments)
        return "\n".join(str(block.get("text", block)) for block in result["content"])


class Deepagents:
    """deepagents: `FilesystemMiddleware` with its defaults, over 20,000 tokens; `grep` and
    `read_file`.

    grep → `grep` for its longest plain text (it takes no regular expression), with matches or only
    their count; near and the end → `read_file` at an offset that was shown. It continues with the
    next offset."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._results = folder, 0
        self._use_new_folder()
        self.schemas = json.dumps([
            {"name": name, "description": self._tools[name].description,
             "parameters": self._tools[name].tool_call_schema.model_json_schema()}
            for name in ("ls", "read_file", "glob", "grep")
        ])  # fmt: skip

    def _use_new_folder(self) -> None:
        """One for each question: `grep` for a path also finds files of similar names."""
        from deepagents.backends import FilesystemBackend
        from deepagents.middleware.filesystem import FilesystemMiddleware

        self._results += 1
        root = self._folder / str(self._results)
        root.mkdir()
        self._middleware = FilesystemMiddleware(
            backend=FilesystemBackend(root_dir=str(root), virtual_mode=True)
        )
        self._tools = {tool.name: tool for tool in self._middleware.tools}

    def offload(self, content: str, ask: str) -> str:
        from langchain_core.messages import ToolMessage

        self._use_new_folder()
        message = ToolMessage(content=content, tool_call_id=f"call-{self._results}", name="run")
        shown = str(self._middleware._intercept_large_tool_result(message).content)
        stored = re.match(r"Tool result too large.* at this path: (\S+)", shown)
        self._path = stored[1] if stored else ""
        return shown

    def hint(self, shown: str) -> Call | None:
        return (
            Call("read_file", {"file_path": self._path, "offset": 0, "limit": 100})
            if self._path
            else None
        )

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if not self._path:
            return None
        before, after = intent.near
        if intent.lines.startswith("-"):
            last = re.findall(r"(?m)^(\d+)  ", pages[0])
            wanted = int(intent.lines.strip(":-"))
            return self._read(int(last[-1]) - wanted, wanted) if last else None
        at = shown_line(intent, r" *(\d+): ", pages)
        if at is not None:
            return self._read(max(0, at - 1 - before), before + after + 1)
        if not intent.grep:
            return None
        mode = "count" if intent.count else "content"
        return Call("grep", {"pattern": intent.literal, "path": self._path, "output_mode": mode})

    def more(self, call: Call, page: str) -> Call | None:
        following = re.search(r"next offset (\d+)", page)
        return self._read(int(following[1]), 100) if following else None

    def run(self, call: Call) -> str:
        runtime = types.SimpleNamespace(
            tool_call_id="call", state={"files": {}}, config={}, context=None, store=None
        )
        answer = self._tools[call.tool].func(runtime=runtime, **call.arguments)
        return str(getattr(answer, "content", answer))

    def _read(self, offset: int, limit: int) -> Call:
        return Call("read_file", {"file_path": self._path, "offset": offset, "limit": limit})


class Agno:
    """agno: `ResultStore` with its defaults, over 16,000 characters; `search_result` and
    `read_result`.

    grep → `search_result`; near → `read_result` if a search has shown the line, else
    `search_result` with `context_lines` (at most 20); the end → `read_result` from a line counted
    from the number of lines in the envelope."""

    def __init__(self, folder: Path) -> None:
        from agno.db.sqlite import SqliteDb
        from agno.offload.store import ResultStore
        from agno.offload.tools import (
            OFFLOAD_INSTRUCTION,
            get_read_result_function,
            get_search_result_function,
        )
        from agno.run import RunContext

        self._store = ResultStore(db=SqliteDb(db_file=str(folder / "agno.db")))
        owner, run = (
            types.SimpleNamespace(_result_store=self._store),
            RunContext(run_id="r", session_id="s"),
        )
        tools = get_read_result_function(owner, run), get_search_result_function(owner, run)
        self._tools = {tool.name: tool for tool in tools}
        self._results = 0
        self.schemas = json.dumps([OFFLOAD_INSTRUCTION, *(tool.to_dict() for tool in tools)])

    def offload(self, content: str, ask: str) -> str:
        self._result, self._results = "", self._results + 1
        if not self._store.should_offload("run", content):
            return content
        shown = str(self._store.offload_for_model(
            session_id="s", run_id="r", tool_call_id=f"call-{self._results}", tool_name="run", tool_args={},
            output=content,
        ))  # fmt: skip
        self._result = re.findall(r'<result id="(\w+)"', shown)[0]
        self._lines = int(re.findall(r' lines="(\d+)"', shown)[0])
        return shown

    def hint(self, shown: str) -> Call | None:
        return Call("read_result", {"result_id": self._result}) if self._result else None

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if not self._result:
            return None
        if intent.lines.startswith("-"):
            first = max(1, self._lines - int(intent.lines.strip(":-")))
            return Call("read_result", {"result_id": self._result, "start_line": first})
        if not intent.grep:
            return None
        before, after = intent.near
        at = shown_line(intent, r"(\d+)(?: \(char \d+\))?: ", pages)
        if at is not None:
            lines = {"start_line": max(1, at - before), "end_line": at + after}
            return Call("read_result", {"result_id": self._result, **lines})
        context = {"context_lines": min(20, max(before, after))} if before or after else {}
        return Call("search_result", {"result_id": self._result, "pattern": intent.grep, **context})

    def more(self, call: Call, page: str) -> Call | None:
        following = re.search(r"read from line (\d+)(?: with start_char=(\d+))?", page[:300])
        if following is None:
            return self.hint(page) if call.tool == "search_result" else None
        start = {"start_line": int(following[1]), "start_char": int(following[2] or 0)}
        return Call("read_result", {"result_id": self._result, **start})

    def run(self, call: Call) -> str:
        return str(self._tools[call.tool].entrypoint(**call.arguments))


class Headroom:
    """headroom-ai: `compress` on the conversation, with the question before the result;
    `headroom_retrieve`.

    It has one call for every intent: the whole, by hash. Where it leaves a result as it is, the
    model has it whole."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {"HEADROOM_CCR_SQLITE_PATH": str(folder / "ccr.db"), "HF_HUB_OFFLINE": "1"}
        from headroom import compress
        from headroom.ccr import CCRResponseHandler, CCRToolCall, create_ccr_tool_definition

        self._compress, self._handler, self._call = compress, CCRResponseHandler(), CCRToolCall
        self.schemas = json.dumps([create_ccr_tool_definition("anthropic")])

    def offload(self, content: str, ask: str) -> str:
        called = {"id": "call", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call", "content": content},
        ]
        return str(
            self._compress(messages, model="claude-sonnet-4-5-20250929").messages[-1]["content"]
        )

    def hint(self, shown: str) -> Call | None:
        marked = re.findall(r"hash=([0-9a-f]{8,})", shown)
        return Call("headroom_retrieve", {"hash": marked[-1]}) if marked else None

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        return self.hint(pages[0])

    def more(self, call: Call, page: str) -> Call | None:
        return None

    def run(self, call: Call) -> str:
        return str(
            self._handler._execute_retrieval(self._call("call", call.arguments["hash"])).content
        )


class ContextMode:
    """context-mode: a server over stdio. The command whose output is the result is run in its
    sandbox, with the question as the intent: over 5 KB, that shows the matching sections.

    grep and lines → a shell command over the file in the sandbox (`ctx_execute`); path → JavaScript
    over it (`ctx_execute_file`); command and code → its sandbox too; after that, `ctx_search` for the words of the question. It slows
    down a session that searches often, so each question is a session of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._id, self._ask = folder, 0, ""
        self._server: subprocess.Popen[str] | None = None
        self.version = self._start()["serverInfo"]["version"]
        self.schemas = json.dumps(self._rpc("tools/list")["tools"])

    def offload(self, content: str, ask: str) -> str:
        self._start()
        self._ask, self._path = ask, self._folder / "result.txt"
        self._path.write_text(content)
        return self.run(
            Call(
                "ctx_execute",
                {"language": "shell", "code": f"cat {self._path.name}", "intent": ask},
            )
        )

    def hint(self, shown: str) -> Call | None:
        return Call("ctx_search", {"queries": [self._ask]})

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if intent.command or intent.code:
            name = self._path.name
            if intent.command:
                return self._shell(shell_command(intent, name, ""))
            script = as_script(intent.code, name, self._path.read_text()[:2_000])
            return Call("ctx_execute", {"language": "python", "code": script})
        before, after = intent.near
        if intent.grep:
            flags = "-i " if intent.grep.startswith("(?i)") else ""
            flags += (
                "-oE" if intent.count else f"-nE -B{before} -A{after}" if before or after else "-nE"
            )
            pattern = intent.grep.removeprefix("(?i)").replace("'", r"'\''")
            then = " | wc -l" if intent.count else ""
            return self._shell(f"grep {flags} '{pattern}' {self._path.name}{then}")
        if intent.lines.startswith("-"):
            return self._shell(f"tail -n {intent.lines.strip(':-')} {self._path.name}")
        if intent.path and ".." not in intent.path:
            where = re.sub(
                r"\[\?@\.([\w.]+)==('[^']*')\]",
                r".filter(x => x.\1==\2).map(x => x)",
                intent.path[1:],
            )
            head, filtered, tail = where.partition(".map(x => x)")
            code = f"console.log(JSON.parse(FILE_CONTENT){head}{f'.map(x => x{tail})' if filtered else ''})"
            return Call(
                "ctx_execute_file",
                {"path": self._path.name, "language": "javascript", "code": code},
            )
        return None

    def more(self, call: Call, page: str) -> Call | None:
        return None

    def run(self, call: Call) -> str:
        result = self._rpc("tools/call", name=call.tool, arguments=call.arguments)
        return "\n".join(str(block.get("text", "")) for block in result.get("content", [result]))

    def _shell(self, code: str) -> Call:
        return Call("ctx_execute", {"language": "shell", "code": code})

    def _start(self) -> Any:
        if self._server is not None:
            self._server.communicate()
        command = os.environ["CONTEXT_MODE"].split(os.pathsep)
        path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
        home = str(self._folder)
        self._server = subprocess.Popen(
            command, cwd=home, env={**os.environ, "PATH": path, "HOME": home, "CLAUDE_PROJECT_DIR": home},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        client = {"name": "questions", "version": "1"}
        about = self._rpc(
            "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client
        )
        self._send(method="notifications/initialized")
        return about

    def _rpc(self, method: str, **params: Any) -> Any:
        self._id += 1
        self._send(id=self._id, method=method, params=params)
        assert self._server is not None
        assert self._server.stdout is not None
        for line in self._server.stdout:
            answer = json.loads(line)
            if answer.get("id") == self._id and "method" not in answer:
                return answer.get("result", answer.get("error"))
        raise RuntimeError("the server ended")

    def _send(self, **message: Any) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._server.stdin.flush()


READERS: Final[dict[str, tuple[str, Callable[[Path], Any]]]] = {
    "shell": ("", Shell),
    "strands": ("strands-agents", Strands),
    "deepagents": ("deepagents", Deepagents),
    "agno": ("agno", Agno),
    "headroom": ("headroom-ai", Headroom),
    "context-mode": ("", ContextMode),
}


def main(name: str, folder: Path, requests: TextIO, answers: TextIO) -> None:
    """Serve one reader: `[method, arguments…]` is answered with what it returns."""
    package, reader_of = READERS[name]
    try:
        reader = reader_of(folder)
    except Exception as error:  # noqa: BLE001 - whatever keeps a package from working is why it is not asked
        print(
            json.dumps({"missing": f"{type(error).__name__}: {error}"[:200]}),
            file=answers,
            flush=True,
        )
        return
    print(
        json.dumps({"version": version(package) if package else reader.version}),
        file=answers,
        flush=True,
    )
    for line in requests:
        method, *arguments = json.loads(line)
        if method == "call_for":
            arguments[0] = Intent(**{**arguments[0], "near": tuple(arguments[0]["near"])})
        elif method in ("run", "more"):
            arguments[0] = Call(*arguments[0])
        found = reader.schemas if method == "schemas" else getattr(reader, method)(*arguments)
        print(json.dumps({"answer": found}), file=answers, flush=True)


def request(method: str, *arguments: Any) -> list[Any]:
    """A request to `main` as JSON values."""
    return [method, *(asdict(one) if isinstance(one, Intent) else one for one in arguments)]


if __name__ == "__main__":
    # What a peer prints must not come between the answers.
    to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(sys.argv[1], Path(sys.argv[2]), sys.stdin, to_parent)
