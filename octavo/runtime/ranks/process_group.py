"""Collectives through torch's process groups, for ranks that cannot map each other's memory: NCCL between GPUs.

Only bytes are exchanged. The ranks add them up themselves, in float32 and in the order of the ranks, so all ranks get
the same bits, in every run, whatever the library does.

Shapes: T tokens, D model, W ranks, n numbers.
"""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.ops.collective import Collective, exchanged_rows, gathered_rows
from octavo.ops.device_backend import backend_of, is_gpu

logger = logging.getLogger(__name__)
_distributed: Any = dist  # torch has no types for it
HOST = "127.0.0.1"
FOREVER = datetime.timedelta(days=1)
"""Whoever watches the ranks decides how long they may take."""
DIVIDED_BYTES = 1 << 20
"""From so many bytes on, each rank adds up a part and sends the sum: fewer bytes, but a second exchange."""


class ProcessGroupCollective:
    """The collective of one rank; see ``ops.collective``. A process has at most one."""

    def __init__(self, host: Collective, device: torch.device) -> None:
        """Every rank must make its own at the same time. ``host`` exchanges the port at which they meet."""
        self.rank, self.size = host.rank, host.size
        store = self._store(0) if self.rank == 0 else None
        port = int(host.all_gather(torch.tensor([store.port if store else 0]))[0])
        store = store or self._store(port)
        backend, device_id = "gloo", None  # gloo is for tests
        if is_gpu(device):
            backend, device_id = "nccl", torch.device(device.type, torch.cuda.current_device())
        sizes = {"world_size": self.size, "rank": self.rank}
        _distributed.init_process_group(backend, store=store, timeout=FOREVER, device_id=device_id, **sizes)

    def _store(self, port: int) -> Any:
        return _distributed.TCPStore(HOST, port, self.size, is_master=self.rank == 0, wait_for_workers=False)

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        x_n = x_TD.contiguous().view(-1)
        residual_n = None if residual_TD is None else residual_TD.contiguous().view(-1)
        if x_n.nbytes < DIVIDED_BYTES or len(x_n) % self.size:
            return _sum(self.all_gather(x_n), residual_n).view(x_TD.shape)
        parts_Wn = torch.empty_like(x_n).view(self.size, -1)
        _distributed.all_to_all_single(parts_Wn.view(-1), x_n)
        own_residual_n = None if residual_n is None else residual_n.view(self.size, -1)[self.rank]
        return self.all_gather(_sum(parts_Wn, own_residual_n)).view(x_TD.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``."""
        gathered = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        _distributed.all_gather_into_tensor(gathered.view(-1), x.contiguous().view(-1))
        return gathered

    def all_to_all(self, x_RD: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        """See ``Collective``."""
        return gathered_rows(self, x_RD, places_R, num_places)

    def exchange(self, x_TPX: Tensor) -> Tensor:
        """See ``Collective``."""
        return exchanged_rows(self, x_TPX)


def _sum(parts_Wn: Tensor, residual_n: Tensor | None) -> Tensor:
    """The sum over the ranks, plus the residual, rounded once."""
    total_n = parts_Wn[0].float()
    for part_n in parts_Wn[1:]:
        total_n += part_n
    if residual_n is not None:
        total_n += residual_n
    return total_n.to(parts_Wn.dtype)


def device_collective(host: Collective, device: torch.device) -> Collective:
    """The collective of a rank's device, given that of the hosts."""
    if host.size == 1 or not is_gpu(device):
        return host
    collective = backend_of(device.type).peer_collective(host, device)
    if collective is not None:
        return collective
    logger.warning("the GPUs cannot access each other's memory: sums go through NCCL, which is slower")
    return ProcessGroupCollective(host, device)


def visible_gpus() -> list[str]:
    """The GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(index) for index in range(torch.cuda.device_count())]
