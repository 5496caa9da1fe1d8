"""Tables of kernel configurations: a file for each GPU that was measured, with a section for each op.

The shipped ones are ``configs/<name of the GPU>.json``; what was measured on this machine is in a file of the same form
(``own_path``)::

    {"linear": {"6144x4096, 16": {"kernel": "skinny", "block_n": 64, ...}, ...}, "grouped_linear": {...}}

An entry's fields are those of its configuration; ``cublas`` has none and leaves the products to cuBLAS.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
import triton

from octavo.config import cache_dir

FOLDER = Path(__file__).parent / "configs"
LIBRARY = "cublas"
MEASURED_SOURCES = (
    "triton/linear/gemv.py",
    "triton/linear/skinny_gemm.py",
    "triton/grouped/grouped_gemv.py",
    "hopper/streamed_gemv.py",
    "hopper/streamed_tiles.py",
    "triton/grouped/grouped_gemm.py",
    "hopper/pipelined_gemm.py",
    "hopper/pipelined_producer.py",
    "hopper/pipelined_tiles.py",
    "hopper/pipelined_epilogue.py",
    "triton/grouped/grouped_numbers.py",
    "triton/grouped/grouped_dense.py",
)
"""The kernels of the tables: after a change in one of these files, all are measured anew."""

RELEASES = ("early", "late", "never")
"""When the next kernel may start."""
LIMITS = {"block_n": (1, 1024), "block_k": (1, 8192), "block_t": (0, 1024), "warps": (1, 32)}
MOST = 1 << 12
"""Of other numbers, such as programs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ConfigTable:
    """An op's section of the tables, by the keys of its products."""

    section: str
    kinds: Mapping[str, type[Any]]
    """Names of kernels, and the types of their configurations."""

    def of(self, device: torch.device) -> dict[str, Any]:
        """The configurations for this device: shipped ones, and over them those measured here; read once."""
        is_unnumbered = device.type == "cuda" and device.index is None
        return _for_device(self, torch.device("cuda", torch.cuda.current_device()) if is_unnumbered else device)

    def use(self, entries: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """From now on use these entries, and keep them for the next start."""
        configs = {key: self.parse(key, fields) for key, fields in entries.items()}
        self.of(device).update(configs)
        if device.type != "cuda" or not configs:
            return
        path = own_path(device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_suffix(".lock")):
                self.write(path, {**self.read_usable(path), **configs})
        except (OSError, ValueError) as error:
            logger.warning("measured kernels are not kept for the next start: %s", error)

    def read(self, path: Path) -> dict[str, Any]:
        """The configurations in this file, none without it. Raises ``ValueError`` for an entry that is wrong."""
        entries = _sections(path).get(self.section, {})
        return {key: self.parse(f"{path.name}: {self.section}, {key}", fields) for key, fields in entries.items()}

    def read_usable(self, path: Path) -> dict[str, Any]:
        """As ``read``, of a file that others may have made: an entry that is wrong is reported and left out."""
        found = {}
        for key, fields in _sections(path).get(self.section, {}).items():
            try:
                found[key] = self.parse(f"{path.name}: {self.section}, {key}", fields)
            except ValueError as error:
                logger.warning("a measured kernel is not used: %s", error)
        return found

    def write(self, path: Path, configs: Mapping[str, Any]) -> None:
        """Replace this section of the file at once, an entry a line; other sections stay."""
        sections = _sections(path)
        sections[self.section] = {key: self.fields_of(config) for key, config in sorted(configs.items())}
        texts = []
        for name, entries in sections.items():
            lines = [f"    {json.dumps(key)}: {json.dumps(fields)}" for key, fields in entries.items()]
            texts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text("{\n" + ",\n".join(texts) + "\n}\n")
        written.replace(path)  # a reader never sees half of a table

    def fields_of(self, config: object) -> dict[str, Any]:
        """An entry: the name of the kernel, and the fields of its configuration."""
        kind = next((name for name, type_ in self.kinds.items() if isinstance(config, type_)), LIBRARY)
        return {"kernel": kind, **({} if config is None else asdict(config))}  # type: ignore[call-overload]

    def parse(self, place: str, fields: Mapping[str, Any]) -> Any:
        """The configuration of an entry. Raises ``ValueError``, which names its place, for one that is wrong."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"{place}: must be an object")
        kind = str(fields.get("kernel"))
        rest = {name: value for name, value in fields.items() if name != "kernel"}
        try:
            config = None if kind == LIBRARY and not rest else self.kinds[kind](**rest)
        except (KeyError, TypeError) as error:
            names = ", ".join([*self.kinds, LIBRARY])
            raise ValueError(f"{place}: {error}; kernels are {names}, with their own fields") from None
        if config is not None:
            _check_values(place, config)
        return config


def _check_values(place: str, config: Any) -> None:
    """Raise ``ValueError`` for a field of a configuration that no kernel can have."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value, allowed = getattr(config, name), kind.__name__
        is_right = type(value) is kind
        if kind is str:
            allowed, is_right = ", ".join(RELEASES), value in RELEASES
        elif kind is int and name in LIMITS:
            least, most = LIMITS[name]
            allowed = f"a power of two from {least} to {most}"
            is_right = is_right and least <= value <= most and value & (value - 1) == 0
        elif kind is int:
            allowed, is_right = f"a number from 0 to {MOST}", is_right and 0 <= value <= MOST
        if not is_right:
            raise ValueError(f"{place}: {name} is {value!r}; it must be {allowed}")


def table_path(gpu: str) -> Path:
    """Where the shipped table of the GPU of this name is kept."""
    return FOLDER / f"{gpu.replace(' ', '_')}.json"


def own_path(device: torch.device) -> Path:
    """The file of what was measured on this machine, by the GPU, its driver, Triton and the kernels' source."""
    sources = (FOLDER.parents[1] / name for name in MEASURED_SOURCES)
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    name = torch.cuda.get_device_name(device).replace(" ", "_")
    return cache_dir() / "tuned" / f"{name}-{_driver_version()}-triton{triton.__version__}-{digest}.json"


def forget_tables() -> None:
    """Read tables again when they are used next."""
    _for_device.cache_clear()


@functools.cache
def _for_device(table: ConfigTable, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    shipped = table.read(table_path(torch.cuda.get_device_name(device)))
    try:
        own = table.read_usable(own_path(device))
    except (ValueError, OSError) as error:
        logger.warning("kernels measured on this machine are not used: %s", error)
        own = {}
    return {**shipped, **own}


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        newest_cuda = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        return f"cuda{newest_cuda}"


def _sections(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(entries, dict) for entries in found.values()):
        raise ValueError(f"{path.name}: must have sections of entries")
    return found
