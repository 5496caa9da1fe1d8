"""``octavo bench packed``: random weights of each format, and figures of a layer's products; times are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo_bench.device import packed_weights
from octavo_bench.device.packed_weights import FORMS, measure
from octavo_fleet.sim.shapes import SHAPES

DENSE = SHAPES["tiny"] | {"vocab_size": 512}
MIXTURE = SHAPES["qwen3-30b-a3b"] | {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8}


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def microseconds(calls: Sequence[Callable[[], object]], with_pdl: bool) -> float:
        for call in calls:
            call()
        return 2.0

    monkeypatch.setattr(packed_weights, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(packed_weights, "ALONE_BYTES", 1)
    monkeypatch.setattr(packed_weights, "microseconds", microseconds)
    monkeypatch.setattr(packed_weights, "compiling", contextlib.nullcontext)
    monkeypatch.setattr(packed_weights.ceilings, "measure", lambda: {"read_tb_s": 3.0, "matmul_tflop_s": 700.0})
    for name, shape in (("small", DENSE), ("small mixture", MIXTURE)):
        monkeypatch.setitem(SHAPES, name, shape)


@pytest.mark.parametrize("name", FORMS)
def test_outputs_have_about_unit_variance(name: str) -> None:
    weight = FORMS[name].weight(64, 512)
    assert 0.5 < weight.unpack().std().item() * 512**0.5 < 2
    sizes = {"q4_k": 4, "q6_k": 4}
    assert weight.scales_GN.element_size() == sizes.get(name, 2)


@pytest.mark.parametrize("name", ["int4", "q4_k", "nvfp4", "int8"])
def test_figures_of_a_layer(name: str) -> None:
    rows: list[dict[str, Any]] = measure(["small"], [name], [1, 20])["rows"]
    assert [(row["kernel"].split()[0], row["T"]) for row in rows] == [
        *((kernel, T) for kernel in ("qkv", "o", "gate_up", "down") for T in (1, 20)),
        ("output", 1),
    ]
    for row in rows:
        assert row["error"] < 0.01
        assert row["tb_s"] == pytest.approx(row["bytes"] / 2e6, abs=1e-3)
    maps = [row["bytes"] for row in rows if row["T"] == 1]
    assert maps[-1] == pytest.approx(sum(maps[1:-1]), rel=0.02), "what follows attention is the last three"


def test_experts_that_are_chosen_count() -> None:
    one, many = measure(["small mixture"], ["mxfp4"], [1, 64])["rows"]
    assert (one["kernel"], one["model"], one["format"]) == ("8 of 8 experts", "small mixture", "mxfp4")
    assert one["error"] < 0.01
    assert many["bytes"] == pytest.approx(one["bytes"] + 63 * 2 * 256 * 2, rel=1e-6)


def test_a_format_that_does_not_fit_one_model_is_left_out_and_named() -> None:
    result = measure(["small mixture", "gpt-oss-20b"], ["int4"], [1])
    assert {row["model"] for row in result["rows"]} == {"small mixture"}
    assert result["left_out"] == ["int4 has groups of 128 inputs; gpt-oss-20b has rows of 2880"]


def test_time_that_is_over_ends_it() -> None:
    assert measure(["small"], ["int4"], [1], deadline=-1)["rows"] == []


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("small", "int5", "int5.*is not one of int4, int4-zeros"),
        ("none", "int4", "none.*is not one of"),
        ("gpt-oss-20b", "int4", "int4 has groups of 128 inputs; gpt-oss-20b has rows of 2880"),
    ],
)
def test_what_cannot_be_measured_is_said_before(model: str, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        measure([model], [name], [1])
