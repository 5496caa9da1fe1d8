"""Safe access to the files of an untrusted checkpoint folder.

File names must not lead out of the folder, and its JSON must not take more memory or stack than that of a real
checkpoint. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError

MAX_JSON_BYTES = 16 << 20
MAX_JSON_VALUES = 1 << 20
"""Most values in one JSON text; a parsed value takes up to about 25 times its size in the text."""


def find_file(folder: Path, name: str) -> Path | None:
    """The file ``name`` directly inside ``folder``; ``None`` when there is none.

    A link must lead to a file in the same folder, or, in the cache layout of the Hugging Face hub
    (``snapshots/REVISION/NAME`` linked to ``blobs/HASH``), into the blobs. Raises ``CheckpointError``.
    """
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name or "\\" in name:
        raise CheckpointError(f"{folder}: file name {name[:100]!r} is not allowed, it must be a bare name")
    try:
        path, home = (folder / name).resolve(), folder.resolve()
        if not (folder / name).is_symlink() and not path.exists():
            return None
        revision = home if home.parent.name == "snapshots" else home.parent  # for subfolders of modules
        allowed = [home, revision.parents[1] / "blobs"] if revision.parent.name == "snapshots" else [home]
        if path.parent not in allowed:
            raise CheckpointError(f"{folder / name}: is a link to {path}, which is outside {allowed[0]}")
        if not path.is_file():
            raise CheckpointError(f"{folder / name}: missing, or not a regular file")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder / name}: {error}") from error
    return path


UNNAMED = {"deepseek_vl_v2": "DeepseekVLV2ForCausalLM"}
"""Architectures of models whose configurations name none, by ``model_type``."""


def with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that names its architecture, if its ``model_type`` has one of ``UNNAMED``; of Qwen3-Omni that of
    the part that reads and writes text, with what is said of the whole."""
    if isinstance(thinker := config.get("thinker_config"), dict):
        whole = ("architectures", "quantization_config")
        return thinker | {key: config[key] for key in whole if key in config}
    name = UNNAMED.get(str(config.get("model_type")))
    return config if name is None or config.get("architectures") else {**config, "architectures": [name]}


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in the file ``name`` of ``folder``; ``None`` when there is no such file."""
    path = find_file(folder, name)
    if path is None:
        return None
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    return parse_json(text, f"{folder / name}")


def read_list(folder: Path, name: str) -> list[Any] | None:
    """The same for a JSON list."""
    path = find_file(folder, name)
    if path is None:
        return None
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    result = _parse(text, f"{folder / name}")
    if not isinstance(result, list):
        raise CheckpointError(f"{folder / name}: expected a JSON list, found {type(result).__name__}")
    return result


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object, refusing duplicate keys and NaN; raises ``CheckpointError`` starting with ``where``."""
    result = _parse(text, where)
    if not isinstance(result, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(result).__name__}")
    return result


def _parse(text: bytes, where: str) -> Any:
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{where}: JSON is larger than the {MAX_JSON_BYTES} bytes allowed")
    # Every value but the first follows one of these, so counting them bounds the number of values.
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise CheckpointError(f"{where}: JSON has more than the {MAX_JSON_VALUES} values allowed")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {str(error)[:200]}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:100]!r} appears twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")
