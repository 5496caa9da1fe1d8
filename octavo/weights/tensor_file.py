"""Tensors in memory in the form of a safetensors file, by which other processes of this machine read them."""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.gguf.block_formats import BlockTensor
from octavo.weights.safetensors import DTYPE_NAMES, TensorFiles

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
"""By their names in requests."""


class FileTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """A file in memory with room for these tensors; ``tensors`` [name] are views of it. It is gone when closed.

    Raises ``CheckpointError`` for a name that is there twice, or a type that no checkpoint has.
    """

    def __init__(self, entries: Sequence[FileTensor]) -> None:
        starts: dict[str, int] = {}
        header, end = {}, 0
        for name, dtype, shape in entries:
            if name in starts or dtype not in DTYPE_NAMES:
                raise CheckpointError(f"tensor {name}: " + ("is there twice" if name in starts else f"is {dtype}"))
            starts[name], end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64 + 56)  # so that the numbers begin at a multiple of 64
        head = len(text).to_bytes(8, "little") + text
        self._file = os.fdopen(_descriptor(), "r+b", buffering=0)
        self._file.truncate(len(head) + end)
        self._file.write(head)
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.tensors: dict[str, Tensor] = {}
        memory = mmap.mmap(self._file.fileno(), 0)
        for name, dtype, shape in entries:
            offset, count = len(head) + starts[name], math.prod(shape)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)
            self.tensors[name] = flat.view(shape)

    def close(self) -> None:
        """Free the memory, once no tensor is used."""
        self.tensors.clear()
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def written(weights: Iterable[tuple[str, Tensor]]) -> TensorFile:
    """A file with copies of these tensors. Raises ``CheckpointError``."""
    held = list(weights)
    file = TensorFile([FileTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held])
    for name, tensor in held:
        file.tensors[name].copy_(tensor.detach())
    return file


class Updated:
    """A checkpoint of which some tensors are those of other files, in the types of the checkpoint's own."""

    is_dummy = False

    def __init__(self, checkpoint: Checkpoint, paths: Sequence[str]) -> None:
        """Raises ``CheckpointError``."""
        self._checkpoint = checkpoint
        self._files = TensorFiles([Path(path) for path in paths])
        self.updated = self._files.names()

    def names(self) -> set[str]:
        return self._checkpoint.names() | self.updated

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self.updated:
            return self._checkpoint.describe(name)
        kind, shape = self._files.describe(name)
        return self._kind(name, kind), shape

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor | BlockTensor:
        if name not in self.updated:
            return self._checkpoint.load(name, shape)
        kind = self._files.describe(name)[0]
        tensor, wanted = self._files.load(name, shape), self._kind(name, kind)
        return tensor if wanted == kind else tensor.to(FLOATS[wanted])

    def _kind(self, name: str, found: str) -> str:
        """Trainers hold numbers of 32 bits where the checkpoint has 16."""
        own = self._checkpoint.describe(name)[0] if name in self._checkpoint.names() else found
        return own if own in FLOATS and found in FLOATS else found


def _descriptor() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-weights")
    descriptor, path = tempfile.mkstemp(prefix="octavo-weights-")
    os.unlink(path)
    return descriptor
