"""Prefix caching of models with recurrent state under load, on a virtual clock: what it finds, and what it keeps."""

from __future__ import annotations

import pytest

from octavo.config import CacheSettings, EngineConfig, SchedulerSettings
from octavo.engine.engine import Engine
from octavo_fleet.sim.client_metrics import LatencyTargets
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.simulate import Simulation
from tests.tiers import nightly_after, one_in


def served(spec: SimulationSpec, config: EngineConfig) -> tuple[Engine, float]:
    """The engine after a load, and the share of prompt tokens that came from its cache."""
    simulation = Simulation(spec.fleet(config), spec.clients(), LatencyTargets())
    figures = simulation.run()
    [replica] = simulation.replicas
    replica.engine.check()
    return replica.engine, figures["prefix_hit_rate"]


@one_in(2)
@pytest.mark.parametrize("workload", nightly_after(2, ["agent", "shared-prefix", "chat", "multi-turn"]))
@pytest.mark.parametrize("device", nightly_after(1, ["h100", "l4"]))
def test_conversations_are_found_nearly_as_with_a_dense_model(workload: str, device: str) -> None:
    """An H100 has memory for all of them; on an L4, with weights of 4 bits, some are given up."""
    bits = 4 if device == "l4" else 16
    specs = [
        SimulationSpec(model, device, workload, 100, rate=1.0, output_len=32, weight_bits=bits)
        for model in ("qwen3-8b", "qwen3.5-9b")
    ]
    (_, dense), (engine, hybrid) = (served(spec, EngineConfig()) for spec in specs)
    assert engine.stats().num_snapshot_hits > 0
    assert dense > 0.5
    assert hybrid >= 0.9 * dense


@pytest.mark.nightly
def test_a_day_of_conversations_loses_no_slot() -> None:
    """In a pool that is too small for the conversations that go on at a time."""
    spec = SimulationSpec("qwen3.5-9b", "h100", "chat", 4_500, rate=0.05, output_len=8)
    cache, scheduler = CacheSettings(num_kv_blocks=300, num_state_snapshots=4), SchedulerSettings(max_num_seqs=2)
    engine, share = served(spec, EngineConfig(cache=cache, scheduler=scheduler))
    assert engine.scheduler.clock() > 24 * 3600
    stats, states = engine.stats(), engine.scheduler.cache.states
    assert states is not None
    assert stats.num_snapshot_hits > 1000
    assert stats.num_snapshot_evictions > 1000
    assert (stats.num_used_states, states.num_pending) == (0, 0)
    engine.scheduler.cache.clear()
    engine.check()
    assert states.num_snapshots == 0
    assert 0.3 < share < 0.9
