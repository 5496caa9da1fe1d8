"""How far the engine's probabilities are from those of the same weights in float32, on a text.

The reference makes every weight dense and computes, and caches, in float32. For each position of the text, the
Kullback-Leibler divergence of the engine's distribution of the next token from the reference's, in nats, over
the whole vocabulary.

Shapes: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.config import EngineConfig, ModelSettings
from octavo.device_settings import DTYPES, weight_format
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.ops.attention import GroupRows, PagedRows
from octavo.quant.stored import WeightFormat
from octavo.quant.tensors import Source
from octavo.runtime.kv_storage import KVStorage
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model

WINDOW = 500
BLOCK = 64
CPU = torch.device("cpu")


class Scorer:
    """A model in one form, its cache in one type."""

    def __init__(self, config: ModelConfig, checkpoint: Source, form: WeightFormat, kv_dtype: torch.dtype) -> None:
        self.loaded: LoadedModel = load_model(config, checkpoint, form)
        self.num_blocks = -(-WINDOW // BLOCK)
        self.storage = KVStorage(config.cache, kv_groups(config.cache), [self.num_blocks], BLOCK, kv_dtype, CPU)

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities float32 [T, V] of what follows each token."""
        T, model = len(tokens), self.loaded.model
        positions = torch.arange(T)
        blocks = list(range(self.num_blocks))
        tables, starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([blocks], [0, T], [T]))
        rows = PagedRows((GroupRows(positions, tables),), starts, lengths, T)
        with torch.inference_mode():
            x_TD = model.forward(torch.tensor(tokens), positions, self.storage.layers, rows)
            return model.logits(x_TD).float().log_softmax(-1)


def divergences(found_TV: Tensor, exact_TV: Tensor) -> Tensor:
    """Of log-probabilities from exact ones: sum of p (log p - log q), float64 [T]."""
    exact = exact_TV.double()
    return (exact.exp() * (exact - found_TV.double())).sum(-1)


def measure(config: EngineConfig, text: Path, positions: int) -> dict[str, Any]:
    """Divergence and agreement over the first ``positions`` tokens of a text file, in windows of WINDOW tokens."""
    path = resolve_model(config.model)
    checkpoint = open_checkpoint(path, config.model.load_format, config.model.seed)
    tokens = _tokens(config.model, path, text)[:positions]
    if len(tokens) < positions:
        raise ConfigError(f"text: {text} has {len(tokens)} tokens; {positions} positions were asked for")
    form = weight_format(config.model, CPU, checkpoint)
    kv_dtype = DTYPES.get(config.cache.kv_cache_dtype, form.kv_dtype)
    model_config = read_config(checkpoint.config)
    ours = Scorer(model_config, checkpoint, form, kv_dtype)
    reference = Scorer(model_config, checkpoint, WeightFormat(torch.float32, CPU), torch.float32)
    apart, agrees = [], []
    for first in range(0, positions, WINDOW):
        window = tokens[first : first + WINDOW]
        found, exact = ours.logprobs(window), reference.logprobs(window)
        apart.append(divergences(found, exact))
        agrees.append(found.argmax(-1) == exact.argmax(-1))
    divergence_T = torch.cat(apart)
    return {
        "model": path.name,
        "text": text.name,
        "positions": positions,
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "mean_divergence": float(f"{divergence_T.mean():.3g}"),
        "largest_divergence": float(f"{divergence_T.max():.3g}"),
        "same_top_token": round(float(torch.cat(agrees).double().mean()), 4),
    }


def _tokens(settings: ModelSettings, path: Path, text: Path) -> list[int]:
    tokenizer = load_tokenizer(Path(settings.tokenizer or path))
    if tokenizer is None:
        raise ConfigError("model: it has no tokenizer, so a text cannot be scored")
    return tokenizer.encode(text.read_text())
