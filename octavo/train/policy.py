"""A model whose log-probabilities have gradients, and the bits that an engine with its weights reports.

Shapes: T tokens that are computed, S sequences, R rows, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from octavo import ops
from octavo.build.build_engine import open_model, read_model
from octavo.build.device_settings import quant_method, resolve_kv_dtype
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError, InvalidParameter
from octavo.llm import LLM
from octavo.models.model_config import ModelConfig
from octavo.models.parts import DecoderConfig, MLPPart
from octavo.models.registry import CausalLM, load_model
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.device_backend import backend_of
from octavo.ops.dispatch import wrapped
from octavo.quant.checkpoint_tensors import FLOATS
from octavo.runtime.memory_budget import DEFAULTS
from octavo.train.gradients import recorded
from octavo.weights.checkpoint import Checkpoint

_ONE_AT_A_TIME = threading.RLock()
"""Ops are wrapped in the whole process."""
LOGITS_ROWS = 1024
"""Rows whose logits are in memory at once. The head's gradient is added up once for each, in the checkpoint's type."""


class Policy:
    """The parameters of a dense decoder, for a trainer.

    ``settings`` are those of the engine that samples, by name, or ``model`` is an ``LLM`` in this process; the weights
    are those of its folder. Raises ``ConfigError`` for settings, and ``CheckpointError`` for models, of which no
    gradients can be computed.
    """

    def __init__(
        self,
        model: str | Path | LLM,
        *,
        parameter_dtype: torch.dtype = torch.float32,
        recomputes_layers: bool = False,
        **settings: Any,
    ) -> None:
        """``parameter_dtype``: of parameters and their gradients; kernels get them in the types of the checkpoint.
        With ``recomputes_layers`` a layer's inputs alone are kept for the backward pass."""
        config = model.config if isinstance(model, LLM) else EngineConfig.from_flat({"model": model, **settings})
        _check_settings(config)
        device, path, checkpoint = open_model(config.model)
        config, read, self._form = read_model(config, path, checkpoint, device)
        self._config = _checked_model(read, checkpoint)
        kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, self._form, self._config.cache)
        if kv_dtype not in FLOATS:
            raise ConfigError(f"kv_cache_dtype: {config.cache.kv_cache_dtype} has no gradients; use auto")
        self._cache_form = config.cache.block_size or DEFAULTS[device.type].block_size, kv_dtype
        self._recomputes_layers = recomputes_layers
        self._leaves = _Leaves(checkpoint, parameter_dtype, device, self._config)
        with torch.no_grad():
            loaded = load_model(self._config, self._leaves, self._form)
        if loaded.kept is not None and loaded.kept.has_constants:
            raise CheckpointError(f"config: {self._config.architecture} has weights that kernels get as constants")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters, leaves of autograd's graph, by their names in the checkpoint."""
        return self._leaves.parameters

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as a checkpoint has them: for ``LLM.load_weights``, a broadcast or a file."""
        return self._leaves.weights()

    def model(self) -> CausalLM:
        """The engine's model over the parameters: what is joined or reordered in it is a function of them."""
        model = load_model(self._config, self._leaves, self._form).model
        if self._recomputes_layers:
            model.layers = [_Recomputed(layer, self) for layer in model.layers]  # type: ignore[attr-defined]
        return model

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """In this block ops are recorded by autograd, and rows do not depend on each other."""
        with _ONE_AT_A_TIME, wrapped(recorded), backend_of(self._form.device.type).batch_invariant():
            yield

    def recompute(self, function: Any, *args: Any) -> Any:
        """``function(*args)``, of which ``args`` alone are kept for the backward pass."""
        if not torch.is_grad_enabled():
            return function(*args)
        return recomputed(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), self.recording()),
        )

    def checked(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """The token ids. Raises ``InvalidParameter``."""
        V, sets = self._config.vocab_size, self._config.rope_sets
        longest = self._config.max_position_embeddings if sets is None else sets.original
        for i, tokens in enumerate(sequences):
            name = f"sequences[{i}]"
            if not 2 <= len(tokens) <= longest:
                raise InvalidParameter(name, f"{name} has {len(tokens)} tokens; 2 to {longest} are allowed.")
            if other := [token for token in tokens if type(token) is not int or not 0 <= token < V]:
                raise InvalidParameter(name, f"{name} has {other[0]!r}, which is not a token id from 0 to {V - 1}.")
        if not sequences:
            raise InvalidParameter("sequences", "'sequences' is empty.")
        return [list(tokens) for tokens in sequences]

    def rows(self, lengths: Sequence[int]) -> tuple[list[LayerCache], PagedRows]:
        """A cache for sequences of these lengths, which layers use one after the other, and their places in it."""
        (block_size, dtype), device = self._cache_form, self._form.device
        tables, slots, first = list[list[int]](), list[int](), 0
        for length in lengths:
            count = -(-length // block_size)
            tables.append(list(range(first, first + count)))
            slots += range(first * block_size, first * block_size + length)
            first += count
        widest = max(map(len, tables))
        tables_SB = torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32)
        group = GroupRows(torch.tensor(slots, device=device), tables_SB.to(device))
        lens_S = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), lens_S.cumsum(0, dtype=torch.int32)))
        pools: dict[tuple[int, int], LayerCache] = {}
        for spec in self._config.cache:
            key = spec.num_kv_heads, spec.head_dim
            if key not in pools:
                keys, values = torch.empty(2, first, key[0], block_size, key[1], dtype=dtype, device=device)
                pools[key] = LayerCache(keys, values)
        caches = [pools[spec.num_kv_heads, spec.head_dim] for spec in self._config.cache]
        return caches, PagedRows((group,), starts.to(device), lens_S.to(device), max(lengths))


def forward(policy: Policy, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities of each sequence's tokens but the first, given those before them: float32, with gradients.

    Logits are divided by the ``temperature``, as with ``logprobs_mode`` "processed_logprobs". The bits are those that
    an engine with these weights reports, while sampling and of a prompt. Raises ``InvalidParameter``.
    """
    if not temperature > 0:
        raise InvalidParameter("temperature", f"'temperature' must be above 0, not {temperature}.")
    sequences = policy.checked(sequences)
    lengths = [len(tokens) - 1 for tokens in sequences]
    with policy.recording():
        caches, rows = policy.rows(lengths)
        device = rows.seq_lens_S.device
        ids_T = torch.tensor([token for tokens in sequences for token in tokens[:-1]], device=device)
        next_T = torch.tensor([token for tokens in sequences for token in tokens[1:]], dtype=torch.int32, device=device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        model = policy.model()
        x_TD = model.forward(ids_T, positions_T, caches, rows)

        def score(x_RD: Tensor, tokens_R: Tensor) -> Tensor:
            logits_RV = model.logits(x_RD)
            if temperature != 1.0:
                logits_RV = logits_RV.float() / torch.tensor(temperature, dtype=torch.float32, device=device)
            return ops.token_logprobs(logits_RV, tokens_R, 0).logprob_R

        parts = zip(torch.split(x_TD, LOGITS_ROWS), torch.split(next_T, LOGITS_ROWS), strict=True)
        logprobs_T = torch.cat([policy.recompute(score, *part) for part in parts])
    return list(torch.split(logprobs_T, lengths))


class _Recomputed:
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: Any, policy: Policy) -> None:
        self._layer, self._policy = layer, policy

    def __call__(self, *args: Any) -> Any:
        return self._policy.recompute(self._layer, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Leaves:
    """The tensors of a checkpoint, those that a model loads as parameters; a ``TensorSource``."""

    is_dummy = False

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, config: DecoderConfig) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._names = config.names if config.tie_word_embeddings else None
        self._types: dict[str, torch.dtype] = {}
        self.parameters: dict[str, Tensor] = {}

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._checkpoint.describe(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter in the checkpoint's type; one is made of a tensor that is loaded for the first time."""
        if name not in self._types:
            tensor = self._checkpoint.load(name, shape)
            if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
                raise CheckpointError(f"tensor {name} is quantised, and has no gradient")
            self._types[name] = tensor.dtype
            if self._own(name) == name:
                own = tensor.detach().to(device=self._device, dtype=self._dtype, copy=True)
                self.parameters[name] = own.requires_grad_()
        return self.parameters[self._own(name)].to(self._types[name])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Policy.weights``."""
        for name, dtype in self._types.items():
            yield name, self.parameters[self._own(name)].detach().to(dtype)

    def _own(self, name: str) -> str:
        """The name of the parameter: that of the embedding for a head that is tied to it and stored besides."""
        head = None if self._names is None else f"{self._names.head}.weight"
        if self._names is None or head is None or not name.endswith(head):
            return name
        return f"{name.removesuffix(head)}{self._names.embedding}.weight"


def _check_settings(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for settings with which the engine computes what this does not."""
    settings = config.model
    refused = {
        "backend": settings.backend != "octavo" and settings.backend,
        "load_format": settings.load_format == "dummy" and "dummy",
        "merge_lora": settings.merge_lora and "true",
        "quantization": settings.quantization,
        "pipeline_parallel_size": settings.pipeline_parallel_size > 1 and settings.pipeline_parallel_size,
        "quantize_lm_head": settings.quantize_lm_head and "true",
        "tensor_parallel_size": settings.tensor_parallel_size > 1 and settings.tensor_parallel_size,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(f"{name}: {value} has no gradients; octavo.train takes unquantised dense decoders whole")


def _checked_model(config: ModelConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """The configuration of a dense decoder. Raises ``CheckpointError`` for a model of another kind."""
    if (method := quant_method(checkpoint)) is not None:
        raise CheckpointError(f"config: the weights are quantised ({method}), and have no gradients")
    if not isinstance(config, DecoderConfig) or not config.has_head:
        reason = "is no decoder with a head"
    elif not all(isinstance(part.mlp, MLPPart) for part in config.layers):
        reason = "is a mixture of experts"
    elif any(part.cache is not None or part.attention.shared_with is not None for part in config.layers):
        reason = "has layers without keys and values of their own"
    else:
        return config
    raise CheckpointError(f"config: {config.architecture} {reason}; octavo.train takes dense decoders")
