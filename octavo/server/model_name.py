"""The API names of the served model."""

from __future__ import annotations

from pathlib import Path

from octavo.config import ServeConfig


def served_model_names(config: ServeConfig) -> tuple[str, ...]:
    """``served_model_name`` split at commas; by default the Hub id, or the name of the model's folder or file."""
    listed = (name.strip() for name in (config.server.served_model_name or "").split(","))
    if names := tuple(dict.fromkeys(name for name in listed if name)):
        return names
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return (config.model.model,)
    path = path.resolve()
    return (path.stem if path.is_file() else path.name,)
