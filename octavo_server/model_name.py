"""The API names of the served model, and where it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from octavo.backend_settings import WITHOUT_MODEL
from octavo.config import DEFAULT_MODEL, ServeConfig
from octavo.weights.hub import resolve_model


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


def with_local_model(config: ServeConfig) -> ServeConfig:
    """``config`` with the model fetched: its local path, and the API names of what was asked for.

    Raises ``ConfigError`` if there is no such model or it cannot be fetched.
    """
    if config.model.backend in WITHOUT_MODEL:
        name = config.model.backend if config.model.model == DEFAULT_MODEL else config.model.model
        return dataclasses.replace(config, model=dataclasses.replace(config.model, model=name))
    server = dataclasses.replace(config.server, served_model_name=",".join(served_model_names(config)))
    model = dataclasses.replace(config.model, model=str(resolve_model(config.model)))
    return dataclasses.replace(config, model=model, server=server)
