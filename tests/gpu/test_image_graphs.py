"""Towers that run as CUDA graphs: the embeddings of each image, at their places. Skipped where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.embedding_pool import MOST_FORMS, EmbeddingPool
from octavo.steps.messages import EncodeImages, ImageToEncode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
D = 3


class Tower:
    """An embedding is a row's mean colour."""

    def __init__(self, waits: bool) -> None:
        self.waits, self.num_calls = waits, 0

    def __call__(self, image: Pixels) -> Tensor:
        self.num_calls += 1
        if self.waits:
            image.pixels.max().item()
        return image.pixels[0].float().mean(1)


def encode(pool: EmbeddingPool, pixels: np.ndarray, slots: list[int]) -> None:
    image = ImageToEncode(np.array(slots, np.int64).tobytes(), (1, *pixels.shape[:2]), pixels.tobytes())
    assert pool.execute(EncodeImages([image])).wait() is None


@pytest.mark.parametrize("waits", [False, True])
def test_images_of_a_size_share_a_graph(waits: bool) -> None:
    """One that waits for the device cannot be captured, and runs without."""
    random, tower = np.random.default_rng(0), Tower(waits)
    form = WeightFormat(torch.float32, torch.device("cuda"))
    pool = EmbeddingPool(VisionConfig(hidden_size=D), tower, 64, form, ([0.0] * 3, [1.0] * 3))
    pool.use_graphs()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for number in range(3 * MOST_FORMS):
            rows = 2 + number % (MOST_FORMS + 2)
            pixels = random.integers(0, 256, (rows, 5, 3), dtype=np.uint8)
            slots = random.permutation(64)[:rows].tolist()
            encode(pool, pixels, slots)
            expected = pixels.astype(np.float32).mean(1)
            np.testing.assert_allclose(pool.table[slots].cpu().numpy(), expected, rtol=1e-6)
        before = tower.num_calls
        encode(pool, pixels, slots)
        assert tower.num_calls == before + waits
        pool.forget_graphs()
        encode(pool, pixels, slots)
    np.testing.assert_allclose(pool.table[slots].cpu().numpy(), expected, rtol=1e-6)
