"""A GGUF file of a repository on the Hugging Face Hub, chosen by its quantisation: ``owner/name:Q4_K_M``.

The names are those of llama.cpp (``-hf owner/name:Q4_K_M``) and of Ollama (``hf.co/owner/name:Q4_K_M``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from octavo.config import ModelSettings
from octavo.errors import CANCELLATIONS, ConfigError
from octavo.weights.gguf.projector import is_projector, order_of
from octavo.weights.gguf.split_files import part_names, without_number

_ID = re.compile(
    r"(?:https://)?(?:hf\.co/|huggingface\.co/|hf:)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}):([\w.-]{1,64})",
    re.ASCII,
)
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))$", re.ASCII | re.IGNORECASE
)
LOOK_UP_SECONDS = 30.0
"""Time limit of asking the hub for the files of a repository."""


class HubGGUF(NamedTuple):
    """A repository, and the quantisation of one of its files."""

    repo: str
    quantisation: str


def parse_hub_gguf(name: str) -> HubGGUF | None:
    """The parts of ``owner/name:Q4_K_M``, with or without ``hf.co/`` or ``hf:`` before it; ``None`` for other names."""
    found = _ID.fullmatch(name)
    return HubGGUF(*found.groups()) if found else None


def quantisation_of(file: str) -> str | None:
    """The quantisation that the name of a GGUF file ends with, such as Q4_K_M; ``None`` if there is none."""
    path = PurePosixPath(file)
    if path.suffix.lower() != ".gguf" or path.name.startswith("mmproj"):
        return None
    found = _QUANTISATION.search(without_number(path.stem))
    return found[1].upper() if found else None


def choose_file(files: Iterable[str], wanted: HubGGUF) -> str:
    """The file with the wanted quantisation, or its first part. Raises ``ConfigError``, with those that there are."""
    known = {file: quantisation for file in files if (quantisation := quantisation_of(file)) is not None}
    matches = [file for file, quantisation in known.items() if quantisation == wanted.quantisation.upper()]
    if not matches:
        there = ", ".join(sorted(set(known.values()))) or "no GGUF files with one in their names"
        raise ConfigError(f"model: {wanted.repo} has no quantisation {wanted.quantisation!r}; it has {there}")
    return part_names(min(matches, key=lambda file: (len(file), file)))[0]


def choose_projector(files: Iterable[str], beside: str) -> str | None:
    """The file of the vision tower next to the one that was chosen; ``None`` if there is none."""
    paths = [PurePosixPath(file) for file in files]
    found = [path for path in paths if path.parent == PurePosixPath(beside).parent and is_projector(path.name)]
    return str(min(found, key=lambda path: order_of(path.name))) if found else None


def fetch_gguf(wanted: HubGGUF, settings: ModelSettings) -> Path:
    """The file or its first part, fetched with the others if they are not on this machine.

    Raises ``ConfigError`` and errors of the hub's library.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if settings.offline:
        return _local_gguf(wanted, settings, ConfigError("offline, nothing is fetched"))
    try:
        repo = HfApi().model_info(wanted.repo, revision=settings.revision, timeout=LOOK_UP_SECONDS)
    except HfHubHTTPError:
        raise
    except CANCELLATIONS:
        raise
    except BaseException as error:  # offline, or an error of the library's HTTP client, which depends on its version
        return _local_gguf(wanted, settings, error)
    files = [file.rfilename for file in repo.siblings or ()]
    file = choose_file(files, wanted)
    fetch = partial(hf_hub_download, wanted.repo, revision=settings.revision, cache_dir=settings.download_dir)
    if not settings.language_model_only and (projector := choose_projector(files, file)) is not None:
        fetch(projector)
    first, *_ = (Path(fetch(part)) for part in part_names(file))
    return first


def _local_gguf(wanted: HubGGUF, settings: ModelSettings, reason: BaseException) -> Path:
    """The file, if it is on this machine; ``reason`` is why the hub could not be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            wanted.repo, revision=settings.revision, cache_dir=settings.download_dir, local_files_only=True
        )
    except LocalEntryNotFoundError:
        raise LocalEntryNotFoundError(str(reason)) from reason
    folder = Path(found)
    return folder / choose_file((str(path.relative_to(folder)) for path in folder.rglob("*.gguf")), wanted)
