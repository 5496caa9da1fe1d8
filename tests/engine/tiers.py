"""Slower tiers below the cache of a random workload: what they hand back is read by the oracle."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

from octavo.cache.offload import Identity, Offload
from octavo.cache.offload_tiers import INDEX, Content, DiskTier, HostTier
from octavo.types import Output
from tests.engine.workload import Run
from tests.oracle import OracleRunner

SLOT = 8


class OracleStore:
    """Copies the oracle's digests out of and into its slots."""

    def __init__(self, runner: OracleRunner) -> None:
        self.runner = runner
        self.num_bytes, self.state_bytes = runner.block_size * SLOT, SLOT

    def read(self, blocks: list[int]) -> Callable[[], bytes]:
        digests = [digest for block in blocks for digest in self.runner.read_block(block)]
        content = struct.pack(f"<{len(digests)}q", *digests)
        return lambda: content

    def write(self, blocks: list[int], contents: list[Content]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self.runner.write_block(block, struct.unpack(f"<{self.runner.block_size}q", content))

    def allocate(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def read_state(self, slot: int) -> Callable[[], bytes]:
        content = struct.pack("<q", self.runner.read_state(slot))
        return lambda: content

    def write_state(self, slot: int, content: bytes) -> None:
        self.runner.write_state(slot, *struct.unpack("<q", content))


def damage_some(folder: Path, rng: random.Random) -> None:
    """Let a file be gone, cut, or wrong in one bit."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(INDEX)]
    for path in files:
        chance = rng.random()
        try:
            if chance < 0.04:
                path.unlink()
            elif chance < 0.1:
                stored = bytearray(path.read_bytes() or b"?")
                stored[rng.randrange(len(stored))] ^= 1 << rng.randrange(8)
                path.write_bytes(stored)
            elif chance < 0.12:
                path.write_bytes(path.read_bytes()[: rng.randrange(40)])
        except FileNotFoundError:
            pass  # the tier gave it up meanwhile


def attach(run: Run, rng: random.Random, folder: Path | None) -> Offload:
    """Give the cache of ``run`` slower tiers of some size; files, where a ``folder`` is given, are damaged at times."""
    store = OracleStore(run.runner)
    host = HostTier(rng.choice([1, 2, 4, 1000]) * store.num_bytes)
    disk = None if folder is None else DiskTier(folder, rng.choice([8, 1000, 1000]) * store.num_bytes)
    offload = Offload(store, run.workload.block_size, Identity("oracle", ""), host, disk)
    run.cache.must_find = False
    run.cache.use_offload(offload)
    engine_step = run.engine.step

    def step() -> list[Output]:
        if folder is not None and rng.random() < 0.04:
            damage_some(folder, rng)
        return engine_step()

    run.engine.step = step  # type: ignore[method-assign]
    return offload
