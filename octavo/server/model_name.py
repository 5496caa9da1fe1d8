"""What a served model is called."""

from __future__ import annotations

from pathlib import Path

from octavo.config import ServeConfig


def served_model_names(config: ServeConfig) -> tuple[str, ...]:
    """The model's names in the API: those of the setting, the id as given, or the name of the folder or file."""
    listed = (name.strip() for name in (config.server.served_model_name or "").split(","))
    if names := tuple(dict.fromkeys(name for name in listed if name)):
        return names
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return (config.model.model,)
    path = path.resolve()
    return (path.stem if path.is_file() else path.name,)
