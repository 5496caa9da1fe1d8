"""Linear maps.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.quant.scheme import LinearWeight


class Linear:
    """``x @ weight.T + bias``, where the weight may be several maps side by side (query, key and value, say).

    Parts that are stored alike are one weight; the outputs of the others are put beside each other.
    """

    def __init__(self, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> None:
        self.weights = list(weights)
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        outputs = [weight.apply(x_TK) for weight in self.weights]
        y_TN = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y_TN if self.bias_N is None else y_TN.add_(self.bias_N)
