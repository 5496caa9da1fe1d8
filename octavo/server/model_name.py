"""What a served model is called."""

from __future__ import annotations

from pathlib import Path

from octavo.config import ServeConfig


def served_model_name(config: ServeConfig) -> str:
    """The model's name in the API: the setting, the id as given, or the name of the folder or file."""
    if config.server.served_model_name:
        return config.server.served_model_name
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return config.model.model
    path = path.resolve()
    return path.stem if path.is_file() else path.name
