"""An executor in a process of its own, which reads messages from a file and writes its answers to another.

Run as ``python -m tests.runtime.executor_process KIND HOME MESSAGES ANSWERS``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from octavo.layers.lora import AdapterRows
from octavo.layers.stacked_lora import StackedRows
from octavo.models.layer_cache import kv_groups
from octavo.models.model_adapters import ModelAdapters, make_stacks
from octavo.models.registry import load_model, read_config
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Message, unpack
from tests.models.checkpoints import FolderSource
from tests.models.families import VOCAB_SIZE
from tests.runtime.making import CPU

LIMITS = StepLimits(max_num_seqs=5, max_num_batched_tokens=24, max_blocks=30, max_drafts=4)
BLOCK_SIZE = 4
NUM_BLOCKS = (34, 30)
MAX_ADAPTERS, MAX_RANK = 3, 8
EXECUTORS = ("host", "stream")


def make_storage(home: Path) -> KVStorage:
    """Two KV groups, in which nothing is a number before it is written."""
    specs = read_config(FolderSource(home).config).cache
    storage = KVStorage(specs, kv_groups(specs, max_window=1000), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    for pool in storage.pools:
        for part in pool:
            part.fill_(torch.nan)
    return storage


def make_executor(kind: str, home: Path, storage: KVStorage) -> HostExecutor | StreamExecutor:
    """An executor of the model in the folder ``home``."""
    source, form = FolderSource(home), WeightFormat(torch.float32, CPU)
    rows: AdapterRows = AdapterRows() if kind == "host" else StackedRows(MAX_ADAPTERS, MAX_RANK)
    loaded = load_model(read_config(source.config), source, form, rows)
    make_stacks(loaded.maps, form)
    adapters = ModelAdapters(loaded.maps, rows, form)
    if kind == "host":
        return HostExecutor(loaded.model, storage, VOCAB_SIZE, LIMITS, adapters=adapters)
    return StreamExecutor(loaded.model, storage, VOCAB_SIZE, LIMITS, adapters=adapters)


def answer(executor: Any, message: Message) -> bytes:
    """What an executor answers, as bytes."""
    return msgspec.msgpack.encode(executor.send(message).wait())


def main() -> None:
    kind, home, messages, answers = sys.argv[1], *map(Path, sys.argv[2:])
    torch.set_num_threads(1)
    with dispatch.only(REFERENCE):
        executor = make_executor(kind, home, make_storage(home))
        packed: list[bytes] = msgspec.msgpack.decode(messages.read_bytes(), type=list[bytes])
        answers.write_bytes(msgspec.msgpack.encode([answer(executor, unpack(one)) for one in packed]))


if __name__ == "__main__":
    main()
