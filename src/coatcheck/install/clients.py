"""The clients: where each keeps its configuration, in which format, and how an entry looks there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from coatcheck.errors import InvalidArgument

Format = Literal["json", "toml"]
Scope = Literal["user", "project", "local"]
SCOPES: Final[tuple[Scope, ...]] = ("user", "project", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What is particular about a client.

    `http` maps the key of an address in an entry to the transport that it means where no `type` says so; None where
    the client finds out by trying. `local` is where it keeps what is for one user in one project."""

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
class Place:
    """One configuration file, and the path to the servers in it."""

    client: Client
    scope: Scope
    file: Path
    section: tuple[str, ...]


# `{config}` is the platform's folder for configurations, `{home}` the home folder or what the variable names.
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
_DEFAULT_HOMES: Final = {"CODEX_HOME": ".codex"}  # the others name what stands for the home folder


def place_of(
    name: str,
    scope: Scope,
    *,
    home: Path,
    project: Path,
    platform: str,
    environ: Mapping[str, str],
    file: Path | None = None,
) -> Place:
    """The configuration of a client. Raises `InvalidArgument` where it has none for that scope."""
    client = CLIENTS[name]
    section = client.section
    if scope == "local":
        if not client.has_local:
            raise InvalidArgument(f"{client.title} has no scope 'local'", hint="user or project")
        section = ("projects", str(project), *section)
    if scope == "project" and client.project is None:
        raise InvalidArgument(f"{client.title} has no configuration for a project", hint="leave --scope out")
    if file is not None:
        return Place(client, scope, file.absolute(), section)
    if scope == "project":
        return Place(client, scope, project / str(client.project), section)
    variable = client.home_variable
    named = environ.get(variable) if variable else None
    base = Path(named) if named else home / _DEFAULT_HOMES.get(variable or "", "")
    text = client.user.format(home=base, config=_config_folder(home, platform, environ))
    return Place(client, scope, Path(text), section)


def _config_folder(home: Path, platform: str, environ: Mapping[str, str]) -> Path:
    if platform == "darwin":
        return home / "Library" / "Application Support"
    if platform == "win32":
        return Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
    named = environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if named.startswith("/") else home / ".config"
