"""Quantised checkpoints through the engine with weights packed as for GPUs, computed by the references of the ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.quant.stored import packed
from tests.models.test_quantised import checkpoint, logprobs
from tests.quant.writers import compressed, fp8, gptq, quantise, replace_matrices
from tests.tiers import one_in

INT = {"type": "int", "strategy": "group", "group_size": 32}
FORMATS = {
    "gptq, in activation order": gptq(4, 32, has_zeros=True, is_ordered=True),
    "int4, zeros": compressed("pack-quantized", num_bits=4, **INT, symmetric=False),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8": fp8(),
    "fp8, blocks": fp8(32, 32),
    "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}


@one_in(5)
@pytest.mark.parametrize("row", ["llama/biases", "qwen3_moe/normalised"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_groups_give_the_logits_of_their_matrices(
    name: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    source, folder, plain = (tmp_path / kind for kind in ("source", "quantised", "plain"))
    for path in (source, folder, plain):
        path.mkdir()
    checkpoint(source, row)
    replace_matrices(source, plain, quantise(source, folder, FORMATS[name]))
    expected, same = logprobs(plain, dtype="float32")
    monkeypatch.setattr(packed, "REFERENCE", "none")
    packed_shapes = []
    pack = packed.PackedGroups.pack
    monkeypatch.setattr(packed.PackedGroups, "pack", lambda *args: packed_shapes.append(args) or pack(*args))
    found, answer = logprobs(folder, kv_cache_dtype="float32")
    assert packed_shapes
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, equal_nan=True)
    assert answer == same
