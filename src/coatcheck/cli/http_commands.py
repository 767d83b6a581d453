"""Commands for HTTP: serve gives programs in any language the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import coatcheck
from coatcheck import errors
from coatcheck.cli import check_main_store, setting, store_option, usage_error
from coatcheck.cli.terminal import print_error, print_text

if TYPE_CHECKING:
    from coatcheck.http.credentials import Keyring, TokenScope

TOKEN: Final = "COATCHECK_HTTP_TOKEN"  # an environment variable
_TOKENS: Final = "File with the digests of tokens. Default: the settings (COATCHECK_SERVE_TOKENS)."
_GRACE: Final = "Time that requests in progress have to finish when a signal ends the server."
_NEW: Final = "Make a token, add its digest to the tokens file, print it, and end."


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8976,
    show_default=True,
    help="0 for any free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on.",
)
@click.option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="Host name that clients may use. Repeatable.",
)
@click.option(
    "--allow-origin",
    metavar="ORIGIN",
    multiple=True,
    help="Origin of an allowed web page. Repeatable.",
)
@click.option(
    "--grace",
    type=click.IntRange(min=0),
    metavar="SECONDS",
    default=15,
    show_default=True,
    help=_GRACE,
)
@click.option("--tokens", type=click.Path(path_type=Path), metavar="FILE", help=_TOKENS)
@click.option("--new-token", metavar="NAME", help=_NEW)
@click.option(
    "--scope",
    type=click.Choice(["read", "write", "admin", "metrics"]),
    help="With --new-token: its scope.",
)
@click.option("--tenant", metavar="NAME", help="With --new-token: the tenant whose store it opens.")
@click.option(
    "--sessions",
    metavar="PREFIX",
    help="With --new-token: only sessions whose ids begin like this.",
)
@store_option
def serve(
    port: int,
    host: str,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    grace: int,
    tokens: Path | None,
    new_token: str | None,
    scope: TokenScope | None,
    tenant: str | None,
    sessions: str | None,
    url: str | None,
) -> None:
    """Serve the store over HTTP.

    Clients need a token: one of the tokens file, the one in COATCHECK_HTTP_TOKEN, or without both a
    new one that is printed once. The paths are in docs/http.md and at /api/v1/openapi.json."""
    file = tokens or (Path(found) if (found := setting("serve.tokens")) else None)
    with errors.needs_extra("http"):
        from coatcheck.console.site import console_routes
        from coatcheck.http.application import EXPOSED, METHODS, store_app
        from coatcheck.http.credentials import Access, add_token
        from coatcheck.http.serving import LocalServer
    if new_token is not None:
        if file is None or scope is None:
            raise usage_error("--new-token needs --tokens and --scope")
        print_text(add_token(file, Access(new_token, scope, tenant, sessions or "")) + "\n")
        return
    if scope or tenant or sessions:
        raise usage_error("--scope, --tenant and --sessions need --new-token")
    from coatcheck.collect import collecting_daily
    from coatcheck.lanes import ending

    server = LocalServer(
        host=host,
        port=port,
        hosts=allow_host,
        origins=allow_origin,
        methods=METHODS,
        exposed=EXPOSED,
    )
    with server, ending(), coatcheck.open(url) as store:
        keyring, printed = _keyring(file)
        if keyring.tenants:
            check_main_store(store)
        print_error(f"store at {server.url}/api/v1")
        if printed is not None:
            print_error(f"token, shown only once: {printed}")
        if not server.is_local(host):
            print_error("tokens are readable on the way: put a proxy with TLS before this server")
        print_error(f"console at {server.url}/console")
        with collecting_daily(store, tenants=lambda: keyring.tenants):
            server.run(
                store_app(store, keyring, routes=console_routes(store, keyring)), grace=grace
            )


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8977,
    show_default=True,
    help="0 for any free port.",
)
@click.option("--read-only", is_flag=True, help="Pages only: nothing can be pinned or forgotten.")
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@store_option
def console(port: int, read_only: bool, opens: bool, url: str | None) -> None:
    """Look at the store in a browser.

    Shows sessions, conversations, artifacts and savings. Prints an address that logs in once. Only
    this machine can reach it; `coatcheck serve` has the same pages for others, who log in with
    their tokens."""
    with errors.needs_extra("http"):
        from coatcheck.console.site import ROOT, console_routes
        from coatcheck.http.application import METHODS, store_app
        from coatcheck.http.credentials import Access, Keyring
        from coatcheck.http.serving import LocalServer, new_token
    from coatcheck.lanes import ending

    token, key = new_token(), new_token()
    keyring = Keyring(given={token: Access("console", "read" if read_only else "admin")})
    with LocalServer(port=port, methods=METHODS) as server, ending(), coatcheck.open(url) as store:
        address = f"{server.url}{ROOT}/enter?key={key}"
        print_error(f"console at {address}")
        print_error("the address logs in once; end with Ctrl-C")
        routes = console_routes(store, keyring, key=key, token=token)
        with ExitStack() as stack:
            if opens:
                import webbrowser

                page = stack.enter_context(_private_page(address))
                webbrowser.open(page.as_uri())
            server.run(store_app(store, keyring, routes=routes), grace=1)


@contextmanager
def _private_page(address: str) -> Iterator[Path]:
    """Write a page that leads to an address, readable by this user only, and remove it at the end.
    A browser gets its path instead of the address, because every user of a machine can read the
    arguments of a program."""
    from html import escape
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="coatcheck-") as folder:  # mode 0700
        page = Path(folder) / "console.html"
        with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            link = escape(address)
            file.write("<!doctype html><title>Console</title>")
            file.write(f'<meta http-equiv="refresh" content="0; url={link}">')
            file.write(f'<p><a href="{link}">Open the console</a></p>')
        yield page


def _keyring(file: Path | None) -> tuple[Keyring, str | None]:
    """The known tokens, and a new one to print if there is none."""
    from coatcheck.http.credentials import Access, Keyring
    from coatcheck.http.serving import check_token, new_token

    given = os.environ.get(TOKEN)
    if given:
        check_token(given, TOKEN)
    printed = None if given or file else new_token()
    named = given or printed
    return Keyring(file, {named: Access("start", "admin")} if named else {}), printed
