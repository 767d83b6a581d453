"""The MCP clients: where each keeps its configuration, how an entry looks there, and how it starts
Coatcheck."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from coatcheck.errors import InvalidArgument

HEADERS: Final = "COATCHECK_PROXY_HEADERS"
"""Environment variable with headers for the proxy's `--url`, one per line: no secret is on a
command line."""

HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")
"""The names of the only transport over HTTP that the proxy supports."""

Scope = Literal["user", "project", "local"]
SCOPES: Final[tuple[Scope, ...]] = ("user", "project", "local")
_SIGN_IN: Final = (
    "oauth",
    "auth",
    "headersHelper",
    "authProviderType",
    "bearer_token_env_var",
    "env_http_headers",
)
_REPLACED: Final = (
    "command",
    "args",
    "type",
    "url",
    "httpUrl",
    "headers",
)  # when a URL is put behind the proxy
_UV_CACHE: Final = re.compile(r"/(?:archive|environments|builds)-v\d+/")
_TEMPORARY: Final = re.compile(r"/pipx/\.cache/|/\.cache/pipx/|/_npx/")
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The properties of a client.

    `http` maps the key of a URL in an entry to the transport that it implies if there is no `type`;
    None if the client tries both. `others` are further places of the user's file or, if relative,
    of the project's: the first file that exists is used. `has_local` clients also keep entries for
    one user in one project. `is_list` clients have the command and its arguments in one list, and
    call the environment `environment`."""

    title: str
    user: str
    project: str | None = None
    others: tuple[str, ...] = ()
    home_variable: str | None = None
    section: tuple[str, ...] = ("mcpServers",)
    format: Literal["json", "toml"] = "json"
    entry: Mapping[str, Any] = field(default_factory=dict)
    http: Mapping[str, str | None] = field(default_factory=lambda: {"url": "http"})
    has_local: bool = False
    is_list: bool = False

    def shaped(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Convert an entry with `command`, `args` and `env` to this client's form."""
        if not self.is_list:
            return {**self.entry, **entry}
        rest = {key: value for key, value in entry.items() if key not in ("command", "args", "env")}
        environment = {"environment": entry["env"]} if entry.get("env") else {}
        return {
            **self.entry,
            "command": [entry["command"], *entry.get("args", ())],
            **environment,
            **rest,
        }


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """One configuration file, and the path to the servers in it."""

    client: Client
    scope: Scope
    file: Path
    section: tuple[str, ...]


# `{config}` is the platform's configuration folder, `{xdg}` the one of programs that use ~/.config
# on macOS too, `{home}` the home folder or the value of `home_variable`.
CLIENTS: Final[Mapping[str, Client]] = {
    "claude-code": Client(
        title="Claude Code",
        user="{home}/.claude.json",
        project=".mcp.json",
        home_variable="CLAUDE_CONFIG_DIR",
        entry={"type": "stdio"},
        has_local=True,
    ),
    "claude-desktop": Client(
        title="Claude Desktop", user="{config}/Claude/claude_desktop_config.json"
    ),
    "cursor": Client(
        title="Cursor",
        user="{home}/.cursor/mcp.json",
        project=".cursor/mcp.json",
        http={"url": None},
    ),
    "vscode": Client(
        title="VS Code",
        user="{config}/Code/User/mcp.json",
        project=".vscode/mcp.json",
        section=("servers",),
        entry={"type": "stdio"},
        http={"url": None},
    ),
    "codex": Client(
        title="Codex",
        user="{home}/config.toml",
        project=".codex/config.toml",
        home_variable="CODEX_HOME",
        section=("mcp_servers",),
        format="toml",
    ),
    "gemini": Client(
        title="Gemini CLI",
        user="{home}/.gemini/settings.json",
        project=".gemini/settings.json",
        home_variable="GEMINI_CLI_HOME",
        http={"httpUrl": "http", "url": "sse"},
    ),
    "windsurf": Client(
        title="Windsurf",
        user="{home}/.codeium/windsurf/mcp_config.json",
        http={"serverUrl": None, "url": None},
    ),
    "zed": Client(
        title="Zed",
        user="{xdg}/zed/settings.json",
        project=".zed/settings.json",
        section=("context_servers",),
    ),
    "opencode": Client(
        title="opencode",
        user="{xdg}/opencode/opencode.json",
        project="opencode.json",
        section=("mcp",),
        entry={"type": "local", "enabled": True},
        is_list=True,
        others=(
            "{xdg}/opencode/opencode.jsonc",
            "opencode.jsonc",
            ".opencode/opencode.json",
            ".opencode/opencode.jsonc",
        ),
    ),
    "cline": Client(
        title="Cline",
        http={"url": "sse"},
        user="{config}/Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
        others=("{home}/.cline/data/settings/cline_mcp_settings.json",),
    ),
}
_DEFAULT_HOMES: Final = {"CODEX_HOME": ".codex"}  # the other variables replace the home folder


FILES: Final = ".coatcheck"
"""The folder of results as files, in the working folder."""
READING_FILES: Final = frozenset({"claude-code", "codex", "gemini", "opencode"})
"""Clients whose agent reads files, and that start servers in the working folder."""


def find_config(
    name: str,
    scope: Scope,
    *,
    home: Path,
    project: Path,
    platform: str,
    environ: Mapping[str, str],
    file: Path | None = None,
) -> ConfigFile:
    """Locate the configuration of a client. Raises `InvalidArgument` if it has none for that
    scope."""
    client = CLIENTS[name]
    section = client.section if scope != "local" else ("projects", str(project), *client.section)
    if scope == "local" and not client.has_local:
        raise InvalidArgument(f"{client.title} has no scope 'local'", hint="use user or project")
    if scope == "project" and client.project is None:
        raise InvalidArgument(
            f"{client.title} has no configuration for a project", hint="omit --scope"
        )
    if file is None:
        file = _existing_file(
            client,
            is_project=scope == "project",
            home=home,
            project=project,
            platform=platform,
            environ=environ,
        )
    return ConfigFile(client, scope, file.absolute(), section)


def _existing_file(
    client: Client,
    *,
    is_project: bool,
    home: Path,
    project: Path,
    platform: str,
    environ: Mapping[str, str],
) -> Path:
    """Return the first of a client's files that exists, or the usual one if none does."""
    variable = client.home_variable or ""
    folders = {
        "home": Path(environ.get(variable) or home / _DEFAULT_HOMES.get(variable, "")),
        "config": _config_folder(home, platform, environ),
        "xdg": _config_folder(home, "linux" if platform == "darwin" else platform, environ),
    }
    usual = str(client.project) if is_project else client.user
    others = [one for one in client.others if is_project != one.startswith("{")]
    places = [project / one.format(**folders) for one in (usual, *others)]
    return next((one for one in places if one.exists()), places[0])


def find_here(name: str, scope: Scope, file: Path | None = None) -> ConfigFile:
    """Locate the configuration of a client of this user, for the working folder."""
    home, project = Path.home(), Path.cwd()
    return find_config(
        name,
        scope,
        home=home,
        project=project,
        platform=sys.platform,
        environ=os.environ,
        file=file,
    )


def _config_folder(home: Path, platform: str, environ: Mapping[str, str]) -> Path:
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
    named = environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if named.startswith("/") else home / ".config"


def launcher(
    argv0: str, executable: str, prefix: str, version: str, environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts this Coatcheck from anywhere.

    A desktop client has another PATH than a shell, so the path is absolute: the running command's,
    without following links (upgrades keep them), or this Python with `-m`. An environment made by
    `uvx` is temporary, so `uvx` is used again, with this version."""
    where = PurePath(prefix).as_posix() + "/"
    if _UV_CACHE.search(where):
        for program, words in (
            (shutil.which("uvx"), []),
            (environ.get("UV") or shutil.which("uv"), ["tool", "run"]),
        ):
            if program:
                return [
                    os.path.abspath(program),
                    *words,
                    "--from",
                    f"coatcheck[mcp]=={version}",
                    "coatcheck",
                ]
    if _UV_CACHE.search(where) or _TEMPORARY.search(where):
        raise InvalidArgument(
            "this Coatcheck runs from a temporary cache", hint="install it, then try again"
        )
    if PurePath(argv0).name.removesuffix(".exe") == "coatcheck":
        found = argv0 if Path(argv0).is_file() else shutil.which("coatcheck")
        if found:
            return [os.path.abspath(found)]
    return [os.path.abspath(executable), "-m", "coatcheck"]


def after_launcher(entry: object) -> list[str] | None:
    """Return the arguments that an entry passes to Coatcheck, or None if it starts something
    else."""
    program, *words = _command_line(entry) or [""]
    name = PurePath(program.replace("\\", "/")).name.removesuffix(".exe")
    if name.startswith("python") and words[:2] == ["-m", "coatcheck"]:
        words = words[2:]
    elif name in ("uv", "uvx") and "coatcheck" in words:
        words = words[words.index("coatcheck") + 1 :]
    elif name != "coatcheck":
        return None
    return words if words[:1] in (["mcp"], ["proxy"]) else None


def shared_options(entry: object) -> list[str] | None:
    """Return the `--session` and `--store` options of a `coatcheck mcp` entry, or None if it names
    no session."""
    words = after_launcher(entry) or []
    pairs = [pair for pair in pairwise(words) if pair[0] in ("--session", "--store")]
    if words[:1] != ["mcp"] or "--session" not in dict(pairs):
        return None
    return [word for pair in pairs for word in pair]


def _command_line(entry: object) -> list[str] | None:
    """Return the command of an entry and its arguments, or None if it has no valid command."""
    if not isinstance(entry, dict) or not entry.get("command"):
        return None
    if isinstance(entry["command"], list):
        return entry["command"] if all(isinstance(one, str) for one in entry["command"]) else None
    arguments = entry.get("args", [])
    if not isinstance(entry["command"], str):
        return None
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
        return None
    return [entry["command"], *arguments]


def wrap(
    client: Client,
    entry: object,
    start: Sequence[str],
    options: Sequence[str],
    *,
    named: bool,
    files: bool = False,
) -> dict[str, Any]:
    """Return the entry of a server behind the proxy. `named` means that the user named it. With
    `files`, its results are files in the working folder. Raises `InvalidArgument` with the reason
    if it cannot be put there."""
    if after_launcher(entry) is not None:
        raise _unchanged("it already runs through the proxy, or is Coatcheck itself")
    if not isinstance(entry, dict):
        raise _unchanged("its entry is not an object")
    before = [*start[1:], "proxy", *(("--files", FILES) if files else ("--no-tools",))]
    if "command" not in entry:
        url, env, kept = _url_of(client, entry, named=named)
        wrapped = {"command": start[0], "args": [*before, "--url", url, *options], **kept}
        return client.shaped({**wrapped, **({"env": env} if env else {})})
    words = _command_line(entry)
    if words is None or isinstance(entry["command"], list) != client.is_list:
        raise _unchanged("its command or args are invalid")
    usual = client.entry.get("type", "stdio")
    if entry.get("type", usual) != usual:
        raise _unchanged(f"its type is {entry['type']!r}")
    if re.search(r"\s", words[0]) and not Path(words[0]).is_file():
        raise _unchanged(
            "its command is a shell command line: split it into command and args first"
        )
    if words[0].startswith("~"):
        raise _unchanged(
            "its command begins with ~, which only the client expands: write the full path first"
        )
    if client.is_list:
        return {**entry, "command": [start[0], *before, *options, "--", *words]}
    return {**entry, "command": start[0], "args": [*before, *options, "--", *words]}


def _url_of(
    client: Client, entry: dict[str, Any], *, named: bool
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the URL of an entry, the environment that passes its headers on, and everything else
    in it."""
    key = next((one for one in client.http if isinstance(entry.get(one), str)), None)
    if key is None:
        raise _unchanged("it has neither a command nor a URL")
    if client.format == "toml":
        raise _unchanged(
            f"URLs in {client.title} cannot be wrapped: add 'coatcheck proxy --url' by hand"
        )
    url = entry[key]
    transport = _transport_of(client, entry, key)
    if transport not in HTTP:
        raise _unchanged(f"its transport is {transport!r}; the proxy supports only streamable HTTP")
    for sign_in in _SIGN_IN:
        if sign_in in entry:
            raise _unchanged(f"it uses a sign-in ({sign_in}), which the proxy does not support")
    headers = entry.get("headers", {})
    if not _are_headers(headers):
        raise _unchanged("its headers are not strings")
    if not headers and not named and urlsplit(url).hostname not in _LOOPBACK:
        raise _unchanged(
            "it may require a sign-in, which the proxy does not support; if it does not, name it"
        )
    env = dict(entry.get("environment" if client.is_list else "env") or {})
    env |= _headers_variable(headers)
    passed_on = (key, "type", "headers", "args", "environment")
    rest = {one: value for one, value in entry.items() if one not in passed_on}
    return url, env, rest


def _transport_of(client: Client, entry: dict[str, Any], key: str) -> Any:
    """Return the transport of an entry whose URL is under `key`. A client that tries both uses SSE
    if the URL ends with /sse."""
    implied = client.http[key]
    transport = implied if client.is_list else entry.get("type", implied)
    if transport is not None:
        return transport
    return "sse" if urlsplit(entry[key]).path.rstrip("/").endswith("/sse") else "http"


def _are_headers(headers: object) -> bool:
    if not isinstance(headers, dict):
        return False
    return all(isinstance(value, str) and "\n" not in value for value in headers.values())


def _headers_variable(headers: dict[str, str]) -> dict[str, str]:
    """Return the environment variable that passes headers on, if there are any."""
    if not headers:
        return {}
    return {HEADERS: "\n".join(f"{name}: {value}" for name, value in headers.items())}


def _unchanged(reason: str) -> InvalidArgument:
    return InvalidArgument(reason, hint="")


def unwrap(entry: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a wrapped server without the proxy, with all other changes made to it
    since. `before` is the record of the entry as it was."""
    if "entry" in before:
        return _unwrapped_url(entry, before["entry"])
    return _unwrapped_command(entry, before)


def _unwrapped_command(entry: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    words = after_launcher(entry) or []
    if "--" not in words:
        return dict(entry)
    command, *arguments = words[words.index("--") + 1 :] or [before["command"]]
    if isinstance(entry["command"], list):
        return {**entry, "command": [command, *arguments]}
    restored = {**entry, "command": command, "args": arguments}
    if not arguments and before["args"] is None:
        del restored["args"]
    return restored


def _unwrapped_url(entry: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    env_key = "environment" if isinstance(entry["command"], list) else "env"
    env = {name: value for name, value in (entry.get(env_key) or {}).items() if name != HEADERS}
    now = {key: value for key, value in entry.items() if key not in _REPLACED}
    now[env_key] = env
    if not env and env_key not in old:
        del now[env_key]
    kept = {key: value for key, value in old.items() if key in _REPLACED or key in now}
    return {**kept, **now}
