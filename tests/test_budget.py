"""Budgets of the code as a body: what is counted here may only fall.

A count above its bound fails, and so does one clearly below it: lower the bound then, in the same change.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer
from tests.test_architecture import MAY_IMPORT, ROOT, imports_of_files, source_files

SMALL_MODULE_LINES = 120
"""A module of so many lines may have a single importer."""
MAX_LOOSE_FILES = 15

REGISTRIES = {
    *("octavo.engine.policies", "octavo.models.registry", "octavo.models.vision.towers", "octavo.quant.methods"),
    *("octavo.models.encoders", "octavo_bench.cli.bench", "octavo_bench.reference.__main__"),
}
"""Modules that import the rows of a table."""
CATALOGUES = {"octavo/cli", "octavo/models", "octavo/models/vision", "octavo/text/tool_calls"}
"""Folders of equals: a file for each command, family of models, kind of tower and format of calls."""
OPS = ("octavo/ops", "octavo_kernels/")
"""Here a name stands for one operation: its contract, and what each kind of device does."""


class Bound(NamedTuple):
    """The largest count allowed, and how far below it a count may be: changes that are made at the same time can then
    come together in any order."""

    most: int
    slack: int


BOUNDS = {
    "lines of octavo": Bound(75_500, 900),
    "lines of octavo_kernels": Bound(24_500, 600),
    "lines of octavo_server": Bound(23_500, 500),
    "lines of octavo_fleet": Bound(10_000, 400),
    "lines of octavo_bench": Bound(12_760, 500),
    "small modules with one importer, in their own folder": Bound(23, 4),
    "files that a chat request enters": Bound(29, 4),
    "files that a request enters in the engine process": Bound(47, 4),
    "folders with many loose files": Bound(0, 0),
    "names of several modules": Bound(37, 4),
    "class names of several modules": Bound(13, 3),
}


def single_imports() -> Iterator[str]:
    """Small modules that only one other imports, of their own folder and no registry."""
    paths, imports = imports_of_files()
    importers = defaultdict(set)
    for module, names in imports.items():
        for name in names:
            importers[name].add(module)
    registry = importlib.import_module("octavo.models.registry")  # with torch, which no other quick test needs
    for family in registry.FAMILIES.split():
        importers[f"octavo.models.{family}"].add("octavo.models.registry")
    for module, path in paths.items():
        if (
            path.name == "__init__.py"
            or source_files()[path].lines >= SMALL_MODULE_LINES
            or len(importers[module]) != 1
        ):
            continue
        (importer,) = importers[module]
        if paths[importer].parent == path.parent and importer not in REGISTRIES:
            yield f"{module} (by {importer})"


def crowded_folders() -> Iterator[str]:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in source_files() if path.name != "__init__.py")
    yield from (f"{folder}: {n}" for folder, n in counts.items() if n > MAX_LOOSE_FILES and folder not in CATALOGUES)


def repeated_names() -> Iterator[str]:
    places = defaultdict(set)
    for path in source_files():
        folder = str(path.parent.relative_to(ROOT))
        places[path.stem].add(OPS[0] if folder.startswith(OPS) else folder)
    yield from (
        f"{name}: {', '.join(sorted(where))}" for name, where in places.items() if len(where) > 1 and name[0] != "_"
    )


def repeated_classes() -> Iterator[str]:
    """Public classes of one name in several modules.

    Those that are left stand for one thing: what the server tells the engine process is what that tells its executor,
    a norm is a norm in a vision tower too, and ``octavo.llm`` and ``llm_engine`` have the names of the APIs they offer.
    """
    places = defaultdict(list)
    for path in source_files():
        for found in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            places[found].append(str(path.relative_to(ROOT)))
    yield from (f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def entered_files() -> set[str]:
    """Files of the package with a function that a streamed chat request calls, in a server that had one before."""
    entered: set[str] = set()
    is_recording = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        if is_recording and event == "call":
            entered.add(frame.f_code.co_filename)

    def chat() -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        assert served.client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")

    threading.setprofile(note)  # in every thread that starts from now on
    try:
        served = Served(InProcessEngine(), byte_tokenizer(), {})
        chat()
        is_recording = True
        chat()
        is_recording = False
        served.stop()
    finally:
        threading.setprofile(None)
    return {name for name in entered if _is_ours(name)}


def engine_files() -> set[str]:
    """Files with a function that a request calls in the engine process, which had some before, on a CPU."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    def compute(number: int) -> None:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        engine.add(Request(number, [5, 6, 7, 8], params, 8))
        tokens = [token for _ in iter(lambda: engine.has_work, False) for out in engine.step() for token in out.tokens]
        assert len(tokens) == 8

    build_engine = importlib.import_module("octavo.build.build_engine").build_engine  # with torch
    write_tiny_model = importlib.import_module("octavo_bench.chaos.tiny_model").write_tiny_model
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "tiny"))
        engine, _ = build_engine(EngineConfig.from_flat({"model": model, "load_format": "dummy", "device": "cpu"}))
    compute(1)
    compute(2)  # by recorded steps
    sys.setprofile(note)
    try:
        compute(3)
    finally:
        sys.setprofile(None)
        engine.close()
    ends = {ROOT / "octavo_server" / "engines" / name for name in ("engine_process.py", "wire.py")}
    return {name for name in entered | set(map(str, ends)) if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return any(Path(name).is_relative_to(ROOT / package) for package in MAY_IMPORT)


def counted(what: str) -> tuple[int, list[str]]:
    """How many there are, and which, where a list helps."""
    if what.startswith("lines of "):
        folder = ROOT / what.removeprefix("lines of ")
        return sum(facts.lines for path, facts in source_files().items() if path.is_relative_to(folder)), []
    found = {
        "small modules with one importer, in their own folder": single_imports,
        "files that a chat request enters": entered_files,
        "files that a request enters in the engine process": engine_files,
        "folders with many loose files": crowded_folders,
        "names of several modules": repeated_names,
        "class names of several modules": repeated_classes,
    }[what]()
    listed = sorted(found)
    return len(listed), listed


@pytest.mark.parametrize("what", BOUNDS)
def test_it_only_falls(what: str) -> None:
    (count, listed), (most, slack) = counted(what), BOUNDS[what]
    assert count <= most, "\n".join([f"{what}: {count}, and at most {most} are allowed", *listed])
    assert count >= most - slack, f"{what}: only {count} are left; lower the bound of {most} in {Path(__file__).name}"
