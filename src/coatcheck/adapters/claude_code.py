"""The hooks of Claude Code, for its plugin and for its SDK.

Before a tool runs, pointers in its arguments become values. After it, a large output becomes a
stub. Claude Code accepts a changed output only in the tool's own shape and ignores any other, so
`_SHAPES` has the place of the long text for each tool that is known. Outputs of other built-in
tools, and shapes that are not known, stay as they are.

With `Policy(files=folder)` and no tools of ours, a stub names a file that the model reads with
Claude Code's own tools. A file that was cleaned away is written again before the next tool that
names it runs; if its artifact is gone too, a note says what to do.

Claude Code cuts some outputs itself before a hook sees them, and saves them to a file: those of
shells over 30,000 characters, and those of MCP tools over 25,000 tokens. They are read from that
file. It cuts long errors too, and saves them nowhere: a note says so.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from coatcheck import Session
from coatcheck.adapters import Adapter, Kit, Refusal, can_be_read
from coatcheck.agent_files import is_files_folder
from coatcheck.errors import CoatcheckError
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.externalize.wrapped import structured_text
from coatcheck.ids import SCHEME
from coatcheck.parts.mcp import only_string
from coatcheck.regular import read_regular
from coatcheck.store import private_id
from coatcheck.truncation import Truncation, find_truncation

HOOK: Final = "hook"
"""The tool of our MCP server that answers the hooks. It is not listed: only Claude Code itself
calls it."""

CALL_ID: Final = "claudecode/toolUseId"
"""The key in a request's metadata for the id of a call that a model made. Hooks are called without
one."""

HOST: Final = "claude-code"
PLUGIN_SERVER: Final = "plugin_coatcheck_artifacts"
"""The name of the plugin's MCP server in the names of tools."""

_MCP: Final = "mcp__"
_MOST_SAVED: Final = 64 << 20  # bytes of an output that Claude Code has saved to a file
_LARGEST_AGENT: Final = 1 << 20  # bytes of the file of a custom agent
_UNCUT: Final = 11_024  # characters of an error up to which Claude Code shows it unchanged
_REMEMBERED: Final = 1_000  # calls whose session is known
_VALUES: Final[Mapping[str, frozenset[str]]] = {
    "Write": frozenset({"content"}),
    "Edit": frozenset({"old_string", "new_string"}),
    "NotebookEdit": frozenset({"new_source"}),
}
"""The arguments of built-in tools that may be a pointer. A command, a path or a prompt is never
replaced."""

_FILE_READERS: Final = frozenset({"*", "Bash", "Grep", "Read"})
_FILE: Final = r"{}/([0-9a-f]{{12,64}})\.([a-z0-9]{{1,8}})"
"""The file of an artifact in a folder of this name, in an argument of a tool."""

_GONE: Final = (
    "{} is gone: Coatcheck has removed the result that it had, since it had expired or was "
    "deleted. Run the call that gave it again to get a new one."
)
_READ_ONLY: Final = (
    "This file has a stored result and is read-only. Copy it to another file, and change the copy."
)
_TOOLS_LINE: Final = re.compile(r"^tools:(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_AGENT: Final = re.compile(r"[\w-]{1,64}")
_LOG: Final = logging.getLogger("coatcheck")


class Hooks:
    """Answers hooks, and knows the session of each call.

    `server` is our MCP server's name as it appears in tool names: `mcp__<server>__get_artifact`.
    `first` is the host's session before a hook names another. `restricted` has the tools that types
    of sub-agents are limited to, or None if they are not; for other types, their files are read."""

    def __init__(
        self,
        adapter: Adapter,
        *,
        server: str,
        first: str | None = None,
        restricted: Mapping[str, Sequence[str] | None] | None = None,
    ) -> None:
        kit = adapter.kit()
        self.prefix = f"{_MCP}{server}__"
        reader = self.prefix + kit.policy.read_tool if kit.policy.read_tool else None
        self.kit: Kit = replace(kit, policy=replace(kit.policy, read_tool=reader))
        self._own_tools = frozenset(self.prefix + tool.name for tool in kit.tools)
        self._adapter = adapter
        self._folder = None if kit.policy.files is None else Path(kit.policy.files)
        self._restricted = dict(restricted or {})
        self._calls: dict[str, str] = {}  # call id -> session id of the host, the newest last
        self._newest = first or private_id()

    def session_of(self, call_id: str | None) -> Session:
        """Return the session of a call to one of our tools; the newest hook's if no hook was called
        for it."""
        return self._adapter.session(self._calls.get(call_id or "", self._newest))

    def answer(
        self, event: Mapping[str, Any], schema: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the output of a hook for its input, both in Claude Code's form; {} changes
        nothing. Never raises.

        Claude Code does not say what an MCP tool's arguments are. With its JSON `schema`, a pointer
        in place of a list becomes a list; without it, a pointer becomes a text, whatever the
        content."""
        try:
            return self._answer(event, schema)
        except Exception as error:  # noqa: BLE001 - whatever is wrong here, the call of the tool is not
            _LOG.warning("a hook left a call as it is: %s", type(error).__name__)
            return {}

    def _answer(self, event: Mapping[str, Any], schema: Mapping[str, Any] | None) -> dict[str, Any]:
        name, tool, call_id = (
            str(event.get(key) or "") for key in ("hook_event_name", "tool_name", "tool_use_id")
        )
        host_id = str(event.get("session_id") or "")
        if not host_id or not self.kit.policy.enabled:
            return {}
        self._remember(call_id, host_id)
        if tool in self._own_tools:
            # Reading back what this session has stored needs no permission of its own. Not every
            # tool with our prefix is ours: another server may have the same name.
            return _output(name, permissionDecision="allow") if name == "PreToolUse" else {}
        given = event.get("tool_input")
        gone = self._missing_files(host_id, given)
        if name == "PreToolUse":
            return self._before(host_id, tool, given, schema)
        done: dict[str, Any] = {}
        can_read = self._can_read(str(event.get("agent_type") or ""), str(event.get("cwd") or ""))
        if can_read and name == "PostToolUse" and not self._is_page(tool, given):
            done = self._after(host_id, tool, call_id, event.get("tool_response"))
        if can_read and name == "PostToolUseFailure":
            done = self._failed(host_id, tool, call_id, event.get("error"))
        if gone and not done.get("additionalContext"):
            done["additionalContext"] = _GONE.format(", ".join(gone))
        return _output(name, **done) if done else {}

    def _remember(self, call_id: str, host_id: str) -> None:
        self._newest = host_id
        if call_id:
            self._calls[call_id] = host_id
            if len(self._calls) > _REMEMBERED:
                del self._calls[next(iter(self._calls))]

    def _missing_files(self, host_id: str, given: Any) -> list[str]:
        """Return the files of artifacts that a call names and that cannot be written again: their
        artifacts are gone. The others are there when this returns."""
        if self._folder is None or not isinstance(given, dict):
            return []
        missing: list[str] = []
        for value in given.values():
            if isinstance(value, str) and self._folder.name in value:
                missing += self._missing_in(host_id, value)
        return list(dict.fromkeys(missing))

    def _missing_in(self, host_id: str, text: str) -> list[str]:
        assert self._folder is not None
        found: list[str] = []
        for digits, ending in re.findall(_FILE.format(re.escape(self._folder.name)), text):
            path = self._folder / f"{digits}.{ending}"
            if path.exists():
                continue
            try:
                self._adapter.session(host_id).write_file(SCHEME + digits, self._folder)
            except CoatcheckError:
                found.append(str(path))
        return found

    def _is_page(self, tool: str, given: Any) -> bool:
        """Whether a call reads some lines of an artifact's file: the model asked for just these."""
        is_read = tool == "Read" and isinstance(given, dict)
        return is_read and "limit" in given and self._is_file(given.get("file_path"))

    def _is_file(self, path: Any) -> bool:
        """Whether this is the path of an artifact's file."""
        if self._folder is None or not isinstance(path, str):
            return False
        return re.search(_FILE.format(re.escape(self._folder.name)) + "$", path) is not None

    def _before(
        self, host_id: str, tool: str, given: Any, schema: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if not isinstance(given, dict):
            return {}
        if tool in _VALUES and self._is_file(given.get("file_path")):
            return _denied(_READ_ONLY)
        names = _VALUES.get(tool, frozenset()) if not tool.startswith(_MCP) else given.keys()
        asked = {name: value for name, value in given.items() if name in names}
        if SCHEME not in repr(asked):
            return {}
        schema = _TEXTS if tool in _VALUES else schema
        values = self.kit.arguments(self._adapter.session(host_id), tool, asked, schema)
        if isinstance(values, Refusal):
            return _denied(values.text)
        # Without a decision: the user's own rules apply to the new arguments.
        return {} if values is asked else _output("PreToolUse", updatedInput={**given, **values})

    def _after(self, host_id: str, tool: str, call_id: str, response: Any) -> dict[str, Any]:
        """Replace a large output. Returns fields of the hook's output."""
        change = _in_blocks if tool.startswith(_MCP) else _SHAPES.get(tool)
        if change is None:
            return {}
        call = _Call(self.kit, self._adapter.session(host_id), host_id, tool, call_id)
        changed = change(response, call)
        return {} if changed is response else {"updatedToolOutput": changed}

    def _failed(self, host_id: str, tool: str, call_id: str, error: Any) -> dict[str, Any]:
        """Add what the model cannot see of a long error: Claude Code lets no hook replace an error,
        and shows the model only 10,000 characters of it. Current versions (2.1.325, 2.1.326) give
        the hook no more either: nothing is stored, and a note says how to get the output. An error
        that came uncut is stored, and the model gets its pointer."""
        if not isinstance(error, str):
            return {}
        cut = find_truncation(error)
        if cut is not None:
            return {"additionalContext": _RERUN.format(cut)} if tool == "Bash" else {}
        if len(error) <= _UNCUT or not (self.kit.policy.read_tool or self._folder):
            return {}
        kit = replace(
            self.kit, source=UNCOUNTED
        )  # the model gets the beginning of the error, not a stub
        outcome = kit.result(self._adapter.session(host_id), error, tool=tool, call_id=call_id)
        if not outcome.refs:
            return {}
        pointer = outcome.refs[0].pointer
        all_of_it = f"The error above was cut. All {len(error):,} characters of it are"
        if self.kit.policy.read_tool:
            reader = self.kit.policy.read_tool
            text = f'{all_of_it} {pointer}; {reader}(pointer="{pointer}", grep="…") searches them.'
        else:
            file = _stub_file(outcome.text)
            text = f"{all_of_it} in the file {file}; grep searches it." if file else ""
        return {"additionalContext": text} if text else {}

    def _can_read(self, agent: str, folder: str) -> bool:
        """Whether a sub-agent of this type has our tools, or one that reads files if there are
        files. One that is limited to other tools could not open a stub."""
        if agent and agent not in self._restricted and _AGENT.fullmatch(agent):
            self._restricted[agent] = _tools_in_file(agent, Path(folder))
        allowed = self._restricted.get(agent) or ("*",)
        if self._folder is not None and not self.kit.tools:
            return not _FILE_READERS.isdisjoint(allowed)
        return any(one == "*" or one.startswith(self.prefix.rstrip("_")) for one in allowed)


_RERUN: Final = (
    "The error above is {}, which Coatcheck did not get and has not stored. To get them, "
    "run the command so that it "
    'succeeds, for example with `; echo "exit code $?"` at its end: such output is not cut.'
)

_TEXTS: Final = {
    "properties": {name: {"type": "string"} for names in _VALUES.values() for name in names}
}


def _denied(reason: str) -> dict[str, Any]:
    return _output("PreToolUse", permissionDecision="deny", permissionDecisionReason=reason)


def _output(event: str, **fields: Any) -> dict[str, Any]:
    return {"hookSpecificOutput": {"hookEventName": event, **fields}}


def _stub_file(stub: str) -> str:
    """Return the file that a stub names, "" if it names none."""
    try:
        found = json.loads(stub)
    except ValueError:
        return ""
    return str(found.get("file", "")) if isinstance(found, dict) else ""


def files_folder(project: Path) -> Path:
    """Return the folder for files of artifacts in a project: `.coatcheck`, or `.coatcheck-files` if
    that is something else, such as a store."""
    folder = project / ".coatcheck"
    if not folder.exists() or is_files_folder(folder):
        return folder
    return project / ".coatcheck-files"


def parsed_event(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of a hook from the arguments of the MCP tool that answers it, where objects
    and lists are JSON and texts are unchanged. An object in the response of an MCP tool is a text:
    its structured content as JSON."""
    event = dict(arguments)
    is_mcp = str(event.get("tool_name")).startswith(_MCP)
    for key in ("tool_input", "tool_response"):
        try:
            value = json.loads(event.get(key) or "")
        except (TypeError, ValueError):
            continue
        is_text = is_mcp and key == "tool_response" and isinstance(value, dict)
        if isinstance(value, dict | list) and not is_text:
            event[key] = value
    return event


def _tools_in_file(agent: str, folder: Path) -> list[str]:
    """Return the tools that a custom agent's file limits it to; [] if it has no limit, or no
    file."""
    for place in (folder / ".claude", Path.home() / ".claude"):
        try:
            file = place / "agents" / f"{agent}.md"
            text = read_regular(file, max_bytes=_LARGEST_AGENT, follow=True).decode()
        except (OSError, ValueError):
            continue
        found = _TOOLS_LINE.search(text.split("\n---", 1)[0])
        return re.findall(r"[*\w-]+", found[1]) if found else []
    return []


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has an output."""

    kit: Kit
    session: Session
    host_id: str
    tool: str
    id: str

    def slim(self, value: Any, cut: Truncation | None = None) -> Any:
        """Return what the model gets for a text or for content blocks; the same object if nothing
        changes. `cut` is what Claude Code left out of it."""
        outcome = self.kit.result(self.session, value, tool=self._ruled, call_id=self.id, cut=cut)
        # If nothing can be stored, a built-in tool's output stays: Claude Code bounds it, and keeps
        # what it cuts.
        if outcome.failure and not self.tool.startswith(_MCP):
            return value
        is_readable = can_be_read(self.session, outcome, self.kit.policy)
        return outcome.content if is_readable else value

    @property
    def _ruled(self) -> str:
        """The name that the policy has a rule for: a rule for `search` also covers
        `mcp__server__search`."""
        bare = self.tool.split("__", 2)[-1]
        return (
            bare
            if self.tool not in self.kit.policy.tools and bare in self.kit.policy.tools
            else self.tool
        )

    def saved(self, path: Any) -> str | None:
        """Return the output that Claude Code has saved to a file of this session, or None. A server
        may name any file, so the file must really be there: a link that leads elsewhere is not
        followed."""
        if not isinstance(path, str) or Path(path).parts[-3:-1] != (self.host_id, "tool-results"):
            return None
        try:
            real = Path(os.path.realpath(path))
            if real.parts[-3:] != Path(path).parts[-3:]:
                return None
            return read_regular(real, max_bytes=_MOST_SAVED).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None


# The shapes of outputs. Each function returns the same object if nothing changes.


def _in_blocks(response: Any, call: _Call) -> Any:
    """An MCP tool: content blocks, or the JSON text of the structured content. Claude Code checks
    nothing there. Over 25,000 tokens are in a file: as a text, or as JSON."""
    if not isinstance(response, str):
        return call.slim(response) if isinstance(response, list) else response
    found = _SAVED_MCP.match(response)
    saved = call.saved(found["path"]) if found else None
    if saved is None:
        value: Any = _text_in(response)
    elif found and found["format"] == "Plain text":
        value = saved
    else:
        value = _blocks_in(saved)
    shown = call.slim(value)
    return response if shown is value else shown


def _text_in(response: str) -> str:
    """Return the text that is all there is in structured content, else the response itself."""
    text = structured_text(response)
    return response if text is None else text


def _blocks_in(saved: str) -> Any:
    """Return the blocks in a saved result, or the text in its structured content."""
    try:
        value = json.loads(saved)
    except (ValueError, RecursionError):
        return saved
    text = only_string(value)
    return value if text is None else text


_SAVED_MCP: Final = re.compile(
    r"Error: result \([\d,]+ characters.{0,80}Output has been saved to "
    r"(?P<path>[^\n]+)\.\nFormat: (?P<format>[^\n]*)"
)


def _in_shell(response: Any, call: _Call) -> Any:
    """Bash and PowerShell. An output that was saved to a file is read from there; without the path,
    Claude Code shows what is in `stdout`."""
    if (
        not _has(response, stdout=str, stderr=str)
        or response.get("isImage")
        or response.get("structuredContent")
    ):
        return response
    saved = call.saved(response.get("persistedOutputPath"))
    if saved is None and response.get("persistedOutputPath"):
        return response  # `stdout` is only its beginning, and Claude Code shows where the rest is
    out, err = response["stdout"] if saved is None else saved, response["stderr"]
    shown = {"stdout": call.slim(out) if out else out, "stderr": call.slim(err) if err else err}
    if shown["stdout"] is out:
        return response if shown["stderr"] is err else {**response, "stderr": shown["stderr"]}
    return {**{key: value for key, value in response.items() if key not in _ABOUT_SAVED}, **shown}


_ABOUT_SAVED: Final = ("persistedOutputPath", "persistedOutputSize", "stdoutHoldsOutputEnd")


def _in_read(response: Any, call: _Call) -> Any:
    """A text file, without line numbers. Claude Code remembers that the file was read, so that Edit
    works."""
    if not _has(response, file=dict) or response.get("type") != "text":
        return response
    given = response["file"]
    file = _in_field(
        "content", cut=_left_out(given, "numLines", "totalLines", "lines of the file")
    )(given, call)
    return response if file is given else {**response, "file": file}


def _in_grep(response: Any, call: _Call) -> Any:
    """Lines or file names. Names are a list, so their stub is shown as lines."""
    if not _has(response, filenames=list) or "content" in response:
        return _in_field("content", cut=_left_out(response, "numLines", "totalLines", "lines"))(
            response, call
        )
    names = "\n".join(map(str, response["filenames"]))
    shown = call.slim(names, _left_out(response, "numFiles", "totalFiles", "files"))
    return (
        response
        if shown is names
        else {**response, "mode": "content", "content": shown, "filenames": []}
    )


def _left_out(response: Any, some: str, of: str, unit: str) -> Truncation | None:
    """What Claude Code says it left out: one field has the number that it returned, another the
    number of all."""
    if not _has(response, **{some: int, of: int}) or response[some] >= response[of]:
        return None
    return Truncation("Claude Code", f"{response[of] - response[some]:,} {unit}")


def _in_field(name: str, cut: Truncation | None = None) -> Callable[[Any, _Call], Any]:
    """The long text, or the content blocks, are in one field."""

    def change(response: Any, call: _Call) -> Any:
        if not isinstance(response, dict) or not isinstance(response.get(name), str | list):
            return response
        shown = call.slim(response[name], cut)
        return response if shown is response[name] else {**response, name: shown}

    return change


def _has(value: Any, **fields: type) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in fields.items()
    )


_SHAPES: Final[Mapping[str, Callable[[Any, _Call], Any]]] = {
    "Agent": _in_field("content"),
    "Bash": _in_shell,
    "Grep": _in_grep,
    "PowerShell": _in_shell,
    "Read": _in_read,
    "Task": _in_field("content"),
    "WebFetch": _in_field("result"),
}
