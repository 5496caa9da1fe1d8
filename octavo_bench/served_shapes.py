"""Sizes of the dense models that people serve, as their published ``config.json`` have them, for tables of kernels."""

from __future__ import annotations

from typing import NamedTuple

from octavo.ops.linear import Activation


class MatrixSizes(NamedTuple):
    """What decides the matrices of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: Activation = "silu"
    norms_outputs: bool = False
    """Whether a norm stands between a block's output and the residual, so that the residual is not fused."""


def _llama(hidden: int, heads: int, ffn: int, head_dim: int = 128) -> MatrixSizes:
    return MatrixSizes(hidden, heads, 8, head_dim, ffn, 128_256)


def _qwen2(hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152_064) -> MatrixSizes:
    return MatrixSizes(hidden, heads, kv_heads, hidden // heads, ffn, vocab)


def _qwen3(hidden: int, heads: int, ffn: int) -> MatrixSizes:
    return MatrixSizes(hidden, heads, 8, 128, ffn, 151_936)


def _gemma3(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int = 262_208) -> MatrixSizes:
    return MatrixSizes(hidden, heads, kv_heads, head_dim, ffn, vocab, "gelu_tanh", norms_outputs=True)


SERVED: dict[str, MatrixSizes] = {
    "llama-3.2-1b": _llama(2048, 32, 8192, head_dim=64),
    "llama-3.2-3b": _llama(3072, 24, 8192),
    "llama-3.1-8b": _llama(4096, 32, 14_336),
    "llama-3.3-70b": _llama(8192, 64, 28_672),
    "qwen2.5-0.5b": _qwen2(896, 14, 2, 4864, 151_936),
    "qwen2.5-1.5b": _qwen2(1536, 12, 2, 8960, 151_936),
    "qwen2.5-3b": _qwen2(2048, 16, 2, 11_008, 151_936),
    "qwen2.5-7b": _qwen2(3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(5120, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(5120, 40, 8, 27_648),
    "qwen3-0.6b": _qwen3(1024, 16, 3072),
    "qwen3-1.7b": _qwen3(2048, 16, 6144),
    "qwen3-4b": _qwen3(2560, 32, 9728),
    "qwen3-8b": _qwen3(4096, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 25_600),
    "mistral-7b": MatrixSizes(4096, 32, 8, 128, 14_336, 32_768),
    "mistral-small-24b": MatrixSizes(5120, 32, 8, 128, 32_768, 131_072),
    "gemma-3-1b": _gemma3(1152, 4, 1, 256, 6912, 262_144),
    "gemma-3-4b": _gemma3(2560, 8, 4, 256, 10_240),
    "gemma-3-12b": _gemma3(3840, 16, 8, 256, 15_360),
    "gemma-3-27b": _gemma3(5376, 32, 16, 128, 21_504),
    "phi-4": MatrixSizes(5120, 40, 10, 128, 17_920, 100_352),
    "glm-4-9b": MatrixSizes(4096, 32, 2, 128, 13_696, 151_552),
}
