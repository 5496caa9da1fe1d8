"""The package's shape, checked: who may import whom, what stays free of torch, how big things may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "octavo"

# A module may import only from lower levels, or from its own folder. `base` modules are single files.
LEVELS: list[set[str]] = [
    {"errors", "child_worker", "collector", "kernel_compiler", "private_files"},
    {"setting", "speculative_config"},
    {"sampling_params", "config", "child_process"},
    {"steps", "types"},
    {"telemetry", "weights", "grammar"},
    {"ops"},
    {"text", "cache", "quant"},
    {"engine", "layers"},
    {"models"},
    {"runtime"},
    {"build_encoder"},
    {"build"},
    {"llm", "server"},
    {"bench"},
    {"sim"},
    {"cli"},
    {"__main__", "__init__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

TORCH_FREE = {
    *("errors", "kernel_compiler", "setting", "speculative_config", "sampling_params", "config", "types", "steps"),
    *("telemetry", "text", "cache", "engine", "grammar"),
}
TORCH_FREE_FILES = {"weights/gguf.py", "weights/blocks.py", "weights/hub.py", "weights/default_model.py"}
FRONT_PROCESS = ["octavo.server.app", "octavo.text.tokenizer", "octavo.engine.engine", "octavo.cli"]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"pickle", "dill", "marshal", "shelve"}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _violations(path: Path) -> Iterator[str]:
    relative = path.relative_to(PACKAGE)
    where, part = str(relative), relative.parts[0].removesuffix(".py")
    source = path.read_text()
    tree = ast.parse(source)
    if part not in LEVEL:
        yield f"{where}: {part} has no level"
        return
    if source.count("\n") > MAX_FILE_LINES:
        yield f"{where}: {source.count(chr(10))} lines, limit {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{where}: {node.name} has {lines} lines, limit {MAX_FUNCTION_LINES}"
    for name in set(_imports(tree)):
        top, _, rest = name.partition(".")
        if top == "torch" and (part in TORCH_FREE or where in TORCH_FREE_FILES):
            yield f"{where}: imports torch"
        if top in FORBIDDEN_NAMES:
            yield f"{where}: imports {top}"
        target = rest.partition(".")[0]
        if top == "octavo" and target in LEVEL and target != part and LEVEL[target] >= LEVEL[part]:
            yield f"{where}: imports {target}, which is not below it"


def test_imports_point_down_and_sizes_hold() -> None:
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in _violations(path)]
    assert not found, "\n".join(found)


def test_front_process_never_imports_torch() -> None:
    code = f"import sys, {', '.join(FRONT_PROCESS)}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_unpickles_or_evaluates() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                bad = (node.func.attr, getattr(node.func.value, "id", ""))
                assert bad not in {("load", "torch"), ("load", "yaml")}, f"{path}:{node.lineno}"
