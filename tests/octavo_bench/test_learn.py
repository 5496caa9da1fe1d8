"""docs/learn: short pages, code that is there, commands that run, figures of the records; and the table of switches."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from octavo.build.build_engine import build_engine
from octavo.cli import main, parse_arguments
from octavo.cli.settings import load_config
from octavo.config import EngineConfig, ServeConfig, to_flat
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_bench.dummy_models import write_model
from octavo_bench.offline import checked_step
from octavo_bench.records.report_tables import render
from tests.tiers import nightly_after, one_in

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs/learn"
OTHERS = ("index", "switches", "design-decisions")
PAGES = [page for page in sorted(LEARN.glob("*.md")) if page.stem not in OTHERS]
MOST_WORDS, MOST_LINES = 300, 200


def part(page: Path, title: str) -> str:
    return page.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def lines_of(file: str, name: str) -> int:
    """Lines of a function, method or class."""
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    node: Any = None
    for step in name.split("."):
        node = next(one for one in body if getattr(one, "name", None) == step)
        body = getattr(node, "body", [])
    return int(node.end_lineno - node.lineno + 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_what_it_shows_is_there(page: Path) -> None:
    assert 100 < len(part(page, "The idea").split()) <= MOST_WORDS
    read = re.findall(r"^- `([^`]+)`: ((?:`[\w.]+`(?:, )?)+)", part(page, "The code"), re.MULTILINE)
    assert read
    total = sum(lines_of(file, name) for file, names in read for name in re.findall(r"`([\w.]+)`", names))
    assert total <= MOST_LINES, total
    assert page.with_suffix(".svg").is_file()
    assert part(page, "Turn it off").strip()
    (record,) = re.findall(r"<!-- report (\S+) -->", page.read_text())
    assert render(ROOT / record) in page.read_text(), f"octavo bench report --fill {page.relative_to(ROOT)}"
    assert f"({page.stem}.md)" in (LEARN / "index.md").read_text()


def test_there_are_ten() -> None:
    assert len(PAGES) == 10


COMMANDS = [(page.stem, line) for page in PAGES for line in re.findall(r"^ {4}octavo (.+)$", page.read_text(), re.M)]
QUICK = {
    "offline": "--sequences 1 --prompt 16 --decode 2 --rounds 1",
    "ablation": "--rounds 1 --num-prompts 2 --shared-len 16 --input-len 16 --output-len 3 --gap 0",
    "speculate": "--rounds 1 --max-tokens 4",
    "quality": "--formats float32 --tokens 60 --window 30 --rounds 0",
    "front": "--streams 1 --seconds 0.2",
    "throughput": "--num-prompts 2 --input-len 40 --output-len 3 --gap 0 --rounds 1",
    "generate": "--max-tokens 2",
    "demo": "",
}
"""Flags that are added to a command, so that it takes a second or two."""
FEW = ("demo", "bench offline", "bench throughput smollm2-135m --vary enforce_eager")
IN_ORDER = sorted(COMMANDS, key=lambda one: not one[1].startswith(FEW))


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), nightly_after(4, IN_ORDER))
def test_commands_run(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    kind = next(word for word in words if word in QUICK)
    model = [str(write_model("tiny", tmp_path / "tiny")), "--load-format", "dummy", "--device", "cpu"]
    named = [word for word in words if word in ("smollm2-135m", "MODEL", "llama-3.2-1b")]
    for name in named:
        words[words.index(name) : words.index(name) + 1] = model
    if kind == "ablation":
        words += model
    quick = QUICK[kind].split()
    if kind == "throughput":
        quick += ["--kv-cache-memory", "0.01"] if "--kv-cache-memory" in words else ["--num-kv-blocks", "64"]
    if "--shared-len" in words:
        quick += ["--shared-len", "16"]
    assert main([*words, *quick]) == 0


def switches() -> list[tuple[str, str, bool]]:
    rows = [line.split(" | ") for line in (LEARN / "switches.md").read_text().splitlines() if line.startswith("| ")][1:]
    return [(row[0].strip("| "), row[1].strip("`"), row[3].startswith("yes")) for row in rows]


PROMPTS = ([*range(5, 45)], [*range(5, 33), 77, 78], [90, 91, 92], [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6])


def tokens(settings: dict[str, Any]) -> list[list[int]]:
    engine, _ = build_engine(EngineConfig.from_flat(settings))
    answers: dict[int, list[int]] = {number: [] for number in range(2 * len(PROMPTS))}
    for turn in (0, 1):  # the second finds the first in the prefix cache
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, ignore_eos=True)
            engine.add(Request(turn * len(PROMPTS) + number, list(prompt), params, 8))
        while engine.has_work:
            for output in checked_step(engine):
                answers[output.request_id] += output.tokens
    engine.close()
    return list(answers.values())


@pytest.mark.slow
def test_each_switch_turns_one_thing_off_and_changes_no_token(tmp_path: Path) -> None:
    sizes = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 40}
    model = {"model": str(write_model("tiny", tmp_path / "tiny")), "load_format": "dummy"}
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    everything = {**model, **sizes, **drafts, "block_size": 8}
    expected = tokens(everything)
    rows = switches()
    assert len(rows) == 8
    for name, flags, is_same in rows:
        given = to_flat(
            load_config(ServeConfig, parse_arguments(["serve", "m", *shlex.split(flags.partition("no `")[0])]), {})
        )
        default = to_flat(load_config(ServeConfig, parse_arguments(["serve", "m"]), {}))
        changed = {key: value for key, value in given.items() if value != default[key]}
        if name.startswith("[drafts]"):
            changed = {"speculative_config": None}
        assert changed, name
        if is_same:
            assert tokens({**everything, **changed}) == expected, name
