"""Resolves the ``model`` setting to a local path."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.config import DEFAULT_MODEL, ModelSettings
from octavo.errors import ConfigError, first_line_of
from octavo.weights.gguf.hub_gguf import fetch_gguf, parse_hub_gguf
from octavo.weights.gguf.split_files import gguf_in, parts_of

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "merges.txt"]
"""What is fetched where a worker has the weights."""
FETCHED_FILES = ["*.safetensors", *TOKENIZER_FILES]
PYTORCH_FILES = ["*.bin", *TOKENIZER_FILES]
"""What is fetched instead with load format pt."""
IGNORED_FILES = ["[!0-9]*/*.safetensors", "[!0-9]*/*.bin", "*/*.model", "consolidated*", "training_args.bin"]
"""Duplicates of the weights in other layouts. Other files in subfolders are kept: they may configure pooling, and have
weights of its modules, in folders whose names begin with a number."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def resolve_model(settings: ModelSettings, patterns: Sequence[str] | None = None) -> Path:
    """The folder or file of ``settings.model``: an existing path, the default model, an id on the Hugging Face hub,
    or such an id with the quantisation of a GGUF file. Of a GGUF file in parts it is the first.

    Fetches files that are not local yet; from the hub, those that match ``patterns``, by default those of the load
    format. Raises ``ConfigError`` if the model is none of these or cannot be fetched.
    """
    name = settings.model
    path = Path(name).expanduser()
    if name and path.exists():
        return gguf_in(path) or parts_of(path)[0]
    if name == DEFAULT_MODEL:
        folder = Path(settings.download_dir).expanduser() if settings.download_dir else None
        # Imported late, with its progress bar: explicitly named models do not need it.
        from octavo.weights.default_model import SMOLLM2_135M, fetch_default_model, models_dir

        if is_offline(settings) and not ((folder or models_dir()) / SMOLLM2_135M.file_name).is_file():
            raise ConfigError(f"model: {name!r} is not on this machine, and offline it is not fetched")
        return fetch_default_model(folder)
    if (gguf := parse_hub_gguf(name)) is not None:
        with _hub_errors(name):
            return fetch_gguf(gguf, settings)
    looks_like_path = name.startswith((".", "/", "~")) or path.suffix.lower() in (".gguf", ".safetensors")
    if looks_like_path or not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"model: {name!r} does not exist, and is not '{DEFAULT_MODEL}' or an id on the hub like owner/name "
            "or owner/name:Q4_K_M"
        )
    if patterns is None:
        patterns = PYTORCH_FILES if settings.load_format == "pt" else FETCHED_FILES
        patterns = TOKENIZER_FILES if settings.backend == "grpc" else patterns
    return _fetch_from_hub(settings, list(patterns))


def by_hub_name(settings: ModelSettings) -> ModelSettings:
    """For a folder in another machine's cache of the hub, the settings by which this machine fetches the same files."""
    path = Path(settings.model)
    if path.exists() or path.parent.name != "snapshots":
        return settings
    kind, *owner_and_name = path.parent.parent.name.split("--")
    if kind != "models" or not owner_and_name:
        return settings
    return dataclasses.replace(settings, model="/".join(owner_and_name), revision=path.name)


def is_offline(settings: ModelSettings) -> bool:
    """Whether nothing may be fetched, by the settings or by the variable of the hub's library."""
    return settings.offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _fetch_from_hub(settings: ModelSettings, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # imported late: slow, and local models do not need it

    with _hub_errors(settings.model):
        folder = snapshot_download(
            settings.model,
            revision=settings.revision,
            cache_dir=settings.download_dir,
            allow_patterns=patterns,
            ignore_patterns=IGNORED_FILES,
            local_files_only=is_offline(settings),
        )
    return Path(folder)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Raise the errors of the hub's library as ``ConfigError``."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"model: {name!r} does not exist here, and the Hugging Face hub does not give it ({first_line_of(error)}). "
            "Give the path of a folder or of a GGUF file, or check the name, the network and the access rights"
        ) from error
