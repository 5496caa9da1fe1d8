"""Other weights for a loaded model, in place of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import CheckpointError
from octavo.models.in_place import overwrite
from octavo.models.meta_model import outline
from octavo.models.model_adapters import merge
from octavo.models.model_config import ModelConfig
from octavo.models.registry import LoadedModel, load_model
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.steps.messages import LoadWeights
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.tensor_file import Updated


class WeightUpdates:
    """Writes the weights of a checkpoint over those of a model that was loaded from another of the same form.

    They are quantised, divided among ranks and merged with an adapter as when the model was loaded. LoRA adapters stay
    as they are, and so does a drafter, but for parts that ``drafter`` loads from the model's own checkpoint.
    """

    def __init__(
        self,
        settings: ModelSettings,
        config: ModelConfig,
        checkpoint: Checkpoint,
        form: WeightFormat,
        loaded: LoadedModel,
        collective: Collective = SINGLE_RANK,
        drafter: Callable[[TensorSource], None] = lambda _: None,
    ) -> None:
        self._settings, self._checkpoint, self._form = settings, checkpoint, form
        self._config = dataclasses.replace(config, routes=None)  # as it was when the model was loaded
        self._loaded, self._collective, self._drafter = loaded, collective, drafter
        self._received: set[str] = set()
        """Names of tensors that are not those of ``_checkpoint``."""

    def load(self, message: LoadWeights) -> None:
        """See ``LoadWeights``; any error but a ``CheckpointError`` leaves weights that are of no use."""
        checkpoint = self._checkpoint
        if message.folder:
            checkpoint = open_checkpoint(Path(message.folder), config_folder=self._settings.hf_config_path)
        source = self._source(checkpoint, message.files)
        outline(self._config, source, self._form, self._collective.size)
        try:
            self._overwrite(source)
        except CheckpointError as error:
            raise RuntimeError(f"weights were written over in part: {error}") from error
        self._checkpoint = checkpoint
        self._received = source.updated if isinstance(source, Updated) else set()

    def _source(self, checkpoint: Checkpoint, files: Sequence[str]) -> TensorSource:
        """Raises ``CheckpointError`` for weights that would not have the form of those that are loaded."""
        if not files:
            own, names = self._checkpoint, checkpoint.names() & self._checkpoint.names()
            if other := [name for name in sorted(names) if own.describe(name)[0] != checkpoint.describe(name)[0]]:
                raise CheckpointError(f"tensor {other[0]} is of another type than before")
            return checkpoint
        source = Updated(checkpoint, files)
        if checkpoint is self._checkpoint and (missing := sorted(self._received - source.updated)):
            raise CheckpointError(f"tensor {missing[0]} is missing, which an earlier update had")
        return source

    def _overwrite(self, source: TensorSource) -> None:
        old, form = self._loaded, self._form
        assert old.kept is not None, "a model of another backend"
        new = load_model(self._config, source, form, collective=self._collective, kept=old.kept.again())
        if self._settings.merge_lora:
            for path in parse_lora_modules(self._settings.lora_modules).values():
                merge(Path(path), new.maps, form)
        overwrite(old.model, new.model)
        overwrite(old.kv_scales, new.kv_scales)
        self._drafter(source)
