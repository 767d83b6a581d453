"""The MCP clients: where each keeps its configuration, how an entry looks there, and how it starts Coatcheck."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from coatcheck.errors import InvalidArgument

HEADERS: Final = "COATCHECK_PROXY_HEADERS"
"""Environment variable with headers for the proxy's `--url`, one per line: no secret is on a command line."""

Format = Literal["json", "toml"]
Scope = Literal["user", "project", "local"]
SCOPES: Final[tuple[Scope, ...]] = ("user", "project", "local")
_HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")
_SIGN_IN: Final = ("oauth", "auth", "headersHelper", "authProviderType", "bearer_token_env_var", "env_http_headers")
_REPLACED: Final = ("command", "args", "type", "url", "httpUrl", "headers")  # when an entry is put behind the proxy
_UV_CACHE: Final = re.compile(r"/(?:archive|environments|builds)-v\d+/")
_TEMPORARY: Final = re.compile(r"/pipx/\.cache/|/\.cache/pipx/|/_npx/")
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The properties of a client.

    `http` maps the key of a URL in an entry to the transport that it implies if there is no `type`; None if the client
    tries both. `has_local` clients also keep entries for one user in one project."""

    title: str
    user: str
    project: str | None = None
    home_variable: str | None = None
    section: tuple[str, ...] = ("mcpServers",)
    format: Format = "json"
    entry: Mapping[str, Any] = field(default_factory=dict)
    http: Mapping[str, str | None] = field(default_factory=lambda: {"url": "http"})
    has_local: bool = False


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """One configuration file, and the path to the servers in it."""

    client: Client
    scope: Scope
    file: Path
    section: tuple[str, ...]


# `{config}` is the platform's configuration folder, `{home}` the home folder or the value of `home_variable`.
CLIENTS: Final[Mapping[str, Client]] = {
    "claude-code": Client(
        title="Claude Code",
        user="{home}/.claude.json",
        project=".mcp.json",
        home_variable="CLAUDE_CONFIG_DIR",
        entry={"type": "stdio"},
        has_local=True,
    ),
    "claude-desktop": Client(title="Claude Desktop", user="{config}/Claude/claude_desktop_config.json"),
    "cursor": Client(title="Cursor", user="{home}/.cursor/mcp.json", project=".cursor/mcp.json", http={"url": None}),
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
}
_DEFAULT_HOMES: Final = {"CODEX_HOME": ".codex"}  # the other variables replace the home folder


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
    """Locate the configuration of a client. Raises `InvalidArgument` if it has none for that scope."""
    client = CLIENTS[name]
    section = client.section
    if scope == "local":
        if not client.has_local:
            raise InvalidArgument(f"{client.title} has no scope 'local'", hint="use user or project")
        section = ("projects", str(project), *section)
    if scope == "project" and client.project is None:
        raise InvalidArgument(f"{client.title} has no configuration for a project", hint="omit --scope")
    if file is not None:
        return ConfigFile(client, scope, file.absolute(), section)
    if scope == "project":
        return ConfigFile(client, scope, project / str(client.project), section)
    variable = client.home_variable
    named = environ.get(variable) if variable else None
    base = Path(named) if named else home / _DEFAULT_HOMES.get(variable or "", "")
    text = client.user.format(home=base, config=_config_folder(home, platform, environ))
    return ConfigFile(client, scope, Path(text), section)


def _config_folder(home: Path, platform: str, environ: Mapping[str, str]) -> Path:
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
    named = environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if named.startswith("/") else home / ".config"


def launcher(argv0: str, executable: str, prefix: str, version: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts this Coatcheck from anywhere.

    A desktop client has another PATH than a shell, so the path is absolute: that of the running command, without
    following links (upgrades keep them), or this Python with `-m`. An environment made by `uvx` is temporary, so `uvx`
    is used again, with this version."""
    where = PurePath(prefix).as_posix() + "/"
    if _UV_CACHE.search(where):
        uv = environ.get("UV") or shutil.which("uv")
        uvx = shutil.which("uvx")
        asked = ["--from", f"coatcheck[mcp]=={version}", "coatcheck"]
        if uvx:
            return [os.path.abspath(uvx), *asked]
        if uv:
            return [os.path.abspath(uv), "tool", "run", *asked]
    if _UV_CACHE.search(where) or _TEMPORARY.search(where):
        raise InvalidArgument("this Coatcheck runs from a temporary cache", hint="install it, then try again")
    program = Path(argv0)
    if program.name.removesuffix(".exe") == "coatcheck":
        found = str(program) if program.is_file() else shutil.which("coatcheck")
        if found:
            return [os.path.abspath(found)]
    return [os.path.abspath(executable), "-m", "coatcheck"]


def after_launcher(entry: object) -> list[str] | None:
    """Return the arguments that an entry passes to Coatcheck, or None if it starts something else."""
    words = command_line(entry)
    if not words:
        return None
    program = PurePath(words[0].replace("\\", "/")).name.removesuffix(".exe")
    if program == "coatcheck":
        rest = words[1:]
    elif program.startswith("python") and words[1:3] == ["-m", "coatcheck"]:
        rest = words[3:]
    elif program in ("uv", "uvx") and "coatcheck" in words[1:]:
        rest = words[words.index("coatcheck") + 1 :]
    else:
        return None
    return rest if rest[:1] in (["mcp"], ["proxy"]) else None


def shared_options(entry: object) -> list[str] | None:
    """Return the `--session` and `--store` options of a `coatcheck mcp` entry, or None if it names no session."""
    words = after_launcher(entry) or []
    pairs = [pair for pair in pairwise(words) if pair[0] in ("--session", "--store")]
    if words[:1] != ["mcp"] or "--session" not in dict(pairs):
        return None
    return [word for pair in pairs for word in pair]


def command_line(entry: object) -> list[str] | None:
    """Return the command of an entry and its arguments, or None if it has no valid command."""
    if not isinstance(entry, dict) or not isinstance(entry.get("command"), str) or not entry["command"]:
        return None
    arguments = entry.get("args", [])
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
        return None
    return [entry["command"], *arguments]


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Run the same command through `command` and `words`."""

    command: str
    words: list[str]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Replace the entry: a URL becomes a command."""

    entry: dict[str, Any]


def wrap(
    client: Client, entry: object, start: Sequence[str], options: Sequence[str], *, named: bool
) -> Prefixed | Rewritten | str:
    """Put the entry of a server behind the proxy, or return the reason not to. `named` means the user named it."""
    if after_launcher(entry) is not None:
        return "it already runs through the proxy, or is Coatcheck itself"
    if not isinstance(entry, dict):
        return "its entry is not an object"
    if "command" in entry:
        words = command_line(entry)
        if words is None:
            return "its command or args are invalid"
        if entry.get("type", "stdio") != "stdio":
            return f"its type is {entry['type']!r}"
        if re.search(r"\s", words[0]) and not Path(words[0]).is_file():
            return "its command is a shell command line: split it into command and args first"
        if words[0].startswith("~"):
            return "its command begins with ~, which only the client expands: write the full path first"
        return Prefixed(start[0], [*start[1:], "proxy", "--no-tools", *options, "--", words[0]])
    return _wrap_url(client, entry, start, options, named=named)


def _wrap_url(
    client: Client, entry: dict[str, Any], start: Sequence[str], options: Sequence[str], *, named: bool
) -> Rewritten | str:
    key = next((one for one in client.http if isinstance(entry.get(one), str)), None)
    if key is None:
        return "it has neither a command nor a URL"
    if client.format == "toml":
        return f"URLs in {client.title} cannot be wrapped: add 'coatcheck proxy --url' by hand"
    url = entry[key]
    transport = entry.get("type", client.http[key])
    if transport is None:
        transport = "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http"
    if transport not in _HTTP:
        return f"its transport is {transport!r}; the proxy supports only streamable HTTP"
    if sign_in := next((one for one in _SIGN_IN if one in entry), None):
        return f"it uses a sign-in ({sign_in}), which the proxy does not support"
    headers = entry.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(one, str) and "\n" not in one for one in headers.values()):
        return "its headers are not strings"
    if not headers and not named and urlsplit(url).hostname not in _LOOPBACK:
        return "it may require a sign-in, which the proxy does not support; if it does not, name it"
    kept = {one: value for one, value in entry.items() if one not in (key, "type", "headers", "command", "args")}
    env = dict(entry.get("env") or {})
    if headers:
        env[HEADERS] = "\n".join(f"{name}: {value}" for name, value in headers.items())
    arguments = [*start[1:], "proxy", "--no-tools", "--url", url, *options]
    new = {**client.entry, "command": start[0], "args": arguments, **kept, **({"env": env} if env else {})}
    return Rewritten(new)


def unwrap(entry: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the URL of a rewritten entry, and keep all other changes made to it since."""
    env = {name: value for name, value in (entry.get("env") or {}).items() if name != HEADERS}
    now = {key: value for key, value in entry.items() if key not in _REPLACED} | {"env": env}
    if not env and "env" not in before:
        del now["env"]
    kept = {key: value for key, value in before.items() if key in _REPLACED or key in now}
    return {**kept, **now}
