"""Commands for the gateway: gateway serves it, run starts a command behind one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck import errors
from coatcheck.cli import (
    FOLDER,
    check_main_store,
    expand_folder,
    json_option,
    store_option,
    usage_error,
)
from coatcheck.cli.terminal import print_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from coatcheck import Policy, Store
    from coatcheck.http.credentials import Keyring

_MODES: Final = ("observe", "stub", "loop")
_MODE: Final = (
    "observe changes nothing and records; stub shortens results for clients that have our tools "
    "through MCP; loop adds our tools and answers them itself."
)
_TOKENS: Final = (
    "File with the digests of tokens, as for `coatcheck serve`: each names the tenant and the "
    "sessions of its client."
)
_SESSION: Final = (
    "Session of all requests that name none; {folder} is replaced by the working folder. "
    "Default: one for each conversation, by what the client sends."
)
_FILES: Final = (
    "With --mode stub: folder in which results are files too, for a client on this machine that "
    "reads files. It needs no tools of ours then."
)
_MAX_TOKENS: Final = (
    "Larger results become stubs. Default: [policy], else where a stub is expected to pay."
)


def _absolute(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return a folder as an absolute path: the client may work in another one."""
    return None if value is None else os.path.abspath(value)


def _shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--mode", type=click.Choice(_MODES), default="observe", show_default=True, help=_MODE
        ),
        click.option("--anthropic", metavar="URL", help="Address of Anthropic's API, without /v1."),
        click.option(
            "--openai",
            metavar="URL",
            help="Address of OpenAI's API, or one like it, without /v1.",
        ),
        click.option("--max-tokens", metavar="N", type=click.IntRange(min=1), help=_MAX_TOKENS),
        click.option("--files", metavar="FOLDER", callback=_absolute, help=_FILES),
        click.option(
            "--session",
            "session_id",
            envvar="COATCHECK_SESSION",
            show_envvar=True,
            metavar="ID",
            callback=expand_folder,
            help=_SESSION,
        ),
        click.option(
            "--proxy",
            metavar="URL",
            help="HTTP proxy to the providers. None is taken from the environment.",
        ),
        store_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_shared_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8975,
    show_default=True,
    help="0 for any free port.",
)
@click.option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="Further host name of this server. Repeatable.",
)
@click.option(
    "--allow-origin",
    metavar="ORIGIN",
    multiple=True,
    help="Origin of an allowed web page. Repeatable.",
)
@click.option(
    "--no-token", is_flag=True, help="Accept requests without a token. On the loopback only."
)
@click.option("--tokens", type=click.Path(path_type=Path), metavar="FILE", help=_TOKENS)
def gateway(
    mode: Any,
    max_tokens: int | None,
    files: str | None,
    session_id: str | None,
    url: str | None,
    as_json: bool,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    no_token: bool,
    tokens: Path | None,
    **upstream: str | None,
) -> None:
    """Serve a gateway between agents and model providers.

    Prints the address for clients, with the token from COATCHECK_GATEWAY_TOKEN or a new one. With
    --tokens, each client has a token of its own. A conversation that went through stub or loop mode
    cannot continue without the gateway."""
    _check_files(files, mode)
    launch = _launch()
    from coatcheck.collect import collecting_daily
    from coatcheck.gateway import Gateway, GatewaySettings
    from coatcheck.http.serving import LocalServer, new_token
    from coatcheck.lanes import ending

    if no_token and not LocalServer.is_local(host):
        raise usage_error("--no-token is only possible on the loopback")
    if tokens is not None and no_token:
        raise usage_error("--no-token and --tokens cannot be used together")
    given = None if no_token else _given_token()
    keyring = None if tokens is None else _keyring(tokens, given)
    token = None if no_token or keyring is not None else given or new_token()
    settings = GatewaySettings(mode=mode, session=session_id, token=token, **_upstream(**upstream))
    server = launch.local_server(host=host, port=port, hosts=allow_host, origins=allow_origin)

    def tenants() -> set[str]:
        return keyring.tenants if keyring is not None else set()

    with server, ending(), coatcheck.open(url) as store, collecting_daily(store, tenants=tenants):
        if tenants():
            check_main_store(store)
        app = Gateway(
            store, replace(settings, policy=_policy(store, max_tokens, files)), keyring=keyring
        )
        if token is not None and not given:
            address = launch.address_of(server, token)
            _print_address(address, mode, as_json, note=", shown only once")
        else:
            _print_address(launch.address_of(server, None if no_token else "…"), mode, as_json)
        try:
            server.run(app, grace=launch.GRACE)
        finally:
            _print_figures(app, as_json)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", metavar="-- COMMAND [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@_shared_options
def run(
    command: tuple[str, ...],
    mode: Any,
    max_tokens: int | None,
    files: str | None,
    session_id: str | None,
    url: str | None,
    as_json: bool,
    **upstream: str | None,
) -> int:
    """Run a command behind a gateway of its own.

    Sets the variables that point Claude Code, opencode and the providers' SDKs at it, and the
    option that points Codex. Exits with the command's exit code. At the end, a line on stderr says
    what was saved."""
    if not command:
        raise usage_error("a command is missing after --")
    _check_files(files, mode)
    launch = _launch()
    from coatcheck.collect import collecting_daily
    from coatcheck.gateway import Gateway, GatewaySettings
    from coatcheck.http.serving import new_token

    if session_id is None and mode == "stub":  # the client's own MCP server must use the same one
        session_id = expand_folder(
            click.get_current_context(), click.Option(["--session"]), f"run-{FOLDER}"
        )
    token = new_token()
    addresses = {**launch.upstreams(os.environ), **_upstream(**upstream)}
    settings = GatewaySettings(mode=mode, session=session_id, token=token, **addresses)
    with launch.local_server() as server, coatcheck.open(url) as store, collecting_daily(store):
        address = launch.address_of(server, token)
        trusts_user = launch.is_codex(command) and launch.knows_users(server)
        if launch.is_codex(command) and not trusts_user:
            print_error(
                "other users of this machine can read the token of the gateway "
                "in the arguments of Codex"
            )
        app = Gateway(
            store,
            replace(settings, policy=_policy(store, max_tokens, files), trusts_user=trusts_user),
        )
        environ = {**os.environ, **launch.variables(address, os.environ)}
        if session_id is not None:
            environ["COATCHECK_SESSION"] = session_id
        if url is not None:
            environ["COATCHECK_STORE"] = os.path.abspath(url)
        with launch.beside(app, server):
            pointed = launch.pointed(command, server.url if trusts_user else address)
            code: int = launch.run_command(pointed, environ)
        _print_figures(app, as_json)
    return code


def _given_token() -> str | None:
    from coatcheck.gateway.settings import TOKEN

    token = os.environ.get(TOKEN)
    return _launch().check_token(token) if token else None


def _keyring(tokens: Path, given: str | None) -> Keyring:
    """Return the tokens in a file, and the one from the environment, which may do everything."""
    from coatcheck.http.credentials import Access, Keyring

    return Keyring(tokens, {given: Access("start", "admin")} if given else {})


def _print_address(address: str, mode: str, as_json: bool, *, note: str = "") -> None:
    if as_json:
        click.echo(json.dumps({"address": address, "mode": mode}))
        return
    print_error(f"gateway in {mode} mode at {address}{note}")
    print_error(f"  ANTHROPIC_BASE_URL={address}")
    print_error(f"  OPENAI_BASE_URL={address}/v1")


def _launch() -> Any:
    with errors.needs_extra("http"):
        from coatcheck.gateway import launch
    return launch


def _upstream(proxy: str | None, **addresses: str | None) -> dict[str, Any]:
    """Return the settings for the providers that were given: the proxy, and addresses without
    /v1."""
    given = {
        name: address.rstrip("/").removesuffix("/v1")
        for name, address in addresses.items()
        if address
    }
    return {"proxy": proxy, **given}


def _check_files(files: str | None, mode: str) -> None:
    if files is not None and mode != "stub":
        raise usage_error("--files needs --mode stub")


def _policy(store: Store, max_tokens: int | None, files: str | None) -> Policy | None:
    """Return the policy for results, None for the one in the settings."""
    from coatcheck.externalize import configured

    if max_tokens is None and files is None:
        return None
    policy = configured(store.settings)
    if max_tokens is not None:
        policy = policy.limited(max_tokens=max_tokens)
    return policy if files is None else replace(policy, files=files)


def _print_figures(app: Any, as_json: bool) -> None:
    """Print on stderr what passed through, if anything did: stdout belongs to the command."""
    figures = app.watcher.figures
    if as_json:
        click.echo(json.dumps(asdict(figures)), err=True)
    elif figures.calls or figures.errors:
        print_error(str(figures))
