"""Parts that the packages around this one bring, found by name: the core imports none of them.

Those of this distribution are in a table: they are found in a checkout that is not installed, and where what was
installed is older than one of them. Other distributions name theirs by entry points of the same groups.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

CPU, GPU = "cpu", "cuda"
"""Types of devices, as torch calls them: GPUs of every maker are "cuda"."""

COMMANDS = "octavo.commands"
"""Modules with the interface ``octavo.cli.Command``."""
KERNELS = "octavo.kernels"
"""Instances of ``octavo.ops.device_backend.DeviceBackend``. A name is a type of device, or with a dot and more behind
it another backend for that type, which is asked before those of this distribution."""
COMPILERS = "octavo.kernel_compilers"
"""Modules that are run as processes by ``octavo.system.kernel_compiler``."""
ENGINE_BACKENDS = "octavo.backends"
"""Modules with the interface ``octavo.engine.protocols.EngineBackend``."""
MODEL_BACKENDS = "octavo.model_backends"
"""Modules with the interface ``octavo.build.build_engine.ModelBackend``."""
FRONTS = "octavo.fronts"
"""Classes of ``octavo_server.serving.Front``, made of a ``ServeConfig``."""
KV_CONNECTORS = "octavo.kv_connectors"
"""Pairs of classes as in ``octavo.cache.kv_channel``: what lets others fetch blocks, and what fetches them."""
STAGE_HOSTS = "octavo.stage_hosts"
"""Functions as ``octavo.build.build_engine.PlaceHosts``, by values of distributed_executor_backend."""
ENGINE_GROUPS = "octavo.engine_groups"
"""Classes of engines of several processes, made of settings and the command of an engine process."""

OWN: Mapping[str, Mapping[str, str]] = {
    COMMANDS: {
        "serve": "octavo_server.cli.serve",
        "launch": "octavo_server.cli.launch",
        "run-batch": "octavo_server.cli.run_batch",
        "state": "octavo_server.cli.state",
        "simulate": "octavo_fleet.cli.simulate",
        "plan": "octavo_fleet.cli.plan",
        "debug": "octavo_fleet.cli.debug",
        "bench": "octavo_bench.cli.bench",
        "demo": "octavo_bench.cli.demo",
        "tune": "octavo_bench.cli.tune",
    },
    KERNELS: {CPU: "octavo_kernels.cpu.backend:BACKEND", GPU: "octavo_kernels.triton.backend:BACKEND"},
    COMPILERS: {"triton": "octavo_kernels.triton.compiler_process"},
    MODEL_BACKENDS: {"transformers": "octavo_fleet.transformers.build"},
    ENGINE_BACKENDS: {
        "grpc": "octavo_fleet.worker.build_remote",
        "toy": "octavo_fleet.backends.toy",
        "instant": "octavo_fleet.backends.instant",
    },
    KV_CONNECTORS: {"tcp": "octavo.cache.kv_channel:CONNECTOR", "nixl": "octavo_fleet.nixl_channel:CONNECTOR"},
    FRONTS: {"openai": "octavo_fleet.proxy.front:ProxyFront"},
    STAGE_HOSTS: {"ray": "octavo_fleet.ray.stage_hosts:placed_hosts"},
    ENGINE_GROUPS: {
        "data_parallel": "octavo_fleet.data_parallel:DataParallelEngine",
        "several_models": "octavo_fleet.several_models:ModelGroup",
    },
}


@functools.cache
def parts(group: str) -> Mapping[str, EntryPoint]:
    """The parts of a group by name: those of this distribution whose package is here, then others of other names."""
    own = {
        name: EntryPoint(name, value, group)
        for name, value in OWN[group].items()
        if find_spec(value.partition(".")[0]) is not None
    }
    return own | {entry.name: entry for entry in entry_points(group=group) if entry.name not in own}


def load(group: str, name: str) -> Any:
    """Import a part. Raises ``KeyError`` if there is none of this name, and ``ImportError``."""
    return parts(group)[name].load()
