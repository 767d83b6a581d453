"""Who may do what over HTTP: tokens with scopes, tenants and prefixes; foreign hosts and origins;
nothing leaks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Store
from coatcheck.cli import main
from coatcheck.errors import InvalidArgument
from coatcheck.http.credentials import (
    Access,
    Keyring,
    TokenScope,
    add_token,
    digest_of_token,
    read_tokens,
)
from coatcheck.http.operations import OPERATIONS, Operation
from coatcheck.http.serving import LocalServer
from tests.backends import Backend, wait_until
from tests.http.servers import ADMIN, Web, environment, path_of, running, serve, served

SCOPES: tuple[TokenScope, ...] = ("read", "write", "admin")
PREFIXES = ("", "ci-")
TENANTS = (None, "acme", "other")


def token(scope: TokenScope, tenant: str | None = None, prefix: str = "") -> str:
    return f"token-{scope}-{tenant}-{prefix}-{'x' * 16}"


EVERY = {
    token(scope, tenant, prefix): Access("t", scope, tenant, prefix)
    for scope in (*SCOPES, "metrics")
    for tenant in TENANTS
    for prefix in PREFIXES
}


@pytest.fixture(scope="module")
def web(shared_store: Store) -> Iterator[Web]:
    for tenant in TENANTS:
        store = shared_store if tenant is None else shared_store.tenant(tenant)
        for session in ("ci-1", "mine"):
            store.session(session).put(f"{tenant} {session}", name="n")
    with running(shared_store, Keyring(given=EVERY)) as found:
        yield found


def send_request(client: httpx2.Client, operation: Operation, session: str) -> httpx2.Response:
    """Send a valid request to an operation, for an artifact that does not exist."""
    path = operation.path.replace("{session_id}", session).replace("{target}", "none")
    body: Any = (
        {"value": 1}
        if operation.name == "externalize"
        else {"to": session}
        if operation.body
        else None
    )
    params = (
        {"q": "x"}
        if operation.name == "search"
        else {"dry_run": "true"}
        if operation.name == "collect"
        else {}
    )
    if operation.name == "open_session":
        body = {}
    return client.request(operation.methods[0], path, json=body, params=params)


def rank(scope: TokenScope) -> int:
    return SCOPES.index(scope)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("tenant", TENANTS[:2])
def test_a_token_allows_only_the_operations_of_its_scope_in_its_sessions(
    web: Web, operation: Operation, tenant: str | None, prefix: str
) -> None:
    needed = operation.scope
    with web.client(token=None) as client:
        for scope in SCOPES:
            client.headers["authorization"] = f"Bearer {token(scope, tenant, prefix)}"
            for session in ("ci-new", "elsewhere"):
                found = send_request(client, operation, session)
                is_covered = "{session_id}" not in operation.path or session.startswith(prefix)
                if needed is None:
                    is_allowed = True
                elif needed == "metrics":
                    is_allowed = scope == "admin" and tenant is None and not prefix
                else:
                    is_allowed = rank(scope) >= rank(needed) and is_covered
                assert (found.status_code != 403) == is_allowed, (scope, session, found.text)
                if not is_allowed:
                    assert found.json()["error"]["code"] == "forbidden"


def test_a_metrics_token_allows_only_metrics(web: Web) -> None:
    for tenant in TENANTS:
        with web.client(token=token("metrics", tenant)) as client:
            assert client.get("/metrics").status_code == 200
            assert client.get("/api/v1/sessions").status_code == 403
            assert client.get(path_of("mine", "n")).status_code == 403


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_token_sees_only_the_store_of_its_tenant(web: Web, tenant: str | None) -> None:
    with web.client(token=token("admin", tenant)) as client:
        assert client.get(path_of("mine", "n")).text == f"{tenant} mine"
        made = client.post(path_of("mine"), content=f"only of {tenant}").json()
        listed = {one["session_id"] for one in client.get("/api/v1/sessions").json()["sessions"]}
        assert {"ci-1", "mine"} <= listed
    for other in TENANTS:
        if other != tenant:
            with web.client(token=token("admin", other)) as client:
                assert client.get(path_of("mine", made["pointer"])).status_code == 404
                assert client.get(path_of("mine", made["artifact_id"])).status_code == 404


def test_a_token_with_a_prefix_lists_only_its_sessions(web: Web) -> None:
    with web.client(token=token("read", None, "ci-")) as client:
        for prefix in ("", "c", "ci-", "ci-1"):
            found = client.get("/api/v1/sessions", params={"prefix": prefix}).json()["sessions"]
            assert found
            assert all(one["session_id"].startswith("ci-") for one in found)
        for prefix in ("mine", "x", "ci_"):
            assert (
                client.get("/api/v1/sessions", params={"prefix": prefix}).json()["sessions"] == []
            )


def test_a_token_with_a_prefix_cannot_reach_other_sessions_through_its_own(web: Web) -> None:
    with web.client(token=token("write", None, "ci-")) as client:
        for refused in (
            client.put("/api/v1/sessions/ci-2", json={"parent": "mine"}),
            client.post(path_of("ci-1", "n", "/grant"), json={"to": "mine"}),
            client.put("/api/v1/sessions/ci-2", json={"quota_bytes": 5}),
            client.get(path_of("mine", "n")),
            client.get("/api/v1/sessions/mine%2F..%2Fci-1"),
        ):
            assert refused.status_code == 403, refused.text
        assert client.put("/api/v1/sessions/ci-2", json={"parent": "ci-1"}).status_code == 200
        assert client.get(path_of("ci-2", "n")).text == "None ci-1"


def test_internal_sessions_are_only_for_administrators(web: Web, shared_store: Store) -> None:
    for name in ("transcript:abc", "coatcheck:releases"):
        shared_store.session(name, ttl=None).put("internal", name="n")
        for scope, status in (("read", 403), ("write", 403), ("admin", 200)):
            with web.client(token=token(scope)) as client:  # type: ignore[arg-type]
                assert client.get(path_of(name, "n")).status_code == status
                listed = {
                    one["session_id"] for one in client.get("/api/v1/sessions").json()["sessions"]
                }
                assert (name in listed) == (status == 200)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Basic {}",
        "{}",
        "Bearer {}x",
        "Bearer x{}",
        "Bearer {} x",
    ],
)
def test_a_request_without_a_valid_token_is_refused(web: Web, header: str | None) -> None:
    known = token("admin")
    with web.client(token=None) as client:
        if header is not None:
            client.headers["authorization"] = header.format(known)
        for operation in OPERATIONS:
            found = send_request(client, operation, "s")
            if operation.scope is None:
                assert found.status_code == 200
            else:
                assert (found.status_code, found.json()["error"]["code"]) == (401, "unauthorized")
                assert found.headers["www-authenticate"] == "Bearer"
                assert known not in found.text


def test_two_authorization_headers_are_refused(web: Web) -> None:
    given = [("authorization", f"Bearer {token('admin')}")] * 2
    with web.client(token=None) as client:
        assert client.get("/api/v1/sessions", headers=given).status_code == 401


# Hosts and origins


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1",
        "localhost",
        "127.0.0.1.evil.example:{}",
        "0.0.0.0:{}",
        "[::1]:{}",
        "",
        "a b",
    ],
)
def test_a_foreign_host_is_refused_even_with_a_token(web: Web, host: str) -> None:
    with web.client(token=token("admin"), host=host.format(web.port)) as client:
        for path in ("/api/v1/sessions", "/healthz", "/nothing"):
            found = client.get(path)
            assert (found.status_code, found.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1", "http://localhost:1", "file://", ""],
)
def test_a_foreign_origin_is_refused_even_with_a_token(web: Web, origin: str) -> None:
    with web.client(token=token("admin"), origin=origin) as client:
        assert client.get("/api/v1/sessions").status_code == 403


def test_allowed_hosts_and_origins_pass(tmp_path: Path) -> None:
    page, name = "https://console.example", "store.example"
    with (
        served(tmp_path / "store", "--allow-host", name, "--allow-origin", page) as web,
        web.client() as client,
    ):
        for host in (name, f"{name}:443", web.host, f"localhost:{web.port}"):
            assert client.get("/healthz", headers={"host": host}).status_code == 200
        found = client.get("/healthz", headers={"origin": page})
        assert found.headers["access-control-allow-origin"] == page
        headers = {"origin": page, "access-control-request-method": "PUT"}
        preflight = client.options("/api/v1/sessions/s", headers=headers)
        assert preflight.status_code == 200
        assert "PUT" in preflight.headers["access-control-allow-methods"]


def test_a_server_for_other_machines_mentions_tls_and_checks_the_host(tmp_path: Path) -> None:
    with served(tmp_path / "store", "--host", "0.0.0.0") as web:
        assert web.process is not None
        assert web.process.stderr is not None
        assert "TLS" in web.process.stderr.readline()
        with httpx2.Client(headers={"authorization": f"Bearer {web.token}"}) as client:
            here = f"http://127.0.0.1:{web.port}/api/v1/sessions"
            assert client.get(here).status_code == 200
            for host in (f"0.0.0.0:{web.port}", "store.example"):
                assert client.get(here, headers={"host": host}).status_code == 403


# The tokens file


def test_a_new_token_is_printed_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    made = [
        CliRunner()
        .invoke(main, ["serve", "--tokens", str(file), "--new-token", *words])
        .stdout.strip()
        for words in (
            ["ci", "--scope", "write", "--tenant", "acme", "--sessions", "ci-"],
            ["eyes", "--scope", "read"],
        )
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert not any(one in text for one in made)
    assert read_tokens(file) == {
        digest_of_token(made[0]): Access("ci", "write", "acme", "ci-"),
        digest_of_token(made[1]): Access("eyes", "read"),
    }
    with served(tmp_path / "store", "--tokens", str(file), token="") as web:
        with web.client(token=made[0]) as client:
            assert client.post(path_of("ci-1"), content=b"x").status_code == 201
            assert client.post(path_of("other"), content=b"x").status_code == 403
        with web.client(token=made[1]) as client:
            assert client.get("/api/v1/sessions").json() == {"sessions": [], "next": None}
            assert client.post(path_of("ci-1"), content=b"x").status_code == 403
    with coatcheck.open(tmp_path / "store") as store:
        assert [info.session_id for info in store.tenant("acme").sessions()] == ["ci-1"]


def test_a_token_is_revoked_by_removing_it_from_the_file(
    tmp_path: Path, shared_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.toml"
    one = add_token(file, Access("one", "read"))
    keyring = Keyring(file)
    with running(shared_store, keyring) as web, web.client(token=one) as client:
        assert client.get("/api/v1/sessions").status_code == 200
        other = add_token(file, Access("other", "read"))
        wait_until(lambda: keyring.find(other))
        file.write_text("nonsense = [")
        wait_until(lambda: keyring.find(one) and "stay as they were" in caplog.text)
        assert client.get("/api/v1/sessions").status_code == 200
        file.unlink()
        wait_until(lambda: keyring.find(one) is None)
        assert client.get("/api/v1/sessions").status_code == 401


names = st.text("abcXYZ09_-", min_size=1, max_size=20)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@given(names, st.sampled_from([*SCOPES, "metrics"]), st.none() | texts, st.just("") | texts)
def test_every_access_is_read_back_from_the_file(
    name: str, scope: TokenScope, tenant: str | None, sessions: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        access = Access(name, scope, tenant, sessions)
        made = add_token(Path(folder) / "tokens", access)
        assert Keyring(Path(folder) / "tokens").find(made) == access


@pytest.mark.parametrize(
    "text", ["x = 1", "[a]", "[a]\nsha256='x'\nscope='read'", f"[a]\nsha256='{'0' * 64}'\nscope='root'",
             f"[a]\nsha256='{'0' * 64}'\nscope='read'\nextra=1", f"['a b']\nsha256='{'0' * 64}'\nscope='read'",
             f"[a]\nsha256='{'0' * 64}'\nscope='read'\ntenant=''", "[a", "\x00",
             "".join(f"[{name}]\nsha256='{'0' * 64}'\nscope='read'\n" for name in "ab")],
)  # fmt: skip
def test_a_tokens_file_with_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(InvalidArgument) as caught:
        Keyring(file)
    assert "\n" not in str(caught.value)


def test_a_tokens_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    add_token(file, Access("a", "read"))
    file.chmod(0o660)
    with pytest.raises(InvalidArgument):
        Keyring(file)
    with pytest.raises(InvalidArgument):
        add_token(file, Access("b", "read"))
    file.chmod(0o600)
    with pytest.raises(InvalidArgument):
        add_token(file, Access("a", "write"))
    with pytest.raises(InvalidArgument):
        add_token(file, Access("not a name", "write"))


def test_a_link_in_place_of_the_tokens_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "tokens").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        add_token(tmp_path / "tokens", Access("a", "read"))
    assert not target.exists()


# Output


def test_a_token_is_generated_at_startup_and_printed_once(tmp_path: Path) -> None:
    with served(tmp_path / "store", token=None) as web:
        assert len(web.token) >= 32
        with web.client() as client:
            assert client.get("/api/v1/stats").status_code == 200


def test_credentials_are_in_no_output_error_or_metric(tmp_path: Path) -> None:
    with served(tmp_path / "store") as web:
        with web.client(token="a-wrong-token-of-a-client") as client:
            texts = [client.get("/api/v1/sessions").text, client.get(path_of("s", "n")).text]
        with web.client() as client:
            texts += [
                client.get("/api/v1/sessions", params={"x": ADMIN}).text,
                client.get("/nothing", params={"token": ADMIN}).text,
                client.post("/api/v1/sessions/s/externalize", content=b"{").text,
                client.get("/metrics").text,
            ]
        with contextlib.suppress(httpx2.HTTPError), httpx2.Client() as bad:
            bad.get(f"{web.url}/%zz", headers={"authorization": f"Bearer {ADMIN}\x01"})
        assert web.process is not None
        assert web.process.stderr is not None
        web.process.terminate()
        texts.append(web.process.stderr.read())
        web.process.wait(60)
    for text in texts:
        assert ADMIN not in text
        assert "a-wrong-token" not in text


def test_a_weak_token_and_invalid_options_are_refused_at_startup(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    add_token(file, Access("a", "read", "acme"))
    for options, env, word in (
        ([], {"COATCHECK_HTTP_TOKEN": "short"}, "too weak"),
        (["--tokens", str(file)], {"COATCHECK_TENANT": "acme"}, "COATCHECK_TENANT"),
        (["--tokens", str(tmp_path / "none")], {}, "cannot read"),
        (["--scope", "read"], {}, "--new-token"),
        (["--new-token", "x"], {}, "--tokens and --scope"),
        (["--allow-origin", "evil.example/"], {}, "origin"),
        (["--allow-host", "http://x"], {}, "host name"),
    ):  # fmt: skip
        done = CliRunner().invoke(
            main,
            ["serve", "--port", "0", *options],
            env={"COATCHECK_STORE": str(tmp_path / "store"), **env},
        )
        assert done.exit_code == 2, done.stderr
        assert word in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_server_needs_the_extra_and_help_does_not_import_it(tmp_path: Path) -> None:
    without = "import sys; sys.modules['starlette'] = None; from coatcheck.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, "serve"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert "pip install 'coatcheck[http]'" in done.stderr
    shown = "import sys; from coatcheck.cli import main\ntry: main(['--help'])\nfinally: print('starlette' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=False
    )
    assert "serve" in done.stdout
    assert done.stdout.endswith("False\n")


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    with served(tmp_path / "store") as web:
        done = subprocess.run(
            serve("--port", str(web.port)), env=environment(tmp_path / "other"), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 7
    assert "--port" in done.stderr
    assert not os.path.exists(tmp_path / "other")


def test_tokens_of_tenants_work_on_every_backend(backend: Backend) -> None:
    given = {f"a-token-of-{name}": Access(name, "write", name) for name in ("one", "two")}
    with running(backend.open(), Keyring(given=given)) as web:
        for name in ("one", "two"):
            with web.client(token=f"a-token-of-{name}") as client:
                assert (
                    client.post(
                        path_of("s"), content=name.encode(), params={"name": "n"}
                    ).status_code
                    == 201
                )
        for name in ("one", "two"):
            with web.client(token=f"a-token-of-{name}") as client:
                assert client.get(path_of("s", "n")).text == name


def test_small_writes_are_sent_at_once() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", b"0")],
                }
            )
            await send({"type": "http.response.body"})

    with LocalServer() as local:
        server = local.prepared(app, grace=1)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            with httpx2.Client(base_url=local.url) as client:
                assert client.get("/").status_code == 200
                (connection,) = server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            server.should_exit = True
            thread.join()
