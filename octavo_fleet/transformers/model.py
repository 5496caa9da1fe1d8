"""Loads any decoder that the transformers library has, for the backend transformers.

Its attention runs over the paged cache if a trial at load shows that this gives what the model itself gives, for
several sequences in one pass and a prompt in chunks. Otherwise the model keeps a cache of its own for each sequence.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, CheckpointError, ConfigError, failures_as, first_line_of
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.model_config import ModelConfig
from octavo.models.registry import LoadedModel
from octavo.ops.device_backend import is_gpu
from octavo.quant.checkpoint_tensors import HARMLESS
from octavo.quant.stored.stored_weight import WeightFormat, dtype_name
from octavo.weights.adapter import CONFIG_NAME
from octavo.weights.folder import read_json
from octavo.weights.generation_config import token_ids
from octavo.weights.gguf.split_files import parts_of
from octavo_fleet.transformers import trial
from octavo_fleet.transformers.known_modules import KnownModules
from octavo_fleet.transformers.own_cache import OwnCacheTransformer
from octavo_fleet.transformers.paged import NotPaged, PagedTransformer, first_position, num_layers, register

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embeddings that depend on the longest sequence of a batch."""
OF_PROMPTS = "reference_sliding_attention"
"""A kind of layers in which an answer's tokens see the whole prompt but only a window of the answer (arXiv 2606.23050).
So the same text has other outputs with a shorter prompt, and steps do not say where the prompt of a sequence ends."""

INSTALL = "`pip install transformers accelerate gguf` installs what it needs"

logger = logging.getLogger("octavo.start")


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """The configuration of a loaded model of the transformers library."""

    specs: tuple[LayerCacheSpec, ...] = ()
    loaded: LoadedModel | None = None
    not_paged: str = ""
    """Why the model keeps a cache of its own for each sequence; empty if it runs over the paged cache."""
    is_eager: bool = True
    """Whether its passes cannot be CUDA graphs."""

    @property
    def cache(self) -> tuple[LayerCacheSpec, ...]:
        return self.specs


def load_transformers(path: Path, form: WeightFormat, max_len: int | None) -> TransformersConfig:
    """Load a model from a folder or GGUF file. Raises ``ConfigError`` without the library, and ``CheckpointError``."""
    with failures_as(
        lambda error: CheckpointError(f"{path}: transformers cannot load it: {first_line_of(error)}"),
        *(CheckpointError, ConfigError),
    ):
        result: Any = pretrained(
            path,
            dtype=form.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which are refused below, by name
        )
    model, told = result
    _check_tensors(path, told)
    if OF_PROMPTS in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise _not_served(model, f"layer_types has {OF_PROMPTS!r}: what a token sees depends on where the prompt ended")
    model = model.to(form.device).eval().requires_grad_(False)
    with torch.inference_mode():
        _first_pass(model)
        executed, not_paged = _executed(model)
        is_eager = not is_gpu(form.device) or _runs_eagerly(model, executed)
    size = sum(parameter.numel() for parameter in model.parameters())
    num_bytes: Counter[str] = Counter()
    for parameter in model.parameters():
        num_bytes[dtype_name(parameter.dtype)] += parameter.nbytes
    loaded = LoadedModel(executed, size, num_bytes, {})
    specs = tuple(executed.specs) if isinstance(executed, PagedTransformer) else (LayerCacheSpec(1, 1),)
    return dataclasses.replace(_config(model, specs, loaded, not_paged, max_len), is_eager=is_eager)


def pretrained(path: Path, **options: Any) -> Any:
    """What ``AutoModelForCausalLM.from_pretrained`` makes of a folder or GGUF file, by code of the library alone.

    Raises ``CheckpointError`` for a checkpoint that needs other code, ``ConfigError`` without the library, and what the
    library raises.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # read when the library is imported: nothing is fetched and run
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError:
        raise ConfigError(f"the package transformers is not installed; {INSTALL}") from None
    folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    if len(parts_of(path)) > 1:
        raise CheckpointError(f"{path}: transformers does not read a GGUF file in parts")
    if (folder / CONFIG_NAME).exists():
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: the folder of a model must not hold an adapter, which transformers would apply; "
            "keep it in a folder of its own"
        )
    if path.is_dir():
        _check_kernels(read_json(folder, "config.json"), folder / "config.json")
    settings = {"local_files_only": True, **file, **options}
    try:
        for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
            try:
                return loader.from_pretrained(folder, trust_remote_code=False, **settings)
            except ValueError as error:
                unknown = error
                if "Unrecognized configuration class" not in str(error):
                    raise
        if (named := _named_class(folder)) is None:
            raise unknown
        return named.from_pretrained(folder, trust_remote_code=False, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"{path}: auto_map in config.json names code of the checkpoint, which is never run, and transformers has "
            "no code of its own for this model"
        ) from None


def _named_class(folder: Path) -> Any:
    """The library's own class that a configuration names, if that generates text: it may be a part of a larger model,
    for whose configuration alone the library has no entry."""
    import transformers

    names = (read_json(folder, "config.json") or {}).get("architectures") or [""]
    found = getattr(transformers, str(names[0]), None)
    is_own = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_own and hasattr(found, "prepare_inputs_for_generation") else None


def _check_kernels(value: Any, where: Path) -> None:
    """Raise ``CheckpointError`` if a configuration chooses a kernel of the hub, as ``attn_implementation`` can."""
    entries = value.items() if isinstance(value, dict) else []
    for key, found in entries:
        if key.endswith("_implementation") and "/" in str(found):
            raise CheckpointError(f"{where}: {key} is {found!r}: code of the hub is not run; remove the key")
        _check_kernels(found, where)


def _check_tensors(path: Path, told: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` unless all tensors were read: the library makes missing ones random, and drops others.

    ``told`` is its ``loading_info``, without tied tensors and those that it knows to leave out.
    """
    found = {
        "missing": sorted(told["missing_keys"]),
        "unexpected": sorted(name for name in told["unexpected_keys"] if not HARMLESS.search(name)),
        "of another shape": sorted(
            f"{name} (found {list(stored)}, expected {list(expected)})"
            for name, stored, expected in told["mismatched_keys"]
        ),
    }
    if any(found.values()):
        shown = "; ".join(
            f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            for what, names in found.items()
            if names
        )
        raise CheckpointError(f"{path}: transformers cannot read all of its tensors; {shown}")


def _first_pass(model: Any) -> None:
    """Run the whole model, which makes weights of compressed-tensors dense. Raises ``CheckpointError`` if it fails."""
    with failures_as(lambda error: _not_served(model, f"its forward pass fails: {error}")):
        text = _texts(model)[-1]
        model(input_ids=text.unsqueeze(0), use_cache=False)


def _config(
    model: Any, specs: tuple[LayerCacheSpec, ...], loaded: LoadedModel, not_paged: str, max_len: int | None
) -> TransformersConfig:
    config = model.config.get_text_config()
    hidden_size = model.get_input_embeddings().embedding_dim
    return TransformersConfig(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        ffn_size=_widest(getattr(config, "intermediate_size", None)) or 4 * hidden_size,
        num_layers=max(num_layers(config), len(specs)),
        num_heads=_widest(getattr(config, "num_attention_heads", None)) or 1,
        num_kv_heads=max(spec.num_kv_heads for spec in specs),
        head_dim=max(spec.head_dim for spec in specs),
        norm_eps=0.0,
        max_position_embeddings=_max_len(config, max_len) - max(map(first_position, model.modules())),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=token_ids({"eos_token_id": getattr(config, "eos_token_id", None)}, "eos_token_id"),
        specs=specs,
        loaded=loaded,
        not_paged=not_paged,
    )


UNLIMITED_LEN = 8192
"""Context length of models without a table of positions, such as recurrent ones, unless one is asked for."""


def _widest(size: Any) -> int:
    """A size, or the largest of those of each layer; 0 for none."""
    sizes = size if isinstance(size, list | tuple) else [size]
    return max((value for value in sizes if isinstance(value, int)), default=0)


def _max_len(config: Any, asked: int | None) -> int:
    """The longest context. With longrope, that for which it has one rotary embedding: the library chooses another by
    the length of a call, and so would rotate keys of earlier calls by other angles than those of later ones."""
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        if isinstance(length := getattr(config, name, None), int):
            ropes = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
            given = [rope.get("original_max_position_embeddings") for rope in ropes]
            given += [getattr(config, "original_max_position_embeddings", None)] if ropes else []
            return min([length, *(size for size in given if isinstance(size, int))])
    return asked or UNLIMITED_LEN


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotary embeddings of a configuration, which may have one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in given.values() if isinstance(part, Mapping)]
    return nested or [given]


def _executed(model: Any) -> tuple[PagedTransformer | OwnCacheTransformer, str]:
    """The model over the paged cache; or with caches of its own, and why. Raises ``CheckpointError``."""
    try:
        return _paged(model), ""
    except NotPaged as error:
        logger.warning("%s keeps a cache of its own for each sequence: %s", type(model).__name__, error)
        return _own_cache(model), str(error)


def _runs_eagerly(model: Any, executed: PagedTransformer | OwnCacheTransformer) -> bool:
    """Whether a model's passes on a GPU cannot be graphs."""
    if isinstance(executed, OwnCacheTransformer):
        return True
    if why := trial.why_not_captured(executed, _texts(model)):
        logger.warning("%s runs without CUDA graphs: %s", type(model).__name__, why)
    return bool(why)


def _paged(model: Any) -> PagedTransformer:
    """The model over the paged cache, with as many of its modules computed by operations as a trial allows. Raises
    ``NotPaged`` unless that gives what the model itself gives; then the model is unchanged."""
    before = model.config._attn_implementation
    config, known = model.config.get_text_config(), None
    try:
        if getattr(config, "attention_chunk_size", None) is not None:
            raise NotPaged("it has chunked attention")
        if any(rope.get("rope_type") in BATCH_DEPENDENT_ROPE for rope in _ropes(config)):
            raise NotPaged("its rotary embeddings depend on the longest sequence of a batch")
        texts = _texts(model)
        expected, logits = zip(*(trial.alone(model, text) for text in texts), strict=True)
        bound = trial.tolerance(model, texts, expected)
        register()
        paged = PagedTransformer(model)
        known = KnownModules(paged.state)
        known.replace(model)
        while True:
            reason = _why_it_differs(paged, texts, expected, logits, bound)
            if not reason:
                logger.info("%s: attention over blocks; operations compute %s", type(model).__name__, known)
                return paged
            if not known.rotate_as_before() and not known.restore():
                raise NotPaged(reason)
    except CANCELLATIONS:
        raise
    except BaseException as error:  # any error of the library's code
        if known is not None:
            known.restore()
        model.set_attn_implementation(before)
        if isinstance(error, NotPaged):
            raise
        raise NotPaged(f"its code fails with attention over blocks: {first_line_of(error)}") from error


def _why_it_differs(
    paged: PagedTransformer, texts: list[Tensor], expected: Sequence[Tensor], logits: Sequence[Tensor], bound: float
) -> str:
    """Why a trial does not give the expected outputs and logits; empty if it does."""
    try:
        found = trial.over_blocks(paged, texts)
        of_logits = trial.difference(logits, [paged.logits(x) for x in found])
    except CANCELLATIONS:
        raise
    except BaseException as error:  # any error of the library's code
        return f"its code fails with attention over blocks: {first_line_of(error)}"
    difference = max(trial.difference(expected, found), of_logits)
    return "" if difference < bound else f"the trial differs by {difference:.1g}"  # also if it is not a number


def _texts(model: Any) -> list[Tensor]:
    config = model.config.get_text_config()
    return trial.trial_texts(config, _max_len(config, None), model.device)


def _own_cache(model: Any) -> OwnCacheTransformer:
    """The model with a cache of its own for each sequence. Raises ``CheckpointError`` if it has none."""
    try:
        own = OwnCacheTransformer(model)
    except NotPaged as error:
        raise _not_served(model, error) from None
    text = _texts(model)[0]
    (expected, logits), tokens = trial.alone(model, text), text.tolist()
    bound = trial.tolerance(model, [text], [expected])
    cut = max(len(tokens) // 2, len(tokens) - trial.LENGTHS[1])  # behind a window, if there is one
    ends = sorted({min(trial.LENGTHS[1], cut), cut, len(tokens)})  # a window that began within a call is left, too
    reason: object = "its cache fails a trial"
    for takes_chunks, keeps_cache in ((True, True), (False, True), (True, False)):
        own.takes_chunks, own.keeps_cache = takes_chunks, keeps_cache
        try:
            parts, cache = [], None
            for start, end in pairwise([0, *ends]):
                output, cache = own.decode(tokens[start if keeps_cache else 0 : end], cache, model.device)
                parts.append(output[start - end :])
            found = torch.cat(parts)
            difference = max(trial.difference([expected], [found]), trial.difference([logits], [own.logits(found)]))
        except CANCELLATIONS:
            raise
        except BaseException as error:  # any error of the library's code
            logger.debug("%s: %s", type(model).__name__, error)
            reason = f"its cache fails a trial: {first_line_of(error)}"
            continue
        if difference < bound:
            if not keeps_cache:
                logger.warning("%s computes a text again for each of its tokens: %s", type(model).__name__, reason)
            return own
        reason = f"its cache fails a trial, which differs by {difference:.1g}"
    if not keeps_cache:
        reason = f"{reason}; without a cache, tokens depend on later ones"
    raise _not_served(model, reason)


def _not_served(model: Any, reason: object) -> CheckpointError:
    return CheckpointError(f"{type(model).__name__} cannot be served by the backend transformers: {reason}")
