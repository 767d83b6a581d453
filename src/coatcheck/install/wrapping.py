"""How a client's configuration starts Coatcheck, and how another server's entry becomes one behind the proxy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import urlsplit

from coatcheck.errors import InvalidArgument
from coatcheck.install.clients import Client

HEADERS: Final = "COATCHECK_PROXY_HEADERS"
"""The variable in which the proxy finds headers for its `--url`, one on a line: no secret stands on a command line."""

_HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")
_SIGNS_IN: Final = ("oauth", "auth", "headersHelper", "authProviderType", "bearer_token_env_var", "env_http_headers")
_PICKS: Final = ("includeTools", "enabled_tools")  # the client shows no other tools
_READER: Final = "get_artifact"
_REPLACED: Final = ("command", "args", "type", "url", "httpUrl", "headers")  # by the proxy, and back again
_UV_CACHE: Final = re.compile(r"/(?:archive|environments|builds)-v\d+/")
_PASSING: Final = re.compile(r"/pipx/\.cache/|/\.cache/pipx/|/_npx/")
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def launcher(argv0: str, executable: str, prefix: str, version: str, environ: Mapping[str, str]) -> list[str]:
    """The words that start this Coatcheck from anywhere.

    A client with windows has another PATH than a shell, so they are absolute: the command that runs now, links not
    followed (they stay when an upgrade moves what is behind them), or this Python with `-m`. An environment that `uvx`
    made may be gone tomorrow: then it is `uvx` again, with this version."""
    where = PurePath(prefix).as_posix() + "/"
    if _UV_CACHE.search(where):
        uv = environ.get("UV") or shutil.which("uv")
        uvx = shutil.which("uvx")
        asked = ["--from", f"coatcheck[mcp]=={version}", "coatcheck"]
        if uvx:
            return [os.path.abspath(uvx), *asked]
        if uv:
            return [os.path.abspath(uv), "tool", "run", *asked]
    if _UV_CACHE.search(where) or _PASSING.search(where):
        raise InvalidArgument("this Coatcheck runs from a cache that may be cleared", hint="install it, then try again")
    program = Path(argv0)
    if program.name.removesuffix(".exe") == "coatcheck":
        found = str(program) if program.is_file() else shutil.which("coatcheck")
        if found:
            return [os.path.abspath(found)]
    return [os.path.abspath(executable), "-m", "coatcheck"]


def after_launcher(entry: object) -> list[str] | None:
    """The words that an entry gives to Coatcheck, or None where it starts something else."""
    words = words_of(entry)
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


def words_of(entry: object) -> list[str] | None:
    """The command of an entry with its arguments, or None where it has none that can be understood."""
    if not isinstance(entry, dict) or not isinstance(entry.get("command"), str) or not entry["command"]:
        return None
    arguments = entry.get("args", [])
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
        return None
    return [entry["command"], *arguments]


@dataclass(frozen=True, slots=True)
class Prefixed:
    """The command stays, behind these words."""

    command: str
    words: list[str]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An address becomes a command: another entry."""

    entry: dict[str, Any]


def wrapped(
    client: Client, entry: object, start: Sequence[str], options: Sequence[str], *, named: bool
) -> Prefixed | Rewritten | str:
    """A server's entry behind the proxy, or why it is left alone. `named` is a server that somebody asked for."""
    if after_launcher(entry) is not None:
        return "it is behind the proxy already, or is Coatcheck itself"
    if not isinstance(entry, dict):
        return "its entry is no object"
    for key in _PICKS:
        if isinstance(entry.get(key), list) and _READER not in entry[key]:
            return f"it picks its tools ({key}), and a stub is of no use without {_READER}: add that there first"
    if "command" in entry:
        words = words_of(entry)
        if words is None:
            return "its command or args cannot be understood"
        if entry.get("type", "stdio") != "stdio":
            return f"its type is {entry['type']!r}"
        if re.search(r"\s", words[0]) and not Path(words[0]).is_file():
            return "its command is a line for a shell: split it into command and args first"
        if words[0].startswith("~"):
            return "its command begins with ~, which only the client understands: write the path out first"
        return Prefixed(start[0], [*start[1:], "proxy", *options, "--", words[0]])
    return _address(client, entry, start, options, named=named)


def _address(
    client: Client, entry: dict[str, Any], start: Sequence[str], options: Sequence[str], *, named: bool
) -> Rewritten | str:
    key = next((one for one in client.http if isinstance(entry.get(one), str)), None)
    if key is None:
        return "it has neither a command nor an address"
    if client.format == "toml":
        return f"an address of {client.title} cannot be wrapped: put 'coatcheck proxy --url' there by hand"
    url = entry[key]
    transport = entry.get("type", client.http[key])
    if transport is None:
        transport = "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http"
    if transport not in _HTTP:
        return f"its transport is {transport!r}, and the proxy speaks streamable HTTP"
    if signs_in := next((one for one in _SIGNS_IN if one in entry), None):
        return f"it signs in ({signs_in}), which the proxy cannot do"
    headers = entry.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(one, str) and "\n" not in one for one in headers.values()):
        return "its headers are no strings"
    if not headers and not named and urlsplit(url).hostname not in _LOOPBACK:
        return "it may want a sign-in, which the proxy cannot do; if it does not, name it"
    kept = {one: value for one, value in entry.items() if one not in (key, "type", "headers", "command", "args")}
    env = dict(entry.get("env") or {})
    if headers:
        env[HEADERS] = "\n".join(f"{name}: {value}" for name, value in headers.items())
    arguments = [*start[1:], "proxy", "--url", url, *options]
    new = {**client.entry, "command": start[0], "args": arguments, **kept, **({"env": env} if env else {})}
    return Rewritten(new)


def unwrapped(entry: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """An entry that was rewritten, with its address again, and with all else that somebody has changed in it since."""
    env = {name: value for name, value in (entry.get("env") or {}).items() if name != HEADERS}
    now = {key: value for key, value in entry.items() if key not in _REPLACED} | {"env": env}
    if not env and "env" not in before:
        del now["env"]
    kept = {key: value for key, value in before.items() if key in _REPLACED or key in now}
    return {**kept, **now}
