"""The audio towers of Qwen2.5-Omni (arXiv 2503.20215), Qwen3-Omni (arXiv 2509.17765) and Qwen3-ASR, which compute audio
in chunks of a second or two, so that it may be long.

Shapes: B chunks, T frames, M mel bins, N rows, D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.audio.encoder import (
    HOP,
    RATE,
    AudioConfig,
    Stem,
    WhisperLayer,
    in_pairs,
    log_mel,
    read_audio,
    samples_of,
    sinusoids,
)
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels
from octavo.models.vision.tower_parts import Affine, Feedforward, LayerNorm, part

AT_ONCE = 64
"""Chunks whose convolutions are computed together: what these take is 30 times as large as what comes out."""
LONGEST = 300 * RATE
"""Samples up to which silence follows audio of Qwen2.5-Omni."""


@dataclass(frozen=True, kw_only=True)
class ChunkedConfig(AudioConfig):
    chunk: int
    """Frames of a chunk."""
    output_size: int


def _read(keys: ConfigKeys, window: int, **others: int) -> dict[str, Any]:
    inner, known = part(keys, "audio_config"), read_audio(keys, **others)
    if (output_size := inner.size("output_dim", 3584)) != known["hidden_size"]:
        raise wrong("audio_config.output_dim", output_size, f"{known['hidden_size']}, the width of the decoder")
    return {**known, "chunk": 2 * inner.size("n_window", window), "output_size": output_size}


class Qwen25AudioTower:
    """The tower of Qwen2.5-Omni: Whisper's layers within each chunk, and the means of two rows each."""

    own_names: ClassVar = {"thinker.": ""}

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> ChunkedConfig:
        return ChunkedConfig(**_read(keys, 100))

    def __init__(self, config: ChunkedConfig, weights: WeightLoader) -> None:
        self.config, D, name = config, config.width, "audio_tower"
        self.stem = Stem(config, weights)
        self.layers = [WhisperLayer(config, weights, f"{name}.layers.{i}", False) for i in range(config.depth)]
        self.norm = LayerNorm(weights, f"{name}.ln_post", D, 1e-5)
        self.map = Affine(weights, f"{name}.proj", (config.output_size, D))

    def __call__(self, audio: Pixels) -> Tensor:
        """An embedding for four frames."""
        samples_S = samples_of(audio.pixels)
        mel_TM = log_mel(samples_S, -(-len(samples_S) // HOP), self.config.num_bins, LONGEST)
        rows = [self._convolved(chunk_TM[None])[0] for chunk_TM in torch.split(mel_TM, self.config.chunk)]
        x_ND = torch.cat(rows)
        ends = tuple(accumulate(map(len, rows)))
        for layer in self.layers:
            x_ND = layer(x_ND, ends)
        return self.map(self.norm(in_pairs(x_ND)))

    def _convolved(self, mel_BTM: Tensor) -> Tensor:
        x_BND = self.stem(mel_BTM)
        return x_BND + sinusoids(x_BND.shape[1], x_BND.shape[2], x_BND.device).to(x_BND.dtype)


@dataclass(frozen=True, kw_only=True)
class Qwen3AudioConfig(ChunkedConfig):
    num_channels: int
    """Of the convolutions."""
    chunks_together: int
    """Chunks whose rows attend to each other."""


class Qwen3AudioTower:
    """The tower of Qwen3-Omni: three convolutions over time and pitch, and layers over eight chunks at a time."""

    own_names: ClassVar = {"thinker.": ""}
    maps = "audio_tower.proj1", "audio_tower.proj2"
    fills_chunks = False
    """Whether silence fills up a single chunk."""
    defaults: ClassVar[dict[str, int]] = {}
    """Those that are not Whisper's."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Qwen3AudioConfig:
        inner, known = part(keys, "audio_config"), _read(keys, 50, **cls.defaults)
        return Qwen3AudioConfig(
            **known,
            num_channels=inner.size("downsample_hidden_size", 480),
            chunks_together=max(1, inner.size("n_window_infer", 800) // known["chunk"]),
        )

    def __init__(self, config: Qwen3AudioConfig, weights: WeightLoader) -> None:
        self.config, D, C, name = config, config.width, config.num_channels, "audio_tower"
        self.convolutions = [
            (weights.dense(f"{name}.conv2d{i}.weight", C, before, 3, 3), weights.dense(f"{name}.conv2d{i}.bias", C))
            for i, before in ((1, 1), (2, C), (3, C))
        ]
        self.joined = Affine(weights, f"{name}.conv_out", (D, C * num_rows(config.num_bins)), has_bias=False)
        self.layers = [WhisperLayer(config, weights, f"{name}.layers.{i}", True) for i in range(config.depth)]
        self.norm = LayerNorm(weights, f"{name}.ln_post", D, 1e-5)
        self.map = Feedforward(weights, self.maps, (D, D, config.output_size), config.activation)

    def __call__(self, audio: Pixels) -> Tensor:
        """As many embeddings as the convolutions leave of each chunk."""
        samples_S, chunk = samples_of(audio.pixels), self.config.chunk
        num_frames = len(samples_S) // HOP
        mel_TM = log_mel(samples_S, num_frames, self.config.num_bins)
        if self.fills_chunks or num_frames > chunk:
            mel_TM = functional.pad(mel_TM, (0, 0, 0, -num_frames % chunk))
        chunks_BTM = mel_TM.view(-1, min(chunk, len(mel_TM)), self.config.num_bins)
        rows_BND = torch.cat([self._convolved(some_BTM) for some_BTM in torch.split(chunks_BTM, AT_ONCE)])
        count = num_frames // chunk * num_rows(chunk) + num_rows(num_frames % chunk)
        x_ND, together = rows_BND.flatten(0, 1)[:count], self.config.chunks_together * rows_BND.shape[1]
        ends = (*range(together, count, together), count)
        for layer in self.layers:
            x_ND = layer(x_ND, ends)
        return self.map(self.norm(x_ND))

    def _convolved(self, mel_BTM: Tensor) -> Tensor:
        x_BCMT = mel_BTM.transpose(1, 2)[:, None].to(self.joined.weight.dtype)
        for weight, bias in self.convolutions:
            x_BCMT = functional.gelu(functional.conv2d(x_BCMT, weight, bias, 2, padding=1))
        x_BND = self.joined(x_BCMT.permute(0, 3, 1, 2).flatten(2))
        return x_BND + sinusoids(x_BND.shape[1], x_BND.shape[2], x_BND.device).to(x_BND.dtype)


class Qwen3ASRTower(Qwen3AudioTower):
    """The tower of Qwen3-ASR, whose first checkpoints name its parts as Qwen3-Omni's do."""

    maps = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
    own_names: ClassVar = {
        **Qwen3AudioTower.own_names,
        "audio_tower.proj1.": "multi_modal_projector.linear_1.",
        "audio_tower.proj2.": "multi_modal_projector.linear_2.",
    }
    fills_chunks = True
    defaults: ClassVar = {"width": 1024, "num_heads": 16, "depth": 24, "ffn_size": 4096}


def num_rows(count: int) -> int:
    """Rows that three convolutions leave of so many frames or bins."""
    for _ in range(3):
        count = (count + 1) // 2
    return count
