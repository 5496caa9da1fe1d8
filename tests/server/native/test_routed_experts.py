"""The experts of a mixture in the answers of /inference/v1/generate, and given to it."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from octavo.model_info import RoutesInfo
from octavo.types import EngineInfo
from octavo_fleet.backends.vocabulary import byte_tokenizer
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.test_response import events

PATH = "/inference/v1/generate"
ROUTES = RoutesInfo(num_layers=3, num_chosen=2, num_experts=5, layers=(1, 2))


class Mixture(InProcessEngine):
    """Its tokens use experts 0 and 1 of both layers that have any."""

    routes: RoutesInfo | None = ROUTES

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, routes=self.routes)

    def step(self) -> None:
        number = self.routes.num_bytes if self.routes else 0
        for live in self.live.values():
            count = len(live.request.prompt_tokens) + live.request.max_tokens - 1
            start = live.request.params.routed_experts_prompt_start
            if live.request.params.return_routed_experts and live.num_tokens == live.request.max_tokens - 1:
                live.listener.routes = bytes([0, 0, 0, 1, 0, 1]) * (count - start) if number else None  # type: ignore
        super().step()


def test_the_form_of_sglang(mixture: Served) -> None:
    """As slime and AReaL read it: 32 bits for each layer and expert of all tokens but the last."""
    body: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    meta = mixture.client.post("/generate", json={**body, "return_routed_experts": True}).json()["meta_info"]
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(6, 3, 2)
    assert found.tolist() == [[[0, 0], [0, 1], [0, 1]]] * 6
    assert "routed_experts" not in mixture.client.post("/generate", json=body).json()["meta_info"]


@pytest.fixture(scope="module")
def mixture() -> Any:
    served = Served(Mixture(), byte_tokenizer(), {})
    yield served
    served.stop()


def npy(ids: npt.NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def read(text: str) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_they_come_with_the_last_tokens(mixture: Served, stream: bool) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}, "stream": stream}
    response = mixture.client.post(PATH, json=body)
    choices = [event["choices"][0] for event in (events(response.content) if stream else [response.json()])]
    assert all(choice["routed_experts"] is None for choice in choices[:-1])
    experts = read(choices[-1]["routed_experts"])
    assert experts.dtype == np.uint8
    assert experts.shape == (6, 3, 2)
    assert experts[5].tolist() == [[0, 0], [0, 1], [0, 1]]
    body["sampling_params"] = {"max_tokens": 4, "routed_experts_prompt_start": 2}
    if not stream:
        found = mixture.client.post(PATH, json=body).json()["choices"][0]["routed_experts"]
        assert len(read(found)) == 4
        body["sampling_params"] = {"max_tokens": 4, "return_routed_experts": False}
        assert mixture.client.post(PATH, json=body).json()["choices"][0]["routed_experts"] is None


def test_given_ones_reach_the_engine_under_a_salt_of_their_own(mixture: Served) -> None:
    ids = np.array([[[0, 0], [3, 1], [4, 0]], [[0, 0], [1, 2], [0, 4]]], np.uint8)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}
    mixture.client.post(PATH, json=body)
    mixture.client.post(PATH, json={**body, "routed_experts": npy(ids)})
    mixture.client.post(PATH, json={**body, "routed_experts": npy(ids[:1].astype(np.int32))})
    plain, given, other = mixture.engine.requests[-3:]
    assert plain.routes == b""
    assert given.routes == ids.astype(np.uint16).tobytes()
    assert other.routes == ids[:1].astype(np.uint16).tobytes()
    assert len({plain.cache_salt, given.cache_salt, other.cache_salt}) == 3


GOOD = np.array([[[0, 0], [3, 1], [4, 0]]], np.uint8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("!", "must be an .npy file in base64"),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "must be an .npy file in base64"),
        (npy(GOOD)[:-8], "must be an .npy file in base64"),
        (npy(GOOD.astype(np.float32)), "of integers [positions, 3, 2]"),
        (npy(GOOD[:, :2]), "of integers [positions, 3, 2]"),
        (npy(np.full((600, 3, 2), [0, 1], np.uint8)), "at most 512 positions"),
        (npy(GOOD + np.uint8(1)), "distinct numbers below 5"),
        (npy(GOOD.astype(np.int8) - np.int8(1)), "distinct numbers below 5"),
        (npy(np.array([[[0, 0], [3, 3], [4, 0]]])), "distinct numbers below 5"),
    ],
)
def test_what_no_router_can_take_is_refused(mixture: Served, given: str, message: str) -> None:
    response = mixture.client.post(PATH, json={"token_ids": [1], "routed_experts": given})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"sampling_params": {"return_routed_experts": True}}, {"routed_experts": npy(GOOD)}])
def test_other_models_have_none(served: Served, body: dict[str, Any]) -> None:
    response = served.client.post(PATH, json={"token_ids": [1], **body})
    assert response.status_code == 400
    assert "--enable-return-routed-experts" in response.json()["error"]["message"]
    assert served.client.post(PATH, json={"token_ids": [1]}).json()["choices"][0]["routed_experts"] is None
