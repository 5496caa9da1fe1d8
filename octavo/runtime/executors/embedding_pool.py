"""The pool of image embeddings on the device, and the tower that fills it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, RunnerError
from octavo.models.vision.tower import Pixels, Tower, VisionConfig
from octavo.ops.device_backend import backend_of
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.replies import Done, FailedReply
from octavo.steps.messages import EncodeImages, ImageToEncode, Reply

logger = logging.getLogger(__name__)


def pool_bytes(config: VisionConfig, num_slots: int, form: WeightFormat) -> int:
    """Bytes of the pool."""
    return num_slots * (1 + config.num_deep) * config.hidden_size * form.dtype.itemsize


class EmbeddingPool:
    """Embeddings by slot. Which slot holds what is decided elsewhere."""

    def __init__(
        self,
        config: VisionConfig,
        tower: Tower,
        num_slots: int,
        form: WeightFormat,
        scaling: tuple[Sequence[float], Sequence[float]],
    ) -> None:
        """``scaling``: mean and deviation of each colour, by which pixels are normalised."""
        width = (1 + config.num_deep) * config.hidden_size
        self.table = torch.zeros(num_slots, width, dtype=form.dtype, device=form.device)
        self._tower, self._scaling = tower, scaling
        self.placeholders = config.placeholders

    def execute(self, message: EncodeImages) -> Reply[None]:
        """Compute the embeddings of images."""
        try:
            with torch.inference_mode(), backend_of(self.table.device.type).torch_threads():
                for image in message.images:
                    self._encode(image)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            logger.exception("the vision tower failed")
            return FailedReply(RunnerError(f"the vision tower failed: {type(error).__name__}: {error}"))
        return Done(None)

    def _encode(self, image: ImageToEncode) -> None:
        slots = self._uploaded(np.frombuffer(image.slots, np.int64))
        pixels = self._uploaded(np.frombuffer(image.pixels, np.uint8)).view(*image.shape, 3)
        rows = self._tower(Pixels(pixels, image.details, *self._scaling))
        if len(rows) != len(slots):
            raise ValueError(f"the tower made {len(rows)} embeddings of an image that has {len(slots)} tokens")
        self.table[slots] = rows.to(self.table.dtype)

    def _uploaded(self, numbers: npt.NDArray[Any]) -> Tensor:
        """On the device, without waiting for the step that it still computes."""
        on_host = torch.from_numpy(numbers.copy())
        if self.table.is_cuda:
            on_host = on_host.pin_memory()
        return on_host.to(self.table.device, non_blocking=True)
