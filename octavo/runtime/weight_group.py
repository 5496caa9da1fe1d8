"""Weights that a trainer broadcasts, as rank 0 of a group of torch.distributed to which this process belongs.

They arrive in the background, in host memory, while steps are computed with the earlier ones.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.device_backend import is_gpu
from octavo.types import JoinGroup, ReceiveTensors
from octavo.weights.tensor_file import DTYPES, FileTensor, TensorFile

logger = logging.getLogger(__name__)
TIMEOUT = datetime.timedelta(minutes=10)
PACKED_BYTES = 1 << 30
"""A packed buffer ends behind the tensor with which it has more bytes than this, as those of vLLM's trainers do."""


class WeightGroup:
    """See ``TensorReceiver``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: list[TensorFile] = []
        self._group: Any = None
        self._is_packed = False
        self._orders: list[Future[None]] = []
        self._worker: ThreadPoolExecutor | None = None

    @property
    def is_busy(self) -> bool:
        return not all(order.done() for order in self._orders)

    def join(self, group: JoinGroup) -> None:
        """Connect to the others, in the background. Raises ``CheckpointError``."""
        if group.backend == "nccl" and not is_gpu(self._device):
            raise CheckpointError("the backend nccl needs a GPU; gloo does not")
        if self._worker is not None:  # one that waits for a trainer that does not come goes on to wait
            self._worker.shutdown(wait=False)
        self._worker, self._orders, self._is_packed = ThreadPoolExecutor(1, "weights"), [], group.is_packed
        self._orders.append(self._worker.submit(self._join, group))

    def receive(self, tensors: ReceiveTensors) -> None:
        """Receive tensors, in the background. Raises ``CheckpointError``."""
        if self._worker is None:
            raise CheckpointError("there is no group in which weights could be received; join one first")
        if unknown := sorted(set(tensors.dtypes) - DTYPES.keys()):
            raise CheckpointError(f"{unknown[0]} is no type of weights; there are {', '.join(DTYPES)}")
        each = zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True)
        file = TensorFile([FileTensor(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in each])
        is_packed = self._is_packed if tensors.is_packed is None else tensors.is_packed
        self._orders.append(self._worker.submit(self._receive, file, tensors.names, is_packed))

    def drop(self, leaves_group: bool) -> None:
        """Forget what was received."""
        while self._files:
            self._files.pop().close()
        if leaves_group and self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._worker, self._orders = None, []
            self._leave()

    def check(self) -> None:
        """Raise ``CheckpointError`` if an order failed since the last call."""
        while self._orders and self._orders[0].done():
            if (error := self._orders.pop(0).exception()) is not None:
                raise CheckpointError(f"weights were not received: {error}")

    def files(self) -> list[str]:
        """See ``TensorReceiver``."""
        if self.is_busy:
            raise CheckpointError("weights are still being received")
        if not self._files:
            raise CheckpointError("no weights were received")
        return [file.path for file in self._files]

    def _join(self, group: JoinGroup) -> None:
        from torch.distributed import distributed_c10d
        from torch.distributed.rendezvous import rendezvous

        self._leave()
        # As torch.distributed makes a group beside the default one, which there may be, so that trainers can do so.
        url = f"tcp://{group.address}:{group.port}"
        store, _, _ = next(rendezvous(url, group.rank, group.world_size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        self._group, _ = distributed_c10d._new_process_group_helper(
            group.world_size,
            group.rank,
            [],
            distributed_c10d.Backend(group.backend),
            distributed_c10d.PrefixStore(group.name, store),
            group_name=distributed_c10d.GroupName(group.name),
            timeout=TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(group.world_size)}

    def _leave(self) -> None:
        """Give up the group, whose name the next one may have: torch.distributed has one of a name."""
        from torch.distributed import destroy_process_group

        group, self._group = self._group, None
        if group is not None:
            try:
                destroy_process_group(group)
            except (RuntimeError, ValueError) as error:  # such as a trainer that is gone
                logger.warning("a group for weights could not be ended: %s", error)

    def _receive(self, file: TensorFile, names: Sequence[str], is_packed: bool) -> None:
        for part in packs([file.tensors[name] for name in names], PACKED_BYTES if is_packed else 0):
            flat = [tensor.reshape(-1) for tensor in part]
            if not is_packed and self._device.type == "cpu":
                self._broadcast(flat[0])  # to where it belongs
                continue
            size = sum(tensor.nbytes for tensor in part)
            kind = (size, torch.uint8) if is_packed else (len(flat[0]), flat[0].dtype)
            buffer = torch.empty(kind[0], dtype=kind[1], device=self._device)
            self._broadcast(buffer)
            parts = torch.split(buffer.view(torch.uint8), [tensor.nbytes for tensor in part])
            for tensor, content in zip(flat, parts, strict=True):
                tensor.view(torch.uint8).copy_(content)
        self._files.append(file)

    def _broadcast(self, tensor: Tensor) -> None:
        from torch.distributed import BroadcastOptions

        self._group.broadcast([tensor], BroadcastOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def packs(tensors: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors that come in one buffer: with ``num_bytes`` 0, each in its own."""
    pack: list[Tensor] = []
    for tensor in tensors:
        pack.append(tensor)
        if sum(each.nbytes for each in pack) > num_bytes or not num_bytes:
            yield pack
            pack = []
    if pack:
        yield pack
