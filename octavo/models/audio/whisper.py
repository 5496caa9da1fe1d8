"""Whisper's encoder before a decoder: Qwen2-Audio (arXiv 2407.10759), Voxtral (arXiv 2507.13264).

Shapes: T frames, N rows, one for two frames, D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.models.audio.encoder import (
    HOP,
    AudioConfig,
    Stem,
    WhisperLayer,
    in_pairs,
    log_mel,
    read_audio,
    samples_of,
)
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels
from octavo.models.vision.tower_parts import ACTIVATIONS, Activation, Affine, Feedforward, LayerNorm, part

REACH = 3
"""Frames behind the last one that its convolutions and the loudest frame can depend on."""


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(AudioConfig):
    most_rows: int
    """Rows of the longest audio, one for two frames."""
    map_activation: Activation


class WhisperEncoder:
    """The encoder up to its last norm."""

    def __init__(self, config: WhisperConfig, weights: WeightLoader) -> None:
        self.config, D, name = config, config.width, "audio_tower"
        self.stem = Stem(config, weights)
        self.places = weights.dense(f"{name}.embed_positions.weight", config.most_rows, D)
        self.layers = [WhisperLayer(config, weights, f"{name}.layers.{i}", False) for i in range(config.depth)]
        self.norm = LayerNorm(weights, f"{name}.layer_norm", D, 1e-5)

    def __call__(self, mel_BTM: Tensor, num_rows: int) -> Tensor:
        """The first rows of each window of a spectrogram, which attend to each other: [B * N, D]."""
        x_ND = (self.stem(mel_BTM)[:, :num_rows] + self.places[:num_rows]).flatten(0, 1)
        ends = tuple(range(num_rows, len(x_ND) + 1, num_rows)) if len(mel_BTM) > 1 else ()
        for layer in self.layers:
            x_ND = layer(x_ND, ends)
        return x_ND


def read_whisper(keys: ConfigKeys) -> WhisperConfig:
    """Read the configuration. Raises ``CheckpointError``."""
    known: dict[str, Any] = read_audio(keys)
    return WhisperConfig(
        **known,
        most_rows=part(keys, "audio_config").size("max_source_positions", 1500),
        map_activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
    )


class Qwen2AudioTower:
    """The tower of Qwen2-Audio: means of two rows each, normalised, and a map."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> WhisperConfig:
        return read_whisper(keys)

    def __init__(self, config: WhisperConfig, weights: WeightLoader) -> None:
        self.encoder = WhisperEncoder(config, weights)
        self.map = Affine(weights, "multi_modal_projector.linear", (config.hidden_size, config.width))

    def __call__(self, audio: Pixels) -> Tensor:
        """An embedding for four frames."""
        config, samples_S = self.encoder.config, samples_of(audio.pixels)
        most = 2 * config.most_rows
        num_frames = min(-(-len(samples_S) // HOP), most)
        mel_TM = log_mel(samples_S, min(num_frames + REACH, most), config.num_bins, most * HOP)
        rows_ND = self.encoder(mel_TM[None], (num_frames + 1) // 2)
        return self.map(self.encoder.norm(in_pairs(rows_ND)))


class VoxtralTower:
    """The tower of Voxtral: windows of half a minute, the last one with silence behind it, and four rows each through
    two maps."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> WhisperConfig:
        config = read_whisper(keys)
        if config.ffn_size % config.width or config.most_rows % (config.ffn_size // config.width):
            raise wrong("audio_config.intermediate_size", config.ffn_size, f"a multiple of {config.width}, the width")
        return config

    def __init__(self, config: WhisperConfig, weights: WeightLoader) -> None:
        self.encoder, name = WhisperEncoder(config, weights), "multi_modal_projector.linear"
        sizes = config.ffn_size, config.hidden_size, config.hidden_size
        self.map = Feedforward(weights, (f"{name}_1", f"{name}_2"), sizes, config.map_activation, has_bias=False)

    def __call__(self, audio: Pixels) -> Tensor:
        """As many embeddings for each window."""
        config, samples_S = self.encoder.config, samples_of(audio.pixels)
        window = 2 * config.most_rows
        num_windows = -(-len(samples_S) // (window * HOP))
        mel_TM = log_mel(samples_S, num_windows * window, config.num_bins, num_windows * window * HOP)
        rows_ND = self.encoder(mel_TM.view(num_windows, window, -1), config.most_rows)
        return self.map(self.encoder.norm(rows_ND).reshape(-1, config.ffn_size))
