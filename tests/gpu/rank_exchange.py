"""One rank that sums and gathers with others over peer memory, alone and in a graph.

Run as ``python -m tests.gpu.rank_exchange RANK SIZE MEMORY``; prints a digest of all results.
"""

from __future__ import annotations

import random
import sys
import time
import zlib

import torch
from torch import Tensor

from octavo.runtime.peer_memory import device_collective
from octavo.runtime.rank_memory import RankMemory

ROWS = (1, 2, 3, 17, 64, 513, 4096)
WIDTH = 1024
NUM_REPLAYS = 100


def parts(rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, WIDTH, generator=generator).to("cuda", dtype) for _ in range(size)]


def main() -> None:
    rank, size, descriptor = map(int, sys.argv[1:])
    collective = device_collective(RankMemory(descriptor, rank, size).collective, torch.device("cuda"))
    delays, digest = random.Random(rank), 0
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ROWS:
            own = parts(rows, size, dtype)
            residual = parts(rows + 1, 1, dtype)[0][:rows].contiguous()
            exact = sum(part.double() for part in own) + residual.double()
            found = collective.all_reduce(own[rank].clone(), residual)
            limit = 1e-5 if dtype == torch.float32 else 0.04
            torch.testing.assert_close(found.double(), exact, atol=limit, rtol=limit)
            assert torch.equal(collective.all_gather(own[rank]), torch.stack(own))
            digest = zlib.crc32(found.cpu().view(torch.uint8).numpy().tobytes(), digest)
            time.sleep(delays.random() * 0.01)
    digest = replayed(collective, rank, size, digest)
    print(digest)


def replayed(collective: object, rank: int, size: int, digest: int) -> int:
    """A graph of two sums, replayed with other numbers each time."""
    x = torch.zeros(4, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        first = collective.all_reduce(x.clone())  # type: ignore[attr-defined]
        second = collective.all_reduce(first * (rank + 1))  # type: ignore[attr-defined]
        graph.capture_end()
        for number in range(NUM_REPLAYS):
            x.fill_(number + rank)
            graph.replay()
            stream.synchronize()
            expected = sum(number + r for r in range(size)) * sum(range(1, size + 1))
            assert (second == expected).all(), (number, second.flatten()[:4], expected)
            digest = zlib.crc32(second.cpu().numpy().tobytes(), digest)
    return digest


if __name__ == "__main__":
    main()
