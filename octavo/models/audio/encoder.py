"""What audio towers share: log-mel spectrograms, as Whisper (arXiv 2212.04356) has them, and its layers.

Shapes: S samples, T frames, M mel bins, N rows, D width of the tower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import VisionConfig
from octavo.models.vision.tower_parts import ACTIVATIONS, Activation, Affine, Feedforward, LayerNorm, attend, part

RATE, HOP, WINDOW = 16_000, 160, 400
"""Samples of a second, from a frame to the next, and of a frame."""
LOWEST = 1e-10
"""Power below which all is silence."""
RANGE = 8.0
"""Powers of ten below the loudest bin that are kept."""
LINEAR_MELS, LINEAR_HERTZ, LOG_STEP = 15.0, 1000.0, 27.0 / math.log(6.4)
"""Slaney's scale: linear up to 1,000 Hz, which are 15 mels, then 27 mels for a factor of 6.4."""


@dataclass(frozen=True, kw_only=True)
class AudioConfig(VisionConfig):
    """What audio towers have in common."""

    num_bins: int
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    activation: Activation


def read_audio(keys: ConfigKeys, **others: int) -> dict[str, object]:
    """The settings that all towers have, for ``AudioConfig``; ``others``: defaults that are not
    Whisper's. Raises ``CheckpointError``."""
    inner, text = part(keys, "audio_config"), part(keys, "text_config")

    def size(names: tuple[str, str], default: int) -> int:
        name = next((name for name in names if inner.has(name)), names[0])
        return inner.size(name, default)

    width = size(("d_model", "hidden_size"), others.get("width", 1280))
    num_heads = size(("encoder_attention_heads", "num_attention_heads"), others.get("num_heads", 20))
    if width % num_heads or width % 2:
        raise wrong("audio_config.d_model", width, f"an even multiple of {num_heads}, the number of heads")
    return {
        "hidden_size": text.size("hidden_size", 4096),
        "num_bins": inner.size("num_mel_bins", 128),
        "depth": size(("encoder_layers", "num_hidden_layers"), others.get("depth", 32)),
        "width": width,
        "ffn_size": size(("encoder_ffn_dim", "intermediate_size"), others.get("ffn_size", 5120)),
        "num_heads": num_heads,
        "activation": inner.choice("activation_function", ACTIVATIONS, "gelu"),
    }


def samples_of(pixels: Tensor) -> Tensor:
    """The samples, from -1 to 1, of audio as ``Pixels`` has it: float32 [S]."""
    low, middle, high = pixels.reshape(-1, 3).int().unbind(-1)
    return ((low | middle << 8 | high << 16) ^ 1 << 23).float() / (1 << 23) - 1


def log_mel(samples_S: Tensor, num_frames: int, num_bins: int, silence_to: int = 0) -> Tensor:
    """The first frames of the log-mel spectrogram, float32 [T, M]; each frame is around a place of the samples.

    The samples are mirrored at their beginning, and at their end unless silence follows up to ``silence_to``.
    """
    half, end = WINDOW // 2, (num_frames - 1) * HOP + WINDOW - len(samples_S) - WINDOW // 2
    mirrored = samples_S[-half - 1 : -1].flip(0) if len(samples_S) >= silence_to else samples_S[:0]
    padded = functional.pad(torch.cat([samples_S[1 : half + 1].flip(0), samples_S, mirrored]), (0, max(0, end)))
    spectrum = padded.unfold(0, WINDOW, HOP)[:num_frames] @ _waves(samples_S.device)
    power = spectrum.square().view(num_frames, 2, -1).sum(1)
    logs = (power @ _filters(num_bins, samples_S.device)).clamp(min=LOWEST).log10()
    return (torch.maximum(logs, logs.max() - RANGE) + 4) / 4


@cache
def _waves(device: torch.device) -> Tensor:
    """Cosines and sines of all frequencies under a Hann window: [WINDOW, 2 * (WINDOW / 2 + 1)]."""
    turns = torch.arange(WINDOW, dtype=torch.float64)[:, None] * torch.arange(WINDOW // 2 + 1) / WINDOW
    window = torch.hann_window(WINDOW, dtype=torch.float64)[:, None]
    angles = 2 * math.pi * turns
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * window).float().to(device)


@cache
def _filters(num_bins: int, device: torch.device) -> Tensor:
    """Triangles over Slaney's scale, of equal area: [WINDOW / 2 + 1, M]."""
    nyquist = RATE / 2
    top = LINEAR_MELS + LOG_STEP * math.log(nyquist / LINEAR_HERTZ)
    mels = torch.linspace(0, top, num_bins + 2, dtype=torch.float64)
    above = LINEAR_HERTZ * torch.exp((mels - LINEAR_MELS) / LOG_STEP)
    edges = torch.where(mels < LINEAR_MELS, mels * LINEAR_HERTZ / LINEAR_MELS, above)
    hertz = torch.linspace(0, nyquist, WINDOW // 2 + 1, dtype=torch.float64)[:, None]
    widths = edges.diff()
    rising, falling = (hertz - edges[:-2]) / widths[:-1], (edges[2:] - hertz) / widths[1:]
    triangles = torch.minimum(rising, falling).clamp(min=0) * 2 / (edges[2:] - edges[:-2])
    return triangles.float().to(device)


@cache
def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of positions, float32 [count, width]."""
    steps = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2).float())
    angles = torch.arange(count)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(device)


class WhisperLayer:
    """Attention and feed-forward layer of Whisper's encoder."""

    def __init__(self, config: AudioConfig, weights: WeightLoader, prefix: str, has_key_bias: bool) -> None:
        D = config.width
        self.num_heads = config.num_heads
        names = "self_attn_layer_norm", "final_layer_norm"
        self.norms = [LayerNorm(weights, f"{prefix}.{name}", D, 1e-5) for name in names]
        self.qkv = [
            Affine(weights, f"{prefix}.self_attn.{name}_proj", (D, D), name != "k" or has_key_bias) for name in "qkv"
        ]
        self.out = Affine(weights, f"{prefix}.self_attn.out_proj", (D, D))
        self.mlp = Feedforward(weights, (f"{prefix}.fc1", f"{prefix}.fc2"), (D, config.ffn_size, D), config.activation)

    def __call__(self, x_ND: Tensor, ends: Sequence[int] = ()) -> Tensor:
        """``ends``: where parts end whose rows attend to each other; all do without."""
        inner = self.norms[0](x_ND)
        q, k, v = (affine(inner).view(len(x_ND), self.num_heads, -1) for affine in self.qkv)
        x_ND = x_ND + self.out(attend(q, k, v, ends=ends))
        return x_ND + self.mlp(self.norms[1](x_ND))


class Convolution:
    """A convolution of rows [B, T, C] over time, of three rows each."""

    def __init__(self, weights: WeightLoader, name: str, size: tuple[int, int], stride: int) -> None:
        self.weight, self.bias = weights.dense(f"{name}.weight", *size, 3), weights.dense(f"{name}.bias", size[0])
        self.stride = stride

    def __call__(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC.to(self.weight.dtype)
        made = functional.conv1d(x_BTC.transpose(1, 2), self.weight, self.bias, self.stride, padding=1)
        return functional.gelu(made).transpose(1, 2)


class Stem:
    """The two convolutions of Whisper's encoder, of which the second has one row for two frames."""

    def __init__(self, config: AudioConfig, weights: WeightLoader) -> None:
        D = config.width
        self.first = Convolution(weights, "audio_tower.conv1", (D, config.num_bins), 1)
        self.second = Convolution(weights, "audio_tower.conv2", (D, D), 2)

    def __call__(self, mel_BTM: Tensor) -> Tensor:
        return self.second(self.first(mel_BTM))


def in_pairs(x_ND: Tensor) -> Tensor:
    """The means of each two rows; of an odd number the last is left out."""
    return x_ND[: len(x_ND) // 2 * 2].view(-1, 2, x_ND.shape[1]).mean(1)
