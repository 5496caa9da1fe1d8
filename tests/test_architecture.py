"""The shape of the packages, checked: who may import whom, what stays free of torch, how big things may grow."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "octavo"
MAY_IMPORT = {
    "octavo": set[str](),
    "octavo_kernels": {"octavo"},
    "octavo_server": {"octavo"},
    "octavo_fleet": {"octavo", "octavo_server"},
    "octavo_bench": {"octavo", "octavo_kernels", "octavo_server", "octavo_fleet"},
}
"""The packages, and which others each may import. The core imports none: ``octavo.plugins`` finds them by name."""
EXCEPTIONS = {("octavo/ray.py", "octavo_fleet")}
"""Files that import what their package may not: none may come to this one, a name under which users import."""

# A module may import its own folder, and what is lower in its column or in a column below. The two towers stand beside
# each other on the base: neither may import the other.
BASE: list[set[str]] = [
    {"errors", "plugins"},
    {"setting", "speculative_config", "backend_settings", "names_of_others", "sampling_params"},
    {"model_info", "server_settings", "parallel_settings"},
    {"config"},
    {"system"},
    {"types"},
    {"steps"},
    {"telemetry", "weights"},
]
DECIDING: list[set[str]] = [{"grammar"}, {"text", "cache"}, {"engine", "images"}]
EXECUTING: list[set[str]] = [{"ops"}, {"quant"}, {"layers"}, {"models"}, {"runtime"}]
BUILD: list[set[str]] = [{"build"}, {"rank_process"}]
SURFACES: list[set[str]] = [{"client", "llm", "ray"}, {"cli", "train"}, {"__main__", "__init__"}]
COLUMNS = {"base": BASE, "deciding": DECIDING, "executing": EXECUTING, "build": BUILD, "surfaces": SURFACES}
BELOW = {
    "base": set[str](),
    "deciding": {"base"},
    "executing": {"base"},
    "build": {"base", "deciding", "executing"},
    "surfaces": {"base", "deciding", "executing", "build"},
}


class Place(NamedTuple):
    """Where a folder or a single file of the package stands."""

    column: str
    level: int


PLACES = {
    name: Place(column, level)
    for column, levels in COLUMNS.items()
    for level, names in enumerate(levels)
    for name in names
}

TORCH_FREE = {
    *("plugins", "backend_settings", "errors", "setting", "speculative_config", "sampling_params", "server_settings"),
    *("names_of_others", "parallel_settings"),
    *("config", "types", "telemetry", "system"),
    *("steps", "text", "cache", "engine", "grammar", "images", "client"),
}
TORCH_FREE_FILES = {
    "weights/gguf/gguf_reader.py",
    "weights/adapter_files.py",
    "weights/gguf/block_formats.py",
    "weights/hub.py",
    "weights/default_model.py",
}
FRONT_PROCESS = [
    *("octavo_server.app", "octavo_server.engines.async_engine", "octavo_server.engines.engine_process"),
    *("octavo.text.tokenizer", "octavo.engine.engine", "octavo.cli"),
]

REQUESTS = {"Sequence", "Scheduled", "Plan", "Request", "Output"}
"""Names of ``types`` that the executing tower does not know: it is told of sequences by messages (``steps``)."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
TENSORS_ALONE = {CORE / "weights/pytorch.py"}
"""Where ``torch.load`` may be called, with ``weights_only``."""
PRETRAINED = {"from_pretrained", "from_config", "pipeline"}
"""Calls of transformers, and of libraries like it, that may run code of a checkpoint."""
CODE_LOADERS = {"get_kernel", "load_custom_generate", "get_class_from_dynamic_module", "spec_from_file_location"}
KEEPS_FOR_LATER = {CORE / "runtime/executors/stream_executor.py"}
"""Where a thread keeps whatever ended it, for the thread that waits for it."""
FORBIDDEN_NAMES = {"pickle", "dill", "marshal", "shelve"}


def may_import(importer: str, imported: str) -> bool:
    """Whether ``importer``, a folder or single file of the package, may import another."""
    upper, lower = PLACES[importer], PLACES[imported]
    if upper.column == lower.column:
        return lower.level < upper.level
    return lower.column in BELOW[upper.column]


@dataclass
class Facts:
    """What the tests ask of a file, found in one walk through its syntax."""

    lines: int
    imports: set[str] = field(default_factory=set)
    """Modules, and each name that is imported from one as if it was a module."""
    globals: list[str] = field(default_factory=list)
    functions: list[tuple[str, int]] = field(default_factory=list)
    """Names, and numbers of lines."""
    calls: list[ast.Call] = field(default_factory=list)
    tries: list[ast.Try] = field(default_factory=list)


def facts_of(source: str) -> Facts:
    facts = Facts(source.count("\n"))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call():
                facts.calls.append(node)
            case ast.Try():
                facts.tries.append(node)
            case ast.Import():
                facts.imports.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                facts.imports.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                facts.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
            case ast.Global():
                facts.globals.append(", ".join(node.names))
    return facts


@functools.cache
def source_files() -> dict[Path, Facts]:
    """The files of all packages; each is read once."""
    folders = map(ROOT.joinpath, MAY_IMPORT)
    gc.disable()  # a million nodes are made, and none is garbage: searches take longer than all else
    try:
        return {path: facts_of(path.read_text()) for folder in folders for path in sorted(folder.rglob("*.py"))}
    finally:
        gc.enable()


def _is_executing(part: str) -> bool:
    return PLACES[part].column == "executing"


def _too_long(where: str, facts: Facts) -> Iterator[str]:
    if facts.lines > MAX_FILE_LINES:
        yield f"{where}: {facts.lines} lines, limit {MAX_FILE_LINES}"
    for name, lines in facts.functions:
        if lines > MAX_FUNCTION_LINES:
            yield f"{where}: {name} has {lines} lines, limit {MAX_FUNCTION_LINES}"


def violations(where: str, facts: Facts) -> Iterator[str]:
    """What is wrong with a file of the package ``octavo``; ``where`` is its path in it."""
    part = Path(where).parts[0].removesuffix(".py")
    if part not in PLACES:
        yield f"{where}: {part} has no place"
        return
    yield from _too_long(where, facts)
    yield from (f"{where}: global {names}" for names in facts.globals)
    for name in facts.imports:
        top, _, rest = name.partition(".")
        if top == "torch" and (part in TORCH_FREE or where in TORCH_FREE_FILES):
            yield f"{where}: imports torch"
        if top in FORBIDDEN_NAMES:
            yield f"{where}: imports {top}"
        if name.startswith("octavo.types.") and name.split(".")[2] in REQUESTS and _is_executing(part):
            yield f"{where}: knows of {name.split('.')[2]}"
        target = rest.partition(".")[0]
        if top == "octavo" and target in PLACES and target != part and not may_import(part, target):
            yield f"{where}: imports {target}, which is not below it"


def test_imports_point_down_and_sizes_hold() -> None:
    found = [
        line
        for path, facts in source_files().items()
        if path.is_relative_to(CORE)
        for line in violations(str(path.relative_to(CORE)), facts)
    ]
    assert not found, "\n".join(found)


def foreign_imports(where: str, facts: Facts) -> Iterator[tuple[str, str]]:
    """The file ``where`` with each package that it imports although its own may not."""
    own = Path(where).parts[0]
    for top in {name.partition(".")[0] for name in facts.imports} & MAY_IMPORT.keys():
        if top != own and top not in MAY_IMPORT[own]:
            yield where, top


def test_packages_import_only_those_below_them() -> None:
    found = {
        pair for path, facts in source_files().items() for pair in foreign_imports(str(path.relative_to(ROOT)), facts)
    }
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("where", "line", "imported"),
    [
        ("octavo/engine/engine.py", "from octavo_server.app import make_app", "octavo_server"),
        ("octavo_kernels/cpu/attention/attention.py", "    from octavo_fleet import sim", "octavo_fleet"),
        ("octavo_server/app.py", "import octavo_kernels.cpu", "octavo_kernels"),
        ("octavo_fleet/sim/setup.py", "from octavo_bench.records.report import keep", "octavo_bench"),
    ],
)
def test_an_import_of_a_package_above_is_found(where: str, line: str, imported: str) -> None:
    facts = facts_of(f"def inside():\n    pass\n{line}\n")
    assert list(foreign_imports(where, facts)) == [(where, imported)]


def test_sizes_hold_around_the_core() -> None:
    found = [
        line
        for path, facts in source_files().items()
        if not path.is_relative_to(CORE)
        for line in _too_long(str(path.relative_to(ROOT)), facts)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("where", "line", "found"),
    [
        ("runtime/build_offload.py", "from octavo.cache.offload import Offload", "imports cache"),
        ("models/llama.py", "from octavo.engine.scheduler import Scheduler", "imports engine"),
        ("ops/linear/linear.py", "import octavo.text.tokenizer", "imports text"),
        ("quant/scheme.py", "    from octavo import grammar", "imports grammar"),
        ("engine/engine.py", "from octavo.runtime.executors.stream_executor import StreamExecutor", "imports runtime"),
        ("runtime/host_executor.py", "from octavo.types import Sequence", "knows of Sequence"),
        ("models/llama.py", "from octavo.types import Plan, EngineInfo", "knows of Plan"),
        ("cache/kv_cache.py", "from octavo.ops import attention", "imports ops"),
        ("weights/gguf.py", "from octavo.cache import node", "imports cache"),
        ("types.py", "from octavo.telemetry.request_events import EventLog", "imports telemetry"),
        ("layers/linear.py", "from octavo.models.llama import LlamaForCausalLM", "imports models"),
        ("llm/llm.py", "from octavo.cli import main", "imports cli"),
        ("engine/scheduler.py", "    import torch", "imports torch"),
        ("new_room/file.py", "", "new_room has no place"),
        ("ops/dispatch.py", "    global _only", "global _only"),
    ],
)
def test_a_violation_is_found(where: str, line: str, found: str) -> None:
    facts = facts_of(f"def inside():\n    pass\n{line}\n")
    assert any(found in violation for violation in violations(where, facts))


def test_a_file_or_a_function_that_is_too_long_is_found() -> None:
    long = facts_of("def long():\n" + "    pass\n" * MAX_FUNCTION_LINES + "\n" * (MAX_FILE_LINES - MAX_FUNCTION_LINES))
    found = list(violations("text/some_file.py", long))
    assert found == ["text/some_file.py: 601 lines, limit 600", "text/some_file.py: long has 61 lines, limit 60"]


def test_every_place_is_there() -> None:
    assert {path.name.removesuffix(".py") for path in CORE.iterdir() if path.name != "__pycache__"} == set(PLACES)


def test_front_process_never_imports_torch() -> None:
    code = f"import sys, {', '.join(FRONT_PROCESS)}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_unpickles_or_evaluates() -> None:
    for path, facts in source_files().items():
        for node in facts.calls:
            if isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
            if isinstance(node.func, ast.Attribute):
                if path in TENSORS_ALONE and "weights_only=True" in ast.unparse(node):
                    continue
                bad = (node.func.attr, getattr(node.func.value, "id", ""))
                assert bad not in {("load", "torch"), ("load", "yaml")}, f"{path}:{node.lineno}"


def test_no_code_of_a_checkpoint_runs() -> None:
    """Each call that loads by a library says so, and none is used that cannot."""
    for path, facts in source_files().items():
        for call in facts.calls:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            assert name not in CODE_LOADERS, f"{path}:{call.lineno}"
            assert name not in PRETRAINED or "trust_remote_code=False" in ast.unparse(call), f"{path}:{call.lineno}"
        if "jinja2" in {module.partition(".")[0] for module in facts.imports}:
            assert path == CORE / "text/template_worker.py", "templates are rendered in a process with limits"


def unsafe_handlers(tries: list[ast.Try]) -> Iterator[int]:
    """Lines of handlers that let the panic of a library in Rust pass, or that stop a cancellation."""
    for node in tries:
        passes_cancellations = False
        for handler in node.handlers:
            caught = {"BaseException"} if handler.type is None else set(re.findall(r"\w+", ast.unparse(handler.type)))
            raises_again = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
            if "Exception" in caught or ("BaseException" in caught and not (passes_cancellations or raises_again)):
                yield handler.lineno
            passes_cancellations |= "CANCELLATIONS" in caught


def test_what_handles_any_failure_handles_panics_and_no_cancellation() -> None:
    for path, facts in source_files().items():
        if path.relative_to(ROOT).parts[0] != "octavo_bench" and path not in KEEPS_FOR_LATER:
            assert not list(unsafe_handlers(facts.tries)), f"{path}:{list(unsafe_handlers(facts.tries))}"


@pytest.mark.parametrize(
    ("handlers", "is_safe"),
    [
        ("except Exception: pass", False),
        ("except (KeyError, Exception): pass", False),
        ("except BaseException: pass", False),
        ("except: pass", False),
        ("except BaseException:\n    raise", True),
        ("except CANCELLATIONS:\n    raise\nexcept BaseException: pass", True),
        ("except ValueError: pass", True),
    ],
)
def test_an_unsafe_handler_is_found(handlers: str, is_safe: bool) -> None:
    assert bool(list(unsafe_handlers(facts_of(f"try:\n    pass\n{handlers}\n").tries))) != is_safe


@functools.cache
def imports_of_files() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """The files of all packages by the names of their modules, and which of them each imports, for types too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source_files()
    }
    imports = {
        module: {name for name in source_files()[path].imports if name in files and name != module}
        for module, path in files.items()
    }
    return files, imports


def test_no_files_import_each_other() -> None:
    """Neither directly nor by way of others, nor for types alone."""
    imports = {module: set(names) for module, names in imports_of_files()[1].items()}
    for module, names in imports.items():
        names -= {name for name in names if any(other.startswith(f"{name}.") for other in names)}  # its packages
        names -= {package for package in names if module.startswith(f"{package}.")}
    remaining = dict(imports)
    while leaves := [module for module, names in remaining.items() if not names & remaining.keys()]:
        for module in leaves:
            del remaining[module]
    assert not remaining, f"circles among {sorted(remaining)}"


def test_the_readme_says_how_long_the_engine_is() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## The engine") : text.index("## More")]
    files = {path for pattern in re.findall(r"`(octavo/[^`]+)`", section) for path in ROOT.glob(pattern)}
    lines = sum(source_files()[path].lines for path in files)
    said = re.search(r"is some ([\d,]+) lines", text)
    assert said is not None
    assert lines == pytest.approx(int(said[1].replace(",", "")), rel=0.1)
