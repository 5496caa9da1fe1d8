"""From what the user names as the model to a path on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from octavo.config import DEFAULT_MODEL, ModelSettings
from octavo.errors import ConfigError

WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED_FILES = ["*/*.safetensors", "*/*.model", "consolidated*"]
"""Second copies of the weights in other layouts. Folders within may say how a text's vector is made."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def resolve_model(settings: ModelSettings, wanted: Sequence[str] = WANTED_FILES) -> Path:
    """The folder or file of ``settings.model``: an existing path, the default model, or an id on the Hugging Face hub.

    Fetches what is not here yet; of a repository on the hub, the files that are ``wanted``. Raises ``ConfigError``
    when it is none of these or cannot be fetched.
    """
    name = settings.model
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name == DEFAULT_MODEL:
        folder = Path(settings.download_dir).expanduser() if settings.download_dir else None
        # Imported late, with its progress bar: models that are named do without.
        from octavo.weights.default_model import fetch_default_model

        return fetch_default_model(folder)
    looks_like_path = name.startswith((".", "/", "~")) or path.suffix.lower() in (".gguf", ".safetensors")
    if looks_like_path or not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"model: {name!r} does not exist, and is not '{DEFAULT_MODEL}' or an id on the hub like owner/name"
        )
    return _fetch_from_hub(settings, list(wanted))


def _fetch_from_hub(settings: ModelSettings, wanted: list[str]) -> Path:
    # Imported late: it takes a while, and models that are on this machine do without.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            settings.model,
            revision=settings.revision,
            cache_dir=settings.download_dir,
            allow_patterns=wanted,
            ignore_patterns=UNWANTED_FILES,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model: {settings.model!r} does not exist here, and the Hugging Face hub does not give it ({lines[0]}). "
            "Give the path of a folder or of a GGUF file, or check the name, the network and the access rights"
        ) from error
    return Path(folder)
