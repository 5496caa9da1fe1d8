"""What draft heads have in common: they continue a model's hidden states, one token at a time.

Shapes: T rows, S sequences, R rows that are needed, D width of the head, E width of the model, V
vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.models.decoder import Decoder
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.loader import WeightLoader
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import Collective
from octavo.quant.checkpoint_tensors import Renamed, TensorSource
from octavo.quant.methods import QuantMethod
from octavo.quant.stored.shard import Shard
from octavo.quant.stored.stored_weight import WeightFormat


class DraftHead(Protocol):
    """A few layers over the hidden states of a model. Row t holds the model's state at position t and token t + 1; its
    output predicts token t + 2."""

    layers: tuple[int, ...]
    """Layers of the model whose inputs it needs; the number of layers stands for the last layer's output."""
    cache: tuple[LayerCacheSpec, ...]
    """What its own layers cache."""
    num_bytes: int
    """Bytes of its own weights."""
    vocab_size: int
    target_ids: Tensor | None
    """int64 [V]: the model's token for each one of the head's vocabulary; ``None``: they are the same."""

    def combine(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The head's input [T, D] from the model's hidden states [T, E] by layer."""
        ...

    def forward(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        """The output, [T, D], or [R, D] with logits indices; may overwrite ``hidden``."""
        ...

    def remember(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        """Store the keys and values that ``forward`` stores."""
        ...

    def feedback(self, x_SD: Tensor) -> Tensor:
        """The input of the next position, in place of ``combine``, from the output at this one."""
        ...

    def logits(self, x_SD: Tensor) -> Tensor:
        """Logits [S, V] from the output; on several ranks, those of this rank's part of V."""
        ...


def part_loader(
    source: TensorSource, names: Mapping[str, str], form: WeightFormat, method: QuantMethod, collective: Collective
) -> WeightLoader:
    """Loads this rank's part of a drafter, whose ``names`` lead to those in ``source``."""
    shard = Shard(collective.rank, collective.size)
    return WeightLoader(Renamed(source, names), form, method=method, shard=shard, collective=collective)


def drafted(model: CausalLM, method: str) -> Decoder:
    """``model``, whose embedding and head a drafter may share. Raises ``CheckpointError`` for other kinds."""
    if not isinstance(model, Decoder):
        raise CheckpointError(f"speculative_config: {method} is not supported for {type(model).__name__}")
    return model
