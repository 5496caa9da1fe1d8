"""Builds the part of an engine that takes images or audio: towers, the pool of embeddings, what the scheduler knows."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.engine.sequence_images import ImageSettings
from octavo.errors import CheckpointError
from octavo.images.audio import RATE, AudioForm
from octavo.images.families import read_processor
from octavo.images.processors import ImageProcessor
from octavo.models.meta_model import Outline
from octavo.models.model_config import ModelConfig
from octavo.models.registry import CausalLM
from octavo.models.vision.tower import Pixels, Tower, VisionConfig
from octavo.models.vision.towers import LoadedTower, connect, load_tower, read_vision
from octavo.plugins import GPU
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.embedding_pool import GRAPH_PIXELS, EmbeddingPool, pool_bytes
from octavo.steps.limits import StepLimits
from octavo.types import AUDIO_DETAILS
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.gguf.gguf_checkpoint import ProjectorTensors
from octavo.weights.gguf.gguf_reader import vocabulary
from octavo.weights.gguf.projector import open_projector

logger = logging.getLogger(__name__)

SQUARE, LARGEST = 1024, 16_384
"""Side of the image that is measured, in pixels, and of one that no family leaves as large."""
SHAPES = (SQUARE, SQUARE), (1600, 1200), (1200, 1600), (1920, 1080), (2400, 600)
"""Sizes of images, one of which has the most tiles of a family whose images are tiles."""
MOST_SLOTS = {"cpu": 8192, GPU: 16_384}
"""Slots of the pool by default, if contexts are as long: all images of a request must fit."""


class Vision:
    """The loaded tower of an engine.

    It is loaded before the memory is divided, so that its weights and the pool are counted; the pool is made, and the
    decoder connected to it, once the decoder's own cache is there.
    """

    def __init__(
        self,
        loaded: LoadedTower,
        processor: ImageProcessor,
        num_slots: int,
        form: WeightFormat,
        temporary: int,
        of_graphs: int,
    ) -> None:
        """``temporary``: bytes that computing an image takes. ``of_graphs``: those that graphs of a tower may keep."""
        self.loaded = loaded
        self._processor, self._form = processor, form
        config = loaded.config
        self.settings = ImageSettings(num_slots, config.num_axes, config.is_bidirectional, config.longest)
        self._of_graphs = of_graphs
        self.num_bytes = pool_bytes(config, num_slots, form) + temporary + of_graphs
        """Bytes of the pool, of graphs, and of what an image takes while it is computed."""

    @property
    def weight_bytes(self) -> Counter[str]:
        """Bytes of the tower's weights, by format."""
        return Counter(self.loaded.bytes_by_format)

    def connect(self, model: CausalLM) -> EmbeddingPool:
        """The pool, and a decoder that knows the positions of images."""
        connect(model, self.loaded.config, self._form)
        scaling = self._processor.mean, self._processor.deviation
        sizes = self.settings.num_slots, self._of_graphs
        return EmbeddingPool(self.loaded.config, self.loaded.tower, sizes, self._form, scaling)

    def limited(self, limits: StepLimits) -> StepLimits:
        """The limits of steps that may have images."""
        settings = self.settings
        longest = settings.longest if settings.is_bidirectional else 0
        return limits._replace(longest_image=longest, num_axes=settings.num_axes, num_image_slots=settings.num_slots)


def load_vision(
    config: EngineConfig, path: Path, checkpoint: Checkpoint, model: ModelConfig, form: WeightFormat
) -> Vision | None:
    """Load the tower of a checkpoint; ``None`` if the model is to read text alone, or has none that is known.

    With the format of an outline, from headers alone, but for a GGUF file of its own. Raises ``CheckpointError``.
    """
    if config.model.language_model_only or config.model.backend != "octavo":
        return None
    values: Mapping[str, Any] = checkpoint.config
    source: TensorSource = checkpoint if form.outlined_for is None else Outline(checkpoint)
    if (projector := open_projector(path)) is not None:
        source = ProjectorTensors(projector)
        values = projector.config(values, vocabulary(path))
    found = read_vision(values)
    processor = None if found is None else read_processor(config.model.config_folder(path))
    if found is None or processor is None:
        return None
    if found.is_bidirectional:
        found = dataclasses.replace(found, longest=found.longest or processor.most_tokens)
    check(found, model)
    known = {token for token in (processor.token, *found.placeholders) if token < model.vocab_size}
    found = dataclasses.replace(found, placeholders=tuple(sorted(known)))
    loaded = load_tower(values, found, source, form)
    longest = config.model.max_model_len or model.max_position_embeddings
    num_slots = max(found.longest, min(longest, MOST_SLOTS[form.kernel_device]))
    logger.info(
        "the model takes images or audio: %d M parameters, %d slots", loaded.num_parameters // 1_000_000, num_slots
    )
    temporary, of_graphs = measured_bytes(loaded, processor, num_slots, form)
    return Vision(loaded, processor, num_slots, form, temporary, 0 if config.model.enforce_eager else of_graphs)


def measured_bytes(
    loaded: LoadedTower, processor: ImageProcessor, num_slots: int, form: WeightFormat
) -> tuple[int, int]:
    """Bytes of a GPU that computing an image takes, at most: what a square takes, by its embeddings where images differ
    in size. And those that graphs may keep, 0 for a tower that waits for the device and cannot be captured. Towers use
    libraries that are slow when first called, which is done here, before the first request."""
    if form.device.type != GPU:
        return 0, 0
    of_audio = audio_bytes(loaded.tower, processor.limited(num_slots).audio, form)
    if not processor.takes_images:
        return of_audio, 0
    from PIL import Image  # only here: most models take no images

    from octavo.images.tiling import joined, size_of, tiled

    settings = processor.settings_for("auto")
    tiles, details = tiled(Image.new("RGB", (SQUARE, SQUARE)), settings)
    shape, found = joined(tiles)

    def num_colours(image: Image.Image) -> int:
        return sum(3 * tile.width * tile.height for tile in tiled(image, settings)[0])

    pixels = torch.from_numpy(np.frombuffer(found, np.uint8).copy().reshape(*shape, 3)).to(form.device)
    before = torch.cuda.memory_allocated(form.device)
    torch.cuda.reset_peak_memory_stats(form.device)
    image = Pixels(pixels, details, processor.mean, processor.deviation)
    with torch.inference_mode():
        made = len(loaded.tower(image))
        taken = torch.cuda.max_memory_allocated(form.device) - before
        of_graphs = taken * GRAPH_PIXELS // SQUARE**2 if runs_ahead(loaded.tower, image) else 0
    torch.cuda.empty_cache()
    if not processor.side:
        most = max(num_colours(Image.new("RGB", size)) for size in SHAPES)
        return max(of_audio, -(-taken * max(most, pixels.numel()) // pixels.numel())), of_graphs
    rows, columns = size_of(LARGEST, LARGEST, processor.limited(num_slots).settings_for("auto"))
    of_largest = taken * max(1, -(-min(num_slots, rows * columns // processor.side**2) // made))
    return max(of_audio, of_largest), of_graphs


def audio_bytes(tower: Tower, audio: AudioForm | None, form: WeightFormat) -> int:
    """Bytes of a GPU that the longest audio and its computation take; 0 for a model that takes none."""
    if audio is None:
        return 0
    before = torch.cuda.memory_allocated(form.device)
    torch.cuda.reset_peak_memory_stats(form.device)
    samples = torch.zeros(1, 1, int(audio.most_seconds * RATE), 3, dtype=torch.uint8, device=form.device)
    with torch.inference_mode():
        tower(Pixels(samples, AUDIO_DETAILS, (), ()))
    taken = torch.cuda.max_memory_allocated(form.device) - before
    torch.cuda.empty_cache()
    return taken


def runs_ahead(tower: Tower, image: Pixels) -> bool:
    """Whether the host does not wait for the device while it starts this computation."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower(image)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def connected(vision: Vision | None, model: CausalLM) -> tuple[EmbeddingPool | None, ImageSettings | None]:
    """The pool of embeddings and what the scheduler knows of it; ``None`` for a model that takes no images."""
    return (None, None) if vision is None else (vision.connect(model), vision.settings)


def check(found: VisionConfig, model: ModelConfig) -> None:
    """Raise ``CheckpointError`` if tower and decoder do not fit together."""
    if found.hidden_size != model.hidden_size:
        raise CheckpointError(
            f"vision_config: embeddings of images have {found.hidden_size} numbers, those of tokens {model.hidden_size}"
        )
    if found.num_axes and model.rope_sets is not None:
        raise CheckpointError(
            "rope_parameters: frequencies depend on a text's length, and positions of images have axes"
        )
    windows = [window for window in model.windows if window]
    if found.is_bidirectional and windows and min(windows) < found.longest:
        raise CheckpointError(f"sliding_window: {min(windows)} is less than an image's {found.longest} tokens")
