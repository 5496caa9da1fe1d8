"""The wheel: what is in it, and what it says of itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.tiers import nightly

ROOT = Path(__file__).parent.parent
PACKAGES = ("octavo", "octavo_kernels", "octavo_server", "octavo_fleet", "octavo_bench")
MAX_BYTES = 3_000_000
VENDOR_PAGE = "octavo_server/console/page/vendor/README.md"

wheel_builder = pytest.importorskip("hatchling.builders.wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    builder = wheel_builder.WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_it_has_the_files_of_the_packages_and_no_others(wheel: zipfile.ZipFile) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    tracked = shutil.which("git") and subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not tracked or tracked.returncode:
        pytest.skip("not a clone of the repository")
    wanted = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted
    assert {"py", "json", "html", "css", "js", "svg", "proto", "binpb"} <= {name.rpartition(".")[2] for name in found}


def test_it_is_small_and_has_its_licence_and_those_of_the_console(wheel: zipfile.ZipFile) -> None:
    assert sum(entry.compress_size for entry in wheel.infolist()) < MAX_BYTES
    files = [ROOT / "LICENSE", *(ROOT / "octavo_server/console/page/vendor").rglob("LICENSE")]
    wanted = {file.relative_to(ROOT).as_posix(): file.read_bytes() for file in files}
    found = {name.partition("/licenses/")[2]: wheel.read(name) for name in wheel.namelist() if "/licenses/" in name}
    assert found == wanted


def test_the_recipe_for_conda_requires_what_the_wheel_does(wheel: zipfile.ZipFile) -> None:
    recipe = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text())
    about = metadata(wheel)
    assert recipe["context"]["version"] == about["Version"]
    assert recipe["about"]["license"] == about["License-Expression"]
    wanted = {f"python {about['Requires-Python']}", "--unix"}
    for line in about.get_all("Requires-Dist", []):
        required = Requirement(line)
        if "extra" not in line:
            bounds = ",".join(sorted(map(str, required.specifier), reverse=True))
            wanted.add(f"{'pytorch' if required.name == 'torch' else required.name} {bounds}")
    assert {each.replace("_", "-") for each in recipe["requirements"]["run"]} == wanted


def test_its_licence_names_all_that_is_in_it(wheel: zipfile.ZipFile) -> None:
    rows = [line for line in wheel.read(VENDOR_PAGE).decode().splitlines() if line.startswith("| ")][1:]
    named = set(
        re.findall(
            r"\b(?:[A-Z]+-[\d.]+[\w-]*|BSD-3-Clause|MIT|Apache-2.0)", " ".join(row.split("|")[3] for row in rows)
        )
    )
    expression = set(metadata(wheel)["License-Expression"].split(" AND "))
    assert expression == named - {"MPL-2.0"}  # DOMPurify's other choice


def test_it_runs_without_extras_and_says_which_there_are(wheel: zipfile.ZipFile) -> None:
    described = metadata(wheel)
    needed = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not any(line.startswith(("triton", "ray", "transformers", "matplotlib", "opentelemetry")) for line in needed)
    pages = (ROOT / "docs/quickstart.md").read_text()
    for_development = {"test", "lint", "docs", "browser", "fuzz"}
    for extra in set(described.get_all("Provides-Extra", [])) - for_development:
        assert f"[{extra}]" in pages, f"docs/quickstart.md does not say what the extra {extra} is for"


@pytest.mark.parametrize("argument", [nightly("--version"), nightly("doctor")])
def test_its_commands_run_without_the_source_tree(wheel: zipfile.ZipFile, tmp_path: Path, argument: str) -> None:
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "home").mkdir()
    code = "import octavo, sys; from octavo.cli import main; print(octavo.__file__); sys.exit(main(sys.argv[1:]))"
    environment = {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", code, argument]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(tmp_path / "installed" / "octavo"))
    assert metadata(wheel)["Version"] in ended.stdout
