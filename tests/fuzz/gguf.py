"""A GGUF file: header, metadata as a configuration, tokenizer, and the tensors."""

from __future__ import annotations

import contextlib
import random
import struct

import numpy as np

from octavo.errors import CheckpointError
from octavo.models.registry import read_config
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from tests.fuzz.target import Target
from tests.weights import gguf_bytes


def make() -> Target:
    return GGUF()


class GGUF(Target):
    def __init__(self) -> None:
        super().__init__()
        np.seterr(all="ignore")  # scales of changed blocks overflow
        whole = gguf_bytes.llama_file()
        header = whole.index(b"blk.1.ffn_down.weight") + 64
        self.seeds, self._tensors = [whole[:header]], whole[header:]
        self.words = (
            *(key.encode() for key in gguf_bytes.LLAMA),
            *(struct.pack("<I", kind) for kind in range(13)),
            *(b"tokenizer.ggml.model", b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"gpt2", b"llama", b"qwen3"),
        )

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        # As long as before, mostly: the tensors' places are counted from the header's end.
        changed = super().mutate(data, rng)
        return changed if rng.random() < 0.3 else (changed + data[len(changed) :])[: len(data)]

    def read(self, data: bytes) -> None:
        path = self.folder / "model.gguf"
        path.write_bytes(data + self._tensors)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                _, shape = checkpoint.describe(name)
                if isinstance(weight := checkpoint.load(name, shape), BlockTensor):
                    dequantize(weight)
        except CheckpointError:
            return
        for use in (lambda: read_config(checkpoint.config), lambda: load_tokenizer(path)):
            with contextlib.suppress(CheckpointError):
                use()
