"""What a choice of kernels has to know of a product with packed weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.ops.linear.grouped_linear import Number, PackedGroups, chunk_of


class GroupedProduct(NamedTuple):
    """A product of any number of rows [T, K] with a packed weight [N, K]."""

    number: Number
    groups: int
    """Of inputs; 1 for a scale per output."""
    N: int
    K: int
    is_gated: bool
    """Whether half of the N outputs are gates."""
    dtype: torch.dtype = torch.bfloat16
    """Of activations."""
    has_zeros: bool = False
    has_minima: bool = False
    scale_bytes: int = 2

    @classmethod
    def of(cls, packed: PackedGroups, is_gated: bool, dtype: torch.dtype) -> GroupedProduct:
        """The product of activations of this type with this weight."""
        return cls(
            packed.number,
            len(packed.scales_GN),
            *packed.shape,
            is_gated,
            dtype,
            packed.zeros_GN is not None,
            packed.minima_GN is not None,
            packed.scales_GN.element_size(),
        )

    @property
    def outputs(self) -> int:
        return self.N // 2 if self.is_gated else self.N

    @property
    def weights(self) -> int:
        """Rows of the weight for each output."""
        return 2 if self.is_gated else 1

    @property
    def chunks(self) -> int:
        """Of columns, that lie together in the weight."""
        return -(-self.K // chunk_of(self.number))

    @property
    def parts(self) -> int:
        """Of a chunk of columns, each with a scale of its own."""
        return 1 if self.groups == 1 else max(1, chunk_of(self.number) * self.groups // self.K)
