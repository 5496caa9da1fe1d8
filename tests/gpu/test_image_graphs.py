"""Towers that run as CUDA graphs: the embeddings of each image, at their places. Skipped where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.build.build_vision import runs_ahead
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.embedding_pool import EmbeddingPool
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


def test_images_of_a_size_share_a_graph() -> None:
    """As far as there is memory; they are captured again after a sleep."""
    random, tower = np.random.default_rng(0), Tower(waits=False)
    form = WeightFormat(torch.float32, torch.device("cuda"))
    pool = EmbeddingPool(VisionConfig(hidden_size=D), tower, (64, 32 << 20), form, ([0.0] * 3, [1.0] * 3))
    pool.use_graphs()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for number in range(60):
            rows = 2 + number % 20
            pixels = random.integers(0, 256, (rows, 5, 3), dtype=np.uint8)
            slots = random.permutation(64)[:rows].tolist()
            encode(pool, pixels, slots)
            expected = pixels.astype(np.float32).mean(1)
            np.testing.assert_allclose(pool.table[slots].cpu().numpy(), expected, rtol=1e-6)
        before = tower.num_calls
        encode(pool, pixels, slots)
        assert tower.num_calls == before
        pool.forget_graphs()
        encode(pool, pixels, slots)
        assert tower.num_calls > before
    np.testing.assert_allclose(pool.table[slots].cpu().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("waits", [False, True])
def test_a_tower_that_waits_for_the_device_is_found(waits: bool) -> None:
    image = Pixels(torch.zeros(1, 4, 5, 3, dtype=torch.uint8, device="cuda"), (), [0.0] * 3, [1.0] * 3)
    assert runs_ahead(Tower(waits), image) is not waits
    torch.rand(3, device="cuda")
