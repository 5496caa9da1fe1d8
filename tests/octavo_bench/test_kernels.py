"""``octavo bench kernels``: random weights of each format, caches and states, and the least time of every kernel; times
are made up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.ops.dispatch import OPS, Kernel
from octavo.ops.linear.linear import PLAIN, Fused
from octavo_bench.cli import results
from octavo_bench.device import attention_cases, ceilings, kernels, measured_case, product_cases, recurrences, row_cases
from octavo_bench.device.product_cases import FORMS, NumberForm
from octavo_bench.records.report_tables import kernel_shares, render
from octavo_fleet.sim.shapes import SHAPES

SHAPE = {
    "small": SHAPES["tiny"] | {"vocab_size": 512},
    "small mixture": SHAPES["qwen3-30b-a3b"] | {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8},
    "small latents": SHAPES["deepseek-v2-lite"] | {"num_attention_heads": 2, "kv_lora_rank": 32},
    "small states": SHAPES["qwen3.5-9b"],
}
LIMITS = {"read_tb_s": 4.0, "matmul_tflop_s": 700.0, "fp8_tflop_s": 1400.0, "int8_tflop_s": 1300.0}


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def microseconds(calls: Sequence[Callable[[], object]], with_pdl: bool) -> float:
        for call in calls:
            call()
        return 2.0

    for module in (attention_cases, measured_case, product_cases, recurrences, row_cases):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    for module in (attention_cases, measured_case, product_cases, row_cases):
        monkeypatch.setattr(module, "ALONE_BYTES", 1)
    for module in (attention_cases, row_cases):
        monkeypatch.setattr(module, "MOST_SEQUENCES", 4)
    monkeypatch.setattr(attention_cases, "BLOCK", 16)
    monkeypatch.setattr(kernels, "CONTEXTS", (40,))
    monkeypatch.setattr(kernels, "microseconds", microseconds)
    monkeypatch.setattr(kernels, "compiling", contextlib.nullcontext)
    monkeypatch.setattr(kernels, "start_compilers", lambda: None)
    monkeypatch.setattr(ceilings, "measure", lambda: LIMITS)
    monkeypatch.setitem(recurrences.LAYERS, "small states", lambda: recurrences.delta_layer(1, 2, 16))
    for name, shape in SHAPE.items():
        monkeypatch.setitem(SHAPES, name, shape)


def measured(models: list[str], formats: list[str], rows: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kernels.measure(models, formats, rows, lambda line: None)["rows"]
    assert not [row["failed"] for row in found if "failed" in row]
    return found


@pytest.mark.parametrize("name", FORMS)
def test_outputs_have_about_unit_variance(name: str) -> None:
    form = FORMS[name]
    weight = form.weight(64, 512)
    assert 0.5 < product_cases._unpacked(weight).float().std().item() * 512**0.5 < 2
    if isinstance(form, NumberForm):
        assert form.weight(64, 512).scales_GN.element_size() == {"q4_k": 4, "q6_k": 4}.get(name, 2)


@pytest.mark.parametrize("name", ["bf16", "fp8-rows", "int8-rows", "int4", "q4_k", "nvfp4"])
def test_figures_of_a_layer(name: str) -> None:
    rows = [row for row in measured(["small"], [name], [1, 20]) if row["family"] == "linear"]
    kernels_of_few = [("o,", 1)] if isinstance(FORMS[name], NumberForm) else []
    assert [(row["kernel"].split()[0], row["T"]) for row in rows] == [
        *((kernel, T) for kernel in ("qkv", "o", "gate_up", "down") for T in (1, 20)),
        *kernels_of_few,
    ]
    for row in rows:
        assert row["error"] < (0.05 if name.endswith("rows") else 0.01)
        floor = max(row["bytes"] / 4e6, row["flops"] / 1e6 / LIMITS[FORMS[name].rate])
        assert row["floor_microseconds"] == pytest.approx(floor, abs=0.01)
        assert row["of_floor"] == pytest.approx(floor / row["microseconds"], abs=1e-3)
    if kernels_of_few:
        maps = [row["bytes"] for row in rows if row["T"] == 1]
        assert maps[-1] == pytest.approx(sum(maps[1:-1]), rel=0.02), "what follows attention is the last three"


@pytest.fixture
def strict_linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that takes weights and rows of one type, as those for GPUs."""

    def run(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> Tensor:
        assert x_TK.dtype == weight_NK.dtype
        return ops.linear.reference(x_TK, weight_NK, fused)

    monkeypatch.setattr(ops.linear, "kernels", [Kernel("strict", "cpu", 99, lambda dtype: None, run)])
    OPS.forget_choices()
    yield
    OPS.forget_choices()


@pytest.mark.usefixtures("strict_linear")
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_experts_that_are_chosen_count(name: str) -> None:
    rows = kernels.measure(["small mixture"], [name], [1, 64], lambda line: None)["rows"]
    one, many = (row for row in rows if row["family"] == "experts")
    assert (one["kernel"], one["model"], one["format"]) == ("8 of 8 experts, 256 to 128", "small mixture", name)
    assert one["error"] < 0.01
    assert many["bytes"] == pytest.approx(one["bytes"] + 63 * 2 * 256 * 2, rel=1e-6)


def test_every_family_is_in_one_table() -> None:
    rows = measured(list(SHAPE), ["bf16"], [1, 3])
    attended = {(row["family"], row["format"]): row for row in rows if "attention" in row["family"] and row["T"] == 3}
    shape = SHAPE["small"]
    kv_heads = shape["num_key_value_heads"]
    cached = 2 * kv_heads * 40 * (shape["hidden_size"] // shape["num_attention_heads"])
    assert attended["decode attention", "bf16"]["bytes"] - attended["decode attention", "fp8"]["bytes"] == 3 * cached
    several, one = (attended[f"{kind} attention", "bf16"] for kind in ("decode", "prefill"))
    assert several["bytes"] - one["bytes"] == 2 * 2 * cached
    assert several["flops"] / one["flops"] == pytest.approx(40 / 39), "a prompt's rows do not see each other's future"
    states = [row["bytes"] for row in rows if row["family"] == "recurrence" and row["T"] == 3]
    assert states[0] - states[1] == 2 * 2 * 4 * 2 * 16 * 16
    table = kernel_shares({"rows": rows}).splitlines()
    assert table[0].startswith("| model | kernel | format | 1 row: ")
    families = ["linear", "head", "experts", "router", "decode", "prefill", "latent", "recurrence", "sampling", "rows"]
    assert {line.split("|")[2].split()[0].strip(":") for line in table[2:]} == set(families)
    (prompt,) = (line for line in table if "rows of one sequence" in line)
    assert prompt.split("|")[4].strip() == "-", "a row of one sequence is in another line"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_command_keeps_a_record_and_shows_the_table(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    monkeypatch.setattr(results, "require_cuda", lambda measurement: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert main(["bench", "kernels", "small latents", "--rows", "1,2", "--output", str(file)]) == 0
    shown = capsys.readouterr().out
    assert ("| latent attention: 2 heads, latents of 32, 40 positions |" in shown) != is_terminal
    assert "latent attention" in shown
    assert "| 2 rows: µs / floor, share |" in render(file)


def test_a_kernel_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "rms_norm", fail)
    rows = kernels.measure(["small"], ["bf16"], [1], lambda line: None)["rows"]
    assert [row["failed"] for row in rows if "failed" in row] == ["RuntimeError: no such kernel"]
    assert "| failed |" in kernel_shares({"rows": rows})


def test_a_format_that_does_not_fit_one_model_is_left_out_and_named() -> None:
    result = kernels.measure(["small mixture", "gpt-oss-20b"], ["int4"], [1], lambda line: None)
    assert {row["model"] for row in result["rows"] if row["family"] == "experts"} == {"small mixture"}
    assert result["left_out"] == ["int4 has groups of 128 inputs; gpt-oss-20b has rows of 2880"]


def test_time_that_is_over_ends_it() -> None:
    assert kernels.measure(["small"], ["int4"], [1], lambda line: None, deadline=-1)["rows"] == []


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("small", "int5", "int5.*is not one of bf16, fp8-rows"),
        ("none", "int4", "none.*is not one of"),
        ("qwen3.5-35b-a3b", "int4", "recurrent state, qwen3.5-9b, .* are known, not qwen3.5-35b-a3b"),
        ("gpt2", "int4", "no gated feed-forward part"),
    ],
)
def test_what_cannot_be_measured_is_said_before(model: str, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kernels.measure([model], [name], [1], lambda line: None)
