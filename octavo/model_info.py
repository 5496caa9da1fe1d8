"""What is known of a loaded model wherever it is used."""

from __future__ import annotations

from typing import Literal

import msgspec

LabelActivation = Literal["sigmoid", "softmax", "none"]
"""What makes a classifier's scores of its logits."""


class KVGroupInfo(msgspec.Struct, frozen=True):
    """Layers that share one block table per sequence."""

    window: int
    """Sliding window in tokens; 0: full attention."""
    num_layers: int
    num_blocks: int


class RoutesInfo(msgspec.Struct, frozen=True):
    """What the routers of a mixture select for each position."""

    num_layers: int
    """All layers of the model; those without experts have zeros."""
    num_chosen: int
    num_experts: int
    layers: tuple[int, ...]
    """Those with experts."""
    takes_given: bool = True
    """Whether requests may give experts to take."""

    @property
    def itemsize(self) -> int:
        """Bytes of an expert's number, an unsigned integer."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def num_bytes(self) -> int:
        """Bytes of one position."""
        return self.num_layers * self.num_chosen * self.itemsize


class PoolingInfo(msgspec.Struct, frozen=True):
    """What a model's vectors and logits mean."""

    normalizes: bool = True
    """Whether embeddings are normalised to length 1; those in ``Output`` are not yet."""
    token_size: int = 0
    """Dimension of a token's embedding."""
    is_sparse: bool = False
    """Whether a text's embedding has a number for each token of the vocabulary, most of them 0."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, in the order of their logits."""
    activation: LabelActivation = "none"
