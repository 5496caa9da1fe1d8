"""``octavo debug diff MODEL``: compare this implementation of a model with that of transformers, layer by layer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.cli.settings import add_some_settings, load_config
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, InvalidParameter

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NAME = "debug"
HELP = "debug a model: diff compares its layers with those of transformers"

TOLERANCE = 1e-3
"""Largest difference, relative to the largest value of a layer, that counts as rounding."""


class Difference(NamedTuple):
    """The largest difference between two results, absolute and relative."""

    what: str
    largest: float
    relative: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The comparison, its tokens, and the settings that find the model: all is computed in float32 on the CPU."""
    parser.add_argument("what", choices=["diff"], metavar="diff", help="compare the layers with those of transformers")
    add_some_settings(parser, ["model", "revision", "offline", "download_dir"])
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.usage = f"{parser.prog} diff MODEL [options]"
    parser.add_argument("--tokens", metavar="IDS", default="1,2,3,4,5,6,7,8", help="token ids (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a line per layer and one for the logits; return 1 if any exceeds ``TOLERANCE``."""
    config = load_config(EngineConfig, args)
    try:
        tokens = [int(part) for part in args.tokens.split(",")]
    except ValueError:
        raise InvalidParameter("tokens", f"--tokens: {args.tokens!r} is not a list of ids like 1,2,3") from None
    parted = None
    for item in compare(config, tokens):
        if item.what == "layer 0":  # no header above an error
            print(f"{'after':<12}{'largest difference':>20}{'relative':>12}")
        is_first = parted is None and item.relative > TOLERANCE
        parted = item.what if is_first else parted
        print(f"{item.what:<12}{item.largest:>20.3g}{item.relative:>12.2g}{'  <- differs here' if is_first else ''}")
    return 0 if parted is None else 1


def compare(config: EngineConfig, tokens: list[int]) -> Iterator[Difference]:
    """Run both implementations on ``tokens`` in float32 on the CPU; yield each layer's difference, then the logits'."""
    import torch

    from octavo.weights.hub import resolve_model

    path = resolve_model(config.model)
    with torch.inference_mode():
        ours, theirs = _ours(path, tokens), _theirs(path, tokens)
    if len(ours) != len(theirs):
        raise ConfigError(f"model: {len(ours) - 1} layers here, but {len(theirs) - 1} in transformers")
    names = [f"layer {i}" for i in range(len(ours) - 1)] + ["logits"]
    for name, mine, other in zip(names, ours, theirs, strict=True):
        largest = (mine - other).abs().max().item()
        yield Difference(name, largest, largest / max(other.abs().max().item(), 1e-30))


def _ours(path: Path, tokens: list[int]) -> list[Tensor]:
    """The output of each layer, [T, D], and the logits, [T, V]."""
    import torch

    from octavo.models.layer_cache import kv_groups
    from octavo.models.registry import load_model, read_config
    from octavo.ops.attention.attention import GroupRows, PagedRows
    from octavo.quant.stored.stored_weight import WeightFormat
    from octavo.runtime.kv_storage import KVStorage
    from octavo.weights.checkpoint import open_checkpoint

    cpu, T = torch.device("cpu"), len(tokens)
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint.config)
    if not all(0 <= token < config.vocab_size for token in tokens) or config.max_position_embeddings < T:
        raise InvalidParameter("tokens", f"--tokens: ids must be below {config.vocab_size}, and fit the context")
    model: Any = load_model(config, checkpoint, WeightFormat(torch.float32, cpu)).model
    results: list[Tensor] = []
    model.layers = [_recorded(layer, results) for layer in model.layers]
    storage = KVStorage(config.cache, kv_groups(config.cache), [1], T, torch.float32, cpu)
    lengths = (torch.tensor([0, T], dtype=torch.int32), torch.tensor([T], dtype=torch.int32))
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows = PagedRows((GroupRows(torch.arange(T), table),), *lengths, T, state_slots_S=slots)
    x_TD = model.forward(torch.tensor(tokens), torch.arange(T), storage.layers, rows)
    return [*results, model.logits(x_TD).float()]


def _recorded(layer: Any, results: list[Tensor]) -> Any:
    def call(*args: Any) -> Any:
        x_TD = layer(*args)
        results.append(x_TD.clone())  # the next layer may overwrite it
        return x_TD

    return call


def _theirs(path: Path, tokens: list[int]) -> list[Tensor]:
    """The same results from transformers."""
    import torch

    from octavo_fleet.transformers.model import INSTALL, pretrained

    form: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        model = pretrained(path, **form)
    except (CheckpointError, ConfigError):
        raise
    except (ImportError, ValueError) as error:  # reading GGUF needs further packages; without accelerate, a ValueError
        reason = " ".join(str(error).split())
        raise ConfigError(f"debug diff: transformers cannot read {path.name}: {reason}; {INSTALL}") from None
    stack = max((part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=_num_parameters)
    results: list[Tensor] = []
    for layer in stack:
        layer.register_forward_hook(lambda module, args, out: results.append(out[0] if isinstance(out, tuple) else out))
    model.train(False)
    logits = model(torch.tensor([tokens]), use_cache=False).logits
    return [result.reshape(len(tokens), -1) for result in results] + [logits[0]]


def _num_parameters(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())
