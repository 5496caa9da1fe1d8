"""The pool of image embeddings on the device, and the tower that fills it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, RunnerError
from octavo.models.vision.tower import Pixels, Tower, VisionConfig
from octavo.ops.device_backend import backend_of
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.graphs import Graphs
from octavo.runtime.replies import Done, FailedReply
from octavo.steps.messages import EncodeImages, ImageToEncode, Reply

logger = logging.getLogger(__name__)

GRAPH_PIXELS = 1 << 21
"""A tower's kernels for more pixels take a GPU longer than the host to launch them, and their results more memory."""
MOST_FORMS = 16
"""Sizes of images for which graphs are kept."""
MOST_SEEN = 1024
"""Sizes that are remembered as seen once."""


class Form(NamedTuple):
    """What decides which kernels compute an image."""

    shape: tuple[int, ...]
    details: tuple[int, ...]
    slot_bytes: int


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
        self._seen = Counter[Form]()
        self._inputs: dict[Form, tuple[Tensor, Tensor]] = {}
        """Slots and pixels, at places that the graph of a form reads."""
        self._graphs: Graphs[Form] | None = None

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

    def use_graphs(self) -> None:
        """From now on, launch a tower's kernels as one graph where images of a size come again."""
        self._graphs = Graphs(self._repeat, nullcontext)

    def forget_graphs(self) -> None:
        """Free the memory of graphs, while none runs."""
        if self._graphs is not None:
            self._graphs.clear()
            self._inputs.clear()

    def _encode(self, image: ImageToEncode) -> None:
        form = Form(image.shape, image.details, len(image.slots))
        slots, pixels = np.frombuffer(image.slots, np.int64), np.frombuffer(image.pixels, np.uint8)
        inputs = self._uploaded(slots), self._uploaded(pixels).view(*image.shape, 3)
        if self._graphs is None or not self._has_graph(form):
            self._fill(form, *inputs)
            return
        if form not in self._inputs and not self._runs_ahead(form, inputs):
            logger.info("the vision tower waits for the device: it runs without CUDA graphs")
            self._graphs = None
            return
        kept = self._inputs.setdefault(form, inputs)
        if kept is not inputs:
            for place, given in zip(kept, inputs, strict=True):
                place.copy_(given)
        self._graphs(form)

    def _runs_ahead(self, form: Form, inputs: tuple[Tensor, Tensor]) -> bool:
        """Compute an image; whether the host did not wait for the device meanwhile. A capture in which it does fails,
        and leaves torch's random numbers unusable."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._fill(form, *inputs)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
        else:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self._fill(form, *inputs)
        return False

    def _has_graph(self, form: Form) -> bool:
        """Whether an image is computed by a graph: of a size that was seen before, as the first may be the last."""
        if form in self._inputs:
            return True
        if math.prod(form.shape) > GRAPH_PIXELS or len(self._inputs) == MOST_FORMS:
            return False
        if len(self._seen) == MOST_SEEN:
            self._seen.clear()
        self._seen[form] += 1
        return self._seen[form] > 1

    def _repeat(self, form: Form) -> None:
        self._fill(form, *self._inputs[form])

    def _fill(self, form: Form, slots: Tensor, pixels: Tensor) -> None:
        rows = self._tower(Pixels(pixels, form.details, *self._scaling))
        if len(rows) != len(slots):
            raise ValueError(f"the tower made {len(rows)} embeddings of an image that has {len(slots)} tokens")
        self.table[slots] = rows.to(self.table.dtype)

    def _uploaded(self, numbers: npt.NDArray[Any]) -> Tensor:
        """On the device, without waiting for the step that it still computes."""
        on_host = torch.from_numpy(numbers.copy())
        if self.table.is_cuda:
            on_host = on_host.pin_memory()
        return on_host.to(self.table.device, non_blocking=True)
