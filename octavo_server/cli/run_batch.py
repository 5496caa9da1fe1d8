"""``octavo run-batch INPUT OUTPUT [MODEL]``: answer the requests in a file at full speed, without a server.

The formats are those of the Batch API (https://platform.openai.com/docs/api-reference/batch): a request or a result a
line. Results are appended to ``OUTPUT.partial`` as they arrive, so that the same command goes on after a kill; once
all are there, they are written to OUTPUT in the order of the requests. INPUT and OUTPUT may be URLs that fsspec
knows, such as ``s3://bucket/name``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo.cli.settings import add_settings, load_config
from octavo.cli.terminal import note
from octavo.config import ServeConfig, cache_dir
from octavo.errors import ConfigError, InvalidParameter

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo_server.dialects.batches.runner import BatchLine

NAME = "run-batch"
HELP = "answer the requests in a file, and write the results into another one"

COMMON = ("model", "quantization", "device", "tensor_parallel_size", "max_model_len", "max_num_seqs")
"""Settings in the short help."""
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
SORTED_BYTES = 4096
"""Leading bytes of a prompt by which requests are sorted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two files, and every setting of the engine and of the API."""
    parser.add_argument("input_argument", nargs="?", metavar="INPUT", help="file of requests, its URL, or - for stdin")
    parser.add_argument("output_argument", nargs="?", metavar="OUTPUT", help="file for the results, or its URL")
    parser.add_argument("-i", "--input-file", metavar="INPUT", help="the same as INPUT")
    parser.add_argument("-o", "--output-file", metavar="OUTPUT", help="the same as OUTPUT")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if there is one, and begin anew")
    add_settings(parser, ServeConfig, COMMON)
    parser.usage = f"{parser.prog} INPUT OUTPUT [MODEL] [options]"


def run(args: argparse.Namespace) -> int:
    """Answer the requests; return 0 once each has a result, be it an answer or an error."""
    given = [args.input_argument, args.output_argument, args.model_argument]
    names = [flag or given.pop(0) for flag in (args.input_file, args.output_file)]
    model = next((each for each in given if each), None)
    config = load_config(ServeConfig, argparse.Namespace(**{**vars(args), "model_argument": model}))
    for name, value in zip(("input", "output"), names, strict=True):
        if value is None:
            raise InvalidParameter(name, f"There is no {name}: give INPUT and OUTPUT.")
    source, results = _local_input(names[0]), BatchResults(names[1])
    if args.overwrite:
        results.remove()
    with source as path, path.open("rb") as lines:
        requests = read_requests(lines)
        done = results.read()
        todo = sorted(each for each in requests if each.digest not in done)
        if len(todo) < len(requests):
            note(f"{len(requests) - len(todo)} of {len(requests)} requests have a result of an earlier run")
        if todo:
            with results.appending() as append:
                asyncio.run(_answer(config, lines, todo, append))
        num_failed = results.finish(requests)
    note(f"{len(requests)} results in {results.name}, {num_failed} of them errors")
    return 0


# --- requests ---


class BatchRequest(NamedTuple):
    """Where a request is in the input. Sorted, those with a common beginning follow each other."""

    prompt: bytes
    """Its leading bytes."""
    offset: int
    size: int
    digest: bytes
    """Of its ``custom_id``."""


class _Prompt(msgspec.Struct):
    """Fields of a body that may be a prompt."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def read_requests(lines: IO[bytes]) -> list[BatchRequest]:
    """Check all lines of a file, and return where the requests are. Raises ``ConfigError`` with the line number."""
    from octavo_server.dialects.batches.runner import BadLine, LineReader, digest_of

    reader, found, offset = LineReader(URLS), [], 0
    for text in lines:
        try:
            for line in reader.parsed([text]):
                found.append(BatchRequest(_prompt_of(line), offset, len(text), digest_of(line.custom_id)))
        except BadLine as error:
            raise ConfigError(f"input: {error}") from None
        offset += len(text)
    return found


def _prompt_of(line: BatchLine) -> bytes:
    try:
        fields = msgspec.json.decode(line.body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""  # the endpoint rejects it later
    return b"".join(bytes(field) for field in msgspec.structs.astuple(fields))[:SORTED_BYTES]


@contextlib.contextmanager
def _local_input(name: str) -> Iterator[Path]:
    """The path of a file, or of a copy of what a URL or standard input has."""
    if name != "-" and "://" not in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"input: {name}: there is no such file")
        yield path
        return
    with tempfile.NamedTemporaryFile() as copy:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else _opened(name, "rb") as source:
            shutil.copyfileobj(source, copy)
        copy.flush()
        yield Path(copy.name)


def _opened(name: str, mode: str) -> Any:
    """A file of any kind that fsspec knows. Raises ``ConfigError``."""
    import fsspec

    try:
        return fsspec.open(name, mode).open()
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{name}: {error}") from error


# --- results ---


class _Summary(msgspec.Struct):
    """What is read of a result."""

    custom_id: str
    response: dict[str, Any]


class _Kept(NamedTuple):
    """Where a result is in the partial file."""

    offset: int
    size: int
    is_error: bool


class BatchResults:
    """The output, and the partial file that collects results while there are requests without one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_remote = "://" in name
        if self._is_remote:
            self._partial = cache_dir() / "run-batch" / f"{hashlib.sha256(name.encode()).hexdigest()}.partial"
        else:
            self._path = Path(name).expanduser()
            self._partial = self._path.with_name(f"{self._path.name}.partial")
            if not self._path.parent.is_dir():
                raise ConfigError(f"output: {self._path.parent}: there is no such folder")
        self._kept: dict[bytes, _Kept] = {}

    def remove(self) -> None:
        """Delete what earlier runs left."""
        self._partial.unlink(missing_ok=True)
        if not self._is_remote:
            self._path.unlink(missing_ok=True)

    def read(self) -> dict[bytes, _Kept]:
        """Results of an earlier run by digest, without those that failed inside the server.

        Raises ``ConfigError`` if the output exists. A torn last line is cut off.
        """
        from octavo_server.dialects.batches.runner import digest_of

        if not self._is_remote and self._path.exists():
            raise ConfigError(f"output: {self.name} exists; --overwrite replaces it")
        if not self._partial.exists():
            return self._kept
        self._kept.clear()
        offset = 0
        with self._partial.open("r+b") as file:
            for text in file:
                try:
                    found = msgspec.json.decode(text, type=_Summary)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    found = None
                if not text.endswith(b"\n"):
                    break
                if found is not None and (status := found.response.get("status_code", 500)) < 500:
                    self._kept[digest_of(found.custom_id)] = _Kept(offset, len(text), status != 200)
                offset += len(text)
            file.truncate(offset)
        return self._kept

    @contextlib.contextmanager
    def appending(self) -> Iterator[Callable[[bytes, bytes, int], None]]:
        """A function that keeps a result: its ``custom_id``'s digest, its line and its status."""
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        with self._partial.open("ab") as file:

            def append(digest: bytes, text: bytes, status: int) -> None:
                self._kept[digest] = _Kept(file.tell(), len(text), status != 200)
                file.write(text)
                file.flush()

            yield append

    def finish(self, requests: Sequence[BatchRequest]) -> int:
        """Write the results in the order of the requests; return how many are errors."""
        kept = [self._kept[each.digest] for each in requests]
        beside = None if self._is_remote else self._path.with_name(f"{self._path.name}.new")
        with _opened(self.name, "wb") if beside is None else beside.open("wb") as file:
            if kept:
                with self._partial.open("rb") as results:
                    for each in kept:
                        results.seek(each.offset)
                        file.write(results.read(each.size))
        if beside is not None:
            beside.replace(self._path)
        self._partial.unlink(missing_ok=True)
        return sum(each.is_error for each in kept)


# --- answers ---


@contextlib.asynccontextmanager
async def _running_app(config: ServeConfig) -> AsyncIterator[Starlette]:
    """The application of a server that nobody can connect to, with its engine."""
    from octavo_server.front.serving import EngineFront

    front = EngineFront(config, None)
    starting = asyncio.create_task(front.engine.start())
    try:
        app = await asyncio.to_thread(front.load, None)
        await starting
        async with app.router.lifespan_context(app):
            yield app
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await front.engine.stop(timeout=0)
        front.close()


async def _answer(
    config: ServeConfig, lines: IO[bytes], todo: list[BatchRequest], append: Callable[[bytes, bytes, int], None]
) -> None:
    """Answer requests of the input; twice as many at a time as the engine's batch holds, so that some always wait."""
    async with _running_app(config) as app:
        with _progress(len(todo)) as advance:

            def keep(request: BatchRequest, text: bytes, status: int) -> None:
                append(request.digest, text, status)
                advance()

            await answer_all(app, lines, todo, keep)


async def answer_all(
    app: Starlette, lines: IO[bytes], todo: Sequence[BatchRequest], keep: Callable[[BatchRequest, bytes, int], None]
) -> None:
    """Have ``app`` answer the requests, and ``keep`` each result's line and status."""
    from octavo_server.app import PARTS
    from octavo_server.dialects.batches.runner import BatchLine, LineRunner
    from octavo_server.durable.own_requests import end_with_key
    from octavo_server.tenants.api_keys import Caller

    endpoints = {each.path: each for part in PARTS for each in part.ENDPOINTS if each.method == "POST"}
    at_once = 2 * app.state.services.first.engine.info.max_num_seqs
    runner, left, caller = LineRunner(app, endpoints, at_once), iter(todo), Caller()

    async def work() -> None:
        for request in left:
            lines.seek(request.offset)
            line = msgspec.json.decode(lines.read(request.size).removeprefix(b"\xef\xbb\xbf"), type=BatchLine)
            key = f"run-batch.{request.digest.hex()}"
            outcome = await runner.run(line, caller, key)
            keep(request, msgspec.json.encode(outcome) + b"\n", outcome.response["status_code"])
            end_with_key(app.state.services, caller, key)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(todo))):
            group.create_task(work())


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
