"""Weights of 8 bits times rows rounded to their type on a GPU: graphs with programmatic dependent launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.linear import Fused
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits
from tests.models.test_architectures import SETTINGS
from tests.models.test_quantised import PROMPT, checkpoint, logprobs
from tests.ops.triton.test_scaled_linear import EPS, NUMBERS, random_values, rounded
from tests.quant.writers import compressed, quantise, replace_matrices

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
)


@pytest.mark.parametrize("T", [1, 16, 64, 300])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(number: torch.dtype, T: int) -> None:
    from octavo.ops import scaled_linear

    shapes = [(512, 512), (512, 512), (2048, 512), (512, 1024)]
    layers = [[random_values(*shape, number) for shape in shapes] for _ in range(6)]
    start_TD, norm_D = torch.randn(T, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16() + 0.5
    x_TD = torch.empty_like(start_TD)

    def run() -> Tensor:
        x = x_TD.copy_(start_TD)
        for qkv, o, gate_up, down in layers:
            attended = scaled_linear(x, qkv, Fused(norm_K=norm_D, eps=EPS))
            x = scaled_linear(attended, o, Fused(residual_TN=x))
            inner = scaled_linear(x, gate_up, Fused(norm_K=norm_D, eps=EPS, activation="silu"))
            x = scaled_linear(inner, down, Fused(residual_TN=x))
        return x

    assert assert_a_graph_gives_the_same_bits(run, x_TD, replays=30).isfinite().all()


@pytest.mark.parametrize("T", [1, 40, 90])
def test_matrices_of_w8a8_checkpoints_multiply_several_rounded_rows(T: int) -> None:
    from octavo.quant.stored.int_group_weight import GroupedStored
    from octavo.quant.stored.scaled import ScaledWeight
    from octavo.quant.stored.stored_weight import WeightFormat

    codes_NK, scales_N1 = torch.randint(-127, 128, (512, 256), dtype=torch.int8), torch.rand(512, 1) * 0.01 + 0.01
    stored = GroupedStored(codes_NK, scales_N1, None, 8, rounds_activations=True)
    weight = stored.pack(WeightFormat(torch.bfloat16, torch.device("cuda"), packs=True))
    assert isinstance(weight, ScaledWeight)
    assert weight.format == "int8"
    x_TK = torch.randn(T, 256, device="cuda").bfloat16()
    exact = rounded(x_TK, torch.int8 if T > 1 else None) @ (codes_NK.double() * scales_N1).cuda().T
    assert (weight.apply(x_TK).double() - exact).norm() < 4e-3 * exact.norm()
    assert (rounded(x_TK, torch.int8) - x_TK).norm() < 0.02 * x_TK.norm()


def test_a_w8a8_checkpoint_gives_nearly_the_logits_of_its_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated in float32, the rounding of activations moves log-probabilities by 0.008."""
    torch.manual_seed(0)
    writer = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    activations = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
    writer.config["config_groups"]["group_0"]["input_activations"] = activations
    source, folder, plain = (tmp_path / kind for kind in ("source", "quantised", "plain"))
    replace_matrices(checkpoint(source, "llama/biases"), plain, quantise(source, folder, writer))
    exact, _ = logprobs(plain, dtype="float32")
    monkeypatch.setitem(SETTINGS, "device", "cuda")
    found, _ = logprobs(folder, dtype="bfloat16")
    assert (found - exact)[: len(PROMPT) - 1].abs().nanmean() < 0.05
