"""``octavo models [MODEL]``: list model families, or check that a model is supported and fits, without loading it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo.cli.settings import add_settings, load_config
from octavo.config import DEFAULT_MODEL, EngineConfig, ModelSettings
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.build.build_encoder import EncoderLimits
    from octavo.build.build_vision import Vision
    from octavo.models.encoder import EncoderConfig
    from octavo.models.encoders import LoadedEncoder
    from octavo.models.linear_parts import MapPart
    from octavo.models.model_config import ModelConfig
    from octavo.models.registry import LoadedModel
    from octavo.quant.stored.stored_weight import WeightFormat
    from octavo.runtime.memory_budget import Limits
    from octavo.weights.checkpoint import Checkpoint

NAME = "models"
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
HELP = "list model families, or check that a model is supported and fits, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, and the settings that decide whether it fits."""
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print the table of families, or the check of a model; return 1 if it does not fit."""
    if args.model_argument is None and args.model is None:
        layout = "{:<39} {:<10} {:<29} {:<8} {}"
        print("\n".join(layout.format(*row) for row in families()))
        print("\nOther decoders: with --backend transformers, more slowly.", file=sys.stderr)
        return 0
    return _check(load_config(EngineConfig, args))


def families() -> Iterator[tuple[str, str, str, str, str]]:
    """Titles, then for each architecture its GGUF name, LoRA and window support, and the first line of its module."""
    from octavo.models.encoders import BIDIRECTIONAL, CLASSES, ENCODERS
    from octavo.models.encoders import FAMILIES as ENCODER_FAMILIES
    from octavo.models.features import features
    from octavo.models.multimodal_text import TEXT_MODELS, TEXT_PARTS
    from octavo.models.registry import ARCHITECTURES
    from octavo.models.vision.towers import AUDIO_TOWERS, TOWERS
    from octavo.weights.gguf.gguf_checkpoint import ALL_FAMILIES

    in_gguf: dict[str, str] = {}
    for name, form in ALL_FAMILIES.items():
        for architecture in {form.architecture, *(other.architecture for other in form.variants.values())}:
            known = in_gguf.get(architecture)
            in_gguf[architecture] = f"{known}, {name}" if known else name
    in_gguf |= {"DeepseekV3ForCausalLM": "deepseek2", "Glm4MoeLiteForCausalLM": "deepseek2"}
    in_gguf |= {"Olmo3ForCausalLM": "olmo2", "GraniteMoeSharedForCausalLM": "granitemoe"}
    in_gguf |= {"FalconMambaForCausalLM": "mamba", "YoutuForCausalLM": "deepseek2"}
    yield "architecture", "GGUF", "LoRA", "windows", "about"
    shown = {}
    for name, family in sorted(ARCHITECTURES.items(), key=lambda item: item[0].lower()):
        found = features(name)
        maps = f"not {', '.join(found.not_adaptable)}" if found.not_adaptable else "all maps"
        shown[name] = maps, found.windows, _about(family)
        yield name, in_gguf.get(name, "-"), *shown[name]
    for name, kind in TEXT_PARTS.items():
        text = TEXT_MODELS[kind][0]
        maps, windows, _ = shown[text]
        media = [kind for kind, towers in (("images", TOWERS), ("audio", AUDIO_TOWERS)) if name in towers]
        reads = f"{' and '.join(', '.join(['Text', *media]).rsplit(', ', 1))}, by default with"
        yield name, "-", maps, windows, f"{reads if media else 'Its text model only, by default'} {text}."
    alone = {name: family for name, family in ENCODERS.items() if not name.startswith(tuple(ENCODER_FAMILIES))}
    with_heads = {f"{family}{CLASSES[0]}": encoder for family, encoder in ENCODER_FAMILIES.items()}
    heads = f" With {', '.join(CLASSES[1:])}."
    for name, encoder in {**with_heads, **alone, **BIDIRECTIONAL}.items():
        about = (encoder.__doc__ or "").splitlines()[0]
        yield name, "-", "-", "-", about + (heads if name in with_heads else "")


def _about(family: object) -> str:
    return (sys.modules[getattr(family, "__module__", "")].__doc__ or "").splitlines()[0]


def _check(config: EngineConfig, *about: str) -> int:
    """Check what a start reads, but for the content of weights; nothing is called supported before, nor said ``about``
    an adapter of the model."""
    from octavo.build.build_encoder import adaptable, encoder_limits
    from octavo.build.build_engine import configured_model, model_backend
    from octavo.build.build_vision import load_vision
    from octavo.build.device_settings import resolve_device
    from octavo.models.config_checks import check_copy
    from octavo.models.encoder import EncoderConfig
    from octavo.models.meta_model import outline, outlined
    from octavo.models.registry import LoadedModel
    from octavo.models.vision.towers import connect
    from octavo.runtime import memory_budget
    from octavo.runtime.ranks.ranks import check_divides
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.hub import resolve_model

    if (adapter := _as_adapter(config)) is not None:
        return _check_adapter(config, adapter)
    backend = model_backend(config.model)
    is_here = config.model.model == DEFAULT_MODEL or Path(config.model.model).expanduser().exists()
    is_whole = is_here or backend is not None
    path = resolve_model(config.model) if is_whole else resolve_model(config.model, ["*.json"])
    has_weights = is_whole and (path.is_file() or any(any(path.glob(pattern)) for pattern in WEIGHTS))
    load_format = config.model.load_format if has_weights else "dummy"
    checkpoint = open_checkpoint(path, load_format, config_folder=config.model.hf_config_path)
    device = resolve_device(config.model.device)
    free = memory_budget.free_memory(device, config.cache.gpu_memory_utilization)
    config, model, form = configured_model(config, path, checkpoint, device)
    if is_whole:
        _check_text(config, path, checkpoint, model)
    if not isinstance(model, EncoderConfig):
        check_divides(model, config.model, device)
    model = _with_pooling(config, path, model, form, has_weights)
    loaded: LoadedModel | LoadedEncoder
    if backend is not None:
        loaded, lines = backend.load_model(model), list(backend.describe(model))
    else:
        loaded = outline(model, checkpoint, form, config.model.tensor_parallel_size)
        check_copy(loaded.copy, checkpoint, form.dtype)
        lines = list(describe(model, loaded, checkpoint))
    if isinstance(model, EncoderConfig):
        limits = encoder_limits(config, path, model, device)
        if config.model.enable_lora:
            lines += _check_modules(config, *adaptable(model, loaded.maps))
        print(*about, *lines, sep="\n")
        return _fit_encoder(limits, model, loaded.num_bytes, form, free)
    assert isinstance(loaded, LoadedModel)
    lines += [*_check_modules(config, loaded.maps), *_check_drafter(config, model, checkpoint, device)]
    vision = load_vision(config, path, checkpoint, model, outlined(form))
    if vision is not None:
        connect(loaded.model, vision.loaded.config, form)
    print(*about, *lines, sep="\n")
    return _fit(config, path, checkpoint, CheckedDecoder(model, form, loaded, vision), free)


class CheckedDecoder(NamedTuple):
    """A decoder that can be loaded."""

    model: ModelConfig
    form: WeightFormat
    loaded: LoadedModel
    """Without content."""
    vision: Vision | None


def _fit(config: EngineConfig, path: Path, checkpoint: Checkpoint, found: CheckedDecoder, free: int) -> int:
    """Check a decoder, which needs memory for its weights and its KV cache, and for a tower and its images."""
    from octavo.build.device_settings import resolve_kv_dtype
    from octavo.models.meta_model import largest_stage, outline
    from octavo.ops.device_backend import backend_of
    from octavo.runtime import memory_budget
    from octavo.weights.gguf.split_files import parts_of

    model, form, loaded, vision = found
    device, num_ranks = form.device, config.model.tensor_parallel_size
    if config.model.pipeline_parallel_size > 1:
        loaded = largest_stage(model, checkpoint, form, num_ranks, config.model.pipeline_parallel_size)
    sizes = Counter(loaded.bytes_by_format)
    if checkpoint.has_blocks and form.packs and device.type == "cpu" and config.model.backend == "octavo":
        of_files, whole = sum(part.stat().st_size for part in parts_of(path)), outline(model, checkpoint, form)
        sizes = Counter({"blocks": of_files * loaded.num_bytes // whole.num_bytes})
    of_images = 0
    if vision is not None:
        sizes, of_images = sizes + vision.weight_bytes, vision.num_bytes
    left = (free // config.model.ranks_per_node if device.type == "cpu" else free) - sum(sizes.values())
    left -= backend_of(device.type).peer_bytes(num_ranks) + of_images
    try:
        limits, budget = memory_budget.plan_memory(
            config,
            model,
            kv_dtype=resolve_kv_dtype(config.cache.kv_cache_dtype, form, model.cache),
            dtype=form.dtype,
            device=device.type,
            weights=sizes,
            free=left,
            num_ranks=num_ranks,
        )
    except ConfigError as error:
        print(f"does not fit on {device}: {error}")
        print(f"{_weights(sizes)}\nfree: {free / 2**20:,.1f} MiB, {left / 2**20:,.1f} MiB without the weights")
        return 1
    print(f"fits on {device}, with contexts of {limits.max_model_len} tokens{_of_each(limits, config.model)}:")
    print(f"{budget.table()}\n{_weights(sizes)}")
    return 0


def _check_text(config: EngineConfig, path: Path, checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Read the tokenizer, the chat template and the generation config. Raises ``ConfigError``, ``CheckpointError``."""
    from octavo.build.build_engine import read_generation
    from octavo.text.chat_template import load_chat_template
    from octavo.text.tokenizer import load_tokenizer

    load_chat_template(config.model, load_tokenizer(Path(config.model.tokenizer or path))).close()
    read_generation(config.model, checkpoint, path, model)


def _with_pooling(
    config: EngineConfig, path: Path, model: ModelConfig, form: WeightFormat, has_weights: bool
) -> ModelConfig:
    """The model, an encoder with the head that its pooling needs. Raises ``ConfigError`` or ``CheckpointError``."""
    from octavo.build.build_encoder import pooled_tasks, with_pooling
    from octavo.models.encoder import EncoderConfig
    from octavo.models.meta_model import outlined
    from octavo.models.pooling import read_pooling
    from octavo.runtime.executors.pooler import Pooler

    width = model.hidden_size
    if isinstance(model, EncoderConfig):
        model, pooling = with_pooling(config, path, model)
        width = model.vocab_size if model.uses_vocabulary else width
    else:
        pooling = read_pooling(config.model.config_folder(path), config.model.pooling_type, is_encoder=False)
    pooled_tasks(pooling, model.labels, width)
    if has_weights:
        Pooler(pooling, None, config.model.load_format, outlined(form))
    return model


def _of_each(limits: Limits, settings: ModelSettings) -> str:
    count = settings.num_ranks
    if count == 1:
        return ""
    return f", divided among {count} ranks with a KV cache for {limits.num_cached_tokens} tokens, of which each has"


def _weights(sizes: Mapping[str, int]) -> str:
    return "weights: " + ", ".join(f"{size / 2**20:,.1f} MiB in {name}" for name, size in sorted(sizes.items()))


def _fit_encoder(limits: EncoderLimits, model: EncoderConfig, num_bytes: int, form: WeightFormat, free: int) -> int:
    """Check an encoder, which needs memory for its weights and the activations of a step."""
    from octavo.build.build_encoder import activation_bytes

    activations = activation_bytes(model, limits.max_num_seqs, limits.max_num_batched_tokens, form.dtype)
    sizes = f"{num_bytes / 2**20:,.1f} MiB of weights and {activations / 2**20:,.1f} MiB of activations"
    fits = num_bytes + activations <= free
    print(f"{'fits' if fits else 'does not fit'}, with texts of {limits.max_model_len} tokens: {sizes}")
    return 0 if fits else 1


def _as_adapter(config: EngineConfig) -> Path | None:
    """The folder, if it holds a LoRA adapter instead of a model."""
    from octavo.weights.adapter import CONFIG_NAME

    path = Path(config.model.model).expanduser()
    return path if (path / CONFIG_NAME).exists() and not (path / "config.json").exists() else None


def _check_adapter(config: EngineConfig, path: Path) -> int:
    """Describe an adapter; check it against its base model if that is a local folder. Raises ``CheckpointError``."""
    from octavo.weights.adapter import read_adapter
    from octavo.weights.folder import read_json

    factors = read_adapter(path).factors
    ranks = sorted({len(down) for down, _, _ in factors.values()})
    count = sum(down.numel() + up.numel() for down, up, _ in factors.values())
    ends = sorted({name.rpartition(".")[2] for name in factors})
    about = f"LoRA adapter of rank {', '.join(map(str, ranks))}: supported\n"
    about += f"{count:,} parameters, for {len(factors)} maps: {', '.join(ends)}"
    base = str((read_json(path, "adapter_config.json") or {}).get("base_model_name_or_path"))
    if not Path(base).is_dir():
        where = f"with --lora-modules NAME={path}, to see whether they fit"
        print(about, f"its model, {base}, is not here: give that, {where}", sep="\n")
        return 0
    settings = dataclasses.replace(config.model, model=base, lora_modules=f"adapter={path}", enable_lora=True)
    return _check(dataclasses.replace(config, model=settings), about)


def _check_modules(config: EngineConfig, maps: Mapping[str, MapPart], unused: tuple[str, ...] = ()) -> Iterator[str]:
    """A line per adapter of the settings; ``unused``: see ``ModelAdapters``. Raises ``CheckpointError`` for one that
    does not fit the model."""
    import torch

    from octavo.config import parse_lora_modules
    from octavo.models.model_adapters import changes_of, check_merge
    from octavo.quant.stored.stored_weight import WeightFormat

    check_merge(config.model, maps)
    for name, folder in parse_lora_modules(config.model.lora_modules).items():
        changes = list(changes_of(Path(folder), maps, WeightFormat(torch.float32, torch.device("meta")), unused))
        yield f"adapter {name} fits: it changes {len(changes)} of {len(maps)} maps"


def _check_drafter(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, device: torch.device
) -> Iterator[str]:
    """A line about the drafter of the settings. Raises ``ConfigError`` or ``CheckpointError`` for one that cannot draft
    for the model, as far as can be seen without weights."""
    from octavo.build.build_drafter import find_drafter
    from octavo.speculative_config import parse_speculative_config

    method = parse_speculative_config(config.speculative.speculative_config)
    if find_drafter(method, config, model, checkpoint, device) is not None:
        yield "the drafter is found; its weights and its part of the KV cache are not counted below"


def describe(model: ModelConfig, loaded: LoadedModel | LoadedEncoder, checkpoint: Checkpoint) -> Iterator[str]:
    """Lines about a model: architecture, parameters, quantisation, sizes and windows."""
    from octavo.models.multimodal_text import text_config
    from octavo.quant.methods import weights_method

    kinds = sorted({checkpoint.describe(name)[0] for name in checkpoint.names()})
    yield f"{model.architecture}: supported"
    yield f"{loaded.num_parameters:,} parameters, " + (
        f"stored as {', '.join(kinds)}" if kinds else "storage types not read"
    )
    quantised = text_config(checkpoint.config).get("quantization_config")
    if isinstance(quantised, Mapping) and weights_method(quantised) is not None:
        names = (quantised.get("quant_method"), quantised.get("format"), quantised.get("quant_algo"))
        yield f"quantised: {', '.join(name for name in names if isinstance(name, str))}"
    shown = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    values = dataclasses.asdict(model)
    yield ", ".join(f"{name} {values[name]}" for name in (*shown, "max_position_embeddings"))
    windows = [spec.window for spec in model.cache]
    for window in sorted(set(windows) - {0}, reverse=True):
        count = windows.count(window)
        layers = "every layer has" if count == len(windows) else f"{count} of {len(windows)} layers have"
        yield f"{layers} a window: keys and values of {window} positions and of a step are kept"
