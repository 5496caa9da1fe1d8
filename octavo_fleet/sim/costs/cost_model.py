"""Cost models of a step's duration: the roofline of a model on a device, or a fit to timed steps."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from octavo.config import CacheSettings
from octavo.engine.timing.step_model import StepWork
from octavo.errors import ConfigError
from octavo.steps.limits import StateSize
from octavo_fleet.sim.costs.devices import LAYER_SECONDS, LINK_LATENCY, Device
from octavo_fleet.sim.costs.roofline import Shape

VALUE_BYTES = 2


class CostModel(Protocol):
    """The time of a step."""

    def seconds(self, work: StepWork) -> float:
        """Seconds from the start of a step to its sampled tokens."""
        ...

    def of_replica(self, number: int) -> CostModel:
        """The cost model of one replica, with its own random stream if the model is random."""
        return self


def kv_parts(shape: Shape, tensor_parallel: int) -> int:
    """Into how many parts so many devices divide the KV cache. Raises ``ConfigError`` if they cannot."""
    parts = min(shape.kv_heads, tensor_parallel)
    if shape.kv_heads % parts or tensor_parallel % parts or shape.heads % tensor_parallel:
        raise ConfigError(f"tensor_parallel: {tensor_parallel} does not divide the {shape.kv_heads} kv heads")
    return parts


class Roofline(CostModel):
    """Matrices, the layers after the last attention (only for rows that sample a token), attention and recurrent states
    each take the longer of moving their bytes and doing their arithmetic.

    ``tensor_parallel`` devices share the work evenly and all-reduce twice per layer: 2 (p - 1) / p of the activations
    cross each link (ring all-reduce). Where there are fewer KV heads than devices, several read the same.
    """

    def __init__(
        self,
        shape: Shape,
        device: Device,
        tensor_parallel: int = 1,
        weight_bytes: float = VALUE_BYTES,
        kv_bytes: float = VALUE_BYTES,
        context_parts: int = 1,
    ) -> None:
        """``weight_bytes`` and ``kv_bytes``: those of one number. ``context_parts``: of the devices, how many divide
        each context; in every layer they exchange queries, and results in 32 bits."""
        parts = kv_parts(shape, tensor_parallel)
        bandwidth, arithmetic = device.bandwidth * tensor_parallel, device.arithmetic * tensor_parallel
        self._shape = shape
        self._seconds_a_weight = (weight_bytes / bandwidth, 2 / arithmetic)
        self._last_active = shape.last_weights_read(1)
        self._body_active = shape.active_weights - self._last_active
        self._attention = (
            shape.kv_values_per_token * kv_bytes / (device.bandwidth * parts * context_parts),
            shape.pair_flops / arithmetic,
        )
        self._states = 2 * shape.state_bytes / bandwidth, shape.state_flops / arithmetic
        self._base = shape.layers * LAYER_SECONDS
        self._per_token = 0.0
        if tensor_parallel > 1:
            self._base += 2 * shape.layers * LINK_LATENCY
            crossing = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden * VALUE_BYTES
            self._per_token = 2 * shape.layers * crossing / device.link
        if context_parts > 1:
            attending = shape.layers if shape.attention_layers is None else shape.attention_layers
            self._base += 2 * attending * LINK_LATENCY
            results = (context_parts - 1) * 2 * VALUE_BYTES
            sent = ((tensor_parallel - 1) * VALUE_BYTES + results) * shape.heads * shape.head_dim / tensor_parallel
            self._per_token += attending * sent / device.link

    def seconds(self, work: StepWork) -> float:
        tokens, rows, context, pairs, *_ = work
        moving, computing = self._seconds_a_weight
        body_read = self._shape.weights_read(tokens) - self._shape.last_weights_read(tokens)
        body = max(moving * body_read, computing * self._body_active * tokens)
        last = max(moving * self._shape.last_weights_read(rows), computing * self._last_active * rows) if rows else 0.0
        attention = max(self._attention[0] * context, self._attention[1] * pairs)
        states = max(self._states[0] * rows, self._states[1] * tokens)
        return self._base + self._per_token * tokens + body + last + attention + states


class Pools(NamedTuple):
    """What the memory next to the weights is divided into."""

    num_blocks: int
    states: StateSize | None = None


def pools_of(
    shape: Shape,
    device: Device,
    tensor_parallel: int,
    cache: CacheSettings,
    sizes: tuple[int, int],
    weight_bytes: float,
) -> Pools:
    """The KV cache blocks and recurrent states that fit, with ``sizes``: of a block, and most sequences of a step. As
    in an engine, half of what is left for both is for snapshots. Raises ``ConfigError`` if no block fits."""
    block_size, max_num_seqs = sizes
    embedding = shape.hidden * shape.vocab
    weights = (shape.matrix_weights + embedding) * weight_bytes
    memory = device.memory * tensor_parallel * cache.gpu_memory_utilization
    copies = tensor_parallel // kv_parts(shape, tensor_parallel)
    per_token, per_state = copies * shape.kv_values_per_token * VALUE_BYTES, shape.state_bytes
    room, states, num_snapshots = memory - weights - max_num_seqs * per_state, None, 0
    if per_state:
        num_snapshots = 0 if cache.num_state_snapshots is None else cache.num_state_snapshots
        if cache.num_state_snapshots is None and cache.enable_prefix_caching:
            num_snapshots = max(0, int(room / 2 // per_state))
        states = StateSize(max_num_seqs + num_snapshots, max_num_seqs, -(-per_state // per_token))
    count = cache.num_kv_blocks or int((room - num_snapshots * per_state) // (per_token * block_size))
    if count < 1:
        held = f" and the states of {max_num_seqs} sequences" if per_state else ""
        raise ConfigError(
            f"device: the weights{held} take {(memory - room) / 1e9:.0f} GB, and {tensor_parallel} {device.name} have "
            f"{memory / 1e9:.0f} GB; raise tensor_parallel"
        )
    return Pools(count, states)
