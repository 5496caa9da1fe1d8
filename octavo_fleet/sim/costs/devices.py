"""Attainable figures of devices, for the roofline."""

from __future__ import annotations

from typing import NamedTuple

from octavo.errors import ConfigError

BANDWIDTH_SHARE = 4.3 / 4.8
"""Fraction of the data sheet's bandwidth that a copy reached on an H200."""
ARITHMETIC_SHARE = 0.55
"""Fraction of the data sheet's arithmetic that full prefill steps reached on an H200."""
LAYER_SECONDS = 9.5e-6
"""Overhead per layer beyond its bytes, from single-token steps on an H200, equal with 16 and with 36 layers."""
LINK_LATENCY = 2.5e-6
"""Seconds of the smallest all-reduce within a host, between two H100s (`octavo bench collectives`)."""


class Device(NamedTuple):
    """Attainable figures of one device."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second."""
    arithmetic: float
    """16-bit operations a second."""
    link: float
    """Bytes a second between devices of a host, one way."""
    is_measured: bool
    """Whether fractions and overhead were measured on it; otherwise those of an H200 are assumed."""

    @property
    def peak(self) -> float:
        """16-bit operations a second by the data sheet."""
        return self.arithmetic / ARITHMETIC_SHARE


def _device(name: str, memory_gib: float, tb_s: float, tflop_s: float, link_gb_s: float) -> Device:
    """A device by its data sheet."""
    return Device(
        name,
        memory_gib * 2**30,
        bandwidth=tb_s * 1e12 * BANDWIDTH_SHARE,
        arithmetic=tflop_s * 1e12 * ARITHMETIC_SHARE,
        link=link_gb_s * 1e9,
        is_measured=name == "h200",
    )


DEVICES = {
    device.name: device
    for device in (
        _device("h200", 139.8, 4.8, 989, 450),
        _device("h100", 79.2, 3.35, 989, 450),
        _device("a100", 79.2, 2.039, 312, 300),
        _device("b200", 178.3, 8.0, 2250, 900),
        _device("l40s", 44.4, 0.864, 362, 32),
        _device("l4", 22.0, 0.3, 121, 32),
        _device("mi300x", 191.7, 5.3, 1307, 448),
        _device("rtx3090", 23.6, 0.936, 71, 32),
        _device("rtx4090", 23.6, 1.008, 165, 32),
        _device("rtx5090", 31.4, 1.792, 209, 64),
    )
}
"""Dense 16-bit arithmetic and links as the makers' data sheets give them; memory as PyTorch finds it, which an engine
divides."""


def find_device(name: str) -> Device:
    """The device of that name; raise ``ConfigError`` when there is none."""
    if name not in DEVICES:
        raise ConfigError(f"device: {name!r} is not one of {', '.join(DEVICES)}")
    return DEVICES[name]
