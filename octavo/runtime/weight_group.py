"""Weights that a trainer broadcasts, as rank 0 of a group of torch.distributed to which this process belongs.

They arrive in the background, in host memory, while steps are computed with the earlier ones.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self._member: _Member | None = None

    @property
    def is_busy(self) -> bool:
        return self._member is not None and not all(order.done() for order in self._member.orders)

    def join(self, group: JoinGroup) -> None:
        """Connect to the others, in the background; an earlier group is left. Raises ``CheckpointError``."""
        if group.backend == "nccl" and not is_gpu(self._device):
            raise CheckpointError("the backend nccl needs a GPU; gloo does not")
        self.drop(leaves_group=True)
        self._member = _Member(group, self._device)

    def receive(self, tensors: ReceiveTensors) -> None:
        """Receive tensors, in the background. Raises ``CheckpointError``."""
        if self._member is None:
            raise CheckpointError("there is no group in which weights could be received; join one first")
        if unknown := sorted(set(tensors.dtypes) - DTYPES.keys()):
            raise CheckpointError(f"{unknown[0]} is no type of weights; there are {', '.join(DTYPES)}")
        each = zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True)
        try:
            file = TensorFile([FileTensor(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in each])
        except (OSError, OverflowError, ValueError, RuntimeError) as error:  # such as of sizes
            raise CheckpointError(f"there is no memory for these tensors: {error}") from None
        self._member.receive(file, tensors)

    def drop(self, leaves_group: bool) -> None:
        """Forget what was received, also what is being received now."""
        if self._member is not None:
            files, self._member.files = self._member.files, []
            while files:
                files.pop().close()
            if leaves_group:
                self._member.leave()
                self._member = None

    def check(self) -> None:
        """Raise ``CheckpointError``, and forget what was received, if an order failed since the last call."""
        orders = [] if self._member is None else self._member.orders
        while orders and orders[0].done():
            if (error := orders.pop(0).exception()) is not None:
                self.drop(leaves_group=False)
                raise CheckpointError(f"weights were not received: {error}")

    def files(self) -> list[str]:
        """See ``TensorReceiver``."""
        if self.is_busy:
            raise CheckpointError("weights are still being received")
        if self._member is None or not self._member.files:
            raise CheckpointError("no weights were received")
        return [file.path for file in self._member.files]


class _Member:
    """This process as a member of one group, from the order to join it on; a thread follows its orders, one by one.

    What a trainer that is gone leaves the thread waiting for may come, or fail, long after the group was left: it then
    has no effect on the next one.
    """

    def __init__(self, group: JoinGroup, device: torch.device) -> None:
        self.files: list[TensorFile] = []
        """What was received."""
        self._device, self._is_packed = device, group.is_packed
        self._group: Any = None
        self._is_left, self._lock = False, threading.Lock()
        self._worker = ThreadPoolExecutor(1, "weights")
        self.orders = [self._worker.submit(self._join, group)]
        """Those that were not looked at yet."""

    def receive(self, file: TensorFile, tensors: ReceiveTensors) -> None:
        is_packed = self._is_packed if tensors.is_packed is None else tensors.is_packed
        self.orders.append(self._worker.submit(self._receive, file, tensors.names, is_packed, self.files))

    def leave(self) -> None:
        """Give up the group, whose name the next one may have: torch.distributed has one of a name."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_left, group = True, self._group
        if group is not None:
            _end(group)

    def _join(self, group: JoinGroup) -> None:
        from torch.distributed import distributed_c10d
        from torch.distributed.rendezvous import rendezvous

        # As torch.distributed makes a group beside the default one, which there may be, so that trainers can do so.
        url = f"tcp://{group.address}:{group.port}"
        store, _, _ = next(rendezvous(url, group.rank, group.world_size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        if self._is_left:
            return
        made, _ = distributed_c10d._new_process_group_helper(
            group.world_size,
            group.rank,
            [],
            distributed_c10d.Backend(group.backend),
            distributed_c10d.PrefixStore(group.name, store),
            group_name=distributed_c10d.GroupName(group.name),
            timeout=TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(group.world_size)}
        with self._lock:
            self._group = made
            is_left = self._is_left
        if is_left:
            _end(made)

    def _receive(self, file: TensorFile, names: Sequence[str], is_packed: bool, files: list[TensorFile]) -> None:
        """Receive tensors into ``file``, one of ``files``, which were perhaps dropped meanwhile."""
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
        files.append(file)

    def _broadcast(self, tensor: Tensor) -> None:
        from torch.distributed import BroadcastOptions

        if self._group is None:
            raise CheckpointError("the group was not joined")
        self._group.broadcast([tensor], BroadcastOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def _end(group: Any) -> None:
    from torch.distributed import destroy_process_group

    try:
        destroy_process_group(group)
    except (RuntimeError, ValueError) as error:  # such as a trainer that is gone
        logger.warning("a group for weights could not be ended: %s", error)


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
