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
from octavo.types import AUDIO_DETAILS

logger = logging.getLogger(__name__)

GRAPH_PIXELS = 1 << 21
"""Of an image, or of several sizes together, whose graphs are kept. A tower's kernels for more pixels take a GPU longer
than the host to launch them."""
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
        sizes: tuple[int, int],
        form: WeightFormat,
        scaling: tuple[Sequence[float], Sequence[float]],
    ) -> None:
        """``sizes``: number of slots, and bytes that graphs of the tower may take. ``scaling``: mean and deviation of
        each colour, by which pixels are normalised."""
        num_slots, self._most_bytes = sizes
        width = (1 + config.num_deep) * config.hidden_size
        self.table = torch.zeros(num_slots, width, dtype=form.dtype, device=form.device)
        self._tower, self._scaling = tower, scaling
        self.placeholders = config.placeholders
        self._seen = Counter[Form]()
        self._inputs: dict[Form, tuple[Tensor, Tensor]] = {}
        """Slots and pixels, at places that the graph of a form reads."""
        self._graphs: Graphs[Form] | None = None
        self._num_bytes = 0
        """Of the graphs captured so far."""
        self._plain = set[Form]()
        """Sizes whose capture failed."""

    def execute(self, message: EncodeImages) -> Reply[None]:
        """Compute the embeddings of images."""
        try:
            with torch.inference_mode(), backend_of(self.table.device.type).torch_threads():
                for image in message.images:
                    self._encode(image)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            logger.exception("a tower failed")
            return FailedReply(RunnerError(f"the tower for images or audio failed: {type(error).__name__}: {error}"))
        return Done(None)

    def use_graphs(self) -> None:
        """From now on, launch a tower's kernels as one graph where images of a size come again."""
        if self._most_bytes:
            self._graphs = Graphs(self._repeat, nullcontext)

    def forget_graphs(self) -> None:
        """Free the memory of graphs, while none runs."""
        if self._graphs is not None:
            self._graphs.clear()
            self._inputs.clear()
            self._num_bytes = 0

    def _encode(self, image: ImageToEncode) -> None:
        form = Form(image.shape, image.details, len(image.slots))
        slots, pixels = np.frombuffer(image.slots, np.int64), np.frombuffer(image.pixels, np.uint8)
        inputs = self._uploaded(slots), self._uploaded(pixels).view(*image.shape, 3)
        if self._graphs is not None and form in self._inputs:
            for place, given in zip(self._inputs[form], inputs, strict=True):
                place.copy_(given)
            self._graphs(form)
        elif self._graphs is not None and self._comes_again(form):
            self._capture(self._graphs, form, inputs)
        else:
            self._fill(form, *inputs)

    def _capture(self, graphs: Graphs[Form], form: Form, inputs: tuple[Tensor, Tensor]) -> None:
        """Compute an image, and keep a graph for others of its size."""
        torch.cuda.empty_cache()
        before, self._inputs[form] = torch.cuda.memory_reserved(self.table.device), inputs
        try:
            graphs(form)
        except RuntimeError:
            logger.warning("images of %s are computed without a CUDA graph, more slowly", form.shape, exc_info=True)
            del self._inputs[form]
            self._plain.add(form)
            self._fill(form, *inputs)
        self._num_bytes += max(0, torch.cuda.memory_reserved(self.table.device) - before)

    def _comes_again(self, form: Form) -> bool:
        """Whether a graph is to be captured for images of a size: it was seen before, as the first may be the last, and
        there is memory. Audio has too many lengths."""
        num_pixels = math.prod(form.shape)
        needed = self._most_bytes * num_pixels // GRAPH_PIXELS
        if form.details == AUDIO_DETAILS or form in self._plain or self._num_bytes + needed > self._most_bytes:
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
