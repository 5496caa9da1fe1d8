"""Weights that a trainer on another CUDA device broadcasts through NCCL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM
from octavo.types import AskReceiver, DropTensors, JoinGroup, ReceiveTensors, TakeWeights, WeightOrder
from tests.llm.test_weight_updates import SETTINGS, changed, said, start_trainer
from tests.models.families import make_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

ON_GPU: dict[str, Any] = {
    **SETTINGS,
    "device": "cuda",
    "block_size": 16,
    "gpu_memory_utilization": 1.0,
    "max_num_seqs": 4,
    "batch_invariant": True,
}


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}], ids=str)
def test_weights_that_a_trainer_broadcasts(settings: dict[str, Any], tmp_path: Path) -> None:
    """As tensors, then as one buffer of bytes: each time the bits are those of a fresh start with them."""
    make_checkpoint(tmp_path / "a", "llama/gqa", vocab_size=264)
    second = changed(tmp_path / "a", tmp_path / "b")
    settings = {**ON_GPU, "dtype": "bfloat16", **settings}
    tensors = load_file(second / "model.safetensors")
    names, types = list(tensors), [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    announced = ReceiveTensors(names, types, [tuple(tensor.shape) for tensor in tensors.values()])
    with LLM(str(second), **settings) as fresh:
        expected = said(fresh)
    trainer, port = start_trainer(second, "cuda:1")
    try:
        with LLM(str(tmp_path / "a"), **settings) as llm:
            before, engine = said(llm), llm.engine

            def received(order: WeightOrder) -> None:
                is_busy = engine.order_weights(order)
                while is_busy:
                    time.sleep(0.01)
                    is_busy = engine.order_weights(AskReceiver())

            received(JoinGroup("127.0.0.1", port, 1, 2, "nccl", "one"))
            for is_packed in (False, True):
                received(msgspec.structs.replace(announced, is_packed=is_packed))
                assert said(llm) == before
                engine.order_weights(TakeWeights())
                assert said(llm) == expected
                engine.order_weights(TakeWeights(str(tmp_path / "a")))
            assert trainer.wait(60) == 0
            assert said(llm) == before
            engine.order_weights(DropTensors(leaves_group=True))
    finally:
        trainer.kill()
        trainer.wait()
