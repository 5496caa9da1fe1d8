"""Cost models of a step's duration: the roofline of a model on a device, or a fit to timed steps."""

from __future__ import annotations

from typing import Protocol

from octavo.engine.step_times import StepWork
from octavo.errors import ConfigError
from octavo_fleet.sim.devices import LAYER_SECONDS, LINK_LATENCY, Device
from octavo_fleet.sim.roofline import Shape

VALUE_BYTES = 2


class CostModel(Protocol):
    """The time of a step."""

    def seconds(self, work: StepWork) -> float:
        """Seconds from the start of a step to its sampled tokens."""
        ...

    def of_replica(self, number: int) -> CostModel:
        """The cost model of one replica, with its own random stream if the model is random."""
        return self


class Roofline(CostModel):
    """Matrices, the layers after the last attention (only for rows that sample a token), and attention each take the
    longer of moving their bytes and doing their arithmetic.

    ``tensor_parallel`` devices share the work evenly and all-reduce twice per layer: 2 (p - 1) / p of the activations
    cross each link (ring all-reduce).
    """

    def __init__(
        self, shape: Shape, device: Device, tensor_parallel: int = 1, weight_bytes: float = VALUE_BYTES
    ) -> None:
        if shape.kv_heads % tensor_parallel or shape.heads % tensor_parallel:
            raise ConfigError(f"tensor_parallel: {tensor_parallel} does not divide the {shape.kv_heads} kv heads")
        bandwidth, arithmetic = device.bandwidth * tensor_parallel, device.arithmetic * tensor_parallel
        self._shape = shape
        self._seconds_a_weight = (weight_bytes / bandwidth, 2 / arithmetic)
        self._last_active = shape.last_weights_read(1)
        self._body_active = shape.active_weights - self._last_active
        self._attention = (shape.kv_values_per_token * VALUE_BYTES / bandwidth, shape.pair_flops / arithmetic)
        self._base = shape.layers * LAYER_SECONDS
        self._per_token = 0.0
        if tensor_parallel > 1:
            self._base += 2 * shape.layers * LINK_LATENCY
            crossing = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden * VALUE_BYTES
            self._per_token = 2 * shape.layers * crossing / device.link

    def seconds(self, work: StepWork) -> float:
        tokens, rows, context, pairs, *_ = work
        moving, computing = self._seconds_a_weight
        body_read = self._shape.weights_read(tokens) - self._shape.last_weights_read(tokens)
        body = max(moving * body_read, computing * self._body_active * tokens)
        last = max(moving * self._shape.last_weights_read(rows), computing * self._last_active * rows) if rows else 0.0
        attention = max(self._attention[0] * context, self._attention[1] * pairs)
        return self._base + self._per_token * tokens + body + last + attention


def num_blocks_of(
    shape: Shape, device: Device, tensor_parallel: int, block_size: int, utilization: float, weight_bytes: float
) -> int:
    """Number of KV cache blocks that fit next to the weights; raise ``ConfigError`` if none fits."""
    embedding = shape.hidden * shape.vocab
    weights = (shape.matrix_weights + embedding) * weight_bytes
    room = device.memory * tensor_parallel * utilization - weights
    count = int(room // (shape.kv_values_per_token * VALUE_BYTES * block_size))
    if count < 1:
        raise ConfigError(
            f"device: the weights take {weights / 1e9:.0f} GB, and {tensor_parallel} {device.name} have "
            f"{device.memory * tensor_parallel * utilization / 1e9:.0f} GB; raise tensor_parallel"
        )
    return count
