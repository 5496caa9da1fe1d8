"""What the driver says of the GPUs while something is measured: a figure taken at low clocks is another figure."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time

QUERY = "clocks.sm,clocks.mem,power.draw,memory.used,temperature.gpu"


def gpus() -> list[str]:
    """Name, driver version and memory of each GPU; empty where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


class GpuWatch:
    """Clocks, power, memory and temperature of the first GPU, once a second until closed; nothing without one."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        if gpus():
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "1000"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._samples.append((time.monotonic(), [float(value) for value in line.split(",")]))

    def since(self, start: float) -> dict[str, float]:
        """Medians and extremes from ``start`` (``time.monotonic()``) until now; empty without samples."""
        rows = [values for taken, values in self._samples if taken >= start]
        if not rows:
            return {}
        sm, memory_clock, power, memory, temperature = zip(*rows, strict=True)
        return {
            "samples": len(rows),
            "sm_mhz_median": statistics.median(sm),
            "sm_mhz_min": min(sm),
            "memory_mhz_median": statistics.median(memory_clock),
            "power_w_median": statistics.median(power),
            "power_w_max": max(power),
            "memory_mib_max": max(memory),
            "temperature_c_max": max(temperature),
        }

    def close(self) -> None:
        """Stop asking."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
