"""Pooling settings: how token vectors become the embedding of a text, or of its tokens.

Checkpoints for sentence-transformers store them in ``modules.json`` and in the configuration of their pooling module
(https://sbert.net/docs/package_reference/sentence_transformer/modules.html). Linear maps before the pooling, or where
there is none, are of tokens; those behind it are of texts.

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.layers.linear import Linear
from octavo.layers.mlp import PlainActivation, gelu, relu
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.labels import tanh
from octavo.models.loader import WeightLoader
from octavo.ops.elementwise import sigmoid
from octavo.quant.checkpoint_tensors import Renamed, TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.folder import read_json, read_list
from octavo.weights.pytorch import PytorchFile

logger = logging.getLogger(__name__)

Kind = Literal["cls", "mean", "last", "splade"]

MODES: dict[str, Kind | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
NEWER_MODES: dict[str, Kind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Values of ``pooling_mode``, which newer files have instead of one flag per mode."""
M3_FILES = ("colbert_linear.pt", "sparse_linear.pt")
KNOWN_MODULES = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize")
FUNCTIONS: dict[str, PlainActivation | None] = {
    "Identity": None,
    "Tanh": tanh,
    "ReLU": relu,
    "GELU": gelu,
    "Sigmoid": sigmoid,
}
"""Activations of linear maps, by the last part of their names in torch."""


@dataclass(frozen=True)
class DensePart:
    """A linear map of vectors, in a folder of its own."""

    path: Path
    """Of the folder, or of a PyTorch file of the map alone."""
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: PlainActivation | None


@dataclass(frozen=True)
class Pooling:
    """The kind of pooling, and whether the result is normalised to length 1.

    That of the first token, the last one, or the mean; with "splade" a text's vector has a number for each token of the
    vocabulary: log(1 + the largest of its logits at any token), or 0 (arXiv 2107.05720).
    """

    kind: Kind
    normalizes: bool = True
    of_tokens: tuple[DensePart, ...] = ()
    """Maps of token vectors."""
    of_texts: tuple[DensePart, ...] = ()
    """Maps of the pooled vector."""
    is_of_tokens: bool = False
    """Whether the model is for vectors of tokens alone."""
    vectors: tuple[DensePart, ...] = ()
    """Of a model of the kind of BGE-M3 (arXiv 2402.03216): the map of tokens for the task of their vectors, which
    leaves out the first token."""
    weights: tuple[DensePart, ...] = ()
    """And that to a number for each token, but for the first and the last: its weight in a sparse vector."""

    def sizes(self, width: int) -> tuple[int, int]:
        """The dimensions of a token's vector and of a text's, of a model of this width. Raises ``CheckpointError``."""
        of_token = _width_behind(self.of_tokens, width)
        _width_behind(self.weights, width)
        return _width_behind(self.vectors or self.of_tokens, width), _width_behind(self.of_texts, of_token)


def _width_behind(parts: Sequence[DensePart], width: int) -> int:
    for part in parts:
        if part.num_inputs != width:
            raise CheckpointError(f"{part.path}: in_features is {part.num_inputs}; vectors have {width} numbers")
        width = part.num_outputs
    return width


def read_pooling(path: Path, requested: str, is_encoder: bool, load_format: str = "auto") -> Pooling:
    """The pooling of the checkpoint at ``path``; the setting ``requested`` overrides it if not "auto".

    The maps of BGE-M3 are PyTorch files, which are read with the load format ``pt`` alone.
    The default is the mean for encoders and the last token for decoders, normalised to length 1. Raises
    ``CheckpointError`` for unsupported modules, and ``ConfigError`` for a kind that the model cannot use.
    """
    found = _from_modules(path) if path.is_dir() else None
    pooling = found or Pooling("mean" if is_encoder else "last")
    if is_encoder and all((path / name).exists() for name in M3_FILES):
        if load_format == "pt":
            vectors, weights = (_of_file(path / name) for name in M3_FILES)
            weights = dataclasses.replace(weights, activation=relu)
            pooling = dataclasses.replace(pooling, vectors=(vectors,), weights=(weights,))
        else:
            logger.info("%s are left out: they are read with load_format pt alone", " and ".join(M3_FILES))
    if requested != "auto":
        normalizes = pooling.normalizes and requested != "splade"
        pooling = dataclasses.replace(pooling, kind=cast(Kind, requested), normalizes=normalizes)
    if pooling.kind == "cls" and not is_encoder:
        raise ConfigError("pooling_type: cls is for encoders: a decoder's first token attends to itself alone")
    if pooling.kind == "splade" and not is_encoder:
        raise ConfigError("pooling_type: splade is for encoders with a map to their vocabulary")
    return pooling


def _of_file(path: Path) -> DensePart:
    """The linear map in a PyTorch file of its own."""
    file = PytorchFile(path)
    shape = file.describe("weight")[1] if "weight" in file.names() else ()
    if len(shape) != 2 or "bias" not in file.names():
        raise CheckpointError(f"{path}: must hold the weight and the bias of a linear map")
    return DensePart(path, shape[1], shape[0], True, None)


def _from_modules(folder: Path) -> Pooling | None:
    modules = read_list(folder, "modules.json")
    if modules is None:
        return None
    pooling: Kind | None = None
    normalizes = False
    of_tokens: list[DensePart] = []
    of_texts: list[DensePart] = []
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else str(module)
        if kind not in KNOWN_MODULES:
            raise CheckpointError(f"{folder / 'modules.json'}: {kind} is not one of {', '.join(KNOWN_MODULES)}")
        if kind == "Pooling":
            pooling = _kind(folder, str(module.get("path")))
        if kind == "SpladePooling":
            keys = _module_config(folder, str(module.get("path")))
            keys.must_be({"pooling_strategy": ("max",), "activation_function": ("relu",)})
            return Pooling("splade", normalizes=False)
        if kind == "Dense":
            (of_texts if pooling else of_tokens).append(_dense(folder, str(module.get("path"))))
        normalizes = normalizes or kind == "Normalize"
    if pooling is None and of_tokens:  # vectors of tokens are normalised without a module that says so
        return Pooling("mean", True, tuple(of_tokens), is_of_tokens=True)
    return Pooling(pooling or "mean", normalizes, tuple(of_tokens), tuple(of_texts))


def _module_config(folder: Path, name: str) -> ConfigKeys:
    if Path(name).name != name or name in (".", ".."):
        raise CheckpointError(f"{folder / 'modules.json'}: path {name[:100]!r} must be the name of a folder")
    values: dict[str, Any] | None = read_json(folder / name, "config.json")
    if values is None:
        raise CheckpointError(f"{folder / name}: there is no config.json")
    return ConfigKeys(values)


def _kind(folder: Path, name: str) -> Kind:
    keys = _module_config(folder, name)
    if keys.get("pooling_mode") is not None:
        return keys.choice("pooling_mode", NEWER_MODES)
    chosen = [mode for mode in MODES if keys.flag(mode)]
    if not keys.flag("include_prompt", True):
        raise wrong("include_prompt", False, "true")
    kind = MODES[chosen[0]] if len(chosen) == 1 else None
    if kind is None:
        raise wrong("pooling_mode", chosen, "one of " + ", ".join(mode for mode in MODES if MODES[mode]))
    return kind


def _dense(folder: Path, name: str) -> DensePart:
    keys = _module_config(folder, name)
    function = str(keys.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if function not in FUNCTIONS:
        raise wrong("activation_function", function, f"one of {', '.join(FUNCTIONS)}")
    keys.must_be({"use_residual": (False,)})
    return DensePart(
        folder / name, keys.size("in_features"), keys.size("out_features"), keys.flag("bias", True), FUNCTIONS[function]
    )


class Dense:
    """Linear maps with their weights, one after the other, in float32."""

    def __init__(self, parts: Sequence[DensePart], load_format: str, form: WeightFormat) -> None:
        """Read the weights. Raises ``CheckpointError``."""
        exact = WeightFormat(torch.float32, form.device, outlined_for=form.outlined_for)
        self._maps: list[tuple[Linear, PlainActivation | None]] = []
        for part in parts:
            source: TensorSource
            if part.path.is_file():
                names = {"linear.weight": "weight", "linear.bias": "bias"}
                source = Renamed(PytorchFile(part.path), names)
            else:
                source = open_checkpoint(part.path, "pt" if load_format == "pt" else "safetensors")
            weights = WeightLoader(source, exact)
            linear = weights.replicated("linear", part.num_outputs, part.num_inputs, part.has_bias)
            weights.tensors.finish()
            self._maps.append((linear, part.activation))

    def __call__(self, x_RK: Tensor) -> Tensor:
        """The last map's outputs [R, N], float32."""
        x_RK = x_RK.float()
        for linear, activation in self._maps:
            x_RK = linear(x_RK)
            if activation is not None:
                x_RK = activation(x_RK)
        return x_RK


def longest_text(path: Path) -> int | None:
    """The checkpoint's ``max_seq_length`` in tokens, special tokens included; ``None`` if absent."""
    values = read_json(path, "sentence_bert_config.json") if path.is_dir() else None
    return None if values is None or values.get("max_seq_length") is None else ConfigKeys(values).size("max_seq_length")
