"""Open every checkpoint of a folder with little memory to spare, and print what came of each as JSON.

Run as ``python -m tests.weights.load_many FOLDER [open | load]`` in a process of its own, which it confines.
``open`` only reads a GGUF header; ``load`` opens a checkpoint and widens all its weights.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path

import numpy as np

from octavo.errors import CheckpointError
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from octavo.weights.gguf.gguf_reader import GGUFFile

SPARE_BYTES = 200 << 20


def confine(spare_bytes: int) -> None:
    """From now on, memory beyond what the process has already, plus this, is refused."""
    status = Path("/proc/self/status").read_text()
    limit = int(re.findall(r"VmSize:\s+(\d+)", status)[0]) * 1024 + spare_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def open_header(path: Path) -> None:
    GGUFFile.open(path)


def load_all(path: Path) -> None:
    from octavo.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    for name, shape in json.loads(Path("shapes.json").read_text()).items():
        if isinstance(weight := checkpoint.load(name, tuple(shape)), BlockTensor):
            dequantize(weight)


def main() -> None:
    folder = Path(sys.argv[1])
    load = load_all if sys.argv[2] == "load" else open_header
    if sys.argv[2] == "load":
        import octavo.weights.checkpoint  # noqa: F401  its libraries must be here before memory gets scarce
    largest = max((path.stat().st_size for path in folder.iterdir() if path.is_file()), default=0)
    confine(SPARE_BYTES + largest)
    np.seterr(all="ignore")
    for path in sorted(folder.iterdir()):
        start = time.process_time()
        try:
            load(path)
            outcome = "loaded"
        except CheckpointError as error:
            outcome = f"refused: {error}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps({"name": path.name, "outcome": outcome, "seconds": time.process_time() - start}))


if __name__ == "__main__":
    main()
