"""A safetensors file."""

from __future__ import annotations

import contextlib
import random
import struct

import torch
from safetensors.torch import save

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import open_checkpoint
from tests.fuzz.target import Target


def make() -> Target:
    return Safetensors()


class Safetensors(Target):
    words = (
        *(b'"dtype":"F8_E4M3"', b'"dtype":"I64"', b'"shape":[4,8]', b'"shape":[]', b'"data_offsets":[0,128]'),
        *(b"9" * 20, b"-1", b"1.5", b"1e3", b"{", b"}", b'"', b"null", b"[[", b'"__metadata__":{}'),
    )

    def __init__(self) -> None:
        super().__init__()
        (self.folder / "config.json").write_bytes(b'{"architectures": ["LlamaForCausalLM"]}')
        tensors = {"a.weight": torch.ones(4, 8), "b.weight": torch.ones(3).bfloat16()}
        self.seeds = [save(tensors), save(tensors, {"format": "pt"})]

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return super().mutate(data, rng)
        end = data.rfind(b"}") + 1
        header = super().mutate(data[8:end], rng)
        return struct.pack("<Q", len(header)) + header + data[end:]

    def read(self, data: bytes) -> None:
        (self.folder / "model.safetensors").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(self.folder)
            for name in checkpoint.names():
                _, shape = checkpoint.describe(name)
                checkpoint.load(name, shape)
