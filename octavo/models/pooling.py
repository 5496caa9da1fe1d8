"""Pooling settings: how token vectors become the embedding of a text.

Checkpoints for sentence-transformers store them in ``modules.json`` and in the configuration of their pooling module
(https://sbert.net/docs/package_reference/sentence_transformer/modules.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from octavo.errors import CheckpointError, ConfigError
from octavo.models.keys import ConfigKeys, wrong
from octavo.weights.folder import read_json, read_list

Kind = Literal["cls", "mean", "last"]

MODES: dict[str, Kind | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
NEWER_MODES: dict[str, Kind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Values of ``pooling_mode``, which newer files have instead of one flag per mode."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """The kind of pooling (first token, last token or mean), and whether the result is normalised to length 1."""

    kind: Kind
    normalizes: bool = True


def read_pooling(path: Path, requested: str, is_encoder: bool) -> Pooling:
    """The pooling of the checkpoint at ``path``; the setting ``requested`` overrides it if not "auto".

    The default is the mean for encoders and the last token for decoders, normalised to length 1. Raises
    ``CheckpointError`` for unsupported modules, and ``ConfigError`` for a kind that the model cannot use.
    """
    found = _from_modules(path) if path.is_dir() else None
    pooling = found or Pooling("mean" if is_encoder else "last")
    if requested != "auto":
        pooling = Pooling(cast(Kind, requested), pooling.normalizes)
    if pooling.kind == "cls" and not is_encoder:
        raise ConfigError("pooling_type: cls is for encoders: a decoder's first token attends to itself alone")
    return pooling


def _from_modules(folder: Path) -> Pooling | None:
    modules = read_list(folder, "modules.json")
    if modules is None:
        return None
    pooling: Kind = "mean"
    normalizes = False
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else str(module)
        if kind not in KNOWN_MODULES:
            raise CheckpointError(f"{folder / 'modules.json'}: {kind} is not one of {', '.join(KNOWN_MODULES)}")
        if kind == "Pooling":
            pooling = _kind(folder, str(module.get("path")))
        normalizes = normalizes or kind == "Normalize"
    return Pooling(pooling, normalizes)


def _kind(folder: Path, name: str) -> Kind:
    if Path(name).name != name or name in (".", ".."):
        raise CheckpointError(f"{folder / 'modules.json'}: path {name[:100]!r} must be the name of a folder")
    values: dict[str, Any] | None = read_json(folder / name, "config.json")
    if values is None:
        raise CheckpointError(f"{folder / name}: there is no config.json")
    keys = ConfigKeys(values)
    if keys.get("pooling_mode") is not None:
        return keys.choice("pooling_mode", NEWER_MODES)
    chosen = [mode for mode in MODES if keys.flag(mode)]
    if not keys.flag("include_prompt", True):
        raise wrong("include_prompt", False, "true")
    kind = MODES[chosen[0]] if len(chosen) == 1 else None
    if kind is None:
        raise wrong("pooling_mode", chosen, "one of " + ", ".join(mode for mode in MODES if MODES[mode]))
    return kind


def longest_text(path: Path) -> int | None:
    """The checkpoint's ``max_seq_length`` in tokens, special tokens included; ``None`` if absent."""
    values = read_json(path, "sentence_bert_config.json") if path.is_dir() else None
    return None if values is None or values.get("max_seq_length") is None else ConfigKeys(values).size("max_seq_length")
