"""Pages for users: those that programs write are fresh, and what the others name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cli import COMMANDS
from octavo.cli.settings import flag_name
from octavo.config import ServeConfig, settings
from octavo.names_of_others import ADVICE, FLAGS_OF_OTHERS
from octavo_bench.reference.__main__ import PAGES

ROOT = Path(__file__).parents[2]
TASKS = [page.relative_to(ROOT / "docs").as_posix() for page in sorted((ROOT / "docs/tasks").glob("*.md"))]
GUIDES = ("quickstart.md", "migrating.md", "tuning.md", "security.md", "troubleshooting.md", *TASKS)
OTHER_COMMANDS = (
    r"octavo (?:bench|simulate|explain|launch|doctor|plan|tune) |(?:make [a-z]+|docker|helm|kubectl|pipx?|uvx) "
)
KNOWN = {flag_name(item.name) for item in settings(ServeConfig)}
KNOWN.add("--config")
KNOWN |= {f"--no-{item.name.replace('_', '-')}" for item in settings(ServeConfig) if item.type is bool}
PAGES_AND_README = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/tasks").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


@pytest.mark.parametrize("name", PAGES)
def test_written_pages_are_fresh(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `python -m octavo_bench.reference`"


def own_cells(page: str) -> str:
    """A page without the first cells of tables, which may name the flags of other servers."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    is_theirs = page == "migrating.md"
    return "\n".join(line.split(" | ", 1)[1] if is_theirs and line.startswith("| ") else line for line in lines)


@pytest.mark.parametrize("page", GUIDES)
def test_settings_that_a_guide_names_exist(page: str) -> None:
    text = re.sub(rf"(?:{OTHER_COMMANDS})(?:[^\n`]*\\\n)*[^\n`]*", "", own_cells(page))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named <= KNOWN | set(FLAGS_OF_OTHERS), named - KNOWN
    assert not named & set(ADVICE)


@pytest.mark.parametrize("page", GUIDES)
def test_commands_that_a_guide_names_exist(page: str) -> None:
    named = set(re.findall(r"(?<!from )octavo ([a-z]+)(?= |`|\n)", own_cells(page)))
    assert named <= {*COMMANDS, "bench"}, named


def test_flags_of_vllm_that_are_called_the_same_are_settings() -> None:
    text = (ROOT / "docs/migrating.md").read_text()
    vllm = text[text.index("## From vLLM") : text.index("## From llama.cpp")]
    same = [line.split("|")[1] for line in vllm.splitlines() if re.match(r"\| .* \| the same", line)]
    flags = [flag for cell in same for flag in re.findall(r"`(--[a-z-]+)", cell)]
    assert len(flags) >= 8
    assert set(flags) <= KNOWN


@pytest.mark.parametrize("page", PAGES_AND_README, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if ":" in target:
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(title) for title in titles}, target


@pytest.mark.parametrize("page", TASKS)
def test_a_task_is_a_short_page_that_the_readme_and_the_site_name(page: str) -> None:
    assert len((ROOT / "docs" / page).read_text().split()) <= 600
    assert f"(docs/{page})" in (ROOT / "README.md").read_text()
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()


def slug(title: str) -> str:
    """The anchor that GitHub gives a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
