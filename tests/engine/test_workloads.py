"""The deciding half under random load, over the oracle."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import POLICY_NAMES, EngineConfig
from octavo.config import settings as engine_settings
from tests.engine.tiers import attach
from tests.engine.workload import Features, Run
from tests.tiers import one_in

WINDOWS: dict[str, Any] = {"windows": 1, "full_attention": False}
FEATURES = {
    "plain": Features(),
    "overlap": Features(depth=2),
    "deep overlap": Features(depth=3),
    "stages": Features(depth=3, stages=3, aborts=True, tight=True),
    "two stages": Features(depth=2, stages=2, windows=1, grammar=True, fault_rate=0.03),
    "drafts": Features(drafts=True),
    "drafts and overlap": Features(drafts=True, depth=2),
    "masks": Features(grammar=True),
    "masks and overlap": Features(grammar=True, depth=2),
    "drafts and masks": Features(drafts=True, grammar=True),
    "faults": Features(fault_rate=0.03),
    "many faults and overlap": Features(fault_rate=0.2, depth=2),
    "poison": Features(poison=True),
    "poison and overlap": Features(poison=True, depth=2),
    "bad rows": Features(bad_rows=True),
    "aborts": Features(aborts=True),
    "aborts and overlap": Features(aborts=True, depth=2),
    "priority": Features(policy="priority"),
    "priority and overlap": Features(policy="priority", depth=2),
    "no prefix caching": Features(prefix_caching=False),
    "no partial blocks": Features(parts=False),
    "no partial blocks, tight": Features(parts=False, tight=True, depth=2),
    "tight": Features(tight=True),
    "tight and overlap": Features(tight=True, depth=2),
    "tight, priority, drafts": Features(tight=True, policy="priority", drafts=True),
    **{policy: Features(policy=policy) for policy in POLICY_NAMES[2:]},
    **{f"tight, {policy} and overlap": Features(policy=policy, tight=True, depth=2) for policy in POLICY_NAMES[2:]},
    "youngest victims": Features(tight=True, victim="youngest", policy="fair"),
    "cheapest victims": Features(tight=True, victim="cheapest"),
    "largest victims and overlap": Features(tight=True, victim="largest", depth=2),
    "sliced": Features(max_itl=0.03),
    "sliced and fair": Features(max_itl=0.03, policy="fair", tight=True),
    "varied": Features(varied=True, depth=2),
    "varied, with drafts": Features(varied=True, depth=2, drafts=True),
    "tight and varied, with faults": Features(varied=True, tight=True, fault_rate=0.03),
    "tight and varied, with drafts": Features(varied=True, tight=True, drafts=True),
    "windows": Features(**WINDOWS),
    "windows, drafts and overlap": Features(**WINDOWS, drafts=True, depth=2),
    "windows, tight": Features(**WINDOWS, tight=True),
    "windows, tight, faults and overlap": Features(**WINDOWS, tight=True, fault_rate=0.03, depth=2),
    "windows without prefix caching": Features(**WINDOWS, prefix_caching=False, depth=2, aborts=True),
    "hybrid": Features(windows=1),
    "hybrid, drafts and overlap": Features(windows=1, drafts=True, depth=2),
    "hybrid, tight": Features(windows=1, tight=True),
    "hybrid, tight, faults and overlap": Features(windows=1, tight=True, fault_rate=0.03, depth=2),
    "hybrid, no partial blocks, varied": Features(windows=1, parts=False, varied=True, depth=2),
    "hybrid without prefix caching": Features(windows=1, prefix_caching=False, depth=2, aborts=True, drafts=True),
    "two windows": Features(windows=2, full_attention=False, drafts=True, depth=2),
    "two windows, tight": Features(windows=2, full_attention=False, tight=True, fault_rate=0.03, depth=2),
    "three groups": Features(windows=2, drafts=True, aborts=True, depth=2),
    "three groups, tight and faults": Features(windows=2, tight=True, fault_rate=0.03),
    "states": Features(states=True),
    "states and overlap": Features(states=True, depth=2, aborts=True),
    "states and drafts": Features(states=True, drafts=True, aborts=True),
    "states, drafts and masks": Features(states=True, drafts=True, grammar=True, tight=True),
    "states, tight": Features(states=True, tight=True),
    "states, tight, faults and overlap": Features(states=True, tight=True, fault_rate=0.03, depth=2, poison=True),
    "states, tight, many faults": Features(states=True, tight=True, fault_rate=0.2, drafts=True, bad_rows=True),
    "states without prefix caching": Features(states=True, prefix_caching=False, depth=2, fault_rate=0.03),
    "ranks": Features(ranks=2, aborts=True),
    "ranks, tight, faults and overlap": Features(ranks=3, tight=True, fault_rate=0.03, depth=2),
    "ranks, tight, priority and drafts": Features(ranks=3, tight=True, policy="priority", drafts=True),
    "ranks, windows, varied": Features(ranks=2, windows=1, tight=True, varied=True, drafts=True, depth=2),
    "ranks, deadlines, tight": Features(ranks=2, policy="deadline", tight=True, depth=2, aborts=True),
    "ranks without prefix caching": Features(ranks=4, tight=True, prefix_caching=False),
    "memory below": Features(tiers="host", tight=True),
    "memory and files below": Features(tiers="disk", tight=True, depth=2, fault_rate=0.03),
    "everything": Features(2, True, True, 0.03, True, True, True, "priority", tight=True),
}


NUM_WORKLOADS = 56
"""Of each kind, so that there are 100,000 steps in all."""
NUM_QUICK = 8
"""Of those, the ones that ``make check`` serves; ``make nightly`` serves all."""
LEAST_STEPS = 1000
"""Of those with each choice of a setting."""
steps_with: Counter[tuple[str, object]] = Counter()
"""Steps by what was chosen for a setting."""
happened: Counter[str] = Counter()


def serve(seed: int, features: Features) -> None:
    """Serve a workload, and count its steps and what happened in them."""
    run = Run(seed, features)
    with TemporaryDirectory() as folder:
        offload = None
        if features.tiers != "none":
            offload = attach(run, random.Random(seed), Path(folder) if features.tiers == "disk" else None)
        run.serve()
        if offload is not None:
            offload.close()
    num_steps, stats = len(run.runner.plans), run.engine.stats()
    chosen = {**vars(features), "eviction": run.workload.eviction, "watermark": run.workload.watermark > 0}
    chosen |= {name: chosen[name] not in (None, 0) for name in ("fault_rate", "max_itl")}
    happened["steps"] += num_steps
    steps_with.update(dict.fromkeys(chosen.items(), num_steps))
    happened.update(
        preempted=stats.num_preemptions,
        found=stats.prefix_hits,
        copied=stats.num_copied_tokens,
        accepted=stats.num_accepted_drafts,
        failed=stats.num_faults,
        restored=offload.stats.num_restored if offload else 0,
        marked=sum(len(item.marks) for plan in run.runner.plans for item in plan),
    )


def serve_all(seeds: range, name: str) -> None:
    for seed in seeds:
        try:
            serve(seed, FEATURES[name])
        except AssertionError as error:
            raise AssertionError(f"workload {seed} with {name}: {error}") from error


@one_in(5)
@pytest.mark.parametrize("name", FEATURES)
def test_random_workloads(name: str) -> None:
    serve_all(range(NUM_QUICK), name)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_many_random_workloads_have_many_steps_with_every_choice_of_every_setting() -> None:
    for counts in (steps_with, happened):
        counts.clear()
    for name in FEATURES:
        serve_all(range(NUM_WORKLOADS), name)
    offered = {item.name: item.choices for item in engine_settings(EngineConfig)}
    choices: dict[str, tuple[object, ...]] = {
        "policy": offered["scheduling_policy"],
        "victim": offered["preemption_victim"],
        "eviction": offered["eviction_policy"],
        "tiers": ("none", "host", "disk"),
        "depth": (1, 2, 3),
        "stages": (1, 2, 3),
        "ranks": (1, 2, 3, 4),
        "windows": (0, 1, 2),
    }
    switches = {name for name, _ in steps_with} - choices.keys()
    choices |= dict.fromkeys(switches, (False, True))
    few = {(name, choice) for name in choices for choice in choices[name] if steps_with[name, choice] < LEAST_STEPS}
    assert not few
    assert happened["steps"] >= 100_000
    assert all(happened[name] >= 100 for name in happened), happened


def _is_possible(features: Features) -> bool:
    if features.states and (features.windows or (features.drafts and features.depth > 1)):
        return False
    is_whole = features.ranks == features.stages == 1
    if not is_whole and (features.states or features.tiers != "none" or features.ranks > 1 < features.stages):
        return False
    return features.tiers == "none" or (features.prefix_caching and features.num_groups == 1)


any_workload = given(
    seed=st.integers(0, 2**32),
    features=st.builds(
        Features,
        depth=st.sampled_from([1, 2, 3]),
        stages=st.sampled_from([1, 1, 2, 3]),
        ranks=st.sampled_from([1, 1, 2, 3, 4]),
        drafts=st.booleans(),
        grammar=st.booleans(),
        fault_rate=st.sampled_from([0.0, 0.03, 0.3]),
        poison=st.booleans(),
        bad_rows=st.booleans(),
        aborts=st.booleans(),
        policy=st.sampled_from(POLICY_NAMES),
        victim=st.sampled_from(["auto", "youngest", "cheapest", "largest"]),
        max_itl=st.sampled_from([None, 0.03, 0.2]),
        varied=st.booleans(),
        prefix_caching=st.booleans(),
        parts=st.booleans(),
        tiers=st.sampled_from(["none", "host", "disk"]),
        tight=st.booleans(),
        windows=st.sampled_from([0, 0, 1, 2, 3]),
        full_attention=st.booleans(),
        states=st.booleans(),
    ).filter(_is_possible),
)


@any_workload
@settings(max_examples=25, deadline=None)
def test_any_combination_of_features(seed: int, features: Features) -> None:
    serve(seed, features)


@pytest.mark.nightly
@pytest.mark.slow
@any_workload
@settings(max_examples=150, deadline=None)
def test_many_combinations_of_features(seed: int, features: Features) -> None:
    serve(seed, features)
