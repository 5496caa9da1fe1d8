"""Loads the drafter of a speculative configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.device_settings import weight_format
from octavo.engine.device_drafts import DeviceDrafts
from octavo.engine.ngram import NgramProposer
from octavo.engine.proposer import Proposer
from octavo.engine.suffix import SuffixProposer
from octavo.errors import CheckpointError, ConfigError
from octavo.models.bert import EncoderConfig
from octavo.models.config import ModelConfig
from octavo.models.drafters.dflash import DFlashModel
from octavo.models.drafters.eagle3 import Eagle3Head
from octavo.models.drafters.head import DraftHead
from octavo.models.drafters.mtp import MTPHead
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.mtp_names import mtp_prefixes
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.models.text_part import TextPart
from octavo.quant.stored import WeightFormat
from octavo.runtime.drafter import Drafter
from octavo.runtime.drafters import BlockDrafter, HeadDrafter, ModelDrafter
from octavo.runtime.forward import make_forward
from octavo.runtime.kv_storage import KVStorage
from octavo.speculative_config import DFlash, DraftModel, Eagle3, Method, Ngram, OwnCheckpoint, Suffix, WithDrafter
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.hub import resolve_model

logger = logging.getLogger(__name__)


class LoadedDrafter(NamedTuple):
    """A drafter with its weights, before it has a cache."""

    cache: tuple[LayerCacheSpec, ...]
    num_bytes: int
    start: Callable[[KVStorage], Drafter | None]


NO_DRAFTER = LoadedDrafter((), 0, lambda _: None)
"""What methods without a drafter have."""


class Target(NamedTuple):
    """The model that is drafted for."""

    loaded: LoadedModel
    config: ModelConfig
    checkpoint: Checkpoint
    form: WeightFormat


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


def load_drafter(method: Method | None, config: EngineConfig, target: Target) -> LoadedDrafter:
    """The drafter of a method that has one. Raises ``ConfigError`` or ``CheckpointError``."""
    if method is None and mtp_prefixes(TextPart(target.checkpoint).names(), target.config.num_layers):
        logger.info('the checkpoint has an MTP layer; --speculative-config \'{"method": "mtp"}\' drafts with it')
    if not isinstance(method, WithDrafter):
        return NO_DRAFTER
    settings = config.model
    if settings.enable_lora or settings.tensor_parallel_size > 1:
        other = "enable_lora" if settings.enable_lora else "tensor_parallel_size above 1"
        raise ConfigError(f'speculative_config: "{_name(method)}" cannot be combined with {other}')
    try:
        if isinstance(method, DraftModel):
            return _model(method, config, target)
        if isinstance(method, DFlash):
            return _block(method, config, target)
        return _head(method, config, target)
    except CheckpointError as error:
        raise CheckpointError(f"the drafter: {error}") from None


def _name(method: Method) -> str:
    return str(method.__struct_config__.tag)


def _open(config: EngineConfig, name: str, form: WeightFormat) -> Checkpoint:
    """The checkpoint of a drafter; its weights are random if the model's are."""
    settings = dataclasses.replace(config.model, model=name, revision=None)
    load_format = "dummy" if config.model.load_format == "dummy" else "auto"
    return open_checkpoint(resolve_model(settings), load_format, config.model.seed, str(form.device))


def _form(method: OwnCheckpoint, config: EngineConfig, checkpoint: Checkpoint, default: WeightFormat) -> WeightFormat:
    """The format of a drafter's weights: ``default`` unless they are quantised while loading."""
    if method.quantization is None:
        return default
    settings = dataclasses.replace(config.model, quantization=method.quantization, quantize_lm_head=True)
    try:
        found = weight_format(settings, default.device, checkpoint)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    return dataclasses.replace(found, dtype=default.dtype)


def _head(method: WithDrafter, config: EngineConfig, target: Target) -> LoadedDrafter:
    form, model = target.form, target.loaded.model
    head: DraftHead
    if isinstance(method, Eagle3):
        checkpoint = _open(config, method.model, form)
        form = _form(method, config, checkpoint, form)
        head = Eagle3Head(checkpoint.config, checkpoint, form, model, target.config.max_position_embeddings)
    else:
        head = MTPHead(target.config, target.checkpoint, form, model)

    def start(storage: KVStorage) -> Drafter:
        count, vocab_size = method.num_speculative_tokens, target.config.vocab_size
        return HeadDrafter(head, storage, count, vocab_size, config.model.enforce_eager)

    return LoadedDrafter(head.cache, head.num_bytes, start)


def _block(method: DFlash, config: EngineConfig, target: Target) -> LoadedDrafter:
    checkpoint = _open(config, method.model, target.form)
    max_len = target.config.max_position_embeddings
    form = _form(method, config, checkpoint, target.form)
    model = DFlashModel(checkpoint.config, checkpoint, form, target.loaded.model, max_len)
    count = method.num_speculative_tokens
    if count >= model.block_size:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens must be less than the drafter's block_size, {model.block_size}"
        )

    def start(storage: KVStorage) -> Drafter:
        return BlockDrafter(model, storage.draft_layers, storage.block_size, count)

    return LoadedDrafter(model.cache, model.num_bytes, start)


def _model(method: DraftModel, config: EngineConfig, target: Target) -> LoadedDrafter:
    checkpoint = _open(config, method.model, target.form)
    own = read_config(checkpoint.config)
    if isinstance(own, EncoderConfig):
        raise ConfigError("speculative_config: model is an encoder; a drafter must generate text")
    if own.vocab_size != target.config.vocab_size:
        sizes = f"{own.vocab_size} tokens, and the model {target.config.vocab_size}"
        logger.warning("the drafter has %s: drafts are accepted only if the tokens that both have are the same", sizes)
    form = _form(method, config, checkpoint, weight_format(config.model, target.form.device, checkpoint))
    form = dataclasses.replace(form, dtype=target.form.dtype)  # its cache has the type of the model's
    loaded = load_model(own, checkpoint, form)

    def start(storage: KVStorage) -> Drafter:
        forward = make_forward(loaded.model, storage.draft_layers, storage.device, config.model.enforce_eager)
        return ModelDrafter(
            loaded.model, own, forward, storage.block_size, method.num_speculative_tokens, target.config.vocab_size
        )

    return LoadedDrafter(own.cache, loaded.num_bytes, start)
