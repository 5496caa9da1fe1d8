"""The models on this machine: the default model, and those in the cache of the Hugging Face Hub.

Models in folders of the user are not among them: they are given by their path.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config import DEFAULT_MODEL, ModelSettings
from octavo.errors import ConfigError
from octavo.weights.default_model import SMOLLM2_135M, models_dir
from octavo.weights.gguf.hub_gguf import quantisation_of
from octavo.weights.gguf.split_files import parts_of


@dataclass(frozen=True)
class LocalModel:
    """A model that starts without a download."""

    name: str
    """Value of the setting ``model``."""
    path: Path
    """The folder or file that this name stands for."""
    folder: Path | None
    """Folder in the cache of the hub, with every revision; ``None`` for a single file."""
    num_bytes: int
    changed: float
    """When it was downloaded, in seconds since the epoch."""
    others: tuple[Path, ...] = ()
    """Further files of it: those in the cache of the hub that files link to, and other parts of a GGUF file."""

    def remove(self) -> None:
        """Delete its files. Raises ``ConfigError``."""
        try:
            if self.folder is not None:
                shutil.rmtree(self.folder)
                return
            for file in (self.path, *self.others):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.name}: cannot be removed from {error.filename}: {error.strerror}") from error


def local_models(settings: ModelSettings) -> list[LocalModel]:
    """The models on this machine, by name; ``settings`` give the download folder."""
    found = [*_default_model(settings), *_of_the_hub(settings)]
    return sorted(found, key=lambda model: model.name.lower())


def find_local(name: str, settings: ModelSettings) -> LocalModel:
    """The model of this name. Raises ``ConfigError``, with the closest name, if it is not on this machine."""
    models = {model.name: model for model in local_models(settings)}
    if name in models:
        return models[name]
    close = difflib.get_close_matches(name, models, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`octavo list` shows those that are"
    raise ConfigError(f"model: {name!r} is not on this machine; {hint}")


def hub_folder(settings: ModelSettings) -> Path:
    """Folder of models of the hub, which other programs share unless a download folder is set."""
    if settings.download_dir is not None:
        return Path(settings.download_dir).expanduser()
    from huggingface_hub.constants import HF_HUB_CACHE  # slow to import

    return Path(HF_HUB_CACHE)


def _default_model(settings: ModelSettings) -> list[LocalModel]:
    folder = Path(settings.download_dir).expanduser() if settings.download_dir else models_dir()
    path = folder / SMOLLM2_135M.file_name
    if not path.is_file():
        return []
    facts = path.stat()
    return [LocalModel(DEFAULT_MODEL, path, None, facts.st_size, facts.st_mtime)]


def _of_the_hub(settings: ModelSettings) -> Iterator[LocalModel]:
    """A model for each repository, and for each GGUF file of one, whose name has its quantisation."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(hub_folder(settings)).repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        revision = repo.refs.get(settings.revision or "main") or max(repo.revisions, key=_age)
        files = {file.file_path: file for file in revision.files}
        for path, file in files.items():
            quantisation, parts = quantisation_of(file.file_name), parts_of(path)
            if quantisation is None or path != parts[0] or not files.keys() >= {*parts}:
                continue
            found = [files[part] for part in parts]
            size, changed = sum(part.size_on_disk for part in found), max(part.blob_last_modified for part in found)
            others = (*parts[1:], *(part.blob_path for part in found))
            yield LocalModel(f"{repo.repo_id}:{quantisation}", path, None, size, changed, others)
        if not all(file.file_name.endswith(".gguf") for file in revision.files):
            facts = repo.size_on_disk, repo.last_modified
            yield LocalModel(repo.repo_id, revision.snapshot_path, repo.repo_path, *facts)


def _age(revision: object) -> float:
    return float(getattr(revision, "last_modified", 0.0))
