"""``kv_transfer_params`` in requests and answers of prefill and decode servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.types import KVTransfer, Output
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine

HEADER = "x-octavo-unknown-fields"
ADDRESSES = {"127.0.0.1:5": ("127.0.0.1", 5), "[::1]:5": ("::1", 5)}
FETCH = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 5, "remote_request_id": "t"}


def serve(serve_app: Callable[..., Served], role: str, address: str = "127.0.0.1:5") -> Served:
    """A server whose engine holds what it is asked to hold."""
    engine = InProcessEngine()
    engine_step = engine.engine.step

    def step() -> list[Output]:
        outputs = engine_step()
        for output in outputs:
            if output.finish_reason and engine.requests[-1].transfer == KVTransfer():
                output.transfer = KVTransfer(address, "t", 2)
        return outputs

    engine.engine.step = step  # type: ignore[method-assign]
    return serve_app(engine, role=role, kv_transfer_key="k")


def continue_ids(served: Served, **fields: Any) -> Any:
    sampling = {"max_tokens": fields.pop("max_tokens", 2)}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, **fields}
    return served.client.post("/inference/v1/generate", json=body)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("ask", [Served.complete, Served.chat, continue_ids])
def test_a_prefill_server_tells_where_the_prompt_is_and_a_decode_server_takes_it(
    ask: Callable[..., Any], address: str, serve_app: Callable[..., Served]
) -> None:
    first, second = serve(serve_app, "prefill", address), serve(serve_app, "decode")
    host, port = ADDRESSES[address]
    params = ask(first, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "remote_host": None}).json()[
        "kv_transfer_params"
    ]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": address,
        "remote_block_ids": [0, 1],
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": "t",
    }
    answer = ask(second, kv_transfer_params=params)
    assert HEADER not in answer.headers
    assert "kv_transfer_params" not in answer.json()
    assert second.engine.requests[-1].transfer == KVTransfer(address, "t")
    assert "kv_transfer_params" not in ask(first).json()
    assert first.engine.requests[-1].transfer is None


@pytest.mark.parametrize(
    ("role", "params", "named"),
    [
        ("decode", [1], "must be an object"),
        ("decode", {**FETCH, "do_remote_prefill": 1}, "do_remote_prefill' must be true or false"),
        ("decode", {**FETCH, "do_remote_decode": True}, "one of them goes"),
        ("decode", {**FETCH, "remote_port": 0}, "remote_port' must be a whole number from 1 to 65535"),
        ("decode", {**FETCH, "remote_port": "5"}, "remote_port"),
        ("decode", {**FETCH, "remote_host": "a\nb"}, "remote_host' must be 1 to 256 printable characters"),
        ("decode", {**FETCH, "remote_request_id": None}, "remote_request_id"),
    ],
)
def test_bad_parameters_are_named(role: str, params: Any, named: str, serve_app: Callable[..., Served]) -> None:
    served = serve(serve_app, role)
    answer = served.complete(kv_transfer_params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert named in answer.json()["error"]["message"]


def test_what_is_held_is_one_prompt_of_an_answer_that_is_no_stream(serve_app: Callable[..., Served]) -> None:
    served = serve(serve_app, "prefill")
    for more in ({"stream": True}, {"n": 2}, {"prompt": ["a", "b"]}):
        answer = served.complete(kv_transfer_params={"do_remote_decode": True}, **more)
        assert answer.status_code == 400
        assert "for one prompt and one answer, and not for streams" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("role", "params"), [("prefill", FETCH), ("decode", {"do_remote_decode": True}), ("both", 5)])
def test_what_the_role_does_not_do_is_passed_over(role: str, params: Any, serve_app: Callable[..., Served]) -> None:
    served = serve_app() if role == "both" else serve(serve_app, role)
    answer = served.complete(kv_transfer_params=params)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "kv_transfer_params")
    assert served.engine.requests[-1].transfer is None
