"""What operators ask."""

from __future__ import annotations

import re
from typing import Any

from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine


def test_ready_is_the_truth_and_health_is_liveness(serve_app: Any) -> None:
    engine = InProcessEngine()
    served = serve_app(engine)
    assert served.client.get("/ready").status_code == 200
    assert served.client.get("/health_generate").status_code == 200
    engine.is_ready = False
    response = served.client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    response = served.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    engine.failure = "The engine cannot be restarted: secret"
    response = served.client.get("/health")
    assert response.status_code == 503
    assert "secret" not in response.text


def test_stats(served: Served) -> None:
    stats = served.client.get("/stats").json()
    wanted = {"num_running", "num_waiting", "num_used_blocks", "num_live", "num_restarts", "engine_pid", "is_ready"}
    assert wanted <= set(stats)
    assert stats["engine_pid"] == 4711


def test_load_counts_unfinished_requests(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    assert served.client.get("/load").json() == {"server_load": 0}
    begun = served.client.post("/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
    while not engine.num_live:
        pass
    assert served.client.get("/load").json() == {"server_load": 1}
    served.client.delete(f"/v1/responses/{begun}")
    assert served.client.get("/load").json() == {"server_load": 0}


def test_metrics_and_version(served: Served) -> None:
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running" in response.text
    assert isinstance(served.client.get("/version").json()["version"], str)


def test_the_openapi_document_describes_the_bodies(served: Served) -> None:
    document = served.client.get("/openapi.json").json()
    for path, name in (
        ("/v1/completions", "CompletionBody"),
        ("/v1/chat/completions", "ChatBody"),
        ("/tokenize", "TokenizeBody"),
        ("/detokenize", "DetokenizeBody"),
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert document["components"]["schemas"][name]["properties"]
    assert "messages" in document["components"]["schemas"]["ChatBody"]["required"]
    references = {part.split('"')[0] for part in str(document).replace("'", '"').split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])


def test_the_openapi_document_says_what_may_be_null_and_how_it_fails(served: Served) -> None:
    document = served.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["n"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 1}
    assert "anyOf" not in schemas["ChatBody"]["properties"]["messages"]
    others = {"/v1/messages": "Anthropic", "/api/": "Ollama", "/generate_stream": "TGI", "/v1beta/": "Gemini"}
    others |= dict.fromkeys(("/embed", "/predict", "/similarity", "/rerank"), "TEI")
    for path, operations in document["paths"].items():
        if path == "/":
            continue  # a page and TGI's, which have the errors of both
        name = next((name for start, name in others.items() if path.startswith(start)), "") + "Error"
        for operation in operations.values():
            content = operation["responses"]["default"]["content"]["application/json"]
            assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}


def test_the_openapi_document_has_every_path(served: Served) -> None:
    paths = served.client.get("/openapi.json").json()["paths"]
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/completions", "/openapi.json"} <= paths.keys()
    for path, operations in paths.items():
        if "{" not in path and not path.startswith("/admin"):  # that asks for a key first
            allowed = served.client.options(path).headers["allow"].lower().split(", ")
            wider = [each for each in paths if "{" in each and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", each), path)]
            expected = operations.keys() | {method for each in wider for method in paths[each]}
            assert set(allowed) - {"head", "options"} == expected, path
