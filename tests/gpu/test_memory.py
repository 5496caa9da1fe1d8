"""What a discarded engine has held is there for the next one of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.gpu.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_engines_one_after_another_have_the_same_cache(tmp_path: Path) -> None:
    """Each takes most of the device's memory, in one piece, in which the weights of the next one must not lie."""
    write_checkpoint(tmp_path, "llama")
    sizes = []
    for _ in range(3):
        llm = LLM(str(tmp_path), gpu_memory_utilization=0.8)
        assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
        sizes.append(llm.info.num_kv_blocks)
        llm.close()
        del llm
    assert min(sizes) > 0.95 * max(sizes)
