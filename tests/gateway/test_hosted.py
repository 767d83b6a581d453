"""A gateway for several clients: each has a token, which decides its tenant and sessions. Metrics
for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from coatcheck import Store
from coatcheck.gateway import Gateway, GatewaySettings, launch
from coatcheck.http.credentials import Access, Keyring
from tests.gateway.provider import Provider, Say, Use, turn
from tests.gateway.talking import BIG, KEYS, Talk, post, serving

ACME, OTHER, CI, READER, METRICS = (
    f"token-of-{name}-{'x' * 16}" for name in ("acme", "other", "ci", "reader", "meter")
)
KNOWN = {
    ACME: Access("acme", "write", "acme"),
    OTHER: Access("other", "write", "other"),
    CI: Access("ci", "write", "acme", "ci-"),
    READER: Access("reader", "read", "acme"),
    METRICS: Access("meter", "metrics"),
}
BODY: Any = {
    "model": "claude-opus-5-5",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


@contextlib.contextmanager
def hosted(store: Store, provider: Provider, **settings: Any) -> Iterator[str]:
    given = GatewaySettings(anthropic=provider.url, openai=provider.url, **settings)
    app = Gateway(store, given, keyring=Keyring(given=KNOWN))
    with launch.local_server() as server, launch.beside(app, server):
        yield server.url


def sessions_of(store: Store) -> set[str]:
    return {
        info.session_id for info in store.sessions() if not info.session_id.startswith("coatcheck:")
    }


def test_the_token_decides_the_tenant_and_the_providers_credential_does_not(store: Store) -> None:
    def script(seen: Any) -> Any:
        return turn(Use("search", {})) if len(seen.messages) == 1 else turn(Say("Found."))

    with Provider(script) as provider, hosted(store, provider, mode="loop", session="same") as url:
        for token, result in ((ACME, BIG + "acme"), (OTHER, BIG + "other")):
            talk = Talk(f"{url}/t/{token}", thinking=False)
            talk.ask("find it")
            talk.ask(talk.results(result))
        assert {one.headers["authorization"] for one in provider.seen} == {"Bearer sk-test"}
        assert all(
            token not in str(one.headers) + one.path for one in provider.seen for token in KNOWN
        )
    assert sessions_of(store) == set()
    for tenant in ("acme", "other"):
        session = store.tenant(tenant).session("same")
        stored = [session.get(ref) for ref in session.list() if ref.tool == "search"]
        assert [str(one)[-len(tenant) :] for one in stored] == [tenant]
        assert len(session.records("gateway:calls")) == 2


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [(None, "/v1/messages", 401), ("wrong" * 9, "/v1/messages", 401), ("sk-test", "/v1/models", 401),
     (READER, "/v1/messages", 403), (METRICS, "/v1/messages", 403), (METRICS, "/v1/models", 403),
     (ACME, "/metrics", 403), (None, "/metrics", 401), (METRICS, "/metrics", 200), (ACME, "/v1/messages", 200)],
)  # fmt: skip
def test_a_token_opens_only_what_its_scope_allows(
    store: Store, token: str | None, path: str, status: int
) -> None:
    headers = {**KEYS, **({"x-coatcheck-token": token} if token else {})}
    with Provider([turn(Say("Hi."))]) as provider, hosted(store, provider) as url:
        with httpx2.Client(trust_env=False) as client:
            found = client.get(url + path, headers=headers) if path != "/v1/messages" else None
        found = found or post(url, path, BODY, **headers)
        assert found.status_code == status
        assert len(provider.seen) == (status == 200 and path == "/v1/messages")


def test_a_token_can_use_only_sessions_with_its_prefix(store: Store) -> None:
    with Provider(lambda _: turn(Say("Hi."))) as provider, hosted(store, provider) as url:
        named = {"x-coatcheck-token": CI, "x-coatcheck-session": "mine"}
        refused = post(url, "/v1/messages", BODY, **named)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert (
            post(url, "/v1/messages", BODY, **{**named, "x-coatcheck-session": "ci-7"}).status_code
            == 200
        )
        for found in (
            {},
            {"x-claude-code-session-id": "one"},
            {"x-claude-code-session-id": "odd/id"},
        ):
            assert (
                post(url, "/v1/messages", BODY, **{"x-coatcheck-token": CI}, **found).status_code
                == 200
            )
    used = sessions_of(store.tenant("acme"))
    assert {"ci-7", "ci-claude-code-one"} < used
    assert len(used) == 4
    assert all(one.startswith("ci-") for one in used)


def test_prometheus_metrics_contain_nothing_chosen_by_a_client(store: Store) -> None:
    with (
        Provider([turn(Say("Hi.")), turn(status=429)]) as provider,
        serving(store, provider, is_one=True) as url,
    ):
        odd = {**BODY, "model": "secret-model"}
        assert (
            post(url, "/v1/messages", odd, **{"x-coatcheck-session": "secret-session"}).status_code
            == 200
        )
        assert post(url, "/v1/messages", odd, **{"user-agent": "secret-agent"}).status_code == 429
        with httpx2.Client(trust_env=False) as client:
            client.get(f"{url}/v1/models/secret-path", headers=KEYS)
            found = client.get(f"{url}/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    lines = found.text.splitlines()
    assert 'coatcheck_gateway_requests_total{api="anthropic",status="200"} 1.0' in lines
    assert 'coatcheck_gateway_requests_total{api="anthropic",status="429"} 1.0' in lines
    assert 'coatcheck_gateway_requests_total{api="other",status="200"} 1.0' in lines
    assert "coatcheck_gateway_requests_running 1.0" in lines
    assert any(line.startswith("coatcheck_gateway_input_tokens_total ") for line in lines)
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)
    assert "secret" not in found.text
