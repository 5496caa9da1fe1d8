"""Builds a fleet from the user's choice of model, device and engine settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.weights.safetensors import read_configs
from octavo_fleet.sim.costs.cost_model import VALUE_BYTES, CostModel, Roofline, pools_of
from octavo_fleet.sim.costs.devices import Device, find_device
from octavo_fleet.sim.costs.fitted import fit, read_log
from octavo_fleet.sim.costs.roofline import Shape, shape_of
from octavo_fleet.sim.event_loop import Transfer
from octavo_fleet.sim.jobs import Workload
from octavo_fleet.sim.replica import ReplicaSizes
from octavo_fleet.sim.shapes import SHAPES
from octavo_fleet.sim.simulate import Fleet
from octavo_fleet.sim.traces import Trace
from octavo_fleet.sim.workloads import WithinContext, make_workload

TRANSFER_RATE = 0.4e9
"""Bytes of keys and values that one connection of ``octavo.cache.kv_channel`` carried for each second of a core."""
HANDOVER_SECONDS = 0.005
"""Of two further requests, and of asking for what there is: an assumption."""
BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, DEPTH = 64, 256, 8192, 2
"""Defaults of an engine on CUDA devices."""


@dataclass(frozen=True)
class SimulationSpec:
    """Specification of a simulation."""

    model: str
    device: str
    workload: str
    num_requests: int
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    replicas: int = 1
    tensor_parallel: int = 1
    router: str = "least-loaded"
    weight_bits: float = 16
    cost_log: Path | None = None
    depth: int = DEPTH
    seed: int = 0
    prefill_replicas: int = 0
    """Of the replicas, those that compute prompts for the others."""
    transfer_rate: float = TRANSFER_RATE
    """Bytes a second of keys and values, from one replica to another."""
    answer_seconds: float = 0.0
    """What an answer takes, for the number of conversations at the start."""

    def fleet(self, engine: EngineConfig) -> Fleet:
        """The engines. Raises ``ConfigError``."""
        config = read_model(self.model)
        shape, device = shape_of(config), find_device(self.device)
        cache, scheduler = engine.cache, engine.scheduler
        block_size = cache.block_size or BLOCK_SIZE
        weight_bytes = self.weight_bits / 8
        max_tokens = scheduler.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, scheduler.max_num_seqs or 0)
        max_num_seqs = scheduler.max_num_seqs or min(MAX_NUM_SEQS, max_tokens)
        pools = pools_of(shape, device, self.tensor_parallel, cache, (block_size, max_num_seqs), weight_bytes)
        if not 0 <= self.prefill_replicas < self.replicas:
            raise ConfigError(f"prefill_replicas: must be at least 0 and below the {self.replicas} replicas")
        per_token = shape.kv_values_per_token * VALUE_BYTES / self.transfer_rate
        return Fleet(
            self._cost(shape, device, weight_bytes),
            ReplicaSizes(pools.num_blocks, block_size, max_num_seqs, max_tokens, self.depth, pools.states),
            self.replicas,
            self.tensor_parallel,
            self.router,
            cache,
            scheduler,
            self.prefill_replicas,
            Transfer(HANDOVER_SECONDS + shape.state_bytes / self.transfer_rate, per_token),
        )

    def at_its_rate(self, figures: Mapping[str, Any]) -> SimulationSpec:
        """The same if its rate was reached; else with the time of its answers, which delay turns of conversations."""
        if self.answer_seconds or self.rate is None or figures["offered_per_second"] >= 0.95 * self.rate:
            return self
        return replace(self, answer_seconds=figures["e2el"]["mean"])

    def _cost(self, shape: Shape, device: Device, weight_bytes: float) -> CostModel:
        if self.cost_log is None:
            return Roofline(shape, device, self.tensor_parallel, weight_bytes)
        if self.tensor_parallel != 1:
            raise ConfigError("tensor_parallel: a cost log holds the steps of one engine as it was; leave it at 1")
        return fit(*read_log(self.cost_log), seed=self.seed)

    def clients(self) -> Workload:
        """The workload, within the model's context. Raises ``ConfigError``."""
        config = read_model(self.model)
        limit = config.get("max_position_embeddings") or config.get("n_positions") or 1 << 30
        if Path(self.workload).is_file():
            return WithinContext(Trace(Path(self.workload), self.num_requests), limit)
        made = make_workload(
            self.workload,
            self.num_requests,
            rate=self.rate,
            burstiness=self.burstiness,
            concurrency=self.concurrency,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=self.seed,
            is_steady=True,
            answer_seconds=self.answer_seconds,
        )
        return WithinContext(made, limit)


def read_model(name: str) -> Mapping[str, Any]:
    """The configuration of a shape's name or of a folder with a ``config.json``; raise ``ConfigError``."""
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_dir():
        raise ConfigError(f"model: {name!r} is neither a folder nor one of {', '.join(SHAPES)}")
    return read_configs(Path(name))[0]
