"""The configuration fields common to all models; each family adds its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError
from octavo.layers.rotary import DefaultRope
from octavo.model_info import RoutesInfo
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.labels import LabelPart
from octavo.models.layer_cache import ONE_STAGE, LayerCacheSpec, PipelineStage
from octavo.ops.linear.linear import Activation
from octavo.quant.formats.plain import PLAIN
from octavo.quant.methods import QuantMethod
from octavo.steps.limits import RopeSets
from octavo.weights.generation_config import token_ids

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration that the runtime uses. ``ffn_size`` is the widest feed-forward layer that a token uses."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    num_streams: int = 1
    """Residual streams, side by side."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for full attention; empty where all layers have full attention."""
    quantization: QuantMethod = PLAIN
    """How the checkpoint stores its matrices."""
    has_head: bool = True
    """Whether the checkpoint's model has logits of tokens."""
    labels: LabelPart | None = None
    """The classification head, if the checkpoint has one."""
    routes: RoutesInfo | None = None
    """What shall be kept of its routers, if anything; known when it is loaded."""
    stage: PipelineStage = ONE_STAGE
    """The part of its layers that this device computes."""

    @property
    def cache(self) -> tuple[LayerCacheSpec, ...]:
        """What each layer caches; overridden by families whose layers differ in more than windows."""
        windows = self.windows or (0,) * self.num_layers
        return tuple(LayerCacheSpec(self.num_kv_heads, self.head_dim, window) for window in windows)

    @property
    def num_chosen_experts(self) -> int:
        """Most experts that a layer selects for each token."""
        return 0

    @property
    def has_stages(self) -> bool:
        """Whether layers need no more than positions and what the layer before gives, so that ranks may divide them."""
        return False

    @property
    def rotary_embeddings(self) -> tuple[DefaultRope, ...]:
        """Those that layers of the model choose from."""
        return ()

    @property
    def rope_sets(self) -> RopeSets | None:
        """When texts have which rotary frequencies; ``None``: all have the same."""
        found = {rope.sets for rope in self.rotary_embeddings if rope.sets is not None}
        if len(found) > 1:
            raise CheckpointError("config: rope_parameters: kinds of layers differ in the original length of a context")
        return next(iter(found), None)

    @property
    def embedding_width(self) -> int:
        """Width of the table of embeddings; overridden by families that project them to that of the model."""
        return self.hidden_size

    @property
    def num_stored_layers(self) -> int:
        """Layers by the names in a checkpoint; overridden by families of which one is several here."""
        return self.num_layers

    @property
    def stream_size(self) -> int:
        """Most numbers of the model's dtype that a token takes between two layers; overridden by families that keep
        more there than residual streams of that type."""
        return self.num_streams * self.hidden_size

    @property
    def num_output_groups(self) -> int:
        """Groups of heads that have a map of their own behind attention; 1: there are none."""
        return 1

    @property
    def query_rows(self) -> int:
        """Rows of the query projection; overridden by families that store more than queries in it."""
        return self.num_heads * self.head_dim

    @property
    def dense_context(self) -> int:
        """Positions of the longest context to all of which layers attend whose rows else attend to chosen ones; 0: the
        model has no such layers."""
        return 0

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        """Bytes of what a GPU makes of the cache for attention of a step's tokens, for contexts of up to ``longest``:
        keys and values that it expands, or scores of what an indexer chooses among and its choice."""
        return 0


def read_common(
    keys: ConfigKeys,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    ffn_size: int | None = None,
    num_layers: int | None = None,
    positions: int | None = None,
) -> dict[str, Any]:
    """The fields of ``ModelConfig`` that nearly every family reads from the same keys.

    Arguments are a family's defaults of tied embeddings, head dimension, norm epsilon, the width of feed-forward
    layers, the number of layers and the longest context.
    """
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    if keys.get("head_dim", head_dim) is None and hidden_size % num_heads:
        raise wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}")
    return {
        "architecture": architecture(keys),
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": hidden_size,
        "ffn_size": keys.size("intermediate_size", ffn_size),
        "num_layers": keys.size("num_hidden_layers", num_layers),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": keys.size("head_dim", head_dim or hidden_size // num_heads),
        "norm_eps": keys.number(eps_key, eps),
        "max_position_embeddings": keys.size("max_position_embeddings", positions),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", tied),
        "eos_token_ids": token_ids({"eos_token_id": keys.get("eos_token_id")}, "eos_token_id"),
    }


def architecture(keys: ConfigKeys) -> str:
    """The first of the ``architectures``, or "None"."""
    names = keys.get("architectures", [None])
    return str(names[0]) if isinstance(names, list | tuple) and names else "None"


def read_layer_types(keys: ConfigKeys, slides: Callable[[int], object] = lambda i: False) -> tuple[str, ...]:
    """FULL or SLIDING for each layer: from ``layer_types``, or by what ``slides`` says of the layer's number."""
    count = keys.size("num_hidden_layers")
    given = keys.choices("layer_types", (FULL, SLIDING), count)
    return given or tuple(SLIDING if slides(i) else FULL for i in range(count))


def layer_windows(types: Sequence[str], window: int | None, max_len: int) -> tuple[int, ...]:
    """The sliding window of each layer in positions, 0 for full attention.

    ``window`` is that of the sliding layers, ``None`` if the configuration has none; a window of at least ``max_len``
    is full attention.
    """
    if window is None and SLIDING in types:
        raise wrong("sliding_window", None, "an integer, as layer_types has sliding_attention")
    width = 0 if window is None or window >= max_len else window
    return tuple(width if kind == SLIDING else 0 for kind in types)
