"""GGUF files made piece by piece, sound or not, for the tests."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from octavo.weights.gguf.block_formats import BLOCK_KINDS

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13}
NUMBERS |= {"Q6_K": 14, "BF16": 30, "MXFP4": 39, "Q2_K": 10, "Q3_K": 11, "IQ2_XXS": 16, "IQ2_XS": 17}
NUMBERS |= {"IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29}
NUMBERS |= {"TQ1_0": 34, "TQ2_0": 35, "NVFP4": 40}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}
HALVES |= {"Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": ()}
"""Where blocks have a float16, unless it is at their start alone."""
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value: object, kind: int | None = None) -> bytes:
    """A metadata pair; the value type is guessed for the Python types that llama files use."""
    if isinstance(value, str):
        return string(key) + struct.pack("<I", 8) + string(value)
    if isinstance(value, list):
        strings = isinstance(value[0], str)
        kind = 8 if strings else 5 if kind is None else kind
        items = [string(item) if strings else struct.pack("<" + FORMATS[kind], item) for item in value]
        return string(key) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    if kind is None:
        kind = 7 if isinstance(value, bool) else (4 if value >= 0 else 5) if isinstance(value, int) else 6
    return string(key) + struct.pack("<I" + FORMATS[kind], kind, value)


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry of the tensor table; ``dims`` as in the file, the row length first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(pairs: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", **counts: int) -> bytes:
    head = struct.pack("<QQ", counts.get("num_tensors", len(tensors)), counts.get("num_pairs", len(pairs)))
    header = b"GGUF" + struct.pack("<I", counts.get("version", 3)) + head + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % counts.get("alignment", 32)) + data


def random_blocks(kind: str, num_blocks: int, random: np.random.Generator) -> np.ndarray:
    """Blocks with random numbers in them, [num_blocks, bytes]; the float16 scales are finite."""
    blocks = random.integers(0, 256, (num_blocks, BLOCK_KINDS[kind].num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # a byte of exponent
        blocks[:, 0] %= 200
        return blocks
    if kind == "IQ1_M":  # its float16 is in the top bits of four words
        halves = random.normal(size=num_blocks).astype("<f2").view(np.uint16)
        for place in range(4):
            blocks[:, 49 + 2 * place] = blocks[:, 49 + 2 * place] & 15 | (halves >> 4 * place & 15) << 4
        return blocks
    for at in HALVES.get(kind, (0,)):
        scales = random.normal(size=num_blocks).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": [f"token {index} ä" for index in range(40)],
    "tokenizer.ggml.scores": [1, 2, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
}
LLAMA_TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "token_embd.weight": ("Q8_0", (40, 64)),
    "output_norm.weight": ("F32", (64,)),
    **{
        f"blk.{layer}.{name}": kind_and_shape
        for layer in range(2)
        for name, kind_and_shape in {
            "attn_norm.weight": ("F32", (64,)),
            "attn_q.weight": ("Q4_0", (64, 64)),
            "attn_k.weight": ("F16", (32, 64)),
            "attn_v.weight": ("Q5_1", (32, 64)),
            "attn_output.weight": ("Q4_1", (64, 64)),
            "ffn_norm.weight": ("F32", (64,)),
            "ffn_gate.weight": ("BF16", (96, 64)),
            "ffn_up.weight": ("Q5_0", (96, 64)),
            "ffn_down.weight": ("Q4_0", (64, 96)),
        }.items()
    },
}


def llama_file(
    changes: dict[str, object] | None = None, tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None
) -> bytes:
    """A small llama file with random weights; a change to ``None`` leaves the key out."""
    random = np.random.default_rng(0)
    entries, chunks, offset = [], [], 0
    for name, (kind, shape) in (LLAMA_TENSORS | (tensors or {})).items():
        block = BLOCK_KINDS[kind]
        data = random_blocks(kind, math.prod(shape) // block.length, random).tobytes()
        if kind == "F32":
            data = random.normal(size=shape).astype("<f4").tobytes()
        entries.append(tensor(name, shape[::-1], NUMBERS[kind], offset))
        chunks.append(data + bytes(-len(data) % 32))
        offset += len(chunks[-1])
    metadata = {key: value for key, value in (LLAMA | (changes or {})).items() if value is not None}
    return file([pair(key, value) for key, value in metadata.items()], entries, b"".join(chunks))
