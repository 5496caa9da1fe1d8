"""Several keys, quotas, the admin's key, names of hosts, origins, and HTTPS."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError, QueueFull
from octavo.server_settings import ServerSettings
from octavo_server.http.middleware import AllowedHosts
from octavo_server.http.server import HTTPServer
from octavo_server.tenants import api_keys
from octavo_server.tenants.api_keys import Account, Keys
from tests.server.in_process import InProcessEngine


def key_file(folder: Path, *lines: str) -> str:
    path = folder / "keys"
    path.write_text("\n".join(lines))
    return str(path)


def line(name: str, secret: str, limits: str = "") -> str:
    return f"{name} {hashlib.sha256(secret.encode()).hexdigest()} {limits}"


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_several_keys_and_what_each_has(serve_app: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, "\ufeff# who may", line("alice", "a-key"), "", line("bob", "b-key", "# hers"))
    served = serve_app(api_key_file=path, api_key="own", admin_key="admin")
    for secret in ("a-key", "b-key", "own"):
        assert served.client.get("/v1/models", headers=bearer(secret)).status_code == 200
        assert served.client.get("/v1/models", headers={"x-api-key": secret}).status_code == 200
    for secret in ("-", "a-ke", "a-key2", "alice", hashlib.sha256(b"a-key").hexdigest(), "admin"):
        assert served.client.get("/v1/models", headers=bearer(secret)).status_code == 401
    body = {"input": "Hi", "max_output_tokens": 2}
    name = served.client.post("/v1/responses", json=body, headers=bearer("a-key")).json()["id"]
    assert served.client.get(f"/v1/responses/{name}", headers=bearer("a-key")).status_code == 200
    assert served.client.get(f"/v1/responses/{name}", headers=bearer("b-key")).status_code == 404
    import anthropic  # late: it takes more than a second

    refused = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as error:
        refused.models.list()
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.AuthenticationError) as error:
        refused.messages.create(model="test", max_tokens=1, messages=messages)
    assert error.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_the_admin_sees_usage_and_reads_the_file_again(serve_app: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, line("alice", "a-key"))
    served = serve_app(api_key_file=path, admin_key="admin")
    complete = {"prompt": "Hello", "max_tokens": 3}
    served.client.post("/v1/completions", json=complete, headers=bearer("a-key"))
    served.client.post("/v1/completions", json={**complete, "stream": True}, headers=bearer("a-key"))
    usage = served.client.get("/admin/keys", headers=bearer("admin")).json()["data"]
    assert usage[1] == {"name": "alice", "num_requests": 2, "num_tokens": 16}
    for secret in ("a-key", "x"):
        assert served.client.get("/admin/keys", headers=bearer(secret)).status_code == 401
    key_file(tmp_path, line("bob", "b-key"))
    assert served.client.post("/admin/keys/reload", headers=bearer("admin")).status_code == 200
    assert served.client.get("/v1/models", headers=bearer("a-key")).status_code == 401
    assert served.client.get("/v1/models", headers=bearer("b-key")).status_code == 200
    key_file(tmp_path, "bob b-key")
    bad = served.client.post("/admin/keys/reload", headers=bearer("admin"))
    assert bad.status_code == 400
    assert "b-key" not in bad.text
    assert served.client.get("/v1/models", headers=bearer("b-key")).status_code == 200


SHARED = ("/metrics", "/stats", "/v1/kv_events")


def statuses(served: Any, secret: str | None, paths: tuple[str, ...] = SHARED) -> list[int]:
    headers = {} if secret is None else bearer(secret)
    return [served.client.get(path, headers=headers).status_code for path in paths]


def test_one_key_of_several_does_not_see_what_concerns_all(serve_app: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, line("alice", "a-key"), line("bob", "b-key"), line("ops", "o-key", "admin"))
    served = serve_app(api_key_file=path, admin_key="admin")
    for secret in ("a-key", "b-key"):
        assert statuses(served, secret) == [403] * 3
        assert not {200} & set(statuses(served, secret, ("/metrics/", "/stats//", "/%6detrics")))
        # What a router or a probe asks stays open to every key.
        assert statuses(served, secret, ("/load", "/version", "/v1/models", "/health")) == [200] * 4
    refused = served.client.get("/stats", headers=bearer("a-key")).json()["error"]
    assert refused["code"] == "permission_denied"
    for secret in ("admin", "o-key"):
        # Events are not kept unless the settings say so.
        assert statuses(served, secret) == [200, 200, 400]
    assert statuses(served, "wrong") == statuses(served, None) == [401] * 3


@pytest.mark.parametrize("from_file", [True, False])
def test_the_only_key_sees_all(serve_app: Any, tmp_path: Path, from_file: bool) -> None:
    path = key_file(tmp_path, line("alice", "a-key"))
    keys = {"api_key_file": path} if from_file else {"api_key": "a-key"}
    served = serve_app(**keys, admin_key="admin")
    assert statuses(served, "a-key", ("/metrics", "/stats")) == [200] * 2
    assert statuses(served, "admin", ("/metrics", "/stats")) == [200] * 2
    if from_file:
        key_file(tmp_path, line("alice", "a-key"), line("bob", "b-key"))
        assert served.client.post("/admin/keys/reload", headers=bearer("admin")).status_code == 200
        assert statuses(served, "a-key", ("/metrics", "/stats")) == [403] * 2


def test_a_key_of_the_file_may_be_the_admins(serve_app: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, line("alice", "a-key"), line("ops", "o-key", "requests_per_minute=100 admin"))
    served = serve_app(api_key_file=path)
    name = served.client.post("/v1/responses", json={"input": "Hi"}, headers=bearer("a-key")).json()["id"]
    timeline = f"/v1/requests/{name}/timeline"
    assert statuses(served, "a-key", ("/admin/keys", "/v1/models")) == [401, 200]
    assert statuses(served, "o-key", ("/admin/keys", "/v1/models")) == [200, 200]
    # Its reports are on all requests, but what others keep is theirs.
    assert served.client.get(f"/v1/responses/{name}", headers=bearer("o-key")).status_code == 404
    assert statuses(served, "o-key", (timeline,)) == statuses(served, "a-key", (timeline,))
    key_file(tmp_path, line("alice", "a-key"))
    assert served.client.post("/admin/keys/reload", headers=bearer("o-key")).status_code == 200
    assert statuses(served, "o-key", ("/admin/keys",)) == [403]


def test_without_an_admin_key_no_request_is_the_admin(serve_app: Any) -> None:
    served = serve_app()
    answer = served.client.get("/admin/keys")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "permission_denied"


@pytest.mark.parametrize(
    "bad",
    [
        "alice",
        "alice secret",
        "al/ice " + "0" * 64,
        "a " + "0" * 64 + " tokens_per_minute=0",
        "a " + "0" * 64 + " x=1",
    ],
)
def test_a_bad_line_is_named_but_not_shown(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as error:
        Keys(ServerSettings(api_key_file=key_file(tmp_path, line("bob", "b"), bad)))
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="twice"):
        Keys(ServerSettings(api_key_file=key_file(tmp_path, line("bob", "b"), line("bob", "c"))))
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(ServerSettings(api_key_file=str(tmp_path / "none")))


def test_an_account_never_gets_more_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(api_keys.time, "monotonic", lambda: now)
    account = Account(requests_per_minute=60)
    admitted = 0
    for _ in range(20_000):
        now += 0.01
        try:
            account.admit()
            admitted += 1
        except QueueFull:
            pass
    assert admitted == pytest.approx(60 + 200, abs=1)


def test_tokens_are_owed_and_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(api_keys.time, "monotonic", lambda: now)
    account = Account(tokens_per_minute=60)
    account.admit()
    account.charge(119)
    with pytest.raises(QueueFull) as refusal:
        account.admit()
    assert refusal.value.retry_after == 60
    now += 59
    with pytest.raises(QueueFull):
        account.admit()
    now += 1.01
    account.admit()


def test_quotas_are_429_with_a_time(serve_app: Any, tmp_path: Path) -> None:
    limits = ("requests_per_minute=2", "tokens_per_minute=20")
    path = key_file(tmp_path, *(line(f"k{i}", f"k{i}", limit) for i, limit in enumerate(limits)), line("k2", "k2"))
    served = serve_app(api_key_file=path)
    body = {"prompt": "x" * 30, "max_tokens": 2}
    statuses = {
        key: [served.client.post("/v1/completions", json=body, headers=bearer(key)) for _ in range(4)]
        for key in ("k0", "k1", "k2")
    }
    assert [answer.status_code for answer in statuses["k0"]] == [200, 200, 429, 429]
    assert [answer.status_code for answer in statuses["k1"]] == [200, 429, 429, 429]
    assert [answer.status_code for answer in statuses["k2"]] == [200] * 4
    refused = statuses["k1"][1]
    assert 30 <= int(refused.headers["retry-after"]) <= 40
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "20 tokens a minute" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("localhost", True),
        ("LOCALHOST.:80", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("localhost@evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_only_names_of_the_machine_reach_a_server_for_the_machine(serve_app: Any, host: str, is_served: bool) -> None:
    served = serve_app()
    answer = served.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == (200 if is_served else 421)
    assert served.client.get("/health", headers={"host": host}).status_code == 200


def test_names_that_are_allowed() -> None:
    assert AllowedHosts(ServerSettings(host="0.0.0.0")).allowed is None
    assert AllowedHosts(ServerSettings(allowed_hosts="*")).allowed is None
    allowed = AllowedHosts(ServerSettings(host="0.0.0.0", allowed_hosts="a.example, B.example")).allowed
    assert allowed is not None
    assert {"a.example", "b.example", "localhost"} <= allowed


def test_origins(serve_app: Any) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    closed = serve_app(api_key="k")
    assert closed.client.options("/v1/completions", headers=asks).status_code == 401
    assert "access-control-allow-origin" not in closed.client.get("/health", headers=asks).headers
    opened = serve_app(api_key="k", allowed_origins="https://page.example")
    preflight = opened.client.options("/v1/completions", headers=asks)
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert opened.client.get("/health", headers=asks).headers["access-control-allow-origin"] == "https://page.example"
    other = opened.client.options("/v1/completions", headers={**asks, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def certificate(folder: Path) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key


def test_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    from tests.server.conftest import Served
    from tests.server.in_process import byte_tokenizer

    served = Served(InProcessEngine(), byte_tokenizer(), {"ssl_certfile": cert, "ssl_keyfile": key})
    try:
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=trusting, base_url=f"https://localhost:{served.port}") as client:
            answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "The"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{served.port}/health")
    finally:
        served.stop()


def test_certificates_of_clients(tmp_path: Path) -> None:
    """Only those that an authority of the settings has signed may come in."""
    cert, key = certificate(tmp_path)
    from tests.server.conftest import Served
    from tests.server.in_process import byte_tokenizer

    served = Served(
        InProcessEngine(), byte_tokenizer(), {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert}
    )
    try:
        trusting = ssl.create_default_context(cafile=cert)
        url = f"https://localhost:{served.port}/health"
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=trusting)
        trusting.load_cert_chain(cert, key)
        assert httpx.get(url, verify=trusting).status_code == 200
    finally:
        served.stop()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile needs ssl_certfile"):
        ServeConfig.from_flat({"ssl_keyfile": "x"})
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for path in (str(bad), str(tmp_path / "none.pem")):
        with pytest.raises(ConfigError, match="ssl_certfile"):
            HTTPServer(None, ServerSettings(ssl_certfile=path))  # type: ignore[arg-type]


def test_wrong_and_right_keys_take_the_same_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    keys = Keys(ServerSettings(api_key_file=key_file(tmp_path, *(line(f"k{i}", f"k{i}") for i in range(5)))))
    compared: list[int] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare(a, b)

    monkeypatch.setattr("octavo_server.tenants.api_keys.hmac.compare_digest", counted)
    for secret in (b"k0", b"k4"):
        compared.clear()
        keys.check("/v1/models", secret)
        assert compared == [32] * 5
