"""Model FLOPs utilisation (MFU): the arithmetic that a model's tokens need, over what the device could do meanwhile.

Counted are two operations for each weight that a token is multiplied by, and those of attention over the tokens before
it; what an implementation computes more than that does not count. (The term is that of Chowdhery et al., "PaLM", 2022,
appendix B.)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model
from octavo_fleet.sim.devices import DEVICES
from octavo_fleet.sim.roofline import Shape, decode_work, prefill_work, shape_of


def data_sheet_peak(gpu: str) -> float | None:
    """Dense 16-bit TFLOP/s in the data sheet of the GPU that a driver calls ``gpu``; ``None`` if it is not known."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    names = {*words, *map("".join, itertools.pairwise(words))}  # "RTX 4090" is rtx4090
    found = [device.peak for name, device in DEVICES.items() if name in names]
    return found[0] / 1e12 if found else None


def device_peak(device: str) -> float | None:
    """``data_sheet_peak`` of the first CUDA device; ``None`` for any other device."""
    if device != "cuda":
        return None
    import torch

    return data_sheet_peak(torch.cuda.get_device_name())


class Utilisation(NamedTuple):
    """Turns tokens per second into GFLOP/s of a model, and into a share of the device's."""

    shape: Shape | None
    """``None`` for a model whose arithmetic is not known here: there are no figures then."""
    peak: float | None
    """TFLOP/s of the device; ``None``: there is no share."""

    @classmethod
    def of(cls, config: EngineConfig, device: str, peak: float | None) -> Utilisation:
        """For the model of ``config``; ``peak`` is by default that of the device's data sheet."""
        checkpoint = open_checkpoint(resolve_model(config.model), config.model.load_format)
        try:
            shape = shape_of(checkpoint.config)
        except ConfigError:
            shape = None
        return cls(shape, device_peak(device) if peak is None else peak)

    def prefill(self, tok_s: float, prompt: int) -> Mapping[str, float]:
        """Of prompts of ``prompt`` tokens, at ``tok_s`` prompt tokens per second."""
        if self.shape is None:
            return {}
        return self._figures("prefill_", prefill_work(self.shape, prompt).flops * tok_s / prompt)

    def decode(self, tok_s: float, context: float) -> Mapping[str, float]:
        """Of decoding at a mean context of ``context`` tokens, at ``tok_s`` output tokens per second."""
        if self.shape is None:
            return {}
        return self._figures("decode_", decode_work(self.shape, 1, round(context)).flops * tok_s)

    def requests(self, requests_s: float, prompt: int, output: int) -> Mapping[str, float]:
        """Of whole requests; a prompt's step gives the first of the ``output`` tokens."""
        if self.shape is None:
            return {}
        decode = (output - 1) * decode_work(self.shape, 1, prompt + output // 2).flops
        return self._figures("", (prefill_work(self.shape, prompt).flops + decode) * requests_s)

    def _figures(self, name: str, flop_s: float) -> Mapping[str, float]:
        found = {f"{name}gflop_s": flop_s / 1e9}
        return found if self.peak is None else {**found, f"{name}mfu_percent": flop_s / 1e10 / self.peak}
