"""``grouped_output_mlp`` for CUDA devices: one kernel for one row where the weights suit it.

Shapes: T rows, D model, A attention's outputs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups, grouped_output_mlp
from octavo.ops.linear.linear import Activation
from octavo_kernels.hopper.streamed_configs import OutputMLPConfig, output_mlp_config
from octavo_kernels.triton.grouped.grouped_linear import declines_grouped
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import allows_grid_barriers, is_invariant
from octavo_kernels.triton.tuning.product_calls import is_collecting


@grouped_output_mlp.kernel(device="cuda", name="triton", preference=10, supports=declines_grouped)
def grouped_output_mlp_triton(
    attended_TA: Tensor,
    x_TD: Tensor,
    output: PackedGroups,
    norm_D: Tensor,
    eps: float,
    gate_up: PackedGroups,
    down: PackedGroups,
    activation: Activation,
) -> Tensor:
    """See ``ops.grouped_output_mlp``. While products are collected, each is called by itself as for several rows."""
    config = None
    if len(x_TD) == 1 and allows_grid_barriers() and not is_invariant() and not is_collecting():
        config = config_of(output, gate_up, down, x_TD)
    if config is None:
        return grouped_output_mlp.reference(attended_TA, x_TD, output, norm_D, eps, gate_up, down, activation)
    from octavo_kernels.hopper.streamed_output_mlp import streamed_output_mlp

    attended_TA, x_TD = attended_TA.contiguous(), x_TD.contiguous()
    return streamed_output_mlp(attended_TA, x_TD, output, norm_D, eps, gate_up, down, activation, config)


def config_of(output: PackedGroups, gate_up: PackedGroups, down: PackedGroups, x_1D: Tensor) -> OutputMLPConfig | None:
    """The tiling for these weights, or ``None`` if one kernel cannot compute all of it."""
    weights = output, gate_up, down
    sides = [(packed.scales_GN, packed.minima_GN) for packed in weights]
    dtypes = {tuple(None if side is None else side.dtype for side in both) for both in sides}
    if len(dtypes) > 1 or any(packed.order_K is not None for packed in weights):
        return None
    products = [GroupedProduct.of(packed, packed is gate_up, x_1D.dtype) for packed in weights]
    return output_mlp_config(products, x_1D.device)
