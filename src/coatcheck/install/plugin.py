"""The plugin for Claude Code: a folder that it loads by itself, planned and shown first, then
written, and undone.

Claude Code loads every folder in `skills` of its configuration that has a
`.claude-plugin/plugin.json`. So nothing is registered elsewhere, and removing the folder undoes all
of it. A record in the folder has the digests of our files: those that were edited since stay when
it is undone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from coatcheck.atomic import replace_file
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.install.clients import Scope, after_launcher
from coatcheck.install.plan import Plan, decode, read_file

NAME: Final = "coatcheck"
_MANIFEST: Final = ".claude-plugin/plugin.json"
_SERVER: Final = ".mcp.json"
# the manifest last: with it, the folder is a plugin
_FILES: Final = ("hooks/hooks.json", _SERVER, _MANIFEST)
_RECORD: Final = ".coatcheck-undo"


class PluginPlan:
    """The files of the plugin before and after, as bytes (None: no file). `notes` are for the
    user."""

    def __init__(
        self, folder: Path, after: Mapping[str, bytes | None], *, is_undo: bool = False
    ) -> None:
        self.folder = folder
        self.is_undo = is_undo
        self.before = {name: read_file(folder / name) for name in after}
        self.after = dict(after)
        self.notes: list[str] = []

    @property
    def is_empty(self) -> bool:
        return self.before == self.after

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        parts: list[str] = []
        for name, data in self.after.items():
            both = (self.before[name], data)
            old, new = (decode(one or b"").splitlines() for one in both)
            was, will = (os.devnull if one is None else str(self.folder / name) for one in both)
            parts += difflib.unified_diff(old, new, was, will, lineterm="")
        return "".join(f"{line}\n" for line in parts)

    def write(self) -> None:
        """Apply the plan. Raises `InvalidArgument` if a file has changed since the plan was
        made."""
        if {name: read_file(self.folder / name) for name in self.after} != self.before:
            hint = "nothing was written; try again"
            raise InvalidArgument(f"{str(self.folder)!r} was changed by another program", hint=hint)
        if self.is_undo:
            self._remove()
            return
        for name, data in {_RECORD: _record(self.after), **self.after}.items():
            assert data is not None
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, data)

    def _remove(self) -> None:
        for name, data in reversed(self.after.items()):
            if data is None:
                (self.folder / name).unlink(missing_ok=True)
        (self.folder / _RECORD).unlink(missing_ok=True)
        hooks, manifest = self.folder / "hooks", self.folder / ".claude-plugin"
        for folder in (hooks, manifest, self.folder, self.folder.parent):
            try:
                os.rmdir(folder)
            except OSError:
                pass  # it is not empty, or not there


def plugin_folder(scope: Scope, folder: Path | None = None) -> Path:
    """Return the folder of the plugin, for this user and the working folder. Raises
    `InvalidArgument` for a scope that Claude Code does not load it from."""
    if scope == "local":
        raise InvalidArgument("a plugin has no scope 'local'", hint="use user or project")
    if scope == "user":
        place = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    else:
        place = Path.cwd() / ".claude"
    return (folder or place / "skills" / NAME).absolute()


def plan_plugin(
    folder: Path,
    start: Sequence[str],
    options: Sequence[str],
    servers: Plan,
    *,
    tools: bool = False,
) -> PluginPlan:
    """Plan to write the plugin. It starts our server with the command `start`, and adds `options`.
    With `tools`, models get our tools instead of files. `servers` is the configuration of the
    client's MCP servers; a note says if one of them has our tools already."""
    source = resources.files("coatcheck.install").joinpath("claude_code_plugin")
    files = {name: source.joinpath(*name.split("/")).read_bytes() for name in _FILES}
    server = json.loads(files[_SERVER])
    (entry,) = server["mcpServers"].values()
    words = [word for word in entry["args"] if not (tools and word == "--files")]
    entry["command"], entry["args"] = start[0], [*start[1:], *words, *options]
    files[_SERVER] = f"{json.dumps(server, indent=2, ensure_ascii=False)}\n".encode()
    plan = PluginPlan(folder, files)
    if any(data is not None for data in plan.before.values()) and _read_record(folder) is None:
        raise InvalidArgument(
            f"{str(folder)!r} already has another plugin", hint="nothing was changed; move it away"
        )
    file = str(servers.config.file)
    for name, one in servers.text.servers.items():
        used = after_launcher(one) or [""]
        if used[0] == "mcp":
            plan.notes.append(f"the server {name!r} in {file!r} has the same tools; remove it")
        elif used[0] == "proxy":
            plan.notes.append(
                f"{name!r} runs through the proxy, which the plugin makes unnecessary; unwrap it"
            )
    return plan


def plan_unplug(folder: Path) -> PluginPlan:
    """Plan to remove the plugin. Raises `NotFound` if Coatcheck has not written it."""
    record = _read_record(folder)
    if record is None:
        raise NotFound(
            f"there is no plugin by Coatcheck in {str(folder)!r}",
            hint="try another --scope or --file",
        )
    edited: dict[str, bytes] = {}
    for name in _FILES:
        data = read_file(folder / name)
        if data is not None and _digest(data) != record.get(name):
            edited[name] = data
    plan = PluginPlan(folder, {name: edited.get(name) for name in _FILES}, is_undo=True)
    plan.notes += [f"{str(folder / name)!r} was edited since; it is left there" for name in edited]
    return plan


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _record(files: Mapping[str, bytes | None]) -> bytes:
    return json.dumps(
        {name: _digest(data) for name, data in files.items() if data is not None}, indent=1
    ).encode()


def _read_record(folder: Path) -> dict[str, Any] | None:
    data = read_file(folder / _RECORD)
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
