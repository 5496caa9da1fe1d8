"""Loads the drafter of a speculative configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from octavo.build.device_settings import quant_method, weight_format
from octavo.config import EngineConfig
from octavo.engine.speculative.proposer import DeviceDrafts, NgramProposer, Proposer
from octavo.engine.speculative.suffix import SuffixProposer
from octavo.errors import CheckpointError, ConfigError
from octavo.models.drafters.dflash import DFlashModel, DFlashSettings
from octavo.models.drafters.eagle3 import Eagle3Head
from octavo.models.drafters.head import DraftHead
from octavo.models.drafters.mtp import MTPHead
from octavo.models.encoder import EncoderConfig
from octavo.models.in_place import overwrite
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.model_config import ModelConfig
from octavo.models.mtp_names import mtp_prefixes
from octavo.models.multimodal_text import TextPart
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.ops.collective import Collective
from octavo.ops.device_backend import is_gpu
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.drafting.drafter import Drafter
from octavo.runtime.drafting.drafters import BlockDrafter, HeadDrafter, ModelDrafter, WholeLogits
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.ranks.ranks import check_divides
from octavo.runtime.sharded_logits import part_of_vocabulary
from octavo.speculative_config import DFlash, DraftModel, Eagle3, Method, Ngram, OwnCheckpoint, Suffix, WithDrafter
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.hub import resolve_model

logger = logging.getLogger(__name__)


class LoadedDrafter(NamedTuple):
    """A drafter with its weights, before it has a cache."""

    cache: tuple[LayerCacheSpec, ...]
    num_bytes: int
    start: Callable[[KVStorage], Drafter | None]
    update: Callable[[TensorSource], None] = lambda _: None
    """Load again what comes from the model's own checkpoint, of other weights of the model."""


NO_DRAFTER = LoadedDrafter((), 0, lambda _: None)
"""What methods without a drafter have."""


class DraftTarget(NamedTuple):
    """The model that is drafted for."""

    loaded: LoadedModel
    config: ModelConfig
    form: WeightFormat
    collective: Collective
    """Its ranks, among which the drafter is divided, too."""


def make_proposer(method: Method) -> Proposer:
    """Where the drafts of a method come from, on the deciding side."""
    match method:
        case Ngram():
            return NgramProposer(method)
        case Suffix():
            return SuffixProposer(method)
        case DFlash():  # the block begins with the newest token
            return DeviceDrafts(method.num_speculative_tokens, method.num_speculative_tokens + 1)
        case _:
            return DeviceDrafts(method.num_speculative_tokens)


def find_drafter(
    method: Method | None, config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, device: torch.device
) -> Checkpoint | None:
    """The checkpoint of the drafter of a method that has one, which may be the model's own, ``checkpoint``.

    Called before the model's weights are loaded, which may take minutes: raises ``ConfigError`` or ``CheckpointError``
    for settings and checkpoints that do not go together, as far as can be seen without weights.
    """
    has_mtp = bool(mtp_prefixes(TextPart(checkpoint).names(), model.num_layers))
    has_streams = model.stream_size != model.hidden_size
    has_mtp = has_mtp and not has_streams  # MTP layers of such models are made in other ways
    if method is None and has_mtp:
        logger.info('the checkpoint has an MTP layer; --speculative-config \'{"method": "mtp"}\' drafts with it')
    if not isinstance(method, WithDrafter):
        return None
    name = method.__struct_config__.tag
    if config.model.decode_context_parallel_size > 1:
        raise ConfigError(f'speculative_config: "{name}" needs decode_context_parallel_size 1; "ngram" does not')
    if config.model.enable_dp_attention:
        raise ConfigError(f'speculative_config: "{name}" does not go with enable_dp_attention; "ngram" does')
    if config.model.pipeline_parallel_size > 1:
        raise ConfigError(f'speculative_config: "{name}" needs pipeline_parallel_size 1; "ngram" does not')
    if config.model.tensor_parallel_size > 1 and is_gpu(device):
        raise ConfigError(f'speculative_config: "{name}" needs tensor_parallel_size 1 on a GPU; "ngram" does not')
    if not isinstance(method, OwnCheckpoint):
        if not has_mtp:
            reason = "its MTP layers are not supported" if has_streams else "the model's checkpoint has no MTP layers"
            raise CheckpointError(f"speculative_config: {reason}")
        return checkpoint
    with _naming_drafter():
        found = _open(config, method.model, device)
        _quantised_form(method, config, device, found)  # raises for one that cannot be quantised
        if isinstance(method, DFlash):
            most = DFlashSettings(found.config, model.num_layers, model.vocab_size).block_size - 1
            if method.num_speculative_tokens > most:
                raise ConfigError(
                    f"speculative_config: num_speculative_tokens must be less than the drafter's block_size, {most + 1}"
                )
        if isinstance(method, DraftModel) and isinstance(read_config(found.config), EncoderConfig):
            raise ConfigError("speculative_config: model is an encoder; a drafter must generate text")
    return found


def load_drafter(
    method: Method | None, config: EngineConfig, target: DraftTarget, found: Checkpoint | None
) -> LoadedDrafter:
    """The drafter that was found. Raises ``ConfigError`` or ``CheckpointError``."""
    if found is None or not isinstance(method, WithDrafter):
        return NO_DRAFTER
    with _naming_drafter():
        if isinstance(method, DraftModel):
            return _model(method, config, target, found)
        if isinstance(method, DFlash):
            return _block(method, config, target, found)
        return _head(method, config, target, found)


@contextlib.contextmanager
def _naming_drafter() -> Iterator[None]:
    """Say that what is wrong with a checkpoint is wrong with the drafter's."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the drafter: {error}") from None


def _open(config: EngineConfig, name: str, device: torch.device) -> Checkpoint:
    """The checkpoint of a drafter; its weights are random if the model's are."""
    settings = dataclasses.replace(config.model, model=name, revision=None)
    load_format = "dummy" if config.model.load_format == "dummy" else "auto"
    try:
        folder = resolve_model(settings)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    return open_checkpoint(folder, load_format, config.model.seed, str(device))


def _quantised_form(
    method: OwnCheckpoint, config: EngineConfig, device: torch.device, checkpoint: Checkpoint
) -> WeightFormat | None:
    """The format of weights that ``method`` quantises while they are loaded. Raises ``ConfigError``."""
    if method.quantization is None:
        return None
    settings = dataclasses.replace(config.model, quantization=method.quantization, quantize_lm_head=True)
    try:
        return weight_format(settings, device, checkpoint)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None


def _form(method: OwnCheckpoint, config: EngineConfig, checkpoint: Checkpoint, default: WeightFormat) -> WeightFormat:
    """The format of a drafter's weights: ``default``, that of the model's, unless ``method`` says to what they are
    quantised. Weights that are quantised already stay so, whatever those of the model become."""
    if (own := _quantised_form(method, config, default.device, checkpoint)) is not None:
        return dataclasses.replace(own, dtype=default.dtype)
    return default if quant_method(checkpoint) is None else dataclasses.replace(default, quantization=None)


def _head(method: WithDrafter, config: EngineConfig, target: DraftTarget, checkpoint: Checkpoint) -> LoadedDrafter:
    form, model, collective = target.form, target.loaded.model, target.collective
    head: DraftHead
    if isinstance(method, Eagle3):
        form = _form(method, config, checkpoint, form)
        max_len = target.config.max_position_embeddings
        head = Eagle3Head(checkpoint.config, checkpoint, form, model, max_len, collective)
    else:
        head = MTPHead(target.config, checkpoint, form, model, collective)

    def update(source: TensorSource) -> None:
        if isinstance(head, MTPHead):
            overwrite(head, MTPHead(target.config, source, form, model, collective))

    def start(storage: KVStorage) -> Drafter:
        count, vocab_size = method.num_speculative_tokens, target.config.vocab_size
        whole = _whole_logits(head.vocab_size, collective)
        return HeadDrafter(head, storage, count, vocab_size, whole, config.model.enforce_eager)

    return LoadedDrafter(head.cache, head.num_bytes, start, update)


def _block(method: DFlash, config: EngineConfig, target: DraftTarget, checkpoint: Checkpoint) -> LoadedDrafter:
    max_len = target.config.max_position_embeddings
    form = _form(method, config, checkpoint, target.form)
    model = DFlashModel(checkpoint.config, checkpoint, form, target.loaded.model, max_len, target.collective)
    whole = _whole_logits(target.config.vocab_size, target.collective)

    def start(storage: KVStorage) -> Drafter:
        return BlockDrafter(model, storage.draft_layers, storage.block_size, method.num_speculative_tokens, whole)

    return LoadedDrafter(model.cache, model.num_bytes, start)


def _model(method: DraftModel, config: EngineConfig, target: DraftTarget, checkpoint: Checkpoint) -> LoadedDrafter:
    own = read_config(checkpoint.config)
    assert not isinstance(own, EncoderConfig)
    if any(spec.state for spec in own.cache):
        raise ConfigError("speculative_config: model has recurrent state; a drafter must not have any")
    if own.vocab_size != target.config.vocab_size:
        sizes = f"{own.vocab_size} tokens, and the model {target.config.vocab_size}"
        logger.warning("the drafter has %s: drafts are accepted only if the tokens that both have are the same", sizes)
    form = _form(method, config, checkpoint, target.form)
    check_divides(own, config.model, form.device)
    loaded = load_model(own, checkpoint, form, collective=target.collective)

    def start(storage: KVStorage) -> Drafter:
        forward = make_forward(loaded.model, storage.draft_layers, storage.device, config.model.enforce_eager)
        whole = _whole_logits(own.vocab_size, target.collective)
        sizes = storage.block_size, method.num_speculative_tokens, target.config.vocab_size
        return ModelDrafter(loaded.model, own, forward, *sizes, whole)

    return LoadedDrafter(own.cache, loaded.num_bytes, start)


def _whole_logits(vocab_size: int, collective: Collective) -> WholeLogits:
    return part_of_vocabulary(vocab_size, collective, is_on_host=False).whole
