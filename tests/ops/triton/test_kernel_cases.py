"""The linear maps of models that kernels are measured on."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo_bench.device.kernel_cases import head_case, layer_cases


@pytest.mark.parametrize("name", ["qwen", "gpt2"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        layer_cases(name)


def test_matrices_of_a_model() -> None:
    assert [(case.N, case.K) for case in layer_cases("llama-3.1-8b")] == [
        (6144, 4096),
        (4096, 4096),
        (28_672, 4096),
        (4096, 14_336),
    ]
    assert (head_case("llama-3.1-8b").N, head_case("llama-3.1-8b").K) == (128_256, 4096)
    gemma = layer_cases("gemma-3-27b")
    assert [case.has_residual for case in gemma] == [False] * 4
    assert gemma[2].activation == "gelu_tanh"
