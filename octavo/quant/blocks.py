"""Block weights computed with as they are: GGUF's Q4_0 to Q8_0 and Q4_K to Q6_K, repacked once for the kernel.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.block_linear import KINDS, PackedBlocks, block_linear
from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear import Activation
from octavo.weights.blocks import BlockTensor


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight in panels; the activations must be float32."""

    packed: PackedBlocks

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        return block_linear(x_TK, self.packed, bias_N, norm_K, eps, residual_TN, activation)


class PackedBlockScheme:
    """Used where ``block_linear`` has a kernel: its reference would widen the whole weight at every call."""

    kinds = KINDS

    def declines(self, device: str) -> str | None:
        if block_linear.chosen(device, torch.float32) != REFERENCE:
            return None
        choices = block_linear.choices(device, torch.float32)
        reasons = [f"{choice.kernel}: {choice.reason}" for choice in choices if not choice.chosen]
        return "; ".join(reasons) or f"block_linear has no kernel for {device}"

    def pack(self, blocks: BlockTensor) -> BlockWeight:
        return BlockWeight(PackedBlocks.pack(blocks))
