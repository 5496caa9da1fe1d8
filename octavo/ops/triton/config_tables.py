"""Tables of kernel configurations: a file for each GPU that was measured, with a section for each op.

Tables are ``configs/<name of the GPU>.json``::

    {"linear": {"6144x4096, 16": {"kernel": "skinny", "block_n": 64, ...}, ...}, "grouped_linear": {...}}

An entry's fields are those of its configuration; ``cublas`` has none and leaves the products to cuBLAS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"
LIBRARY = "cublas"
Kinds = Mapping[str, type[Any]]
"""Names of kernels, and the types of their configurations."""


def table_path(gpu: str) -> Path:
    """Where the table of the GPU of this name is kept."""
    return FOLDER / f"{gpu.replace(' ', '_')}.json"


def read_section(path: Path, section: str, kinds: Kinds) -> dict[str, Any]:
    """A section of the table in this file, empty if there is none. Raises ``ValueError`` for an entry that is wrong."""
    entries = _sections(path).get(section, {})
    return {shape: parse_entry(f"{path.name}: {section}, {shape}", fields, kinds) for shape, fields in entries.items()}


def write_section(path: Path, section: str, configs: Mapping[str, Any], kinds: Kinds) -> None:
    """Replace a section of the table in this file at once, an entry a line; others stay."""
    sections = _sections(path)
    sections[section] = {shape: fields_of(config, kinds) for shape, config in sorted(configs.items())}
    texts = []
    for name, entries in sections.items():
        lines = [f"    {json.dumps(shape)}: {json.dumps(fields)}" for shape, fields in entries.items()]
        texts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text("{\n" + ",\n".join(texts) + "\n}\n")
    written.replace(path)  # a reader never sees half of a table


def _sections(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def fields_of(config: object, kinds: Kinds) -> dict[str, Any]:
    """An entry of a table: the name of the kernel, and the fields of its configuration."""
    kind = next((name for name, type_ in kinds.items() if isinstance(config, type_)), LIBRARY)
    return {"kernel": kind, **({} if config is None else asdict(config))}  # type: ignore[call-overload]


def parse_entry(place: str, fields: Mapping[str, Any], kinds: Kinds) -> Any:
    """The configuration of an entry. Raises ``ValueError``, which names its place, for one that is wrong."""
    kind = str(fields.get("kernel"))
    rest = {name: value for name, value in fields.items() if name != "kernel"}
    try:
        return None if kind == LIBRARY and not rest else kinds[kind](**rest)
    except (KeyError, TypeError) as error:
        names = ", ".join([*kinds, LIBRARY])
        raise ValueError(f"{place}: {error}; kernels are {names}, with their own fields") from None
