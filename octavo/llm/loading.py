"""Build the engine of this process, from a model and settings by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.config import settings as known_settings
from octavo.engine.engine import Engine
from octavo.names_of_others import of_llm
from octavo.plugins import ENGINE_BACKENDS, load
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.types import EngineInfo
from octavo.weights.hub import resolve_model

logger = logging.getLogger(__name__)


def settle(model: str | Path, settings: Mapping[str, Any]) -> tuple[EngineConfig, Tokenizer | None]:
    """The configuration, with the model's folder, and the tokenizer. Raises ``ConfigError`` or ``CheckpointError``."""
    kept, notes = of_llm(settings, {item.name for item in known_settings(EngineConfig)})
    for note in notes:
        logger.warning("%s", note)
    config = EngineConfig.from_flat({"model": model, **kept})
    if config.model.backend == "toy":
        return config, load(ENGINE_BACKENDS, "toy").word_tokenizer()
    path = resolve_model(config.model)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(path)))
    return config, load_tokenizer(Path(config.model.tokenizer or path))


def build(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """Build the engine, which loads the model. Raises ``ConfigError`` or ``CheckpointError``."""
    if config.model.backend == "toy":
        engine, info = load(ENGINE_BACKENDS, "toy").build(config)
        return engine, info
    return build_engine(config)
